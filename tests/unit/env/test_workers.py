import os
import signal

import pytest

from provision.env import chunks, scan
from provision.env.marks import Seeking
from provision.env.prefixes import Search
from provision.env.workers import Workers
from provision.errors import BundleError, UsageError


@pytest.fixture
def parts(tmp_path):
    for number in range(200):
        (tmp_path / f"{number:03}").write_text("x" * number)
    found = scan.walk(tmp_path, "", leave_out=lambda *_: False).found
    return [chunks.Part("p", (one,) * 50) for one in found]


def seeking():
    return Seeking(Search((("/opt/env", ""),)))


def test_results_come_in_order(parts):
    with Workers(seeking(), 3) as workers:
        assert [part for part, _ in workers.seal(parts)] == parts


@pytest.mark.parametrize("_time", range(5))
def test_an_error_stops_the_others_and_is_the_one_that_is_raised(parts, _time):
    os.truncate(parts[20].found[0].source, 1)
    with pytest.raises(BundleError, match="020 changed"), Workers(seeking(), 2) as workers:
        list(workers.seal(parts))


def test_a_killed_worker_is_an_error_of_its_own(parts):
    with Workers(seeking(), 1) as workers:
        os.kill(workers._all[0].pid, signal.SIGKILL)
        with pytest.raises(UsageError, match="was killed") as error:
            list(workers.seal(parts))
    assert "memory" in error.value.hint


def test_leaving_early_is_no_error(parts):
    with Workers(seeking(), 2) as workers:
        next(workers.seal(parts))
