"""What the agents exchange before and after an attempt, and what the hub decides from it.

Each agent sends an offer. The hub chooses the nodes, the port and the checkpoint before an attempt, and the outcome of
the whole attempt (``judge``) after it. Offers and outcomes are by the position of the node in ``Link.nodes``.

A node's part (``outcome``) is ``{"rc", "signal", "stopped", "failed", "killed", "left", "step"}``:

- ``rc`` and ``signal``: how its command exited
- ``stopped``: a stop was requested before the command exited
- ``failed``: the first failure that the node knows, ``{"node", "rank", "text", "signal", "time"}``
- ``killed``: the first rank that was killed there before the agents ended anything, without ``signal``
- ``left``: processes that could not be ended
- ``step``: the last step that it has seen
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..contract import offers as checkpoint_offers
from ..contract.offers import digest, file_name, text
from ..contract.untrusted import is_whole
from ..link import LinkError, Offers
from ..run_files import NodePlan
from . import roster as rosters
from .roster import Roster

Outcomes = Dict[int, Dict[str, Any]]

# The signals of a rank that was killed from outside, by the kernel because memory was full, or by its own memory error.
KILLS = ("SIGKILL", "SIGSEGV", "SIGBUS")
# The signal by which NCCL's watchdog ends a rank that lost another rank. It is often seen first: a killed process exits
# only when the kernel has freed its GPU's memory.
ECHO = "SIGABRT"

FINISHED, FAILED, STOPPED, AGAIN = STATES = ("finished", "failed", "stopped", "again")


def judge(outcomes: Outcomes, first: Optional[Dict[str, Any]], *, more: bool) -> Dict[str, Any]:
    """Decide ``state`` (finished, failed, stopped or again), ``why`` and ``step``.

    Args:
        outcomes: of the nodes that took part.
        first: the first failure that the hub received; the nodes' own reports count only without one.
        more: whether another attempt is allowed.
    """
    step = max((outcome["step"] for outcome in outcomes.values() if outcome.get("step") is not None), default=None)
    why = first or earliest([outcome["failed"] for outcome in outcomes.values() if outcome.get("failed")])
    if why is not None and why.get("signal") == ECHO:
        why = earliest([outcome["killed"] for outcome in outcomes.values() if outcome.get("killed")]) or why
    if any(outcome["stopped"] for outcome in outcomes.values()):
        return {"state": STOPPED, "why": None, "step": step}
    if why is None and all(outcome["rc"] == 0 for outcome in outcomes.values()):
        return {"state": FINISHED, "why": None, "step": step}
    stuck = any(outcome["left"] for outcome in outcomes.values())
    return {"state": AGAIN if more and not stuck else FAILED, "why": why, "step": step}


def earliest(failures: List[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """The failure with the lowest time. The nodes' clocks may differ, but there is no better order."""
    return min(failures, key=lambda failure: float(failure.get("time") or 0.0), default=None)


UNKNOWN = (
    "%s has checkpoints, and how the program resumes from one is not known, so it might write over them. Name its "
    "option: clusterctl resume %s --resume-arg '--resume {checkpoint}'; or --resume-arg '' if it finds its newest one"
)
MOST = 1 << 20  # processes of a run


def own_checkpoints(plan: NodePlan) -> Dict[str, Any]:
    """This node's checkpoints and copies, as ``selection.newest`` takes them."""
    if plan.output is None:
        return {}
    from ..checkpoints import selection  # noqa: PLC0415 - a run that does not resume needs no checkpoints

    found = selection.offer(plan.output, plan.data.first_rank, plan.data.processes)
    if plan.data.copies is None or plan.data.link is None:
        return found
    from ..keeping import held  # noqa: PLC0415

    return dict(found, copies=held.offers(plan.output))


def offer_start(plan: NodePlan, number: int, resume: bool) -> Dict[str, Any]:
    """This node's offer for the meeting before attempt ``number``; ``resume``: with its checkpoints."""
    found = own_checkpoints(plan) if resume else {}
    offer = dict(found, processes=plan.data.processes)
    may_be_first = plan.rank == 0 or rosters.survives(plan.data)
    if plan.data.port is not None and may_be_first and (number > 1 or plan.rank):
        from ..probe import free_port  # noqa: PLC0415 - most nodes never offer one

        # For the node that gets rank 0. Processes that were just ended may hold the last attempt's port for a while.
        offer["port"] = free_port(plan.host or plan.data.env.get("MASTER_ADDR") or "127.0.0.1")
    return offer


def decide_start(
    plan: NodePlan,
    offers: Offers,
    number: int,
    resume: bool,
    roster: Optional[Roster] = None,
    reasons: Optional[Dict[int, str]] = None,
    condemned: Optional[Dict[int, str]] = None,
) -> Dict[str, Any]:
    """The hub's decision before attempt ``number``.

    It has ``checkpoint`` (a path below the output folder, or null), its ``step``, ``port``, ``world_size``, ``copy``
    (the files of the checkpoint that each node lacks), ``refused`` (newer checkpoints that are not used, with reasons)
    and ``aside`` (the checkpoints that the nodes move, see ``selection.Aside``). ``members``, ``processes`` (of each),
    ``excluded``, ``unfit`` and ``replaced`` are the nodes, see ``roster.py``. When the attempt cannot start, it has
    ``error`` and the ``node``.

    Args:
        plan: this node's plan.
        offers: of all nodes, spares included.
        number: of the attempt.
        resume: whether the offers have checkpoints.
        roster: the nodes before; None: those at the start of the run.
        reasons: why nodes are lost, where that is known.
        condemned: why nodes should be replaced although they are here.
    """
    _check(plan, offers)
    before = roster or rosters.first(plan.data)
    condemned = {**_reasons(offers, "condemned"), **(condemned or {})}
    unfit = _reasons(offers, "unfit")
    changed = rosters.change(before, set(offers), plan.data.min_nodes, reasons, condemned, unfit)
    if changed.problem is not None:
        return {"error": changed.problem, "node": changed.node}
    members = changed.roster.members
    # The files of a condemned node count as lost: its agent leaves the run now.
    offers = {position: offer for position, offer in offers.items() if position not in changed.roster.excluded}
    processes = [offers[position]["processes"] for position in members]
    world_size = sum(processes)
    port = offers[members[0]].get("port") or plan.data.port
    decision: Dict[str, Any] = {"checkpoint": None, "port": port, "world_size": world_size}
    decision.update(rosters.to_decision(changed.roster, processes), replaced=changed.replaced)
    if not resume or plan.output is None:
        return decision
    from ..checkpoints import selection  # noqa: PLC0415

    choice = selection.newest(_with_ranks(offers, members, processes), world_size)
    refused = ["%s: %s" % each for each in choice.refused]
    if choice.error is not None:
        return dict(decision, error="%s: %s" % (plan.output, choice.error), node=plan.node)
    if plan.data.resume is not None and not plan.data.resume.known and (choice.name or choice.refused):
        return dict(decision, error=UNKNOWN % (plan.output, plan.run), node=plan.node)
    aside = choice.aside and choice.aside._asdict()
    if choice.name is not None:
        copy = {position: files for position, files in choice.copy.items() if position in members}
        found = {"checkpoint": choice.name, "step": choice.step, "copy": copy}
        return dict(decision, refused=refused, aside=aside, **found)
    if len(members) < len(before.members) and refused:
        text = "the run cannot continue on %d nodes: %s" % (len(members), "; ".join(refused))
        return dict(decision, error=text, node=plan.node)
    if number == 1 and not plan.data.none_ok:
        why = "; ".join(refused) or "there are no checkpoints"
        text = "no complete checkpoint in %s to resume from: %s" % (plan.output, why)
        return dict(decision, error=text, node=plan.node)
    return dict(decision, refused=refused, aside=aside)


def _with_ranks(offers: Offers, members: Sequence[int], processes: Sequence[int]) -> Offers:
    """The offers with the ranks that each node gets; spares get none."""
    ranks = {position: [0, 0] for position in offers}
    ranks.update({each: [sum(processes[:rank]), processes[rank]] for rank, each in enumerate(members)})
    return {position: dict(offer, ranks=ranks[position]) for position, offer in offers.items()}


def _reasons(offers: Offers, key: str) -> Dict[int, str]:
    """Why nodes should be replaced (``condemned``), or take no rank (``unfit``), as their own agents say."""
    return {position: str(offer[key]) for position, offer in offers.items() if offer.get(key)}


def offer_end(plan: NodePlan, outcome: Dict[str, Any]) -> Dict[str, Any]:
    """This node's offer for the meeting after an attempt: its outcome and, after a stop, its checkpoints."""
    found = own_checkpoints(plan) if outcome["stopped"] else {}
    about = {"before": outcome.get("before"), "condemned": outcome.get("condemned")}
    return dict(found, outcome=outcome, processes=plan.data.processes, **about)


def decide_end(
    plan: NodePlan,
    offers: Offers,
    first: Optional[Dict[str, Any]],
    *,
    more: bool,
    roster: Optional[Roster] = None,
) -> Dict[str, Any]:
    """The hub's verdict after an attempt (see ``judge``).

    ``saved`` is the step that a stop saved, or null. With ``replaces`` the next attempt replaces a lost or condemned
    node, or does without it: it is no restart.
    """
    _check(plan, offers)
    before = roster or rosters.first(plan.data)
    taking = {position: offer for position, offer in offers.items() if position in before.members}
    for position, offer in taking.items():
        if not _outcome(offer.get("outcome")) or checkpoint_offers.problem(offer.get("before") or {}):
            raise LinkError("%s did not report how the attempt ended there" % _name(plan, position))
    changed = rosters.change(before, set(offers), plan.data.min_nodes, condemned=_reasons(taking, "condemned"))
    why = first
    if changed.replaced and first is None:
        why = {"node": changed.replaced[0]["node"], "rank": None, "text": changed.replaced[0]["why"]}
    outcomes = {position: offer["outcome"] for position, offer in taking.items()}
    for position in set(outcomes) & set(changed.roster.excluded):
        outcomes[position] = dict(outcomes[position], left=[])  # a process that waits for a lost GPU may never end
    condemned = first is not None and first.get("condemned") is True
    verdict = judge(outcomes, why, more=more or bool(changed.replaced) or condemned)
    if changed.replaced and all(outcome["rc"] == 0 for outcome in outcomes.values()) and first is None and outcomes:
        verdict = judge(outcomes, None, more=more)  # the work is done: a lost node changes nothing
    replaces = verdict["state"] == AGAIN and (bool(changed.replaced) or condemned)
    if replaces and changed.problem is not None:
        text = "%s; %s" % ((verdict["why"] or {}).get("text", "it is lost"), changed.problem)
        verdict = dict(
            verdict, state=FAILED, why=dict(verdict["why"] or {"node": changed.node, "rank": None}, text=text)
        )
        replaces = False
    saved = saved_step(taking, verdict["step"]) if verdict["state"] == STOPPED else None
    return dict(verdict, saved=saved, replaces=replaces)


def saved_step(offers: Offers, last: Optional[int] = None) -> Optional[int]:
    """The step of the newest complete checkpoint, if it was written after the stop request; else None.

    ``last`` is the last step of the run: that of a checkpoint without a number.
    """
    world_size = sum(offer["processes"] for offer in offers.values())
    before = {rank: offer["before"] for rank, offer in offers.items() if offer.get("before") is not None}
    if not before:
        return None
    from ..checkpoints import selection  # noqa: PLC0415

    now, earlier = selection.newest(offers, world_size), selection.newest(before, world_size)
    if now.name is None or (now.name == earlier.name and now.time <= earlier.time):
        return None
    if now.step is None:
        return last
    return now.step if earlier.step is None or now.step > earlier.step else None


def _name(plan: NodePlan, position: int) -> str:
    nodes = plan.data.link.nodes if plan.data.link else ()
    return str(nodes[position]) if position < len(nodes) else plan.node


def _check(plan: NodePlan, offers: Offers) -> None:
    """Refuse invalid offers: a node may be broken or lie.

    Raises:
        LinkError: an offer is invalid; the text names the node.
    """
    for rank, offer in offers.items():
        wrong = checkpoint_offers.problem(offer)
        if not wrong and not is_whole(offer.get("processes"), MOST, 1):
            wrong = "has no valid number of processes"
        if not wrong and not _port(offer.get("port")):
            wrong = "has an invalid port"
        if not wrong and not (offer.get("condemned") is None or text(offer["condemned"])):
            wrong = "has an invalid reason to replace the node"
        if not wrong and not (offer.get("unfit") is None or text(offer["unfit"])):
            wrong = "has an invalid reason to give the node no rank"
        if wrong:
            raise LinkError("the offer of %s %s; see its agent.log" % (_name(plan, rank), wrong))


def _port(value: Any) -> bool:
    return value is None or is_whole(value, 1 << 16, 1)


def _outcome(value: Any) -> bool:
    """Whether a node's outcome is valid."""
    if not isinstance(value, dict) or not isinstance(value.get("stopped"), bool):
        return False
    left = value.get("left")
    return (
        all(value.get(key) is None or is_whole(value[key]) for key in ("rc", "step"))
        and (value.get("signal") is None or text(value["signal"]))
        and isinstance(left, list)
        and all(map(is_whole, left))
        and all(_why(value.get(key)) for key in ("failed", "killed"))
    )


def _why(value: Any) -> bool:
    """Whether a failure is valid or None."""
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and isinstance(value.get("node"), str)
        and isinstance(value.get("text"), str)
        and (value.get("rank") is None or is_whole(value["rank"]))
        and (value.get("signal") is None or text(value["signal"]))
        and isinstance(value.get("time", 0.0), (int, float))
    )


def _hub(plan: NodePlan, hub: int) -> Tuple[str, str]:
    return _name(plan, hub), "rank 0" if hub == 0 else "the hub"


def check_start(plan: NodePlan, decision: Dict[str, Any], hub: int = 0) -> Dict[str, Any]:
    """Validate the hub's decision before an attempt, on every node: the hub's may be broken or lie too.

    Raises:
        LinkError: it is invalid.
    """
    if isinstance(decision.get("error"), str) and isinstance(decision.get("node"), str):
        return decision
    if decision.get("skip") is True:
        return {"skip": True}
    name, port, copies = decision.get("checkpoint"), decision.get("port"), decision.get("copy") or {}
    wrong = (
        not (name is None or file_name(name))
        or not (decision.get("step") is None or is_whole(decision["step"]))
        or not _port(port)
        or not rosters.is_valid(decision, len(plan.data.link.nodes) if plan.data.link else 1)
        or not is_whole(decision.get("world_size"), MOST)
        or not isinstance(copies, dict)
        or not all(isinstance(each, list) and all(map(_copy, each)) for each in copies.values())
        or not isinstance(decision.get("refused", []), list)
        or not _aside(decision.get("aside"))
    )
    if wrong:
        raise LinkError("%s (%s) sent an invalid decision" % _hub(plan, hub))
    return decision


def _copy(value: Any) -> bool:
    if not isinstance(value, list) or len(value) not in (3, 5) or not file_name(value[0]):
        return False
    return all(map(is_whole, value[1:3])) and (len(value) == 3 or (file_name(value[3]) and digest(value[4])))


def _aside(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or not is_whole(value.get("number")):
        return False
    names, pointers = value.get("names"), value.get("pointers")
    return (
        isinstance(names, list)
        and all(map(file_name, names))
        and isinstance(pointers, dict)
        and all(file_name(name) and text(tag) for name, tag in pointers.items())
    )


def check_end(plan: NodePlan, decision: Dict[str, Any], hub: int = 0) -> Dict[str, Any]:
    """Validate the hub's verdict, on every node.

    Raises:
        LinkError: it is invalid.
    """
    if decision.get("skip") is True:
        return {"state": AGAIN, "why": None, "step": None, "saved": None, "replaces": True}
    steps = (decision.get("step"), decision.get("saved"))
    if (
        decision.get("state") not in STATES
        or not all(step is None or is_whole(step) for step in steps)
        or not _why(decision.get("why"))
    ):
        raise LinkError("%s (%s) sent an invalid verdict" % _hub(plan, hub))
    return decision


def describe_reason(why: Optional[Dict[str, Any]]) -> str:
    """Describe a reason."""
    if why is None:
        return "the cause is unknown"
    return "%s: %s" % (why["node"], why["text"])


def describe_outcome(outcome: Dict[str, Any]) -> str:
    """Describe how a node's command ended."""
    if outcome["stopped"]:
        return "it stopped"
    if outcome["signal"]:
        return "its command was killed by %s" % outcome["signal"]
    return "its command exited with code %s" % outcome["rc"]
