"""A user's script for accelerate, with ``save_state`` and ``load_state`` as its guide to checkpoints shows them."""

import argparse
import math
import os
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
parser.add_argument("--max_steps", type=int, default=100)
parser.add_argument("--save_steps", type=int, default=20)
parser.add_argument("--resume_from_checkpoint", help="a folder step_N")
args = parser.parse_args()

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(7)
x = torch.linspace(-math.pi, math.pi, 32768).unsqueeze(1)
net = torch.nn.Sequential(
    *(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_steps * accelerator.num_processes)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sin()), batch_size=1024, shuffle=True)
net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)

step = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    step = int(args.resume_from_checkpoint.rpartition("_")[2])
while step < args.max_steps:
    loader.set_epoch(step // len(loader))
    for inputs, targets in accelerator.skip_first_batches(loader, step % len(loader)):
        loss = torch.nn.functional.mse_loss(net(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(0.05)  # as long as the step of a larger model, which a test can kill and stop between others
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"step {step} loss {mean:.8f}", flush=True)
        if step % args.save_steps == 0:
            accelerator.save_state(f"{args.output_dir}/step_{step}")
        if step == args.max_steps:
            break
accelerator.end_training()
sys.stdout.flush()
os._exit(0)  # torch's threads may abort the end of the interpreter: pytorch/pytorch issue 190489
