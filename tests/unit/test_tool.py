"""What goes into the packed tool, and that it depends on nothing but its files."""

import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from provision.errors import UsageError
from provision.model import Notice, Progress, ignore
from provision.tasks.bundles import pack_tool
from provision.tool import contents, distributions, pack
from provision.tool.contents import Item, compile_sources, running
from provision.tool.libraries import Dynamic


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of distributions that this Python finds: ``site(name, requires, files=...)``."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(name, *requires, files=(), record=True, top_level=(), direct_url=None):
        info = folder / f"{re.sub('[-.]', '_', name)}-1.0.dist-info"
        info.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            "Version: 1.0",
            *(f"Requires-Dist: {each}" for each in requires),
        ]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        for each in files:
            path = folder / each
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        if record:
            (info / "RECORD").write_text("".join(f"{each},,\n" for each in (*files, f"{info.name}/METADATA")))
        if top_level:
            (info / "top_level.txt").write_text("\n".join(top_level) + "\n")
        if direct_url:
            (info / "direct_url.json").write_text(json.dumps(direct_url))
        return folder

    return make


def names(name):
    return [package.metadata["Name"] for package in distributions.required(name)]


def test_requirements_are_followed_to_their_end(site):
    site("zz-app", "zz_Lib>=1.0,<2", "zz-old; python_version < '3'", 'zz-test>=7; extra == "test"')
    site("zz.lib", "zz-deep [fast] (>=1)", "zz-app")
    site("zz-deep", "zz-turbo; extra == 'fast'", "zz-slow; extra == 'slow' and python_version >= '3'")
    site("zz-turbo")
    site("zz-slow")
    site("zz-test")
    assert names("zz-app") == ["zz-deep", "zz.lib", "zz-turbo"]


def test_requirement_with_a_marker_is_included_if_installed(site):
    site("zz-app", "zz-here; python_version < '3.11'", "zz-gone; sys_platform == 'win32'")
    site("zz-here")
    assert names("zz-app") == ["zz-here"]


def test_a_requirement_that_is_not_installed_is_named(site):
    site("zz-app", "zz-gone>=3")
    with pytest.raises(UsageError, match="zz-gone, which clusterctl needs, is not installed") as caught:
        distributions.required("zz-app")
    assert "pip install clusterctl" in caught.value.hint
    with pytest.raises(UsageError, match="zz-nothing, which clusterctl needs, is not installed"):
        distributions.required("zz-nothing")


def test_requirements_of_clusterctl_are_found():
    found = set(names("clusterctl"))
    assert {"click", "fabric", "paramiko", "invoke", "pydantic_core", "MarkupSafe", "zstandard"} <= found
    assert not found & {"clusterctl", "pytest", "ruff", "mypy", "setuptools"}


def test_files_of_a_distribution_are_included(site):
    files = ["zz/__init__.py", "zz/data.txt", "zz/__pycache__/__init__.cpython-311.pyc", "../bin/zz", "zz/gone.py"]
    folder = site("zz-app", files=files)
    (folder / "zz/gone.py").unlink()
    (folder / "zz/not_its_own.py").touch()
    found = dict(distributions.files(distribution("zz-app")))
    assert set(found) == {"zz_app-1.0.dist-info/METADATA", "zz/__init__.py", "zz/data.txt"}
    assert found["zz/data.txt"] == folder / "zz/data.txt"


def test_a_package_of_a_linux_distribution_is_found_by_its_modules(site):
    files = ["zz/__init__.py", "zz/sub/deep.py", "_zz.cpython-311-x86_64-linux-gnu.so", "zzz.py", "single.py"]
    site("zz-app", files=files, record=False, top_level=["zz", "_zz", "single"])
    found = {name for name, _ in distributions.files(distribution("zz-app"))}
    info = {f"zz_app-1.0.dist-info/{name}" for name in ("METADATA", "top_level.txt")}
    assert found == info | {"_zz.cpython-311-x86_64-linux-gnu.so", "single.py", "zz/__init__.py", "zz/sub/deep.py"}


def test_distribution_that_cannot_be_included_is_named(site):
    site("zz-blind", record=False)
    with pytest.raises(UsageError, match="zz-blind, which clusterctl needs, has no list of its files"):
        list(distributions.files(distribution("zz-blind")))
    site("zz-dev", direct_url={"url": "file:///src", "dir_info": {"editable": True}})
    with pytest.raises(UsageError, match="zz-dev is an editable install"):
        list(distributions.files(distribution("zz-dev")))


# --- compiling -------------------------------------------------------------------------------------------


def test_compiled_files_are_hash_based_and_unchecked(tmp_path, monkeypatch):
    source = tmp_path / "zz_module.py"
    source.write_text("value = {'b', 'a'} and frozenset('xyz'); name = __file__\n")
    data = compile_sources({"lib/zz_module.py": source.read_bytes()})["lib/zz_module.py"]
    assert data[:8] == importlib.util.MAGIC_NUMBER + b"\1\0\0\0"
    assert data[8:16] == importlib.util.source_hash(source.read_bytes())
    assert compile_sources({"lib/zz_module.py": source.read_bytes()}) == {"lib/zz_module.py": data}
    cached = Path(importlib.util.cache_from_source(str(source)))
    cached.parent.mkdir()
    cached.write_bytes(data)
    source.write_text("raise SystemExit('the source was compiled')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("zz_module")
    assert module.name == str(source)


def test_files_that_are_not_python_are_not_compiled():
    sources = {"a.py": b"def {{ name }}(): pass\n", "b.py": b"x = 1\n", "c.py": b"x = '\0'\n"}
    assert list(compile_sources(sources)) == ["b.py"]


def test_each_source_has_its_compiled_file(found):
    sources = [name for name in found.items if name.endswith(".py")]
    assert len(sources) > 1000
    for name in sources:
        cached = found.items.get(importlib.util.cache_from_source(name))
        assert cached is None or cached.source[8:16] == importlib.util.source_hash(found.items[name].source)


# --- the contents and the file -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return contents.contents(running())


def test_tool_has_all_required_modules(found):
    python = running()
    home = f"{python.lib}/{python.stdlib.name}"
    cache = f"__pycache__/os.{sys.implementation.cache_tag}.pyc"
    wanted = {
        "clusterctl",
        "python",
        f"bin/{python.stdlib.name}",
        f"{home}/os.py",
        f"{home}/{cache}",
        f"{home}/sitecustomize.py",
        f"{home}/encodings/__init__.py",
        "packages/provision/errors.py",
        "packages/provision/templates/tool/header.sh.j2",
        "packages/trainer/agent/supervisor/supervisor.py",
        "packages/fabric/__init__.py",
        f"packages/clusterctl-{distribution('clusterctl').version}.dist-info/METADATA",
    }
    assert wanted <= set(found.items)
    assert list(found.items) == sorted(found.items)
    assert found.items["python"].executable
    assert found.glibc >= (2, 17)
    assert found.notices == ()


def test_tool_has_no_unneeded_modules(found):
    parts = {part for name in found.items if not name.startswith("packages/") for part in name.split("/")}
    assert not parts & {
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "ensurepip",
        "site-packages",
        "turtledemo",
        "EXTERNALLY-MANAGED",
    }
    extensions = {name.rpartition("/")[2].partition(".")[0] for name in found.items if "lib-dynload" in name}
    assert not extensions & {"_tkinter", "readline", "_curses", "_sqlite3", "_testcapi"}
    libraries = {name.partition("/")[2].partition("/")[2] for name in found.items if name.startswith("lib/clusterctl/")}
    assert not {name for name in libraries if name.startswith(("libc.", "libm.", "ld-", "libX", "libtcl"))}
    assert not [name for name in found.items if name.startswith(("packages/pytest", "packages/pip/"))]
    assert not [name for name in found.items if name.endswith(".pyc") and "__pycache__" not in name]


@pytest.mark.parametrize(
    "loader", ["/lib/ld-musl-x86_64.so.1", "/nix/store/abc-glibc-2.40/lib/ld-linux-x86-64.so.2", ""]
)
def test_a_python_that_other_machines_could_not_start_is_refused(monkeypatch, loader):
    monkeypatch.setattr(contents, "dynamic", lambda _: Dynamic(loader=loader))
    with pytest.raises(UsageError, match=f"is started by {loader or 'no dynamic loader'}, which"):
        contents.contents(running())


ITEMS = {
    "clusterctl": Item(b"#!/bin/sh\necho it runs\n", executable=True),
    "lib/a b": Item(b"x" * 5_000_000),
    "lib/täst": Item(b""),
}


def test_equal_files_give_an_equal_tool(tmp_path):
    first, second = tmp_path / "a.run", tmp_path / "b.run"
    assert pack.write(first, ITEMS, emit=ignore) == pack.write(second, dict(ITEMS), emit=ignore)
    assert first.read_bytes() == second.read_bytes()
    digest, size = pack.write(second, {**ITEMS, "lib/täst": Item(b"1")}, emit=ignore)
    assert (digest, size) != pack.write(first, ITEMS, emit=ignore)
    assert first.stat().st_mode & 0o111
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.run", "b.run"]


def test_the_archive_opens_with_tar_and_has_fixed_owners_and_times(tmp_path):
    file = tmp_path / "tool.tar.gz"
    reported = []
    with file.open("wb") as out:
        _, size = pack.write_archive(ITEMS, out, reported.append)
    with tarfile.open(file) as tar:
        members = tar.getmembers()
        assert tar.extractfile("lib/a b").read() == ITEMS["lib/a b"].source
    assert [member.name for member in members] == [*ITEMS, ".complete"]
    assert {(member.uid, member.gid, member.uname, member.mtime) for member in members} == {(0, 0, "", 315532800)}
    assert [member.mode for member in members] == [0o755, 0o644, 0o644, 0o644]
    assert len(subprocess.run(["gzip", "-dc", file], check=True, capture_output=True).stdout) == size
    assert isinstance(reported[0], Progress)


def test_unwritable_output_is_reported(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="is a folder") as caught:
        pack_tool(output=tmp_path, emit=ignore)
    assert caught.value.hint == f"clusterctl pack-tool -o {tmp_path}/clusterctl.run"
    with pytest.raises(UsageError, match=r"cannot write .*x\.run: No such file or directory"):
        pack.write(tmp_path / "gone/x.run", ITEMS, emit=ignore)
    with pytest.raises(UsageError, match=r"cannot read .*/gone: No such file or directory"):
        pack.write(tmp_path / "x.run", {"clusterctl": Item(tmp_path / "gone")}, emit=ignore)
    assert list(tmp_path.iterdir()) == []


def test_a_tool_that_does_not_start_is_not_written(tmp_path):
    command = b"#!/bin/sh\necho 'Traceback (most recent call last):' >&2\necho 'No module named zz' >&2\nexit 1\n"
    with pytest.raises(UsageError, match="does not start from its own file: No module named zz"):
        pack.write(tmp_path / "x.run", {**ITEMS, "clusterctl": Item(command)}, emit=ignore)
    assert list(tmp_path.iterdir()) == []


def test_untestable_tool_is_written_with_a_warning(tmp_path):
    reported = []
    command = b"#!/bin/sh\necho 'error: is /tmp mounted with noexec?' >&2\nexit 2\n"
    pack.write(tmp_path / "x.run", {**ITEMS, "clusterctl": Item(command)}, emit=reported.append)
    assert [event.level for event in reported if isinstance(event, Notice)] == ["warning"]
    assert (tmp_path / "x.run").exists()


def test_full_disk_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    def full(items, file, emit):
        file.write(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pack, "write_archive", full)
    with pytest.raises(UsageError, match=r"no space left for .*x\.run"):
        pack.write(tmp_path / "x.run", ITEMS, emit=ignore)
    assert list(tmp_path.iterdir()) == []
