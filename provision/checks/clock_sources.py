"""clock.sources: Whether chrony's servers answer and agree, and only one node uses its own clock as a source.

``chronyc -c -n sources``: a line for each, of which the second field is its state (``*`` followed, ``+`` combined,
``-`` not combined, ``?`` unreachable, ``x`` false, ``~`` too variable) and the third its address (chronyc(1)).
A chronyd that follows its own clock has the reference 7F7F0101.
"""

from provision.checks.kit import Answer, Answers, Judgements, ok, unknown, warn

TOOL = "chronyc"
TITLE = "chrony's servers answer, and all nodes follow the same clock"
WHY = "Nodes that follow different clocks, or their own, drift apart although each calls itself synchronised."
PROBE = "chronyc -c -n tracking 2>&1; echo sources; chronyc -c -n sources 2>&1"

_OWN = "7F7F0101"
_STATES = {"x": "disagrees with the others", "?": "does not answer", "~": "is too variable"}


def judge(answers: Answers) -> Judgements:
    """WARN where no server is followed; of several nodes that follow their own clock only one may."""
    read = {name: _read(answer) for name, answer in answers.items()}
    own = [name for name, found in read.items() if found and found[0] == _OWN]
    fix = (
        "services: chrony: {} in the inventory makes the first node the clock; or chronyc -n sources, and UDP port 123"
    )
    for name, found in read.items():
        if found is None:
            observed = next(iter(answers[name].lines), answers[name].err) or "no answer"
            yield name, unknown(f"chronyc: {observed[:120]}", fix="systemctl enable --now chrony")
            continue
        reference, sources = found
        followed = [address for state, address in sources if state == "*"]
        bad = [f"{address} {_STATES[state]}" for state, address in sources if state in _STATES]
        if followed:
            yield name, ok(f"follows {followed[0]}" + (f"; {', '.join(bad)}" if bad else ""))
        elif reference == _OWN and own[0] == name:
            yield name, ok("serves its own clock")
        elif reference == _OWN:
            observed = f"follows its own clock, as {own[0]} does" + (f": {', '.join(bad)}" if bad else "")
            yield name, warn(observed, fix=fix)
        else:
            observed = ", ".join(bad) or ("no server is followed yet" if sources else "has no server")
            yield name, warn(observed, fix=fix)


def _read(answer: Answer) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """The reference, and state and address of every source."""
    tracking, mark, listed = answer.out.partition("sources\n")
    fields = tracking.strip().split(",")
    if not mark or len(fields) != 14:
        return None
    rows = [line.split(",") for line in listed.splitlines()]
    return fields[0], tuple((row[1], row[2]) for row in rows if len(row) >= 10)
