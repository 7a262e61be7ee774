"""``init --from FILE``: files beside Ansible's inventories, other kinds of files, and the written inventory."""

# ruff: noqa: E501 - a message is one string, so that a search finds it

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.errors import InventoryError, UsageError
from provision.inventory import load
from provision.inventory.foreign import kind_of, read, read_file
from provision.inventory.loading import parse
from provision.inventory.names import MAX_NODES
from provision.inventory.new_nodes import Wanted, parse_hosts
from provision.inventory.writing import inventory_text as written
from provision.model import Node, Notice
from provision.ssh.enrol import Enrolled
from provision.tasks import init


@pytest.fixture
def files(tmp_path):
    def files(texts):
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / next(iter(texts))

    return files


@pytest.fixture
def create(tmp_path, monkeypatch):
    """Runs ``init --from`` with nodes that are ready and report no facts."""
    monkeypatch.setattr(init, "enrol", lambda _, node, __: Enrolled(node.name, "ready"))
    monkeypatch.setattr(init, "ask_facts", lambda *_: {})
    monkeypatch.setattr(init, "default_key", lambda: None)

    def create(source, *, hosts=(), **options):
        notes = []

        def emit(event):
            notes.extend([event.text] if isinstance(event, Notice) else [])

        found = init.foreign(source, emit=emit, group=options.pop("group", None)) if source else None
        named = found.hosts if found else parse_hosts(hosts)
        ssh = {**(found.ssh if found else {}), **options.pop("ssh", {})}
        path = tmp_path / "new/inventory.yaml"
        init.create(path, named, ssh=ssh, found=found, emit=emit, **options)
        return load(path), notes

    return create


# --- group_vars and host_vars --------------------------------------------------------------------------

SITE = {
    "hosts.ini": "[gpus]\ngpu[1:3]\n[big:children]\ngpus\n[store]\nstore1 ansible_port=5\n[gpus:vars]\nansible_user=ini\n",
    "group_vars/all.yml": "ansible_user: everyone\nansible_port: 1\nrack: r1\n",
    "group_vars/big.yaml": "ansible_port: 2\nansible_become: true\n",
    "group_vars/gpus/10-ports": "ansible_port: 3\n",
    "group_vars/gpus/20-user.json": '{"ansible_user": "gpu", "ansible_ssh_private_key_file": "k"}\n',
    "group_vars/gpus/deep/x.yml": "ansible_port: 4\n",
    "group_vars/gpus/README.md": "not variables\n",
    "group_vars/gpus/.hidden.yml": "ansible_port: 9\n",
    "group_vars/store.json": '{"ansible_port": 7}\n',
    "group_vars/store.yml~": "ansible_port: 9\n",
    "host_vars/gpu2.yml": "ansible_host: 10.0.0.2\nansible_port: 22\n",
    "host_vars/gpu3": "ansible_host: 10.0.0.3\n",
    "host_vars/store1.yml": "ansible_port: 8\n",
}


def test_variables_beside_an_ansible_inventory(files):
    path = files(SITE)
    assert read_file(path).hosts == (
        Wanted("gpu1", "gpu1", user="gpu", port=4),
        Wanted("10.0.0.2", "gpu2", user="gpu", port=22),
        Wanted("10.0.0.3", "gpu3", user="gpu", port=4),
        Wanted("store1", "store1", user="everyone", port=8),
    )
    assert read_file(path).notes[0] == "rack (group_vars/all.yml line 3) is skipped"
    assert "ansible_become (group_vars/big.yaml line 2) is skipped: clusterctl uses sudo where it needs root" in (
        read_file(path).notes
    )
    assert read_file(path, group="gpus").ssh == {"user": "gpu", "key": "k"}


@pytest.mark.skipif(not shutil.which("ansible-inventory"), reason="Ansible is not installed")
def test_ansible_reads_the_same_files(files, tmp_path):
    path = files(SITE)
    argv = ["ansible-inventory", "-i", path, "--list"]
    listed = subprocess.run(argv, capture_output=True, check=True, cwd=tmp_path, text=True).stdout
    theirs = json.loads(listed)["_meta"]["hostvars"]
    for each in read_file(path).hosts:
        their = theirs[each.name]
        assert (each.user, each.port) == (their["ansible_user"], their["ansible_port"])
        assert each.address == their.get("ansible_host", each.name)
    assert set(read(listed, "hosts.json").hosts) == set(read_file(path).hosts)


def test_files_beside_it_that_are_not_used_are_named(files):
    path = files(
        {
            "hosts": "gpu1\n",
            "group_vars/all/vault.yml": "$ANSIBLE_VAULT;1.1;AES256\n3132\n",
            "group_vars/all/tagged.yml": "secret: !vault |\n  $ANSIBLE_VAULT\n",
            "group_vars/web.yml": "a: b\n",
            "group_vars/all.yml": "ansible_port: 3\n",
            "host_vars/gpu1.yml": b"\xff\n",
            "host_vars/gpu9.yml": "a: b\n",
        }
    )
    found = read_file(path)
    assert found.hosts == (Wanted("gpu1", "gpu1"),)
    assert found.notes == (
        "group_vars/all/tagged.yml: secret (line 1): the tag !vault is not allowed in an inventory; its value is skipped",
        "group_vars/all/vault.yml is not read: it is encrypted with Ansible Vault",
        "group_vars/all.yml is not read: Ansible reads group_vars/all in its place",
        "group_vars/web.yml is not used: there is no group web",
        "host_vars/gpu1.yml is not read: it is not UTF-8",
        "host_vars/gpu9.yml is not used: there is no host gpu9",
        "secret (group_vars/all/tagged.yml line 1) is skipped",
    )


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("ansible_port: 0\n", "host_vars/gpu1.yml line 1: gpu1: 0 is not a port (1-65535)"),
        ("\nansible_user: -oX\n", "host_vars/gpu1.yml line 2: gpu1: -oX is not a login name"),
        ("ansible_host: '{{ ip }}'\n", "host_vars/gpu1.yml line 1: gpu1: its address is a template, {{ ip }}: write the value"),
        ("a: {\n", "host_vars/gpu1.yml line 2, column 1: expected the node content, but found '<stream end>' (the bracket opened in line 2 is not closed)"),
        ("- a\n", "host_vars/gpu1.yml is not a mapping of variables"),
        ("a: 1\na: 2\n", "host_vars/gpu1.yml: a (line 2): is listed twice, first in line 1"),
    ],
)  # fmt: skip
def test_error_in_a_variables_file_names_the_file_and_the_line(files, text, printed):
    with pytest.raises(InventoryError) as caught:
        read_file(files({"hosts": "gpu1\n", "host_vars/gpu1.yml": text}))
    assert caught.value.problems == (printed,)


def test_many_variables_of_playbooks_share_one_sentence(files):
    found = read_file(files({"hosts": "gpu1\n", "group_vars/all.yml": "".join(f"v{n}: x\n" for n in range(30))}))
    assert found.notes == ("30 variables that ssh does not need are skipped: " + ", ".join(f"v{n}" for n in range(30)),)


# --- what is no list of hosts ---------------------------------------------------------------------------

LIST = "ansible-inventory -i {0} --list > hosts.json; clusterctl init --from hosts.json"


@pytest.mark.parametrize(
    ("name", "text", "printed", "hint"),
    [
        (
            "aws_ec2.yaml",
            "---\nplugin: amazon.aws.aws_ec2\nregions: [eu-central-1]\n",
            "configures Ansible's inventory plugin amazon.aws.aws_ec2, which asks another system for the hosts; init runs none",
            LIST,
        ),
        ("hosts.py", "#!/usr/bin/env python3\nprint({})\n", "is a script that prints an inventory; init runs none", LIST),
        ("hosts", b"\x7fELF\xff\xfe", "cannot be read: it is not a text file", "if it is a program: " + LIST),
        ("hosts.toml", "[gpus.hosts]\ngpu1 = {}\n", "is a TOML inventory of Ansible's, which is not read", LIST),
        ("hosts", "$ANSIBLE_VAULT;1.1;AES256\n31\n", "is encrypted with Ansible Vault", LIST.replace("--list", "--list --ask-vault-pass")),
        (
            "groups.conf",
            "[Main]\ndefault: local\nconfdir: /etc/clustershell/groups.conf.d\n[local]\nmap: sed x\n",
            "is ClusterShell's configuration, which names the files that have the groups",
            "name such a file: clusterctl init --from /etc/clustershell/groups.d/local.cfg; or the nodes: clusterctl init $(cluset -e @all)",
        ),
    ],
)  # fmt: skip
def test_files_without_hosts_are_named_with_the_next_command(files, name, text, printed, hint):
    path = files({name: text})
    with pytest.raises(UsageError) as caught:
        read_file(path)
    assert str(caught.value) == f"{path} {printed}"
    assert caught.value.hint == hint.format(path)


def test_a_folder_and_a_large_file_are_no_inventories(files, tmp_path):
    path = files({"a folder/hosts": "gpu1\n"}).parent
    with pytest.raises(UsageError, match="is a directory; Ansible reads every file in it") as caught:
        read_file(path)
    assert caught.value.hint == LIST.format(f"'{path}'")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(UsageError, match="is larger than 4 MiB: it is not an inventory"):
        read_file(tmp_path / "large")


@pytest.mark.parametrize("text", ["h[1:999999999]", "h[1:4000][1:4000]", "\n".join(f"h{n}[1:4096]" for n in range(9))])
def test_huge_ranges_are_refused(text):
    with pytest.raises(InventoryError, match=r"has (a|7) mistake") as caught:
        read("[gpus]\n" + text, "hosts")
    assert "more than" in caught.value.problems[0]
    assert MAX_NODES == 4096


# --- ansible-inventory --list ---------------------------------------------------------------------------


def test_output_of_ansible_inventory(files):
    listed = {
        "_meta": {"hostvars": {"gpu1": {"ansible_host": "10.0.0.1", "ansible_port": 2222, "tags": {"a": 1}}}},
        "all": {"children": ["ungrouped", "gpus", "big"]},
        "big": {"children": ["gpus"], "vars": {"ansible_user": "ada"}},
        "gpus": {"hosts": ["gpu1", "gpu2"]},
        "empty": [],
    }
    found = read_file(files({"hosts.json": json.dumps(listed)}))
    assert found.hosts == (Wanted("10.0.0.1", "gpu1", port=2222), Wanted("gpu2", "gpu2"))
    assert found.ssh == {"user": "ada"}
    assert found.groups == {"big": (0, 1), "gpus": (0, 1), "empty": ()}
    assert found.notes == ("tags is skipped",)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ('{"gpus": ["gpu[1-2]"]}', "gpu[1-2] is not a host"),
        ('{"gpus": ["-oX"]}', "-oX is neither a host name nor an IP address"),
        ('{"_meta": {}, "gpus": {"hosts": [1]}}', "hosts in the group gpus is not understood"),
        ('{"_meta": {}, "gpus": 3}', "the group gpus is neither a list nor an object"),
    ],
)
def test_invalid_listings(text, printed):
    with pytest.raises(InventoryError) as caught:
        read(text, "hosts.json")
    assert caught.value.problems == (printed,)


# --- hostfiles ------------------------------------------------------------------------------------------

MPICH = "the number after the colon ({}) is read as slots, as MPICH writes them; write a port as HOST:PORT slots=N"
PORTS = "the number after the colon ({}) is read as a port; write slots as slots=N"


@pytest.mark.parametrize(
    ("text", "hosts", "notes"),
    [
        ("a:2\nb:4\n", [Wanted("a", "a", gpus=2), Wanted("b", "b", gpus=4)], [MPICH.format("lines 1-2")]),
        ("a:22\nb:2222\n", [Wanted("a", "a", port=22), Wanted("b", "b", port=2222)], [PORTS.format("lines 1-2")]),
        ("a:2222 slots=8\nb slots=4\n", [Wanted("a", "a", port=2222, gpus=8), Wanted("b", "b", gpus=4)], []),
        ("ada@a\nb\n", [Wanted("a", "a", "ada"), Wanted("b", "b")], []),
        ("ada@10.0.0.1:2222\n", [Wanted("10.0.0.1", user="ada", port=2222)], [PORTS.format("line 1")]),
        ("[::1]:22\n[fd00::2]\nfd00::3\n", [Wanted("::1", port=22), Wanted("fd00::2"), Wanted("fd00::3")], []),
        ("gpu[01-02]:8\n", [Wanted(f"gpu0{n}", f"gpu0{n}", gpus=8) for n in (1, 2)], [MPICH.format("line 1")]),
        (
            "a:2 binding=user:0,1 ifhn=a-ib user=ada\n",
            [Wanted("a", "a", user="ada", gpus=2)],
            [
                "binding (line 1) has no counterpart and is skipped",
                "ifhn (line 1) has no counterpart and is skipped",
                MPICH.format("line 1"),
            ],
        ),
        ("h:2201 slots=1\nh:2202 slots=1\n", [Wanted("h", port=2201, gpus=1), Wanted("h", port=2202, gpus=1)], []),
    ],
)
def test_hostfiles(text, hosts, notes):
    found = read(text, "hostfile")
    assert list(found.hosts) == hosts
    assert list(found.notes) == notes


# --- ClusterShell ---------------------------------------------------------------------------------------

FLAT = """\
# /etc/clustershell/groups.d/local.cfg
adm: head
io: io[1-2]  # two
compute: gpu[01-03] gpu05
gpu: @compute,!gpu05
all: head,@io,@compute
"""
SOURCES = """\
nodes:
  all: '@compute,@adm'
  compute: 'gpu[1-4]'
  adm: ['head']
racks:
  r1: 'gpu[1-2]'
  adm: '@nodes:adm'
"""


def test_flat_group_files():
    found = read(FLAT, "local.cfg")
    assert [each.name for each in found.hosts] == ["head", "io1", "io2", "gpu01", "gpu02", "gpu03", "gpu05"]
    assert found.groups == {"adm": (0,), "io": (1, 2), "compute": (3, 4, 5, 6), "gpu": (3, 4, 5)}
    assert found.notes == ()
    only = read(FLAT, "local.cfg", group="gpu")
    assert [each.name for each in only.hosts] == ["gpu01", "gpu02", "gpu03"]
    assert only.groups == {"compute": (0, 1, 2), "gpu": (0, 1, 2)}


def test_sources_of_groups():
    found = read(SOURCES, "cluster.yaml")
    assert [each.name for each in found.hosts] == ["gpu1", "gpu2", "gpu3", "gpu4", "head"]
    assert found.groups == {"compute": (0, 1, 2, 3), "nodes-adm": (4,), "r1": (0, 1), "racks-adm": (4,)}
    assert found.notes == ("nodes:adm is called nodes-adm", "racks:adm is called racks-adm")


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("a: b\nc: @d\n", "line 2: c: there is no group @d"),
        ("a: @b\nb: @a\nc: d\n", "line 1: a: contains itself: @a -> @b -> @a"),
        ("a: -oX\n", "line 1: a: -oX is neither a host name nor an IP address"),
        ("a: n[1-999999999]\n", "line 1: a: [1-999999999] has more than 4096 numbers"),
    ],
)
def test_invalid_group_files(text, printed):
    with pytest.raises(InventoryError) as caught:
        read(text, "local.cfg")
    assert caught.value.problems[0] == printed


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (FLAT, "clustershell-flat"),
        (SOURCES, "clustershell-yaml"),
        ("all:\n  hosts:\n    a:\n", "ansible-yaml"),
        ('{"all": {"hosts": ["a"]}}', "ansible-json"),
        ('{"all": {"hosts": {"a": null}}}', "ansible-yaml"),
        ("a:8\n", "hostfile"),
        ("[::1]:22\n", "hostfile"),
        ("[gpus]\na:8\n", "ansible-ini"),
    ],
)
def test_kinds(text, kind):
    assert kind_of(text) == kind


# --- the inventory that is written ----------------------------------------------------------------------

FORMATS = {
    "hosts.ini": "head ansible_host=10.0.0.9\n[gpus]\ngpu[01:03] ansible_user=ada\n[rack:children]\ngpus\n[empty]\n",
    "hosts.yml": "gpus:\n  hosts:\n    gpu[1:3]: {ansible_port: 2222}\n  children:\n    fast:\n      hosts:\n        gpu2:\n",
    "hosts.json": json.dumps({"gpus": ["gpu1", "gpu2"], "fast": {"hosts": ["gpu2"]}}),
    "deepspeed": "worker-1 slots=8\nworker-2 slots=8\nroot@10.0.0.7:2222 slots=4\n",
    "mpich": "a:2\nb:2\n",
    "plain": "a\nb.example.org\n10.0.0.1\n",
    "local.cfg": FLAT,
    "cluster.yaml": SOURCES,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_ends_in_an_inventory_that_loads(files, create, name):
    found = read_file(files({name: FORMATS[name]}))
    inventory, _ = create(files({name: FORMATS[name]}))
    assert [node.address for node in inventory.nodes] == [each.address for each in found.hosts]
    for node, each in zip(inventory.nodes, found.hosts, strict=True):
        assert each.name in {None, node.name}
        assert (node.user or inventory.ssh.user) == (each.user or found.ssh.get("user"))
        assert (node.port or inventory.ssh.port) == (each.port or found.ssh.get("port"))
        assert node.gpus == each.gpus
    names = [node.name for node in inventory.nodes]
    assert inventory.groups == {
        key: tuple(names[at] for at in found.groups[key]) for key in found.groups if key != "empty"
    }


def test_groups_that_cannot_be_kept_are_named(files, create):
    inventory, notes = create(files({"hosts": "[a]\na\n[b!]\nb\n[empty]\n[ok]\na\n"}))
    assert inventory.groups == {"ok": ("a",)}
    assert notes == [
        "the group a is skipped: a is the name of a node: choose another name for the group",
        "the group b! is skipped: b! is not a group's name (letters, digits, . _ - only)",
        "the group empty is skipped: it has no host",
    ]


@pytest.mark.parametrize(
    ("source", "options", "printed"),
    [
        ({"hosts.ini": "[a]\nx ansible_host=h\ny ansible_host=h\n"}, {}, "{file} line 3: y has the address of x: h port 22"),
        ({"hosts.ini": "[a]\nx ansible_ssh_private_key_file=~nobody-here/k\n"}, {}, "{file} key: ~nobody-here/k: this machine has no such user"),
        ({"mpi": "a:2\n"}, {"prefix": "opt/x"}, "--prefix: opt/x is not an absolute path: it must begin with /, such as /opt/llm/current"),
        ({"mpi": "a:2\n"}, {"ssh": {"user": "-x"}}, "--user: -x is not a login name"),
        (None, {"hosts": ["a=h", "b=H"]}, "b=H: b has the address of a: H port 22"),
        (None, {"hosts": ["a=10.0.0.300"]}, "a=10.0.0.300: 10.0.0.300 is not an IPv4 address (four numbers from 0 to 255)"),
        (None, {"hosts": ["a[1-2]=10.0.0.[255-256]"]}, "a[1-2]=10.0.0.[255-256]: 10.0.0.256 is not an IPv4 address (four numbers from 0 to 255)"),
    ],
)  # fmt: skip
def test_error_names_the_users_text_and_no_line_of_a_generated_file(files, create, tmp_path, source, options, printed):  # fmt: skip
    path = files(source) if source else None
    with pytest.raises(InventoryError) as caught:
        create(path, **options)
    assert caught.value.problems == (printed.format(file=path),)
    assert str(caught.value) == f"no inventory was written: {tmp_path}/new/inventory.yaml would have a mistake"
    assert caught.value.hint
    assert not list((tmp_path / "new").iterdir())


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,8}", fullmatch=True)
ADDRESSES = (
    st.ip_addresses().map(str)
    | st.from_regex(r"[a-z0-9]{1,5}(-[a-z0-9]{1,3})?(\.[a-z]{1,4})?", fullmatch=True).filter(lambda text: not text.isdigit())
)  # fmt: skip


@given(st.data())
def test_written_inventory_loads_with_equal_values(data):
    names = data.draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    addresses = data.draw(st.lists(ADDRESSES, min_size=len(names), max_size=len(names), unique=True))
    users = st.none() | st.sampled_from(["root", "ü", "1000", "true", "CORP\\ada"])
    nodes = tuple(
        Node(
            name,
            at,
            None,
            data.draw(users),
            data.draw(st.none() | st.integers(1, 65535)),
            data.draw(st.none() | st.just(8)),
        )
        for name, at in zip(names, addresses, strict=True)
    )
    wishes = st.dictionaries(
        NAMES.filter(lambda each: each not in {*names, "all"}), st.sets(st.sampled_from(names), min_size=1), max_size=3
    )
    groups = {name: tuple(node for node in names if node in members) for name, members in data.draw(wishes).items()}
    ssh = {"user": "no", "port": 22}
    for ranges in (True, False):
        loaded = parse(
            written(nodes, prefix="/opt/a b/current", ssh=ssh, groups=groups, ranges=ranges), Path("/x/i.yaml")
        )
        assert loaded.nodes == nodes
        assert loaded.groups == groups
        assert (loaded.ssh.user, loaded.ssh.port) == ("no", 22)
