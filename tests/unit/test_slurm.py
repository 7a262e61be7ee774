"""Slurm as data: options, what its programs answer, and the nodes of a job."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision import slurm
from provision.errors import PreflightError, UsageError
from provision.model import Node
from provision.slurm import Allocation, Chosen, Options, SlurmNode
from provision.tasks.slurm import job_script, refuse_other_nodes, step

NODES = tuple(Node(f"gpu{number:02}", f"10.0.0.{number}") for number in range(1, 5))
SINFO = """\
gpu01|10.0.0.1|gpu01|main|allocated|gpu:h100:8(S:0-1)
gpu02|10.0.0.2|gpu02|main|idle|gpu:h100:8(S:0-1)
gpu02|10.0.0.2|gpu02|debug|idle|gpu:h100:8(S:0-1)
n3|10.0.0.3|n3|main|idle|gpu:a100:4,shard:8
gpu04|gpu04|gpu04|main|idle*|(null)
other|other|other|main|drained|(null)
"""
THEIRS = slurm.read_nodes(SINFO)


def test_sinfo_is_read_by_node():
    assert [node.name for node in THEIRS] == ["gpu01", "gpu02", "n3", "gpu04", "other"]
    assert THEIRS[1] == SlurmNode("gpu02", "10.0.0.2", "gpu02", ("main", "debug"), "idle", 8)
    assert [node.gpus for node in THEIRS] == [8, 8, 4, 0, 0]
    assert [node.preference for node in THEIRS] == [1, 0, 0, None, None]


def test_nodes_match_by_name_and_address():
    assert {name: node.name for name, node in slurm.match(NODES, THEIRS).items()} == {
        "gpu01": "gpu01", "gpu02": "gpu02", "gpu03": "n3", "gpu04": "gpu04",
    }  # fmt: skip
    cloud = [Node("a", "gpu01.cluster.example"), Node("gpu02.cluster.example", "192.0.2.7")]
    assert {name: node.name for name, node in slurm.match(cloud, THEIRS).items()} == {
        "a": "gpu01", "gpu02.cluster.example": "gpu02",
    }  # fmt: skip


def test_two_nodes_of_the_inventory_are_not_one_of_slurm():
    twice = [Node("gpu01", "192.0.2.1"), Node("other", "10.0.0.1")]
    assert set(slurm.match(twice, slurm.read_nodes(SINFO.splitlines()[0]))) == {"gpu01"}


def test_idle_nodes_come_first_and_ranks_keep_the_inventory_order():
    chosen = slurm.choose(NODES, THEIRS, Options(), 2)
    assert [node.name for node in chosen.nodes] == ["gpu02", "gpu03"]
    assert chosen.names == {"gpu02": "gpu02", "gpu03": "n3"}
    assert chosen.gpus == 4
    assert [node.name for node in slurm.choose(NODES, THEIRS, Options(), 3).nodes] == ["gpu01", "gpu02", "gpu03"]
    assert slurm.choose(NODES, THEIRS, Options(), 1, per_node=2).gpus == 2


def test_too_few_nodes_are_explained():
    with pytest.raises(UsageError, match=r"Slurm has 3 of the 4 nodes that the run needs \(unknown: gpu04\)") as error:
        slurm.choose(NODES, THEIRS, Options(), None)
    assert error.value.hint == "--nodes 3, or see: sinfo -N -l"
    with pytest.raises(UsageError, match=r"partition debug has 1 of the 2 nodes .*not in the partition: gpu\[01,03\]"):
        slurm.choose(NODES[:3], THEIRS, Options("debug"), 2)
    with pytest.raises(UsageError, match="Slurm does not know: new"):
        slurm.choose([Node("new", "192.0.2.9")], THEIRS, Options(), None)
    with pytest.raises(UsageError, match="Slurm has no such partition") as error:
        slurm.choose(NODES, THEIRS, Options("nope"), None)
    assert error.value.hint == "it has: debug, main"


def test_arguments_of_sbatch():
    chosen = Chosen(NODES[:2], {"gpu01": "gpu01", "gpu02": "g2"}, 8)
    words = slurm.arguments(Options("main", "2-12", "team", ("--qos=high",)), "run-1", chosen)
    assert {"--nodes=2", "--nodelist=gpu01,g2", "--gpus-per-node=8", "--requeue", "--signal=B:USR1@120"} <= {*words}
    assert words[-4:] == ["--partition=main", "--time=2-12", "--account=team", "--qos=high"]
    short = slurm.arguments(Options(time="4"), "run-1", Chosen(NODES[:1], {"gpu01": "gpu01"}))
    assert not [word for word in short if word.startswith(("--signal", "--gpus", "--partition"))]


def test_a_run_that_survives_the_loss_of_nodes_keeps_its_job():
    chosen = Chosen(NODES[:2], {"gpu01": "gpu01", "gpu02": "g2"})
    assert "--no-kill" not in slurm.arguments(Options(), "run-1", chosen)
    assert not re.search("--no-kill|end-job|requeue ", job_script("/opt/runs/r", chosen))
    survives = chosen.surviving(1, None)
    assert "--no-kill" in slurm.arguments(Options(), "run-1", survives)
    script = job_script("/opt/runs/r", survives)
    assert " --no-kill " in script
    assert "cc_agent requeue --nodes gpu01,g2 --least 2\n" in script
    assert '/agent" end-job ' in script
    assert "--no-kill" in step("/opt/runs/r", survives, ["gpu01", "g2"])
    assert "end-job" not in step("/opt/runs/r", survives, ["gpu01", "g2"])  # the allocation is the user's


@pytest.mark.parametrize(
    ("count", "spares", "min_nodes", "least"),
    [(3, 1, None, 2), (10, 2, None, 8), (10, 0, 9, 9), (10, 2, 7, 7), (4, 3, None, 3), (2, 1, None, 2), (4, 0, 1, 3)],
)
def test_a_requeued_job_needs_the_nodes_of_the_run_and_a_majority(count, spares, min_nodes, least):
    nodes = tuple(Node(f"gpu{number}", f"192.0.2.{number}") for number in range(count))
    chosen = Chosen(nodes).surviving(spares, min_nodes)
    assert (chosen.survives, chosen.least) == (True, least)
    assert not Chosen(nodes).surviving(0, None).survives


def test_spares_are_named_in_errors():
    with pytest.raises(UsageError, match="3 of the 4 nodes that the run needs, 2 of them as spares") as error:
        slurm.choose(NODES, THEIRS, Options(), 4, spares=2)
    assert error.value.hint == "--nodes 1, or see: sinfo -N -l"
    with pytest.raises(UsageError) as error:
        slurm.choose(NODES, THEIRS, Options(), 4, spares=3)
    assert error.value.hint == "fewer --spares, or see: sinfo -N -l"
    with pytest.raises(UsageError, match=r"^--nodes 2 and --spares 1: Slurm job 7 has 2 of the chosen nodes") as error:
        slurm.inside(NODES, Allocation("7", ("gpu01", "gpu02")), 3, spares=1)
    assert error.value.hint == "--nodes 1, or a larger allocation: salloc --nodes=3"


def test_a_job_on_other_nodes_is_refused():
    chosen = Chosen(NODES[:2], {"gpu01": "gpu01", "gpu02": "g2"})
    for text in ("13|RUNNING|g2,gpu01|None", "13|RUNNING|gpu[1-99999999]|None"):
        refuse_other_nodes(chosen, slurm.read_job(text, "13"))
    with pytest.raises(PreflightError, match="job 13 runs on other nodes") as error:
        refuse_other_nodes(chosen, slurm.read_job("13|RUNNING|g[2-3]|None", "13"))
    assert error.value.reasons == {"gpu01": "it is without gpu01; it also has g3"}


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30", 1.5), ("12:00:00", 720), ("2-12", 3600), ("1-0:30", 1470), ("0-1:0:30", 60.5)],
)
def test_times(text, minutes):
    assert slurm.minutes(text) == minutes


@pytest.mark.parametrize(
    "options",
    [
        Options(partition="a b"), Options(account="$(id)"), Options(time="tomorrow"), Options(time="1:2:3:4"),
        Options(arguments=("script.sh",)), Options(arguments=("--wrap=a\nb",)), Options(arguments=("-x",) * 65),
    ],
)  # fmt: skip
def test_options_that_slurm_would_misread_are_refused(options):
    with pytest.raises(UsageError) as error:
        slurm.check_options(options)
    assert error.value.hint


def test_squeue_and_sbatch():
    text = "slurm_load_jobs: a warning\n12|PENDING||(Resources)\n13|RUNNING|gpu[01-02]|None\n"
    assert slurm.read_job(text, "12") == slurm.Job("12", "PENDING", (), "Resources")
    assert slurm.read_job(text, "13") == slurm.Job("13", "RUNNING", ("gpu01", "gpu02"), "None")
    assert slurm.read_job("slurm_load_jobs error: Invalid job id specified", "12") is None
    assert slurm.read_submitted("sbatch: your project has 12 hours left\n4711;cluster\n") == "4711"
    assert slurm.read_submitted("Submitted batch job 4711") is None


def test_names_are_limited():
    assert slurm.read_names("gpu[01-03,07],login") == ("gpu01", "gpu02", "gpu03", "gpu07", "login")
    assert slurm.read_names("gpu[1-99999999]") == ()
    assert slurm.read_names("a[1-4000],b[1-4000]") == ()
    assert slurm.read_names("a;reboot") == ()


def test_an_allocation_is_read_from_the_environment():
    assert slurm.read_allocation({}) is None
    assert slurm.read_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[02,01]"}) == Allocation(
        "7", ("gpu02", "gpu01")
    )
    with pytest.raises(UsageError, match="not an allocation") as error:
        slurm.read_allocation({"SLURM_JOB_ID": "7; id", "SLURM_JOB_NODELIST": "gpu01"})
    assert "--on ssh" in error.value.hint


def test_nodes_of_an_allocation():
    allocation = Allocation("7", ("gpu03", "gpu02", "login"))
    chosen, other = slurm.inside(NODES, allocation, None)
    assert [node.name for node in chosen.nodes] == ["gpu02", "gpu03"]
    assert other == ("login",)
    assert [node.name for node in slurm.inside(NODES, allocation, 1)[0].nodes] == ["gpu02"]
    with pytest.raises(UsageError, match=r"--nodes 3: Slurm job 7 has 2 of the chosen nodes: gpu\[02-03\]") as error:
        slurm.inside(NODES, allocation, 3)
    assert "salloc --nodes=3" in error.value.hint
    with pytest.raises(UsageError, match="has 0 of the chosen nodes"):
        slurm.inside(NODES[3:], allocation, None)


def test_options_come_back_from_the_nodes():
    options = Options("main", "60", None, ("--qos=high",))
    assert slurm.read_options(json.dumps(options.to_object())) == options
    assert slurm.read_options('{"partition": "a b"}') is None
    assert slurm.read_options('{"arguments": {"a": 1}, "time": 7}') == Options()
    assert slurm.read_options("") is None


@given(st.text(max_size=300))
def test_no_answer_breaks_the_readers(text):
    slurm.read_nodes(text)
    slurm.read_job(text, "1")
    slurm.read_submitted(text)
    slurm.read_names(text)
    slurm.read_options(text)
    slurm.minutes(text)


@given(st.lists(st.text("gpu01|idle*,:()\n\x00ü", max_size=20), max_size=8))
def test_no_line_of_sinfo_breaks_the_reader(parts):
    slurm.read_nodes("|".join(parts))
