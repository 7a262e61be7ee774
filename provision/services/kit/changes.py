"""The kinds of change that services are made of, each a ``Step``: a file, a block of lines, a unit, a folder.

They call the functions of ``templates/services/library.sh.j2``, which write how to undo a change before they make it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from provision.model import Step
from provision.render import quote, words


@dataclass(frozen=True)
class Sh:
    """A word of sh that is one already, such as ``"$cc_conf"``: what only the node itself knows."""

    word: str


def file(
    name: str,
    path: str | Sh,
    text: str | Sh,
    *,
    mode: int = 0o644,
    before: str = "",
    check: str = "",
    then: str = "",
    unit: str | Sh = "",
) -> Step:
    """A file that is ours as a whole.

    Args:
        name: the step's, such as ``configuration``.
        path: absolute.
        text: its content.
        mode: its permissions.
        before: sh that finds out on the node what ``Sh`` values name; it changes nothing.
        check: sh that fails when the new file, whose path is in ``$cc_new``, is not good; the daemon's own checker.
        then: sh that follows a change, such as ``cc_restart chrony``; it is made up for when a crash has lost it.
        unit: that reads the file: what it was is noted first, so that undo brings it back after the file.
    """
    where, content = _word(path), _word(text)
    lines = [
        before,
        f"cc_remember {_word(unit)}" if unit else "",
        f"cc_stage {where} {mode:o} {content}",
        check,
        f"cc_commit {where}",
        then,
        f"cc_done {where}",
    ]
    return Step(name, do=_lines(lines), unless=_lines([before, f"cc_is {where} {mode:o} {content}"]))


def block(
    name: str,
    path: str,
    text: str | Sh,
    *,
    mark: str,
    at: Literal["top", "end"] = "end",
    before: str = "",
    then: str = "",
    unit: str = "",
) -> Step:
    """Lines of ours in a file of others, between ``# BEGIN clusterctl MARK`` and ``# END clusterctl MARK``.

    Args:
        name: the step's.
        path: absolute; others' lines stay as they are, in their order.
        text: the lines, the last one with its newline.
        mark: tells our blocks in one file apart.
        at: where the block goes when it is not there yet; one that is there stays in its place.
        before: sh that finds out on the node what ``Sh`` values name; it changes nothing.
        then: sh that follows a change.
        unit: that reads the file.
    """
    where, content, marked = quote(path), _word(text), quote(mark)
    lines = [
        before,
        f"cc_remember {quote(unit)}" if unit else "",
        f"cc_block {where} {marked} {content} {at}",
        then,
        f"cc_block_done {where} {marked}",
    ]
    return Step(name, do=_lines(lines), unless=_lines([before, f"cc_has_block {where} {marked} {content}"]))


def folder(name: str, path: str, *, mode: int = 0o755) -> Step:
    """A folder; undo removes it, and those above it that were made with it, while they are empty."""
    return Step(name, do=f"cc_folder {quote(path)} {mode:o}", unless=f"[ -d {quote(path)} ]")


def running(name: str, unit: str | Sh, *, before: str = "") -> Step:
    """A unit that is enabled and active."""
    word = _word(unit)
    return Step(name, do=_lines([before, f"cc_start {word}"]), unless=_lines([before, f"cc_on {word}"]))


def stopped(name: str, units: tuple[str, ...]) -> Step:
    """Units that are neither enabled nor active; those that a node does not have count as stopped."""
    each = words(units)
    return Step(
        name,
        do=f'for cc_u in {each}; do cc_off "$cc_u" || cc_stop "$cc_u"; done',
        unless=f'for cc_u in {each}; do cc_off "$cc_u" || exit 1; done',
    )


def must(name: str, test: str, otherwise: str) -> Step:
    """A step of ``verify``: ``test`` is sh that asks, ``otherwise`` sh that prints what is wrong."""
    return Step(name, do=f"{otherwise}\nfalse", unless=test)


def _word(value: str | Sh) -> str:
    return value.word if isinstance(value, Sh) else quote(value)


def _lines(lines: list[str]) -> str:
    return "\n".join(line for line in lines if line)
