"""Copies the last checkpoint after the program has ended, in one more pair of meetings of all agents.

While the program runs, copies are slow on purpose (``pacing.py``), so that the last checkpoint may have none when the
program ends. Then nothing else needs the network, and the copies run at full speed. The wait is bounded: it ends after
``LAST_COPIES`` seconds, when an agent that takes part exits or is silent, and with another stop request. A thread
copies, so that neither a slow disk nor a lost node keeps the agent.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Set, Tuple

from ..contract import offers as checkpoint_offers
from ..contract.plan import LAST_COPIES as LIMIT
from ..contract.untrusted import is_whole
from ..link import CopyError, LinkError, Offers
from ..link.copies import lower_priority
from ..link.direct import Direct
from ..run_files import Events, NodePlan, State
from . import held
from .choices import files_to_copy, shared_by_all
from .copier import Copier, Files
from .jobs import addresses_of, files_of, generation_chosen, generation_of

if TYPE_CHECKING:
    from ..supervisor.control import Control

MEET = 30.0  # seconds in which all agents read their checkpoints and meet
SHOW = 10.0  # seconds between two notices of the progress
LOOK = 0.25  # seconds between looks for a reason to end
SLACK = 5.0  # seconds beyond the limit for the last meeting
AGAIN = 2  # stop requests that came here: the first one ended the program

# Meets with all agents: this one's offer, the decision of the hub, the seconds, whether to continue, which meeting.
Meet = Callable[[Dict[str, Any], Callable[[Offers], Dict[str, Any]], float, Callable[[], bool], int], Dict[str, Any]]


def decide(offers: Offers, members: Tuple[int, ...], world_size: int, count: int) -> Dict[str, Any]:
    """The hub's decision: the newest complete checkpoint, and the files that each holder copies. Empty: nothing.

    Args:
        offers: by position: the checkpoints of all agents, with the ranks that each has, and their addresses.
        members: the positions of the nodes with ranks.
        world_size: all ranks.
        count: how many copies.
    """
    from ..checkpoints import selection  # noqa: PLC0415 - only where there are checkpoints

    valid = {position: offer for position, offer in offers.items() if not checkpoint_offers.problem(offer)}
    own = {position: valid[position] for position in members if position in valid}
    choice = selection.newest(own, world_size)
    if choice.name is None or shared_by_all(own, choice.name):
        return {}
    generation = generation_chosen(choice, own)
    lists = files_to_copy(valid, generation, count, sorted(own))
    if not any(lists.values()):
        return {}
    addresses = {str(position): offer.get("address") for position, offer in valid.items()}
    return dict(generation._asdict(), lists={str(each): files for each, files in lists.items()}, addresses=addresses)


def join(offers: Offers) -> Dict[str, Any]:
    """The hub's decision after the copies: whether every holder has its files, and how many bytes were copied."""
    sizes = [offer.get("bytes") for offer in offers.values()]
    complete = all(offer.get("error") == "" for offer in offers.values())
    return {"complete": complete, "bytes": sum(size for size in sizes if is_whole(size))}


def over(control: "Control", before: Tuple[bool, int]) -> bool:
    """Whether the user ends the wait. ``before``: whether the run was being stopped, and ``Control.requests``.

    The request that stopped the program may come to this node late, after another agent has relayed it.
    """
    stopping, requests = before
    return control.requests >= max(AGAIN, requests + 1) if stopping else control.stop is not None


class Finishing:
    """The last copies of one node.

    Args:
        plan: the node's plan.
        position: of this node.
        members: the positions of the nodes with ranks.
        world_size: all ranks.
        count: how many copies.
        control: what ends the wait.
        events: gets the notices, and on rank 0's node the event ``copied``.
        state: shows the progress.
    """

    def __init__(
        self,
        plan: NodePlan,
        position: int,
        members: Tuple[int, ...],
        world_size: int,
        count: int,
        control: "Control",
        events: Events,
        state: State,
    ) -> None:
        self._plan, self._position, self._members = plan, position, members
        self._world_size, self._count = world_size, count
        self._control, self._events, self._state = control, events, state
        self._names: Tuple[str, ...] = tuple(control.all_nodes)
        self._before = (control.stop is not None, control.requests)
        self._involved: Set[str] = set()
        self._closed = threading.Event()
        self._bytes = 0

    def run(self, offer: Dict[str, Any], meet: Meet) -> None:
        """Copy what lacks a copy. ``offer`` has this node's checkpoints."""
        direct = Direct(self._control.link.copies, len(self._names))
        try:
            offer = dict(offer, address=direct.start())
            decision = meet(offer, self._decide, MEET, self._going, 0)
            if decision.get("lists"):
                self._copy(decision, meet)
        except (LinkError, CopyError) as error:
            self._notice("the last checkpoint may lack a copy: %s" % error, "warning")
        finally:
            self._closed.set()
            direct.close()
            self._state.set(copying=None)

    def _decide(self, offers: Offers) -> Dict[str, Any]:
        return decide(offers, self._members, self._world_size, self._count)

    def _going(self) -> bool:
        control = self._control
        control.take()
        return not (control.broken or over(control, self._before) or self._involved & control.missing)

    def _notice(self, text: str, level: str = "info") -> None:
        self._events.emit("notice", kind="copies", level=level, text=text)

    def _copy(self, decision: Dict[str, Any], meet: Meet) -> None:
        """Copy this node's files, and wait for the other holders.

        Raises:
            LinkError, CopyError: not all nodes could finish.
        """
        began = time.monotonic()
        generation = generation_of(decision)
        lists = decision["lists"] if isinstance(decision["lists"], dict) else {}
        jobs = {each: files_of(lists.get(str(each), [])) for each in range(len(self._names))}
        busy = {each for each, files in jobs.items() if files}
        sources = {rank for files in jobs.values() for _, _, rank in files.values()}
        self._involved = {self._names[each] for each in busy | sources if each < len(self._names)}
        self._control.link.copies.addresses = addresses_of(decision.get("addresses"), sources, self._position)
        if self._position == self._members[0]:
            text = "copying %s to other nodes before the run ends, for at most %d s; another stop ends it"
            self._notice(text % (generation.name, LIMIT))
        answer = {"error": "", "bytes": 0}
        if jobs.get(self._position):
            answer = self._fetch(generation, jobs[self._position], began)
        patience = max(0.0, began + LIMIT - time.monotonic()) + SLACK
        result = meet(answer, join, patience, self._going, 1)
        if self._position != self._members[0]:
            return
        if result.get("complete") is not True:
            raise CopyError("%s was not copied completely" % generation.name)
        copied = {
            "checkpoint": generation.name,
            "step": generation.step,
            "seconds": round(time.monotonic() - began, 3),
            "bytes": result["bytes"] if is_whole(result.get("bytes")) else 0,
            "on": [self._names[each] for each in jobs if str(each) in lists],
        }
        self._state.set(copied=copied)
        self._events.emit("copied", **copied)

    def _fetch(self, generation: Any, files: Files, began: float) -> Dict[str, Any]:
        """Copy in a thread, and show the progress. Returns this node's answer."""
        errors: List[str] = []
        total = max(1, sum(size for size, _, _ in files.values()))
        newest = held.read(self._plan.output)[:1] if self._plan.output is not None else []
        kept = next((copy.folder for copy in newest), None)

        def on_bytes(count: int) -> None:
            self._bytes += count

        def work() -> None:
            lower_priority()
            try:
                Copier(self._plan, self._control.link, self._closed, on_bytes=on_bytes).copy(generation, files, kept)
            except Exception as error:  # noqa: BLE001 - the run must end
                errors.append(str(error) or type(error).__name__)
            finally:
                self._control.nudge()

        thread = threading.Thread(target=work, name="last copies", daemon=True)
        thread.start()
        shown = began
        while thread.is_alive() and self._going() and time.monotonic() < began + LIMIT:
            percent = min(100, 100 * self._bytes // total)
            text = "copying %s to %s: %d %%" % (generation.name, self._plan.node, percent)
            self._state.note(copying=text)
            self._state.refresh(time.monotonic())
            if time.monotonic() - shown >= SHOW:
                shown = time.monotonic()
                self._notice(text)
            self._control.wait(LOOK)
        if thread.is_alive():
            why = "it took more than %d s" % LIMIT if self._going() else "the wait was ended"
            errors.append(why)
        if errors:
            folder = held.folder_of(generation)
            text = "%s is not copied to this node: %s. What is in %s is used when the run resumes"
            self._notice(text % (generation.name, errors[0], folder), "warning")
        return {"error": errors[0][:1000] if errors else "", "bytes": self._bytes}
