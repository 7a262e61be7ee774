"""What people type around a launcher's command: variables, activation, ``nohup``, ``conda run``, redirections.

Each wrapper is removed, and a notice names it with the reason. What cannot be followed is refused with the command to
type instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from provision.errors import UsageError
from provision.inventory.document import printable, shown
from provision.typed import schedulers, scripts
from provision.typed.shell import UNKNOWN, NotUnderstoodError, Simple, Values, assignment, commands, of_words
from provision.typed.state import LOGS, RELEASE, TERMINAL, Known, State, program_of, split_options, words_of

_Rest = list[str] | tuple[str, ...] | None

_LONGEST = 4000  # characters of a command in a notice
_DEEPEST = 20  # wrappers and scripts in each other
# Programs that change nothing for the training, with the options that have a value.
_TRANSPARENT: Mapping[str, Mapping[str, int]] = {
    **{name: {} for name in words_of("nohup unbuffer setsid exec numactl caffeinate")},
    "time": {"-o": 1, "-f": 1},
    "stdbuf": {"-o": 1, "-e": 1, "-i": 1},
    "nice": {"-n": 1},
    "ionice": {"-c": 1, "-n": 1},
    "sudo": {"-u": 1, "-g": 1},
}
_WHY = {
    **dict.fromkeys(("nohup", "setsid"), TERMINAL),
    "numactl": "torchrun --numa-binding binds ranks",
    "sudo": "the run belongs to the user of the inventory",
}
# Programs that choose an environment: PROGRAM SUBCOMMAND [OPTIONS] COMMAND.
_CONDA = dict.fromkeys(words_of("-n --name -p --prefix --cwd"), 1)
_UV = dict.fromkeys(words_of("--with -p --python --project --extra --group --env-file"), 1)
_ENVIRONMENTS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    **dict.fromkeys(("conda", "mamba", "micromamba"), ("run", _CONDA)),
    **{name: ("run", {}) for name in words_of("poetry pipenv rye hatch pdm")},
    "uv": ("run", _UV),
    "pixi": ("run", {"-e": 1, "--environment": 1}),
}
_REFUSED = {
    **dict.fromkeys(("ssh", "pdsh"), "clusterctl reaches the nodes itself: give the command that it would start"),
    **dict.fromkeys(
        words_of("docker podman singularity apptainer"),
        "a run uses the release on the nodes: give the command that would start in the container",
    ),
}
_ACTIVATION = re.compile(r"(^|/)(activate|conda\.sh|setvars\.sh|modules?\.sh|\.?(bashrc|profile|bash_profile|zshrc))$")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_SCRIPTS = (".sh", ".bash", ".bat", ".cmd", ".ps1", ".sbatch", ".slurm")
# Commands that only print or prepare. They are dropped, and named.
_HARMLESS = frozenset(
    words_of(
        "echo printf command hash date hostname whoami "
        "sleep true : wait chmod clear free which type ls cat pause title chcp exit "
        "return nvidia-smi gpustat uname pwd df du printenv ulimit umask trap shopt setlocal endlocal mkdir rem touch "
        "tail head mode color cls ver tput write-host module ml test [ [[ !"
    )
)
_PREPARES = dict.fromkeys(words_of("pip pip3 apt apt-get"), "packages are in the packed environment")
_FILTERS = words_of("tee ts grep cat sed awk head tail")
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
        windows: the words are for Windows, so a backslash separates folders.
    """

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    counts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    windows: bool = False


def unwrap(words: Sequence[str], known: Known, environ: Mapping[str, str]) -> Typed:
    """The launcher's command in a command line.

    Args:
        words: the typed words. A single word with blanks is a quoted command line.
        known: whether words are a launcher's command, a script or a configuration.
        environ: variables of the user's shell, for launch scripts.

    Raises:
        UsageError: it cannot be followed, or it starts no training or several.
    """
    env: dict[str, str] = {}
    state = State(known, environ, env, Values(env, environ=environ))
    text = shown(" ".join(words)[:200])
    try:
        if len(words) == 1 and re.search(r"\s", words[0]) and not _is_file(words[0]):
            found = _line(words[0], state)
        else:
            found = _sequence(of_words(words), state)
    except NotUnderstoodError as error:
        raise UsageError(
            f"{text}: {error} is not understood",
            hint="type only the launcher's command: clusterctl train -- torchrun SCRIPT.py",
        ) from None
    if found is None:
        only = "no command after the variables" if state.env and not state.notices else "it starts no training"
        raise UsageError(f"{text}: {only}", hint="clusterctl train -- NAME=VALUE torchrun SCRIPT.py")
    return Typed(found, state.env, tuple(state.notices), state.counts, state.windows)


def harmless(words: Sequence[str]) -> bool:
    """Whether a command of a launch script only prints, checks or prepares."""
    return not words or program_of(words[0]) in _HARMLESS


def _line(text: str, state: State) -> tuple[str, ...] | None:
    """The one training in a command line of a POSIX shell, of cmd (``set A=b``) or of PowerShell (``$env:A=``)."""
    kind = "ps1" if re.search(r"\$env:\w", text) else "bat" if re.search(r"(^|\n|&)\s*set\s+\w+=", text) else "sh"
    if kind == "sh":
        return _sequence(commands(text, state.values), state)
    state.windows = True
    program = scripts.Program(shown(text[:60]), kind, text)
    return scripts.interpret(program, state.values, lambda simple: _sequence([simple], state), harmless)


def _sequence(simples: Iterable[Simple], state: State) -> tuple[str, ...] | None:
    """The one training among simple commands."""
    found: list[tuple[str, ...]] = []
    piped = False
    for simple in simples:
        if piped and simple.words and simple.words[0] in _FILTERS:
            state.drop("| " + " ".join(simple.words), LOGS)
        elif simple.words and (inner := _command(simple.words, state)) is not None:
            found.append(inner)
            for text in simple.redirects:
                state.drop(text, LOGS)
            if simple.after == "&":
                state.drop("&", "--detach returns once the run has started")
        piped = simple.after in ("|", "|&")
    if len(found) > 1:
        raise UsageError(
            f"{shown(' '.join(found[0]))} and {shown(' '.join(found[1]))}: a run starts one program",
            hint=f"clusterctl train -- {' '.join(map(quote, found[-1]))}",
        )
    return found[0] if found else None


def _command(words: Sequence[str], state: State) -> tuple[str, ...] | None:
    """The training that a simple command starts; None if it only prepares.

    Raises:
        UsageError: a command that cannot be followed.
    """
    rest: _Rest = list(words)
    while isinstance(rest, list) and rest:
        pair = assignment(rest[0]) or _powershell(rest[0])
        if pair is not None:
            state.env[pair[0]] = pair[1]
            rest = rest[1:]
        elif program_of(rest[0]) in ("export", "set", "setenv", "declare", "env"):
            rest = _set(rest, state)
        elif state.known(rest):
            return _settled(rest, state)
        else:
            rest = _remove(program_of(rest[0]), rest, state)
    return rest if isinstance(rest, tuple) else None


def _set(words: list[str], state: State) -> list[str] | None:
    """``export A=b [COMMAND]``, ``set A=b`` (cmd), ``setenv A b``, ``env A=b COMMAND``. None: nothing follows."""
    program, rest = program_of(words[0]), words[1:]
    if program == "setenv":
        if len(rest) > 1:
            state.env[rest[0]] = rest[1]
        return rest[2:] or None
    if program == "set" and rest and rest[0][:1] in ("-", "+") and "=" not in rest[0]:  # set -euo pipefail
        return None
    while rest and (rest[0].startswith("-") or assignment(rest[0]) is not None):
        if (pair := assignment(rest[0])) is not None:
            state.env[pair[0]] = pair[1]
        elif program == "env" and rest[0] == "-u":
            rest = rest[1:]
        rest = rest[1:]
    if program in ("export", "declare") and not state.known(rest or [""]) and all(map(str.isidentifier, rest)):
        return None  # export NAME: its value was set before
    return rest or None


def _powershell(word: str) -> tuple[str, str] | None:
    """``$env:NAME="VALUE"`` as PowerShell has it."""
    found = re.fullmatch(r"\$env:([A-Za-z_]\w*)=[\"']?(.*?)[\"']?;?", word, re.ASCII)
    return (found[1], found[2]) if found else None


def _remove(program: str, words: list[str], state: State) -> _Rest:
    """The words without a wrapper; a tuple if they are the training already; None if they only prepare."""
    if program in _HARMLESS or program in _PREPARES:
        state.drop(" ".join(words)[:60], _PREPARES.get(program, ""))
        return None
    state.depth += 1
    if state.depth > _DEEPEST:
        raise UsageError(f"{shown(' '.join(words))}: too many commands in each other", hint="type the innermost one")
    if program in _TRANSPARENT:
        before, rest = split_options(words, _TRANSPARENT[program])
        state.drop(" ".join(before), _WHY.get(program, ""))
        return rest
    if program in _ENVIRONMENTS and words[1:2] == [_ENVIRONMENTS[program][0]]:
        before, rest = split_options(words[1:], _ENVIRONMENTS[program][1])
        state.drop(" ".join([program, *before]), RELEASE)
        return rest
    handler = _script if program.endswith(_SCRIPTS) else _HANDLERS.get(program, _other)
    return handler(words, state)


def _other(words: list[str], state: State) -> tuple[str, ...] | None:
    """A program that is no wrapper: dropped in a launch script, else for the caller to refuse."""
    program = program_of(words[0])
    if program in _REFUSED:
        raise UsageError(f"{shown(program)} cannot be run on the nodes", hint=_REFUSED[program])
    if not state.inside:
        return tuple(words)
    state.drop(" ".join(words)[:60], "only the training is run")
    return None


def _timeout(words: list[str], state: State) -> list[str]:
    before, rest = split_options(words, {"-s": 1, "-k": 1})
    state.drop(" ".join([*before, *rest[:1]]), "clusterctl stop RUN ends a run")
    return rest[1:]


def _taskset(words: list[str], state: State) -> list[str]:
    before, rest = split_options(words, {})
    state.drop(" ".join([*before, *rest[:1]]), _WHY["numactl"])
    return rest[1:]


def _activation(words: list[str], state: State) -> None:
    """``conda activate X``, ``source FILE`` and the like."""
    text = " ".join(words)[:80]
    if words[0] in ("source", ".") and len(words) > 1 and not _ACTIVATION.search(words[1]):
        state.drop(text, "its variables are not set; give them with --env NAME=VALUE")
    else:
        state.drop(text, RELEASE)


def _sbatch(words: list[str], state: State) -> tuple[str, ...] | None:
    rest, wrapped = schedulers.sbatch(words, state)
    return _sequence(commands(wrapped, state.values), state) if wrapped is not None else _script(rest, state)


def _interpreter(words: list[str], state: State) -> tuple[str, ...] | None:
    """``bash SCRIPT``, ``bash -c COMMAND``, ``cmd /c SCRIPT``, ``powershell -File SCRIPT``."""
    plain = [word for word in words if word.lower() not in ("/c", "/k")]
    before, rest = split_options(plain, {"-ExecutionPolicy": 1})
    if rest and program_of(words[0]) in _SHELLS and any(re.fullmatch(r"-[a-z]*c", word) for word in before):
        return _sequence(commands(rest[0], state.values), state)
    return _script(rest, state)


def _script(words: list[str], state: State) -> tuple[str, ...]:
    """The command that a launch script means, which a notice shows.

    Raises:
        UsageError: it cannot be read or followed, or it starts no training or several.
    """
    if not words:
        raise UsageError("no script to run", hint="clusterctl train -- torchrun SCRIPT.py")
    name = words[0]
    program = scripts.read(name)
    state.windows = state.windows or program.kind != "sh"
    for options in program.slurm:
        schedulers.slurm_options(options, state, "#SBATCH")
    outer, state.values = state.values, Values(dict(state.env), tuple(words[1:]), name, state.environ)
    state.inside = True
    try:
        found = scripts.interpret(program, state.values, lambda simple: _sequence([simple], state), harmless)
    except NotUnderstoodError as error:
        raise UsageError(
            f"{shown(name)}: {error} is not understood",
            hint="type the command that it starts: clusterctl train -- torchrun SCRIPT.py (clusterctl sets the ranks)",
        ) from None
    state.values = outer
    for key in [key for key, value in state.env.items() if UNKNOWN in value]:
        del state.env[key]
        state.drop(f"{key}=…", "its value is known only where the script runs; --env NAME=VALUE sets it")
    means = [*(f"{key}={quote(value)}" for key, value in state.env.items()), *map(quote, found)]
    state.notices.insert(0, f"{shown(name)} means: {printable(' '.join(means))[:_LONGEST]}")
    return found


def _terminal(words: list[str], state: State) -> _Rest:
    """``tmux new -d -s NAME COMMAND`` and ``screen -dmS NAME COMMAND``."""
    tmux = words[0] == "tmux"
    if tmux and words[1:2] not in (["new"], ["new-session"]):
        raise UsageError(f"{shown(' '.join(words))}: it starts no training", hint="clusterctl train -- torchrun …")
    options = dict.fromkeys(words_of("-s -n -c -x -y" if tmux else "-S -dmS -dmLS -Logfile"), 1)
    before, rest = split_options(words[1:] if tmux else words, options)
    state.drop(" ".join(["tmux", *before] if tmux else before), TERMINAL)
    return _sequence(commands(rest[0], state.values), state) if len(rest) == 1 else rest


def _cd(words: list[str], state: State) -> None:
    """``cd``: only to the current folder, where the training starts."""
    del state
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


def _settled(words: Sequence[str], state: State) -> tuple[str, ...]:
    """The command without options that clusterctl sets, if only a running script knows their value."""
    kept: list[str] = []
    skip = False
    for word, after in zip(words, (*words[1:], ""), strict=True):
        if skip:
            skip = False
            continue
        option, has, _ = word.partition("=")
        ours = _SET_BY_RUN.fullmatch("--" + option.lstrip("-").replace("-", "_")) and option.startswith("-")
        skip = bool(ours) and not has and UNKNOWN in after
        if skip or (ours and UNKNOWN in word):
            state.drop(option, "clusterctl sets it")
        elif UNKNOWN in word:
            text = shown(word.replace(UNKNOWN, "?"))
            raise NotUnderstoodError(f"{text} (a value that only the running script knows)")
        else:
            kept.append(word)
    schedulers.one_launcher_per_node(kept, state)
    return tuple(kept)


def _is_file(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


_HANDLERS: Mapping[str, Callable[[list[str], State], _Rest]] = {
    "timeout": _timeout,
    "taskset": _taskset,
    "cd": _cd,
    "srun": schedulers.srun,
    "sbatch": _sbatch,
    **dict.fromkeys(words_of("conda mamba micromamba pyenv source . call eval"), _activation),
    **dict.fromkeys(words_of("mpirun mpiexec mpiexec.hydra orterun"), schedulers.mpirun),
    **dict.fromkeys(("cmd", "powershell", "pwsh", *_SHELLS), _interpreter),
    **dict.fromkeys(("tmux", "screen"), _terminal),
}
