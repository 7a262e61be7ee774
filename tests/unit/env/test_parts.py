"""A release as parts, unpacked as on a node; parts shared with a later release, and their lists."""

import os
import shutil
import subprocess
from collections import deque
from pathlib import Path, PurePosixPath

import pytest

from provision.env.bundle.reader import open_bundle
from provision.env.packing.pack import PackOptions, pack
from provision.env.release import install
from provision.env.release.catalog import ReleasePaths
from provision.env.release.install import Payload
from provision.env.relocation import relocate
from provision.errors import BundleError
from provision.model import Inventory, Node
from provision.script import compile_steps, parse

TARS = [tar for tar in (["tar"], ["busybox", "tar"], ["bsdtar"]) if shutil.which(tar[0])]
OWN_FOLDER = {
    ".clusterctl",
    ".clusterctl/files",
    ".clusterctl/complete",
    ".clusterctl/links",
    ".clusterctl/release.json",
}


def unpack(payload, into, wire="plain", *, tar=("tar",), have=()):
    """Handles parts like a node; returns the new ones."""
    into.mkdir(parents=True, exist_ok=True)
    taken = [part for part in payload.parts(wire) if not {part.key, part.group} & set(have)]
    for part in taken:
        data = b"".join(part.blocks())
        assert len(data) == part.size
        if wire == "zstd":
            data = subprocess.run(["zstd", "-dc"], input=data, capture_output=True, check=True).stdout
        if part.kind != "range":
            argv = [*tar, "-xpf", "-", "-C", str(into)]
            subprocess.run(argv, input=data + bytes(1024), check=True, umask=0o022)
        else:
            path = into / part.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if path.exists() else "wb") as file:
                file.seek(part.offset)
                file.write(data)
            path.chmod(part.mode)
            os.utime(path, (part.mtime, part.mtime))
    return taken


def activate(places, bundle, relocated, *, only=None):
    planned = [
        step for step in install.activate_steps(places, bundle.manifest, relocated) if only is None or step.name in only
    ]
    done = subprocess.run(["sh", "-c", compile_steps(planned, token="t")], capture_output=True, text=True, check=False)
    states = {step.name: step.state for step in parse("t", done.stdout)}
    assert done.returncode == 0, done.stdout
    return states


@pytest.fixture
def bundle(packed):
    return open_bundle(packed)


def release(root, bundle):
    inventory = Inventory(Path("i.yaml"), PurePosixPath(root / "current"), (Node("n", "n"),))
    places = ReleasePaths.of(inventory, bundle.manifest.release_id)
    relocated = relocate(bundle.manifest, bundle.prefix_files(), PurePosixPath(places.release))
    return places, relocated, Payload(bundle, relocated)


def expected_tree(helpers, prefix, checkout, relocated):
    expected = helpers.tree(prefix)
    for path, what in helpers.tree(checkout).items():
        if "__pycache__" not in path:
            expected[f"src/proj/{path}"] = what
    expected |= {"src": ("dir", 0o755), "src/proj": ("dir", 0o755)}
    for entry, content in relocated.files:
        mtime = expected[entry.path][2] if entry.type == "file" else None
        expected[entry.path] = ("link", entry.target) if entry.type == "link" else ("file", entry.mode, mtime, content)
    for name, other in helpers.HARD_LINKS.items():
        expected[name] = expected[other]
    for path in relocated.stale_pyc:
        del expected[path]
    # Until it is sealed, a release's folders can be written to.
    return {path: ("dir", what[1] | 0o200) if what[0] == "dir" else what for path, what in expected.items()}


@pytest.mark.skipif(not TARS, reason="no tar is installed here")
@pytest.mark.parametrize("tar", TARS, ids=lambda tar: tar[0])
@pytest.mark.parametrize("wire", ["plain", "zstd"])
def test_a_node_gets_the_tree(bundle, prefix, checkout, tmp_path, helpers, tar, wire):
    places, relocated, payload = release(tmp_path / "llm", bundle)
    unpack(payload, Path(places.incoming), wire, tar=tar)
    Path(places.transfer).mkdir()
    assert activate(places, bundle, relocated, only={"complete"}) == {"complete": "changed"}
    found = helpers.tree(Path(places.release))
    lists_there = {path for path in found if path.startswith(".clusterctl/files/")}
    ours = {path for path in found if path.split("/")[0] == ".clusterctl"}
    assert ours - lists_there == OWN_FOLDER | {".clusterctl/stale"}
    assert {path: what for path, what in found.items() if path not in ours} == expected_tree(
        helpers, prefix, checkout, relocated
    )
    for name, other in helpers.HARD_LINKS.items():
        assert (Path(places.release) / name).samefile(Path(places.release) / other), name
    done = subprocess.run(["env", "-i", f"{places.release}/bin/hello", "x"], capture_output=True, text=True, check=True)
    assert done.stdout == "hello ['x']\n"


def test_lists_name_every_file_with_its_digest(bundle, tmp_path):
    places, relocated, payload = release(tmp_path / "llm", bundle)
    unpack(payload, Path(places.incoming))
    Path(places.transfer).mkdir()
    activate(places, bundle, relocated, only={"complete"})
    folder = Path(places.release)
    found = sorted(folder.glob(".clusterctl/files/*"))
    for path in found:
        subprocess.run(["sha256sum", "-c", "--quiet", "--strict", path], cwd=folder, check=True)
    listed = sum(path.read_bytes().count(b"\n") for path in found)
    final = {entry.path for entry in bundle.manifest.files if entry.type in ("file", "hard")} - relocated.stale_pyc
    assert listed == len(final)
    assert set(payload.keys) <= {path.name for path in found}


def test_recompiled_files_are_current_and_listed(bundle, tmp_path):
    places, relocated, payload = release(tmp_path / "llm", bundle)
    unpack(payload, Path(places.incoming))
    Path(places.transfer).mkdir()
    activate(places, bundle, relocated, only={"complete", "compile", "seal", "mark"})
    assert relocated.stale_pyc
    compiled = (Path(places.release) / install.COMPILED).read_text()
    for path in relocated.stale_pyc:
        assert path in compiled
        assert (Path(places.release) / path).stat().st_mode & 0o222 == 0
        source = Path(places.release) / "lib/python3.11/site-packages/hello/__init__.py"
        assert (Path(places.release) / path).read_bytes()[8:12] == int(source.stat().st_mtime).to_bytes(4, "little")


def test_damaged_chunk_is_found_before_its_part_ends(bundle, tmp_path):
    data = bytearray(bundle.path.read_bytes())
    chunk = next(chunk for chunk in bundle.manifest.chunks if chunk.package == "other")
    data[chunk.offset + chunk.compressed // 2] ^= 1
    _, _, payload = release(tmp_path / "llm", bundle)
    parts = payload.parts("zstd")
    bundle.path.write_bytes(bytes(data))
    with pytest.raises(BundleError, match="damaged"):
        deque((block for part in parts for block in part.blocks()), maxlen=0)


def test_equal_environment_with_another_prefix_and_new_times_shares_all_but_the_last_part(bundle, prefix, tmp_path):
    _, _, payload = release(tmp_path / "llm", bundle)
    for folder, _, files in os.walk(prefix):
        for name in files:
            os.utime(Path(folder) / name, (1800000000, 1800000000), follow_symlinks=False)
    again = tmp_path / "again.ccb"
    pack(prefix, again, name="env", emit=lambda _event: None, options=PackOptions(limit=1 << 16))
    other = open_bundle(again)
    assert other.manifest.release_id != bundle.manifest.release_id
    _, _, later = release(tmp_path / "elsewhere", other)
    assert later.keys == payload.keys
    have = set(payload.keys)
    assert len([part for part in later.parts("plain") if not {part.key, part.group} & have]) == 1


def test_changed_package_changes_only_its_own_parts(bundle, prefix, tmp_path, helpers):
    _, _, payload = release(tmp_path / "llm", bundle)
    helpers.write(prefix / "lib/python3.11/site-packages/other/1.py", "N = 'changed'\n")
    again = tmp_path / "again.ccb"
    pack(prefix, again, name="env", emit=lambda _event: None, options=PackOptions(limit=1 << 16))
    _, _, later = release(tmp_path / "llm", open_bundle(again))
    assert len(set(later.keys) - set(payload.keys)) == 1


def test_names_that_lists_must_escape_are_escaped_as_sha256sum_does(tmp_path):
    (tmp_path / "new\nline\\x").write_text("a")
    message = subprocess.run(["sha256sum", "new\nline\\x"], cwd=tmp_path, capture_output=True, check=True).stdout
    from provision.env.bundle.manifest import Entry

    entry = Entry("new\nline\\x", "file", 0o644, 0, 1, message[1:65].decode())
    assert install.checksum_lines([entry]) == message
