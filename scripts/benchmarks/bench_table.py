"""The figures with their targets and aims, and the arithmetic and layout of the table. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

HEADER = ("figure", "ours", "peer", "ratio", "must", "aim", "met")

Unit = Literal["s", "bytes", "count"]
# ratio: ours / peer, small is good; speedup: peer / ours, large is good; ours: the value itself, small is good; most:
# the value itself, large is good; more: ours - peer, small is good.
Judged = Literal["ratio", "speedup", "ours", "most", "more"]
LARGE_IS_GOOD = ("speedup", "most")


@dataclass(frozen=True)
class Figure:
    """A line of the table. ``title`` may name ``{nodes}`` and ``{large}``; without ``must`` it is for information."""

    name: str
    title: str
    unit: Unit = "s"
    judged: Judged = "ratio"
    must: float | None = None
    aim: float | None = None


@dataclass(frozen=True)
class Measured:
    """What came out, in the figure's unit; ``raw`` goes into the JSON file as it is."""

    ours: float
    peer: float | None = None
    note: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Missing:
    """The reason why a figure could not be measured."""

    why: str


Outcome = Measured | Missing

# Targets and aims for packing, sending and unpacking an environment.
TARGETS = (
    Figure("pack", "pack, against `tar \\| zstd -T0 -3` of the same tree", must=1.2, aim=1.05),
    Figure("pack-conda-pack", "pack, against conda-pack default (tar.gz)", judged="speedup", must=5, aim=7),
    Figure("unpack", "unpack + relocate on a node, against plain `zstd -d \\| tar x`", must=1.05, aim=0.9),
    Figure("deploy-many", "deploy to {nodes} nodes over equal links, against one node", must=1.5, aim=1.2),
    Figure("uplink", "bytes over the uplink for {nodes} nodes, against one payload", "bytes", must=1.3, aim=1.05),
    Figure(
        "changed", "redeploy, one small package changed: bytes, against the changed chunks", "bytes", must=1.2, aim=1.05
    ),
    Figure("rebuilt", "redeploy, env rebuilt (all mtimes new): bytes, against the whole", "bytes", must=0.1, aim=0.02),
    Figure("unchanged", "redeploy with nothing changed, {nodes} nodes", judged="ours", must=3, aim=1),
    Figure("broken", "link broken at 90 %: bytes sent again, against one chunk a stream", "bytes", must=1),
    Figure("memory", "peak memory packing, a file of {large} inside", "bytes", "ours", must=500e6, aim=200e6),
)

INFORMATION = (
    Figure("pack-conda-pack-zst", "pack, against conda-pack tar.zst", judged="speedup"),
    Figure("distribute-scp-r", "deploy to {peer_nodes} nodes, against `scp -r` of the tree"),
    Figure("distribute-scp", "deploy to {peer_nodes} nodes, against `scp` of a tar.zst + unpack"),
    Figure("distribute-rsync", "deploy to {peer_nodes} nodes, against `rsync -a` of the tree"),
    Figure("distribute-tar", "deploy to {peer_nodes} nodes, against `tar c \\| ssh NODE tar x`"),
    Figure("distribute-clush", "deploy to {peer_nodes} nodes, against `clush --copy` of a tar.zst + unpack"),
)

FIGURES = {figure.name: figure for figure in (*TARGETS, *INFORMATION)}


def ratio(figure: Figure, measured: Measured) -> float | None:
    """``ours / peer``, or ``peer / ours`` for a speedup; None where there is no peer or nothing to divide by."""
    if measured.peer is None:
        return None
    above, below = (measured.peer, measured.ours) if figure.judged == "speedup" else (measured.ours, measured.peer)
    return above / below if below else None


def judged(figure: Figure, measured: Measured) -> float | None:
    """The value that ``must`` and ``aim`` speak of."""
    if figure.judged in ("ours", "most"):
        return measured.ours
    if figure.judged == "more":
        return None if measured.peer is None else measured.ours - measured.peer
    return ratio(figure, measured)


def met(figure: Figure, outcome: Outcome) -> str:
    """``aim``, ``yes`` or ``no``; ``?`` where it was not measured, and nothing for mere information."""
    if figure.must is None:
        return ""
    value = judged(figure, outcome) if isinstance(outcome, Measured) else None
    if value is None:
        return "?"

    def within(limit: float) -> bool:
        return value >= limit if figure.judged in LARGE_IS_GOOD else value <= limit

    if not within(figure.must):
        return "no"
    return "aim" if figure.aim is not None and within(figure.aim) else "yes"


def row(figure: Figure, outcome: Outcome, words: Mapping[str, object]) -> tuple[str, ...]:
    """The cells of one line; ``words`` fill the title."""
    title = figure.title.format_map(words)
    limits = tuple(_limit(figure, value) for value in (figure.must, figure.aim))
    if isinstance(outcome, Missing):
        return (title, "not measured", "", "", *limits, met(figure, outcome))
    value = ratio(figure, outcome)
    return (
        title,
        quantity(outcome.ours, figure.unit),
        "" if outcome.peer is None else quantity(outcome.peer, figure.unit),
        "" if value is None else f"{value:.3g}" if value < 0.995 else f"{value:.2f}",
        *limits,
        met(figure, outcome),
    )


def _limit(figure: Figure, value: float | None) -> str:
    if value is None:
        return ""
    sign = ">=" if figure.judged in LARGE_IS_GOOD else "<="
    of_ratio = figure.judged in ("ratio", "speedup")
    shown = f"{value:g}" if of_ratio else quantity(value, figure.unit, short=True)
    return f"{sign} {shown}{' more' if figure.judged == 'more' else ''}"


def quantity(value: float, unit: Unit, *, short: bool = False) -> str:
    """A number for people: a count, seconds, or bytes in powers of 1000."""
    if unit == "count":
        return f"{value:g}"
    if unit == "s":
        return f"{value:g} s" if short else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    for name in ("B", "kB", "MB"):
        if abs(value) < 1000:
            return f"{value:.0f} {name}" if short or name == "B" else f"{value:.1f} {name}"
        value /= 1000
    return f"{value:g} GB" if short else f"{value:.2f} GB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with its columns aligned."""
    lines = [HEADER, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    ruler = [*("-" * width for width in widths)]

    def text(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([text(HEADER), text(ruler), *(text(line) for line in rows)])


def notes(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The notes below the table: details of a figure, or the reason why it was not measured."""
    lines = []
    for name, outcome in outcomes.items():
        text = f"not measured: {outcome.why}" if isinstance(outcome, Missing) else outcome.note
        if text:
            lines.append(f"- {name}: {text}")
    return lines


def as_json(
    outcomes: Mapping[str, Outcome], words: Mapping[str, object], figures: Mapping[str, Figure] = FIGURES
) -> list[dict[str, Any]]:
    """Every figure with its raw numbers, in its unit."""
    found = []
    for name, outcome in outcomes.items():
        figure = figures[name]
        data: dict[str, Any] = {
            "name": name, "title": figure.title.format_map(words).replace("\\|", "|"), "unit": figure.unit,
            "judged": figure.judged, "must": figure.must, "aim": figure.aim, "met": met(figure, outcome),
        }  # fmt: skip
        if isinstance(outcome, Missing):
            data["not_measured"] = outcome.why
        else:
            data |= {"ours": outcome.ours, "peer": outcome.peer, "ratio": ratio(figure, outcome)}
            data |= {"note": outcome.note, "raw": dict(outcome.raw)}
        found.append(data)
    return found
