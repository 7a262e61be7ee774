#!/bin/bash
# Starts the training of GPT-2 XL with DeepSpeed: checks what it needs, shows what it does, starts it.
set -e

NUM_GPUS=4
CONFIG=ds_config_zero2.json
DATA_DIR=data/shakespeare

echo "============================================================"
echo "GPT-2 XL with DeepSpeed ZeRO-2"
echo "============================================================"

if ! command -v deepspeed &> /dev/null; then
    echo "error: deepspeed is not installed: pip install deepspeed"
    exit 1
fi
if [ ! -f "$CONFIG" ]; then
    echo "error: $CONFIG not found"
    exit 1
fi
if [ ! -f "$DATA_DIR/train.bin" ]; then
    echo "error: no data: python $DATA_DIR/prepare.py"
    exit 1
fi

echo "GPUs: $NUM_GPUS, configuration: $CONFIG"
export NCCL_DEBUG=WARN

deepspeed --num_gpus="$NUM_GPUS" train_deepspeed.py --deepspeed_config "$CONFIG" "$@"

echo "done"
