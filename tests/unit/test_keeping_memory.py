"""Checkpoints in RAM: what reaches the disk, in which order, whatever the program and the disk do."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import eventually, plan_of

from trainer.agent.keeping import ram as ram_module
from trainer.agent.keeping.memory import Memory, rescue
from trainer.agent.keeping.moving import is_written
from trainer.agent.run_files import NodePlan


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def plan(tmp_path):
    data = plan_of(resume={"output": "out", "known": True}, copies={"memory": True})
    return NodePlan(data, tmp_path, tmp_path / "plan.json")


@pytest.fixture
def make(plan, base, disk):
    made = []

    def start():
        said = []
        memory = Memory(plan, said.append, base)
        folder = memory.prepare()
        assert folder is not None, said
        memory.said = said
        made.append(memory)
        return memory

    yield start
    for memory in made:
        memory.finish()


def save(folder, name, weights=b"w" * 100):
    path = folder / name
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(weights)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": int(name.rpartition("-")[2])}))
    return path


def is_linked(path):
    return path.is_symlink() and path.exists()


def test_a_file_that_is_open_for_writing_is_not_replaced(make, disk):
    """A program may pause in the middle of a file for longer than two looks."""
    memory = make()
    path = save(memory.folder, "checkpoint-1")
    with (path / "optimizer.pt").open("wb", buffering=0) as file:
        file.write(b"first")
        assert is_written(path / "optimizer.pt")
        eventually(lambda: is_linked(path / "model.safetensors"))
        eventually(lambda: is_linked(path / "trainer_state.json"))
        assert not (path / "optimizer.pt").is_symlink()
        file.write(b"second")
    assert not is_written(path / "optimizer.pt")
    assert memory.finish() is None
    assert (disk / "checkpoint-1/optimizer.pt").read_bytes() == b"firstsecond"


def test_a_checkpoint_that_is_renamed_after_a_part_is_on_the_disk_is_complete(make, disk):
    memory = make()
    path = save(memory.folder, "tmp-checkpoint-1")
    eventually(lambda: is_linked(path / "model.safetensors"))
    path.rename(memory.folder / "checkpoint-1")
    eventually((disk / "checkpoint-1/model.safetensors").exists)
    assert (memory.folder / "checkpoint-1/model.safetensors").read_bytes() == b"w" * 100
    assert memory.finish() is None
    assert (disk / "checkpoint-1/model.safetensors").read_bytes() == b"w" * 100
    assert not (disk / "tmp-checkpoint-1").exists()


def test_the_disk_keeps_a_deleted_checkpoint_until_it_has_the_next_one(make, disk):
    memory = make()
    old = save(memory.folder, "checkpoint-1")
    eventually(lambda: is_linked(old / "model.safetensors") and is_linked(old / "trainer_state.json"))
    new = save(memory.folder, "checkpoint-2")
    with (new / "optimizer.pt").open("wb"):  # it is not finished
        for name in ("model.safetensors", "trainer_state.json"):
            (old / name).unlink()
        old.rmdir()
        eventually(lambda: is_linked(new / "model.safetensors"))
        assert (disk / "checkpoint-1/model.safetensors").is_file()
    eventually(lambda: not (disk / "checkpoint-1").exists())
    assert (disk / "checkpoint-2/model.safetensors").is_file()


def test_what_the_disk_refuses_stays_in_memory_until_the_next_attempt(make, plan, base, disk):
    memory = make()
    (disk / "checkpoint-1").write_text("in the way")
    save(memory.folder, "checkpoint-1")
    why = memory.finish()
    assert "could not be moved to the disk" in why
    assert "clusterctl resume r" in why
    assert (memory.folder / "checkpoint-1/model.safetensors").is_file()
    (disk / "checkpoint-1").unlink()
    make()
    assert (disk / "checkpoint-1/model.safetensors").read_bytes() == b"w" * 100


def test_a_folder_that_cannot_be_read_is_not_removed(make, base, disk, monkeypatch):
    memory = make()
    save(memory.folder, "checkpoint-1")
    memory.finish()
    memory = make()
    path = save(memory.folder, "checkpoint-2")
    scan = os.scandir

    def refuse(where="."):
        if str(where).endswith("checkpoint-2"):
            raise PermissionError(13, "refused", str(where))
        return scan(where)

    monkeypatch.setattr(os, "scandir", refuse)
    assert "refused" in memory.finish()
    monkeypatch.undo()
    assert (path / "model.safetensors").is_file()


def test_a_pointer_on_the_disk_names_only_what_is_there(make, disk):
    save(disk, "global_step-1")
    (disk / "latest").write_text("global_step-1")
    memory = make()
    new = save(memory.folder, "global_step-2")
    with (new / "optimizer.pt").open("wb"):
        (memory.folder / "latest").write_text("global_step-2")
        eventually(lambda: is_linked(new / "model.safetensors"))
        assert (disk / "latest").read_text() == "global_step-1"
    eventually(lambda: (disk / "latest").read_text() == "global_step-2")
    assert (disk / "global_step-2/optimizer.pt").exists()


def test_a_link_to_the_newest_checkpoint_reaches_the_disk(make, disk):
    memory = make()
    save(memory.folder, "checkpoint-1")
    (memory.folder / "last").symlink_to("checkpoint-1")
    assert memory.finish() is None
    assert (disk / "last").readlink() == Path("checkpoint-1")


def test_a_file_that_changes_while_it_is_copied_leaves_the_disk_as_before(make, disk, monkeypatch):
    memory = make()
    path = memory.folder / "last.ckpt"
    path.write_bytes(b"one")
    eventually((disk / "last.ckpt").exists)
    sync, changed = os.fsync, []

    def change(fd):
        if not changed:
            changed.append(path.write_bytes(b"three"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", change)
    path.write_bytes(b"four")
    eventually(lambda: changed)
    assert (disk / "last.ckpt").read_bytes() == b"one"
    eventually(lambda: (disk / "last.ckpt").read_bytes() == b"three")


def test_a_disk_with_coarse_times_gets_each_file_once(make, disk, monkeypatch):
    times = os.utime

    def coarse(path, now=None, *, ns=(0, 0)):
        times(path, now) if not any(ns) else times(path, ns=tuple(each // 10**9 * 10**9 for each in ns))

    monkeypatch.setattr(os, "utime", coarse)
    memory = make()
    path = save(memory.folder, "checkpoint-1")
    eventually(lambda: is_linked(path / "model.safetensors"))
    assert (disk / "checkpoint-1/model.safetensors").stat().st_mtime_ns % 10**9 == 0


def test_files_beside_nested_checkpoints_are_visible_and_kept(make, disk):
    save(disk, "version_0/checkpoint-1")
    (disk / "version_0/metrics.csv").write_text("before\n")
    memory = make()
    with (memory.folder / "version_0/metrics.csv").open("a") as file:
        file.write("after\n")
    memory.finish()
    assert (disk / "version_0/metrics.csv").read_text() == "before\nafter\n"


def test_unfinished_files_of_a_killed_agent_are_removed(make, disk):
    kept = save(disk, "checkpoint-1") / ".clusterctl-copy-memory-n1-0123"
    stale = disk / "checkpoint-1/.clusterctl-copy-memory-n0-0123"
    for path in (kept, stale):
        path.write_text("half")
    make()
    assert kept.exists()
    assert not stale.exists()


def test_a_folder_in_memory_that_is_a_link_is_not_emptied(make, plan, base, disk, tmp_path):
    memory = make()
    assert memory.finish() is None
    other = tmp_path / "other"
    other.mkdir()
    (other / ".clusterctl").touch()
    (other / "file").write_text("x")
    memory.folder.symlink_to(other)
    assert not rescue(plan, base)
    assert (other / "file").exists()
    memory.folder.unlink()


def test_the_file_system_with_huge_pages_is_used_where_it_is_mounted(monkeypatch, tmp_path):
    monkeypatch.setattr(ram_module, "HUGE", Path("/proc"))
    assert ram_module.file_system() == Path("/proc")
    monkeypatch.setattr(ram_module, "HUGE", tmp_path)
    assert ram_module.file_system() == ram_module.SHM
    monkeypatch.setattr(ram_module, "HUGE", tmp_path / "missing")
    assert ram_module.file_system() == ram_module.SHM


def test_what_an_agent_left_is_moved_from_both_file_systems(monkeypatch, plan, tmp_path, disk):
    for name in ("HUGE", "SHM"):
        base = tmp_path / name
        base.mkdir()
        monkeypatch.setattr(ram_module, name, base)
        folder = ram_module.folder_of(plan, base)
        folder.mkdir(parents=True)
        (folder / ".clusterctl").touch()
        (folder / name).write_text(name)
    assert rescue(plan)
    assert [(disk / name).read_text() for name in ("HUGE", "SHM")] == ["HUGE", "SHM"]
    assert not rescue(plan)
