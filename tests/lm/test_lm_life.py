"""What becomes of a training when something happens to it."""

import json
import os
import re
import shutil
import signal

import pytest
from trainings import HERE, TINY

LONG = ("--max-iters", 100000, "--eval-interval", 0, "--schedule", "constant", "--keep", 2)


MODES = pytest.mark.parametrize("mode", ["off", "on"])  # of --save-async


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("iter_"))


@pytest.fixture(scope="module")
def whole(gpt):
    """A training without interruption."""
    return gpt.session([["--out", "whole", "--max-iters", 40, "--eval-interval", 10, "--save-interval", 4]])[0]


@MODES
def test_a_killed_training_resumes_with_the_same_losses(gpt, whole, mode):
    out = f"killed-{mode}"
    argv = ("--out", out, "--max-iters", 40, "--eval-interval", 10, "--save-interval", 4, "--save-async", mode)
    going = gpt.start(*argv)
    going.until(f"saved {out}/iter_12")
    going.kill()
    assert (gpt.folder / out / "latest").read_text().startswith("iter_")
    resumed = gpt.train(*argv, "--resume", "latest")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from {out}/iter_" in resumed.stdout
    for key in ("loss", "grad_norm", "lr", "eval_loss", "train_loss"):
        again = [json.loads(line) for line in (gpt.folder / out / "trainer_log.jsonl").read_text().splitlines()]
        assert {line["current_steps"]: line[key] for line in again if key in line} == whole.records(key)
    assert (gpt.folder / out / "final").read_text() == "iter_40\n"


@MODES
def test_sigterm_to_one_rank_saves_on_all_and_exits_0(gpt, mode):
    out = f"stopped-{mode}"
    argv = ("--out", out, *LONG, "--save-async", mode, "--save-interval", 2, "--keep", 1)
    going = gpt.start(*argv, ranks=2)
    going.until("iter 5: ")
    os.kill(going.rank(1), signal.SIGUSR2)  # save, and continue
    going.until("saving on request")
    os.kill(going.rank(1), signal.SIGTERM)
    assert going.finish() == 0, going.output
    asked = int(re.search(r"step (\d+): saving on request", going.output)[1])
    assert f"step {asked}: saved {out}/iter_{asked}" in going.output
    (name,) = names(gpt.folder / out)
    assert (gpt.folder / out / "latest").read_text() == f"{name}\n"
    assert not (gpt.folder / out / "final").exists()
    assert [path.name for path in (gpt.folder / out).iterdir() if path.name.startswith(".")] == []
    step = int(name[5:])
    assert f"finished at step {step}: SIGTERM" in going.output
    reported = json.loads((gpt.folder / out / name / "complete.json").read_text())
    assert (reported["step"], reported["world"], len(reported["files"])) == (step, 2, 2)
    resumed = gpt.train(*argv, "--max-iters", step + 2, "--resume", "latest", ranks=2)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"iter {step + 1}: " in resumed.stdout


@MODES
def test_kill_at_any_moment_of_a_save_leaves_a_usable_checkpoint(gpt, mode):
    """``best`` is up to date too: a loss is stored with its checkpoint, and ``latest`` moves last."""
    argv = [*TINY, "--out", gpt.folder / "moments", "--max-iters", 3, "--eval-interval", 1, "--keep", 1]
    argv += ["--save-async", mode]
    losses = [3.0, 2.0, 2.5]
    result = gpt.run(HERE / "moments.py", "moments", "--evaluated", ",".join(map(str, losses)), *argv)
    assert result.returncode == 0, result.stdout + result.stderr
    reported = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    steps = [each["latest"] for each in reported]
    assert steps == sorted(steps, key=lambda step: step or 0)  # it never names an older one than before
    assert {None, 1, 2, 3} == set(steps)
    for each in reported:
        if each["latest"]:
            until = losses[: each["latest"]]
            ahead = each["best"] == each["latest"] + 1  # saved, and not yet committed
            assert each["lowest"] == min(until)
            assert ahead or losses[each["best"] - 1] == min(until)
            assert losses[each["again"] - 1] == min(until)
    assert {(each["latest"], each["best"]) for each in reported} == {(None, None), (1, 1), (1, 2), (2, 2), (3, 2)}
    text = "\n".join(each["before"] for each in reported)
    for what in ("half of /.saving-iter_2/part-", "complete.json", "os.rename /.saving-latest", "shutil.rmtree"):
        assert what in text
    assert len(reported) > 20
    left = gpt.train("--out", "moments", "--max-iters", 4, "--resume", "latest", "--eval-interval", 0)
    assert left.returncode == 0, left.stderr
    hidden = [path.name for path in (gpt.folder / "moments").iterdir() if path.name.startswith(".")]
    assert hidden == []


def test_agent_finds_the_newest_complete_checkpoint(gpt, whole):
    from trainer.agent.checkpoints import selection

    lost = gpt.folder / "lost"
    shutil.copytree(whole.out, lost)
    shutil.copytree(lost / "iter_40", lost / "iter_44")
    (lost / "iter_44/complete.json").unlink()  # as on a node whose disk lost it
    (lost / "latest").write_text("iter_44\n")
    choice = selection.newest({0: selection.offer(lost, 0, 1)}, 1)
    assert (choice.name, choice.step, choice.copy) == ("iter_40", 40, {})
    assert [name for name, _ in choice.refused] == ["iter_44"]
    argv = ("--out", "lost", "--max-iters", 41, "--eval-interval", 0)
    resumed = gpt.train(*argv, env={"CLUSTERCTL_CHECKPOINT": str(lost / choice.name)})
    assert "at step 40" in resumed.stdout, resumed.stderr
    assert (lost / "latest").read_text() == "iter_41\n"


@MODES
def test_nan_stops_all_ranks_and_names_the_rank(gpt, mode):
    out = f"nan-{mode}"
    argv = [*TINY, "--out", out, "--save-interval", 1, "--save-async", mode]
    result = gpt.run(HERE / "poison.py", "nan", 4, 1, *argv, ranks=2)
    assert result.returncode == 1
    reported = f"error: loss is nan at step 4 on rank 1; {out}/iter_3 is the last good checkpoint; --resume latest"
    assert reported in result.stderr
    assert names(gpt.folder / out) == ["iter_1", "iter_2", "iter_3"]
    assert (gpt.folder / out / "latest").read_text() == "iter_3\n"


def test_out_of_memory_is_one_line(gpt):
    result = gpt.run(HERE / "poison.py", "memory", 2, 0, *TINY, "--out", "memory")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: CUDA out of memory. Tried to allocate 2.00 GiB; use a smaller --batch-size")


def test_nan_before_the_first_checkpoint_is_reported_as_such(gpt):
    result = gpt.run(HERE / "poison.py", "nan", 2, 0, *TINY, "--out", "exploded", "--learning-rate", "0.5")
    assert result.returncode == 1
    assert result.stderr.startswith("error: loss is nan at step 2 on rank 0; no checkpoint exists yet; use a lower ")
    assert "--learning-rate, such as --learning-rate 0.25\n" in result.stderr
    assert "Traceback" not in result.stderr
    assert names(gpt.folder / "exploded") == []


@MODES
def test_full_disk_leaves_the_checkpoints_unchanged(gpt, mode):
    out = f"full-{mode}"
    argv = [*TINY, "--out", out, "--save-interval", 1, "--save-async", mode]
    result = gpt.run(HERE / "poison.py", "full", 4, 0, *argv, ranks=2)
    assert result.returncode == 1
    reported = f"step 4: not saved: {out}/iter_4: File too large; earlier checkpoints are unchanged"
    assert reported in result.stdout
    assert "error: the last checkpoint could not be saved" in result.stderr
    assert "free disk space, then --resume latest" in result.stderr
    assert names(gpt.folder / out) == ["iter_1", "iter_2", "iter_3"]
    assert (gpt.folder / out / "latest").read_text() == "iter_3\n"
    resumed = gpt.train("--out", out, "--resume", "latest")
    assert resumed.returncode == 0, resumed.stderr
    assert "iter 4: " in resumed.stdout


@MODES
def test_best_checkpoint_that_was_not_saved_is_not_named(gpt, mode):
    """The evaluation of step 2 is the best, and its checkpoint is lost: of those that exist step 3 has the best one."""
    out = gpt.folder / f"unsaved-{mode}"
    argv = [*TINY, "--out", out, "--eval-interval", 1, "--save-async", mode, "--max-iters", 3, "--evaluated", "3,1,2"]
    result = gpt.run(HERE / "poison.py", "once", 2, 0, *argv)
    assert result.returncode == 0, result.stderr
    assert "step 2: not saved: " in result.stdout
    assert names(out) == ["iter_1", "iter_3"]
    assert (out / "best").read_text() == "iter_3\n"
    resumed = gpt.run(HERE / "poison.py", "once", 0, 0, *argv[:-4], "--max-iters", 5, "--resume", "latest", *argv[-2:])
    assert resumed.returncode == 0, resumed.stderr
    assert (out / "best").read_text() == "iter_5\n"  # 1.0 at step 5, compared with 2.0 of step 3


SAVES = [*TINY, "--eval-interval", 0, "--save-interval", 4, "--max-iters", 10]


def test_training_continues_while_a_checkpoint_of_its_old_state_is_written(gpt):
    result = gpt.run(HERE / "poison.py", "late", 4, 0, *SAVES, "--out", "late", "--save-async", "on")
    assert result.returncode == 0, result.stderr
    order = [
        line.split("(")[0] for line in result.stdout.splitlines() if line.startswith(("iter 6", "step 4", "step 8"))
    ]
    assert order[0].startswith("iter 6: ")
    assert order[1:] == ["step 4: saved late/iter_4 ", "step 8: saved late/iter_8 "]
    (other,) = gpt.session([[*SAVES, "--out", "not-late", "--save-async", "off"]], tiny=False)
    for step in (4, 8, 10):
        part = f"iter_{step}/part-00000-of-00001.safetensors"
        assert (gpt.folder / "late" / part).read_bytes() == (other.out / part).read_bytes()


def test_a_save_waits_for_the_one_before(gpt):
    """The first part is written only when the step begins after which the second save is due."""
    argv = [*SAVES, "--out", "waits", "--save-async", "on", "--save-interval", 3]
    result = gpt.run(HERE / "poison.py", "late", 3, 0, *argv)
    assert result.returncode == 0, result.stderr
    saved = [line.split()[1] for line in result.stdout.splitlines() if ": saved waits/" in line]
    assert saved == ["3:", "6:", "9:", "10:"]


def test_without_memory_for_copies_saves_are_synchronous(gpt):
    result = gpt.run(HERE / "poison.py", "little", 0, 0, *SAVES, "--out", "little", "--save-async", "on", ranks=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("save_async: the training stops during saves: copies of a node's part need ") == 1
    assert "need 0.0 GB of host memory, and 0.0 GB are available" in result.stdout
    assert names(gpt.folder / "little") == ["iter_10", "iter_4", "iter_8"]


@pytest.fixture(scope="module")
def decided(gpt):
    """Trainings whose evaluations a test decides."""
    every = ["--eval-interval", 1, "--evaluated"]
    runs = {
        "calm": ["--keep", 2, "--max-iters", 5, *every, "5,4,3,2,1"],
        "wild": ["--keep", 1, "--max-iters", 5, *every, "5,3,4,4,4"],
        "equal": ["--keep", 1, "--max-iters", 5, *every, "5,3,3,3,3"],
        "early": ["--patience", 2, "--max-iters", 9, *every, "5,3,4,2,4,2,1,1,1"],
        "better": ["--always-save", "false", "--max-iters", 7, *every, "5,6,4,4,5,3,6"],
    }
    return dict(zip(runs, gpt.session([["--out", name, *argv] for name, argv in runs.items()]), strict=True))


@pytest.mark.parametrize(
    ("name", "kept", "best"),
    [
        ("calm", [4, 5], 5),
        ("wild", [2, 5], 2),
        ("equal", [2, 5], 2),  # the first of those with the lowest loss
        ("better", [1, 3, 6, 7], 6),  # the end is always kept
    ],
)
def test_only_the_newest_and_the_best_are_kept(decided, name, kept, best):
    out = decided[name].out
    assert names(out) == [f"iter_{step}" for step in kept]
    assert (out / "best").read_text() == f"iter_{best}\n"
    assert (out / "final").read_text() == f"iter_{kept[-1]}\n"


def test_training_stops_early_without_improvement(decided):
    """No loss is below that of step 4 in the two evaluations after it."""
    out = decided["early"].out
    assert sorted(decided["early"].records("eval_loss")) == [1, 2, 3, 4, 5, 6]
    assert (out / "final").read_text() == "iter_6\n"
    assert (out / "best").read_text() == "iter_4\n"


def disks(gpt, *folders):
    result = gpt.run(HERE / "disks.py", *folders)
    assert result.returncode == 0, result.stdout + result.stderr
    reported = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda each: each["rank"])
    assert [(each["best"], each["named"]) for each in reported] == [(1.0, "iter_2")] * 2
    return reported


def test_one_rank_renames_for_all_nodes_that_share_a_disk(gpt):
    first, second = disks(gpt, "shared-disk", "shared-disk")
    assert {name for what, name in first["done"] if what == "rename"} >= {".saving-iter_1", ".saving-best-0", "iter_1"}
    assert [what for what, name in first["done"]].count("remove") >= 3
    assert second["done"] == []
    kept = {"best", "latest", "iter_2", "iter_3"}
    assert {name for name in second["holds"] if "/" not in name} == kept
    assert sum("part-" in name for name in second["holds"]) == 4


def test_every_node_with_a_private_disk_renames_its_own(gpt):
    first, second = disks(gpt, "private-0", "private-1")
    for reported in (first, second):
        assert {".saving-iter_1", "iter_1"} <= {name for what, name in reported["done"] if what == "rename"}
        assert {name for name in reported["holds"] if "/" not in name} == {"best", "latest", "iter_2", "iter_3"}
        assert sum("part-" in name for name in reported["holds"]) == 2
    assert "iter_3/complete.json" in first["holds"]
    assert "iter_3/complete.json" not in second["holds"]


def test_sigint_saves_like_sigterm(gpt):
    result = gpt.run(HERE / "poison.py", "interrupt", 4, 0, *TINY, "--out", "interrupted")
    assert result.returncode == 0, result.stderr
    assert "finished at step 4: SIGINT\n" in result.stdout
    assert "SIGINT: saving after this step" in result.stderr
    assert (gpt.folder / "interrupted/latest").read_text() == "iter_4\n"
    assert not (gpt.folder / "interrupted/final").exists()


def test_the_third_ctrl_c_does_not_wait(gpt):
    result = gpt.run(HERE / "poison.py", "impatient", 4, 0, *TINY, "--out", "impatient", "--eval-interval", 0)
    assert result.returncode == 130
    assert not (gpt.folder / "impatient/latest").exists()
