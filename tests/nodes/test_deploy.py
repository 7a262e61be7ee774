"""pack-env and deploy as a user runs them, on real sshd nodes without Python. The environment is a small fake one."""

import json
import os
import re
import select
import shlex
import signal
from pathlib import Path

import pytest
from command import run
from forked import Command
from tiny_env import NASTY, as_trainer, inventory, make_env, on, pack

from provision import sandbox as sandboxes
from provision.env.bundle.reader import open_bundle
from provision.errors import PreflightError
from provision.inventory import load
from provision.model import ignore
from provision.session import Session
from provision.tasks.deploy import deploy
from tests.unit.pasting import commands_in

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"deploy-test-{os.getpid()}", directory=tmp_path_factory.mktemp("deploy"))
    ) as box:
        yield box


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, box):
    env = make_env(tmp_path_factory.mktemp("envs") / "tiny")
    result = run("pack-env", env, cwd=box.directory)
    assert result.returncode == 0, result.stderr
    return box.directory / "tiny.ccb"


def impatient(text):
    return text.replace("ssh: {", "ssh: {timeout: 2, ")


def tree(box, node):
    """Every path of a node's disk with what a write would change."""
    passing = " -o ".join(f"-path {path}" for path in ("/proc", "/sys", "/dev", "/run", "/var/log"))
    find = f"find / -xdev \\( {passing} \\) -prune -o -printf '%p %y %s %T@ %m\\n'"
    return sorted(on(box, node, "sh", "-c", find).splitlines())


def test_deploy_brings_the_environment_to_every_node_and_a_second_one_changes_nothing(box, bundle, tmp_path):
    folder = inventory(box, tmp_path / "i", prefix="/opt/first/current")
    result = run("deploy", "--inventory", "inventory.yaml", bundle, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "node[01-02]: deployed" in result.stdout
    for node in ("node01", "node02"):
        release = on(box, node, "readlink", "-f", "/opt/first/current").strip()
        assert re.fullmatch(r"/opt/first/releases/[0-9a-f]{12}", release)
        # The programs start by absolute path with an empty environment, and name the release.
        assert on(box, node, "env", "-i", "/opt/first/current/bin/tool") == ""
        assert on(box, node, "head", "-n", "1", f"{release}/bin/tool") == f"#!{release}/bin/python\n"
        assert on(box, node, "env", "-i", f"{release}/bin/where").strip() == f"{release}/share"
        names = on(
            box, node, "sh", "-c", f"cd '{release}/share/odd names' && ls -A1b | wc -l && cat -- 'new\nline.txt'"
        )
        assert names.splitlines()[0] == str(len(NASTY))
        assert "new\nline.txt" in names
        assert "empty" in on(box, node, "ls", release)
        assert box.enter(node, ["find", "/root", "/tmp", "/home", "/opt", "-name", "owned"]).stdout == ""
        writable = on(box, node, "find", release, "-perm", "/222", "!", "-type", "l")
        assert writable == ""
    before = {node: tree(box, node) for node in ("node01", "node02")}
    again = run("deploy", "--inventory", "inventory.yaml", bundle, cwd=folder)
    assert again.returncode == 0
    assert "nothing changed" in again.stdout
    as_json = run("deploy", "--json", bundle, cwd=folder)
    assert json.loads(as_json.stdout)["changed"] is False
    assert {node: tree(box, node) for node in before} == before


def test_dry_run_writes_nothing_and_lists_the_planned_steps(box, bundle, tmp_path):
    folder = inventory(box, tmp_path / "i", prefix="/opt/dry/current")
    before = {node: tree(box, node) for node in ("node01", "node02")}
    result = run("deploy", "--dry-run", "--scripts", "review", bundle, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "node[01-02]: would send" in result.stdout
    assert {node: tree(box, node) for node in before} == before
    scripts = sorted(path.name for path in (folder / "review").iterdir())
    assert scripts == ["node01-1-gather.sh", "node01-2-activate.sh", "node02-1-gather.sh", "node02-2-activate.sh"]
    assert "/opt/dry/releases" in (folder / "review/node01-1-gather.sh").read_text()


def test_an_interrupted_deploy_is_completed_by_a_rerun(box, bundle, tmp_path):
    folder = inventory(box, tmp_path / "i", prefix="/opt/broken/current")
    release = open_bundle(bundle).manifest.release_id
    for node in ("node01", "node02"):  # the traces of a kill during unpacking, with a read-only folder
        left = f"/opt/broken/releases/.incoming-{release}/lib"
        on(
            box,
            node,
            "sh",
            "-c",
            f"mkdir -p {left} && touch /opt/broken/releases/.clusterctl {left}/x && chmod -R a-w {left}",
        )
    result = run("deploy", bundle, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert ".incoming" not in on(box, "node01", "ls", "-A", "/opt/broken/releases")


@pytest.fixture(scope="module")
def slow(tmp_path_factory, require_sandbox):
    """Two nodes behind a slow link, and a bundle that takes three seconds to each."""
    folder = tmp_path_factory.mktemp("slow")
    env = make_env(tmp_path_factory.mktemp("envs") / "tiny")
    (env / "share/noise").write_bytes(os.urandom(8 << 20))
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"deploy-slow-{os.getpid()}", directory=folder, link="20mbit")
    ) as box:
        yield box, pack(env, folder / "slow.ccb")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])  # SIGTERM is SIGINT's: test_kills
def test_deploy_interrupted_while_sending_changes_nothing_and_can_be_repeated(slow, tmp_path, how):
    box, bundle = slow
    root = f"/opt/{how.name}"
    folder = inventory(box, tmp_path / "i", prefix=f"{root}/current")
    child = Command("deploy", bundle, cwd=folder)
    releases = Path(box.node_root("node01"), f"{root[1:]}/releases")
    while not any(releases.glob(".transfer-*/units/*")):  # the stream has started to arrive
        assert child.poll() is None, child.stderr
        select.select([], [], [], 0.02)
    child.send_signal(how)
    assert child.wait() == (-how if how == signal.SIGKILL else 130)
    if how != signal.SIGKILL:
        assert "try: clusterctl deploy" in child.stderr
    assert not (releases.parent / "current").is_symlink()
    again = run("deploy", bundle, cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "node[01-02]: deployed" in again.stdout
    assert on(box, "node01", "env", "-i", f"{root}/current/bin/tool") == ""


def test_a_smoke_test_that_fails_leaves_the_old_release_in_use(box, bundle, tmp_path):
    folder = inventory(box, tmp_path / "i", prefix="/opt/smoke/current")
    assert run("deploy", bundle, cwd=folder).returncode == 0
    before = on(box, "node01", "readlink", "/opt/smoke/current")
    env = make_env(tmp_path / "tiny", "bad")
    (env / "bin/python").write_text("#!/bin/sh\necho 'ImportError: libfoo.so.1' >&2\nexit 1\n")
    run("pack-env", env, "-o", "bad.ccb", cwd=folder)
    result = run("deploy", "bad.ccb", cwd=folder)
    assert result.returncode == 5
    assert "ImportError: libfoo.so.1" in result.stderr
    assert on(box, "node01", "readlink", "/opt/smoke/current") == before


NOT_OURS = "exists and is not clusterctl's"
REFUSED = {
    "a folder in the way": ("mkdir -p /opt/c1/current", "/opt/c1/current", NOT_OURS),
    "a file in the way": (
        "mkdir -p /opt/c2 && touch /opt/c2/current",
        "/opt/c2/current",
        "exists and is not clusterctl's",
    ),
    "a foreign link": ("mkdir -p /opt/c3 && ln -s /usr /opt/c3/current", "/opt/c3/current", "is a link to /usr"),
    "foreign releases": ("mkdir -p /opt/c4/releases/mine", "/opt/c4/current", "/opt/c4/releases exists"),
    "no space": ("mkdir -p /small && mount -t tmpfs -o size=4k tmpfs /small", "/small/llm/current", "free at /small"),
    "no inodes": ("mkdir -p /f && mount -t tmpfs -o nr_inodes=9 tmpfs /f", "/f/llm/current", "inodes free at /f"),
    "read-only": (
        "mkdir -p /ro && mount -t tmpfs -o ro tmpfs /ro",
        "/ro/llm/current",
        "has no permission to write in /ro",
    ),
    "a file as root": ("touch /afile", "/afile/llm/current", "has no permission to write in /afile"),
}


def test_unsuitable_node_refuses_and_no_node_is_changed(box, bundle, tmp_path):
    for command, _, _ in REFUSED.values():
        on(box, "node02", "sh", "-c", command)
    before = {node: tree(box, node) for node in ("node01", "node02")}
    for case, (_, prefix, message) in REFUSED.items():
        cluster = load(inventory(box, tmp_path / case, prefix=prefix) / "inventory.yaml")
        with pytest.raises(PreflightError) as refused, Session(cluster) as session:
            deploy(session, bundle)
        assert refused.value.exit_code == 4
        assert set(refused.value.reasons) == {"node02"}, case
        assert message in refused.value.reasons["node02"], case
    assert {node: tree(box, node) for node in before} == before


def test_missing_permission_names_the_command_that_grants_it(box, bundle, tmp_path):
    folder = inventory(
        box,
        tmp_path / "i",
        prefix="/opt/noway/current",
        change=as_trainer,
    )
    result = run("deploy", bundle, cwd=folder)
    assert result.returncode == 4
    assert "install -d -o trainer /opt/noway" in " ".join(result.stderr.split())


def test_a_node_without_tar_is_refused(box, bundle, tmp_path):
    folder = inventory(box, tmp_path / "i", prefix="/opt/notar/current")
    where = on(box, "node02", "sh", "-c", "command -v tar").strip()
    on(box, "node02", "mv", where, "/root/tar.away")
    try:
        result = run("deploy", bundle, cwd=folder)
    finally:
        on(box, "node02", "mv", "/root/tar.away", where)
    assert result.returncode == 4
    assert "tar is missing" in result.stderr


def test_services_come_first_and_can_be_skipped(box, bundle, tmp_path):
    folder = inventory(box, tmp_path / "i", prefix="/opt/svc/current", extra="services:\n  hosts:\n")
    left = run("deploy", "--no-services", bundle, cwd=folder)
    assert left.returncode == 0, left.stderr
    assert "BEGIN clusterctl" not in on(box, "node01", "cat", "/etc/hosts")
    would = run("deploy", "--dry-run", bundle, cwd=folder)
    assert "hosts  node[01-02]: would change: names of the nodes" in would.stdout
    first = run("deploy", "--json", bundle, cwd=folder)
    assert first.returncode == 0, first.stderr
    printed = json.loads(first.stdout)
    assert printed["changed"] is True
    assert printed["services"]["nodes"]["node02"]["services"] == {"hosts": "set up (names of the nodes)"}
    assert "BEGIN clusterctl nodes" in on(box, "node02", "cat", "/etc/hosts")
    again = run("deploy", bundle, cwd=folder)
    assert "hosts  node[01-02]: unchanged" in again.stdout
    assert "nothing changed" in again.stdout
    assert run("services", "undo", cwd=folder).returncode == 0


@pytest.mark.parametrize(  # tests/unit/env/test_bundle.py damages one anywhere
    ("how", "where"), [("truncated", 0.6), ("flipped", 0.02), ("flipped", 0.3), ("flipped", 0.999)]
)
def test_a_damaged_bundle_changes_nothing(box, bundle, tmp_path, how, where):
    folder = inventory(box, tmp_path / "i", prefix="/opt/damaged/current")
    data = bytearray(bundle.read_bytes())
    at = int(len(data) * where)
    if how == "flipped":
        data[at] ^= 0x20
    else:
        del data[at:]
    (folder / "bad.ccb").write_bytes(data)
    result = run("deploy", "bad.ccb", cwd=folder)
    if how == "flipped" and result.returncode == 0:
        pytest.fail("a flipped byte went unnoticed")
    assert result.returncode == 3, result.stderr
    assert "bad.ccb" in result.stderr
    for node in ("node01", "node02"):
        assert not Path(box.node_root(node), "opt/damaged/current").is_symlink()
        left = box.enter(node, ["sh", "-c", "ls -A /opt/damaged/releases 2>/dev/null"]).stdout.split()
        assert [name for name in left if not name.startswith(".")] == []


def test_a_bundle_for_another_platform_is_refused(box, bundle, tmp_path, monkeypatch):
    import platform

    from provision.env.packing.pack import pack

    folder = inventory(box, tmp_path / "i", prefix="/opt/arm/current")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    pack(make_env(tmp_path / "tiny"), folder / "arm.ccb", name="tiny", emit=ignore)
    monkeypatch.undo()
    result = run("deploy", "arm.ccb", cwd=folder)
    assert result.returncode == 4
    assert "packed for linux-aarch64" in " ".join(result.stderr.split())


def test_an_unreachable_node_is_named_with_its_likely_typo_and_nothing_is_changed(box, bundle, tmp_path):
    def mistyped(text):
        address = re.search(r"node02: (\S+)", text)[1]
        first, second, *rest = address.split(".")
        wrong = ".".join([first, str((int(second) + 1) % 256), *rest])
        return text.replace(f"node02: {address}", f"node02: {wrong}").replace("ssh: {", "ssh: {timeout: 2, ")

    folder = inventory(box, tmp_path / "i", prefix="/opt/typo/current", change=mistyped)
    result = run("deploy", bundle, cwd=folder)
    assert result.returncode == 5
    text = " ".join(result.stderr.split())
    assert "node02" in text
    assert "typing error" in text
    assert "clusterctl deploy --exclude node02" in text
    assert "nothing was changed" in text
    assert not Path(box.node_root("node01"), "opt/typo").exists()
    (hint,) = [each for each in commands_in(text) if "--exclude" in each]
    pasted = run(*shlex.split(hint)[1:], cwd=folder)
    assert (pasted.returncode, Path(box.node_root("node01"), "opt/typo/current").is_symlink()) == (0, True), hint


def test_switched_off_node_is_named_and_the_others_can_be_deployed(box, bundle, tmp_path):
    folder = inventory(box, tmp_path / "i", prefix="/opt/off/current", change=impatient)
    box.unplug("node02")
    try:
        result = run("deploy", bundle, cwd=folder)
        alone = run("deploy", "--exclude", "node02", bundle, cwd=folder)
    finally:
        box.plug("node02")
    assert result.returncode == 5
    assert "node02" in result.stderr
    assert alone.returncode == 0, alone.stderr
    added = run("deploy", bundle, cwd=folder)
    assert added.returncode == 0, added.stderr
    assert "node01: unchanged" in added.stdout
    assert "node02: deployed" in added.stdout


def test_prefix_with_spaces_and_non_ascii_letters_works(box, bundle, tmp_path):
    prefix = "/opt/my env é日本/current"
    folder = inventory(box, tmp_path / "i", prefix=prefix)
    result = run("deploy", bundle, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert on(box, "node01", "env", "-i", f"{prefix}/bin/tool") == ""
    assert "nothing changed" in run("deploy", bundle, cwd=folder).stdout


def test_prefix_with_unsafe_characters_is_refused(box, bundle, tmp_path):
    # The prefix is part of scripts and Python files: these characters would have a meaning there.
    # Nodes are asked about the prefix before it is refused; tests/unit/env/test_relocate.py has each character alone.
    odd = "$(touch owned)`touch owned`;touch owned&it's a\"b\\(a)*#a"
    folder = inventory(box, tmp_path / "i", prefix=f"/opt/{odd}/current")
    result = run("deploy", bundle, cwd=folder)
    assert result.returncode == 2
    assert "cannot be a prefix" in " ".join(result.stderr.split())
    assert box.enter("node01", ["find", "/root", "/tmp", "/home", "/opt", "-name", "owned"]).stdout == ""
