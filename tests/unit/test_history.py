"""The history of runs, which of them ``prune`` may remove, and where a run's program wrote files for other tools."""

import json
from pathlib import PurePosixPath

import pytest

from provision.run import record
from provision.run.found import merge_runs, parse_runs
from provision.run.history import SETTLED, Past, Wanted, history, is_collected, parse_folders, removable
from provision.run.written import Places, offline_runs, outermost, places
from provision.tasks.history import parse_left

NOW = 1_800_000_000.0
DAY = 86400.0


def answer(node, run, rank=0, *, state="finished", uid=1000, alive=False, **more):
    fields = {"run": run, "node": node, "node_rank": rank, "nnodes": 2, "state": state, "uid": uid, "pid": 7}
    fields |= {"start": "99", "boot_id": "boot", "began": NOW - DAY, "time": NOW - DAY + 60, **more}
    lines = ["me 1000", "boot boot", f"part {run}/logs/node{rank} trainer", f"state {json.dumps(fields)}"]
    stat = ["stat 7 (python) S " + " ".join(["1"] * 18) + " 99"] if alive else []
    return parse_runs(node, "\n".join([*lines, *stat]), ["node01", "node02"])


def found(*answers, folders=None, records=None, silent=(), users=None):
    users = users or {"node01": 1000, "node02": 1000}
    return history(merge_runs(answers), folders or {}, records or {}, users=users, unreachable=silent, now=NOW)


def test_a_run_has_its_numbers_and_the_size_on_all_nodes():
    folders = {
        "node01": parse_folders("now 100\nfolder 5 40 r1\n"),
        "node02": parse_folders("now 90\nfolder 3 40 r1\nfolder x 1 r2\nfolder 1 1 ../r3\nnoise"),
    }
    (past,) = found(answer("node01", "r1", step=6, total=9, loss=1.5), answer("node02", "r1", 1), folders=folders)
    assert (past.nodes, past.step, past.total, past.loss, past.seconds) == (("node01", "node02"), 6, 9, 1.5, 60)
    assert past.size == 8 * 1024
    assert past.stays == ""


def test_a_shared_folder_counts_once():
    folder = parse_folders("now 100\nfolder 5 40 r1\n")
    shared = [answer("node01", "r1"), answer("node02", "r1")]
    text = {"run": "r1", "node": "node01", "node_rank": 0, "nnodes": 1, "state": "finished", "pid": 7}
    shared = [
        parse_runs(node, f"me 1000\npart r1/logs/node0 trainer\nstate {json.dumps(text)}", ["node01", "node02"])
        for node in ("node01", "node02")
    ]
    (past,) = found(*shared, folders={"node01": folder, "node02": folder})
    assert past.size == 5 * 1024


@pytest.mark.parametrize(
    ("answers", "silent", "why"),
    [
        ([answer("node01", "r1", state="running", alive=True), answer("node02", "r1", 1)], (), "it is running"),
        ([answer("node01", "r1")], ("node02",), "it may be running on node02, without an answer"),
        ([answer("node01", "r1", uid=2000), answer("node02", "r1", 1)], (), "it belongs to trainer"),
    ],
)
def test_a_run_that_may_be_running_or_is_another_users_stays(answers, silent, why):
    (past,) = found(*answers, silent=silent)
    assert past.stays == why
    assert removable([past], Wanted(), now=NOW) == ((), (past,))
    assert removable([past], Wanted(), now=NOW, named=["r1"]) == ((), (past,))


def test_a_folder_without_a_state_stays_while_it_may_be_starting():
    new, old = (parse_folders(f"now 100000\nfolder 1 {100000 - age:.0f} r1") for age in (SETTLED - 1, SETTLED + 1))
    assert found(folders={"node01": new})[0].stays == "it may be starting"
    (past,) = found(folders={"node01": old})
    assert (past.state, past.stays) == ("not started", "")


def test_a_record_alone_is_a_run():
    written = {
        "state": "failed",
        "nodes": ["node01"],
        "losses": [2.0, 1.5],
        "steps": 4,
        "began": "2026-11-26T10:00:00Z",
    }
    damaged = {"state": 7, "nodes": "node01", "losses": {}, "began": "yesterday"}
    second, first = found(records={"r1": written, "r2": damaged})
    assert (first.state, first.loss, first.step, first.began) == ("failed", 1.5, 4, 1795687200)
    assert (second.state, second.loss, second.began) == ("unknown", None, None)
    (away,) = found(records={"r1": written}, silent=("node01",))
    assert away.stays == "node01 did not answer"


def test_conditions_choose_runs_and_the_newest_are_kept():
    runs = [
        Past("c-sft", "failed", ("node01",), began=NOW - DAY),
        Past("b-sft", "finished", ("node02",), began=NOW - 9 * DAY),
        Past("a-dpo", "finished", ("node01",)),
    ]

    def chosen(wanted, **more):
        return [past.id for past in removable(runs, wanted, now=NOW, **more)[0]]

    assert chosen(Wanted(states=("finished",))) == ["b-sft", "a-dpo"]
    assert chosen(Wanted(name="sft")) == ["c-sft", "b-sft"]
    assert chosen(Wanted(name="*-dpo")) == ["a-dpo"]
    assert chosen(Wanted(node="node01"), keep=1) == ["a-dpo"]
    assert chosen(Wanted(since=2 * DAY)) == ["c-sft"]
    assert chosen(Wanted(before=2 * DAY)) == ["b-sft"]  # a run without a known start is neither new nor old
    assert chosen(Wanted(), named=["b-sft"], keep=5) == ["b-sft"]


def test_a_run_is_collected_until_it_is_resumed():
    (past,) = found(answer("node01", "r1"), answer("node02", "r1", 1))
    assert is_collected(past, {"collected": {"checkpoint": "c", "began": NOW - DAY}})
    assert not is_collected(past, {"collected": {"checkpoint": "c", "began": NOW - 2 * DAY}})
    assert not is_collected(past, {"collected": True})
    assert not is_collected(past, None)


def test_what_a_node_could_not_remove_is_named():
    assert parse_left("busy 12 r1\nkept r2 mv: no space\nleft .removing-r3\nnoise\n") == {
        "r1": "process 12 of it is running",
        "r2": "mv: no space",
        "r3": "some of its files could not be deleted",
    }


def test_a_killed_removal_of_a_record_is_completed(tmp_path):
    inventory = tmp_path / "inventory.yaml"
    for run in ("r1", "r2"):
        record.write(record.folder_of(inventory, run), {"state": "finished"})
    record.folder_of(inventory, "r1").rename(tmp_path / "runs/.removing-r1")
    assert list(record.kept(inventory)) == ["r2"]
    record.remove_leftovers(inventory)
    record.remove(inventory, "r2")
    assert list((tmp_path / "runs").iterdir()) == []


def test_places_of_a_plan_are_absolute_and_wrong_types_are_ignored():
    folder = PurePosixPath("/opt/llm/runs/r1")
    plan = {"cwd": "job", "resume": {"output": "job/out"}, "env": {"WANDB_DIR": "logs", "WANDB_MODE": "online"}}
    assert places(plan, folder) == Places(
        "/opt/llm/runs/r1/job/out", "", ("/opt/llm/runs/r1/job/logs/wandb", "/opt/llm/runs/r1/job/wandb"), "online"
    )
    assert places({"cwd": 7, "env": [], "resume": "x", "progress": None}, folder).output == ""
    assert outermost(["/a/b", "/a", "/ab", "", "/a/b/c"]) == ("/a", "/ab")


def test_only_folders_with_data_are_offline_runs():
    one = "/r/logs/wandb/offline-run-20261126_114026-blafnyrf"
    files = [f"{one}/run-blafnyrf.wandb", f"{one}/files/requirements.txt", "/r/logs/wandb/debug.log"]
    files += ["/r/wandb/offline-run-2-x/logs/debug.log", "/r/wandb/run-3-y/run-y.wandb"]
    assert offline_runs(files) == {one: frozenset({"run-blafnyrf.wandb", "files/requirements.txt"})}
