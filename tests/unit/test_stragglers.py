"""The rank that the others wait for: named with its cause, and no healthy rank ever."""

import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import plan_of

from trainer.agent import rounds
from trainer.agent.processes import stat_of
from trainer.agent.queues import Queues, plain, sockets
from trainer.agent.rounds import Steps, Stragglers, from_object, join, round_seconds, to_object
from trainer.agent.run_files import Events, NodePlan, State
from trainer.agent.signals import foreign_shares, gpu_of
from trainer.agent.stragglers import (
    CONSISTENT,
    LOSS,
    PERSISTENT,
    WARM,
    Case,
    Gpu,
    Rank,
    Round,
    Track,
    Verdict,
    advance,
    consider,
    sentence,
)
from trainer.agent.supervisor.control import Control

RECORDED = Path(__file__).parent / "recorded_stragglers"


def news_of(rounds):
    """What is reported, each with the number of the round."""
    track, found = Track(), []
    for number, one in enumerate(rounds):
        track, news = advance(track, one)
        found += [(number, verdict, slow) for verdict, slow in news]
    return found


def ranks(*each, per_node=1, **links):
    """A round of ranks, each with changes of a usual one."""
    found = {
        number: Rank(f"node{number // per_node + 1:02}", run=0.5)._replace(**one) for number, one in enumerate(each)
    }
    return Round(found, links.get("queues", {}))


HEALTHY = [ranks({}, {}, {}, {})] * 10
FAST_GPU = Gpu(use=1.0, power=690.0, clock=1750.0, memory=50e9)


@pytest.mark.parametrize(
    ("slow", "cause", "says"),
    [
        ({"delay": 0.12, "stall": 0.12}, "cpu", "waits for a processor 12 % of the time"),
        ({"delay": 0.12, "stall": 0.12, "quota": 0.6}, "cpu", "uses up its CPU quota"),
        ({"data": 0.12}, "data", "waits for its data loader 12 % of the time"),
        ({"disk": 0.12}, "disk", "waits for a disk 12 % of the time"),
    ],
)
def test_slow_rank_is_named_with_its_cause_even_if_it_was_slow_from_the_start(slow, cause, says):
    ((number, verdict, named),) = news_of([ranks({}, {}, slow, {})] * 8)
    assert (verdict.rank, verdict.node, verdict.cause, named) == (2, "node03", cause, True)
    assert number == CONSISTENT  # the first round does not count
    assert verdict.by == pytest.approx(0.12)
    assert says in sentence(verdict)
    assert "the others wait for rank 2 on node03 12 % of the time" in sentence(verdict)


def test_slower_computation_is_named_only_if_it_has_changed():
    unequal = ranks({"run": 0.8}, {}, {}, {})  # a pipeline's first stage, rank 0 with the logs
    assert news_of([unequal] * 100) == []
    slower = ranks({"run": 0.8}, {"run": 0.6}, {}, {})
    ((_, verdict, _),) = news_of([unequal] * 10 + [slower] * 6)
    assert (verdict.rank, verdict.cause) == (1, "compute")


def test_four_rounds_are_not_enough_and_five_need_not_be_adjacent_to_the_start():
    slow = ranks({}, {"data": 0.2}, {}, {})
    assert news_of([*HEALTHY, *[slow] * 4, *HEALTHY] * 5) == []
    assert len(news_of([*HEALTHY, *[slow] * 5])) == 1


def test_it_is_reported_once_and_when_it_is_over():
    slow = ranks({}, {"data": 0.2}, {}, {})
    found = news_of([*HEALTHY, *[slow] * 20, *HEALTHY, *[slow] * 9])
    assert [(verdict.rank, named) for _, verdict, named in found] == [(1, True), (1, False), (1, True)]
    assert found[1][0] - (len(HEALTHY) + 20) == CONSISTENT - 1


def test_node_whose_signals_are_missing_is_not_over():
    slow = ranks({}, {"data": 0.2}, {}, {})
    without = Round({rank: each for rank, each in slow.ranks.items() if rank != 1})
    assert len(news_of([*[slow] * 8, without, slow, without, slow, *[without] * 9])) == 1


def test_another_rank_or_cause_replaces_the_named_one():
    one, two = ranks({}, {"data": 0.2}, {}, {}), ranks({}, {}, {}, {"disk": 0.2})
    found = news_of([*HEALTHY, *[one] * 9, *[two] * 9])
    assert [(verdict.rank, verdict.cause, named) for _, verdict, named in found] == [
        (1, "data", True), (1, "data", False), (3, "disk", True),
    ]  # fmt: skip


def test_slow_link_is_named_by_the_queue_of_the_sender():
    full = ranks({}, {}, {}, queues={("node02", "node03"): 0.9, ("node01", "node02"): 0.1})
    ((_, verdict, _),) = news_of([full] * 7)
    assert (verdict.rank, verdict.cause, verdict.to) == (1, "link", "node03")
    assert "data from node02 to node03 waits 90 % of the time" in sentence(verdict)


def test_node_at_both_full_queues_has_the_slow_link():
    full = ranks({}, {}, {}, queues={("node03", "node02"): 0.5, ("node02", "node01"): 0.2})
    ((_, verdict, _),) = news_of([full] * 9)
    assert (verdict.rank, verdict.node, verdict.cause) == (1, "node02", "link")


def test_queues_to_a_rank_that_is_late_do_not_blame_the_sender():
    late = ranks({}, {"data": 0.3}, {}, queues={("node01", "node02"): 0.9})
    assert [verdict.cause for _, verdict, _ in news_of([late] * 9)] == ["data"]


def gpus(*each):
    return ranks(*({"gpu": FAST_GPU._replace(**one)} for one in each))


def test_throttled_clock_is_named():
    hot = gpus({}, {}, {"clock": 1500.0, "slowed": 1.0}, {})
    ((_, verdict, _),) = news_of([hot] * 7)
    assert (verdict.rank, verdict.cause) == (2, "clock")
    assert "its GPU runs at 1500 MHz" in sentence(verdict)


def test_cards_of_unequal_clocks_are_healthy_until_one_changes():
    unequal = gpus({}, {}, {"clock": 1600.0}, {})  # at the power limit every card has its own clock
    assert news_of([unequal] * 50) == []
    ((_, verdict, _),) = news_of([unequal] * 10 + [gpus({}, {}, {"clock": 1400.0}, {})] * 6)
    assert (verdict.rank, verdict.cause) == (2, "clock")


def test_gpu_without_work_is_named_while_the_others_spin():
    slow = ranks({"gpu": FAST_GPU}, {"gpu": FAST_GPU._replace(use=0.8), "run": 0.35, "data": 0.15}, {"gpu": FAST_GPU})
    ((_, verdict, _),) = news_of([slow] * 7)
    assert (verdict.rank, verdict.cause) == (1, "data")
    hidden = ranks({"gpu": FAST_GPU}, {"gpu": FAST_GPU, "data": 0.15}, {"gpu": FAST_GPU})
    assert news_of([hidden] * 30) == []  # its GPU works in the meantime


def test_power_of_the_others_falls():
    spinning = gpus({"power": 560.0}, {"power": 680.0}, {"power": 560.0})
    ((_, verdict, _),) = news_of([gpus({}, {}, {})] * 9 + [spinning] * 6)
    assert (verdict.rank, verdict.cause) == (1, "compute")
    more = gpus({}, {"power": 760.0}, {})  # the card itself draws more, and no other waits
    assert news_of([gpus({}, {}, {})] * 9 + [more] * 20) == []


def test_all_of_a_slow_node_does_not_hide_its_ranks():
    each = [{"delay": 0.2, "stall": 0.2} if number // 8 == 1 else {} for number in range(32)]
    found = news_of([ranks(*each, per_node=8)] * 9)
    assert [verdict.node for _, verdict, _ in found] == ["node02"]


# --- recorded ---------------------------------------------------------------------------------------


def recorded(name):
    return [json.loads(line) for line in (RECORDED / name).read_text().splitlines()]


def test_second_process_on_a_gpu_as_nvidia_smi_shows_it():
    text = (RECORDED / "pmon.txt").read_text()
    lines = [line.split(None, 1)[1] for line in text.splitlines() if not line.startswith("#")]  # it has times
    quiet = [line for line in lines if "1363" not in line and "1412" not in line]
    assert foreign_shares(quiet, {1280, 1281}) == {}
    heavy = [line for line in lines if "1363" not in line]
    assert foreign_shares(heavy, {1280, 1281}) == {1: pytest.approx(0.1, abs=0.01)}  # half of 25 s of 113
    assert foreign_shares(heavy, {7, 8}) == {}  # a container's pids


# --- the parts ---------------------------------------------------------------------------------------

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0100000A:8000 0200000A:9000 01 00100000:00000000 01:00000014 00000000     0        0 2 1
   2: 0100000A:8001 0200000A:9000 01 00000010:00000000 01:00000014 00000000     0        0 2 1
   3: 0100007F:8001 0100007F:9000 01 00100000:00000000 01:00000014 00000000     0        0 2 1
"""


def test_established_connections_to_other_nodes():
    assert [(each.local, each.remote_port) for each in sockets(TCP)] == [("0100000A", 0x9000)] * 2
    assert sockets("") == sockets("garbage\nmore 1 2\n") == []
    assert plain("0000000000000000FFFF00000100000A:8000") == plain("0100000A:1") == "0100000A"


def filled(sock):
    """Send until the other end, which does not read, takes no more."""
    sock.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            sock.send(b"x" * (1 << 16))


def test_data_that_waits_in_sockets_is_seen():
    with ExitStack() as stack:
        keep = stack.enter_context
        plain_server = keep(socket.create_server(("127.0.0.2", 0)))
        mapped_server = keep(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        for address, server in (("127.0.0.2", plain_server), ("127.0.0.3", mapped_server)):
            place = (address, server.getsockname()[1])
            keep(socket.create_connection(place, source_address=("127.0.0.1", 0)))
            sender = keep(server.accept()[0])
            filled(sender)
        queues = Queues()
        stack.callback(queues.close)
        for now in (0.0, 1.0):  # with a new list of sockets, and with a known one
            assert queues.look(now)["0100007F"] > 2 * (64 << 10)
        assert {"0200007F", "0300007F"} <= queues.own


@pytest.mark.parametrize(
    ("local", "visible", "index"),
    [("1", None, 1), ("1", "4,5", 5), ("3", "6", 6), ("0", "GPU-bfec", None), (None, None, None), ("x", None, None)],
)
def test_gpu_of_a_rank(local, visible, index):
    assert gpu_of(local, visible) == index


def test_join_drops_what_no_agent_sends():
    good = {"ranks": {"0": {"run": 0.5, "gpu": {"power": 300}}}, "addresses": ["A"], "queues": {"B": 0.5, "C": 1.0}}
    bad = {"ranks": {"1": {"run": 1e9, "delay": "x", "gpu": {"power": float("nan")}}, "-1": {}, "x": {}, "2": 7}}
    found = join({"one": good, "two": {**bad, "addresses": ["B", 7], "queues": [1]}, "three": {"ranks": 5}})
    assert found.ranks == {0: Rank("one", run=0.5, gpu=Gpu(power=300.0)), 1: Rank("two", gpu=Gpu())}
    assert found.queues == {("one", "two"): 0.5}
    assert from_object(json.loads(json.dumps(to_object(found)))) == found


def test_rounds_without_steps_do_not_count():
    steps = Steps()
    assert not steps.steady(0, 20)
    for second in range(0, 100, 10):
        steps.step(second)
    assert steps.steady(115, 20)
    assert not steps.steady(121, 20)  # rank 0 saves a checkpoint that nothing announces


def test_seconds_of_a_round():
    assert round_seconds(plan_of()) == 0  # one rank
    assert round_seconds(plan_of(processes=2)) == 20
    assert round_seconds(plan_of(processes=2, env={"CLUSTERCTL_STRAGGLER_ROUND": "2"})) == 2
    assert round_seconds(plan_of(processes=2, env={"CLUSTERCTL_STRAGGLER_ROUND": "0"})) == 0
    assert round_seconds(plan_of(processes=2, env={"CLUSTERCTL_STRAGGLER_ROUND": "x"})) == 20
    assert round_seconds(plan_of(processes=2, env={"CLUSTERCTL_STRAGGLER_ROUND": "nan"})) == 0


def part(folder, rank, pid, env, **more):
    """An agent's search for stragglers, with one process as its rank."""
    folder.mkdir()
    link = {"nodes": ["n0", "n1"], "host": "127.0.0.1", "port": 1, "token": "0" * 32}
    plan = NodePlan(plan_of(node=f"n{rank}", node_rank=rank, link=link, env=env), folder, folder / "plan.json")
    plan.logs.mkdir(parents=True, exist_ok=True)
    events = Events(plan.logs)
    control = Control(plan, events)
    tracker = SimpleNamespace(ranks={pid: rank}, known={pid: stat_of(pid)})
    search = Stragglers(plan, tracker, control, events, State(plan.logs), **more)
    return search, control, plan.logs / "events.jsonl"


def test_the_stack_of_the_named_rank_is_taken_once_on_its_node(tmp_path, monkeypatch):
    verdict = Verdict(1, "n1", "data", "data", 0.2, "it waits")
    monkeypatch.setattr(rounds, "advance", lambda track, _new: (track, [(verdict, True)]))
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**os.environ, "RANK": "1"})
    with child, ExitStack() as stack:
        head, control, _ = part(tmp_path / "a", 0, os.getpid(), {rounds.VARIABLE: "1"})
        other, theirs, written = part(tmp_path / "b", 1, child.pid, {rounds.VARIABLE: "1"})
        stack.callback(child.stdin.close)
        for each in (head, other, control, theirs):
            stack.callback(each.close)
        asked = []
        control.link = SimpleNamespace(send=lambda kind, **fields: asked.append({"kind": kind, "node": "n0", **fields}))
        for second in range(6):
            head.look("training", float(second), float(second))
        assert {"kind": "stack?", "node": "n0", "straggler": 1} in asked
        theirs.link = SimpleNamespace(send=lambda *_, **__: None, take=lambda: asked[-1:])
        for second in range(100, 160):  # it is asked again and again
            theirs.take()
            other.look("training", None, float(second) / 2)
            if thread := next((each for each in threading.enumerate() if each.name == "stack"), None):
                thread.join(20)
        found = [event for event in map(json.loads, written.read_text().splitlines()) if event["event"] == "stack"]
    assert [event["rank"] for event in found] == [1]
    assert found[0]["text"].startswith("rank 1 was in ")
    assert found[0]["stack"]


# --- no false alarms -----------------------------------------------------------------------------------


def seconds():
    """A training on two H100, second by second: healthy, with a light and then a heavy second process on GPU 1.

    The card's figures are those of nvidia-smi, the shares those of /proc/PID/schedstat.
    """
    return recorded("two_h100.jsonl")


def round_of(samples):
    """A round from samples of single seconds."""
    found = {}
    for rank in range(len(samples[0]["ranks"])):
        each = [sample["ranks"][rank] for sample in samples]
        mean = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
        gpu = Gpu(mean["use"], mean["power"], mean["clock"], mean["memory"], foreign=mean["foreign"])
        found[rank] = Rank("gpunode", run=mean["run"], delay=mean["delay"], gpu=gpu)
    return Round(found)


def test_second_process_on_one_of_two_h100_is_named():
    """The recording has 95 s, so these rounds are short: 4 s."""
    series = seconds()
    rounds = [round_of(series[at : at + 4]) for at in range(0, len(series) - 3, 4)]
    heavy = next(number for number, sample in enumerate(series) if sample["what"] == "heavy") // 4
    found = news_of(rounds)
    assert [(verdict.rank, verdict.cause, named) for _, verdict, named in found] == [(1, "shared GPU", True)]
    assert found[0][0] >= heavy


def test_faults_of_a_real_training_are_named_as_the_agent_recorded_them():
    """scripts/benchmarks/stragglers_gpu.py on two H100 with rounds of 10 s: a second process, then a data loader."""
    found = news_of([from_object(each) for each in recorded("faults_h100.jsonl")])
    assert [(verdict.rank, verdict.cause, named) for _, verdict, named in found] == [
        (1, "shared GPU", True), (1, "shared GPU", False), (1, "data", True),
    ]  # fmt: skip


def test_faults_of_a_training_over_gloo_are_named_as_the_agents_recorded_them():
    """scripts/benchmarks/stragglers.py on three nodes of a busy machine, with rounds of 5 s."""
    found = news_of([from_object(each) for each in recorded("faults_gloo.jsonl")])
    named = [(verdict.rank, verdict.cause) for _, verdict, slow in found if slow]
    assert named == [(1, "data"), (1, "disk"), (1, "cpu"), (1, "link")]


def test_power_alone_shows_the_waiting_h100():
    blind = [
        one._replace(
            ranks={rank: each._replace(gpu=each.gpu._replace(foreign=0.0)) for rank, each in one.ranks.items()}
        )
        for one in (round_of(seconds()[at : at + 4]) for at in range(0, len(seconds()) - 3, 4))
    ]
    assert {(verdict.rank, named) for _, verdict, named in news_of(blind)} == {(1, True)}


def test_ten_healthy_hours_name_no_rank():
    """1,800 rounds of 20 s, drawn from the healthy seconds of the recording.

    Simulated: four ranks, a pipeline whose second half has more work, rank 0 that logs in every round and saves a
    checkpoint in every thirtieth.
    """
    chance = random.Random(7)
    healthy = [sample["ranks"] for sample in seconds() if sample["what"] == "healthy"]
    rounds = []
    for number in range(1800):
        each = []
        for rank in range(4):
            some = [{"ranks": [chance.choice(healthy)[rank % 2]]} for _ in range(2)]
            one = round_of(some).ranks[0]
            extra = 0.1 * (rank // 2) + (0.05 if rank == 0 else 0) + (0.4 if rank == 0 and number % 30 == 0 else 0)
            each.append({"run": one.run + extra, "delay": one.delay, "gpu": one.gpu})
        rounds.append(ranks(*each))
    assert news_of(rounds) == []


# --- replaced by a spare node --------------------------------------------------------------------------


def considered(rounds_, saves):
    """The rounds after which the node should be replaced; ``saves``: by round, the newest checkpoint."""
    track, case, found = Track(), Case(), []
    for number, each in enumerate(rounds_):
        track, _ = advance(track, each)
        case, replace = consider(case, track, max((save for save in saves if save <= number), default=None))
        if replace:
            found.append((number, case.verdict.node))
    return found


def waits_for_cpu(by):
    """Rounds in which rank 1 waits for a processor in ``by`` of the time."""
    return Round({rank: Rank(f"n{rank}", run=0.3, delay=by if rank == 1 else 0.0) for rank in range(3)})


def test_a_node_that_stays_slow_is_replaced_right_after_a_checkpoint():
    enough = WARM + CONSISTENT + PERSISTENT - 1  # rounds
    slow = [waits_for_cpu(0.2)] * (enough + 20)
    assert considered(slow, [3, enough + 7])[0] == (enough + 7, "n1")
    assert considered(slow, [3, enough - 2]) == []  # that one is lost time: the next one is awaited
    assert considered(slow, []) == []  # everything would be repeated


@pytest.mark.parametrize(
    ("by", "pause"), [(0.0, 0), (LOSS - 0.02, 0), (0.2, 7)], ids=["healthy", "a little slow", "now and then"]
)
def test_no_other_node_is_replaced(by, pause):
    series = [waits_for_cpu(0.0 if pause and number % pause == 0 else by) for number in range(300)]
    assert considered(series, range(0, 300, 10)) == []


def test_a_rank_that_waits_for_its_data_is_not_replaced():
    late = Round({rank: Rank(f"n{rank}", run=0.3, data=0.3 if rank == 1 else 0.0) for rank in range(3)})
    assert considered([late] * 100, range(0, 100, 10)) == []


def test_a_node_is_condemned_only_if_there_is_a_spare(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "join", lambda _reports: waits_for_cpu(0.2))
    seconds = iter(range(1000))
    now = next(seconds)
    env = {rounds.VARIABLE: "1"}
    head, control, _ = part(tmp_path / "a", 0, os.getpid(), env, saved=lambda: now // 40)
    sent = []
    control.link = SimpleNamespace(send=lambda kind, **fields: sent.append((kind, fields)))
    for spares in (0, 1):
        control.spares = spares
        for now in itertools.islice(seconds, 100):
            head.look("training", float(now), float(now))
        assert (control.failure is not None) == bool(spares)
    head.close()
    control.close()
    assert (control.failure["node"], control.failure["condemned"]) == ("n1", True)
    failures = [fields for kind, fields in sent if kind == "failed"]
    assert [(each["about"], each["condemned"]) for each in failures] == [("n1", True)]
    assert "the others wait for rank 1 on n1 20 % of the time" in failures[0]["text"]
