"""Parse filters on the command line, ``score > 0.7 and lang in ("en", "de")``, into expressions over columns."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow.compute as pc

__all__ = ["parse_expression"]

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda column, values: column.isin(values),
    ast.NotIn: lambda column, values: ~column.isin(values),
}
_JOIN: dict[type[ast.boolop], Callable[[Any, Any], Any]] = {ast.And: operator.and_, ast.Or: operator.or_}


def parse_expression(text: str) -> pc.Expression:
    """Parse an expression over columns. Names are columns, and values are literals.

    Raises:
        ConfigError: anything but comparisons of a column with literals, joined by ``and``, ``or`` and ``not``.

    >>> str(parse_expression("score > 0.7 and not lang == 'en'"))
    '((score > 0.7) and invert((lang == "en")))'
    """
    try:
        return _made(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{text!r} is not a filter: compare columns with values, for example score > 0.7 and lang in ('en', 'de')"
        ) from error


def _made(node: ast.expr) -> Any:
    if isinstance(node, ast.BoolOp):
        return reduce(_JOIN[type(node.op)], map(_made, node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_made(node.operand)
    if isinstance(node, ast.Compare):
        sides = list(map(_side, [node.left, *node.comparators]))
        pairs = zip(sides, node.ops, sides[1:], strict=False)
        return reduce(operator.and_, [_compared(*pair) for pair in pairs])
    return _column(node)


def _compared(left: Any, compare: ast.cmpop, right: Any) -> Any:
    import pyarrow.compute as pc

    if type(compare) not in _COMPARE or not any(isinstance(side, pc.Expression) for side in (left, right)):
        raise ValueError("compare a column with a value")
    if isinstance(compare, ast.In | ast.NotIn) and not isinstance(right, list):
        raise ValueError("use a list of values after in")
    return _COMPARE[type(compare)](left, right)


def _side(node: ast.expr) -> Any:
    if isinstance(node, ast.Name | ast.Attribute):
        return _column(node)
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, tuple | set) else value


def _column(node: ast.expr) -> Any:
    import pyarrow.compute as pc

    if not isinstance(node, ast.Name):
        raise ValueError("a column must be a name")
    return pc.field(node.id)
