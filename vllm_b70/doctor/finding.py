"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is, in this order."""

    ok = "ok"
    note = "note"
    warning = "warning"
    error = "error"

    @property
    def rank(self) -> int:
        """0 for ``ok``, more for what is worse."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        group: The module that looked.
        what: What it looked at.
        severity: ``error`` for what stops a server or its promise, ``warning`` for what may.
        found: What is there.
        remedy: What to do about it; empty where nothing needs doing.
    """

    group: str
    what: str
    severity: Severity
    found: str
    remedy: str = ""
