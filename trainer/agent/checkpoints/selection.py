"""Selects the newest checkpoint that all nodes together have completely, and lists the files that each node lacks.

Every agent scans its output folder (``scan``) and offers its checkpoints (``offer``). Rank 0 combines the offers
(``newest``). If nodes have separate disks, rank 0's node has the weights and every node the files of its own ranks.

Checkpoints are ordered by the step in their name, else the step in a JSON file of theirs. A checkpoint without a step,
such as DeepSpeed's tag ``best``, comes after all steps that were written before it. Names that count epochs have no
step if others count steps.

A checkpoint that cannot be used is never written over: ``Choice.aside`` has the names that the nodes move aside, see
``aside.py``. Layouts of libraries have precedence over other folders, and folders over single files.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..contract.untrusted import is_whole
from ..link.copies import TEMPORARY
from .files import File, look
from .layouts import (
    ABOUT,
    ACCELERATE,
    COMPLETE,
    DEEPSPEED,
    FILE,
    FOLDER,
    INDEX,
    LATEST,
    METADATA,
    TRAINER,
    TYPED,
    Union,
    is_of_one_rank,
    layouts_of,
    must_be_equal,
    readers,
    why_incomplete,
)
from .names import Number, number_in
from .places import Found, Seen, find, text_of

NEWEST = 5  # checkpoints that are read; older ones are never each
RECENT = 2  # checkpoints whose files are watched while a run writes them
OTHERS = 1000  # names of checkpoints that are not read
DEEP = 4  # levels of folders below a checkpoint's
STEPS = ("global_step", "step", "iteration", "iter_num", "iter", "current_step", "epoch")  # keys of JSON files
_LIMIT = 1 << 62
_SAVED = re.compile(r"global_step\d+$")


class Checkpoint(NamedTuple):
    """One node's copy of a checkpoint.

    Attributes:
        name: its path below the output folder.
        single: it is one file.
        step: the step in a JSON file of it.
        files: by path below the checkpoint; of a single file, by its name.
        contents: the content of index files, ``.metadata``, ``complete.json`` and ``latest``, by name.
    """

    name: str
    single: bool
    step: Optional[int]
    files: Dict[str, File]
    contents: Dict[str, Any]

    @property
    def torn(self) -> List[str]:
        """The truncated files."""
        return sorted(name for name, file in self.files.items() if file.torn)


class Aside(NamedTuple):
    """What every node moves to the folder ``kept-NUMBER``, and the text pointers that then name another checkpoint."""

    number: int
    names: List[str]
    pointers: Dict[str, str]


Missing = Tuple[Any, ...]  # see ``Choice.copy``


class Choice(NamedTuple):
    """The result of ``newest``.

    Attributes:
        name: the checkpoint's path below the output folder; None if none is complete.
        step: its step, if it has one.
        copy: the files that each rank lacks, as (path below the output folder, size, rank that has it). A file that is
            only in a folder of copies also has its path there and its digest.
        refused: newer checkpoints with reasons.
        layout: the checkpoint's.
        time: when it was written, in nanoseconds since the epoch.
        aside: the checkpoints that cannot be used and would be written over; None if there are none.
        error: why no checkpoint can be chosen at all.
    """

    name: Optional[str] = None
    step: Optional[int] = None
    copy: Dict[int, List[Missing]] = {}  # noqa: RUF012 - never changed
    refused: Sequence[Tuple[str, str]] = ()
    layout: str = ""
    time: int = 0
    aside: Optional[Aside] = None
    error: Optional[str] = None


def path_of(name: str, file: str, single: bool) -> str:
    """The path of a checkpoint's file below the output folder."""
    return name if single else "%s/%s" % (name, file)


# --- on a node ---------------------------------------------------------------------------------------------------


def _walk(folder: Path, below: str = "", depth: int = 0) -> Iterator[Tuple[str, Path]]:
    """Name and path of every file. Skips unreadable folders and does not follow links."""
    try:
        entries = sorted(os.scandir(folder / below), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and depth < DEEP:
            yield from _walk(folder, below + entry.name + "/", depth + 1)
        elif entry.is_file(follow_symlinks=False) and not entry.name.startswith(TEMPORARY):
            yield below + entry.name, Path(entry.path)


def read(path: Path, seen: Seen) -> Checkpoint:
    """Read a checkpoint. ``path``: the folder, or the single file."""
    files: Dict[str, File] = {}
    contents: Dict[str, Any] = {}
    steps: Dict[str, int] = {}
    for relative, where in [(path.name, path)] if seen.single else _walk(path):
        try:
            files[relative], content = look(where)
        except OSError:
            continue
        if relative == LATEST:
            contents[LATEST] = text_of(where)
        elif relative.rpartition("/")[2] == METADATA:
            contents[relative] = content or []
        elif not isinstance(content, dict):
            continue
        elif relative.endswith(INDEX) and isinstance(content.get("weight_map"), dict):
            contents[relative] = sorted({str(shard) for shard in content["weight_map"].values()})
        elif relative == COMPLETE and isinstance(content.get("files"), dict):
            contents[COMPLETE] = sorted(map(str, content["files"]))
        if "/" not in relative and isinstance(content, dict):
            steps.update({key: content[key] for key in STEPS if _is_step(content.get(key))})
    step = next((steps[key] for key in STEPS if key in steps), None)
    return Checkpoint(seen.name, seen.single, step, files, contents)


def _is_step(value: Any) -> bool:
    return is_whole(value, _LIMIT)


def _written(path: Path) -> int:
    """When the newest file of a checkpoint was written: of the folder's own files, for a quick order."""
    try:
        times = [path.stat().st_mtime_ns]
        times += [each.stat().st_mtime_ns for each in path.iterdir() if each.is_file()] if path.is_dir() else []
    except OSError:
        return 0
    return max(times)


def scan(output: Path, found: Optional[Found] = None) -> List[Checkpoint]:
    """The newest checkpoints below an output folder, newest first; empty without a folder."""
    seen = _candidates((find(output) if found is None else found).checkpoints)
    order = _ordered({one.name: (number_in(one.name), None, _written(output / one.name)) for one in seen})
    by_name = {one.name: one for one in seen}
    return [read(output / name, by_name[name]) for name in order[:NEWEST]]


def _candidates(seen: Sequence[Seen]) -> List[Seen]:
    """The folders that are least deep below the output folder; without folders, the single files.

    So a copy in ``out/old/`` does not compete with the checkpoints in ``out/``.
    """
    folders = [one for one in seen if not one.single]
    depth = min((one.name.count("/") for one in folders), default=0)
    return [one for one in folders if one.name.count("/") == depth] or list(seen)


def offer(output: Path, first_rank: int, processes: int) -> Dict[str, Any]:
    """A node's offer: its checkpoints, pointers and ranks, and the names of everything that a new start would hit."""
    found = find(output)
    checkpoints = scan(output, found)
    read = {one.name for one in checkpoints}
    pointers = []
    for one in found.pointers:
        try:
            facts = None if one.link else list(look(output / one.name)[0])
        except OSError:
            continue
        pointers.append({"name": one.name, "tag": one.tag, "file": facts})
    everything = (*(one.name for one in found.checkpoints), *found.parts)
    return {
        "ranks": [first_rank, processes],
        "kept": found.kept,
        "pointers": pointers,
        "others": [name for name in everything if name not in read][:OTHERS],
        "checkpoints": [
            dict(described(one), disk=_disk_mark(output / one.name, one.files, one.single)) for one in checkpoints
        ],
    }


def described(one: Checkpoint) -> Dict[str, Any]:
    """A checkpoint as plain JSON values, for an offer."""
    files = {name: list(file) for name, file in one.files.items()}
    return {"name": one.name, "single": one.single, "step": one.step, "says": one.contents, "files": files}


def _disk_mark(path: Path, files: Mapping[str, File], single: bool) -> str:
    """A text that is equal on two nodes only if they see the same files on one shared disk.

    It covers the inodes and the times at which they changed, which no program can set.
    """
    found = []
    for name in sorted(files):
        try:
            stat = (path if single else path / name).stat()
        except OSError:
            continue
        found.append("%s %d %d" % (name, stat.st_ino, stat.st_ctime_ns))
    return hashlib.sha256("\n".join(found).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def signs(output: Path) -> Tuple[bool, Tuple[Tuple[str, int, int], ...]]:
    """Whether there are checkpoints, and name, size and time of the newest ones' files; else of all large files.

    Reads no file: equal signs mean that nothing was written in between.
    """
    found = find(output)
    seen = _candidates(found.checkpoints)
    recent = sorted(seen, key=lambda one: _written(output / one.name))[-RECENT:]
    paths = [
        (one.name + "/" + name, path) for one in recent if not one.single for name, path in _walk(output / one.name)
    ]
    paths += [(one.name, output / one.name) for one in recent if one.single]
    paths += [(name, output / name) for name in (*found.parts[:OTHERS], *(each.name for each in found.pointers))]
    listed = []
    for name, path in paths:
        try:
            stat = path.lstat()
        except OSError:
            continue
        listed.append((name, stat.st_size, stat.st_mtime_ns))
    return bool(seen), tuple(listed)


# --- on rank 0's node --------------------------------------------------------------------------------------------


def _ordered(facts: Mapping[str, Tuple[Optional[Number], Optional[int], int]]) -> List[str]:
    """Names of checkpoints, newest first. ``facts``: by name, the number in it, the step in its files, its time."""
    counted = any(number is not None and not number.epochs for number, _, _ in facts.values())

    def step_of(number: Optional[Number], inside: Optional[int]) -> Optional[int]:
        return inside if number is None or (number.epochs and counted) else number.value

    steps = {name: step_of(number, inside) for name, (number, inside, _) in facts.items()}
    stepped = [(facts[name][2], step) for name, step in steps.items() if step is not None]

    def key(name: str) -> Tuple[int, bool, int, str]:
        step, time = steps[name], facts[name][2]
        after = max((each for at, each in stepped if at <= time), default=-1)
        return (after if step is None else step, step is None, time, name)

    return sorted(facts, key=key, reverse=True)


COPY = 1 << 20  # added to the rank of a node for its copies of other nodes' files


class _Held(NamedTuple):
    """A file's best version: the last written of the complete ones. ``rank``: with ``COPY`` for a copy."""

    file: File
    rank: int


class _Merged(NamedTuple):
    """A checkpoint of all nodes together.

    Attributes:
        inside: the step in a JSON file of it.
        versions: of each file, by the node's rank.
        layouts: more than one if it mixes formats.
        copies: the entries of copies, by rank with ``COPY``.
    """

    name: str
    single: bool
    inside: Optional[int]
    time: int
    versions: Dict[str, Dict[int, File]]
    contents: Dict[str, Any]
    layouts: List[str]
    copies: Dict[int, Mapping[str, Any]]

    @property
    def step(self) -> Optional[int]:
        """The step, or the epoch, in the name; else the step inside."""
        number = number_in(self.name)
        return self.inside if number is None else number.value


def _merge(name: str, copies: Mapping[int, Mapping[str, Any]]) -> _Merged:
    versions: Dict[str, Dict[int, File]] = {}
    contents: Dict[str, Any] = {}
    for rank in sorted(copies, reverse=True):  # rank 0's node takes precedence
        contents.update(copies[rank]["says"])
        for file, facts in copies[rank]["files"].items():
            versions.setdefault(file, {})[rank] = File(*facts)
    single = all(one["single"] for one in copies.values())
    inside = next((copies[rank]["step"] for rank in sorted(copies) if copies[rank].get("step") is not None), None)
    time = max((file.mtime for each in versions.values() for file in each.values()), default=0)
    layouts = [FILE] if single else layouts_of(name, versions)
    copied = {rank: one for rank, one in copies.items() if rank >= COPY}
    return _Merged(name, single, inside, time, versions, contents, layouts, copied)


def _with_copies(
    nodes: Dict[int, Dict[str, Mapping[str, Any]]], offers: Mapping[int, Mapping[str, Any]]
) -> Dict[int, Dict[str, Mapping[str, Any]]]:
    """The checkpoints of each node, and its copies under its rank plus ``COPY``.

    Copies of one checkpoint count only if all are of the same save, and if no node wrote to the checkpoint since. So
    the files of two saves under one name are never mixed.
    """
    written: Dict[str, int] = {}
    for held in nodes.values():
        for name, one in held.items():
            whole = (File(*facts) for facts in one["files"].values())  # a torn file has no content to mix
            written[name] = max([written.get(name, 0), *(file.mtime for file in whole if not file.torn)])
    copies = [(rank, one) for rank, each in offers.items() for one in each.get("copies", ())]
    saved: Dict[str, int] = {}
    for _, one in copies:
        saved[one["name"]] = max(saved.get(one["name"], 0), one["saved"])
    found = dict(nodes)
    for rank, one in copies:
        if one["saved"] == saved[one["name"]] >= written.get(one["name"], 0):
            found.setdefault(rank + COPY, {})[one["name"]] = one
    return found


def newest(offers: Dict[int, Dict[str, Any]], world_size: int) -> Choice:
    """Select the newest checkpoint that is complete on all nodes together.

    Args:
        offers: the results of ``offer``, by the node's rank; other keys are ignored.
        world_size: ranks of the whole run.
    """
    own = {rank: {one["name"]: one for one in each.get("checkpoints", [])} for rank, each in offers.items()}
    nodes = _with_copies(own, offers)
    names = {name for held in nodes.values() for name in held}
    merged = {name: _merge(name, {rank: held[name] for rank, held in nodes.items() if name in held}) for name in names}
    chosen = _without_saved_models(_first_kind(merged))
    typed = {one.layouts[0] for one in chosen.values() if len(one.layouts) == 1} & set(TYPED)
    if len(typed) > 1:
        return Choice(error=_mixture(chosen, typed))
    order = _ordered({name: (number_in(name), one.inside, one.time) for name, one in chosen.items()})
    tags = _tags(offers)
    refused: List[Tuple[str, str]] = []
    for name in order:
        one = chosen[name]
        held, why = _unite(one.versions)
        why = why or _why(one, set(held), world_size, [chosen[other] for other in order]) or _unnamed(one, order, tags)
        if why is None:
            copy = {rank: _lacking(one, held, rank, each.get("ranks", (0, 0))) for rank, each in offers.items()}
            if one.layouts == [DEEPSPEED]:
                _add_latest(copy, name, offers)
            copy = {rank: files for rank, files in copy.items() if files}
            aside = _aside(offers, [each for each, _ in refused], name)
            if one.layouts == [DEEPSPEED] and name not in tags.values() and _uses_copies(copy):
                aside = _with_latest(aside, name)
            return Choice(name, one.step, copy, refused, one.layouts[0], one.time, aside)
        refused.append((name, why))
    if not refused:
        return Choice()
    others = sorted({name for each in offers.values() for name in each.get("others", ())} | (names - set(order)))
    return Choice(refused=refused, aside=_aside(offers, [name for name, _ in refused] + others, None))


def _mixture(merged: Mapping[str, _Merged], typed: "set[str]") -> str:
    examples = []
    for layout in sorted(typed):
        name = max(name for name, one in merged.items() if one.layouts == [layout])
        examples.append("%s (%s)" % (name, ABOUT[layout]))
    return "it has checkpoints of different formats: %s; move those that do not belong to this run elsewhere" % (
        ", ".join(examples)
    )


def _without_saved_models(merged: Dict[str, _Merged]) -> Dict[str, _Merged]:
    """The checkpoints without DeepSpeed's tags that transformers' Trainer saves beside its own as the final model.

    ``Trainer.save_model`` does so in ZeRO stage 3 without ``stage3_gather_16bit_weights_on_model_save`` (5.6).
    """
    if not any(one.layouts == [TRAINER] for one in merged.values()):
        return merged
    saved = [name for name, one in merged.items() if one.layouts == [DEEPSPEED] and _SAVED.match(name)]
    return {name: one for name, one in merged.items() if name not in saved}


def _first_kind(merged: Mapping[str, _Merged]) -> Dict[str, _Merged]:
    """The checkpoints of a library's layout; without any, other folders; without any, single files."""
    for kinds in (set(TYPED), {FOLDER}, {FILE}):
        found = [one for one in merged.values() if set(one.layouts) & kinds]
        if found:
            return {seen.name: merged[seen.name] for seen in _candidates([Seen(one.name, one.single) for one in found])}
    return {}


def _why(one: _Merged, names: "set[str]", world_size: int, all_: Sequence[_Merged]) -> Optional[str]:
    """Why a checkpoint with these complete files cannot be used, or None."""
    if len(one.layouts) != 1:
        return "it mixes the files of %s" % " and ".join(ABOUT.get(each, each) for each in one.layouts)
    layout = one.layouts[0]
    why = why_incomplete(Union(one.name, layout, names, one.contents), world_size)
    if why or layout not in (FOLDER, ACCELERATE):
        return why
    for other in all_:  # what no library defines is complete if it has the files of the others
        missing = set(other.versions) - names
        if other.layouts == [layout] and missing and names < set(other.versions):
            return "%s is missing, although %s has it" % (min(missing), other.name)
    return None


def _tags(offers: Mapping[int, Mapping[str, Any]]) -> Dict[str, str]:
    """By folder, the path of the checkpoint that ``latest`` in it names: the last written one of all nodes."""
    best: Dict[str, Tuple[int, str]] = {}
    for each in offers.values():
        for pointer in each.get("pointers", ()):
            folder, _, base = pointer["name"].rpartition("/")
            time = pointer["file"][1] if pointer["file"] else 0
            if base == LATEST and pointer["tag"] and time >= best.get(folder, (0, ""))[0]:
                best[folder] = (time, "%s/%s" % (folder, pointer["tag"]) if folder else pointer["tag"])
    return {folder: path for folder, (_, path) in best.items()}


def _unnamed(one: _Merged, order: Sequence[str], tags: Mapping[str, str]) -> Optional[str]:
    """DeepSpeed writes ``latest`` last: a tag that is newer than the named one is not finished."""
    named = tags.get(one.name.rpartition("/")[0])
    if one.layouts != [DEEPSPEED] or named is None or named == one.name:
        return None
    if named in order:
        older = order.index(one.name) > order.index(named)
    else:
        mine, other = number_in(one.name), number_in(named)
        older = mine is None or other is None or mine.value <= other.value
    return None if older else "the file latest does not name it yet: the save did not finish"


def _unite(versions: Dict[str, Dict[int, File]]) -> Tuple[Dict[str, _Held], Optional[str]]:
    """The best version of each file, or why there is none."""
    held = {}
    for name, by_rank in sorted(versions.items()):
        whole = {rank: file for rank, file in by_rank.items() if not file.torn}
        if not whole:
            return {}, "%s: %s" % (name, next(iter(by_rank.values())).torn)
        if must_be_equal(name) and len({file.size for file in whole.values()}) > 1:
            return {}, "%s has different sizes on the nodes" % name
        rank = min(whole, key=lambda rank: (-whole[rank].mtime, rank))
        held[name] = _Held(whole[rank], rank)
    return held, None


def is_copy(missing: Missing) -> bool:
    """Whether a file of ``Choice.copy`` comes from a folder of copies."""
    return len(missing) > 3


def _uses_copies(copy: Mapping[int, Sequence[Missing]]) -> bool:
    return any(is_copy(each) for files in copy.values() for each in files)


def _lacking(one: _Merged, held: Dict[str, _Held], rank: int, ranks: Tuple[int, int]) -> List[Missing]:
    """The files that the node of ``rank`` must copy: missing, truncated or outdated ones."""
    files: List[Missing] = []
    first, count = ranks
    elsewhere = {name for name, reader in readers(held).items() if not first <= reader < first + count}
    for name, (best, giver) in sorted(held.items()):
        if name in elsewhere:
            continue
        mine = one.versions[name].get(rank)
        compared = must_be_equal(name) or is_of_one_rank(name)
        if mine is None or mine.torn or (compared and (mine.size, mine.mark) != (best.size, best.mark)):
            path = path_of(one.name, name, one.single)
            if giver < COPY:
                files.append((path, best.size, giver))
            else:
                entry = one.copies[giver]
                files.append((path, best.size, giver - COPY, "%s/%s" % (entry["folder"], name), entry["digests"][name]))
    return files


def _with_latest(aside: Optional[Aside], name: str) -> Aside:
    """Let ``latest`` name a tag of DeepSpeed that comes from copies: the node that wrote ``latest`` is lost."""
    folder, slash, tag = name.rpartition("/")
    before = aside or Aside(0, [], {})
    return before._replace(pointers=dict(before.pointers, **{folder + slash + LATEST: tag}))


def _add_latest(copy: Dict[int, List[Missing]], name: str, offers: Mapping[int, Mapping[str, Any]]) -> None:
    """Add the file ``latest``, which DeepSpeed reads beside the tag's folder, if it names the tag somewhere."""
    folder, slash, tag = name.rpartition("/")
    path = folder + slash + LATEST
    right = {
        rank: pointer["file"]
        for rank, each in sorted(offers.items())
        for pointer in each.get("pointers", ())
        if pointer["name"] == path and pointer["tag"] == tag and pointer["file"]
    }
    for rank, files in copy.items():
        if right and rank not in right:
            giver = min(right)
            files.append((path, right[giver][0], giver))


def _aside(offers: Mapping[int, Mapping[str, Any]], names: List[str], chosen: Optional[str]) -> Optional[Aside]:
    """What must be moved, with the pointers to it: they name the chosen checkpoint if it is in their folder."""
    if not names:
        return None
    moved = set(names)
    number = 1 + max(int(each.get("kept", 0)) for each in offers.values())
    pointers: Dict[str, str] = {}
    for pointer in (pointer for each in offers.values() for pointer in each.get("pointers", ())):
        folder, slash, _ = pointer["name"].rpartition("/")
        if folder + slash + pointer["tag"] not in moved:
            continue
        if chosen is not None and pointer["file"] and chosen.rpartition("/")[0] == folder:
            pointers[pointer["name"]] = chosen.rpartition("/")[2]
        elif pointer["name"] not in moved:
            moved.add(pointer["name"])
            names.append(pointer["name"])
    return Aside(number, names, pointers)
