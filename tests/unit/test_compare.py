"""``clusterctl compare``: the differences of runs, mixtures of their settings, and the search for a cause."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from provision.cli import cli
from provision.errors import UsageError
from provision.model import CommandLine
from provision.output import Reporter
from provision.run import Facts, RunFiles
from provision.run.bisect import (
    CAUSES,
    Measured,
    command,
    judge,
    mixed_nodes,
    most_rounds,
    node_settings,
    outputs,
    search,
    space,
    usual_rounds,
)
from provision.run.difference import KINDS, arguments, compare, describe
from provision.run.environment import started_on, started_with
from provision.run.readiness import Content
from provision.tasks.bisect import Limits, Round, plan_text, round_text, value_of_rows
from trainer.agent import probe
from trainer.reader import Row


def record_of(*argv, **more):
    return {"argv": list(argv), "nodes": ["gpu01", "gpu02"], "prefix": "/opt/releases/aa", **more}


def differences(good, bad, **more):
    return compare([describe("r-1", good, **more), describe("r-2", bad, **more)])


def group(*nodes, **values):
    return {"nodes": list(nodes), "values": values}


def test_the_most_likely_cause_is_first():
    good = record_of(
        *("t.py", "--lr", "1", "--seed=3"), variables={"NCCL_P2P_DISABLE": "0"}, files={"job/t.py": "aa"},
        data={"/data": "3 files"}, packages=[group("gpu01", "gpu02", torch="2.12", click="8.1", zipp="1")],
        hardware=[group("gpu01", "gpu02", driver="580.1", kernel="6.1")],
        preflight={"problems": []},
    )  # fmt: skip
    bad = record_of(
        *("t.py", "--lr", "2", "--seed=3"), variables={"NCCL_P2P_DISABLE": "1"}, files={"job/t.py": "bb"},
        data={"/data": "4 files"}, packages=[group("gpu01", "gpu02", torch="2.13", click="8.2", zipp="1")],
        hardware=[group("gpu01", driver="580.1", kernel="6.2"), group("gpu03", driver="570.9", kernel="6.2")],
        preflight={"problems": [{"check": "ib.state", "verdict": "WARN", "nodes": ["gpu03"], "observed": "down"}]},
    )  # fmt: skip
    bad["nodes"] = ["gpu01", "gpu03"]
    bad["prefix"] = "/opt/releases/bb"
    found = differences(good, bad).differences
    assert [(each.kind, each.name) for each in found] == [
        ("check", "ib.state"), ("mixed", "driver"), ("argument", "--lr"), ("variable", "NCCL_P2P_DISABLE"),
        ("file", "job/t.py"), ("data", "/data"), ("package", "torch"), ("package", "click"), ("release", "release"),
        ("hardware", "kernel"), ("nodes", "nodes"),
    ]  # fmt: skip
    assert found[0].values == (None, "WARN on gpu03: down")
    assert found[1].values == ("580.1", "580.1 (gpu01), 570.9 (gpu03)")
    assert found[2].values == ("1", "2")


def test_what_a_record_lacks_is_said_and_not_compared():
    found = differences({}, record_of("t.py"))
    assert found.unknown["package"] == ("r-1", "r-2")
    assert found.unknown["argument"] == ("r-1",)
    assert [each.kind for each in found.differences] == []


def test_values_that_contain_the_run_are_no_difference():
    assert not compare([describe(name, record_of("t.py", f"/out/{name}")) for name in ("a-1", "b-2")]).differences


KEYS = ("argv", "nodes", "values", "packages", "preflight", "problems", "plans", "env", "files", "verdict")
leaves = st.none() | st.text(max_size=5) | st.integers()
trees = st.recursive(leaves, lambda each: st.lists(each) | st.dictionaries(st.sampled_from(KEYS), each), max_leaves=8)


@given(trees)
def test_any_record_can_be_compared(record):
    if isinstance(record, dict):
        assert space(record, record, ()).settings == ()
    content = record if isinstance(record, dict) else {"packages": record, "preflight": record, "argv": record}
    assert differences(content, content).differences == ()


def test_a_thousand_nodes_are_folded():
    names = [f"gpu{number:04}" for number in range(1000)]
    moved = [names[1], names[0], *names[2:]]
    one, other = record_of("t.py", nodes=names), record_of("t.py", nodes=moved)
    other["hardware"] = one["hardware"] = [group(*names, kernel="6.1")]
    found = differences(one, other)
    assert [each.name for each in found.differences] == ["order of the nodes"]
    assert found.differences[0].values == ("by name", "gpu0001 is rank 0, gpu0000 is rank 1")
    other["hardware"] = [group(*names[1:], kernel="6.1"), group(names[0], kernel="5.9")]
    assert differences(one, other).differences[0].values[1] == "5.9 (gpu0000), 6.1 (gpu[0001-0999])"
    other["hardware"] = [group(name, kernel=name) for name in names]
    assert len(json.dumps([each.values for each in differences(one, other).differences])) < 2000


def test_every_kind_has_a_reason():
    assert len({kind.id for kind in KINDS}) == len(KINDS)
    assert all(kind.why and kind.title for kind in KINDS)


words = st.lists(st.sampled_from(["t.py", "--lr", "1", "-1e-4", "--lr=2", "a=1", "b=2", "-x", "--flag", "c.d=3"]))


@given(words)
def test_the_arguments_together_are_the_command(given_words):
    assert [word for each in arguments(given_words).values() for word in each] == given_words


def test_a_mixture_has_the_arguments_of_both_runs():
    good = record_of("t.py", "cfg.json", "--lr", "1", "--steps", "900", "--fast", variables={"A": "1", "B": "1"})
    bad = record_of("t.py", "cfg.json", "--lr", "2", "--steps", "800", "--out", "/out/x", variables={"A": "2"})
    found = space(good, bad, ["probe.py", "--steps", "5"])
    assert [each.name for each in found.settings] == ["--lr", "--fast", "A", "B"]
    assert found.mixture(()).words == ("probe.py", "cfg.json", "--steps", "5", "--lr", "1", "--fast")
    both = found.mixture((0, 1, 2, 3))
    assert both.words == ("probe.py", "cfg.json", "--steps", "5", "--lr", "2")
    assert both.variables == {"A": "2"}
    plain = space(good, bad, ())
    assert plain.mixture(()).words == tuple(good["argv"])
    assert plain.mixture((0,)).words == ("t.py", "cfg.json", "--lr", "2", "--steps", "900", "--fast")


def test_a_configuration_is_mixed_by_its_values():
    good = record_of("a.yaml", settings={"learning_rate": 1e-4, "bf16": True, "output_dir": "/o", "hub": "***"})
    bad = record_of(
        "b.yaml", settings={"learning_rate": 1e-3, "output_dir": "/p", "hub": "x", "warmup_steps": 3, "a.b": 1}
    )
    bad["prefix"] = "/opt/releases/bb"
    found = space(good, bad, ())
    assert [each.name for each in found.settings] == ["learning_rate", "warmup_steps", "release"]
    assert found.untested == {
        "bf16": "train cannot remove a key of a configuration",
        "hub": "records have no secrets",
        "a.b": "it is a part of a value",
    }
    assert found.mixture((0,)).words == ("a.yaml", "learning_rate=0.001")
    assert found.mixture((1,)).words == ("a.yaml", "learning_rate=0.0001", "warmup_steps=3")
    assert found.mixture((2,)).prefix == "/opt/releases/bb"


def test_the_commands_to_verify_set_what_differs():
    good = record_of("t.py", "--lr", "1", variables={"A": "1", "B": "1", "HF_TOKEN": "***"})
    bad = record_of("t.py", "--lr", "2", variables={"A": "2", "B": "1", "HF_TOKEN": "***"}, prefix="/opt/releases/bb")
    bad["nodes"] = ["gpu01", "gpu09"]
    found = space(good, bad, ())
    assert [each.label for each in found.settings] == ["--lr", "A", "release", "gpu02 replaced by gpu09"]
    assert command(found, (1, 2), {"B": "1"}, alone=False) == (
        "clusterctl rollback --to bb && clusterctl train --limit gpu01,gpu02 --env A=2 --env HF_TOKEN -- t.py --lr 1"
    )
    assert command(found, (3,), {"A": "1", "B": "1"}, alone=True) == "clusterctl train --env HF_TOKEN -- t.py --lr 1"


def test_a_round_that_writes_where_the_run_did_is_noticed():
    record = record_of("t.py", "--output-dir", "/data/out")
    assert outputs(space(record, record, ()).mixture(())) == ("--output-dir",)
    assert outputs(space(record, record, ["t.py", "--output-dir", "out"]).mixture(())) == ()


names = st.permutations("abcdef")


@given(names, names, st.integers(0, 6), st.integers(0, 6), st.data())
def test_mixed_nodes(one, other, most, least, data):
    good, bad = one[:most], other[:least]
    settings = [each.name for each in node_settings(good, bad)]
    assert mixed_nodes(good, bad, ()) == tuple(good)
    assert mixed_nodes(good, bad, settings) == tuple(bad)
    some = mixed_nodes(good, bad, data.draw(st.lists(st.sampled_from(settings), unique=True)) if settings else ())
    assert len(set(some)) == len(some)


def searched(count, verdict):
    """The conclusion, and the rounds."""
    rounds, run = [], search(count)
    try:
        ask = next(run)
        while True:
            rounds.append(ask)
            ask = run.send(verdict(ask, len(rounds)))
    except StopIteration as done:
        return done.value, rounds


@given(st.integers(1, 40), st.data())
def test_one_cause_is_found(count, data):
    cause = data.draw(st.integers(0, count - 1))
    found, rounds = searched(count, lambda ask, _: "bad" if cause in ask.chosen else "good")
    assert (found.cause, found.sure) == ((cause,), True)
    assert len(rounds) <= usual_rounds(count)


@given(st.integers(2, 30), st.data())
def test_causes_that_act_together_are_found(count, data):
    cause = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=CAUSES + 1))
    found, rounds = searched(count, lambda ask, _: "bad" if cause <= ask.chosen else "good")
    assert len(rounds) <= most_rounds(count)
    if len(cause) <= CAUSES:
        assert (set(found.cause), found.sure) == (cause, True)
        assert "together" in found.why
    else:
        assert not found.sure
        assert "more than" in found.why


@given(st.integers(2, 20), st.data())
def test_a_second_cause_is_said(count, data):
    causes = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2))
    found, _ = searched(count, lambda ask, _: "bad" if causes & ask.chosen else "good")
    assert set(found.cause) < causes
    assert "second cause" in found.why


@given(st.integers(1, 20), st.data())
def test_a_job_that_only_sometimes_fails_never_blames_what_is_innocent(count, data):
    """With the cause it fails in some rounds, without it never: what is found contains the cause, or is not sure."""
    cause = data.draw(st.integers(0, count - 1))
    found, rounds = searched(
        count, lambda ask, _: "bad" if cause in ask.chosen and data.draw(st.booleans()) else "good"
    )
    assert len(rounds) <= most_rounds(count)
    assert not found.sure or cause in found.cause


@given(st.integers(1, 20), st.data())
def test_a_result_that_changes_is_not_sure(count, data):
    cause = data.draw(st.integers(0, count - 1))
    good_again = data.draw(st.booleans())

    def verdict(ask, _):
        wrong = ask.again and bool(ask.chosen) != good_again
        return "bad" if (cause in ask.chosen) != wrong else "good"

    found, _ = searched(count, verdict)
    assert not found.sure
    assert "another result" in found.why


@given(st.integers(0, 20), st.lists(st.sampled_from(["good", "bad", "unclear"]), min_size=200, max_size=200))
def test_any_verdicts_end_the_search(count, verdicts):
    found, rounds = searched(count, lambda _, number: verdicts[number])
    assert len(rounds) <= most_rounds(count)
    assert found.why


def test_nothing_is_blamed_if_the_job_cannot_show_it():
    assert searched(3, lambda *_: "good")[0].why.startswith("the job is not bad with all settings")
    assert searched(3, lambda *_: "bad")[0].why.startswith("the job is not good")
    assert searched(0, lambda *_: "good")[0].cause == ()


@pytest.mark.parametrize(
    ("value", "verdict"), [(100.0, "good"), (76.0, "good"), (74.0, "bad"), (10.0, "bad"), (None, "unclear")]
)
def test_a_value_is_judged_halfway(value, verdict):
    assert judge(Measured(False, value), Measured(False, 100.0), Measured(False, 50.0), measures=True) == verdict


def test_values_of_both_runs_that_are_near_decide_nothing():
    assert judge(Measured(False, 97.0), Measured(False, 100.0), None, measures=True) == "good"
    assert judge(Measured(False, 3.0), Measured(False, 2.0), None, measures=True) == "bad"
    assert judge(Measured(True), None, None, measures=True) == "bad"
    assert judge(Measured(False), None, None, measures=False) == "good"


def run_command(*words):
    reporter = Reporter()
    done = CliRunner().invoke(cli, ["compare", *map(str, words)], obj=reporter)
    reporter.finish()
    return done


def test_the_command_needs_no_nodes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    for name, argv in (("a", ["t.py", "--lr", "1"]), ("b", ["t.py", "--lr", "2"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"run": name, "state": "failed", "argv": argv}))
    assert run_command(tmp_path / "a", tmp_path / "b", "--json").exit_code == 0
    data = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["good"], each["bad"]) for each in data["differences"]] == [("--lr", "1", "2")]
    assert data["unknown"]["package"] == ["a", "b"]
    assert "goes with --bisect" in str(run_command("a", "b", "--steps", "3").exception)


def test_hardware_is_read_from_files(tmp_path):
    """As driver 580.159.04 and an H100 print them."""
    gpu = "Model: \t\t NVIDIA H100 80GB HBM3\nVideo BIOS: \t 96.00.da.00.0c\nGPU Firmware: \t 580.159.04\n"
    version = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (a@b)\nGCC version: 15"
    )
    files = {
        "proc/driver/nvidia/version": version, "proc/sys/kernel/osrelease": "6.1.0\n",
        "proc/driver/nvidia/gpus/0000:00:06.0/information": gpu,
        "proc/driver/nvidia/gpus/0000:00:07.0/information": gpu.replace("580.159.04", "??.??"),
        "sys/class/infiniband/mlx5_0/fw_ver": "28.39.1002\n", "sys/class/infiniband/mlx5_0/hca_type": "MT4129\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert probe.hardware(str(tmp_path)) == {
        "kernel": "6.1.0", "driver": "580.159.04", "GPUs": "2 x NVIDIA H100 80GB HBM3",
        "GPU firmware": "1 x 580.159.04", "GPU VBIOS": "2 x 96.00.da.00.0c", "network cards": "1 x MT4129",
        "network card firmware": "1 x 28.39.1002",
    }  # fmt: skip


def test_a_record_has_no_secrets_and_equal_nodes_once(tmp_path):
    typed = CommandLine("train", {"--zero": ("2",), "--env": ("HF_TOKEN=s3cr3t",), "--limit": ("gpu01",)})
    settings = {"lr": 1e-4, "hub_token": "s3cr3t", "nested": {"api_key": "s3cr3t", "seed": 3}, "layers": [1, 2]}
    files = RunFiles(tmp_path / "a.yaml", "a.yaml", {"job/a.yaml": b"lr"}, (), settings=settings)
    found = started_with(typed, {"HF_TOKEN": "s3cr3t", "A": "1"}, files, {"/data": Content("file", files=2)})
    assert "s3cr3t" not in json.dumps(found)
    assert found["options"] == {"--zero": ["2"]}
    assert found["settings"]["lr"] == 1e-4
    assert found["settings"]["nested.seed"] == 3
    assert found["settings"]["layers"] == "1 2"
    facts = {f"gpu{number}": Facts(versions={"torch": "2.13"}, hardware={"kernel": "6.1"}) for number in range(3)}
    facts["gpu2"] = replace(facts["gpu2"], hardware={"kernel": "6.2"})
    machines = started_on(facts)
    assert [each["nodes"] for each in machines["packages"]] == [["gpu0", "gpu1", "gpu2"]]
    assert [each["nodes"] for each in machines["hardware"]] == [["gpu0", "gpu1"], ["gpu2"]]


ROWS = [Row(step, loss=10.0 / step, tokens_per_second=1.0 if step < 3 else 100.0) for step in range(1, 11)]


@pytest.mark.parametrize(
    ("name", "step", "value"),
    [("loss", None, 1.0), ("loss", 5, 2.0), ("tokens_per_second", None, 100.0), ("ms", None, None), ("loss", 0, None)],
)
def test_the_value_that_decides(name, step, value):
    assert value_of_rows(ROWS, name, step) == value


def test_a_metric_has_a_known_name_and_a_step():
    limits = Limits(metric="loss@100", steps=20)
    assert (limits.name, limits.step, limits.enough) == ("loss", 100, 100)
    for word in ("speed", "loss@", "loss@x", "@3"):
        with pytest.raises(UsageError, match="unknown value"):
            Limits(metric=word)


def test_the_plan_and_the_rounds_are_single_lines():
    words = [f"--option-{number}={{}}" for number in range(200)]
    found = space(
        record_of("t.py", *(w.format(1) for w in words)), record_of("t.py", *(w.format(2) for w in words)), ()
    )
    text = plan_text(found, Limits(seconds=60.0))
    assert "200 settings" in text
    assert "188 more" in text
    assert len(text) < 600
    line = round_text(found, Round(tuple(range(100)), False, "bad", True, None, "ValueError", 12.0))
    assert line.startswith("GOOD with --option-0, ")
    assert line.endswith("and 88 more of BAD: bad (ValueError), 12 s")
    assert len(line) < 400
