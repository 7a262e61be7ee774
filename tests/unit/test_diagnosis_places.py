"""A diagnosis names the run, the file, the line, the traceback, and the rank at fault."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for recorded_runs; last, so that it hides no module

from recorded_runs.cases import FOLDER, case

from provision.diagnosis import Evidence, arrivals, diagnose, reading
from provision.diagnosis.arrivals import find_arrival, name_ranks
from provision.errors import UsageError
from provision.render import render
from provision.summaries.diagnosis import diagnosis_output
from provision.tasks import diagnose as task

MARK = "@clusterctl:0123456789abcdef"
TRACEBACK = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 90, in <module>
    main()
  File "/home/ann/train.py", line 80, in main
    run(data)
  File "/home/ann/loop.py", line 70, in run
    step(batch)
  File "/home/ann/loop.py", line 60, in step
    return fetch(batch)
  File "/home/ann/data.py", line 50, in fetch
    return batch["input_ids"]
           ~~~~~^^^^^^^^^^^^^
KeyError: 'input_ids'
"""


def logs(tmp_path, **texts):
    paths = []
    for name, text in texts.items():
        paths.append(tmp_path / f"{name}.log")
        paths[-1].write_text(text)
    return task.diagnose_files(paths)


def shown(result):
    return diagnosis_output(result)[1]


def at(place):
    """The line that a place names."""
    path, number = re.fullmatch(r"(.+), line (\d+)", place).groups()
    return Path(path).read_text().split("\n")[int(number) - 1]


def test_the_run_is_named():
    assert shown(diagnose(case("python_exception").evidence)).splitlines()[0] == "run python_exception: failed"


def test_the_commands_of_the_advice_name_the_run_and_the_node():
    text = " ".join(shown(diagnose(case("node_lost").evidence)).split())
    assert "clusterctl resume node_lost --exclude node02" in text
    assert not re.search(r"\b(RUN|NODE)\b", text)


def test_unexplained_last_lines_name_their_file(tmp_path):
    result = logs(tmp_path, train="one\ntwo\nexits with return code = 3\n")
    assert result.verdict.first is None
    assert at(result.verdict.place) == "exits with return code = 3"
    assert f"until {result.verdict.place}" in " ".join(shown(result).split())


def test_the_last_frames_of_the_rank_that_failed_first_are_shown(tmp_path):
    other = TRACEBACK.replace("KeyError: 'input_ids'", "RuntimeError: Connection closed by peer").replace(
        "loop.py", "other.py"
    )
    mixed = "".join(
        f"[rank{rank}]: {row}\n"
        for pair in zip(TRACEBACK.splitlines(), other.splitlines(), strict=True)
        for rank, row in zip((3, 0), pair, strict=True)
    )
    result = logs(tmp_path, train=f"start\n{mixed}")
    text = shown(result)
    assert (result.verdict.rank, result.verdict.first.cause.id) == (3, "python.exception")
    assert 'File "/home/ann/data.py", line 50, in fetch' in text
    assert 'File "/home/ann/train.py", line 80, in main' in text
    assert "line 90" not in text  # the innermost four
    assert "other.py" not in text
    assert text.index("line 80") < text.index("line 50") < text.rindex("KeyError: 'input_ids'\n")
    assert at(result.verdict.first.place) == "[rank3]: KeyError: 'input_ids'"
    assert f"in {tmp_path / 'train.log'}, line " in " ".join(text.split())
    data = json.loads(json.dumps(diagnosis_output(result)[0]))["verdict"]
    assert data["traceback"][0].strip() == 'File "/home/ann/train.py", line 80, in main'
    assert data["place"] == result.verdict.first.place


@pytest.mark.parametrize(
    "text", ["KeyError: 'x'\n", "  indented\nKeyError: 'x'\n", "Traceback\n" * 3 + "KeyError: 'x'\n"]
)
def test_an_exception_without_a_traceback_shows_none(tmp_path, text):
    assert logs(tmp_path, train=text).verdict.first.before == ()


@pytest.mark.parametrize("limit", [10, 100, 350, 1000, 10**6])
def test_line_numbers_count_from_the_start_of_a_partly_read_file(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(task, "FILE_LIMIT", limit)
    result = logs(tmp_path, train="".join(f"line {number}\n" for number in range(50)) + "KeyError: 'x'\n" * 2)
    if result.verdict is None:
        assert limit == 10
    else:
        assert at(result.verdict.first.place) == "KeyError: 'x'"


@pytest.mark.parametrize("shell", [["dash"], ["bash", "--posix"], ["busybox", "sh"]], ids=lambda shell: shell[0])
@pytest.mark.parametrize("limit", [40, 10**6])
def test_line_numbers_of_a_node_are_those_of_its_file(tmp_path, shell, limit):
    (tmp_path / "run.log").write_text("one\n" * 30 + "KeyError: 'x'\nlast\n")
    (tmp_path / "agent.log").write_text("the agent's own\n")
    text = render("run/evidence.sh.j2", logs=str(tmp_path), mark=MARK, limit=limit)
    answer = subprocess.run([*shell, "-c", text], capture_output=True, text=True, timeout=60, check=True).stdout
    files = {**task.split(answer, MARK), "where": str(tmp_path)}
    record = reading.record("node01", files)
    result = diagnose(Evidence((record,), "r", "failed"))
    assert result.verdict.first.place == f"{tmp_path}/run.log, line 31"
    assert [line.text for line in record.agent] == ["the agent's own"]


def test_local_copy_is_named_with_its_path(tmp_path):
    (tmp_path / "rank1.log").write_text("x\nKeyError: 'x'\n")
    (result,) = [diagnose(Evidence((reading.record("node01", task.local_files(tmp_path)),), "r", "failed"))]
    assert at(result.verdict.first.place) == "KeyError: 'x'"
    (tmp_path / "rank1.log").unlink()
    assert task.local_files(tmp_path) == {}


# Times without a year


GLOG = "[rank{}]:[E{}{} 0{}:00:00.000000000 x.cpp:1] {}\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_files_without_years_count_in_the_order_in_which_they_are_named(tmp_path):
    """The second file's clock shows an earlier time, without a meaning: the clocks are unrelated."""
    one = GLOG.format(0, 11, 22, 9, "KeyError: 'x'") + "KeyError: 'first'\n"
    two = GLOG.format(1, 11, 22, 3, "y") + "KeyError: 'second'\n"
    for names, first in ((("a", "b"), "KeyError: 'first'"), (("b", "a"), "KeyError: 'second'")):
        texts = {"a": one, "b": two}
        result = logs(tmp_path, **{name: texts[name] for name in names})
        assert result.verdict.by_file
        assert result.verdict.first.text == first
        assert "no common time" in shown(result)
        assert "later)" not in shown(result)


@pytest.mark.parametrize(
    "stamp",
    ["Nov 22 07:15:00 gpu01 train[4]: ", "[E1122 07:15:00.123456789 x.cpp:1] ", ""],
    ids=["syslog", "glog", "none"],
)
@pytest.mark.parametrize("year", ["2024-06-01 16:22:16,125 ", "2026-11-22T07:15:00.123 "])
def test_a_log_without_years_is_not_compared_with_one_that_has_them(tmp_path, stamp, year):
    """It was taken for 1970, or for the beginning of time, so that it always failed first."""
    dated = f"{year}start\nKeyError: 'dated'\n"
    bare = f"{stamp}start\nKeyError: 'bare'\n"
    assert logs(tmp_path, a=dated, b=bare).verdict.first.text == "KeyError: 'dated'"
    assert logs(tmp_path, b=bare, a=dated).verdict.first.text == "KeyError: 'bare'"
    assert logs(tmp_path, b=bare, a=f"{year}start\n{OOM}\n").verdict.first.cause.id == "cuda.oom"  # explains more


def test_logs_with_years_are_compared(tmp_path):
    early, late = "2026-11-22T07:15:00.123 x\nKeyError: 'a'\n", "2026-11-22T07:15:20.123 x\nKeyError: 'b'\n"
    result = logs(tmp_path, a=late, b=early)
    assert result.verdict.first.text == "KeyError: 'a'"
    assert not result.verdict.by_file


def test_a_year_that_comes_later_in_the_file_counts_for_its_beginning():
    one, two = reading.log_lines(GLOG.format(0, 11, 22, 7, "x") + "2026-11-22T07:15:00.000 y", "n")
    assert two.time - one.time == 900


def test_syslogs_times_are_read_and_the_year_may_turn():
    one, two, three = reading.log_lines("Dec 31 23:59:58 x\nJan  1 00:00:01 y\nJan  1 00:00:02.5 z", "n")
    assert (two.time - one.time, three.time - two.time) == (3, 1.5)


# Collectives

WATCHDOG = (
    "[rank{0}]:[E1123 01:11:55.016827524 ProcessGroupNCCL.cpp:689] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600084 "
    "milliseconds before timing out.\n"
)
DUMP = (
    "[rank{0}]:[E1123 01:11:55.1 x.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Received a dump signal due to a "
    "collective timeout from  rank 0. Last enqueued NCCL work: {1}, last completed NCCL work: {1}.\n"
)
OLD = (
    "[rank{0}]:[E321 02:07:08.4 x.cpp:1] [PG 1 Rank {0}] Exception (either an error or timeout) detected by watchdog "
    "at work: {1}, last enqueued NCCL work: {1}, last completed NCCL work: {2}.\n"
)
DESYNC = "[rank0]:[E1 x] [{0}] finished collective #{1}, but didn't join collective #{2} (count from 1)\n"


def judged(**texts):
    records = tuple(
        reading.record(name, {"run.log": text}, node_rank=place, first_rank=2 * place)
        for place, (name, text) in enumerate(texts.items())
    )
    return Evidence(records)


@pytest.mark.parametrize(
    ("a", "b", "missing"),
    [
        (WATCHDOG.format(0, 7), WATCHDOG.format(2, 7) + DUMP.format(3, 6) + DUMP.format(1, 7), (3,)),
        (WATCHDOG.format(0, 7), DUMP.format(3, 6) + DUMP.format(2, 6), (2, 3)),
        (OLD.format(0, 7, 6) + WATCHDOG.format(0, 7), OLD.format(2, 5, 4) + WATCHDOG.format(1, 7), (2,)),
        (WATCHDOG.format(0, 7) + DESYNC.format(3, 6, 7), WATCHDOG.format(2, 7), (3,)),
        (WATCHDOG.format(0, 7), WATCHDOG.format(2, 7) + "[rank3]: {'loss': 2.1}\n", (3,)),  # prints nothing of it
        (WATCHDOG.format(0, 7), WATCHDOG.format(2, 7), ()),
    ],
    ids=["last enqueued", "a whole node", "older torch", "desync report", "silent", "unknown"],
)
def test_the_rank_that_did_not_arrive_is_named(a, b, missing):
    for texts in ({"a": a, "b": b}, {"b": b, "a": a}):
        met = find_arrival(judged(**texts))
        assert (met.number, met.operation, met.missing) == (7, "ALLREDUCE", missing)


@pytest.mark.parametrize("write", [pickle.dumps, lambda dump: json.dumps(dump).encode()], ids=["pickle", "json"])
def test_the_flight_recorder_names_the_rank_too(tmp_path, write):
    (tmp_path / "a.log").write_text(WATCHDOG.format(0, 7) + DUMP.format(0, 7))
    dumps = []
    for rank, enqueued in ((1, 7), (2, 5), (3, 7)):
        status = {"last_enqueued_collective": str(enqueued), "last_completed_collective": enqueued - 1}
        dumps.append(tmp_path / f"nccl_trace_rank_{rank}")
        dumps[-1].write_bytes(write({"version": "2.10", "entries": [{"sizes": [[8]]}], "pg_status": {"0": status}}))
    verdict = task.diagnose_files([tmp_path / "a.log", *dumps]).verdict
    assert (verdict.node, verdict.rank) == ("nccl_trace_rank_2", 2)


@pytest.mark.parametrize(
    "data",
    [pickle.dumps({"pg_status": Path("x")}), pickle.dumps({"pg_status": {"0": {}}})[:-3], pickle.dumps(["pg_status"])],
    ids=["a class", "cut short", "a list"],
)
def test_unexpected_content_of_a_dump_runs_no_code(tmp_path, data):
    (tmp_path / "nccl_trace_rank_1").write_bytes(data)
    with pytest.raises(UsageError, match="not a flight recorder dump"):
        task.diagnose_files([tmp_path / "nccl_trace_rank_1"])


class Touches:
    """Unpickling one writes a file, and gives what a dump holds."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.open, (str(self.path), os.O_CREAT)


def test_a_dump_that_calls_a_function_does_not_call_it(tmp_path):
    dump = {"pg_status": {}, "entries": [Touches(tmp_path / "owned")]}
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(dump))
    with pytest.raises(UsageError, match="not a flight recorder dump"):
        task.diagnose_files([tmp_path / "nccl_trace_rank_1"])
    assert not (tmp_path / "owned").exists()


def test_the_verdict_is_about_the_rank_that_did_not_arrive(tmp_path):
    result = logs(tmp_path, a=WATCHDOG.format(0, 7), b=DUMP.format(1, 6))
    assert (result.verdict.node, result.verdict.rank) == ("b.log", 1)
    text = " ".join(shown(result).split())
    assert text.startswith(
        "b.log rank 1 did not arrive: rank 0 waited 600084 ms for ALLREDUCE, which rank 1 did not join"
    )
    assert "clusterctl logs RUN --rank 1" in text


def test_waiting_rank_is_not_blamed_without_evidence(tmp_path):
    text = " ".join(shown(logs(tmp_path, a=WATCHDOG.format(0, 7), b=WATCHDOG.format(1, 7))).split())
    assert text.startswith("the logs do not say which rank did not arrive: rank 0 waited 600084 ms for ALLREDUCE")
    assert "failed first" not in text


def test_ranks_are_named():
    texts = {(3,): "rank 3", (0, 1, 2): "ranks 0-2", (0, 1, 2, 5, 7): "ranks 0-2, 5 and 7", (1, 4): "ranks 1 and 4"}
    assert {ranks: name_ranks(ranks) for ranks in texts} == texts


# Nodes that fell silent


def test_a_node_without_other_evidence_is_lost():
    assert diagnose(case("node_lost").evidence).verdict.first.cause.id == "node.lost"


def test_crash_of_an_agent_is_not_mistaken_for_a_node_failure():
    result = diagnose(case("agent_failed").evidence)
    assert result.verdict.first.cause.id == "agent.failed"
    assert "switched off" not in shown(result)
    number = int(result.verdict.first.place.rpartition(" ")[2])
    text = (FOLDER / "agent_failed/node01/agent.log").read_text().split("\n")
    assert text[number - 1].startswith("RecursionError")


def test_a_machine_that_was_booted_after_the_silence_was_down(tmp_path):
    record = case("node_silent").evidence.records
    assert diagnose(case("node_silent").evidence).verdict.first.cause.id == "node.silent"
    booted = reading.record("node01", {"run.log": "x", "machine": "clock 1795332000 60.5\n"})
    assert diagnose(Evidence((booted, record[1]), "r", "failed")).verdict.first.cause.id == "node.lost"


# What others wrote

LONG = "9" * 5000


@pytest.mark.parametrize(
    "row",
    [
        "2024-13-01 00:00:00 x", "0000-01-01 00:00:00 x", "2024-99-01T00:00:00.000Z [0] x", "Mar 99 99:99:99 x",
        "[E9999 07:15:00.123456 x", f"2024-01-01T00:00:00.000Z [{LONG}] x", f"[rank{LONG}]: x",
        f"  rank      : {LONG} (local_rank: 3)", f"failed (exitcode: -9) local_rank: {LONG} (pid: 3)",
        f"[Rank {LONG}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={LONG}, OpType=A, ran for 3 ms",
    ],
    ids=lambda row: row[:20],
)  # fmt: skip
def test_dates_and_ranks_that_do_not_exist_are_text(row):
    machine = f"cores {LONG}\nclock {LONG} {LONG}\nlink eth0 {LONG}\n"
    for files in ({"run.log": row}, {f"rank{LONG}.log": row, "machine": machine, "kernel": f"[{LONG}.5] x"}):
        diagnosis_output(diagnose(Evidence((reading.record("n", files),), "r", "failed")))


@pytest.mark.parametrize(
    "event",
    [
        {"event": "started", "attempt": 10**9},
        {"event": "exit", "attempt": 10**12, "rc": 1},
        {"event": "hang", "kind": "x", "text": f"elsewhere than the others: rank {LONG}"},
        {"event": "end", "why": {"node": "x", "rank": 10**30, "text": "t"}, "state": "failed"},
        {"event": "end", "attempt": -5},
    ],
    ids=lambda event: event["event"],
)
def test_an_event_of_any_size_is_judged_at_once(event):
    record = reading.record("n", {"events.jsonl": json.dumps(event)})
    assert len(diagnose(Evidence((record,), "r", "failed")).earlier) <= 50


def test_a_recorded_dump_of_the_flight_recorder_is_read():
    """torch 2.13.0 wrote it after two all-reduces (gloo, one process)."""
    path = Path(__file__).parent / "recorded_logs" / "nccl_trace_rank_0"
    assert arrivals.is_dump(path.name, path.read_bytes())
    text = arrivals.dump_lines(path.name, path.read_bytes())
    assert "[PG ID 0 PG GUID 0 Rank 0]" in text
    assert "last enqueued work: 2, last completed work: 2" in text
