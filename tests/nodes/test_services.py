"""Node services on real sshd nodes, as a user sets them up: hosts and limits need no systemd."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import run
from tiny_env import on

from trainer.agent.contract.plan import RAM

pytestmark = pytest.mark.root

# The limits that a container may raise are unknown: these are below this machine's.
SERVICES = "services:\n  hosts:\n  limits: {memlock: 4096, nofile: 2000, shm: 64M}\n  tmpfs: {size: 32M}\n"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    from provision import sandbox as sandboxes

    with sandboxes.up(
        sandboxes.Options(nodes=3, name=f"services-test-{os.getpid()}", directory=tmp_path_factory.mktemp("services"))
    ) as box:
        (box.directory / "services.yaml").write_text((box.directory / "inventory.yaml").read_text() + SERVICES)
        yield box


@pytest.fixture
def services(box):
    """Runs ``clusterctl services`` on the nodes, and undoes everything at the end."""

    def services(*argv, inventory="services.yaml", **options):
        return run("services", *argv, "-i", inventory, cwd=box.directory, **options)

    yield services
    result = services("undo")
    assert result.returncode == 0, result.stderr


def etc(box, node):
    """Everything of a node that a service may change, with what a rewrite would change."""
    find = "find /etc /var/lib/clusterctl ! -path /var/lib/clusterctl/lock -printf '%p %m %u %g\\n' | sort; "
    mounts = "df /dev/shm | tail -n 1; grep -c clusterctl /proc/mounts; ls -d /run/clusterctl"
    return on(box, node, "sh", "-c", f"{find}find /etc -type f -exec sha256sum {{}} + | sort; {mounts} 2>&1 || true")


def states(box, node="node01"):
    return on(box, node, "sh", "-c", "grep -A4 BEGIN /etc/hosts; cat /etc/security/limits.d/90-clusterctl.conf")


def test_apply_changes_the_nodes_once_and_undo_restores_every_byte(box, services):
    on(box, "node01", "mkdir", "-p", "/var/lib/clusterctl")
    before = {node: etc(box, node) for node in ("node01", "node02", "node03")}
    would = services("apply", "--dry-run")
    assert would.returncode == 0, would.stderr
    assert "hosts   node[01-03]: would change: names of the nodes" in would.stdout
    assert "dry run: nothing was written on any node" in would.stdout
    assert {node: etc(box, node) for node in before} == before

    first = services("apply")
    assert first.returncode == 0, first.stderr
    assert "hosts   node[01-03]: set up (names of the nodes)" in first.stdout
    assert "127.0." not in on(box, "node02", "getent", "hosts", "node02")
    assert on(box, "node01", "getent", "hosts", "node03").split() == [box.nodes[2].address, "node03"]
    assert on(box, "node03", "su", "-s", "/bin/sh", "root", "-c", "ulimit -n; ulimit -l").split() == ["2000", "4096"]
    assert on(box, "node01", "df", "-k", "--output=size", "/dev/shm").split()[-1] == "65536"
    assert on(box, "node01", "df", "-k", "--output=size", RAM).split()[-1] == "32768"
    assert f"tmpfs {RAM} tmpfs rw,nosuid,nodev,relatime,size=32768k,huge=always" in on(
        box, "node01", "cat", "/proc/mounts"
    )

    after = {node: etc(box, node) for node in before}
    second = services("apply", "--json")
    assert json.loads(second.stdout)["changed"] is False
    assert {node: etc(box, node) for node in before} == after
    assert "up to date" in services("status").stdout
    verified = services("verify")
    assert verified.returncode == 0, verified.stderr
    assert "limits  node[01-03]: works" in verified.stdout
    assert "tmpfs   node[01-03]: works" in verified.stdout

    assert "hosts   node[01-03]: would change: undo" in services("undo", "--dry-run").stdout
    assert {node: etc(box, node) for node in before} == after
    undone = services("undo")
    assert undone.returncode == 0, undone.stderr
    assert {node: etc(box, node).replace("/var/lib/clusterctl 755 root root\n", "") for node in before} == {
        node: text.replace("/var/lib/clusterctl 755 root root\n", "") for node, text in before.items()
    }
    assert services("undo").stdout == "node[01-03]: nothing to undo\n"


def test_one_service_on_some_nodes(box, services):
    result = services("apply", "limits", "--limit", "node02")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("limits  node02: set up")
    assert "clusterctl" not in on(box, "node02", "cat", "/etc/hosts").replace("clusterctl sandbox", "")
    differs = services("status").stdout
    assert "hosts   node[01-03]: differs: names of the nodes" in differs
    assert "  node02: up to date" in differs
    assert "node[01,03]: differs: limits of a login" in differs


def test_verify_reports_errors_on_a_running_node(box, services):
    services("apply", "hosts")
    on(box, "node02", "sh", "-c", "printf '127.0.1.1 node02\\n' | cat - /etc/hosts >/tmp/h && cat /tmp/h >/etc/hosts")
    result = services("verify", "hosts")
    on(box, "node02", "sh", "-c", "sed 1d /etc/hosts >/tmp/h && cat /tmp/h >/etc/hosts")
    assert result.returncode == 5
    assert "node[01,03]: works" in result.stdout
    address = box.nodes[1].address
    assert f"node02: does not work: names resolve to the nodes: node02 resolves to 127.0.1.1, expected {address}" in (
        " ".join(result.stdout.split())
    )


def test_an_unreachable_node_does_not_stop_the_others(box, services, tmp_path):
    lost = box.nodes[1]
    inventory = tmp_path / "inventory.yaml"
    text = (box.directory / "services.yaml").read_text().replace("ssh: {", "ssh: {timeout: 2, ")
    text = text.replace("key: id_ed25519", f"key: {box.key}").replace(
        "known_hosts: known", f"known_hosts: {box.directory}/known"
    )
    inventory.write_text(text.replace(lost.address, f"{lost.address[: lost.address.rindex('.')]}.250"))
    result = services("apply", "hosts", inventory=str(inventory))
    assert result.returncode == 5
    assert "services apply failed on 1 of 3 nodes" in result.stderr
    assert lost.name in result.stderr
    assert "BEGIN clusterctl nodes" in on(box, "node03", "cat", "/etc/hosts")
    inventory.write_text(text)
    again = services("apply", "hosts", inventory=str(inventory))
    assert again.returncode == 0, again.stderr
    assert "node[01-03]: set up" in again.stdout  # all of them know its right address now


def test_verify_reports_the_other_nodes_when_one_is_unreachable(box, services, tmp_path):
    services("apply", "hosts")
    inventory = tmp_path / "inventory.yaml"
    text = (box.directory / "services.yaml").read_text().replace("ssh: {", "ssh: {timeout: 2, ")
    text = text.replace("key: id_ed25519", f"key: {box.key}").replace(
        "known_hosts: known", f"known_hosts: {box.directory}/known"
    )
    lost = box.nodes[1].address
    inventory.write_text(text.replace(lost, f"{lost[: lost.rindex('.')]}.250"))
    result = services("verify", "hosts", inventory=str(inventory))
    assert result.returncode == 5
    assert "node[01,03]: does not work" in result.stdout  # there, node02 has another address
    assert "no answer from 1 of 3 nodes" in result.stderr
    assert "--exclude node02" in result.stderr


def test_failed_step_reports_why_and_a_rerun_completes(box, services):
    on(box, "node03", "sh", "-c", "cp -p /etc/hosts /root/hosts; printf '# BEGIN clusterctl nodes\\n' >>/etc/hosts")
    result = services("apply", "hosts")
    assert result.returncode == 5
    assert "do not match; fix them by hand" in " ".join(result.stderr.split())
    assert "node03" in result.stderr
    on(box, "node03", "sh", "-c", "cat /root/hosts >/etc/hosts")
    assert services("apply", "hosts").returncode == 0


def test_the_scripts_written_for_review_are_the_scripts_that_run(box, services, tmp_path):
    result = services("apply", "--dry-run", "--scripts", tmp_path / "review")
    assert result.returncode == 0, result.stderr
    scripts = sorted((tmp_path / "review").iterdir())
    assert [path.name for path in scripts] == [f"node0{n}-01-base.sh" for n in (1, 2, 3)]
    checked = subprocess.run(
        [SHELLCHECK, "-s", "sh", "-S", "warning", *scripts], check=False, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    assert box.enter(box.nodes[0].name, ["sh", "-s"], stdin=scripts[0].read_text()).returncode == 0
    assert "hosts   node01: up to date" in services("status").stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("apply", "nfss"), "nfss is not a service"),
        (("apply", "chrony"), "does not configure the service chrony"),
        (("apply", "--scripts", "x"), "--scripts goes with --dry-run"),
        (("undo", "nfss"), "nfss is not a service"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_done(box, argv, message):
    result = run("services", *argv, "-i", "services.yaml", cwd=box.directory)
    assert result.returncode == 2
    assert message in result.stderr
    assert "try: " in result.stderr


def test_rerun_completes_a_killed_apply(box, services):
    """The controller dies while nodes run scripts: the scripts stop, and the next apply completes."""
    hold = "mkdir -p /var/lib/clusterctl; exec 9>/var/lib/clusterctl/lock; flock 9; echo $$ >/root/pid; exec sleep 250"
    on(box, "node01", "sh", "-c", f"sh -c '{hold}' </dev/null >/dev/null 2>&1 & until [ -s /root/pid ]; do :; done")
    from command import CLUSTERCTL

    argv = [CLUSTERCTL, "services", "apply", "hosts", "-i", "services.yaml"]
    with subprocess.Popen(argv, cwd=box.directory, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as killed:
        killed.stderr.readline()
        killed.send_signal(signal.SIGKILL)
    on(box, "node01", "sh", "-c", "kill $(cat /root/pid); rm /root/pid")
    result = services("apply", "hosts")
    assert result.returncode == 0, result.stderr
    for node in ("node01", "node02", "node03"):
        assert on(box, node, "grep", "-c", "BEGIN clusterctl nodes", "/etc/hosts").strip() == "1"


# Settings of a network namespace: each node of the sandbox has one. All others belong to this machine.
NET = {
    "net.ipv4.tcp_rmem": "4096 65536 1048576",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.core.somaxconn": "512",
}
FOLDER = Path("/proc/sys")


def settings(box, node):
    paths = [str(FOLDER / key.replace(".", "/")) for key in NET]
    return [" ".join(line.split()) for line in on(box, node, "cat", *paths).splitlines()]


def test_kernel_settings_are_set_verified_and_undone(box, services):
    ours = [(FOLDER / key.replace(".", "/")).read_text() for key in NET]
    text = (box.directory / "inventory.yaml").read_text()
    (box.directory / "sysctl.yaml").write_text(f"{text}services: {{sysctl: {{settings: {json.dumps(NET)}}}}}\n")
    before, files = settings(box, "node01"), etc(box, "node01")
    assert before != list(NET.values())
    assert services("apply", "--dry-run", inventory="sysctl.yaml").returncode == 0
    assert settings(box, "node01") == before

    first = services("apply", inventory="sysctl.yaml")
    assert first.returncode == 0, first.stderr
    for node in ("node01", "node02", "node03"):
        assert settings(box, node) == list(NET.values())
    written = on(box, "node01", "cat", "/etc/sysctl.d/99-zz-clusterctl.conf").splitlines()[1:]
    assert written == [f"{key} = {value}" for key, value in sorted(NET.items())]
    assert json.loads(services("apply", "--json", inventory="sysctl.yaml").stdout)["changed"] is False

    on(box, "node02", "sh", "-c", "echo 600 >/proc/sys/net/core/somaxconn")
    wrong = services("verify", inventory="sysctl.yaml")
    assert wrong.returncode == 5
    assert "node02: does not work: net.core.somaxconn: net.core.somaxconn is 600, not 512" in (
        " ".join(wrong.stdout.split())
    )
    again = services("apply", inventory="sysctl.yaml")
    assert "node02: set up (net.core.somaxconn now)" in again.stdout

    undone = services("undo", "sysctl", inventory="sysctl.yaml")
    assert undone.returncode == 0, undone.stderr
    assert settings(box, "node01") == settings(box, "node02") == before
    assert etc(box, "node01").replace("/var/lib/clusterctl 755 root root\n", "") == files.replace(
        "/var/lib/clusterctl 755 root root\n", ""
    )
    assert [(FOLDER / key.replace(".", "/")).read_text() for key in NET] == ours


def test_another_size_is_set_on_the_mounted_tmpfs_and_a_busy_one_is_not_undone(box, services, tmp_path):
    assert services("apply", "tmpfs").returncode == 0
    other = box.directory / "larger.yaml"
    other.write_text((box.directory / "services.yaml").read_text().replace("size: 32M", "size: 48M"))
    on(box, "node02", "sh", "-c", f"echo kept >{RAM}/file")
    changed = services("apply", "tmpfs", inventory="larger.yaml")
    assert changed.returncode == 0, changed.stderr
    assert on(box, "node02", "df", "-k", "--output=size", RAM).split()[-1] == "49152"
    assert on(box, "node02", "cat", f"{RAM}/file") == "kept\n"
    with held_open(box, "node02", f"{RAM}/file"):
        busy = services("undo", "tmpfs")
        assert busy.returncode == 5
        assert "busy" in busy.stderr
    undone = services("undo", "tmpfs")
    assert undone.returncode == 0, undone.stderr
    assert RAM not in on(box, "node02", "cat", "/proc/mounts")


def test_tmpfs_refuses_another_file_system_at_its_place(box, services):
    on(box, "node03", "sh", "-c", f"mkdir -p {RAM} && mount -t tmpfs other {RAM}")
    try:
        result = services("apply", "tmpfs")
        assert result.returncode == 5
        assert f"another file system is mounted on {RAM}" in result.stderr
    finally:
        on(box, "node03", "umount", RAM)
    assert services("apply", "tmpfs").returncode == 0


@contextmanager
def held_open(box, node, path):
    """A process of the node that has the file open."""
    into = ["nsenter", "--target", str(box.init_process(node).pid), "--mount", "--pid", "--"]
    script = f'exec 3<"{path}"; echo open; exec cat'
    with subprocess.Popen([*into, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"open\n"
        yield
        holder.stdin.close()
