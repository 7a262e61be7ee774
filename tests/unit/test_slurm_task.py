"""``tasks/slurm.py`` on this machine, with programs of Slurm that answer as broken, slow or forbidden ones do."""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from provision.errors import ClusterctlError, PreflightError, UsageError
from provision.launchers import from_words
from provision.model import LOCAL, CommandLine, Inventory, Node, Notice
from provision.session import Session
from provision.slurm import Allocation, Chosen, Options
from provision.tasks import slurm
from provision.tasks.slurm import On
from provision.tasks.train import Training, train

NODES = (Node("gpu01", LOCAL),)
CHOSEN = Chosen(NODES, {"gpu01": "n1"})


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Writes programs of Slurm. Each writes its arguments to ``calls``."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "ANSWER", 1)

    def write(**scripts):
        for name, script in scripts.items():
            (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/calls\n{script}\n')
            (tmp_path / name).chmod(0o755)

    write.calls = lambda: (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    return write


@pytest.fixture
def session(tmp_path):
    events = []
    path = tmp_path / "inventory.yaml"
    inventory = Inventory(path=path, prefix=PurePosixPath("/opt/llm/current"), nodes=NODES)
    with Session(inventory, NODES, emit=events.append) as session:
        session.warnings = lambda: [each.text for each in events if isinstance(each, Notice)]
        yield session


def reserve(session):
    with ExitStack() as stack:
        stack.enter_context(slurm.reserve(session, "run-1", NODES, On(Options()), CHOSEN))


@pytest.mark.parametrize(
    ("sbatch", "text"),
    [
        ("echo Submitted batch job twelve", "no job id"),
        ("head -c 3000000 /dev/zero | tr '\\0' x", "no job id"),
        ("sleep 30", "refused the run"),
    ],
    ids=["garbage", "much", "hangs"],
)
def test_a_job_whose_id_is_not_known_is_cancelled_by_its_name(programs, session, sbatch, text):
    programs(sbatch=sbatch, scancel="")
    with pytest.raises(PreflightError, match=text):
        reserve(session)
    assert programs.calls()[-1] == "scancel --name=run-1"
    assert session.warnings() == []


def test_a_job_that_may_be_left_is_named(programs, session):
    programs(sbatch="echo ok", scancel="echo no permission >&2; exit 1")
    with pytest.raises(PreflightError, match="no job id"):
        reserve(session)
    assert "squeue --me -n run-1" in session.warnings()[0]


def test_without_permission_nothing_is_cancelled(programs, session):
    programs(sbatch="echo 'sbatch: error: Access/permission denied' >&2; exit 1", scancel="")
    with pytest.raises(PreflightError) as error:
        reserve(session)
    assert error.value.reasons == {"gpu01": "sbatch: error: Access/permission denied"}
    assert "Slurm's administrator" in error.value.hint
    assert len(programs.calls()) == 1


@pytest.mark.parametrize("nodes", ["n2", "n[1-2]"])
def test_a_job_on_other_nodes_is_cancelled(programs, session, nodes):
    programs(sbatch="echo 12", squeue=f"echo '12|RUNNING|{nodes}|None'", scancel="")
    with pytest.raises(PreflightError, match="runs on other nodes"):
        reserve(session)
    assert programs.calls()[-1] == "scancel 12"


def test_squeue_that_hangs_is_reported(programs, session, monkeypatch):
    monkeypatch.setattr(slurm, "OUTAGE", 0.5)
    programs(sbatch="echo 12", squeue="sleep 30", scancel="")
    with pytest.raises(PreflightError, match="job 12 is in the queue is not known") as error:
        reserve(session)
    assert "no answer within 1 s" in error.value.reasons["gpu01"]
    assert programs.calls()[-1] == "scancel 12"


def test_a_run_in_the_queue_is_not_resumed_and_the_hint_repeats_the_command(programs, session):
    programs(squeue="echo '12|PENDING||BeginTime'")
    session.typed = CommandLine("resume", options={"--nodes": ("1",)}, words=("run",))
    with pytest.raises(UsageError, match="in Slurm's queue as job 12") as error:
        slurm.refuse_queued(session, "run-1", NODES[0], "12")
    assert error.value.hint.endswith("clusterctl stop run-1; then: clusterctl resume --nodes 1 run-1")


@pytest.mark.parametrize("sinfo", ["echo '|||||'; echo a", "head -c 3000000 /dev/urandom", "true"])
def test_an_answer_of_sinfo_without_nodes_is_an_error(programs, session, sinfo):
    programs(sinfo=sinfo)
    with pytest.raises((UsageError, ClusterctlError)) as error:
        slurm.choose(session, NODES, On(Options()), None)
    assert error.value.hint


def test_the_chosen_nodes_know_whether_the_run_survives(programs, session):
    programs(sinfo="echo 'gpu01|a|b|main|idle|(null)'")
    for on in (On(Options()), On(allocation=Allocation("7", ("gpu01",)))):
        for min_nodes in (1, None):
            chosen = slurm.choose(session, NODES, on, 1, min_nodes=min_nodes)
            assert chosen == replace(chosen, names={"gpu01": "gpu01"}, survives=min_nodes is not None)


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["--include", "gpu02"], "--nodes=1 --nodelist=gpu02 "),
        (["--exclude", "gpu01"], "--nodes=2 --nodelist=gpu02,gpu03 "),
    ],
)
def test_slurm_is_asked_for_the_nodes_that_deepspeed_uses(programs, tmp_path, monkeypatch, words, asks):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    nodes = tuple(Node(f"gpu0{number}", LOCAL) for number in (1, 2, 3))
    lines = "\n".join(f"{node.name}|a|b|main|idle|(null)" for node in nodes)
    programs(sinfo=f"echo '{lines}'", sbatch="echo refused >&2; exit 1")
    inventory = Inventory(path=tmp_path / "inventory.yaml", prefix=PurePosixPath("/opt/llm/current"), nodes=nodes)
    asked = Training(job=from_words(["deepspeed", *words, "a.py"]), on=On(Options()), spares=0)
    with Session(inventory, nodes) as session, pytest.raises(PreflightError, match="Slurm refused"):
        train(session, asked)
    assert asks in programs.calls()[-1]
