import json
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from provision.env import payload
from provision.env.bundle import open_bundle
from provision.env.relocate import relocate
from provision.errors import BundleError

TARS = [tar for tar in (["tar"], ["busybox", "tar"], ["bsdtar"]) if shutil.which(tar[0])]


@pytest.fixture
def bundle(packed):
    return open_bundle(packed)


def relocated(bundle, new):
    return relocate(bundle.manifest, bundle.prefix_files(), PurePosixPath(new))


@pytest.mark.skipif(not TARS, reason="no tar is installed here")
@pytest.mark.parametrize("tar", TARS, ids=lambda tar: tar[0])
def test_a_node_gets_the_tree(bundle, prefix, checkout, tmp_path, helpers, tar):
    new = tmp_path / "releases" / "0123456789ab"
    new.mkdir(parents=True)
    result = relocated(bundle, new)
    data = b"".join(payload.stream(bundle, result, block=1000))
    assert len(data) == payload.size(bundle, result)
    subprocess.run([*tar, "-xpf", "-", "-C", str(new)], input=data, check=True, umask=0o077)

    expected = helpers.tree(prefix)
    for path, what in helpers.tree(checkout).items():
        if "__pycache__" not in path:
            expected[f"src/proj/{path}"] = what
    expected |= {"src": ("dir", 0o755), "src/proj": ("dir", 0o755)}
    for entry, content in result.files:
        mtime = expected[entry.path][2] if entry.type == "file" else None
        expected[entry.path] = ("link", entry.target) if entry.type == "link" else ("file", entry.mode, mtime, content)
    for path in result.stale_pyc:
        del expected[path]
    found = helpers.tree(new)
    ours = {path for path in found if path.split("/")[0] == ".clusterctl"}
    assert ours == {".clusterctl", ".clusterctl/complete", ".clusterctl/manifest.json"}
    assert {path: what for path, what in found.items() if path not in ours} == expected

    listing = json.loads((new / ".clusterctl/manifest.json").read_text())
    assert listing["prefix"] == str(new)
    assert listing["digest"] == bundle.manifest.digest
    assert {row[0] for row in listing["files"]} == set(expected)
    done = subprocess.run(["env", "-i", new / "bin" / "hello", "x"], capture_output=True, text=True, check=True)
    assert done.stdout == "hello ['x']\n"


def test_the_mark_of_completeness_comes_last(bundle):
    blocks = list(payload.stream(bundle, relocated(bundle, "/new"), block=512))
    assert {len(block) for block in blocks} == {512}
    assert blocks[-3].startswith(b".clusterctl/complete\0")
    assert b"".join(blocks[-2:]) == bytes(1024)


def test_a_damaged_chunk_never_gets_the_mark(bundle):
    data = bytearray(bundle.path.read_bytes())
    chunk = next(chunk for chunk in bundle.manifest.chunks if chunk.package == "other")
    data[chunk.offset + chunk.compressed // 2] ^= 1
    result = relocated(bundle, "/new")
    bundle.path.write_bytes(bytes(data))
    got = []
    with pytest.raises(BundleError, match="damaged"):
        got.extend(payload.stream(bundle, result, block=4096))
    assert b".clusterctl/complete" not in b"".join(got)


@pytest.mark.skipif(not TARS, reason="no tar is installed here")
def test_every_header_matches_what_tar_lists(bundle):
    data = b"".join(payload.stream(bundle, relocated(bundle, "/new")))
    names = subprocess.run([*TARS[0], "-tf", "-"], input=data, capture_output=True, check=True).stdout.splitlines()
    assert len(names) == len(bundle.manifest.files) - 1 + 3  # one stale .pyc less, three members of ours
    assert names[-1] == b".clusterctl/complete"
    assert Path(names[-1].decode()).name == "complete"
