"""The plan of a run on one node: what the controller sends to the node's agent, as ``plan-RANK.json``.

A launcher builds a ``Plan``, ``resume`` copies it with changes, and the agent reads it. ``from_json`` refuses a
version, a key or a value that it does not know, and names it.

The nodes of a run may change from attempt to attempt: a spare takes the rank of a lost node, or the ranks are
renumbered for fewer nodes. So a launcher writes the words of ``WORDS`` in place of ranks and addresses, and the agent
fills them in for each attempt (``for_attempt``).
"""

from __future__ import annotations

import base64
import json
import math
import re
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Type, Union

from .expected import Expected
from .expected import from_object as read_expected
from .untrusted import UntrustedError, is_number, is_whole, parse_object

VERSION = 2
LIMIT = 16 << 20  # bytes of a plan; the environment and the arguments of a command have at most 2 MiB on Linux
BACKOFF_LIMIT = 60.0  # seconds
# Words of ``argv`` that the agent replaces for each attempt:
PORT = "{port}"
NODE_RANK = "{node_rank}"
NNODES = "{nnodes}"
MASTER = "{master}"  # the address of rank 0's node
FIRST_RANK = "{first_rank}"  # the global rank of the node's local rank 0
WORLD_SIZE = "{world_size}"
EVEN_SIZE = "{even_size}"  # the node's processes times the number of nodes, which accelerate divides again
WORLD_INFO = "--world_info={world_info}"  # DeepSpeed's table of the nodes' GPUs, from ``Plan.slots``
SEVERAL = "{several}"  # before a word: the word is removed if the run has one rank
WORDS = (PORT, NODE_RANK, NNODES, MASTER, FIRST_RANK, WORLD_SIZE, EVEN_SIZE, WORLD_INFO)
INTERFACE = "{interface}"  # a value of ``env``, also after ``=``: the interface from which the node reaches rank 0
OUTPUT = "{output}"  # in a word of ``argv``: the folder that the program writes checkpoints to, see ``Copies.memory``
CHECKPOINT = "{checkpoint}"  # in ``resume``: the path of the checkpoint that the attempt starts from
# The same in parts, for programs that want them separately: its folder, its name there (DeepSpeed's tag), its step.
PLACES = (CHECKPOINT, "{folder}", "{name}", "{tag}", "{step}")
_PLACE = re.compile("|".join(map(re.escape, PLACES)))
STAR = 64  # nodes of a run whose agents are all connected to the hub
_RANKS = 1 << 20
_LONG = 1e9  # seconds


class PlanError(UntrustedError):
    """A plan that cannot be used. The text names the key."""


class Link(NamedTuple):
    """How the agents of the run reach each other.

    Attributes:
        host: the address of the first node, whose agent listens for the others.
        port: the port of its agent.
        token: hexadecimal digits that only the agents of this run know.
        nodes: names, first those that start the run in the order of their ranks, then the spares.
        lost_after: seconds of silence after which a node counts as lost.
        others: address and port of the agents of the other nodes, in the order of ``nodes``. With them the run survives
            the loss of a node, see ``supervisor/roster.py``; empty: it ends when a node is lost.
        most: agents that are connected to the hub itself; None: see ``width``.
    """

    host: str
    port: int
    token: str
    nodes: Tuple[str, ...]
    lost_after: float = 60.0
    others: Tuple[Tuple[str, int], ...] = ()
    most: Optional[int] = None

    @property
    def width(self) -> int:
        """How many agents are connected to the hub; the others are connected to these, see ``link/relay.py``.

        Up to ``STAR`` nodes: all. Beyond, as many as each of them serves: the square root of their number.
        """
        if self.most is not None:
            return self.most
        count = len(self.nodes)
        return count if count <= STAR else math.isqrt(count - 1) + 1

    def address(self, position: int) -> Tuple[str, int]:
        """Address and port of the agent of a node, by its position in ``nodes``."""
        return (self.host, self.port) if position == 0 or not self.others else self.others[position - 1]


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


class Members(NamedTuple):
    """The nodes of one attempt, in the order of their ranks.

    Attributes:
        nodes: names.
        processes: the local ranks of each.
        master: the address of the first; None: the one that the plan has.
    """

    nodes: Tuple[str, ...]
    processes: Tuple[int, ...]
    master: Optional[str] = None


class Hang(NamedTuple):
    """What counts as a hang, and how the agent reacts to one.

    Attributes:
        after: seconds without progress; None: the pace of the run decides, see ``silence.py``.
        policy: ``stop`` or ``warn``.
    """

    after: Optional[float] = None
    policy: str = "stop"


COPIES = 16  # copies of a node's files at most
SPACE = 1 << 60  # bytes
RAM = "/run/clusterctl/memory"  # where the service tmpfs mounts a file system with huge pages for checkpoints
FROM_MEMORY = 600.0  # seconds in which checkpoints move from RAM to the disk at the end
LAST_COPIES = 120.0  # seconds that a run waits for copies of its last checkpoint after its program has ended


class Copies(NamedTuple):
    """How the agents keep checkpoints safe, see ``trainer/agent/keeping/``.

    Attributes:
        peers: the number of other nodes that get a copy of each node's part of a checkpoint; None: 1 where nodes do not
            share the output folder.
        space: bytes of each node's disk for copies; None: what leaves a tenth of the disk free.
        rate: bytes per second that a node receives at most; None: a share of the network, see ``pacing.py``.
        memory: the option of ``argv`` that names the output folder is set to a folder in RAM, see ``memory.py``. A word
            ``{output}`` in ``argv`` becomes that folder, or the output folder if RAM is too small.
    """

    peers: Optional[int] = None
    space: Optional[int] = None
    rate: Optional[int] = None
    memory: bool = False


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
        argv: the command, with ``WORDS`` in place of what depends on the attempt.
        env: variables of the command, besides the few that it inherits. For each attempt the agent sets ``NNODES``,
            ``NODE_RANK``, ``MASTER_ADDR``, ``MASTER_PORT`` and ``INTERFACE``.
        launcher: the launcher that wrote the plan and can change it.
        each_rank: start the command once for each local rank, with its ``RANK`` and ``LOCAL_RANK``. Else the command
            is a launcher that starts the ranks.
        node_rank: the node's position in ``link.nodes``: its rank in the first attempt, unless it is a spare.
        nnodes: the number of nodes of the first attempt.
        processes: the number of local ranks.
        first_rank: the global rank of local rank 0 in the first attempt; 0 for a spare.
        slots: by node, the GPUs that DeepSpeed starts a rank on: numbers or UUIDs; empty for other launchers.
        min_nodes: the number of nodes with which the run may continue without spares; None: all of them.
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
        copies: how checkpoints are copied; None: they are not.
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
    slots: Dict[str, Tuple[Union[int, str], ...]] = {}  # noqa: RUF012 - never changed
    min_nodes: Optional[int] = None
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
    copies: Optional[Copies] = None
    save: Optional[SaveEvery] = None

    @property
    def attempts(self) -> int:
        """How often the command starts at most."""
        return 1 + self.restarts

    @property
    def members(self) -> Members:
        """The nodes of the first attempt, as far as the plan of one node knows them: all start as many processes."""
        nodes = self.link.nodes[: self.nnodes] if self.link else (self.node,)
        return Members(nodes, (self.processes,) * len(nodes), self.link.host if self.link else None)

    @property
    def memory_patience(self) -> float:
        """Seconds in which checkpoints move from RAM to the disk after the program has ended."""
        return FROM_MEMORY if self.copies is not None and self.copies.memory else 0.0

    def for_attempt(self, members: Members, port: Optional[int] = None, interface: Optional[str] = None) -> "Plan":
        """The plan of a node that takes part in an attempt, with everything filled in that depends on the attempt.

        Args:
            members: the nodes of the attempt.
            port: ``MASTER_PORT``; None: the plan's.
            interface: the interface from which the node reaches rank 0; None: it is not known.
        """
        alone = self.link is None  # its ranks are the plan's: nothing changes them
        rank = self.node_rank if alone else members.nodes.index(self.node)
        first = self.first_rank if alone else sum(members.processes[:rank])
        count = self.nnodes if alone else len(members.nodes)
        port = self.port if port is None else port
        master = members.master or self.env.get("MASTER_ADDR", "")
        world_size = sum(members.processes)
        values = {
            NODE_RANK: str(rank),
            NNODES: str(count),
            MASTER: master,
            FIRST_RANK: str(first),
            WORLD_SIZE: str(world_size),
            EVEN_SIZE: str(self.processes * count),
        }
        if port is not None:
            values[PORT] = str(port)
        if self.slots:
            table = {node: self.slots.get(node, ()) for node in members.nodes}
            values[WORLD_INFO] = WORLD_INFO.partition("=")[0] + "=" + _encoded(table)
        kept = [word for word in self.argv if world_size > 1 or not word.startswith(SEVERAL)]
        words = [word[len(SEVERAL) :] if word.startswith(SEVERAL) else values.get(word, word) for word in kept]
        env = {key: _with_interface(value, interface) for key, value in self.env.items()}
        env.update(NNODES=values[NNODES], NODE_RANK=values[NODE_RANK])
        env.update({"MASTER_ADDR": master} if master else {})
        env.update({} if port is None else {"MASTER_PORT": str(port)})
        if self.each_rank:
            env.update(WORLD_SIZE=values[WORLD_SIZE], LOCAL_WORLD_SIZE=str(self.processes))
        return self._replace(
            argv=tuple(words),
            env={key: value for key, value in env.items() if value is not None},
            node_rank=rank,
            nnodes=count,
            first_rank=first,
            port=port,
            link=self.link and self.link._replace(host=master, nodes=members.nodes, others=()),
        )

    def needs_interface(self) -> bool:
        """Whether the environment has a place for the interface."""
        return any(value.lstrip("=") == INTERFACE for value in self.env.values())

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failed attempts in a row."""
        return min(BACKOFF_LIMIT, self.backoff * 2.0 ** min(failures - 1, 16))

    def to_object(self) -> Dict[str, Any]:
        """The plan as plain JSON values."""
        named = (("link", self.link), ("resume", self.resume), ("copies", self.copies), ("save", self.save))
        parts = {key: part._asdict() if part is not None else None for key, part in named}
        band = self.expected and self.expected.to_object()
        return dict(self._asdict(), version=VERSION, hang=self.hang._asdict(), expected=band, **parts)

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        return json.dumps(self.to_object(), sort_keys=True)


def _encoded(table: Dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(table).encode()).decode()


def _with_interface(value: str, interface: Optional[str]) -> Optional[str]:
    """A variable's value with the interface; None: the variable is not set, because no interface is known."""
    if value not in (INTERFACE, "=" + INTERFACE):
        return value
    return value.replace(INTERFACE, interface) if interface else None


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
    count = len(plan.link.nodes) if plan.link is not None else plan.nnodes
    if plan.node_rank >= count:
        raise PlanError("node_rank is %d, but there are %d nodes" % (plan.node_rank, count))
    if count < plan.nnodes:
        raise PlanError("link.nodes has %d names for %d nodes" % (count, plan.nnodes))
    if plan.link is not None and plan.link.others and len(plan.link.others) != count - 1:
        raise PlanError("link.others has %d addresses for %d nodes" % (len(plan.link.others), count))
    if plan.link is not None and not plan.link.others and count > plan.nnodes:
        raise PlanError("link.others is missing, and there are spares")
    if plan.min_nodes is not None and plan.min_nodes > plan.nnodes:
        raise PlanError("min_nodes is %d, but there are %d nodes" % (plan.min_nodes, plan.nnodes))
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
        if not is_whole(value, most + 1, least):
            raise PlanError("%s must be a whole number from %d to %d" % (key, least, most))
        return int(value)

    return read


def _seconds(key: str, value: Any) -> float:
    if not is_number(value, least=0.0) or value > _LONG:
        raise PlanError("%s must be a number of seconds" % key)
    return float(value)


def _texts(key: str, value: Any) -> Tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise PlanError("%s must be a list of texts" % key)
    return tuple(value)


def _addresses(key: str, value: Any) -> Tuple[Tuple[str, int], ...]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(one, (list, tuple)) and len(one) == 2 for one in value
    ):
        raise PlanError("%s must be a list of addresses and ports" % key)
    return tuple((_text(key, host), _PORT(key, port)) for host, port in value)


def _slots(key: str, value: Any) -> Dict[str, Tuple[Union[int, str], ...]]:
    if not isinstance(value, dict) or not all(isinstance(each, (list, tuple)) for each in value.values()):
        raise PlanError("%s must be an object of lists" % key)
    for each in value.values():
        if any(isinstance(one, bool) or not isinstance(one, (int, str)) for one in each):
            raise PlanError("%s must have numbers or names of GPUs" % key)
    return {node: tuple(each) for node, each in value.items()}


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
_LINK: Dict[str, Reader] = {
    **dict.fromkeys(("host", "token"), _text),
    "port": _PORT,
    "nodes": _texts,
    "lost_after": _seconds,
    "others": _addresses,
    "most": _or_null(_whole(1, _RANKS)),
}
_COPIES: Dict[str, Reader] = {
    "peers": _or_null(_whole(0, COPIES)),
    "space": _or_null(_whole(0, SPACE)),
    "rate": _or_null(_whole(1, SPACE)),
    "memory": _flag,
}
_PLAN: Dict[str, Reader] = dict(
    argv=_command,
    env=_variables,
    node_rank=_whole(0, _RANKS),
    nnodes=_whole(1, _RANKS),
    processes=_whole(1, _RANKS),
    first_rank=_whole(0, _RANKS),
    slots=_slots,
    min_nodes=_or_null(_whole(1, _RANKS)),
    restarts=_whole(0, _RANKS),
    port=_or_null(_PORT),
    link=_or_null(_part(Link, _LINK)),
    hang=_part(Hang, {"after": _or_null(_seconds), "policy": _policy}),
    resume=_or_null(_part(Resume, {"output": _text, "argv": _texts, "env": _variables, "known": _flag})),
    expected=_or_null(_band),
    copies=_or_null(_part(Copies, _COPIES)),
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
