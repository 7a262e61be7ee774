"""Hostile bundles: valid manifests, limits of reading, and mutations of a valid bundle."""

import copy
import functools
import hashlib
import json
import os
import tracemalloc
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.env.bundle import layout, parse, tar
from provision.env.bundle.layout import MANIFEST, index_member, member_header
from provision.env.bundle.manifest import Chunk, Entry, Manifest, Mark, PrefixFiles
from provision.env.bundle.parse import LIMIT
from provision.env.bundle.reader import open_bundle
from provision.env.packing import pack, writer
from provision.env.source import editable, environment
from provision.errors import BundleError, UsageError
from provision.model import ignore
from provision.tasks.bundles import pack_archive


@pytest.fixture(scope="module")
def packed(tmp_path_factory, helpers):
    """The small environment's bundle; never written to."""
    folder = tmp_path_factory.mktemp("hostile")
    prefix = helpers.make_env(folder / "opt/env", folder / "proj")
    pack.pack(prefix, folder / "env.ccb", name="env", emit=ignore, options=pack.PackOptions(limit=helpers.LIMIT))
    return folder / "env.ccb"


def patched(path, change):
    """A copy of a bundle whose manifest has been changed, with a true index."""
    bundle = open_bundle(path)
    data = json.loads(bundle.manifest.to_json())
    change(data)
    return with_manifest(path, json.dumps(data).encode())


def with_manifest(path, data, *, size=None, split=0):
    member = open_bundle(path).manifest.prefix_files
    begin = member.offset + member.compressed + tar.padding(member.compressed)
    content = path.read_bytes()[:begin]
    size = len(data) if size is None else size
    index = index_member(begin + tar.BLOCK, size, hashlib.sha256(data).hexdigest(), split)
    end = member_header(MANIFEST, size) + data + bytes(tar.padding(len(data))) + tar.END
    out = path.with_name("hostile.ccb")
    out.write_bytes(index + content[len(index) :] + end)
    return out


def entry_named(data, path):
    return next(entry for entry in data["files"] if entry["path"] == path)


STRINGS = {
    "name that leads out": (lambda d: d.update(name="../../ESCNAME"), "name"),
    "name with a slash": (lambda d: d.update(name="a/b"), "name"),
    "absolute name": (lambda d: d.update(name="/tmp/x"), "name"),
    "name that is a folder": (lambda d: d.update(name=".."), "name"),
    "empty name": (lambda d: d.update(name=""), "name"),
    "name with an escape sequence": (lambda d: d.update(name="a\x1b]0;x\x07"), "name"),
    "name with a newline": (lambda d: d.update(name="a\nb"), "name"),
    "name with a NUL": (lambda d: d.update(name="a\0b"), "name"),
    "name written backwards": (lambda d: d.update(name="a\u202eb"), "name"),
    "name of no bytes": (lambda d: d.update(name="\ud800"), ""),
    "long name": (lambda d: d.update(name="x" * 300), "name"),
    "tool": (lambda d: d.update(tool="1\x1b[2J"), "tool"),
    "created": (lambda d: d.update(created="now\r"), "created"),
    "platform": (lambda d: d.update(platform="linux\n-64"), "platform"),
    "python": (lambda d: d.update(python="3.11\x07"), "python"),
    "glibc": (lambda d: d.update(glibc="2.28\n"), "glibc"),
    "long python": (lambda d: d.update(python="3" * 5000), "python"),
    "version": (lambda d: d["versions"].update(torch="2\x1b[1A"), r"versions\['torch'\]"),
    "version key": (lambda d: d["versions"].update({"to\nrch": "2"}), "versions"),
    "architecture": (lambda d: d.update(gpu_architectures=["sm_90\x00"]), "gpu_architectures"),
    "package name": (lambda d: d["packages"][0].update(name="a\x85b"), r"packages\[0\].name"),
    "package version": (lambda d: d["packages"][1].update(version="1\n2"), r"packages\[1\].version"),
    "package kind": (lambda d: d["packages"][1].update(kind=["pypi"]), r"packages\[1\]"),
    "notice": (lambda d: d.update(notices=["x" * 70000]), r"notices\[0\]"),
    "notice of no bytes": (lambda d: d.update(notices=["\ud800"]), ""),
    "prefix": (lambda d: d.update(source_prefix="/opt/a\nb"), "source_prefix"),
    "long prefix": (lambda d: d.update(source_prefix="/" + "a" * 4096), "source_prefix"),
    "relocation": (lambda d: d["relocations"][0].__setitem__(0, "/x\x1b"), "relocations"),
    "link with a NUL": (lambda d: entry_named(d, "share/dangling").update(target="a\0b"), "target of 'share/dangling'"),
    "long link": (lambda d: entry_named(d, "share/dangling").update(target="a" * 4096), "target of"),
    "long path": (lambda d: d["files"][-1].update(path="src/" + "a/" * 2100 + "b"), "in one name"),
    "long component": (lambda d: d["files"][-1].update(path="src/" + "a" * 256), "in one name"),
    "long component in bytes": (lambda d: d["files"][-1].update(path="src/" + "é" * 128), "in one name"),
    "size as a float": (lambda d: entry_named(d, "bin/hello").update(size=5.0), "size of 'bin/hello' is 5.0"),
    "size as a bool": (lambda d: entry_named(d, "bin/hello").update(size=True), "size of 'bin/hello' is True"),
    "size not a number": (
        lambda d: entry_named(d, "bin/hello").update(size=float("nan")),
        "size of 'bin/hello' is nan",
    ),
    "size infinite": (lambda d: entry_named(d, "bin/hello").update(size=float("inf")), "size of 'bin/hello' is inf"),
    "huge size": (lambda d: entry_named(d, "bin/hello").update(size=1 << 60), "size of 'bin/hello'"),
    "number of many digits": (lambda d: entry_named(d, "bin/hello").update(size=10**4000), "4001 digits"),
    "mode as a bool": (lambda d: entry_named(d, "bin/hello").update(mode=True), "mode of 'bin/hello' is True"),
    "sticky": (lambda d: entry_named(d, "bin/hello").update(mode=0o1755), "mode of 'bin/hello'"),
    "digest in capitals": (lambda d: entry_named(d, "bin/hello").update(sha256="A" * 64), "sha256 of 'bin/hello'"),
    "digest with a newline": (lambda d: entry_named(d, "bin/hello").update(sha256="a" * 64 + "\n"), "sha256"),
    "room": (lambda d: entry_named(d, "bin/hello").update(prefix=[["text", "", -1]]), "prefix of 'bin/hello'"),
    "huge room": (lambda d: entry_named(d, "bin/hello").update(prefix=[["text", "", 1 << 40]]), "room of"),
    "a mark of one": (lambda d: entry_named(d, "bin/hello").update(prefix=[["text"]]), "prefix of 'bin/hello'"),
    "a mark of four": (lambda d: entry_named(d, "bin/hello").update(prefix=[["text", "", 1, 1]]), "4 items"),
    "chunk offset": (lambda d: d["chunks"][1].update(offset=1.5), r"chunks\[1\]: offset"),
    "chunk without a key": (lambda d: d["chunks"][1].pop("key"), r"chunks\[1\]: lacks 'key'"),
    "chunk's package": (lambda d: d["chunks"][1].update(package="a\0"), r"chunks\[1\].package"),
    "entry without a path": (lambda d: d["files"][2].pop("path"), r"files\[2\]: lacks 'path'"),
    "an entry that is a list": (lambda d: d["files"].__setitem__(3, []), r"files\[3\]"),
    "no prefix files": (lambda d: d.update(prefix_files=[]), "prefix_files"),
    "a version that is a list": (lambda d: d["versions"].update(torch=[]), "torch"),
    "deep": (lambda d: d.update(extra=functools.reduce(lambda x, _: [x], range(20), [])), "nested"),
}


@pytest.mark.parametrize("case", STRINGS)
def test_invalid_manifest_is_refused_and_the_key_is_named(packed, case):
    change, key = STRINGS[case]
    with pytest.raises(BundleError, match=f"the manifest is not valid: .*{key}") as error:
        open_bundle(patched(packed, change))
    assert len(str(error.value)) < 1000
    assert "\x1b" not in str(error.value)


def test_an_archive_is_not_written_outside_of_the_folder(packed, tmp_path, monkeypatch):
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    hostile = patched(packed, lambda data: data.update(name="../../ESCNAME"))
    with pytest.raises(BundleError, match="name is"):
        pack_archive(str(hostile), environ={}, emit=ignore)
    assert not list(tmp_path.glob("ESC*"))


@pytest.mark.parametrize("name", ["a\nb", "a\x1bb", "..", ""])
def test_pack_refuses_a_name_that_no_reader_accepts(prefix, tmp_path, name):
    with pytest.raises(UsageError, match="cannot be packed under its name"):
        pack.pack(prefix, tmp_path / "x.ccb", name=name, emit=ignore)


def test_names_that_people_use_are_names(packed):
    for name in ("llm", ".venv", "my env", "ümlaut", "-x", "a'b", os.fsdecode(b"\xff")):
        assert open_bundle(patched(packed, lambda data, name=name: data.update(name=name))).manifest.name == name


class TestMemory:
    def test_a_sparse_bundle_with_a_manifest_of_200_gb_is_refused_unread(self, packed):
        size = 200 << 30
        out = with_manifest(packed, b"{}", size=size)
        os.truncate(out, out.stat().st_size + size)
        tracemalloc.start()
        with pytest.raises(BundleError, match=f"its manifest has {size} bytes, more than the limit of {LIMIT}"):
            open_bundle(out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()

    def test_pack_writes_only_readable_manifests(self, prefix, tmp_path, monkeypatch):
        monkeypatch.setattr(writer, "LIMIT", 1000)
        with pytest.raises(BundleError, match="the limit is 1000"):
            pack.pack(prefix, tmp_path / "x.ccb", name="x", emit=ignore)
        assert not list(tmp_path.glob("*x.ccb*"))

    def test_parts_of_one_byte_are_refused_before_they_are_counted(self, packed):
        whole = open_bundle(packed)
        out = with_manifest(packed, whole.manifest.to_json(), split=1)
        data = out.read_bytes()
        first = out.with_name("many.ccb.000")
        first.write_bytes(data)
        with pytest.raises(BundleError, match="more than 100000 parts"):
            open_bundle(first)

    def test_missing_parts_are_counted_and_not_all_named(self, tmp_path):
        error = layout.parts_missing(tmp_path / "x.ccb", [f"x.ccb.{number:03}" for number in range(5000)])
        assert "and 4990 more" in str(error)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d: d["prefix_files"].update(size=parse.PREFIX_FILES + 1), "prefix_files has"),
            (lambda d: entry_named(d, "bin/hello").update(size=parse.REWRITTEN + 1), "in memory"),
            (lambda d: entry_named(d, "share/sp ace").update(size=parse.MEMBER + 1), "in memory"),
        ],
    )
    def test_data_in_memory_has_limits(self, packed, change, message):
        with pytest.raises(BundleError, match=message):
            open_bundle(patched(packed, change))

    def test_folders_within_folders_are_not_multiplied(self, monkeypatch):
        monkeypatch.setattr(parse, "FOLDER_PATHS", 10_000)
        entries = tuple(Entry(f"{n}/" + "a/" * 500 + "f", "file", 0o644, 0, chunks=(0,)) for n in range(10))
        manifest = Manifest(
            name="a", tool="", created="", platform="", python="", source_prefix="/p", chunks=(),
            prefix_files=PrefixFiles("", 0, 0, 0), files=entries, relocations=(("/p", ""),),
        )  # fmt: skip
        with pytest.raises(parse.InvalidManifest, match="paths of all folders"):
            parse.check(manifest)


@pytest.mark.parametrize(
    "data", ["[" * 100_000, '{"paths_data": ' * 5000, "{}" + " " * 100, '{"name": 1e999}', "\ud800"]
)
def test_package_metadata_is_read_with_limits(tmp_path, data):
    path = tmp_path / "x.json"
    path.write_bytes(data.encode("utf-8", "surrogatepass"))
    list(environment.read_conda_package(path))
    editable.editable_root(path)


# Any mutation of a valid manifest is the same manifest or refused.
SMALL = Manifest(
    name="env", tool="1", created="2026-01-01T00:00:00Z", platform="linux-64", python="3.11.7",
    source_prefix="/opt/env", glibc="2.28", versions={"torch": "2"}, gpu_architectures=("sm_90",),
    chunks=(
        Chunk("a" * 64, "b" * 64, "tar", "pkg", 1024, 100, 1024),
        Chunk("c" * 64, "d" * 64, "raw", "pkg", 9, 9, 2048),
        Chunk("e" * 64, "f" * 64, "tar", "./", 512 * 2, 50, 4096),
    ),
    prefix_files=PrefixFiles("0" * 64, 1024, 60, 8192),
    files=(
        Entry("bin", "dir", 0o755, 315532800, chunks=(2,)),
        Entry("bin/a", "file", 0o755, 1, 5, "1" * 64, chunks=(0,)),
        Entry("bin/b", "hard", 0o755, 1, target="bin/a", chunks=(2,)),
        Entry("bin/c", "file", 0o644, 2, 9, "2" * 64, chunks=(1,), raw=True),
        Entry("bin/d", "file", 0o755, 1, 3, "3" * 64, marks=(Mark("text", ""),)),
    ),
    relocations=(("/opt/env", ""),),
)  # fmt: skip


@functools.cache
def small():
    return json.loads(SMALL.to_json())


def places(value, at=()):
    """The paths to every value in a document."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*at, key))


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 1 << 70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["../x", "/etc", "a\0b", "", ".", "bin/a", "file", "dir", "link", "hard", "raw", "tar", "./", "a" * 64]
    )
    | st.just([])
    | st.just({})
    | st.lists(st.integers(-1, 3), max_size=3)
)


@given(st.data())
def test_any_mutation_of_a_manifest_is_refused_or_read_consistently(data):
    document = copy.deepcopy(small())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(list(places(document))[1:]))
        holder = functools.reduce(lambda value, key: value[key], at[:-1], document)
        how = data.draw(st.sampled_from(["set", "drop", "twice"]))
        if how == "set":
            holder[at[-1]] = data.draw(VALUES)
        elif how == "drop":
            del holder[at[-1]]
        elif isinstance(holder, list):
            holder.insert(at[-1], copy.deepcopy(holder[at[-1]]))
        if len(list(places(document))) < 2:
            break
    try:
        found = parse.parse(json.dumps(document).encode())
    except BundleError:
        return
    assert parse.parse(found.to_json()) == found
    assert "/" not in found.name
    for entry in found.files:
        assert not PurePosixPath(entry.path).is_absolute()
        assert ".." not in entry.path.split("/")
        assert 0 <= entry.mode <= 0o777


def test_the_manifest_that_is_mutated_is_valid():
    assert parse.parse(json.dumps(small()).encode()) == SMALL


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_refused(data):
    with pytest.raises(BundleError):
        parse.parse(data)


@given(st.data())
def test_any_mutation_of_a_bundle_or_its_parts_is_refused_or_changes_nothing(packed, data):
    """Bytes are replaced, cut, doubled or moved, in a whole bundle or in one of its parts."""
    whole = packed.read_bytes()
    original = open_bundle(packed).manifest
    content = bytearray(whole)
    begin = data.draw(
        st.sampled_from([0, 512, 1024, len(whole) // 2, len(whole) - 2048]) | st.integers(0, len(whole) - 1)
    )
    length = data.draw(st.integers(0, 600))
    piece = data.draw(
        st.sampled_from([b"", bytes(length), b"\xff" * length, whole[:length], whole[begin : begin + length] * 2])
        | st.binary(max_size=64)
    )
    content[begin : begin + length] = piece
    out = packed.with_name("mutated.ccb")
    out.write_bytes(content)
    try:
        bundle = open_bundle(out)
        bundle.verify(ignore)
    except BundleError as error:
        assert str(out.parent) in str(error)  # noqa: PT017 - any other exception fails
    else:
        assert bundle.manifest == original
        assert bytes(content) == whole
