"""Which nodes take part in a run: its members, its spares, and those that it continues without. Pure.

All agents of a run, by their positions in ``Link.nodes``, are its roster. The *members* have ranks. The *spares* only
wait. A node that is lost is *excluded* for the rest of the run: the first spare takes its rank, and without a spare the
ranks are renumbered if ``Plan.min_nodes`` allows it. All other nodes keep their ranks. A spare that has lost a GPU is
*unfit*: it takes no rank, but stays a spare, because it may hold copies of checkpoints.

Only a majority of the agents that are not excluded may decide, so that two parts of a divided network never continue
both. Exactly half of them may decide if the first one is among them.
"""

from __future__ import annotations

from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ..contract.offers import text
from ..contract.plan import Members, Plan
from ..contract.untrusted import is_whole

REASON = 2000  # characters


class Roster(NamedTuple):
    """The state of a run's roster.

    Attributes:
        names: of all nodes of the run, by position.
        members: the positions of the nodes that have ranks, in the order of these.
        excluded: by position, why the run continues without the node.
        unfit: by position, why a spare can take no rank.
    """

    names: Tuple[str, ...]
    members: Tuple[int, ...]
    excluded: Dict[int, str]
    unfit: Dict[int, str] = {}  # noqa: RUF012 - never changed

    @property
    def nodes(self) -> Tuple[str, ...]:
        """The names of the members, in the order of their ranks."""
        return tuple(self.names[position] for position in self.members)

    @property
    def left(self) -> List[int]:
        """The positions of the nodes that are not excluded."""
        return [position for position in range(len(self.names)) if position not in self.excluded]

    @property
    def spares(self) -> List[int]:
        """The positions of the spares."""
        return [position for position in self.left if position not in self.members]

    @property
    def ready(self) -> List[int]:
        """The positions of the spares that can take a rank."""
        return [position for position in self.spares if position not in self.unfit]

    def enough(self, here: Set[int]) -> bool:
        """Whether the agents at these positions may decide for all."""
        count = len(here & set(self.left))
        return 2 * count > len(self.left) or (2 * count == len(self.left) and self.left[0] in here)


class Change(NamedTuple):
    """What a meeting changes.

    Attributes:
        roster: the new roster.
        replaced: one for each member that was lost: ``node``, ``by`` (None: no node took its rank), ``rank``, ``why``.
        problem: why the run cannot continue, or None; ``node``: the lost node that it is about.
    """

    roster: Roster
    replaced: List[Dict[str, Any]]
    problem: Optional[str] = None
    node: str = ""


def first(plan: Plan) -> Roster:
    """The roster at the start of a run."""
    names = plan.link.nodes if plan.link is not None else (plan.node,)
    return Roster(names, tuple(range(plan.nnodes)) if plan.link is not None else (0,), {})


def survives(plan: Plan) -> bool:
    """Whether a run may continue after the loss of a node."""
    return plan.link is not None and bool(plan.link.others)


def change(
    roster: Roster,
    here: Collection[int],
    least: Optional[int],
    reasons: Optional[Mapping[int, str]] = None,
    condemned: Optional[Mapping[int, str]] = None,
    unfit: Optional[Mapping[int, str]] = None,
) -> Change:
    """Continue with the nodes that are here.

    Args:
        roster: the roster before.
        here: the positions of the agents in the meeting.
        least: ``Plan.min_nodes``.
        reasons: by position, why a node is lost, where that is known.
        condemned: by position, why a node should be replaced although it is here; only spares take their places.
        unfit: by position, why a spare can take no rank; those of ``roster`` stay unfit.
    """
    known = reasons or {}
    roster = roster._replace(unfit={**roster.unfit, **(unfit or {})})
    excluded = dict(roster.excluded)
    for position in roster.left:
        if position not in here:
            excluded[position] = known.get(position, "its agent exited or cannot be reached")
    spares = [position for position in roster.ready if position in here]
    free = len(spares) - len([position for position in roster.members if position in excluded])
    for position, reason in sorted((condemned or {}).items()):
        if free > 0 and position in roster.members and position not in excluded:
            excluded[position] = reason
            free -= 1
    members: List[int] = []
    replaced = []
    for rank, position in enumerate(roster.members):
        if position not in excluded:
            members.append(position)
            continue
        by = spares.pop(0) if spares else None
        members += [] if by is None else [by]
        why: Dict[str, Any] = {"node": roster.names[position], "rank": rank, "why": excluded[position]}
        replaced.append(dict(why, by=None if by is None else roster.names[by]))
    new = Roster(roster.names, tuple(members), excluded)
    new = new._replace(unfit={position: why for position, why in roster.unfit.items() if position in new.spares})
    without = [each["node"] for each in replaced if each["by"] is None]
    if without and len(members) < (len(roster.members) if least is None else least):
        few = "" if least is None else ", and the run needs at least %d nodes" % least
        idle = "".join("; %s takes no rank: %s" % (new.names[each], why) for each, why in sorted(new.unfit.items()))
        return Change(new, replaced, "no spare is left for %s%s%s" % (", ".join(without), few, idle), without[0])
    return Change(new, replaced)


def to_decision(roster: Roster, processes: Sequence[int]) -> Dict[str, Any]:
    """The roster as a part of the decision before an attempt."""
    about = {"excluded": _texts(roster.excluded), "unfit": _texts(roster.unfit)}
    return dict(about, members=list(roster.members), processes=list(processes))


def _texts(reasons: Mapping[int, str]) -> Dict[str, str]:
    return {str(position): why for position, why in reasons.items()}


def is_valid(decision: Dict[str, Any], count: int) -> bool:
    """Whether a decision has a valid roster of ``count`` nodes: the hub's node may be broken or lie."""
    members, processes = decision.get("members"), decision.get("processes")
    excluded: Any = decision.get("excluded")
    replaced, unfit = decision.get("replaced", []), decision.get("unfit", {})
    if not isinstance(members, list) or not isinstance(processes, list):
        return False
    if not _are_reasons(excluded, count) or not _are_reasons(unfit, count):
        return False
    return (
        0 < len(members) == len(processes) == len(set(map(str, members)))
        and all(is_whole(position, count) for position in members)
        and all(is_whole(each, 1 << 20, 1) for each in processes)
        and not any(str(position) in excluded for position in members)
        and isinstance(replaced, list)
        and all(map(_is_replacement, replaced))
    )


def _are_reasons(value: Any, count: int) -> bool:
    return isinstance(value, dict) and all(
        key.isdigit() and len(key) <= 7 and int(key) < count and text(why) for key, why in value.items()
    )


def _is_replacement(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(text(value.get(key)) for key in ("node", "why"))
        and is_whole(value.get("rank"))
        and (value.get("by") is None or text(value["by"]))
    )


def from_decision(roster: Roster, decision: Dict[str, Any]) -> Roster:
    """The roster of a valid decision."""
    excluded, unfit = (
        {int(key): str(why)[:REASON] for key, why in decision.get(name, {}).items()} for name in ("excluded", "unfit")
    )
    return Roster(roster.names, tuple(decision["members"]), excluded, unfit)


def members(roster: Roster, plan: Plan, processes: Sequence[int]) -> Members:
    """The nodes of an attempt, for ``Plan.for_attempt``."""
    master = plan.link.address(roster.members[0])[0] if plan.link is not None else None
    return Members(roster.nodes, tuple(processes), master)
