"""What the checks of NVLink share: nvidia-smi's lists of links and its matrices. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_GPU = re.compile(r"GPU (\d+): (.*?)(?: \(UUID: .*\))?$")
_LINK = re.compile(r"Link (\d+): (.*)$")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_NAME = re.compile(r"(?:GPU|NIC|mlx|hca|roce|ib|bnxt)\S*\d\S*")

Matrix = Mapping[tuple[str, str], str]


def links(out: str) -> dict[str, list[tuple[int, str]]]:
    """What ``nvidia-smi nvlink`` says of the links of each GPU: pairs of a link's number and the text behind it."""
    found: dict[str, list[tuple[int, str]]] = {}
    for line in out.splitlines():
        if gpu := _GPU.match(line):
            found[gpu[1]] = []
        elif found and (link := _LINK.match(line.strip())):
            list(found.values())[-1].append((int(link[1]), link[2].strip()))
    return found


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
