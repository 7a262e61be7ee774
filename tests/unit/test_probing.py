"""All probes of a node as one script, under every sh that a node may have; and the sh of every check."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from provision import checks
from provision.checks import Plan
from provision.checks.kit.probing import LONGEST, Probe, Script, compile_probes, parse, probe_of
from provision.errors import ClusterctlError
from provision.model import Inventory, Node
from provision.render import quote

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
TOKEN = f"Tok3n{os.getpid()}"  # other runs of these tests have their own
PLACES = "/dev/shm /tmp /var/tmp"


@pytest.fixture(params=SHELLS, ids=list(SHELLS))
def shell(request):
    argv = SHELLS[request.param]
    if not shutil.which(argv[0]):
        pytest.skip(f"{argv[0]} is not installed")
    return argv


def ask(shell, *probes, limit=60, env=None, change=lambda text: text):
    """The answers by check; every file that the script wrote is deleted again."""
    script = compile_probes(probes, token=TOKEN, limit=limit)
    done = subprocess.run(
        [*shell, "-c", change(script.text).replace("while sleep 1;", "while sleep 0.2;")],  # its seconds are short
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
    )
    out = done.stdout.decode("utf-8", "surrogateescape")
    assert out.endswith(f"@clusterctl:{TOKEN}:end:::\n")
    assert left() == []
    return parse(script, out)


def left():
    """The files of a script, while they exist."""
    return [path for place in PLACES.split() for path in Path(place).glob(f".clusterctl-{TOKEN}*")]


def test_outputs_and_exit_codes_are_kept_apart(shell):
    found = ask(
        shell,
        Probe("os.a", "echo one; echo two", 60),
        Probe("os.b", "printf 'no end of line'; echo bad >&2; exit 3", 60),
        Probe("net.c", "read -r line || echo no input; pwd; echo $LC_ALL", 60),
        Probe("net.d", ":", 60),
        Probe("mem.e", "printf 'a\\n@clusterctl:Tok3:state:0:7:\\n\\n'; printf '\\377'", 60),
    )
    assert found["os.a"].lines == ("one", "two")
    assert found["os.a"].rc == 0
    assert (found["os.b"].out, found["os.b"].rc, found["os.b"].err) == ("no end of line", 3, "bad")
    assert found["net.c"].out == "no input\n/\nC\n"
    assert (found["net.d"].out, found["net.d"].rc) == ("", 0)
    assert found["mem.e"].out == "a\n@clusterctl:Tok3:state:0:7:\n\n\N{REPLACEMENT CHARACTER}"
    assert {answer.root for answer in found.values()} == {os.geteuid() == 0}
    assert {answer.state for answer in found.values()} == {"answered"}


def test_a_broken_probe_breaks_nothing_else(shell):
    found = ask(
        shell,
        Probe("os.a", "if then", 60),
        Probe("os.b", "set -eu; cd /proc; cc_dir=/nowhere; cc_stuck=yes; PATH=; exit 9", 60),
        Probe("os.c", 'pwd; echo it\\\'s "$(echo fine)"', 60),
    )
    assert found["os.a"].rc != 0
    assert found["os.b"].rc == 9
    assert found["os.c"].out == "/\nit's fine\n"


def test_equal_probes_run_once(shell, tmp_path):
    text = f"echo x >>{quote(tmp_path / 'runs')}; echo seen"
    found = ask(shell, Probe("os.a", text, 60), Probe("net.b", text, 20), Probe("os.c", f"{text} # other", 60))
    assert [found[check].out for check in ("os.a", "net.b", "os.c")] == ["seen\n"] * 3
    assert (tmp_path / "runs").read_text() == "x\nx\n"


def test_probe_without_its_tool_does_not_start(shell, tmp_path):
    ran = f"touch {quote(tmp_path / 'ran')}"
    found = ask(shell, Probe("os.a", ran, 60, "no-such-tool"), Probe("gpu.b", ran, 60, "no-such-tool-either"))
    assert found["os.a"].state == "missing"
    assert found["gpu.b"].state in {"absent", "missing"}  # where the tests' machine has a GPU
    assert not (tmp_path / "ran").exists()


def test_hanging_tool_delays_one_deadline_and_affects_only_its_checks(shell, tmp_path):
    hang = f"echo begun; echo $$ >>{quote(tmp_path / 'begun')}; sleep 600 & sleep 600"
    found = ask(
        shell,
        Probe("gpu.a", hang, 1, "sleep"),
        Probe("gpu.b", f"{hang} # again", 1, "sleep"),
        Probe("os.a", f"{hang} # alone", 1),
        Probe("os.b", "echo still here", 60),
        Probe("net.c", "echo beside", 60, "cat"),
    )
    assert {check: answer.state for check, answer in found.items()} == {
        "gpu.a": "hung",
        "gpu.b": "hung",
        "os.a": "hung",
        "os.b": "answered",
        "net.c": "answered",
    }
    assert found["gpu.a"].out == "begun\n"  # its output is kept
    assert (tmp_path / "begun").read_text().count("\n") == 2  # gpu.a and os.a


def test_unkillable_probe_is_abandoned(shell, tmp_path):
    """A process in uninterruptible sleep (a dead NFS server) survives SIGKILL; here none is sent."""
    pid = tmp_path / "pid"
    found = ask(
        shell,
        Probe("fs.a", f"sh -c 'echo $$ >{pid}; exec sleep 600 >/dev/null 2>&1'", 1),
        Probe("fs.b", "echo next", 60),
        change=lambda text: text.replace("kill -KILL $cc_family", "true"),
    )
    os.kill(int(pid.read_text()), 9)
    assert found["fs.a"].state == "hung"
    assert found["fs.b"].out == "next\n"


def test_a_script_that_is_stopped_leaves_nothing(shell, tmp_path):
    """As the controller stops it, when it is interrupted itself: the process group gets SIGTERM."""
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    probes = [Probe("os.a", f"echo >{quote(begun)}; sleep 600", 500), Probe("net.b", "sleep 600", 500)]
    script = compile_probes(probes, token=TOKEN, limit=500)
    with subprocess.Popen([*shell, "-c", script.text], stdout=subprocess.PIPE, start_new_session=True) as running:
        begun.read_text()
        assert left()
        os.killpg(running.pid, signal.SIGTERM)
        running.communicate(timeout=60)
    assert left() == []


def test_script_reports_its_results_at_the_limit(shell):
    found = ask(shell, Probe("os.a", "echo a", 60), Probe("os.b", "sleep 600", 500), Probe("os.c", ":", 5), limit=5)
    assert [found[check].state for check in ("os.a", "os.b", "os.c")] == ["answered", "hung", "hung"]


def test_without_a_writable_folder_probes_run_one_after_the_other(shell):
    found = ask(
        shell,
        Probe("os.a", "echo a; exit 4", 60),
        Probe("net.b", "sleep 600", 1, "sleep"),
        Probe("net.c", "sleep 601", 1, "sleep"),
        Probe("fs.d", "echo it\\'s d", 60),
        Probe("fs.e", ":", 60, "no-such-tool"),
        env={"HOME": "/proc"},
        change=lambda text: text.replace(PLACES, "/proc /nowhere"),
    )
    assert {check: answer.state for check, answer in found.items()} == {
        "os.a": "answered",
        "net.b": "hung",
        "net.c": "hung",
        "fs.d": "answered",
        "fs.e": "missing",
    }
    assert (found["os.a"].out, found["os.a"].rc, found["fs.d"].out) == ("a\n", 4, "it's d\n")


def test_much_output_is_cut(shell):
    found = ask(shell, Probe("os.a", "while :; do echo 0123456789abcdef; done", 60), Probe("os.b", "echo b", 60))
    assert 60_000 < len(found["os.a"].out) <= LONGEST
    assert found["os.a"].rc != 0
    assert found["os.b"].out == "b\n"


def test_frames_of_two_writers_may_mix():
    script = compile_probes([Probe("os.a", ":", 10), Probe("net.b", "exit", 10)], token=TOKEN, limit=9)
    found = parse(script, f"\n\n@clusterctl:{TOKEN}:state:0:0:\n@clusterctl:{TOKEN}:state:1:missing:\n")
    assert [found[check].state for check in ("os.a", "net.b")] == ["answered", "missing"]


def test_truncated_output_is_no_answer():
    script = compile_probes([Probe("os.a", ":", 60), Probe("os.b", ":", 60)], token=TOKEN, limit=9)
    found = parse(script, f"@clusterctl:{TOKEN}:out:0::\nhalf an ans")
    assert {answer.state for answer in found.values()} == {"hung"}
    assert parse(Script("", TOKEN, {}), "") == {}


def test_a_token_is_letters_and_digits():
    with pytest.raises(ClusterctlError):
        compile_probes([], token="a:b", limit=1)


# --- the sh of every check -----------------------------------------------------------------------

NODES = tuple(Node(f"node{number:02}", f"192.168.20.{number}") for number in range(1, 4))
PLAN = Plan(Inventory(Path("inventory.yaml"), PurePosixPath("/opt/it's/current"), NODES), NODES)


def all_probes():
    probed = [each for each in checks.ids() if not checks.load(each).measure]
    plans = {each: replace(PLAN, limits=checks.load(each).limits) for each in probed}
    return [probe_of(each, plans[each], NODES[0]) for each in probed if not checks.load(each).bundle]


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck comes with the dev packages")
def test_every_probe_passes_shellcheck(tmp_path):
    for text, check in {probe.text: probe.check for probe in all_probes()}.items():
        (tmp_path / check).write_text(f"{text}\n", encoding="utf-8")
    script = compile_probes([Probe("os.a", ":", 60), Probe("gpu.a", ":", 60, "nvidia-smi")], token=TOKEN, limit=9)
    (tmp_path / "script").write_text(script.text, encoding="utf-8")
    done = subprocess.run(
        [SHELLCHECK, "--shell=sh", "--format=gcc", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.replace(f"{tmp_path}/", "") == ""


def test_every_probe_prints_something_on_this_machine():
    """The real probes, whatever this machine is like: each ends in time with an answer, and no judge is at a loss."""
    probes = all_probes()
    script = compile_probes(probes, token=TOKEN, limit=120)
    done = subprocess.run(["sh", "-c", script.text], capture_output=True, check=False, timeout=200)
    found = parse(script, done.stdout.decode("utf-8", "surrogateescape"))
    answered = {check: answer for check, answer in found.items() if answer.state == "answered"}
    assert len(answered) > 40
    for check, answer in found.items():
        plan = replace(PLAN, nodes=NODES[:1], limits=checks.load(check).limits)
        (finding,) = checks.judged(check, plan, {NODES[0].name: answer})
        assert finding.observed
        assert answer.out or finding.verdict != "OK" or answer.state == "absent", check
