"""Selects the newest checkpoint that all nodes together have completely, and lists the files that each node lacks.

Every agent scans its output folder (``scan``) and offers its checkpoints. Rank 0 combines the offers (``newest``). If
nodes have separate disks, rank 0's node has the weights and every node the files of its own ranks.

========================  ===================================================================================
``checkpoint-N/``         Hugging Face's Trainer and LLaMA-Factory, also with DeepSpeed's folder inside
``TAG/`` and ``latest``   DeepSpeed's own: ``TAG`` is usually ``global_stepN``
``iter_N/``               trainer.gpt's, with a ``complete.json`` in it
========================  ===================================================================================
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ..link.copies import TEMPORARY
from .files import File, look
from .rules import (
    COMPLETE,
    DEEPSPEED,
    HUGGING_FACE,
    INDEX,
    LATEST,
    OURS,
    Union,
    is_of_one_rank,
    must_be_equal,
    readers,
    why_incomplete,
)

NEWEST = 5  # checkpoints that are read; older ones are never each
DEEP = 4  # levels of folders below a checkpoint's


class Checkpoint(NamedTuple):
    """One node's copy of a checkpoint. ``contents``: the content of its index files and ``latest``, by name."""

    name: str
    step: int
    layout: str
    files: Dict[str, File]
    contents: Dict[str, Any]

    @property
    def torn(self) -> List[str]:
        """The truncated files."""
        return sorted(name for name, file in self.files.items() if file.torn)


class Choice(NamedTuple):
    """The result of ``newest``. ``name`` is None if no checkpoint is complete; ``refused`` has reasons for newer ones.

    ``copy``: the files that each rank lacks, as (name below the output folder, size, rank that has it).
    """

    name: Optional[str]
    step: Optional[int]
    copy: Dict[int, List[Tuple[str, int, int]]]
    refused: List[Tuple[str, str]]


def step_of(name: str) -> int:
    """The last number in a name; 0 without one."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else 0


def _layout(folder: Path, name: str) -> Optional[str]:
    if re.fullmatch(r"checkpoint-\d+", name):
        return HUGGING_FACE
    if re.fullmatch(r"iter_\d+", name):
        return OURS
    try:
        inside = [entry.name for entry in os.scandir(folder / name)]
    except OSError:
        return None
    return DEEPSPEED if any(one.endswith(("model_states.pt", "optim_states.pt")) for one in inside) else None


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


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def _read(folder: Path, name: str, layout: str) -> Checkpoint:
    files: Dict[str, File] = {}
    contents: Dict[str, Any] = {}
    for relative, path in _walk(folder / name):
        try:
            files[relative], content = look(path)
        except OSError:
            continue
        if relative == LATEST:
            contents[LATEST] = _text(path)
        elif relative.endswith(INDEX) and isinstance(content, dict) and isinstance(content.get("weight_map"), dict):
            contents[relative] = sorted({str(shard) for shard in content["weight_map"].values()})
        elif relative == COMPLETE and isinstance(content, dict) and isinstance(content.get("files"), dict):
            contents[COMPLETE] = sorted(map(str, content["files"]))
    return Checkpoint(name, step_of(name), layout, files, contents)


def scan(folder: Path) -> List[Checkpoint]:
    """The newest checkpoints in an output folder, newest first; empty without a folder."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    found = [(step_of(name), name, layout) for name in names for layout in [_layout(folder, name)] if layout]
    return [_read(folder, name, layout) for _, name, layout in sorted(found, reverse=True)[:NEWEST]]


def offer(folder: Path, first_rank: int, processes: int) -> Dict[str, Any]:
    """A node's offer: its checkpoints and its ranks."""
    found = {}
    path = folder / LATEST
    if path.is_file() and not path.is_symlink():
        found = {"tag": _text(path), "file": list(look(path)[0])}
    checkpoints = [
        {
            "name": one.name,
            "layout": one.layout,
            "says": one.contents,
            "files": {k: list(v) for k, v in one.files.items()},
        }
        for one in scan(folder)
    ]
    return {"ranks": [first_rank, processes], "latest": found, "checkpoints": checkpoints}


class _Held(NamedTuple):
    """A file's best version: the last written of the complete ones."""

    file: File
    rank: int


def newest(offers: Dict[int, Dict[str, Any]], world_size: int) -> Choice:
    """Select the newest checkpoint that is complete on all nodes together.

    Args:
        offers: the results of ``offer``, by the node's rank; other keys are ignored.
        world_size: ranks of the whole run.
    """
    nodes = {rank: {one["name"]: one for one in each.get("checkpoints", [])} for rank, each in offers.items()}
    layouts = {one["name"]: one["layout"] for held in nodes.values() for one in held.values()}
    tags = {rank: each["latest"] for rank, each in offers.items() if each.get("latest")}
    latest = max(tags.items(), key=lambda item: item[1]["file"][1])[1]["tag"] if tags else None
    refused: List[Tuple[str, str]] = []
    for name in sorted(layouts, key=lambda name: (step_of(name), name), reverse=True):
        versions: Dict[str, Dict[int, File]] = {}
        contents: Dict[str, Any] = {}
        for rank in sorted(nodes, reverse=True):  # rank 0's node takes precedence
            one = nodes[rank].get(name, {"files": {}, "says": {}})
            contents.update(one["says"])
            for file, facts in one["files"].items():
                versions.setdefault(file, {})[rank] = File(*facts)
        held, why = _unite(versions)
        step = step_of(latest) if latest else None
        why = why or why_incomplete(Union(layouts[name], set(held), contents, step_of(name), step), world_size)
        if why is None:
            copy = {
                rank: _lacking(name, held, versions, rank, each.get("ranks", (0, 0))) for rank, each in offers.items()
            }
            if layouts[name] == DEEPSPEED and latest == name:
                _add_latest(copy, tags, latest)
            return Choice(name, step_of(name), {rank: files for rank, files in copy.items() if files}, refused)
        refused.append((name, why))
    return Choice(None, None, {}, refused)


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


def _lacking(
    folder: str, held: Dict[str, _Held], versions: Dict[str, Dict[int, File]], rank: int, ranks: Tuple[int, int]
) -> List[Tuple[str, int, int]]:
    """The files that the node of ``rank`` must copy: missing, truncated or outdated ones."""
    files = []
    first, count = ranks
    elsewhere = {name for name, reader in readers(held).items() if not first <= reader < first + count}
    for name, (best, giver) in sorted(held.items()):
        if name in elsewhere:
            continue
        mine = versions[name].get(rank)
        compared = must_be_equal(name) or is_of_one_rank(name)
        if mine is None or mine.torn or (compared and (mine.size, mine.mark) != (best.size, best.mark)):
            files.append(("%s/%s" % (folder, name), best.size, giver))
    return files


def _add_latest(copy: Dict[int, List[Tuple[str, int, int]]], tags: Dict[int, Dict[str, Any]], latest: str) -> None:
    """Add the file ``latest``, which DeepSpeed reads beside the tag's folder."""
    giver = next(rank for rank, found in sorted(tags.items()) if found["tag"] == latest)
    for rank, files in copy.items():
        if tags.get(rank, {}).get("tag") != latest:
            files.append((LATEST, tags[giver]["file"][0], giver))
