"""What the agents offer one another before and after an attempt, and what rank 0 decides from it."""

from __future__ import annotations

from typing import Any, Dict, Optional

from checkpoints import stock
from life.verdict import STOPPED, judge
from node.probe import free_port
from plan import Plan

Offers = Dict[int, Dict[str, Any]]


def _checkpoints(plan: Plan) -> Dict[str, Any]:
    """This node's checkpoints, as ``stock.newest`` takes them."""
    if plan.output is None:
        return {}
    first = int(plan.given.get("first_rank") or 0)
    return stock.offer(plan.output, first, int(plan.given.get("processes") or 1))


def offer_start(plan: Plan, resume: bool) -> Dict[str, Any]:
    """What a node brings to the meeting before an attempt; ``resume``: a checkpoint is asked for."""
    found = _checkpoints(plan) if resume else {}
    return dict(found, processes=int(plan.given.get("processes") or 1))


def decide_start(plan: Plan, offers: Offers, number: int, resume: bool) -> Dict[str, Any]:
    """Rank 0's decision before attempt ``number``.

    ``checkpoint`` (a name, or null), ``port``, ``world_size``, ``copy`` (what each rank lacks of the checkpoint),
    ``refused`` (newer checkpoints that are not used, each with the reason), and ``error`` of ``node`` when the attempt
    cannot begin.
    """
    world_size = sum(offer["processes"] for offer in offers.values())
    decision: Dict[str, Any] = {"checkpoint": None, "port": plan.given.get("port"), "world_size": world_size}
    if number > 1 and decision["port"] is not None:
        # The last attempt's may be held for a while by what was just ended.
        host = (plan.given.get("link") or {}).get("host") or plan.given["env"].get("MASTER_ADDR") or "127.0.0.1"
        decision["port"] = free_port(host) or decision["port"]
    if not resume or plan.output is None:
        return decision
    choice = stock.newest(offers, world_size)
    refused = ["%s: %s" % each for each in choice.refused]
    if choice.name is not None:
        return dict(decision, checkpoint=choice.name, copy=choice.copy, refused=refused)
    if number == 1 and plan.given.get("checkpoint") != "none-ok":
        why = "; ".join(refused) or "there is none"
        text = "no complete checkpoint in %s to resume from: %s" % (plan.output, why)
        return dict(decision, error=text, node=plan.node)
    return dict(decision, refused=refused)


def offer_end(plan: Plan, outcome: Dict[str, Any]) -> Dict[str, Any]:
    """What a node brings to the meeting after an attempt: how it went here and, after a stop, its checkpoints."""
    found = _checkpoints(plan) if outcome["stopped"] else {}
    processes = int(plan.given.get("processes") or 1)
    return dict(found, outcome=outcome, before=outcome.get("before"), processes=processes)


def decide_end(offers: Offers, first: Optional[Dict[str, Any]], *, more: bool) -> Dict[str, Any]:
    """Rank 0's verdict after an attempt, see ``verdict.judge``; ``saved``: the step that a stop has kept, or null."""
    verdict = judge({rank: offer["outcome"] for rank, offer in offers.items()}, first, more=more)
    return dict(verdict, saved=kept(offers) if verdict["state"] == STOPPED else None)


def kept(offers: Offers) -> Optional[int]:
    """The step of the newest complete checkpoint, if it was written after the stop was asked for; else None."""
    world_size = sum(offer["processes"] for offer in offers.values())
    before = {rank: offer["before"] for rank, offer in offers.items() if offer.get("before") is not None}
    if not before:
        return None
    step = stock.newest(offers, world_size).step
    earlier = stock.newest(before, world_size).step
    return step if step is not None and (earlier is None or step > earlier) else None


def before_saving(plan: Plan) -> Dict[str, Any]:
    """The checkpoints that are there when a stop is to save."""
    return _checkpoints(plan)
