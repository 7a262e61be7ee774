"""The scripts of the packed tool under three shells: a file that unpacks and starts itself."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from provision.model import ignore
from provision.render import render
from provision.tool import pack
from provision.tool.contents import Item

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")

# Replaces the real command: prints how it was called, and fails on request.
COMMAND = """#!/bin/sh
[ -z "${REFUSE-}" ] || { echo "error: $REFUSE" >&2; exit 2; }
[ -z "${HANG-}" ] || { : >"$HANG"; exec sleep 60; }
printf '%s\\n' "umask $(umask)" "$@"
"""


@pytest.fixture(params=SHELLS)
def shell(request):
    if shutil.which(SHELLS[request.param][0]) is None:
        pytest.fail(f"{request.param} is missing: apt-get install dash bash busybox")
    return SHELLS[request.param]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A tool whose command is a script of four lines, and 100 kB that do not shrink."""
    file = tmp_path_factory.mktemp("usb stick") / "clusterctl.run"
    items = {
        "clusterctl": Item(COMMAND.encode(), executable=True),
        "lib/it's one.txt": Item(b"one\n"),
        "lib/noise": Item(random.Random(1).randbytes(100_000)),
        "python": Item(b"#!/bin/sh\n", executable=True),
    }
    pack.write(file, items, emit=ignore)
    return file


@pytest.fixture
def home(tmp_path):
    """A home folder with a name that tempts every shell."""
    home = tmp_path / 'it\'s $(touch owned) "x"'
    home.mkdir()
    return home


def run(shell, file, *argv, home=None, cwd=None, **env):
    environment = {"PATH": os.environ["PATH"], **({"HOME": str(home)} if home else {}), **env}
    return subprocess.run(
        [*shell, str(file), *argv], check=False, capture_output=True, text=True, env=environment, cwd=cwd, timeout=60
    )


def cache(home):
    """The names in the cache, hidden ones too."""
    return sorted(path.name for path in (home / ".cache/clusterctl").iterdir())


def test_the_first_run_unpacks_and_the_second_starts_at_once(shell, packed, home):
    first = run(shell, packed, "deploy", "a b", "$(id)", "", home=home)
    assert (first.returncode, first.stderr.count("this once")) == (0, 1), first.stderr
    mask = os.umask(0o022)
    os.umask(mask)
    assert first.stdout.splitlines() == [f"umask {mask:04o}", "deploy", "a b", "$(id)", ""]
    (tool,) = cache(home)
    assert tool.startswith("tool-")
    folder = home / ".cache/clusterctl" / tool
    assert (folder / "lib/it's one.txt").read_text() == "one\n"
    assert folder.stat().st_mode & 0o777 == 0o700
    again = run(shell, packed, "deploy", home=home)
    assert (again.returncode, again.stderr) == (0, "")
    assert not (home.parent / "owned").exists()


@pytest.mark.parametrize("how", ["by its name", "by PATH", "as a program", "through a link"])
def test_tool_finds_itself_by_every_way_to_start_it(shell, packed, home, how):
    if how == "by its name":
        done = run(shell, packed.name, home=home, cwd=packed.parent)
    elif how == "by PATH":
        done = run([], packed.name, home=home, PATH=f"{packed.parent}:{os.environ['PATH']}")
    elif how == "as a program":
        done = run([], packed, home=home)
    else:
        (home / "link").symlink_to(packed)
        done = run(shell, home / "link", home=home)
    assert done.returncode == 0, done.stderr
    assert len(cache(home)) == 1


def test_cache_of_the_user_is_used_if_its_path_is_absolute(shell, packed, home, tmp_path):
    assert run(shell, packed, home=home, XDG_CACHE_HOME=str(tmp_path / "c c")).returncode == 0
    assert [path.name[:5] for path in (tmp_path / "c c/clusterctl").iterdir()] == ["tool-"]
    assert run(shell, packed, home=home, XDG_CACHE_HOME="relative", cwd=tmp_path).returncode == 0
    assert len(cache(home)) == 1


def test_tool_unpacks_into_the_given_folder(shell, packed, home, tmp_path):
    to = tmp_path / "for all/clusterctl"
    done = run(shell, packed, "--unpack", to, home=home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{to}/clusterctl is ready\n"
    assert sorted(path.name for path in to.iterdir() if path.name != ".complete") == ["clusterctl", "lib", "python"]
    assert (to / "lib").stat().st_mode & 0o777 == 0o755
    assert run([], to / "clusterctl", "x").stdout.splitlines()[1:] == ["x"]
    assert not (home / ".cache").exists()
    again = run(shell, packed, "--unpack", to, home=home)
    assert (again.returncode, again.stderr.splitlines()[0]) == (2, f"error: {to} is not empty")
    assert run(shell, packed, "--unpack", home=home).returncode == 2


def test_relative_folder_is_below_the_working_folder(shell, packed, home, tmp_path):
    (tmp_path / "elsewhere/tools").mkdir(parents=True)
    done = run(shell, packed, "--unpack", "tools", home=home, cwd=tmp_path, CDPATH=str(tmp_path / "elsewhere"))
    assert done.stdout == f"{tmp_path}/tools/clusterctl is ready\n", done.stderr
    assert (tmp_path / "tools/clusterctl").exists()


def test_a_truncated_file_is_refused(shell, packed, home, tmp_path):
    data = packed.read_bytes()
    bad = tmp_path / "bad.run"
    for size in (len(data) - 1, len(data) - 512, 10_000):
        bad.write_bytes(data[:size])
        done = run(shell, bad, home=home)
        assert done.returncode == 3, done.stderr
        assert "cut off or damaged" in done.stderr
        assert "copy it again" in done.stderr
        assert cache(home) == []


def test_a_file_cut_off_inside_its_script_does_nothing(packed, home, tmp_path):
    data = packed.read_bytes()
    bad = tmp_path / "bad.run"
    for size in range(data.index(b"fail()"), data.index(b"\nmain "), 150):
        bad.write_bytes(data[:size])
        run(["dash"], bad, home=home, cwd=tmp_path)
        assert list(home.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.run", home.name]


def test_one_wrong_bit_anywhere_is_refused(packed, home, tmp_path):
    data = packed.read_bytes()
    bad = tmp_path / "bad.run"
    begin = data.index(b"sum=")
    script = data.index(b"\nexit 2\n") + 8
    for at in (*range(begin, script, 97), *range(script, len(data), (len(data) - script) // 20)):
        bad.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        done = run(["dash"], bad, home=home, cwd=tmp_path)
        assert done.returncode != 0, (at, data[at : at + 10])
        assert list(home.glob(".cache/clusterctl/*")) == [], (at, data[at : at + 10])


def test_concurrent_first_runs_unpack_one_tool(shell, packed, home):
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    started = [
        subprocess.Popen([*shell, packed, "x"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(8)
    ]
    ends = [(process.communicate(timeout=60), process.returncode) for process in started]
    assert [code for _, code in ends] == [0] * 8, ends
    assert all(out.splitlines()[1:] == [b"x"] for (out, _), _ in ends)
    assert len(cache(home)) == 1


def test_tool_that_does_not_start_leaves_nothing(shell, packed, home):
    done = run(shell, packed, home=home, REFUSE="this clusterctl needs glibc 2.99")
    assert done.returncode == 2
    assert "needs glibc 2.99" in done.stderr
    assert cache(home) == []


def test_an_interrupted_first_run_leaves_nothing(shell, packed, home, tmp_path):
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "HANG": str(tmp_path / "begun")}
    process = subprocess.Popen([*shell, packed], env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, 15)
    assert process.wait(30) != 0
    assert cache(home) == []


def test_leftovers_of_a_killed_run_are_removed_after_a_day(shell, packed, home):
    folder = home / ".cache/clusterctl"
    for name, age in (("old", 3 * 86400), ("young", 60)):
        (folder / f".new-{name}/tool").mkdir(parents=True)
        os.utime(folder / f".new-{name}", times=(time.time() - age,) * 2)
    assert run(shell, packed, home=home).returncode == 0
    assert [name[:10] for name in cache(home)] == [".new-young", cache(home)[1][:10]]


def test_a_tool_that_another_user_could_change_is_not_started(shell, packed, home):
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    assert run(shell, packed, home=home).returncode == 0
    os.chown(home / ".cache/clusterctl" / cache(home)[0], 12345, -1)
    done = run(shell, packed, home=home)
    assert done.returncode == 2
    assert "belongs to another user" in done.stderr
    assert "--unpack" in done.stderr


def test_partly_removed_tool_is_named(shell, packed, home):
    assert run(shell, packed, home=home).returncode == 0
    tool = home / ".cache/clusterctl" / cache(home)[0]
    (tool / ".complete").unlink()
    done = run(shell, packed, home=home)
    assert done.returncode == 2
    assert f"rm -r '{tool}'" in done.stderr


def test_a_missing_home_and_an_unwritable_folder_are_reported(shell, packed, tmp_path):
    done = run(shell, packed)
    assert (done.returncode, "HOME is not set" in done.stderr) == (2, True)
    (tmp_path / "file").touch()
    done = run(shell, packed, home=tmp_path / "file")
    assert (done.returncode, "--unpack FOLDER" in done.stderr) == (2, True)


@pytest.mark.parametrize(("without", "says"), [("gzip", "gzip"), ("sha256sum", "sha256sum"), ("tar", "tar")])
def test_a_program_that_is_missing_is_named(packed, home, tmp_path, without, says):
    # A PATH with little more than what is asked for.
    some = tmp_path / "bin"
    some.mkdir()
    for name in ("sh", "tar", "tail", "sha256sum", "mktemp", "gzip", "mkdir", "rm", "mv", "uname"):
        if name != without:
            (some / name).symlink_to(shutil.which(name))
    done = run([shutil.which("dash")], packed, home=home, PATH=str(some))
    assert done.returncode == 2
    assert f"{says} is not on this machine" in done.stderr


def test_busybox_alone_is_enough(packed, home, tmp_path):
    some = tmp_path / "bin"
    some.mkdir()
    box = shutil.which("busybox")
    for name in subprocess.run([box, "--list"], check=True, capture_output=True, text=True).stdout.split():
        (some / name).symlink_to(box)
    done = run([some / "sh"], packed, "x", home=home, PATH=str(some))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["x"]
    assert len(cache(home)) == 1


# --- the scripts inside the tool -----------------------------------------------------------------------


MACHINE = os.uname().machine


@pytest.fixture
def tool(tmp_path):
    """The scripts of a tool, and a Python that prints how it was started."""
    home = tmp_path / 'it\'s "x" & `y`'
    start = {"machine": MACHINE, "minor": 17, "loader": "/no/loader", "program": "bin/python3.11"}
    python = {"program": "bin/python3.11", "libraries": "lib/clusterctl"}
    show = 'printf "%s\\n" "$LD_LIBRARY_PATH" "${CLUSTERCTL_LD_LIBRARY_PATH-none}" "$@"'
    write(home / "tool/clusterctl", render("tool/clusterctl.sh.j2", **start))
    write(home / "tool/python", render("tool/python.sh.j2", **python))
    write(home / "tool/bin/python3.11", f"#!/bin/sh\n{show}\n")
    return home / "tool"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_command_starts_python_with_its_libraries(shell, tool):
    main = ["-I", "-c", "from provision.cli import main; main()"]
    done = run(shell, tool / "clusterctl", "a b", "")
    assert done.stdout.splitlines() == [f"{tool}/lib/clusterctl", "none", *main, "a b", ""], done.stderr
    done = run(shell, "./clusterctl", cwd=tool, LD_LIBRARY_PATH="/theirs")
    assert done.stdout.splitlines() == [f"{tool}/./lib/clusterctl", "/theirs", *main], done.stderr
    (tool.parent / "link").symlink_to("tool/clusterctl")
    done = run(shell, tool.parent / "link", LD_LIBRARY_PATH="")
    assert done.stdout.splitlines() == [f"{tool}/lib/clusterctl", "", *main], done.stderr


@pytest.mark.parametrize(
    ("getconf", "ldd", "says"),
    [
        ("echo glibc 2.12", "", "needs glibc 2.17, and this machine has 2.12"),
        ("exit 1", "echo 'ldd (GNU libc) 2.5'; echo Copyright", "needs glibc 2.17, and this machine has 2.5"),
        ("exit 1", "echo 'musl libc (x86_64)' >&2; exit 1", "this machine has no /no/loader"),
        ("echo glibc 2.17", "", ""),
        ("echo glibc 2.100", "", ""),
        ("exit 1", "echo 'ldd (Debian GLIBC 2.36-9+deb12u10) 2.36'", ""),
    ],
)
def test_an_older_glibc_is_refused(shell, tool, tmp_path, getconf, ldd, says):
    write(tmp_path / "bin/getconf", f"#!/bin/sh\n{getconf}\n")
    write(tmp_path / "bin/ldd", f"#!/bin/sh\n{ldd}\n")
    done = run(shell, tool / "clusterctl", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert done.returncode == (2 if says else 0), done.stderr
    assert says in done.stderr
    assert not says or "try: run" in done.stderr


def test_another_kind_of_machine_is_refused(shell, tool):
    write(tool / "clusterctl", (tool / "clusterctl").read_text().replace(f"machine={MACHINE}", "machine=sparc64"))
    done = run(shell, tool / "clusterctl")
    assert (done.returncode, f"is for sparc64, and this machine is {MACHINE}" in done.stderr) == (2, True)


def test_programs_that_may_not_be_started_are_explained(shell, tool):
    (tool / "bin/python3.11").chmod(0o644)
    done = run(shell, tool / "clusterctl")
    assert (done.returncode, "noexec" in done.stderr, "--unpack" in done.stderr) == (2, True, True)
    (tool / "bin/python3.11").unlink()
    done = run(shell, tool / "clusterctl")
    assert (done.returncode, "is missing" in done.stderr) == (2, True)


def test_a_folder_that_the_loader_would_misread_is_refused(shell, tool):
    other = tool.rename(tool.with_name("a:b"))
    done = run(shell, other / "clusterctl")
    assert (done.returncode, "LD_LIBRARY_PATH" in done.stderr) == (2, True)


def test_shellcheck_finds_nothing(packed, tool):
    header = tool / "header.sh"
    data = packed.read_bytes()
    header.write_bytes(data[: data.index(b"\nexit 2\n") + 8])
    scripts = [header, tool / "clusterctl", tool / "python"]
    done = subprocess.run([SHELLCHECK, *scripts], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
