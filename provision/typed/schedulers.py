"""``srun``, ``sbatch`` and ``mpirun`` in front of a command: their numbers of nodes and processes are the job's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.typed.shell import UNKNOWN, assignment
from provision.typed.state import INVENTORY, State, program_of, split_options, words_of

# srun(1) and sbatch(1), Slurm 24.11
_SLURM_VALUES = dict.fromkeys(
    words_of(
        "-N -n -c -p -A -J -t -w -x -G -o -e -i -q -D -C -d --nodes --ntasks --ntasks-per-node --tasks-per-node "
        "--cpus-per-task --partition --account --job-name --time --nodelist --exclude --gpus --gres --gpus-per-node "
        "--gpus-per-task --cpus-per-gpu --mem --mem-per-cpu --mem-per-gpu --output --error --input --qos --chdir "
        "--constraint --export --mpi --cpu-bind --gpu-bind --jobid --reservation --container-image --container-name "
        "--container-mounts --container-workdir --distribution --hint --threads-per-core --dependency --signal "
        "--licenses --open-mode"
    ),
    1,
)
_SLURM_COUNTS = {
    **dict.fromkeys(("-N", "--nodes"), "nodes"),
    **dict.fromkeys(("-n", "--ntasks"), "total"),
    **dict.fromkeys(("--ntasks-per-node", "--tasks-per-node"), "per_node"),
}
# mpirun(1) of Open MPI 5 and MPICH 4
_MPI_VALUES = {
    **dict.fromkeys(
        words_of(
            "-np -n -c -N -npernode --npernode -ppn --ppn -perhost -H -host --host -hosts -hostfile --hostfile "
            "-machinefile --machinefile -f -x -bind-to --bind-to -map-by --map-by -rank-by --rank-by -prefix --prefix "
            "-iface -wdir --wdir -output-filename --output-filename -genvlist -path --path --timeout"
        ),
        1,
    ),
    **dict.fromkeys(words_of("-mca --mca -gmca --gmca -genv -env"), 2),
}
_MPI_COUNTS = {
    **dict.fromkeys(("-np", "-n", "-c"), "total"),
    **dict.fromkeys(words_of("-N -npernode --npernode -ppn --ppn -perhost"), "per_node"),
}
_LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")


def srun(words: Sequence[str], state: State) -> list[str]:
    """The command that ``srun`` starts."""
    before, rest = split_options(words, _SLURM_VALUES)
    slurm_options(before[1:], state, "srun")
    state.drop(" ".join(before), INVENTORY)
    return rest


def sbatch(words: Sequence[str], state: State) -> tuple[list[str], str | None]:
    """The script of ``sbatch`` with its arguments, and the command of ``--wrap``."""
    before, rest = split_options(words, _SLURM_VALUES)
    slurm_options(before[1:], state, "sbatch")
    state.drop(" ".join(before), INVENTORY)
    return rest, next((word.partition("=")[2] for word in before if word.startswith("--wrap=")), None)


def slurm_options(options: Sequence[str], state: State, program: str) -> None:
    """Use the numbers and the variables (``--export``) in options of Slurm.

    Raises:
        UsageError: a number is none.
    """
    for place, word in enumerate(options):
        name, has, value = word.partition("=")
        if attached := re.fullmatch(r"(-[Nn])([0-9]+)", word):
            name, has, value = attached[1], "=", attached[2]
        after = options[place + 1] if place + 1 < len(options) else None
        if name in _SLURM_COUNTS:
            number = value if has else after
            if number is None or UNKNOWN not in number:
                state.count(_SLURM_COUNTS[name], number, f"{program} {name} {number}")
        elif name == "--export":
            pairs = map(assignment, (value if has else after or "").split(","))
            state.env.update(pair for pair in pairs if pair is not None)


def mpirun(words: Sequence[str], state: State) -> list[str]:
    """The command that ``mpirun`` or ``mpiexec`` starts, with the variables of ``-x``.

    Raises:
        UsageError: a number is none.
    """
    before, rest = split_options(words, _MPI_VALUES)
    for place, word in enumerate(before):
        value, second = (*before[place + 1 : place + 3], "", "")[:2]
        if word in _MPI_COUNTS:
            state.count(_MPI_COUNTS[word], value, f"mpirun {word} {value}")
        elif word in ("-H", "-host", "--host", "-hosts"):
            hosts = len({host.partition(":")[0] for host in value.split(",") if host})
            state.counts["nodes"] = (max(1, hosts), shown(f"mpirun {word} {value}"))
        elif word in ("-genv", "-env"):
            state.env[value] = second
        elif word == "-x":
            name, has, text = value.partition("=")
            if has or name in state.environ:
                state.env[name] = text if has else state.environ[name]
    state.drop(" ".join(before), INVENTORY)
    return rest


def one_launcher_per_node(words: Sequence[str], state: State) -> None:
    """If a launcher starts the ranks, ``srun`` and ``mpirun`` start one launcher on each node.

    Raises:
        UsageError: they would start several on a node.
    """
    name = program_of(words[0])
    if name not in _LAUNCHERS and "torch.distributed" not in " ".join(words[1:3]):
        return
    per_node, total = state.counts.pop("per_node", None), state.counts.pop("total", None)
    if total is not None:
        state.counts.setdefault("nodes", total)
    nodes = state.counts.get("nodes")
    several = per_node if per_node and per_node[0] > 1 else total if total and nodes and total[0] > nodes[0] else None
    if several:
        raise UsageError(
            f"{several[1]}: {name} would start several times on each node",
            hint=f"clusterctl train -- {' '.join(map(quote, words))}",
        )
