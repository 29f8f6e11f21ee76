"""What this machine has, and what is missing: what ``penstock doctor`` prints.

    found = diagnose(["/data"])
    found.ok, [advice.do for advice in found.advice]

One module a subject, each of which gives facts and advice. Nothing is changed; only the user's cache folder is made if
it is not there.
"""

from penstock.tools.doctor.result import Advice, Diagnosis
from penstock.tools.doctor.run import diagnose

__all__ = ["Advice", "Diagnosis", "diagnose"]
