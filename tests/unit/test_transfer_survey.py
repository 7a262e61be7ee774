"""What a survey says, how other nodes reach a node, and the lines of a relay's keys."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from provision.errors import ClusterctlError
from provision.model import Inventory, Node, Ssh
from provision.transfer import Target
from provision.transfer.keys import RelayKey, comment_prefix, is_quotable, options, scope_of, secret_prefix
from provision.transfer.nodes import explain_failure, login_target, read_facts

ANSWER = """\
digest b2sum
kept aa
kept bb
user trainer
reached 10.0.0.1 40000 10.0.0.11 2222
sshd unknown option -- V OpenSSH_7.4p1, OpenSSL 1.0.2k-fips  26 Jan 2017 usage: sshd OpenSSH_7.4p1
memory /dev/shm
keys
k1
keys
end
"""
INVENTORY = Inventory(Path("i.yaml"), PurePosixPath("/opt/llm/current"), ())


def target(**node):
    return Target(Node("n", "gpu01", **node), "/opt/x/t", "/opt/x/i", "plain", has_ssh=True)


def test_a_survey_is_read():
    facts = read_facts(ANSWER)
    assert facts.have == {"k1", "keys"}
    assert facts.kept == {"aa", "bb"}
    assert (facts.digest, facts.user, facts.memory, facts.left) == ("b2sum", "trainer", "/dev/shm", False)
    assert facts.reached == ("10.0.0.11", 2222)
    assert facts.sshd == (7, 4)


def test_truncated_survey_is_no_answer():
    with pytest.raises(ClusterctlError, match="incomplete"):
        read_facts(ANSWER.removesuffix("end\n"))


def test_refusal_of_a_node_has_a_reason():
    assert read_facts("digest b2sum\nrefused its dd is too old\n").refused == "its dd is too old"


@pytest.mark.parametrize(
    ("connection", "data", "addresses", "port"),
    [
        ("10.0.0.1 4 10.0.0.11 2222", None, ("10.0.0.11", "gpu01"), 2222),
        ("10.0.0.1 4 10.0.0.11 22", "192.168.5.1", ("192.168.5.1", "10.0.0.11", "gpu01"), 22),
        ("::1 4 ::1 2022", None, ("gpu01",), 1022),  # a way that only this machine has
        ("fe80::1%eth0 4 fe80::2%eth0 22", None, ("gpu01",), 1022),
        ("fd00::1 4 fd00::2 22", None, ("fd00::2", "gpu01"), 22),
        ("", "192.168.5.1", ("192.168.5.1", "gpu01"), 1022),
    ],
)
def test_routes_use_the_fast_network_first_and_then_the_address(connection, data, addresses, port):
    inventory = Inventory(Path("i.yaml"), PurePosixPath("/opt/llm/current"), (), ssh=Ssh(port=1022))
    facts = read_facts(ANSWER.replace("10.0.0.1 40000 10.0.0.11 2222", connection))
    door = login_target(inventory, target(data_address=data), facts, "clusterctl-1", ("ssh-ed25519", b"abc"))
    assert (door.addresses, door.port, door.user) == (addresses, port, "trainer")
    assert door.known == "clusterctl-1 ssh-ed25519 YWJj\n"


def test_route_trusts_one_host_key_and_one_login_key():
    facts = read_facts(ANSWER)
    door = login_target(INVENTORY, target(), facts, "clusterctl-1", ("ssh-ed25519", b"abc"))
    first, second = door.commands('/dev/shm/a "b" 100%')
    argv = first["argv"]
    assert argv[-5:] == ["-p", "2222", "--", "10.0.0.11"][-4:] or argv[-4:] == ["-p", "2222", "--", "10.0.0.11"]
    assert second["argv"][-1] == "gpu01"
    assert {"HostKeyAlias=clusterctl-1", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes", "BatchMode=yes"} <= set(
        argv
    )
    assert 'UserKnownHostsFile="/dev/shm/a \\"b\\" 100%%/known_hosts"' in argv
    assert first["text"].startswith("secret='/dev/shm/a \"b\" 100%'\nset -- ssh ")
    assert first["text"].endswith(" -- 10.0.0.11 receive")


def test_relay_key_is_new_each_time_and_names_its_owner():
    first, second = RelayKey.new(), RelayKey.new()
    place = scope_of("/opt/llm/releases/.transfer-0123456789ab")
    line = first.line(INVENTORY, place)
    assert line != second.line(INVENTORY, place)
    assert first.private not in line
    kind, _, words = line.split()
    assert kind == "ssh-ed25519"
    assert words.startswith(comment_prefix(INVENTORY, place))
    assert words.split(":")[3:] == [str(first.created), first.number]
    public = load_ssh_private_key(first.private.encode(), None).public_key().public_bytes_raw()
    assert len(public) == 32


def test_keys_of_each_cluster_and_folder_are_distinguished():
    other = Inventory(Path("i.yaml"), PurePosixPath("/opt/other/current"), ())
    releases = [scope_of(f"/opt/llm/releases/.transfer-{release}") for release in ("one", "two")]
    assert releases == ["/opt/llm/releases"] * 2  # one lock guards both
    assert comment_prefix(INVENTORY, releases[0]).startswith(comment_prefix(INVENTORY))
    places = [(INVENTORY, "/opt/llm/releases"), (INVENTORY, "/data/.push"), (other, "/opt/llm/releases")]
    assert len({comment_prefix(*place) for place in places}) == len({secret_prefix(*place) for place in places}) == 3


@pytest.mark.parametrize(
    ("version", "begins", "expires"),
    [((9, 2), "restrict,", True), ((7, 4), "restrict,", False), ((6, 6), "no-port", False), (None, "no-port", False)],
)
def test_old_sshd_gets_only_supported_options(version, begins, expires):
    text, may_expire = options("/opt/a b", version)
    assert text.startswith(begins)
    assert text.endswith("command=\"exec sh '/opt/a b/receive'\"")
    assert may_expire is expires


@pytest.mark.parametrize(
    ("folder", "possible"),
    [
        ("/opt/a b/ü$`", True),
        ("/opt/it's", False),
        ('/opt/"', False),
        ("/opt/a!", False),
        ("/a\\b", False),
        ("/a\nb", False),
    ],
)
def test_folders_that_a_forced_command_can_contain(folder, possible):
    assert is_quotable(folder) is possible


@pytest.mark.parametrize(
    ("free", "words", "why", "in_vain"),
    [
        ((0, 9), "tar: x: Cannot open: No space left on device", "no space left on the device (/i)", True),
        ((9, 0), "tar: x: Cannot mkdir: No space left on device", "no inodes left on the device (/i)", True),
        ((0, 9), "sh: printf: I/O error", "no space left on the device (/i)", True),
        ((9, 9), "dd: Disk quota exceeded", "the disk quota is used up (/i)", True),
        ((9, 9), "dd: x: Read-only file system", "the file system is read-only (/i)", True),
        ((9, 9), "zstd: boom", "zstd: boom", False),
        ((9, 9), "", "a transfer process was killed", False),
    ],
)
def test_reasons(free, words, why, in_vain):
    assert explain_failure(free, words, "/i") == (why, in_vain)
