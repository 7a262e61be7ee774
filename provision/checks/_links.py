"""What the checks of NVLink share: nvidia-smi's lists of links and its matrices. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_GPU = re.compile(r"GPU (\d+): (.*?)(?: \(UUID: .*\))?$")
_LINK = re.compile(r"Link (\d+): (.*)$")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_NAME = re.compile(r"(?:GPU|NIC|mlx|hca|roce|ib|bnxt)\S*\d\S*")

Matrix = Mapping[tuple[str, str], str]


@dataclass(frozen=True)
class Gpu:
    """A GPU in the answer of ``nvidia-smi nvlink``: its links by number, and what is said of each."""

    index: str
    model: str
    links: tuple[tuple[int, str], ...]


def links(out: str) -> tuple[Gpu, ...]:
    """What ``nvidia-smi nvlink`` says of the links of each GPU; a link may have several lines."""
    heads: list[tuple[str, str]] = []
    found: list[list[tuple[int, str]]] = []
    for line in out.splitlines():
        if head := _GPU.match(line):
            heads.append((head[1], head[2]))
            found.append([])
        elif found and (link := _LINK.match(line.strip())):
            found[-1].append((int(link[1]), link[2].strip()))
    return tuple(Gpu(*head, tuple(lines)) for head, lines in zip(heads, found, strict=True))


def matrix(out: str) -> Matrix:
    """The cells of ``nvidia-smi topo``: of GPUs (rows) with GPUs and network cards; the header is underlined."""
    lines = [_STYLE.sub("", line) for line in out.splitlines()]
    header = next((line for line in lines if re.match(r"\s+GPU0\b", line)), "")
    columns = [cell for cell in re.split(r"\s*\t\s*", header.strip()) if _NAME.fullmatch(cell)]
    found = {}
    for line in lines:
        cells = line.strip().split("\t")
        if re.fullmatch(r"GPU\d+", cells[0].strip()):
            for column, cell in zip(columns, cells[1:], strict=False):
                found[cells[0].strip(), column] = cell.strip()
    return {pair: cell for pair, cell in found.items() if cell != "X"}
