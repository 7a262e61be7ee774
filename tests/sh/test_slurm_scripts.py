"""The batch script of a Slurm job under dash, bash and busybox, with a stand-in for ``srun``."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from provision.model import Node
from provision.slurm import Chosen
from provision.tasks.slurm import job_script, step

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
# Runs the command behind srun's options; prints when it has started it, and waits for a line.
SRUN = """\
#!/bin/sh
while [ "$1" != sh ]; do shift; done
SLURMD_NODENAME=n1 "$@"
echo started
read -r rest
exit 3
"""
PYTHON = """\
#!/bin/sh
text=
for word; do text="$text[$word]"; done
echo "$text" >>"$OUT"  # one write: two of these may run at once
"""


@pytest.fixture(params=SHELLS)
def shell(request):
    return SHELLS[request.param]


@pytest.fixture
def folder(tmp_path):
    """A run's folder, whose plans are complete."""
    run = tmp_path / "it's a run"
    (run / "slurm").mkdir(parents=True)
    (run / "slurm/node-n1").write_text("plan-0.json\n")
    (run / "slurm/go").write_text("12\n")
    release = tmp_path / "release"
    (release / "bin").mkdir(parents=True)
    (run / "release").write_text(f"{release}\n")
    for path, text in ((release / "bin/python", PYTHON), (tmp_path / "srun", SRUN)):
        path.write_text(text)
        path.chmod(0o755)
    os.mkfifo(tmp_path / "line")
    return run


def begin(shell, run, restarts=0, min_nodes=None):
    script = job_script(str(run), Chosen((Node("a", "10.0.0.1"),), {"a": "n1"}).surviving(0, min_nodes))
    # The stand-in reads from the pipe, as the step of a job outlives the lines before it.
    script = script.replace("\nsrun ", f"\n<'{run.parent}/line' srun ", 1) if "'" not in str(run.parent) else script
    env = {
        "PATH": f"{run.parent}:{os.environ['PATH']}", "OUT": str(run.parent / "out"), "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": str(restarts), "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    return subprocess.Popen([shutil.which(shell[0]), *shell[1:], "-c", script], env=env)


def until_started(run):
    """Until the step is running: the stand-in opens the pipe for reading."""
    return (run.parent / "line").open("w")


def calls(run):
    path = run.parent / "out"
    return (path.read_text() if path.exists() else "").replace(str(run), "RUN").splitlines()


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_requeued_job_resumes_and_the_code_is_that_of_the_step(shell, folder, restarts):
    job = begin(shell, folder, restarts)
    with until_started(folder) as line:
        line.write("end\n")
    assert job.wait(timeout=60) == 3
    resumes = "[--resume]" if restarts else ""
    assert calls(folder) == [f"[-IS][RUN/agent][run]{resumes}[RUN/plan-0.json]"]
    assert f"job 12 on n1, restarts: {restarts}" in (folder / "slurm/log").read_text()


def test_a_signal_before_the_end_saves_and_another_ends_nothing(shell, folder):
    job = begin(shell, folder)
    with until_started(folder) as line:
        deadline = time.monotonic() + 30
        while not any("[stop]" in call for call in calls(folder)):
            assert job.poll() is None
            assert time.monotonic() < deadline
            job.send_signal(signal.SIGUSR1)  # a signal that comes before the step has started is ignored
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        line.write("end\n")
    assert job.wait(timeout=60) != 0  # 3, or the signal's if it comes at the same moment
    assert "[-IS][RUN/agent][stop][--save][--who][Slurm: the time of the job is almost over][RUN/plan-0.json]" in calls(
        folder
    )


def test_a_job_that_survives_lost_nodes_asks_only_for_the_others_when_it_is_requeued(shell, folder):
    job = begin(shell, folder, min_nodes=1)
    with until_started(folder) as line:
        deadline = time.monotonic() + 30
        while not any("[requeue]" in call for call in calls(folder)):
            assert job.poll() is None
            assert time.monotonic() < deadline
            job.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        line.write("end\n")
    assert job.wait(timeout=60) != 0
    assert {*calls(folder)} == {
        "[-IS][RUN/agent][run][RUN/plan-0.json]",
        "[-IS][RUN/agent][end-job][RUN/plan-0.json]",
        "[-IS][RUN/agent][requeue][--nodes][n1][--least][1][RUN/plan-0.json]",
    }


@pytest.mark.parametrize("other", [None, "11\n", ""])
def test_a_job_without_plans_of_its_own_starts_nothing(shell, folder, other):
    (folder / "slurm/go").unlink()
    if other is not None:
        (folder / "slurm/go").write_text(other)  # of an earlier job
    assert begin(shell, folder, restarts=1).wait(timeout=60) == 0
    assert not (folder.parent / "out").exists()


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(tmp_path):
    chosen = Chosen((Node("a", "10.0.0.1"),), {"a": "n1"}, 8)
    parts = {
        "job": job_script("/opt/runs/1", chosen),
        "survives": job_script("/opt/runs/1", chosen.surviving(0, 1)),
        "step": step("/opt/runs/1", chosen, ["n1"]) + 'wait "$cc_srun"\n',
    }
    for name, text in parts.items():
        path = tmp_path / f"{name}.sh"
        path.write_text(text)
        done = subprocess.run(
            [SHELLCHECK, "-s", "sh", "-e", "SC2016,SC2317,SC2329", path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
