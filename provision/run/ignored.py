"""Files of a code folder that git ignores: which of them a run sends nevertheless, and what stays behind.

Git ignores data sets and results alike. A run needs the data that its command line names, and no results of earlier
runs. ``named`` finds out what is named; this module decides, and lists the rest with its sizes.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pathspec

from provision.env.source import editable
from provision.errors import UsageError
from provision.inventory.document import shown
from provision.output_text import size as human
from provision.run.named import Named

LISTED = 1000  # unsent files that a run's record lists
_MOST = 200_000  # files that are looked at
_SAME = 20  # unsent files of one folder; more are listed as ``FOLDER/*``
_SHOWN = 4  # unsent files in the notice of ``train``
# Folders and files that trainers write. A name in a script's text alone does not send them.
_RESULTS = frozenset(
    ("wandb", "runs", "logs", "mlruns", "lightning_logs", "outputs", "output", "checkpoints", "tensorboard", "results")
)
_CHECKPOINT = re.compile(
    r"(^|/)(ckpt[\w.-]*\.pt|checkpoint-\d+/|global_step\d+/|mp_rank_\d+|trainer_(state\.json|log\.jsonl)"
    r"|events\.out\.tfevents|\w*optim_states\.pt|latest$|run\.json$|\.hydra/)"
)
_WEIGHTS = (".safetensors", ".gguf", ".ckpt", ".pth", ".pt", ".onnx")


@dataclass(frozen=True)
class Unsent:
    """Something that git ignores and that a run does not send.

    Attributes:
        path: relative to the code folder. A folder ends with ``/``, the files of a folder with ``/*``.
        size: bytes.
    """

    path: str
    size: int


@dataclass(frozen=True)
class Ignored:
    """What git ignores in a folder.

    Attributes:
        folder: the folder.
        tops: the paths that git lists; a folder that is ignored as a whole ends with ``/``.
        sizes: by relative path, the bytes of each file in them.
        cut: whether there are more files than are looked at.
    """

    folder: Path
    tops: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    cut: bool = False

    def below(self, path: str) -> list[str]:
        """The ignored file of this path, or the ignored files in this folder."""
        return [path] if path in self.sizes else [name for name in self.sizes if name.startswith(f"{path}/")]


@dataclass(frozen=True)
class Choice:
    """Ignored files to send, each with what named it, and notices."""

    files: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def find_ignored(folder: Path) -> Ignored:
    """The files in a folder that git ignores, without caches and environments; none without a repository."""
    tops = tuple(sorted(editable.list_ignored(folder)))
    sizes: dict[str, int] = {}
    for top in tops:
        for name, size in _files(folder, top):
            if len(sizes) >= _MOST:
                return Ignored(folder, tops, sizes, cut=True)
            sizes[name] = size
    return Ignored(folder, tops, sizes)


def _files(folder: Path, top: str) -> Iterator[tuple[str, int]]:
    if not top.endswith("/"):
        try:
            yield top, (folder / top).stat().st_size
        except OSError:
            return  # a broken link, or deleted in the meantime
        return
    for at, folders, names in os.walk(folder / top):
        folders[:] = sorted(
            name for name in folders if not editable.is_cache(name) and not Path(at, name, "pyvenv.cfg").exists()
        )
        inner = Path(at).relative_to(folder).as_posix()
        for name in sorted(names):
            if not editable.is_cache(name):
                yield from _files(folder, f"{inner}/{name}")


def choose_files(ignored: Ignored, names: Iterable[Named], limit: int) -> Choice:
    """The ignored files that a run needs.

    A command line and the configurations that it names count. Text of the script itself is weaker: it sends no results
    of earlier runs, no weights, and nothing that exceeds the limit.

    Args:
        ignored: what git ignores.
        names: values that may be paths.
        limit: bytes that a run sends at most.
    """
    if not ignored.sizes:
        return Choice()
    found = _matches(ignored, list(names))
    files: dict[str, str] = {}
    notices = []
    total = 0
    for path, named in sorted(found.items(), key=lambda item: (item[1].weak, item[0])):
        inside = [name for name in ignored.below(path) if name not in files]
        size = sum(ignored.sizes[name] for name in inside)
        if named.weak and total + size > limit:
            notices.append(
                f"{path} ({human(size)}) is git-ignored and too large to send, but {named.source} names it: "
                f"clusterctl push {path} DIR copies it to the nodes once"
            )
            continue
        total += size
        files |= dict.fromkeys(inside, named.source)
    by_source: dict[str, list[str]] = {}
    for path, named in found.items():
        if any(name in files for name in ignored.below(path)):
            by_source.setdefault(named.source, []).append(path)
    for source, paths in by_source.items():
        size = sum(ignored.sizes[name] for name, by in files.items() if by == source)
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        listed = ", ".join(shown(path) for path in sorted(paths)[:_SHOWN])
        notices.append(f"sent although git ignores it, because {source} names it: {listed}{more} ({human(size)})")
    return Choice(files, tuple(notices))


def _matches(ignored: Ignored, names: Sequence[Named]) -> dict[str, Named]:
    """The paths with ignored files that are named, each with the strongest evidence."""
    folders = _folders_of(ignored.sizes)
    bases = [each for each in names if each.path in folders or (ignored.folder / each.path).is_dir()][:50]
    found: dict[str, Named] = {}
    joined: set[str] = set()
    for each in names:
        for base in (*bases, *([] if each.prefix else [None])):
            path = each.path if base is None else f"{base.path}/{each.path}"
            if path not in ignored.sizes and path not in folders:
                continue
            weak = each.weak and (base is None or base.weak)
            if weak and _is_result(ignored, path):
                continue
            if base is not None and base.weak:
                joined.add(base.path)
            if path not in found or (found[path].weak and not weak):
                found[path] = Named(each.key, path, each.source, weak=weak)
    # A script that joins "data" with the data set's name needs only that data set.
    return {path: named for path, named in found.items() if not (named.weak and path in joined)}


def _folders_of(sizes: Iterable[str]) -> set[str]:
    found = set()
    for name in sizes:
        above = name.rpartition("/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


def _is_result(ignored: Ignored, path: str) -> bool:
    """Whether a path has what trainers write, or is private."""
    parts = path.split("/")
    if any(part in _RESULTS or part.startswith(".") for part in parts):
        return True
    return any(_CHECKPOINT.search(name) or name.endswith(_WEIGHTS) for name in ignored.below(path))


def include_files(ignored: Ignored, patterns: Sequence[str], sent: Iterable[str]) -> tuple[str, ...]:
    """The ignored files that ``--include`` patterns match.

    Args:
        ignored: what git ignores.
        patterns: as in a .gitignore file, relative to the code folder.
        sent: files that are sent anyway; a pattern for one of them is no error.

    Raises:
        UsageError: a pattern is invalid, or matches no file.
    """
    found: dict[str, None] = {}
    others = list(sent)
    for pattern in patterns:
        try:
            spec = pathspec.GitIgnoreSpec.from_lines([pattern.removeprefix("./")])
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"--include {shown(pattern)}: {error}", hint="the syntax is that of a .gitignore"
            ) from error
        matched = list(spec.match_files(ignored.sizes))
        if not matched and not any(spec.match_files(others)):
            raise UsageError(
                f"--include {shown(pattern)}: matches no file in {ignored.folder}", hint=_near(ignored, pattern)
            )
        found |= dict.fromkeys(matched)
    return tuple(found)


def _near(ignored: Ignored, pattern: str) -> str:
    names = [*ignored.tops, *_folders_of(ignored.sizes), *list(ignored.sizes)[:LISTED]]
    close = difflib.get_close_matches(pattern.strip("/"), names, n=1, cutoff=0.3)
    if close:
        return f"the nearest git-ignored path: --include {close[0]}"
    return "patterns are relative to the folder that is sent, as in its .gitignore; --dry-run lists what is not sent"


def list_unsent(ignored: Ignored, sent: Iterable[str]) -> tuple[Unsent, ...]:
    """What stays behind, the largest first; at most ``LISTED`` entries."""
    gone = set(sent)
    inside: defaultdict[str, list[str]] = defaultdict(list)
    tops = {top for top in ignored.tops if top.endswith("/")}
    for name in ignored.sizes:
        if name in gone:
            tops -= {top for top in tops if name.startswith(top)}
    folded: defaultdict[str, int] = defaultdict(int)
    for name, size in ignored.sizes.items():
        if name in gone:
            continue
        top = next((top for top in _above(name) if top in tops), None)
        if top:
            folded[top] += size
        else:
            inside[name.rpartition("/")[0]].append(name)
    for above, names in inside.items():
        if len(names) > _SAME:
            folded[f"{above}/*".lstrip("/")] += sum(ignored.sizes[name] for name in names)
        else:
            folded |= {name: ignored.sizes[name] for name in names}
    found = [Unsent(path, size) for path, size in folded.items()]
    return tuple(sorted(found, key=lambda each: (-each.size, each.path))[:LISTED])


def _above(name: str) -> Iterator[str]:
    """The folders above a file, each with ``/``."""
    place = name.find("/")
    while place >= 0:
        yield name[: place + 1]
        place = name.find("/", place + 1)


def unsent_text(unsent: Sequence[Unsent], *, complete: bool = False) -> str:
    """A notice of what stays behind, with sizes."""
    listed = unsent if complete else unsent[:_SHOWN]
    names = ", ".join(f"{shown(each.path)} ({human(each.size)})" for each in listed)
    rest = unsent[len(listed) :]
    more = f" and {len(rest)} more ({human(sum(each.size for each in rest))})" if rest else ""
    lists = "; --dry-run lists all" if rest else ""
    return f"not sent, git-ignored: {names}{more}; --include PATTERN sends more{lists}"


def find_unsent(path: str, unsent: Iterable[str]) -> str | None:
    """The unsent entry that contains a path of a failed run; None if no entry does.

    Args:
        path: as an error names it: relative, or absolute in the run's folder.
        unsent: the paths of ``Unsent``.
    """
    relative = path.rpartition("/job/")[2] if path.startswith("/") else os.path.normpath(path)
    if not relative or (path.startswith("/") and "/job/" not in path):
        return None
    for entry in unsent:
        folder = entry[:-1] if entry.endswith("/*") else entry
        if relative == entry or relative == entry.rstrip("/"):
            return relative
        if folder.endswith("/") and relative.startswith(folder):
            return relative
        if entry.startswith(f"{relative}/"):
            return relative
    return None
