"""What is left out of an environment on request: patterns as in a .gitignore file, relative to the prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pathspec

from provision.env.source.scan import Found
from provision.errors import UsageError


def leave_out(found: Iterable[Found], patterns: Sequence[str]) -> tuple[list[Found], tuple[str, ...]]:
    """Leave out what patterns name, and all that lies in folders that they name.

    Args:
        found: sorted by path.
        patterns: ``share/doc`` and ``/tests`` count from the prefix, ``*.a`` and ``tests/`` anywhere, ``!keep.a`` takes
            back; the last one that matches decides.

    Returns:
        What is left, and what people should know: for each pattern how much it leaves out.

    Raises:
        UsageError: a pattern is none, or leaves out the environment's Python.
    """
    if not patterns:
        return list(found), ()
    try:
        spec = pathspec.GitIgnoreSpec.from_lines(patterns)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--exclude: {error}", hint="patterns are those of a .gitignore file") from error
    left: list[Found] = []
    gone: dict[str, int] = {}  # by path, the pattern
    counts = [0] * len(patterns)
    sizes = [0] * len(patterns)
    matched: set[int] = set()
    for one in found:
        number = gone.get(one.path.rpartition("/")[0])
        if number is None:
            verdict = spec.check_file(one.path + ("/" if one.type == "dir" else ""))
            if verdict.index is not None:
                matched.add(verdict.index)
            if not verdict.include:
                left.append(one)
                continue
            number = verdict.index
            assert number is not None
        gone[one.path] = number
        if one.type != "dir":
            counts[number] += 1
            sizes[number] += one.size
    if python := next((path for path in ("bin", "bin/python") if path in gone), ""):
        raise UsageError(
            f"--exclude {patterns[gone[python]]!r} would leave out {python}", hint="no Python runs without it"
        )
    return left, tuple(
        _told(pattern, counts[number], sizes[number])
        for number, pattern in enumerate(patterns)
        if counts[number] or number not in matched
    )


def _told(pattern: str, count: int, size: int) -> str:
    if not count:
        return f"--exclude {pattern!r} matches nothing"
    return f"--exclude {pattern!r} leaves out {count} {'file' if count == 1 else 'files'} of {size / 1e6:.1f} MB"
