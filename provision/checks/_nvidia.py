"""What the checks of GPUs share: the questions that several of them ask, the answers as data, words for findings.

Every call of nvidia-smi starts with looking at all GPUs, so what every driver since 525 (CUDA 12) can tell is asked at
once: checks with the same probe share its answer. The format was seen with driver 580.159.04
(``nvidia-smi --help-query-gpu`` explains the fields): one line a GPU, values with ", " between them, and "[N/A]" for
what a GPU does not have.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass

from provision.checks import Answer, not_here, unknown
from provision.checks._judging import found_as, odd
from provision.model import Finding, Verdict

SMI = "nvidia-smi"
FIELDS = (
    "index",
    "driver_version",
    "name",
    "compute_cap",
    "memory.total",
    "memory.used",
    "vbios_version",
    "inforom.img",
    "persistence_mode",
    "mig.mode.current",
    "compute_mode",
    "ecc.mode.current",
    "ecc.mode.pending",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.uncorrected.aggregate.sram",
    "temperature.gpu",
    "temperature.memory",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "pcie.link.gen.max",
    "power.limit",
    "power.default_limit",
)

_NOT_THERE = ("[N/A]", "N/A", "[Not Supported]", "")
_NUMBERS = ("memory.", "ecc.errors.", "temperature.", "pcie.link.", "power.")
_SWITCHES = ("persistence_mode", "mig.mode.current", "ecc.mode.current", "ecc.mode.pending")
_POSITIONS = ("Enabled", "Disabled")


def query(*fields: str) -> str:
    """Sh that asks for fields of every GPU; what it prints is read by ``rows``."""
    return f"{SMI} --query-gpu={','.join(fields)} --format=csv,noheader,nounits"


GPUS = query(*FIELDS)


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi's answer."""

    index: str
    values: Mapping[str, str]

    def __getitem__(self, field: str) -> str:
        return self.values[field]

    def has(self, field: str) -> bool:
        """Whether this GPU knows the field at all."""
        return self.values[field] not in _NOT_THERE

    def number(self, field: str) -> float | None:
        """The field's number; None where the GPU does not have it."""
        return _number(self.values[field])


def rows(answer: Answer, fields: tuple[str, ...] = FIELDS) -> tuple[Gpu, ...] | str:
    """The GPUs of an answer to ``query(*fields)``, ``index`` first among them; text: why there are none to read."""
    lines = said(answer)
    if nothing(answer):
        return ()
    values = [re.split(r",\s*", line) for line in lines]
    if answer.rc or not values or any(len(row) != len(fields) or not row[0].isdecimal() for row in values):
        return trouble(answer)
    return tuple(Gpu(row[0], dict(zip(fields, row, strict=True))) for row in values)


def said(answer: Answer) -> tuple[str, ...]:
    """The lines of an answer without nvidia-smi's warnings (of a damaged InfoROM), which may stand beside any."""
    return tuple(line for line in answer.lines if not line.upper().startswith("WARNING"))


def nothing(answer: Answer) -> bool:
    """Whether nvidia-smi says that there is no GPU."""
    return any(line.startswith("No devices were found") for line in answer.lines)


def trouble(answer: Answer) -> str:
    """Why nvidia-smi's answer is none, in a few words."""
    first = next(iter((*answer.lines, *answer.err.splitlines())), "it said nothing")
    if found := re.search(r'Field "(\S+)" is not a valid field', answer.out + answer.err):
        return f"this driver's nvidia-smi does not know {found[1]}"
    return f"nvidia-smi gave no answer that can be read (exit code {answer.rc}): {first[:160]}"


def unanswered(check: str, node: str, answer: Answer) -> Finding:
    """OK where there is no GPU, else UNKNOWN: what a check says of an answer that is none."""
    if nothing(answer):
        return not_here(check, node, "no GPU")
    is_old = "not a valid field" in answer.out + answer.err
    fix = "a newer driver tells it" if is_old else f"run nvidia-smi on {node}; the check gpu.driver tells more"
    return unknown(check, node, trouble(answer), fix=fix)


def gpus(
    check: str, answers: Mapping[str, Answer], *used: str, fields: tuple[str, ...] = FIELDS
) -> Generator[Finding, None, dict[str, tuple[Gpu, ...]]]:
    """The GPUs of every node that has some, by its name; a finding for each of the other nodes.

    Args:
        check: the id.
        answers: to ``query(*fields)``.
        used: the fields that the check looks at: a GPU that cannot tell one of them makes the node UNKNOWN.
        fields: what was asked.
    """
    found = {}
    for node, answer in answers.items():
        read = rows(answer, fields)
        if isinstance(read, str) or not read:
            yield unanswered(check, node, answer)
        elif silent := {gpu.index: gpu[name] for gpu in read for name in used if _broken(name, gpu[name])}:
            yield unknown(check, node, each(silent), fix=f"run nvidia-smi -q on {node}; reset the GPU or reboot")
        else:
            found[node] = read
    return found


def _broken(field: str, text: str) -> bool:
    """``[GPU requires reset]``, ``[GPU is lost]``, ``[Unknown Error]``, and what no value of the field looks like."""
    if text in _NOT_THERE:
        return False
    if field.startswith(_NUMBERS):
        return _number(text) is None
    return text == "ERR!" or text.startswith("[") or (field in _SWITCHES and text not in _POSITIONS)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) else None


def each(values: Mapping[str, str]) -> str:
    """``GPU 0-2, 5: Enabled; GPU 3: Disabled`` from the value of each GPU."""
    found: dict[str, list[str]] = {}
    for index, value in values.items():
        found.setdefault(value, []).append(index)
    return "; ".join(f"GPU {ranges(indexes)}: {value}" for value, indexes in found.items())


def ranges(indexes: Iterable[str]) -> str:
    """``0-2, 5`` from 0, 1, 2 and 5."""
    parts: list[tuple[int, int]] = []
    for index in sorted(int(index) for index in indexes):
        if parts and index == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], index)
        else:
            parts.append((index, index))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def alike(
    check: str, nodes: Mapping[str, Mapping[str, str]], *, what: str, fix: str, verdict: Verdict
) -> Iterator[Finding]:
    """A finding for every node: the GPUs of a node have one value, and all nodes the same.

    Args:
        check: the id.
        nodes: for each node, the value of each GPU by its index.
        what: the noun that stands before the value.
        fix: what to do.
        verdict: for a node whose GPUs differ, from one another or from those of the other nodes.
    """
    mixed = {node: values for node, values in nodes.items() if len(set(values.values())) > 1}
    for node, values in mixed.items():
        yield found_as(check, node, verdict, each(values), expected="the same for all GPUs of a node", fix=fix)
    same = {node: next(iter(values.values())) for node, values in nodes.items() if node not in mixed}
    yield from odd(check, same, what=what, fix=fix, verdict=verdict)
