"""Checkpoints of runs that fail: torn ones, a disk that is full, a node less, and a copy of the newest here."""

import json
import re
import signal
import subprocess
import time

import pytest
from training import RUNS

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]


# TensorBoard's own reader: the scalars of a folder, by tag.
SCALARS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0}).Reload()
print(json.dumps({tag: list(map(vars, found.Scalars(tag))) for tag in found.Tags()["scalars"]}))
"""


def losses(training, run):
    """By step, from the trainer's own log on rank 0's node; a repeated step counts with its last line."""
    lines = training.on("node01", "cat", f"{RUNS}/{run}/job/out/trainer_log.jsonl").splitlines()
    return {line["current_steps"]: line["loss"] for line in map(json.loads, lines)}


def report(training, run, path):
    """The page about a run."""
    written = training.run("report", run, "-o", path)
    assert written.returncode == 0, written.stderr
    return path.read_text()


def test_torn_checkpoint_is_skipped_restart_resumes_and_collect_takes_the_newest(plain_nodes, lab_env, tmp_path):
    restarted = plain_nodes.start(
        *("train", "--nodes", "2", "--restarts", "2", "--output", "out", "--resume-arg", "--resume={checkpoint}"),
        *("steps.py", "--", "--steps", "40", "--output", "out", "--save-every", "5"),
        until=r"step 12 ",
    )
    run = plain_nodes.last_run().name
    out = f"{RUNS}/{run}/job/out"
    # The result of a full disk or a killed process: the newest checkpoint by its name, half written.
    torn = f"cp -r {out}/checkpoint-10 {out}/checkpoint-99; truncate -s 100 {out}/checkpoint-99/model.safetensors"
    plain_nodes.on("node01", "sh", "-c", torn)
    plain_nodes.kill("node02", plain_nodes.rank("node02"), signal.SIGKILL)
    assert "the run was running when this report was written" in report(plain_nodes, run, tmp_path / "early.html")
    assert restarted.finish(180) == 0, restarted.output
    page = report(plain_nodes, run, tmp_path / "report.html")
    restarts = re.search(r'id="attempts".*?</section>', page)[0]
    began = r"attempt 2 starts from checkpoint-[123][05]</td><td>node02.*(SIGKILL|exited with code)"
    assert re.search(began, restarts), restarts
    assert re.search(r'id="preflight".*?[1-9]\d* <span data-i="v_passed">', page)
    for rank, node in enumerate(plain_nodes.nodes):
        assert f"<td>{node}</td><td>{rank}</td><td>finished" in page
    assert re.search(r"rank 0 resumes from step [123][05]\b", restarted.output), restarted.output
    assert sorted(losses(plain_nodes, run)) == list(range(1, 41))
    assert plain_nodes.marked() == []
    plain_nodes.on("node01", "rm", "-r", f"{out}/checkpoint-99")
    for _ in range(2):  # the second finds all there
        collected = plain_nodes.run("collect", run, "--to", tmp_path)
        assert collected.returncode == 0, collected.stderr
    names = {path.name for path in tmp_path.rglob("*")}
    assert {"run.log", "checkpoint-40", "model.safetensors"} <= names
    assert "checkpoint-35" not in names
    for source in (run, tmp_path / run):  # from the nodes, and from the collected files
        written = plain_nodes.run("metrics", source, "--tensorboard", tmp_path / "events")
        assert written.returncode == 0, written.stderr
        read = [lab_env / "bin/python", "-c", SCALARS, tmp_path / "events" / run]
        tags = json.loads(subprocess.run(read, check=True, capture_output=True, text=True).stdout)
        found = {each["step"]: each["value"] for each in tags["train/loss"]}
        assert found == pytest.approx(losses(plain_nodes, run))
        assert len(found) == len(tags["train/loss"])  # also of the steps that were repeated after the kill
        times = [each["wall_time"] for each in tags["train/loss"]]
        assert time.time() - 600 < times[0] < times[-1] < time.time()
        assert times == sorted(times)
        assert {"node/node01/memory_gib", "node/node02/memory_gib"} <= set(tags)


def test_a_run_of_two_nodes_resumes_on_one(plain_nodes):
    """The second node's rank is killed and the node excluded: the run finishes on the first, at world size 1."""
    steps = ("steps.py", "--", "--steps", "30", "--output", "out", "--save-every", "5")
    broken = plain_nodes.start("train", "--nodes", "2", "--resume-arg", "", *steps, until=r"step 7 ")
    run = plain_nodes.last_run().name
    plain_nodes.kill("node02", plain_nodes.rank("node02"), signal.SIGKILL)
    assert broken.finish(180) == 6, broken.output
    resumed = plain_nodes.run("resume", "--exclude", "node02", "--resume-arg", "--resume={checkpoint}", run)
    message = resumed.stdout + resumed.stderr
    assert resumed.returncode == 0, message
    assert f"run {run} resumes on 1 of 2 nodes: node01 is node 0; world size 1 instead of 2" in message
    assert re.search(r"rank 0 resumes from step \d+", message), message
    plan = json.loads(plain_nodes.on("node01", "cat", f"{RUNS}/{run}/plan-0.json"))
    assert plan["resume"]["argv"] == ["--resume={checkpoint}"]  # for the next resume too
    shown = json.loads(plain_nodes.run("status", run, "--json").stdout)
    assert list(shown["parts"]) == ["node01"], shown
    assert plain_nodes.marked() == []


def assert_case_file(training, run, diagnosed, path):
    """The code has the verdict, and the redacted report neither names nor addresses of the nodes."""
    code = re.findall(r"(?m)^  ((?:[0-9A-Z]{4}-){3}[0-9A-Z]{4})$", diagnosed)
    decoded = training.run("diagnose", "--code", *code)
    assert "node-1 rank 0 failed first: the disk is full" in decoded.stdout, decoded.stdout + decoded.stderr
    reported = training.run("report", run, "--redact", "--output", path)
    assert reported.returncode == 0, reported.stderr
    page = path.read_text()
    addresses = [node.address for node in training.box.nodes]
    names = [run, "/home/trainer", *training.nodes, *addresses]
    assert [name for name in names if name in page] == []
    assert code[0] in page


def test_a_full_disk_during_a_checkpoint_is_reported_and_resume_works(plain_nodes, tmp_path):
    output = "/home/trainer/small/out"
    for node in plain_nodes.nodes:
        plain_nodes.on(node, "mkdir", "-p", output)
        plain_nodes.on(node, "chown", "-R", "trainer:trainer", "/home/trainer/small")
    plain_nodes.on("node01", "mount", "-t", "tmpfs", "-o", "size=6m,uid=1000,gid=1000", "tmpfs", output)
    try:
        failed = plain_nodes.start(
            *("train", "--nodes", "2", "--output", output, "--resume-arg", "--resume={checkpoint}", "steps.py", "--"),
            *("--steps", "40", "--pause", "0", "--output", output, "--save-every", "5", "--ballast", "2500000"),
            until=r"step 1 ",
        )
        assert failed.finish() == 6, failed.output
        run = plain_nodes.last_run().name
        assert plain_nodes.marked(run=run) == []
        diagnosed = plain_nodes.run("diagnose", run)
        assert "node01 rank 0 failed first: the disk is full" in diagnosed.stdout, diagnosed.stdout
        assert_case_file(plain_nodes, run, diagnosed.stdout, tmp_path / "case.html")
        plain_nodes.on("node01", "mount", "-o", "remount,size=64m", output)
        resumed = plain_nodes.run("resume", run)
        assert resumed.returncode == 0, resumed.stderr
        went_on = re.findall(r"rank 0 resumes from step (\d+)", resumed.stdout + resumed.stderr)
        assert went_on == ["10"]  # two of them had room
    finally:
        plain_nodes.on("node01", "umount", "-l", output)
        for node in plain_nodes.nodes:
            plain_nodes.on(node, "rm", "-rf", "/home/trainer/small")


def test_deepspeeds_tags_are_resumed_without_options_and_unusable_work_is_moved_aside(plain_nodes):
    """Two nodes with own disks: the folder and the arguments to resume come from the script's own source."""
    started = plain_nodes.start(
        *("train", "--nodes", "2", "--restarts", "3", "tags.py", "--", "--steps", "40", "--save-every", "5"),
        until=r"step 12 ",
    )
    run = plain_nodes.last_run().name
    out = f"{RUNS}/{run}/job/out-tags"
    # A tag of a save that did not finish, as newest.
    part = "mp_rank_00_model_states.pt"
    torn = f"mkdir {out}/iter_35; head -c 50 {out}/iter_10/{part} >{out}/iter_35/{part}; chown -R trainer {out}/iter_35"
    plain_nodes.on("node01", "sh", "-c", torn)
    plain_nodes.kill("node02", plain_nodes.rank("node02"), signal.SIGKILL)
    assert started.finish(180) == 0, started.output
    assert "to resume, tags.py gets --load_dir {folder} --ckpt_id {tag}" in started.output
    assert re.search(r"rank 0 resumes from step ([123][05]) of iter_\1\b", started.output), started.output
    assert f"moved to {out}/kept-1, so that nothing writes over it: iter_35" in started.output
    assert plain_nodes.on("node01", "ls", f"{out}/kept-1").split() == ["iter_35"]
    assert plain_nodes.on("node01", "cat", f"{out}/latest") == "iter_40"
    assert f"moved aside, because it could not be used: node01:{out}/kept-1" in plain_nodes.run("status", run).stdout
    assert plain_nodes.marked() == []


def test_a_script_that_only_its_help_explains_is_restarted_and_resumed(plain_nodes):
    """Its options are not in its source: rank 0's node is asked, which neither trains nor writes into the run."""
    started = plain_nodes.start(
        *("train", "--nodes", "2", "--restarts", "1", "hidden.py", "--", "--steps", "40", "--out_dir", "out"),
        until=r"step 12 ",
    )
    run = plain_nodes.last_run().name
    assert plain_nodes.record()["resume_arg"] == "--resume_from {checkpoint}", started.output
    plain_nodes.kill("node02", plain_nodes.rank("node02"), signal.SIGKILL)
    assert started.finish(180) == 0, started.output
    assert "resume is not in its source: the start of the run asks hidden.py --help" in started.output
    assert "to resume, hidden.py gets --resume_from {checkpoint}, by its option --resume_from (its --help)" in (
        started.output
    )
    assert re.search(r"rank 0 resumes from step [123][05]\b", started.output), started.output
    assert sorted(losses(plain_nodes, run)) == list(range(1, 41))
    assert plain_nodes.on("node01", "sh", "-c", "ls -d /tmp/clusterctl-help-* 2>/dev/null || true") == ""
