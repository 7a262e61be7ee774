"""Programs on the GPUs that a run is to have: asked of nvidia-smi, and told apart from runs of our own. Pure.

The check gpu.busy fails for any process. A run is stopped only by one that holds memory it will miss: services such as
DCGM or MPS keep some dozen MiB open for ever.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from provision.checks.kit.gpu import SMI
from provision.checks.kit.probing import Probe
from provision.model import Finding
from provision.run.gate_rules import devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from provision.checks import Answer
    from provision.model import Node
    from provision.run import Facts

CHECK = "gpu.gate"
LEAST = 256  # MiB
_MIB = re.compile("[0-9]{1,9}")  # nvidia-smi prints "[N/A]" where it does not know

# ``gpu INDEX, UUID``, then a line for each process and GPU, with the login name of its owner before it.
_TEXT = f"""\
{SMI} --query-gpu=index,uuid --format=csv,noheader | sed 's/^/gpu /'
{SMI} --query-compute-apps=pid,used_memory,gpu_uuid,process_name --format=csv,noheader,nounits |
    while IFS= read -r line; do
        pid=${{line%%,*}}
        case $pid in '' | *[!0-9]*) continue ;; esac
        owner=$(stat -c %U "/proc/$pid" 2>/dev/null) || owner=somebody
        printf 'process %s, %s\\n' "$owner" "$line"
    done
"""
PROBE = Probe(CHECK, _TEXT, 20, SMI)


def busy(
    nodes: Sequence[Node], answers: Mapping[str, Answer], facts: Mapping[str, Facts], visible: Mapping[str, str]
) -> Iterator[Finding]:
    """FAIL for programs that are no run of ours (``gate_rules.runs`` names those) and hold a GPU's memory.

    Args:
        nodes: that shall take part.
        answers: to ``PROBE``.
        facts: of each node.
        visible: by node name, the CUDA_VISIBLE_DEVICES that the run will have; all GPUs of nodes not named.
    """
    for node in nodes:
        answer = answers.get(node.name)
        if answer is None or answer.state != "answered":
            continue  # no nvidia-smi, or one that hangs: the check gpu.driver says so
        ours = {pid for run in facts[node.name].runs for pid in run["pids"]}
        wanted = _wanted(answer, facts[node.name], node, visible.get(node.name))
        found: dict[int, tuple[str, str, list[str], list[str]]] = {}
        for owner, pid, used, index, name in _processes(answer):
            elsewhere = wanted is not None and index not in wanted
            if int(pid) in ours or elsewhere or (_MIB.fullmatch(used) and int(used) < LEAST):
                continue
            entry = found.setdefault(int(pid), (owner, name.rsplit("/", 1)[-1], [], []))
            entry[2].append(index)
            entry[3].append(used)
        if found:
            told = [_told(pid, *entry) for pid, entry in list(found.items())[:8]]
            said = "; ".join(told) + (f"; {len(found) - 8} more" if len(found) > 8 else "")
            fix = f"wait for it or ask its owner: ps -fp {','.join(map(str, list(found)[:8]))} on {node.name}"
            yield Finding(CHECK, node.name, "FAIL", said, "no other program", fix=fix)


def _told(pid: int, owner: str, name: str, gpus: list[str], used: list[str]) -> str:
    memory = f"{sum(map(int, used))} MiB" if all(map(_MIB.fullmatch, used)) else "memory"
    return f"process {pid} ({name}) of {owner} holds {memory} of GPU {', '.join(gpus)}"


def _processes(answer: Answer) -> Iterator[tuple[str, str, str, str, str]]:
    """Owner, pid, MiB, index of the GPU, program."""
    index = dict(re.findall(r"^gpu (\d{1,9}), (\S+)$", answer.out, flags=re.MULTILINE))
    by_uuid = {uuid: number for number, uuid in index.items()}
    for owner, pid, used, uuid, name in re.findall(
        r"^process (.*?), (\d{1,18}), (.*?), (.*?), (.*)$", answer.out, flags=re.MULTILINE
    ):
        yield owner, pid, used, by_uuid.get(uuid, uuid), name


def _wanted(answer: Answer, facts: Facts, node: Node, visible: str | None) -> frozenset[str] | None:
    """The indexes of the GPUs that the run will use there; None for all."""
    if visible is not None:
        uuids = re.findall(r"^gpu (\d{1,9}), (\S+)$", answer.out, flags=re.MULTILINE)
        return devices(visible) | {
            index for index, uuid in uuids for word in devices(visible) if word[:4] == "GPU-" and uuid.startswith(word)
        }
    if node.gpus and node.gpus < facts.gpus:
        return frozenset(str(number) for number in range(node.gpus))
    return None
