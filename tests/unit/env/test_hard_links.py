"""Several names of one file: packed once, and one file again on a node."""

import os
import shutil
import subprocess

import pytest

from provision.env.bundle import tar
from provision.env.bundle.manifest import FOLDERS
from provision.env.bundle.reader import open_bundle
from provision.env.packing.pack import PackOptions, pack
from provision.env.source import files
from provision.env.source.survey import link_names, scan_environment, survey
from provision.model import ignore

TARS = [program for program in (["tar"], ["busybox", "tar"], ["bsdtar"]) if shutil.which(program[0])]


def entries(manifest):
    return {entry.path: entry for entry in manifest.files}


def test_the_first_name_is_the_file_and_every_other_points_to_it(packed, helpers):
    found = entries(open_bundle(packed).manifest)
    hard = {path: entry.target for path, entry in found.items() if entry.type == "hard"}
    assert hard == helpers.HARD_LINKS
    for path, target in hard.items():
        assert found[target].type == "file"
        assert (found[path].mode, found[path].mtime) == (found[target].mode, found[target].mtime)
        assert (found[path].size, found[path].sha256, found[path].marks) == (0, "", ())


def test_last_chunk_has_the_hard_links_and_folders_only(packed, helpers):
    manifest = open_bundle(packed).manifest
    last = len(manifest.chunks) - 1
    assert [chunk.package for chunk in manifest.chunks].index(FOLDERS) == last
    members = manifest.members(last)
    assert {entry.type for entry in members} == {"hard", "dir"}
    assert {entry.path for entry in members if entry.type == "hard"} == set(helpers.HARD_LINKS)
    types = [entry.type for entry in members]
    assert types == sorted(types, key=["hard", "dir"].index)
    assert not [entry.path for entry in manifest.files if entry.type in ("hard", "dir") and set(entry.chunks) - {last}]


@pytest.mark.skipif(not TARS, reason="no tar is installed here")
@pytest.mark.parametrize("program", TARS, ids=lambda program: program[0])
def test_every_tar_makes_them_one_file(packed, tmp_path, helpers, program):
    bundle = open_bundle(packed)
    manifest = bundle.manifest
    target = helpers.HARD_LINKS["share/hard/plain.py"]
    wanted = [entries(manifest)[target].chunks[0], len(manifest.chunks) - 1]
    for other in set(helpers.HARD_LINKS.values()) - {target}:  # those lie in other chunks, or are prefix files
        helpers.write(tmp_path / "out" / other, "x")
    stream = b"".join(block for index in wanted for block in bundle.chunk_blocks(index)) + tar.END
    subprocess.run([*program, "-xpf", "-", "-C", tmp_path / "out"], input=stream, check=True)
    for path, other in helpers.HARD_LINKS.items():
        assert (tmp_path / "out" / path).samefile(tmp_path / "out" / other)
    assert (tmp_path / "out" / target).read_text() == "X = 1\n"
    assert int((tmp_path / "out" / target).stat().st_mtime) == entries(manifest)[target].mtime


def test_names_outside_the_environment_make_no_hard_link(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env")
    cache = helpers.write(tmp_path / "cache" / "cached.py", "C = 1\n")
    os.link(cache, prefix / "share" / "cached.py")
    found = {one.path: one for one in survey(scan_environment(prefix)).sources}
    assert found["share/cached.py"].type == "file"
    assert found["share/cached.py"].size == 6


def test_a_hard_link_to_a_link_is_another_link(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env")
    os.link(prefix / "share" / "dangling", prefix / "share" / "dangling-too", follow_symlinks=False)
    manifest = pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    found = entries(manifest)
    assert {found[path].type for path in ("share/dangling", "share/dangling-too")} == {"link"}


def test_excluded_first_name_leaves_the_file_to_the_next(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env")
    manifest = pack(
        prefix,
        tmp_path / "b.ccb",
        name="b",
        emit=ignore,
        options=PackOptions(exclude=[f"{helpers.SITE}/hello/plain.py"]),
    )
    found = entries(manifest)
    assert found["share/hard/plain.py"].type == "file"
    assert found["share/locked/inside/plain.py"].target == "share/hard/plain.py"


def test_files_with_equal_numbers_on_two_disks_are_two_files():
    def found(path, inode):
        return files.Source(path, path, "file", 0o644, 0, 1, "", inode)

    names = link_names([found("a", (1, 7)), found("b", (2, 7)), found("c", (1, 7)), found("d", None)])
    assert [(one.path, one.type, one.target) for one in names] == [
        ("a", "file", ""),
        ("b", "file", ""),
        ("c", "hard", "a"),
        ("d", "file", ""),
    ]
