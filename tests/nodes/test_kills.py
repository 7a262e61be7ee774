"""After any kill at any moment the old release runs, and the same command completes the new one.

What is killed: the controller at the start of a stage and at random moments, the node's side (sshd) and
the script on the node at random moments, and the script at every step. The random moments come from a seed, which a
failure names (CLUSTERCTL_SEED sets it, CLUSTERCTL_MOMENTS how many there are).
"""

import contextlib
import itertools
import os
import random
import re
import signal
import time

import pytest
from command import run
from forked import Command
from killing import signal_at
from tiny_env import inventory, make_env, on, pack
from training import wait_until

from provision import sandbox as sandboxes
from provision.env.release import install
from provision.errors import ClusterctlError
from provision.inventory import load
from provision.model import StageStarted, ignore
from provision.script import compile_steps
from provision.session import Session, session
from provision.tasks.deploy import deploy
from provision.tasks.releases import prune, rollback, verify_release

pytestmark = [pytest.mark.root, pytest.mark.timeout(1200)]

MOMENTS = int(os.environ.get("CLUSTERCTL_MOMENTS", "3"))  # 100 before a release
ROOT = "/opt/kills"


def do(inventory, task, *given, emit=ignore):
    """Run a task in its own session, as a command does."""
    with Session(inventory, emit=emit) as opened:
        return task(opened, *given)


class Cluster:
    """Two nodes that have the release ``old``; every test deploys ``new`` and removes it again."""

    def __init__(self, box, folder, old, new):
        self.box, self.folder, self.new = box, folder, new
        self.inventory = load(folder / "inventory.yaml")
        self.old_id = self.deploy(old).release_id
        self.new_id = self.deploy(new).release_id
        self.forget()

    def deploy(self, bundle):
        return do(self.inventory, deploy, bundle)

    def forget(self):
        """Back to the old release alone."""
        with Session(self.inventory) as session:
            self._forget(session)

    def _forget(self, session):
        rollback(session, self.old_id)
        prune(session, 1)

    def check(self, note):
        """One of the two releases is current and runs; the rerun completes, and then everything is OK."""
        for node in ("node01", "node02"):
            message = on(self.box, node, "sh", "-c", f"readlink {ROOT}/current; exec env -i {ROOT}/current/bin/where")
            link, where = message.splitlines()
            assert link in (f"releases/{self.old_id}", f"releases/{self.new_id}"), note
            assert where == f"{ROOT}/{link}/share", note
            on(self.box, node, "env", "-i", f"{ROOT}/releases/{self.old_id}/bin/tool")
        result = self.deploy(self.new)
        assert set(result.states.values()) <= {"deployed", "unchanged"}, note
        with Session(self.inventory) as session:  # one login for what follows
            findings = verify_release(session).findings
            assert [finding.verdict for finding in findings] == ["OK", "OK"], (note, findings)
            self._check_files(note)
            self._forget(session)  # takes over what a killed script still holds
        for node in ("node01", "node02"):
            assert ".lock" not in on(self.box, node, "ls", "-A", f"{ROOT}/releases"), note

    def _check_files(self, note):
        for node in ("node01", "node02"):
            left = set(on(self.box, node, "ls", "-A", f"{ROOT}/releases").split())
            expected = {f"{name}{end}" for name in (self.old_id, self.new_id) for end in ("", ".ok")}
            assert left - {".lock"} == {".clusterctl", ".history", *expected}, note
            keys = self.box.enter(node, ["cat", "/root/.ssh/authorized_keys"]).stdout
            assert "clusterctl-relay" not in keys, note

    def processes(self, node, words):
        """The ids, inside the node, of processes whose command line holds ``words``."""
        script = (
            'for p in /proc/[0-9]*; do tr "\\0" " " <$p/cmdline 2>/dev/null | grep -q -- "$1" && echo ${p#/proc/}; done'
        )
        return self.box.enter(node, ["sh", "-c", script, "sh", words]).stdout.split()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, require_sandbox):
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"kills-{os.getpid()}", directory=tmp_path_factory.mktemp("kills"))
    ) as box:
        folder = inventory(box, tmp_path_factory.mktemp("folder"), prefix=f"{ROOT}/current")
        bundles = []
        for text in ("old", "new"):
            env = make_env(tmp_path_factory.mktemp(text) / "tiny", text)
            (env / "share/noise").write_bytes(os.urandom(5 << 20))  # more than a unit; new in both
            bundles.append(pack(env, folder / f"{text}.ccb"))
        yield Cluster(box, folder, *bundles)


def start(cluster, event=0, number=signal.SIGKILL):
    return Command("deploy", cluster.new, cwd=cluster.folder, first=signal_at(event, number))


def ended(child):
    """The exit code and the messages of a command."""
    code = child.wait(120)
    assert "Traceback" not in child.stderr
    return code, child.stderr


def test_the_controller_is_killed_at_every_stage(cluster):
    """The start of a stage, after the last one's end: a stage's end and the next one's start leave the same state."""
    code, err = ended(start(cluster))
    assert code == 0, err
    cluster.forget()
    events = re.findall(r"^event (\w+)$", err, re.MULTILINE)
    assert events.count("StageStarted") >= 5
    moments = [number for number, kind in enumerate(events, 1) if kind == "StageStarted"] + [len(events)]
    for event in moments:
        code, err = ended(start(cluster, event))
        assert code == -signal.SIGKILL, err
        cluster.check(f"event {event} of {len(events)}")


def test_ctrl_c_at_every_event_ends_cleanly(cluster):
    for event in itertools.count(1):
        code, err = ended(start(cluster, event, (signal.SIGINT, signal.SIGTERM)[event % 2]))
        assert code in {0, 130}, err
        assert ("interrupted\ntry: clusterctl deploy" in err) == (code == 130), err
        for node in ("node01", "node02"):
            # Stopped processes need a moment to exit; the command does not wait for them.
            wait_until(
                lambda node=node: not cluster.processes(node, "[c]c_n cc_t"), f"event {event}: no script runs", 60
            )
            assert ".lock" not in on(cluster.box, node, "ls", "-A", f"{ROOT}/releases"), f"event {event}"
        if code == 0:  # there is no such event: it was done before
            break
    assert event > 10
    cluster.check("done")


def test_the_script_on_the_node_is_killed_at_every_step(cluster, monkeypatch):
    names = []
    original = install.activate_steps

    def remember(*args, **options):
        planned = original(*args, **options)
        names[:] = [step.name for step in planned]
        return planned

    monkeypatch.setattr(install, "activate_steps", remember)
    cluster.deploy(cluster.new)
    cluster.forget()
    assert {"complete", "seal", "smoke test", "mark", "switch"} <= set(names)
    # Between the end of a step and the beginning of the next one nothing is done: only the last one's end is a moment.
    moments = [(index, "before") for index in range(len(names))] + [(len(names) - 1, "after")]
    for index, place in moments:

        def cut(planned, *, token, dry_run=False, index=index, place=place):
            text = compile_steps(planned, token=token, dry_run=dry_run)
            after = (f"cc_mark {index} changed 0", f"cc_mark {index} ok 0")
            markers = after if place == "after" else (f"@clusterctl:{token}:start:{index}:",)
            lines = text.split("\n")
            found = [number for number, line in enumerate(lines) if any(each in line for each in markers)]
            for number in reversed(found):
                lines.insert(number, "kill -9 -$$")
            return "\n".join(lines)

        with monkeypatch.context() as patch:
            patch.setattr(session, "compile_steps", cut)
            with contextlib.suppress(Exception):
                cluster.deploy(cluster.new)
                pytest.fail(f"{names[index]} was not killed")
        cluster.check(f"{place} {names[index]}")


def test_a_process_is_killed_at_random_moments(cluster):
    seed = int(os.environ.get("CLUSTERCTL_SEED", time.time()))
    chance = random.Random(seed)
    began = time.monotonic()
    assert ended(start(cluster))[0] == 0
    longest = time.monotonic() - began
    cluster.forget()
    for moment in range(MOMENTS):
        victim = ("controller", "sshd", "script")[moment % 3]
        delay = chance.uniform(0, 1) * longest
        child = start(cluster)
        time.sleep(delay)
        node = chance.choice(("node01", "node02"))
        if victim == "controller":
            child.kill()
        else:
            words = "sshd: root" if victim == "sshd" else "cc_n cc_t"
            found = cluster.processes(node, words)
            if found:
                cluster.box.enter(node, ["sh", "-c", 'kill -9 "$@" 2>/dev/null', "sh", *found])
        child.wait(120)
        cluster.check(f"seed {seed}, moment {moment}: {victim} on {node} after {delay:.3f} s")


def test_a_disk_of_a_node_that_fills_while_it_unpacks(cluster, tmp_path):
    """The old release stays, nothing is left that grows with every try, and with space the same command completes."""
    box, into = cluster.box, "/opt/small"
    on(box, "node02", "sh", "-c", f"mkdir -p {into} && mount -t tmpfs -o size=40m tmpfs {into}")
    mine = load(inventory(box, tmp_path / "small", prefix=f"{into}/current") / "inventory.yaml")
    first = do(mine, deploy, cluster.folder / "old.ccb")

    def fill(event):
        if isinstance(event, StageStarted) and event.stage == "send":
            on(box, "node02", "sh", "-c", f"cat /dev/zero >{into}/ballast 2>/dev/null; truncate -s -1M {into}/ballast")

    for _ in range(2):
        with pytest.raises(ClusterctlError) as failed:
            do(mine, deploy, cluster.new, emit=fill)
        assert "no space left on the device" in str(failed.value.reasons["node02"])
        assert on(box, "node02", "readlink", f"{into}/current").strip() == f"releases/{first.release_id}"
        on(box, "node02", "env", "-i", f"{into}/current/bin/tool")
        on(box, "node02", "rm", f"{into}/ballast")
        # Received bytes wait for the rerun in the two folders of this release; they never exceed the release.
        left = set(on(box, "node02", "ls", "-A", f"{into}/releases").split()) - {".lock"}
        waiting = {f".incoming-{cluster.new_id}", f".transfer-{cluster.new_id}"}
        assert left - waiting == {".clusterctl", ".history", first.release_id, f"{first.release_id}.ok"}
        assert set(on(box, "node02", "ls", "-A", into).split()) == {"current", "releases"}
        size = on(box, "node02", "sh", "-c", f"du -cks {into}/releases/.[it]*-* | tail -n 1").split()[0]
        assert int(size) << 10 <= 1.2 * cluster.new.stat().st_size
    result = do(mine, deploy, cluster.new)
    assert result.states["node02"] == "deployed"
    assert [finding.verdict for finding in do(mine, verify_release).findings] == ["OK", "OK"]
    left = set(on(box, "node02", "ls", "-A", f"{into}/releases").split()) - {".lock"}
    expected = {f"{name}{end}" for name in (first.release_id, cluster.new_id) for end in ("", ".ok")}
    assert left == {".clusterctl", ".history", *expected}


def test_a_signal_while_a_deploy_sets_up_services_ends_cleanly(cluster, tmp_path):
    """Before the scripts start, when they are done, and while one waits on a node for the lock of the services."""
    box, lock = cluster.box, "/var/lib/clusterctl/lock"
    folder = inventory(box, tmp_path / "services", prefix=f"{ROOT}/current", extra="services:\n  hosts:\n")
    hold = f"mkdir -p {lock.rpartition('/')[0]}; exec 9>{lock}; flock 9; echo $$ >/root/pid; exec sleep 250"
    on(box, "node01", "sh", "-c", f"sh -c '{hold}' </dev/null >/dev/null 2>&1 & until [ -s /root/pid ]; do :; done")
    child = Command("deploy", cluster.new, cwd=folder)
    wait_until(lambda: len(waiting(box, "node01", lock)) > 1, "a script waits for the lock", 60)
    child.send_signal(signal.SIGTERM)
    results = [ended(child)]
    on(box, "node01", "sh", "-c", "kill $(cat /root/pid); rm /root/pid")
    for event, number in ((1, signal.SIGINT), (2, signal.SIGTERM)):
        results.append(ended(Command("deploy", cluster.new, cwd=folder, first=signal_at(event, number))))
    for code, message in results:
        assert code == 130, message
        assert "interrupted\ntry: clusterctl deploy" in message
    for node in ("node01", "node02"):
        wait_until(lambda node=node: not waiting(box, node, lock), f"{node}: no script holds the lock", 60)
        assert ".lock" not in on(box, node, "ls", "-A", f"{ROOT}/releases")
    assert run("services", "apply", cwd=folder).returncode == 0
    assert "BEGIN clusterctl" in on(box, "node01", "cat", "/etc/hosts")
    assert run("services", "undo", cwd=folder).returncode == 0


def waiting(box, node, lock):
    """The processes of a node that have the lock's file open."""
    script = 'for p in /proc/[0-9]*; do ls -l "$p/fd" 2>/dev/null | grep -q -- "-> $1$" && echo "$p"; done; true'
    return on(box, node, "sh", "-c", script, "sh", lock).split()
