import os
import signal

import pytest

from provision.env.bundle.reader import open_bundle
from provision.env.packing.chunks import Group, split_ranges
from provision.env.packing.detect import PrefixDetector
from provision.env.packing.pack import PackOptions, pack
from provision.env.packing.workers import PREFETCHED, Workers
from provision.env.relocation import Search
from provision.env.source import files
from provision.errors import BundleError, UsageError
from provision.model import ignore

LIMIT = 50 * 1024


@pytest.fixture
def groups(tmp_path):
    for number in range(200):
        (tmp_path / f"{number:03}").write_text("x" * number)
    sources = files.walk(tmp_path, "", skip=lambda *_: False).sources
    return [Group(one.path, (one,) * 50, LIMIT, 50 * one.size) for one in sources]


def started(number, limit=LIMIT):
    """Workers with so many processes, however little there is to compress."""
    workers = Workers(limit, number)
    workers.start(1 << 40)
    return workers


def compress(groups, number, kept):
    """Compress all groups with so many processes, and note in which order their chunks come."""
    with started(number) as workers:
        workers.use_detector(PrefixDetector(Search((("/opt/env", ""),))))
        for group, chunk in workers.compress(groups):
            kept.append((group.package, chunk.size))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_chunks_come_in_the_order_of_the_groups(groups, number):
    kept = []
    compress(groups, number, kept)
    assert [name for name, _ in kept] == [group.package for group in groups]
    assert {size for _, size in kept} == {50 * 512, 50 * 1024}  # the empty file, and all others


@pytest.mark.parametrize("_time", range(5))
def test_an_error_stops_the_others_and_is_the_one_that_is_raised(groups, _time):
    os.truncate(groups[20].sources[0].file, 1)
    kept = []
    with pytest.raises(BundleError, match="020 changed"):
        compress(groups, 2, kept)
    assert [name for name, _ in kept] == [group.package for group in groups[:20]]


def test_a_killed_process_is_an_error(groups):
    with started(1) as workers:
        os.kill(workers.processes[0], signal.SIGKILL)
        with pytest.raises(UsageError, match="was killed") as error:
            next(workers.compress(groups))
    assert "memory" in error.value.hint


def test_early_exit_is_no_error(groups):
    with started(2) as workers:
        next(workers.compress(groups))


def test_a_range_that_was_prefetched_is_not_compressed_again(groups):
    source = groups[100].sources[0]
    ranges = split_ranges(source, 10)
    with started(2, limit=1 << 20) as workers:
        workers.prefetch(ranges)
        first = [next(workers.compress([part])) for part in ranges]
        os.truncate(source.file, 1)  # the next reader notices
        with pytest.raises(BundleError, match="100 changed"):
            next(workers.compress(ranges))
    assert [part for part, _ in first] == ranges
    assert [chunk.size for _, chunk in first] == [10] * 10


def test_only_as_many_ranges_are_prefetched_as_memory_allows(groups):
    source = groups[199].sources[0]
    ranges = split_ranges(source, 5)
    with started(1, limit=10) as workers:
        workers.prefetch(ranges)
        chunks = workers.compress(ranges)
        for _ in range(PREFETCHED - 1):
            next(chunks)
        os.truncate(source.file, 1)
        with pytest.raises(BundleError, match="199 changed"):
            list(chunks)


@pytest.fixture
def larger(prefix, helpers):
    """An environment that is worth several processes: large files and small ones, quick and slow to compress."""
    for number, size in enumerate((20 << 20, 17 << 20, 9 << 20, 5 << 20, 700_000)):
        content = os.urandom(size) if number % 2 else bytes(size)
        helpers.write(prefix / "share" / f"set{number}" / "file.bin", content)
    for number in range(300):
        helpers.write(prefix / "lib" / f"part{number % 7}" / f"{number}.txt", f"{number}\n" * 1000)
    return prefix


@pytest.mark.parametrize("split", [0, 3_000_001])
def test_bundle_does_not_depend_on_the_order_of_workers(larger, tmp_path, monkeypatch, split):
    counts = set()
    start = Workers.start

    def count(self, size):
        start(self, size)
        counts.add(len(self.processes))

    monkeypatch.setattr(Workers, "start", count)
    manifests = []
    for number, name in ((1, "one.ccb"), (3, "three.ccb"), (3, "again.ccb")):
        manifests.append(
            pack(larger, tmp_path / name, name="env", emit=ignore, options=PackOptions(split=split, processes=number))
        )
        open_bundle(tmp_path / name).verify(ignore)
    assert counts == {1, 3}
    assert manifests[0].chunks == manifests[1].chunks == manifests[2].chunks
    assert manifests[0].files == manifests[1].files == manifests[2].files
    assert manifests[0].prefix_files == manifests[1].prefix_files == manifests[2].prefix_files


def test_processes_find_what_one_process_finds(larger, tmp_path):
    whole = pack(larger, tmp_path / "workers.ccb", name="env", emit=ignore)
    alone = pack(larger, tmp_path / "alone.ccb", name="env", emit=ignore, options=PackOptions(processes=0))
    assert (whole.files, whole.chunks, whole.glibc) == (alone.files, alone.chunks, alone.glibc)


def test_a_file_that_changes_is_named_by_a_worker_too(larger, tmp_path, helpers, monkeypatch):
    real = files.walk_environment

    def environment(path, **options):
        tree = real(path, **options)
        helpers.write(larger / "lib" / "part3" / "10.txt", "changed")
        return tree

    monkeypatch.setattr(files, "walk_environment", environment)
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match=r"part3/10\.txt changed while it was read"):
        pack(larger, tmp_path / "out" / "b.ccb", name="env", emit=ignore)
    assert not list((tmp_path / "out").iterdir())
