"""Closed, full and broken streams, a deleted working folder, signals while the program is being imported."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# One node at a port where nothing listens: a command that has a result, and fails.
INVENTORY = "prefix: /opt/llm/current\nnodes: {n: 127.0.0.1}\nssh: {port: 1}\n"
MAIN = [sys.executable, "-c", "from provision.cli import main; main()"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path


def sh(line, folder, *argv, **environ):
    """Runs a line of sh in which ``"$@"`` is clusterctl and its arguments."""
    done = subprocess.run(
        ["sh", "-c", line, "sh", *MAIN, *argv],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done


def test_a_closed_stdout_is_an_error_before_anything_is_done(folder):
    done = sh('"$@" >&-', folder, "status")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("error: stdout is closed, so no result could be shown\ntry: clusterctl status >/dev/null\n")


def test_without_stdin_and_stderr_a_command_does_its_work(folder):
    done = sh('"$@" <&- 2>&-', folder, "status")
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout.startswith("n: no answer: ")


def test_without_any_stream_the_exit_code_is_correct(folder):
    done = sh('"$@" <&- >&- 2>&-', folder, "status")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_full_disk_below_stdout_is_an_error_line(folder):
    done = sh('"$@" >/dev/full', folder, "status", "-q")
    assert done.returncode == 2
    assert done.stderr == "error: cannot use stdout: No space left on device\n"


def test_closed_reader_is_no_error(folder):
    done = sh('{ "$@"; echo "code $?" >&2; } | true', folder, "--help")
    assert done.stderr in {"code 1\n", "code 0\n"}  # 0: it had taken all before it went


def test_a_deleted_working_folder_has_its_error_and_versions_need_none(folder):
    gone = 'mkdir gone && cd gone && rmdir ../gone && "$@"'
    done = sh(gone, folder, "status")
    assert done.returncode == 2
    assert done.stderr == ('error: the working folder no longer exists\ntry: cd "$HOME", then run the command again\n')
    assert sh(gone, folder, "--version").returncode == 0


def test_text_outside_the_encoding_is_escaped(folder):
    done = sh('"$@"', folder, "run", "echo é", PYTHONIOENCODING="ascii")
    assert done.returncode == 5
    assert "echo \\xe9" in done.stderr


@pytest.mark.parametrize("environ", [{"COLUMNS": "0", "LINES": "0"}, {"TERM": "dumb"}])
def test_odd_terminals_show_the_result(folder, environ):
    control, terminal = pty.openpty()
    with subprocess.Popen(
        [*MAIN, "status"], cwd=folder, env={**os.environ, **environ}, stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        shown = b""
        while part := read(control):
            shown += part
        assert process.wait(30) == 5
    os.close(control)
    assert b"n: no answer: " in shown
    assert b"error: no answer from 1 of 1 nodes" in shown


def read(control):
    try:
        return os.read(control, 4096)
    except OSError:  # the last one has closed the terminal
        return b""


# Sends itself a signal while one of the program's libraries is being imported.
SIGNALLED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
from provision.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["click", "pydantic"])  # of the program, and of a command
def test_a_signal_during_imports_is_an_interrupt(folder, name, number):
    code = SIGNALLED.format(name=name, number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", code, "status", "--json"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stderr == "interrupted\ntry: run the same command again\n"
    assert json.loads(done.stdout)["error"]["exit_code"] == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_running_command_imports_ssh_is_an_interrupt(folder, number):
    code = SIGNALLED.format(name="paramiko", number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", code, "status", "--json"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stderr.endswith("interrupted\ntry: clusterctl status --json\n")
    assert json.loads(done.stdout)["error"]["exit_code"] == 130


def test_ignored_signal_stays_ignored(folder):
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SIGNALLED
    code = code.format(name="click", number=int(signal.SIGINT))
    assert subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, check=False).returncode == 0


def test_entry_point_handles_signals_before_it_imports_anything():
    code = (
        "import sys, os\nbefore = set(sys.modules)\nimport provision.cli\n"
        "print(*sorted(name for name in set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__future__", "provision", "provision.cli"]


def test_entry_point_is_the_installed_one():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'clusterctl = "provision.cli:main"' in text


HEAVY = {"rich", "jinja2", "cryptography", "paramiko", "fabric", "invoke", "asyncio", "unittest"}


def loaded(folder, *commands):
    """The modules of HEAVY that are imported at the end of each command, all in one process, by its first word."""
    code = (
        "import json, sys\nfrom provision.cli import main\nfound = {}\n"
        f"for words in {list(commands)!r}:\n"
        "    try:\n        main(words)\n"
        "    except SystemExit as end:\n        assert not end.code, (words, end.code)\n"
        "    found[words[0]] = sorted({name.partition('.')[0] for name in sys.modules})\n"
        "print('\\nloaded', json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True
    )
    modules = json.loads(done.stdout.rpartition("\nloaded ")[2])
    return {word: HEAVY & set(modules[word]) for word, *_ in commands}


COMMANDS = ["deploy", "push", "run", "check", "status", "train", "stop", "logs", "pack-env", "services"]


def test_help_imports_neither_ssh_nor_templates_nor_a_screen(folder):
    """In one process: a module stays imported, so the first command with any is the one that imports it."""
    assert loaded(folder, *([command, "--help"] for command in COMMANDS)) == {name: set() for name in COMMANDS}


def test_a_command_on_this_machine_alone_imports_no_ssh(folder):
    (folder / "inventory.yaml").write_text("prefix: /opt/llm/current\nnodes: {here: local}\n")
    found = loaded(folder, ["run", "-i", "inventory.yaml", "true"])
    assert not found["run"] & {"rich", "paramiko", "fabric", "invoke"}
