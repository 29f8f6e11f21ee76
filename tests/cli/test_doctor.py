"""``penstock doctor`` says what is here, and what it costs that something is not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.images import native
from penstock.images.backends import BACKENDS, installed


def test_json() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["packages"]["numpy"] == np.__version__
    assert {name for name, here in report["image_backends"].items() if here} == set(installed())
    assert set(report["image_backends"]) == set(BACKENDS)
    assert report["extension"] == native.is_available()


def test_a_missing_extension_is_said_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "crops decode the whole image" in text
    assert "libjpeg62-turbo-dev" in text
    monkeypatch.setattr(native, "is_available", lambda: True)
    assert "libjpeg62-turbo-dev" not in CliRunner().invoke(app, ["doctor"]).output
