"""The checks of this machine and its packages that ``penstock doctor`` runs.

    found = diagnose(["/data"])
    found.ok, [advice.do for advice in found.advice]

Each module checks one subject, and returns facts and advice. The checks change nothing, except that they create the
user's cache folder if it is missing.
"""

from penstock.tools.doctor.result import Advice, Diagnosis
from penstock.tools.doctor.run import diagnose

__all__ = ["Advice", "Diagnosis", "diagnose"]
