import os
import shutil
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from ib_fabric import PROGRAMS, fabric, star

from provision import checks
from provision.checks import Answer, Plan, judged


@pytest.fixture
def make(tmp_path):
    """Makes fabrics of a net file; they end with the test."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        pytest.fail(f"{', '.join(missing)} missing: run scripts/setup")
    with ExitStack() as stack:
        yield lambda net: stack.enter_context(fabric(tmp_path, net))


@pytest.fixture
def four(make):
    """Four nodes at one switch, and no subnet manager."""
    hosts = [f"node{number:02}" for number in range(1, 5)]
    return SimpleNamespace(fabric=make(star(hosts)), hosts=hosts)


@pytest.fixture
def look():
    """``look(fabric, hosts, CHECK...)``: findings by check and node, of the checks' own probes; equal ones run once."""

    def look(fabric, hosts, *wanted, root=True):
        answers = {}
        for text in {checks.load(check).probe for check in wanted}:
            for host in hosts:
                done = fabric.sh(host, text)
                answers[text, host] = Answer(done.stdout, done.returncode, root=root, err=done.stderr)
        found = {}
        for check in wanted:
            about = checks.load(check)
            plan = Plan(None, (), limits=about.limits)
            findings = list(judged(check, plan, {host: answers[about.probe, host] for host in hosts}))
            assert sorted(finding.node for finding in findings) == sorted(hosts)
            found[check] = {finding.node: finding for finding in findings}
        return found

    return look


@pytest.fixture
def bad(look):
    """``bad(fabric, hosts, CHECK...)``: ``{check: {node: (verdict, observed)}}`` of every verdict other than OK."""

    def bad(fabric, hosts, *wanted):
        return {
            check: {
                node: (each.verdict, each.observed) for node, each in found.items() if each.verdict not in {"OK", "N/A"}
            }
            for check, found in look(fabric, hosts, *wanted).items()
            if any(each.verdict not in {"OK", "N/A"} for each in found.values())
        }

    return bad
