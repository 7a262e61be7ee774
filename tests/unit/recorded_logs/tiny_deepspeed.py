"""A small network under DeepSpeed's engine, which prints what the engine prints: for the logs of test_reader*.py.

torchrun --nproc-per-node 2 tiny_deepspeed.py [STEPS]
"""

import sys

import deepspeed
import torch

deepspeed.utils.logging.set_log_level_from_string("info")  # steps are logged at this level
torch.manual_seed(0)
deepspeed.init_distributed("gloo")
network = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
engine, _, _, _ = deepspeed.initialize(
    model=network,
    model_parameters=network.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 8}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
    },
)
torch.manual_seed(engine.global_rank)
for _ in range(2 * int(sys.argv[1] if len(sys.argv) > 1 else 6)):
    batch = torch.randn(4, 32)
    engine.backward(engine(batch).square().mean())
    engine.step()
torch.distributed.destroy_process_group()
