"""Trains a small vision-language model on one or more GPUs: a vision tower, a projector and a language model.

    python data/prepare.py
    torchrun --nproc_per_node=4 train_vlm.py --config configs/vlm_pretrain.yaml --stage pretrain
    torchrun --nproc_per_node=4 train_vlm.py --config configs/vlm_sft.yaml --stage sft --resume outputs/pretrain/latest.pt

The stage ``pretrain`` trains the projector alone, ``sft`` the projector and the language model. ``batch_size`` is the
batch of all GPUs together.
"""

import argparse
import contextlib
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class VisionTower(nn.Module):
    """Images of shape (batch, 3, size, size) to one vector for each patch."""

    def __init__(self, size, patch, width, layers):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, images):
        return self.encoder(self.patches(images).flatten(2).transpose(1, 2) + self.positions)


class LanguageModel(nn.Module):
    """A causal transformer over vectors; its head gives logits of shape (batch, length, vocabulary)."""

    def __init__(self, vocabulary, width, layers, length):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, vectors):
        length = vectors.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=vectors.device)
        return self.head(self.decoder(vectors + self.positions[:, :length], mask=mask, is_causal=True))


class VisionLanguageModel(nn.Module):
    """The loss of predicting a caption's bytes from an image and the bytes before."""

    def __init__(self, model):
        super().__init__()
        size, patch = model["image_size"], model["patch_size"]
        width, inner = model["hidden_size"], model["vision_width"]
        self.patches = (size // patch) ** 2
        self.vision_tower = VisionTower(size, patch, inner, model["vision_layers"])
        self.projector = nn.Sequential(nn.Linear(inner, width), nn.GELU(), nn.Linear(width, width))
        self.language_model = LanguageModel(256, width, model["layers"], self.patches + model["max_length"])

    def forward(self, images, captions):
        seen = self.projector(self.vision_tower(images))
        logits = self.language_model(torch.cat([seen, self.language_model.embed(captions[:, :-1])], dim=1))
        predicted = logits[:, self.patches - 1 :]
        return functional.cross_entropy(predicted.float().reshape(-1, 256), captions.reshape(-1), ignore_index=0)


class Captions(Dataset):
    """Images with captions, from a .npz file: images uint8 (count, 3, size, size), captions uint8 (count, length)."""

    def __init__(self, path, max_length):
        data = np.load(path)
        self.images, self.captions = data["images"], data["captions"][:, :max_length]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).float() / 127.5 - 1
        return image, torch.from_numpy(self.captions[index].astype(np.int64))


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--stage", choices=["pretrain", "sft"], default="pretrain")
    parser.add_argument("--batch_size", type=int, help="batch size of all GPUs together")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--resume", help="a checkpoint to continue from")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help="set by torch.distributed.launch")
    return parser.parse_args()


def main():
    args = parse_args()
    with open(args.config, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    training = config["training"]
    if args.batch_size:
        training["batch_size"] = args.batch_size
    if args.lr:
        training["lr"] = args.lr

    training["use_ddp"] = int(os.environ.get("WORLD_SIZE", 1)) > 1
    rank, world_size, local_rank = 0, 1, 0
    cuda = torch.cuda.is_available()
    if training["use_ddp"]:
        dist.init_process_group("nccl" if cuda else "gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))
    main_process = rank == 0
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    batch_size = training["batch_size"] // world_size
    print(f"[rank {rank}/{world_size}] local_rank={local_rank} device={device}", flush=True)
    print(
        f"[rank {rank}] 分布式训练已初始化, batch size per GPU: {batch_size} (total {training['batch_size']})",
        flush=True,
    )

    random.seed(training["seed"])
    torch.manual_seed(training["seed"])
    dataset = Captions(config["data"][args.stage], config["model"]["max_length"])
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=training["seed"], drop_last=True)
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=training["num_workers"],
        pin_memory=cuda,
        drop_last=True,
    )

    model = VisionLanguageModel(config["model"]).to(device)
    model.vision_tower.requires_grad_(False)
    model.language_model.requires_grad_(args.stage == "sft")
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=training["lr"], weight_decay=training["weight_decay"])

    epoch, step = 0, 0
    if args.resume:
        saved = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        if saved["stage"] == args.stage:
            optimizer.load_state_dict(saved["optimizer"])
            epoch, step = saved["epoch"], saved["step"]
        if main_process:
            print(f"Resumed from {args.resume}: epoch {epoch}, step {step}", flush=True)
    if training["use_ddp"]:
        model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None, find_unused_parameters=False)
    inner = model.module if training["use_ddp"] else model

    out = os.path.join(config["output_dir"], args.stage)
    per_epoch = len(loader) // training["accumulation_steps"]
    total = training["epochs"] * per_epoch
    mixed = (
        torch.autocast("cuda", torch.bfloat16) if cuda and training["use_mixed_precision"] else contextlib.nullcontext()
    )

    def save(name):
        if main_process:
            os.makedirs(out, exist_ok=True)
            state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}
            state.update(stage=args.stage, epoch=epoch, step=step)
            torch.save(state, os.path.join(out, f"{name}.tmp"))
            os.replace(os.path.join(out, f"{name}.tmp"), os.path.join(out, name))
            print(f"saved {os.path.join(out, name)}", flush=True)

    while epoch < training["epochs"]:
        sampler.set_epoch(epoch)
        skip = (step - epoch * per_epoch) * training["accumulation_steps"]
        loss_sum = 0.0
        for number, (images, captions) in enumerate(loader):
            if number < skip or number >= per_epoch * training["accumulation_steps"]:
                continue
            last = (number + 1) % training["accumulation_steps"] == 0
            wait = contextlib.nullcontext() if last or not training["use_ddp"] else model.no_sync()
            with wait, mixed:
                loss = model(images.to(device), captions.to(device)) / training["accumulation_steps"]
                loss.backward()
            loss_sum += loss.item()
            if not last:
                continue
            torch.nn.utils.clip_grad_norm_(wanted, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if main_process and step % training["log_every"] == 0:
                lr = optimizer.param_groups[0]["lr"]
                print(
                    f"Epoch [{epoch + 1}/{training['epochs']}] Step [{step}/{total}] Loss: {loss_sum:.4f} LR: {lr:.2e}",
                    flush=True,
                )
            loss_sum = 0.0
            if step % training["save_every"] == 0:
                save(f"checkpoint_step_{step}.pt")
        epoch += 1
    save("latest.pt")
    if training["use_ddp"]:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
