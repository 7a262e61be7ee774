"""Inventories of Ansible's and hostfiles, read."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from provision.errors import InventoryError, UsageError
from provision.inventory.foreign import kind_of, read
from provision.inventory.new_nodes import Wanted

INI = """\
# a cluster
head ansible_host=10.0.0.1
[gpus]
gpu[01:03]  ansible_user=ubuntu   # comment
10.0.0.9:2222
[gpus:vars]
ansible_port = 2200
ansible_become=true
rack='r 1'
[spare]
gpu04 ansible_ssh_host="10.0.0.14" ansible_ssh_private_key_file=~/.ssh/cluster
[cluster:children]
gpus
spare
[all:vars]
ansible_user=root
"""

DIFFERENT = "nodes have different keys; write them as IdentityFile into ~/.ssh/config"
YAML = """\
---
all:
  vars:
    ansible_user: root
    secret: !vault |
      $ANSIBLE_VAULT;1.1;AES256
      3132
  children:
    gpus:
      hosts:
        gpu[1:2]:
          ansible_port: 2222
        gpu9: {ansible_host: 10.0.0.9, slots: 8}
      vars: {ansible_ssh_private_key_file: keys/one}
    rest:
      hosts:
        10.0.0.5:
      vars: {ansible_ssh_private_key_file: keys/one}
"""


def hosts(text, **options):
    return read(text, "file", **options).hosts


def test_ini():
    found = read(INI, "hosts.ini")
    assert found.hosts == (
        Wanted("10.0.0.1", "head", user="root"),
        Wanted("gpu01", "gpu01", user="ubuntu", port=2200),
        Wanted("gpu02", "gpu02", user="ubuntu", port=2200),
        Wanted("gpu03", "gpu03", user="ubuntu", port=2200),
        Wanted("10.0.0.9", None, user="root", port=2222),
        Wanted("10.0.0.14", "gpu04", user="root"),
    )
    assert found.ssh == {}
    assert found.notes == (
        "ansible_become (line 8) is skipped: clusterctl uses sudo where it needs root",
        "rack (line 9) is skipped",
        f"ansible_ssh_private_key_file (line 11): {DIFFERENT}",
    )


def test_groups():
    assert [each.name for each in hosts(INI, group="spare")] == ["gpu04"]
    assert len(hosts(INI, group="cluster")) == 5
    found = read(INI, "hosts.ini", group="spare")
    assert found.ssh == {"user": "root", "key": "~/.ssh/cluster"}
    assert found.notes == ()  # settings of other hosts do not apply to these
    with pytest.raises(UsageError, match="has no group gpu") as caught:
        read(INI, "hosts.ini", group="gpu")
    assert "gpus, spare, cluster" in caught.value.hint


def test_yaml():
    found = read(YAML, "hosts.yml")
    assert found.hosts == (
        Wanted("gpu1", "gpu1", port=2222),
        Wanted("gpu2", "gpu2", port=2222),
        Wanted("10.0.0.9", "gpu9"),
        Wanted("10.0.0.5"),
    )
    assert found.ssh == {"user": "root", "key": "keys/one"}
    assert found.notes == (
        "all.vars.secret (line 5): the tag !vault is not allowed in an inventory; its value is skipped",
        "secret (line 5) is skipped",
        "slots (line 13) is skipped",
    )
    assert [each.name for each in hosts(YAML, group="gpus")] == ["gpu1", "gpu2", "gpu9"]


def test_host_variables_override_those_of_child_and_parent_groups():
    text = """\
[parent:children]
a
z
[a]
one
two ansible_port=3
three
[z]
three
[parent:vars]
ansible_port=1
[a:vars]
ansible_port=2
[z:vars]
ansible_port=4
"""
    assert [each.port for each in hosts(text)] == [2, 3, 4]


@pytest.mark.skipif(not shutil.which("ansible-inventory"), reason="Ansible is not installed")
@pytest.mark.parametrize(("name", "text"), [("hosts.ini", INI), ("hosts.yml", YAML.replace("!vault |", "|"))])
def test_ansible_reads_the_same(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    argv = ["ansible-inventory", "-i", tmp_path / name, "--list"]
    done = subprocess.run(argv, capture_output=True, check=True, cwd=tmp_path)
    theirs = json.loads(done.stdout)["_meta"]["hostvars"]
    found = read(text, name)
    assert {each.name or each.address for each in found.hosts} == set(theirs)
    for each in found.hosts:
        mine = {"user": each.user or found.ssh.get("user"), "port": each.port and str(each.port)}
        their = theirs[each.name or each.address]
        port = their.get("ansible_port")
        assert mine == {"user": their["ansible_user"], "port": port and str(port)}
        assert each.address == their.get("ansible_host", their.get("ansible_ssh_host", each.name or each.address))


def test_hostfiles():
    text = "# workers\nworker-1 slots=8\nworker-2 slots=4 max_slots=8 # two\n\n10.0.0.3 slots=1\nworker-4:2\n"
    found = read(text, "hostfile")
    assert found.hosts == (
        Wanted("worker-1", "worker-1", gpus=8),
        Wanted("worker-2", "worker-2", gpus=4),
        Wanted("10.0.0.3", gpus=1),
        Wanted("worker-4", "worker-4", gpus=2),
    )
    assert found.notes == ("max_slots (line 3) has no counterpart and is skipped",)
    with pytest.raises(UsageError, match="no groups"):
        read(text, "hostfile", group="x")


def test_bare_host_names():
    assert hosts("a\nb.example.org\n10.0.0.1\n") == (
        Wanted("a", "a"),
        Wanted("b.example.org", "b.example.org"),
        Wanted("10.0.0.1"),
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (INI, "ansible-ini"),
        (YAML, "ansible-yaml"),
        ("gpus:\n  hosts:\n    a:\n", "ansible-yaml"),
        ("# x\n{all: {hosts: {a: }}}", "ansible-yaml"),
        ("a slots=1\n", "hostfile"),
        ("a ansible_host=b\n", "ansible-ini"),
        ("prefix: /opt/env\nnodes: {a: b}\n", "clusterctl"),
        ("nodes:\n  a: b\nprefix: /opt/env\n", "clusterctl"),
        ("", "ansible-ini"),
    ],
)
def test_kind_is_detected_from_the_content(text, kind):
    assert kind_of(text) == kind


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "[a]\nb c\n[a:b]\nd\n[x\n",
            ["line 2: c is not", "line 3: [a:b] is not a section", "line 5: [x is not a section"],
        ),
        ("[a:children]\nb\n", ["line 2: there is no group b"]),
        ("[a:children]\nb\n[b:children]\na\n", ["line 2: the group a is its own child", "line 4: the group b"]),
        ("[a]\ngpu[1:]\ngpu[3:1]\nh[1-2]\n", ["line 2: gpu[1:]", "line 3: [3:1] is not a range", "line 4: h[1-2]"]),
        ("[a]\nb ansible_host={{ip}} ansible_port=0\n", ["line 2: b: its address is a template"]),
        (
            "[a]\nb ansible_port=99999\nc ansible_user=x:y\n",
            ["line 2: b: 99999 is not a port", "line 3: c: x:y is not"],
        ),
        ("[a]\nb ansible_user='x\n", ["line 2: b ansible_user='x: no closing quotation"]),
        ("[a:vars]\nb\n", ["line 2: b is not NAME=VALUE"]),
        ("all:\n  hosts: [a]\n", ["line 2: all.hosts must be a mapping"]),
        ("all:\n  host:\n    a:\n", ["line 2: host in the group all"]),
        ("all:\n  hosts:\n   a: {\n", ["line 4, column 1"]),
        (
            "a slots=0\na slots=2\nb slot=3 slots=1\nc_! slots=1\n",
            ["line 1: 0 is not", "line 3: slot=3", "line 4: c_!"],
        ),
        ("a slots=1\na slots=2\n", ["line 2: a is listed twice, first in line 1"]),
    ],
)
def test_unknown_syntax_is_named_with_its_line(text, problems):
    with pytest.raises(InventoryError) as caught:
        read(text, "file")
    assert len(caught.value.problems) == len(problems), caught.value.problems
    for message, wanted in zip(caught.value.problems, problems, strict=True):
        assert message.startswith(wanted)


@pytest.mark.parametrize("text", ["", "# nothing\n", "all:\n  vars: {a: b}\n", "[gpus]\n"])
def test_no_host(text):
    with pytest.raises(InventoryError, match="names no host"):
        read(text, "file")


def test_passwords_are_not_imported():
    found = read("a ansible_password=hunter2 ansible_ssh_common_args='-4 -J x' ansible_connection=ssh\n", "f")
    assert "hunter2" not in repr(found)
    assert [note.split(" (")[0] for note in found.notes] == ["ansible_password", "ansible_ssh_common_args"]
    assert "never stores it" in found.notes[0]


@pytest.mark.parametrize(
    ("arguments", "jump"),
    [
        ("-o ProxyJump=login", "login"),
        ("-J ops@login.example:2222", "ops@login.example:2222"),
        ('-o ProxyJump=\\"bastion\\"', "bastion"),
        ("-oProxyJump=10.0.0.1", "10.0.0.1"),
        ("-J one,two", None),  # a chain
        ("-o ProxyJump=login -o StrictHostKeyChecking=no", None),
        ("-o ProxyCommand=evil", None),
        ("-J -oProxyCommand=x", None),
        ("-J $(id)", None),
        ("-J none:x", None),
    ],
)
def test_a_jump_host_of_all_hosts_is_imported(arguments, jump):
    hosts = f"gpu1\ngpu2\n[all:vars]\nansible_ssh_common_args='{arguments}'\n"
    found = read(hosts, "hosts")
    assert found.ssh.get("jump_hosts") == ([jump] if jump else None)
    assert bool(found.notes) == (jump is None)
    some = read("gpu1 ansible_ssh_common_args='-J login'\ngpu2\n", "hosts")
    assert "jump_hosts" not in some.ssh
    assert "for a jump host: --jump-host HOST" in some.notes[0]
