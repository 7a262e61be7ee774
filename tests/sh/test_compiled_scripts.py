"""What compile_steps writes, under every sh that a node may have."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from provision.model import Step
from provision.render import quote
from provision.script import DETAIL_LINES, FROM_INPUT, compile_steps, parse
from provision.ssh.wire import BOOTSTRAP

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"], "sh": ["sh"]}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
TOKEN = "Tok3n"
NASTY = "'\"$(id)`id`\n ü \\ @clusterctl:Tok3n:step:0:ok:0:1"


@pytest.fixture(params=SHELLS, ids=list(SHELLS))
def shell(request):
    argv = SHELLS[request.param]
    if not shutil.which(argv[0]):
        pytest.skip(f"{argv[0]} is not installed")
    return argv


def run(shell, steps, *, stdin=b"", dry_run=False, keep_going=False, env=None):
    """The results, the exit code and the whole output."""
    script = compile_steps(steps, token=TOKEN, dry_run=dry_run, keep_going=keep_going)
    done = subprocess.run([*shell, "-c", script], input=stdin, capture_output=True, check=False, timeout=60, env=env)
    assert done.stderr == b""
    out = done.stdout.decode("utf-8", "surrogateescape")
    return parse(TOKEN, out), done.returncode, out


def states(results):
    return [(result.name, result.state) for result in results]


def test_ok_changed_and_order(shell, tmp_path):
    log = quote(tmp_path / "log")
    steps = [
        Step("there", do=f"echo never >>{log}", unless="true"),
        Step("missing", do=f"echo second >>{log}", unless="false"),
        Step("no test", do=f"echo third >>{log}"),
    ]
    results, rc, out = run(shell, steps)
    assert (states(results), rc) == ([("there", "ok"), ("missing", "changed"), ("no test", "changed")], 0)
    assert (tmp_path / "log").read_text() == "second\nthird\n"
    assert all(line.startswith("@clusterctl:Tok3n:") for line in out.splitlines())


def test_a_failure_stops_the_script(shell, tmp_path):
    mark = quote(tmp_path / "mark")
    results, rc, _ = run(
        shell, [Step("a", "true"), Step("b", "echo bad; echo worse >&2; exit 7"), Step("c", f"touch {mark}")]
    )
    assert states(results) == [("a", "changed"), ("b", "failed")]
    assert results[1].detail == "bad\nworse"
    assert rc == 7
    assert not (tmp_path / "mark").exists()


def test_keep_going_runs_the_steps_after_a_failure(shell):
    steps = [
        Step("a", "printf 'no newline at the end'; exit 7"),
        Step("b", "false", unless="true"),
        Step("c", "true"),
    ]
    results, rc, _ = run(shell, steps, keep_going=True)
    assert (states(results), rc) == ([("a", "failed"), ("b", "ok"), ("c", "changed")], 0)
    assert results[0].detail == "no newline at the end"


def test_a_script_on_standard_input_runs_whole(shell):
    script = compile_steps([Step("a", "true"), Step("b", "echo bad; exit 7")], token=TOKEN)
    done = subprocess.run([*shell, "-c", FROM_INPUT], input=script.encode(), capture_output=True, check=False)
    assert (states(parse(TOKEN, done.stdout.decode())), done.returncode) == ([("a", "changed"), ("b", "failed")], 7)
    script = compile_steps([Step("a", "true")], token=TOKEN)
    done = subprocess.run([*shell, "-c", FROM_INPUT], input=script.encode(), capture_output=True, check=False)
    assert (done.stderr, done.returncode) == (b"", 0)


def test_a_script_on_standard_input_gets_no_further_text(shell):
    done = subprocess.run([*shell, "-c", FROM_INPUT], input=b"echo last", capture_output=True, check=True)
    assert done.stdout == b"last\n"


def test_a_failed_step_whose_output_has_no_last_newline_hides_no_later_step(shell):
    results, rc, _ = run(shell, [Step("one", "printf oops; false"), Step("two", "true")], keep_going=True)
    assert (states(results), rc) == ([("one", "failed"), ("two", "changed")], 0)
    assert results[0].detail == "oops"


def test_the_last_word_of_a_test_and_of_a_step_stays(shell, tmp_path):
    file = quote(tmp_path / "X")
    step = Step("a", do=f"touch {file}\n\n", unless=f"test -e {file}\n\n")
    assert states(run(shell, [step])[0]) == [("a", "changed")]
    assert states(run(shell, [step])[0]) == [("a", "ok")]


def test_set_e_is_on_in_the_middle_of_do_and_of_unless(shell, tmp_path):
    mark = quote(tmp_path / "mark")
    results, rc, _ = run(shell, [Step("a", f"false\ntouch {mark}")])
    assert (states(results), rc) == ([("a", "failed")], 1)
    assert not (tmp_path / "mark").exists()
    results, rc, _ = run(shell, [Step("a", "true", unless="false\ntrue")])
    assert states(results) == [("a", "changed")]


def test_set_e_is_on_inside_functions(shell):
    results, rc, _ = run(shell, [Step("a", "work() {\n  false\n  echo went on\n}\nwork")])
    assert (results[0].state, results[0].detail, rc) == ("failed", "exit code 1", 1)


def test_only_the_last_lines_of_a_long_output_are_kept(shell):
    results, _, _ = run(
        shell, [Step("a", "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i + 1)); done; printf end; exit 3")]
    )
    lines = results[0].detail.splitlines()
    assert lines[-2:] == ["line 2999", "end"]
    assert len(lines) <= DETAIL_LINES + 1


def test_a_long_line_is_cut(shell):
    results, rc, _ = run(shell, [Step("a", "head -c 300000 /dev/zero | tr '\\000' x; exit 4")])
    assert rc == 4
    assert 1000 < len(results[0].detail) < 20000


def test_output_without_a_newline_and_with_false_markers(shell):
    step = Step("a", f"printf %s {quote(NASTY)}; exit 5")
    results, rc, _ = run(shell, [step])
    assert (results[0].detail, rc) == (NASTY, 5)
    results, rc, _ = run(shell, [Step("a", f"printf %s {quote(NASTY)}")])
    assert (states(results), rc) == ([("a", "changed")], 0)


def test_output_that_looks_like_the_exit_code(shell):
    results, rc, _ = run(shell, [Step("a", f"printf %s {quote('@rc:0:')}; exit 9")])
    assert (results[0].state, results[0].detail, rc) == ("failed", "@rc:0:", 9)


def test_steps_share_nothing(shell, tmp_path):
    steps = [
        Step("a", f"x=1; cd {quote(tmp_path)}; umask 000; trap 'echo trapped' EXIT"),
        Step("b", '[ -z "${x:-}" ]; [ ! -e log ]'),
    ]
    results, rc, _ = run(shell, steps)
    assert (states(results), rc) == ([("a", "changed"), ("b", "changed")], 0)


def test_heredocs_comments_and_cases_survive(shell, tmp_path):
    file = quote(tmp_path / "f")
    do = f"cat >{file} <<'EOF'\n)\n$x\nEOF\ncase a in a) true ;; esac # done"
    results, _, _ = run(shell, [Step("a", do, unless="case b in a) true ;; *) false ;; esac # no")])
    assert states(results) == [("a", "changed")]
    assert (tmp_path / "f").read_text() == ")\n$x\n"


def test_only_a_step_that_asks_for_it_reads_stdin(shell, tmp_path):
    file = quote(tmp_path / "f")
    steps = [Step("a", "cat", unless="cat; false"), Step("b", f"cat >{file}", stdin=True), Step("c", "cat")]
    data = bytes(range(256)) * 4000
    results, rc, _ = run(shell, steps, stdin=data)
    assert (states(results), rc) == ([("a", "changed"), ("b", "changed"), ("c", "changed")], 0)
    assert (tmp_path / "f").read_bytes() == data


def test_a_step_reads_stdin_even_where_it_is_skipped_or_fails(shell):
    results, rc, _ = run(shell, [Step("b", "head -c 3 >&2; exit 2", stdin=True)], stdin=b"abcdef")
    assert (results[0].detail, rc) == ("abc", 2)


def test_dry_run_reports_what_would_change(shell, tmp_path):
    mark = quote(tmp_path / "mark")
    steps = [Step("a", f"touch {mark}", unless=f"[ -e {mark} ]"), Step("b", "false"), Step("c", "false", unless="true")]
    results, rc, _ = run(shell, steps, dry_run=True)
    assert (states(results), rc) == ([("a", "would change"), ("b", "would change"), ("c", "ok")], 0)
    assert not (tmp_path / "mark").exists()


def test_a_second_run_changes_nothing(shell, tmp_path):
    mark = quote(tmp_path / "mark")
    steps = [Step("a", f"touch {mark}", unless=f"[ -e {mark} ]")]
    assert states(run(shell, steps)[0]) == [("a", "changed")]
    assert states(run(shell, steps)[0]) == [("a", "ok")]


def test_odd_names(shell):
    results, _, _ = run(shell, [Step("it's $(id)\n`x` ü", "true")])
    assert states(results) == [("it's $(id) `x` ü", "changed")]


def test_time_is_measured(shell):
    began = time.monotonic()
    results, _, _ = run(shell, [Step("a", "sleep 0.2 2>/dev/null || sleep 1")])
    assert 0 <= results[0].seconds <= time.monotonic() - began + 1  # some shells have whole seconds only


@pytest.mark.parametrize("answer", ["N", "%N", ""])
def test_time_without_nanoseconds(shell, tmp_path, answer):
    date = tmp_path / "date"
    date.write_text(f"#!/bin/sh\ncase $1 in +%s%N) echo 1763700000{answer} ;; *) echo 1763700000 ;; esac\n")
    date.chmod(0o755)
    if shell[0] == "busybox":
        pytest.skip("runs its own date")
    results, rc, _ = run(shell, [Step("a", "true")], env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (results[0].seconds, rc) == (0, 0)


def test_no_steps(shell):
    assert run(shell, []) == ((), 0, "")


@pytest.mark.parametrize("dry_run", [False, True])
def test_shellcheck(dry_run, tmp_path):
    steps = [Step("it's a name", "printf x", unless="test -e /nowhere"), Step("b", "cat >/dev/null", stdin=True)]
    (tmp_path / "a.sh").write_text(compile_steps(steps, token=TOKEN, dry_run=dry_run))
    done = subprocess.run([SHELLCHECK, "-s", "sh", tmp_path / "a.sh"], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


# --- the constant remote command -------------------------------------------------------------------


def boot(login, script, rest=b""):
    body = script.encode()
    return subprocess.run(
        [*login, "-c", BOOTSTRAP],
        input=f"{len(body)} T\n".encode() + body + rest,
        capture_output=True,
        check=False,
        timeout=60,
    )


def test_the_bootstrap_gives_script_and_input_apart(shell):
    done = boot(shell, "cat; echo err >&2; exit 3\n", b"\0binary\n\n")
    head, _, tail = done.stdout.partition(b"\n")
    assert head.startswith(b"@clusterctl:T:begin:")
    assert tail == b"\0binary\n\n@clusterctl:T:end:3:\n"
    assert done.stderr.splitlines()[1:] == [b"err", b"@clusterctl:T:end:3:"]
    assert done.returncode == 3


@pytest.mark.parametrize("login", ["bash", "dash", "tcsh", "fish", "zsh", "ksh", "busybox sh"])
def test_every_login_shell_reads_the_bootstrap(login):
    argv = login.split()
    if not shutil.which(argv[0]):
        pytest.skip(f"{argv[0]} is not installed")
    done = boot(argv, f"printf %s {quote(NASTY)}\n")
    assert done.stdout.decode().endswith(f"\n{NASTY}@clusterctl:T:end:0:\n")


def test_a_script_keeps_its_trailing_newlines_and_an_empty_one_runs():
    assert b"end:0:" in boot(["sh"], "").stdout
    assert boot(["sh"], "cat <<E\nx\n\n\nE\n\n\n").stdout.split(b":\n", 1)[1] == b"x\n\n\n@clusterctl:T:end:0:\n"


def test_a_syntax_error_is_an_exit_code():
    assert b"@clusterctl:T:end:2:" in boot(["dash"], "if then (\n").stdout
