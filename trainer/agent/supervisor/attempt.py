"""One attempt of a run on one node: from the start of the command until none of its processes is left.

The command is a launcher that starts the ranks, with its output in a pipe. Or the agent starts the command once for
each local rank (``Plan.each_rank``): then the output goes to files, in the layout of torchrun's ``--log-dir``.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from ..contract.plan import OUTPUT, Plan
from ..hangs import Hangs, Watch
from ..metrics import Metrics
from ..pace import Pace
from ..processes import NODE, RUN, describe_status, die_with_parent, reap, send, signal_of, stat_of
from ..rounds import Stragglers
from ..run_files import Events, NodePlan, State
from ..saves import Saves, known_account, save_argument
from ..silence import SAVING
from ..textfile import Textfile
from ..tracker import HURRY, Death, Ending, Group, ProcessTracker, end_all
from .control import Control
from .decisions import KILLS, own_checkpoints
from .output import Output

if TYPE_CHECKING:
    from ..keeping.keeper import Keeper
    from ..keeping.memory import Memory
    from ..reader import Reading

QUIET = 60.0  # seconds without a sign of work after which the save has failed
SAVING_LOOK = 1.0  # seconds between looks for such signs


class Saving:
    """A stop that lets the trainer save a checkpoint first. Sends SIGTERM to the ranks, or to a command without ranks.

    A trainer that saves on SIGTERM (transformers' ``enable_jit_checkpoint``) does it in its ranks. They get the signal
    directly: torchrun forwards its own SIGTERM, but kills the ranks 30 s later, and a large checkpoint takes longer.
    """

    def __init__(
        self, tracker: ProcessTracker, started: Iterable[int], output: Optional[Path], patience: float, now: float
    ) -> None:
        self._tracker = tracker
        self._output = output
        self._until = now + patience
        self._sign: Tuple[int, ...] = ()
        self._signed = now
        self._looked = now
        tracker.look()
        for pid in list(tracker.ranks) or started:
            stat = stat_of(pid)
            if stat is not None:
                send(pid, stat, signal.SIGTERM)

    def going(self, now: float) -> bool:
        """Whether the trainer may still be saving."""
        if now - self._looked >= SAVING_LOOK:
            self._looked = now
            sign = (sum(stat.ticks for stat in self._tracker.look().values()), *_sizes(self._output))
            if sign != self._sign:
                self._sign, self._signed = sign, now
        return now < self._until and now - self._signed < QUIET


def _sizes(folder: Optional[Path]) -> Iterator[int]:
    """Sizes and times of the files in the folder of checkpoints, two levels deep."""
    pending = [(folder, 0)] if folder is not None else []
    while pending:
        path, depth = pending.pop()
        try:
            entries = list(os.scandir(path))
        except OSError:
            continue  # it does not exist yet, or is being deleted
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            yield from (found.st_size, found.st_mtime_ns)
            if depth < 1 and entry.is_dir(follow_symlinks=False):
                pending.append((Path(entry.path), depth + 1))


TICK = 0.25  # seconds between looks at the files that grow
LOOK = 1.0  # seconds between looks for new files, hangs and samples
DRAIN = 2.0  # seconds to read what is left in the command's pipe
# After a failure no rank can continue, and a stop without saving saves nothing: this is for closing files. Launchers
# that take longer are killed: DeepSpeed's gives each rank 30 s, torchrun on a busy machine needs 10 s.
SHORT_GRACE = 2.0


class Attempt:
    """One attempt. ``run`` does all of it and returns this node's outcome, see ``decisions.py``."""

    def __init__(
        self,
        plan: NodePlan,
        decision: Dict[str, Any],
        control: Control,
        events: Events,
        state: State,
        textfile: Textfile,
    ) -> None:
        self._plan, self._control, self._events, self._state = plan, control, events, state
        self._decision = decision
        self._group = Group(plan.run, plan.node)
        self._tracker = ProcessTracker(plan.run, plan.node, self._group, control.guard_pid)
        self._watch = Watch(plan.data)
        self._hangs = Hangs(plan, self._watch, self._tracker, control, events)
        self._stragglers = Stragglers(plan, self._tracker, control, events, state, self._newest_checkpoint)
        self._metrics = Metrics(plan, control, events, textfile)
        self._pace = Pace(plan, events, state)
        self._saver = Saves(plan, self._watch, self._tracker, events, state)
        self._keeper: Optional[Keeper] = None
        self._memory: Optional[Memory] = None
        if plan.data.copies is not None and (plan.data.link is not None or plan.data.copies.memory):
            self._keep(decision)
        self._command: Optional[Command] = None
        self._stopped = False  # a stop came before the command exited
        self._saving: Optional[Saving] = None
        self._ending: Optional[Ending] = None
        self._before: Optional[Dict[str, Any]] = None  # the checkpoints when the stop that saves arrived
        self._killed: Optional[Dict[str, Any]] = None  # the first rank here that another process killed
        self._looked = self._ticked = 0.0
        self._step: Optional[int] = None
        self._saves = 0  # of which the events know

    def _keep(self, decision: Dict[str, Any]) -> None:
        """Copy checkpoints to other nodes, and let the program save to RAM, as the plan says."""
        from ..keeping.keeper import Keeper  # noqa: PLC0415 - a run on one node needs neither
        from ..keeping.memory import Memory  # noqa: PLC0415

        self._keeper = Keeper(self._plan, decision, self._control, self._events, self._state)
        self._memory = Memory(self._plan, self._keeper.notice)

    def _newest_checkpoint(self) -> Any:
        """What identifies the newest checkpoint that every node can resume from; None before the first one."""
        if self._keeper is not None and self._keeper.peers:
            return (self._state.fields.get("copied") or {}).get("checkpoint")
        return self._watch.saves or None

    def _leave_memory(self, memory: "Memory") -> None:
        """Move what is in RAM to the disk. An attempt whose files are not all there has failed."""
        why = memory.finish()
        if why is not None:
            assert self._keeper is not None
            self._keeper.notice(why)
            self._control.fail(None, why)

    def run(self) -> Dict[str, Any]:
        """Start the command, follow it until it exits, and end its remaining processes."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._tracker.close)
            stack.callback(self._metrics.close)
            stack.callback(self._stragglers.close)
            if self._keeper is not None:
                stack.callback(self._keeper.close)
            if self._memory is not None:
                stack.callback(self._leave_memory, self._memory)
            try:
                take = (self._line, self._progress, self._reading, self._bytes)
                folder = self._memory.prepare() if self._memory is not None else None
                seen = with_output(self._plan, folder)
                self._output = Output(seen, self._events, *take, start=self._decision.get("step") or 0)
                stack.callback(self._output.close)
                self._group.make()
                extra = save_argument(self._plan.data, known_account(self._state))
                command = self._command = start_command(seen, self._decision, self._group, extra)
            except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
                end_all(self._tracker, SHORT_GRACE)  # other ranks may have been started
                why = "%s: %s" % (type(error).__name__, error)
                self._control.fail(None, "the command could not be started: " + why)
                return self._outcome(error=why)
            self._tracker.started = command.running
            self._events.emit("started", pid=command.pid)
            self._state.set(state="running", phase=self._watch.phase, command=command.pid)
            if self._keeper is not None:
                self._keeper.start()
            self._follow(command)
            self._output.look()
            self._output.report(last=True)
            self._share_account(last=True)
            return self._outcome()

    def _follow(self, command: Command) -> None:
        """Follow the command until every process of the run has exited."""
        pipe = command.output
        with selectors.DefaultSelector() as selector:
            self._control.register(selector)
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, self._take)
            while True:
                for key, _ in selector.select(TICK if self._ending is None else HURRY):
                    if key.data is not None and not key.data(key.fd):
                        selector.unregister(key.fileobj)
                self._reap(command)
                now = time.monotonic()
                self._regular(selector, now)
                if self._over(command, now):
                    break
        self._reap(command)
        if pipe is None:
            return
        limit = time.monotonic() + DRAIN  # another process may hold the pipe open, and write
        while time.monotonic() < limit and self._output.take(pipe.fileno()):
            pass
        pipe.close()

    def _take(self, fd: int) -> bool:
        """Read some of the command's output. False at its end."""
        return self._output.take(fd) != b""

    def _reap(self, command: Command) -> None:
        for ended in command.reap():
            self._tracker.started = command.running
            self._look_for_stop(ended.status)
            if ended.status and ended.rank is None:
                self._control.fail(None, "the command %s" % describe_status(ended.status))
            elif ended.status and ended.rank is not None and self._saving is None and self._ending is None:
                self._died(Death(ended.rank, ended.pid, ended.status))

    def _regular(self, selector: selectors.BaseSelector, now: float) -> None:
        """Do the periodic work, at intervals that do not depend on the amount of output."""
        self._tracker.adopter = self._control.guard_pid
        ticking = now - self._ticked >= TICK
        if self._saving is None and self._ending is None:
            for death in self._tracker.deaths(selector):
                self._died(death)
        if ticking:
            self._ticked = now
            self._output.report()
        if now - self._looked < LOOK:
            return
        self._looked = now
        self._output.look([pid for pid, rank in self._tracker.ranks.items() if rank == 0])
        if self._ending is None:
            if self._tracker.due(now):
                self._tracker.look()
                self._tracker.watch(selector)
            self._hangs.look(now)
            self._control.look(now)
            sample = self._metrics.look(self._tracker.known, now)
            self._stragglers.gpus(sample.get("gpus"))
            self._stragglers.look(self._watch.phase, self._watch.stepped, now)
            self._pace.look(self._watch.phase, now)
            self._pace.sample(sample)
            if self._keeper is not None:
                self._keeper.look()
            if self._saving is None:
                self._saver.look(now)
            self._share_account()
        self._phase()
        self._state.refresh(now)

    def _share_account(self, *, last: bool = False) -> None:
        """Send the account of the run's time to those that may take this node's place, see ``spent.py``."""
        control = self._control
        if control.account is not None and control.members is not None:
            control.account.share(control.link, self._plan.rank, self._plan.data.nnodes, last=last)

    def _phase(self) -> None:
        """Write new phases. A save that was over before this look is written too: it explains a slow step."""
        before, phases = self._state.fields.get("phase"), [self._watch.phase]
        if self._watch.saves != self._saves and SAVING not in (before, *phases):
            phases.insert(0, SAVING)
        self._saves = self._watch.saves
        if phases != [before]:
            for phase in phases:
                self._events.emit("phase", phase=phase)
            self._state.set(phase=phases[-1])

    def _died(self, death: Death) -> None:
        if not death.status:
            return
        text = "rank %d %s" % (death.rank, describe_status(death.status))
        number = signal_of(death.status)
        if number in KILLS and self._killed is None:
            self._killed = {"node": self._plan.node, "rank": death.rank, "text": text, "time": round(time.time(), 3)}
        self._look_for_stop(death.status)
        self._control.fail(death.rank, text, signal=number)

    def _look_for_stop(self, status: int) -> None:
        """Attribute a failed process to a stop that arrives with its death, see ``Control.wait_for_stop``."""
        if signal_of(status) == "SIGTERM" or (status and "SLURM_JOB_ID" in os.environ):
            self._control.wait_for_stop()
        if status and self._control.stop is not None and self._control.failure is None:
            self._stopped = True

    def _bytes(self, rank: Optional[int], count: int) -> None:
        self._watch.bytes(rank, count, time.monotonic())

    def _line(self, rank: Optional[int], text: str) -> None:
        self._watch.line(rank, text, time.monotonic())
        if self._watch.saves != self._saves:
            self._phase()  # at once, so that it comes before the steps that the save delays

    def _reading(self, rank: Optional[int], reading: Reading) -> None:
        self._watch.reading(rank, reading, time.monotonic())

    def _progress(self, fields: Dict[str, Any], logged: bool) -> None:
        now = time.monotonic()
        if logged:
            self._watch.progress(fields, now)
        self._control.last_progress = now
        self._step = fields.get("step", self._step)
        self._state.note(**{key: fields[key] for key in ("step", "total", "loss") if key in fields})
        self._metrics.progress(fields)
        self._pace.progress(fields, now)

    def _over(self, command: Command, now: float) -> bool:
        """Take the next step of ending the attempt, if it must end. True when no process is left."""
        control = self._control
        if command.status is None and not control.over():
            return False
        if control.stop is not None and control.failure is None and command.status is None:
            self._stopped = True
            if control.stop.save and self._ending is None:
                if self._saving is None:
                    self._state.set(state="ending")
                    self._before = own_checkpoints(self._plan)
                    patience = self._plan.data.save_patience
                    self._saving = Saving(self._tracker, command.running, self._plan.output, patience, now)
                if self._saving.going(now):
                    return False
        if self._ending is None:
            self._metrics.close()
            self._stragglers.close()
            self._ending = Ending(self._tracker, self._plan.grace)
            self._state.set(state="ending")
        if control.failure is not None or (control.stop is not None and not control.stop.save):
            self._ending.hurry(SHORT_GRACE)
        return self._ending.step(now)

    def _outcome(self, error: Optional[str] = None) -> Dict[str, Any]:
        """This node's outcome; also writes the event ``exit``."""
        status = self._command.status if self._command is not None else None
        rc = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
        number = None if status is None else signal_of(status)
        ended: Dict[str, Any] = {"rc": rc, "signal": number, "stopped": self._stopped}
        left = self._ending.left if self._ending is not None else []
        fields = dict(ended, **({"left": left} if left else {}), **({"error": error} if error else {}))
        self._events.emit("exit", **fields)
        known = {"failed": self._control.failure, "killed": self._killed, "step": self._step, "before": self._before}
        replaceable = self._control.failure is not None and not self._stopped and self._control.spares > 0
        return dict(ended, left=left, condemned=self._metrics.lost_gpus() if replaceable else None, **known)


KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "TZ", "TMPDIR", "LANG", "XDG_RUNTIME_DIR")
KEPT_PREFIXES = ("LC_", "NCCL_", "CUDA_", "NVIDIA_", "UCX_")  # what a site sets for its machines

Child = Tuple[Optional[int], "subprocess.Popen[bytes]"]  # the rank; None: a launcher


class Ended(NamedTuple):
    """A process started by the agent that has exited; ``rank`` is None for a launcher."""

    rank: Optional[int]
    pid: int
    status: int


class Command:
    """The processes of one attempt that the agent started itself.

    Attributes:
        status: the wait status of the command; None while a process is running. After a failure, the status of the
            first process that failed.
        pid: the launcher, or the first local rank.
        output: the launcher's output; None where ranks write to files.
    """

    def __init__(self, children: List[Child]) -> None:
        self.status: Optional[int] = None
        self.pid = children[0][1].pid
        self.output = children[0][1].stdout
        self._running = list(children)
        self._failure = 0

    @property
    def running(self) -> Set[int]:
        """The processes that have not exited."""
        return {child.pid for _, child in self._running}

    def reap(self) -> Iterator[Ended]:
        """Reap the processes that have exited since the last call."""
        for one in list(self._running):
            rank, child = one
            status = reap(child.pid)
            if status is None:
                continue
            child.returncode = status  # Popen must not wait for it again
            self._running.remove(one)
            self._failure = self._failure or status
            if not self._running:
                self.status = self._failure
            yield Ended(rank, child.pid, status)


def environment(plan: Plan, env: Dict[str, str], inherited: Dict[str, str]) -> Dict[str, str]:
    """The command's environment. It does not depend on how the agent was started."""
    clean = {name: value for name, value in inherited.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    for name in plan.unset:
        clean.pop(name, None)
    return {**clean, **env, RUN: plan.run, NODE: plan.node}


def with_checkpoint(
    plan: NodePlan, decision: Dict[str, Any], extra: Optional[str] = None
) -> Tuple[List[str], Dict[str, str]]:
    """The arguments and variables of one attempt (its plan is filled in), with its checkpoint and ``extra`` argument.

    Raises:
        ValueError: the program needs the checkpoint's step, and it has none.
    """
    argv, env = list(plan.data.argv), dict(plan.data.env)
    checkpoint = decision.get("checkpoint")
    if checkpoint is not None and plan.data.resume is not None:
        path = str(plan.folder / plan.data.resume.output / checkpoint)
        resume = plan.data.resume.filled(path, decision.get("step"))
        argv += resume.argv
        env.update(resume.env)
    return argv + ([extra] if extra else []), env


def with_output(plan: NodePlan, folder: Optional[Path]) -> NodePlan:
    """The plan whose command saves to a folder in RAM, or to the output folder; see ``Copies.memory``."""
    data, output = plan.data, plan.output
    if data.copies is None or not data.copies.memory or output is None:
        return plan
    target = str(folder or output)
    argv = tuple(word.replace(OUTPUT, target) for word in data.argv)
    progress = data.progress
    if folder is not None and progress is not None:
        with contextlib.suppress(ValueError):  # it is elsewhere
            progress = str(folder / (plan.folder / progress).relative_to(output))
    return plan._replace(data=data._replace(argv=argv, progress=progress))


def make_private(path: Path) -> None:
    """Create a folder that only this user may write. Refuses one that another user created."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError("%s is not a folder that only this user may write; remove it" % path)


def start_command(plan: NodePlan, decision: Dict[str, Any], group: Group, extra: Optional[str] = None) -> Command:
    """Start the command for one attempt.

    Args:
        plan: the plan.
        decision: the hub's decision on the attempt: its ``checkpoint`` and ``step``.
        group: the cgroup that the processes enter.
        extra: an argument of this attempt, see ``saves.py``.

    Raises:
        OSError, ValueError, TypeError: a process cannot be started. Others may have been.
    """
    for folder in plan.data.private:
        make_private(Path(folder))
    plan.rank_logs.mkdir(parents=True, exist_ok=True)
    argv, variables = with_checkpoint(plan, decision, extra)
    env = environment(plan.data, variables, dict(os.environ))
    prepare: List[Callable[[], None]] = [group.preexec(), die_with_parent()]

    def before_exec() -> None:
        for each in prepare:
            each()

    if not plan.data.each_rank:
        return Command([(None, _start(plan, argv, env, subprocess.PIPE, subprocess.STDOUT, before_exec))])
    logs = plan.rank_logs / str(time.time_ns()) / "attempt_0"
    children: List[Child] = []
    for local in range(plan.data.processes):
        rank = plan.data.first_rank + local
        own = logs / str(local)
        own.mkdir(parents=True)
        ranked = dict(env, RANK=str(rank), LOCAL_RANK=str(local))
        with (own / "stdout.log").open("ab") as out, (own / "stderr.log").open("ab") as err:
            children.append((rank, _start(plan, argv, ranked, out, err, before_exec)))
    return Command(children)


def _start(
    plan: NodePlan, argv: List[str], env: Dict[str, str], stdout: Any, stderr: Any, before_exec: Callable[[], None]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        argv,
        env=env,
        cwd=plan.cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=before_exec,  # noqa: PLW1509 - it takes no lock that another thread could hold
    )
