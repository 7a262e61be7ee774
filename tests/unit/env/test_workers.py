import os
import signal

import pytest

from provision.env.bundle.reader import open_bundle
from provision.env.packing import chunks
from provision.env.packing.marks import Seeking
from provision.env.packing.pack import pack
from provision.env.packing.pipeline import Pipeline
from provision.env.packing.workers import Workers, ranges_of
from provision.env.relocation.prefixes import Search
from provision.env.source import scan
from provision.errors import BundleError, UsageError
from provision.model import ignore


@pytest.fixture
def parts(tmp_path):
    for number in range(200):
        (tmp_path / f"{number:03}").write_text("x" * number)
    found = scan.walk(tmp_path, "", leave_out=lambda *_: False).found
    return [chunks.Part(one.path, (one,) * 50, 50 * 1024) for one in found]


def seal(parts, number, kept):
    """Give all parts to as many workers, and note in which order what came of them is kept."""
    with Workers() as workers:
        workers.start(number)
        workers.seek(Seeking(Search((("/opt/env", ""),))))
        pipeline = Pipeline(workers, 50 * 1024)
        for part in parts:
            pipeline.add(part, lambda sealed, _place, part=part: kept.append((part.package, sealed.size)))
        pipeline.finish()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_results_are_kept_in_the_order_of_the_parts(parts, number):
    kept = []
    seal(parts, number, kept)
    assert [name for name, _ in kept] == [part.package for part in parts]
    assert {size for _, size in kept} == {50 * 512, 50 * 1024}  # the empty file, and all others


@pytest.mark.parametrize("_time", range(5))
def test_an_error_stops_the_others_and_is_the_one_that_is_raised(parts, _time):
    os.truncate(parts[20].found[0].source, 1)
    kept = []
    with pytest.raises(BundleError, match="020 changed"):
        seal(parts, 2, kept)
    assert [name for name, _ in kept] == [part.package for part in parts[:20]]


def test_a_killed_worker_is_an_error_of_its_own(parts):
    with Workers() as workers:
        workers.start(1)
        os.kill(workers._all[0].process.pid, signal.SIGKILL)
        with pytest.raises(UsageError, match="was killed") as error:
            workers.submit(parts[0])()
    assert "memory" in error.value.hint


def test_leaving_early_is_no_error(parts):
    with Workers() as workers:
        workers.start(2)
        workers.submit(parts[0])


def test_a_task_that_was_begun_early_is_not_done_again(parts, monkeypatch):
    given = []
    with Workers() as workers:
        workers.start(2)
        submit = workers.submit
        monkeypatch.setattr(workers, "submit", lambda task: given.append(task) or submit(task))
        pipeline = Pipeline(workers, 1 << 20)
        ranges = ranges_of(parts[100].found[0], 10)
        pipeline.begin(ranges)
        sizes = []
        for one in ranges:
            pipeline.add(one, lambda sealed, _place: sizes.append(sealed.size))
        pipeline.finish()
    assert given == ranges
    assert sizes == [10] * 10


def test_only_so_much_is_begun_early_as_memory_may_hold(parts):
    with Workers() as workers:
        workers.start(1)
        pipeline = Pipeline(workers, 10)
        pipeline.begin(ranges_of(parts[199].found[0], 5))
        assert len(pipeline._early) == 12  # of twenty: it holds what it has compressed
        pipeline.add(parts[0], lambda _sealed, _place: None)
        pipeline.finish()


def test_a_chunk_that_cannot_be_written_is_an_error(parts, tmp_path):
    with Workers() as workers:
        workers.start(1)
        _, place = workers.submit(parts[50])()
        place([(str(tmp_path / "nowhere" / "file"), 0, 10)])
        with pytest.raises(FileNotFoundError):
            workers.finish()


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
def test_a_bundle_does_not_depend_on_who_is_ready_first(larger, tmp_path, monkeypatch, split):
    started = []
    start = Workers.start
    monkeypatch.setattr(Workers, "start", lambda self, number: started.append(number) or start(self, number))
    manifests = []
    for processors, name in ((1, "one.ccb"), (3, "three.ccb"), (3, "again.ccb")):
        monkeypatch.setattr("provision.env.packing.pack.processors", lambda count=processors: count)
        manifests.append(pack(larger, tmp_path / name, name="env", emit=ignore, split=split))
        open_bundle(tmp_path / name).verify(ignore)
    assert set(started) == {1, 3}
    assert manifests[0].chunks == manifests[1].chunks == manifests[2].chunks
    assert manifests[0].files == manifests[1].files == manifests[2].files
    assert manifests[0].prefix_files == manifests[1].prefix_files == manifests[2].prefix_files


def test_what_a_worker_finds_is_what_would_be_found_here(larger, tmp_path, monkeypatch):
    whole = pack(larger, tmp_path / "workers.ccb", name="env", emit=ignore)
    monkeypatch.setattr("provision.env.packing.pack._WORTH_WORKERS", 1 << 40)
    alone = pack(larger, tmp_path / "alone.ccb", name="env", emit=ignore)
    assert (whole.files, whole.chunks, whole.glibc) == (alone.files, alone.chunks, alone.glibc)


def test_a_file_that_changes_is_named_by_a_worker_too(larger, tmp_path, helpers, monkeypatch):
    real = scan.environment

    def environment(path, **options):
        tree = real(path, **options)
        helpers.write(larger / "lib" / "part3" / "10.txt", "changed")
        return tree

    monkeypatch.setattr(scan, "environment", environment)
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match=r"part3/10\.txt changed while it was packed"):
        pack(larger, tmp_path / "out" / "b.ccb", name="env", emit=ignore)
    assert not list((tmp_path / "out").iterdir())
