"""The kinds of change that services consist of, each a ``Step``: a file, a block of lines, a unit, a folder.

They call the functions of ``templates/services/library.sh.j2``, which write an undo entry before each change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from provision.model import Step
from provision.render import quote, words


@dataclass(frozen=True)
class Sh:
    """A word of sh that needs no quoting, such as ``"$cc_conf"``, for a value that only the node knows."""

    word: str


def write_file(
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
    """Write a file that belongs to clusterctl as a whole.

    Args:
        name: the step's name, such as ``configuration``.
        path: an absolute path.
        text: the content.
        mode: the permissions.
        before: sh that sets the variables in ``Sh`` values; it changes nothing.
        check: sh that fails if the new file, ``$cc_new``, is invalid, such as a daemon's checker.
        then: sh to run after a change, such as ``cc_restart chrony``. After a crash, the next apply runs it.
        unit: the unit that reads the file. Its state is recorded first, so that undo restores it after the file.
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


def write_block(
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
    """Write lines to a shared file, between ``# BEGIN clusterctl MARK`` and ``# END clusterctl MARK``.

    Args:
        name: the step's name.
        path: an absolute path. Other lines of the file do not change.
        text: the lines, each with its newline.
        mark: distinguishes several blocks in one file.
        at: where a new block goes; an existing block keeps its place.
        before: sh that sets the variables in ``Sh`` values; it changes nothing.
        then: sh to run after a change.
        unit: the unit that reads the file.
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


def make_folder(name: str, path: str, *, mode: int = 0o755) -> Step:
    """Create a folder and its parents; undo removes those of them that are empty."""
    return Step(name, do=f"cc_folder {quote(path)} {mode:o}", unless=f"[ -d {quote(path)} ]")


def start_unit(name: str, unit: str | Sh, *, before: str = "") -> Step:
    """Enable and start a unit."""
    word = _word(unit)
    return Step(name, do=_lines([before, f"cc_start {word}"]), unless=_lines([before, f"cc_on {word}"]))


def stop_units(name: str, units: tuple[str, ...]) -> Step:
    """Stop and disable units; a unit that a node does not have counts as stopped."""
    each = words(units)
    return Step(
        name,
        do=f'for cc_u in {each}; do cc_off "$cc_u" || cc_stop "$cc_u"; done',
        unless=f'for cc_u in {each}; do cc_off "$cc_u" || exit 1; done',
    )


def require(name: str, test: str, report: str) -> Step:
    """A step of ``verify`` that runs the sh ``test``. If it fails, the sh ``report`` prints the problem."""
    return Step(name, do=f"{report}\nfalse", unless=test)


def _word(value: str | Sh) -> str:
    return value.word if isinstance(value, Sh) else quote(value)


def _lines(lines: list[str]) -> str:
    return "\n".join(line for line in lines if line)
