"""The faults of a rehearsal, in the order in which it injects them, and their scripts.

A fault's script is ``templates/rehearse/NAME.sh.j2``. It prints ``at EPOCH``, the time of the injection, and ``hit
TEXT``, what it hit. Exit status 3 means that the node cannot have this fault, with the reason on stderr. A fault that
lasts ends on the node after its seconds, without any command; ``undo.sh.j2`` ends it earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from provision.errors import UsageError
from provision.render import render

CONTROLLER = "remove-controller"
SLOW = "slow-node"
DISK = "fill-disk"
TEAR = "tear-checkpoint"
WATCHDOG = "watchdog"  # no fault, but a timer like theirs
SKIPPED = 3  # exit status of a script on a node that cannot have the fault


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: as the user types it, and the name of its script.
        about: what it does, in a few words.
        expected: what a run that survives does.
        place: the node that it hits: rank 0's, or the last one.
        ends: the attempt must end, and another one must start; else the attempt must continue.
        nodes: how many nodes the run needs.
        checkpoints: how many complete checkpoints there must be.
        root: its script runs as root.
        lasts: its part of the rehearsal's time; 0 for a fault that happens at once.
        longest: seconds that it lasts at most.
        shared: other users of the node notice it.
        fix: what to do if the run does not survive it.
    """

    name: str
    about: str
    expected: str
    place: Literal["first", "last"] = "last"
    ends: bool = True
    nodes: int = 1
    checkpoints: int = 0
    root: bool = False
    lasts: float = 0.0
    longest: float = 0.0
    shared: bool = False
    fix: str = "train with --restarts, or resume it: clusterctl resume"


FAULTS: tuple[Fault, ...] = (
    Fault(
        CONTROLLER,
        "remove the controller",
        "the run continues, and another command attaches to it",
        ends=False,
        lasts=0.02,
        longest=20.0,
        fix="keep the nodes' logins alive: loginctl enable-linger USER",
    ),
    Fault(
        SLOW,
        "slow a node down",
        "the run continues, and the slow rank is named",
        ends=False,
        lasts=0.15,
        longest=150.0,
        fix="find out which program the pauses break: clusterctl diagnose",
    ),
    Fault(
        DISK,
        "fill the disk of the checkpoints",
        "the run continues, or restarts from an older checkpoint",
        place="first",
        ends=False,
        lasts=0.04,
        longest=45.0,
        shared=True,
        fix="let the script survive a failed save, and keep more of the disk free",
    ),
    Fault("kill-rank", "kill a rank", "the run restarts from its newest checkpoint"),
    Fault(
        TEAR,
        "tear the newest checkpoint",
        "it is skipped with a reason, and an older one is used",
        place="first",
        checkpoints=2,
        fix="let the script write a checkpoint under another name, and rename it when it is complete",
    ),
    Fault("kill-agent", "kill the agent", "the run ends everywhere, and resumes"),
    Fault(
        "stop-rank",
        "stop a rank (SIGSTOP)",
        "the hang is found, and the run restarts",
        lasts=0.5,
        longest=300.0,
        fix="train with --on-hang stop",
    ),
    Fault(
        "cut-network",
        "cut a node's network",
        "the run ends everywhere, and resumes when the node is back",
        nodes=2,
        root=True,
        lasts=0.5,
        longest=600.0,
        shared=True,
        fix="resume it without the node: clusterctl resume --exclude NODE",
    ),
    Fault("kill-launcher", "kill the launcher", "the run restarts from its newest checkpoint"),
)
NAMES = tuple(fault.name for fault in FAULTS)


def chosen(text: str | None) -> tuple[Fault, ...]:
    """The faults that ``--faults`` names, in the order of ``FAULTS``; None: all.

    Raises:
        UsageError: an unknown name, or none.
    """
    if text is None:
        return FAULTS
    words = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in words if word not in NAMES]:
        raise UsageError(f"--faults {', '.join(unknown)[:200]}: no such fault", hint=f"choose among {','.join(NAMES)}")
    if not words:
        raise UsageError("--faults: no fault is named", hint=f"choose among {','.join(NAMES)}")
    return tuple(fault for fault in FAULTS if fault.name in words)


def lasting(fault: Fault, seconds: float, lost_after: float) -> int:
    """How many seconds a fault lasts in a rehearsal of ``seconds``; 0: it happens at once.

    A cut network lasts until the node counts as lost, and some seconds more.
    """
    if fault.name == "cut-network":
        return round(min(fault.longest, lost_after + 10))
    return round(min(fault.longest, max(5.0, seconds * fault.lasts))) if fault.lasts else 0


@dataclass(frozen=True)
class Planned:
    """A fault with its node, "" for this machine, and the seconds that it lasts."""

    fault: Fault
    node: str
    seconds: int


def planned(faults: Sequence[Fault], nodes: Sequence[str], seconds: float, lost_after: float) -> tuple[Planned, ...]:
    """What a rehearsal does on ``nodes``, which are in the order of their ranks."""
    return tuple(
        Planned(
            fault,
            "" if fault.name == CONTROLLER else nodes[0] if fault.place == "first" else nodes[-1],
            lasting(fault, seconds, lost_after),
        )
        for fault in faults
    )


@dataclass(frozen=True)
class Place:
    """Where a script finds a run on a node.

    Attributes:
        run: the run's id.
        node: the node's name.
        folder: the run's folder.
        logs: the node's folder of logs.
        output: the folder of the checkpoints; None: unknown.
        names: patterns of sh for the names of the checkpoints below it.
    """

    run: str
    node: str
    folder: str
    logs: str
    output: str | None = None
    names: Sequence[str] = ()


def undo_script(name: str, place: Place) -> str:
    """The script that undoes a fault on a node. It may run more than once, and also if nothing was injected."""
    return render("rehearse/undo.sh.j2", fault=name, **_values(place))


def watchdog_script(place: Place, seconds: int, stop: str) -> str:
    """The script that lets a node run the script ``stop`` after some seconds, unless ``WATCHDOG`` is undone."""
    return render("rehearse/watchdog.sh.j2", fault=WATCHDOG, seconds=seconds, stop=stop, **_values(place))


def inject_script(fault: Fault, place: Place, seconds: int) -> str:
    """The script that injects a fault, which undoes itself after ``seconds``."""
    undo = undo_script(fault.name, place) if seconds else ""
    name = f"rehearse/{fault.name.replace('-', '_')}.sh.j2"
    return render(name, fault=fault.name, seconds=seconds, undo=undo, names=list(place.names), **_values(place))


def _values(place: Place) -> dict[str, str]:
    return {
        "run": place.run,
        "node": place.node,
        "folder": place.folder,
        "logs": place.logs,
        "output": place.output or place.folder,
    }
