"""A real, small disk fills: this machine's while a bundle is packed, made from an archive or written; and a run's."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from tiny_env import make_env

from provision.env.packing.pack import PackOptions, pack
from provision.errors import UsageError
from provision.model import ignore
from provision.tasks.bundles import bundle_of, pack_archive
from trainer.agent.disks import LOW, measure

pytestmark = pytest.mark.root


@pytest.fixture
def disk(tmp_path):
    """A disk of 2 MB, and what makes it larger."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], check=True)
    yield place, lambda: subprocess.run(["mount", "-o", "remount,size=99m", place], check=True)
    subprocess.run(["umount", place], check=True)


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    prefix = make_env(tmp_path_factory.mktemp("full") / "tiny")
    (prefix / "share/more").write_bytes(os.urandom(6 << 20))
    return prefix


def test_full_disk_is_named_leaves_nothing_and_a_rerun_completes(env, disk, tmp_path):
    place, enlarge = disk
    bundle = tmp_path / "tiny.ccb"
    pack(env, bundle, name="tiny", emit=ignore)
    commands = (
        lambda: pack(env, place / "tiny.ccb", name="tiny", emit=ignore),
        lambda: pack(env, place / "parts.ccb", name="tiny", emit=ignore, options=PackOptions(split=1 << 20)),
        lambda: pack_archive(str(bundle), environ={}, output=place / "tiny.tar.gz", emit=ignore),
    )
    for command in commands:
        with pytest.raises(UsageError, match=rf"no space left for {place}/.*: \d\.\d\d GB free in {place}"):
            command()
        assert not list(place.iterdir())
    enlarge()
    for command in commands:
        command()


def test_an_archive_that_does_not_fit_unpacked_is_refused_and_leaves_nothing(env, disk):
    place, enlarge = disk
    archive = place / "a.tar.gz"
    zeros = tarfile.TarInfo("share/zeros")
    zeros.size = 30 << 20
    with tarfile.open(archive, "w:gz") as file, Path("/dev/zero").open("rb") as content:
        file.add(env, ".", filter=lambda info: None if info.name == "./share/more" else info)
        file.addfile(zeros, content)
    with pytest.raises(UsageError, match="no space left"):
        bundle_of(archive, emit=ignore)
    assert [path.name for path in place.iterdir()] == ["a.tar.gz"]
    enlarge()
    assert bundle_of(archive, emit=ignore).name == "a.tar.gz.ccb"


def test_the_disk_of_a_run_is_measured_by_its_bytes_and_by_its_files(disk):
    place, _ = disk
    empty = measure(place / "out/later")
    assert (empty.folder, empty.device) == (place, place.stat().st_dev)
    assert empty.free > 0.99
    (place / "x").write_bytes(bytes((2 << 20) - 4096))
    full = measure(place)
    assert full.free < LOW
    assert full.text == "4.1 kB of 2.1 MB free"
    (place / "x").unlink()
    subprocess.run(["mount", "-o", "remount,nr_inodes=100", place], check=True)
    for number in range(99):
        (place / str(number)).touch()
    assert measure(place).text == "0 inodes of 100 inodes free"
