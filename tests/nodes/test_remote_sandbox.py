"""Connections to minimal nodes in network namespaces: no Python, no zstd, dash as sh."""

from __future__ import annotations

import pytest

from provision import inventory as inventory_file
from provision.model import Node, Step
from provision.render import quote
from provision.script import compile_steps, parse
from provision.ssh.openssh import OpenSshRemote
from provision.ssh.remote import Connections, NodeUnreachable, connect, fan_out

NASTY = "'\"$(id)`id`\n ü\\"


@pytest.fixture
def pool(sandbox):
    with Connections(inventory_file.load(sandbox.inventory)) as pool:
        yield pool


def test_steps_on_every_node_are_idempotent(pool):
    nodes = pool.inventory.nodes
    step = Step("file", f"printf %s {quote(NASTY)} >/tmp/nasty", f'[ "$(cat /tmp/nasty)" = {quote(NASTY)} ]')
    script = compile_steps([step], token="T1")
    for state in ("changed", "ok"):
        results = fan_out(nodes, lambda node: parse("T1", pool[node].run(script).out)[0].state)
        assert results == {node.name: state for node in nodes}
    fan_out(nodes, lambda node: pool[node].run("rm /tmp/nasty"))


def test_an_address_without_a_host(pool):
    first = pool.inventory.nodes[0].address
    nobody = Node("nobody", first.rsplit(".", 1)[0] + ".251")
    for way in (connect, lambda inventory, node: OpenSshRemote(inventory, node).run("true")):
        with pytest.raises(NodeUnreachable, match=r"no route|no answer"):
            way(pool.inventory, nobody)


def test_node_without_power(make_sandbox):
    box = make_sandbox(nodes=1)
    inventory = inventory_file.load(box.inventory)
    (node,) = inventory.nodes
    remote = connect(inventory, node)
    with pytest.raises(NodeUnreachable, match="lost"):
        remote.run("echo started; sleep 60", on_line=lambda _line: box.power_off(node.name), deadline=100)
    remote.close()
