"""Messages and exit codes for a user who cannot log in yet, or no longer."""

import os
import re
import shutil
import subprocess

import forked
import pexpect
import pytest
from command import CLUSTERCTL

from provision import sandbox as sandboxes

pytestmark = pytest.mark.root

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    folder = tmp_path_factory.mktemp("contact")
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"contact-test-{os.getpid()}", directory=folder, password=PASSWORD)
    ) as box:
        yield box


@pytest.fixture
def folder(box, tmp_path):
    """A user's folder with an inventory for the nodes; the home is empty, so that no key of this machine helps."""
    for name in ("inventory.yaml", "known_hosts", "id_ed25519"):
        shutil.copy2(box.directory / name, tmp_path / name)
    (tmp_path / "home").mkdir()
    (tmp_path / "tiny.ccb").write_text("never looked at before the nodes")
    return tmp_path


def environ(folder):
    kept = {name: value for name, value in os.environ.items() if name not in ("SSH_AUTH_SOCK", "CONDA_PREFIX")}
    return {**kept, "HOME": str(folder / "home"), "TERM": "dumb"}


def init(folder, *argv):
    """``clusterctl init``: the shortest command that logs in everywhere."""
    result = forked.run("init", *argv, cwd=folder, env=environ(folder), timeout=60)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, " ".join(result.stderr.split()), result.stdout


def change(folder, name, pattern, replacement):
    path = folder / name
    text = path.read_text()
    changed = re.sub(pattern, lambda _: replacement, text, flags=re.MULTILINE)
    assert changed != text
    path.write_text(changed)


def test_a_healthy_node_is_ready(folder):
    code, _, out = init(folder)
    assert code == 0
    assert "node[01-02]: ready" in out


def test_an_unknown_host_key_is_refused_without_a_terminal(folder):
    (folder / "known_hosts").write_text("")
    code, err, _ = init(folder)
    assert code == 5
    assert "node01" in err
    assert "node02" in err
    assert "is not pinned" in err
    assert "on a terminal" in err
    assert (folder / "known_hosts").read_text() == ""


def test_unknown_host_keys_can_be_accepted_for_a_script(folder):
    pinned = set((folder / "known_hosts").read_text().split())
    (folder / "known_hosts").write_text("")
    code, err, _ = init(folder, "--accept-host-keys")
    assert code == 0, err
    assert "SHA256:" in err
    assert set((folder / "known_hosts").read_text().split()) <= pinned


def test_a_changed_host_key_is_always_refused(folder):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "other"], check=True)
    key = (folder / "other.pub").read_text().split()[1]
    change(folder, "known_hosts", r"AAAA\S+", key)
    before = (folder / "known_hosts").read_text()
    code, err, _ = init(folder, "--accept-host-keys")
    assert code == 5
    assert "changed" in err
    assert "ssh-keygen -R" in err
    assert (folder / "known_hosts").read_text() == before


def test_wrong_key_reports_a_refused_login(folder):
    (folder / "id_ed25519").unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id_ed25519"], check=True)
    code, err, _ = init(folder)
    assert code == 5
    assert "needs a password" in err
    assert "Enrolling nodes: failed after" in err
    assert "node[01-02]: login as root at its address needs a password" in err


def test_a_port_without_sshd_is_refused(folder):
    change(folder, "inventory.yaml", r"ssh: \{", "ssh: {port: 2, ")
    code, err, _ = init(folder)
    assert code == 5
    assert "refuses connections" in err or "refused" in err


def test_a_node_that_does_not_answer_times_out(folder, box):
    change(folder, "inventory.yaml", r"ssh: \{", "ssh: {timeout: 1, ")
    box.unplug("node02")
    try:
        code, err, out = init(folder)
    finally:
        box.plug("node02")
    assert code == 5
    assert "node02" in err
    assert "node01: ready" in err + out


def test_login_shells_and_noisy_rc_files_make_no_difference(require_sandbox, tmp_path):
    shells = {"node01": "tcsh", "node02": "fish"}
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"shell-test-{os.getpid()}", directory=tmp_path, rootfs="host")
    ) as box:
        for node, shell in shells.items():
            where = box.enter(node, ["sh", "-c", f"command -v {shell}"]).stdout.strip()
            script = (
                f"usermod -s {where} root; cd /root; echo 'echo noise from csh' >.cshrc; mkdir -p .config/fish; "
                "echo 'echo noise from fish' >.config/fish/config.fish; echo 'echo noise' >.bashrc; "
                "cp .bashrc .profile"
            )
            assert box.enter(node, ["sh", "-c", script]).returncode == 0
        (tmp_path / "home").mkdir()
        code, err, _ = init(tmp_path)
        assert code == 0, err
        (tmp_path / "train.yaml").write_text("stage: sft\nmodel_name_or_path: /m\ndataset: d\ndataset_dir: /d\n")
        result = forked.run("train", "train.yaml", cwd=tmp_path, env=environ(tmp_path), timeout=60)
    # The script ran and answered, through whatever the login shell is.
    assert result.returncode == 4
    message = " ".join(result.stderr.split())
    assert "node[01-02]: there is no environment at /opt/llm/current" in message


def test_init_installs_a_key_where_only_a_password_works_and_asks_for_it_once(folder, box):
    for node in ("node01", "node02"):
        box.enter(node, ["mv", "/root/.ssh/authorized_keys", "/root/.ssh/away"])
    try:
        (folder / "known_hosts").write_text("")
        (folder / "id_ed25519").unlink()  # named in the inventory and missing: init creates it
        child = pexpect.spawn(
            str(CLUSTERCTL), ["init"], cwd=str(folder), env=environ(folder), encoding="utf-8", timeout=60
        )
        asked = 0
        while True:
            what = child.expect([r"Trust this key\?.*: ", r"Password of root on .*: ", pexpect.EOF])
            if what == 2:
                break
            if what == 1:
                asked += 1
            child.sendline("y" if what == 0 else PASSWORD)
        child.close()
        assert child.exitstatus == 0, child.before
        assert "key installed" in child.before
        assert asked == 1
        assert PASSWORD not in child.before
        # From now on no question is asked: the new key logs in, the host keys are pinned.
        code, err, out = init(folder)
        assert code == 0, err
        assert "node[01-02]: ready" in out
        for path in folder.rglob("*"):
            if path.is_file():
                assert PASSWORD.encode() not in path.read_bytes()
    finally:
        for node in ("node01", "node02"):
            box.enter(node, ["mv", "/root/.ssh/away", "/root/.ssh/authorized_keys"])


def test_a_wrong_password_is_tried_once_and_not_on_every_node(folder, box):
    for node in ("node01", "node02"):
        box.enter(node, ["mv", "/root/.ssh/authorized_keys", "/root/.ssh/away"])
    try:
        child = pexpect.spawn(
            str(CLUSTERCTL), ["init"], cwd=str(folder), env=environ(folder), encoding="utf-8", timeout=60
        )
        child.expect(r"Password of root on .*: ")
        child.sendline("wrong")
        assert child.expect([r"Password of root on .*: ", pexpect.EOF]) == 1
        child.close()
        assert child.exitstatus == 5
        assert "refused" in child.before
    finally:
        for node in ("node01", "node02"):
            box.enter(node, ["mv", "/root/.ssh/away", "/root/.ssh/authorized_keys"])


def test_init_writes_a_first_inventory(folder, box):
    (folder / "inventory.yaml").unlink()
    first, second = (node.address for node in box.nodes)
    (folder / "home/.ssh").mkdir(mode=0o700)
    (folder / "id_ed25519").rename(folder / "home/.ssh/id_ed25519")
    code, err, _ = init(folder, f"gpu01={first}", f"gpu02={second}", "--user", "root", "--prefix", "/opt/e/current")
    assert code == 0, err
    text = (folder / "inventory.yaml").read_text()
    network, _, one = first.rpartition(".")
    assert f"gpu[01-02]: {network}.[{one}-{second.rpartition('.')[2]}]" in text
    assert "prefix: /opt/e/current" in text
    code, err, _ = init(folder, f"gpu03={first}")
    assert code == 2
    assert "inventory.yaml already exists" in err
