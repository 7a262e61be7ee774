"""Recognises the layout of a checkpoint by its files, and decides whether the checkpoint is complete.

The names, and the order in which they are written, are those of these functions:

============  =====================================================================================================
trainer       transformers 5.6, ``Trainer._save_checkpoint``: weights, ``training_args.bin``, optimizer and scheduler,
              each rank its ``rng_state``, last ``trainer_state.json`` by rank 0; with ``enable_jit_checkpoint``,
              ``checkpoint-is-incomplete.txt`` exists during the save
deepspeed     DeepSpeed 0.19, ``DeepSpeedEngine.save_checkpoint``: model states, each rank its ZeRO file, in a folder
              named by the tag; then ``latest`` beside it by rank 0, which does not wait for the others
accelerate    accelerate 1.15, ``Accelerator.save_state`` and ``save_accelerator_state``: weights, optimizer, scheduler,
              each rank its ``random_states_N.pkl``, last ``custom_checkpoint_N.pkl``; with DeepSpeed a tag
              ``pytorch_model``, with FSDP the names of ``save_fsdp_model`` and ``save_fsdp_optimizer``
dcp           torch 2.13, ``torch.distributed.checkpoint.FileSystemWriter``: each rank its ``__RANK_N.distcp``, last
              ``.metadata``, which names them (torchtitan's ``step-N`` folders are of this kind)
lightning     Lightning 2.6: a folder ``*.ckpt`` with DeepSpeed's tag ``checkpoint`` (``DeepSpeedStrategy``), or with
              files of ``dcp`` and ``meta.pt`` (``FSDPStrategy``)
clusterctl    trainer.lm: parts of ranks, last ``complete.json``, which names them; also a script's own
folder        any other folder whose name is a step or a tag, with tensors in it
file          one file; Lightning's own checkpoints, ``ckpt.pt`` of nanoGPT, the usual ``torch.save`` of a script
============  =====================================================================================================
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set

from .names import LARGE, is_share, names_a_checkpoint, number_in

TRAINER = "trainer"
DEEPSPEED = "deepspeed"
ACCELERATE = "accelerate"
DCP = "dcp"
LIGHTNING = "lightning"
OURS = "clusterctl"
FOLDER = "folder"
FILE = "file"
ABOUT = {
    TRAINER: "transformers' Trainer",
    DEEPSPEED: "DeepSpeed",
    ACCELERATE: "accelerate",
    DCP: "torch.distributed.checkpoint",
    LIGHTNING: "Lightning",
    OURS: "a script with complete.json",
}
TYPED = tuple(ABOUT)  # layouts that a library defines, as opposed to FOLDER and FILE

INCOMPLETE = "checkpoint-is-incomplete.txt"
LATEST = "latest"
COMPLETE = "complete.json"
STATE = "trainer_state.json"
INDEX = ".index.json"
METADATA = ".metadata"
RECOVERY = "zero_to_fp32.py"

MOST = 1 << 20  # ranks

_WEIGHTS = re.compile(
    r"((model|pytorch_model(_fsdp)?|adapter_model)\.(safetensors|bin)|pytorch_model_fsdp(_0/\.metadata|_rank\d+\.bin))$"
)
_OPTIMIZER = re.compile(r"optimizer\.(pt|bin)$|optimizer_0/\.metadata$")
_RNG = re.compile(r"rng_state_(\d+)\.pth$")
_RANDOM = re.compile(r"random_states_(\d+)\.pkl$")
_ZERO = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
_ZERO_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt$")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_(\d+)_mp_rank_\d+_model_states\.pt$")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
_SHARD = re.compile(r"__(\d+)_\d+\.distcp$")
_LOCAL = re.compile(r"pytorch_model_fsdp(?:_\d+)?_rank(\d+)\.bin$")
_BY_RANK = (_RNG, _RANDOM, _ZERO, _ZERO_MODEL, _EXPERT, _EXPERT_OPTIMIZER, _SHARD, _LOCAL)
_TENSORS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

# What only one library writes, by the names of a folder's own files and folders.
_MARKS = (
    (OURS, re.compile(r"complete\.json|part-\d+-of-\d+\.safetensors")),
    (TRAINER, re.compile(r"trainer_state\.json|rng_state(_\d+)?\.pth|" + re.escape(INCOMPLETE))),
    (
        ACCELERATE,
        re.compile(r"random_states_\d+\.pkl|(scheduler|sampler|dl_state_dict)(_\d+)?\.bin|custom_checkpoint_\d+\.pkl"),
    ),
    (DEEPSPEED, re.compile(r".*(model|optim)_states\.pt")),
    (DCP, re.compile(r"\.metadata|__\d+_\d+\.distcp")),
)
# What the Trainer writes too, and a folder of DeepSpeed's in accelerate's.
_ACCELERATE_TOO = re.compile(r"optimizer(_\d+)?\.bin|pytorch_model_fsdp(_\d+)?(_rank\d+)?(\.bin)?")
_ACCELERATE_FOLDER = re.compile(r"pytorch_model(_fsdp)?(_\d+)?|optimizer_\d+")
_TRAINER_NAME = re.compile(r"checkpoint-\d+")


class Union(NamedTuple):
    """A checkpoint, combined from all nodes.

    Attributes:
        name: its path below the output folder.
        layout: one of the module's list.
        names: its files.
        contents: the content of index files, ``latest``, ``.metadata`` and ``complete.json``, by name.
    """

    name: str
    layout: str
    names: Set[str]
    contents: Mapping[str, Any]


def is_checkpoint(name: str, files: Set[str], folders: Set[str]) -> bool:
    """Whether a folder is a checkpoint or one node's part of it, by its own files and folders."""
    return bool(kinds(name, files, folders))


def kinds(name: str, files: Iterable[str], folders: Iterable[str]) -> List[str]:
    """The layouts of a folder, by its own files and folders: none, one, or several if it mixes formats."""
    base = name.rpartition("/")[2]
    files, folders = set(files), set(folders)
    if any(map(_TRAINER_NAME.fullmatch, folders)):
        return []  # the Trainer's output folder
    found = [kind for kind, mark in _MARKS if any(map(mark.fullmatch, files))]
    if base.endswith(".ckpt") and ({DEEPSPEED, DCP} & set(found) or "checkpoint" in folders):
        return [LIGHTNING]
    if len(found) > 1 and OURS in found:
        found.remove(OURS)  # a script that marks the checkpoints of a library
    if not {TRAINER, ACCELERATE} & set(found) and any(map(_ACCELERATE_FOLDER.fullmatch, folders)):
        found.append(TRAINER if _TRAINER_NAME.fullmatch(base) else ACCELERATE)
    if found:
        return found
    if _TRAINER_NAME.fullmatch(base):
        return [TRAINER] if files or folders else []
    if any(map(_ACCELERATE_TOO.fullmatch, files)):
        return [ACCELERATE]
    large = [each for each in files if each.endswith(LARGE)]
    named = names_a_checkpoint(base) and not any(map(number_in, large))  # else a folder of single files
    return [FOLDER] if large and named else []


def layouts_of(name: str, names: Iterable[str]) -> List[str]:
    """The layouts of a folder by all its files, as ``kinds``."""
    names = set(names)
    return kinds(
        name, {each for each in names if "/" not in each}, {each.partition("/")[0] for each in names if "/" in each}
    )


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
    patterns = [_RNG, _RANDOM]
    if not any(int(found.group(2)) for found in _matches(_ZERO, bases)):
        patterns += [_ZERO, _ZERO_MODEL]
    found = ((name, pattern.match(base)) for name, base in bases.items() for pattern in patterns)
    return {name: int(match.group(1)) for name, match in found if match}


_UNFINISHED = "%s is missing: the save did not finish"


def why_incomplete(union: Union, world_size: int) -> Optional[str]:
    """The reason why a run of ``world_size`` ranks cannot resume from a checkpoint, or None."""
    rules: Dict[str, Callable[[Union, int], Optional[str]]] = {
        TRAINER: _trainer,
        DEEPSPEED: lambda union, world_size: _deepspeed(union.names, world_size),
        ACCELERATE: _accelerate,
        DCP: _dcp,
        LIGHTNING: _lightning,
        OURS: lambda union, _: _ours(union),
        FOLDER: lambda *_: None,
        FILE: lambda union, _: _file(union),
    }
    return _unlisted(union) or rules[union.layout](union, world_size)


def _unlisted(union: Union) -> Optional[str]:
    """A file that an index or ``.metadata`` names, and that is missing."""
    for name, shards in sorted(union.contents.items()):
        if name.endswith((INDEX, METADATA)):
            folder = name.rpartition("/")[0]
            wanted = {"%s/%s" % (folder, shard) if folder else shard for shard in shards}
            if not wanted <= union.names:
                return "%s lists %s, which is missing" % (name, min(wanted - union.names))
    return None


def _file(union: Union) -> Optional[str]:
    if is_share(union.name.rpartition("/")[2]):
        return "it is one of several files: the files of a step must be in one folder"
    return None


def _ours(union: Union) -> Optional[str]:
    if COMPLETE not in union.names:
        return _UNFINISHED % COMPLETE
    missing = sorted(set(union.contents.get(COMPLETE, ())) - union.names)  # parts of ranks whose node is missing
    return "%s is missing, although %s lists it" % (missing[0], COMPLETE) if missing else None


def _dcp(union: Union, world_size: int) -> Optional[str]:
    return _shards(union, world_size) or (None if METADATA in union.names else _UNFINISHED % METADATA)


def _trainer(union: Union, world_size: int) -> Optional[str]:
    names = union.names
    if INCOMPLETE in names:
        return "%s exists: the save did not finish" % INCOMPLETE
    if STATE not in names:
        return _UNFINISHED % STATE
    tags = {name.partition("/")[0] for name in names if name.startswith("global_step") and "/" in name}
    why = _tagged(union, tags, world_size) if tags or LATEST in names else _states(union, world_size)
    if why or "rng_state.pth" in names:  # rng_state.pth: saved by one process
        return why
    return _ranks("rng_state", _numbers(_RNG, names), world_size, at_least=True)


def _accelerate(union: Union, world_size: int) -> Optional[str]:
    names = union.names
    tags = {name.rpartition("/")[0] for name in names if name.endswith("_states.pt") and "/" in name}
    if tags:
        why = next((why for why in (_tag(union, tag, world_size) for tag in sorted(tags)) if why), None)
    elif not any(map(_WEIGHTS.match, names)) and not any(name.endswith(INDEX) for name in union.contents):
        why = "it has no weights"
    elif not any(map(_OPTIMIZER.match, names)) and not any(_LOCAL.search(name) for name in names):
        why = "it has no optimizer state"
    else:
        why = _shards(union, world_size)
    return why or _ranks("random_states", _numbers(_RANDOM, names), world_size, at_least=True)


def _lightning(union: Union, world_size: int) -> Optional[str]:
    if any(name.startswith("checkpoint/") for name in union.names):
        return _tagged(union, {"checkpoint"}, world_size)
    if METADATA not in union.names:
        return _UNFINISHED % METADATA
    return _shards(union, world_size) or (None if "meta.pt" in union.names else _UNFINISHED % "meta.pt")


def _tagged(union: Union, tags: Set[str], world_size: int) -> Optional[str]:
    """A folder with DeepSpeed's inside, which ``latest`` names."""
    tag = union.contents.get(LATEST)
    if not tag:
        return "the file latest is missing or empty"
    if tag not in tags:
        return "the file latest names %s, which is missing" % tag
    return _tag(union, tag, world_size)


def _tag(union: Union, tag: str, world_size: int) -> Optional[str]:
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
    return _shards(union, world_size)


def _shards(union: Union, world_size: int) -> Optional[str]:
    """The folders with files of ``dcp``. ``.metadata`` lists them; if it cannot be read, each rank must have one."""
    for folder in sorted({name.rpartition("/")[0] for name in union.names if name.endswith(".distcp")}):
        metadata = folder + "/" + METADATA if folder else METADATA
        if metadata not in union.names:
            return _UNFINISHED % metadata
        if union.contents.get(metadata):
            continue
        inside = {name for name in union.names if name.rpartition("/")[0] == folder}
        why = _ranks(folder or "shards", _numbers(_SHARD, inside), world_size)
        if why:
            return why
    return None


def _deepspeed(names: Set[str], world_size: int) -> Optional[str]:
    """The files of one tag, by their names in its folder."""
    zero = [(int(found.group(1)), int(found.group(2))) for found in _matches(_ZERO, names)]
    weights = [(int(found.group(1)), int(found.group(2))) for found in _matches(_ZERO_MODEL, names)]
    models = _numbers(_MODEL, names)
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
        ("experts", _numbers(_EXPERT, names)),
        ("experts' optimizer states", _numbers(_EXPERT_OPTIMIZER, names)),
    ):
        why = _ranks(what, found, len(found))
        if why:
            return why
    return None


def _matches(pattern: Any, names: Iterable[str]) -> Any:
    found = (pattern.match(name.rpartition("/")[2]) for name in names)
    return [match for match in found if match]


def _numbers(pattern: Any, names: Iterable[str]) -> Set[int]:
    return {int(found.group(1)) for found in _matches(pattern, names)}


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
