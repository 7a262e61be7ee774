"""What tasks use of the checks: which to run, their probes as one script, and the lines that measures print."""

from provision.checks._choosing import choose, limits
from provision.checks._clock import Offset, offset
from provision.checks._clock import line as clock_line
from provision.checks._fresh import Side, outcome, steps
from provision.checks._mounts import Share, shares
from provision.checks._pairs import pairs
from provision.checks._probing import compile_probes, parse, probe_of

__all__ = [
    "Offset",
    "Share",
    "Side",
    "choose",
    "clock_line",
    "compile_probes",
    "limits",
    "offset",
    "outcome",
    "pairs",
    "parse",
    "probe_of",
    "shares",
    "steps",
]
