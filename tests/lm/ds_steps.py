"""Run by the rehearsal environment's Python: DeepSpeed loads each configuration and takes one optimizer step with it.

``ds_steps.py own|trainer|load CONFIGS.json`` prints a JSON object a configuration: its name, the global step, the loss
before it and after it, and the configuration that was used in the end.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")

import deepspeed
import deepspeed.ops.adam
import torch
from deepspeed.accelerator import get_accelerator

# This processor may lack fp16 products that are fast; here they only have to be right.
get_accelerator().is_fp16_supported = lambda: True


def own(config, _folder):
    """As a script of one's own does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = None
    if "optimizer" not in config:
        offloaded = "offload_optimizer" in config["zero_optimization"]
        kind = deepspeed.ops.adam.DeepSpeedCPUAdam if offloaded else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=config
    )
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = next((kind for key, kind in low.items() if config[key]["enabled"]), torch.float32)
    for _ in range(config["gradient_accumulation_steps"]):
        inputs = torch.ones(config["train_micro_batch_size_per_gpu"], 8, dtype=dtype)
        loss = engine(inputs).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    return engine.global_steps, [float(loss.detach()), float(engine(inputs).detach().float().pow(2).mean())], config


def trainer(config, folder):
    """As transformers' Trainer does, and so LLaMA-Factory."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    on = [key for key in ("bf16", "fp16") if config[key]["enabled"] is True] or ["bf16"]
    numbers = {} if "optimizer" not in config else {"learning_rate": 2e-5, "warmup_steps": 1000}
    arguments = TrainingArguments(
        output_dir=folder, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], save_strategy="no", logging_steps=1, deepspeed=config, disable_tqdm=True,
        **{on[0]: True}, **numbers,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=16))
    data = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]} for _ in range(8)]
    running = Trainer(model=model, args=arguments, train_dataset=data)
    done = running.train()
    used = running.model_wrapped.config if hasattr(running.model_wrapped, "config") else {}
    return done.global_step, [done.training_loss], used if isinstance(used, dict) else {}


def load(config, _folder):
    """DeepSpeed reads it, and checks what it can without a model."""
    read = deepspeed.DeepSpeedConfig(config)
    zero = read.zero_config
    devices = [str(each.device) for each in (zero.offload_optimizer, zero.offload_param) if each is not None]
    return int(zero.stage), [], {"devices": devices, "aio": read.aio_config}


def main(how, file):
    deepspeed.init_distributed("gloo")
    configs = json.loads(Path(file).read_text(encoding="utf-8"))
    for name, config in configs.items():
        with tempfile.TemporaryDirectory() as folder:
            step, loss, used = {"own": own, "trainer": trainer, "load": load}[how](config, folder)
        sys.stdout.write(f"STEP {json.dumps({'name': name, 'step': step, 'loss': loss, 'used': used})}\n")
        sys.stdout.flush()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
