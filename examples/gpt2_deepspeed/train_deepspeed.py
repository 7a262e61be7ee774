"""Trains GPT-2 with DeepSpeed.

python data/shakespeare/prepare.py
deepspeed --num_gpus=4 train_deepspeed.py
deepspeed --num_gpus=4 train_deepspeed.py --resume_from_checkpoint out-shakespeare-xl-deepspeed/iter_15
"""

# ----------------------------------------------------------------------------- imports and configuration
import argparse
import math
import os
import pickle
import time

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from model import GPT, GPTConfig

parser = argparse.ArgumentParser(description="GPT-2 with DeepSpeed")
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out_dir", default="out-shakespeare-xl-deepspeed")
parser.add_argument("--dataset", default="shakespeare")
parser.add_argument("--init_from", default="gpt2-xl", help="scratch, a folder, or a name of the hub such as gpt2-xl")
parser.add_argument("--resume_from_checkpoint", default="", help="a folder such as out/iter_15")
parser.add_argument("--max_iters", type=int, default=20)
parser.add_argument("--batch_size", type=int, default=1)
parser.add_argument("--gradient_accumulation_steps", type=int, default=32)
parser.add_argument("--learning_rate", type=float, default=3e-5)
parser.add_argument("--warmup_iters", type=int, default=0)
parser.add_argument("--lr_decay_iters", type=int, default=0, help="0: a constant learning rate")
parser.add_argument("--eval_interval", type=int, default=5)
parser.add_argument("--eval_iters", type=int, default=20)
parser.add_argument("--always_save_checkpoint", action="store_true")
parser.add_argument("--patience", type=int, default=5, help="evaluations without progress until the training stops")
parser.add_argument("--block_size", type=int, default=1024)
parser.add_argument("--n_layer", type=int, default=12)
parser.add_argument("--n_head", type=int, default=12)
parser.add_argument("--n_embd", type=int, default=768)
parser.add_argument("--stage", default="", help="a tag for the checkpoint at the end, such as stage1")
parser.add_argument("--seed", type=int, default=1337)
parser.add_argument("--deepspeed_config", default="ds_config_zero2.json")
args = parser.parse_args()
min_lr = args.learning_rate / 10

# ----------------------------------------------------------------------------- distributed initialisation
deepspeed.init_distributed()
rank, world_size = dist.get_rank(), dist.get_world_size()
local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))
master_process = rank == 0
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(args.seed)

# ----------------------------------------------------------------------------- data
data_dir = os.path.join("data", args.dataset)
with open(os.path.join(data_dir, "meta.pkl"), "rb") as file:
    vocab_size = pickle.load(file)["vocab_size"]


def get_batch(split, generator):
    """Ids and targets of one micro-batch, each of shape (batch_size, block_size)."""
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - args.block_size, (args.batch_size,), generator=generator)
    x = torch.stack([torch.from_numpy(data[i : i + args.block_size].astype(np.int64)) for i in starts.tolist()])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + args.block_size].astype(np.int64)) for i in starts.tolist()])
    return x.to(device), y.to(device)


# ----------------------------------------------------------------------------- model
if args.init_from == "scratch":
    model = GPT(GPTConfig(args.block_size, vocab_size, args.n_layer, args.n_head, args.n_embd))
else:
    model = GPT.from_pretrained(args.init_from, block_size=args.block_size)
decay = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=args.learning_rate,
    betas=(0.9, 0.95),
)
model_engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.deepspeed_config)

iter_num = 0
best_val_loss = 1e9
patience_counter = 0
if args.resume_from_checkpoint:
    out_dir, tag = os.path.split(args.resume_from_checkpoint.rstrip("/"))
    _, client_state = model_engine.load_checkpoint(out_dir or ".", tag=tag, load_lr_scheduler_states=False)
    if client_state:
        iter_num = client_state.get("iter_num", 0)
        best_val_loss = client_state.get("best_val_loss", 1e9)
        patience_counter = client_state.get("patience_counter", 0)
        if master_process:
            print(f"Resumed from iteration {iter_num}", flush=True)


# ----------------------------------------------------------------------------- evaluation, learning rate, checkpoints
@torch.no_grad()
def estimate_loss():
    """The mean loss of both splits over all ranks."""
    model_engine.eval()
    losses = {}
    for split in ("train", "val"):
        generator = torch.Generator().manual_seed(args.seed + rank)  # the same batches at every evaluation
        total = torch.zeros((), device=device)
        for _ in range(args.eval_iters):
            total += model_engine(*get_batch(split, generator))[1].float()
        total /= args.eval_iters
        dist.all_reduce(total)
        losses[split] = total.item() / world_size
    model_engine.train()
    return losses


def get_lr(number):
    if number < args.warmup_iters:
        return args.learning_rate * (number + 1) / args.warmup_iters
    if not args.lr_decay_iters:
        return args.learning_rate
    if number < args.lr_decay_iters:
        ratio = (number - args.warmup_iters) / (args.lr_decay_iters - args.warmup_iters)
        return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (args.learning_rate - min_lr)
    return min_lr


def save(tag):
    state = {"iter_num": iter_num, "best_val_loss": best_val_loss, "patience_counter": patience_counter}
    model_engine.save_checkpoint(args.out_dir, tag=tag, client_state=state)  # every process takes part


# ----------------------------------------------------------------------------- training
line = "=" * 60
zero = model_engine.zero_optimization_stage()
if master_process:
    count = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{line}\n开始训练 GPT-2 ({count:.1f}M 参数) with DeepSpeed ZeRO-{zero}\n使用 {world_size} 个 GPU")
    print(f"Batch size: {args.batch_size}\nGradient accumulation steps: {args.gradient_accumulation_steps}")
    print(f"Max iterations: {args.max_iters}\n{line}\n", flush=True)
resumed = iter_num if args.resume_from_checkpoint else -1
while iter_num < args.max_iters:
    started = time.time()
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % args.eval_interval == 0 and iter_num != resumed:
        losses = estimate_loss()
        if master_process:
            print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
        better = losses["val"] < best_val_loss
        best_val_loss = min(best_val_loss, losses["val"])
        patience_counter = 0 if better else patience_counter + 1
        if iter_num > 0 and (better or args.always_save_checkpoint):
            save(f"iter_{iter_num}")
            if master_process:
                print(f"saving checkpoint to {args.out_dir}", flush=True)
        if patience_counter >= args.patience:
            if master_process:
                print(f"Early stopping triggered at iteration {iter_num}", flush=True)
            break
    generator = torch.Generator().manual_seed(args.seed + 1000 * iter_num + rank)
    loss = torch.zeros((), device=device)
    for _ in range(args.gradient_accumulation_steps):
        _, micro_loss = model_engine(*get_batch("train", generator))
        model_engine.backward(micro_loss)
        model_engine.step()
        loss += micro_loss.detach().float() / args.gradient_accumulation_steps
    if master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {1000 * (time.time() - started):.2f}ms", flush=True)
    iter_num += 1

if master_process:
    print(f"\n{line}\n训练完成！\n最终模型保存在: {args.out_dir}\n{line}\n\n保存最终检查点...", flush=True)
save("final")
if args.stage:
    save(args.stage)
if master_process:
    print(f"✅ 最终模型已保存到: {args.out_dir}/final/", flush=True)
dist.destroy_process_group()
