#!/usr/bin/env python3
"""docs/checks.md, from the checks themselves and their recordings.

scripts/pages/checks.py          writes the page
scripts/pages/checks.py --print  shows it
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "checks.md"

sys.path[:0] = [str(ROOT)]
sys.path += [str(ROOT / "tests" / "unit")]

from recorded import FOLDER, Recording, recorded  # noqa: E402

from provision import checks  # noqa: E402

WHAT = {
    "clock": "Clocks",
    "cpu": "Processors",
    "env": "The packed environment against the node",
    "fs": "File systems",
    "gpu": "GPUs",
    "ib": "InfiniBand and RoCE",
    "lim": "Limits",
    "mem": "Memory",
    "net": "Network",
    "offline": "Working without the internet",
    "os": "Operating system",
    "pci": "PCI",
    "proc": "Processes",
    "rdma": "GPUDirect",
    "run": "The training run",
    "svc": "System services",
}

HEAD = """\
# Preflight checks

<!-- scripts/pages/checks.py writes this page from provision/checks and tests/unit/recorded; a test compares them. -->

`clusterctl check` looks for what would make a training hang, fail or crawl, and changes nothing. Every check is OK,
WARN (it runs, slower or at a risk), FAIL (a training would hang, crash or go wrong), UNKNOWN (a program, rights or an
understandable answer are missing; never OK) or n/a (the node lacks the hardware that the check is about, such as GPUs
or InfiniBand; nothing was checked, and it is counted apart from OK). What differs between
nodes is compared with the value that more than half of at least three nodes have, and the odd node is named; where
there is no such value, all are.

A check without a *level* is passive and part of every `clusterctl check`; those of level 1 are between nodes and come
with `--level 1`. *Needs* names a program that must be on the node, `root` where it knows more with root's rights, and
`BUNDLE` where the nodes are compared with a bundle. The inventory changes thresholds and leaves checks out:

```yaml
checks:
  off: [{off}]
  {check}:
    {limit}: {value:g}
```

Each check has recordings of what healthy and faulty nodes answer ([tests/unit/recorded](../tests/unit/recorded)), with
where they are from. *Unproven* stands where nobody has seen the real thing: the healthy answer, or a faulty one, is
written after a document or changed by hand. {number} checks, of which {proven} are proven on both sides.
"""


def page() -> str:
    """The whole page."""
    ids = checks.ids()
    kinds = sorted({check.partition(".")[0] for check in ids}, key=lambda kind: WHAT.get(kind, kind))
    sample = next(check for check in ids if checks.load(check).limits)
    limit, value = next(iter(checks.load(sample).limits.items()))
    head = HEAD.format(
        off=", ".join([check for check in ids if check in {"gpu.persist", "net.proxy"}] or ids[:1]),
        check=sample,
        limit=limit,
        value=value,
        number=len(ids),
        proven=sum(not unproven(check) for check in ids),
    )
    parts = [head]
    for kind in kinds:
        parts.append(f"\n## {WHAT.get(kind, kind)}\n")
        parts += [section(check) for check in ids if check.partition(".")[0] == kind]
    return "".join(parts)


def section(check: str) -> str:
    """What the page says about one check."""
    about = checks.load(check)
    needs = [
        *([f"`{about.tool}`"] if about.tool else []),
        *(["root"] if about.root else []),
        *(["BUNDLE"] if about.bundle else []),
    ]
    limits = ", ".join(f"`{name}` {value:g}" for name, value in about.limits.items())
    facts = [
        *(["level 1"] if about.level else []),
        *([f"needs {', '.join(needs)}"] if needs else []),
        *([f"thresholds: {limits}"] if limits else []),
        *([f"**unproven**: {unproven(check)}"] if unproven(check) else []),
    ]
    title = about.title[0].upper() + about.title[1:]
    return (
        f"\n### {check}\n\n{title}. {about.why}\n"
        + (f"\n{'; '.join(facts)[0].upper() + '; '.join(facts)[1:]}.\n" if facts else "")
        + "".join(f"\n{text}\n" for text in sources(check, about))
    )


def sources(check: str, about: checks.Check) -> list[str]:
    """Where its thresholds and formats are from, and what was recorded."""
    told = " ".join(about.about.split()).replace("``", "`")
    known = dict.fromkeys(f"{each.source}" for each in recordings(check) if each.seen)
    return [told] * bool(told) + [f"Recorded: {'; '.join(known)}."] * bool(known)


def unproven(check: str) -> str:
    """What of it nobody has seen."""
    if not recordings(check):
        return "nothing is recorded"
    found = recorded(check)
    missing = [
        *(["healthy"] if not any(each.seen for each in found.healthy) else []),
        *(["faulty"] if not any(each.seen for each in found.faulty) else []),
    ]
    return " and ".join(missing)


def recordings(check: str) -> tuple[Recording, ...]:
    """All of a check's recordings; a check that is being written may have none."""
    if not (FOLDER / f"{check}.yaml").exists():
        return ()
    return recorded(check).healthy + recorded(check).faulty


def wrapped(text: str, width: int = 120) -> str:
    """Paragraphs in lines that fit; what is indented, fenced or a heading stays."""
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if fenced or len(line) <= width or line.startswith(("#", "<")):
            lines.append(line)
            continue
        row = ""
        for word in line.split(" "):
            if row and len(row) + 1 + len(word) > width:
                lines.append(row)
                row = word
            else:
                row = f"{row} {word}" if row else word
        lines.append(row)
    return "\n".join(lines) + "\n"


def main() -> None:
    text = wrapped(page())
    if "--print" in sys.argv[1:]:
        print(text, end="")
    else:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
