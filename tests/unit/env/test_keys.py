"""A chunk's key is equal for an environment built again from the same packages; its digest only for equal bytes."""

import os
import py_compile
import struct
import sys
from pathlib import Path

import pytest

from provision.env.bundle.manifest import content_digest, has_source_time
from provision.env.bundle.reader import open_bundle
from provision.env.packing.pack import PackOptions, pack
from provision.env.source.environment import source_of
from provision.errors import BundleError
from provision.model import ignore


def packed_again(prefix, tmp_path, helpers):
    return pack(prefix, tmp_path / "again.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT))


def compile_all(folder, mode=py_compile.PycInvalidationMode.TIMESTAMP):
    for path in folder.rglob("*.py"):
        py_compile.compile(str(path), doraise=True, invalidation_mode=mode)


def reinstall(prefix, at):
    """What a fresh install of the same packages changes: every time, and those of sources in compiled files."""
    for folder, _, files in os.walk(prefix):
        for name in files:
            os.utime(Path(folder) / name, (at, at), follow_symlinks=False)
    compile_all(prefix)


def test_the_same_environment_has_the_same_digests_and_keys(packed, prefix, tmp_path, helpers):
    first, again = open_bundle(packed).manifest, packed_again(prefix, tmp_path, helpers)
    assert [(c.digest, c.key) for c in first.chunks] == [(c.digest, c.key) for c in again.chunks]
    assert first.digest == again.digest


def test_a_reinstalled_environment_has_new_digests_and_the_same_keys(prefix, tmp_path, helpers):
    reinstall(prefix, 1_700_000_000)
    first = packed_again(prefix, tmp_path, helpers)
    pycs = [entry for entry in first.files if entry.path.endswith(".pyc") and "/other/" in entry.path]
    assert len(pycs) == 40
    reinstall(prefix, 1_750_000_000)
    again = packed_again(prefix, tmp_path, helpers)
    assert [chunk.key for chunk in first.chunks] == [chunk.key for chunk in again.chunks]
    changed = [one.package for one, two in zip(first.chunks, again.chunks, strict=True) if one.digest != two.digest]
    assert "other" in changed
    old = {entry.path: entry.sha256 for entry in first.files}
    assert {entry.path for entry in pycs} <= {entry.path for entry in again.files if entry.sha256 != old[entry.path]}


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text(path.read_text().replace("7", "8")),
        lambda path: path.chmod(0o755),
        lambda path: path.rename(path.with_name("8a.py")),
        lambda path: path.unlink(),
    ],
    ids=["content", "mode", "name", "gone"],
)
def test_any_other_change_is_a_new_key_of_that_chunk_alone(packed, prefix, tmp_path, helpers, change):
    path = prefix / helpers.SITE / "other" / "7.py"
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    change(path)
    for one in path.parent.iterdir():
        os.utime(one, ns=times)
    first, again = open_bundle(packed).manifest, packed_again(prefix, tmp_path, helpers)
    new = {chunk.key for chunk in again.chunks} - {chunk.key for chunk in first.chunks}
    packages = {chunk.package for chunk in again.chunks if chunk.key in new}
    assert packages - {f"{helpers.SITE}/other/"} == {"other"}  # a new name is in no RECORD, and goes by folder


def test_reused_chunks_keep_a_source_and_its_compiled_file_together(prefix, tmp_path, helpers):
    """Else the time in the compiled file is not the source's, and a read-only release compiles at every start."""
    files = {f"{helpers.SITE}/wide/{n:02}.py": f"N{n} = {os.urandom(3000).hex()!r}\n" for n in range(40)}
    helpers.add_package(prefix, "wide", files)
    helpers.write(prefix / helpers.SITE / "single.py", "X = 1\n")  # which no package owns
    reinstall(prefix, 1_700_000_000)
    old = {chunk.key for chunk in packed_again(prefix, tmp_path, helpers).chunks}
    (prefix / helpers.SITE / "wide" / "39.py").write_text("N39 = 1\n")
    reinstall(prefix, 1_750_000_000)
    manifest = packed_again(prefix, tmp_path, helpers)
    wide = [chunk for chunk in manifest.chunks if chunk.package == "wide"]
    assert {chunk.key in old for chunk in wide} == {True, False}
    place = {entry.path: entry.chunks for entry in manifest.files if not entry.marks}
    place |= {entry.path: place.get(entry.target, ()) for entry in manifest.files if entry.type == "hard"}
    compiled = [path for path in place if path.endswith(".pyc") and source_of(path) in place]
    assert f"{helpers.SITE}/__pycache__/single.{sys.implementation.cache_tag}.pyc" in compiled
    assert [path for path in compiled if place[path] != place[source_of(path)]] == []


def test_keys_of_ranges_cover_mode_offset_and_content(packed, prefix, tmp_path, helpers):
    def key_of_ranges(manifest):
        entry = next(entry for entry in manifest.files if entry.path.endswith("big.bin"))
        return [manifest.chunks[index].key for index in entry.chunks]

    first = key_of_ranges(open_bundle(packed).manifest)
    assert len(set(first)) == 3
    path = prefix / helpers.SITE / "big" / "big.bin"
    os.utime(path, (1, 1))
    assert key_of_ranges(packed_again(prefix, tmp_path, helpers)) == first
    path.chmod(0o600)
    assert not set(key_of_ranges(packed_again(prefix, tmp_path, helpers))) & set(first)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(helpers.LIMIT)
        file.write(b"x")
    changed = key_of_ranges(packed_again(prefix, tmp_path, helpers))
    assert not set(changed) & set(first), "a file that changed is sent whole"


def test_hash_based_pyc_has_no_time(tmp_path):
    source = tmp_path / "a.py"
    source.write_text("X = 1\n")
    for mode, is_timed in (("TIMESTAMP", True), ("CHECKED_HASH", False), ("UNCHECKED_HASH", False)):
        compiled = py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode[mode])
        data = Path(compiled).read_bytes()
        assert has_source_time("a.pyc", data) == is_timed
        changed = data[:8] + struct.pack("<L", 5) + data[12:]
        assert (content_digest("a.pyc", data) == content_digest("a.pyc", changed)) == is_timed
        assert content_digest("a.bin", data) != content_digest("a.bin", changed)
    assert sys.implementation.cache_tag in compiled


@pytest.mark.parametrize("data", [b"", b"1234", b"1234\0\0\0\0mtimsiz"])
def test_truncated_pyc_is_hashed_as_a_plain_file(data):
    assert content_digest("a.pyc", data) != content_digest("a.pyc", data + b"\0")
    assert not has_source_time("a.pyc", data)


def test_a_wrong_key_is_found_by_verify(packed, helpers):
    from dataclasses import replace

    bundle = open_bundle(packed)
    for number, chunk in enumerate(bundle.manifest.chunks):
        chunks = list(bundle.manifest.chunks)
        chunks[number] = replace(chunk, key="0" * 64)
        lying = replace(bundle, manifest=replace(bundle.manifest, chunks=tuple(chunks)))
        with pytest.raises(BundleError, match="has the wrong key"):
            lying.verify(ignore)
