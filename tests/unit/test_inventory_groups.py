"""Groups of nodes, the sets that --limit takes, and addresses with a login name and a port."""

# ruff: noqa: E501 - a message is one string, so that a search finds it

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from provision.errors import InventoryError, UsageError
from provision.inventory import load, select
from provision.inventory.new_nodes import Wanted, describe_nodes, parse_hosts
from provision.model import Inventory, Node

HEAD = "prefix: /opt/llm/current\n"
NODES = "nodes:\n  gpu[01-05]: 10.0.0.[1-5]\n  store: 10.0.0.9\n"
GROUPS = {"rack1": ("gpu01", "gpu02"), "rack2": ("gpu03", "gpu04"), "storage": ("store", "gpu04")}
CLUSTER = Inventory(
    Path("/x/inventory.yaml"),
    PurePosixPath("/opt/llm/current"),
    tuple(Node(name, f"10.0.0.{number}") for number, name in enumerate(["gpu01", "gpu02", "gpu03", "gpu04", "store"])),
    groups=GROUPS,
)


@pytest.fixture
def loaded(tmp_path):
    def loaded(text):
        path = tmp_path / "inventory.yaml"
        path.write_text(text)
        return load(path)

    return loaded


def problems(loaded, text):
    with pytest.raises(InventoryError) as caught:
        loaded(text)
    return caught.value.problems


def test_groups_contain_nodes_patterns_and_groups(loaded):
    text = "groups:\n  big: '@small,gpu05'\n  small: gpu[02,01]\n  rest: ['@all', '!@big']\n  odd: gpu0?,!gpu02\n"
    assert loaded(HEAD + NODES + text).groups == {
        "big": ("gpu01", "gpu02", "gpu05"),
        "small": ("gpu01", "gpu02"),
        "rest": ("gpu03", "gpu04", "store"),
        "odd": ("gpu01", "gpu03", "gpu04", "gpu05"),
    }


@pytest.mark.parametrize(
    ("group", "printed"),
    [
        ("a: gpu9", "groups.a (line 6): no node is called gpu9; did you mean gpu05?"),
        ("a: x*", "groups.a (line 6): no node matches x*"),
        ("a: '@b'", "groups.a (line 6): there is no group @b"),
        ("rack: store\n  a: '@rakc'", "groups.a (line 7): there is no group @rakc; did you mean @rack?"),
        ("a: '@a'", "groups.a (line 6): contains itself: @a -> @a"),
        ("all: gpu01", "groups.all (line 6): @all is every node already: choose another name"),
        ("store: gpu01", "groups.store (line 6): store is the name of a node: choose another name for the group"),
        ("a b: gpu01", "groups.a b (line 6): a b is not a group's name (letters, digits, . _ - only)"),
        ("a:", "groups.a (line 6): names no node: write GROUP: NODES, such as `storage: gpu[01-02]`"),
        ("a: []", "groups.a (line 6): names no node: write GROUP: NODES, such as `storage: gpu[01-02]`"),
        ("a: gpu01!gpu01", "groups.a (line 6): gpu01!gpu01 has no node"),
        ("a: {b: c}", "groups.a (line 6): must be text, not a mapping"),
        ("a: gpu01,,gpu02", "groups.a (line 6): a name or a group is missing before ,"),
        ("a: gpu[01-", "groups.a (line 6): unmatched bracket: write a range as gpu[01-04,07]"),
    ],
)
def test_invalid_groups(loaded, group, printed):
    assert problems(loaded, f"{HEAD}{NODES}groups:\n  {group}\n") == (printed,)


def test_a_circle_of_groups_is_shown_for_each_of_them(loaded):
    printed = problems(loaded, HEAD + NODES + "groups: {a: '@b', b: '@c', c: '@a', d: '@a', e: gpu01}")
    assert printed == (
        "groups.a (line 5): contains itself: @a -> @b -> @c -> @a",
        "groups.b (line 5): contains itself: @b -> @c -> @a -> @b",
        "groups.c (line 5): contains itself: @c -> @a -> @b -> @c",
        "groups.d (line 5): contains itself: @d -> @a -> @b -> @c -> @a",
    )


def test_error_in_a_group_is_not_repeated_for_groups_that_contain_it(loaded):
    assert len(problems(loaded, HEAD + NODES + "groups: {a: gpu9, b: '@a', c: '@b'}")) == 1


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        ("@rack1", "gpu01 gpu02"),
        ("gpu*", "gpu01 gpu02 gpu03 gpu04"),
        ("gpu0?", "gpu01 gpu02 gpu03 gpu04"),
        ("gpu[01-04],@storage,!gpu03", "gpu01 gpu02 gpu04 store"),
        ("gpu[01-04],@storage!gpu03", "gpu01 gpu02 gpu04 store"),
        ("@rack*", "gpu01 gpu02 gpu03 gpu04"),
        ("@rack[1-2]", "gpu01 gpu02 gpu03 gpu04"),
        ("@rack2&@storage", "gpu04"),
        ("@all,!@rack1", "gpu03 gpu04 store"),
        ("@*", "gpu01 gpu02 gpu03 gpu04 store"),
        ("!gpu03", "gpu01 gpu02 gpu04 store"),
        ("!gpu03,gpu03", "gpu01 gpu02 gpu03 gpu04 store"),
        ("store, gpu[ 01 ]", "gpu01 store"),
        ("store gpu01", "gpu01 store"),
        ("*", "gpu01 gpu02 gpu03 gpu04 store"),
    ],
)
def test_limit(limit, names):
    assert [node.name for node in select(CLUSTER, limit=limit)] == names.split()
    left = {node.name for node in CLUSTER.nodes} - set(names.split())
    if left:
        assert {node.name for node in select(CLUSTER, exclude=limit)} == left


HAS = "inventory.yaml has gpu[01-04],store and the groups @rack1, @rack2, @storage"


@pytest.mark.parametrize(
    ("limit", "printed", "hint"),
    [
        ("@rak1", "--limit @rak1: there is no group @rak1", f"did you mean @rack1? {HAS}"),
        ("storage", "--limit storage: no node is called storage", f"did you mean @storage? {HAS}"),
        ("node*", "--limit node*: no node matches node*", HAS),
        ("gpu99,@x,y*", "--limit gpu99,@x,y*: no node is called gpu99; no node matches y*; there is no group @x", HAS),
        ("gpu01,", "--limit gpu01,: not a set of nodes: a name or a group is missing after ,", None),
        ("&gpu01", "--limit &gpu01: not a set of nodes: a name or a group is missing before &", None),
        ("gpu01!!gpu02", "--limit gpu01!!gpu02: not a set of nodes: a name or a group is missing before !", None),
        ("gpu01!gpu01", "no node is selected", HAS),
    ],
)
def test_invalid_limits(limit, printed, hint):
    with pytest.raises(UsageError) as caught:
        select(CLUSTER, limit=limit)
    assert str(caught.value) == printed
    assert hint is None or caught.value.hint == hint


# --- user@host:port --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "nodes"),
    [
        ("a: ada@h", [Node("a", "h", user="ada")]),
        ("a: h:2222", [Node("a", "h", port=2222)]),
        ("a: ada@10.0.0.1:2222", [Node("a", "10.0.0.1", user="ada", port=2222)]),
        ("a: '[::1]:22'", [Node("a", "::1", port=22)]),
        ("a: '[fd00::1]'", [Node("a", "fd00::1")]),
        ("a: 'ada@[fd00::1]:2222'", [Node("a", "fd00::1", user="ada", port=2222)]),
        ("a: ada@fd00::1", [Node("a", "fd00::1", user="ada")]),
        ("a: ada@corp.example@h", [Node("a", "h", user="ada@corp.example")]),
        ("a: {address: 'ada@h:22', user: ada, port: 22, gpus: 2}", [Node("a", "h", None, "ada", 22, 2)]),
        ("a[1-2]: ada@h[1-2]:2222", [Node(f"a{n}", f"h{n}", user="ada", port=2222) for n in (1, 2)]),
        ("a[1-2]: '[fd00::[1-2]]:2222'", [Node(f"a{n}", f"fd00::{n}", port=2222) for n in (1, 2)]),
    ],
)
def test_an_address_may_have_a_login_name_and_a_port(loaded, entry, nodes):
    assert list(loaded(f"{HEAD}nodes:\n  {entry}\n").nodes) == nodes


@pytest.mark.parametrize(
    ("entry", "printed"),
    [
        ("a: -oProxyCommand=id@h", "nodes.a (line 3): -oProxyCommand=id@h: -oProxyCommand=id is not a login name"),
        ("a: ada@-oProxyCommand=id", "nodes.a (line 3): -oProxyCommand=id is neither a host name nor an IP address"),
        ("a: h:99999", "nodes.a (line 3): h:99999: 99999 is not a port (1-65535)"),
        ("a: 'h:'", "nodes.a (line 3): h:: is empty"),
        ("a: ''", "nodes.a (line 3): is empty"),
        ("a: '[::1]:x'", "nodes.a (line 3): [::1]:x: x is not a port (1-65535)"),
        ("a: {address: 'ada@h', user: bob}", "nodes.a.address (line 3): ada@h has the user ada, but user: says bob"),
        ("a: {address: 'h:1', port: 2}", "nodes.a.address (line 3): h:1 has the port 1, but port: says 2"),
        (
            "a: {address: h, data_address: 'ada@h'}",
            "nodes.a.data_address (line 3): ada@h is not an address: the login name goes into `user`",
        ),
        ("a: h:22\n  b: h", "nodes.b (line 4): b has the address of a: h port 22"),
    ],
)
def test_addresses_with_invalid_parts(loaded, entry, printed):
    assert problems(loaded, f"{HEAD}nodes:\n  {entry}\n") == (printed,)


def test_hosts_of_the_command_line_may_have_them_too():
    assert parse_hosts(["a=ada@10.0.0.1:2222", "bob@h[1-2]", "[fd00::1]:22", "h1:23"]) == (
        Wanted("10.0.0.1", "a", user="ada", port=2222),
        Wanted("h1", user="bob"),
        Wanted("h2", user="bob"),
        Wanted("fd00::1", port=22),
        Wanted("h1", port=23),
    )
    nodes, _ = describe_nodes(parse_hosts(["h:21", "h:22"]), {})
    assert [(node.name, node.address, node.port) for node in nodes] == [("node1", "h", 21), ("node2", "h", 22)]
    with pytest.raises(UsageError, match="the address h is listed twice"):
        parse_hosts(["h", "ada@h"])
    with pytest.raises(UsageError, match="-x is not a login name"):
        parse_hosts(["-x@h"])


# --- messages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("nodes: {a: {address: h, num_gpus: 8}}", "nodes.a.num_gpus (line 2): unknown key; did you mean gpus?"),
        ("nodes: {a: h}\nssh: {identity_file: k}", "ssh.identity_file (line 3): unknown key; did you mean key?"),
        ("nodes: {a: h}\nuser: root", "user (line 3): unknown key; it belongs below ssh:"),
        ("nodes: {a: h}\nnfs:\n  server: a", "nfs (line 3): unknown key; it belongs below services:"),
        ("nodes: {a: h}\nGroups: {}", "Groups (line 3): unknown key; did you mean groups?"),
        (
            "nodes: {a: h}\nxyzzy: 1",
            "xyzzy (line 3): unknown key; known: prefix, nodes, ssh, train, groups, services, checks, textfile, notify",
        ),
        (
            "nodes:\n  gpu[01" + ",02" * 600 + "]: h",
            "line 3, column 1810: mapping values are not allowed here (a key has at most 1,024 characters: write several entries)",
        ),
    ],
)  # fmt: skip
def test_an_unknown_key_is_explained(loaded, text, printed):
    assert problems(loaded, HEAD + text) == (printed,)


@pytest.mark.parametrize(
    "text", ["[gpus]\ngpu01\n", "gpu01 slots=8\n", "gpus:\n  hosts:\n    gpu01:\n", "gpu: gpu[01-04]\n"]
)
def test_the_file_of_another_tool_is_explained(loaded, tmp_path, text):
    with pytest.raises(InventoryError) as caught:
        loaded(text)
    assert caught.value.hint == (
        f"if it is an Ansible inventory, a hostfile or a list of groups: clusterctl init --from {tmp_path}/inventory.yaml"
    )
