"""Checkpoints on disks: whole or torn, complete over all nodes or not, and what each node lacks."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for saved; last, so that it hides no module

from saved import choose, deepspeed, safetensors, torch_zip, trainer, why, write

from trainer.agent.checkpoints import files as checkpoint_files
from trainer.agent.checkpoints.names import number_in
from trainer.agent.checkpoints.selection import Choice, newest, offer, scan
from trainer.agent.link.copies import TEMPORARY


class FloatStorage:
    """Stands for torch's class of that name: pickles name it only."""


def torch_legacy(elements=50, storage_class=FloatStorage, width=4):
    """What torch.save writes with ``_use_new_zipfile_serialization=False``."""
    file = io.BytesIO()
    for value in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True}):
        pickle.dump(value, file, 2)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", storage_class, "94", "cpu", elements, None) if value is storage else None

    storage = object()
    Pickler(file, 2).dump({"weight": [Path("a"), {1, 2}, storage], "n": 1})
    pickle.dump(["94"], file, 2)
    file.write(struct.pack("<q", elements) + b"\1" * (width * elements))
    return file.getvalue()


WIDTHS = {
    "ByteStorage": 1, "CharStorage": 1, "BoolStorage": 1, "UntypedStorage": 1, "HalfStorage": 2, "BFloat16Storage": 2,
    "ShortStorage": 2, "IntStorage": 4, "LongStorage": 8, "DoubleStorage": 8, "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16,
}  # fmt: skip

FORMATS = {
    "model.safetensors": safetensors(),
    "optimizer.pt": torch_zip(),
    "old.bin": torch_legacy(),
    "trainer_state.json": json.dumps({"global_step": 20, "log_history": [{"loss": 1.5}] * 30}, indent=1).encode(),
}


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_complete_files_are_complete(tmp_path, name):
    write(tmp_path, FORMATS)
    assert checkpoint_files.look(tmp_path / name)[0].torn is None


@given(st.data())
@settings(deadline=None)
def test_a_file_that_is_cut_anywhere_is_torn(tmp_path_factory, data):
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    whole = FORMATS[name]
    size = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.mktemp("cut") / name
    path.write_bytes(whole[:size])
    assert checkpoint_files.look(path)[0].torn
    path.write_bytes(whole[:size] + b"\0" * (len(whole) - size))  # a file system may give the length and no content
    if name != "trainer_state.json" and size < 60:
        assert checkpoint_files.look(path)[0].torn


@pytest.mark.parametrize(("storage", "width"), WIDTHS.items())
def test_an_old_file_has_as_many_bytes_as_its_elements_need(tmp_path, monkeypatch, storage, width):
    made = type(storage, (), {"__module__": __name__})
    monkeypatch.setitem(globals(), storage, made)
    path = tmp_path / "old.bin"
    path.write_bytes(torch_legacy(storage_class=made, width=width))
    assert checkpoint_files.look(path)[0].torn is None
    path.write_bytes(torch_legacy(storage_class=made, width=width)[:-1])
    assert checkpoint_files.look(path)[0].torn is not None


def test_a_distcp_file_may_join_zips_and_must_not_be_truncated(tmp_path):
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"planned tensors, one after another")
    assert checkpoint_files.look(path)[0].torn is None
    path.write_bytes(torch_zip())
    assert checkpoint_files.look(path)[0].torn is None
    path.write_bytes(torch_zip()[:-1])
    assert checkpoint_files.look(path)[0].torn == "it is truncated: its zip directory is missing"


def test_a_pickle_of_an_old_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    start = torch_legacy()[:20]
    (tmp_path / "old.bin").write_bytes(start + pickle.dumps(Evil(), 2))
    assert checkpoint_files.look(tmp_path / "old.bin")[0].torn
    (tmp_path / "worse.pt").write_bytes(pickle.dumps(Evil(), 2))
    assert checkpoint_files.look(tmp_path / "worse.pt")[0].torn
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 8, struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"w":{}} '],
)
def test_invalid_safetensors(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    assert checkpoint_files.look(tmp_path / "model.safetensors")[0].torn


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".distcp"])
def test_a_truncated_torch_file_is_found_by_its_suffix(tmp_path, suffix):
    path = tmp_path / f"state{suffix}"
    path.write_bytes(torch_zip()[:-1])
    assert checkpoint_files.look(path)[0].torn == "it is truncated: its zip directory is missing"


@pytest.mark.parametrize(("levels", "torn"), [(200, None), (201, "it is not complete JSON")])
def test_json_of_a_checkpoint_may_have_200_levels(tmp_path, levels, torn):
    path = tmp_path / "trainer_state.json"
    path.write_bytes(b"[" * levels + b"]" * levels)
    assert checkpoint_files.look(path)[0].torn == torn


@pytest.mark.parametrize(("size", "torn"), [(64 << 20, "it is not complete JSON"), ((64 << 20) + 1, None)])
def test_json_of_more_than_64_mib_is_not_read(tmp_path, size, torn):
    path = tmp_path / "trainer_state.json"
    with path.open("wb") as file:
        file.truncate(size)  # zeros, which are no JSON
    assert checkpoint_files.look(path)[0].torn == torn


def test_a_mark_covers_the_whole_header_of_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    marks = set()
    for shape in (1, 2):
        tensors = {f"layer{n:05}": {"shape": [0], "data_offsets": [0, 0]} for n in range(2000)}
        tensors["last"] = {"shape": [shape], "data_offsets": [0, 1 << 20]}
        header = json.dumps(tensors).encode()
        assert len(header) > 100_000
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(1 << 20))
        assert checkpoint_files.look(path)[0].torn is None
        marks.add(checkpoint_files.look(path)[0].mark)
    assert len(marks) == 2


@pytest.mark.parametrize("size", [1, 4095, 4097, 8193, 32_768, 32_775, 32_776, 32_781, 32_782, 100_003, (1 << 20) + 5])
def test_a_mark_covers_both_ends_of_a_file(tmp_path, size):
    path = tmp_path / "__0_0.distcp"

    def mark(changed=None):
        data = bytearray(size)
        if changed is not None:
            data[changed] = 1
        path.write_bytes(data)
        return checkpoint_files.look(path)[0].mark

    before = mark()
    block = checkpoint_files.BLOCK
    ends = {0, block - 1, *range(size - 8, size), size - block}
    assert [place for place in sorted(ends) if 0 <= place < size and mark(place) == before] == []


def test_a_mark_covers_every_byte_of_a_small_file(tmp_path):
    size = checkpoint_files.BLOCK * checkpoint_files.PLACES
    path = tmp_path / "__0_0.distcp"
    marks = set()
    for place in range(0, size, 511):
        path.write_bytes(bytes(place) + b"\1" + bytes(size - place - 1))
        marks.add(checkpoint_files.look(path)[0].mark)
    assert len(marks) == len(range(0, size, 511))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_mark_distinguishes_files_of_equal_size(tmp_path, name):
    make = safetensors if name == "model.safetensors" else lambda elements, fill: torch_zip(b"%d" % fill, elements)
    marks = set()
    for fill in (1, 1, 2):
        (tmp_path / name).write_bytes(make(200000, fill))
        marks.add(checkpoint_files.look(tmp_path / name)[0].mark)
    assert len(marks) == 2


# --- one checkpoint ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        trainer(20),
        trainer(20, world=1, without=["rng_state_0.pth"], more={"rng_state.pth": torch_zip()}),
        trainer(20, world=4),  # ranks that this run has not, but no gap
        trainer(20, without=["model.safetensors"], more={"adapter_model.safetensors": safetensors()}),
        trainer(20, without=["model.safetensors"], more={"pytorch_model.bin": torch_legacy()}),
        trainer(
            20,
            without=["model.safetensors"],
            more={
                "model-00001-of-00002.safetensors": safetensors(),
                "model-00002-of-00002.safetensors": safetensors(),
                "model.safetensors.index.json": json.dumps(
                    {"weight_map": {n: f"model-0000{n}-of-00002.safetensors" for n in "12"}}
                ).encode(),
            },
        ),
        deepspeed(20),
        deepspeed(20, stage=3),
        trainer(
            20,
            without=["model.safetensors", "optimizer.pt"],
            more={
                f"{folder}/{name}": b"x."
                for folder in ("pytorch_model_fsdp_0", "optimizer_0")
                for name in (".metadata", "__0_0.distcp", "__1_0.distcp")
            },
        ),
    ],
)
def test_complete_checkpoints(tmp_path, files):
    write(tmp_path, files)
    choice = choose([tmp_path])
    assert (*choice[:5], choice.aside) == ("checkpoint-20", 20, {}, [], "trainer", None)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (trainer(20, without=["trainer_state.json"]), "trainer_state.json is missing: the save did not finish"),
        (trainer(20, without=["model.safetensors"]), "it has no weights"),
        (trainer(20, without=["optimizer.pt"]), "it has no optimizer state (save_only_model?)"),
        (trainer(20, without=["scheduler.pt"]), "scheduler.pt is missing"),
        (trainer(20, without=["rng_state_1.pth"]), "rng_state of rank 1 missing"),
        (trainer(20, without=["rng_state_0.pth"]), "rng_state of rank 0 missing"),
        (
            trainer(20, more={"checkpoint-is-incomplete.txt": b""}),
            "checkpoint-is-incomplete.txt exists: the save did not finish",
        ),
        (
            trainer(20, more={"model.safetensors.index.json": b'{"weight_map": {"a": "m-2.safetensors"}}'}),
            "model.safetensors.index.json lists m-2.safetensors, which is missing",
        ),
        (
            trainer(20, more={"optimizer.pt": torch_zip()[:-1]}),
            "optimizer.pt: it is truncated: its zip directory is missing",
        ),
        (trainer(20, more={"model.safetensors": safetensors()[:-1]}), "model.safetensors: it has 472 of 473 bytes"),
        (deepspeed(20, without=["latest"]), "the file latest is missing or empty"),
        (deepspeed(20, more={"latest": b"global_step19"}), "the file latest names global_step19, which is missing"),
        (deepspeed(20, world=1), "global_step20: ZeRO of rank 1 missing"),
        (deepspeed(20, world=3), "global_step20: ZeRO: it was saved by 3 ranks, this run has 2"),
        (
            deepspeed(20, without=["global_step20/mp_rank_00_model_states.pt"]),
            "global_step20: it has no model states",
        ),
        (
            deepspeed(20, stage=3, without=["global_step20/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]),
            "global_step20: rank 1 has only one of model states and optimizer states",
        ),
        (
            deepspeed(20, more={"global_step20/zero_pp_rank_0_mp_rank_01_optim_states.pt": torch_zip()}),
            "global_step20: optimizer states of some ranks are missing",
        ),
        (
            trainer(20, more={"pytorch_model_fsdp_0/__0_0.distcp": b"x"}),
            "pytorch_model_fsdp_0/.metadata is missing: the save did not finish",
        ),
        (
            trainer(
                20,
                more={
                    "adapter/model.safetensors.index.json": b'{"weight_map": {"a": "m-1.safetensors"}}',
                    "m-1.safetensors": safetensors(),
                },
            ),
            "adapter/model.safetensors.index.json lists adapter/m-1.safetensors, which is missing",
        ),
        (
            deepspeed(20, more={f"global_step20/expert_{n}_mp_rank_00_model_states.pt": torch_zip() for n in (0, 2)}),
            "global_step20: experts of rank 1 missing",
        ),
        (
            deepspeed(20, more={"global_step20/expp_rank_1_mp_rank_00_optim_states.pt": torch_zip()}),
            "global_step20: experts' optimizer states of rank 0 missing",
        ),
        (
            {"iter_20/part-00000-of-00002.safetensors": safetensors()},
            "complete.json is missing: the save did not finish",
        ),
        (
            {"checkpoint-20/a.index.json": b'{"weight_map": {"a": "a.index.json"}}'},  # an index that lists only itself
            "trainer_state.json is missing: the save did not finish",
        ),
    ],
)
def test_incomplete_checkpoints(tmp_path, files, message):
    write(tmp_path, files)
    assert why(tmp_path) == message


@pytest.mark.parametrize("make", [trainer, deepspeed])
def test_checkpoint_of_a_killed_save_is_never_chosen(tmp_path, make):
    """In the order of writing, for each last file that was started."""
    files = make(20)
    last = "checkpoint-20/trainer_state.json"
    order = [name for name in files if name != last] + [last]
    for count in range(len(order)):
        folder = tmp_path / str(count)
        write(folder, {name: files[name] for name in order[:count]})
        write(folder, {order[count]: files[order[count]][:-1]})
        assert choose([folder]).name is None


def test_deepspeeds_own_layout(tmp_path):
    inside = deepspeed(20, without=["latest"])
    files = {name.partition("/")[2]: data for name, data in inside.items() if "/global_step20/" in name}
    write(tmp_path, files | {"latest": b"global_step20\n", "logs/x.txt": b"", "tokenizer.json": b"{}"})
    assert choose([tmp_path])[:5] == ("global_step20", 20, {}, [], "deepspeed")
    other = {name.replace("20", "30"): data for name, data in files.items()}
    write(tmp_path, other)  # rank 0 has not written latest yet
    assert choose([tmp_path]).name == "global_step20"
    assert choose([tmp_path]).refused == [
        ("global_step30", "the file latest does not name it yet: the save did not finish")
    ]
    (tmp_path / "latest").write_text("global_step30")
    assert choose([tmp_path]).name == "global_step30"
    (tmp_path / "latest").unlink()  # save_latest=False
    assert choose([tmp_path]).name == "global_step30"


def test_own_checkpoint_needs_every_part_of_its_complete_json(tmp_path):
    parts = [f"part-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    reported = json.dumps({"format": 1, "files": dict.fromkeys(parts, 3)}).encode()
    write(tmp_path / "a", {f"iter_30/{parts[0]}": safetensors(), "iter_30/complete.json": reported})
    write(tmp_path / "b", {f"iter_30/{parts[1]}": safetensors()})
    both = choose([tmp_path / "a", tmp_path / "b"])
    assert both.name == "iter_30"
    assert {rank: [file[0] for file in files] for rank, files in both.copy.items()} == {
        0: [f"iter_30/{parts[1]}"],
        1: ["iter_30/complete.json", f"iter_30/{parts[0]}"],
    }
    alone = choose([tmp_path / "a"])
    assert alone.refused == [("iter_30", f"{parts[1]} is missing, although complete.json lists it")]


def test_a_folder_with_model_states_only_is_a_checkpoint_of_deepspeed_without_zero(tmp_path):
    write(tmp_path, {"last/mp_rank_00_model_states.pt": torch_zip()})
    assert choose([tmp_path])[:5] == ("last", None, {}, [], "deepspeed")


def test_own_checkpoint_needs_its_complete_json(tmp_path):
    write(tmp_path, {"iter_30/model.safetensors": safetensors(), "iter_30/complete.json": b"{}"})
    assert choose([tmp_path]).name == "iter_30"


def test_steps_are_numbers(tmp_path):
    for step in (9, 10, 100, 20):
        write(tmp_path, trainer(step))
    assert [one.step for one in scan(tmp_path)] == [100, 20, 10, 9]
    assert choose([tmp_path]).name == "checkpoint-100"


STEPS = {
    "checkpoint-7": 7, "global_step12": 12, "epoch3_step40": 40, "iter_0000100": 100, "00300": 300,
    "model_step_100.pt": 100, "epoch=1-step=200-val_loss=0.35.ckpt": 200, "epoch=1-step=200.ckpt": 200,
    "step_100_loss_2.35.pt": 100, "step-9_rank_3.pt": 9, "model-00001-of-00002.safetensors": None, "best": None,
    "gpt2-xl-1558M.pt": None, "last-v1.ckpt": None, "ckpt.pt": None, "deep3.pt": None, "checkpoints/checkpoint_4": 4,
}  # fmt: skip


@pytest.mark.parametrize(("name", "step"), STEPS.items())
def test_the_step_in_a_name(name, step):
    number = number_in(name)
    assert (number and number.value) == step


def test_names_that_count_epochs():
    assert number_in("checkpoint_epoch_3.pt") == (3, True)
    assert number_in("ep12.pth") == (12, True)


def test_torn_newer_checkpoints_are_skipped_and_named(tmp_path):
    write(tmp_path, trainer(10) | trainer(20) | trainer(30, without=["trainer_state.json"]))
    (tmp_path / "checkpoint-20/optimizer.pt").write_bytes(b"")
    choice = choose([tmp_path])
    assert choice.name == "checkpoint-10"
    assert [name for name, _ in choice.refused] == ["checkpoint-30", "checkpoint-20"]
    assert scan(tmp_path)[1].torn == ["optimizer.pt"]


def test_folders_that_are_not_checkpoints_are_ignored(tmp_path, tmp_path_factory):
    assert scan(tmp_path / "none") == []
    write(tmp_path, {"checkpoint-x/a": b"", "runs/b": b"", "c": b"", "checkpoint-": b""})
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere, trainer(5))
    (tmp_path / "checkpoint-5").symlink_to(elsewhere / "checkpoint-5")
    assert scan(tmp_path) == []
    assert choose([tmp_path]) == Choice()
    write(tmp_path, trainer(6))
    (tmp_path / "checkpoint-6" / (TEMPORARY + "1")).write_bytes(b"x")
    (tmp_path / "checkpoint-6" / "link.pt").symlink_to("/etc/passwd")
    assert set(scan(tmp_path)[0].files) == {name.partition("/")[2] for name in trainer(6)}


def test_only_the_five_newest_checkpoints_are_read(tmp_path):
    for step in range(1, 8):
        write(tmp_path, trainer(step))
    assert [one.step for one in scan(tmp_path)] == [7, 6, 5, 4, 3]


def test_files_are_found_four_folders_below_a_checkpoint_and_links_are_not_followed(tmp_path):
    write(tmp_path, trainer(5))
    folder = tmp_path / "checkpoint-5"
    write(folder, {"a/b/c/d/there.json": b"{}", "a/b/c/d/e/too_deep.json": b"{}"})
    write(tmp_path / "elsewhere", {"secret.json": b"{}"})
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    found = set(scan(tmp_path)[0].files) - {name.partition("/")[2] for name in trainer(5)}
    assert found == {"a/b/c/d/there.json"}


def test_a_latest_that_is_not_text_names_no_tag(tmp_path):
    write(tmp_path, deepspeed(20, more={"latest": b"\xff\xfe"}))
    assert why(tmp_path) == "the file latest names \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}, which is missing"


# --- several nodes -----------------------------------------------------------------------------------------------


def parts(files, *patterns):
    """The files whose names hold one of the patterns, and the others."""
    some = {name: data for name, data in files.items() if any(pattern in name for pattern in patterns)}
    return some, {name: data for name, data in files.items() if name not in some}


def test_each_node_with_its_own_disk(tmp_path):
    own, main = parts(trainer(20), "rng_state_1")
    write(tmp_path / "a", main)
    write(tmp_path / "b", own)
    choice = choose([tmp_path / "a", tmp_path / "b"])
    assert choice.name == "checkpoint-20"
    assert sorted(choice.copy) == [1]
    assert sorted(choice.copy[1]) == sorted((name, len(data), 0) for name, data in main.items() if "rng" not in name)


def test_a_node_without_ranks_gets_no_file_that_only_one_rank_reads(tmp_path):
    files = trainer(20, world=1)
    write(tmp_path, files)
    copy = newest({0: offer(tmp_path, 0, 1), 1: {}}, 1).copy
    assert {name for name, _, _ in copy[1]} == {name for name in files if "rng_state" not in name}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_node_gets_no_zero_files_of_others(tmp_path, stage):
    own, main = parts(deepspeed(20, stage=stage), "rank_1_mp", "rng_state_1")
    write(tmp_path / "a", main)
    write(tmp_path / "b", own)
    copied = {name for name, _, _ in choose([tmp_path / "a", tmp_path / "b"]).copy[1]}
    assert copied == {name for name in main if "rank_0" not in name and "rng" not in name} | {
        name for name in main if "/mp_rank_00" in name
    }


def test_files_follow_ranks_to_other_nodes(tmp_path):
    own, main = parts(deepspeed(20), "rank_1_mp", "rng_state_1")
    write(tmp_path / "a", own)  # this node was rank 1 and is rank 0 now
    write(tmp_path / "b", main)
    copy = choose([tmp_path / "a", tmp_path / "b"]).copy
    assert {name for name, _, giver in copy[0] if giver == 1} == set(main)
    assert {(name, giver) for name, _, giver in copy[1]} == {(name, 0) for name in own}


def test_a_shared_folder_needs_no_copy(tmp_path):
    write(tmp_path, deepspeed(20))
    assert choose([tmp_path, tmp_path]).copy == {}


def test_all_nodes_save_everything(tmp_path):
    """``save_on_each_node``: names with the process differ, which is harmless."""
    for node, text in (("a", b'{"is_world_process_zero": true}'), ("b", b'{"is_world_process_zero": false}')):
        extra = {"trainer_state.json": text, "training_args.bin": torch_zip(node.encode(), 5 + len(text))}
        write(tmp_path / node, trainer(20, more=extra))
    choice = choose([tmp_path / "a", tmp_path / "b"])
    assert (choice.name, choice.copy) == ("checkpoint-20", {})


def test_weights_of_different_sizes_are_refused(tmp_path):
    write(tmp_path / "a", trainer(20))
    write(tmp_path / "b", trainer(20, more={"model.safetensors": safetensors(99)}))
    choice = choose([tmp_path / "a", tmp_path / "b"])
    assert choice.refused == [("checkpoint-20", "model.safetensors has different sizes on the nodes")]


def test_a_copy_from_an_earlier_time_is_replaced(tmp_path):
    write(tmp_path / "a", trainer(20, more={"model.safetensors": safetensors(fill=2)}), mtime=2000)
    write(tmp_path / "b", trainer(20), mtime=1000)
    assert choose([tmp_path / "a", tmp_path / "b"]).copy == {1: [("checkpoint-20/model.safetensors", 473, 0)]}
    assert choose([tmp_path / "b", tmp_path / "a"]).copy == {0: [("checkpoint-20/model.safetensors", 473, 1)]}


def test_a_file_torn_on_one_node_comes_from_another(tmp_path):
    write(tmp_path / "a", trainer(20))
    write(tmp_path / "b", trainer(20, more={"optimizer.pt": torch_zip(b"optimizer")[:-5]}))
    size = len(torch_zip(b"optimizer"))
    assert choose([tmp_path / "a", tmp_path / "b"]).copy == {1: [("checkpoint-20/optimizer.pt", size, 0)]}


def test_latest_file_of_deepspeed_is_copied(tmp_path):
    files = {"latest": b"global_step20"}
    for name, data in deepspeed(20).items():
        if "/global_step20/" in name:
            files[name.partition("/")[2]] = data
    own, main = parts(files, "rank_1_mp")
    write(tmp_path / "a", main)
    write(tmp_path / "b", own)
    assert ("latest", 13, 0) in choose([tmp_path / "a", tmp_path / "b"]).copy[1]


@pytest.mark.parametrize(("first", "second", "chosen"), [(1, 2, "global_step20"), (2, 1, "global_step10")])
def test_newest_latest_file_of_all_nodes_is_used(tmp_path, first, second, chosen):
    files = {}
    for step in (10, 20):
        inside = {name.partition("/")[2]: data for name, data in deepspeed(step).items()}
        files |= {name: data for name, data in inside.items() if name.startswith("global_step")}
    for node, tag, mtime in (("a", b"global_step10", first), ("b", b"global_step20", second)):
        write(tmp_path / node, files)
        write(tmp_path / node, {"latest": tag}, mtime)
    assert choose([tmp_path / "a", tmp_path / "b"]).name == chosen


def test_missing_zero_files_make_a_checkpoint_incomplete(tmp_path):
    files = {name: data for name, data in deepspeed(20).items() if "zero_pp_rank" not in name}
    write(tmp_path / "a", files)
    assert choose([tmp_path / "a"]).refused == [("checkpoint-20", "global_step20: ZeRO's optimizer states are missing")]
    del files["checkpoint-20/zero_to_fp32.py"]
    write(tmp_path / "b", files)
    assert choose([tmp_path / "b"]).name == "checkpoint-20"


@given(st.data())
@settings(deadline=None)
def test_after_copying_every_node_has_the_files_of_its_ranks(tmp_path_factory, data):
    """However the files lie about, and whichever are missing on all nodes."""
    make = data.draw(st.sampled_from([trainer, deepspeed]))
    nodes, world = data.draw(st.integers(1, 3)), 3
    files = make(20, world=world)
    folders = [tmp_path_factory.mktemp("node") for _ in range(nodes)]
    holders = {name: data.draw(st.sets(st.integers(0, nodes - 1)), label=name) for name in files}
    for name, where in holders.items():
        for node in where:
            write(folders[node], {name: files[name]})
    choice = choose(folders, world)
    spare = {"checkpoint-20/config.json", "checkpoint-20/training_args.bin", "checkpoint-20/zero_to_fp32.py"}
    missing = {name for name, where in holders.items() if not where} - spare
    zero = {name for name in files if "zero_pp_rank" in name}
    if zero and missing == zero and not holders["checkpoint-20/zero_to_fp32.py"]:
        return  # nothing distinguishes it from a checkpoint without ZeRO, whose model states contain everything
    if missing:
        assert choice.name is None
        return
    assert choice.name == "checkpoint-20"
    for node, wanted in choice.copy.items():
        for name, size, giver in wanted:
            assert len(files[name]) == size
            assert giver in holders[name]
            write(folders[node], {name: (folders[giver] / name).read_bytes()})
    again = choose(folders, world)
    assert (again.name, again.copy) == ("checkpoint-20", {})
    for node, folder in enumerate(folders):
        last = world if node == nodes - 1 else node + 1
        for rank in range(node, last):
            assert (folder / f"checkpoint-20/rng_state_{rank}.pth").exists()
        assert (folder / "checkpoint-20/trainer_state.json").exists()
