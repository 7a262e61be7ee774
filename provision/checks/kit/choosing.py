"""Which checks are meant, and whether what the inventory says about them can be. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from provision.checks import ids, load
from provision.errors import UsageError
from provision.model import CheckOptions


def choose(options: CheckOptions, *, level: int, only: Sequence[str], bundle: bool) -> tuple[str, ...]:
    """The checks to run, sorted by id.

    Args:
        options: the inventory's; a check that is ``off`` runs only when ``only`` names it whole.
        level: 0: passive ones; 1: those between nodes as well.
        only: ids, or first words of ids such as ``gpu``; empty for all. A whole id is run whatever its level.
        bundle: whether there is one to compare with; checks that need one are left out without it.

    Raises:
        UsageError: ``only`` names no check, or only such as need a bundle.
    """
    named = set(only) & set(ids())
    known = {each.partition(".")[0] for each in ids()}
    kinds = known & set(only)
    unknown = [each for each in only if each not in named | kinds]
    if unknown:
        raise UsageError(
            f"there is no check {unknown[0]!r}", hint=_close(unknown[0], ids() if "." in unknown[0] else known)
        )
    wanted = [
        each
        for each in ids()
        if each in named
        or ((not only or each.partition(".")[0] in kinds) and each not in options.off and level >= load(each).LEVEL)
    ]
    usable = tuple(each for each in wanted if bundle or not getattr(load(each), "BUNDLE", False))
    if wanted and not usable:
        raise UsageError(
            f"{', '.join(wanted)}: nothing to compare the nodes with", hint="name a bundle: clusterctl check BUNDLE"
        )
    if not usable:
        raise UsageError("no check is left to run", hint="see checks: off: in the inventory, or use --level 1")
    return usable


def limits(check: str, options: CheckOptions) -> dict[str, float]:
    """A check's thresholds, the inventory's own values put over them."""
    return {**getattr(load(check), "LIMITS", {}), **options.limits.get(check, {})}


def problems(off: Iterable[str], wanted: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with an inventory's ``checks:``, each with its place below it. Imports only the checks it names."""
    for each in off:
        if each not in ids():
            yield ("off",), f"there is no check {each!r:.80}; {_close(each, ids())}"
    for check, values in wanted.items():
        if check not in ids():
            yield (check,), f"there is no such check; {_close(check, ids())}"
            continue
        known: Mapping[str, float] = getattr(load(check), "LIMITS", {})
        for name, value in values.items():
            if name not in known:
                yield (check, name), f"is no threshold of {check}; {_close(name, known) if known else 'it has none'}"
            elif isinstance(value, bool) or not isinstance(value, int | float):
                yield (check, name), f"must be a number, such as {known[name]:g}"
            elif value < 0:
                yield (check, name), f"must not be negative, such as {known[name]:g}"


def _close(name: str, known: Collection[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    if found:
        return f"did you mean {found[0]}?"
    if len(known) <= 20:
        return f"known: {', '.join(sorted(known))}"
    return "docs/checks.md lists all of them"
