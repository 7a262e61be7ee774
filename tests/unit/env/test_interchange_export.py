"""Bundles become archives that plain tar and the archive's own conda-unpack turn into environments."""

import ast
import gzip
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from provision.env import relocation
from provision.env.bundle.manifest import Mark
from provision.env.bundle.reader import open_bundle
from provision.env.interchange import conda_unpack
from provision.env.interchange.export import MARK, export, prepare
from provision.env.packing.pack import PackOptions, pack
from provision.env.relocation import relocate
from provision.errors import BundleError, UsageError
from provision.model import Progress, ignore

ADDED = {"bin/activate", "bin/activate.fish", "bin/conda-unpack", "bin/deactivate"}
TOOLS = [tool for tool in ("tar", "zstd", "gzip") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(TOOLS), reason=f"not installed here: {' '.join(TOOLS)}")

HASHED = ("/RECORD", "conda-meta/python-3.11.7-0.json")


def untar(archive, folder):
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-xpf", archive, "-C", folder], check=True)
    return folder


def finish(folder, python=None, *, check=True):
    """Run the archive's conda-unpack, as a program or with another Python."""
    argv = [folder / "bin/conda-unpack"] if python is None else [python, folder / "bin/conda-unpack"]
    environ = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(argv, check=check, env=environ, cwd="/", capture_output=True, text=True)


def tables(folder):
    program = ast.parse((folder / "bin/conda-unpack").read_text())
    assignments = [node for node in program.body if isinstance(node, ast.Assign)]
    literals = [node for node in assignments if isinstance(node.value, ast.List | ast.Constant)]
    return {node.targets[0].id: ast.literal_eval(node.value) for node in literals}


@pytest.fixture
def movable(prefix, tmp_path, helpers):
    """The awkward environment without the binary that has no room, packed."""
    (prefix / "lib/libown.so").unlink()
    out = tmp_path / "movable.ccb"
    pack(prefix, out, name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    return open_bundle(out)


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst"])
def test_plain_tar_opens_an_archive_and_only_prefix_files_differ(packed, prefix, checkout, tmp_path, helpers, suffix):
    bundle = open_bundle(packed)
    result = export(bundle, tmp_path / f"env{suffix}", emit=ignore)
    assert result.size == (tmp_path / f"env{suffix}").stat().st_size
    folder = untar(tmp_path / f"env{suffix}", tmp_path / "out")
    expected = helpers.tree(prefix) | {
        f"src/proj/{k}": v for k, v in helpers.tree(checkout).items() if "pycache" not in k
    }
    found = helpers.tree(folder)
    assert result.members == len(found)
    marked = {entry.path for entry in bundle.manifest.marked}
    linked = {entry.path for entry in bundle.manifest.files if entry.type == "hard" and entry.target in marked}
    compiled = {f"{helpers.SITE}/hello/__pycache__/__init__.cpython-311.pyc"}
    assert expected.keys() - found.keys() == compiled
    assert found.keys() - expected.keys() == ADDED | {"src", "src/proj"}
    differing = {path for path in found.keys() & expected.keys() if found[path] != expected[path]}
    assert differing <= marked | linked


def test_table_lists_exactly_the_files_with_the_placeholder(movable, tmp_path):
    export(movable, tmp_path / "env.tar", emit=ignore)
    folder = untar(tmp_path / "env.tar", tmp_path / "out")
    found = tables(folder)
    holding = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and MARK.encode() in path.read_bytes()
    } - {"bin/conda-unpack"}
    assert {path for path, _, _ in found["_prefix_records"]} == holding
    assert dict(found["_script_records"])["bin/hello-env"] == "python"
    assert found["_source_prefix"] == movable.manifest.source_prefix
    source = os.fsencode(movable.manifest.source_prefix)
    naming = [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.suffix != ".pyc" and source in path.read_bytes()
    ]
    # The decoys, which only start or end like the prefix, and the program that prints the environment's old place.
    assert sorted(naming) == ["bin/conda-unpack", "lib/python3.11/site-packages/hello/__init__.py"]


PLACES = {
    "short": "e",
    "longer than Linux reads of a first line": "x" * 60 + "/" + "y" * 60,
    "spaces and other alphabets": "my env é日本",
}


@pytest.mark.parametrize("place", PLACES)
def test_conda_unpack_gives_the_same_files_as_a_deploy(movable, tmp_path, place):
    export(movable, tmp_path / "env.tar.zst", emit=ignore)
    folder = untar(tmp_path / "env.tar.zst", tmp_path / PLACES[place])
    assert finish(folder).stderr == ""
    relocated = relocate(movable.manifest, movable.prefix_files(), PurePosixPath(folder))
    assert relocated.unrewritable == ()
    for entry, data in relocated.files:
        path = folder / entry.path
        if entry.type == "link":
            assert path.resolve() == Path(entry.target).resolve(), entry.path
            assert not path.readlink().is_absolute()
        else:
            assert path.read_bytes() == data, entry.path
            assert stat.S_IMODE(path.stat().st_mode) == entry.mode
    for argv in (["hello", "one"], ["hello-env"], ["hello-sh"]):
        if argv == ["hello-sh"] and " " in str(folder):
            continue  # its exec line has no quotes; a packer cannot detect that
        done = subprocess.run([folder / "bin" / argv[0], *argv[1:]], env={}, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("hello")


def test_conda_unpack_can_be_run_again_and_by_any_python(movable, tmp_path, helpers):
    export(movable, tmp_path / "env.tar", emit=ignore)
    folder = untar(tmp_path / "env.tar", tmp_path / "out")
    finish(folder, sys.executable)
    once = helpers.tree(folder)
    finish(folder)
    assert helpers.tree(folder) == once
    assert "conda-unpack of clusterctl" in subprocess.check_output(
        [folder / "bin/conda-unpack", "--version"], text=True
    )
    assert finish(folder, sys.executable).returncode == 0


def test_an_interrupted_conda_unpack_is_completed_by_another(movable, tmp_path, helpers):
    export(movable, tmp_path / "env.tar", emit=ignore)
    whole = untar(tmp_path / "env.tar", tmp_path / "a")
    finish(whole)
    (tmp_path / "done").mkdir()
    whole.rename(tmp_path / "done/a")
    folder = untar(tmp_path / "env.tar", tmp_path / "a")
    for path, old, mode in tables(folder)["_prefix_records"][::2]:  # some are done, their hashes are not
        rewrite = conda_unpack.in_text if mode == "text" else conda_unpack.padded
        data = rewrite((folder / path).read_bytes(), old.encode(), os.fsencode(folder))
        (folder / path).write_bytes(data)
    finish(folder)
    times_aside = [
        {path: (*known[:2], known[-1]) for path, known in helpers.tree(top).items()}
        for top in (folder, tmp_path / "done/a")
    ]
    assert times_aside[0] == times_aside[1]


def test_hashes_are_correct_before_and_after_conda_unpack(movable, tmp_path, helpers):
    import base64
    import csv
    import hashlib

    def false_rows(folder):
        site = folder / helpers.SITE
        for record in site.glob("*.dist-info/RECORD"):
            for name, digest, size in csv.reader(record.read_text().splitlines()):
                path = site / name
                if not digest or not path.exists():
                    continue
                data = path.read_bytes()
                true = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                if (digest, int(size)) != (f"sha256={true}", len(data)):
                    yield name

    export(movable, tmp_path / "env.tar", emit=ignore)
    folder = untar(tmp_path / "env.tar", tmp_path / "out")
    assert list(false_rows(folder)) == []
    finish(folder)
    assert list(false_rows(folder)) == []
    listed = json.loads((folder / "conda-meta/python-3.11.7-0.json").read_text())["paths_data"]["paths"]
    settings = next(one for one in listed if one["_path"] == "lib/settings.txt")
    assert settings["sha256_in_prefix"] == hashlib.sha256((folder / "lib/settings.txt").read_bytes()).hexdigest()


def test_binary_without_room_is_reported_before_anything_is_written(packed, tmp_path, helpers):
    bundle = open_bundle(packed)
    export(bundle, tmp_path / "env.tar", emit=ignore)
    folder = untar(tmp_path / "env.tar", tmp_path / ("long" * 40))
    before = helpers.tree(folder)
    done = finish(folder, check=False)
    assert done.returncode == 1
    room = len(bundle.manifest.source_prefix)
    assert f"lib/libown.so: {room} bytes" in done.stderr
    assert helpers.tree(folder) == before


def test_a_binary_without_room_keeps_its_length_where_the_prefix_is_shorter(packed, tmp_path):
    bundle = open_bundle(packed)
    export(bundle, tmp_path / "env.tar", emit=ignore)
    folder = untar(tmp_path / "env.tar", tmp_path / "e")  # the environment was at opt/env beside it
    finish(folder)
    relocated = relocate(bundle.manifest, bundle.prefix_files(), PurePosixPath(folder))
    expected = {entry.path: data for entry, data in relocated.files}["lib/libown.so"]
    assert (folder / "lib/libown.so").read_bytes() == expected
    assert os.fsencode(folder) + b"/" in expected


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed here")
def test_loader_paths_are_relative_to_the_folder_of_the_file(prefix, tmp_path, helpers):
    (tmp_path / "part.c").write_text("int part(void) { return 42; }\n")
    (tmp_path / "whole.c").write_text("int part(void);\nint main(void) { return part(); }\n")
    link = ["-L", prefix / "lib", "-lpart", f"-Wl,-rpath,{prefix}/lib"]
    subprocess.run(["gcc", "-shared", "-o", prefix / "lib/libpart.so", tmp_path / "part.c"], check=True)
    subprocess.run(["gcc", "-o", prefix / "bin/whole", tmp_path / "whole.c", *link], check=True)
    pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore)
    export(open_bundle(tmp_path / "b.ccb"), tmp_path / "b.tar", emit=ignore)
    prefix.rename(tmp_path / "away")
    folder = untar(tmp_path / "b.tar", tmp_path / "a longer name than it was built for")
    assert subprocess.run([folder / "bin/whole"], check=False).returncode == 42  # without conda-unpack
    assert "bin/whole" not in {path for path, _, _ in tables(folder)["_prefix_records"]}


def test_file_too_large_to_be_rewritten_is_reported(packed):
    from dataclasses import replace

    bundle = open_bundle(packed)
    large = next(entry for entry in bundle.manifest.files if entry.raw)
    held = replace(large, marks=(Mark("binary"),))
    files = tuple(held if entry == large else entry for entry in bundle.manifest.files)
    prepared = prepare(replace(bundle.manifest, files=files), bundle.prefix_files())
    assert large.path not in {entry.path for entry, _ in prepared.files}
    assert any(large.path in text and "too large" in text for text in prepared.notices)


@pytest.mark.parametrize("prefix", ["/quo'te", "/dol$lar", "/back\\slash", "/new\nline", "/semi;colon"])
def test_a_folder_that_scripts_would_misread_is_refused(prefix):
    with pytest.raises(SystemExit, match="cannot be a prefix"):
        conda_unpack.unpack(prefix.encode())


def test_conda_unpack_has_the_rules_of_relocation():
    from provision.env import relocation

    assert conda_unpack.ENDS == relocation.ENDS
    assert conda_unpack.INSIDE_A_PATH.pattern == relocation.INSIDE_A_PATH.pattern
    assert conda_unpack.PREFIX.pattern == relocation.PREFIX.pattern.encode()
    assert (conda_unpack.LIMIT, conda_unpack.LATER_LIMIT) == (
        relocation.SHEBANG_LIMIT,
        relocation.LATER_SHEBANG_LIMIT,
    )
    for line in (
        b"#!/usr/bin/env python\n",
        b"#! /usr/bin/env -S python3 -I -u\r\n",
        b"#!/usr/bin/env -i x\n",
        b"#!/bin/sh\n",
    ):
        wanted, match = relocation.env_program(line + b"rest"), conda_unpack.ENV.match(line + b"rest")
        assert wanted == (match and (match[1], match[2].strip(), (line + b"rest")[match.end() :]))


LONG = b"/" + b"x" * 150
SHEBANGS = [
    (b"/new/bin/python", b""),
    (b"/new/bin/python3.11", b"-I"),
    (b"/new/bin/python", b"-I -u"),
    (LONG + b"/bin/python", b"-I"),
    (LONG + b"/bin/perl", b"-w"),
    (LONG * 2 + b"/bin/perl", b"-w"),
    (LONG * 2 + b"/bin/perl", b""),
    (b"/a b/bin/python", b""),
    (b"/a b/bin/perl", b""),
]


@pytest.mark.parametrize(("program", "options"), SHEBANGS)
def test_conda_unpack_writes_first_lines_as_a_deploy_does(program, options):
    assert conda_unpack.write_shebang(program, options) == relocation.write_shebang(program, options)


def test_activate_of_conda_pack_is_included_and_works(movable, tmp_path):
    export(movable, tmp_path / "env.tar.gz", emit=ignore)
    folder = untar(tmp_path / "env.tar.gz", tmp_path / "out")
    import conda_pack

    own = Path(conda_pack.__file__).parent / "scripts/posix"
    for name in ("activate", "deactivate", "activate.fish"):
        assert (folder / "bin" / name).read_bytes() == (own / name).read_bytes()
    finish(folder)
    program = f". '{folder}/bin/activate'; command -v hello; hello; . deactivate; command -v hello || echo gone"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{folder}/bin/hello\nhello []\ngone\n"


def test_scripts_run_in_an_activated_environment_before_conda_unpack(movable, tmp_path):
    export(movable, tmp_path / "env.tar", emit=ignore)
    folder = untar(tmp_path / "env.tar", tmp_path / "out")
    program = f". '{folder}/bin/activate'; hello-env"
    assert subprocess.check_output(["bash", "-c", program], text=True) == "hello\n"


def test_activate_of_the_environment_is_replaced(prefix, tmp_path, helpers):
    (prefix / "bin/activate").symlink_to(prefix / "bin/hello")
    helpers.write(prefix / "bin/deactivate", "echo conda's\n", 0o755)
    bundle_path = tmp_path / "b.ccb"
    pack(prefix, bundle_path, name="b", emit=ignore)
    export(open_bundle(bundle_path), tmp_path / "b.tar", emit=ignore)
    names = subprocess.check_output(["tar", "tf", tmp_path / "b.tar"], text=True).splitlines()
    assert names.count("bin/activate") == names.count("bin/deactivate") == 1
    folder = untar(tmp_path / "b.tar", tmp_path / "out")
    assert b"_conda_pack_activate" in (folder / "bin/activate").read_bytes()


def test_other_names_of_a_prefix_file_are_rewritten_with_it(prefix, tmp_path):
    os.link(prefix / "lib/settings.txt", prefix / "share/settings-too.txt")
    bundle_path = tmp_path / "b.ccb"
    manifest = pack(prefix, bundle_path, name="b", emit=ignore)
    assert {e.path: e.target for e in manifest.files if e.type == "hard"}[
        "share/settings-too.txt"
    ] == "lib/settings.txt"
    export(open_bundle(bundle_path), tmp_path / "b.tar", emit=ignore)
    folder = untar(tmp_path / "b.tar", tmp_path / "e")
    finish(folder)
    assert (folder / "share/settings-too.txt").read_text() == f"-I{folder}/include -L{folder}/lib\n"


def test_zstd_frames_are_copied_and_gzip_is_one_file(packed, tmp_path):
    bundle = open_bundle(packed)
    archive = tmp_path / "env.tar.zst"
    export(bundle, archive, emit=ignore)
    data = archive.read_bytes()
    verbatim = [b"".join(bundle.chunk_compressed(i)) in data for i, _ in enumerate(bundle.manifest.chunks)]
    assert verbatim.count(False) <= 2  # chunks with a stale .pyc or a hard link to a prefix file
    subprocess.run(["zstd", "-tq", archive], check=True)
    export(bundle, tmp_path / "env.tar", emit=ignore)
    export(bundle, tmp_path / "env.tar.gz", emit=ignore)
    plain = (tmp_path / "env.tar").read_bytes()
    assert gzip.decompress((tmp_path / "env.tar.gz").read_bytes()) == plain
    assert subprocess.check_output(["zstd", "-dqc", archive]) == plain


def test_progress_counts_every_byte_of_the_stream(packed, tmp_path):
    for suffix in (".tar", ".tar.zst"):
        events = []
        export(open_bundle(packed), tmp_path / f"env{suffix}", emit=events.append)
        done = [event.done for event in events if isinstance(event, Progress)]
        assert done == sorted(done)
        assert done[-1] == (tmp_path / "env.tar").stat().st_size


def test_a_damaged_bundle_leaves_no_archive(packed, tmp_path):
    bundle = open_bundle(packed)
    data = bytearray(packed.read_bytes())
    data[bundle.manifest.chunks[-2].offset + 3] ^= 1
    packed.write_bytes(data)
    for suffix in (".tar", ".tar.gz", ".tar.zst"):
        with pytest.raises(BundleError, match="damaged"):
            export(open_bundle(packed), tmp_path / f"out{suffix}", emit=ignore)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_output_name_without_a_known_suffix_is_refused(packed, tmp_path):
    with pytest.raises(UsageError, match=r"must end in \.tar\.gz"):
        export(open_bundle(packed), tmp_path / "env.zip", emit=ignore)
