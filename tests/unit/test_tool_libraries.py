"""The shared libraries that a tool takes along: read from ELF files, found as ld.so(8) finds them."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from provision.env.source import elf
from provision.errors import UsageError
from provision.tool import libraries
from provision.tool.contents import running
from provision.tool.libraries import Dynamic, Machine, dynamic, find_needed, reader
from provision.tool.pack import strip_symbols

X86, ARM = 62, 183
BASE = 0x400000  # where a fake file is loaded


def fake(path, *, needs=(), rpath="", runpath="", loader="", machine=X86, order="<"):
    """A minimal ELF file with entries for the dynamic loader (System V ABI, chapters 4 and 5)."""
    strings, places = b"\0", {}
    for text in (*needs, rpath, runpath):
        places[text] = len(strings)
        strings += text.encode() + b"\0"
    entries = [(1, places[name]) for name in needs]
    entries += [(15, places[rpath])] if rpath else []
    entries += [(29, places[runpath])] if runpath else []
    at = 64 + 3 * 56
    texts = at + 16 * (len(entries) + 3)
    entries += [(5, BASE + texts), (10, len(strings)), (0, 0)]
    table = b"".join(struct.pack(order + "QQ", *entry) for entry in entries)
    end = texts + len(strings)
    segment = struct.Struct(order + "IIQQQQQQ")
    name = loader.encode() + b"\0"
    segments = [(1, 5, 0, BASE, 0, end, end, 4096), (2, 4, at, BASE + at, 0, len(table), len(table), 8)]
    segments.append((3 if loader else 0, 4, end, BASE + end, 0, len(name), len(name), 1))
    ident = b"\x7fELF\2" + (b"\1" if order == "<" else b"\2") + b"\1" + bytes(9)
    head = ident + struct.pack(order + "HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + b"".join(segment.pack(*each) for each in segments) + table + strings + name)
    return path


@pytest.fixture
def empty(monkeypatch):
    """A machine without libraries, but for those that a test makes."""
    monkeypatch.setattr(libraries, "run_ldconfig", lambda: "")
    monkeypatch.setattr(libraries, "SYSTEM", ())
    return Machine("x86_64")


def find(program, *modules, machine, stay=()):
    return find_needed(program, modules, machine, stay=stay).libraries


@pytest.mark.parametrize("order", ["<", ">"])
def test_dynamic_section_of_a_file_is_read(tmp_path, order):
    path = fake(
        tmp_path / "a",
        needs=["liba.so.1", "libb.so"],
        rpath="/r:$ORIGIN/..",
        runpath="/q",
        loader="/lib/ld.so",
        order=order,
    )
    assert dynamic(reader(path)) == Dynamic(("liba.so.1", "libb.so"), ("/r", "$ORIGIN/.."), ("/q",), "/lib/ld.so")


def test_a_damaged_file_is_no_elf_file(tmp_path):
    data = fake(tmp_path / "a", needs=["liba.so.1"]).read_bytes()
    for size in (0, 3, 10, 63, 100, 200, len(data) - 12):
        (tmp_path / "b").write_bytes(data[:size])
        assert dynamic(reader(tmp_path / "b")) in {None, Dynamic()}
    assert dynamic(reader(Path(__file__))) is None


def test_the_running_interpreter_is_read_as_readelf_reads_it():
    python = running()
    found = dynamic(reader(python.program))
    assert found.loader.startswith("/lib")
    assert "libc.so.6" in found.needed
    if shutil.which("readelf"):
        out = subprocess.run(["readelf", "-d", python.program], check=True, capture_output=True, text=True).stdout
        assert [line.split("[")[1].rstrip("]") for line in out.splitlines() if "(NEEDED)" in line] == list(found.needed)


def test_libraries_are_found_in_the_loaders_order(tmp_path, empty, monkeypatch):
    places = ("rpath", "first", "runpath", "cache", "system")
    for name in places:
        fake(tmp_path / name / "libx.so.1")
    program = fake(tmp_path / "bin/python")
    by_rpath = fake(tmp_path / "a.so", needs=["libx.so.1"], rpath=str(tmp_path / "rpath"))
    by_runpath = fake(tmp_path / "b.so", needs=["libx.so.1"], runpath=str(tmp_path / "runpath"))
    monkeypatch.setattr(libraries, "SYSTEM", (str(tmp_path / "system"),))
    monkeypatch.setattr(
        libraries, "run_ldconfig", lambda: f"\tlibx.so.1 (libc6,x86-64) => {tmp_path}/cache/libx.so.1\n"
    )
    machine = Machine("x86_64", (tmp_path / "first",))
    found = []
    for module in (by_rpath, by_runpath, by_runpath, by_runpath, by_runpath):
        (path,) = find(program, module, machine=machine).values()
        found.append(path.parent.name)
        path.unlink()
    assert found == list(places)


def test_rpath_applies_to_indirect_libraries_and_runpath_does_not(tmp_path, empty):
    fake(tmp_path / "lib/liba.so", needs=["libb.so"])
    fake(tmp_path / "lib/libb.so")
    program = fake(tmp_path / "bin/python", rpath="$ORIGIN/../lib")
    module = fake(tmp_path / "m.so", needs=["liba.so"])
    assert list(find(program, module, machine=empty)) == ["liba.so", "libb.so"]
    program = fake(tmp_path / "bin/python", needs=["liba.so"], runpath="$ORIGIN/../lib")
    assert find_needed(program, (), empty, stay=()).missing == {"libb.so": tmp_path / "lib/liba.so"}


def test_library_of_another_machine_is_skipped(tmp_path, empty):
    fake(tmp_path / "arm/libx.so", machine=ARM)
    fake(tmp_path / "x86/libx.so")
    program = fake(tmp_path / "python", needs=["libx.so"], runpath=f"{tmp_path}/arm:{tmp_path}/x86")
    assert find(program, machine=empty) == {"libx.so": tmp_path / "x86/libx.so"}


def test_variants_for_newer_processors_are_skipped(monkeypatch):
    lines = [
        '\tlibx.so.1 (libc6,x86-64, hwcap: "x86-64-v3") => /usr/lib/glibc-hwcaps/x86-64-v3/libx.so.1',
        "\tlibx.so.1 (libc6,x86-64) => /usr/lib/libx.so.1",
        "Cache generated by: ldconfig (Debian GLIBC 2.36) stable release version 2.36",
    ]
    monkeypatch.setattr(libraries, "run_ldconfig", lambda: "\n".join(lines))
    assert dict(Machine("x86_64").cache) == {"libx.so.1": [Path("/usr/lib/libx.so.1")]}


def test_bundled_libraries_of_a_wheel_stay_in_their_place(tmp_path, empty):
    site = tmp_path / "site-packages"
    program = fake(tmp_path / "python")
    module = fake(site / "x/m.so", needs=["libbundled.so"], rpath="$ORIGIN/../x.libs")
    bundled = fake(site / "x.libs/libbundled.so", needs=["libother.so"], runpath=str(tmp_path / "elsewhere"))
    other = fake(tmp_path / "elsewhere/libother.so")
    found = find(program, module, bundled, machine=empty, stay={module, bundled})
    assert found == {"libother.so": other}
    # The same file through a path that will not exist elsewhere has to be taken along.
    fake(module, needs=["libbundled.so"], rpath=str(site / "x.libs"))
    fake(bundled)
    assert find(program, module, bundled, machine=empty, stay={module}) == {"libbundled.so": bundled}


@pytest.mark.parametrize(
    "name", ["libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "libnss_files.so.2"]
)
def test_libraries_of_glibc_are_never_included(tmp_path, empty, name):
    fake(tmp_path / name)
    program = fake(tmp_path / "python", needs=[name], runpath=str(tmp_path))
    assert find_needed(program, (), empty, stay=()) == libraries.Needed({}, {})


@pytest.mark.parametrize("name", ["libcrypto.so.3", "libcrypt.so.1", "libz.so.1", "libgcc_s.so.1", "libnsl.so.2"])
def test_libraries_outside_glibc_are_included(tmp_path, empty, name):
    path = fake(tmp_path / name)
    program = fake(tmp_path / "python", needs=[name], runpath=str(tmp_path))
    assert find(program, machine=empty) == {name: path}


def test_missing_library_is_named_with_the_file_that_needs_it(tmp_path, empty):
    program = fake(tmp_path / "python", needs=["libgone.so.1"])
    assert find_needed(program, (), empty, stay=()).missing == {"libgone.so.1": program}


def test_a_file_that_cannot_be_read_is_named(tmp_path, empty):
    with pytest.raises(UsageError, match=r"cannot read .*/gone: No such file"):
        find_needed(tmp_path / "gone", (), empty, stay=())


def test_this_pythons_libraries_are_those_that_ldd_finds():
    if not shutil.which("ldd"):
        pytest.skip("ldd is missing: apt-get install libc-bin")
    python = running()
    modules = sorted(python.stdlib.glob("lib-dynload/_[hs]*.so"))
    assert modules
    found = find_needed(python.program, modules, Machine(python.machine, python.libraries), stay=())
    wanted = {}
    for path in (python.program, *modules):
        out = subprocess.run(["ldd", path], check=True, capture_output=True, text=True).stdout
        pairs = (line.split()[:3:2] for line in out.splitlines() if " => /" in line)
        wanted |= {name: path for name, path in pairs if not libraries.GLIBC.fullmatch(name)}
    assert {name: os.path.realpath(path) for name, path in found.libraries.items()} == {
        name: os.path.realpath(path) for name, path in wanted.items()
    }


# --- stripping -------------------------------------------------------------------------------------------


def modules():
    python = running()
    site = Path(next(path for path in sys.path if path.endswith("site-packages")))
    return [python.program, *sorted(python.stdlib.glob("lib-dynload/*.so")), *sorted(site.glob("*/*.so"))]


def test_stripping_keeps_all_loaded_bytes(tmp_path):
    saved = 0
    for path in modules():
        before = path.read_bytes()
        after = strip_symbols(before)
        saved += len(before) - len(after)
        (tmp_path / "after").write_bytes(after)
        assert dynamic(reader(tmp_path / "after")) == dynamic(reader(path))
        assert elf.glibc(reader(tmp_path / "after")) == elf.glibc(reader(path))
        pieces = elf.loaded_ranges(before)
        assert elf.loaded_ranges(after) == pieces
        # The ELF header has the section table's offset; it is the only loaded part that changes.
        assert [after[max(piece.start, 64) : piece.stop] for piece in pieces] == [
            before[max(piece.start, 64) : piece.stop] for piece in pieces
        ]
        assert strip_symbols(after) == after
    assert saved >= 0


def test_a_stripped_module_works(tmp_path):
    source = max(running().stdlib.glob("lib-dynload/*.so"), key=lambda path: path.stat().st_size)
    data = strip_symbols(source.read_bytes())
    (tmp_path / source.name).write_bytes(data)
    name = source.name.partition(".")[0]
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {name} as m; print(m.__file__)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / source.name)
    if shutil.which("readelf"):
        done = subprocess.run(["readelf", "-WSV", tmp_path / source.name], check=True, capture_output=True, text=True)
        assert done.stderr == ""
        assert ".dynsym" in done.stdout
        assert ".debug_info" not in done.stdout


def test_files_that_are_not_elf_are_left_unchanged(tmp_path):
    data = fake(tmp_path / "a", needs=["liba.so.1"]).read_bytes()
    for some in (b"", b"text", data, data[:70], data[:40]):
        assert strip_symbols(some) == some
