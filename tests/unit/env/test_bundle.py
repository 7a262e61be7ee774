import hashlib
import json
import os

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from provision.env.bundle import tar
from provision.env.bundle.layout import MANIFEST, index_member, member_header
from provision.env.bundle.manifest import Chunk, Entry, Manifest, Mark, PrefixFiles, canonical
from provision.env.bundle.parse import parse
from provision.env.bundle.reader import open_bundle
from provision.errors import BundleError, ClusterctlError, UsageError
from provision.model import Progress, ignore


def open_and_verify(path):
    bundle = open_bundle(path)
    bundle.verify(ignore)
    return bundle


def patched(path, change):
    """A copy of a bundle whose manifest has been changed, with a true index."""
    bundle = open_bundle(path)
    data = json.loads(bundle.manifest.to_json())
    change(data)
    return with_manifest(path, bundle, json.dumps(data).encode())


def with_manifest(path, bundle, data):
    member = bundle.manifest.prefix_files
    begin = member.offset + member.compressed + tar.padding(member.compressed)
    content = path.read_bytes()[:begin]
    index = index_member(begin + tar.BLOCK, len(data), hashlib.sha256(data).hexdigest())
    end = member_header(MANIFEST, len(data)) + data + bytes(tar.padding(len(data))) + tar.END
    copy = path.with_name("patched.ccb")
    copy.write_bytes(index + content[len(index) :] + end)
    return copy


def test_complete_bundle_verifies(packed):
    events = []
    open_bundle(packed).verify(events.append)
    progress = [event for event in events if isinstance(event, Progress)]
    assert progress[-1].done == progress[-1].total


def test_reading_back(packed, prefix):
    bundle = open_bundle(packed)
    assert parse(bundle.manifest.to_json()) == bundle.manifest
    for index, chunk in enumerate(bundle.manifest.chunks):
        compressed = b"".join(bundle.chunk_compressed(index))
        assert hashlib.sha256(compressed).hexdigest() == chunk.digest
        assert b"".join(bundle.chunk_blocks(index)) == zstandard.ZstdDecompressor().decompress(compressed)
    assert bundle.prefix_files()["bin/hello"] == (prefix / "bin/hello").read_bytes()


def test_truncated_anywhere(packed, tmp_path):
    data = packed.read_bytes()
    copy = tmp_path / "copy.ccb"
    for length in {0, 1, 511, 512, 513, 1023, 1024, 1025, *range(2000, len(data), len(data) // 40), len(data) - 1}:
        copy.write_bytes(data[:length])
        with pytest.raises(BundleError, match="truncated"):
            open_bundle(copy)


def test_trailing_bytes(packed):
    with packed.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(BundleError, match="is too long"):
        open_bundle(packed)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere(packed, place, bit):
    data = bytearray(packed.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    copy = packed.with_name("flipped.ccb")
    copy.write_bytes(bytes(data))
    with pytest.raises(BundleError):
        open_and_verify(copy)


@pytest.mark.parametrize("offset", [*range(0, 1024, 37), -1, -600, -1025])
def test_a_flipped_byte_at_the_ends(packed, offset):
    data = bytearray(packed.read_bytes())
    data[offset] ^= 0xFF
    packed.write_bytes(bytes(data))
    with pytest.raises(BundleError):
        open_and_verify(packed)


def test_file_that_is_not_a_bundle(tmp_path):
    other = tmp_path / "other.tar.gz"
    other.write_bytes(os.urandom(5000))
    with pytest.raises(BundleError, match="not a clusterctl bundle"):
        open_bundle(other)
    with pytest.raises(UsageError, match="not a file"):
        open_bundle(tmp_path / "nothing")


def test_an_older_format(packed):
    packed.write_bytes(packed.read_bytes().replace(b'"format": 3,', b'"format": 2,', 1))
    with pytest.raises(BundleError, match="format 2; this clusterctl reads format 3 only") as error:
        open_bundle(packed)
    assert "pack it again" in error.value.hint


def test_a_newer_format(packed):
    data = packed.read_bytes()
    packed.write_bytes(data.replace(b'"format": 3,', b'"format": 4,', 1))
    with pytest.raises(BundleError, match="format 4; this clusterctl reads format 3 only") as error:
        open_bundle(packed)
    assert "version of clusterctl" in error.value.hint
    assert error.value.exit_code == 3


def entry_named(data, path):
    return next(entry for entry in data["files"] if entry["path"] == path)


BIG = "lib/python3.11/site-packages/big/big.bin"

EVIL = {
    "parent": lambda data: data["files"][-1].update(path="share/../../etc/passwd"),
    "absolute": lambda data: data["files"][-1].update(path="/etc/passwd"),
    "empty": lambda data: data["files"][0].update(path=""),
    "dot": lambda data: data["files"][-1].update(path="src/./x"),
    "double slash": lambda data: data["files"][-1].update(path="src//x"),
    "nul": lambda data: data["files"][-1].update(path="src/x\0y"),
    "surrogate": lambda data: data["files"][-1].update(path="src/\ud800"),
    "ours": lambda data: data["files"][0].update(path=".clusterctl/complete"),
    "duplicate": lambda data: data["files"].append(data["files"][-1]),
    "unsorted": lambda data: data["files"].reverse(),
    "setuid": lambda data: data["files"][0].update(mode=0o4755),
    "negative size": lambda data: data["files"][-1].update(size=-1),
    "mtime": lambda data: data["files"][-1].update(mtime="now"),
    "hard link to nothing": lambda data: entry_named(data, "bin/hello-too").update(target="bin/nothing"),
    "hard link to itself": lambda data: entry_named(data, "bin/hello-too").update(target="bin/hello-too"),
    "hard link to a later one": lambda data: entry_named(data, "bin/hello-too").update(target="share/sp ace"),
    "hard link to a symlink": lambda data: entry_named(data, "bin/hello-too").update(target="bin/python"),
    "hard link to a folder": lambda data: entry_named(data, "share/hard/plain.py").update(target="lib"),
    "hard link out of the prefix": lambda data: entry_named(data, "bin/hello-too").update(target="../hello"),
    "hard link to an absolute path": lambda data: entry_named(data, "bin/hello-too").update(target="/bin/sh"),
    "hard link of another mode": lambda data: entry_named(data, "bin/hello-too").update(mode=0o777),
    "hard link of another time": lambda data: entry_named(data, "bin/hello-too").update(mtime=7),
    "hard link that holds the prefix": lambda data: entry_named(data, "bin/hello-too").update(prefix=[["text", ""]]),
    "hard link in another chunk": lambda data: entry_named(data, "bin/hello-too").update(
        chunk=entry_named(data, "share/sp ace")["chunk"]
    ),
    "file among the folders": lambda data: data["chunks"][entry_named(data, "share/sp ace")["chunk"]].update(
        package="./"
    ),
    "in ranges and to be rewritten": lambda data: entry_named(data, BIG).update(prefix=[["text", ""]]),
    "ranges of another file": lambda data: entry_named(data, "share/sp ace").update(
        chunk=entry_named(data, BIG)["chunk"]
    ),
    "ranges in another order": lambda data: entry_named(data, BIG)["chunk"].append(entry_named(data, BIG)["chunk"][0]),
    "no ranges": lambda data: entry_named(data, BIG).update(chunk=[]),
    "ranges that are no numbers": lambda data: entry_named(data, BIG).update(chunk=[True, None]),
    "a chunk that is true": lambda data: entry_named(data, "share/sp ace").update(chunk=True),
    "key": lambda data: data["chunks"][0].update(key="x"),
    "no digest": lambda data: entry_named(data, "bin/hello").update(sha256="x"),
    "unknown type": lambda data: data["files"][0].update(type="socket"),
    "no type": lambda data: data["files"][0].pop("type"),
    "chunk too high": lambda data: entry_named(data, "share/sp ace").update(chunk=10**6),
    "chunk negative": lambda data: entry_named(data, "share/sp ace").update(chunk=-1),
    "chunk no number": lambda data: entry_named(data, "share/sp ace").update(chunk="0"),
    "chunk and prefix": lambda data: entry_named(data, "bin/hello").update(chunk=0),
    "chunk missing": lambda data: entry_named(data, "share/sp ace").pop("chunk"),
    "mark unknown": lambda data: entry_named(data, "bin/hello").update(prefix=[["odd", ""]]),
    "mark elsewhere": lambda data: entry_named(data, "bin/hello").update(prefix=[["text", "src/no"]]),
    "link to nowhere": lambda data: entry_named(data, "share/dangling").update(target=""),
    "beneath a link": lambda data: data["files"].insert(
        1 + data["files"].index(entry_named(data, "share/dangling")),
        entry_named(data, "share/sp ace") | {"path": "share/dangling/x"},
    ),
    "size": lambda data: entry_named(data, "share/sp ace").update(size=7000),
    "chunk size": lambda data: data["chunks"][0].update(size=1),
    "offset": lambda data: data["chunks"][0].update(offset=10**12),
    "target": lambda data: data["relocations"][0].__setitem__(1, "../../etc"),
    "no relocations": lambda data: data.update(relocations=[]),
    "prefix": lambda data: data.update(source_prefix="/"),
    "files": lambda data: data.update(files={}),
    "versions": lambda data: data.update(versions={"torch": 1}),
}


@pytest.mark.parametrize("change", EVIL.values(), ids=EVIL.keys())
def test_a_malicious_manifest_is_refused_when_opened(packed, change):
    with pytest.raises(BundleError):
        open_bundle(patched(packed, change))


@pytest.mark.parametrize(
    "change",
    [{"mode": 0o777}, {"mtime": 5}, {"sha256": "0" * 64}, {"path": "share/sp bce"}],
    ids=["mode", "mtime", "sha256", "name"],
)
def test_a_manifest_that_lies_about_a_member_is_found_by_verify(packed, change):
    copy = patched(packed, lambda data: entry_named(data, "share/sp ace").update(change))
    with pytest.raises(BundleError, match="differs from the manifest"):
        open_and_verify(copy)


def with_two_members_swapped(path):
    """A copy of a bundle in which two tar chunks that follow each other have changed places; and the chunks."""
    bundle = open_bundle(path)
    sized = {number: chunk for number, chunk in enumerate(bundle.manifest.chunks) if chunk.kind == "tar"}
    first = next(number for number in sized if number + 1 in sized)
    one, two = sized[first], sized[first + 1]
    data = path.read_bytes()
    begin, middle = one.offset - tar.BLOCK, two.offset - tar.BLOCK
    end = two.offset + two.compressed + tar.padding(two.compressed)
    copy = path.with_name("swapped.ccb")
    copy.write_bytes(data[:begin] + data[middle:end] + data[begin:middle] + data[end:])
    return copy, first, end - middle


def test_members_in_another_order_are_not_confused(packed):
    copy, first, _ = with_two_members_swapped(packed)
    bundle = open_bundle(copy)  # which looks at the manifest alone
    for number in (first, first + 1):
        for read in (bundle.chunk_blocks, bundle.chunk_compressed):
            with pytest.raises(BundleError, match="damaged"):
                list(read(number))
    with pytest.raises(BundleError, match="damaged"):
        bundle.verify(ignore)


def test_members_are_read_in_the_manifests_order(packed):
    copy, first, length = with_two_members_swapped(packed)
    original = open_bundle(packed)

    def tell(data):
        one, two = data["chunks"][first : first + 2]
        one["offset"], two["offset"] = one["offset"] + length, one["offset"]

    bundle = open_bundle(patched(copy, tell))
    for number in range(len(original.manifest.chunks)):
        assert b"".join(bundle.chunk_blocks(number)) == b"".join(original.chunk_blocks(number))
    assert bundle.prefix_files() == original.prefix_files()
    with pytest.raises(BundleError, match="damaged"):  # no pack writes it so
        bundle.verify(ignore)


def test_a_manifest_that_lies_about_a_large_file_is_found_by_verify(packed, helpers):
    path = f"{helpers.SITE}/big/big.bin"
    copy = patched(packed, lambda data: entry_named(data, path).update(sha256="0" * 64))
    with pytest.raises(BundleError, match=r"big\.bin"):
        open_and_verify(copy)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_is_refused_without_a_traceback(value):
    with pytest.raises(BundleError):
        parse(json.dumps(value).encode())


@pytest.mark.parametrize("data", [b"", b"\xff", b"{", b"[" * 100_000, b'{"format": 2}', b"1" * 5000])
def test_data_that_is_not_a_manifest(data):
    with pytest.raises(BundleError):
        parse(data)


def test_chunk_larger_than_the_manifest_says(packed):
    def shrink(data):
        entry = entry_named(data, "share/quo'\"te")
        entry["size"] = 0
        data["chunks"][entry["chunk"]]["size"] -= 512

    copy = patched(packed, shrink)
    with pytest.raises(BundleError):
        open_and_verify(copy)


def test_an_errors_exit_code_is_that_of_bundles(packed):
    packed.write_bytes(b"")
    with pytest.raises(ClusterctlError) as error:
        open_bundle(packed)
    assert error.value.exit_code == 3


def test_digest_ignores_positions_in_the_file():
    def manifest(chunk):
        return Manifest(
            name="a", tool="1", created="", platform="linux-64", python="3.11", source_prefix="/p",
            chunks=(Chunk("0" * 64, "0" * 64, "tar", "p", 1, 1, 1),),
            prefix_files=PrefixFiles("", 0, 0, 0),
            files=(Entry("a", "file", 0o644, 1, 1, "0" * 64, chunks=(chunk,)),), relocations=(("/p", ""),),
        )  # fmt: skip

    assert manifest(0).digest == manifest(1).digest


def test_large_file_with_the_prefix_may_be_in_ranges(packed):
    bundle = open_and_verify(patched(packed, lambda data: entry_named(data, BIG).update(prefix=[["binary", ""]])))
    assert BIG in {entry.path for entry in bundle.manifest.marked}
    assert BIG not in {entry.path for entry in bundle.manifest.rewritable} | bundle.prefix_files().keys()


def test_a_read_error_names_the_file(packed, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(packed), "is_file", refuse)
    with pytest.raises(UsageError, match=r"cannot read .*env\.ccb: Permission denied"):
        open_bundle(packed)


entries = st.builds(
    Entry,
    path=st.binary(min_size=1, max_size=30).map(lambda data: data.decode("utf-8", "surrogateescape")),
    type=st.sampled_from(["file", "link", "hard", "dir"]),
    mode=st.integers(0, 0o777),
    mtime=st.integers(0, 1 << 40),
    size=st.integers(0, 1 << 50),
    sha256=st.just("0" * 64),
    target=st.text(max_size=20),
    chunks=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    raw=st.booleans(),
    marks=st.lists(st.builds(Mark, st.just("binary"), st.text(max_size=5), st.integers(0, 255)), max_size=2).map(tuple),
)


@given(entries, st.booleans())
def test_an_entrys_text_is_its_canonical_json(entry, chunk):
    assert entry.text(chunk=chunk).encode() == canonical(entry.to_json(chunk=chunk))
