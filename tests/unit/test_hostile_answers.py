"""An answer that no script of clusterctl prints is the failure of the node that sent it, and never a traceback."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision import data
from provision.checks import Answer, Plan
from provision.checks.kit.measures import offset, steps
from provision.env.release import catalog, examine
from provision.errors import ClusterctlError
from provision.inventory.new_nodes import read_facts
from provision.model import Finding, Inventory, Node, Result, StepState
from provision.ospackages import node as os_facts
from provision.run import readiness
from provision.run.follow import entry
from provision.script import parse
from provision.session import Session
from provision.ssh.remote import AnswerUnreadable, reading
from provision.summaries.nodes import releases_output
from provision.summaries.status import status_output
from provision.tasks import check, releases, status
from provision.tasks.measures.clock import bounds
from provision.tasks.measures.ports import open_ports
from provision.transfer.fetch import parse_list
from provision.transfer.nodes import read_facts as read_survey

NODE = Node("gpu01", "10.0.0.1")
DIGITS = "9" * 5000


def ports(out):
    return open_ports(out.splitlines())


def steps_of(out):
    found = parse("T", out)
    assert all(step.state in get_args(StepState) for step in found)
    return found


def listing(out):
    return releases_output({"gpu01": catalog.read_listing(out)})


def uptime(out):
    return status_output(status.Status({"gpu01": status.read_status(out)}, apart=1.0))


def gpus(out):
    return list(readiness.busy([NODE], {"gpu01": Answer(out)}, {"gpu01": SimpleNamespace(runs=(), gpus=1)}, {}))


PARSERS = {
    "steps": (
        steps_of,
        "@clusterctl:T:start:0:one\n@clusterctl:T:step:0:ok:0:12\n@clusterctl:T:step:1:failed:3:5\nwhy\n",
    ),
    "examine": (
        examine.read_facts,
        (
            "fact machine=x86_64\nfact glibc=2\nfact user=u\nfact release=absent\nfact others=0\nfact base=/opt\n"
            "fact writable=yes\nfact free_bytes=77\nfact free_inodes=5\nfact end=yes\n"
        ),
    ),
    "listing": (
        listing,
        (
            "current 0123456789ab\nrelease 0123456789ab ok 1700000000\nleft .incoming-x\nhistory 1 0123456789ab\n"
            "used 0123456789ab 77\nend\n"
        ),
    ),
    "verify": (lambda out: catalog.verify_finding("gpu01", "0123456789ab", out), "checked 7\nbad changed lib/x\nend\n"),
    "push": (
        lambda out: data.read_answer(out, "T"),
        "T user 0\nT tools ssh\nT free 900\nT staged 4\nT at 81a4 10 1700000000 0 a/b\nT link a/c\nT to x\nT end\n",
    ),
    "files": (lambda out: parse_list(out, "gpu01"), "10 1700000000.5 a/b\0007 -3.1 c\0"),
    "survey": (
        read_survey,
        "sshd OpenSSH_9.2\ndigest b2sum\nuser root\nreached a 5 10.0.0.1 22\nmemory /dev/shm\nkept a\nkeys\nx\nend\n",
    ),
    "os_packages": (os_facts.read, "lacks chrony\nfree 1000\nnew chrony 1\nholder 77 apt\nname debian12-amd64\n"),
    "init": (
        read_facts,
        "host\tgpu01\nreached\t10.0.0.1\ngpu\tH200\nnet\teth0\t1\tup\t25000\nport\tmlx5_0\t1\tx\ty\tz\n",
    ),
    "clock": (lambda out: bounds(out, 1.0, 2.0), "1700000000.123456789"),
    "ports": (ports, "listen master 29500 open\nlisten random 4000 open\nready\n"),
    "shares": (steps, "begin write 0\nfine\nend write 0 0\nmounted 0 nfs4 a:/b\n"),
    "uptime": (uptime, "uptime 1234.56\ncurrent releases/0123456789ab\n"),
    "log": (lambda out: entry("gpu01", out), "2026-01-01T00:00:00.000Z [0] text"),
    "gpus": (gpus, "gpu 0, GPU-1\nprocess u, 77, 300, GPU-1, python\n"),
    "offset": (lambda out: offset(Answer(out)), "offset -0.100000 0.010000 11\n"),
}


@st.composite
def spoiled(draw, text):
    """A good answer, with some of its words replaced or dropped."""
    words = text.replace("\n", " \n ").replace("\t", " \t ").replace(":", " : ").split(" ")
    glue = "" if ":" in text or "\t" in text else " "
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(words) - 1))
        words[at] = draw(
            st.sampled_from(
                [DIGITS, "-" + DIGITS, "²", "٣", "", "nan", "1e400", "0x", "\udc80", "-1", "18446744073709551616"]
            )
            | st.text(max_size=5)
        )
    return glue.join(words).replace(" \n ", "\n").replace(" \t ", "\t").replace(" : ", ":")


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
def test_damaged_answer_fails_at_most_its_node(name, data):
    parser, good = PARSERS[name]
    out = data.draw(spoiled(good) | st.text(max_size=60))
    with suppress(ClusterctlError), reading(NODE):
        parser(out)


@pytest.mark.parametrize("name", PARSERS)
def test_a_good_answer_is_read(name):
    parser, good = PARSERS[name]
    assert parser(good) is not None


def test_an_answer_that_cannot_be_read_names_the_node_and_a_command():
    with pytest.raises(AnswerUnreadable, match="gpu01: its answer cannot be parsed") as caught, reading(NODE):
        int(DIGITS)
    assert caught.value.hint.endswith("clusterctl run --limit gpu01 -- true")


class Nodes:
    """Connections to nodes with prepared answers."""

    def __init__(self, inventory, answers):
        self.inventory, self.answers = inventory, answers

    def __getitem__(self, node):
        return SimpleNamespace(node=node, run=lambda *_, **__: Result(0, self.answers[node.name]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def cluster(tmp_path):
    nodes = (Node("gpu01", "10.0.0.1"), Node("gpu02", "10.0.0.2"))
    return Inventory(tmp_path / "inventory.yaml", PurePosixPath("/opt/env"), nodes)


def test_status_shows_the_answers_of_the_other_nodes(cluster, monkeypatch):
    def parse(name, out, names):
        if out == "hostile":
            raise ValueError("Exceeds the limit (4300 digits) for integer string conversion")
        return SimpleNamespace(runs={}, uid=0)

    monkeypatch.setattr(status, "parse_runs", parse)
    monkeypatch.setattr(status, "merge_runs", lambda _: {})
    monkeypatch.setattr(status.clock, "measure", lambda *_: {})
    answers = {"gpu01": "hostile", "gpu02": "uptime 77.5\n"}
    found = status.status(Session(cluster, connections=Nodes(cluster, answers)))
    assert found.nodes["gpu02"].uptime == 77.5
    assert "its answer cannot be parsed" in found.unreachable["gpu01"]


def test_releases_names_the_node_with_an_invalid_answer(cluster):
    good = "current 0123456789ab\nrelease 0123456789ab ok 1700000000\nend\n"
    connections = Nodes(cluster, {"gpu01": good.replace("1700000000", DIGITS), "gpu02": good})
    found = releases.releases(Session(cluster, connections=connections))
    assert list(found.failed) == ["gpu01"]
    with pytest.raises(ClusterctlError, match="no answer from 1 of 2"):
        found.required()


def test_a_check_that_one_answer_makes_fail_still_judges_the_others(cluster, monkeypatch):
    def judged(name, seen, answers):
        for node, answer in answers.items():
            yield Finding(name, node, "OK", str(int(answer.out)))

    monkeypatch.setattr(check.checks, "judged", judged)
    answers = {"gpu01": Answer(DIGITS), "gpu02": Answer("7")}
    found = {finding.node: finding for finding in check.judge("clock.skew", Plan(cluster, cluster.nodes), answers)}
    assert (found["gpu02"].verdict, found["gpu02"].observed) == ("OK", "7")
    assert found["gpu01"].verdict == "UNKNOWN"
    assert "does not understand an answer" in found["gpu01"].observed


@pytest.mark.parametrize("word", [DIGITS, "²"], ids=["5000 digits", "superscript"])
@pytest.mark.parametrize("name", ["gpus", "init", "survey", "os_packages"])
def test_odd_digits_in_an_answer_raise_nothing(name, word):
    parser, good = PARSERS[name]
    for found in re.finditer(r"[0-9]+", good):
        parser(good[: found.start()] + word + good[found.end() :])
