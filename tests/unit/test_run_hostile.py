"""Whatever a node says about a run, the controller has an answer or an error with a reason: never a traceback."""

from __future__ import annotations

import contextlib
import json
import stat
from pathlib import Path

import pytest
from case_table import every_case
from hypothesis import given
from hypothesis import strategies as st

from provision.diagnosis import reading
from provision.errors import ClusterctlError
from provision.model import Notice
from provision.netbench import failure_reason, pair_rates, parse_event, rows
from provision.run import Facts, fields, readiness, record
from provision.run.checkpoint import newest, sources
from provision.run.follow import OPEN, RANKS, Follower, entry, parsed
from provision.run.found import merge_runs, parse_runs
from provision.summaries.runs import run_data, run_lines, run_output
from provision.tasks.collect import read_offer
from provision.tasks.measures import clock
from provision.tasks.runs import RunStatus, parse_proof
from provision.transfer.fetch import parse_list
from trainer.agent.contract import offers

NESTED = "[" * 5000
DEEP = '{"state": ' + "[" * 985 + "]" * 985 + "}"
NAMES = ["node01", "node02"]

# Any JSON, with numbers and texts that break programs.
ODD = st.sampled_from(
    [
        float("nan"),
        float("inf"),
        -1,
        0,
        True,
        1 << 70,
        -(1 << 70),
        1e308,
        "",
        "\ud800",
        "\n",
        "x" * 30_000,
        [],
        {},
        None,
    ]
)
VALUES = st.recursive(
    ODD | st.integers() | st.floats() | st.text(max_size=20) | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=6,
)


def objects(names):
    """Objects with these fields, each of any kind."""
    return st.dictionaries(st.sampled_from(sorted(names)), VALUES, max_size=8)


STATE = [
    "run",
    "node",
    "node_rank",
    "nnodes",
    "state",
    "phase",
    "step",
    "total",
    "loss",
    "attempt",
    "attempts",
    "checkpoint",
    "port",
    "why",
    "left",
    "saved",
    "resumable",
    "world_size",
    "uid",
    "began",
    "time",
    "pid",
    "start",
    "guard",
    "guard_start",
    "boot_id",
    "command",
    "expected",
    "measured",
    "slow",
    "full",
]
SAMPLE = [
    "time",
    "step",
    "loss",
    "gpus",
    "cpu",
    "network",
    "infiniband",
    "memory_available",
    "memory_total",
    "disk_free",
]
EVENTS = ["attempt", "dropped", "end", "exit", "gone", "hang", "log", "notice", "peer", "phase", "progress", "started"]
EVENT = [
    "attempt",
    "checkpoint",
    "port",
    "pid",
    "rank",
    "line",
    "step",
    "total",
    "loss",
    "lr",
    "epoch",
    "phase",
    "lines",
    "text",
    "level",
    "kind",
    "stacks",
    "node",
    "state",
    "rc",
    "signal",
    "stopped",
    "error",
    "left",
    "why",
    "saved",
    "time",
    "at",
]


def shown(answer):
    """All that ``status`` prints of an answer."""
    runs = merge_runs([answer])
    run_lines(runs, 1e9, {"node01": 1})
    for run in runs.values():
        json.dumps(run_data(run, 1e9))
        assert run_output(RunStatus(run, {}), 1e9)
    return runs


def answer(state, *more):
    return parse_runs(
        "node01", "\n".join(["me 0", "boot b", "part run-1/logs/node0 root", f"state {state}", *more]), NAMES
    )


@pytest.mark.parametrize("state", [NESTED, DEEP, "{", "\x00", "1" * 5000, '{"node_rank": ' + "1" * 5000 + "}"])
def test_invalid_state_is_no_run(state):
    assert shown(answer(state)) == {}


@given(objects(STATE), objects(SAMPLE), st.booleans())
def test_every_state_can_be_shown(state, sample, lives):
    lines = [f"sample {json.dumps(sample)}"]
    if lives:
        state = state | {"start": "9", "boot_id": "b"}
        lines.append("stat 1 (x) S " + "0 " * 18 + "9")
    assert list(shown(answer(json.dumps(state), *lines))) == ["run-1"]


@given(st.lists(st.text(max_size=60) | st.sampled_from([f"state {NESTED}", "me ²", "me " + "1" * 5000]), max_size=6))
def test_every_line_of_a_node_is_read_or_skipped(lines):
    shown(parse_runs("node01", "\n".join(["part run-1/logs/node0 root", *lines]), NAMES))


@pytest.mark.parametrize(
    "place",
    ["../x/logs/node0", "..", "a/../../etc/logs/node0", "-x/logs/node0", "run-1/logs/node" + "9" * 5000, "", "\x1b[2J"],
)
def test_a_place_that_leads_out_of_the_folder_of_runs_is_no_run(place):
    assert parse_runs("node01", f"part {place} root\nstate {{}}", NAMES).parts == ()


def test_owner_of_another_users_run_is_reported():
    found = shown(parse_runs("node01", "me 1000\nprivate run-7 1001 bob\nprivate ../x 0 root\nprivate", NAMES))
    assert list(found) == ["run-7"]
    run = found["run-7"]
    assert (run.owner, run.state, run.head.fields["uid"]) == ("bob", "unknown", 1001)


# --- events ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(EVENTS), objects(EVENT)), max_size=8))
def test_every_event_is_accepted(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("run")
    message = []
    follower = Follower("run-1", NAMES, folder, emit=message.append)
    for kind, event in events:
        follower.take("node01", parsed(json.dumps(event | {"event": kind})))
    follower.close()
    assert (follower.state, follower.failures) is not None
    for path in folder.rglob("*"):
        assert path.parent in {folder, folder / "node01"}


@pytest.mark.parametrize("line", [NESTED, DEEP, '{"event": "log", "at": ' + "9" * 5000 + "}", "\ud800", "null"])
def test_other_line_is_a_line_of_the_launcher(line):
    event = parsed(line)
    assert (event["event"], event["line"]) == ("log", line[:20_000])


@given(st.text(max_size=200))
def test_every_text_is_an_event(text):
    assert isinstance(parsed(text)["event"], str) if parsed(text).get("event") is not None else True


def test_a_rank_that_is_a_path_makes_no_file_elsewhere(tmp_path):
    follower = Follower("run-1", NAMES, tmp_path / "run-1", emit=lambda _: None)
    for rank in ("/../../../escaped", -1, 1 << 40, True, [], "0"):
        follower.take("node01", parsed(json.dumps({"event": "log", "rank": rank, "line": "x"})))
    follower.close()
    assert [path.name for path in tmp_path.rglob("*.log")] == ["launcher.log"]


def open_files():
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_node_with_very_many_ranks_needs_few_descriptors_and_files(tmp_path):
    before = open_files()
    follower = Follower("run-1", NAMES, tmp_path, emit=lambda _: None)
    for rank in range(RANKS + 300):
        follower.take("node01", {"event": "log", "rank": rank, "line": "x"})
        assert open_files() - before <= OPEN
    follower.take("node01", {"event": "log", "rank": 0, "line": "again"})
    follower.close()
    assert len(list((tmp_path / "node01").iterdir())) == RANKS + 1
    assert (tmp_path / "node01/rank0.log").read_text() == "x\nagain\n"


def test_an_ordinary_event_keeps_all_of_its_fields(tmp_path):
    event = {
        "event": "end",
        "time": 1.5,
        "attempt": 1,
        "state": "failed",
        "why": {"node": "node02", "rank": 3, "text": "rank 3 was killed"},
        "step": 7,
        "saved": False,
        "at": 4096,
    }
    assert parsed(json.dumps(event)) == event
    notices = []
    follower = Follower("run-1", ["node01"], tmp_path, emit=notices.append)
    follower.take("node01", parsed('{"event": "notice", "text": "careful", "level": null}'))
    assert notices == [Notice("node01: careful", "warning")]
    follower.take("node01", event)
    assert follower.failures == {"node02": "rank 3 was killed"}


# --- answers -----------------------------------------------------------------------------------------------------

FACTS = list(Facts.__dataclass_fields__)


@given(objects(FACTS))
def test_facts_have_their_types_or_are_refused(message):
    with contextlib.suppress(ClusterctlError):
        facts = Facts.parse(json.dumps(message))
        assert isinstance(facts.gpus + facts.cpus + facts.clock, int | float)
        assert all(isinstance(run["run"], str) for run in facts.runs)


@pytest.mark.parametrize("text", [NESTED, DEEP, "", "[]", '{"gpus": "8"}', '{"infiniband": 3}', '{"runs": [{}]}'])
def test_invalid_facts_are_an_error_with_a_reason(text):
    if text == DEEP:
        text = '{"runs": ' + "[" * 985 + "]" * 985 + "}"
    with pytest.raises(ClusterctlError, match="the agent's answer cannot be read"):
        Facts.parse(text)


@given(
    st.dictionaries(st.sampled_from(["/a", "/b"]), objects(readiness.Content.__dataclass_fields__) | VALUES, max_size=2)
)
def test_content_of_a_node_can_always_be_compared(message):
    found = readiness.parse_content(json.dumps(message))
    other = readiness.Content("folder", entries={"a": "1 x", "b": "2 y"}, names="n", content="c", files=2)
    for path, one in found.items():
        assert list(readiness.compare_content(path, {"node01": one, "node02": other, "node03": other}))


@pytest.mark.parametrize("text", [NESTED, DEEP, "", "[]", '{"/a": []}', '{"/a": {"entries": {"x": "1"}}}'])
def test_invalid_content(text):
    assert readiness.parse_content(text) == {}


@given(
    st.lists(objects([*STATE, "event", "gpu", "port_free", "error"]).map(json.dumps) | st.text(max_size=50), max_size=4)
)
def test_every_answer_to_a_stop_is_a_proof(lines):
    assert isinstance(parse_proof("\n".join([*lines, "agent 0"])).problem, str)


def test_deeply_nested_answer_to_a_stop_is_ignored():
    assert "the agent did not answer" in parse_proof(f"{NESTED}\nagent 1").problem


# --- checkpoints -------------------------------------------------------------------------------------------------

FILE = [10, 1700000000000000000, "0123", None]
CHECKPOINT = {
    "name": "checkpoints/checkpoint-2", "single": False, "step": 2, "says": {"latest": "x", "i": ["a"]},
    "files": {"a/b": FILE},
}  # fmt: skip
POINTER = {"name": "latest", "tag": "global_step2", "file": FILE}
OFFER = {"ranks": [0, 2], "kept": 1, "pointers": [POINTER], "others": ["a/b.pt"], "checkpoints": [CHECKPOINT]}


def test_valid_offer_is_accepted_unchanged():
    assert offers.problem(OFFER) == offers.problem({}) == offers.problem({"processes": 1}) == ""
    assert read_offer({"output": "/o", "offer": OFFER}, "node01") == {"output": "/o", "offer": OFFER}
    assert read_offer({"output": None, "offer": None}, "node01") == {"output": None, "offer": {}}


@every_case(
    "change",
    [
        {"ranks": [0]},
        {"ranks": [0, -1]},
        {"ranks": ["0", 1]},
        *({"pointers": each} for each in ({}, [POINTER | {"tag": 1}], [POINTER | {"name": "../x"}], [POINTER] * 17)),
        {"pointers": [POINTER | {"file": []}]},
        *({"others": each} for each in ({}, ["../x"], [1], ["x"] * 1001)),
        *({"kept": each} for each in (-1, "1", None)),
        {"checkpoints": {}},
        {"checkpoints": [CHECKPOINT] * 17},
        *({"checkpoints": [CHECKPOINT | {"name": name}]} for name in ("..", "../x", "a//b", "", "a\0", 1, None)),
        *({"checkpoints": [CHECKPOINT | {"files": files}]} for files in ([], {"../x": FILE}, {"/x": FILE}, {"a": []})),
        *(
            {"checkpoints": [CHECKPOINT | {"files": {"a": [size, 1, "", None]}}]}
            for size in (-1, "1", 1.5, True, 1 << 63)
        ),
        {"checkpoints": [CHECKPOINT | {"says": []}]},
        {"checkpoints": [CHECKPOINT | {"says": {"latest": 1}}]},
        {"checkpoints": [CHECKPOINT | {"says": {"latest": ["x"]}}]},
        {"checkpoints": [CHECKPOINT | {"says": {"complete.json": "x"}}]},
        {"checkpoints": [CHECKPOINT | {"single": "no"}]},
        {"checkpoints": [CHECKPOINT | {"step": -1}]},
    ],
)
def test_invalid_offer_is_refused(change):
    assert offers.problem(OFFER | change)
    with pytest.raises(ClusterctlError, match="node01: its checkpoints cannot be read"):
        read_offer({"output": "/o", "offer": OFFER | change}, "node01")


@given(objects(["ranks", "pointers", "others", "kept", "checkpoints"]) | VALUES)
def test_every_offer_is_refused_or_can_be_used(offer):
    if not offers.problem(offer):
        sources({"node01": frozenset({"checkpoint-2/a"})}, {"node01": offer}, "checkpoint-2")


@pytest.mark.parametrize("output", [1, [], "relative", "../x"])
def test_invalid_output_folder(output):
    with pytest.raises(ClusterctlError, match="an invalid output folder"):
        read_offer({"output": output, "offer": {}}, "node01")


@given(objects(["name", "step", "refused"]))
def test_newest_checkpoint_is_one_of_the_offers(message):
    assert newest(message, {"checkpoint-2"}).name in {None, "checkpoint-2"}


def test_a_list_of_files_with_odd_numbers():
    listed = "\0".join(["² 1 a", "1 ² b", "9" * 5000 + " 1 c", "1 " + "9" * 5000 + " d", "10 1700000000.5 e", ""])
    assert list(parse_list(listed, "node01")) == ["e"]


# --- measurements of the network ---------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["met", "ready", "row", "pair", "skipped", "network", "failed", "end"]),
            objects(["rank", "busy", "op", "bytes", "world", "times", "wrong", "a", "b", "why", "text", "log"]),
        ),
        max_size=6,
    )
)
def test_every_event_of_a_measurement_can_be_used(message):
    lines = [json.dumps(fields | {"event": kind}) for kind, fields in message]
    events = [event for line in lines if (event := parse_event(line, 2))]
    assert rows(events) is not None
    assert pair_rates(events, NAMES) is not None
    assert all(failure_reason(event) for event in events if event["event"] == "failed")


@pytest.mark.parametrize(
    "line", [NESTED, DEEP, "", "[]", "{}", '{"event": []}', '{"event": "row"}', '{"event": "pair", "a": 9}']
)
def test_invalid_events_of_a_measurement_are_ignored(line):
    assert parse_event(line, 2) is None


# --- here --------------------------------------------------------------------------------------------------------


def test_record_of_a_run_is_private(tmp_path):
    folder = tmp_path / "runs/run-1"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    record.write(folder, {"run": "run-1"})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert record.read(folder) == {"run": "run-1"}
    (folder / record.FILE).write_text(NESTED)
    assert record.read(folder) is None


def test_fields_of_valid_files_are_kept():
    state = {"node_rank": 0, "state": "running", "step": None, "loss": 1.5, "left": [], "why": None, "saved": False}
    assert fields.valid_fields(state) == state
    assert fields.valid_fields({"loss": float("nan"), "step": -1, "node_rank": "0", "why": [], "other": []}) == {
        "other": []
    }


# --- logs --------------------------------------------------------------------------------------------------------

LOG = [
    "2024-99-99 99:99:99 x",
    "0000-00-00T00:00:00.000Z [0] x",
    "2024-01-01T00:00:00.000Z [" + "9" * 5000 + "] x",
    "[rank" + "9" * 5000 + "]: x",
    "2024-01-01T00:00:00.000Z [0]  rank      : " + "9" * 5000 + " (local_rank: 1)",
    "E9999 99:99:99.000 x",
]
MACHINE = ["cores " + "9" * 5000, "link a " + "9" * 5000, "clock 1 1.2.3", "clock " + "9" * 5000 + " 1", "clock 1 1"]
KERNEL = ["[ 1.0] x", "[ " + "9" * 5000 + ".1] x", "[1." + "9" * 5000 + "] x"]


@given(
    st.lists(st.sampled_from(LOG) | st.text(max_size=80), max_size=6),
    st.lists(st.sampled_from(MACHINE) | st.text(max_size=80), max_size=4),
    st.lists(st.sampled_from(KERNEL) | st.text(max_size=80), max_size=4),
    st.lists(objects(EVENT).map(json.dumps) | st.just(NESTED), max_size=4),
)
def test_every_log_of_a_node_can_be_diagnosed(log, machine, kernel, events):
    texts = {"run.log": log, "machine": machine, "kernel": kernel, "events.jsonl": events, "state.json": events}
    found = reading.record("node01", {name: "\n".join(lines) for name, lines in texts.items()})
    assert all(isinstance(line.text, str) for line in found.lines)
    for line in log:
        assert entry("node01", line).node == "node01"


@pytest.mark.parametrize("message", ["9" * 5000, "1." + "9" * 5000, "²"])
def test_invalid_time_of_a_node(message):
    assert clock.bounds(message, 0.0, 1.0) is None
