"""Handles copies that turn out to be damaged when a checkpoint is put together from them.

A node that receives a damaged copy names it in the next meeting. The node that has it compares it with its digest
again and removes it. Then rank 0 decides again: for another copy, or an older checkpoint. It also decides again when a
node from which files were copied is lost.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from ..contract.offers import file_name
from ..contract.untrusted import is_whole
from ..link import LinkError
from ..run_files import Events, NodePlan
from .held import drop_damaged

SHOWN = 3  # names in a notice
REASON = 2000  # characters


def join(offers: Dict[int, Dict[str, Any]]) -> Dict[str, Any]:
    """Rank 0's answer: the damaged copies that any node received, as (rank that has it, path).

    With ``failed``: the first node that could not prepare the checkpoint, and why. With ``again``: whether rank 0 must
    decide again, because a node from which files were copied is lost.
    """
    found = {tuple(each) for offer in offers.values() for each in _listed(offer)}
    problems = [
        (rank, str(offer["problem"])[:REASON]) for rank, offer in sorted(offers.items()) if offer.get("problem")
    ]
    again = any(offer.get("again") is True for offer in offers.values())
    return dict({"damaged": sorted(found), "again": again}, **({"failed": problems[0]} if problems else {}))


def failed(decision: Dict[str, Any], count: int) -> Optional[Tuple[int, str]]:
    """The node of ``count`` that could not prepare the checkpoint, and why; None: all could.

    Raises:
        LinkError: the answer is invalid.
    """
    found = decision.get("failed")
    if found is None:
        return None
    if not (isinstance(found, (list, tuple)) and len(found) == 2 and is_whole(found[0]) and isinstance(found[1], str)):
        raise LinkError("an agent sent an invalid failure")
    if found[0] >= count:
        raise LinkError("an agent sent the failure of a node that does not exist")
    return found[0], found[1][:REASON]


def check(decision: Dict[str, Any]) -> List[Tuple[int, str]]:
    """Validate rank 0's answer, on every rank."""
    return [(rank, source) for rank, source in _listed(decision)]


def _listed(value: Dict[str, Any]) -> List[Any]:
    listed = value.get("damaged", [])
    if not isinstance(listed, list) or not all(
        isinstance(each, (list, tuple)) and len(each) == 2 and is_whole(each[0]) and file_name(each[1])
        for each in listed
    ):
        raise LinkError("an agent sent an invalid list of damaged copies")
    return listed


def drop(plan: NodePlan, damaged: List[Tuple[int, str]], events: Events) -> bool:
    """Remove this node's damaged copies. True: there are none on any node.

    Raises:
        LinkError: another node received a damaged copy from here, but it is not damaged here.
    """
    mine = [source for rank, source in damaged if rank == plan.rank]
    for source in mine:
        if plan.output is None or not drop_damaged(plan.output, source):
            raise LinkError("%s was damaged on its way from %s; resume again" % (source, plan.node))
    if mine:
        more = ", …" if len(mine) > SHOWN else ""
        text = "a copy is damaged and was removed; another copy or an older checkpoint is used: %s%s"
        events.emit("notice", text=text % (", ".join(mine[:SHOWN]), more))
    return not damaged
