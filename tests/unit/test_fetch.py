"""Files that come from nodes: whatever a node sends, and with whichever programs it lists its files."""

from __future__ import annotations

import base64
import io
import os
import shutil
import subprocess
import tarfile
from types import SimpleNamespace

import pytest

from provision.errors import ClusterctlError, UsageError
from provision.model import Node, Result
from provision.transfer import fetch as fetching
from provision.transfer.fetch import RemoteFile, UnrequestedFile, fetch, lacking, list_files

NODE = Node("node01", "10.0.0.1")
BUSYBOX = ("cat", "find", "stat", "tar", "xargs", "base64", "head", "sh", "grep")


class Busybox:
    """A node that has busybox's programs and no others."""

    node = NODE

    def __init__(self, folder, programs=BUSYBOX):
        folder.mkdir()
        for name in programs:
            (folder / name).symlink_to(shutil.which("busybox"))
        self.path = str(folder)

    def run(self, script, *, stdin=None, on_line=None, **_):
        done = subprocess.run(
            [f"{self.path}/sh", "-c", script],
            input=b"".join(stdin or ()),
            capture_output=True,
            check=False,
            timeout=60,
            env={"PATH": self.path},
        )
        out = done.stdout.decode("utf-8", "surrogateescape")
        for line in out.splitlines() if on_line else ():
            on_line(line)
        return Result(done.returncode, "" if on_line else out, done.stderr.decode())


@pytest.fixture
def there(tmp_path):
    folder = tmp_path / "there"
    (folder / "sub dir").mkdir(parents=True)
    (folder / "sub dir" / "-ünï\nfile").write_bytes(os.urandom(50_000))
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "empty").touch()
    (folder / "big").write_bytes(bytes(300_000))
    os.link(folder / "big", folder / "twin")
    return folder


@pytest.mark.skipif(shutil.which("busybox") is None, reason="busybox is not installed here")
class TestBusybox:
    def test_files_come_from_a_node_with_busybox(self, there, tmp_path):
        many = there / ("x" * 200)
        many.mkdir()
        for number in range(1500):  # more than one call of tar takes
            (many / f"{number:0200}").touch()
        node, here = Busybox(tmp_path / "bin"), tmp_path / "here"
        found = list_files(node, str(there))
        assert len(found) == 1504
        fetch(node, str(there), found, here)
        for name in found:
            assert (here / name).read_bytes() == (there / name).read_bytes()
        assert lacking(found, here) == {}

    def test_node_that_cannot_list_files_is_reported(self, there, tmp_path):
        node = Busybox(tmp_path / "bin", [name for name in BUSYBOX if name != "stat"])
        with pytest.raises(ClusterctlError, match=r"node01: the files in .* cannot be listed: .* install findutils"):
            list_files(node, str(there))

    def test_missing_folder_has_no_files(self, tmp_path):
        assert list_files(Busybox(tmp_path / "bin"), "/nowhere") == {}


def sending(*members):
    """A node that sends these names with these sizes, or links to names."""

    def run(_, *, stdin, on_line):
        list(stdin)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for name, content in members:
                info = tarfile.TarInfo(name)
                if isinstance(content, str):
                    info.type, info.linkname = tarfile.LNKTYPE, content
                else:
                    info.size = content
                archive.addfile(info, io.BytesIO(b"x" * info.size))
        data = stream.getvalue()
        for at in range(0, len(data), 45_000):
            on_line(base64.b64encode(data[at : at + 45_000]).decode())
        return Result(0, "")

    return SimpleNamespace(node=NODE, run=run)


def test_grown_file_is_kept_up_to_its_listed_size(tmp_path):
    assert fetch(sending(("run.log", 100)), "/there", {"run.log": RemoteFile(60, 0)}, tmp_path) == 60
    assert (tmp_path / "run.log").stat().st_size == 60


def test_a_node_that_sends_more_than_it_listed_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "GROWN", 1 << 20)
    with pytest.raises(UnrequestedFile, match="node01: it sent more than it had listed"):
        fetch(sending(("a", 8 << 20)), "/there", {"a": RemoteFile(10, 0)}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_links_cost_no_more_than_was_listed(tmp_path):
    wanted = {"a": RemoteFile(1000, 0), **{f"l{number}": RemoteFile(0, 0) for number in range(9)}}
    fetch(sending(("a", 1000), *((f"l{number}", "a") for number in range(9))), "/there", wanted, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 1000


def test_file_sent_twice_is_refused(tmp_path):
    with pytest.raises(UnrequestedFile, match="sent 'a' twice"):
        fetch(sending(("a", 5), ("a", 5)), "/there", {"a": RemoteFile(5, 0)}, tmp_path)


def test_files_larger_than_the_free_space_are_refused_before_the_transfer(tmp_path):
    wanted = {"a": RemoteFile(10**18 - 1, 0)}
    with pytest.raises(UsageError, match=r"B are needed, and .* are free") as caught:
        fetch(SimpleNamespace(node=NODE, run=None), "/there", wanted, tmp_path / "deep" / "er")
    assert "--to" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    assert fetching.RUNNING == []


def test_fetches_that_run_at_once_share_the_space(tmp_path, monkeypatch):
    free = 1 << 30
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
    half = {"a": RemoteFile(free * 6 // 10, 0)}

    def second(_, **__):
        with pytest.raises(UsageError, match="are needed"):
            fetch(SimpleNamespace(node=NODE, run=None), "/there", half, tmp_path / "2")
        return Result(0, "")

    with pytest.raises(ClusterctlError, match="incomplete"):
        fetch(SimpleNamespace(node=NODE, run=second), "/there", half, tmp_path / "1")
