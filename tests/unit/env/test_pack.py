import hashlib
import io
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from provision.env.bundle.manifest import Mark
from provision.env.bundle.reader import open_bundle
from provision.env.packing import writer
from provision.env.packing.pack import PackOptions, pack
from provision.env.source import files
from provision.errors import BundleError, UsageError
from provision.model import Notice, Progress, StageFinished, StageStarted, ignore
from provision.output import Reporter

TOOLS = [tool for tool in ("tar", "zstd") if shutil.which(tool) is None]
needs_tools = pytest.mark.skipif(bool(TOOLS), reason=f"not installed here: {' '.join(TOOLS)}")


def marks(manifest):
    return {entry.path: set(entry.marks) for entry in manifest.files if entry.marks}


@needs_tools
def test_a_bundle_opens_by_hand(packed, prefix, checkout, tmp_path, helpers):
    out, tree = tmp_path / "out", tmp_path / "tree"
    out.mkdir()
    tree.mkdir()
    subprocess.run(["tar", "xf", packed, "-C", out], check=True)
    assert [path.name for path in sorted(out.iterdir())] == [
        "clusterctl-bundle",
        "data",
        "folders.tar.zst",
        "manifest.json",
        "prefix-files.tar.zst",
    ]
    subprocess.run(
        "cat data/*.tar.zst prefix-files.tar.zst | zstd -dq | tar xp -C ../tree 2>&1", shell=True, check=True, cwd=out
    )
    manifest = open_bundle(packed).manifest
    for entry in manifest.files:
        if entry.raw:
            digests = [manifest.chunks[index].member for index in entry.chunks]
            data = b"".join(subprocess.check_output(["zstd", "-dqc", out / member]) for member in digests)
            helpers.write(tree / entry.path, data, entry.mode)
    subprocess.run("zstd -dqc folders.tar.zst | tar xp -C ../tree 2>&1", shell=True, check=True, cwd=out)
    expected = helpers.tree(prefix) | {
        f"src/proj/{k}": v for k, v in helpers.tree(checkout).items() if "pycache" not in k
    }
    found = helpers.tree(tree)
    assert {k: v for k, v in expected.items() if k not in found} == {
        "share/absolute": ("link", f"{prefix}/lib/settings.txt")
    }
    assert {k: v for k, v in found.items() if v != expected.get(k)} == {
        "src": ("dir", 0o755),
        "src/proj": ("dir", 0o755),
    }


def test_every_file_matches_the_manifest(packed, prefix):
    for entry in open_bundle(packed).manifest.files:
        path = prefix / entry.path
        if entry.type == "file" and not entry.path.startswith("src/"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256
            assert (path.stat().st_size, int(path.stat().st_mtime)) == (entry.size, entry.mtime)


def test_files_with_the_prefix_are_found(packed, helpers):
    site = helpers.SITE
    found = marks(open_bundle(packed).manifest)
    assert found["bin/hello"] == {Mark("shebang")}
    assert found["bin/hello-env"] == {Mark("shebang")}
    assert found["bin/hello-sh"] == {Mark("text")}
    assert found["lib/libconda.so"] == {Mark("binary", "", 255)}
    assert found["lib/libown.so"] == {Mark("binary")}
    assert found["share/absolute"] == {Mark("link")}
    assert found[f"{site}/__editable__.proj-0.1.pth"] == {Mark("text", "src/proj")}
    assert found[f"{site}/proj-0.1.dist-info/direct_url.json"] == {Mark("text", "src/proj")}
    assert found["src/proj/src/proj/__init__.py"] == {Mark("text", "src/proj")}
    assert found[f"{site}/hello-1.0.dist-info/RECORD"] == {Mark("record")}
    assert not [path for path in found if path.endswith(".pyc")]
    assert f"{site}/hello/plain.py" not in found


def test_a_path_that_only_begins_like_the_prefix_is_not_the_prefix(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env")
    helpers.write(prefix / "share" / "decoy", f"{prefix}2/lib {prefix}.old/lib /data{prefix}/lib")
    manifest = pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore)
    assert "share/decoy" not in marks(manifest)


def test_the_same_environment_packs_to_the_same_bytes(packed, prefix, tmp_path, helpers, monkeypatch):
    first = open_bundle(packed).manifest
    again = pack(prefix, tmp_path / "again.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    assert again.digest == first.digest
    assert again.chunks == first.chunks
    assert len(again.release_id) == 12


def test_touching_one_package_changes_only_its_chunks(packed, prefix, tmp_path, helpers):
    before = open_bundle(packed).manifest
    helpers.write(prefix / helpers.SITE / "other" / "7.py", "N = 8\n" * 5000)
    helpers.write(prefix / helpers.SITE / "other" / "new.py", "N = 9\n")
    after = pack(prefix, tmp_path / "again.ccb", name="env", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    changed = {chunk.digest for chunk in after.chunks} - {chunk.digest for chunk in before.chunks}
    # new.py is in no RECORD and counts to the folder
    assert {c.package for c in after.chunks if c.digest in changed} == {"other", f"{helpers.SITE}/other/"}
    assert after.digest != before.digest


def test_large_file_is_split_into_ranges(packed, helpers):
    manifest = open_bundle(packed).manifest
    entry = next(entry for entry in manifest.files if entry.path.endswith("big.bin"))
    assert [manifest.chunks[index].size for index in entry.chunks] == [helpers.LIMIT, helpers.LIMIT, 3]
    assert {manifest.chunks[index].kind for index in entry.chunks} == {"raw"}


@pytest.mark.parametrize("at", [100, (1 << 16) - 5, (1 << 17) - 1])
def test_a_large_file_that_holds_the_prefix_is_a_prefix_file(tmp_path, helpers, at):
    prefix = helpers.make_env(tmp_path / "env")
    data = bytearray(3 * helpers.LIMIT)
    data[at : at + len(str(prefix))] = str(prefix).encode()
    helpers.write(prefix / "lib" / "large.so", bytes(data))
    helpers.write(prefix / "lib" / "large.txt", f"{prefix}2\n" * helpers.LIMIT)
    manifest = pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    assert marks(manifest)["lib/large.so"] == {Mark("binary")}
    assert "lib/large.txt" not in marks(manifest)
    bundle = open_bundle(tmp_path / "b.ccb")
    bundle.verify(ignore)
    assert bundle.prefix_files()["lib/large.so"] == bytes(data)


def test_progress_counts_every_byte(prefix, tmp_path, helpers):
    events = []
    pack(prefix, tmp_path / "b.ccb", name="b", emit=events.append, options=PackOptions(limit=helpers.LIMIT))
    started = next(event for event in events if isinstance(event, StageStarted))
    done = [event.done for event in events if isinstance(event, Progress)]
    assert done == sorted(done)
    assert done[-1] == started.total
    assert isinstance(events[-1], StageFinished)


def test_packing_shows_the_remaining_time(prefix, tmp_path, helpers):
    shown, clock = io.StringIO(), itertools.count(step=7)  # every event takes seven seconds
    reporter = Reporter(out=io.StringIO(), err=shown, environ={}, now=lambda: float(next(clock)))
    pack(prefix, tmp_path / "b.ccb", name="b", emit=reporter, options=PackOptions(limit=helpers.LIMIT))
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("Packing b: ")]
    assert any(re.fullmatch(r"Packing b: \d+ %, .*/s, \d+:\d\d left", line) for line in lines), lines


def test_sockets_and_links_that_lead_outside_are_named(prefix, tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(prefix / "share" / "socket"))
        events = []
        manifest = pack(prefix, tmp_path / "b.ccb", name="b", emit=events.append)
    assert any("share/socket" in notice for notice in manifest.notices)
    assert any("bin/python3.11 links to" in notice for notice in manifest.notices)
    assert [event for event in events if isinstance(event, Notice)] == [
        Notice(text, "warning") for text in manifest.notices
    ]
    assert "share/socket" not in {entry.path for entry in manifest.files}


def test_a_file_that_changes_is_named(tmp_path, helpers):
    path = helpers.write(tmp_path / "file", "before")
    found = files.walk(tmp_path, "", skip=lambda *_: False).sources[0]
    helpers.write(path, "after it")
    with pytest.raises(BundleError, match="file changed while it was read"):
        files.read_into(memoryview(bytearray(found.size)), found)
    path.unlink()
    with pytest.raises(BundleError, match="file changed while it was read"):
        files.read_into(memoryview(bytearray(found.size)), found)


def test_a_file_that_changes_fails_the_pack_and_leaves_nothing(prefix, tmp_path, monkeypatch, helpers):
    real = files.walk_environment

    def environment(path, **options):
        tree = real(path, **options)
        helpers.write(prefix / helpers.SITE / "other" / "7.py", "changed")
        return tree

    monkeypatch.setattr(files, "walk_environment", environment)
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match=r"other/7\.py changed"):
        pack(prefix, tmp_path / "out" / "b.ccb", name="b", emit=ignore)
    assert not list((tmp_path / "out").iterdir())


def test_an_unreadable_file_is_named(tmp_path, helpers, monkeypatch):
    helpers.write(tmp_path / "file", "secret")
    found = files.walk(tmp_path, "", skip=lambda *_: False).sources[0]

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root may read everything
    with pytest.raises(UsageError, match="file: permission denied"):
        files.read_into(memoryview(bytearray(found.size)), found)


def test_a_full_disk_names_the_path_and_leaves_nothing(prefix, tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.Writer, "add_prefix_files", full)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match=r"no space left for .*b\.ccb: .* GB free"):
        pack(prefix, tmp_path / "out" / "b.ccb", name="b", emit=ignore)
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_that_does_not_exist_is_named(prefix, tmp_path):
    with pytest.raises(UsageError, match="cannot write"):
        pack(prefix, tmp_path / "nowhere" / "b.ccb", name="b", emit=ignore)


def test_a_bundle_inside_its_own_environment_is_refused(prefix):
    with pytest.raises(UsageError, match="inside the environment"):
        pack(prefix, prefix / "b.ccb", name="b", emit=ignore)


def test_an_interrupted_pack_leaves_nothing_and_no_process(prefix, tmp_path):
    (tmp_path / "out").mkdir()
    big = prefix / "share" / "data"
    big.mkdir()
    for number in range(30):
        (big / str(number)).write_bytes(os.urandom(4 << 20))
    program = (
        "import sys; from pathlib import Path; from provision.env.packing.pack import pack\n"
        "pack(Path(sys.argv[1]), Path(sys.argv[2]), name='b', emit=lambda e: print('event', flush=True))\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program, prefix, tmp_path / "out" / "b.ccb"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert run.stdout is not None
    while b"event" not in run.stdout.readline():
        pass
    time.sleep(0.2)  # into the middle of a part: no event marks it
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode != 0
    assert errors.count(b"Traceback") <= 1
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)


def test_symlinked_prefix_is_found_under_both_names(prefix, tmp_path, helpers):
    link = tmp_path / "link"
    link.symlink_to(prefix.parent)
    helpers.write(prefix / "share" / "spelled", f"{link}/env/lib")
    manifest = pack(link / "env", tmp_path / "b.ccb", name="b", emit=ignore)
    assert manifest.source_prefix == f"{link}/env"
    assert (str(prefix), "") in manifest.relocations
    assert {"share/spelled", "bin/hello"} <= set(marks(manifest))


def test_bundles_are_plain_tar(packed):
    with tarfile.open(packed) as bundle:
        names = bundle.getnames()
    assert names[0] == "clusterctl-bundle"
    assert names[-3:] == ["folders.tar.zst", "prefix-files.tar.zst", "manifest.json"]


def test_facts(packed):
    manifest = open_bundle(packed).manifest
    assert manifest.python == "3.11.7"
    assert manifest.platform.startswith("linux-")
    assert {package.kind for package in manifest.packages} == {"conda", "pypi", "editable"}
    assert manifest.versions == dict.fromkeys(("torch", "deepspeed", "llamafactory", "cuda", "nccl"))
    assert Path(manifest.source_prefix).is_dir()
