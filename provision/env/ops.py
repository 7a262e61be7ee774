"""Build the ops that DeepSpeed would compile on the nodes, which have no compiler, and keep them in a cache.

The environment is only read. Its own Python compiles into a temporary folder, and the files for the bundle are kept in
a cache with their paths in the prefix. ``git_version_info_installed.py`` tells DeepSpeed which ops are installed: it is
the file that DeepSpeed's own ``setup.py`` would have written.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.env.relocation import record_row
from provision.env.source.files import Source, walk
from provision.errors import UsageError
from provision.render import render

FILE = "git_version_info_installed.py"  # beside ``git_version_info.py``, which imports everything from it

_NO_OP = "deepspeed_not_implemented"

_EMPTY = """\
version={version!r}
git_hash='unknown'
git_branch='unknown'
installed_ops={{}}
accelerator_name='cpu'
torch_info={{'version': '0.0', 'cuda_version': '0.0', 'nccl_version': '0.0', 'hip_version': '0.0'}}
"""

# DeepSpeed loads a built op only with the accelerator it was built for. These run on the CPU with any accelerator; ops
# that were built before are for the accelerator in the file.
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

RESULT = "result.json"

_PROGRAM = "ops/compile_ops.py.j2"
_TIMEOUT = 3600.0  # seconds; the largest op takes a minute or two


@dataclass(frozen=True)
class Baseline:
    """A CPU type that every node supports.

    Attributes:
        name: the compilers' name (``-march``).
        platform: conda's name of the platform.
        simd: the macro for the vector width in DeepSpeed's sources (``csrc/includes/simd.h``).
    """

    name: str
    platform: str
    simd: str


# x86-64-v3 (AVX2, FMA, F16C) is every server since Haswell (2013) and Zen (2017), v4 (AVX-512) Skylake-SP and Zen 4.
# Source: the x86-64 psABI, "Micro-architecture levels".
BASELINES = (
    Baseline("x86-64-v3", "linux-64", "__AVX256__"),
    Baseline("x86-64-v4", "linux-64", "__AVX512__"),
    Baseline("x86-64-v2", "linux-64", "__SCALAR__"),
    Baseline("armv8-a", "linux-aarch64", "__NEON__"),
)


def choose(name: str | None, platform: str) -> Baseline | None:
    """Choose the baseline with that name, or the platform's default; None for a platform without one.

    Raises:
        UsageError: the platform has no such baseline.
    """
    known = [one for one in BASELINES if one.platform == platform]
    if name is None:
        return known[0] if known else None
    for one in known:
        if one.name == name:
            return one
    names = ", ".join(one.name for one in known) or "none"
    raise UsageError(f"{name!r} is not a CPU baseline for {platform}", hint=f"known: {names}")


@dataclass(frozen=True)
class Ops:
    """Ops that were built.

    Attributes:
        baseline: the CPU type they were built for; empty if there is none.
        built: their names.
        missing: the names of the others, each with a reason.
        additions: files to pack in addition to the environment's own, or in their place.
    """

    baseline: str = ""
    built: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    additions: tuple[Source, ...] = ()

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices for the user."""
        found = []
        if self.built:
            found.append(f"DeepSpeed's {', '.join(self.built)} were built for {self.baseline} and added")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.missing:
            reasons.setdefault(reason, []).append(name)
        found += [
            f"DeepSpeed's {', '.join(names)} could not be built, and need a compiler on the nodes: {reason}"
            for reason, names in reasons.items()
        ]
        return tuple(found)


def prebuild(
    prefix: Path, sites: Iterable[str], baseline: Baseline | None, cache: Path, *, names: Iterable[str] | None = None
) -> Ops:
    """Build the ops of an environment's DeepSpeed that run on the CPU, or take them from the cache.

    Args:
        prefix: the environment.
        sites: its ``site-packages`` folders, relative to the prefix.
        baseline: the CPU type to build for; None for a platform without a baseline.
        cache: the cache folder.
        names: only these ops; None for all.

    Returns:
        The ops; none without DeepSpeed. An error is a reason in ``missing``, since the bundle works without ops.
    """
    site = next((site for site in sites if (prefix / site / "deepspeed" / "ops" / "op_builder").is_dir()), None)
    if site is None:
        return Ops()
    if baseline is None:
        return Ops(missing=(("ops", "no CPU baseline is known for this platform"),))
    wanted = None if names is None else sorted(names)
    try:
        home = cache / "ops" / _key(prefix, site, baseline, wanted)
        failure = "" if (home / RESULT).exists() else _build(prefix, site, baseline, wanted, home)
        if not failure:
            return _read_cache(prefix, baseline, home)
    except Exception as error:  # noqa: BLE001 - a full disk, a package with unexpected files
        failure = str(error) or type(error).__name__
    return Ops(baseline.name, missing=(("ops", failure),))


def _read_cache(prefix: Path, baseline: Baseline, home: Path) -> Ops:
    """The ops in a folder of the cache."""
    result = json.loads((home / RESULT).read_bytes())
    files = walk(home / "tree", "", skip=lambda _path, _name: False).sources
    return Ops(
        baseline=baseline.name,
        built=tuple(name for name, _, _ in result["ops"]),
        missing=tuple((name, reason) for name, reason in result["missing"]),
        additions=tuple(one for one in files if one.type == "file" or not (prefix / one.path).exists()),
    )


def unbuilt(prefix: Path, sites: Iterable[str]) -> tuple[str, ...]:
    """The notice for an environment whose ops are not built during packing."""
    for site in sites:
        listed = prefix / site / "deepspeed" / FILE
        try:
            names = unbuilt_ops(listed.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue  # missing, or unreadable, which ``pack`` reports
        if names:
            text = f"DeepSpeed compiles {', '.join(names)} on the nodes if they are used, and fails without a compiler"
            return (f"{text}; clusterctl pack-env --with-ops builds here what it can",)
    return ()


def _build(prefix: Path, site: str, baseline: Baseline, names: list[str] | None, home: Path) -> str:
    """Build into ``home``, which is renamed into place when complete. Returns the reason of a failure, or nothing."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".building-") as folder:
        scratch = Path(folder)
        request = {
            "scratch": folder,
            "march": baseline.name,
            "simd": baseline.simd,
            "prefix": str(prefix),
            "names": names,
        }
        (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
        failure = compile_ops(prefix, scratch)
        if failure:
            return failure
        result = json.loads((scratch / RESULT).read_bytes())
        _stage_files(prefix, site, result, baseline, scratch / "done")
        (scratch / "done" / RESULT).write_text(json.dumps(result), encoding="utf-8")
        if not home.exists():
            (scratch / "done").rename(home)
    return ""


def compile_ops(prefix: Path, scratch: Path) -> str:
    """Compile the ops of ``scratch/request.json`` with the environment's Python. Returns the reason of a failure."""
    python = prefix / "bin" / "python"
    program = scratch / "compile_ops.py"
    program.write_text(render(_PROGRAM), encoding="utf-8")
    words: list[str | Path] = [python, "-I", "-B", program, scratch / "request.json", scratch / RESULT]
    try:
        done = subprocess.run(
            words, cwd=scratch, env=_environ(prefix, scratch), stdin=subprocess.DEVNULL, capture_output=True,
            check=False, timeout=_TIMEOUT,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    last = (done.stderr.decode(errors="replace").strip() or "it failed without a message").splitlines()[-1]
    return "" if done.returncode == 0 else last


def _environ(prefix: Path, scratch: Path) -> dict[str, str]:
    """Environment variables: the environment's programs first, and every cache in ``scratch``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DS_", "LD_"))}
    return own | {
        "PATH": f"{prefix}/bin:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "HOME": str(scratch),
        "DS_ACCELERATOR": "cpu",
        "MAX_JOBS": str(len(os.sched_getaffinity(0))),
        "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }


def _stage_files(prefix: Path, site: str, result: Mapping[str, Any], baseline: Baseline, done: Path) -> None:
    """Write the built ops, DeepSpeed's list of them, and the updated RECORD to their paths in the prefix."""
    top = done / "tree"
    added: dict[str, bytes] = {}
    for _, module, path in result["ops"]:
        added[f"{module.replace('.', '/')}.so"] = Path(path).read_bytes()
    if added:
        listed = prefix / site / "deepspeed" / FILE
        text = listing(
            listed.read_text(encoding="utf-8") if listed.exists() else None,
            names=[name for name, _, _ in result["ops"]],
            baseline=baseline.name,
            deepspeed=result["deepspeed"],
            torch=result["torch"],
        )
        added[f"deepspeed/{FILE}"] = text.encode()
        for record in _records(prefix, site):
            name = str(record.relative_to(prefix / site))
            added[name] = update_record(record.read_text(encoding="utf-8"), added).encode()
    top.mkdir(parents=True)
    for name, data in added.items():
        path = top / site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name.endswith(".so") else 0o644)
        # Reproducible; and a .pyc file of another build cannot match.
        os.utime(path, (result["mtime"], result["mtime"]))
    if added:
        source = top / site / "deepspeed" / FILE
        argv: list[str | Path] = [prefix / "bin" / "python", "-I", "-m", "py_compile", source]
        subprocess.run(argv, check=True, capture_output=True)


def _key(prefix: Path, site: str, baseline: Baseline, names: list[str] | None) -> str:
    """The cache key: equal if a build would give the same files."""
    inputs = {
        "prefix": str(prefix),
        "names": names,
        "baseline": baseline.name,
        "packages": sorted(
            path.name for top in ("torch", "deepspeed") for path in (prefix / site).glob(f"{top}-*.dist-info")
        ),
        "python": os.path.realpath(prefix / "bin" / "python").rpartition("/")[2],
        "compiler": _version(os.environ.get("CXX", "c++")),
        "listed": _digest(prefix / site / "deepspeed" / FILE),
        "records": [_digest(path) for path in _records(prefix, site)],
        "program": hashlib.sha256(render(_PROGRAM).encode()).hexdigest(),
        "site": site,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _records(prefix: Path, site: str) -> list[Path]:
    return sorted((prefix / site).glob("deepspeed-*.dist-info/RECORD"))


def _version(program: str) -> str:
    if shutil.which(program) is None:
        return ""
    done = subprocess.run([program, "--version"], capture_output=True, check=False)
    return done.stdout.decode(errors="replace").partition("\n")[0]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def listing(before: str | None, *, names: Iterable[str], baseline: str, deepspeed: str, torch: str) -> str:
    """The new content of the file.

    Args:
        before: its content in the environment; None if it is missing.
        names: the built ops.
        baseline: the CPU type they were built for.
        deepspeed: DeepSpeed's version.
        torch: torch's version.
    """
    short = ".".join(torch.split(".")[:2])  # DeepSpeed compares these
    text = before if before is not None else _EMPTY.format(version=deepspeed)
    return text.rstrip("\n") + "\n" + _ADDED.format(baseline=baseline, names=tuple(sorted(names)), torch=short)


def unbuilt_ops(text: str) -> tuple[str, ...]:
    """The ops that are not built, from the content of the file."""
    try:
        return tuple(sorted(_waiting(ast.parse(text)) - {_NO_OP}))
    except (SyntaxError, ValueError, TypeError, IndexError):
        return ()  # not written by DeepSpeed


def _waiting(program: ast.Module) -> set[str]:
    waiting: set[str] = set()
    for node in ast.walk(program):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and _assigns(node, "installed_ops"):
            table = ast.literal_eval(node.value)
            waiting |= {str(name) for name, is_built in table.items() if not is_built}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fromkeys":
            waiting -= set(ast.literal_eval(node.args[0]))  # added by clusterctl
    return waiting


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def update_record(before: str, site_files: Mapping[str, bytes]) -> str:
    """Add new and changed files to a RECORD.

    Args:
        before: the RECORD's content.
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
