#!/bin/bash
# Usage: bash scripts/train_multi_gpu.sh CONFIG STAGE
CONFIG=${1:-configs/vlm_pretrain.yaml}
STAGE=${2:-pretrain}
NUM_GPUS=${NUM_GPUS:-4}

export MASTER_ADDR=localhost
export MASTER_PORT=29500

echo "config: $CONFIG, stage: $STAGE, GPUs: $NUM_GPUS"
torchrun --nproc_per_node="$NUM_GPUS" \
    --master_addr=$MASTER_ADDR \
    --master_port=$MASTER_PORT \
    train_vlm.py \
    --config "$CONFIG" \
    --stage "$STAGE"
