"""A run that is resumed on fewer of its nodes: its plans, who is meant, and how it is found afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from provision.errors import NodesFailedError, UsageError
from provision.launchers import arranged, filled, launch
from provision.model import Inventory, Node
from provision.run import Facts, Job, RunSpec, Worker, world_size
from provision.run.found import merge_runs, parse_runs
from provision.session import Session
from provision.tasks.resume import refuse_resume, remaining, renewed
from provision.tasks.train import linked
from trainer.agent.contract.expected import Expected
from trainer.agent.contract.plan import from_json

PACKAGES = ("accelerate", "deepspeed", "llamafactory", "torch")
JOBS = {
    "llamafactory": Job("config", "sft.yaml"),
    "torchrun": Job("script", "train.py", ("--nnodes", "my own", "--lr", "1")),
    "deepspeed": Job("script", "train.py", ("--node_rank", "my own"), launcher="deepspeed"),
    "plain": Job("script", "train.py", ("--nnodes", "my own"), launcher="plain"),
    "accelerate": Job("script", "train.py", ("--num_machines", "my own"), launcher="accelerate"),
}


def spec(job, numbers, gpus=(8, 4, 2)):
    """A run on some of three nodes, which the first of them leads."""
    workers = [
        Worker(
            Node(f"gpu0{number + 1}", f"10.0.0.{number + 1}"),
            Facts(
                rank=rank, ip=f"10.0.0.{number + 1}", interface="eth0", gpus=gpus[number], cpus=64, packages=PACKAGES,
                boot_id=f"b{number}",
            ),
        )
        for rank, number in enumerate(numbers)
    ]  # fmt: skip
    return RunSpec(
        id="r1", workers=tuple(workers), prefix=PurePosixPath("/opt/llm/releases/abc"),
        folder=PurePosixPath("/opt/llm/runs/r1"), config="sft.yaml" if job.kind == "config" else "train.py",
        master=workers[0].node.address, port=29500, job=job, launcher=job.launcher, output="job/out",
        progress="job/out/trainer_log.jsonl" if job.kind == "config" else None,
    )  # fmt: skip


def plans(job, numbers):
    made = spec(job, numbers)
    return linked(launch(made), made, 4711, "00ff", 60.0)


def own_folders(plan, number):
    """A plan with the folders of another rank: those keep the names that they had."""
    return from_json(plan.to_json().replace(f"node{plan.node_rank}", f"node{number}"))


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("kept", [(0, 1), (0, 2), (1, 2), (0,), (2,)], ids=str)
def test_plans_match_the_launcher_for_the_remaining_nodes(job, kept):
    """The order stays, ranks close up, and the script's own arguments of the same names are its own."""
    made = plans(job, (0, 1, 2))
    found = filled(arranged([made[number] for number in kept], f"10.0.0.{kept[0] + 1}"), {})
    own = [own_folders(plan, number) for plan, number in zip(plans(job, kept), kept, strict=True)]
    wanted = [plan._replace(slots=made[0].slots) for plan in filled(own, {})]
    assert found == wanted
    assert [plan.node for plan in found] == [f"gpu0{number + 1}" for number in kept]
    assert world_size(found) == sum((8, 4, 2)[number] for number in kept)


def test_one_process_that_is_left_needs_no_multi_gpu():
    job = replace(JOBS["accelerate"])
    made = spec(job, (0, 1), gpus=(1, 1, 1))
    made = replace(made, expected=Expected("of all nodes", (1.0, 2.0)))
    both = linked(launch(made), made, 4711, "00ff", 60.0)
    assert all("--multi_gpu" in plan.argv for plan in filled(both, {}))
    (left,) = filled(arranged(both[:1], "10.0.0.1"), {})
    assert left.expected is None
    assert "--multi_gpu" not in left.argv


def test_another_first_node_is_reached_by_its_own_interface():
    left = plans(JOBS["torchrun"], (0, 1, 2))[1:]
    found = arranged(left, "10.0.0.2")
    shown = filled(found, {"gpu02": "ens1", "gpu03": "ens2"})
    assert [plan.env["NCCL_SOCKET_IFNAME"] for plan in shown] == ["=ens1", "=ens2"]
    assert [plan.env["GLOO_SOCKET_IFNAME"] for plan in shown] == ["ens1", "ens2"]
    assert {plan.link.host for plan in renewed(found, Facts(port=1, link_port=2), token="t")} == {"10.0.0.2"}


# --- who is meant ---------------------------------------------------------------------------------

NODES = tuple(Node(f"gpu0{number}", f"10.0.0.{number}") for number in range(1, 5))
CLUSTER = Inventory(Path("inventory.yaml"), PurePosixPath("/opt/llm/current"), NODES)


def state(node, rank, *, nnodes=3, began=100.0, message="failed"):
    about = {"run": "r1", "node": node, "node_rank": rank, "nnodes": nnodes, "state": message, "began": began, "uid": 0}
    return f"me 0\nboot b\npart r1/logs/node{rank} alice\nstate {json.dumps(about)}"


def run_of(**parts):
    return merge_runs(parse_runs(name, text, [node.name for node in NODES]) for name, text in parts.items())["r1"]


ALL = run_of(gpu01=state("gpu01", 0), gpu02=state("gpu02", 1), gpu03=state("gpu03", 2))
WITHOUT_THIRD = run_of(gpu01=state("gpu01", 0), gpu02=state("gpu02", 1))


@pytest.mark.parametrize(
    ("run", "nodes", "count", "chosen"),
    [
        (ALL, NODES, None, None),  # no choice by the user: all, or nothing
        (ALL, NODES, 2, ("gpu01", "gpu02")),
        (ALL, (NODES[2], NODES[1]), None, ("gpu02", "gpu03")),  # in the order of the ranks
        (ALL, NODES[1:], 1, ("gpu02",)),
        (WITHOUT_THIRD, (NODES[0], NODES[1], NODES[3]), None, ("gpu01", "gpu02")),
    ],
)
def test_the_nodes_that_a_run_continues_on(run, nodes, count, chosen):
    assert remaining(Session(CLUSTER, nodes), run, {}, count) == chosen
    refuse_resume(Session(CLUSTER), run, {}, chosen=chosen)


def test_more_nodes_than_the_run_had_are_refused_with_a_hint():
    with pytest.raises(UsageError, match=r"--nodes 4: run r1 ran on gpu\[01-03\]") as refused:
        remaining(Session(CLUSTER, NODES), ALL, {}, 4)
    assert refused.value.hint == "clusterctl resume --nodes 3 r1"
    with pytest.raises(UsageError, match="none of these nodes was chosen"):
        remaining(Session(CLUSTER, NODES[3:]), ALL, {}, None)


def test_a_silent_node_stops_a_resume_unless_it_was_excluded():
    silent = {"gpu03": "no route"}
    with pytest.raises(NodesFailedError) as refused:
        refuse_resume(Session(CLUSTER), WITHOUT_THIRD, silent)
    assert "clusterctl resume --exclude gpu03 r1" in refused.value.hint
    chosen = remaining(Session(CLUSTER, (*NODES[:2], NODES[3])), WITHOUT_THIRD, silent, None)
    refuse_resume(Session(CLUSTER), WITHOUT_THIRD, silent, chosen=chosen)


# --- afterwards -----------------------------------------------------------------------------------


def test_state_of_an_excluded_node_is_no_longer_part_of_the_run():
    """Else the run would be failed for ever by a node that has left it."""
    later = {"nnodes": 2, "began": 200.0, "message": "finished"}
    run = run_of(gpu01=state("gpu01", 0), gpu02=state("gpu02", 0, **later), gpu03=state("gpu03", 1, **later))
    assert (run.nodes, run.state, run.missing) == (("gpu02", "gpu03"), "finished", 0)


def test_a_run_with_a_replaced_node_has_its_members_in_the_order_of_their_ranks():
    """The lost node's own state still lists itself; the others' states are newer."""

    def of(node, rank, members, now, **fields):
        text = state(node, rank, message=now)
        start, _, about = text.rpartition("state ")
        return f"{start}state {json.dumps(json.loads(about) | {'members': members} | fields)}"

    now, lost = ["gpu01", "gpu04", "gpu03"], {"gpu02": "no power"}
    run = run_of(
        gpu01=of("gpu01", 0, now, "finished", excluded=lost),
        gpu02=of("gpu02", 1, ["gpu01", "gpu02", "gpu03"], "running", excluded={}),
        gpu03=of("gpu03", 2, now, "finished", excluded=lost),
        gpu04=of("gpu04", 3, now, "finished", excluded=lost),
    )
    assert (run.members, run.spares, run.missing, run.state) == (tuple(now), (), 0, "finished")
    assert [(part.rank, part.position) for part in run.parts] == [(0, 0), (1, 3), (2, 2)]
    idle = run_of(gpu01=of("gpu01", 0, now[:1], "finished"), gpu04=of("gpu04", 1, now[:1], "failed"))
    assert (idle.members, idle.spares, idle.state) == (("gpu01",), ("gpu04",), "finished")


def test_a_run_that_was_resumed_on_other_nodes_is_without_the_old_rank_0():
    """Rank 0's node was lost; the others took over, ended, and were resumed."""

    def of(node, rank, members, began, message):
        text = state(node, rank, message=message, began=began)
        start, _, about = text.rpartition("state ")
        return f"{start}state {json.dumps(json.loads(about) | {'members': members, 'excluded': {}})}"

    now = ["gpu03", "gpu02"]
    run = run_of(
        gpu01=of("gpu01", 0, ["gpu01", "gpu02"], 100.0, "running"),
        gpu02=of("gpu02", 1, now, 1000.0, "finished"),
        gpu03=of("gpu03", 2, now, 1000.0, "finished"),
    )
    assert (run.members, run.missing, run.state) == (tuple(now), 0, "finished")
    assert [(part.node, part.rank) for part in run.parts] == [("gpu03", 0), ("gpu02", 1)]
