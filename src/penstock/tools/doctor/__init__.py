"""Checks of this machine and its packages, behind ``penstock doctor``.

    found = diagnose(["/data"])
    found.ok, [advice.do for advice in found.advice]

Each module checks one subject, and returns facts and advice. Nothing is changed, except that a missing cache folder of
the user is created.
"""

from penstock.tools.doctor.result import Advice, Diagnosis
from penstock.tools.doctor.run import diagnose

__all__ = ["Advice", "Diagnosis", "diagnose"]
