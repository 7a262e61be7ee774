"""Layouts by their files, whatever the folder's name: complete, torn, a rank missing, mixed, newer and incomplete."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for saved; last, so that it hides no module

from saved import choose, deepspeed, safetensors, torch_zip, trainer, why, write

from trainer.agent.checkpoints.aside import AsideError, move
from trainer.agent.checkpoints.selection import newest, offer
from trainer.agent.contract.offers import problem


def tag(name, world=2, **more):
    """DeepSpeed's own folder of a tag, ZeRO-2."""
    files = {f"{name}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": torch_zip(b"%d" % rank) for rank in range(world)}
    return files | {f"{name}/mp_rank_00_model_states.pt": torch_zip(b"model")} | more


def accelerate(name, world=2):
    """``Accelerator.save_state`` with a scheduler and a registered object."""
    files = {f"random_states_{rank}.pkl": torch_zip(b"%d" % rank, 2) for rank in range(world)}
    files |= dict.fromkeys(("optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"), torch_zip())
    return {f"{name}/{file}": data for file, data in ({"model.safetensors": safetensors()} | files).items()}


def fsdp(name, world=2):
    """accelerate's FSDP with SHARDED_STATE_DICT."""
    files = {f"random_states_{rank}.pkl": torch_zip(b"%d" % rank, 2) for rank in range(world)}
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        files |= {f"{part}/{file}": data for file, data in shards(world).items()}
    return {f"{name}/{file}": data for file, data in files.items()}


def shards(world=2):
    """torch.distributed.checkpoint: each file is the zips of several tensors, one after another."""
    names = [f"__{rank}_0.distcp" for rank in range(world)]
    files = {name: torch_zip(b"one", 9) + torch_zip(b"two", 9) for name in names}
    return files | {".metadata": b"\x80\x02" + b"".join(b"X" + name.encode() for name in names) + b"q\x00."}


def dcp(name, world=2):
    return {f"{name}/{file}": data for file, data in shards(world).items()}


def inside(name, inner, world=2):
    """accelerate's or Lightning's folder with a tag of DeepSpeed."""
    files = tag(inner, world) | {"latest": inner.encode(), "zero_to_fp32.py": b"#"}
    if inner == "pytorch_model":
        files |= {f"random_states_{rank}.pkl": torch_zip(b"%d" % rank, 2) for rank in range(world)}
    return {f"{name}/{file}": data for file, data in files.items()}


LAYOUTS = [
    *(
        (tag(name), name, "deepspeed")
        for name in ("iter_10", "global_step10", "final", "best", "stage1", "checkpoint-10x")
    ),
    (accelerate("checkpoints/checkpoint_3"), "checkpoints/checkpoint_3", "accelerate"),
    (accelerate("checkpoint-500"), "checkpoint-500", "accelerate"),
    (fsdp("checkpoints/checkpoint_3"), "checkpoints/checkpoint_3", "accelerate"),
    (inside("checkpoints/checkpoint_3", "pytorch_model"), "checkpoints/checkpoint_3", "accelerate"),
    (inside("epoch=0-step=4.ckpt", "checkpoint"), "epoch=0-step=4.ckpt", "lightning"),
    (dcp("checkpoint/step-10"), "checkpoint/step-10", "dcp"),
    (dcp("a.ckpt") | {"a.ckpt/meta.pt": torch_zip()}, "a.ckpt", "lightning"),
    (trainer(20), "checkpoint-20", "trainer"),
    (deepspeed(20), "checkpoint-20", "trainer"),
    ({"step_7/model.pt": torch_zip(), "step_7/optim.pt": torch_zip()}, "step_7", "folder"),
    *(
        ({name: torch_zip(), "optimizer.pt": torch_zip(), "run.log": b"x"}, name, "file")
        for name in ("ckpt.pt", "checkpoint_epoch_3.pt", "model_step_100.pt", "latest.pt", "pytorch_model.bin")
    ),
    (
        {f"lightning_logs/version_{n}/checkpoints/epoch=0-step={s}.ckpt": torch_zip() for n, s in ((0, 4), (1, 8))},
        "lightning_logs/version_1/checkpoints/epoch=0-step=8.ckpt",
        "file",
    ),
]
IDS = [f"{layout}-{name.replace('/', '-')}" for _, name, layout in LAYOUTS]


@pytest.mark.parametrize(("files", "name", "layout"), LAYOUTS, ids=IDS)
def test_a_complete_checkpoint_is_recognised(tmp_path, files, name, layout):
    write(tmp_path, files)
    choice = choose([tmp_path])
    assert (choice.name, choice.layout, list(choice.refused), choice.copy) == (name, layout, [], {})
    assert problem(offer(tmp_path, 0, 2)) == ""


@pytest.mark.parametrize(("files", "name", "layout"), LAYOUTS, ids=IDS)
def test_a_torn_checkpoint_is_refused_and_kept(tmp_path, files, name, layout):
    """Every file with tensors in turn: the checkpoint is never chosen, and moving it keeps every byte."""
    mine = [file for file in files if file == name or file.startswith(f"{name}/")]
    for count, file in enumerate(file for file in mine if files[file].startswith(b"PK")):
        output = tmp_path / str(count)
        write(output, {each: files[each] for each in mine} | {file: files[file][:-1]})
        choice = choose([output])
        assert choice.name is None
        assert name in [refused for refused, _ in choice.refused]
        move(output, choice.aside.number, choice.aside.names, choice.aside.pointers)
        assert (output / "kept-1" / file).read_bytes() == files[file][:-1]
        assert not (output / name).exists()
        assert choose([output]).refused == ()


@pytest.mark.parametrize(
    ("files", "missing", "message"),
    [
        (tag("iter_10"), "iter_10/zero_pp_rank_1_mp_rank_00_optim_states.pt", "ZeRO of rank 1 missing"),
        (accelerate("c_3"), "c_3/random_states_0.pkl", "random_states of rank 0 missing"),
        (accelerate("c_3"), "c_3/optimizer.bin", "it has no optimizer state"),
        (accelerate("c_3"), "c_3/model.safetensors", "it has no weights"),
        (dcp("step-10"), "step-10/.metadata", ".metadata is missing: the save did not finish"),
        (dcp("step-10"), "step-10/__1_0.distcp", ".metadata lists __1_0.distcp, which is missing"),
        (
            fsdp("c_3"),
            "c_3/optimizer_0/__1_0.distcp",
            "optimizer_0/.metadata lists optimizer_0/__1_0.distcp, which is missing",
        ),
        (
            inside("a.ckpt", "checkpoint"),
            "a.ckpt/checkpoint/mp_rank_00_model_states.pt",
            "checkpoint: it has no model states",
        ),
    ],
)
def test_a_missing_part_is_named(tmp_path, files, missing, message):
    write(tmp_path, {name: data for name, data in files.items() if name != missing})
    assert why(tmp_path) == message


def test_metadata_without_names_needs_a_file_of_every_rank(tmp_path):
    write(tmp_path, dcp("step-10", world=1) | {"step-10/.metadata": b"\x80\x02."})
    assert why(tmp_path) == "shards of rank 1 missing"


def test_shards_may_be_of_another_number_of_ranks(tmp_path):
    write(tmp_path, dcp("step-10", world=4))
    assert choose([tmp_path]).name == "step-10"


@pytest.mark.parametrize("data", [b"", b"not a pickle", b"PK\x03\x04 short"])
def test_a_pickle_is_checked_and_not_loaded(tmp_path, data):
    write(tmp_path, accelerate("c_3") | {"c_3/random_states_0.pkl": data})
    assert why(tmp_path).startswith("random_states_0.pkl: it")


# --- order -------------------------------------------------------------------------------------------------------


def order(folder, **times):
    for name, time in times.items():
        for path in [folder / name, *(folder / name).rglob("*")]:
            if path.is_file():
                os.utime(path, (time, time))


@pytest.mark.parametrize(("best", "chosen"), [(5, "iter_10"), (15, "iter_10"), (25, "best")])
def test_a_tag_without_a_step_comes_after_the_steps_that_were_written_before_it(tmp_path, best, chosen):
    write(tmp_path, tag("iter_5") | tag("iter_10") | tag("best"))
    order(tmp_path, iter_5=10, iter_10=20, best=best)
    assert choose([tmp_path]).name == chosen


def test_latest_names_the_last_finished_tag(tmp_path):
    write(tmp_path, tag("iter_5") | tag("iter_10") | tag("best") | {"latest": b"iter_10"})
    order(tmp_path, iter_5=10, iter_10=20, best=30)
    choice = choose([tmp_path])
    assert choice.name == "iter_10"
    assert choice.refused == [("best", "the file latest does not name it yet: the save did not finish")]
    (tmp_path / "latest").write_text("best")
    assert choose([tmp_path]).name == "best"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("iter_10")
    assert choose([tmp_path]).name == "iter_10"


def test_a_step_inside_a_json_file_counts_without_one_in_the_name(tmp_path):
    for name, step in (("final", 30), ("best", 20)):
        write(tmp_path, tag(name) | {f"{name}/client_state.json": json.dumps({"step": step}).encode()})
    order(tmp_path, final=10, best=20)
    choice = choose([tmp_path])
    assert (choice.name, choice.step) == ("final", 30)


def test_epochs_are_ordered_by_time_among_steps(tmp_path):
    write(tmp_path, dict.fromkeys(("step_100.pt", "step_200.pt", "epoch_1.pt"), torch_zip()))
    for name, time in (("step_100.pt", 10), ("epoch_1.pt", 15), ("step_200.pt", 20)):
        os.utime(tmp_path / name, (time, time))
    assert choose([tmp_path]).name == "step_200.pt"
    os.utime(tmp_path / "epoch_1.pt", (30, 30))
    assert choose([tmp_path]).name == "epoch_1.pt"


def test_a_newer_folder_that_lacks_files_of_the_others_is_incomplete(tmp_path):
    whole = {"model.pt": torch_zip(), "optim.pt": torch_zip()}
    write(tmp_path, {f"step_{step}/{name}": data for step in (1, 2) for name, data in whole.items()})
    write(tmp_path, {"step_3/model.pt": torch_zip()})
    choice = choose([tmp_path])
    assert choice.name == "step_2"
    assert choice.refused == [("step_3", "optim.pt is missing, although step_2 has it")]
    assert choice.aside.names == ["step_3"]


def test_files_of_ranks_beside_each_other_are_no_checkpoint(tmp_path):
    write(tmp_path, {f"step_5_rank_{rank}.pt": torch_zip() for rank in (0, 1)})
    choice = choose([tmp_path])
    assert choice.name is None
    assert "it is one of several files" in choice.refused[0][1]


def test_exported_models_and_parts_beside_a_librarys_checkpoints_do_not_count(tmp_path):
    write(tmp_path, tag("iter_10") | {"final/model.safetensors": safetensors(), "model.pt": torch_zip()})
    write(tmp_path, {"old/iter_99/mp_rank_00_model_states.pt": torch_zip(), "export_20/model.safetensors": b""})
    choice = choose([tmp_path])
    assert (choice.name, choice.aside) == ("iter_10", None)


# --- mixed formats -----------------------------------------------------------------------------------------------


def test_a_folder_that_mixes_two_formats_is_refused_with_both_names(tmp_path):
    files = {name.replace("checkpoint-20", "step_3"): data for name, data in trainer(20).items()}
    write(tmp_path, accelerate("step_3") | files)
    assert why(tmp_path) == "it mixes the files of transformers' Trainer and accelerate"


def test_an_output_folder_with_two_formats_stops_with_both_and_moves_nothing(tmp_path):
    write(tmp_path, tag("iter_10") | trainer(20))
    choice = choose([tmp_path])
    assert choice.name is None
    assert choice.aside is None
    assert choice.error == (
        "it has checkpoints of different formats: iter_10 (DeepSpeed), checkpoint-20 (transformers' Trainer); "
        "move those that do not belong to this run elsewhere"
    )


def test_the_model_that_the_trainer_saves_as_a_tag_is_no_checkpoint(tmp_path):
    """ZeRO stage 3 without stage3_gather_16bit_weights_on_model_save: ``Trainer.save_model`` writes global_stepN."""
    write(tmp_path, trainer(20) | tag("global_step30") | {"latest": b"global_step30"})
    choice = choose([tmp_path])
    assert (choice.name, choice.error, choice.aside) == ("checkpoint-20", None, None)


# --- what cannot be used -----------------------------------------------------------------------------------------


def test_only_newer_checkpoints_are_moved_and_latest_names_the_chosen_one(tmp_path):
    write(tmp_path, tag("iter_5") | tag("iter_10") | tag("iter_15") | {"latest": b"iter_15"})
    (tmp_path / "iter_15/mp_rank_00_model_states.pt").write_bytes(b"PK")
    choice = choose([tmp_path])
    assert choice.name == "iter_10"
    assert move(tmp_path, *choice.aside) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"iter_5", "iter_10", "latest", "kept-1"}
    assert (tmp_path / "latest").read_text() == "iter_10"
    again = choose([tmp_path])
    assert (again.name, again.refused, again.aside) == ("iter_10", [], None)


def test_without_a_usable_one_everything_that_a_new_start_writes_is_moved(tmp_path):
    """Also checkpoints that were not examined, single files, their companions and the pointers."""
    for step in range(1, 9):
        write(tmp_path, tag(f"iter_{step}", world=4))
    write(tmp_path, {"latest": b"iter_8", "best.pt": torch_zip(), "optimizer.pt": torch_zip(), "log.txt": b"x"})
    (tmp_path / "last").symlink_to("iter_8")
    choice = choose([tmp_path])
    assert choice.refused[0] == ("iter_8", "ZeRO: it was saved by 4 ranks, this run has 2")
    move(tmp_path, *choice.aside)
    assert {path.name for path in tmp_path.iterdir()} == {"log.txt", "kept-1"}
    assert len(list((tmp_path / "kept-1").iterdir())) == 8 + 4


def test_a_second_move_gets_another_folder_on_all_nodes(tmp_path):
    write(tmp_path / "a", tag("iter_5", world=4))
    write(tmp_path / "b", {"kept-3/x": b""} | tag("iter_5", world=4))
    aside = choose([tmp_path / "a", tmp_path / "b"]).aside
    assert aside.number == 4
    for node in "ab":
        move(tmp_path / node, *aside)
        assert (tmp_path / node / "kept-4/iter_5").is_dir()


def test_a_name_behind_a_link_is_not_moved(tmp_path):
    (tmp_path / "elsewhere/x").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/link").symlink_to(tmp_path / "elsewhere")
    assert move(tmp_path / "out", 1, ["link/x", "missing"], {}) == 0
    assert (tmp_path / "elsewhere/x").exists()


def test_a_move_that_fails_names_the_command(tmp_path):
    write(tmp_path, {"iter_5/a.pt": b"", "kept-1": b"a file"})
    with pytest.raises(AsideError, match=r"iter_5 cannot be used, and could not be moved aside .*mv "):
        move(tmp_path, 1, ["iter_5"], {})
    assert (tmp_path / "iter_5/a.pt").exists()


@given(st.data())
@settings(deadline=None)
def test_an_unusable_checkpoint_is_never_written_over(tmp_path_factory, data):
    """Whatever is missing or torn: a name that is not the chosen one, and that is newer, is free for the program."""
    output = tmp_path_factory.mktemp("out")
    files = {}
    for step in (5, 10, 15):
        kind = data.draw(st.sampled_from([tag, accelerate, dcp]) if step == 5 else st.just(kind))  # noqa: F821
        files |= kind(f"step_{step}")
    harmed = data.draw(st.sets(st.sampled_from(sorted(files)), max_size=4))
    for name in harmed:
        files[name] = files[name][: data.draw(st.integers(0, len(files[name]) - 1))]
    write(output, files)
    before = {name: (output / name).read_bytes() for name in files}
    choice = newest({0: offer(output, 0, 2)}, 2)
    if choice.aside:
        move(output, *choice.aside)
    for name, content in before.items():
        step = int(name.partition("/")[0].removeprefix("step_"))
        place = output / name
        moved = output / "kept-1" / name
        assert (moved if not place.exists() else place).read_bytes() == content
        if choice.name is None or step > int(choice.name.removeprefix("step_")):
            assert not place.exists()


# --- nodes with their own disks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "name", "layout"), LAYOUTS, ids=IDS)
def test_files_that_only_rank_0_writes_are_copied_to_the_other_node(tmp_path, files, name, layout):
    """And ranks' own files stay where they are; afterwards nothing is missing."""
    mine = {file: data for file, data in files.items() if file == name or file.startswith((f"{name}/", "latest"))}
    own = {file for file in mine if "rank_1_" in file or "_1.pkl" in file or "rng_state_1" in file or "/__1_" in file}
    write(tmp_path / "a", {file: data for file, data in mine.items() if file not in own})
    write(tmp_path / "b", {file: mine[file] for file in own})
    choice = choose([tmp_path / "a", tmp_path / "b"])
    assert choice.name == name
    for node, wanted in choice.copy.items():
        for file, _, giver in wanted:
            write(tmp_path / "ab"[node], {file: (tmp_path / "ab"[giver] / file).read_bytes()})
    again = choose([tmp_path / "a", tmp_path / "b"])
    assert (again.name, again.copy) == (name, {})
