"""``clusterctl rehearse``: runs a job for a few minutes, injects faults, and reports what it survived.

``rehearse`` lists the stages in their order: look for other people, start the job in a folder of its own, inject one
fault after the other, and remove everything. ``provision/rehearsal/`` decides; this module acts.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, InterruptedByUser, PreflightError, RunFailedError
from provision.inventory import fold
from provision.masking import mask_words
from provision.model import Node, Notice
from provision.rehearsal.certificate import HTML, JSON, Certificate, page, to_object
from provision.rehearsal.faults import (
    CONTROLLER,
    SKIPPED,
    WATCHDOG,
    Fault,
    Place,
    inject_script,
    lasting,
    undo_script,
    watchdog_script,
)
from provision.rehearsal.judging import Injected, Result, failed, highest, judge, others
from provision.rehearsal.redirect import own_output
from provision.render import quote, render
from provision.run import record
from provision.run.history import Wanted
from provision.run.record import TrainResult
from provision.run.spec import choose_nodes
from provision.ssh.remote import RootRefused
from provision.tasks import resume as resuming
from provision.tasks import train as training
from provision.tasks.history import prune
from provision.tasks.rehearse_events import Events
from provision.tasks.runs import find_all, problems, run_folder, stop_on, stop_script
from provision.tasks.start import Following

if TYPE_CHECKING:
    from provision.session import Session
    from provision.stages import Stage

RESTARTS = 50  # of one attempt after the other, so that the run never ends because of their number
LOOK = 0.5  # seconds between two judgements
_DEADLINE = 30.0
_REMOVE_DEADLINE = 600.0
_MARGIN = 60.0  # seconds for a recovery, besides the fault and three starts of the job
_ABANDONED = 900.0  # seconds after its time until the node itself ends a rehearsal whose command was killed
_AGAIN = 2.0  # seconds until a node that does not answer is asked again
_CHECKPOINT_LOOK = 3.0
_SHARE = 0.25  # of the time, for which the rehearsal waits for a checkpoint
_SAFE = re.compile(r"[A-Za-z0-9._=/-]{1,200}")


@dataclass(frozen=True)
class Rehearsal:
    """The rehearsal that the user asked for.

    Attributes:
        training: the job and how it is trained; its policy for lost nodes and hangs holds.
        faults: the faults, in their order.
        seconds: after this time no fault is injected any more.
        force: rehearse beside other people's processes, without the faults that they would notice.
    """

    training: training.Training
    faults: tuple[Fault, ...]
    seconds: float = 900.0
    force: bool = False


def rehearse(session: Session, asked: Rehearsal) -> Certificate:
    """Rehearse, remove the run and its output, and write the certificate beside the inventory.

    Raises:
        UsageError: the job cannot be used, or its output folder cannot be replaced.
        PreflightError: other people use the nodes, or the gate refuses nodes; nothing was started.
        RunFailedError: the job failed, or reported no step, before any fault.
        InterruptedByUser: Ctrl-C; everything was undone and removed.
    """
    began, started = record.now(), time.monotonic()
    nodes = choose_nodes(asked.training.job, session.nodes)
    busy = refuse_others(session, nodes, force=asked.force)
    own, output = own_training(session, asked)
    try:
        result = training.train(session, own)
    except BaseException:
        remove_output(session, nodes, output)
        raise
    session.disconnect()  # also ends the streams by which it followed the start
    members = tuple(next(node for node in nodes if node.name == name) for name in result.nodes)
    stage = Rehearsing(session, asked, members, result, output, bool(busy))
    results: tuple[Result, ...] = ()
    interrupted = False
    try:
        results = stage.all()
    except (KeyboardInterrupt, InterruptedByUser):
        interrupted = True
    except RunFailedError:
        stage.remove(keep=True)
        raise
    except BaseException:
        stage.remove()
        raise
    left = stage.remove()
    if interrupted:
        text = "the rehearsal was interrupted; its faults are undone, and its run is removed"
        if left:
            text = "the rehearsal was interrupted: " + "; ".join(f"{name}: {why}" for name, why in left.items())
        raise InterruptedByUser(text, hint=f"clusterctl stop {result.run}" if left else session.again())
    certificate = Certificate(
        run=result.run,
        job=" ".join(mask_words(asked.training.words)),
        nodes=result.nodes,
        world_size=result.world_size,
        began=began,
        seconds=round(time.monotonic() - started, 1),
        start=stage.start,
        results=results,
        left=tuple(left.items()),
    )
    write(session.inventory.path, certificate)
    return certificate


def write(inventory: Path, certificate: Certificate) -> Path:
    """Write the certificate into this machine's folder of the run. Returns the page's path."""
    folder = record.folder_of(inventory, certificate.run)
    record.make_private(folder)
    (folder / JSON).write_text(json.dumps(to_object(certificate), indent=2) + "\n", encoding="utf-8")
    (folder / HTML).write_text(page(certificate), encoding="utf-8")
    return folder / HTML


def refuse_others(session: Session, nodes: Sequence[Node], *, force: bool) -> Mapping[str, str]:
    """Other people's processes by node; without ``force`` they are an error.

    The gate of the run refuses other users of the GPUs.

    Raises:
        PreflightError: other people's processes compute there, or a run is running.
        NodesFailedError: nodes do not answer.
    """
    found = session.ask(
        "others",
        "Looking for other people's processes",
        render("rehearse/others.sh.j2"),
        lambda _node, out: others(out, _own(out)),
        on=nodes,
        deadline=_DEADLINE,
    ).required(nothing="nothing was started")
    busy = {name: "; ".join(texts[:3]) for name, texts in found.items() if texts}
    for run in find_all(session, on=nodes).runs.values():
        for part in run.parts:
            if part.live:
                busy[part.node] = "; ".join(filter(None, (busy.get(part.node), f"run {run.id} of {run.owner}")))
    if busy and not force:
        raise PreflightError(
            f"{fold(busy)}: in use, so no fault was injected and nothing was started",
            reasons=busy,
            hint=f"{session.again(exclude=fold(busy))}; or, without the faults that others would notice: "
            + session.again("--force"),
        )
    for name, text in busy.items():
        session.warn(f"{name} is in use: {text}")
    return busy


def _own(out: str) -> int:
    match = re.search(r"^own ([0-9]{1,10})$", out, re.MULTILINE)
    return int(match[1]) if match else 0


def own_training(session: Session, asked: Rehearsal) -> tuple[training.Training, str | None]:
    """The training of a rehearsal, and its own output folder; None if that is in the run's folder.

    Raises:
        UsageError: the job cannot be used, or its output folder cannot be replaced.
    """
    wanted = asked.training
    any_key = training.takes_any_key(session.inventory, wanted)
    files = training.pack_files(wanted.job, wanted.zero, any_key=any_key)
    own = own_output(wanted.job, files.output, secrets.token_hex(4))
    name = f"rehearsal-{wanted.name or Path(wanted.job.target).stem}"
    return (
        replace(
            wanted,
            job=own.job,
            name=re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:40],
            policy=replace(wanted.policy, restarts=RESTARTS),
            following=Following(detach=True),
            notify="",
        ),
        own.output,
    )


def remove_output(session: Session, nodes: Sequence[Node], output: str | None) -> Mapping[str, str]:
    """Remove the rehearsal's own output folder; by node name, why it is left."""
    if output is None:
        return {}
    script = f"rm -rf -- {quote(output)}"
    return session.work(
        "output",
        f"Removing {output}",
        lambda node: session.output(node, script, deadline=_REMOVE_DEADLINE),
        on=nodes,
        changes=True,
    ).reasons


class Rehearsing:
    """A rehearsal whose run has started. ``start`` are the seconds to its first step."""

    def __init__(
        self,
        session: Session,
        asked: Rehearsal,
        nodes: Sequence[Node],
        run: TrainResult,
        output: str | None,
        shared: bool,
    ) -> None:
        self.session, self.asked, self.nodes, self.run = session, asked, tuple(nodes), run
        self.start = 0.0
        self._output, self._shared = output, shared
        self._names = [node.name for node in nodes]
        self._folder = str(run_folder(session.inventory, run.run))
        self._logs = {name: f"{run.run}/logs/node{rank}" for rank, name in enumerate(self._names)}
        self._events = Events(session, nodes, self._logs)
        self._until = time.monotonic() + asked.seconds
        self._began = time.monotonic()
        self._active: tuple[Fault, Node, float] | None = None
        self._left: dict[str, str] = {}
        self._stuck = ""  # why the run does not continue
        self._patterns: tuple[str, ...] = ()  # of the names of its checkpoints

    def all(self) -> tuple[Result, ...]:
        """Inject all faults."""
        faults, results = self.asked.faults, []
        self._watchdog(on=True)
        with self._events, self.session.stage("rehearse", "Injecting faults", len(faults), "steps") as shown:
            self._first_step(shown)
            for number, fault in enumerate(faults):
                shown.progress(number, fault.about)
                results.append(self._one(fault))
                shown.progress(number + 1)
            shown.states = {each.fault.name: each.outcome for each in results if each.outcome != "survived"}
            shown.failed = sum(each.outcome == "not survived" for each in results)
        return tuple(results)

    # --- one fault ---------------------------------------------------------------------------------

    def _first_step(self, shown: Stage) -> None:
        """Wait until the job reports steps, and if faults end attempts, for its first checkpoint."""
        shown.progress(0, "waiting for the first step")
        while highest(self._events.seen()) is None:
            if self._events.ended(self._names):
                raise RunFailedError(
                    f"run {self.run.run} ended before any fault was injected",
                    reasons=self._events.reasons(),
                    hint=f"clusterctl diagnose {self.run.run}",
                )
            if time.monotonic() > self._until:
                raise RunFailedError(
                    f"run {self.run.run} reported no step in {self.asked.seconds / 60:g} min, so nothing can be judged",
                    reasons={},
                    hint="rehearse longer with --minutes, or name the steps in its log with --pattern",
                )
            self._events.wait(LOOK)
        self.start = round(time.monotonic() - self._began, 1)
        ends = any(fault.ends for fault in self.asked.faults)
        shown.progress(0, "waiting for a checkpoint" if ends else "")
        self._checkpoints(int(ends), self._soon())

    def _soon(self) -> float:
        """How long to wait for a checkpoint: other faults need the rest of the time."""
        return min(self._until, time.monotonic() + _SHARE * self.asked.seconds)

    def _one(self, fault: Fault) -> Result:
        node = self.nodes[0] if fault.place == "first" else self.nodes[-1]
        if why := self._lacks(fault):
            return Result(fault, "not tried", text=why)
        seconds = lasting(fault, self.asked.seconds, self.asked.training.policy.lost_after)
        self._active = (fault, node, time.monotonic() + seconds)
        try:
            injected = (
                self._controller(fault, seconds) if fault.name == CONTROLLER else self._inject(fault, node, seconds)
            )
            if isinstance(injected, Result):
                return injected
            limit = seconds + _MARGIN + 3 * self.start
            if fault.ends:
                limit += self.asked.training.policy.lost_after
            return self._judged(injected, limit)
        finally:
            self._undo()

    def _lacks(self, fault: Fault) -> str:
        """Why a fault cannot be tried; "" if it can."""
        if self._stuck:
            return self._stuck
        if len(self.nodes) < fault.nodes:
            return f"it needs {fault.nodes} nodes"
        if fault.shared and self._shared:
            return "other people's processes use the nodes, and would notice it"
        if self._events.ended(self._names):
            return "the job ended before it"
        if time.monotonic() > self._until:
            minutes = self.asked.seconds / 60
            return f"the time of {minutes:g} min was over; --minutes {2 * minutes:g} leaves more"
        if fault.checkpoints and self._checkpoints(fault.checkpoints, self._soon()) < fault.checkpoints:
            return f"the job saved fewer than {fault.checkpoints} checkpoints in time; save more often, or --minutes N"
        return ""

    def _inject(self, fault: Fault, node: Node, seconds: int) -> Injected | Result:
        script = inject_script(fault, self._place(node.name), seconds)
        try:
            result = self.session.run(node, script, root=fault.root, deadline=_DEADLINE)
        except RootRefused as error:
            self._active = None  # nothing ran
            return Result(fault, "not tried", node.name, f"it needs root: {error.reason}")
        except ClusterctlError as error:
            return Result(fault, "not tried", node.name, str(error).replace("\n", "; "))
        if result.rc:
            why = (result.err.strip().splitlines() or [f"its script ended with status {result.rc}"])[-1]
            if result.rc != SKIPPED:
                why = f"its script failed: {why}"
            return Result(fault, "not tried", node.name, why[:300])
        answer = dict(line.split(" ", 1) for line in result.out.splitlines() if " " in line)
        at = self._events.here(node.name, answer.get("at", "")) + (1.0 if fault.name == "cut-network" else 0.0)
        return Injected(fault, node.name, at, at + seconds, answer.get("hit", "")[:300], answer.get("torn", "")[:300])

    def _controller(self, fault: Fault, seconds: int) -> Injected:
        """Close every connection to the nodes for some seconds; then new ones read what happened meanwhile."""
        at = time.time()
        self._events.pause()
        self.session.disconnect()
        time.sleep(seconds)  # the fault itself: nothing here may look at the run
        self._events.resume()
        return Injected(fault, "", at, at + seconds, "every connection of this command")

    def _judged(self, injected: Injected, limit: float) -> Result:
        """Wait for the verdict; resume the run if it has ended everywhere."""
        until = time.monotonic() + limit
        resumed: float | None = None
        while time.monotonic() < until:
            course = judge(injected, self._events.seen(), self._names, resumed)
            if course.result is not None:
                return course.result
            if course.over and time.time() > injected.until:
                if resumed is not None or self._events.finished(self._names):
                    break
                self._undo()
                resumed = time.time()
                try:
                    resuming.resume(
                        self.session, self.run.run, resuming.ResumeOptions(following=Following(detach=True))
                    )
                except InterruptedByUser:
                    raise
                except ClusterctlError as error:
                    self._stuck = f"the run did not continue after: {injected.fault.about}"
                    return failed(injected, self._events.seen(), f"clusterctl resume: {error}")
                self.session.disconnect()
            self._events.wait(LOOK)
        why = "the run ended" if self._events.ended(self._names) else f"no new step in {limit:.0f} s"
        self._stuck = f"the run did not continue after: {injected.fault.about}"
        return failed(injected, self._events.seen(), why)

    def _place(self, name: str) -> Place:
        output = self._events.output(name)
        logs = f"{self.session.inventory.root}/runs/{self._logs[name]}"
        return Place(self.run.run, name, self._folder, logs, output, self._patterns)

    def _checkpoints(self, wanted: int, until: float) -> int:
        """How many checkpoints rank 0's node has; waits for the wanted number until a time of the monotonic clock."""
        while True:
            names = self._events.checkpoints(self.run.run)
            self._patterns = tuple(
                dict.fromkeys(re.sub(r"\d+", "[0-9]*", name) for name in names if _SAFE.fullmatch(name))
            )
            if len(names) >= wanted or time.monotonic() > until or self._events.ended(self._names):
                return len(names)
            self._events.wait(_CHECKPOINT_LOOK)

    # --- the end -----------------------------------------------------------------------------------

    def _undo(self) -> None:
        """Undo the active fault. A node whose network is cut answers once its timer has restored it."""
        if self._active is None:
            return
        fault, node, ends = self._active
        if fault.name != CONTROLLER and lasting(fault, self.asked.seconds, self.asked.training.policy.lost_after):
            script = undo_script(fault.name, self._place(node.name))
            waiting = False
            while True:
                try:
                    self.session.output(node, script, root=fault.root, deadline=_DEADLINE)
                    break
                except ClusterctlError as error:
                    if time.monotonic() > ends + _DEADLINE:
                        self._left[node.name] = f"{fault.about} may not be undone: {error}"
                        break
                    if not waiting:
                        left = max(0.0, ends - time.monotonic())
                        text = f"{node.name} does not answer; it ends the fault itself in about {left:.0f} s"
                        self.session.emit(Notice(text))
                        waiting = True
                time.sleep(_AGAIN)  # the node's own timer ends the fault; no event of this machine shows it
        self._active = None

    def _watchdog(self, *, on: bool) -> None:
        """Let rank 0's node stop the run if this command is killed; its agent stops the others."""
        place = self._place(self.nodes[0].name)
        script = undo_script(WATCHDOG, place)
        if on:
            stop = stop_script(self._folder, self.run.run, self.nodes[0].name, 0)
            script = watchdog_script(place, round(self.asked.seconds + _ABANDONED), stop)
        try:
            self.session.output(self.nodes[0], script, deadline=_DEADLINE)
        except ClusterctlError as error:
            self._left.update({} if on else {self.nodes[0].name: str(error)})

    def remove(self, *, keep: bool = False) -> dict[str, str]:
        """Undo, stop the run, and remove its output and its folder. By node name, what is left.

        ``keep``: the folder and its logs stay, for a diagnosis.
        """
        self._undo()
        self._watchdog(on=False)
        ranks = {name: rank for rank, name in enumerate(self._names)}
        left = {**self._left, **problems(stop_on(self.session, self.run.run, self.nodes, ranks))}
        left |= remove_output(self.session, self.nodes, self._output)
        if not left and not keep:
            left |= prune(self.session, Wanted(), lambda plan, more: (*plan.runs, *more), words=[self.run.run]).failed
        return left
