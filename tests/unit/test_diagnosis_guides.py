"""Popular guides have troubleshooting tables. Every row of them is a recorded run.

The rows are paraphrased here. Where a guide's advice fixes nothing, or the wrong thing, the advice that
``diagnose`` gives says so; ``NOT`` has words that must not be in it as a fix.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from case_table import every_case

sys.path.append(str(Path(__file__).parent))  # for recorded_runs; last, so that it hides no module

from recorded_runs.cases import cases

from provision.diagnosis import diagnose
from provision.summaries.diagnosis import diagnosis_output

ROWS = {
    # Fine-tuning LLaMA-7B with DeepSpeed: the comparison of fp16 and bf16, and what to do against OOM
    "llama.fp16-overflow": "fp16: gradients overflow or underflow",
    "llama.bf16-kernels": "bf16: kernels do not fit the GPU or the CUDA version",
    "llama.fp16-out-of-memory": "fp16: out of memory (checkpointing, more offloading, smaller batch)",
    "llama.bf16-out-of-memory": "bf16: out of memory (a newer CUDA, no kernels of one's own: neither frees any)",
    "llama.oom-steps": "out of memory, step by step (two of the three settings are the defaults)",
    "llama.out-of-memory-evaluating": "out of memory, as the last resort: lower precision in evaluations",
    # Training on several GPUs: frequent problems 1 to 4
    "multi-gpu.nccl-error": "NCCL error: unhandled system error (not cured by one machine)",
    "multi-gpu.port-in-use": "Address already in use",
    "multi-gpu.out-of-memory": "CUDA out of memory (num_workers is the host's memory, not the GPU's)",
    "multi-gpu.no-speed-up-data": "several GPUs are no faster: loading data is the bottleneck",
    "multi-gpu.no-speed-up-small-model": "several GPUs are no faster: a small model, mostly communication",
    "multi-gpu.no-speed-up-idle-gpu": "several GPUs are no faster: one of them is idle",
    # Distributed training and monitoring: the metrics to watch, and its troubleshooting list
    "monitoring.train-loss-flat": "metric train/loss: does not fall",
    "monitoring.train-loss-oscillates": "metric train/loss: oscillates violently",
    "monitoring.eval-loss-rises": "metric eval/loss: rises (overfitting)",
    "monitoring.learning-rate-too-high": "metric learning_rate: too high, so that the loss oscillates",
    "monitoring.gpu-memory": "metric gpu_memory: above 95 %",
    "monitoring.gpu-out-of-memory": "metric gpu_memory: OOM errors (accumulation alone frees nothing)",
    "monitoring.loss-does-not-fall": "the loss does not fall: learning rate, data's format, chat template",
    "monitoring.loss-oscillates": "the loss oscillates: learning rate, batch, warm-up",
    "monitoring.out-of-memory": "OOM: batch 1, shorter sequences, checkpointing, QLoRA",
    "monitoring.too-slow": "too slow: bf16, packing, FlashAttention, a larger batch",
    # GPT-2 XL with DeepSpeed: questions 1 to 5, and other parts of the guide
    "gpt2-xl.out-of-memory": "question 1: OOM",
    "gpt2-xl.ddp-out-of-memory": "table of measurements: plain DDP does not fit",
    "gpt2-xl.nccl-timeout": "question 2: NCCL communication timeout (NCCL_TIMEOUT is read by nobody)",
    "gpt2-xl.nccl-timeout-words": "question 2: the words as the guide has them",
    "gpt2-xl.slow": "question 3: slow: GPUs below 80 %",
    "gpt2-xl.slow-data": "question 3: slow: more data loader workers, pinned memory",
    "gpt2-xl.slow-evaluation": "question 3: slow: evaluated too often",
    "gpt2-xl.hang-after-evaluation": "question 4: hangs after an evaluation (switching it off hides the fault)",
    "gpt2-xl.checkpoint-loading": "question 5: a checkpoint cannot be loaded: the wrong folder",
    "gpt2-xl.checkpoint-files": "question 5: a checkpoint cannot be loaded: files of ranks are missing",
    "gpt2-xl.checkpoint-torn": "question 5: a checkpoint cannot be loaded: it is not whole",
    "gpt2-xl.low-utilisation": "tuning: GPU use below 80 %",
    "gpt2-xl.mixed-versions": "to be avoided: versions that do not belong together",
}

NOT = {
    "multi-gpu.nccl-error": ("all GPUs on one machine",),
    "gpt2-xl.nccl-timeout": ("NCCL_TIMEOUT=",),
    "gpt2-xl.hang-after-evaluation": ("999999",),
    "llama.oom-steps": ('"zero_optimization.reduce_bucket_size": 5e8',),
}


@cache
def recorded_rows():
    return {row: case for case in cases() for row in case.rows}


@every_case("row", ROWS)
def test_every_row_of_the_guides_is_recorded(row):
    assert row in recorded_rows(), f"no recorded run is the row {row}: {ROWS[row]}"


@every_case("row", recorded_rows)
def test_every_recorded_row_is_one_of_the_guides(row):
    assert row in ROWS


@every_case("row", ROWS)
def test_every_row_yields_a_cause_and_a_fix(row):
    case = recorded_rows()[row]
    result = diagnose(case.evidence)
    text = " ".join(diagnosis_output(result)[1].split())
    assert result.verdict or result.conditions
    assert "try: " in text
    assert case.fix, f"{case.name} does not say which advice the row yields"
    for words in NOT.get(row, ()):
        assert words not in text
