"""What records say about each node, and the nodes that train skips."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.errors import UsageError
from provision.run import record
from provision.run.follow import Follower
from provision.run.node_history import Excluded, exclude, histories, named, read, trust
from provision.summaries.node_history import nodes_output
from trainer.agent.contract.effective import Effective

RECORDS = {
    "old": {"nodes": ["a", "b"], "why": {"b": "out of memory\nmore"}},
    "new": {
        "nodes": ["a", "b", "c"],
        "named": {"b": 3, "c": "x"},
        "why": {"b": "its GPU failed"},
        "spent": Effective(training=5, restarts=3).to_object(),
        "preflight": {"problems": [{"check": "gpu.xid", "verdict": "WARN", "nodes": ["b", "c"]}, None]},
    },
    "bad": {"nodes": 5, "why": [], "named": [], "preflight": {"problems": 3}, "spent": "x"},
}


def test_nodes_are_listed_with_their_failures_the_worst_first():
    found = histories(["a", "b", "c"], RECORDS, {"c": Excluded("lost", "new", "2026-01-01T00:00:00Z")})
    assert [each.node for each in found] == ["b", "c", "a"]
    worst = found[0]
    assert (worst.runs, worst.failures, worst.restarts, worst.checks) == (2, 4, 3, 1)
    assert worst.last == "its GPU failed"
    assert (found[2].runs, found[2].failures) == (2, 0)
    data, text = nodes_output(found)
    assert data["nodes"]["b"]["failures"] == 4
    assert text.splitlines()[-1].endswith("lost: clusterctl nodes trust c")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda each: st.one_of(st.lists(each, max_size=3), st.dictionaries(st.text(max_size=4), each, max_size=3)),
)


@given(st.dictionaries(st.sampled_from(["nodes", "why", "named", "spent", "preflight"]), JSON))
def test_any_record_can_be_counted(content):
    assert len(histories(["a"], {"r": content}, {})) == 1


def test_an_excluded_node_stays_so_until_it_is_trusted(tmp_path):
    inventory = tmp_path / "inventory.yaml"
    assert read(inventory) == {}
    assert trust(inventory, ["a"]) == {}
    exclude(inventory, "a", "it was lost", "r1")
    exclude(inventory, "a", "again", "r2")
    exclude(inventory, "b", "slow", "r2")
    assert read(inventory)["a"].why == "it was lost"
    assert read(inventory)["a"].run == "r1"
    assert list(trust(inventory, ["a", "c"])) == ["a"]
    assert list(read(inventory)) == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["nodes.json"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 2}', "\x00", '{"version": 1' + "0" * 50 + "}"])
def test_a_broken_list_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / "nodes.json").write_text(text)
    with pytest.raises(UsageError, match=r"nodes\.json"):
        read(tmp_path / "inventory.yaml")


@given(JSON)
def test_entries_of_any_form_are_skipped(entries):
    assert named(entries) is not None


def test_entries_of_a_wrong_form_are_skipped(tmp_path):
    (tmp_path / "nodes.json").write_text(json.dumps({"version": 1, "excluded": {"a": 3, "b": {"why": 7}}}))
    assert read(tmp_path / "inventory.yaml") == {"b": Excluded("7")}
    (tmp_path / "nodes.json").write_text(json.dumps({"version": 1, "excluded": []}))
    assert read(tmp_path / "inventory.yaml") == {}


def test_a_follower_counts_the_nodes_that_failures_name(tmp_path):
    follower = Follower("r", ["a", "b"], tmp_path, emit=lambda _: None)
    for node in ("b", "b", "x", None):
        follower.take("a", {"event": "notice", "kind": "restart", "text": "t", "why": {"node": node}})
    follower.take("b", {"event": "notice", "kind": "restart", "text": "t", "why": {"node": "b"}})  # only rank 0 counts
    follower.take("a", {"event": "replaced", "node": "b", "spare": "c", "rank": 1, "text": "lost"})
    follower.take("a", {"event": "replaced", "node": "z", "spare": "c", "rank": 1, "text": "lost"})
    assert follower.named == {"b": 2}
    assert follower.replaced == {"b": "lost"}
    spent = Effective(training=3.0, top=4).to_object()
    follower.take("b", {"event": "end", "state": "finished", "spent": Effective().to_object()})
    follower.take("a", {"event": "end", "state": "finished", "spent": spent})
    assert follower.spent == spent
    follower.close()


def test_the_node_that_took_rank_0_has_the_account_of_a_run(tmp_path):
    follower = Follower("r", ["a", "b", "c"], tmp_path, active=2, emit=lambda _: None)
    follower.take("c", {"event": "attempt", "attempt": 2, "nodes": ["c", "b"]})
    for node, seconds in (("a", 3.0), ("b", 0.0), ("c", 5.0)):  # a is back, and ended
        spent = Effective(training=seconds, top=4 if seconds else None).to_object()
        follower.take(node, {"event": "end", "state": "finished", "spent": spent})
    assert follower.spent["training"] == 5
    follower.close()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yaml").write_text(
        "prefix: /opt/llm\nnodes:\n  gpu01: 10.0.0.1\n  gpu02: 10.0.0.2\n  gpu03: 10.0.0.3\n"
    )
    return tmp_path / "inventory.yaml"


def test_the_commands(cluster, run):
    record.write(record.folder_of(cluster, "r1"), {"nodes": ["gpu01", "gpu03"], "named": {"gpu03": 2}})
    exclude(cluster, "gpu03", "it was lost", "r1")
    code, out, _ = run("nodes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["NODE", "gpu03", "gpu01", "gpu02", "gpu03"]
    code, out, _ = run("nodes", "trust", "gpu[02-03]")
    assert (code, out) == (0, "gpu03 is trusted again; it was excluded: it was lost\ngpu02 was not excluded\n")
    assert run("nodes", "trust", "gpu09")[0] == 2


def test_train_skips_an_excluded_node_with_a_warning(cluster, run, tmp_path):
    (tmp_path / "train.py").touch()
    exclude(cluster, "gpu01", "it was lost", "r1")
    code, _, err = run("train", "--nodes", "3", "train.py")
    assert code == 2
    assert "gpu01 is skipped: it was lost; to use it again: clusterctl nodes trust gpu01" in " ".join(err.split())
