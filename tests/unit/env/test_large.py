"""Large files: cut into ranges, searched block by block, and never whole in memory."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from provision.env.bundle.manifest import Mark
from provision.env.bundle.reader import open_bundle
from provision.env.packing import detect
from provision.env.packing import pack as pack_module
from provision.env.packing.detect import LargeFile, PrefixDetector
from provision.env.packing.pack import PackOptions, pack
from provision.env.relocation import Search
from provision.env.source import files
from provision.errors import BundleError
from provision.model import Notice, ignore

PREFIX = b"/opt/env"
DETECTOR = PrefixDetector(
    Search((("/opt/env/src/x", "src/x"), ("/opt/env", ""))), {"lib/large": 255}, frozenset({b"python", b"other"})
)
ELF = Path("/bin/sh").read_bytes()


def look(tmp_path, data, path="lib/large", bound=1 << 30, step=3 << 20):
    """The marks and traits of a file with this content."""
    source = tmp_path / "file"
    source.write_bytes(data)
    found = files.pick(tmp_path, "", ["file"]).sources[-1]._replace(path=path)
    descriptor = os.open(source, os.O_RDONLY)
    try:
        file = LargeFile(found, descriptor, DETECTOR, rewritable=bound)
        for begin in range(0, len(data), step):
            file.read(begin, min(begin + step, len(data)))
        return file.marks(), file.digest, file.traits
    finally:
        os.close(descriptor)


PIECES = (
    *(b"/opt/env", b"/opt/env/src/x", b"/opt/env2", b"/data/opt/env", b"\n", b" ", b"\0", b".", b"%41"),
    *(b"#!/opt/env/bin/python\n", b"#!/usr/bin/env python\n", b"x" * 200, b"/" + b"y" * 250),
)
pieces = st.lists(st.sampled_from(PIECES), max_size=12)


@given(
    pieces=pieces, begin=st.integers(-600, 600), path=st.sampled_from(["bin/large", "lib/large", "x.dist-info/RECORD"])
)
@example(pieces=[b"/opt/env"], begin=0, path="bin/large")
@example(pieces=[b"/opt/env2"], begin=-8, path="lib/large")
@example(pieces=[b"/data/opt/env"], begin=-5, path="lib/large")
def test_reading_in_blocks_finds_the_same_marks(tmp_path_factory, pieces, begin, path):
    """The pieces cross the border of two blocks."""
    content = b"".join(pieces)
    for data in (
        content,
        b" " * (detect.BLOCK + begin) + content,
        b" " * (detect.BLOCK + begin) + content + b" " * 9000,
    ):
        found = files.Source(path, "", "file", 0o644, 0, len(data))
        marks, digest, _ = look(tmp_path_factory.getbasetemp(), data, path)
        assert marks == DETECTOR.find_marks(found, data)
        assert digest == hashlib.sha256(data).hexdigest()


def test_requirements_of_a_large_file_are_found(tmp_path):
    _, _, traits = look(tmp_path, ELF + bytes(2 << 20))
    assert traits.glibc is not None
    where = "lib/python3.11/site-packages/torch/lib/libtorch_cuda.so"
    flags = b" sm_90 " + bytes(detect.BLOCK - 10) + b"-gencode arch=compute_80,code=sm_80 "
    assert look(tmp_path, flags, where)[2].architectures == {"sm_80", "sm_90"}
    assert look(tmp_path, flags)[2].architectures == set()


@pytest.mark.parametrize(
    ("data", "marks"),
    [
        (ELF + bytes(1 << 20) + b"/opt/env/lib\0", ()),  # after the loaded part: no program reads it
        (ELF[:600] + b"\0/opt/env/lib\0" + ELF[614:] + bytes(1 << 20), (Mark("binary", "", 255),)),
        (ELF[:600] + b"\0/opt/env/a.cpp\0" + ELF[616:] + bytes(1 << 20), ()),  # for messages
        (b"data" * 500 + b"/opt/env/lib" + bytes(1 << 20), ()),
        (b"#!/opt/env/bin/python\n" * 50000, ()),
    ],
    ids=["debug", "loaded", "source file", "data", "script"],
)
def test_only_programs_among_files_too_large_to_rewrite_are_marked(tmp_path, data, marks):
    assert look(tmp_path, data, bound=1 << 20)[0] == marks


def test_file_that_cannot_be_rewritten_is_named_and_packed_in_ranges(tmp_path, helpers, monkeypatch):
    monkeypatch.setattr(detect, "REWRITABLE", 2 * helpers.LIMIT)
    prefix = helpers.make_env(tmp_path / "env")
    path = os.fsencode(str(prefix)) + b"/lib\0"
    start = ELF[:600] + path
    helpers.write(prefix / "lib" / "huge.so", start + ELF[len(start) :] + bytes(2 * helpers.LIMIT))
    helpers.write(prefix / "lib" / "rewritten.so", start + ELF[len(start) :][: helpers.LIMIT] + bytes(100))
    events = []
    manifest = pack(prefix, tmp_path / "b.ccb", name="b", emit=events.append, options=PackOptions(limit=helpers.LIMIT))
    assert [event.text for event in events if isinstance(event, Notice)] == list(manifest.notices)
    found = {entry.path: entry for entry in manifest.files}
    assert found["lib/huge.so"].marks == (Mark("binary"),)
    assert found["lib/huge.so"].raw
    assert found["lib/huge.so"].chunks
    assert found["lib/rewritten.so"].marks == (Mark("binary"),)
    assert not found["lib/rewritten.so"].chunks
    assert [text for text in manifest.notices if "huge.so" in text] == [
        "lib/huge.so contains the prefix and is too large to be rewritten: it may not work on the nodes"
    ]
    bundle = open_bundle(tmp_path / "b.ccb")
    bundle.verify(ignore)
    assert "lib/huge.so" not in bundle.prefix_files()
    assert bundle.manifest == manifest


@pytest.mark.parametrize("when", ["while it is looked through", "before it is written"])
def test_a_large_file_that_changes_is_named(prefix, tmp_path, helpers, monkeypatch, when):
    path = prefix / helpers.SITE / "big" / "big.bin"
    path.write_bytes(path.read_bytes() + str(prefix).encode())  # a prefix file: read again at the end
    os.utime(path, (5, 5))
    real = LargeFile.marks if when == "before it is written" else LargeFile.read

    def change(self, *args):
        answer = real(self, *args)
        with path.open("r+b") as file:
            file.write(os.urandom(8))
        if when == "before it is written":
            os.utime(path, (5, 5))  # only the content shows it
        return answer

    monkeypatch.setattr(LargeFile, real.__name__, change)
    with pytest.raises(BundleError, match=r"big\.bin changed while it was read"):
        pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    assert not (tmp_path / "b.ccb").exists()


@pytest.mark.parametrize("held", [0, 500, 1 << 20])
def test_prefix_files_are_read_again_rather_than_kept_without_bound(
    packed, prefix, tmp_path, helpers, monkeypatch, held
):
    monkeypatch.setattr(pack_module, "HELD", held)
    manifest = pack(prefix, tmp_path / "b.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    assert manifest.prefix_files.digest == open_bundle(packed).manifest.prefix_files.digest
    open_bundle(tmp_path / "b.ccb").verify(ignore)


# On two cores: each core has a worker with its own buffers.
PACK = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from provision.env.packing.pack import pack
pack(Path(sys.argv[1]), Path(sys.argv[2]), name="b", emit=lambda event: None)
"""


def memory_of(pid: int) -> int:
    """Bytes of a process and its children; pages that they share count once."""
    total = 0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0  # it has just exited
    for line in rollup.splitlines():
        if line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])
    return total + sum(memory_of(int(child)) for child in children)


@pytest.mark.timeout(600)
def test_memory_is_bounded_however_large_the_files_are(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env")
    text = str(prefix).encode()
    with (prefix / "lib" / "sparse.so").open("wb") as file:
        file.write(ELF[:600] + text + b"/lib\0" + ELF[605 + len(text) :])
        file.truncate(3 << 30)
    with (prefix / "lib" / "held.so").open("wb") as file:
        for _ in range(9):
            file.write(os.urandom(16 << 20))
        file.write(text)
    with (prefix / "lib" / "random.bin").open("wb") as file:
        for _ in range(9):
            file.write(os.urandom(16 << 20))
    run = subprocess.Popen([sys.executable, "-c", PACK, prefix, tmp_path / "b.ccb"])
    peak = 0
    while run.returncode is None:
        peak = max(peak, memory_of(run.pid))
        try:
            run.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
    assert run.returncode == 0
    found = {entry.path: entry for entry in open_bundle(tmp_path / "b.ccb").manifest.files}
    assert found["lib/sparse.so"].marks
    assert found["lib/sparse.so"].raw
    assert found["lib/held.so"].marks
    assert not found["lib/held.so"].chunks
    assert found["lib/random.bin"].raw
    for path in (*(prefix / "lib").iterdir(), tmp_path / "b.ccb"):
        if path.is_file():
            path.unlink()  # pytest would keep them
    assert peak < 200e6, f"{peak / 1e6:.0f} MB"
