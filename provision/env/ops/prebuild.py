"""Build what DeepSpeed would compile on the nodes, which have no compiler, and keep it for the next time.

The environment is only read: its own Python compiles into a folder of ours, and what the bundle gets beside the
environment is kept in a cache, laid out as it will lie in the prefix.
"""

from __future__ import annotations

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

from provision.env.ops import installed
from provision.env.ops.baseline import Baseline
from provision.env.source.scan import Found, walk
from provision.render import render

RESULT = "result.json"

_PROGRAM = "ops/compile_ops.py.j2"
_TIMEOUT = 3600.0  # seconds; the largest op takes a minute or two


@dataclass(frozen=True)
class Ops:
    """What was built.

    Attributes:
        baseline: the processors that it was built for; empty if there was nothing to build for.
        built: names of ops.
        missing: names of the others, each with its reason.
        additions: files that the bundle gets beside those of the environment, or in place of them.
    """

    baseline: str = ""
    built: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    additions: tuple[Found, ...] = ()

    @property
    def notices(self) -> tuple[str, ...]:
        """What people should know of it."""
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
    """Build the ops of an environment's DeepSpeed that need no GPU, or find them in the cache.

    Args:
        prefix: the environment.
        sites: its ``site-packages`` folders, relative to the prefix.
        baseline: the processors to build for; None for a platform that has no baseline.
        cache: the folder where built ops are kept.
        names: only these ops; None for all.

    Returns:
        What was built. An environment without DeepSpeed has nothing to build; whatever goes wrong is a reason in
        ``missing``, since the bundle is good without.
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
            return _kept(prefix, baseline, home)
    except Exception as error:  # noqa: BLE001 - a cache on a full disk, a package that is not as DeepSpeed makes it
        failure = str(error) or type(error).__name__
    return Ops(baseline.name, missing=(("ops", failure),))


def _kept(prefix: Path, baseline: Baseline, home: Path) -> Ops:
    """What lies in the cache."""
    result = json.loads((home / RESULT).read_bytes())
    files = walk(home / "tree", "", leave_out=lambda _path, _name: False).found
    return Ops(
        baseline=baseline.name,
        built=tuple(name for name, _, _ in result["ops"]),
        missing=tuple((name, reason) for name, reason in result["missing"]),
        additions=tuple(one for one in files if one.type == "file" or not (prefix / one.path).exists()),
    )


def unbuilt(prefix: Path, sites: Iterable[str]) -> tuple[str, ...]:
    """What is to be said of an environment whose ops are not built while packing."""
    for site in sites:
        listed = prefix / site / "deepspeed" / installed.FILE
        try:
            names = installed.unbuilt(listed.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue  # none; or one that cannot be read, which the pack will say
        if names:
            text = f"DeepSpeed compiles {', '.join(names)} on the nodes if they are used, and fails without a compiler"
            return (f"{text}; clusterctl pack-env --with-ops builds here what it can",)
    return ()


def _build(prefix: Path, site: str, baseline: Baseline, names: list[str] | None, home: Path) -> str:
    """Build into ``home``, which appears only when it is whole; the reason why it does not, or nothing."""
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
        failure = _compile(prefix, scratch)
        if failure:
            return failure
        result = json.loads((scratch / RESULT).read_bytes())
        _lay_out(prefix, site, result, baseline, scratch / "done")
        (scratch / "done" / RESULT).write_text(json.dumps(result), encoding="utf-8")
        if not home.exists():
            (scratch / "done").rename(home)
    return ""


def _compile(prefix: Path, scratch: Path) -> str:
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
    last = (done.stderr.decode(errors="replace").strip() or "it ended without a word").splitlines()[-1]
    return "" if done.returncode == 0 else last


def _environ(prefix: Path, scratch: Path) -> dict[str, str]:
    """The caller's environment with the environment's own programs first, and nothing written outside ``scratch``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DS_", "LD_"))}
    return own | {
        "PATH": f"{prefix}/bin:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "HOME": str(scratch),
        "DS_ACCELERATOR": "cpu",
        "MAX_JOBS": str(len(os.sched_getaffinity(0))),
        "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }


def _lay_out(prefix: Path, site: str, result: Mapping[str, Any], baseline: Baseline, done: Path) -> None:
    """Put what was built, DeepSpeed's list of it, and the RECORD with both, where they will lie in the prefix."""
    top = done / "tree"
    added: dict[str, bytes] = {}
    for _, module, path in result["ops"]:
        added[f"{module.replace('.', '/')}.so"] = Path(path).read_bytes()
    if added:
        listed = prefix / site / "deepspeed" / installed.FILE
        text = installed.listing(
            listed.read_text(encoding="utf-8") if listed.exists() else None,
            names=[name for name, _, _ in result["ops"]],
            baseline=baseline.name,
            deepspeed=result["deepspeed"],
            torch=result["torch"],
        )
        added[f"deepspeed/{installed.FILE}"] = text.encode()
        for record in _records(prefix, site):
            name = str(record.relative_to(prefix / site))
            added[name] = installed.record(record.read_text(encoding="utf-8"), added).encode()
    top.mkdir(parents=True)
    for name, data in added.items():
        path = top / site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name.endswith(".so") else 0o644)
        # The same however often it is built; and no compiled file of another time may pass for this one's.
        os.utime(path, (result["mtime"], result["mtime"]))
    if added:
        source = top / site / "deepspeed" / installed.FILE
        argv: list[str | Path] = [prefix / "bin" / "python", "-I", "-m", "py_compile", source]
        subprocess.run(argv, check=True, capture_output=True)


def _key(prefix: Path, site: str, baseline: Baseline, names: list[str] | None) -> str:
    """Equal where the same would be built, and laid out, again."""
    told = {
        "prefix": str(prefix),
        "names": names,
        "baseline": baseline.name,
        "packages": sorted(
            path.name for top in ("torch", "deepspeed") for path in (prefix / site).glob(f"{top}-*.dist-info")
        ),
        "python": os.path.realpath(prefix / "bin" / "python").rpartition("/")[2],
        "compiler": _version(os.environ.get("CXX", "c++")),
        "listed": _digest(prefix / site / "deepspeed" / installed.FILE),
        "records": [_digest(path) for path in _records(prefix, site)],
        "program": hashlib.sha256(render(_PROGRAM).encode()).hexdigest(),
        "site": site,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _records(prefix: Path, site: str) -> list[Path]:
    return sorted((prefix / site).glob("deepspeed-*.dist-info/RECORD"))


def _version(program: str) -> str:
    if shutil.which(program) is None:
        return ""
    done = subprocess.run([program, "--version"], capture_output=True, check=False)
    return done.stdout.decode(errors="replace").partition("\n")[0]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
