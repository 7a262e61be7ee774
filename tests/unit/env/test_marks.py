"""How a file depends on the prefix."""

import shutil
import subprocess

import pytest

from provision.env.bundle.manifest import Mark
from provision.env.packing import detect
from provision.env.packing.detect import LargeFile, PrefixDetector, Traits
from provision.env.relocation import Search
from provision.env.source import files
from provision.env.source.files import Source

DETECTOR = PrefixDetector(Search((("/opt/env", ""),)), {"lib/a.so": 255}, frozenset({b"python3", b"perl"}))


def of_file(path, data):
    return DETECTOR.find_marks(Source(path, "", "file", 0o644, 0, len(data)), data)


def of_link(target):
    return DETECTOR.find_marks(Source("a", "", "link", 0o777, 0, target=target), b"")


@pytest.mark.parametrize(
    ("path", "data", "marks"),
    [
        ("a", b"x /opt/env/lib\n", (Mark("text"),)),
        ("a", b"x /opt/env2/lib\n", ()),
        ("a", b"\0/opt/env/lib\0", (Mark("binary"),)),
        ("lib/a.so", b"\0/opt/env/lib\0", (Mark("binary", "", 255),)),
        ("a.pyc", b"\0/opt/env/lib\0", ()),
        ("bin/a", b"#!/opt/env/bin/python\n", (Mark("shebang"),)),
        ("bin/a", b"#!/opt/env/bin/python\n/opt/env\n", (Mark("shebang"), Mark("text"))),
        ("bin/a", b"#!/usr/bin/env perl\n/opt/env\n", (Mark("shebang"), Mark("text"))),
        ("bin/a", b"#!/usr/bin/env -S python3 -I\n", (Mark("shebang"),)),
        ("bin/a", b"#!/usr/bin/env ruby\n", ()),
        ("share/a", b"#!/usr/bin/env python3\n", ()),
        ("x.dist-info/RECORD", b"", (Mark("record"),)),
    ],
)
def test_files(path, data, marks):
    assert of_file(path, data) == marks


@pytest.mark.parametrize(
    ("target", "is_ours"),
    [
        ("/opt/env/lib/x", True),
        ("/opt/env", True),
        ("/opt/env/a/../b", True),
        ("/opt/env/../other", False),
        ("/opt/env2/lib", False),
        ("/data/opt/env/lib", False),
        ("lib/opt/env", False),
        ("../x", False),
    ],
)
def test_links(target, is_ours):
    assert of_link(target) == ((Mark("link"),) if is_ours else ())


def of_large_file(path, name="lib/a.so"):
    found = Source(name, str(path), "file", 0o644, path.stat().st_mtime_ns, path.stat().st_size)
    with files.open_source(found) as descriptor:
        file = LargeFile(found, descriptor, DETECTOR, rewritable=0)
        file.read(0, found.size)
        return file.marks()


@pytest.mark.parametrize("data", [b'{"path": "/opt/env/lib"}\n', b"\0/opt/env/lib\0", b"PK\3\4/opt/env", b"/opt/env2"])
def test_a_large_file_of_data_needs_no_rewriting(tmp_path, data):
    (tmp_path / "a").write_bytes(data)
    assert of_large_file(tmp_path / "a") == ()


def test_large_compiled_module_has_no_marks(tmp_path):
    (tmp_path / "a").write_bytes(b"\0/opt/env/lib\0")
    assert of_large_file(tmp_path / "a", "lib/a.pyc") == ()


def test_a_file_of_the_largest_size_can_be_rewritten(tmp_path):
    (tmp_path / "a").write_bytes(b"/opt/env/lib\n")
    source = Source("share/a", str(tmp_path / "a"), "file", 0o644, (tmp_path / "a").stat().st_mtime_ns, 13)
    with files.open_source(source) as descriptor:
        assert [LargeFile(source, descriptor, DETECTOR, rewritable=size).is_rewritable for size in (12, 13)] == [
            False,
            True,
        ]


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 4097, 8190, 20_000])
def test_prefix_is_found_wherever_blocks_meet(tmp_path, monkeypatch, at):
    monkeypatch.setattr(detect, "BLOCK", 4096)
    data = b"x" * at + b" /opt/env/lib " + b"y" * 9000
    (tmp_path / "a").write_bytes(data)
    source = Source("share/a", str(tmp_path / "a"), "file", 0o644, (tmp_path / "a").stat().st_mtime_ns, len(data))
    with files.open_source(source) as descriptor:
        file = LargeFile(source, descriptor, DETECTOR, rewritable=len(data))
        file.read(0, len(data))
        assert file.marks() == of_file("share/a", data) == (Mark("text"),)


def test_needs_of_two_files_together():
    one, other = Traits((2, 17), frozenset({"sm_80"})), Traits((2, 34), frozenset({"sm_90"}))
    assert one.merged(other) == other.merged(one) == Traits((2, 34), frozenset({"sm_80", "sm_90"}))
    assert one.merged(Traits()) == one


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed here")
def test_path_in_a_later_block_of_a_large_library(tmp_path, monkeypatch):
    monkeypatch.setattr(detect, "BLOCK", 4096)
    (tmp_path / "a.c").write_text('const char before[20000] = {1}; const char *p = "/opt/env/share";')
    subprocess.run(["gcc", "-shared", "-o", tmp_path / "a.so", tmp_path / "a.c"], check=True)
    assert of_large_file(tmp_path / "a.so") == (Mark("binary", "", 255),)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed here")
@pytest.mark.parametrize(
    ("text", "flags", "marks"),
    [
        ('const char *p = "/opt/env/share";', [], (Mark("binary", "", 255),)),
        ('const char *p = "/opt/env/src/a.c";', [], ()),  # for messages
        ('#line 1 "/opt/env/src/a.c"\nint a;', ["-g"], ()),  # for debuggers
        ("int a;", ["-Wl,-rpath,/opt/env/lib"], (Mark("binary", "", 255),)),
    ],
)
def test_large_library_needs_rewriting_if_a_program_may_use_the_path(tmp_path, text, flags, marks):
    (tmp_path / "a.c").write_text(text)
    subprocess.run(["gcc", "-shared", *flags, "-o", tmp_path / "a.so", tmp_path / "a.c"], check=True)
    assert of_large_file(tmp_path / "a.so") == marks
