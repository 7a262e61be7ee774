"""Chooses which files of a run to collect, and from which node each. Pure: reads the agents' offers.

``trainer/agent/checkpoints/selection.py`` lists a node's checkpoints (``offer``) and finds the newest one that all
nodes together have whole (``newest``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ZERO = ("_optim_states.pt",)  # only DeepSpeed's ZeRO writes these
_CHECKPOINT = re.compile(r"(checkpoint-|iter_)\d+")  # the Trainer's, and checkpoints with a complete.json
_SHOWN = 1000  # characters of a reason
_DEEPSPEED = "_model_states.pt"  # in the folder of a DeepSpeed tag

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
print(json.dumps({"name": choice.name, "step": choice.step, "refused": choice.refused}))
"""


@dataclass(frozen=True)
class Newest:
    """The newest complete checkpoint: its folder's name below the output, and why newer ones are skipped."""

    name: str | None = None
    step: int | None = None
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Sources:
    """The node from which each file of the output folder is collected.

    Attributes:
        files: by node name, the files to collect from it.
        zero: the checkpoint has files of DeepSpeed's ZeRO.
        tag: the checkpoint has DeepSpeed's layout.
    """

    files: Mapping[str, frozenset[str]] = field(default_factory=dict)
    zero: bool = False
    tag: bool = False


def newest(answer: Mapping[str, Any], offered: Collection[str]) -> Newest:
    """Read the answer of ``NEWEST``. A name that no node offered is ignored."""
    listed = answer.get("refused")
    pairs = [each for each in listed if isinstance(each, list) and len(each) == 2] if isinstance(listed, list) else []
    refused = tuple((str(name)[:_SHOWN], str(why)[:_SHOWN]) for name, why in pairs)
    name, step = answer.get("name"), answer.get("step")
    if not isinstance(name, str) or name not in offered:
        return Newest(refused=refused)
    return Newest(name, step if isinstance(step, int) else None, refused)


def folders(names: Iterable[str]) -> set[str]:
    """The checkpoint folders among files below an output folder, whole or not."""
    return {top for top, inside in (name.split("/", 1) for name in names if "/" in name) if _is_one(top, inside)}


def _is_one(top: str, inside: str) -> bool:
    return bool(_CHECKPOINT.fullmatch(top)) or ("/" not in inside and inside.endswith(_DEEPSPEED))


def sources(
    names: Mapping[str, frozenset[str]], offers: Mapping[str, Mapping[str, Any]], checkpoint: str | None
) -> Sources:
    """Choose a node for every file.

    A checkpoint's file comes from the node that wrote it last and whole, any other file from the first node.

    Args:
        names: by node name, in the order of the ranks, its files below the output folder.
        offers: by node name, its agent's offer of checkpoints.
        checkpoint: the folder of the checkpoint to collect; files of other checkpoints are skipped.
    """
    best: dict[str, tuple[str, float]] = {}
    layout = ""
    for node, offer in offers.items():
        for one in offer.get("checkpoints", ()):
            if one["name"] != checkpoint:
                continue
            layout = layout or str(one.get("layout", ""))
            for file, (_, mtime, _, torn) in one["files"].items():
                name = f"{checkpoint}/{file}"
                if not torn and name in names.get(node, ()) and (name not in best or mtime > best[name][1]):
                    best[name] = (node, mtime)
    others = tuple(f"{name}/" for name in folders(name for mine in names.values() for name in mine))
    for node, mine in names.items():
        for name in mine:
            if name not in best and not name.startswith(others):
                best[name] = (node, 0.0)
    files: dict[str, set[str]] = {}
    for name, (node, _) in best.items():
        files.setdefault(node, set()).add(name)
    return Sources(
        {node: frozenset(each) for node, each in files.items()},
        zero=any(name.endswith(ZERO) for name in best),
        tag=layout == "deepspeed",
    )
