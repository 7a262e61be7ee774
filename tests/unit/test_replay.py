"""Replays of public failures: ``diagnose`` names the right cause of each, or says that it does not know it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from case_table import every_case

sys.path.append(str(Path(__file__).parent))  # for replay; last, so that it hides no module

from replay.formats import FORMATS
from replay.replays import FOLDER, PARTS, first_look, part_of, replays, score

from provision import checks
from provision.cli import cli
from provision.diagnosis import Evidence, diagnose, reading
from provision.diagnosis.causes import TABLE
from provision.summaries.diagnosis import diagnosis_output

ROOT = Path(__file__).parents[2]

FAULTS = "tests/nodes/test_check_faults.py::FAULTS"
# What catches a failure before the start, and the test that proves it: the fault injected on sandbox nodes or on a
# simulated fabric. Only hardware can have the faults of RECORDED: their tests judge recorded answers.
BAD_INPUT = "tests/nodes/test_run_bad_input.py"
PROOFS = {
    "gate.checkpoints": f"{BAD_INPUT}::test_a_best_model_that_only_one_node_has_is_refused",
    "gate.data": f"{BAD_INPUT}::test_path_missing_on_one_node_is_named_and_that_node_can_be_excluded",
    "gate.master": f"{BAD_INPUT}::test_rank_0_that_a_node_looks_for_on_itself_is_refused",
    "gate.rank": "tests/nodes/test_main_job.py::test_training_has_world_size_2_and_each_node_its_own_rank",
    "gate.release": f"{BAD_INPUT}::test_nodes_with_different_releases_are_refused",
    "ib.flap": "tests/fabric/test_ib_checks.py::test_errors_that_grow",
    "mem.shm": FAULTS,
    "net.dns": FAULTS,
    "net.docker0": FAULTS,
    "net.ephemeral": "tests/nodes/test_measures.py::test_dropped_refused_and_rerouted_connections_are_distinguished",
    "net.hostname": FAULTS,
    "net.iface": f"{BAD_INPUT}::test_an_interface_that_no_node_has_is_refused",
    "net.master": "tests/nodes/test_measures.py::test_a_master_port_that_is_in_use",
    "resume": "tests/nodes/test_programs.py::test_killed_restarted_collected",
}
RECORDED = {"env.cuda", "ib.gid", "ib.mtu", "lim.memlock", "pci.acs", "pci.iommu"}
IN_UNIT = {"gate.gpus": "tests/unit/test_gate_rules.py::test_more_processes_than_gpus_fail_on_nodes_with_gpus"}
# Kinds that a check, the gate or a command catches before the start, and cases of them that nothing can.
EARLY = {"rendezvous and addresses", "interfaces", "transport", "unequal nodes", "checkpoints without shared disks"}
LATER = {
    "nccl-adapter-failed",  # the adapter fails during the run
    "nccl-shm-attach",  # a fault of one version of NCCL
    "torchtune-store-gone",  # a node that goes during the run
    "torchrun-exit-barrier",
    "nccl-unique-id-times-out",  # no reason was found
    "deepspeed-completion-in-docker",
    "nccl-create-qp-in-container",
    "torchrun-rendezvous-in-containers",
    "nccl-recv-timed-out",  # the network fails during the run
    "nccl-register-invalid-argument",  # a fault of one version of the driver
    "nccl-topology-file-of-plugin",  # a fault of one version of the plugin
    "torchrun-two-jobs-one-endpoint",  # a store of another job, which stops during the run
}


def name(case):
    return case.id


def first_cases():
    return [case for case in replays() if case.part != "aside2"]


@every_case("case", replays, ids=name)
def test_a_replay_yields_its_cause_or_none(case):
    assert case.verdict == case.expected, diagnosis_output(case.result)[1]


def test_the_bounds_hold_in_both_parts_and_together():
    everything = replays()
    assert len(everything) >= 100
    assert len({case.source for case in everything}) == len(everything)
    parts = [[case for case in everything if case.part == part] for part in PARTS]
    assert len(parts[1]) >= len(first_cases()) // 3
    assert len(parts[2]) >= 40
    for cases in (*parts, everything):
        found = score(cases)
        assert found["right"] >= 0.9 * len(cases)
        assert found["wrong"] <= 2


def test_the_part_follows_from_the_id_and_the_first_look_is_kept():
    assert [case.part for case in first_cases()] == [part_of(case.id) for case in first_cases()]
    kept = first_look()
    for part in ("aside", "aside2"):
        names = {case.id for case in replays() if case.part == part}
        found, missed = kept[part]["first look"], kept[part]["not right at the first look"]
        assert sum(found.values()) == len(names)
        assert found["wrong"] + found["unknown"] == len(missed)
        assert set(missed) <= names


@every_case("case", replays, ids=name)
def test_a_case_has_a_thread_and_a_cause_that_the_table_has_if_it_is_expected(case):
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+", case.source)
    assert (case.cause in {cause.id for cause in TABLE}) or case.expected == "unknown"


@every_case("case", replays, ids=name)
def test_what_catches_a_case_exists_and_is_proven(case):
    known = {*checks.ids(), *gate_findings(), *cli.list_commands(None)}
    if case.caught_by:
        assert case.caught_by in known
    if case.kind in EARLY:
        assert (case.caught_by in {*PROOFS, *RECORDED, *IN_UNIT}) != (case.id in LATER), case.caught_by


@every_case("check", PROOFS)
def test_a_proof_on_nodes_exists(check):
    path, _, name = PROOFS[check].partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f'"{check}": (' in text if name == "FAULTS" else f"def {name}(" in text
    assert any(case.caught_by == check for case in replays())


def test_other_proofs_exist():
    assert all((ROOT / "tests/unit/recorded" / f"{check}.yaml").exists() for check in RECORDED)
    for place in IN_UNIT.values():
        path, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / "tests/unit/recorded_logs").glob("*.log")), ids=lambda path: path.name)
def test_a_log_of_a_run_that_succeeded_yields_no_cause(path):
    if "nan" in path.name:
        pytest.skip("its loss becomes NaN")
    record = reading.record(path.name, {"run.log": path.read_text(encoding="utf-8")}, file=path.name)
    result = diagnose(Evidence((record,)))
    assert result.verdict is None, diagnosis_output(result)[1]


def test_what_the_libraries_print_in_a_run_that_succeeds_yields_no_cause():
    case = {"formats": {"torch": "2.6.0"}}
    used = (
        ("deepspeed", {"ranks": 8}),
        ("factory", {"at": "10.0.0.1:29500"}),
        ("shards", 4),
        ("nccl", {"host": "node01", "ranks": [0, 1], "nranks": 2, "address": "eth0:10.0.0.1", "complete": True}),
        ("training", 10),
    )
    lines = [line for name, values in used for line in FORMATS[name](case, values)]
    lines += [
        "Running tokenizer on dataset (num_proc=16): 100%",
        "W&B syncing is set to `offline`",
        '"pin_memory": true',
    ]
    result = diagnose(Evidence((reading.record("log", {"run.log": "\n".join(lines)}),)))
    assert result.verdict is None, diagnosis_output(result)[1]


def gate_findings():
    text = (ROOT / "provision/run/readiness.py").read_text(encoding="utf-8")
    return set(re.findall(r'"(gate\.\w+)"', text))


def test_a_launchers_prefix_is_removed_where_a_traceback_shows_it():
    text = (
        "10.0.1.8: Traceback (most recent call last):\n"
        '10.0.1.8:   File "train.py", line 7, in <module>\n'
        "10.0.1.8: ModuleNotFoundError: No module named 'transformers'\n"
        "10.0.1.9: ready\n"
        "ValueError: 10.0.1.8: no\n"
    )
    assert [line.text for line in reading.log_lines(text, "log")] == [
        "Traceback (most recent call last):",
        '  File "train.py", line 7, in <module>',
        "ModuleNotFoundError: No module named 'transformers'",
        "10.0.1.9: ready",
        "ValueError: 10.0.1.8: no",
    ]


@pytest.mark.parametrize("prefix", ["[1,12]<stdout>:", "3: ", "trainer-worker-0: ", "pod: 3: "])
def test_prefixes_of_launchers(prefix):
    text = f"{prefix}[rank5]: Traceback (most recent call last):\n{prefix}[rank5]: KeyError: 'a'\n"
    assert [(line.rank, line.text) for line in reading.log_lines(text, "log")] == [
        (5, "Traceback (most recent call last):"),
        (5, "KeyError: 'a'"),
    ]


def test_the_cases_folder_holds_cases_only():
    assert {path.suffix for path in FOLDER.iterdir()} == {".yaml"}
