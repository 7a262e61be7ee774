"""inventory.yaml: the loaded values, and the message about every error."""

# ruff: noqa: E501 - a message is one string, so that a search finds it

from __future__ import annotations

import os
import textwrap
from pathlib import Path, PurePosixPath

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from provision import services
from provision.errors import InventoryError, UsageError
from provision.inventory import fold, likely_typo, load, select
from provision.inventory.names import expand
from provision.inventory.schema import NodeSection, ServicesSection, SshSection, TopSection, TrainSection
from provision.model import Inventory, Node, Ssh, TrainDefaults
from provision.services.hosts import Options as Hosts

EXAMPLE = Path(__file__).parents[2] / "inventory.example.yaml"
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "inventory.md"
# Options that most people leave alone; docs/services/ has them.
FINE_TUNING = {"nfs": {"root_squash", "threads", "connections"}, "os_packages": {"packages", "replace"}}
HEAD = "prefix: /opt/llm/current\n"
NODES = "nodes: {gpu01: 192.168.20.14, gpu02: 192.168.20.15}\n"


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "inventory.yaml"
        path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
        return path

    return write


@pytest.fixture
def problems(write):
    def problems(text: str | bytes) -> tuple[str, ...]:
        with pytest.raises(InventoryError) as caught:
            load(write(text))
        return caught.value.problems

    return problems


def cluster(*nodes: Node) -> Inventory:
    return Inventory(Path("/x/inventory.yaml"), PurePosixPath("/opt/llm/current"), nodes)


# --- what is read --------------------------------------------------------------------------------


def test_the_example_shows_every_key_and_loads(write):
    text = EXAMPLE.read_text()
    inventory, raw = load(write(text)), yaml.safe_load(text)
    assert fold(node.name for node in inventory.nodes) == "gpu[01-05]"
    assert inventory.nodes[4] == Node("gpu05", "192.168.20.18", "10.0.0.18", "ubuntu", 2222, 4)
    assert inventory.train.env == {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "0"}
    for name, module in ((name, services.get(name)) for name in services.names()):
        assert set(raw["services"][name] or ()) >= set(module.Options.model_fields) - FINE_TUNING.get(name, set())
    assert inventory.warnings == ()
    assert set(raw) == set(TopSection.model_fields)
    assert set(raw["ssh"]) == set(SshSection.model_fields)
    assert set(raw["train"]) == {"config", "port", "env"}
    assert set(raw["nodes"]["gpu05"]) == {"address", "data_address", "user", "port", "gpus"}


def test_the_documentation_names_every_key_and_its_example_loads(write):
    text = DOCUMENTATION.read_text()
    assert fold(node.name for node in load(write(text.split("```yaml\n")[1].split("```")[0])).nodes) == "gpu[01-02]"
    for section in (TopSection, NodeSection, SshSection, TrainSection, ServicesSection):
        for key in section.model_fields:
            assert f"`{key}`" in text, key


def test_the_least_inventory(write):
    path = write(HEAD + "nodes: {a: b}")
    assert load(path) == Inventory(
        path=path,
        prefix=PurePosixPath("/opt/llm/current"),
        nodes=(Node("a", "b"),),
        ssh=Ssh(known_hosts=path.parent / "known_hosts"),
    )


def test_relative_paths_are_relative_to_the_inventory_and_the_home_folder_is_expanded(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/ada")
    path = write(HEAD + NODES + "ssh: {key: ~/.ssh/id, known_hosts: ../kh}\ntrain: {config: conf/sft.yaml}")
    monkeypatch.chdir(tmp_path)
    for inventory in (load(path), load(Path(path.name))):
        assert inventory.path == path
        assert inventory.ssh.key == Path("/home/ada/.ssh/id")
        assert inventory.ssh.known_hosts == tmp_path.parent / "kh"
        assert inventory.train.config == tmp_path / "conf/sft.yaml"


def test_commands_of_the_documentation_load(write):
    page = DOCUMENTATION.with_name("runs.md").read_text().split("## Notifications")[1].split("## History")[0]
    blocks = page.split("```text\n")[1:]
    commands = [load(write(HEAD + NODES + "\n" + block.split("```")[0])).notify for block in blocks]
    assert [command.split()[0] for command in commands] == ["curl", "(printf", "case", "python3"]
    assert load(write(HEAD + NODES + "textfile: /srv/prom")).textfile == PurePosixPath("/srv/prom")


def test_keys_without_a_value_count_as_missing(write):
    inventory = load(write(HEAD + NODES + "ssh:\n  user:\n  timeout:\ntrain:\nservices:\n  hosts:\n"))
    assert inventory.ssh.timeout == 10.0
    assert inventory.train == TrainDefaults()
    assert inventory.services == {"hosts": Hosts()}


def test_ranges_pair_names_and_addresses_in_the_order_written(write):
    inventory = load(
        write(HEAD + "nodes:\n  gpu[03,01]: {address: '10.0.0.[1-2]', data_address: '10.1.0.[7,5]', gpus: 2}\n")
    )
    assert inventory.nodes == (
        Node("gpu03", "10.0.0.1", "10.1.0.7", gpus=2),
        Node("gpu01", "10.0.0.2", "10.1.0.5", gpus=2),
    )


def test_numbers_in_text_fields_keep_their_spelling(write):
    inventory = load(
        write(HEAD + 'nodes: {01: 10.0.0.1, on: host-1}\nssh: {user: 1000, port: "22"}\n'
              "train: {env: {A: 1.10, B: 0x10, C: 022, D: 1_000, E: 22:30, F: 2026-11-21, G: =}}")
    )  # fmt: skip
    assert [node.name for node in inventory.nodes] == ["01", "on"]
    assert (inventory.ssh.user, inventory.ssh.port) == ("1000", 22)
    assert dict(inventory.train.env) == {
        "A": "1.10", "B": "0x10", "C": "022", "D": "1_000", "E": "22:30", "F": "2026-11-21", "G": "=",
    }  # fmt: skip


def test_a_service_has_the_options_of_its_own_file(write):
    text = "services: {limits: {nofile: 4096, memlock: 1024, shm: 8G}, chrony: {servers: [10.0.0.1, time.lan]}}"
    services = load(write(HEAD + NODES + text)).services
    assert (services["limits"].nofile, services["limits"].memlock, services["limits"].shm) == (4096, "1024", "8g")
    assert services["chrony"].servers == ("10.0.0.1", "time.lan")


def test_recursive_alias_is_named(problems):
    printed = problems(HEAD + NODES + "train: {config: &a [*a]}")
    assert printed[0] == "train.config.0 (line 3): an alias that contains itself"


def test_anchors_and_merge_keys(write):
    inventory = load(
        write(HEAD + "nodes:\n  a: &big {address: 10.0.0.1, gpus: 8}\n  b: {<<: *big, address: 10.0.0.2}\n")
    )
    assert inventory.nodes == (Node("a", "10.0.0.1", gpus=8), Node("b", "10.0.0.2", gpus=8))


def test_a_byte_order_mark_and_windows_line_ends(write):
    assert len(load(write(b"\xef\xbb\xbf" + (HEAD + NODES).replace("\n", "\r\n").encode())).nodes) == 2


@pytest.mark.parametrize(
    ("written", "prefix"),
    [("/opt/llm/", "/opt/llm"), ("//opt//./llm", "/opt/llm"), ("/opt/a b", "/opt/a b"), ("/env", "/env")],
)
def test_the_prefix_is_normalised(write, written, prefix):
    assert load(write(f"prefix: {written}\n{NODES}")).prefix == PurePosixPath(prefix)


@pytest.mark.parametrize(
    "address", ["gpu-1.example.org", "fe80::1%eth0", "2001:db8::1", "10.0.0.1", "_x", "a1", "3com"]
)
def test_valid_addresses(write, address):
    assert load(write(f'{HEAD}nodes: {{a: "{address}"}}')).nodes[0].address == address


def test_jump_hosts_are_nodes_and_other_machines(write):
    def hosts(text):
        return load(write(f"{HEAD}ssh: {{port: 23, jump_hosts: {text}}}\n{NODES}")).ssh.jump_hosts

    assert hosts("login1") == (Node("login1", "login1"),)
    assert hosts('"login[1-2]"') == (Node("login1", "login1"), Node("login2", "login2"))
    assert hosts('[ops@login1:2222, "10.0.0.[1-2]"]') == (
        Node("login1:2222", "login1", user="ops", port=2222),
        Node("10.0.0.1", "10.0.0.1"),
        Node("10.0.0.2", "10.0.0.2"),
    )
    assert hosts('["gpu[01-02]", gpu01]') == (Node("gpu01", "192.168.20.14"), Node("gpu02", "192.168.20.15"))
    assert hosts("192.168.20.15") == (Node("gpu02", "192.168.20.15"),)
    assert hosts("root@192.168.20.15") == (
        Node("192.168.20.15", "192.168.20.15", user="root"),
    )  # another user than the node's
    assert hosts("[]") == ()


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ('"-oProxyCommand=x"', "-oProxyCommand=x is neither a host name nor an IP address"),
        ('"-oProxyCommand=x@login"', "-oProxyCommand=x@login: -oProxyCommand=x is not a login name"),
        ("login:0", "login:0: 0 is not a port (1-65535)"),
        ('"login1,login2"', "login1,login2 is neither a host name nor an IP address"),
        ("root@gpu01", "root@gpu01 is a node: its user and its port are set in nodes"),
        ("here", "here is this machine, which needs no jump host"),
        ('["login[1-4000]", "login[1-97]"]', "has more than 4096 hosts"),
        ("{a: b}", "must be text, not a mapping"),
        ("[[a]]", "must be text, not a list"),
        ("300.1.1.1", "300.1.1.1 is not an IPv4 address (four numbers from 0 to 255)"),
    ],
)
def test_invalid_jump_hosts(problems, value, printed):
    text = f"{HEAD}ssh: {{jump_hosts: {value}}}\nnodes: {{gpu01: 192.168.20.14, here: local}}\n"
    assert problems(text) == (f"ssh.jump_hosts (line 2): {printed}",)


def test_other_names_of_jump_hosts(problems):
    for name in ("ProxyJump", "gateway", "bastion", "jump_host"):
        (problem,) = problems(f"{HEAD}ssh: {{{name}: login}}\n{NODES}")
        assert problem == f"ssh.{name} (line 2): unknown key; did you mean jump_hosts?"


def test_all_errors_are_reported_in_the_order_of_the_file(write):
    path = write("""\
        prefix: opt/llm
        prefx: /opt/llm
        ssh: {user: -oProxyCommand=x, timeot: 3}
        nodes:
          gpu[01-02]: 192.168.20.[14-15]
          gpu03:
            address: 192.168.20.300
            port: 99999
            gpus: 04
          gpu02: 192.168.20.15
          gpu[05-: 192.168.20.18
        train:
          env: {NCCL_IB_DISABLE: yes}
        services: {host: {}}
        """)
    with pytest.raises(InventoryError) as caught:
        load(path)
    error = caught.value
    assert str(error) == f"{path} has 11 mistakes"
    assert error.hint == "correct the file and run the command again; inventory.example.yaml shows every key"
    assert error.exit_code == 2
    assert error.problems == (
        "prefix (line 1): opt/llm is not an absolute path: it must begin with /, such as /opt/llm/current",
        "prefx (line 2): unknown key; did you mean prefix?",
        "ssh.user (line 3): -oProxyCommand=x is not a login name",
        "ssh.timeot (line 3): unknown key; did you mean timeout?",
        "nodes.gpu03.address (line 7): 192.168.20.300 is not an IPv4 address (four numbers from 0 to 255)",
        "nodes.gpu03.port (line 8): 99999 is not a port (1-65535)",
        "nodes.gpu03.gpus (line 9): 04 is not a number of GPUs: omit the leading zero",
        "nodes.gpu02 (line 10): gpu02 is listed twice, first in line 5 (gpu[01-02])",
        "nodes.gpu[05- (line 11): gpu[05- has an unmatched bracket: write a range as gpu[01-04,07]",
        (
            "train.env.NCCL_IB_DISABLE (line 13): YAML reads this word as a truth value (true, yes, on, false, no, off): "
            'put the text in quotes, such as "1" or "true"'
        ),
        "services.host (line 14): unknown key; did you mean hosts?",
    )


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ("/", "/ is the whole system: choose a separate folder, such as /opt/llm/current"),
        ("/./", "/ is the whole system: choose a separate folder, such as /opt/llm/current"),
        ("/opt/../etc", "/opt/../etc contains `..`: write the path without it"),
        ("~/llm", "~/llm is not an absolute path: it must begin with /, such as /opt/llm/current"),
        ("/opt/a:b", "/opt/a:b contains a colon, which would split PATH"),
        ("/opt/releases", "/opt/releases is reserved: releases/ and runs/ are next to the prefix; use /opt/current"),
        (r'"/opt/a\nb"', r"contains a line break or a control character: /opt/a\nb"),
        (r'"/opt/a\0b"', r"contains a line break or a control character: /opt/a\x00b"),
        ('" "', "is empty"),
        ("[a]", "must be text, not a list"),
        ("yes", "YAML reads this word as a truth value (true, yes, on, false, no, off): put it in quotes"),
    ],
)
def test_invalid_prefixes(problems, value, printed):
    assert problems(f"prefix: {value}\n{NODES}") == (f"prefix (line 1): {printed}",)


@pytest.mark.parametrize(
    ("entry", "printed"),
    [
        ("a: 10.0.1", "nodes.a (line 3): 10.0.1 is not an IPv4 address (four numbers from 0 to 255)"),
        ("a: 10.0.0.1O", "nodes.a (line 3): 10.0.0.1O is not an IPv4 address (four numbers from 0 to 255)"),
        (
            "a: 192.168.020.1",
            "nodes.a (line 3): 192.168.020.1 is not an IPv4 address (four numbers from 0 to 255, without leading zeros)",
        ),
        ("a: 17", "nodes.a (line 3): 17 is not an IPv4 address (four numbers from 0 to 255)"),
        ("a: 1:2:3", "nodes.a (line 3): 1:2:3 is not an IPv6 address"),
        ("a: root@", "nodes.a (line 3): nothing is neither a host name nor an IP address"),
        ("a: h:0", "nodes.a (line 3): h:0: 0 is not a port (1-65535)"),
        ("a: -oX", "nodes.a (line 3): -oX is neither a host name nor an IP address"),
        ("a: h..x", "nodes.a (line 3): h..x is neither a host name nor an IP address"),
        ("a: h x", "nodes.a (line 3): h x is neither a host name nor an IP address"),
        ("a: yes", "nodes.a (line 3): YAML reads this word as a truth value (true, yes, on, false, no, off): put it in quotes"),
        ("a:", "nodes.a.address (line 3): is missing (a host name or an IP address)"),
        ("a: {user: x}", "nodes.a.address (line 3): is missing (a host name or an IP address)"),
        ("a: [h]", "nodes.a (line 3): must be a mapping of keys, not a list"),
        ("a: {address: h, adress: i}", "nodes.a.adress (line 3): unknown key; did you mean address?"),
        (
            "a: {address: h, colour: red}",
            "nodes.a.colour (line 3): unknown key; known: address, data_address, user, port, gpus",
        ),
        ("a: {address: h, port: 022}", "nodes.a.port (line 3): 022 is not a port: omit the leading zero"),
        ("a: {address: h, port: 0}", "nodes.a.port (line 3): 0 is not a port (1-65535)"),
        ("a: {address: h, port: 22:22}", "nodes.a.port (line 3): 22:22 is not a port (1-65535)"),
        ("a: {address: h, port: 2_2}", "nodes.a.port (line 3): 2_2 is not a port (1-65535)"),
        ("a: {address: h, port: 22.0}", "nodes.a.port (line 3): 22.0 is not a port (1-65535)"),
        ("a: {address: h, gpus: 0}", "nodes.a.gpus (line 3): 0 is not a number of GPUs (1-1024)"),
        ("a b: h", "nodes.a b (line 3): a b is not a node name (letters, digits, . _ - only); several nodes are written gpu[01,03]"),
        ("-a: h", "nodes.-a (line 3): -a is not a node name (letters, digits, . _ - only)"),
        ("ä: h", "nodes.ä (line 3): ä is not a node name (letters, digits, . _ - only)"),
        ("'': h", "nodes.'' (line 3): nothing is not a node name (letters, digits, . _ - only)"),
        ("..: h", "nodes... (line 3): .. is not a node name (letters, digits, . _ - only)"),
        ("a[1-2]: h[1-3]", "nodes.a[1-2] (line 3): 2 names, but 3 addresses in h[1-3]: a range of names needs a range of as many addresses"),
        ("a[1-2]: h", "nodes.a[1-2] (line 3): 2 names, but 1 address in h: a range of names needs a range of as many addresses"),
        ("a[2-1]: h[1-2]", "nodes.a[2-1] (line 3): [2-1] runs backwards: 2 to 1"),
        ("a[01-2]: h[1-2]", "nodes.a[01-2] (line 3): [01-2] mixes widths: write 01 to 02"),
        ("a[]: h", "nodes.a[] (line 3): [] is not a range such as [01-04,07]"),
        ("a[x]: h", "nodes.a[x] (line 3): [x] is not a range such as [01-04,07]"),
        ("a1]: h", "nodes.a1] (line 3): a1] has an unmatched bracket: write a range as gpu[01-04,07]"),
        ("a[1-999999999]: h", "nodes.a[1-999999999] (line 3): [1-999999999] has more than 4096 numbers"),
        ("a[1-99][1-99]: h", "nodes.a[1-99][1-99] (line 3): a[1-99][1-99] has more than 4096 names"),
    ],
)  # fmt: skip
def test_invalid_nodes(problems, entry, printed):
    assert problems(f"{HEAD}nodes:\n  {entry}\n") == (printed,)


@pytest.mark.parametrize(
    ("nodes", "printed"),
    [
        ("a: h\n  b: H", "nodes.b (line 4): b has the address of a: H port 22"),
        ("a: '::1'\n  b: '0::1'", "nodes.b (line 4): b has the address of a: 0::1 port 22"),
        ("a: h\n  b: {address: h, port: 22}", "nodes.b (line 4): b has the address of a: h port 22"),
        (
            "a: {address: h, data_address: x}\n  b: {address: i, data_address: x}",
            "nodes.b (line 4): b has the data_address of a: x",
        ),
        ("a: h\n  b: {address: i, data_address: h}", "nodes.b (line 4): b's data_address is the address of a: h"),
        ("a: h\n  a: i", "nodes.a (line 4): is listed twice, first in line 3"),
        ("a[1-3]: h[1-3]\n  a[3-4]: h[4-5]", "nodes.a[3-4] (line 4): a3 is listed twice, first in line 3 (a[1-3])"),
    ],
)
def test_duplicate_nodes_and_addresses_are_refused(problems, nodes, printed):
    assert problems(f"{HEAD}nodes:\n  {nodes}\n") == (printed,)


def test_one_address_with_two_ports_is_two_nodes(write):
    assert len(load(write(HEAD + "nodes: {a: h, b: {address: h, port: 2222}}")).nodes) == 2


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("ssh: {timeout: 0}", "ssh.timeout (line 3): 0 is not a number of seconds (0.1 to 3600)"),
        ("ssh: {timeout: .nan}", "ssh.timeout (line 3): .nan is not a number of seconds (0.1 to 3600)"),
        ("ssh: {timeout: inf}", "ssh.timeout (line 3): inf is not a number of seconds (0.1 to 3600)"),
        ("ssh: root", "ssh (line 3): must be a mapping of keys, not one value"),
        ("ssh: {key: ~nobody-here/id}", "ssh.key (line 3): ~nobody-here/id: this machine has no such user"),
        ("train: [a]", "train (line 3): must be a mapping of keys, not a list"),
        ("train: {env: x}", "train.env (line 3): must be a mapping of keys"),
        ("train: {env: {A: }}", 'train.env.A (line 3): has no value: write "" for an empty one'),
        ("train: {env: {A: [b]}}", "train.env.A (line 3): must be text or a number, not a list"),
        (r'train: {env: {A: "\0"}}', "train.env.A (line 3): contains a NUL character, which an environment variable cannot"),
        (
            "train: {env: {1A: x}}",
            "train.env.1A (line 3): is not the name of an environment variable (letters, digits and _, not a digit first)",
        ),
        ("services: {limits: {nofile: 3}}", "services.limits.nofile (line 3): 3 is not a number of open files (1024 to 1073741824)"),
        ("services: {limits: {shm: much}}", "services.limits.shm (line 3): 'much' is not a size of a tmpfs: write 64G, or 50% of the memory"),
        ("services: {limits: {memlok: 1}}", "services.limits.memlok (line 3): unknown key; did you mean memlock?"),
        ("services: {chrony: {head: nobody}}", "services.chrony.head (line 3): no node is called nobody"),
        ("services: {chrony: {servers: [a b]}}", "services.chrony.servers.0 (line 3): a b is neither a host name nor an IP address"),
        ("services: {nfs: yes}", "services.nfs (line 3): must be a mapping of keys"),
        ("services: {nfs: !!python/object/apply:os.abort []}",
         "services.nfs (line 3): the tag !!python/object/apply:os.abort is not allowed in an inventory"),
        ("services: {nfs: {exports: /a}}", "services.nfs.exports (line 3): must be a list, such as [a, b]"),
        ("services: {nfs: {exports: [/a], threads: x}}", "services.nfs.threads (line 3): must be a whole number"),
        ("services: {nfs: {exports: [/a], automount: 3}}", "services.nfs.automount (line 3): must be true or false"),
        ("services: {chrony: {head: !!binary aGk=}}",
         "services.chrony.head (line 3): the tag !!binary is not allowed in an inventory"),
        ("services: {limits: {nofile: 4096, nofile: 4097}}",
         "services.limits.nofile (line 3): is listed twice, first in line 3"),
        ("services: {nfs: {[a]: 1}}", "services.nfs (line 3): a key must be text, not a list or a mapping"),
        ("services: {nfs: {<<: 3}}", "services.nfs (line 3): `<<` takes the alias of a mapping"),
        (r'ssh: {user: "\ud800"}', "ssh.user (line 3): half of a surrogate pair is not a character"),
    ],
)  # fmt: skip
def test_invalid_sections(problems, text, printed):
    assert problems(HEAD + NODES + text) == (printed,)


def test_missing_keys(problems):
    assert problems("ssh: {}") == ("prefix: is missing", "nodes: is missing")
    printed = "nodes (line 2): names no node: write at least one line such as `gpu01: 192.168.20.14`"
    assert problems(HEAD + "nodes: {}") == (printed,)
    assert problems(HEAD + "nodes: [a]") == (printed,)
    assert printed in problems(HEAD + "nodes:")


def test_aliases_of_aliases_end(problems):
    layers = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    assert any(
        "more than 50,000 values: aliases of aliases?" in printed for printed in problems(f"a0: &a0 [x]\n{layers}")
    )


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("a: b: c", "line 1, column 5: mapping values are not allowed here (text that holds `: ` needs quotes)"),
        ("a:\n\tb: 1", r"line 2, column 1: found character '\t' that cannot start any token (a tab; YAML indents with spaces)"),
        ("a: {b: 1\nc: 2\n", "line 2, column 2: expected ',' or '}', but got ':' (the bracket opened in line 1 is not closed)"),
        ("a: {b: 10.0.0.[1-2]}", ("line 1, column 15: expected ',' or '}', but got '[' "
                                 '(inside { } or [ ] a range needs quotes: "10.0.0.[1-4]")')),
        ("a: *x", ("line 1, column 4: found undefined alias 'x' (an alias *NAME needs an anchor &NAME before it; "
                  "text that begins with * needs quotes)")),
        ("---\na: 1\n---\nb: 1", ("line 3, column 1: but found another document (an inventory is one document; "
                                 "take out the second `---`)")),
        ("a: 1\nb: \x01", r"line 2, column 4: a control character (\x01)"),
        ("[" * 5000, "the lists or mappings are nested too deeply"),
    ],
)  # fmt: skip
def test_text_that_is_not_yaml(write, text, printed):
    path = write(text)
    with pytest.raises(InventoryError) as caught:
        load(path)
    assert str(caught.value) == f"{path} is not YAML"
    assert caught.value.problems == (printed,)


def test_unreadable_inventory_files(write, tmp_path, monkeypatch):
    def error(path: Path) -> str:
        with pytest.raises(InventoryError) as caught:
            load(path)
        return f"{caught.value} | {caught.value.hint}"

    name_it = (
        "name the file with --inventory FILE, or write one: clusterctl init gpu01=192.168.20.14 gpu02=192.168.20.15"
    )
    assert error(tmp_path / "no.yaml") == f"{tmp_path}/no.yaml does not exist | {name_it}"
    assert error(tmp_path) == f"{tmp_path} is a folder, not an inventory file | {name_it}"
    assert error(Path("a\0b")).startswith(r"a\x00b cannot be read: ")
    path = write(b"a: 1\nb: \xe9")
    assert error(path) == f"{path} is not UTF-8: byte 0xe9 in line 2 | save the file as UTF-8"
    for empty in ("", "# nothing\n", "---\n"):
        assert error(write(empty)).startswith(f"{path} is empty | write at least prefix: and nodes:")

    def refuse(*_):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "open", refuse)
    assert error(path) == f"{path} cannot be read: Permission denied | {name_it}"


YAMLISH = st.lists(
    st.sampled_from([
        "prefix: ", "nodes:", "ssh:", "train:", "services:", "env:", "\n", "\n  ", "\n    ", "gpu[01-02]", "a", ": ",
        "192.168.20.14", "[", "]", "{", "}", ",", "- ", "? ", "<<", "*a", "&a ", "!!int ", "!x ", "!!set ", "'", '"', "022",
        "yes", "~", "null", "22:30", "|", ">", "%", "@", "`", "#", "---", "\t", "\\", "\x85", "\0", "é", "0x", "1e9", ".inf", "=",
    ])
    | st.text(max_size=4),
    max_size=40,
).map("".join)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=YAMLISH, start=st.sampled_from(["", HEAD, HEAD + "nodes:\n  "]))
def test_load_raises_nothing_but_inventory_errors(tmp_path, text, start):
    path = tmp_path / "any.yaml"
    path.write_bytes((start + text).encode(errors="replace"))
    try:
        assert load(path).nodes
    except InventoryError as error:
        caught = error
    else:
        return
    assert caught.hint
    assert all(problem.isprintable() for problem in caught.problems)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=64))
def test_load_of_any_bytes(tmp_path, raw):
    path = tmp_path / "any.yaml"
    path.write_bytes(raw)
    with pytest.raises(InventoryError):
        load(path)


# --- warnings ------------------------------------------------------------------------------------


def test_suspicious_address_gives_a_warning(write):
    inventory = load(write(HEAD + "nodes: {a: 192.168.20.14, b: 192.168.20.15, c: 192.169.20.16}"))
    printed = "c: address 192.169.20.16 begins with 192.169, those of 2 other nodes with 192.168; is it a typing error?"
    assert inventory.warnings == (printed,)
    assert likely_typo(inventory, inventory.nodes[2]) == printed
    assert likely_typo(inventory, inventory.nodes[0]) is None


@pytest.mark.parametrize(
    ("addresses", "suspects"),
    [
        (["192.169.0.1", "192.168.0.2"], ["n0"]),  # the public one
        (["10.1.0.1", "10.2.0.2"], ["n1"]),  # both private: the later one
        (["10.1.0.1", "10.3.0.2"], []),  # two networks
        (["10.1.0.1", "11.2.0.2"], []),
        (["10.1.0.1", "gpu1"], []),
        (["10.1.0.1", "10.1.0.2", "10.1.0.3", "10.2.0.1", "10.2.0.2", "10.2.0.3"], []),  # two racks
        (["10.1.0.1", "10.1.0.2", "10.1.0.3", "10.1.0.4", "10.2.0.1", "10.2.0.2"], []),  # a large and a small rack
        (["192.168.0.1", "192.168.0.2", "192.168.0.3", "192.168.0.4", "192.169.0.1", "192.169.0.2"], ["n4", "n5"]),
        (["10.1.0.1", "10.2.0.1", "10.3.0.1"], []),
        (["10.1.0.1", "10.1.0.2", "::1", "h", "172.16.0.1"], ["n4"]),
    ],
)
def test_suspicious_addresses(addresses, suspects):
    inventory = cluster(*(Node(f"n{index}", address) for index, address in enumerate(addresses)))
    assert [node.name for node in inventory.nodes if likely_typo(inventory, node)] == suspects


def test_suspicious_data_addresses_give_a_warning():
    inventory = cluster(Node("a", "x", "10.0.0.1"), Node("b", "y", "10.0.0.2"), Node("c", "z", "100.0.0.3"))
    assert likely_typo(inventory, inventory.nodes[2]) == (
        "c: data_address 100.0.0.3 begins with 100.0, those of 2 other nodes with 10.0; is it a typing error?"
    )


def test_a_prefix_too_long_or_with_a_space_for_a_shebang(write):
    room = 127 - len("#!//releases/0123456789ab/bin/python")
    assert load(write(f"prefix: /{'x' * room}/current\n{NODES}")).warnings == ()
    (printed,) = load(write(f"prefix: /{'x' * (room + 1)}/current\n{NODES}")).warnings
    assert printed.endswith(
        "/current makes a first line of 128 bytes, over 127; "
        "the environment's scripts start through /bin/sh instead of `#!…/python`"
    )
    (printed,) = load(write(f"prefix: /opt/a b/current\n{NODES}")).warnings
    assert printed.startswith("prefix: /opt/a b/current contains a space; ")


# --- select and fold -------------------------------------------------------------------------------

GPUS = cluster(*(Node(f"gpu{index:02}", f"10.0.0.{index}") for index in (3, 1, 2, 5)))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "gpu03 gpu01 gpu02 gpu05"),
        ({"count": 2}, "gpu03 gpu01"),
        ({"limit": "gpu[01-03]"}, "gpu03 gpu01 gpu02"),
        ({"limit": "gpu05,gpu01"}, "gpu01 gpu05"),
        ({"exclude": "gpu03"}, "gpu01 gpu02 gpu05"),
        ({"limit": "gpu[01-03]", "exclude": "gpu03", "count": 1}, "gpu01"),
    ],
)
def test_select(options, names):
    assert [node.name for node in select(GPUS, **options)] == names.split()


@pytest.mark.parametrize(
    ("options", "printed", "hint"),
    [
        (
            {"count": 9},
            "--nodes 9: inventory.yaml has 4 (gpu[01-03,05])",
            "--nodes 4, or add the others to inventory.yaml",
        ),
        (
            {"count": 3, "exclude": "gpu[01-02]"},
            "--nodes 3: --limit and --exclude leave 2 (gpu[03,05])",
            "--nodes 2, or name more of gpu[01-03,05]",
        ),
        ({"count": 0}, "--nodes 0: at least one node is needed", "for all nodes: --nodes 4"),
        (
            {"limit": "gpu5"},
            "--limit gpu5: no node is called gpu5",
            "did you mean gpu05? inventory.yaml has gpu[01-03,05]",
        ),
        (
            {"exclude": "xy[1-2],gpu01"},
            "--exclude xy[1-2],gpu01: no node is called xy[1-2]",
            "inventory.yaml has gpu[01-03,05]",
        ),
        (
            {"limit": "gpu[01-"},
            "--limit gpu[01-: not a set of nodes: unmatched bracket: write a range as gpu[01-04,07]",
            "write it as gpu[01-03,05]",
        ),
        ({"limit": ""}, "--limit '': names no node", "inventory.yaml has gpu[01-03,05]"),
        ({"limit": "@al"}, "--limit @al: there is no group @al", "did you mean @all? inventory.yaml has gpu[01-03,05]"),
        ({"limit": "gpu01", "exclude": "gpu01"}, "no node is selected", "inventory.yaml has gpu[01-03,05]"),
    ],
)
def test_invalid_selections(options, printed, hint):
    with pytest.raises(UsageError) as caught:
        select(GPUS, **options)
    assert (str(caught.value), caught.value.hint) == (printed, hint)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["gpu01"], "gpu01"),
        (["gpu02", "gpu01", "gpu07", "gpu01"], "gpu[01-02,07]"),
        (["b", "a"], "a,b"),
        (["a b", "c@d", "a b"], "a b,c@d"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
    ],
)
def test_fold(names, folded):
    assert fold(names) == folded


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,8}", fullmatch=True)


@settings(deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=12, unique=True), st.data())
def test_select_reads_folded_names(names, data):
    inventory = cluster(*(Node(name, f"host-{index}") for index, name in enumerate(names)))
    some = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    assert [node.name for node in select(inventory, limit=fold(some))] == [name for name in names if name in some]


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20, unique=True), st.integers(1, 4))
def test_expand_keeps_the_order_written(numbers, width):
    written = [str(number).zfill(width) for number in numbers]
    assert expand(f"gpu[{','.join(written)}].x") == [f"gpu{number}.x" for number in written]
