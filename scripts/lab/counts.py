"""Prints how many tests of a JUnit XML file passed, failed and were skipped, and why they were skipped.

``counts.py FIRST [AGAIN]``: AGAIN holds a second run of what failed in FIRST; what passed only there is named.
``counts.py --few FIRST``: exits with 0 when so few tests failed that a second run is worth it.
"""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

FEW = 5  # more than these that fail on a busy machine only would be something else


def cases(path: Path) -> dict[str, str]:
    """By test ``failed``, ``skipped: REASON`` or ``passed``."""
    found = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found[name] = "failed"
        elif skip is not None:
            found[name] = f"skipped: {skip.get('message', '')}"
        else:
            found.setdefault(name, "passed")
    return found


def failed(states: dict[str, str]) -> list[str]:
    return [name for name, state in states.items() if state == "failed"]


def summary(first: dict[str, str], again: dict[str, str]) -> str:
    """One line: numbers, what passed only in the second run, and the reasons of those that were skipped."""
    states = first | {name: state for name, state in again.items() if name in first}
    passed_again = [name for name in failed(first) if states[name] == "passed"]
    kinds = Counter(state.partition(":")[0] for state in states.values())
    reasons = Counter(state.partition(": ")[2] for state in states.values() if state.startswith("skipped"))
    why = "".join(f"; {count} skipped: {reason}" for reason, count in reasons.most_common())
    twice = (
        f"; {len(passed_again)} of these only when run again alone: {', '.join(passed_again)}" if passed_again else ""
    )
    return f"{kinds['passed']} passed, {kinds['failed']} failed{twice}{why}"


def main(argv: list[str]) -> int:
    few = argv[0] == "--few"
    paths = [Path(name) for name in argv[few:]]
    if not paths[0].exists():
        print("0 tests: pytest did not start")
        return 1
    first = cases(paths[0])
    if few:
        return 0 if 0 < len(failed(first)) <= FEW else 1
    print(summary(first, cases(paths[1]) if len(paths) > 1 and paths[1].exists() else {}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
