"""Which node copies which files, which copies are removed, and how fast they are made. Pure."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainer.agent.checkpoints.selection import newest
from trainer.agent.contract.offers import problem
from trainer.agent.keeping import restoring
from trainer.agent.keeping.choices import (
    FREE,
    Generation,
    Kept,
    Room,
    files_to_copy,
    holders_of,
    shared_by_all,
    to_remove,
)
from trainer.agent.keeping.memory import deleted
from trainer.agent.keeping.moving import to_drain
from trainer.agent.keeping.pacing import BURST, LEAST, SHARE, Pacer
from trainer.agent.keeping.ram import Ram, why_not
from trainer.agent.link import LinkError

SAVED = 1000


def entry(files, disk="", **more):
    """A checkpoint of clusterctl's layout as an offer has it; ``files``: by name, the mark."""
    facts = {name: [100, SAVED, mark, None] for name, mark in files.items()}
    return {"name": "iter_5", "single": False, "step": 5, "says": {}, "files": facts, "disk": disk, **more}


def copies(files, saved=SAVED):
    folder = f".clusterctl-copies/iter_5@{saved}"
    return entry(files, saved=saved, folder=folder, digests=dict.fromkeys(files, "a" * 64))


def offer(rank, own=None, held=None):
    found = {"ranks": [rank, 1], "kept": 0, "pointers": [], "others": [], "checkpoints": [own] if own else []}
    return dict(found, copies=[held] if held else [])


GENERATION = Generation("iter_5", False, SAVED, 5)


@given(st.integers(1, 20), st.integers(0, 4), st.integers(1, 16), st.data())
def test_any_lost_nodes_leave_every_file_somewhere(count, spares, peers, data):
    """The promise: with K copies, losing any K nodes, spares or not, loses no file, if there are more nodes than K."""
    assume(count + spares > 1)
    peers = min(peers, count + spares - 1)
    names = [f"part-{rank}-of-{count}.safetensors" for rank in range(count)]
    offers = {rank: offer(rank, entry({names[rank]: f"m{rank}"}, disk=f"d{rank}")) for rank in range(count)}
    offers[0]["checkpoints"][0]["files"]["complete.json"] = [100, SAVED, "c", None]
    offers[0]["checkpoints"][0]["says"] = {"complete.json": names}
    offers |= {rank: offer(rank) for rank in range(count, count + spares)}
    lists = files_to_copy(offers, GENERATION, peers, range(count))
    assert (
        max(len({giver for *_, giver in files}) for files in lists.values()) <= peers
    )  # no node gets more than others
    lost = set(data.draw(st.permutations(range(count + spares)))[:peers])
    left = {}
    for rank in set(range(count + spares)) - lost:
        held = {name: offers[giver]["checkpoints"][0]["files"][name][2] for name, _, _, giver in lists.get(rank, ())}
        left[rank] = offer(rank, next(iter(offers[rank]["checkpoints"]), None), copies(held) if held else None)
        if held and "complete.json" in held:
            left[rank]["copies"][0]["says"] = {"complete.json": names}
        assert problem(left[rank]) == ""
    left |= {rank: offer(rank) for rank in lost}  # back with empty disks
    choice = newest(left, count)
    assert choice.name == "iter_5", choice.refused
    for rank in lost:
        wanted = {each[0] for each in choice.copy[rank]}
        assert wanted == {f"iter_5/{name}" for name in (*names, "complete.json")}
        assert all(each[2] not in lost for each in choice.copy[rank])


def test_holders_are_the_next_nodes_with_other_disks():
    assert holders_of(3, range(5), {}, 2) == [4, 0]
    assert holders_of(0, range(4), {0: "a", 1: "a", 2: "b", 3: "b"}, 2) == [2]
    assert holders_of(0, range(2), {0: "a", 1: "a"}, 1) == []


def test_files_that_a_holder_has_are_not_copied():
    offers = {
        0: offer(0, entry({"weights.pt": "w", "a": "a"}, "d0")),
        1: offer(1, entry({"weights.pt": "w", "b": "b"}, "d1"), copies({"a": "a"})),
    }
    assert files_to_copy(offers, GENERATION, 1) == {0: [("b", 100, SAVED, 1)], 1: []}
    assert files_to_copy(offers, GENERATION._replace(saved=SAVED + 1), 1)[1] == [("a", 100, SAVED, 0)]


def test_nodes_with_a_shared_folder_copy_nothing():
    offers = {rank: offer(rank, entry({"a": "a"}, "same")) for rank in (0, 1)}
    assert shared_by_all(offers, "iter_5")
    assert files_to_copy(offers, GENERATION, 1) == {}
    offers[2] = offer(2)
    assert not shared_by_all(offers, "iter_5")


def test_copies_of_an_earlier_save_are_never_mixed_with_a_later_one():
    names = ["part-0-of-2.safetensors", "part-1-of-2.safetensors"]
    old = copies({names[1]: "old"}, saved=SAVED - 1)
    own = entry({names[0]: "new", "complete.json": "c"}, "d0", says={"complete.json": names})
    choice = newest({0: offer(0, own, old), 1: offer(1)}, 2)
    assert choice.name is None
    assert "part-1-of-2.safetensors is missing" in choice.refused[0][1]
    own["files"][names[0]][1] = own["files"]["complete.json"][1] = SAVED - 1
    assert newest({0: offer(0, own, old), 1: offer(1)}, 2).name == "iter_5"


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"digests": {"a": "x"}}, True),
        ({"digests": {}}, True),
        ({"saved": -1}, True),
        ({"folder": "../x"}, True),
        ({}, False),
    ],
)
def test_offered_copies_are_validated(change, wrong):
    assert bool(problem(offer(0, None, copies({"a": "a"}) | change))) == wrong


kept_copies = st.lists(
    st.builds(Kept, st.uuids().map(str), st.integers(0, 100), st.integers(0, 1000)),
    max_size=8,
    unique_by=lambda k: k[0],
)


@given(kept_copies, st.integers(0, 3000), st.none() | st.integers(0, 4000), st.integers(0, 5000), st.data())
def test_removing_old_copies_keeps_the_protected_and_the_limit(kept, needed, space, free, data):
    protected = {each.folder for each in kept if data.draw(st.booleans())}
    room = Room(space, free, 5000)
    removed, lacking = to_remove(kept, needed, protected, room)
    assert not protected & set(removed)
    left = [each for each in kept if each.folder not in removed]
    freed = sum(each.bytes for each in kept) - sum(each.bytes for each in left)
    if lacking is None:
        if space is None:
            assert free + freed - needed >= int(FREE * 5000) - 1 or needed == 0
        else:
            assert sum(each.bytes for each in left) + needed <= space
    else:
        assert all(each.folder in protected for each in left)
    youngest = max((each.saved for each in kept if each.folder in removed), default=0)
    assert all(each.saved >= youngest for each in left if each.folder not in protected)


def test_without_a_limit_two_checkpoints_are_kept():
    kept = [Kept("a", 1, 10), Kept("b", 2, 10), Kept("c", 3, 0)]
    assert to_remove(kept, 10, {"b", "c"}, Room(None, 10**6, 10**6)) == (["a"], None)


@given(st.lists(st.integers(1, 4 << 20), min_size=20, max_size=60), st.integers(10 << 20, 1 << 30))
def test_the_pace_is_a_share_of_the_measured_speed(pieces, speed):
    now = [100.0]
    pacer = Pacer(None, lambda: now[0])
    pacer.begin()
    done = waited = 0
    began = None
    for piece in pieces * 4:
        now[0] += piece / speed
        pause = pacer.pause(piece)
        if done > BURST + (8 << 20):
            began = began or now[0]
            waited += piece
        done += piece
        now[0] += pause
    if pacer.rate is None:
        assert done <= BURST + (4 << 20)
        return
    assert pacer.rate == pytest.approx(max(LEAST, speed * SHARE), rel=0.01)
    if began is not None and waited > 8 << 20:
        assert waited / (now[0] - began) <= pacer.rate * 2


def test_a_given_rate_is_used_from_the_first_byte():
    now = [0.0]
    pacer = Pacer(1000, lambda: now[0])
    pacer.begin()
    assert pacer.pause(500) == pytest.approx(0.5)


# --- memory ------------------------------------------------------------------------------------------------------

GB = 1 << 30


@pytest.mark.parametrize(
    ("ram", "checkpoint", "part"),
    [
        (Ram(64 << 20, 100 * GB), None, "/dev/shm has 64 MB free, but 256 MB are needed"),
        (Ram(3 * GB, 100 * GB), 2 * GB, "remount,size=8192M"),
        (Ram(100 * GB, 7 * GB), 2 * GB, "7168 MB of RAM are available, but 8192 MB are needed"),
        (Ram(100 * GB, 9 * GB), 2 * GB, None),
    ],
)
def test_whether_ram_is_large_enough(ram, checkpoint, part):
    why = why_not(ram, checkpoint)
    assert why is None if part is None else part in why


def test_files_are_drained_when_quiet_and_markers_last():
    files = {"c/a": (1, 5), "c/last": (1, 9), "c/growing": (3, 7), "latest": (1, 1)}
    before = files | {"c/growing": (2, 6)}
    assert to_drain(files, before, ["latest"]) == ["c/a", "c/last", "latest"]
    assert to_drain(files, {}) == []
    assert deleted(["c1", "c2"], ["c2", "c3"]) == ["c1"]


def test_a_node_that_cannot_prepare_a_checkpoint_is_named_to_all():
    offers = {0: {"damaged": [], "problem": ""}, 3: {"damaged": [], "problem": "no space"}, 2: {"damaged": []}}
    answer = json.loads(json.dumps(restoring.join(offers)))
    assert restoring.failed(answer, 4) == (3, "no space")
    assert restoring.failed(restoring.join({0: offers[0]}), 4) is None
    assert restoring.failed({"skip": True}, 4) is None
    assert restoring.join({0: {}, 1: {"again": True}})["again"] is True
    assert restoring.join({0: {}, 1: {"again": "yes"}})["again"] is False
    assert len(restoring.failed(restoring.join({1: {"problem": "x" * 9999}}), 4)[1]) == 2000
    for wrong in ([4, "x"], [-1, "x"], [True, "x"], [1, 2], [1], "x", {}):
        with pytest.raises(LinkError):
            restoring.failed({"failed": wrong}, 4)
