#!/usr/bin/env python3
"""Writes docs/checks.md from the checks and their recordings."""

from __future__ import annotations

from generated import write
from recorded import FOLDER, Recording, recorded

from provision import checks

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

`clusterctl check` looks for anything that would make a training hang, fail or slow down. It changes nothing. Each check
has a verdict per node:

- OK
- WARN: the training runs, but slower or at a risk
- FAIL: the training would hang, crash or go wrong
- UNKNOWN: a program, the rights or an understandable answer are missing; an unknown answer is never OK
- N/A: the node lacks the hardware that the check is about, such as GPUs or InfiniBand; nothing was checked

Values that should be equal on all nodes are compared with the value that more than half of at least three nodes have,
and the node that differs is named. Without such a value, all nodes are named.

A check without a *level* is part of every `clusterctl check`. Checks of level 1 send traffic between nodes and run
with `--level 1`. *Needs* lists a program that the node must have, `root` if the check learns more as root, and
`BUNDLE` if it compares the nodes with a bundle. The inventory changes thresholds and skips checks:

```yaml
checks:
  off: [{off}]
  {check}:
    {limit}: {value:g}
```

Each check has recorded answers of healthy and faulty nodes, with their sources
([tests/unit/recorded](../tests/unit/recorded)). *Unproven* means that the healthy or a faulty answer was never
recorded on a real machine: it was written from documentation or changed by hand. {proven} of {number} checks are
proven on both sides.
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
    """The section about one check."""
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
    """The sources of a check's thresholds and formats, and of its recordings."""
    text = " ".join(about.about.split()).replace("``", "`")
    known = dict.fromkeys(f"{each.source}" for each in recordings(check) if each.seen)
    return [text] * bool(text) + [f"Recorded: {'; '.join(known)}."] * bool(known)


def unproven(check: str) -> str:
    """The sides of a check that were never recorded on a real machine."""
    if not recordings(check):
        return "nothing is recorded"
    found = recorded(check)
    missing = [
        *(["healthy"] if not any(each.seen for each in found.healthy) else []),
        *(["faulty"] if not any(each.seen for each in found.faulty) else []),
    ]
    return " and ".join(missing)


def recordings(check: str) -> tuple[Recording, ...]:
    """All recordings of a check; a new check may have none."""
    if not (FOLDER / f"{check}.yaml").exists():
        return ()
    return recorded(check).healthy + recorded(check).faulty


def wrapped(text: str, width: int = 120) -> str:
    """The text with long lines of paragraphs wrapped; fenced blocks and headings stay as they are."""
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


if __name__ == "__main__":
    write({"docs/checks.md": wrapped(page())})
