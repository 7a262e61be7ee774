"""The plan between controller and agent: a written plan is read back, and others are refused with the key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.agent.contract.plan import LIMIT, VERSION, Hang, Link, Plan, PlanError, Resume, from_json, from_object
from trainer.agent.contract.untrusted import UntrustedError

ROOT = Path(__file__).parents[2]
LINK = Link("10.0.0.1", 4711, "00ff", ("n0", "n1"), 5.0)
PLAN = Plan("r1", "n0", ("python", "t.py"), {"A": "b"})
FULL = PLAN._replace(
    node_rank=1,
    nnodes=2,
    first_rank=4,
    link=LINK,
    hang=Hang(30.0, "warn"),
    resume=Resume("out", ("--resume", "{checkpoint}"), {"FROM": "{checkpoint}"}),
    each_rank=True,
    unset=("LD_PRELOAD",),
    port=29500,
)


@pytest.mark.parametrize("plan", [PLAN, FULL])
def test_written_plan_is_read_back(plan):
    assert from_json(plan.to_json()) == plan
    assert from_object(plan.to_object()) == plan
    assert json.loads(plan.to_json())["version"] == VERSION


def changed(**fields):
    return {**json.loads(FULL.to_json()), **fields}


def linked(**fields):
    return changed(link={**LINK._asdict(), **fields})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (changed(version=1), "version is 1, but only version 2 is supported"),
        (changed(version=True), "version is True"),
        (changed(version=None), "version is missing"),
        (changed(colour="red"), "colour is not a known key"),
        (changed(argv="ls"), "argv must be a list"),
        (changed(argv=[]), "argv must not be empty"),
        (changed(argv=["ls", 1]), "argv must be a list"),
        (changed(env={"A": 1}), "env must be an object of texts"),
        (changed(env=[]), "env must be an object"),
        (changed(run=3), "run must be text"),
        (changed(each_rank=1), "each_rank must be true or false"),
        (changed(first_rank="x"), "first_rank must be a whole number"),
        (changed(first_rank=True), "first_rank must be a whole number"),
        (changed(node_rank=2), "node_rank is 2, but there are 2 nodes"),
        (changed(port=65536), "port must be a whole number from 0 to 65535"),
        (changed(restarts=-1), "restarts must be"),
        (changed(grace=float("nan")), "grace must be a number of seconds"),
        (changed(grace=-1), "grace must be a number of seconds"),
        (changed(hang={"policy": "shrug"}), "hang.policy must be stop or warn"),
        (changed(hang=None), "hang must be an object"),
        (changed(resume={"argv": []}), "resume.output is missing"),
        (changed(resume="x"), "resume must be an object"),
        (linked(port="x"), "link.port must be a whole number"),
        (linked(colour="red"), "link.colour is not a known key"),
        (linked(nodes=["n0"]), "node_rank is 1, but there are 1 nodes"),
        (changed(link={}), "link.host is missing"),
        ({"version": VERSION, "run": "r", "node": "n", "env": {}}, "argv is missing"),
    ],
)
def test_invalid_plan_is_refused_with_its_key(value, text):
    with pytest.raises(PlanError) as caught:
        from_object(value)
    assert text in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "[" * 5000, b"\xff", " " * (LIMIT + 1)])
def test_plan_must_be_an_object(text):
    with pytest.raises(UntrustedError):
        from_json(text)


KEYS = st.sampled_from(sorted(FULL.to_object())) | st.text(max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_object_is_a_plan_or_refused(fields):
    try:
        plan = from_object(changed(**fields))
    except PlanError:
        return
    assert from_json(plan.to_json()) == plan


def test_pauses_between_attempts_grow_up_to_a_limit():
    plan = PLAN._replace(backoff=2.0, restarts=3)
    assert plan.attempts == 4
    assert [plan.pause(attempt) for attempt in (1, 2, 3, 10, 10**6)] == [2.0, 4.0, 8.0, 60.0, 60.0]


def test_it_needs_the_standard_library_only():
    """As a node imports it: from the agent's folder, without anything of clusterctl."""
    program = "import sys; sys.path[:0] = [sys.argv[1]]; import contract.plan; print(*sys.modules)"
    argv = [sys.executable, "-I", "-S", "-c", program, str(ROOT / "trainer/agent")]
    found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    tops = {name.partition(".")[0] for name in found} - {"contract", "__main__"}
    assert tops <= set(sys.stdlib_module_names) | {"sitecustomize", "usercustomize"}
