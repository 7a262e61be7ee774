"""A bundle in parts: written without a second copy, read without joining them, and no wrong part gets past."""

import contextlib
import hashlib
import os
import shutil
import subprocess

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from provision.env.bundle import layout
from provision.env.bundle.reader import open_bundle
from provision.env.packing import writer
from provision.env.packing.pack import PackOptions, pack
from provision.errors import BundleError, UsageError
from provision.model import ignore
from provision.tasks.bundles import parse_size

SPLIT = 20_000


def parts_of(folder):
    return sorted(path for path in folder.iterdir() if path.name != "env.ccb.sha256")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "stick").mkdir()
    return tmp_path / "stick"


@pytest.fixture
def manifest(prefix, folder, helpers):
    return pack(
        prefix, folder / "env.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT, split=SPLIT)
    )


def test_parts_are_slices_of_the_bundle_that_is_not_split(manifest, packed, folder):
    parts = parts_of(folder)
    assert [path.name for path in parts] == [f"env.ccb.{number:03}" for number in range(len(parts))]
    assert len(parts) > 3
    assert {path.stat().st_size for path in parts[:-1]} == {SPLIT}
    joined = b"".join(path.read_bytes() for path in parts)
    assert len(joined) == packed.stat().st_size
    whole = open_bundle(packed).manifest
    assert whole.chunks == manifest.chunks
    assert whole.digest == manifest.digest


@pytest.mark.parametrize(("parts", "last"), [(1000, "env.ccb.999"), (1001, "env.ccb.1000")])
def test_part_numbers_have_more_digits_from_a_thousand_on(folder, parts, last):
    output = writer.Output(folder / "env.ccb", split=1)
    output.write(bytes(parts))
    output.close()
    assert output.names[-1] == last
    assert len({len(name) for name in output.names}) == 1


def test_a_large_bundle_is_flushed_to_the_disk_every_64_mib(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(writer, "flush_file", flushed.append)
    for sizes, times in (((1, (64 << 20) - 1), 0), ((64 << 20, (128 << 20) - 1), 1), ((64 << 20, 128 << 20), 2)):
        flusher = writer.Flusher()
        for size in sizes:
            flusher.report(tmp_path, size)
        flusher.close()
        assert flushed == [tmp_path] * times
        flushed.clear()


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed here")
def test_they_are_checked_and_joined_by_hand(manifest, folder):
    subprocess.run(["sha256sum", "-c", "--strict", "env.ccb.sha256"], cwd=folder, check=True, capture_output=True)
    subprocess.run("cat env.ccb.[0-9]* > env.ccb", shell=True, check=True, cwd=folder)
    for path in parts_of(folder):
        if path.name != "env.ccb":
            path.unlink()
    (folder / "env.ccb.sha256").unlink()
    bundle = open_bundle(folder / "env.ccb")
    bundle.verify(ignore)
    assert bundle.manifest == manifest


@pytest.mark.parametrize("name", ["env.ccb", "env.ccb.000", "env.ccb.002", "env.ccb.sha256"])
def test_any_of_the_names_opens_the_bundle(manifest, folder, name):
    bundle = open_bundle(folder / name)
    assert bundle.manifest == manifest
    assert bundle.path == folder / "env.ccb"
    assert bundle.storage.size == sum(path.stat().st_size for path in parts_of(folder))
    bundle.verify(ignore)
    for index, chunk in enumerate(manifest.chunks):
        compressed = b"".join(bundle.chunk_compressed(index))
        assert hashlib.sha256(compressed).hexdigest() == chunk.digest
        assert b"".join(bundle.chunk_blocks(index)) == zstandard.ZstdDecompressor().decompress(compressed)


def test_the_list_is_not_needed(manifest, folder):
    (folder / "env.ccb.sha256").unlink()
    open_bundle(folder / "env.ccb").verify(ignore)


def test_parts_may_be_in_several_folders_in_any_order(manifest, folder, tmp_path):
    together = tmp_path / "together"
    together.mkdir()
    for path in reversed(list(folder.iterdir())):
        shutil.copy(path, together)
    open_bundle(together / "env.ccb").verify(ignore)


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("listed", [True, False])
def test_a_missing_part_is_named(manifest, folder, number, listed):
    missing = parts_of(folder)[number]
    missing.unlink()
    if not listed:
        (folder / "env.ccb.sha256").unlink()
    with pytest.raises(BundleError, match=f"missing {missing.name}$") as error:
        open_bundle(folder / "env.ccb")
    assert str(folder) in error.value.hint


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_part_that_is_too_short_or_too_long_is_named(manifest, folder, number):
    part = parts_of(folder)[number]
    data = part.read_bytes()
    part.write_bytes(data[:-1])
    with pytest.raises(BundleError, match=f"{part.name} is (truncated|damaged)"):
        open_bundle(folder / "env.ccb")
    part.write_bytes(data + b"x")
    with pytest.raises(BundleError, match=f"{part.name} (is too long|is damaged)"):
        open_bundle(folder / "env.ccb")


def test_a_changed_part_is_named_wherever_the_change_is(manifest, folder):
    for part in parts_of(folder):
        data = part.read_bytes()
        for place in (0, 600, len(data) // 2, len(data) - 1):
            if place >= len(data):
                continue
            part.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(BundleError, match=part.name):
                open_bundle(folder / "env.ccb").verify(ignore)
        part.write_bytes(data)
    open_bundle(folder / "env.ccb").verify(ignore)


def test_without_the_list_the_possibly_damaged_parts_are_named(manifest, folder):
    (folder / "env.ccb.sha256").unlink()
    part = parts_of(folder)[2]
    part.write_bytes(bytes(SPLIT))
    with pytest.raises(BundleError, match=rf"in .*{part.name}.* is damaged"):
        open_bundle(folder / "env.ccb").verify(ignore)


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_part_of_another_bundle_is_named(manifest, folder, prefix, tmp_path, helpers, number):
    helpers.write(prefix / helpers.SITE / "big" / "big.bin", os.urandom(2 * helpers.LIMIT) + b"end")
    (tmp_path / "other").mkdir()
    pack(
        prefix,
        tmp_path / "other" / "env.ccb",
        name="env",
        emit=ignore,
        options=PackOptions(limit=helpers.LIMIT, split=SPLIT),
    )
    foreign, mine = parts_of(tmp_path / "other")[number], parts_of(folder)[number]
    mine.write_bytes(foreign.read_bytes())
    with pytest.raises(BundleError, match=mine.name):
        open_bundle(folder / "env.ccb").verify(ignore)


def test_a_part_of_a_bundle_that_is_not_split(packed, tmp_path):
    packed.rename(tmp_path / "x.ccb.000")
    with pytest.raises(BundleError, match=r"x\.ccb\.000 is not a part"):
        open_bundle(tmp_path / "x.ccb")


def test_no_part_at_all(tmp_path):
    for name in ("env.ccb", "env.ccb.000", "env.ccb.sha256"):
        with pytest.raises(UsageError, match="is not a file"):
            open_bundle(tmp_path / name)
        with pytest.raises(UsageError, match="is not a file"):
            open_bundle(tmp_path / "no folder" / name)


def test_a_shorter_bundle_leaves_no_part_of_a_longer_one(manifest, folder, prefix, helpers):
    before = len(parts_of(folder))
    shutil.rmtree(prefix / helpers.SITE / "big")
    shutil.rmtree(prefix / "share" / "hard")
    pack(prefix, folder / "env.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT, split=SPLIT))
    assert len(parts_of(folder)) < before
    assert len((folder / "env.ccb.sha256").read_text().splitlines()) == len(parts_of(folder))
    open_bundle(folder / "env.ccb").verify(ignore)


def test_whole_and_split_bundles_replace_each_other(manifest, folder, prefix, helpers):
    pack(prefix, folder / "env.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    assert [path.name for path in folder.iterdir()] == ["env.ccb"]
    helpers.write(folder / "env.ccb.sha256", "somebody's own")
    pack(prefix, folder / "env.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    assert len(list(folder.iterdir())) == 2
    pack(prefix, folder / "env.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT, split=SPLIT))
    assert "env.ccb" not in {path.name for path in folder.iterdir()}
    open_bundle(folder / "env.ccb.sha256").verify(ignore)


def test_other_files_of_the_folder_stay(manifest, folder, prefix, helpers):
    others = ["env.ccb.txt", "env.ccb.12", "env2.ccb.000", "env.ccb.000.old", "env.ccb.0000x"]
    for name in others:
        helpers.write(folder / name, "x")
    pack(prefix, folder / "env.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    assert {path.name for path in folder.iterdir()} == {"env.ccb", *others}


@pytest.mark.parametrize("name", ["quo'te.ccb", "back\\slash.ccb", "new\nline.ccb", "\udcff.ccb"])
def test_names_that_sha256sum_escapes(prefix, folder, helpers, name):
    manifest = pack(
        prefix, folder / name, name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT, split=SPLIT)
    )
    subprocess.run(["sha256sum", "-c", "--strict", f"{name}.sha256"], cwd=folder, check=True, capture_output=True)
    part = folder / f"{name}.001"
    part.write_bytes(bytes(SPLIT))
    with pytest.raises(BundleError, match=r"\.001 is damaged or belongs to another bundle"):
        open_bundle(folder / name).verify(ignore)
    assert manifest.chunks


def test_an_interrupted_pack_leaves_the_older_bundle(manifest, folder, prefix, helpers, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layout, "list_line", fail)
    with pytest.raises(UsageError, match="no space left"):
        pack(prefix, folder / "env.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT, split=SPLIT))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@given(data=st.binary(max_size=3000), split=st.integers(1, 700), cut=st.integers(0, 3000), patch=st.integers(0, 3000))
def test_parts_contain_the_written_bytes_for_every_part_size(tmp_path_factory, data, split, cut, patch):
    folder = tmp_path_factory.mktemp("parts")
    with writer.create_output(folder / "x", split=split) as out:
        out.write(data[:cut])
        out.write(data[cut:])
        out.patch(min(patch, len(data)), data[patch : patch + 100])
        out.write(b"end")
    whole = layout.find_files(folder / "x")
    assert whole.size == len(data) + 3
    assert whole.take(0, whole.size) == data + b"end"
    begin = min(patch, len(data)) // 2
    assert whole.take(begin, len(data) // 3) == data[begin : begin + len(data) // 3]
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4G", 4_000_000_000),
        ("3900M", 3_900_000_000),
        ("700MB", 700_000_000),
        ("700 mb", 700_000_000),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("1.5K", 1500),
        ("5", 5),
        ("5B", 5),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "4X", "4 GG", "1,5G", "4Gi B", "inf", "0x10", "4iB"])
def test_invalid_sizes(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.fixture(scope="module")
def two_bundles(tmp_path_factory, helpers):
    """The parts of two bundles of one name, whose packages differ in one file."""
    found = []
    prefix = helpers.make_env(tmp_path_factory.mktemp("split") / "opt/env", tmp_path_factory.mktemp("proj") / "proj")
    for number in range(2):
        folder = tmp_path_factory.mktemp(f"parts{number}")
        helpers.write(prefix / helpers.SITE / "big" / "big.bin", bytes([number]) * 5 + os.urandom(2 * helpers.LIMIT))
        pack(prefix, folder / "env.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT, split=SPLIT))
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
    return found


NAMES = ("env.ccb", "env.ccb.000", "env.ccb.0000", "env.ccb.007", "env.ccb.099", "env.ccb.٣٣٣", "env.ccb." + "9" * 240)
SPOILS = ("swap", "cut", "emptied", "longer", "flip")


def changed(how, content, other, at):
    """Replacements of a part; ``at`` is a position in its content."""
    flipped = content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
    return dict(zip(SPOILS, (other, content[:at], b"", content + other[: 1 + at], flipped), strict=True))[how]


@st.composite
def spoiled(draw, bundles):
    """The parts of the first bundle with up to three faults."""
    files, foreign = dict(bundles[0]), bundles[1]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(files) or ["env.ccb"]))
        how = draw(st.sampled_from(["drop", "rename", "extra", "exchange", *SPOILS]))
        content = files.pop(name, b"")
        other = draw(st.sampled_from(sorted([*files.values(), *foreign.values()])))
        if how in {"rename", "extra"}:
            files[draw(st.sampled_from(NAMES))] = content if how == "rename" else other
        if how == "exchange":
            files[name] = foreign.get(name, b"")
        elif how in SPOILS and content:
            files[name] = changed(how, content, other, draw(st.integers(0, len(content) - 1)))
        elif how == "extra":
            files.setdefault(name, content)
    return files


@given(data=st.data())
def test_any_mutation_of_parts_is_refused_or_read_as_a_bundle(two_bundles, tmp_path_factory, data):
    """Missing, exchanged, of another bundle, cut, longer, renamed, more of them: never a traceback or wrong bytes."""
    folder = tmp_path_factory.mktemp("spoiled")
    for name, content in data.draw(spoiled(two_bundles)).items():
        (folder / name).write_bytes(content)
    opened = data.draw(st.sampled_from(["env.ccb", "env.ccb.000", "env.ccb.001", "env.ccb.sha256"]))
    with contextlib.suppress(BundleError, UsageError):
        bundle = open_bundle(folder / opened)
        bundle.verify(ignore)
        read = b"".join(path.read_bytes() for path in bundle.storage.files)
        assert read in [
            b"".join(each[name] for name in sorted(each) if name != "env.ccb.sha256") for each in two_bundles
        ]
    shutil.rmtree(folder)
