"""Checkpoints as libraries write them, with few bytes, and the choice among them."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile

from trainer.agent.checkpoints.selection import newest, offer


def safetensors(elements=100, fill=0):
    header = json.dumps({"w": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([fill]) * (4 * elements)


def torch_zip(text=b"state", big=4000):
    """What torch.save writes: members one after another, uncompressed, their list last."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in (("data.pkl", text), ("data/0", text * big), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return file.getvalue()


def write(folder, files, mtime=None):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if mtime is not None:
            os.utime(path, (mtime, mtime))


def trainer(step, world=2, **changes):
    """The files of a Trainer's checkpoint without DeepSpeed."""
    files = {
        "config.json": b"{}",
        "model.safetensors": safetensors(),
        "training_args.bin": torch_zip(b"args", 3),
        "optimizer.pt": torch_zip(b"optimizer"),
        "scheduler.pt": torch_zip(b"scheduler", 2),
        "trainer_state.json": json.dumps({"global_step": step}).encode(),
    }
    files |= {f"rng_state_{rank}.pth": torch_zip(b"%d" % rank, 2) for rank in range(world)}
    return place(f"checkpoint-{step}", files, changes)


def deepspeed(step, world=2, stage=2, **changes):
    """The files of a Trainer's checkpoint with DeepSpeed's inside."""
    tag = f"global_step{step}"
    files = {
        "latest": tag.encode(),
        "zero_to_fp32.py": b"#",
        "trainer_state.json": b"{}",
        "training_args.bin": torch_zip(b"args", 3),
    }
    for rank in range(world):
        files[f"rng_state_{rank}.pth"] = torch_zip(b"%d" % rank, 2)
        files[f"{tag}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = torch_zip(b"%d" % rank)
        if stage == 3:
            files[f"{tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = torch_zip(b"%d" % rank, 2)
    if stage < 3:
        files[f"{tag}/mp_rank_00_model_states.pt"] = torch_zip(b"model")
    return place(f"checkpoint-{step}", files, changes)


def place(folder, files, changes):
    files |= changes.get("more", {})
    for name in changes.get("without", ()):
        del files[name]
    return {f"{folder}/{name}": data for name, data in files.items()}


def choose(folders, world=2):
    """The choice over nodes that have these folders, one rank each (the last has the rest)."""
    count = len(folders)
    each = [1] * (count - 1) + [world - count + 1]
    offers = {rank: json.loads(json.dumps(offer(folder, rank, each[rank]))) for rank, folder in enumerate(folders)}
    return newest(offers, world)


def why(folder, world=2):
    """Why the only checkpoint there is refused."""
    choice = choose([folder], world)
    assert choice.name is None
    assert len(choice.refused) == 1
    return choice.refused[0][1]
