"""The unpacked files equal the environment's: none comes from a package cache, none is lost."""

import shutil
import subprocess
import tarfile
from importlib.metadata import version
from pathlib import PurePosixPath

import pytest
import real_env
from test_bundle_page import MISSING, commands

from provision.env.bundle.reader import open_bundle
from provision.env.packing.pack import pack
from provision.env.relocation import relocate
from provision.model import ignore

# What rewriting may change even where the prefix stays: scripts get an interpreter that needs no activation.
NEW_FIRST_LINE = {
    "bin/from-env",
    "bin/from-env-options",
    "bin/in-perl-from-env",
    "bin/long-form-pip",
    "bin/long-form-conda",
}


@pytest.fixture(scope="module")
def original(awkward):
    return real_env.tree(awkward)


def by_hand(bundle, folder):
    """Open a bundle with the commands of docs/bundle.md."""
    (folder / "llm.ccb").symlink_to(bundle)
    subprocess.run(["sh", "-euc", commands("Open it by hand")], cwd=folder, check=True, capture_output=True)
    return folder / "env"


def differing(found, original):
    return {path for path in found.keys() | original.keys() if found.get(path) != original.get(path)}


@pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {' '.join(MISSING)}")
def test_a_bundle_opened_by_hand_is_the_environment(awkward, awkward_bundle, original, tmp_path):
    unpacked = by_hand(awkward_bundle, tmp_path)
    assert differing(real_env.tree(unpacked), original) == set()
    assert real_env.same_file(unpacked) == real_env.same_file(awkward)


def test_relocation_to_the_same_prefix_changes_no_more_than_first_lines(awkward, awkward_bundle):
    opened = open_bundle(awkward_bundle)
    files = opened.prefix_files()
    relocated = relocate(opened.manifest, files, PurePosixPath(awkward))
    changed = {entry.path for entry, data in relocated.files if entry.type == "file" and data != files[entry.path]}
    assert changed - NEW_FIRST_LINE == set()
    assert not relocated.stale_pyc
    targets = {entry.path: entry.target for entry in opened.manifest.marked if entry.type == "link"}
    assert {entry.path: entry.target for entry, _ in relocated.files if entry.type == "link"} == targets


def test_a_relocated_environment_differs_in_the_rewritten_files_alone(
    awkward, awkward_bundle, original, tmp_path, helpers
):
    new = tmp_path / "some" / "where"
    relocated = helpers.place(awkward_bundle, new)
    found = real_env.tree(new)
    expected = {path: what for path, what in original.items() if path not in relocated.stale_pyc}
    rewritten = {entry.path for entry, _ in relocated.files}
    other_names = {name for names in real_env.same_file(awkward) if rewritten & set(names) for name in names}
    changed = differing(found, expected)
    assert changed <= rewritten | other_names
    assert real_env.same_file(new) == real_env.same_file(awkward)
    for path in changed:
        before, after = expected[path], found[path]
        assert before[:-1] == after[:-1] if before[0] == "file" else before[0] == after[0] == "link", path
        if before[0] == "file" and path not in NEW_FIRST_LINE and not path.endswith("RECORD"):
            assert len(after[-1]) == len(before[-1]) or b"\0" not in before[-1]
    assert str((new / "share/into").readlink()) == f"{new}/share/settings.txt"
    assert str((new / "share/decoy").readlink()) == f"{awkward}2/lib"
    settings = (new / "share/settings.txt").read_text()
    assert settings == f"{new}/lib {awkward}2/lib /data{awkward}/lib {awkward}.old\n"


def test_the_same_environment_packs_to_the_same_digests(awkward, awkward_bundle, tmp_path):
    again = pack(awkward, tmp_path / "again.ccb", name="env", emit=ignore)
    first = open_bundle(awkward_bundle).manifest
    assert again.digest == first.digest
    assert [chunk.digest for chunk in again.chunks] == [chunk.digest for chunk in first.chunks]


# --- conda-pack ships what its package cache remembers ---------------------------------------------------------

AS_MEASURED = version("conda-pack") == "0.9.2"  # a later one may have fixed it


def conda_packed(prefix, out):
    """What conda-pack puts into its archive, by path."""
    from conda_pack import pack as conda_pack

    conda_pack(prefix=str(prefix), output=str(out), format="tar", n_threads=1)
    with tarfile.open(out) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}


def ours(prefix, out, helpers):
    pack(prefix, out, name="env", emit=ignore)
    helpers.place(out, out.with_suffix(".unpacked"))
    return out.with_suffix(".unpacked")


@pytest.fixture
def channel(small, tmp_path):
    channel = real_env.Channel(small, tmp_path / "channel")
    channel.add_wheel(real_env.wheel(tmp_path / "conda", "overlaid", "from conda"))
    return channel


def test_a_conda_file_that_pip_overwrote(small, channel, tmp_path, helpers):
    prefix = channel.install(tmp_path / "env")
    small.install(prefix, "--force-reinstall", "--no-deps", real_env.wheel(tmp_path / "pip", "overlaid", "from pip"))
    path = f"{small.site}/overlaid/__init__.py"
    assert b"from pip" in (ours(prefix, tmp_path / "env.ccb", helpers) / path).read_bytes()
    theirs = conda_packed(prefix, tmp_path / "env.tar")
    if AS_MEASURED:
        assert b"from conda" in theirs[path]


def test_a_conda_file_that_was_patched(small, channel, tmp_path, helpers):
    prefix = channel.install(tmp_path / "env")
    path = f"{small.site}/overlaid/__init__.py"
    (prefix / path).write_text("TEXT = 'patched'\n")
    assert (ours(prefix, tmp_path / "env.ccb", helpers) / path).read_text() == "TEXT = 'patched'\n"
    theirs = conda_packed(prefix, tmp_path / "env.tar")
    if AS_MEASURED:
        assert b"from conda" in theirs[path]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed here")
@pytest.mark.filterwarnings("ignore")
def test_an_emptied_package_cache(channel, tmp_path, helpers):
    real_env.add_program(channel)
    prefix = channel.install(tmp_path / "env")
    shutil.rmtree(channel.folder / "pkgs")
    unpacked = ours(prefix, tmp_path / "env.ccb", helpers)
    message = subprocess.check_output([unpacked / "bin/program"], text=True)
    assert message == f"{unpacked}/share\n{unpacked}/lib:{unpacked}/lib64:/usr/lib\n"
    theirs = conda_packed(prefix, tmp_path / "env.tar")
    if AS_MEASURED:  # its record of the prefix is lost, so it will not rewrite it
        assert f"{prefix}/share".encode() in theirs["bin/program"]
        assert b"'bin/program'" not in theirs["bin/conda-unpack"]
