"""Prints how many tests of a JUnit XML file passed, failed and were skipped, and why they were skipped."""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def main(path: Path) -> int:
    if not path.exists():
        print("0 tests: pytest did not start")
        return 1
    suites = list(ET.parse(path).getroot().iter("testsuite"))
    total = sum(int(suite.get("tests", 0)) for suite in suites)
    failed = sum(int(suite.get("failures", 0)) + int(suite.get("errors", 0)) for suite in suites)
    reasons = Counter(skip.get("message", "") for suite in suites for skip in suite.iter("skipped"))
    skipped = sum(reasons.values())
    why = "".join(f"; {count} skipped: {reason}" for reason, count in reasons.most_common())
    print(f"{total - failed - skipped} passed, {failed} failed{why}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
