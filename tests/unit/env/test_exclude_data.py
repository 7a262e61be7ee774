"""Files excluded from an environment, and data packed with it."""

import os
import socket

import pytest

from provision.env.bundle.reader import open_bundle
from provision.env.packing.pack import PackOptions, pack
from provision.env.source import files
from provision.env.source.survey import Survey, exclude_sources, find_data
from provision.errors import UsageError
from provision.model import Notice, ignore


def found(*paths):
    """Files, and the folders (ending in a slash) among them, sorted by path."""
    return sorted(
        files.Source(path.rstrip("/"), "", "dir" if path.endswith("/") else "file", 0o644, 0, 1_000_000)
        for path in paths
    )


TREE = found(
    "bin/", "bin/python", "lib/", "lib/a.a", "lib/b.so", "lib/keep.a", "lib/python3.11/", "lib/python3.11/tests/",
    "lib/python3.11/tests/t.py", "share/", "share/doc/", "share/doc/x", "share/doc/y/", "share/doc/y/z",
    "share/doc.txt", "tests",
)  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "gone"),
    [
        (["share/doc"], {"share/doc", "share/doc/x", "share/doc/y", "share/doc/y/z"}),
        (["/share/doc/"], {"share/doc", "share/doc/x", "share/doc/y", "share/doc/y/z"}),
        (["share/doc/*"], {"share/doc/x", "share/doc/y", "share/doc/y/z"}),
        (["*.a"], {"lib/a.a", "lib/keep.a"}),
        (["*.a", "!keep.a"], {"lib/a.a"}),
        (["!keep.a", "*.a"], {"lib/a.a", "lib/keep.a"}),
        (["tests/"], {"lib/python3.11/tests", "lib/python3.11/tests/t.py"}),
        (["tests"], {"lib/python3.11/tests", "lib/python3.11/tests/t.py", "tests"}),
        (["/tests"], {"tests"}),
        (["lib/python3*/tests"], {"lib/python3.11/tests", "lib/python3.11/tests/t.py"}),
        (["**/y"], {"share/doc/y", "share/doc/y/z"}),
        (["doc", "!share/doc/x"], {"share/doc", "share/doc/x", "share/doc/y", "share/doc/y/z"}),  # as git has it
        ([], set()),
    ],
)
def test_patterns_mean_what_they_mean_in_a_gitignore_file(patterns, gone):
    left = exclude_sources(TREE, patterns)
    assert {one.path for one in TREE} - {one.path for one in left.kept} == gone


def test_each_pattern_reports_how_much_it_excludes():
    notices = exclude_sources(TREE, ["share/doc", "*.a", "!lib/keep.a", "*.nothing", "#comment"])
    assert notices.notices == (
        "--exclude 'share/doc' excludes 2 files of 2.0 MB",
        "--exclude '*.a' excludes 1 file of 1.0 MB",
        "--exclude '*.nothing' matches nothing",
        "--exclude '#comment' matches nothing",
    )


@pytest.mark.parametrize("pattern", ["*", "bin", "/bin/python", "python"])
def test_an_environment_keeps_its_python(pattern):
    with pytest.raises(UsageError, match="would exclude bin"):
        exclude_sources(TREE, [pattern])


def test_invalid_pattern():
    with pytest.raises(UsageError, match=r"--exclude: .*'!'"):
        exclude_sources(TREE, ["!"])


def packed_with(prefix, tmp_path, helpers, **options):
    events = []
    packing = PackOptions(limit=helpers.LIMIT, **options)
    pack(prefix, tmp_path / "b.ccb", name="b", emit=events.append, options=packing)
    bundle = open_bundle(tmp_path / "b.ccb")
    bundle.verify(ignore)
    return bundle, [event.text for event in events if isinstance(event, Notice)]


def test_excluded_files_are_not_packed_and_each_pattern_is_recorded(prefix, tmp_path, helpers):
    bundle, notices = packed_with(prefix, tmp_path, helpers, exclude=["other/", "*.bin", "proj", "nothing"])
    paths = {entry.path for entry in bundle.manifest.files}
    assert not [path for path in paths if "/other/" in path or path.endswith(".bin")]
    assert "src/proj" not in paths
    assert f"{helpers.SITE}/hello/plain.py" in paths
    reported = [text for text in bundle.manifest.notices if "--exclude" in text]
    assert reported == [text for text in notices if "--exclude" in text]
    assert reported[0].startswith("--exclude 'other/' excludes 40 files")
    assert reported[-1] == "--exclude 'nothing' matches nothing"


def test_names_may_change_in_an_excluded_folder(prefix, tmp_path, helpers, monkeypatch):
    real = files.walk_environment

    def environment(path, **options):
        tree = real(path, **options)
        helpers.write(prefix / "share" / "hard" / "new", "x")
        return tree

    monkeypatch.setattr(files, "walk_environment", environment)
    bundle, _ = packed_with(prefix, tmp_path, helpers, exclude=["share/hard"])
    assert "share/hard" not in {entry.path for entry in bundle.manifest.files}


@pytest.fixture
def dataset(tmp_path, prefix, helpers):
    top = tmp_path / "sets" / "corpus"
    helpers.write(
        top / "large.bin", os.urandom(helpers.LIMIT) + str(prefix).encode() + os.urandom(helpers.LIMIT), 0o600
    )
    helpers.write(top / "info.json", f'{{"path": "{prefix}/share"}}')
    helpers.write(top / "code" / "run.py", f"#!{prefix}/bin/python\nprint(1)\n", 0o755)
    (top / "latest").symlink_to("info.json")
    (top / "absolute").symlink_to(prefix / "share")
    (top / "empty").mkdir()
    return top


def test_data_arrive_byte_for_byte(prefix, dataset, tmp_path, helpers):
    single = helpers.write(tmp_path / "model.txt", f"{prefix}\n")
    bundle, _ = packed_with(prefix, tmp_path, helpers, data=[dataset, single])
    found = {entry.path: entry for entry in bundle.manifest.files}
    assert not [entry.path for entry in bundle.manifest.marked if entry.path.startswith("data/")]
    assert found["data/corpus/large.bin"].raw
    assert found["data/corpus/latest"].target == "info.json"
    assert found["data/corpus/absolute"].target == str(prefix / "share")
    assert [found[path].type for path in ("data", "data/corpus", "data/corpus/empty")] == ["dir"] * 3
    assert found["data/model.txt"].type == "file"
    packages = {bundle.manifest.chunks[i].package for path in found for i in found[path].chunks if path[:5] == "data/"}
    assert packages == {"data/corpus/", "data/model.txt/", "./"}
    content = b"".join(b"".join(bundle.chunk_blocks(index)) for index in found["data/corpus/large.bin"].chunks)
    assert content == (dataset / "large.bin").read_bytes()


def test_data_have_separate_chunks(prefix, dataset, packed, tmp_path, helpers):
    bundle, _ = packed_with(prefix, tmp_path, helpers, data=[dataset])
    with_data = {(chunk.digest, chunk.package) for chunk in bundle.manifest.chunks}
    without = {(chunk.digest, chunk.package) for chunk in open_bundle(packed).manifest.chunks}
    assert {package for _, package in without - with_data} == {"./"}
    assert {package for _, package in with_data - without} == {"./", "data/corpus/"}


def test_folder_of_the_environment_with_the_same_name_stays(prefix, dataset, tmp_path, helpers):
    helpers.write(prefix / "data" / "own" / "file", f"{prefix}\n")
    (prefix / "data").chmod(0o700)
    bundle, _ = packed_with(prefix, tmp_path, helpers, data=[dataset])
    found = {entry.path: entry for entry in bundle.manifest.files}
    assert found["data"].mode == 0o700
    assert found["data/own/file"].marks
    assert "data/corpus/info.json" in found


def test_given_link_is_followed_and_keeps_its_name(dataset, tmp_path, prefix, helpers):
    (tmp_path / "latest").symlink_to(dataset)
    bundle, _ = packed_with(prefix, tmp_path, helpers, data=[tmp_path / "latest"])
    assert "data/latest/info.json" in {entry.path for entry in bundle.manifest.files}


def test_a_data_folder_may_be_named_by_a_dot(dataset, monkeypatch):
    monkeypatch.chdir(dataset)
    assert find_data([files.Path()], []).names == ("corpus",)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["sets/corpus", "other/corpus"], "would both be data/corpus"),
        (["sets/taken"], "already has data/taken"),
        (["nowhere"], "no such file or folder"),
        (["/"], "with a name"),
        (["socket"], "neither a file nor a folder"),
    ],
)
def test_data_that_cannot_be_packed(dataset, tmp_path, helpers, monkeypatch, paths, message):
    monkeypatch.chdir(tmp_path)
    for name in ("other/corpus/x", "sets/taken/x"):
        helpers.write(tmp_path / name, "x")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(UsageError, match=message):
            find_data([files.Path(path) for path in paths], ["data/taken"])


def test_a_compiled_file_may_be_data(prefix, tmp_path, helpers):
    alone = helpers.write(tmp_path / "alone.pyc", "x")
    both = helpers.write(tmp_path / "both" / "__pycache__" / "a.cpython-311.pyc", "x").parents[1]
    helpers.write(both / "a.py", "x")
    manifest = pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore, options=PackOptions(data=[alone, both]))
    packages = {entry.path: manifest.chunks[entry.chunks[0]].package for entry in manifest.files if entry.chunks}
    assert packages["data/alone.pyc"] == "data/alone.pyc/"
    assert packages["data/both/__pycache__/a.cpython-311.pyc"] == packages["data/both/a.py"] == "data/both/"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_data_are_refused_if_their_place_is_not_a_folder(prefix, dataset, tmp_path, helpers, kind):
    if kind == "link":
        (prefix / "data").symlink_to("/mnt")
    else:
        helpers.write(prefix / "data", "x")
    with pytest.raises(UsageError, match=r"opt/env/data is not a folder, but data must go there") as error:
        pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore, options=PackOptions(data=[dataset]))
    assert "mv " in error.value.hint
    assert not (tmp_path / "b.ccb").exists()
    pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore, options=PackOptions(data=[dataset], exclude=["/data"]))
    open_bundle(tmp_path / "b.ccb").verify(ignore)


def test_a_bundle_among_its_own_data_is_refused(prefix, dataset, helpers):
    with pytest.raises(UsageError, match=r"would be inside the data .*corpus"):
        pack(prefix, dataset / "b.ccb", name="b", emit=ignore, options=PackOptions(data=[dataset]))
    assert not (dataset / "b.ccb").exists()


def test_patterns_do_not_apply_to_data(prefix, dataset, tmp_path, helpers):
    bundle, _ = packed_with(prefix, tmp_path, helpers, data=[dataset], exclude=["*.json"])
    paths = {entry.path for entry in bundle.manifest.files}
    assert "data/corpus/info.json" in paths
    assert not [path for path in paths if path.endswith(".json") and not path.startswith("data/")]


def test_file_in_the_data_and_in_the_environment_is_packed_twice(prefix, tmp_path, helpers):
    (tmp_path / "shared").mkdir()
    os.link(prefix / "bin" / "hello", tmp_path / "shared" / "hello")
    os.link(prefix / "bin" / "hello", tmp_path / "shared" / "again")
    bundle, _ = packed_with(prefix, tmp_path, helpers, data=[tmp_path / "shared"])
    found = {entry.path: entry for entry in bundle.manifest.files}
    assert found["bin/hello"].type == "file"
    assert found["data/shared/again"].type == "file"
    assert found["data/shared/hello"].target == "data/shared/again"
    assert not found["data/shared/again"].marks


def test_changed_data_are_detected(prefix, dataset, tmp_path, helpers, monkeypatch):
    from provision.errors import BundleError

    real = Survey.check_folders

    def check(self):
        helpers.write(dataset / "empty" / "new", "x")
        real(self)

    monkeypatch.setattr(Survey, "check_folders", check)
    with pytest.raises(BundleError, match=r"corpus/empty changed while it was read"):
        packed_with(prefix, tmp_path, helpers, data=[dataset])
