"""Any services section of an inventory is refused, or each configuration file gets exactly its values.

Hostile values go through the loader; the steps of what it accepts run under a real sh that only collects the files.
"""

from __future__ import annotations

import ipaddress
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from provision.errors import InventoryError, UsageError
from provision.inventory import load
from provision.services.kit import plans
from trainer.agent.contract.plan import RAM

# Replaces the library: files are written to $OUT, one for each path, blocks after each other; nothing else happens.
COLLECT = """
cc_save_as() { printf %s "$2" >"$OUT/$(printf %s "$1" | tr / _)"; }
cc_stage() { cc_new=/dev/null; cc_save_as "$1" "$3"; }
cc_block() { printf %s "$3" >>"$OUT/$(printf %s "$1" | tr / _)"; }
for cc_name in cc_remember cc_commit cc_done cc_block_done cc_journal cc_restart chronyd unshare exportfs systemctl
do eval "$cc_name() { :; }"; done
cc_has_unit() { false; }
"""
WRITING = {
    "hosts: names of the nodes",
    "limits: limits of a login",
    "limits: size of shared memory after a reboot",
    "tmpfs: the mount at boot",
    "chrony: configuration",
    "nfs: exports",
    "nfs: mounts of every boot",
}
LIKE = {
    ("nodes", "gpu01", "address"): "10.0.0.1",
    ("nodes", "gpu02", "address"): "fe80::2",
    ("nodes", "gpu02", "data_address"): "10.1.0.2",
    ("services", "chrony", "head"): "gpu01",
    ("services", "chrony", "servers"): ["ntp.example.org", "fd00::9"],
    ("services", "nfs", "server"): "gpu02",
    ("services", "nfs", "exports"): ["/data", "/srv/x y"],
    ("services", "nfs", "threads"): 64,
    ("services", "nfs", "connections"): 8,
    ("services", "nfs", "automount"): False,
    ("services", "nfs", "root_squash"): True,
    ("services", "limits", "memlock"): "unlimited",
    ("services", "limits", "nofile"): 1048576,
    ("services", "limits", "shm"): "50%",
    ("services", "tmpfs", "size"): "64G",
    ("services", "opensm", "node"): "gpu01",
    ("services", "os_packages", "packages"): ["chrony"],
    ("services", "os_packages", "replace"): ["ntp"],
}
PARTS = (
    *(" ", "\n", "\t", "\r", "\x0b", "\x85", "\u2028", "\u00a0", "#", "*", ",", ";", "=", "'", '"', "\\", "\\040", "%"),
    *("(rw,no_root_squash)", " *(rw)", "%a b", "%a(ro) *", "%eth0", "$(touch owned)", "`touch owned`", "${IFS}", "é"),
    *("\nallow all", " noquery", "]:/", "[", "-", "/..", "/", "0", "9" * 30, "@", ":", "."),
)
HOSTILE = st.one_of(
    st.text(st.sampled_from("ab/.:%-_$`'\"\\ \n\t#*()[],é0"), max_size=10),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map("".join),
)


def base():
    good = {
        "prefix": "/opt/llm/current",
        "nodes": {"gpu01": {"address": "10.0.0.1"}, "gpu02": {"address": "10.0.0.2"}},
        "services": {name: {} for name in ("hosts", "chrony", "nfs", "limits", "opensm")},
    }
    good["services"]["nfs"] = {"exports": ["/data"]}
    return good


@st.composite
def inventories(draw):
    """An inventory with one or two values that start or end like valid ones, and contain invalid text."""
    made = base()
    for place in draw(st.lists(st.sampled_from(sorted(LIKE)), min_size=1, max_size=2, unique=True)):
        like, hostile = LIKE[place], draw(HOSTILE)
        first = like[0] if isinstance(like, list) else like
        value = draw(st.sampled_from([f"{first}{hostile}", f"{hostile}{first}", hostile, like]))
        if isinstance(like, list) and isinstance(value, str):
            value = [*like[1:], value]
        _put(made, place, value)
    if draw(st.booleans()):
        name = draw(HOSTILE | st.sampled_from(["localhost", "GPU01", "10.0.0.7", "ip6-localhost", "x" * 64]))
        made["nodes"][name] = {"address": "10.0.0.3"}
    return made


def _put(made, place, value):
    section, name, key = place
    inner = made[section].setdefault(name, {})
    inner[key] = value


def written(folder, given):
    """By path, what every node's steps write; None where the inventory is refused."""
    path = folder / "inventory.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    try:
        inventory = load(path)
        names = tuple(name for name in plans.choose(inventory) if name != "os_packages")
        plan = plans.plan_services(inventory, inventory.nodes, names)
    except (InventoryError, UsageError):
        return None, None
    files = {}
    for of_nodes in plan.steps.values():
        for node, steps in of_nodes.items():
            out = folder / "out" / node
            out.mkdir(parents=True, exist_ok=True)
            for old in out.iterdir():
                old.unlink()
            text = "".join(f"(\n{step.do}\n) || exit\n" for step in steps if step.name in WRITING)
            done = subprocess.run(
                ["sh", "-eu", "-c", COLLECT + text], check=False, capture_output=True, cwd=folder, env={"OUT": str(out)}
            )
            assert done.returncode == 0, done.stderr
            assert not (folder / "owned").exists()
            files |= {(node, each.name): each.read_text(encoding="utf-8") for each in out.iterdir()}
    return inventory, files


def lines_of(text):
    assert text.isprintable() or set(text) - set("\n") == {each for each in text if each.isprintable()}
    return [line for line in text.split("\n") if line and not line.startswith("#")]


def check_hosts(inventory, text):
    pairs = {node.name: node.train_address for node in inventory.nodes}
    found = {}
    for line in lines_of(text):
        address, name, *_alias = line.split()
        ipaddress.ip_address(address)
        assert name not in found
        found[name] = address
    assert found == pairs
    assert not {name.lower() for name in found} & {"localhost", "ip6-localhost"}


def check_exports(inventory, text):
    options = inventory.services["nfs"]
    server = next(node for node in inventory.nodes if options.server in (None, node.name))
    clients = {each for node in inventory.nodes if node is not server for each in (node.train_address, node.address)}
    squash = "root_squash" if options.root_squash else "no_root_squash"
    expected = {f"{path} {client}(rw,sync,no_subtree_check,{squash})" for path in options.exports for client in clients}
    found = lines_of(text)
    assert set(found) == expected
    for line in found:
        assert re.fullmatch(r"/[^\s#\"\\()]+ [A-Za-z0-9_.:%-]+\([a-z_,]+\)", line), line


def check_fstab(inventory, text):
    for line in lines_of(text):
        fields = line.split()
        assert len(fields) == 6, line
        assert "\\" not in line
        assert fields[4:] == ["0", "0"]
        if fields[2] == "nfs":
            assert fields[1] in inventory.services["nfs"].exports
            assert re.fullmatch(r"(\[[0-9a-f:.%\w-]+\]|[\w.-]+):/\S+", fields[0]), line
        else:
            assert fields[0] == fields[2] == "tmpfs"
            assert fields[1] in {"/dev/shm", RAM}
            options = inventory.services["limits"].shm if fields[1] == "/dev/shm" else inventory.services["tmpfs"].size
            assert f"size={options}" in fields[3].split(",")


def check_chrony(inventory, text):
    addresses = {node.train_address for node in inventory.nodes} | set(inventory.services["chrony"].servers)
    for line in lines_of(text):
        word, *rest = line.split(" ")
        assert word in ("server", "driftfile", "makestep", "rtcsync", "local", "allow"), line
        if word in ("server", "allow"):
            assert rest[0] in addresses
            assert rest[1:] in ([], ["iburst"], ["iburst", "minpoll", "4", "maxpoll", "6"])


def check_limits(inventory, text):
    found = [line.split() for line in lines_of(text)]
    options = inventory.services["limits"]
    values = {"memlock": options.memlock, "nofile": str(options.nofile)}
    assert found == [[who, "-", item, value] for who in ("*", "root") for item, value in values.items()]


CHECKS = {
    "_etc_hosts": check_hosts,
    "_etc_exports.d_clusterctl.exports": check_exports,
    "_etc_fstab": check_fstab,
    "_etc_chrony.conf": check_chrony,
    "_etc_chrony_chrony.conf": check_chrony,
    "_etc_security_limits.d_90-clusterctl.conf": check_limits,
}


def check(folder, made):
    inventory, files = written(folder, made)
    if inventory is None:
        return False
    for (_, name), text in files.items():
        CHECKS[name](inventory, text)
    return True


def with_value(place, value):
    made = base()
    _put(made, place, value)
    return made


def test_a_good_inventory_writes_every_file(tmp_path):
    made = base()
    made["services"] |= {"limits": {"shm": "50%"}, "tmpfs": {"size": "64G"}}
    _inventory, files = written(tmp_path, made)
    assert {name for _, name in files} | {"_etc_chrony.conf", "_etc_chrony_chrony.conf"} == set(CHECKS)
    assert check(tmp_path, made)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(inventories())
@example(with_value(("nodes", "gpu02", "address"), "fe80::2%a(rw,no_root_squash) *"))
@example(with_value(("nodes", "gpu02", "data_address"), "fe80::2%a evil"))
@example(with_value(("services", "chrony", "servers"), ["fe80::2%a trust"]))
@example(with_value(("nodes", "localhost", "address"), "10.0.0.3"))
@example(with_value(("services", "nfs", "exports"), ["/data\\040x"]))
def test_an_accepted_value_is_one_value_in_its_file(tmp_path, made):
    check(tmp_path, made)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("nodes", "gpu02", "address"), "fe80::2%a(rw,no_root_squash) *", "not an IPv6 address"),
        (("nodes", "gpu02", "data_address"), "fe80::2%$(touch owned)", "not an IPv6 address"),
        (("nodes", "gpu02", "address"), "fe80::2%" + "x" * 16, "not an IPv6 address"),
        (("nodes", "localhost", "address"), "10.0.0.3", "on every node localhost means the node itself"),
        (("nodes", "ip6-loopback", "address"), "10.0.0.3", "on every node ip6-loopback means the node itself"),
        (("nodes", "GPU01", "address"), "10.0.0.3", "differ only in upper and lower case"),
        (("services", "chrony", "servers"), ["ntp.example.org noquery"], "neither a host name nor an IP address"),
        (("services", "nfs", "exports"), ["/data *(rw)"], "cannot be written to both"),
        (("services", "nfs", "exports"), ["/" + "x" * 256], "is too long"),
        (("services", "nfs", "exports"), ["/" + "a-b/" * 50], "is too long"),
        (("services", "limits", "memlock"), 10**17, "not a limit of locked memory"),
        (("services", "limits", "shm"), "101%", "size of a tmpfs"),
        (("services", "limits", "shm"), "9" * 30 + "g", "size of a tmpfs"),
        (("services", "limits", "shm"), "1k", "size of a tmpfs"),
        (("services", "tmpfs", "size"), "101%", "size of a tmpfs"),
        (("services", "tmpfs", "size"), "1G,exec", "size of a tmpfs"),
        (("services", "os_packages", "packages"), ["x; reboot"], "not the name of a package"),
        (("services", "os_packages", "packages"), ["x" * 300], "not the name of a package"),
        (("services", "os_packages", "replace"), ["-y"], "not the name of a package"),
    ],
)
def test_value_that_a_file_cannot_contain_is_refused_with_its_key(tmp_path, place, value, message):
    path = tmp_path / "inventory.yaml"
    path.write_text(yaml.safe_dump(with_value(place, value)), encoding="utf-8")
    with pytest.raises(InventoryError) as caught:
        load(path)
    (problem,) = caught.value.problems
    assert message in problem
    assert "(line " in problem


def test_a_link_local_address_with_its_interface_is_accepted(tmp_path):
    made = with_value(("nodes", "gpu02", "address"), "fe80::2%ib0.8001")
    assert check(tmp_path, made)
    assert Path(tmp_path / "inventory.yaml").exists()
