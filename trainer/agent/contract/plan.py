"""The plan of a run on one node: what the controller sends to the node's agent, as ``plan-RANK.json``.

A launcher builds a ``Plan``, ``resume`` copies it with changes, and the agent reads it. ``from_json`` refuses a
version, a key or a value that it does not know, and names it.
"""

from __future__ import annotations

import json
import re
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Type

from .expected import Expected
from .expected import from_object as read_expected
from .untrusted import UntrustedError, parse_object

VERSION = 1
LIMIT = 16 << 20  # bytes of a plan; the environment and the arguments of a command have at most 2 MiB on Linux
BACKOFF_LIMIT = 60.0  # seconds
PORT = "{port}"  # in ``argv``: the port of the attempt
CHECKPOINT = "{checkpoint}"  # in ``resume``: the path of the checkpoint that the attempt starts from
# The same in parts, for programs that want them separately: its folder, its name there (DeepSpeed's tag), its step.
PLACES = (CHECKPOINT, "{folder}", "{name}", "{tag}", "{step}")
_PLACE = re.compile("|".join(map(re.escape, PLACES)))
_RANKS = 1 << 20
_LONG = 1e9  # seconds


class PlanError(UntrustedError):
    """A plan that cannot be used. The text names the key."""


class Link(NamedTuple):
    """The address at which rank 0's agent listens for the others.

    Attributes:
        host: the address of rank 0's node.
        port: the port of rank 0's agent.
        token: hexadecimal digits that only the agents of this run know.
        nodes: names in the order of the nodes' ranks.
        lost_after: seconds of silence after which a node counts as lost.
    """

    host: str
    port: int
    token: str
    nodes: Tuple[str, ...]
    lost_after: float = 60.0


class Resume(NamedTuple):
    """How the command resumes.

    Attributes:
        output: the folder of the checkpoints.
        argv: arguments to add for a checkpoint; the words of ``PLACES`` in them are replaced.
        env: variables to add, in the same way.
        known: whether the program resumes with these. If not, it may start from the first step, and write over
            checkpoints: then it does not start if there are any.
    """

    output: str
    argv: Tuple[str, ...] = ()
    env: Dict[str, str] = {}  # noqa: RUF012 - never changed
    known: bool = True

    def filled(self, checkpoint: str, step: Optional[int]) -> "Resume":
        """The arguments and variables for a checkpoint, given by its absolute path and its step.

        Raises:
            ValueError: they need the step, and the checkpoint has none.
        """
        folder, _, name = checkpoint.rpartition("/")
        values = {CHECKPOINT: checkpoint, "{folder}": folder, "{name}": name, "{tag}": name, "{step}": str(step)}
        words = (*self.argv, *self.env.values())
        if step is None and any("{step}" in word for word in words):
            raise ValueError("%s has no step in its name, and the arguments to resume need {step}" % checkpoint)

        def fill(word: str) -> str:
            return _PLACE.sub(lambda found: values[found.group()], word)

        env = {key: fill(word) for key, word in self.env.items()}
        return self._replace(argv=tuple(map(fill, self.argv)), env=env)


class Hang(NamedTuple):
    """What counts as a hang, and how the agent reacts to one.

    Attributes:
        after: seconds without progress; None: the pace of the run decides, see ``silence.py``.
        policy: ``stop`` or ``warn``.
    """

    after: Optional[float] = None
    policy: str = "stop"


class SaveEvery(NamedTuple):
    """How often the run saves, see ``saves.py``.

    Attributes:
        seconds: the interval; None: the best one.
        failures: observed failures of other runs.
        node_hours: the hours of nodes in which they were observed.
        argument: what sets the interval at the start of an attempt, with ``{steps}``; "": the trainer saves on SIGUSR2.
    """

    seconds: Optional[float] = None
    failures: float = 0.0
    node_hours: float = 0.0
    argument: str = ""


class Plan(NamedTuple):
    """Everything that an agent needs. Relative paths are relative to the folder of the plan.

    Attributes:
        run: the run's id. Every process has it as ``CLUSTERCTL_RUN``.
        node: the node's name. Every process has it as ``CLUSTERCTL_NODE``.
        argv: the command. A word ``{port}`` becomes the port of the attempt.
        env: variables of the command, besides the few that it inherits. ``MASTER_PORT`` is set for each attempt.
        launcher: the launcher that wrote the plan and can change it.
        each_rank: start the command once for each local rank, with its ``RANK`` and ``LOCAL_RANK``. Else the command
            is a launcher that starts the ranks.
            node_rank: the node's rank.
        nnodes: the number of nodes.
        processes: the number of local ranks.
        first_rank: the global rank of local rank 0.
        unset: variables that the command does not inherit.
        cwd: the folder in which the command starts; "": the folder of the plan.
        logs: the node's folder of the run, see ``trainer/agent/run_files.py``.
        rank_logs: the folder for the output of ranks; "": ``ranks`` in ``logs``.
        progress: LLaMA-Factory's ``trainer_log.jsonl``, which rank 0 writes.
        pattern: the user's regular expression that reads the lines of the training, see ``reader/pattern.py``; None:
            the known formats.
        private: folders to create for this user alone.
        grace: seconds between SIGTERM and SIGKILL. After a failure, or a stop that saves nothing, at most 2.
        port: ``MASTER_PORT`` of the first attempt.
        link: the connection to the other agents; None for one node.
        hang: what counts as a hang.
        resume: how the command resumes; None: it cannot.
        resuming: whether to start from the newest complete checkpoint.
        none_ok: when resuming without any checkpoint, start from the beginning.
        restarts: how often a failed attempt is repeated.
        backoff: seconds before the first repetition, doubled each time, at most 60. After a long attempt it starts
            again.
        save_patience: seconds that a stop leaves for saving.
        prefix: the path of the release.
        textfile: the folder of node_exporter's textfile collector, see ``textfile.py``.
        notify: the shell command that runs when something happens to the run, see ``notify.py``.
        expected: what the run is judged by, see ``expected.py``; None: nothing is expected.
        save: how often the run saves; None: as its trainer does.
    """

    run: str
    node: str
    argv: Tuple[str, ...]
    env: Dict[str, str]
    launcher: str = ""
    each_rank: bool = False
    node_rank: int = 0
    nnodes: int = 1
    processes: int = 1
    first_rank: int = 0
    unset: Tuple[str, ...] = ()
    cwd: str = ""
    logs: str = ""
    rank_logs: str = ""
    progress: Optional[str] = None
    pattern: Optional[str] = None
    private: Tuple[str, ...] = ()
    grace: float = 10.0
    port: Optional[int] = None
    link: Optional[Link] = None
    hang: Hang = Hang()
    resume: Optional[Resume] = None
    resuming: bool = False
    none_ok: bool = False
    restarts: int = 0
    backoff: float = 1.0
    save_patience: float = 600.0
    prefix: str = ""
    textfile: Optional[str] = None
    notify: Optional[str] = None
    expected: Optional[Expected] = None
    save: Optional[SaveEvery] = None

    @property
    def attempts(self) -> int:
        """How often the command starts at most."""
        return 1 + self.restarts

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failed attempts in a row."""
        return min(BACKOFF_LIMIT, self.backoff * 2.0 ** min(failures - 1, 16))

    def to_object(self) -> Dict[str, Any]:
        """The plan as plain JSON values."""
        named = (("link", self.link), ("resume", self.resume), ("save", self.save))
        parts = {key: part._asdict() if part else None for key, part in named}
        band = self.expected and self.expected.to_object()
        return dict(self._asdict(), version=VERSION, hang=self.hang._asdict(), expected=band, **parts)

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        return json.dumps(self.to_object(), sort_keys=True)


def from_json(text: "str | bytes") -> Plan:
    """Read a plan.

    Raises:
        PlanError: it is not a plan of this version; the text names the key.
        UntrustedError: it is not a JSON object.
    """
    return from_object(parse_object(text, limit=LIMIT))


def from_object(value: Dict[str, Any]) -> Plan:
    """Read a plan from plain JSON values.

    Raises:
        PlanError: it is not a plan of this version; the text names the key.
    """
    fields = dict(value)
    version = fields.pop("version", None)
    if version is None:
        raise PlanError("version is missing: an older clusterctl wrote this plan")
    if version != VERSION or isinstance(version, bool):
        raise PlanError("version is %.20r, but only version %d is supported" % (version, VERSION))
    plan: Plan = _build(Plan, _PLAN, "", fields)
    if plan.node_rank >= plan.nnodes:
        raise PlanError("node_rank is %d, but there are %d nodes" % (plan.node_rank, plan.nnodes))
    if plan.link is not None and len(plan.link.nodes) != plan.nnodes:
        raise PlanError("link.nodes has %d names for %d nodes" % (len(plan.link.nodes), plan.nnodes))
    return plan


Reader = Callable[[str, Any], Any]  # the key and the JSON value; raises PlanError


def _build(kind: Type[Any], readers: Dict[str, Reader], prefix: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise PlanError("%s must be an object" % prefix.rstrip("."))
    for key in value:
        if key not in readers:
            raise PlanError("%s%.60s is not a known key" % (prefix, key))
    for key in readers:
        if key not in value and key not in kind._field_defaults:
            raise PlanError("%s%s is missing" % (prefix, key))
    return kind(**{key: readers[key](prefix + key, each) for key, each in value.items()})


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise PlanError("%s must be text" % key)
    return value


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise PlanError("%s must be true or false" % key)
    return value


def _whole(least: int, most: int) -> Reader:
    def read(key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise PlanError("%s must be a whole number from %d to %d" % (key, least, most))
        return value

    return read


def _seconds(key: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= _LONG:
        raise PlanError("%s must be a number of seconds" % key)
    return float(value)


def _texts(key: str, value: Any) -> Tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise PlanError("%s must be a list of texts" % key)
    return tuple(value)


def _variables(key: str, value: Any) -> Dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise PlanError("%s must be an object of texts" % key)
    return dict(value)


def _command(key: str, value: Any) -> Tuple[str, ...]:
    words = _texts(key, value)
    if not words:
        raise PlanError("%s must not be empty" % key)
    return words


def _policy(key: str, value: Any) -> str:
    if value not in ("stop", "warn"):
        raise PlanError("%s must be stop or warn" % key)
    return str(value)


def _band(key: str, value: Any) -> Expected:
    try:
        return read_expected(value)
    except UntrustedError as error:
        raise PlanError("%s: %s" % (key, error)) from None


def _or_null(read: Reader) -> Reader:
    return lambda key, value: None if value is None else read(key, value)


def _part(kind: Type[Any], readers: Dict[str, Reader]) -> Reader:
    return lambda key, value: _build(kind, readers, key + ".", value)


_PORT = _whole(0, 65535)
_LINK: Dict[str, Reader] = {"host": _text, "port": _PORT, "token": _text, "nodes": _texts, "lost_after": _seconds}
_PLAN: Dict[str, Reader] = dict(
    argv=_command,
    env=_variables,
    node_rank=_whole(0, _RANKS),
    nnodes=_whole(1, _RANKS),
    processes=_whole(1, _RANKS),
    first_rank=_whole(0, _RANKS),
    restarts=_whole(0, _RANKS),
    port=_or_null(_PORT),
    link=_or_null(_part(Link, _LINK)),
    hang=_part(Hang, {"after": _or_null(_seconds), "policy": _policy}),
    resume=_or_null(_part(Resume, {"output": _text, "argv": _texts, "env": _variables, "known": _flag})),
    expected=_or_null(_band),
    save=_or_null(
        _part(
            SaveEvery,
            {"seconds": _or_null(_seconds), "failures": _seconds, "node_hours": _seconds, "argument": _text},
        )
    ),
    **dict.fromkeys(("run", "node", "launcher", "prefix", "cwd", "logs", "rank_logs"), _text),
    **dict.fromkeys(("progress", "pattern", "textfile", "notify"), _or_null(_text)),
    **dict.fromkeys(("unset", "private"), _texts),
    **dict.fromkeys(("each_rank", "resuming", "none_ok"), _flag),
    **dict.fromkeys(("grace", "backoff", "save_patience"), _seconds),
)
