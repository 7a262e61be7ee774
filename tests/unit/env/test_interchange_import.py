"""Bundles from archives of conda-pack equal bundles packed from the environment itself."""

import io
import json
import os
import shutil
import subprocess
import tarfile
import warnings
import zipfile

import conda_pack
import pytest

from provision.env.bundle.reader import open_bundle
from provision.env.interchange import importer
from provision.env.interchange.export import export
from provision.env.interchange.importer import import_archive, name_of, origin
from provision.env.packing.pack import pack
from provision.errors import BundleError, UsageError
from provision.model import Notice, StageStarted, ignore
from provision.summaries.bundles import archive_output
from provision.tasks.bundles import bundle_of, pack_archive


def conda_packed(prefix, archive, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that its cache does not hold
        conda_pack.pack(prefix=str(prefix), output=str(archive), **options)
    return archive


@pytest.fixture(scope="module")
def real(small_env, tmp_path_factory):
    """The small real environment: env.tar.gz from conda-pack, env.ccb from clusterctl, back.ccb from env.tar.gz."""
    folder = tmp_path_factory.mktemp("real")
    conda_packed(small_env, folder / "env.tar.gz")
    pack(small_env, folder / "env.ccb", name="env", emit=ignore)
    import_archive(folder / "env.tar.gz", folder / "back.ccb", emit=ignore)
    return folder


def entries(path):
    return {entry.path: entry for entry in open_bundle(path).manifest.files}


def contents(entry):
    return entry.type, entry.mode, entry.size, entry.sha256, entry.target, entry.marks


def test_import_restores_an_environment_packed_by_conda_pack(real, small_env):
    manifest = open_bundle(real / "back.ccb").manifest
    assert manifest.source_prefix == str(small_env)
    assert manifest.relocations == ((str(small_env), ""),)
    assert manifest.name == "env"
    assert manifest.notices == (origin(real / "env.tar.gz"),)
    ours, theirs = entries(real / "env.ccb"), entries(real / "back.ccb")
    # conda-pack omits compiled files of packages, and blanks paths of the package cache in conda-meta.
    missing = {path for path in ours.keys() - theirs.keys() if "__pycache__" not in path}
    assert missing == set()
    assert theirs.keys() - ours.keys() == set()
    differing = {path for path in theirs if contents(theirs[path]) != contents(ours[path])}
    assert differing
    assert {path for path in differing if not path.startswith("conda-meta/")} == set()
    assert {path.name for path in real.iterdir()} == {"env.tar.gz", "env.ccb", "back.ccb"}


def test_the_environment_runs_where_it_is_placed(real, tmp_path, helpers):
    place = tmp_path / "somewhere"
    helpers.place(real / "back.ccb", place)
    for argv in (["bin/pip", "--version"], ["bin/python", "-m", "pip", "check"], ["bin/hatchling", "--help"]):
        subprocess.run([place / argv[0], *argv[1:]], env={}, check=True, capture_output=True)
    config = subprocess.check_output([place / "bin/python3.11-config", "--prefix"], text=True, env={"PATH": "/bin"})
    assert config.strip() == str(place)  # conda-pack itself leaves a placeholder in this one
    printed = subprocess.check_output([place / "bin/python", "-c", "import sys; print(sys.prefix)"], text=True, env={})
    assert printed.strip() == str(place)


def test_compression_and_the_folder_in_an_archive_make_no_difference(tiny, tmp_path):
    pack_archive(str(tiny), environ={}, output=tmp_path / "env.tar", emit=ignore)
    (tmp_path / "deep/er").mkdir(parents=True)
    subprocess.run(["tar", "-xpf", tmp_path / "env.tar", "-C", tmp_path / "deep/er"], check=True)
    subprocess.run(["tar", "-cJf", tmp_path / "rooted.tar.xz", "-C", tmp_path, "./deep"], check=True)
    subprocess.run(["zstd", "-q", tmp_path / "env.tar"], check=True)
    subprocess.run(["gzip", "-k", tmp_path / "env.tar"], check=True)
    names = ("env.tar", "env.tar.gz", "env.tar.zst", "rooted.tar.xz")
    made = {name: import_archive(tmp_path / name, tmp_path / f"{name}.ccb", emit=ignore).digest for name in names}
    assert len(set(made.values())) == 1, made


def test_archive_with_a_fixed_prefix_keeps_it(small_env, tmp_path):
    archive = conda_packed(small_env, tmp_path / "there.tar", dest_prefix="/srv/there")
    manifest = import_archive(archive, tmp_path / "there.ccb", emit=ignore)
    assert manifest.source_prefix == "/srv/there"
    marks = {entry.path: {mark.kind for mark in entry.marks} for entry in manifest.marked}
    assert marks["bin/pip"] == {"shebang"}
    assert "text" in marks["lib/pkgconfig/python-3.11.pc"]


def test_exported_archive_is_imported_unchanged(real, tmp_path):
    export(open_bundle(real / "env.ccb"), tmp_path / "env.tar.zst", emit=ignore)
    import_archive(tmp_path / "env.tar.zst", tmp_path / "back.ccb", emit=ignore)
    ours, back = entries(real / "env.ccb"), entries(tmp_path / "back.ccb")
    gone = ours.keys() - back.keys()
    assert all(path.endswith(".pyc") for path in gone)
    assert len(gone) < 5
    assert back.keys() - ours.keys() == set()
    differing = {
        path for path in back if (contents(back[path]), back[path].mtime) != (contents(ours[path]), ours[path].mtime)
    }
    assert {path for path in differing if not path.startswith("conda-meta/")} == set()


def test_environment_with_odd_files_is_imported_unchanged(packed, tmp_path):
    bundle = open_bundle(packed)
    export(bundle, tmp_path / "env.tar.gz", emit=ignore)
    manifest = import_archive(tmp_path / "env.tar.gz", tmp_path / "back.ccb", emit=ignore)
    ours = {entry.path: entry for entry in bundle.manifest.files}
    back = {entry.path: entry for entry in manifest.files}
    assert {path for path in ours.keys() ^ back.keys() if not path.endswith(".pyc")} == set()
    same = ("type", "mode", "size", "sha256")
    differing = {
        path
        for path in back.keys() & ours.keys()
        if any(getattr(back[path], n) != getattr(ours[path], n) for n in same)
    }
    # What pointed at the checkout points into the environment now; links are relative; interpreters have their path.
    editable = {path for path in differing if "proj" in path}
    assert differing - editable <= {
        "bin/hello-env",
        "bin/hello-too",  # another name of a script is a separate file in an archive
        "conda-meta/python-3.11.7-0.json",
        "lib/python3.11/site-packages/hello-1.0.dist-info/RECORD",
    }
    assert back["share/absolute"].target == "../lib/settings.txt"
    open_bundle(tmp_path / "back.ccb").verify(ignore)


def test_archive_cannot_read_files_of_this_machine(packed, checkout, tmp_path, prefix, helpers):
    # The same path may lead to other files here.
    helpers.write(prefix / helpers.SITE / "more.pth", f"{tmp_path}/elsewhere\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret.py").write_text("secret\n")
    with tarfile.open(tmp_path / "env.tar", "w") as tar:
        tar.add(prefix, ".")
    manifest = import_archive(tmp_path / "env.tar", tmp_path / "out.ccb", emit=ignore)
    assert not [entry.path for entry in manifest.files if entry.path.startswith("src")]
    named = " ".join(manifest.notices)
    assert f"{tmp_path}/elsewhere" in named
    assert str(checkout) in named


def archive_of(members, folder, name="bad.tar"):
    path = folder / name
    with tarfile.open(path, "w") as tar:
        for member, data in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


PYTHON = {"bin/python": b"\x7fELF", "conda-meta/history": b""}
NOT_ENVIRONMENTS = {
    "no conda-meta": ({"a.txt": b"a"}, "no conda-meta folder"),
    "no Python": ({"conda-meta/history": b"", "bin/ls": b""}, "it has no bin/python"),
    "two": ({"a/conda-meta/history": b"", "b/conda-meta/history": b""}, "several environments"),
    "a parcel": ({**PYTHON, "meta/parcel.json": b"{}"}, "Cloudera parcel"),
    "no prefix": ({**PYTHON, "bin/tool": b"#!/bin/sh\n"}, "the prefix in its files is unknown"),
    "a foreign conda-unpack": ({**PYTHON, "bin/conda-unpack": b"print('hello')\n"}, "not from conda-pack"),
    "no Python at all": ({**PYTHON, "bin/conda-unpack": b"_prefix_records = [\n"}, "not from conda-pack"),
    "an expression": ({**PYTHON, "bin/conda-unpack": b"_prefix_records = [exit(1)]"}, "not from conda-pack"),
    "an unknown mode": (
        {**PYTHON, "bin/conda-unpack": b"_prefix_records = [('a', '/b', 'c')]"},
        "has an invalid table",
    ),
    "numbers": ({**PYTHON, "bin/conda-unpack": b"_prefix_records = [(1, 2, 3)]"}, "has an invalid table"),
    "a nest": ({**PYTHON, "bin/conda-unpack": b"_prefix_records = " + b"(" * 5000}, "not from conda-pack"),
}


@pytest.mark.parametrize("case", NOT_ENVIRONMENTS)
def test_archive_without_an_environment_is_refused_with_the_reason(tmp_path, case):
    members, why = NOT_ENVIRONMENTS[case]
    archive = archive_of(members, tmp_path)
    with pytest.raises(BundleError) as error:
        import_archive(archive, tmp_path / "out.ccb", emit=ignore)
    assert str(archive) in str(error.value)
    assert why in str(error.value)
    assert error.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar"]


def test_unsupported_formats_are_refused_by_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "env.zip", "w") as archive:
        archive.writestr("conda-meta/history", "")
    (tmp_path / "env.squashfs").write_bytes(b"hsqs" + bytes(100))
    (tmp_path / "noise").write_bytes(b"noise")
    for name, what in (
        ("env.zip", "a zip file"),
        ("env.squashfs", "a squashfs image"),
        ("noise", "not a known kind of archive"),
    ):
        with pytest.raises(BundleError, match=what):
            import_archive(tmp_path / name, tmp_path / "out.ccb", emit=ignore)


def test_conda_unpack_is_read_and_never_run(tmp_path):
    trap = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n_prefix_records = [('bin/tool', '/old/env', 'text')]\n"
    members = {**PYTHON, "bin/conda-unpack": trap.encode(), "bin/tool": b"#!/old/env/bin/python\n"}
    manifest = import_archive(archive_of(members, tmp_path), tmp_path / "out.ccb", emit=ignore)
    assert manifest.source_prefix == "/old/env"
    assert "bin/conda-unpack" not in {entry.path for entry in manifest.files}
    assert not (tmp_path / "ran").exists()


def test_a_table_that_names_files_outside_reaches_none(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("/place/holder")
    rows = [(name, "/place/holder", "text") for name in ("../secret", str(secret), "link", "bin/../../secret")]
    rows += [("bin/tool", "/old/env", "text")] * 3 + [("bin/tool", "/old/env", "text")] * 3
    members = {**PYTHON, "bin/conda-unpack": f"_prefix_records = {rows!r}".encode(), "bin/tool": b"x"}
    archive = archive_of(members, tmp_path)
    with tarfile.open(archive, "a") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        tar.addfile(link)
    import_archive(archive, tmp_path / "out.ccb", emit=ignore)
    assert secret.read_text() == "/place/holder"


BUILT = "/opt/conda_build_" + "placehold_" * 20


def test_placeholders_of_packages_become_the_prefix_again(tmp_path):
    string = BUILT.encode() + b"/share/x\0"
    meta = {
        "name": "c",
        "version": "1",
        "files": ["lib/libc.so", "bin/python-tool"],
        "paths_data": {
            "paths": [
                {"_path": "lib/libc.so", "file_mode": "binary", "prefix_placeholder": BUILT},
                {"_path": "bin/python-tool", "file_mode": "text", "prefix_placeholder": BUILT},
            ]
        },
    }
    rows = [("lib/libc.so", BUILT, "binary"), ("etc/a", "/old/env", "text"), ("etc/b", BUILT, "text")]
    members = {
        **PYTHON,
        "conda-meta/c-1-0.json": json.dumps(meta).encode(),
        "lib/libc.so": b"\x7fELF\0" + string + b"tail",
        "bin/python-tool": BUILT.encode() + b"/lib\n",
        "bin/opts": b"#!/usr/bin/env python -I\n",
        "bin/foreign": b"#!/usr/bin/env perl -w\n",
        "etc/a": b"/old/env/a\n",
        "etc/b": f"file://{BUILT}/b\n".encode(),
        "bin/conda-unpack": f"_prefix_records = {rows!r}".encode(),
    }
    import_archive(archive_of(members, tmp_path), tmp_path / "out.ccb", emit=ignore)
    bundle = open_bundle(tmp_path / "out.ccb")
    assert bundle.manifest.source_prefix == "/old/env"
    files = bundle.prefix_files()
    assert files["lib/libc.so"] == b"\x7fELF\0" + b"/old/env/share/x".ljust(len(string), b"\0") + b"tail"
    room = {entry.path: entry.marks[0].room for entry in bundle.manifest.marked}["lib/libc.so"]
    assert room == len(BUILT)
    assert files["bin/python-tool"] == b"/old/env/lib\n"
    assert files["bin/opts"] == b"#!/old/env/bin/python -I\n"
    assert files["etc/b"] == b"file:///old/env/b\n"
    assert "bin/foreign" not in files
    assert json.loads(files["conda-meta/c-1-0.json"])["paths_data"]["paths"][0]["prefix_placeholder"] == BUILT


def test_prefix_is_found_in_the_history(tmp_path):
    history = b"# cmd: conda create -n other\n# cmd: /opt/conda/bin/conda install --prefix /data/envs/one numpy\n"
    members = {**PYTHON, "conda-meta/history": history, "bin/conda-unpack": b"_prefix_records = [\n\n]\n"}
    manifest = import_archive(archive_of(members, tmp_path), tmp_path / "out.ccb", emit=ignore)
    assert manifest.source_prefix == "/data/envs/one"
    del members["conda-meta/history"]
    members["conda-meta/x.json"] = b"{}"
    archive = archive_of(members, tmp_path, "nothing.tar")
    assert import_archive(archive, tmp_path / "out.ccb", emit=ignore).source_prefix == "/opt/nothing"


def test_the_oldest_placeholder_is_no_prefix():
    rows = [importer.Record("a", "/opt/anaconda1anaconda2" + "anaconda3", "text")] * 3
    assert importer.prefix_of_records([*rows, importer.Record("b", "/env", "text")], ()) == "/env"


def test_prefix_is_the_one_in_most_scripts():
    scripts = [b"#!/usr/bin/python3\n"] * 3 + [
        b"#!/srv/e/bin/python3.11 -I\n",
        b"#!/a b/bin/python\n",
        b"#!/a b/bin/python\n",
    ]
    assert importer.prefix_of_scripts(scripts) == "/a b"
    assert importer.prefix_of_scripts([b"#!/usr/bin/env python\n", b"\x7fELF"]) == ""


@pytest.mark.parametrize(
    ("name", "called"), [("llm.tar.gz", "llm"), ("a.b.tar.zst", "a.b"), ("x.tgz", "x"), ("y", "y")]
)
def test_an_environment_is_called_like_its_archive(tmp_path, name, called):
    assert name_of(tmp_path / name) == called


# --- what the commands use ------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, helpers):
    return helpers.make_env(tmp_path / "envs/tiny")


def stages(events):
    return [event.stage for event in events if isinstance(event, StageStarted)]


def test_an_archive_is_converted_once_and_again_when_it_changes(tiny, tmp_path):
    archive = tmp_path / "tiny.tar.gz"
    pack_archive(str(tiny), environ={}, output=archive, emit=ignore)
    events = []
    bundle = bundle_of(archive, emit=events.append)
    assert bundle == tmp_path / "tiny.tar.gz.ccb"
    assert stages(events) == ["import", "pack"]
    assert any(isinstance(event, Notice) and "tiny.tar.gz.ccb" in event.text for event in events)
    made = bundle.stat().st_mtime_ns
    assert bundle_of(archive, emit=ignore) == bundle
    assert bundle.stat().st_mtime_ns == made
    os.utime(archive, (1, 1))
    assert bundle_of(archive, emit=ignore) == bundle
    assert bundle.stat().st_mtime_ns != made


def test_incomplete_bundle_is_written_again(tiny, tmp_path):
    archive = tmp_path / "tiny.tar"
    pack_archive(str(tiny), environ={}, output=archive, emit=ignore)
    bundle = bundle_of(archive, emit=ignore)
    bundle.write_bytes(bundle.read_bytes()[:5000])
    open_bundle(bundle_of(archive, emit=ignore)).verify(ignore)


def test_path_that_is_not_an_archive_is_returned_unchanged(packed, tmp_path):
    noise = tmp_path / "noise"
    noise.write_bytes(b"noise")
    for path in (packed, noise, tmp_path / "missing.tar.gz", tmp_path):
        assert bundle_of(path, emit=ignore) == path
    renamed = tmp_path / "env.tar"  # a bundle is a tar
    shutil.copy(packed, renamed)
    assert bundle_of(renamed, emit=ignore) == renamed


def test_bundle_is_written_to_the_working_folder_if_the_archives_folder_is_read_only(tiny, tmp_path, monkeypatch):
    archive = tmp_path / "tiny.tar"
    pack_archive(str(tiny), environ={}, output=archive, emit=ignore)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert bundle_of(archive, emit=ignore).resolve() == tmp_path / "here/tiny.tar.ccb"


def test_an_environment_and_its_bundle_give_the_same_archive(tiny, tmp_path):
    pack(tiny, tmp_path / "tiny.ccb", name="tiny", emit=ignore)
    one = pack_archive(str(tiny), environ={}, output=tmp_path / "one.tar", emit=ignore)
    two = pack_archive(str(tmp_path / "tiny.ccb"), environ={}, output=tmp_path / "two.tar", emit=ignore)
    assert one.manifest.digest == two.manifest.digest
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"envs", "one.tar", "two.tar", "tiny.ccb"}


def test_the_default_name_is_the_environments(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = pack_archive(None, environ={"CONDA_PREFIX": str(tiny)}, emit=ignore)
    assert (tmp_path / "tiny.tar.gz").stat().st_size == result.archive.size
    data, text = archive_output(result)
    assert json.loads(json.dumps(data))["bytes"] == result.archive.size
    assert data["archive"] == "tiny.tar.gz"
    assert "tar xf tiny.tar.gz -C FOLDER" in text


def test_unusable_output_is_refused_before_anything_is_packed(tiny, tmp_path):
    for output, message in ((tmp_path, "is a folder"), (tmp_path / "a.zip", "must end"), (tiny / "a.tar", "inside")):
        events = []
        with pytest.raises(UsageError, match=message):
            pack_archive(str(tiny), environ={}, output=output, emit=events.append)
        assert events == []
