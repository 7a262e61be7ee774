"""Untrusted archives: members that would leave the folder, damage, truncation."""

import bz2
import gzip
import io
import lzma
import os
import random
import stat
import tarfile
import zlib
from pathlib import Path

import pytest
import zstandard

from provision.env.interchange.export import gzip_stream
from provision.env.interchange.unpack import format_of, unpack
from provision.env.packing import temporary
from provision.errors import BundleError


def member(name, kind=tarfile.REGTYPE, *, link="", data=b"data", mode=0o644, mtime=1_600_000_000):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.mtime = kind, link, mode, mtime
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    return info, data


def tar_of(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    """The archive is unpacked in inner/to; anything beside it would be an escape."""
    (tmp_path / "inner").mkdir()
    folder = tmp_path / "inner/to"
    folder.mkdir()
    return folder


def everything(top):
    return sorted(str(path.relative_to(top)) for path in top.rglob("*"))


SYM, HARD, DIR = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE

ESCAPES = {
    "dots": ([member("../x")], "'../x'", "leads out"),
    "dots inside": ([member("a/../../x")], "'a/../../x'", "leads out"),
    "dots that stay inside": ([member("a/b"), member("a/../c")], "'a/../c'", "leads out"),
    "absolute": ([member("/etc/x")], "'/etc/x'", "absolute"),
    "absolute folder": ([member("/etc", DIR)], "'/etc'", "absolute"),
    "through a symlink": ([member("a", SYM, link=".."), member("a/x")], "'a/x'", "through the symlink 'a'"),
    "through an absolute symlink": ([member("a", SYM, link="/etc"), member("a/b/x")], "'a/b/x'", "symlink 'a'"),
    "through a symlink that stays inside": (
        [member("lib/y"), member("a", SYM, link="lib"), member("a/x")],
        "'a/x'",
        "symlink 'a'",
    ),
    "a folder over a symlink": ([member("a", SYM, link="/etc"), member("a", DIR)], "'a'", "folder"),
    "through a file": ([member("a"), member("a/x")], "'a/x'", "through the file 'a'"),
    "a file over a folder": ([member("a/x"), member("a")], "'a'", "is not a folder"),
    "a hard link outside": ([member("a", HARD, link="/etc/passwd")], "'a'", "/etc/passwd"),
    "a hard link up": ([member("a", HARD, link="../../secret")], "'a'", "../../secret"),
    "a hard link through a symlink": (
        [member("d", SYM, link="/etc"), member("a", HARD, link="d/passwd")],
        "'a'",
        "d/passwd",
    ),
    "a hard link to what comes later": ([member("a", HARD, link="b"), member("b")], "'a'", "'b'"),
    "a hard link to itself": ([member("a", HARD, link="a")], "'a'", "hard link"),
    "a character device": ([member("null", tarfile.CHRTYPE)], "'null'", "device"),
    "a block device": ([member("disk", tarfile.BLKTYPE)], "'disk'", "device"),
    "a pipe": ([member("pipe", tarfile.FIFOTYPE)], "'pipe'", "pipe"),
}


@pytest.mark.parametrize("case", ESCAPES)
def test_a_member_that_would_leave_the_folder_is_refused_by_name(tmp_path, folder, case):
    members, name, why = ESCAPES[case]
    (tmp_path / "secret").write_text("secret")
    archive = tmp_path / "bad.tar"
    archive.write_bytes(tar_of(*members))
    before = [path for path in everything(tmp_path) if not path.startswith("inner/to/")]
    with pytest.raises(BundleError) as error:
        unpack(archive, folder, lambda _: None)
    assert str(archive) in str(error.value)
    assert name in str(error.value)
    assert why in str(error.value)
    assert [path for path in everything(tmp_path) if not path.startswith("inner/to/")] == before
    assert (tmp_path / "secret").stat().st_nlink == 1


def test_a_hard_link_with_a_name_of_the_archive_shares_its_file_and_no_other(tmp_path, folder):
    archive = tmp_path / "good.tar"
    archive.write_bytes(tar_of(member("a/b"), member("c", HARD, link="./a//b"), member("d", SYM, link="/etc/passwd")))
    unpacked = unpack(archive, folder, lambda _: None)
    assert (folder / "a/b").samefile(folder / "c")
    assert (folder / "d").readlink() == Path("/etc/passwd")
    assert unpacked.kinds == {"a": "dir", "a/b": "file", "c": "file", "d": "link"}


def test_unpacked_files_equal_the_packed_ones(tmp_path, folder):
    odd = os.fsdecode(b"share/\xff\xfe name\nof it")
    archive = tmp_path / "good.tar"
    archive.write_bytes(
        tar_of(
            member("./", DIR),
            member("./ro", DIR, mode=0o555),
            member("ro/file", mode=0o444, mtime=1_600_000_000.25),
            member(odd, data=b"x" * 3_000_000),
            member("setuid", mode=0o6755),
            member("twice", data=b"old"),
            member("twice", data=b"new"),
            member("link", SYM, link="ro/file", mtime=1_500_000_000),
            member("early", mtime=-5),
            member("empty/folder", DIR, mode=0o700),
            member("l" * 150 + "/" + "n" * 150),
        )
    )
    unpacked = unpack(archive, folder, lambda _: None)
    unpacked.seal()
    assert stat.S_IMODE((folder / "ro").stat().st_mode) == 0o555
    assert stat.S_IMODE((folder / "ro/file").stat().st_mode) == 0o444
    assert (folder / "ro/file").stat().st_mtime == 1_600_000_000.25
    assert (folder / odd).read_bytes() == b"x" * 3_000_000
    assert stat.S_IMODE((folder / "setuid").stat().st_mode) == 0o755
    assert (folder / "twice").read_bytes() == b"new"
    assert (folder / "link").lstat().st_mtime == 1_500_000_000
    assert (folder / "early").stat().st_mtime == 0
    assert stat.S_IMODE((folder / "empty/folder").stat().st_mode) == 0o700
    assert (folder / ("l" * 150) / ("n" * 150)).is_file()
    temporary.delete_folder(folder)
    assert not folder.exists()


KINDS = {
    "tar": lambda data: data,
    "gz": gzip.compress,
    "zst": lambda data: zstandard.compress(data[:5000]) + zstandard.compress(data[5000:]),
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
}


def noisy(seed=1):
    noise = random.Random(seed)
    return tar_of(*(member(f"f{number}", data=noise.randbytes(3000)) for number in range(20)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_compression_is_detected_and_progress_reaches_the_end(tmp_path, folder, kind):
    archive = tmp_path / "no.suffix"
    noise = random.Random(2)
    archive.write_bytes(KINDS[kind](tar_of(*(member(f"f{n}", data=noise.randbytes(1 << 20)) for n in range(3)))))
    assert format_of(archive) == kind
    done = []
    unpacked = unpack(archive, folder, done.append)
    assert len(unpacked.kinds) == 3
    assert done == sorted(done)
    assert done[-1] > archive.stat().st_size * 0.6


@pytest.mark.parametrize("where", [0.02, 0.3, 0.77, 0.999])
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_archive_is_refused(tmp_path, folder, kind, where):
    archive = tmp_path / "cut"
    whole = KINDS[kind](noisy())
    if kind == "tar":
        whole = whole.rstrip(b"\0")  # the zeros at its end have no meaning
    archive.write_bytes(whole[: int(len(whole) * where)])
    with pytest.raises(BundleError, match=r"cut is damaged|not a known kind"):
        unpack(archive, folder, lambda _: None)


def test_a_tar_that_ends_between_two_members_is_truncated(tmp_path, folder):
    whole = tar_of(member("a"), member("b"))
    archive = tmp_path / "cut.tar"
    archive.write_bytes(whole[:1024])  # one header, one block of data
    with pytest.raises(BundleError, match="in the middle"):
        unpack(archive, folder, lambda _: None)


def test_a_damaged_header_is_not_the_end(tmp_path, folder):
    data = bytearray(tar_of(member("a"), member("b"), member("c")))
    data[1024 + 5] ^= 0x20
    archive = tmp_path / "bad.tar"
    archive.write_bytes(data)
    with pytest.raises(BundleError, match=r"no member at byte 1024"):
        unpack(archive, folder, lambda _: None)


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2"])
def test_a_flipped_bit_is_found(tmp_path, folder, kind):
    data = bytearray(KINDS[kind](noisy()))
    data[len(data) // 2] ^= 1
    archive = tmp_path / "bad"
    archive.write_bytes(data)
    with pytest.raises(BundleError, match="damaged"):
        unpack(archive, folder, lambda _: None)


@pytest.mark.parametrize("size", [0, 1, 1000, (1 << 20) - 1, 1 << 20, (3 << 20) + 17])
@pytest.mark.parametrize("block", [1 << 12, (1 << 20) + 1])
def test_gzip_in_pieces_is_one_gzip_file(size, block):
    noise = random.Random(size)
    data = b"".join(noise.choice((b"abc", b"defg", noise.randbytes(9))) for _ in range(size // 3 + 1))[:size]
    blocks = (data[start : start + block] for start in range(0, size, block))
    packed = b"".join(gzip_stream(blocks, threads=3))
    plain = io.BytesIO(packed)
    with gzip.GzipFile(fileobj=plain) as stream:
        assert stream.read() == data
    one = zlib.decompressobj(wbits=31)
    assert one.decompress(packed) == data
    assert one.eof
    assert one.unused_data == b""  # a single member


def test_gzip_blocks_refer_to_the_previous_block():
    noise = random.Random(3).randbytes(16 << 10)  # less than deflate's window
    one, many = (len(b"".join(gzip_stream([noise * times], threads=2))) for times in (64, 64 * 8))
    assert many < one + 8 * len(noise) / 2  # eight pieces, of which each but the first refers to what is before it
