#!/bin/sh
# GPT-2 XL on the GPUs of this machine: our default, our ZeRO-2, nanoGPT and a guide's settings, a JSON line for each.
#   scripts/benchmarks/lm_gpu.sh                    what fits into 200 s, the most wanted first
#   scripts/benchmarks/lm_gpu.sh ours guide         these alone
# Wants torch, DeepSpeed, numpy and safetensors in the Python on PATH ($PYTHON), and a checkout of nanoGPT in
# /tmp/nanoGPT ($NANOGPT) for that peer. SECONDS_IN_ALL, GPUS, BATCH and MODEL change what their names say.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" scripts/benchmarks/lm_gpu.py "$@"
