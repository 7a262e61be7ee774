"""The rehearsal cluster: real nodes start, differ where they must, and leave nothing after any end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ipaddress import IPv4Network
from pathlib import Path

import pytest
import yaml

from provision import sandbox as sandboxes
from provision.errors import ClusterctlError, NodesFailedError, UsageError
from provision.model import Notice, Progress, StageFinished, StageStarted
from provision.sandbox import disk, host, network, node, rootfs

ROOT = Path(__file__).resolve().parents[2]

# A process that makes a sandbox and waits at a chosen call until it may continue, or is killed.
DRIVER = """
import importlib, sys
from pathlib import Path
from provision import sandbox
from provision.errors import InterruptedByUser
module, name = sys.argv[2].split(".")
module = importlib.import_module("provision.sandbox." + module)
real = getattr(module, name)
def stop(*args, **kwargs):
    print("here", flush=True)
    sys.stdin.readline()
    return real(*args, **kwargs)
setattr(module, name, stop)
try:
    sandbox.up(sandbox.Options(nodes=3, name="victim", directory=Path(sys.argv[1])))
except InterruptedByUser as error:
    sys.exit(str(error))
"""
KINDS = ("net", "mnt", "pid", "uts", "ipc")
POINTS = ("disk.fill", "node.start", "network.plug", "node.wait_ready", "bring_up.write_files")


class Traces:
    """Looks for anything that a sandbox of the state folder ``home`` has left on this machine."""

    def __init__(self, home):
        self.home = home
        self.named = subprocess.check_output(["ip", "netns", "list"])
        self.states = []
        self.namespaces = set()
        self.held = []

    def remember(self):
        """Notes what there is now: devices by name, namespaces by number."""
        self.states = [json.loads(path.read_text()) for path in self.home.glob("*.json")]
        inits = [each["init"]["pid"] for state in self.states for each in state["nodes"] if each["init"]]
        self.namespaces = {space for pid in inits for space in namespaces(pid)} - set(namespaces("self"))
        # The kernel may reuse a number at once, also for other programs, unless it is held.
        self.held += [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for pid in inits for kind in KINDS]

    def release(self):
        for descriptor in self.held:
            os.close(descriptor)

    def found(self):
        links = {path.name for path in Path("/sys/class/net").iterdir()}
        trace = [f"link {name}" for state in self.states for name in links if name.startswith(f"cc{state['token']}")]
        for pid in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
            trace += [
                f"process {pid}: {name}" for name in ("cmdline", "mountinfo") if str(self.home) in about(pid, name)
            ]
            trace += [f"process {pid}: {space}" for space in self.namespaces.intersection(namespaces(pid))]
        if subprocess.check_output(["ip", "netns", "list"]) != self.named:
            trace.append("ip netns list")
        return trace + [str(path) for path in self.home.iterdir() if path.name != ".lock"]


def about(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has exited
        return ""


def namespaces(pid):
    try:
        return [str(Path(f"/proc/{pid}/ns", kind).readlink()) for kind in KINDS]
    except OSError:
        return []


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A state folder of the test, so that every mention of it belongs to the test."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("CLUSTERCTL_SANDBOX_HOME", str(folder))
    return folder


@pytest.fixture
def traces(home):
    traces = Traces(home)
    yield traces
    traces.release()


def out(result):
    assert result.returncode == 0, result
    return result.stdout.decode().strip() if isinstance(result.stdout, bytes) else result.stdout.strip()


# --- nodes that run -------------------------------------------------------------------------------


def test_ssh_reaches_every_node_with_its_own_name_and_key(sandbox, ssh):
    assert [each.name for each in sandbox.nodes] == ["node01", "node02", "node03"]
    for each in sandbox.nodes:
        assert out(ssh(sandbox, each.name, "hostname")) == each.name
        assert out(ssh(sandbox, each.name, "id -u; pwd", user="trainer")) == "1000\n/home/trainer"
    pins = [line.split() for line in sandbox.known_hosts.read_text().splitlines()[1:]]
    assert [pin[0] for pin in pins] == [each.address for each in sandbox.nodes]
    assert len({pin[2] for pin in pins}) == 3


def test_inventory_is_written(sandbox):
    data = yaml.safe_load(sandbox.inventory.read_text())
    assert data["prefix"] == "/opt/llm/current"
    assert data["ssh"] == {"user": "root", "key": "id_ed25519", "known_hosts": "known_hosts"}
    assert data["nodes"] == {each.name: each.address for each in sandbox.nodes}
    assert sandbox.key.stat().st_mode & 0o777 == 0o600


def test_minimal_node_has_the_documented_programs_and_no_others(sandbox, ssh):
    for missing in ("python3", "python", "zstd", "rsync"):
        assert ssh(sandbox, "node01", f"command -v {missing}").returncode != 0, missing
    for there in ("tar", "gzip", "sha256sum", "perl", "ssh", "dd"):
        assert ssh(sandbox, "node01", f"command -v {there}").returncode == 0, there


def test_a_node_is_a_separate_machine(sandbox, ssh):
    assert out(ssh(sandbox, "node01", "cat /proc/1/comm")) == "sshd"
    assert out(ssh(sandbox, "node01", "cut -d' ' -f2 /proc/mounts | sort")).split() == sorted(
        ["/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/run"]
    )
    assert out(ssh(sandbox, "node01", "getent ahostsv4 localhost | head -1")).startswith("127.0.0.1")
    assert out(ssh(sandbox, "node01", "getent ahostsv4 node01 | head -1")).startswith(sandbox.nodes[0].address)
    assert out(ssh(sandbox, "node01", "echo x > /tmp/x; echo x > /dev/shm/x; echo x > /etc/x; ls /tmp")) == "x"
    assert ssh(sandbox, "node02", "ls /tmp/x /dev/shm/x /etc/x").stdout == b""
    assert (
        out(ssh(sandbox, "node01", "rm /tmp/x /dev/shm/x /etc/x; echo x | tee /dev/null; stat -c %a /tmp")) == "x\n1777"
    )
    assert (
        out(ssh(sandbox, "node01", "head -c 9 /proc/self/mountinfo >/dev/fd/1 && cat /dev/stdin", stdin=b"y"))[-1]
        == "y"
    )


def test_nodes_reach_each_other_and_nothing_else(sandbox, ssh):
    other = sandbox.nodes[1].address
    assert out(ssh(sandbox, "node01", f"bash -c 'exec 3<>/dev/tcp/{other}/22; head -c4 <&3'")) == "SSH-"
    assert out(ssh(sandbox, "node01", "bash -c 'exec 3<>/dev/tcp/127.0.0.1/22; head -c4 <&3'")) == "SSH-"
    outside = ssh(sandbox, "node01", "bash -c 'exec 3<>/dev/tcp/192.0.2.1/53'")
    assert b"unreachable" in outside.stderr


def test_tests_can_change_a_node(make_sandbox, ssh):
    box = make_sandbox(nodes=1)
    with (box.node_root("node01") / "root/.bashrc").open("w") as file:
        file.write("echo noise\n")
    assert out(ssh(box, "node01", "true")) == "noise"
    result = box.enter("node01", ["sh", "-c", "hostname; cat"], stdin="from outside\n")
    assert result.stdout == "node01\nfrom outside\n"
    out(box.enter("node01", ["usermod", "--shell", "/bin/dash", "trainer"]))
    assert out(ssh(box, "node01", "echo $0", user="trainer")) == "dash"
    with pytest.raises(UsageError, match="no node node09"):
        box.node_root("node09")


def test_a_node_can_be_unplugged_and_powered_off(make_sandbox, ssh):
    box = make_sandbox(nodes=["head", "worker"])
    assert (box.status, box.problems) == ("up", ())
    box.unplug("worker")
    assert ssh(box, "head", f"timeout 1 bash -c 'exec 3<>/dev/tcp/{box.nodes[1].address}/22'").returncode != 0
    box.plug("worker")
    assert out(ssh(box, "worker", "hostname")) == "worker"
    box.power_off("worker")
    assert (box.status, box.problems) == ("broken", ("worker is off",))
    with pytest.raises(ClusterctlError, match=r"worker .* is off"):
        box.enter("worker", ["true"])
    assert out(ssh(box, "head", "hostname")) == "head"


def test_a_node_that_was_powered_off_starts_again_with_its_disk(make_sandbox, ssh):
    box = make_sandbox(nodes=["head", "worker"], link="100mbit")
    with pytest.raises(ClusterctlError, match=r"worker .* is on"):
        box.power_on("worker")
    out(ssh(box, "worker", "echo kept >/root/file; echo gone >/dev/shm/file; echo gone >/run/file"))
    boots = [out(ssh(box, name, "cat /proc/sys/kernel/random/boot_id")) for name in ("head", "worker")]
    for number in range(2):
        box.power_off("worker")
        box.power_on("worker")
        assert (box.status, box.problems) == ("up", ())
        assert out(ssh(box, "worker", "hostname; cat /root/file; ls /dev/shm")) == "worker\nkept"
        assert "gone" not in out(ssh(box, "worker", "cat /run/* 2>/dev/null; true"))
        assert ssh(box, "head", f"timeout 5 bash -c 'exec 3<>/dev/tcp/{box.nodes[1].address}/22'").returncode == 0
        boots.append(out(ssh(box, "worker", "cat /proc/sys/kernel/random/boot_id")))
        assert len(set(boots)) == 2 + number  # at first all have the machine's
        assert len(boots[-1]) == len(boots[0])
        shown = ["tc", "qdisc", "show", "dev", box.state.nodes[1].link]
        assert b"rate 100Mbit" in subprocess.run(shown, check=True, capture_output=True).stdout
    box.unplug("worker")
    box.plug("worker")
    assert out(ssh(box, "worker", "hostname")) == "worker"


def test_two_sandboxes_side_by_side_made_at_once(make_sandbox, ssh):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: make_sandbox(nodes=2), range(2))
    assert not IPv4Network(first.subnet).overlaps(IPv4Network(second.subnet))
    assert out(ssh(first, "node02", "hostname")) == out(ssh(second, "node02", "hostname")) == "node02"
    first.down()
    assert out(ssh(second, "node01", "hostname")) == "node01"
    assert ssh(second, "node01", f"bash -c 'exec 3<>/dev/tcp/{IPv4Network(first.subnet)[11]}/22'").returncode != 0


def test_link_is_shaped_in_both_directions(make_sandbox, ssh):
    box = make_sandbox(nodes=1, link="100mbit")
    began = time.monotonic()
    out(ssh(box, "node01", "cat >/dev/null", stdin=bytes(20_000_000)))
    sent = time.monotonic()
    assert len(ssh(box, "node01", "head -c 20000000 /dev/zero").stdout) == 20_000_000
    received = time.monotonic()
    assert 1 < sent - began < 30
    assert 1 < received - sent < 30


def test_host_nodes_have_this_machines_programs_and_none_of_its_secrets(make_sandbox, ssh):
    if not shutil.which("sshd", path=host.environment()["PATH"]):
        pytest.skip("no sshd on this machine: apt-get install -y openssh-server")
    box = make_sandbox(nodes=1, rootfs="host")
    git = shutil.which("git")  # no minimal root has it
    assert out(ssh(box, "node01", f"ls {git}")) == git
    assert out(ssh(box, "node01", "ls -A /root/.ssh /tmp /var/lib/clusterctl/sandbox")).split() == [
        *("/root/.ssh:", "authorized_keys", "/tmp:", "/var/lib/clusterctl/sandbox:")
    ]
    assert out(ssh(box, "node01", "id -un", user="trainer")) == "trainer"
    out(ssh(box, "node01", "touch /etc/made-by-a-node"))
    assert not Path("/etc/made-by-a-node").exists()


def test_password_login_only_when_asked_for(make_sandbox, sandbox, tmp_path):
    ask = tmp_path / "ask"
    ask.write_text("#!/bin/sh\necho 'for a test'\n")
    ask.chmod(0o755)
    environment = {**os.environ, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
    box = make_sandbox(nodes=1, password="for a test")
    for each, rc in ((box, 0), (sandbox, 255)):
        argv = ["ssh", "-F", "none", "-o", "PubkeyAuthentication=no", "-o", f"UserKnownHostsFile={each.known_hosts}"]
        argv += ["-o", "NumberOfPasswordPrompts=1", f"root@{each.nodes[0].address}", "true"]
        assert subprocess.run(argv, env=environment, capture_output=True, check=False).returncode == rc


def test_sixteen_nodes_come_up_fast(make_sandbox, ssh, sandbox, capsys):
    began = time.monotonic()
    make_sandbox(nodes=1)
    alone = time.monotonic() - began
    box = make_sandbox(nodes=16)
    took = time.monotonic() - began - alone
    with capsys.disabled():
        sys.stdout.write(f"\n16 nodes in {took:.2f} s\n")
    assert took < 16 * alone  # whatever the machine does besides: they start side by side
    assert out(ssh(box, "node16", "hostname")) == "node16"


# --- the end ----------------------------------------------------------------------------------------


def test_down_leaves_nothing(traces, make_sandbox, tmp_path):
    events = []
    box = make_sandbox(nodes=3, directory=tmp_path / "files", link="1gbit", emit=events.append)
    # A process that has left its session and its parent is still in the node's pid namespace.
    box.enter("node01", ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 </dev/null &"])
    traces.remember()
    assert traces.found()
    box.down()
    assert traces.found() == []
    assert list((tmp_path / "files").iterdir()) == []
    assert [type(each) for each in events] == [StageStarted, *[Progress] * 3, StageFinished]
    assert events[-1].states == dict.fromkeys(["node01", "node02", "node03"], "up")


def test_down_keeps_files_that_the_user_changed(make_sandbox, tmp_path):
    box = make_sandbox(nodes=1, directory=tmp_path)
    with box.inventory.open("a") as file:
        file.write("train: {port: 29500}\n")
    events = []
    inventory = box.inventory
    box.down(emit=events.append)
    assert list(tmp_path.iterdir()) == [inventory]
    assert [each for each in events if isinstance(each, Notice)] == [Notice(f"{inventory} was changed and is kept")]
    make_sandbox(nodes=1, directory=tmp_path)  # its first line says that a sandbox made it


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_up_leaves_nothing(require_sandbox, traces, tmp_path, point, number):
    with _victim(tmp_path / "files", point) as victim:
        traces.remember()
        victim.send_signal(number)
        _, errors = victim.communicate(timeout=60)
        assert (victim.returncode, errors) == (1, f"interrupted by {number.name}\n")
    assert traces.found() == []
    assert list((tmp_path / "files").iterdir()) == []
    assert sandboxes.list_all() == []


@pytest.mark.parametrize("point", POINTS)
def test_down_cleans_up_after_kill_9_during_up(require_sandbox, traces, tmp_path, point):
    with _victim(tmp_path / "files", point) as victim:
        traces.remember()
        with pytest.raises(UsageError, match="is being created by process"):
            sandboxes.down("victim")
        assert [each.status for each in sandboxes.list_all()] == ["starting"]
        victim.kill()
        victim.communicate()
    (box,) = sandboxes.list_all()
    assert (box.name, box.status) == ("victim", "broken")
    assert "exited" in box.problems[0]
    sandboxes.down("victim")
    assert traces.found() == []
    assert list((tmp_path / "files").iterdir()) == []


@contextmanager
def _victim(directory, point):
    with spawned("-c", DRIVER, directory, point) as victim:
        assert victim.stdout.readline() == "here\n", victim.stderr.read()
        yield victim


@contextmanager
def spawned(*arguments):
    """A Python process that does not outlive the test."""
    argv = [sys.executable, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as child:
        try:
            yield child
        finally:
            child.kill()


def test_node_that_fails_to_start_is_named_and_everything_is_removed(require_sandbox, traces, tmp_path, monkeypatch):
    write = node.write_script

    def sabotage(state, each, lower, sshd):
        write(state, each, lower, "/no/such/sshd" if each.name == "node02" else sshd)

    monkeypatch.setattr(node, "write_script", sabotage)
    with pytest.raises(NodesFailedError, match="1 of 3 nodes") as caught:
        sandboxes.up(sandboxes.Options(nodes=3, name="lame", directory=tmp_path / "files"))
    assert list(caught.value.reasons) == ["node02"]
    assert "/no/such/sshd" in caught.value.reasons["node02"]
    traces.remember()
    assert traces.found() == []


def test_a_reused_process_id_is_left_alone():
    with subprocess.Popen(["sleep", "100"]) as other:
        ours = host.identify(other.pid)
        host.kill([host.Process(other.pid, ours.started - 1)])
        assert other.poll() is None
        host.kill([ours, ours])
        assert other.wait() == -signal.SIGKILL
    assert not ours.alive


def test_down_of_an_unknown_sandbox(require_sandbox, home):
    with pytest.raises(UsageError, match="no sandbox nobody"):
        sandboxes.down("nobody")


# --- refusals ---------------------------------------------------------------------------------------


def test_without_root(monkeypatch, tmp_path, home):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="needs root") as caught:
        sandboxes.up(sandboxes.Options(nodes=2, directory=tmp_path))
    assert caught.value.hint == "sudo clusterctl sandbox up"
    assert list(home.iterdir()) == []


def test_missing_programs_are_all_named_with_the_command_that_installs_them(monkeypatch):
    gone = {"debootstrap", "tc", "ip"}
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name in gone else name)
    with pytest.raises(UsageError, match="ip, tc, debootstrap are not installed") as caught:
        host.require_programs(host.FOR_LINK, host.FOR_MINIMAL)
    assert caught.value.hint == "apt-get install -y debootstrap iproute2"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nodes": 0}, "0 nodes"),
        ({"nodes": 251}, "251 nodes"),
        ({"nodes": ["a", "a"]}, "same name"),
        ({"nodes": ["a b"]}, "'a b' is not a valid host name"),
        ({"name": "../x"}, "is not a valid sandbox name"),
        ({"link": "fast"}, "'fast' is not a valid link rate"),
        ({"user": "nobody"}, "no user nobody"),
        ({"prefix": "opt"}, "not absolute"),
        ({"rootfs": "host", "packages": ["tcsh"]}, "minimal root"),
    ],
)
def test_wrong_arguments(options, text, tmp_path, home):
    with pytest.raises(UsageError, match=re.escape(text)):
        sandboxes.up(sandboxes.Options(directory=tmp_path, **options))
    assert list(home.iterdir()) == []


def test_files_of_the_user_are_never_replaced(require_sandbox, tmp_path, home):
    (tmp_path / "inventory.yaml").write_text("prefix: /opt/real\n")
    with pytest.raises(UsageError, match=r"inventory\.yaml exists"):
        sandboxes.up(sandboxes.Options(nodes=1, directory=tmp_path))
    assert (tmp_path / "inventory.yaml").read_text() == "prefix: /opt/real\n"
    assert sandboxes.list_all() == []


def test_a_name_and_a_folder_are_used_once(home, make_sandbox, tmp_path):
    make_sandbox(nodes=1, name="one", directory=tmp_path / "a")
    with pytest.raises(UsageError, match="sandbox one already exists"):
        sandboxes.up(sandboxes.Options(nodes=1, name="one", directory=tmp_path / "b"))
    with pytest.raises(UsageError, match="contains the files of sandbox one"):
        sandboxes.up(sandboxes.Options(nodes=1, name="two", directory=tmp_path / "a"))


# --- parts --------------------------------------------------------------------------------------------


def test_the_subnet_avoids_used_addresses():
    taken = [IPv4Network("10.77.0.0/16"), IPv4Network("10.78.128.0/30")]
    assert str(network.choose_subnet(taken)) == "10.79.0.0/16"
    assert str(network.choose_subnet([IPv4Network("10.0.0.0/8")])) == "172.16.0.0/16"
    with pytest.raises(ClusterctlError, match="no private"):
        network.choose_subnet([IPv4Network("0.0.0.0/0")])
    assert network.addresses(IPv4Network("10.77.0.0/16"), 250)[-1] == "10.77.1.4"


def test_rates():
    assert network.rate_in_bits("2.5gbit") == 2.5e9
    assert network.burst("100mbit") == 64 * 1024
    assert network.burst("10gbit") == 5_000_000
    for wrong in ("", "100", "100mb", "0gbit", "1bit; reboot"):
        with pytest.raises(UsageError):
            network.rate_in_bits(wrong)


def test_mirror_is_the_one_of_apt(tmp_path, monkeypatch):
    monkeypatch.delenv("CLUSTERCTL_DEBIAN_MIRROR", raising=False)
    assert rootfs.debian_mirror("bookworm", tmp_path) == "http://deb.debian.org/debian"
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/debian.sources").write_text(
        "Types: deb\n# old\nURIs: http://sec.example/s\nSuites: bookworm-security\n\n"
        "Enabled: no\nTypes: deb\nURIs: http://off.example\nSuites: bookworm\n\n"
        "Types: deb deb-src\nURIs:\n http://in.example/debian/\nSuites: bookworm\n bookworm-updates\n"
    )
    assert rootfs.debian_mirror("bookworm", tmp_path) == "http://in.example/debian"
    (tmp_path / "sources.list").write_text(
        "# deb http://no.example bookworm main\ndeb cdrom:[x]/ bookworm main\n"
        "deb-src http://src.example bookworm main\n"
        "deb [arch=amd64 signed-by=/k] https://one.example/debian bookworm main\n"
    )
    assert rootfs.debian_mirror("bookworm", tmp_path) == "https://one.example/debian"
    monkeypatch.setenv("CLUSTERCTL_DEBIAN_MIRROR", "http://mine.example")
    assert rootfs.debian_mirror("bookworm", tmp_path) == "http://mine.example"


def test_suite_is_that_of_this_machine_if_it_is_debian(tmp_path):
    release = tmp_path / "os-release"
    assert rootfs.debian_suite(release) == "bookworm"
    release.write_text('ID=debian\nVERSION_CODENAME=trixie\nPRETTY_NAME="Debian"\n')
    assert rootfs.debian_suite(release) == "trixie"
    release.write_text("ID=ubuntu\nVERSION_CODENAME=noble\n")
    assert rootfs.debian_suite(release) == "bookworm"


def test_trainer_takes_the_first_free_number():
    before = disk.Accounts("root:x:0:0::/root:/bin/sh\nme:x:1000:1000::/home/me:/bin/sh\n", "", "root:!:1::::::\n")
    after = disk.with_trainer(before, None)
    assert after.trainer_id == 1001
    assert after.shadow.startswith("root:*:1:")  # not locked
    assert disk.with_trainer(after, "$6$x").passwd == after.passwd


def test_of_two_builders_one_makes_the_root(require_sandbox, fake_debootstrap):
    wanted = rootfs.recipe(["tcsh"])
    with ThreadPoolExecutor(2) as pool:
        roots = set(pool.map(lambda _: rootfs.minimal(wanted), range(2)))
    assert roots == {rootfs.find_cached(wanted)}
    calls = fake_debootstrap.read_text().splitlines()
    assert len(calls) == 1
    assert "--include=openssh-client,openssh-server,tcsh" in calls[0]
    assert rootfs.find_cached(rootfs.recipe()) is None


def test_failed_build_leaves_nothing_and_reports_why(require_sandbox, fake_debootstrap):
    with pytest.raises(ClusterctlError, match="E: no such package") as caught:
        rootfs.minimal(rootfs.recipe(["broken"]))
    assert "CLUSTERCTL_DEBIAN_MIRROR" in caught.value.hint
    assert [path.suffix for path in rootfs.cache().iterdir()] == [".lock"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_build_outlives_its_starter(require_sandbox, fake_debootstrap, number):
    code = "from provision.sandbox import rootfs; rootfs.minimal(rootfs.recipe(['slow']), lambda e: print(flush=True))"
    with spawned("-c", code) as maker:
        maker.stdout.readline()  # the stage
        maker.stdout.readline()  # the program's first line
        names = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
        pidfds = []
        for pid in (name for name in names if str(fake_debootstrap.parent) in about(name, "cmdline")):
            with suppress(*host.GONE):  # one of its short-lived children
                pidfds.append(os.pidfd_open(int(pid)))
        maker.send_signal(number)
    assert len(pidfds) >= 2
    for pidfd in pidfds:
        assert host.wait_for_end(pidfd, 10)
        os.close(pidfd)


@pytest.fixture
def fake_debootstrap(tmp_path, monkeypatch):
    program = tmp_path / "bin/debootstrap"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\necho "I: Retrieving x"\nmkdir -p "$4/etc/ssh"\n'
        'case "$2" in *broken*) echo "E: no such package"; exit 1;; *slow*) sleep 1000;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "calls"
