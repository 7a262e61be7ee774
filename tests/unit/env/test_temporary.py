"""A file has a temporary name until it is complete; the next run removes leftovers of a killed one."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from provision.env.bundle.layout import find_bundle
from provision.env.packing import temporary, writer
from provision.env.packing.pack import PackOptions, pack
from provision.errors import UsageError
from provision.model import ignore

ROOT = Path(__file__).parents[3]
OUT_OF = {errno.ENOSPC: r"\d+\.\d\d GB free in", errno.EDQUOT: "your disk quota is used up"}

HANG = """
import sys, time
from pathlib import Path
from provision.env.packing import temporary, writer
def hang():
    print("ready", flush=True)
    time.sleep(600)
out, how = Path(sys.argv[1]), sys.argv[2]
if how == "folder":
    with temporary.create_folder_beside(out) as folder:
        (folder / "inside").mkdir()
        (folder / "inside" / "file").write_text("x")
        hang()
if how == "file":
    with temporary.create_file(out) as file:
        file.write(b"x")
        hang()
with writer.create_output(out, split=int(how)) as file:
    file.write(bytes(2500))
    hang()
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def kill_one(out, how):
    """The leftovers of a run that is killed while it writes."""
    run = subprocess.Popen([sys.executable, "-c", HANG, out, how], stdout=subprocess.PIPE, cwd=ROOT)
    assert run.stdout.readline() == b"ready\n"
    run.send_signal(signal.SIGKILL)
    run.communicate()
    return names(out.parent)


@pytest.mark.parametrize(("how", "left"), [("0", 1), ("1000", 3), ("file", 1), ("folder", 1)])
@pytest.mark.parametrize("split", [0, 1_000_000])
def test_leftovers_of_a_killed_run_are_removed_by_the_next_one(prefix, tmp_path, helpers, how, left, split):
    out = tmp_path / "out" / "llm.ccb"
    out.parent.mkdir()
    helpers.write(out.parent / ".0123abcd-other.ccb", "another's")
    helpers.write(out.parent / ".llm.ccb", "somebody's")
    assert len(kill_one(out, how)) == 2 + left
    pack(prefix, out, name="llm", emit=ignore, options=PackOptions(limit=helpers.LIMIT, split=split))
    parts = ["llm.ccb.000", "llm.ccb.sha256"] if split else ["llm.ccb"]
    assert names(out.parent) == [".0123abcd-other.ccb", ".llm.ccb", *parts]


def test_a_file_that_was_not_completed_is_deleted(tmp_path):
    writing = temporary.create_file(tmp_path / "out")
    writing.__enter__().write(b"x")
    assert writing.__exit__(RuntimeError, RuntimeError(), None) is not True
    assert names(tmp_path) == []


def test_a_link_in_the_place_of_a_leftover_stays(tmp_path):
    (leftover,) = kill_one(tmp_path / "out", "file")
    (tmp_path / leftover).rename(tmp_path / "elsewhere")
    (tmp_path / leftover).symlink_to("elsewhere")
    with temporary.create_file(tmp_path / "out") as file:
        file.write(b"y")
    assert names(tmp_path) == sorted(["elsewhere", leftover, "out"])


@pytest.mark.parametrize("split", [0, 1000])
def test_files_of_a_running_run_stay(tmp_path, split):
    with writer.create_output(tmp_path / "x", split=split) as mine:
        mine.write(bytes(2500))
        mine_at_work = set(names(tmp_path))
        with writer.create_output(tmp_path / "x", split=split) as other:
            other.write(b"other")
        with temporary.create_file(tmp_path / "x") as file:
            file.write(b"file")
        with temporary.create_folder_beside(tmp_path / "x") as folder, temporary.create_file(tmp_path / "x"):
            assert folder.is_dir()
        assert mine_at_work <= set(names(tmp_path))
    assert names(tmp_path) == (["x.000", "x.001", "x.002", "x.sha256"] if split else ["x"])


def test_without_file_locks_nothing_is_removed(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    (tmp_path / ".0123abcd-x").write_text("may be at work")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary.create_file(tmp_path / "x") as file:
        file.write(b"x")
    assert names(tmp_path) == [".0123abcd-x", "x"]


def test_a_file_that_is_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    swept = []

    def lock(descriptor):
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()

    monkeypatch.setattr(temporary, "lock", lock)
    with temporary.create_file(tmp_path / "x") as file:
        file.write(b"x")
    assert len(swept) == 1
    assert (tmp_path / "x").read_bytes() == b"x"


def test_deploy_ignores_the_unfinished_output_of_pack(tmp_path):
    for name in ("llm.ccb", ".abcd1234-llm.ccb", ".abcd1234-llm.ccb.0", ".hidden.ccb"):
        (tmp_path / name).touch()
    assert find_bundle(tmp_path) == tmp_path / "llm.ccb"
    (tmp_path / "llm.ccb").unlink()
    with pytest.raises(UsageError, match="no bundle"):
        find_bundle(tmp_path)


@pytest.mark.parametrize("number", OUT_OF)
def test_full_disk_and_unwritable_folder_are_reported(tmp_path, number):
    out = tmp_path / "out.tar"
    message = rf"no space left for .*out\.tar: {OUT_OF[number]}"
    for writing in (temporary.create_file, temporary.create_folder_beside, writer.create_output):
        with pytest.raises(UsageError, match=message), writing(out):
            raise OSError(number, os.strerror(number))
        with pytest.raises(UsageError, match="cannot write"), writing(tmp_path / "nowhere/out.tar"):
            pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("split", [0, 10_000])
def test_exceeded_quota_while_packing_is_reported_and_leaves_nothing(prefix, tmp_path, helpers, monkeypatch, split):
    real, counted = writer.Output.write, []

    def write(output, data):
        counted.append(data)
        if len(counted) > 20:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(output, data)

    monkeypatch.setattr(writer.Output, "write", write)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match=r"no space left for .*b\.ccb: your disk quota is used up") as error:
        pack(
            prefix,
            tmp_path / "out" / "b.ccb",
            name="b",
            emit=ignore,
            options=PackOptions(limit=helpers.LIMIT, split=split),
        )
    assert "another disk" in error.value.hint
    assert names(tmp_path / "out") == []
