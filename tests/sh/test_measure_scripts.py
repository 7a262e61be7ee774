"""The scripts of ``tasks/measures``, run for real under three shells, with different installed programs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from provision.checks import Answer
from provision.checks.kit.measures import heard, outcome, steps
from provision.render import render, words

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
BASE = ("cat", "grep", "od", "printf", "rm", "sh", "sleep", "timeout")
TOKEN = "0123abcd"


@pytest.fixture(params=SHELLS)
def shell(request):
    return SHELLS[request.param]


@pytest.fixture
def path(tmp_path):
    """Makes a PATH that holds what every node has, and some programs more."""

    def make(*programs):
        folder = tmp_path / "-".join(["bin", *programs])
        if folder.exists():
            return str(folder)
        folder.mkdir()
        for name in (*BASE, *programs):
            place = sys.executable if name == "python3" else shutil.which(name)
            assert place, f"{name} is missing here: scripts/setup"
            (folder / name).symlink_to(place)
        return str(folder)

    return make


def ports(mode, *arguments):
    return render(
        "measures/ports.sh.j2",
        mode=mode,
        token=TOKEN,
        words=words(arguments),
        life=60,
        perl=render("measures/ports.pl"),
        program=render("measures/ports.py"),
        python="/nonexistent/bin/python",
    )


class Listener:
    """clusterctl's listener on this machine: two random ports, until its input ends."""

    def __init__(self, shell, place):
        script = ports("listen", "it's", "127.0.0.1", 60, 0, 0)
        which = shutil.which(shell[0])
        self.process = subprocess.Popen(
            [which, *shell[1:], "-c", script],
            env={"PATH": place},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        for line in self.process.stdout:
            if line == "ready\n":
                break
            self.lines.append(line.strip())

    @property
    def numbers(self):
        message = [line.split() for line in self.lines if line.startswith("listen ")]
        assert [each[3] for each in message] == ["open", "open"], self.lines
        return [int(each[2]) for each in message]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.read()  # until every process that holds it has exited
        self.process.wait(30)
        self.process.stdout.close()
        self.process.stderr.close()


def connect(shell, place, *targets):
    script = ports("connect", 4, *(word for target in targets for word in target))
    done = run(shell, script, PATH=place)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0], heard(Answer(done.stdout)).tried


def run(shell, script, **environment):
    which = shutil.which(shell[0])
    argv = [which, *shell[1:], "-c", script]
    env = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("listener", ["perl", "python3", "busybox"])
def test_every_listener_understands_every_client(path, listener):
    with Listener(["dash"], path(listener)) as ear:
        for client in ("perl", "python3", "bash", "busybox"):
            targets = [("it's", "random", "127.0.0.1", port) for port in ear.numbers]
            tool, tried = connect(["dash"], path(client), *targets)
            assert tool == f"tool {client if client in {'perl', 'python3'} else 'sh'}"
            assert sorted(one.port for one in tried) == sorted(ear.numbers)
            for one in tried:
                assert one.state == "open", one
                assert one.seen in {"127.0.0.1", "-"}
                assert one.seen == "127.0.0.1" or listener == "busybox"
                assert one.source == ("127.0.0.1" if tool != "tool sh" else "-")
    for client in ("perl", "python3", "bash", "busybox"):  # the listener has exited at the end of its input
        _, tried = connect(["dash"], path(client), ("it's", "random", "127.0.0.1", ear.numbers[0]))
        assert [one.state for one in tried] == ["refused"]


@pytest.mark.parametrize("client", ["perl", "python3", "bash", "busybox"])
def test_a_foreign_listener_is_not_mistaken_for_clusterctls(path, client):
    with Listener(["dash"], path("perl")) as ear:
        _, tried = connect(["dash"], path(client), ("another", "master", "127.0.0.1", ear.numbers[0]))
    assert [(one.kind, one.state) for one in tried] == [("master", "foreign")]


@pytest.mark.parametrize("client", ["perl", "python3", "bash"])
def test_a_name_without_an_address(path, client):
    _, (one,) = connect(["dash"], path(client), ("node02", "random", "nowhere.invalid", 1))
    assert one.state == "unreachable"
    assert one.text


def test_listening_without_perl_and_python_in_every_shell(shell, path):
    with Listener(shell, path("busybox")) as ear:
        assert ear.lines[0] == "tool sh"
        _, tried = connect(shell, path("bash"), ("it's", "random", "127.0.0.1", ear.numbers[0]))
        assert [one.state for one in tried] == ["open"]


def test_node_without_perl_python_and_nc_reports_it(shell, path):
    place = path()
    for mode, arguments in (("listen", ("node01", "127.0.0.1", 60, 0)), ("connect", (4, "node02", "random", "::1", 1))):
        done = run(shell, ports(mode, *arguments), PATH=place)
        assert heard(Answer(done.stdout)).problem.startswith("neither perl, python3"), done


@pytest.mark.parametrize("tool", ["perl", "python3", "busybox"])
def test_port_in_use(path, tool):
    with Listener(["dash"], path("perl")) as ear:
        (port, _) = ear.numbers
        done = run(["dash"], ports("listen", "node01", "127.0.0.1", 60, port), PATH=path(tool))
        assert heard(Answer(done.stdout)).master == "busy", done
        done = run(["dash"], render("measures/owner.sh.j2", port=port))
        assert heard(Answer(done.stdout)).owner == f"perl (process {ear.process.pid})", done


def shares(folder, role, node="it's", *, written=True, limit=5):
    share = {"number": 0, "path": str(folder), "file": f"{folder}/.fresh-{TOKEN}", "written": written}
    return render("measures/shares.sh.j2", shares=[share], role=role, node=node, limit=limit)


def test_written_file_is_read_and_removed(shell, tmp_path):
    folder = tmp_path / "a $(touch owned) ünïx"
    folder.mkdir()
    first = steps(run(shell, shares(folder, "server", "node01")).stdout)
    assert outcome(first["write", 0], "") == "fine"
    other = steps(run(shell, shares(folder, "client")).stdout)
    assert outcome(other["read", 0], "from node01") == "fine"
    assert outcome(other["read", 0], "from node09") == "absent"
    assert outcome(other["write", 0], "") == "fine"
    end = steps(run(shell, shares(folder, "end", "node01")).stdout)
    assert end["back", 0][1] == "from it's\n"
    assert list(folder.iterdir()) == []
    assert steps(run(shell, shares(folder, "tidy")).stdout)["away", 0][0] == 0


def test_missing_folder(shell, tmp_path):
    message = steps(run(shell, shares(tmp_path / "nowhere", "client")).stdout)
    assert outcome(message["read", 0], "from node01") == "absent"
    assert outcome(message["write", 0], "") == "absent"


def test_hanging_share_is_given_up_after_its_limit(shell, tmp_path):
    os.mkfifo(tmp_path / f".fresh-{TOKEN}")  # opening it for reading blocks until a process writes
    done = run(shell, shares(tmp_path, "client", limit=1))
    assert outcome(steps(done.stdout)["read", 0], "x") == "hung"
    assert ("write", 0) not in steps(done.stdout)  # one that hangs is touched once


def test_mount_is_reported_without_accessing_it(shell, tmp_path):
    message = run(shell, shares("/proc/sys/net", "server", limit=1)).stdout.splitlines()[0]
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    above = [mount for mount in mounts if "/proc/sys/net".startswith(mount[1])]
    deepest = max(above, key=lambda mount: len(mount[1]))
    assert message == f"mounted 0 {deepest[2]} {deepest[0]}"


def test_shellcheck(tmp_path):
    scripts = {"listen": ports("listen", "a", "b", 1, 0), "owner": render("measures/owner.sh.j2", port=29500)}
    scripts |= {role: shares("/data", role) for role in ("server", "client", "end", "tidy")}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    unused = "-e", "SC2329,SC2317,SC2034"  # functions that another role calls
    argv = [SHELLCHECK, "-s", "sh", *unused, *(tmp_path / name for name in scripts)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
