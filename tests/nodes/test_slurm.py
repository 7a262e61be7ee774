"""``train --on slurm`` and ``train`` within an allocation, with Debian's slurmctld, slurmd and munged on nodes."""

import json
import re
import shutil
import time

import command
import pytest
from slurm import EXTRACTED, Slurm
from training import PLAIN, Attached, wait_until

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

ROOT = "/opt/lab"
# One rank that saves a checkpoint when it is asked to end.
SAVES = """\
import signal, sys, time
from pathlib import Path
from steps import save

def end(*_):
    save(Path("out") / f"checkpoint-{step}", 0.5, step, 0)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
Path("out").mkdir(exist_ok=True)
for step in range(1, 2000):
    print(f"step {step} loss {1 / step}", flush=True)
    time.sleep(0.2)
"""
TWO = ("--nodes", "2")
PLAIN_STEPS = ("--launcher", "plain", "--gpus-per-node", "1", "code/steps.py", "--")


class Lab:
    """The user's folder, the sandbox ``box`` and its ``slurm``."""

    def __init__(self, box):
        self.box, self.folder = box, box.directory
        self.slurm = Slurm(box)

    def run(self, *argv, rc=0, **env):
        done = command.run(*argv, cwd=self.folder, env=env, timeout=120)
        assert done.returncode == rc, done.stderr + done.stdout
        return done

    def detached(self, *argv, **env):
        """The id of a run that was started, and of its job."""
        self.run("train", "--detach", *argv, **env)
        return self.newest, (self.folder / "runs" / self.newest / "run.json").read_text()

    @property
    def newest(self):
        return max(path.name for path in (self.folder / "runs").iterdir())

    def job(self, run):
        """The newest job of a run."""
        return self.slurm.on(f"cat {ROOT}/runs/{run}/slurm/job")

    def state(self, run):
        return json.loads(self.run("status", run, "--json").stdout)["state"]

    def events(self, run, rank=0):
        """The agent's events of one node, but the log."""
        node = self.slurm.nodes[rank]
        text = self.slurm.on(f"cat {ROOT}/runs/{run}/logs/node{rank}/events.jsonl", node)
        return [event for line in text.splitlines() if (event := json.loads(line))["event"] != "log"]

    def attempts(self, run, rank=0):
        """The checkpoints that the run started from, one for each start of its agents."""
        return [event["checkpoint"] for event in self.events(run, rank) if event["event"] == "attempt"]

    def members(self, run, rank=0):
        """The nodes of each attempt, in the order of their ranks."""
        return [event["nodes"] for event in self.events(run, rank) if event["event"] == "attempt"]

    def lines(self, run, rank):
        """What the ranks of a node have printed."""
        node = self.slurm.nodes[rank]
        text = self.slurm.on(f"cat {ROOT}/runs/{run}/logs/node{rank}/events.jsonl", node)
        return [event["line"] for line in text.splitlines() if (event := json.loads(line))["event"] == "log"]

    def until_saved(self, run, step=10):
        path = f"{ROOT}/runs/{run}/job/out/checkpoint-{step}/trainer_state.json"
        wait_until(lambda: self.slurm.on(f"test -e {path} && echo yes", check=False), "no checkpoint", 60)

    def lose(self, node):
        """Kill everything of Slurm and of the run on a node at once; what its controller is, stays."""
        every = "$(pidof slurmd slurmstepd srun) $(pgrep -f '[s]lurm_script|[a]gent\"* run|[s]teps.py')"
        self.slurm.on(f"kill -9 {every}; true", node)  # some have ended because of others

    def no_jobs(self):
        wait_until(lambda: not self.slurm.jobs(), "there are still jobs", 60)


@pytest.fixture(scope="module")
def lab(require_sandbox, tmp_path_factory):
    """Three nodes with this machine's root, Slurm, and an environment that is the machine's Python."""
    from provision import sandbox as sandboxes

    if not EXTRACTED.exists():
        pytest.skip("no Slurm: scripts/setup extracts it on Debian, as root")
    folder = tmp_path_factory.mktemp("slurm")
    with sandboxes.up(
        sandboxes.Options(
            nodes=3, name=f"slurm-{folder.name[-6:]}-{time.time_ns() % 10**6}", directory=folder, rootfs="host"
        )
    ) as box:
        lab = Lab(box)
        for name in lab.slurm.nodes:
            lab.slurm.on(f"mkdir -p {ROOT}/current/bin; ln -sf $(command -v python3) {ROOT}/current/bin/python", name)
        text = box.inventory.read_text()
        box.inventory.write_text(re.sub(r"^prefix: .*$", f"prefix: {ROOT}/current", text, flags=re.MULTILINE))
        (folder / "code").mkdir()
        shutil.copy(PLAIN / "steps.py", folder / "code/steps.py")
        (folder / "code/saves.py").write_text(SAVES)
        yield lab


@pytest.fixture(autouse=True)
def _no_jobs_are_left(lab):
    """A test that fails leaves no job on the nodes of the next one."""
    yield
    if jobs := lab.slurm.on("squeue -h -o %i", check=False):
        lab.slurm.on(f"scancel {' '.join(jobs.split())}", check=False)
        lab.no_jobs()


def test_a_job_trains_to_the_end(lab):
    done = lab.run(
        "train", "--on", "slurm", *TWO, "--partition", "main", "--time", "30", "--sbatch-arg=--comment=ours",
        *PLAIN_STEPS, "--steps", "12", "--save-every", "5",
    )  # fmt: skip
    assert "trained on node[01-02] (world size 2): 12 steps" in done.stdout
    assert "Waiting for Slurm job" in done.stderr
    lab.no_jobs()
    fields = lab.slurm.job(lab.job(lab.newest))
    assert fields["JobState"] == "COMPLETED"
    assert fields["TimeLimit"] == "00:30:00"
    assert fields["Comment"] == "ours"
    assert fields["JobName"] == lab.newest
    assert fields["OverSubscribe"] == "NO"


def test_a_failed_rank_ends_the_job(lab):
    (lab.folder / "code/fails.py").write_text("raise SystemExit(7)")
    done = lab.run("train", "--on", "slurm", "--nodes", "1", *PLAIN_STEPS[:-2], "code/fails.py", rc=6)
    assert "rank 0 exited with code 7" in done.stderr
    assert "requeued" not in done.stderr
    lab.no_jobs()
    assert lab.slurm.job(lab.job(lab.newest))["JobState"] == "FAILED"


def test_status_logs_stop_and_resume_are_the_same_as_without_slurm(lab):
    run, _ = lab.detached("--on", "slurm", *TWO, *PLAIN_STEPS, "--steps", "3000", "--save-every", "10")
    lab.until_saved(run)
    job = lab.job(run)
    assert lab.slurm.jobs() == {job: "RUNNING"}
    for node in lab.slurm.nodes[:2]:  # the agents are processes of the job, on every node
        pids = lab.slurm.on(
            "pgrep -f '[a]gent run' | while read p; do ps -o args= -p $(ps -o ppid= -p $p); done", node, False
        )
        assert "slurmstepd" in pids
    assert lab.state(run) == "running"
    assert "step 10 " in lab.run("logs", run).stdout
    stopped = lab.run("stop", run)
    assert f"run {run} stopped on node[01-02]: no process left" in stopped.stdout
    lab.no_jobs()
    assert lab.state(run) == "stopped"
    lab.run("resume", "--detach", run)
    assert lab.job(run) != job
    assert re.fullmatch(r"checkpoint-\d+", lab.attempts(run)[-1])

    lab.slurm.on(f"scancel {lab.job(run)}")
    lab.no_jobs()
    assert lab.state(run) == "stopped"
    assert any(f"signal SIGTERM of Slurm job {lab.job(run)}" in str(event.get("text")) for event in lab.events(run))
    lab.run("resume", "--detach", run)  # scancel leaves the files of the last job
    wait_until(lambda: len(lab.attempts(run)) == 3, f"it did not resume: {lab.events(run)[-6:]}", 30)
    assert re.fullmatch(r"checkpoint-\d+", lab.attempts(run)[-1])
    lab.run("stop", run)


def test_a_requeued_job_resumes_the_run_without_the_controller(lab):
    words = ["train", "--on", "slurm", *TWO, *PLAIN_STEPS, "--steps", "3000", "--save-every", "10"]
    with_controller = Attached(lab, words, "step 12 ")
    run = lab.newest
    job = lab.job(run)
    lab.slurm.on(f"scontrol requeue {job}")
    assert with_controller.finish() == 0, with_controller.output
    assert f"Slurm requeued job {job}" in with_controller.output
    wait_until(lambda: len(lab.attempts(run)) == 2, "it did not resume", 60)
    assert re.fullmatch(r"checkpoint-\d+", lab.attempts(run)[1])
    assert lab.state(run) == "running"
    assert "restarts: 1" in lab.slurm.on(f"cat {ROOT}/runs/{run}/slurm/log")

    # A job with more right to the nodes preempts it.
    lab.slurm.on("cd /tmp && sbatch -p urgent -N2 --exclusive -o /dev/null --wrap 'sleep 1'")
    wait_until(lambda: len(lab.attempts(run)) == 3, "it did not resume after the preemption", 90)

    lab.slurm.on(f"scontrol requeuehold {job}")
    wait_until(lambda: lab.slurm.jobs() == {job: "PENDING"}, "it is not in the queue", 30)
    refused = lab.run("resume", run, rc=2)
    assert f"run {run} is in Slurm's queue as job {job}" in refused.stderr
    lab.run("stop", run)
    assert lab.slurm.jobs() == {}


def test_the_run_resumes_from_a_copy_after_slurm_loses_the_first_node_of_its_job(lab):
    """The job's script runs there, so Slurm requeues the job. The node comes back without its checkpoints."""
    words = ("--on", "slurm", *TWO, "--copies", "1", *PLAIN_STEPS, "--steps", "3000", "--save-every", "10")
    run, _ = lab.detached(*words)
    job, first = lab.job(run), lab.slurm.nodes[0]
    wait_until(lambda: any(each["event"] == "copied" for each in lab.events(run)), "no copies", 60)
    lab.lose(first)
    (*_, copied) = [each["step"] for each in lab.events(run) if each["event"] == "copied"]
    lab.slurm.on(f"rm -r {ROOT}/runs/{run}/job/out")
    wait_until(lambda: lab.slurm.jobs().get(job) != "RUNNING", "Slurm did not notice", 90)
    lab.slurm.start_slurmd(first)
    wait_until(lambda: len(lab.attempts(run)) == 2, "it did not resume", 90)
    assert int(lab.attempts(run)[1].removeprefix("checkpoint-")) >= copied
    assert lab.slurm.job(job)["Restarts"] == "1"
    lab.run("stop", run)
    lab.no_jobs()


def test_a_spare_replaces_the_first_node_of_the_job_which_ends_with_the_run(lab):
    """The node has the job's script and srun, which end a job otherwise."""
    words = ("--on", "slurm", *TWO, "--spares", "1", "--copies", "1", "--lost-after", "5", *PLAIN_STEPS)
    run, _ = lab.detached(*words, "--save-every", "20", "--steps", "300")
    job, first = lab.job(run), lab.slurm.nodes[0]
    wait_until(lambda: any(each["event"] == "copied" for each in lab.events(run)), "no copies", 60)
    lab.lose(first)
    lab.slurm.wait(
        lambda: len(lab.attempts(run, 1)) == 2, 60, lambda: str(lab.events(run, 1)[-8:] + lab.events(run, 2)[-4:])
    )
    assert lab.members(run, 1) == [["node01", "node02"], ["node03", "node02"]]
    resumed = int(lab.attempts(run, 1)[1].removeprefix("checkpoint-"))
    wait_until(lambda: not lab.slurm.jobs(), "the run does not finish, or its job does not end", 120)
    fields = lab.slurm.job(job)
    assert (fields["JobState"], fields["Restarts"], fields["BatchHost"]) == ("CANCELLED", "0", first)
    for rank in (1, 2):
        end = lab.events(run, rank)[-1]
        assert (end["event"], end["state"], end["step"]) == ("end", "finished", 300)
    assert "rank 1 of 2, local rank 0" in lab.lines(run, 1)[-3:]
    steps = [line for line in lab.lines(run, 2) if line.startswith("step ")]
    losses = {step: round(0.99 ** (2 * step) + 1 / step, 6) for step in range(resumed + 1, 301)}
    assert steps == [f"step {step} loss {loss:.6f}" for step, loss in losses.items()]
    lab.slurm.start_slurmd(first)
    lab.slurm.wait(lambda: lab.slurm.states()[first] == "idle", 30, lambda: str(lab.slurm.states()))


def test_a_spare_of_the_job_replaces_a_node_that_slurm_loses(lab):
    """Slurm then requeues the job, which does not wait for the lost node."""
    words = ("--on", "slurm", *TWO, "--spares", "1", "--lost-after", "5", *PLAIN_STEPS, "--save-every", "10")
    run, _ = lab.detached(*words, "--steps", "400")
    lab.until_saved(run)
    job, node = lab.job(run), lab.slurm.nodes[1]
    assert lab.slurm.job(job)["NumNodes"] == "3"
    lab.slurm.on("kill -9 $(pidof slurmd) $(pgrep slurmstepd) $(pgrep -f '[a]gent run')", node)
    lab.slurm.wait(lambda: len(lab.attempts(run)) == 2, 60, lambda: str(lab.events(run)[-8:]))
    wait_until(lambda: lab.slurm.states()[node].startswith("down"), "Slurm did not notice", 60)
    assert lab.slurm.jobs() == {job: "RUNNING"}
    fields = lab.slurm.job(job)
    assert (fields["NumNodes"], fields["Restarts"]) == ("2", "0")
    lab.slurm.on(f"scontrol requeue {job}")
    lab.slurm.wait(lambda: len(lab.attempts(run)) == 3, 90, lambda: str(lab.slurm.job(job)))
    assert lab.members(run) == [["node01", "node02"], ["node01", "node03"], ["node01", "node03"]]
    fields = lab.slurm.job(job)
    assert (fields["NumNodes"], fields["Restarts"]) == ("2", "1")
    wait_until(lambda: not lab.slurm.jobs(), "the run does not finish, or its job does not end", 120)
    assert lab.slurm.job(job)["JobState"] == "COMPLETED"
    end = lab.events(run)[-1]
    assert (end["event"], end["state"], end["step"]) == ("end", "finished", 400)
    lab.slurm.start_slurmd(node)
    lab.slurm.wait(lambda: lab.slurm.states()[node] == "idle", 30, lambda: str(lab.slurm.states()))


def test_the_run_saves_before_its_time_is_over(lab):
    run, _ = lab.detached("--on", "slurm", "--nodes", "1", *PLAIN_STEPS[:-2], "--output", "out", "code/saves.py")
    job = lab.job(run)
    assert lab.slurm.on(f"scontrol show job {job}").count("node01")
    wait_until(lambda: "step 3" in lab.run("logs", run).stdout, "it did not train", 60)
    lab.slurm.on(f"scancel --batch --signal=USR1 {job}")  # as Slurm does, --signal=B:USR1@120
    lab.no_jobs()
    assert lab.state(run) == "stopped"
    (end,) = [event for event in lab.events(run) if event["event"] == "end"]
    assert end["saved"] is True
    assert end["step"] >= 3


def test_train_within_an_allocation_uses_its_nodes(lab):
    name = lab.slurm.nodes[1]
    text = lab.slurm.on(f"timeout 30 salloc --no-shell -N1 -w {name} 2>&1")
    job = re.search(r"allocation (\d+)", text)[1]
    inside = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": f"{name},other[1-2]"}
    refused = lab.run("train", "--nodes", "2", *PLAIN_STEPS, rc=2, **inside)
    assert f"--nodes 2: Slurm job {job} has 1 of the chosen nodes: node02; other[1-2] of it are not" in refused.stderr
    assert "--nodes 1" in refused.stderr
    refused = lab.run("train", "--limit", "node01", *PLAIN_STEPS, rc=2, **inside)
    assert "has 0 of the chosen nodes" in refused.stderr
    done = lab.run("train", *PLAIN_STEPS, "--steps", "5", **inside)
    assert (
        f"the nodes are those of Slurm job {job}: node02; not in the inventory, or not chosen: other[1-2]"
        in done.stderr
    )
    assert "trained on node02" in done.stdout
    run, _ = lab.detached(*PLAIN_STEPS, "--steps", "3000", **inside)
    lab.slurm.on(f"scancel {job}")
    lab.no_jobs()
    assert lab.state(run) == "stopped"


def test_slurm_refuses(lab):
    words = ["train", "--on", "slurm", *TWO, *PLAIN_STEPS]
    refused = lab.run(*words[:3], "--partition", "nope", *PLAIN_STEPS, rc=2)
    assert "--partition nope: Slurm has no such partition" in refused.stderr
    assert "main, small, urgent" in refused.stderr
    refused = lab.run(*words[:3], "--partition", "small", *TWO, *PLAIN_STEPS, rc=2)
    assert (
        "partition small has 1 of the 2 nodes that the run needs (not in the partition: node[02-03])" in refused.stderr
    )
    refused = lab.run(*words[:3], "--sbatch-arg=--licenses=none:9", *PLAIN_STEPS, rc=4)
    assert "node01: sbatch: error: " in " ".join(refused.stderr.split())
    refused = lab.run(*words[:3], "--nodes", "2", "--sbatch-arg=--nodelist=node02,node03", *PLAIN_STEPS, rc=4)
    assert "it is without node01; it also has node03" in " ".join(refused.stderr.split())
    refused = lab.run(*words[:3], "--sbatch-arg=--hold", *PLAIN_STEPS, rc=4)
    assert "it can never start: JobHeldUser" in refused.stderr
    assert lab.slurm.jobs() == {}
    lab.slurm.on("mv /usr/bin/sbatch /usr/bin/sbatch.gone")
    refused = lab.run(*words, rc=4)
    lab.slurm.on("mv /usr/bin/sbatch.gone /usr/bin/sbatch; kill $(pidof slurmctld)")
    assert "sbatch is not installed there" in refused.stderr
    refused = lab.run(*words, rc=4)
    assert "Slurm refused the run; nothing was started" in refused.stderr or "Slurm's controller" in refused.stderr
    assert "scontrol ping" in refused.stderr
