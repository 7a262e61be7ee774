"""Probes that want root's rights, where the ssh user is an ordinary one."""

from os import getpid

import pytest
from sudo_nodes import ASKING, FREE, allow, install

from provision import inventory, sandbox
from provision.session import Session
from provision.tasks.check import CheckOptions, check

PASSWORD = "correct $horse' battery"
CHECKS = ("net.fw", "os.uid")  # only the first wants root's rights


@pytest.fixture(scope="module")
def box(require_sandbox, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sandbox")
    with sandbox.up(
        sandbox.Options(nodes=3, name=f"rights-{getpid()}", directory=folder, user="trainer", password=PASSWORD)
    ) as box:
        install(box)
        allow(box, FREE, ASKING, "# nothing\n")
        for node in box.nodes:  # records the user of net.fw's probe
            nft = box.node_root(node.name) / "usr/sbin/nft"
            nft.write_text("#!/bin/sh\nid -un >>/tmp/nft\n", encoding="utf-8")
            nft.chmod(0o755)
        yield box


@pytest.fixture
def look(box):
    """Runs the checks. Returns the nodes on which root was used, and the messages to the user."""

    def run(*, prompts=None, root=None):
        for node in box.nodes:
            (box.node_root(node.name) / "tmp/nft").unlink(missing_ok=True)
        message = []
        cluster = inventory.load(box.inventory)
        with Session(cluster, prompts=prompts, emit=message.append, asks_sudo=bool(root)) as session:
            result = check(session, CheckOptions(only=CHECKS, root=root))
        assert not result.unreachable
        asked = [box.node_root(node.name) / "tmp/nft" for node in box.nodes]
        rooted = [node.name for node, file in zip(box.nodes, asked, strict=True) if file.exists()]
        return result, rooted, " ".join(str(event) for event in message)

    return run


class Typing:
    """A user who types a password when asked."""

    def __init__(self):
        self.asked = 0

    def confirm_host_key(self, *_about):
        raise AssertionError("the host keys are pinned")

    def password(self, *_about):
        raise AssertionError("the key logs in")

    def sudo_password(self, *_about):
        self.asked += 1
        return PASSWORD


def test_by_default_root_is_used_if_no_password_is_needed(look):
    user = Typing()
    result, rooted, message = look(prompts=user)
    assert rooted == ["node01"]
    assert user.asked == 0
    verdicts = {each.node: each.verdict for each in result.findings if each.check == "net.fw"}
    assert verdicts == {"node01": "OK", "node02": "UNKNOWN", "node03": "UNKNOWN"}
    assert {each.verdict for each in result.findings if each.check == "os.uid"} == {"OK"}
    assert "node[02-03]: root is not available" in message


def test_become_asks_for_the_password_once(look):
    user = Typing()
    _result, rooted, _message = look(prompts=user, root=True)
    assert rooted == ["node01", "node02"]
    assert user.asked == 1


def test_without_root_sudo_is_not_used(look):
    result, rooted, message = look(root=False)
    assert rooted == []
    assert {each.verdict for each in result.findings if each.check == "net.fw"} == {"UNKNOWN"}
    assert "root is not available" not in message
