"""Curves as SVG, for a browser without scripts; and how every text is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from provision.output_text import clean

WIDTH, HEIGHT = 640, 180
_LEFT, _BOTTOM, _TOP = 64, 22, 8
_COLUMNS = 400  # points of a curve
COLOURS = 8  # classes c0 to c7 of the style

Points = Sequence[tuple[float, float]]


def escaped(value: object) -> str:
    """A text for HTML, without control characters and halves of characters."""
    return html.escape(clean(str(value)).encode("utf-8", "replace").decode())


def picture(title: str, curves: Sequence[tuple[str, Points]], bands: Sequence[tuple[float, float] | None] = ()) -> str:
    """Curves in one picture, each with its name; "" if none has two finite points.

    Args:
        title: what they show.
        curves: the points of each, by its name.
        bands: the expected range of each, None for those without one.
    """
    drawn = [(name, _thinned([point for point in points if all(map(math.isfinite, point))])) for name, points in curves]
    every = [point for _, points in drawn for point in points]
    if len(every) < 2:
        return ""
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    ends = [end for band in bands if band for end in band]
    low, high = min((*(y for _, y in every), *ends)), max((*(y for _, y in every), *ends))
    wide, tall = right - left or 1.0, high - low or 1.0

    def place(point: tuple[float, float]) -> str:
        x = _LEFT + (point[0] - left) / wide * (WIDTH - _LEFT - 8)
        y = _TOP + (high - point[1]) / tall * (HEIGHT - _BOTTOM - _TOP)
        return f"{x:.1f},{y:.1f}"

    behind = "".join(_band(band, number, high, tall) for number, band in enumerate(bands) if band)
    lines = "".join(
        f'<polyline class="c{number % COLOURS}" points="{" ".join(map(place, points))}">'
        f"<title>{escaped(name)}</title></polyline>"
        for number, (name, points) in enumerate(drawn)
    )
    names = "".join(
        f' <span class="k{number % COLOURS}">{escaped(name)}</span>' for number, (name, _) in enumerate(drawn)
    )
    labels = (
        (_LEFT - 6, _TOP + 8, "end", high),
        (_LEFT - 6, HEIGHT - _BOTTOM, "end", low),
        (_LEFT, HEIGHT - 6, "start", left),
        (WIDTH - 8, HEIGHT - 6, "end", right),
    )
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{value:.6g}</text>' for x, y, anchor, value in labels
    )
    return (
        f"<figure><figcaption>{escaped(title)}{names}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escaped(title)}: {low:.6g} to {high:.6g}">{behind}{lines}{texts}</svg></figure>'
    )


def _band(band: tuple[float, float], number: int, high: float, tall: float) -> str:
    """The rectangle of an expected range; ``high`` is the upper end of the picture, and ``tall`` its extent."""
    scale = (HEIGHT - _BOTTOM - _TOP) / tall
    top, height = _TOP + (high - band[1]) * scale, max(1.0, (band[1] - band[0]) * scale)
    return (
        f'<rect class="k{number % COLOURS}" x="{_LEFT}" y="{top:.1f}" width="{WIDTH - _LEFT - 8}" '
        f'height="{height:.1f}"><title>{band[0]:.6g} to {band[1]:.6g} expected</title></rect>'
    )


def _thinned(points: Points) -> Points:
    """At most twice ``_COLUMNS`` points: the lowest and the highest of as many equal parts."""
    if len(points) <= 2 * _COLUMNS:
        return points
    found: list[tuple[float, float]] = []
    for part in range(_COLUMNS):
        some = points[part * len(points) // _COLUMNS : (part + 1) * len(points) // _COLUMNS]
        ends = {min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])}
        found += sorted(ends)
    return found
