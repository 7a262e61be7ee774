"""Runs that lose nodes: a spare takes the rank, or the run continues on fewer nodes, decided by the agents alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import SAVE, alive, eventually, free_port, nodes

from trainer.agent.contract import effective
from trainer.agent.supervisor.spent import SHARE

# Without a checkpoint it saves one, writes the file ``ready`` and waits; with one it prints its place and finishes.
TRAINER = (
    SAVE
    + """
import time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
found = [word for word in sys.argv[1:] if word.startswith("resume=")]
if not found:
    save(2, 0)
    for other in range(1, size):
        with zipfile.ZipFile("out/checkpoint-2/rng_state_%d.pth" % other, "w") as file:
            file.writestr("data", "x")
    open("ready", "w").close()
    time.sleep(600)
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "NODE_RANK", "NNODES")
about = {name: os.environ[name] for name in names}
about["words"], about["from"] = sys.argv[1:6], os.path.basename(found[-1])
new = pathlib.Path("resumed.new")
new.write_text(json.dumps(about))
new.rename("resumed")
time.sleep(float(os.environ.get("LONGER", "0")))
"""
)
# Each node saves its own rank's file alone. A resumed one shows the file that its rank reads.
PARTED = (
    SAVE
    + """
import time
rank = int(os.environ["RANK"])
found = [word for word in sys.argv[1:] if word.startswith("resume=")]
own = "rng_state_%d.pth" % rank
if not found:
    save(2, rank, weights=rank == 0)
    with zipfile.ZipFile("out/checkpoint-2/" + own, "w") as file:
        file.writestr("data", "of rank %d" % rank)
        file.writestr("more", bytes(int(os.environ.get("MORE", "0"))))
    open("ready", "w").close()
    time.sleep(600)
save(4, rank, weights=rank == 0)
folder = pathlib.Path(found[-1].partition("=")[2])
if os.environ.get("AGAIN"):
    while not os.path.exists("go"):
        time.sleep(0.05)
with zipfile.ZipFile(folder / own) as file:
    about = {"rank": rank, "data": file.read("data").decode(), "weights": (folder / "model.safetensors").is_file()}
new = pathlib.Path("resumed.new")
new.write_text(json.dumps(about))
new.rename("resumed")
"""
)
WORDS = ("{node_rank}", "{nnodes}", "{master}", "{first_rank}", "{world_size}")


class SpareRun:
    """A run on the first nodes, with the others as spares. Each node has its own address and disk."""

    def __init__(self, folder, active, spares, **link):
        count = active + spares
        others = [[f"127.0.0.{position + 1}", free_port()] for position in range(1, count)]
        self.parts, self.shared = nodes(folder, count, others=others, **link)
        self.active = active

    def start(self, code=TRAINER, without=None, **plan):
        shared = self.shared | {"nnodes": self.active}
        for part in self.parts:
            first = part.rank if part.rank < self.active else 0
            part.plan(
                code,
                *WORDS,
                each_rank=True,
                first_rank=first,
                resume={"output": "out", "argv": ["resume={checkpoint}"]},
                none_ok=True,
                port=23456,
                **shared,
                **plan,
            )
        present = [part for part in self.parts if part.rank != without]
        started = [subprocess.Popen(part.command("start"), stdout=subprocess.PIPE) for part in present]
        assert all(json.loads(each.communicate(timeout=60)[0])["started"] for each in started)
        return self

    def wait_ready(self):
        for part in self.parts[: self.active]:
            part.wait_for("ready")
        for part in self.parts[self.active :]:
            eventually(lambda part=part: part.state().get("state") == "spare")
        return self

    def kill(self, *positions):
        """What a node's loss is to the others: no process of it is left."""
        for position in positions:
            state = self.parts[position].state()
            for key in ("guard", "pid"):
                os.kill(state[key], signal.SIGKILL)
        for position in positions:
            for pid in set(alive(self.parts[position].mark)) & set(alive(self.parts[position].node_mark)):
                os.kill(pid, signal.SIGKILL)

    def stop(self, *positions, number=signal.SIGSTOP):
        """Stop the processes of agents: the nodes are silent, as if the network were cut."""
        for position in positions:
            state = self.parts[position].state()
            for key in ("guard", "pid"):
                os.kill(state[key], number)

    def resumed(self, position):
        return json.loads(self.parts[position].wait_for("resumed"))

    def ends(self, *positions):
        return [self.parts[position].wait_end() for position in positions]

    def events(self, position, kind):
        return [event for event in self.parts[position].events() if event["event"] == kind]

    def close(self):
        for part in self.parts:
            state = part.state()
            for key in ("guard", "pid"):
                if key in state and state[key] in alive(part.mark):
                    os.kill(state[key], signal.SIGCONT)
            part.close()


@pytest.fixture
def spare_run(tmp_path, request):
    made = []

    def make(*arguments, **link):
        made.append(SpareRun(tmp_path, *arguments, most=getattr(request, "param", None), **link))
        return made[-1]

    yield make
    for run in made:
        run.close()


# All agents are connected to the hub, or one is, and passes on the frames of the others.
BOTH_WAYS = pytest.mark.parametrize("spare_run", [None, 1], indirect=True, ids=["all to the hub", "through one"])


def place(rank, size, master):
    """What a program on one node with one rank sees."""
    return {
        "RANK": str(rank),
        "NODE_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "NNODES": str(size),
        "MASTER_ADDR": master,
        "words": [str(rank), str(size), master, str(rank), str(size)],
        "from": "checkpoint-2",
    }


@BOTH_WAYS
def test_a_spare_takes_the_rank_of_a_lost_node(spare_run):
    run = spare_run(3, 1).start().wait_ready()
    run.kill(1)
    assert [run.resumed(position) for position in (0, 3, 2)] == [place(rank, 3, "127.0.0.1") for rank in range(3)]
    assert [end["state"] for end in run.ends(0, 2, 3)] == ["finished"] * 3
    (replaced,) = run.events(0, "replaced")
    assert (replaced["node"], replaced["spare"], replaced["rank"]) == ("n1", "n3", 1)
    assert "agent" in replaced["text"]  # "its agent exited …", or its guard's death is seen first
    for position in (0, 2, 3):
        assert run.events(position, "attempt")[-1]["nodes"] == ["n0", "n3", "n2"]
        assert run.parts[position].state()["members"] == ["n0", "n3", "n2"]
        assert list(run.parts[position].state()["excluded"]) == ["n1"]
    assert not (run.parts[3].folder / "ready").exists()


@BOTH_WAYS
@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_gets_the_files_of_a_node_that_is_lost_with_its_disk(spare_run, lost):
    run = spare_run(3, 1).start(PARTED, copies={}).wait_ready()
    (copied,) = eventually(lambda: run.events(0, "copied"))
    assert copied["on"] == ["n1", "n2", "n3"]  # a ring, with the spare at its end
    assert {path.name for path in (run.parts[3].folder / "out/.clusterctl-copies").rglob("*.pth")} == {
        "rng_state_2.pth"
    }
    run.kill(lost)
    shutil.rmtree(run.parts[lost].folder / "out")
    for rank, position in enumerate([3 if position == lost else position for position in range(3)]):
        assert run.resumed(position) == {"rank": rank, "data": f"of rank {rank}", "weights": True}
    assert {end["state"] for end in run.ends(*({0, 1, 2, 3} - {lost}))} == {"finished"}
    later = [event for position in {0, 1, 2, 3} - {lost} for event in run.events(position, "copied")]
    assert [event["on"] for event in later if event["step"] == 4] == [[f"n{each}" for each in range(4) if each != lost]]


def test_copies_continue_on_a_spare_that_took_a_rank(spare_run):
    run = spare_run(2, 2).start(PARTED, copies={}, env={"AGAIN": "1"}).wait_ready()
    eventually(lambda: run.events(0, "copied"))
    run.kill(1)
    eventually(lambda: [event for event in run.events(0, "copied") if event["checkpoint"] == "checkpoint-4"])
    assert run.events(0, "copied")[-1]["on"] == ["n2", "n3"]  # a ring again, with the other spare at its end
    assert not [event["text"] for event in run.events(0, "notice") if event.get("kind") == "copies"]
    assert list((run.parts[3].folder / "out/.clusterctl-copies").glob("checkpoint-4@*/rng_state_1.pth"))
    for position in (0, 2):
        (run.parts[position].folder / "go").touch()
    assert {end["state"] for end in run.ends(0, 2, 3)} == {"finished"}


def test_another_copy_is_used_if_its_node_falls_silent_in_a_restore(spare_run):
    """The run has no restart: the loss of a spare that has copies fails no attempt."""
    run = spare_run(2, 3, lost_after=3)
    run.start(PARTED, copies={"peers": 3, "rate": 1 << 30}, env={"MORE": str(96 << 20)}).wait_ready()
    (copied,) = eventually(lambda: run.events(0, "copied"))
    assert copied["on"] == ["n1", "n2", "n3", "n4"]  # n2 to n4 have the file of n1
    shutil.rmtree(run.parts[2].folder / "out")  # so the first spare gets its files from the second one
    run.kill(1)
    shutil.rmtree(run.parts[1].folder / "out")
    log = run.parts[2].logs / "events.jsonl"
    eventually(lambda: "files of checkpoint-2" in log.read_text())
    run.stop(3)
    began = time.monotonic()
    assert run.resumed(2) == {"rank": 1, "data": "of rank 1", "weights": True}
    assert time.monotonic() - began < 15
    assert {end["state"] for end in run.ends(0, 2, 4)} == {"finished"}
    assert any(event["text"].startswith("n3 is lost while") for event in run.events(2, "notice"))
    assert [event["attempt"] for event in run.events(0, "attempt")] == [1, 2]
    assert list(run.parts[0].state()["excluded"]) == ["n1", "n3"]


def test_a_spare_that_cannot_write_the_checkpoint_tries_again(spare_run):
    run = spare_run(2, 2).start(PARTED, copies={}, restarts=9, backoff=0.2).wait_ready()
    eventually(lambda: run.events(0, "copied"))
    blocked = run.parts[2].folder / "out/checkpoint-2"
    blocked.write_text("in the way")
    run.kill(1)
    eventually(lambda: [event for event in run.events(0, "notice") if "n2: [Errno" in event["text"]])
    blocked.unlink()
    assert [run.resumed(position)["rank"] for position in (0, 2)] == [0, 1]
    assert {end["state"] for end in run.ends(0, 2, 3)} == {"finished"}
    assert [event["node"] for event in run.events(0, "replaced")] == ["n1"]


def test_a_spare_replaces_one_that_cannot_write_the_checkpoint(spare_run):
    run = spare_run(2, 3).start(PARTED, copies={"peers": 2}).wait_ready()  # n2, which fails too, has one of the copies
    eventually(lambda: run.events(0, "copied"))
    (run.parts[2].folder / "out/checkpoint-2").write_text("in the way")
    run.kill(1)
    assert [run.resumed(position)["rank"] for position in (0, 3)] == [0, 1]
    assert {end["state"] for end in run.ends(0, 3, 4)} == {"finished"}
    assert [(event["node"], event["spare"]) for event in run.events(0, "replaced")] == [("n1", "n2"), ("n2", "n3")]


@BOTH_WAYS
def test_another_agent_becomes_the_hub_if_rank_0_is_lost(spare_run):
    run = spare_run(3, 1).start().wait_ready()
    run.kill(0)
    assert [run.resumed(position) for position in (3, 1, 2)] == [place(rank, 3, "127.0.0.4") for rank in range(3)]
    assert [end["state"] for end in run.ends(1, 2, 3)] == ["finished"] * 3
    assert {run.parts[position].state()["hub"] for position in (1, 2, 3)} == {1}


# Rank 0 makes a step every 50 ms. A resumed run ends soon.
STEPS = (
    TRAINER.replace(
        "    time.sleep(600)",
        """
    for step in range(3, 10**6):
        time.sleep(0.05)
        if rank == 0:
            print("step %d loss 1.0" % step, flush=True)""",
    )
    + """
if rank == 0:
    for step in range(3, 43):
        time.sleep(0.05)
        print("step %d loss 1.0" % step, flush=True)
"""
)


@pytest.mark.parametrize("printing", [0, 1])
def test_the_account_of_time_continues_on_the_node_that_takes_the_place_of_the_printing_one(spare_run, printing):
    """Rank 0 prints the steps, or the last one, as in Megatron."""
    run = spare_run(2, 1).start(STEPS.replace("rank == 0", f"rank == {printing}")).wait_ready()

    def trained():
        found = effective.read(run.parts[printing].state().get("spent"))
        return found if found is not None and found.training > 1.5 * SHARE else None

    before = eventually(trained)
    run.kill(printing)
    assert {end["state"] for end in run.ends(1 - printing, 2)} == {"finished"}
    end = run.events(2, "end")[-1]
    found = effective.read(end["spent"])
    assert before.training - SHARE - 2 < found.training <= before.training + 6  # its state is 5 s old at most
    assert found.repeating > 0.5  # the new node's steps were made before
    assert (found.restarts, found.failures) == (1, 1)
    assert found.recovering > 2  # until the loss was noticed
    began = run.parts[printing].state()["began"]
    assert found.total == pytest.approx(end["time"] - began, abs=2.0)
    assert run.parts[2].state()["spent"]["training"] == pytest.approx(found.training, abs=0.1)


@pytest.mark.parametrize("after", ["ready", "copied"])
def test_the_last_two_agents_find_each_other_when_rank_0_is_lost(spare_run, after):
    """The spare looks for another hub while the node with a rank is still ending its processes."""
    run = spare_run(2, 1, lost_after=5).start(PARTED, copies={}, env={"AGAIN": "1"}).wait_ready()
    if after == "copied":
        eventually(lambda: run.events(0, "copied"))
    run.kill(0)
    for position in (1, 2):
        eventually(lambda position=position: len(run.events(position, "attempt")) == 2)
        attempt = run.events(position, "attempt")[-1]
        assert attempt["nodes"] == ["n2", "n1"]
        assert after == "ready" or attempt["checkpoint"] == "checkpoint-2"
        (run.parts[position].folder / "go").touch()
        assert run.parts[position].state()["hub"] == 1


def test_a_requeued_job_starts_without_the_nodes_that_slurm_has_lost(spare_run, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")  # of srun
    run = spare_run(2, 1).start(without=1)
    for position in (0, 2):
        (attempt,) = eventually(lambda position=position: run.events(position, "attempt"))
        assert attempt["nodes"] == ["n0", "n2"]


@BOTH_WAYS
def test_two_nodes_are_lost_at_once(spare_run):
    run = spare_run(3, 2).start().wait_ready()
    run.kill(0, 1)
    assert [run.resumed(position) for position in (3, 4, 2)] == [place(rank, 3, "127.0.0.4") for rank in range(3)]
    assert [end["state"] for end in run.ends(2, 3, 4)] == ["finished"] * 3


def test_fewer_nodes_continue_without_a_spare(spare_run):
    run = spare_run(3, 0).start(min_nodes=2).wait_ready()
    run.kill(1)
    assert [run.resumed(position) for position in (0, 2)] == [place(rank, 2, "127.0.0.1") for rank in range(2)]
    assert [end["state"] for end in run.ends(0, 2)] == ["finished"] * 2
    assert run.events(0, "replaced")[0]["spare"] is None


def test_the_run_ends_if_too_few_nodes_are_left(spare_run):
    run = spare_run(3, 0).start(min_nodes=3).wait_ready()
    run.kill(2)
    for end in run.ends(0, 1):
        assert (end["state"], end["why"]["node"]) == ("failed", "n2")
        assert "no spare is left for n2, and the run needs at least 3 nodes" in end["why"]["text"]


def test_a_lost_spare_does_not_end_the_run(spare_run):
    run = spare_run(2, 2).start().wait_ready()
    run.kill(2)
    eventually(lambda: any(event["node"] == "n2" for event in run.events(0, "peer")))
    assert [part.state()["state"] for part in run.parts[:2]] == ["running"] * 2
    run.kill(1)
    assert run.resumed(3) == place(1, 2, "127.0.0.1")
    assert [end["state"] for end in run.ends(0, 3)] == ["finished"] * 2


def test_the_smaller_part_of_a_divided_network_ends_and_says_why(spare_run):
    """The hub and another node are silent; the others continue, and refuse both when they are back."""
    run = spare_run(3, 2, lost_after=3).start(env={"LONGER": "30"}).wait_ready()
    run.stop(0, 1)
    assert run.resumed(2) == place(2, 3, "127.0.0.4")
    run.stop(0, 1, number=signal.SIGCONT)
    for end in run.ends(0, 1):
        assert end["state"] == "failed"
        assert "the run continues without n" in end["why"]["text"]
    assert [run.parts[position].state()["state"] for position in (2, 3, 4)] == ["running"] * 3
    run.parts[3].do("stop")
    assert [end["state"] for end in run.ends(2, 3, 4)] == ["stopped"] * 3


@BOTH_WAYS
def test_a_part_without_a_majority_does_not_continue(spare_run):
    run = spare_run(2, 2, lost_after=3).start().wait_ready()
    run.stop(1, 2, 3)
    (end,) = run.ends(0)
    assert end["state"] == "failed"
    assert "no majority: the run may continue on the others" in end["why"]["text"]
    assert not (run.parts[0].folder / "resumed").exists()
    run.kill(1, 2, 3)


# Whenever rank 1 has work, another process is busy on its processor. That process also lets the ranks step together.
SLOW = (
    SAVE
    + """
import socket, time
rank = int(os.environ["RANK"])
if any(word.startswith("resume=") for word in sys.argv[1:]):
    pathlib.Path("resumed.new").write_text(json.dumps({"rank": rank}))
    os.rename("resumed.new", "resumed")
    sys.exit(0)
ports = [30000 + (int(os.environ["MASTER_PORT"]) + each) % 10000 for each in range(2)]
steps = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
steps.bind((os.environ["MASTER_ADDR"], ports[rank]))
if rank == 1:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if os.fork() == 0:
        while True:
            for port in ports:
                steps.sendto(b"x", (os.environ["MASTER_ADDR"], port))
            until = time.monotonic() + 0.02
            while time.monotonic() < until:
                pass
            time.sleep(0.03)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
for step in range(1, 10**6):
    steps.recv(1)
    sum(range(300_000 * rank))
    if rank == 0:
        print("step %d loss 1.0" % step, flush=True)
    if step % 40 == 0:
        save(step, rank, weights=rank == 0)
"""
)


def test_a_node_that_stays_slow_is_replaced_by_a_spare(spare_run):
    run = spare_run(2, 1).start(SLOW, copies={}, env={"CLUSTERCTL_STRAGGLER_ROUND": "1"})
    assert [run.resumed(position) for position in (0, 2)] == [{"rank": 0}, {"rank": 1}]
    assert {end["state"] for end in run.ends(0, 2)} == {"finished"}
    (replaced,) = run.events(0, "replaced")
    assert (replaced["node"], replaced["spare"]) == ("n1", "n2")
    assert "rank 1 on n1" in replaced["text"]
    end = run.parts[1].wait_end()
    assert end["state"] == "failed"
    assert end["why"]["text"].startswith("a spare replaces this node: the others wait for rank 1 on n1")


# nvidia-smi of a node with two GPUs. After the file ``lost`` is in the node's folder, it answers as recorded.
GPUS = """#!/bin/sh
node=$(tr '\\0' '\\n' </proc/$PPID/cmdline | sed -n 's|/plan-.*[.]json$||p' | head -n 1)
case $* in
*--loop=*) exec sleep 600 ;;
*clocks.max.sm*) printf '0, 1980, GPU-a\\n1, 1980, GPU-b\\n'; touch "$node/listed" ;;
*) if [ -e "$node/lost" ]; then cat "$node/lost"; else printf 'GPU-a\\nGPU-b\\n'; touch "$node/asked"; fi ;;
esac
"""
# The rank of n1 fails when the test says so. The other ranks finish in the second attempt.
LOSES = """
import os, sys, time
node = os.environ["CLUSTERCTL_NODE"]
if os.path.exists("ready") or node in ("n2", "n3"):
    sys.exit(0)
open("ready", "w").close()
while node != "n1" or not os.path.exists("go"):
    time.sleep(0.02)
sys.exit(3)
"""


def lose(run, answer):
    """Let a node's rank fail. ``answer`` is what its nvidia-smi says from then on; None: what it said before."""
    folder = run.parts[1].folder
    run.parts[1].wait_for("listed")
    if answer is not None:
        (folder / "lost").write_text(answer)
    (folder / "go").touch()


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(GPUS)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("GPU-a\n", "it has lost GPU 1: nvidia-smi lists 1 of 2"),
        (
            "Unable to determine the device handle for GPU1: 0000:00:07.0: GPU is lost.  Reboot the system\n",
            "it has lost a GPU: nvidia-smi says: Unable to determine the device handle for GPU1",
        ),
    ],
    ids=["fewer", "error"],
)
def test_a_spare_replaces_a_node_that_lost_a_gpu(spare_run, gpus, answer, says):
    run = spare_run(2, 1).start(LOSES).wait_ready()
    lose(run, answer)
    assert {end["state"] for end in run.ends(0, 2)} == {"finished"}
    (replaced,) = run.events(0, "replaced")
    assert (replaced["node"], replaced["rank"], replaced["spare"]) == ("n1", 1, "n2")
    assert says in replaced["text"]
    end = run.parts[1].wait_end()
    assert end["why"]["text"].startswith(f"a spare replaces this node: {says}")


def test_a_spare_that_lost_a_gpu_takes_no_rank(spare_run, gpus):
    run = spare_run(2, 2).start(LOSES).wait_ready()
    run.parts[2].wait_for("asked")
    (run.parts[2].folder / "lost").write_text("GPU-b\n")
    lose(run, "GPU-a\n")
    assert {end["state"] for end in run.ends(0, 2, 3)} == {"finished"}
    (replaced,) = run.events(0, "replaced")
    assert (replaced["node"], replaced["spare"]) == ("n1", "n3")
    assert run.parts[0].state()["members"] == ["n0", "n3"]
    texts = [event["text"] for event in run.events(2, "notice")]
    assert "this spare takes no rank: it has lost GPU 0: nvidia-smi lists 1 of 2" in texts


def test_a_run_whose_only_spare_lost_a_gpu_ends_and_says_why(spare_run, gpus):
    run = spare_run(2, 1).start(LOSES).wait_ready()
    run.parts[2].wait_for("asked")
    (run.parts[2].folder / "lost").write_text("GPU-b\n")
    run.kill(1)
    for end in run.ends(0, 2):
        assert end["state"] == "failed"
        assert "no spare is left for n1; n2 takes no rank: it has lost GPU 0" in end["why"]["text"]


def test_a_failed_rank_on_a_node_with_all_gpus_is_no_reason_to_replace_it(spare_run, gpus):
    run = spare_run(2, 1).start(LOSES).wait_ready()
    lose(run, None)
    assert {end["state"] for end in run.ends(0, 1, 2)} == {"failed"}
    assert run.events(0, "replaced") == []
