"""OS packages from an offline bundle on minimal Debian nodes that reach nothing; apt and dpkg are real."""

import base64
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from os import getpid

import pytest
from command import CLUSTERCTL, run
from deb_mirror import Deb, build, make
from tiny_env import on

from provision.errors import UsageError
from provision.ospackages import releases
from provision.sandbox import rootfs as machine

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not shutil.which("gpg-agent"), reason="needs gpg and gpg-agent, which sign the tests' mirror"),
]

REAL = ("rpcbind", "tree")  # one that brings a daemon, one that brings nothing
CODENAME = machine.debian_suite()
# Settings of a host: a release that the bundle's repository does not have, and a hook of its own updates.
IN_THE_WAY = 'APT::Default-Release "stable"; APT::Update::Post-Invoke-Success { "touch /tmp/hooked"; };'
WAIT = "#!/bin/sh\nwhile [ ! -e /tmp/go-on ]; do sleep 0.1; done\n"
DEBS = (
    Deb("cc-tool", fields={"Depends": "cc-base (= 2)"}),
    Deb("cc-base", "2"),
    Deb("cc-clock", fields={"Conflicts": "cc-time", "Provides": "cc-time"}),
    Deb("cc-slow", scripts={"postinst": WAIT}),
    Deb("cc-plain"),
)
OLD_CLOCK = Deb(
    "cc-old-clock",
    fields={"Conflicts": "cc-time", "Provides": "cc-time"},
    scripts={"conffiles": "/etc/cc-old-clock.conf\n"},
    files={"etc/cc-old-clock.conf": "as it came\n"},
)
BROKEN = Deb("cc-broken", scripts={"postinst": "#!/bin/sh\n[ -e /tmp/mended ]\n"})


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    from provision import sandbox as sandboxes

    try:
        releases.find(CODENAME)
    except UsageError as error:
        pytest.skip(f"the nodes are made of {CODENAME}: {error}")
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"os-packages-{getpid()}", directory=tmp_path_factory.mktemp("os-packages"))
    ) as box:
        sh(box, f"echo '{IN_THE_WAY}' >/etc/apt/apt.conf.d/99host")
        yield box


@pytest.fixture(scope="module")
def made_up(box, tmp_path_factory):
    """A bundle of made-up packages for the nodes' release."""
    mirror = make(tmp_path_factory.mktemp("mirror"), CODENAME, DEBS)
    out = box.directory / "made-up.osb"
    options = ["--mirror", mirror.uri, "--security-mirror", mirror.uri, "--keyring", mirror.keyring, "-o", out]
    names = [deb.name for deb in DEBS]
    cache = tmp_path_factory.mktemp("cache")
    packed = run(
        "pack-os", "--release", CODENAME, *options, *names, cwd=box.directory, env={"CLUSTERCTL_CACHE": str(cache)}
    )
    assert packed.returncode == 0, packed.stderr
    return out


@pytest.fixture
def services(box):
    """``services(ACTION, options)`` runs ``clusterctl services`` with these options of os_packages; undone at last."""

    def write(options):
        text = (box.directory / "inventory.yaml").read_text()
        (box.directory / "os.yaml").write_text(f"{text}services: {{os_packages: {{{options}}}}}\n")
        return ["-i", "os.yaml", "os_packages"]

    def services(action, options, *argv, **more):
        return run("services", action, *write(options), *argv, cwd=box.directory, **more)

    services.argv = lambda action, options: [CLUSTERCTL, "services", action, *write(options)]
    yield services
    result = run("services", "undo", "-i", "inventory.yaml", "os_packages", cwd=box.directory)
    assert result.returncode == 0, result.stderr


def sh(box, text, node="node01"):
    return on(box, node, "sh", "-c", text)


def installed(box, node="node01"):
    return sh(box, "dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\\n'", node)


def host(box):
    """The host's files that must not change: apt's sources, settings and lists, and the policy of starting daemons."""
    return sh(
        box,
        "find /etc/apt /var/lib/apt/lists /usr/sbin/policy-rc.d* -type f -exec sha256sum {} + 2>/dev/null | sort;"
        "ls -lR --full-time /etc/apt /var/lib/apt/lists | grep -v '^total'; ls /var/cache/apt /var/cache/apt/archives",
    )


@contextmanager
def there(box, tmp_path, deb, node="node01"):
    """A package that a user has installed on a node by hand."""
    data = base64.b64encode(build(deb, tmp_path).read_bytes()).decode()
    sh(box, f"echo {data} | base64 -d >/tmp/{deb.name}.deb; dpkg -i /tmp/{deb.name}.deb 2>&1 || :", node)
    try:
        yield
    finally:
        sh(box, f"dpkg --purge --force-all {deb.name}; rm -f /tmp/{deb.name}.deb", node)


def test_packages_of_the_real_mirror_are_installed_without_a_network_and_undone(box, services):
    packed = run("pack-os", "--release", CODENAME, "-o", "real.osb", *REAL, cwd=box.directory, timeout=280)
    assert packed.returncode == 0, packed.stderr
    assert sh(box, "cut -f2 /proc/net/route | grep -cx 00000000 || :").strip() == "0"  # no default route
    before, untouched = installed(box), host(box)

    would = services("apply", "bundle: real.osb", "--dry-run")
    assert "os_packages  node[01-02]: would change: packages" in would.stdout, would.stderr
    assert (installed(box), host(box)) == (before, untouched)
    assert sh(box, "ls /var/lib/clusterctl 2>/dev/null || :") == ""

    first = services("apply", "bundle: real.osb")
    assert "os_packages  node[01-02]: set up (packages)" in first.stdout, first.stderr
    for name in REAL:
        assert sh(box, f"dpkg-query -W -f '${{db:Status-Status}}' {name}", "node02") == "installed"
    assert "usage" in sh(box, "tree --help 2>&1")
    assert sh(box, "ps ax | grep -c '[r]pcbind' || :").strip() == "0"  # it is not configured yet
    assert host(box) == untouched
    assert sh(box, "find /var/lib/clusterctl -size +100k") == ""  # the bundle does not stay

    second = services("apply", "bundle: real.osb")
    assert "os_packages  node[01-02]: unchanged" in second.stdout
    verified = services("verify", "bundle: real.osb")
    assert "os_packages  node[01-02]: works" in verified.stdout

    sh(box, "dpkg --purge tree")
    lacking = services("verify", "bundle: real.osb")
    assert (lacking.returncode, "not installed: tree" in lacking.stdout) == (5, True), lacking.stdout
    undone = services("undo", "bundle: real.osb")
    assert undone.returncode == 0, undone.stderr
    assert installed(box, "node02") == before
    assert installed(box) == before
    assert host(box) == untouched
    assert sh(box, "ls /tmp/hooked 2>/dev/null || :") == ""


def test_removal_must_be_allowed_and_undo_reinstalls_the_removed_packages(box, made_up, services, tmp_path):
    with there(box, tmp_path, OLD_CLOCK):
        sh(box, "echo edited >/etc/cc-old-clock.conf")
        before = installed(box)
        refused = services("apply", "bundle: made-up.osb, packages: [cc-clock]")
        assert refused.returncode == 5, refused.stdout
        assert "node01: installing cc-clock would remove cc-old-clock" in refused.stderr
        assert "replace: [cc-old-clock]" in refused.stderr
        assert installed(box) == before
        assert "cc-clock 1 installed" in installed(box, "node02")

        allowed = services("apply", "bundle: made-up.osb, packages: [cc-clock], replace: [cc-old-clock]")
        assert "node01: cc-old-clock will be removed" in allowed.stderr
        assert "node01: set up (packages)" in allowed.stdout, allowed.stderr
        assert "cc-clock 1 installed" in installed(box)
        undone = services("undo", "bundle: made-up.osb")
        assert undone.returncode == 0, undone.stderr
        assert installed(box) == before
        assert sh(box, "cat /etc/cc-old-clock.conf; cat /usr/share/doc/cc-old-clock/README") == "edited\n1"


def test_downgrade_and_newer_node_are_refused(box, made_up, services, tmp_path):
    wanted = "bundle: made-up.osb, packages: [cc-tool]"
    with there(box, tmp_path, Deb("cc-base", "3")):
        ahead = services("apply", wanted)
        assert "node01: apt cannot install cc-tool" in ahead.stderr, ahead.stdout
        assert "cc-base (= 2) but 3 is to be installed" in ahead.stderr
        sh(box, "printf 'Package: *\\nPin: release o=clusterctl\\nPin-Priority: 1001\\n' >/etc/apt/preferences.d/pin")
        pinned = services("apply", wanted)
        assert "node01: installing cc-tool would downgrade cc-base" in pinned.stderr, pinned.stdout
        sh(box, "rm /etc/apt/preferences.d/pin")
        assert "cc-base 3 installed" in installed(box)
    assert "cc-tool 1 installed" in installed(box, "node02")


def test_undo_is_refused_where_apt_would_also_remove_another_package(box, made_up, services, tmp_path):
    assert services("apply", "bundle: made-up.osb, packages: [cc-plain]").returncode == 0
    with there(box, tmp_path, Deb("cc-theirs", fields={"Depends": "cc-plain"})):
        kept = services("undo", "bundle: made-up.osb")
        assert kept.returncode == 5
        assert "nothing was removed: apt would also remove cc-theirs" in kept.stderr
        assert "cc-plain 1 installed" in installed(box)
        assert "cc-plain" not in installed(box, "node02")


def test_the_node_finishes_an_interrupted_apply_and_the_next_apply_waits(box, made_up, services):
    try:
        _interrupted_and_waited_for(box, services, "bundle: made-up.osb, packages: [cc-slow]")
    finally:
        for node in ("node01", "node02"):
            sh(box, "touch /tmp/go-on", node)


def _interrupted_and_waited_for(box, services, wanted):
    argv, piped = services.argv("apply", wanted), {"cwd": box.directory, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, **piped) as first:
        until(box, "pgrep -f [c]c-slow.postinst")
        first.send_signal(signal.SIGINT)
        _out, err = first.communicate(timeout=60)
    assert (first.returncode, "Traceback" in err) == (130, False), err
    assert sh(box, "pgrep -f [c]c-slow.postinst || :") != ""  # dpkg is not left half-way

    with subprocess.Popen(argv, stderr=subprocess.STDOUT, **piped) as second:
        message = ""
        for line in second.stdout:
            message += line
            if "Preparing nodes" in line:  # it waits, or is about to
                for node in ("node01", "node02"):
                    sh(box, "touch /tmp/go-on", node)
    assert second.returncode == 0, message
    assert "node01: apt-get (process " in message
    assert "is using dpkg; installing waits up to 120 s for it" in message
    assert "cc-slow 1 installed" in installed(box)
    assert sh(box, "ls /usr/sbin/policy-rc.d* 2>/dev/null || :") == ""


def test_a_half_configured_dpkg_is_reported_with_the_command_that_fixes_it(box, made_up, services, tmp_path):
    wanted = "bundle: made-up.osb, packages: [cc-plain]"
    with there(box, tmp_path, BROKEN):
        refused = services("apply", wanted)
        assert (
            "node01: dpkg was interrupted: cc-broken half installed; run there: dpkg --configure -a" in refused.stderr
        )
        sh(box, "touch /tmp/mended; dpkg --configure -a")
        assert services("apply", wanted).returncode == 0
        assert "cc-plain 1 installed" in installed(box)


def test_a_damaged_bundle_is_refused_before_any_node_is_asked(box, made_up, services):
    damaged = box.directory / "damaged.osb"
    data = made_up.read_bytes()
    damaged.write_bytes(data[: len(data) // 2])
    refused = services("apply", "bundle: damaged.osb")
    assert (refused.returncode, "damaged.osb is truncated" in refused.stderr) == (3, True), refused.stderr
    assert "Comparing packages" not in refused.stderr
    damaged.unlink()


def test_a_node_of_another_release_lists_the_available_bundles(box, made_up, services):
    sh(box, "cp -p /etc/os-release /tmp/was; printf 'ID=rocky\\nVERSION_ID=9.4\\n' >/etc/os-release.new")
    sh(box, "rm /etc/os-release; mv /etc/os-release.new /etc/os-release")
    try:
        refused = services("apply", "bundle: made-up.osb, packages: [cc-plain]")
        assert (
            f"node01: there is no bundle for rocky9.4-amd64, only for {releases.find(CODENAME).name}-amd64"
            in refused.stderr
        )
    finally:
        sh(box, "rm /etc/os-release; ln -s ../usr/lib/os-release /etc/os-release")


def until(box, test, node="node01"):
    """Wait until a command on a node succeeds."""
    deadline = time.monotonic() + 120
    while sh(box, f"{test} || :", node) == "":
        assert time.monotonic() < deadline, test
