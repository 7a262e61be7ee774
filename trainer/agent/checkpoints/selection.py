"""Selects the newest checkpoint that all nodes together have completely, and lists the files that each node lacks.

Every agent scans its output folder (``scan``) and offers its checkpoints. Rank 0 combines the offers (``newest``). If
nodes have separate disks, rank 0's node has the weights and every node the files of its own ranks.

========================  ===================================================================================
``checkpoint-N/``         Hugging Face's Trainer and LLaMA-Factory, also with DeepSpeed's folder inside
``TAG/`` and ``latest``   DeepSpeed's own: ``TAG`` is usually ``global_stepN``
``iter_N/``               trainer.gpt's, with a ``complete.json`` in it
========================  ===================================================================================

Whether a checkpoint is complete depends on the names of its files on all nodes together (``why_incomplete``). Names and
order are those of transformers 5.6 (``Trainer._save_checkpoint``: weights, ``training_args.bin``, optimizer and
scheduler, each rank its ``rng_state``, last ``trainer_state.json`` by rank 0) and DeepSpeed 0.19
(``DeepSpeedEngine.save_checkpoint``: model states, each rank its ZeRO file, then ``latest`` by rank 0, which does not
wait for the others). With ``enable_jit_checkpoint``, ``checkpoint-is-incomplete.txt`` exists during the save.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from ..link.copies import TEMPORARY
from .files import File, look

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


HUGGING_FACE = "trainer"
DEEPSPEED = "deepspeed"
OURS = "clusterctl"

INCOMPLETE = "checkpoint-is-incomplete.txt"
LATEST = "latest"
COMPLETE = "complete.json"
STATE = "trainer_state.json"
INDEX = ".index.json"
RECOVERY = "zero_to_fp32.py"

MOST = 1 << 20  # ranks

_WEIGHTS = re.compile(
    r"((model|pytorch_model(_fsdp)?|adapter_model)\.(safetensors|bin)|pytorch_model_fsdp(_0/\.metadata|_rank\d+\.bin))$"
)
_OPTIMIZER = re.compile(r"optimizer\.(pt|bin)$|optimizer_0/\.metadata$")
_RNG = re.compile(r"rng_state_(\d+)\.pth$")
_ZERO = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
_ZERO_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt$")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_(\d+)_mp_rank_\d+_model_states\.pt$")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
_SHARD = re.compile(r"__(\d+)_\d+\.distcp$")
_LOCAL = re.compile(r"pytorch_model_fsdp(?:_\d+)?_rank(\d+)\.bin$")
_BY_RANK = (_RNG, _ZERO, _ZERO_MODEL, _EXPERT, _EXPERT_OPTIMIZER, _SHARD, _LOCAL)
_TENSORS = (".safetensors", ".pt", ".pth", ".bin")


class Union(NamedTuple):
    """A checkpoint, combined from all nodes."""

    layout: str
    names: Set[str]
    contents: Mapping[str, Any]  # the content of index files, ``latest`` and ``complete.json``, by name
    step: int
    latest_step: Optional[int]  # of the tag that the folder's own ``latest`` names (DeepSpeed's layout)


def is_of_one_rank(name: str) -> bool:
    """Whether each rank writes its own file of this kind."""
    base = name.rpartition("/")[2]
    return any(pattern.match(base) for pattern in _BY_RANK)


def must_be_equal(name: str) -> bool:
    """Whether the file must be the same on every node that has it.

    ``trainer_state.json`` and ``training_args.bin`` name the process that wrote them. Text files may differ.
    """
    base = name.rpartition("/")[2]
    return base.endswith(_TENSORS) and base != "training_args.bin" and not is_of_one_rank(name)


def readers(names: Iterable[str]) -> Dict[str, int]:
    """The files that only one rank reads when it resumes, with that rank.

    A ZeRO file's rank is the run's rank only without tensor and pipeline parallelism.
    """
    bases = {name: name.rpartition("/")[2] for name in names}
    patterns = [_RNG]
    if not any(int(found.group(2)) for found in _matches(_ZERO, bases)):
        patterns += [_ZERO, _ZERO_MODEL]
    found = ((name, pattern.match(base)) for name, base in bases.items() for pattern in patterns)
    return {name: int(match.group(1)) for name, match in found if match}


def why_incomplete(union: Union, world_size: int) -> Optional[str]:
    """The reason why a run of ``world_size`` ranks cannot resume from a checkpoint, or None."""
    names = union.names
    if union.layout == OURS:
        if COMPLETE not in names:
            return "%s is missing: the save did not finish" % COMPLETE
        missing = sorted(set(union.contents.get(COMPLETE, ())) - names)  # parts of ranks whose node is missing
        return "%s is missing, although %s lists it" % (missing[0], COMPLETE) if missing else None
    for name, shards in union.contents.items():
        if name.endswith(INDEX):
            folder = name.rpartition("/")[0]
            wanted = {"%s/%s" % (folder, shard) if folder else shard for shard in shards}
            if not wanted <= names:
                return "%s lists %s, which is missing" % (name, min(wanted - names))
    if union.layout == DEEPSPEED:
        if union.latest_step is not None and union.step > union.latest_step:
            return "the file latest does not name it yet: the save did not finish"
        return _deepspeed(names, world_size)
    return _trainer(union, world_size)


def _trainer(union: Union, world_size: int) -> Optional[str]:
    names = union.names
    if INCOMPLETE in names:
        return "%s exists: the save did not finish" % INCOMPLETE
    if STATE not in names:
        return "%s is missing: the save did not finish" % STATE
    tags = {name.partition("/")[0] for name in names if name.startswith("global_step") and "/" in name}
    why = _tagged(union, tags, world_size) if tags or LATEST in names else _states(union, world_size)
    if why or "rng_state.pth" in names:  # rng_state.pth: saved by one process
        return why
    return _ranks("rng_state", {int(found.group(1)) for found in _matches(_RNG, names)}, world_size, at_least=True)


def _tagged(union: Union, tags: Set[str], world_size: int) -> Optional[str]:
    """The Trainer's folder with DeepSpeed's inside."""
    tag = union.contents.get(LATEST)
    if not tag:
        return "the file latest is missing or empty"
    if tag not in tags:
        return "the file latest names %s, which is missing" % tag
    inside = {name.partition("/")[2] for name in union.names if name.startswith(tag + "/")}
    why = _deepspeed(inside, world_size)
    if why is None and RECOVERY in union.names and not any(_matches(_ZERO, inside)):
        # DeepSpeed writes this script only with ZeRO's files; without ZeRO the model states contain the optimizer's.
        why = "ZeRO's optimizer states are missing"
    return "%s: %s" % (tag, why) if why else None


def _states(union: Union, world_size: int) -> Optional[str]:
    """The Trainer's folder without DeepSpeed."""
    names = union.names
    if not any(map(_WEIGHTS.match, names)) and not any(name.endswith(INDEX) for name in union.contents):
        return "it has no weights"
    if not any(map(_OPTIMIZER.match, names)):
        return "it has no optimizer state (save_only_model?)"
    if "scheduler.pt" not in names:
        return "scheduler.pt is missing"
    return _shards(names, world_size)


def _shards(names: Set[str], world_size: int) -> Optional[str]:
    for folder in {name.rpartition("/")[0] for name in names if name.endswith(".distcp")}:
        inside = {name for name in names if name.rpartition("/")[0] == folder}
        if folder + "/.metadata" not in inside:
            return "%s/.metadata is missing: the save did not finish" % folder
        why = _ranks(folder, {int(found.group(1)) for found in _matches(_SHARD, inside)}, world_size)
        if why:
            return why
    return None


def _deepspeed(names: Set[str], world_size: int) -> Optional[str]:
    """The files of one tag, by their names in its folder."""
    zero = [(int(found.group(1)), int(found.group(2))) for found in _matches(_ZERO, names)]
    weights = [(int(found.group(1)), int(found.group(2))) for found in _matches(_ZERO_MODEL, names)]
    models = {int(found.group(1)) for found in _matches(_MODEL, names)}
    if not weights and not models:
        return "it has no model states"
    if weights and set(weights) != set(zero):
        lacking = min(set(weights) ^ set(zero))
        return "rank %d has only one of model states and optimizer states" % lacking[0]
    if zero:
        parallel = {model for _, model in zero}
        data = {rank for rank, _ in zero}
        if len(set(zero)) != len(data) * len(parallel):
            return "optimizer states of some ranks are missing"
        why = _ranks("model parallel", parallel, len(parallel)) or (
            _ranks("ZeRO", data, world_size if len(parallel) == 1 else len(data))
        )
        if why:
            return why
    for what, found in (
        ("model states", models),
        ("experts", {int(one.group(1)) for one in _matches(_EXPERT, names)}),
        ("experts' optimizer states", {int(one.group(1)) for one in _matches(_EXPERT_OPTIMIZER, names)}),
    ):
        why = _ranks(what, found, len(found))
        if why:
            return why
    return None


def _matches(pattern: Any, names: Iterable[str]) -> Any:
    found = (pattern.match(name.rpartition("/")[2]) for name in names)
    return [match for match in found if match]


def _ranks(what: str, found: Set[int], wanted: int, at_least: bool = False) -> Optional[str]:
    """The reason why these are not the ranks 0 to ``wanted`` - 1 (``at_least``: or more without a gap), or None."""
    count = max(found, default=-1) + 1
    if count > MOST:
        return "%s: a file name has a rank that no run can have" % what
    gaps = sorted(set(range(max(count, wanted))) - found)
    if gaps:
        return "%s of rank %s missing" % (what, ", ".join(map(str, gaps[:5])))
    if count > wanted and not at_least:
        return "%s: it was saved by %d ranks, this run has %d" % (what, count, wanted)
    return None
