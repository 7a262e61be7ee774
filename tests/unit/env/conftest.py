"""A small environment with everything that makes real ones hard to move."""

import base64
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import pytest

from provision.env.bundle.manifest import FOLDERS
from provision.env.bundle.reader import open_bundle
from provision.env.packing.pack import PackOptions, pack
from provision.env.relocation import Relocated, relocate
from provision.model import ignore

sys.path.append(str(Path(__file__).parent))  # for real_env; last, so that it hides no module

SITE = "lib/python3.11/site-packages"
HARD_LINKS = {  # of a file in a chunk, of one that holds the prefix, of a large one, and two in a read-only folder
    "share/hard/plain.py": f"{SITE}/hello/plain.py",
    "bin/hello-too": "bin/hello",
    "share/hard/big.bin": f"{SITE}/big/big.bin",
    "share/locked/inside/file-too": "share/locked/inside/file",
    "share/locked/inside/plain.py": f"{SITE}/hello/plain.py",
}
LIMIT = 1 << 16  # bytes of a chunk: small, so that a small environment has large files


def write(path: Path, data: str | bytes, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    path.chmod(mode)
    os.utime(path, (1700000000, 1700000000))
    return path


def record_line(prefix: Path, path: Path) -> str:
    data = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{os.path.relpath(path, prefix / SITE)},sha256={digest},{len(data)}\n"


def add_package(prefix: Path, name: str, files: dict[str, str | bytes], version: str = "1.0") -> None:
    """A pip-installed package: ``files`` by path relative to the prefix."""
    info = f"{SITE}/{name}-{version}.dist-info"
    written = [write(prefix / path, data, 0o755 if path.startswith("bin/") else 0o644) for path, data in files.items()]
    written.append(write(prefix / info / "METADATA", f"Name: {name}\nVersion: {version}\n"))
    record = "".join(record_line(prefix, path) for path in written) + f"{name}-{version}.dist-info/RECORD,,\n"
    write(prefix / info / "RECORD", record)


def add_editable(prefix: Path, checkout: Path, name: str) -> None:
    """What ``pip install -e`` with setuptools leaves in an environment."""
    write(checkout / "pyproject.toml", f"[project]\nname = '{name}'\n")
    write(checkout / "src" / name / "__init__.py", f"WHERE = '{checkout}/data'\n")
    write(checkout / "src" / name / "__pycache__" / "__init__.cpython-311.pyc", b"\0\1")
    url = checkout.as_uri()
    add_package(
        prefix,
        name,
        {
            f"{SITE}/__editable__.{name}-0.1.pth": f"{checkout}/src\n",
            f"{SITE}/__editable___{name}_0_1_finder.py": f"MAPPING = {{'{name}': '{checkout}/src/{name}'}}\n",
            f"{SITE}/{name}-0.1.dist-info/direct_url.json": json.dumps({"dir_info": {"editable": True}, "url": url}),
        },
        version="0.1",
    )


def make_env(prefix: Path, checkout: Path | None = None) -> Path:
    python = os.path.realpath(sys.executable)
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python3.11").symlink_to(python)
    (prefix / "bin" / "python").symlink_to("python3.11")
    add_package(
        prefix,
        "hello",
        {
            f"{SITE}/hello/__init__.py": f"PREFIX = '{prefix}'\nDECOY = '{prefix}2/x /data{prefix}'\n",
            f"{SITE}/hello/plain.py": "X = 1\n",
            f"{SITE}/hello/__pycache__/__init__.cpython-311.pyc": f"\1\2{prefix}\0",
            f"{SITE}/hello/__pycache__/plain.cpython-311.pyc": f"\1\2{prefix}\0",
            "bin/hello": f"#!{prefix}/bin/python -I\nimport sys\nprint('hello', sys.argv[1:])\n",
            "bin/hello-env": "#!/usr/bin/env python\nprint('hello')\n",
            "bin/hello-sh": f"#!/bin/sh\nexec {prefix}/bin/python -c 'print(\"hello\")'\n",
        },
    )
    add_package(prefix, "other", {f"{SITE}/other/{n}.py": f"N = {n}\n" * 50 for n in range(40)})
    add_package(prefix, "big", {f"{SITE}/big/big.bin": os.urandom(LIMIT) + bytes(LIMIT) + b"end"})
    padded = f"\x7fELF{prefix}/share/a:{prefix}/lib".encode() + bytes(2 * (255 - len(str(prefix))) + 1) + b"\1tail"
    write(prefix / "lib" / "libconda.so", padded)
    write(prefix / "lib" / "libown.so", b"\x7fELF\0" + f"{prefix}/share/own".encode() + b"\0next\0")
    meta = {
        "name": "python",
        "version": "3.11.7",
        "files": ["lib/libconda.so", "lib/settings.txt"],
        "paths_data": {
            "paths": [
                {"_path": "lib/libconda.so", "file_mode": "binary", "prefix_placeholder": "/" + "p" * 254},
                {"_path": "lib/settings.txt", "file_mode": "text", "sha256_in_prefix": "0" * 64},
            ]
        },
    }
    write(prefix / "lib" / "settings.txt", f"-I{prefix}/include -L{prefix}/lib\n")
    write(prefix / "conda-meta" / "python-3.11.7-0.json", json.dumps(meta))
    write(prefix / "conda-meta" / "history", f"# cmd: conda create -p {prefix}\n")
    (prefix / "share" / "empty").mkdir(parents=True)
    (prefix / "share" / "absolute").symlink_to(prefix / "lib" / "settings.txt")
    (prefix / "share" / "dangling").symlink_to("nowhere/at all")
    for name in (b"\xff\xfe.txt", b"new\nline", b"$(touch x)", b"quo'\"te", b"sp ace", b"l" * 200):
        Path(os.fsdecode(os.fsencode(prefix) + b"/share/" + name)).write_bytes(name)
    write(prefix / "share" / "locked" / "inside" / "file", "locked", 0o444)
    for name, other in HARD_LINKS.items():
        (prefix / name).parent.mkdir(exist_ok=True)
        os.link(prefix / other, prefix / name)
    (prefix / "share" / "locked" / "inside").chmod(0o555)
    (prefix / "share" / "locked").chmod(0o555)
    if checkout is not None:
        add_editable(prefix, checkout, "proj")
    return prefix


def tree(top: Path) -> dict[str, tuple[object, ...]]:
    """The files of a folder, for comparison: kind, mode, whole seconds, content."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = Path(folder) / name
            status = path.lstat()
            key = os.path.relpath(path, top)
            if path.is_symlink():
                found[key] = ("link", str(path.readlink()))
            elif path.is_dir():
                found[key] = ("dir", status.st_mode & 0o777)
            else:
                found[key] = ("file", status.st_mode & 0o777, int(status.st_mtime), path.read_bytes())
    return found


def place(packed: Path, prefix: Path) -> Relocated:
    """Unpack a bundle at ``prefix`` as a node does, but for the way there: tar, the rewritten files, compiled files."""
    bundle = open_bundle(packed)
    manifest = bundle.manifest
    relocated = relocate(manifest, bundle.prefix_files(), PurePosixPath(prefix))
    prefix.mkdir(parents=True)
    tars = [number for number, chunk in enumerate(manifest.chunks) if chunk.kind == "tar"]
    last = [number for number in tars if manifest.chunks[number].package == FOLDERS]
    untar(prefix, (block for number in tars if number not in last for block in bundle.chunk_blocks(number)))
    for entry in manifest.files:
        if entry.raw:
            with (prefix / entry.path).open("wb") as file:
                for number in entry.chunks:
                    file.writelines(bundle.chunk_blocks(number))
            (prefix / entry.path).chmod(entry.mode)
            os.utime(prefix / entry.path, (entry.mtime, entry.mtime))
    for entry, data in relocated.files:
        path = prefix / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.type == "link":
            path.symlink_to(entry.target)
            os.utime(path, (entry.mtime, entry.mtime), follow_symlinks=False)
        else:
            path.write_bytes(data)
            path.chmod(entry.mode)
            os.utime(path, (entry.mtime, entry.mtime))
    for path in relocated.stale_pyc:
        (prefix / path).unlink(missing_ok=True)
    untar(prefix, (block for number in last for block in bundle.chunk_blocks(number)))
    return relocated


def untar(folder: Path, blocks: Iterable[bytes]) -> None:
    with subprocess.Popen(["tar", "-xpf", "-", "-C", folder], stdin=subprocess.PIPE) as tar:
        tar.stdin.writelines(blocks)
        tar.stdin.write(bytes(1024))
    assert tar.returncode == 0


def compile_modules(prefix: Path, relocated: Relocated) -> None:
    """A node's actions before it makes the tree read-only."""
    names = "".join(f"{prefix / path}\n" for path in relocated.uncompiled)
    argv = [prefix / "bin/python", "-I", "-m", "compileall", "-q", "-i", "-"]
    subprocess.run(argv, input=names.encode(), check=False, capture_output=True)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Makes what is in a folder once for all workers: ``once(name, make)`` calls ``make(folder)``."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(name, make):
        folder, complete = base / name, base / f"{name}.complete"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                folder.mkdir()  # exists if another worker failed: one error is enough
                make(folder)
                complete.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def awkward(small, once):
    """A real environment with everything that is awkward to move; never written to."""
    from real_env import make_awkward

    return once("awkward", lambda folder: make_awkward(small, folder, folder / "opt" / "env")) / "opt" / "env"


@pytest.fixture(scope="session")
def awkward_bundle(awkward, once):
    """The bundle of ``awkward``; never written to."""
    name = "env.ccb"
    return once("awkward-bundle", lambda folder: pack(awkward, folder / name, name="env", emit=ignore)) / name


@pytest.fixture
def checkout(tmp_path):
    return tmp_path / "My Code" / "proj"


@pytest.fixture
def prefix(tmp_path, checkout):
    return make_env(tmp_path / "opt" / "env", checkout)


@pytest.fixture
def packed(prefix, tmp_path):
    out = tmp_path / "env.ccb"
    pack(prefix, out, name="env", emit=lambda _event: None, options=PackOptions(limit=LIMIT))
    return out


@pytest.fixture(scope="session")
def helpers():
    """The functions of this file, which tests cannot import."""
    import types

    return types.SimpleNamespace(
        tree=tree,
        write=write,
        add_package=add_package,
        add_editable=add_editable,
        make_env=make_env,
        place=place,
        untar=untar,
        compile_modules=compile_modules,
        SITE=SITE,
        LIMIT=LIMIT,
        HARD_LINKS=HARD_LINKS,
    )
