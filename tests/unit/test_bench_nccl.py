"""Judging a measured network: bandwidths, slow nodes and links, and the messages about them."""

import itertools
import json
import random

import pytest

from provision.errors import UsageError
from provision.netbench import (
    OPS,
    Row,
    Setting,
    bus_factor,
    failed_stage,
    failure_reason,
    judge_pairs,
    pair_rates,
    parse_ops,
    parse_sizes,
    rows,
    search_settings,
    slow_pairs,
    tournament,
)
from provision.tasks.bench import network_used

M = 1 << 20


# --- bandwidths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "world", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("broadcast", 8, 1.0),
        ("sendrecv", 8, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bus_bandwidth_matches_nccl_tests(op, world, factor):
    row = Row(op, 100, world, (1.0, 2.0, 4.0))
    assert bus_factor(op, world) == factor
    assert (row.seconds, row.algbw, row.busbw) == (2.0, 50.0, 50.0 * factor)


def test_the_spread_is_that_of_the_middle_half():
    assert Row("broadcast", 1, 2, (9.0, 1.0, 2.0, 3.0, 4.0)).spread == pytest.approx((4 - 2) / 3)
    assert Row("broadcast", 1, 2, (1.0,)).spread == 0


def test_rows_are_found_among_the_events():
    events = [
        {"event": "ready", "rank": 0},
        {"event": "row", "rank": 0, "op": "broadcast", "bytes": 8, "world": 2, "times": [1.0, 2.0], "wrong": 3},
    ]
    assert rows(events) == (Row("broadcast", 8, 2, (1.0, 2.0), 3),)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8M:512M", (8 * M, 32 * M, 128 * M, 512 * M)),
        ("8M:100M", (8 * M, 32 * M, 100 * M)),
        ("64m", (64 * M,)),
        ("1K, 1GiB", (1024, 1 << 30)),
        ("2M:2M,1M", (M, 2 * M)),
    ],
)
def test_sizes(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "8", "8M:", ":8M", "512M:8M", "-8M", "8Q", "17G", "8M;9M", "0M"])
def test_invalid_size_is_refused(text):
    with pytest.raises(UsageError, match="--sizes"):
        parse_sizes(text)


def test_operations():
    assert parse_ops("sendrecv,all-reduce,sendrecv") == ("sendrecv", "all_reduce")
    for text in ("", ",", "all_reduce,alltoall"):
        with pytest.raises(UsageError) as refused:
            parse_ops(text)
        assert ",".join(OPS) in refused.value.hint


# --- pairs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(2, 18))
def test_each_pair_of_nodes_is_measured_once(count):
    rounds = tournament(count)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(count), 2))
    for pairs in rounds:
        assert len(pairs) == count // 2
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)


def fabric(count, slow=(), usual=10e9):
    """What ``count`` nodes reach, within 5 %; ``slow`` has node names, and pairs of them, that reach a third."""
    chance = random.Random(count)
    names = [f"gpu{number:02}" for number in range(1, count + 1)]
    found = {}
    for pair in itertools.combinations(names, 2):
        bad = pair in slow or set(pair) & {name for name in slow if isinstance(name, str)}
        found[pair] = usual * chance.uniform(0.95, 1.05) / (3 if bad else 1)
    return found


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16, 33])
def test_no_node_is_slow_when_all_are_alike(count):
    judged = judge_pairs(fabric(count))
    assert (judged.nodes, judged.links) == ({}, ())
    assert judged.compared == (count > 2)


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16, 33])
def test_one_slow_node_is_named(count):
    judged = judge_pairs(fabric(count, slow=("gpu02",)))
    assert judged.nodes == {"gpu02": (count - 1, count - 1)}
    assert judged.links == ()
    assert judged.usual == pytest.approx(10e9, rel=0.06)


@pytest.mark.parametrize("count", [3, 4, 5, 16])
def test_a_single_slow_pair_is_a_link(count):
    judged = judge_pairs(fabric(count, slow=(("gpu01", "gpu03"),)))
    assert (judged.nodes, judged.links) == ({}, (("gpu01", "gpu03"),))


@pytest.mark.parametrize("count", [4, 5, 8])
def test_two_slow_nodes_are_two_slow_nodes(count):
    judged = judge_pairs(fabric(count, slow=("gpu01", "gpu04")))
    assert set(judged.nodes) == {"gpu01", "gpu04"}
    assert judged.links == ()


def test_a_slow_node_and_a_slow_link_of_others():
    judged = judge_pairs(fabric(6, slow=("gpu01", ("gpu03", "gpu05"))))
    assert (set(judged.nodes), judged.links) == ({"gpu01"}, (("gpu03", "gpu05"),))


def test_a_node_that_is_slow_with_most_others_is_named():
    judged = judge_pairs(fabric(6, slow=(("gpu01", "gpu03"), ("gpu02", "gpu03"), ("gpu03", "gpu04"))))
    assert (judged.nodes, judged.links) == ({"gpu03": (3, 5)}, ())


def test_two_halves_that_are_slow_with_one_another_are_links():
    across = tuple(itertools.product(("gpu01", "gpu02"), ("gpu03", "gpu04")))
    judged = judge_pairs(fabric(4, slow=across))
    assert (judged.nodes, set(judged.links)) == ({}, set(across))


def test_one_pair_compares_with_nothing():
    assert slow_pairs({("a", "b"): 1.0}) == []
    assert not judge_pairs({("a", "b"): 1.0}).compared
    assert judge_pairs({}).usual == 0


def test_the_processes_of_a_pair_add_up_and_outliers_do_not_count():
    events = [{"event": "pair", "a": 0, "b": 1, "local": n, "bytes": 100, "times": [1, 1, 9, 9]} for n in range(2)]
    assert pair_rates([*events, {"event": "end"}], ["x", "y"]) == {("x", "y"): 200.0}


# --- words ---------------------------------------------------------------------------------------


def test_the_network_is_what_the_channels_of_all_ranks_go_through():
    lines = [
        "gpu01:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>",
        "gpu01:1:2 [0] NCCL INFO Using network Socket",
        "gpu01:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
        "gpu01:1:3 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0",
    ]
    events = [{"event": "network", "rank": 0, "text": line} for line in lines]
    assert str(network_used(events)) == "TCP, eth0"
    assert str(network_used(events[:3])) == "inside the node"
    assert network_used([]) is None


def test_reason_omits_stacks_and_log_noise():
    event = {
        "rank": 3,
        "why": "DistBackendError: NCCL error in: x.cpp:3690\nException raised from y at z:1\nframe #0: a",
        "log": ["h:1:1 [0] NCCL INFO comm", "h:1:1 [0] x.cc:1 NCCL WARN socketStartConnect: refused", "all is well"],
    }
    assert failure_reason(event).splitlines() == [
        "rank 3: DistBackendError: NCCL error in: x.cpp:3690",
        "h:1:1 [0] x.cc:1 NCCL WARN socketStartConnect: refused",
    ]


def test_stage_names_the_missing_ranks():
    failed = {"event": "failed", "rank": 0, "why": "Timed out after 120 seconds waiting for clients", "log": []}
    met = [{"event": "met", "rank": rank} for rank in range(2)]
    assert "rank 1 did not reach" in failed_stage([met[0], failed], 2)
    assert "not one another" in failed_stage([*met, failed], 2)
    assert failed_stage([*met, dict(failed, why="out of memory")], 2) == ""
    ready = [{"event": "ready", "rank": rank} for rank in range(2)]
    assert failed_stage([*met, *ready, failed], 2) == ""


def test_summaries_are_json_and_fit_the_screen():
    from provision.summaries.bench import bench_output, bench_rows
    from provision.tasks.bench import BenchResult

    pairs = fabric(3, slow=("gpu02",))
    result = BenchResult(
        nodes=("gpu01", "gpu02", "gpu03"),
        world_size=24,
        backend="nccl",
        network="TCP, eth0",
        interfaces="eth0",
        versions={"torch": "2.11.0", "nccl": "2.28.3", "device": "NVIDIA H200"},
        rows=(Row("reduce_scatter", 512 * M, 24, (0.11, 0.12, 0.13)), Row("all_reduce", 8 * M, 24, (0.001,), 7)),
        skipped={"sendrecv": "not today"},
        pairs=pairs,
        judgement=judge_pairs(pairs),
        tuning=search_settings(lambda setting: 4e9 if setting.channels else 1e9, Setting()),
        seconds=12.34,
    )
    data, text = bench_output(result)
    assert json.loads(json.dumps(data))["slow"] == {"nodes": ["gpu02"], "links": []}
    assert "gpu[01-03] (world size 24): nccl over TCP, eth0 (torch 2.11.0, nccl 2.28.3)" in text
    lines = [line.text for line in bench_rows(result)]
    assert max(len(line) for line in lines[:3]) <= 82
    assert any("WRONG RESULT" in line for line in lines)
    assert any(line.startswith("slow node: gpu02: 2 of its 2 pairs") for line in lines)
    assert any("times NCCL's defaults" in line for line in lines)
