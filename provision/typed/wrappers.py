"""What people type around a launcher's command: variables, activation, ``nohup``, ``conda run``, ``srun``, ``mpirun``.

Each wrapper is removed, and a notice names it with the reason. Numbers of nodes and processes are kept: they are the
job's. What cannot be followed is refused with the command to type instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.render import quote
from provision.typed import scripts
from provision.typed.shell import UNKNOWN, NotUnderstoodError, Simple, Values, assignment, commands, of_words

Known = Callable[[Sequence[str]], bool]

_PREPARES = dict.fromkeys(("pip", "pip3", "apt-get", "apt"), "packages are in the packed environment")
_DEEPEST = 8  # wrappers and scripts in each other
_LOGS = "the logs of all ranks are in runs/RUN"
_RELEASE = "the run uses the environment of the nodes' release"
# Programs that change nothing for the training, with the number of values of each option that has any.
_TRANSPARENT: Mapping[str, Mapping[str, int]] = {
    "nohup": {},
    "time": {"-o": 1, "-f": 1},
    "stdbuf": {"-o": 1, "-e": 1, "-i": 1},
    "unbuffer": {},
    "nice": {"-n": 1},
    "ionice": {"-c": 1, "-n": 1},
    "setsid": {},
    "exec": {},
    "command": {},
    "numactl": {},
    "taskset": {"-c": 1, "-p": 1},
    "sudo": {"-u": 1, "-g": 1},
    "caffeinate": {},
}
_WHY = {
    "nohup": "a run does not need the terminal; --detach returns once it has started",
    "setsid": "a run does not need the terminal; --detach returns once it has started",
    "numactl": "torchrun --numa-binding binds ranks",
    "taskset": "torchrun --numa-binding binds ranks",
    "sudo": "the run belongs to the user of the inventory",
}
# Programs that choose an environment: PROGRAM SUBCOMMAND [OPTIONS] COMMAND.
_ENVIRONMENTS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    **dict.fromkeys(
        ("conda", "mamba", "micromamba"), ("run", {"-n": 1, "--name": 1, "-p": 1, "--prefix": 1, "--cwd": 1})
    ),
    "uv": ("run", {"--with": 1, "-p": 1, "--python": 1, "--project": 1, "--extra": 1, "--group": 1, "--env-file": 1}),
    "poetry": ("run", {}),
    "pipenv": ("run", {}),
    "pixi": ("run", {"-e": 1, "--environment": 1}),
    "rye": ("run", {}),
    "hatch": ("run", {}),
    "pdm": ("run", {}),
}
_SRUN_VALUES = [
    "-N",
    "-n",
    "-c",
    "-p",
    "-A",
    "-J",
    "-t",
    "-w",
    "-x",
    "-G",
    "-o",
    "-e",
    "-i",
    "-q",
    "-D",
    "-C",
    "-d",
    "--nodes",
    "--ntasks",
    "--ntasks-per-node",
    "--cpus-per-task",
    "--partition",
    "--account",
    "--job-name",
    "--time",
    "--nodelist",
    "--exclude",
    "--gpus",
    "--gres",
    "--gpus-per-node",
    "--gpus-per-task",
    "--mem",
    "--mem-per-cpu",
    "--mem-per-gpu",
    "--output",
    "--error",
    "--input",
    "--qos",
    "--chdir",
    "--constraint",
    "--export",
    "--mpi",
    "--cpu-bind",
    "--gpu-bind",
    "--jobid",
    "--reservation",
    "--container-image",
    "--container-mounts",
    "--container-name",
    "--container-workdir",
    "--distribution",
    "--hint",
    "--threads-per-core",
    "--cpus-per-gpu",
    "--tasks-per-node",
    "--dependency",
    "--signal",
    "--licenses",
    "--open-mode",
]
_MPI_VALUES = {
    **dict.fromkeys(
        [
            "-np",
            "-n",
            "-c",
            "-N",
            "-npernode",
            "--npernode",
            "-ppn",
            "--ppn",
            "-H",
            "-host",
            "--host",
            "-hosts",
            "-hostfile",
            "--hostfile",
            "-machinefile",
            "--machinefile",
            "-f",
            "-x",
            "-bind-to",
            "--bind-to",
            "-map-by",
            "--map-by",
            "-rank-by",
            "--rank-by",
            "-prefix",
            "--prefix",
            "-iface",
            "-wdir",
            "--wdir",
            "--output-filename",
            "-output-filename",
            "-genvlist",
            "-path",
            "--path",
            "--timeout",
            "-perhost",
        ],
        1,
    ),
    **dict.fromkeys(["-mca", "--mca", "-genv", "-env", "--gmca", "-gmca"], 2),
}
_REFUSED = {
    "ssh": "clusterctl reaches the nodes itself: give the command that ssh would start",
    "pdsh": "clusterctl reaches the nodes itself: give the command that pdsh would start",
    **dict.fromkeys(
        ("docker", "podman", "singularity", "apptainer"),
        "a run uses the release on the nodes: give the command that would start in the container",
    ),
}
_ACTIVATION = re.compile(
    r"(^|/)(activate|conda\.sh|\.?bashrc|\.?profile|\.?bash_profile|\.?zshrc|modules?\.sh|setvars\.sh)$"
)
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_SCRIPTS = (".sh", ".bash", ".bat", ".cmd", ".ps1", ".sbatch", ".slurm")
# Commands that only print or prepare. They are dropped, and named.
_HARMLESS = frozenset(
    [
        "echo",
        "printf",
        "date",
        "hostname",
        "whoami",
        "sleep",
        "true",
        ":",
        "wait",
        "chmod",
        "clear",
        "free",
        "which",
        "type",
        "ls",
        "cat",
        "pause",
        "title",
        "chcp",
        "exit",
        "return",
        "nvidia-smi",
        "gpustat",
        "uname",
        "pwd",
        "df",
        "du",
        "env",
        "printenv",
        "ulimit",
        "umask",
        "trap",
        "shopt",
        "setlocal",
        "endlocal",
        "mkdir",
        "rem",
        "touch",
        "tail",
        "head",
        "mode",
        "color",
        "cls",
        "ver",
        "tput",
        "write-host",
        "module",
        "ml",
        "test",
        "[",
        "[[",
        "!",
    ]
)
# Options that clusterctl sets itself: a value that only a running script knows is not needed.
_SET_BY_RUN = re.compile(
    r"--?(nnodes|num_machines|num_nodes|nproc_per_node|num_processes|num_gpus|node_rank|machine_rank|master_addr|"
    r"master_port|main_process_ip|main_process_port|rdzv_(endpoint|id|backend|conf)|hostfile|log_dir|local_rank)"
)


@dataclass(frozen=True)
class Typed:
    """A command without what is around it.

    Attributes:
        words: the launcher's command.
        env: variables that were set before it.
        notices: what was dropped or replaced, and why.
        counts: numbers of ``nodes``, and of processes ``per_node`` or in ``total``, each with the text that gives it.
        windows: the words are from a batch file or a PowerShell script, so a backslash separates folders.
    """

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    counts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    windows: bool = False


@dataclass
class _State:
    """The state while wrappers are removed."""

    known: Known
    environ: Mapping[str, str]
    env: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    counts: dict[str, tuple[int, str]] = field(default_factory=dict)
    depth: int = 0
    inside: bool = False  # a launch script is read: programs that are no training are dropped
    batch: bool = False  # it is a batch file or a PowerShell script

    def drop(self, text: str, why: str = "") -> None:
        """Note what is dropped, once."""
        notice = f"{shown(text)}: dropped" + (f"; {why}" if why else "")
        if notice not in self.notices:
            self.notices.append(notice)

    def count(self, key: str, value: str | None, text: str) -> None:
        """Note a number of nodes or processes.

        Raises:
            UsageError: it is not a number.
        """
        if value is None or not re.fullmatch(r"0*[1-9][0-9]{0,6}", value):
            raise UsageError(
                f"{shown(text)}: not a number of nodes or processes", hint="clusterctl train --nodes N -- …"
            )
        self.counts[key] = (int(value), shown(text))


def unwrap(words: Sequence[str], known: Known, environ: Mapping[str, str] | None = None) -> Typed | None:
    """The launcher's command in a command line; None if nothing is around it.

    Args:
        words: the typed words. A single word with blanks is a quoted command line.
        known: whether words are a launcher's command, a script or a configuration.
        environ: variables of the user's shell, for launch scripts.

    Raises:
        UsageError: it cannot be followed, or it starts no training or several.
    """
    state = _State(known, environ or {})
    try:
        if len(words) == 1 and re.search(r"\s", words[0]) and not _is_file(words[0]):
            found = _sequence(commands(words[0]), state)
        else:
            found = _sequence(of_words(words), state)
    except NotUnderstoodError as error:
        raise UsageError(
            f"{shown(' '.join(words))}: {error} is not understood",
            hint="type only the launcher's command: clusterctl train -- torchrun SCRIPT.py",
        ) from None
    if found is None:
        raise UsageError(
            f"{shown(' '.join(words))}: it starts no training", hint="clusterctl train -- torchrun SCRIPT.py"
        )
    if found == tuple(words) and not (state.env or state.notices or state.counts):
        return None
    return Typed(found, state.env, tuple(state.notices), state.counts, state.batch)


def _sequence(simples: Sequence[Simple], state: _State) -> tuple[str, ...] | None:
    """The one training among simple commands."""
    found: list[tuple[str, ...]] = []
    piped = False
    for simple in simples:
        if piped and simple.words and simple.words[0] in ("tee", "ts", "grep", "cat", "sed", "awk", "head", "tail"):
            state.drop("| " + " ".join(simple.words), _LOGS)
            piped = simple.after in ("|", "|&")
            continue
        inner = command(simple.words, state) if simple.words else None
        for text in simple.redirects:
            if inner is not None:
                state.drop(text, _LOGS)
        if inner is not None:
            found.append(inner)
            if simple.after == "&":
                state.drop("&", "--detach returns once the run has started")
        piped = simple.after in ("|", "|&")
    if len(found) > 1:
        raise UsageError(
            f"{shown(' '.join(found[0]))} and {shown(' '.join(found[1]))}: a run starts one program",
            hint=f"clusterctl train -- {' '.join(map(quote, found[-1]))}",
        )
    return found[0] if found else None


def command(words: Sequence[str], state: _State) -> tuple[str, ...] | None:
    """The training that a simple command starts; None if it only prepares.

    Raises:
        UsageError: a command that cannot be followed.
    """
    rest = list(words)
    while rest:
        if (pair := assignment(rest[0])) is not None:
            state.env[pair[0]] = pair[1]
            rest = rest[1:]
            continue
        if (pair := _powershell(rest[0])) is not None:
            state.env[pair[0]] = pair[1]
            rest = rest[1:]
            continue
        program = _program(rest[0])
        if program in ("export", "set", "setenv", "declare", "env"):
            after = _set(program, rest, state)
            if after is None:
                return None
            rest = after
            continue
        if state.known(rest):
            return _settled(rest, state)
        after = _remove(program, rest, state)
        if after is None:
            return None
        if isinstance(after, tuple):
            return after
        rest = after
    return None


def _program(word: str) -> str:
    return word.replace("\\", "/").rpartition("/")[2].lower().removesuffix(".exe")


def _remove(program: str, words: list[str], state: _State) -> list[str] | tuple[str, ...] | None:
    """The words without a wrapper; a tuple if they are the training already; None if they only prepare."""
    state.depth += 1
    if state.depth > _DEEPEST:
        raise UsageError(f"{shown(' '.join(words))}: too many commands in each other", hint="type the innermost one")
    if program in _TRANSPARENT:
        before, rest = _options(words, _TRANSPARENT[program])
        state.drop(" ".join(before), _WHY.get(program, ""))
        return rest
    if program in _ENVIRONMENTS and words[1:2] == [_ENVIRONMENTS[program][0]]:
        before, rest = _options(words[1:], _ENVIRONMENTS[program][1])
        state.drop(" ".join([program, *before]), _RELEASE)
        return rest
    if program in _HARMLESS or program in _PREPARES:
        state.depth -= 1
        state.drop(" ".join(words)[:60], _PREPARES.get(program, ""))
        return None
    if program.endswith(_SCRIPTS):
        return _script(words, state)
    handler = _HANDLERS.get(program)
    return handler(words, state) if handler else _other(program, words, state)


def _timeout(words: list[str], state: _State) -> list[str]:
    before, rest = _options(words, {"-s": 1, "-k": 1})
    state.drop(" ".join([*before, *rest[:1]]), "clusterctl stop RUN ends a run")
    return rest[1:]


def _other(program: str, words: list[str], state: _State) -> tuple[str, ...] | None:
    """A program that is no wrapper: dropped in a launch script, else for the caller to refuse."""
    if program in _REFUSED:
        raise UsageError(f"{shown(program)} cannot be run on the nodes", hint=_REFUSED[program])
    if not state.inside:
        return tuple(words)
    state.drop(" ".join(words)[:60], "only the training is run")
    return None


def _options(words: Sequence[str], values: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Split ``PROGRAM [OPTIONS] COMMAND`` before the command."""
    place = 1
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        word = words[place]
        place += 1 + (0 if "=" in word else values.get(word, 0))
    return list(words[:place]), list(words[place + (words[place : place + 1] == ["--"]) :])


def _set(program: str, words: list[str], state: _State) -> list[str] | None:
    """``export A=b [COMMAND]``, ``set A=b`` (cmd), ``setenv A b``, ``env A=b COMMAND``. None: nothing follows."""
    rest = words[1:]
    if program == "setenv":
        if len(rest) > 1:
            state.env[rest[0]] = rest[1]
        return rest[2:] or None
    if program == "set" and rest and (rest[0][:1] in "-+" and "=" not in rest[0]):  # set -euo pipefail
        return None
    while rest and (rest[0].startswith("-") or assignment(rest[0]) is not None):
        if (pair := assignment(rest[0])) is not None:
            state.env[pair[0]] = pair[1]
        elif program == "env" and rest[0] == "-u":
            rest = rest[1:]
        rest = rest[1:]
    if program in ("export", "declare") and rest and not state.known(rest) and all(map(str.isidentifier, rest)):
        return None  # export NAME: its value was set before
    return rest or None


def _powershell(word: str) -> tuple[str, str] | None:
    """``$env:NAME="VALUE"`` as PowerShell has it."""
    found = re.fullmatch(r"\$env:([A-Za-z_]\w*)=[\"']?(.*?)[\"']?;?", word, re.ASCII)
    return (found[1], found[2]) if found else None


def _activation(words: list[str], state: _State) -> list[str] | None:
    text, program = " ".join(words)[:80], words[0]
    if program == "call" and len(words) > 1 and not words[1].lower().endswith(("activate", "activate.bat", "conda")):
        return words[1:]
    if program in ("source", ".") and len(words) > 1 and not _ACTIVATION.search(words[1]):
        state.drop(text, "its variables are not set; give them with --env NAME=VALUE")
        return None
    state.drop(text, _RELEASE)
    return None


def _srun(words: list[str], state: _State) -> list[str]:
    """The command of ``srun``, with its numbers of nodes and tasks (srun(1), Slurm 24.11)."""
    before, rest = _options(words, dict.fromkeys(_SRUN_VALUES, 1))
    _slurm(before[1:], state, "srun")
    state.drop(" ".join(before), "clusterctl starts the nodes of the inventory")
    return _tasks(rest, state, "srun")


def _slurm(options: Sequence[str], state: _State, program: str) -> None:
    names = {"-N": "nodes", "--nodes": "nodes", "-n": "total", "--ntasks": "total"}
    names |= dict.fromkeys(("--ntasks-per-node", "--tasks-per-node"), "per_node")
    for place, word in enumerate(options):
        attached = re.fullmatch(r"(-[Nn])([0-9]+)", word)
        name, has, value = word.partition("=")
        if attached:
            name, has, value = attached[1], "=", attached[2]
        if name in names:
            number = value if has else options[place + 1] if place + 1 < len(options) else None
            if number is not None and UNKNOWN in number:
                continue
            state.count(names[name], number, f"{program} {name} {number}")
        elif name == "--export" and has:
            for each in value.split(","):
                if (pair := assignment(each)) is not None:
                    state.env[pair[0]] = pair[1]


def _mpirun(words: list[str], state: _State) -> list[str]:
    """The command of ``mpirun`` (Open MPI 5, MPICH 4), with its numbers of processes and its ``-x`` variables."""
    before, rest = _options(words, _MPI_VALUES)
    names = dict.fromkeys(("-np", "-n", "-c"), "total")
    names |= dict.fromkeys(("-N", "-npernode", "--npernode", "-ppn", "--ppn", "-perhost"), "per_node")
    for place, word in enumerate(before):
        value = before[place + 1] if place + 1 < len(before) else None
        if word in names:
            state.count(names[word], value, f"mpirun {word} {value}")
        elif word in ("-H", "-host", "--host", "-hosts") and value:
            hosts = len({host.partition(":")[0] for host in value.split(",") if host})
            state.counts["nodes"] = (max(1, hosts), shown(f"mpirun {word} {value}"))
        elif word in ("-x", "-genv", "-env") and value:
            name = f"{value}={before[place + 2]}" if word != "-x" and place + 2 < len(before) else value
            if (pair := assignment(name)) is not None:
                state.env[pair[0]] = pair[1]
            elif value in state.environ:
                state.env[value] = state.environ[value]
    state.drop(" ".join(before), "clusterctl starts the nodes of the inventory")
    return _tasks(rest, state, "mpirun")


def _tasks(words: list[str], state: _State, program: str) -> list[str]:
    """Check what ``srun`` and ``mpirun`` start: one launcher on each node, or a script for each rank."""
    inner = words[0].rpartition("/")[2] if words else ""
    if inner in ("torchrun", "accelerate", "deepspeed") or words[1:3] == ["-m", "torch.distributed.run"]:
        total, nodes = state.counts.pop("total", None), state.counts.get("nodes")
        per_node = state.counts.pop("per_node", None)
        if total is not None and nodes is None:
            state.counts["nodes"] = total
        several = per_node if per_node and per_node[0] > 1 else None
        if several is None and total and nodes and total[0] > nodes[0]:
            several = total
        if several:
            raise UsageError(
                f"{several[1]}: {program} would start {inner} several times on each node",
                hint=f"clusterctl train -- {' '.join(map(quote, words))}",
            )
    return words


def _interpreter(words: list[str], state: _State) -> list[str] | tuple[str, ...] | None:
    """``bash SCRIPT``, ``bash -c COMMAND``, ``sbatch SCRIPT``, ``cmd /c SCRIPT``, ``powershell -File SCRIPT``."""
    program = _program(words[0])
    if program == "sbatch":
        before, rest = _options(words, dict.fromkeys(_SRUN_VALUES, 1))
        _slurm(before[1:], state, "sbatch")
        wrapped = next((word.partition("=")[2] for word in before if word.startswith("--wrap=")), None)
        state.drop(" ".join(before), "clusterctl starts the nodes of the inventory")
        if wrapped is not None:
            return _sequence(commands(wrapped), state)
    else:
        options = {"-c": 0, "-File": 0, "-file": 0, "-ExecutionPolicy": 1}
        before, rest = _options([word for word in words if word.lower() not in ("/c", "/k")], options)
        if any(re.fullmatch(r"-[a-z]*c", word) for word in before) and program in _SHELLS:
            return _sequence(commands(rest[0]), state) if rest else None
    if not rest:
        raise UsageError(f"{shown(' '.join(words))}: no script", hint="clusterctl train -- torchrun SCRIPT.py")
    return _script(rest, state)


def _script(words: list[str], state: _State) -> tuple[str, ...]:
    """The command that a launch script means, which a notice shows."""
    name = words[0]
    values = Values({**state.environ, **state.env}, tuple(words[1:]), name)
    program = scripts.read(name)
    state.batch = state.batch or program.kind != "sh"
    for option in program.slurm:
        _slurm(option, state, "#SBATCH")

    def follow(simple: Simple) -> tuple[str, ...] | None:
        return _sequence([simple], state)

    state.inside = True
    try:
        found = scripts.interpret(program, values, follow, harmless)
    except NotUnderstoodError as error:
        raise UsageError(
            f"{shown(name)}: {error} is not understood",
            hint="type the command that it starts: clusterctl train -- torchrun SCRIPT.py (clusterctl sets the ranks)",
        ) from None
    exported = {key: value for key, value in state.env.items() if UNKNOWN not in value}
    state.env = exported
    shown_env = [f"{key}={quote(value)}" for key, value in exported.items()]
    state.notices.insert(0, f"{shown(name)} means: {' '.join([*shown_env, *map(quote, found)])}")
    return found


def harmless(words: Sequence[str]) -> bool:
    """Whether a command of a launch script only prints, checks or prepares."""
    return not words or words[0].replace("\\", "/").rpartition("/")[2].lower() in _HARMLESS


def _terminal(words: list[str], state: _State) -> list[str] | tuple[str, ...] | None:
    """``tmux new -d -s NAME COMMAND`` and ``screen -dmS NAME COMMAND``."""
    program = words[0]
    if program == "tmux":
        if words[1:2] not in (["new"], ["new-session"]):
            raise UsageError(f"{shown(' '.join(words))}: it starts no training", hint="clusterctl train -- torchrun …")
        before, rest = _options(words[1:], {"-s": 1, "-n": 1, "-c": 1, "-x": 1, "-y": 1})
    else:
        before, rest = _options(words, {"-S": 1, "-dmS": 1, "-dmLS": 1, "-L": 0, "-Logfile": 1})
    state.drop(" ".join([program, *before] if program == "tmux" else before), _WHY["nohup"])
    return _sequence(commands(rest[0]), state) if len(rest) == 1 else rest


def _cd(words: list[str]) -> None:
    """``cd``: the training starts in the current folder."""
    rest = [word for word in words[1:] if word.lower() not in ("/d", "--")]
    where = rest[0] if rest else "~"
    try:
        same = UNKNOWN not in where and Path(where).resolve() == Path.cwd().resolve()
    except (OSError, ValueError):
        same = False
    if not same:
        raise UsageError(
            f"cd {shown(where.replace(UNKNOWN, '?'))}: the training starts in the folder where clusterctl is called",
            hint="clusterctl train -- torchrun …" if UNKNOWN in where else f"cd {quote(where)} && clusterctl train …",
        )


def _settled(words: Sequence[str], state: _State) -> tuple[str, ...]:
    """The command without options whose value only a running script knows, if clusterctl sets them."""
    kept: list[str] = []
    skip = False
    for place, word in enumerate(words):
        if skip:
            skip = False
            continue
        after = words[place + 1] if place + 1 < len(words) else ""
        name = word.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        ours = _SET_BY_RUN.fullmatch(name) is not None
        if ours and "=" not in word and UNKNOWN in after:
            skip = True
        if skip or (ours and UNKNOWN in word):
            state.drop(word.partition("=")[0], "clusterctl sets it")
            continue
        if UNKNOWN in word:
            text = word.replace(UNKNOWN, "?")
            raise NotUnderstoodError(f"{shown(text)} (a value that only the running script knows)")
        kept.append(word)
    return tuple(kept)


def _is_file(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


_HANDLERS: Mapping[str, Callable[[list[str], _State], list[str] | tuple[str, ...] | None]] = {
    "timeout": _timeout,
    "srun": _srun,
    "cd": lambda words, _: _cd(words),
    **dict.fromkeys(("conda", "mamba", "micromamba", "pyenv", "source", ".", "call", "eval"), _activation),
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun"), _mpirun),
    **dict.fromkeys(("sbatch", "cmd", "powershell", "pwsh", *_SHELLS), _interpreter),
    **dict.fromkeys(("tmux", "screen"), _terminal),
}
