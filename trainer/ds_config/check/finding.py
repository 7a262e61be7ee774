"""A finding about a configuration, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterable, List

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Finding:
    """One problem of a configuration.

    Attributes:
        level: ``error`` if it prevents the run, else ``warning``.
        what: what is wrong.
        why: what happens because of it.
        fix: the argument or the edit that resolves it.
        line: in the file, from 1; 0 if it concerns no line.
        column: in the line, from 1; 0 if it concerns no column.
        key: the key, with dots; empty if it concerns none.
    """

    level: str
    what: str
    why: str = ""
    fix: str = ""
    line: int = 0
    column: int = 0
    key: str = ""

    def text(self, file: str, *, shows_level: bool = True) -> str:
        """Format the finding, as compilers do: ``FILE:LINE:COLUMN: error: WHAT: WHY; FIX``."""
        where = ":".join([file, *(str(number) for number in (self.line, self.column) if number)])
        why = ": " + self.why if self.why else ""
        fix = "; " + self.fix if self.fix else ""
        level = self.level + ": " if shows_level else ""
        return "%s: %s%s%s%s" % (where, level, self.what, why, fix)

    def data(self, file: str) -> Dict[str, Any]:
        """Return the finding as JSON data."""
        return {
            "file": file, "line": self.line, "column": self.column, "level": self.level, "key": self.key,
            "what": self.what, "why": self.why, "fix": self.fix,
        }  # fmt: skip


def fails(findings: Iterable[Finding]) -> bool:
    """Whether a finding prevents the run."""
    return any(each.level == ERROR for each in findings)


def in_order(findings: Iterable[Finding]) -> List[Finding]:
    """Sort findings by their place in the file, without repetitions. Those without a place come last."""
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda each: (each.line == 0, each.line, each.column, each.level))
