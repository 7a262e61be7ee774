"""``rehearse``: what it decides, its scripts on real processes, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from provision.cli import main
from provision.errors import PreflightError, UsageError
from provision.inventory import local_inventory
from provision.rehearsal.certificate import Certificate, page, to_object
from provision.rehearsal.faults import (
    FAULTS,
    NAMES,
    Place,
    chosen,
    inject_script,
    lasting,
    planned,
    undo_script,
    watchdog_script,
)
from provision.rehearsal.judging import Injected, Result, Seen, failed, judge, others
from provision.rehearsal.redirect import own_output
from provision.render import render
from provision.run.job import Job
from provision.session import Session
from provision.summaries.rehearsal import certificate_rows
from provision.tasks.rehearse import refuse_others

BY = {fault.name: fault for fault in FAULTS}
NODES = ("node01", "node02")
SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]


def step(time, number, node="node01"):
    return Seen(time, node, {"event": "progress", "step": number})


def attempt(time, checkpoint, node="node01"):
    return Seen(time, node, {"event": "attempt", "checkpoint": checkpoint})


def ends(time, state="failed"):
    return [Seen(time, node, {"event": "end", "state": state}) for node in NODES]


def why(time, text, node="node02"):
    return Seen(time, "node01", {"event": "notice", "kind": "restart", "why": {"node": node, "rank": 1, "text": text}})


def injected(name, at=10.0, lasts=0.0, torn=""):
    return Injected(BY[name], "node02", at, at + lasts, torn=torn)


# --- judging ---------------------------------------------------------------------------------------

BEFORE = [step(8.0, 39), step(9.0, 40), step(9.5, 41)]


def test_a_restart_is_survived_from_the_first_step_beyond_the_last_one():
    fault = injected("kill-rank")
    seen = [*BEFORE, step(10.5, 42), why(11.0, "rank 1 was killed by SIGKILL"), attempt(13.0, "checkpoint-40")]
    assert judge(fault, seen, NODES).result is None
    seen += [step(14.0, 41), step(14.5, 42)]
    assert judge(fault, seen, NODES).result is None  # these are repeated
    found = judge(fault, [*seen, step(15.0, 43)], NODES).result
    assert (found.outcome, found.seconds, found.repeated) == ("survived", 5.0, 2)
    assert found.text == "rank 1 was killed by SIGKILL; continued from checkpoint-40"


@pytest.mark.parametrize(
    ("checkpoint", "first", "repeated"),
    [("checkpoint-40", 41, 1), (None, 1, 41), ("best", 31, 11), ("epoch=3.ckpt", 21, 21)],
)
def test_repeated_steps_are_counted_from_the_checkpoint(checkpoint, first, repeated):
    seen = [*BEFORE, attempt(13.0, checkpoint), *(step(13.0 + at, at) for at in range(first, 45))]
    assert judge(injected("kill-rank"), seen, NODES).result.repeated == repeated


def test_a_run_that_ended_everywhere_needs_a_command():
    fault = injected("kill-agent")
    assert not judge(fault, BEFORE, NODES).over
    assert not judge(fault, [*BEFORE, ends(11.0)[0]], NODES).over
    assert judge(fault, [*BEFORE, *ends(11.0)], NODES).over
    resumed = [*BEFORE, *ends(11.0), attempt(14.0, "checkpoint-40"), step(15.0, 41)]
    assert judge(fault, [*BEFORE, *ends(11.0)], NODES, 12.0).over is False  # the new attempt has not reported yet
    assert judge(fault, resumed, NODES, 12.0).result is None
    found = judge(fault, [*resumed, step(15.5, 42)], NODES, 12.0).result
    assert (found.outcome, found.seconds, found.repeated) == ("resumed", 5.5, 1)
    assert judge(fault, [*resumed, *ends(15.2)], NODES, 12.0).over


def test_a_fault_that_is_endured_ends_before_it_is_judged():
    fault = injected("slow-node", lasts=20.0)
    seen = [*BEFORE, step(12.0, 43), step(29.0, 50)]
    assert judge(fault, seen, NODES).result is None
    found = judge(fault, [*seen, step(31.5, 51)], NODES).result
    assert (found.outcome, found.seconds, found.repeated) == ("survived", 1.5, 0)
    assert found.text == "steps 41 to 50 meanwhile; not named as slow within 20 s; that takes about 100 s"
    slow = Seen(28.0, "node01", {"event": "straggler", "state": "slow", "text": "the others wait for rank 1"})
    assert "wait for rank 1" in judge(fault, [*seen, slow, step(31.5, 51)], NODES).result.text
    disk = injected("fill-disk", lasts=20.0)
    assert "wait for rank 1" not in judge(disk, [*seen, slow, step(31.5, 51)], NODES).result.text


def test_an_endured_fault_may_also_restart_the_run():
    seen = [*BEFORE, why(12.0, "rank 0 exited with code 1", "node01"), attempt(14.0, "checkpoint-40"), step(15.0, 42)]
    found = judge(injected("fill-disk", lasts=20.0), seen, NODES).result
    assert (found.outcome, found.repeated) == ("survived", 1)
    assert found.text.startswith("node01: rank 0 exited with code 1")


def test_a_torn_checkpoint_must_not_be_used():
    skipped = Seen(12.5, "node01", {"event": "notice", "text": "checkpoint skipped: checkpoint-40: no trainer_state"})
    fault = injected("tear-checkpoint", torn="checkpoint-40")
    good = [*BEFORE, why(11.0, "killed"), skipped, attempt(13.0, "checkpoint-30"), step(15.0, 42)]
    found = judge(fault, good, NODES).result
    assert (found.outcome, found.repeated) == ("survived", 11)
    assert found.text == "checkpoint skipped: checkpoint-40: no trainer_state; continued from checkpoint-30"
    found = judge(fault, [*BEFORE, attempt(13.0, "checkpoint-40"), step(15.0, 42)], NODES).result
    assert (found.outcome, found.text) == ("not survived", "it continued from checkpoint-40, which was torn")


def test_what_was_not_survived_names_what_the_run_reported():
    found = failed(injected("kill-rank"), [*BEFORE, why(11.0, "rank 1 died")], "no new step in 60 s")
    assert (found.outcome, found.text) == ("not survived", "rank 1 died; no new step in 60 s")


# --- other people ----------------------------------------------------------------------------------

LISTED = """\
own 1001
hertz 100
first 5 100 python
first 6 100 cc1plus
first 7 100 sshd
first 8 100 train (x) y
second 5 190 python
second 6 119 cc1plus
second 7 180 sshd
second 8 150 train (x) y
second 9 900 new
user 5 1000 alice
user 6 1000 alice
user 7 101 daemon
user 8 1001 me
user 9 1000 alice
"""


def test_only_other_peoples_processes_that_compute_count():
    assert others(LISTED, 1001) == ["alice: python (process 5) uses 90 % of a core"]
    assert others(LISTED, 1000) == ["me: train (x) y (process 8) uses 50 % of a core"]
    assert others(LISTED.replace("alice", "UNKNOWN"), 1001)[0].startswith("user 1000: python")


@pytest.mark.parametrize("text", ["", "first", "first x y z\nsecond 5 -3 a\nuser a b c\nhertz 0\nown\n", "\0" * 50])
def test_any_list_of_processes_is_read(text):
    assert others(text, 0) == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_lists_processes_with_their_time_and_their_user(shell):
    argv = [shell, "sh"] if shell == "busybox" else [shell]
    out = subprocess.run(
        argv, input=render("rehearse/others.sh.j2"), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    me = os.getpid()
    assert f"own {os.getuid()}" in out.splitlines()
    assert [line.split()[0] for line in out.splitlines() if line.split()[1] == str(me)] == ["first", "second", "user"]


def test_nodes_that_others_use_are_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "env"))
    monkeypatch.chdir(tmp_path)
    inventory = local_inventory(starts=True)
    monkeypatch.setattr("provision.tasks.rehearse.others", lambda *_: ["alice: python (process 5) uses 90 % of a core"])
    with Session(inventory) as session:
        with pytest.raises(PreflightError, match="in use, so no fault was injected") as caught:
            refuse_others(session, session.nodes, force=False)
        (reason,) = caught.value.reasons.values()
        assert "alice: python (process 5)" in reason
        assert "--force" in caught.value.hint
        assert refuse_others(session, session.nodes, force=True)


# --- the output folder -----------------------------------------------------------------------------


def test_a_relative_output_is_in_the_runs_folder_already():
    job = Job("script", "train.py", ("--out", "out"))
    assert own_output(job, "job/out", "ab").job == job
    assert own_output(job, "job/out", "ab").output is None


def test_an_absolute_output_is_replaced_wherever_it_is_typed():
    job = Job("script", "train.py", ("--out", "/data/out/", "--x=/data/out", "--y=/data/outer"), output="/data/out")
    own = own_output(job, "/data/out", "ab12")
    fresh = "/data/out-rehearsal-ab12"
    assert own.output == fresh
    assert own.job == replace(job, args=("--out", fresh, f"--x={fresh}", "--y=/data/outer"), output=fresh)


def test_the_output_of_a_config_is_replaced_by_an_argument():
    job = Job("config", "sft.yaml", ("output_dir=/data/old", "max_steps=5"))
    own = own_output(job, "/data/out", "ab12")
    assert own.job.args == ("max_steps=5", "output_dir=/data/out-rehearsal-ab12")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "where this program saves its checkpoints is not known"),
        ("../out", "outside of the run's folder"),
        ("/data/out", "which its arguments do not name"),
    ],
)
def test_an_output_that_cannot_be_replaced_is_refused(output, message):
    with pytest.raises(UsageError, match=message) as caught:
        own_output(Job("script", "train.py", ("--lr", "1")), output, "ab")
    assert caught.value.hint


def test_an_output_that_the_arguments_contradict_is_refused():
    job = Job("script", "train.py", ("--output_dir", "/data/real"), output="out")
    with pytest.raises(UsageError, match="arguments name /data/real, which a rehearsal would write over"):
        own_output(job, "job/out", "ab")
    with pytest.raises(UsageError, match="starts with ~"):
        own_output(Job("script", "train.py", ("--out", "~/real")), "job/~/real", "ab")


# --- faults and their scripts ----------------------------------------------------------------------


def test_faults_are_chosen_by_name_and_keep_their_order():
    assert chosen(None) == FAULTS
    assert [fault.name for fault in chosen("cut-network, kill-rank")] == ["kill-rank", "cut-network"]
    for text in ("kill-rnk", ","):
        with pytest.raises(UsageError, match="fault") as caught:
            chosen(text)
        assert "kill-rank" in caught.value.hint


def test_a_fault_lasts_a_bounded_part_of_the_rehearsal():
    for seconds in (60.0, 900.0, 14400.0):
        for fault in FAULTS:
            lasts = lasting(fault, seconds, 60.0)
            assert 0 <= lasts <= fault.longest
            assert bool(lasts) == bool(fault.lasts)
    assert lasting(BY["cut-network"], 60.0, 60.0) == 70
    nodes = {each.fault.name: each.node for each in planned(FAULTS, ("a", "b"), 900, 60)}
    assert (nodes["remove-controller"], nodes["kill-rank"], nodes["tear-checkpoint"]) == ("", "b", "a")


def scripts(place):
    for fault in FAULTS:
        if fault.name != "remove-controller":
            seconds = lasting(fault, 60.0, 5.0)
            yield fault.name, inject_script(fault, place, seconds)
            yield f"undo-{fault.name}", undo_script(fault.name, place)
    yield "watchdog", watchdog_script(place, 900, "echo stopped")


AWKWARD = Place("r 'un", "no$de", "/a folder/`id`", "/a folder/logs/node0", '/out "put"', ("checkpoint-[0-9]*", "a b"))


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_is_sh_whatever_the_names(shell):
    argv = [shell, "sh"] if shell == "busybox" else [shell]
    for name, text in scripts(AWKWARD):
        done = subprocess.run([*argv, "-n"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), name


def test_a_fault_that_lasts_carries_its_undo_and_a_timer():
    place = Place("run", "node01", "/r/run", "/r/run/logs/node0", "/out")
    for fault in FAULTS:
        if fault.lasts and fault.name != "remove-controller":
            text = inject_script(fault, place, 30)
            last = undo_script(fault.name, place).strip().splitlines()[-1]
            assert last in text
            assert "setsid" in text


class Ranks:
    """A run on this machine as its scripts see it: two ranks, a launcher, and a process that is none of its."""

    def __init__(self, folder: Path) -> None:
        self.place = Place("run-1", "here", str(folder), str(folder), str(folder))
        marks = {"CLUSTERCTL_RUN": "run-1", "CLUSTERCTL_NODE": "here"}
        self.launcher = self.start(marks)
        self.ranks = [self.start({**marks, "RANK": str(rank)}) for rank in range(2)]
        self.strangers = [self.start({**marks, "CLUSTERCTL_NODE": "there", "RANK": "0"}), self.start({"RANK": "0"})]
        self.state(command=self.launcher.pid, pid=self.strangers[0].pid)

    @staticmethod
    def start(env):
        return subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], **env})

    def state(self, **fields):
        Path(self.place.logs, "state.json").write_text(json.dumps(fields))

    def run(self, text):
        return subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=False, timeout=60)

    def inject(self, name, seconds=0):
        return self.run(inject_script(BY[name], self.place, seconds))

    def undo(self, name):
        return self.run(undo_script(name, self.place))

    def close(self):
        for process in (self.launcher, *self.ranks, *self.strangers):
            process.kill()
            process.wait()


@pytest.fixture
def ranks(tmp_path):
    found = Ranks(tmp_path)
    yield found
    found.close()


def state_of(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(test):
    limit = time.monotonic() + 30
    while not test():
        assert time.monotonic() < limit
        time.sleep(0.02)  # only /proc shows the state


def timers(place):
    argv = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            argv.append(path.read_bytes())
    return [each for each in argv if b"cc-rehearsal" in each and place.folder.encode() in each]


def test_a_stopped_rank_continues_after_the_undo(ranks):
    done = ranks.inject("stop-rank", 60)
    assert done.returncode == 0, done.stderr
    assert "hit process" in done.stdout
    until(lambda: "T" in map(state_of, ranks.ranks))
    assert all(state_of(each) != "T" for each in (*ranks.strangers, ranks.launcher))
    assert timers(ranks.place)
    for _ in range(2):  # an undo may run twice
        assert ranks.undo("stop-rank").returncode == 0
    until(lambda: "T" not in map(state_of, ranks.ranks))
    until(lambda: not timers(ranks.place))
    assert not list(Path(ranks.place.folder).glob(".rehearsal-*"))


def test_a_timer_undoes_a_fault_without_any_command(ranks):
    assert ranks.inject("stop-rank", 1).returncode == 0
    until(lambda: "T" in map(state_of, ranks.ranks) or not timers(ranks.place))
    until(lambda: not timers(ranks.place))
    assert "T" not in map(state_of, ranks.ranks)


def test_a_slow_node_stops_only_its_ranks_and_runs_at_the_end(ranks):
    assert ranks.inject("slow-node", 60).returncode == 0
    until(lambda: list(map(state_of, ranks.ranks)) == ["T", "T"])
    assert all(state_of(each) != "T" for each in (*ranks.strangers, ranks.launcher))
    assert ranks.undo("slow-node").returncode == 0
    until(lambda: not timers(ranks.place))
    assert "T" not in map(state_of, ranks.ranks)


def test_kills_hit_only_processes_of_the_run(ranks):
    assert ranks.inject("kill-rank").returncode == 0
    until(lambda: sorted(each.poll() for each in ranks.ranks if each.poll() is not None) == [-signal.SIGKILL])
    assert ranks.inject("kill-launcher").returncode == 0
    until(lambda: ranks.launcher.poll() == -signal.SIGKILL)
    done = ranks.inject("kill-agent")  # the state names a process that is no agent of this run
    assert (done.returncode, done.stderr.strip()) == (
        3,
        f"process {ranks.strangers[0].pid} is not the agent of this run",
    )
    assert all(each.poll() is None for each in ranks.strangers)


def test_a_launcher_that_is_a_rank_is_not_killed(ranks):
    ranks.state(command=ranks.ranks[0].pid)
    done = ranks.inject("kill-launcher")
    assert done.returncode == 3
    assert "there is no launcher" in done.stderr
    assert all(each.poll() is None for each in ranks.ranks)


def test_a_torn_checkpoint_lacks_the_file_that_was_written_last(ranks):
    folder = Path(ranks.place.folder)
    for number, at in ((10, 100), (20, 200)):
        (folder / f"checkpoint-{number}").mkdir()
        for name, more in (("model.safetensors", 0), ("trainer_state.json", 1)):
            file = folder / f"checkpoint-{number}" / name
            file.write_text("x")
            os.utime(file, (at + more, at + more))
        os.utime(folder / f"checkpoint-{number}", (at, at))
    ranks.place = replace(ranks.place, names=("checkpoint-[0-9]*",))
    done = ranks.inject("tear-checkpoint")
    assert done.returncode == 0, done.stderr
    assert "torn checkpoint-20" in done.stdout.splitlines()
    assert [path.name for path in (folder / "checkpoint-20").iterdir()] == ["model.safetensors"]
    assert len(list((folder / "checkpoint-10").iterdir())) == 2


def test_a_torn_file_is_cut_in_half(ranks):
    file = Path(ranks.place.folder, "step_30.pt")
    file.write_bytes(bytes(1000))
    ranks.place = replace(ranks.place, names=("step_[0-9]*.pt",))
    assert "torn step_30.pt" in ranks.inject("tear-checkpoint").stdout
    assert file.stat().st_size == 500


def test_the_watchdog_stops_the_run_unless_it_is_undone(ranks):
    marker = Path(ranks.place.folder, "stopped")
    assert ranks.run(watchdog_script(ranks.place, 60, f"touch {marker}")).returncode == 0
    until(lambda: timers(ranks.place))  # it starts in the background
    assert ranks.undo("watchdog").returncode == 0
    until(lambda: not timers(ranks.place))
    assert not marker.exists()
    assert ranks.run(watchdog_script(ranks.place, 0, f"touch {marker}")).returncode == 0
    until(marker.exists)


# --- the certificate -------------------------------------------------------------------------------

CERTIFICATE = Certificate(
    run="20261127-101500-rehearsal-sft-1a2b",
    job="sft.yaml",
    nodes=("gpu01", "gpu02"),
    world_size=16,
    began="2026-11-27T10:15:00Z",
    seconds=412.0,
    start=21.5,
    results=(
        Result(BY["kill-rank"], "survived", "gpu02", "rank 9 was killed by SIGKILL; continued from c-40", 31.2, 1204),
        Result(BY["kill-agent"], "resumed", "gpu02", "the agent was killed; continued from c-60", 44.0, 1),
        Result(BY["tear-checkpoint"], "not survived", "gpu01", "it continued from <b>c-80</b>, which was torn"),
        Result(BY["cut-network"], "not tried", text="nft is not installed, which would cut the network and restore it"),
    ),
    left=(("gpu02", "the run may still be running"),),
)

TEXT = """\
rehearsal of sft.yaml on gpu[01-02] (16 ranks), 6 min 52 s

FAULT                            RESULT                    RECOVERY     REPEATED
kill a rank                      survived                      31 s  1,204 steps
    gpu02: rank 9 was killed by SIGKILL; continued from c-40
kill the agent                   survived, with resume         44 s       1 step
    gpu02: the agent was killed; continued from c-60
    try: after such a fault: clusterctl resume
tear the newest checkpoint       not survived                     -            -
    gpu01: it continued from <b>c-80</b>, which was torn
    try: let the script write a checkpoint under another name, and rename it
        when it is complete

NOT TRIED
cut a node's network: nft is not installed, which would cut the network and
    restore it

survived 2 of 3 faults, 1 with clusterctl resume; 1 not tried
the certificate: runs/x/certificate.html
warning: gpu02: the run may still be running
"""


def test_the_certificate_fits_a_terminal():
    rows = certificate_rows(CERTIFICATE, Path("runs/x/certificate.html"))
    assert "".join(f"{row.text}\n" for row in rows) == TEXT
    assert max(len(row.text) for row in rows) <= 80
    assert [row.style for row in rows if row.text.startswith(("kill", "tear"))] == ["green", "yellow", "red"]


def test_the_page_has_everything_and_asks_no_other_host():
    text = page(CERTIFICATE)
    assert "default-src 'none'; script-src 'none'" in text
    assert "://" not in text
    assert "&lt;b&gt;c-80" in text
    assert "<b>c-80" not in text
    for words in ("kill a rank", "survived, with resume", "1,204", "Not tried", "nft is not installed", "gpu[01-02]"):
        assert words in text, words


def test_the_data_has_every_fault():
    data = json.loads(json.dumps(to_object(CERTIFICATE)))
    assert [each["outcome"] for each in data["faults"]] == ["survived", "resumed", "not survived", "not tried"]
    assert data["faults"][0]["recovery_seconds"] == 31.2
    assert data["faults"][3]["node"] is None


# --- the command -----------------------------------------------------------------------------------


def call(tmp_path, monkeypatch, capfd, *words):
    (tmp_path / "train.py").write_text("import argparse\np = argparse.ArgumentParser()\np.add_argument('--out_dir')\n")
    nodes = "prefix: /opt/llm/current\nnodes:\n  gpu[01-02]: 192.0.2.[1-2]\n"
    (tmp_path / "inventory.yaml").write_text(nodes)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["rehearse", *words, "train.py"])
    out, err = capfd.readouterr()
    return caught.value.code, out, err


def test_nothing_is_killed_without_a_question(tmp_path, monkeypatch, capfd):
    code, _, err = call(tmp_path, monkeypatch, capfd)
    assert code == 2
    assert "without a terminal, it needs --yes" in err
    assert "clusterctl rehearse --yes train.py" in err


def test_an_unknown_fault_is_refused_before_anything(tmp_path, monkeypatch, capfd):
    code, _, err = call(tmp_path, monkeypatch, capfd, "--faults", "kill-ranks")
    assert code == 2
    assert "kill-ranks: no such fault" in err


def test_a_dry_run_prints_what_happens_where(tmp_path, monkeypatch, capfd):
    code, out, _ = call(tmp_path, monkeypatch, capfd, "--dry-run")
    assert code == 0
    assert "  cut a node's network on gpu02 for 1 min 10 s" in out.splitlines()
    assert "  remove the controller for 18 s" in out.splitlines()
    assert "# --- cut-network on gpu02, as root" in out
    assert "nft delete table inet clusterctl_rehearsal" in out
    code, out, _ = call(tmp_path, monkeypatch, capfd, "--dry-run", "--json", "--faults", "kill-rank")
    assert [each["fault"] for each in json.loads(out)["faults"]] == ["kill-rank"]
    assert set(NAMES) >= set(json.loads(out)["scripts"])
