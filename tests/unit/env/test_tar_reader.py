"""Tars from outside: every header of theirs that could ask for memory, a place outside, or more than is there."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import stat
import tarfile
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from provision.env.bundle import tar
from provision.env.bundle.tar import TarError, TarReader
from provision.env.interchange.importer import LIMIT, Environment, declared_records, import_archive, read_unpacker
from provision.env.interchange.unpack import unpack
from provision.errors import BundleError, ClusterctlError, UsageError
from provision.model import ignore


def header(
    name=b"x", *, kind=b"0", size=0, mode=0o644, mtime=1, link=b"", magic=b"ustar\x0000", prefix=b"", sized=None
):
    """One header block; ``sized`` is the size field as it stands there."""
    block = bytearray(512)
    block[:100] = name[:100].ljust(100, b"\0")
    block[100:124] = b"%07o\0" % mode + b"0000000\0" * 2
    block[124:136] = sized or (b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big"))
    block[136:148] = b"%011o\0" % mtime
    block[156:157] = kind
    block[157:257] = link[:100].ljust(100, b"\0")
    block[257:265] = magic
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def blocks(data):
    return data + bytes(-len(data) % 512)


def pax(kind=b"x", **records):
    data = b""
    for key, value in records.items():
        body = b" %s=%s\n" % (
            key.replace("__", ".").encode(),
            value if isinstance(value, bytes) else str(value).encode(),
        )
        length = len(body)
        while len(str(length)) + len(body) != length:
            length = len(str(length)) + len(body)
        data += b"%d%s" % (length, body)
    return header(b"pax", kind=kind, size=len(data)) + blocks(data)


END = bytes(1024)
FILE = header(b"f", size=4) + blocks(b"data")


@pytest.fixture
def unpacked(tmp_path):
    """Unpacks bytes in inner/to, and sees to it that nothing comes to lie elsewhere."""
    folder = tmp_path / "inner/to"
    folder.mkdir(parents=True)
    archive = tmp_path / "a.tar"

    def run(data):
        archive.write_bytes(data)
        tracemalloc.start()
        began = time.process_time()
        try:
            return unpack(archive, folder, lambda _: None)
        finally:
            assert tracemalloc.get_traced_memory()[1] < 24 << 20
            tracemalloc.stop()
            assert time.process_time() - began < 20
            assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "inner"]
            assert [path.name for path in (tmp_path / "inner").iterdir()] == ["to"]

    return run


def zeros(size):
    """A gzip file of a tar followed by zeros: small on the disk, large when it is read."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as file:
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return out.getvalue()


REFUSED = {
    "a long name of 2 GiB": (
        header(b"././@LongLink", kind=b"L", size=2 << 30) + END,
        "a long name of 2147483648 bytes",
    ),
    "a long target of 2 GiB": (header(b"././@LongLink", kind=b"K", size=2 << 30), "a long link target of 2147483648"),
    "a pax header of 8 EiB": (header(kind=b"x", size=(1 << 62)), "a pax header of 4611686018427387904 bytes"),
    "a global header of 1 GiB": (header(kind=b"g", size=1 << 30), "a pax header of 1073741824 bytes"),
    "Solaris' header of 1 GiB": (header(kind=b"X", size=1 << 30), "a pax header of 1073741824 bytes"),
    "many headers of one member": (
        (header(kind=b"L", size=600_000) + blocks(b"a" * 600_000)) * 2 + FILE,
        "the limit for the headers of a member is 1048576",
    ),
    "a name of 5000 bytes": (header(kind=b"L", size=5000) + blocks(b"a/" * 2500) + FILE, "longer than the 4095 bytes"),
    "a pax path of 5000 bytes": (pax(path="a/" * 2500) + FILE, "longer than the 4095 bytes"),
    "a component of 300 bytes": (pax(path="a" * 300) + FILE, "more than 255 bytes"),
    "GNU's sparse file": (header(kind=b"S", size=512) + bytes(512) + END, "sparse file"),
    "a sparse file in pax 0.0": (pax(GNU__sparse__size=1 << 60, GNU__sparse__numblocks=1) + FILE, "sparse file"),
    "a sparse file in pax 0.1": (pax(GNU__sparse__map="0,1", GNU__sparse__size=9) + FILE, "sparse file"),
    "a sparse file in pax 1.0": (
        pax(GNU__sparse__major=1, GNU__sparse__minor=0, GNU__sparse__realsize=1 << 60) + FILE,
        "sparse file",
    ),
    "a global path": (pax(b"g", path="x") + FILE, "gives all members one path"),
    "a global size": (pax(b"g", size=9) + FILE, "gives all members one size"),
    "a global linkpath": (pax(b"g", linkpath="/etc/passwd") + FILE, "gives all members one linkpath"),
    "a global sparse map": (pax(b"g", GNU__sparse__map="0,1") + FILE, "sparse file"),
    "a pax path that leads out": (pax(path="../x") + FILE, "leads out"),
    "an absolute pax path": (pax(path="/etc/x") + FILE, "absolute"),
    "a pax path with a NUL": (pax(path=b"a\0b") + FILE, "leads out"),
    "a long name that leads out": (header(kind=b"L", size=150) + blocks(b"../" * 50) + FILE, "leads out"),
    "a prefix that leads out": (header(b"x", prefix=b"../../up") + END, "leads out"),
    "a pax linkpath that leads out": (pax(linkpath="../../x") + header(b"l", kind=b"1", link=b"f"), "is a link to"),
    "an absolute pax linkpath": (pax(linkpath="/etc/passwd") + header(b"l", kind=b"1", link=b"f"), "is a link to"),
    "a symlink with a NUL": (pax(linkpath=b"a\0b") + header(b"l", kind=b"2"), "symlink to no path"),
    "a symlink to nothing": (header(b"l", kind=b"2") + END, "symlink to no path"),
    "through a symlink of a pax path": (
        pax(linkpath="/tmp") + header(b"d", kind=b"2") + pax(path="d/x") + FILE,
        "through the symlink 'd'",
    ),
    "a pax size of many digits": (pax(size="9" * 5000) + FILE, "has the size"),
    "a negative pax size": (pax(size="-1") + FILE, "has the size"),
    "a pax size that is no number": (pax(size="nan") + FILE, "has the size"),
    "a pax size beyond the end": (pax(size=1 << 40) + FILE + END, "in the middle|no space left"),
    "a pax time that is no number": (pax(mtime="nan") + FILE, "has the time"),
    "a negative size": (header(size=0, sized=b"\xff" * 12) + END, "has the size -1"),
    "a size beyond 63 bits": (header(sized=b"\x80" + b"\xff" * 11) + END, "has the size"),
    "a size with a sign": (header(sized=b"-0000000001\0") + END, "has the size"),
    "a size with an underscore": (header(sized=b"1_0\0".ljust(12, b"\0")) + END, "has the size"),
    "a record without a length": (header(kind=b"x", size=8) + blocks(b"path=a\n\n") + FILE, "damaged at its byte 0"),
    "a record of length 0": (header(kind=b"x", size=9) + blocks(b"0 path=a\n") + FILE, "damaged at its byte 0"),
    "a record that is too long": (header(kind=b"x", size=10) + blocks(b"99 path=a\n") + FILE, "damaged at its byte 0"),
    "a record that is too short": (header(kind=b"x", size=9) + blocks(b"5 path=a\n") + FILE, "damaged at its byte 0"),
    "digits without an end": (
        header(kind=b"x", size=1 << 19) + blocks(b"1" * (1 << 19)) + FILE,
        "damaged at its byte 0",
    ),
    "a header and no member": (pax(path="x") + END, "no member follows"),
    "a character device": (header(b"null", kind=b"3") + END, "device"),
    "a block device": (header(b"disk", kind=b"4") + END, "device"),
    "a pipe": (header(b"pipe", kind=b"6") + END, "pipe"),
    "a volume label": (header(b"label", kind=b"V") + END, "device"),
    "a part of another volume": (header(b"part", kind=b"M", size=4) + blocks(b"data") + END, "device"),
    "a kind that nobody knows": (header(b"odd", kind=b"Z") + END, "device"),
    "a tar behind the tar": (FILE + END + FILE + END, "there is data but no member"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_header_that_no_environment_needs_is_refused(unpacked, case):
    data, why = REFUSED[case]
    with pytest.raises((BundleError, UsageError), match=why) as error:
        unpacked(data)
    assert len(str(error.value)) < 1000


def test_the_long_name_of_the_report_is_refused_from_65_kb(unpacked):
    """A gzip file with a long name of 2 GiB used 4.1 GB of memory and died with a MemoryError."""
    bomb = gzip.compress(header(b"././@LongLink", kind=b"L", size=2 << 30)) + zeros(64 << 20)
    with pytest.raises(BundleError, match="the limit for the headers of a member is 1048576") as error:
        unpacked(bomb)
    assert error.value.hint


def test_members_and_their_names_are_counted(unpacked, monkeypatch):
    monkeypatch.setattr(tar, "MEMBERS", 10)
    with pytest.raises(BundleError, match="more than 10 members"):
        unpacked(b"".join(header(b"f%d" % n) for n in range(11)) + END)


@pytest.mark.parametrize("kind", ["xz", "zst"])
def test_a_dictionary_that_needs_much_memory_is_refused(unpacked, kind):
    if kind == "xz":
        data = bytearray(
            lzma.compress(FILE + END, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0}], check=lzma.CHECK_NONE)
        )
        assert data[12 + 2] == 0x21  # the block's only filter is LZMA2; its property is the size of the dictionary
        data[12 + 4] = 35  # 768 MiB
        data[12 + 8 : 12 + 12] = zlib.crc32(data[12 : 12 + 8]).to_bytes(4, "little")
    else:
        # magic, a header without a single segment or content size, and a window of 2 GiB (RFC 8878, 3.1.1.1.2)
        data = b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3]) + b"\x01\x00\x00"
    with pytest.raises(BundleError, match="MiB of memory"):
        unpacked(bytes(data))


KINDS = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_larger_than_the_disk_is_refused_before_the_disk_is_full(unpacked, monkeypatch, kind):
    free = os.statvfs_result((4096, 4096, 1000, 500, 500, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: free)
    bomb = KINDS[kind](header(b"zeros", size=3 << 20) + bytes(3 << 20) + END)
    with pytest.raises(UsageError, match=r"'zeros' has 0\.00 GB, and 0\.00 GB are free in .*inner"):
        unpacked(bomb)


def test_several_xz_streams_with_padding_are_one_file(unpacked):
    whole = FILE + END
    assert unpacked(lzma.compress(whole[:700]) + bytes(4) + lzma.compress(whole[700:]) + bytes(8)).kinds == {
        "f": "file"
    }


def test_setuid_setgid_and_sticky_bits_are_dropped(unpacked, tmp_path):
    unpacked(header(b"s", mode=0o7755, size=4) + blocks(b"data") + header(b"d/", kind=b"5", mode=0o7777) + END).seal()
    assert stat.S_IMODE((tmp_path / "inner/to/s").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "inner/to/d").stat().st_mode) == 0o777


def test_member_with_every_allowed_field(unpacked, tmp_path):
    long = "l" * 200 + "/" + "n" * 200
    data = (
        pax(b"g", comment="made by git archive", mtime="7.5")
        + header(b"old/", kind=b"\0", magic=bytes(8))
        + header(b"old/v7", kind=b"\0", magic=bytes(8), size=4)
        + blocks(b"data")
        + header(b"short", prefix=b"a/b")
        + pax(path=long, mtime="9.25", SCHILY__xattr__user__x=b"\0\xff=\n", atime="1")
        + header(b"cut", size=4)
        + blocks(b"data")
        + header(kind=b"L", size=202)
        + blocks(b"m" * 201 + b"\0")
        + header(b"m" * 100, kind=b"2", link=b"/nowhere")
        + header(kind=b"K", size=151, magic=b"ustar  \0")
        + blocks(b"t" * 150 + b"\0")
        + header(b"sym", kind=b"2", magic=b"ustar  \0")
        + header(b"contiguous", kind=b"7", size=4)
        + blocks(b"data")
        + header(b"big", sized=b"\x80" + (4).to_bytes(11, "big"))
        + blocks(b"data")
        + header(b"spaces", sized=b"       4    ")
        + blocks(b"data")
    )
    top = tmp_path / "inner/to"
    unpacked(data + bytes(512))
    assert (top / "old/v7").read_bytes() == (top / "contiguous").read_bytes() == (top / "big").read_bytes() == b"data"
    assert (top / "a/b/short").stat().st_mtime == 7.5
    assert (top / long).stat().st_mtime == 9.25
    assert (top / ("m" * 201)).readlink() == Path("/nowhere")
    assert (top / "sym").readlink() == Path("t" * 150)


names = st.binary(min_size=1, max_size=160).filter(lambda name: b"\0" not in name and name.strip(b"/") == name)


@given(st.lists(st.tuples(names, st.binary(max_size=999), st.integers(0, 0o7777), st.integers(0, 1 << 34)), max_size=5),
       st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))  # fmt: skip
def test_headers_written_by_python_are_read(members, form):
    out = io.BytesIO()
    wanted = []
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as file:
        for name, data, mode, mtime in members:
            info = tarfile.TarInfo(os.fsdecode(name))
            info.size, info.mode, info.mtime = len(data), mode, mtime
            file.addfile(info, io.BytesIO(data))
            wanted.append((os.fsdecode(name), data, mode, mtime))
    reader = TarReader(io.BytesIO(out.getvalue()).read)
    assert [(m.name, b"".join(reader.content()), m.mode, m.mtime) for m in reader] == wanted


SOME = (
    pax(path="dir/with a long name", mtime="5.5") + header(b"cut", size=600) + blocks(b"x" * 600)
    + header(kind=b"L", size=121) + blocks(b"n" * 120 + b"\0") + header(b"n" * 100, size=3) + blocks(b"abc")
    + header(b"s", kind=b"2", link=b"f") + header(b"h", kind=b"1", link=b"s") + header(b"d/", kind=b"5") + FILE + END
)  # fmt: skip


@given(st.data())
def test_any_mutation_of_a_tar_is_read_or_refused(data):
    content = bytearray(SOME)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        piece = data.draw(
            st.binary(max_size=20)
            | st.sampled_from([header(kind=kind) for kind in (b"L", b"K", b"x", b"g", b"S", b"3")] + [bytes(512), FILE])
        )
        content[at : at + data.draw(st.sampled_from([0, len(piece), 512]))] = piece
    if data.draw(st.booleans()):  # a check sum that is right, so that the fields behind it are read
        for at in range(0, len(content) - 511, 512):
            block = content[at : at + 512]
            if block[257:262] == b"ustar":
                block[148:156] = b" " * 8
                content[at + 148 : at + 156] = b"%06o\0 " % sum(block)
    reader = TarReader(io.BytesIO(bytes(content)).read)
    with contextlib.suppress(TarError, EOFError):
        for member in reader:
            assert len(member.name) <= tar.PATH
            assert sum(map(len, reader.content())) == member.size <= len(content)


@given(st.data())
def test_any_mutation_of_an_archive_is_unpacked_inside_or_refused(tmp_path_factory, data):
    content = bytearray(SOME)
    at = data.draw(st.integers(0, len(content) - 1))
    piece = data.draw(
        st.sampled_from([b"../", b"/", b"\0", b"a/../../", b"/etc/x\0", b"5", b"1", b"2"]) | st.binary(max_size=9)
    )
    content[at : at + len(piece)] = piece
    for block in range(0, len(content) - 511, 512):
        if content[block + 257 : block + 262] == b"ustar":
            content[block + 148 : block + 156] = b" " * 8
            content[block + 148 : block + 156] = b"%06o\0 " % sum(content[block : block + 512])
    top = tmp_path_factory.mktemp("fuzz")
    (top / "to").mkdir()
    (top / "a.tar").write_bytes(content)
    with contextlib.suppress(ClusterctlError):
        unpack(top / "a.tar", top / "to", lambda _: None)
    assert sorted(path.name for path in top.iterdir()) == ["a.tar", "to"]


def test_a_long_program_of_an_archive_is_not_parsed():
    with pytest.raises(BundleError, match="more than the limit of 33554432"):
        read_unpacker(b"x" * (LIMIT + 1))


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"_prefix_records = " + b"-" * 100_000 + b"1", b"\0", b"x = (" * 5000]
)
def test_any_program_of_an_archive_is_refused_without_a_traceback(data):
    with pytest.raises(BundleError):
        read_unpacker(data)


def test_deeply_nested_package_metadata_is_not_an_error():
    assert declared_records([b"[" * 100_000, b'{"paths_data": {"paths": 5}}']) == ()


def test_file_too_large_for_memory_is_not_rewritten(tmp_path):
    (tmp_path / "bin").mkdir()
    with (tmp_path / "bin/huge").open("wb") as file:
        file.truncate(300 << 20)
    environment = Environment(tmp_path, {"bin": "dir", "bin/huge": "file"})
    assert environment.read("bin/huge") == b""


def test_failed_import_leaves_nothing(tmp_path):
    archive = tmp_path / "env.tar.gz"
    archive.write_bytes(gzip.compress(FILE + header(kind=b"L", size=2 << 30)))
    with pytest.raises(BundleError, match="cannot be used"):
        import_archive(archive, tmp_path / "env.tar.gz.ccb", emit=ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["env.tar.gz"]
