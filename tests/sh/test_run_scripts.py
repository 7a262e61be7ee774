"""The scripts that send a run to a node and query existing runs, under three shells."""

import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from provision.render import quote, render
from provision.run.files import Entry, RunFiles, tar_stream
from provision.tasks.measures.talk import talk_script

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")

# Replaces the environment's Python: prints its arguments.
PYTHON = """\
#!/bin/sh
[ -e "$2/__main__.py" ] || { echo 'the agent is not whole' >&2; exit 1; }
for word; do printf '[%s]' "$word"; done
echo
"""


@pytest.fixture(params=SHELLS)
def shell(request):
    return SHELLS[request.param]


@pytest.fixture
def root(tmp_path):
    """A node's root with a space in it and one release."""
    folder = tmp_path / "it's a root"
    release = folder / "releases/0123456789ab"
    (release / "bin").mkdir(parents=True)
    (release / "bin/python").write_text(PYTHON)
    (release / "bin/python").chmod(0o755)
    (folder / "releases/0123456789ab.ok").touch()
    (folder / "current").symlink_to("releases/0123456789ab")
    return folder


def luggage(content=b"one"):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in ("agent/__main__.py", "job/sft.yaml"):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def prepare(root, *, node="node01", sends=True, prefix=None, run="run-1", scratch="", digest="d1"):
    return render(
        "run/prepare.sh.j2",
        prefix=str(prefix or root / "current"),
        root=str(root),
        run=scratch or f"{root}/runs/{run}",
        scratch=bool(scratch),
        node=node,
        probe=["--master", "it's", "--rank", "0"],
        sends=sends,
        digest=digest,
    )


def names(root):
    """The runs' folders."""
    return [path.name for path in (root / "runs").iterdir() if not path.name.startswith(".agent-")]


def call(shell, script, stdin=b""):
    which = shutil.which(shell[0])
    return subprocess.run([which, *shell[1:], "-c", script], input=stdin, capture_output=True, check=False, timeout=60)


def lines(done):
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode().splitlines()


def test_folder_is_created_and_the_agent_is_probed(shell, root):
    run = root / "runs/run-1"
    assert lines(call(shell, prepare(root), luggage())) == [
        "release 0123456789ab",
        "folder made",
        f"[-I][{run}/agent][probe][--master][it's][--rank][0]",
    ]
    assert (run / "job/sft.yaml").read_bytes() == b"one"
    assert names(root) == ["run-1"]


def test_first_node_creates_a_shared_folder(shell, root):
    lines(call(shell, prepare(root), luggage()))
    assert lines(call(shell, prepare(root, node="node02"), luggage(b"two")))[1] == "folder there"
    assert (root / "runs/run-1/job/sft.yaml").read_bytes() == b"one"
    assert names(root) == ["run-1"]


def test_concurrent_nodes_create_a_shared_folder_atomically(shell, root):
    which = shutil.which(shell[0])
    nodes = [f"node{number:02}" for number in range(12)]
    started = [
        subprocess.Popen(
            [which, *shell[1:], "-c", prepare(root, node=node)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node in nodes
    ]
    for process in started:
        process.stdin.write(luggage(b"x" * 100_000))
    answers = [process.communicate(timeout=60) for process in started]
    assert [err for _, err in answers] == [b""] * len(nodes)
    made = [out.decode().splitlines()[1] for out, _ in answers]
    assert sorted(made) == ["folder made", *["folder there"] * (len(nodes) - 1)]
    run = root / "runs/run-1"
    assert sorted(path.name for path in run.iterdir()) == ["agent", "job"]
    assert names(root) == ["run-1"]


def test_existing_run_is_only_queried(shell, root):
    lines(call(shell, prepare(root), luggage()))
    message = lines(call(shell, prepare(root, sends=False)))
    assert message[1] == "folder there"
    assert message[2].startswith("[-I]")


def test_missing_run_cannot_be_queried(shell, root):
    done = call(shell, prepare(root, sends=False))
    assert done.returncode == 4
    assert done.stderr.decode() == f"there is no run at {root}/runs/run-1\n"


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_environment_that_was_not_deployed_is_used_unchecked(shell, root, tmp_path, kind):
    prefix = tmp_path / "my env"
    if kind == "folder":
        shutil.copytree(root / "releases/0123456789ab", prefix)
    else:
        shutil.copytree(root / "releases/0123456789ab", tmp_path / "elsewhere")
        prefix.symlink_to(tmp_path / "elsewhere")
    data = tmp_path / "not there yet"
    script = prepare(data, prefix=prefix)
    assert lines(call(shell, script, luggage()))[:2] == ["release local", "folder made"]
    assert (data / "runs/run-1/job/sft.yaml").exists()


def test_no_environment_at_all(shell, root):
    done = call(shell, prepare(root, prefix=root / "nowhere"), luggage())
    assert (done.returncode, done.stdout) == (4, b"")
    assert done.stderr.decode() == f"there is no environment at {root}/nowhere\n"
    assert not (root / "runs").exists()


def test_incomplete_release_is_refused(shell, root):
    (root / "releases/0123456789ab.ok").unlink()
    done = call(shell, prepare(root), luggage())
    assert done.returncode == 4
    assert done.stderr.decode() == f"the environment at {root}/current is not complete\n"


def test_truncated_run_files_leave_nothing(shell, root):
    done = call(shell, prepare(root), luggage()[:700])
    assert done.returncode == 4
    assert done.stderr
    assert not any((root / "runs").iterdir())


def talk(prefix, run, *paths):
    return talk_script(str(prefix), str(run), 2.0, paths)


def test_agent_reads_paths_unchanged(shell, root):
    lines(call(shell, prepare(root), luggage()))
    (message,) = lines(call(shell, talk(root / "current", root / "runs/run-1", "/data/it's a model", "-n")))
    assert message == f"[-I][{root}/runs/run-1/agent][talk][--patience][2.0][--][/data/it's a model][-n]"


@pytest.mark.parametrize("paths", [(), ("/nowhere at all", "-n")])
def test_agent_answers_the_script(tmp_path, paths):
    agent = Path(__file__).parents[2] / "trainer/agent"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    (tmp_path / "agent").symlink_to(agent)
    *content, clock = lines(call(["sh"], talk(tmp_path, tmp_path, *paths), b"time\n"))
    assert clock.startswith("time ")
    assert [list(json.loads(line.removeprefix("content "))) for line in content] == (
        [list(paths)[::-1]] if paths else []
    )


@pytest.mark.parametrize("sends", [True, False])
def test_shellcheck_finds_nothing(root, sends):
    done = subprocess.run(
        [SHELLCHECK, "--shell=sh", "--severity=style", "--exclude=SC2016", "-"],
        input=prepare(root, sends=sends).encode(),
        capture_output=True,
        check=False,
    )
    assert done.stdout.decode() == ""


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def ask_for_runs(root, word=""):
    return render("run/runs.sh.j2", root=str(root), word=word, most=10, limit=1 << 18)


def test_run_folder_is_private_and_the_folder_of_all_runs_is_shared(shell, root):
    before = os.umask(0)
    try:
        lines(call(shell, prepare(root), luggage()))
    finally:
        os.umask(before)
    assert mode(root / "runs") == 0o755
    assert mode(root / "runs/run-1") == 0o700


def test_files_sent_with_a_run_are_private(shell, root, tmp_path):
    """Configurations hold tokens: also in a folder that the user opens to others."""
    for name in ("job/deep/sft.yaml", "agent/__main__.py", "run.sh"):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text("hub_token: hf_secret")
    entries = tuple(
        Entry(tmp_path / "here" / name, name, 20, hashlib.sha256(b"hub_token: hf_secret").hexdigest(), name == "run.sh")
        for name in ("job/deep/sft.yaml", "agent/__main__.py", "run.sh")
    )
    travel = RunFiles(tmp_path / "here/job/deep/sft.yaml", "sft.yaml", {"job/made.yaml": b"x"}, entries)
    lines(call(shell, prepare(root), b"".join(tar_stream(travel))))
    run = root / "runs/run-1"
    modes = {str(path.relative_to(run)): mode(path) for path in run.rglob("*")}
    assert modes == {
        **dict.fromkeys(("job", "job/deep", "agent", "run.sh"), 0o700),
        **dict.fromkeys(("job/deep/sft.yaml", "job/made.yaml"), 0o600),
    }
    assert mode(run / "agent/__main__.py") == 0o600


# --- the agent that runs share ---------------------------------------------------------------------


def shared(root, digest="d1"):
    return root / f"runs/.agent-{os.getuid()}-{digest}"


def start_runs(shell, root, *runs, **changes):
    for run in runs:
        lines(call(shell, prepare(root, run=run, **changes), luggage()))


def compiled(folder):
    """A module that Python has compiled."""
    (folder / "__pycache__").mkdir(exist_ok=True)
    (folder / "__pycache__/m.pyc").touch()
    return folder / "__pycache__/m.pyc"


def test_runs_share_one_agent_whose_modules_stay_compiled(shell, root):
    start_runs(shell, root, "run-1")
    module = compiled(shared(root))
    start_runs(shell, root, "run-2")
    start_runs(shell, root, "run-3", digest="d2")
    links = [(root / "runs" / run / "agent").readlink() for run in ("run-1", "run-2", "run-3")]
    assert links == [Path("..") / shared(root, digest).name for digest in ("d1", "d1", "d2")]
    assert module.exists()
    assert mode(shared(root)) == 0o700
    assert (root / "runs/run-2/agent/__main__.py").read_bytes() == b"one"


@pytest.mark.parametrize("change", ["mode", "owner", "link"])
def test_an_agent_that_another_user_could_change_is_not_shared(shell, root, tmp_path, change):
    start_runs(shell, root, "run-1")
    (shared(root) / "__main__.py").write_text("another user's")
    if change == "mode":
        shared(root).chmod(0o770)
    elif change == "owner":
        os.chown(shared(root), 65534, 65534)
    else:
        shared(root).rename(tmp_path / "elsewhere")
        shared(root).symlink_to(tmp_path / "elsewhere")
    start_runs(shell, root, "run-2")
    assert not (root / "runs/run-2/agent").is_symlink()
    assert (root / "runs/run-2/agent/__main__.py").read_bytes() == b"one"


def test_shared_agent_is_verified_after_a_reboot(shell, root):
    start_runs(shell, root, "run-1")
    module = compiled(shared(root))
    (shared(root) / "boots").write_text("another boot\n")
    start_runs(shell, root, "run-2")
    assert not module.exists()
    module = compiled(shared(root))
    start_runs(shell, root, "run-3")
    assert module.exists()


def test_damaged_shared_agent_is_replaced(shell, root):
    start_runs(shell, root, "run-1")
    (shared(root) / "boots").write_text("another boot\n")
    (shared(root) / "__main__.py").write_text("")
    start_runs(shell, root, "run-2")
    assert (shared(root) / "__main__.py").read_bytes() == b"one"
    assert sorted(path.name for path in (root / "runs/run-2").iterdir()) == ["agent", "job"]


def test_an_agent_of_another_version_is_removed_when_no_run_needs_it(shell, root):
    start_runs(shell, root, "run-1", digest="used")
    for digest in ("old", "new"):
        shared(root, digest).mkdir(mode=0o700)
    for digest in ("used", "old"):
        os.utime(shared(root, digest), (1_600_000_000, 1_600_000_000))
    start_runs(shell, root, "run-2")
    left = {path.name.rpartition("-")[2] for path in (root / "runs").glob(".agent-*")}
    assert left == {"used", "new", "d1"}


def test_runs_that_start_at_once_share_one_agent(shell, root):
    which = shutil.which(shell[0])
    started = [
        subprocess.Popen(
            [which, *shell[1:], "-c", prepare(root, run=f"run-{number}")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(12)
    ]
    for process in started:
        process.stdin.write(luggage(b"x" * 100_000))
    answers = [process.communicate(timeout=60) for process in started]
    assert [err for _, err in answers] == [b""] * len(started)
    for number in range(12):
        assert (root / f"runs/run-{number}/agent").resolve() == shared(root).resolve()
    assert sorted(path.name for path in shared(root).iterdir()) == ["__main__.py", "boots"]


def test_next_command_makes_readable_runs_private(shell, root):
    for name, at_first in (("run-1", 0o755), ("run-2", 0o775), ("run-3", 0o700)):
        logs = root / "runs" / name / "logs/node0"
        logs.mkdir(parents=True)
        (logs / "state.json").write_text("{}")
        (root / "runs" / name).chmod(at_first)
    (root / "elsewhere").mkdir(mode=0o755)
    (root / "runs/link").symlink_to(root / "elsewhere")
    message = lines(call(shell, ask_for_runs(root)))
    assert len([line for line in message if line.startswith("part ")]) == 3
    assert [mode(root / f"runs/run-{number}") for number in (1, 2, 3)] == [0o700] * 3
    assert mode(root / "elsewhere") == mode(root / "runs") == 0o755


def test_a_start_closes_the_folder_too(shell, root):
    run = root / "runs/run-1"
    lines(call(shell, prepare(root), luggage()))
    run.chmod(0o755)
    script = render("run/start.sh.j2", run=str(run), release=str(root / "current"), name="plan-0.json", plan="{}")
    lines(call(shell, script))
    assert mode(run) == 0o700
    assert mode(run / "plan-0.json") == mode(run / "release") == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a program as another user")
def test_only_name_and_owner_of_another_users_run_are_reported(shell):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        Path(folder).chmod(0o755)
        logs = Path(folder, "runs/run-1/logs/node0")
        logs.mkdir(parents=True)
        (logs / "state.json").write_text("{}")
        Path(folder, "runs/run-1").chmod(0o700)
        done = [
            subprocess.run(
                [shutil.which(shell[0]), *shell[1:], "-c", ask_for_runs(folder, word)],
                capture_output=True,
                text=True,
                check=False,
                user=65534,
            )
            for word in ("", "run-1")
        ]
    assert [each.stderr for each in done] == ["", ""]
    assert "run-1" not in done[0].stdout
    assert [line for line in done[1].stdout.splitlines() if "run-1" in line] == ["private run-1 0 root"]


def test_only_the_beginning_of_a_huge_state_file_is_read(shell, root):
    logs = root / "runs/run-1/logs/node0"
    logs.mkdir(parents=True)
    with (logs / "state.json").open("wb") as file:
        file.truncate(3 << 30)  # sparse
    message = call(shell, ask_for_runs(root))
    assert message.returncode == 0
    assert len(message.stdout) < 1 << 20


def test_dry_run_uses_a_separate_folder_and_reports_the_roots_disk(shell, root, tmp_path):
    scratch = tmp_path / "dry run"
    before = sorted(root.rglob("*"))
    message = lines(call(shell, prepare(root, scratch=str(scratch)), luggage()))
    assert message[:2] == ["release 0123456789ab", "folder made"]
    assert message[2:] == [f"[-I][{scratch}/agent][probe][--master][it's][--rank][0][--folder][{root}]"]
    assert sorted(root.rglob("*")) == before
    assert scratch.stat().st_mode & 0o777 == 0o700
    script = f"rm -rf -- {quote(scratch)}"
    assert lines(call(shell, script)) == []
    assert not scratch.exists()
