"""How DeepSpeed is told which ops need no compiling: the file that its own ``setup.py`` would have written. Pure."""

from __future__ import annotations

import ast
import csv
import hashlib
from collections.abc import Iterable, Mapping

from provision.env.relocation.records import record_row

FILE = "git_version_info_installed.py"  # beside ``git_version_info.py``, which imports everything from it

_NO_OP = "deepspeed_not_implemented"

_WITHOUT_ONE = """\
version={version!r}
git_hash='unknown'
git_branch='unknown'
installed_ops={{}}
accelerator_name='cpu'
torch_info={{'version': '0.0', 'cuda_version': '0.0', 'nccl_version': '0.0', 'hip_version': '0.0'}}
"""

# DeepSpeed takes a built op only where the accelerator is the one that it was built beside. These run on the CPU beside
# any; but where ops were built before, they are for the accelerator that the file names.
_ADDED = """

# Added by clusterctl pack-env: ops that it built for {baseline}.
class _OnTheCpu(str):
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        return other in ('cpu', 'cuda') or str.__eq__(self, other)

    def __ne__(self, other):
        return not self == other


if not any(installed_ops.values()):
    accelerator_name = _OnTheCpu(accelerator_name)
installed_ops.update(dict.fromkeys({names!r}, True))
torch_info['version'] = {torch!r}
"""


def listing(before: str | None, *, names: Iterable[str], baseline: str, deepspeed: str, torch: str) -> str:
    """The file's new text.

    Args:
        before: its text in the environment; None if there is none.
        names: the ops that were built.
        baseline: the processors that they were built for.
        deepspeed: DeepSpeed's version.
        torch: torch's version.
    """
    short = ".".join(torch.split(".")[:2])  # as DeepSpeed compares it
    text = before if before is not None else _WITHOUT_ONE.format(version=deepspeed)
    return text.rstrip("\n") + "\n" + _ADDED.format(baseline=baseline, names=tuple(sorted(names)), torch=short)


def unbuilt(text: str) -> tuple[str, ...]:
    """The ops that are not built yet, from the file's text."""
    try:
        return tuple(sorted(_waiting(ast.parse(text)) - {_NO_OP}))
    except (SyntaxError, ValueError, TypeError, IndexError):
        return ()  # not as DeepSpeed writes it


def _waiting(program: ast.Module) -> set[str]:
    waiting: set[str] = set()
    for node in ast.walk(program):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and _names(node, "installed_ops"):
            table = ast.literal_eval(node.value)
            waiting |= {str(name) for name, is_built in table.items() if not is_built}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fromkeys":
            waiting -= set(ast.literal_eval(node.args[0]))  # what we have added ourselves
    return waiting


def _names(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def record(before: str, site_files: Mapping[str, bytes]) -> str:
    """A RECORD with the rows of files that are new or changed.

    Args:
        before: the RECORD's text.
        site_files: the files, by path relative to ``site-packages``.
    """
    lines = []
    left = dict(site_files)
    for line in before.splitlines(keepends=True):
        name = "".join(next(csv.reader([line]), [])[:1])  # an empty line has none
        lines.append(_row(name, left.pop(name)) if name in left else line)
    return "".join((*lines, *(_row(name, data) for name, data in sorted(left.items()))))


def _row(name: str, data: bytes) -> str:
    return record_row(name, hashlib.sha256(data).digest(), len(data), end="\n")
