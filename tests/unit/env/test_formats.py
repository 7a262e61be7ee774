import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.env.bundle import tar
from provision.env.bundle.manifest import Entry
from provision.env.packing.chunks import plan_chunks
from provision.env.source import elf, environment, files

names = st.binary(min_size=1, max_size=300).filter(lambda b: b"\0" not in b and b.strip(b"/"))


@given(name=names, target=names, mtime=st.integers(0, 1 << 40), mode=st.integers(0, 0o777))
def test_tarfile_reads_the_written_headers(name, target, mtime, mode):
    path = name.strip(b"/").decode(errors="surrogateescape")
    link = Entry(path, "link", mode, mtime, target=target.decode(errors="surrogateescape"))
    head = tar.entry_header(link)
    assert len(head) == tar.header_size(link) == tar.span(link)
    with tarfile.open(fileobj=io.BytesIO(head + tar.END), encoding="utf-8", errors="surrogateescape") as stream:
        (read,) = stream
    assert (read.name, read.linkname, read.mtime, read.mode) == (path.rstrip("/"), link.target, mtime, mode)


def test_a_file_over_8_gib():
    read = tarfile.TarInfo.frombuf(tar.header(b"big", size=9 << 30), "utf-8", "strict")
    assert read.size == 9 << 30


def test_elf_of_this_machine():
    data = Path(sys.executable).resolve().read_bytes()
    version = elf.glibc(lambda offset, size: data[offset : offset + size])
    assert version is not None
    assert version >= (2, 2)
    assert elf.platform(data) in ("linux-64", "linux-aarch64")
    if shutil.which("objdump"):
        out = subprocess.check_output(["objdump", "-p", Path(sys.executable).resolve()], text=True)
        newest = max(tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", out))
        assert version == newest


@given(st.binary(max_size=200), st.integers(0, 1 << 14), st.integers(0, 255))
def test_damaged_elf_files_raise_nothing(tail, at, value):
    data = bytearray(Path("/bin/true").read_bytes())
    data[at % len(data)] = value
    data += tail
    elf.glibc(lambda offset, size: bytes(data[offset : offset + size]))
    elf.glibc(lambda offset, size: (b"\x7fELF\2\1" + tail)[offset : offset + size])


def test_gpu_architectures():
    data = b"-gencode arch=compute_80,code=sm_80 -gencode x,code=sm_90a;\0sm_100 sm_120\0kernel_sm_70_x"
    assert environment.find_architectures(data) == {"sm_80", "sm_90a", "sm_100", "sm_120"}
    assert environment.has_architectures("lib/python3.11/site-packages/torch/lib/libtorch_cuda.so")
    assert not environment.has_architectures("lib/libtorch_cuda.so")


def found(path, size):
    return files.Source(path, "", "file", 0o644, 0, size)


@given(st.lists(st.integers(0, 6000), max_size=20), st.lists(st.integers(0, 6000), max_size=20))
def test_a_packages_chunks_do_not_depend_on_others(sizes, others):
    mine = [found(f"a/{n}", size) for n, size in enumerate(sizes)]
    theirs = [found(f"b/{n}", size) for n, size in enumerate(others)]

    def owner(path):
        return path[0]

    alone = plan_chunks(mine, owner, limit=5000)
    together = plan_chunks([*mine, *theirs], owner, limit=5000)
    assert [part for part in together.groups if part.package == "a"] == list(alone.groups)
    assert [one for one in together.large if one.path[0] == "a"] == list(alone.large)
    in_parts = [one for part in alone.groups for one in part.sources]
    assert sorted([*in_parts, *alone.large]) == sorted(mine)
    assert all(part.span <= 5000 for part in alone.groups)
    assert [part.span for part in alone.groups] == sorted((part.span for part in alone.groups), reverse=True)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=20))
def test_source_and_its_compiled_file_are_in_one_chunk(sizes):
    files = [found(f"a/{n}.py", size) for n, (size, _) in enumerate(sizes)]
    files += [found(f"a/__pycache__/{n}.cpython-311.pyc", size) for n, (_, size) in enumerate(sizes)]
    parts = plan_chunks(files, lambda _path: "a", limit=5000).groups
    assert sorted(one for part in parts for one in part.sources) == sorted(files)
    for part in parts:
        assert list(part.sources) == sorted(part.sources)
        assert part.span == sum(tar.file_span(one.path, one.size) for one in part.sources)
        sources = {environment.source_of(one.path) for one in part.sources}
        assert len(part.sources) == 2 * len(sources)
        assert part.span <= 5000 or len(sources) == 1


def test_owners(prefix, helpers):
    paths = [one.path for one in files.walk_environment(prefix).sources]
    owner = environment.find_owners(prefix, paths).owner
    site = helpers.SITE
    assert owner("bin/hello") == "hello"
    assert owner(f"{site}/hello/plain.py") == "hello"
    assert owner(f"{site}/hello/__pycache__/plain.cpython-311.opt-1.pyc") == "hello"
    assert owner(f"{site}/hello-1.0.dist-info/RECORD") == "hello"
    assert owner("lib/libconda.so") == "python"
    assert owner("conda-meta/python-3.11.7-0.json") == "python"
    assert owner(f"{site}/stray/a/b.py") == f"{site}/stray/"
    assert owner(f"{site}/__pycache__/six.cpython-311.pyc") == owner(f"{site}/six.py") == f"{site}/"
    assert owner("share/doc/a") == "share/"
    assert owner("top") == "/"
    assert owner("src/proj/a/b.py") == "src/proj/"


def test_damaged_metadata_owns_nothing(prefix, helpers):
    helpers.write(prefix / "conda-meta" / "broken-1-0.json", "{")
    helpers.write(prefix / "conda-meta" / "odd-1-0.json", "[1]")
    paths = [one.path for one in files.walk_environment(prefix).sources]
    assert "broken" not in {package.name for package in environment.find_owners(prefix, paths).packages}


@pytest.mark.parametrize("name", ["Foo.Bar_baz", "foo-bar-baz", "FOO--bar.baz"])
def test_names(name):
    assert environment.normalized(name) == "foo-bar-baz"
