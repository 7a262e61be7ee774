"""Chooses which files of a run to collect, and from which node each. Pure: reads the agents' offers.

``trainer/agent/checkpoints/selection.py`` lists a node's checkpoints (``offer``) and finds the newest one that all
nodes together have whole (``newest``). ``conversion`` says how its weights become one set in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.agent.checkpoints.layouts import FILE, OURS, TYPED, layouts_of
from trainer.agent.checkpoints.names import COPIES, KEPT, is_single, number_in

_ZERO = "_optim_states.pt"  # only DeepSpeed's ZeRO writes these
_METADATA = ".metadata"  # of torch.distributed.checkpoint
_MODEL_SHARDS = ("", "pytorch_model_fsdp_0/")  # where it is; a folder optimizer_0 has no weights
_SHOWN = 1000  # characters of a reason

# Runs with the run's Python. Arguments: the agent's folder, the plan.
OFFER = """\
import json, os, pathlib, sys
sys.path[:0] = [os.path.dirname(sys.argv[1]), sys.argv[1]]
try:
    from agent.checkpoints import selection
except ImportError:  # an agent of an earlier version
    from checkpoints import stock as selection
path = pathlib.Path(sys.argv[2]).absolute()
plan = json.loads(path.read_text(encoding="utf-8"))  # may be from another version
output = offer = None
if plan.get("resume"):
    output = path.parent / plan["resume"]["output"]
    offer = selection.offer(output, int(plan.get("first_rank") or 0), int(plan.get("processes") or 1))
print(json.dumps({"output": None if output is None else str(output.resolve()), "offer": offer}))
"""

# Arguments: the agent's folder, the number of ranks. Reads the offers by node rank from its input.
NEWEST = """\
import json, os, sys
sys.path[:0] = [os.path.dirname(sys.argv[1]), sys.argv[1]]
try:
    from agent.checkpoints import selection
except ImportError:  # an agent of an earlier version
    from checkpoints import stock as selection
offers = {int(rank): offer for rank, offer in json.load(sys.stdin).items()}
choice = selection.newest(offers, int(sys.argv[2]))
answer = {key: getattr(choice, key, None) for key in ("name", "step", "refused", "error")}
print(json.dumps(answer))
"""


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name; None if it has none, or counts epochs."""
    found = number_in(name)
    return None if found is None or found.epochs else found.value


@dataclass(frozen=True)
class Newest:
    """The newest complete checkpoint: its path below the output, and why newer ones are skipped.

    ``error`` says why none can be chosen, although there may be a complete one.
    """

    name: str | None = None
    step: int | None = None
    refused: tuple[tuple[str, str], ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Conversion:
    """How the weights of a checkpoint become one set in fp32.

    Attributes:
        how: ``zero`` (DeepSpeed's zero_to_fp32), ``dcp`` (torch.distributed.checkpoint), ``none`` (they are one set
            already), or ``impossible``.
        tag: for ``zero``: the checkpoint is the folder of a tag.
        folder: for ``dcp``: the folder below the checkpoint, "" for itself.
        why: for ``impossible``: the reason.
    """

    how: str
    tag: bool = False
    folder: str = ""
    why: str = ""


@dataclass(frozen=True)
class Sources:
    """The node from which each file of the output folder is collected, by node name."""

    files: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def inside(self, checkpoint: str) -> frozenset[str]:
        """The files of a checkpoint, by their names below it; of a single file, its own."""
        names = {name for each in self.files.values() for name in each}
        inside = {name.removeprefix(f"{checkpoint}/") for name in names if name.startswith(f"{checkpoint}/")}
        return frozenset(inside or names & {checkpoint})


def newest(answer: Mapping[str, Any], offered: Collection[str]) -> Newest:
    """Read the answer of ``NEWEST``. A name that no node offered is ignored."""
    listed = answer.get("refused")
    pairs = [each for each in listed if isinstance(each, list) and len(each) == 2] if isinstance(listed, list) else []
    refused = tuple((str(name)[:_SHOWN], str(why)[:_SHOWN]) for name, why in pairs)
    name, step = answer.get("name"), answer.get("step")
    error = answer.get("error")
    if not isinstance(name, str) or name not in offered:
        return Newest(refused=refused, error=error[:_SHOWN] if isinstance(error, str) else None)
    return Newest(name, step if isinstance(step, int) else None, refused)


def checkpoints(names: Iterable[str]) -> dict[str, str]:
    """The checkpoints among files below an output folder, whole or not: by path, the layout."""
    found: dict[str, str] = {}
    _search("", frozenset(names), found)
    return found


def _search(below: str, names: frozenset[str], found: dict[str, str]) -> None:
    """Add the checkpoints in a folder that is none itself; ``names`` are relative to it."""
    inside: dict[str, set[str]] = {}
    for name in names:
        top, slash, rest = name.partition("/")
        if slash:
            inside.setdefault(top, set()).add(rest)
        elif is_single(name):
            found[below + name] = FILE
    for top, below_it in inside.items():
        layouts = layouts_of(below + top, below_it)
        if layouts:
            found[below + top] = layouts[0]
        else:
            _search(f"{below}{top}/", frozenset(below_it), found)


def sources(
    names: Mapping[str, frozenset[str]], offers: Mapping[str, Mapping[str, Any]], checkpoint: str | None
) -> Sources:
    """Choose a node for every file.

    A checkpoint's file comes from the node that wrote it last and whole, any other file from the first node. Files of
    other checkpoints are skipped: of a library's layout all, of other layouts those with a step. So an exported model
    is collected. What a restart moved aside is skipped too, and so are copies of other nodes' files.

    Args:
        names: by node name, in the order of the ranks, its files below the output folder.
        offers: by node name, its agent's offer of checkpoints.
        checkpoint: the path of the checkpoint to collect.
    """
    best: dict[str, tuple[str, float]] = {}
    for node, offer in offers.items():
        for one in offer.get("checkpoints", ()):
            if one["name"] != checkpoint:
                continue
            for file, (_, mtime, _, torn) in one["files"].items():
                name = str(checkpoint) if one["single"] else f"{checkpoint}/{file}"
                if not torn and name in names.get(node, ()) and (name not in best or mtime > best[name][1]):
                    best[name] = (node, mtime)
    found = checkpoints(name for mine in names.values() for name in mine)
    others = {path for path, layout in found.items() if layout in TYPED or number_in(path) is not None}
    for node, mine in names.items():
        for name in mine:
            parts = name.split("/")
            above = {"/".join(parts[: count + 1]) for count in range(len(parts))}
            if name not in best and not above & others and not KEPT.match(parts[0]) and parts[0] != COPIES:
                best[name] = (node, 0.0)
    files: dict[str, set[str]] = {}
    for name, (node, _) in best.items():
        files.setdefault(node, set()).add(name)
    return Sources({node: frozenset(each) for node, each in files.items()})


def conversion(checkpoint: str, names: Collection[str]) -> Conversion:
    """How a checkpoint's weights become one set in fp32, by the names of its files."""
    files = {name for name in names if "/" not in name}
    if layouts_of(checkpoint, names)[:1] == [OURS]:
        return Conversion("impossible", why="every rank has a part of them; trainer.lm.export joins them")
    if any(name.endswith(_ZERO) for name in names):
        return Conversion("zero", tag=any(name.endswith(_ZERO) for name in files))
    for folder in _MODEL_SHARDS:
        if f"{folder}{_METADATA}" in names:
            return Conversion("dcp", folder=folder.rstrip("/"))
    if any("_rank0.bin" in name for name in names):
        return Conversion("impossible", why="every rank has saved its own part (FSDP's LOCAL_STATE_DICT)")
    return Conversion("none")
