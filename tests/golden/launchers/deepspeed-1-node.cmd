@echo off
rem gpu01: node 0 of 1, 8 processes, the first is rank 0
setlocal DisableDelayedExpansion
chcp 65001 >nul
cd /d "\data\our runs\20261121-071500-sft-3f2a\job" || exit /b
if not exist "\data\our runs\20261121-071500-sft-3f2a\logs\node0\ranks" mkdir "\data\our runs\20261121-071500-sft-3f2a\logs\node0\ranks"
set PYTHONPATH=
set PYTHONHOME=
set PYTHONUSERBASE=
set LD_PRELOAD=
set LD_LIBRARY_PATH=
set CLUSTERCTL_NODE=gpu01
set CLUSTERCTL_RUN=20261121-071500-sft-3f2a
set GLOO_SOCKET_IFNAME=ens1f0
set HF_DATASETS_OFFLINE=1
set HF_HOME=/data/our runs/20261121-071500-sft-3f2a/cache/node0
set HF_HUB_OFFLINE=1
set LANG=C.UTF-8
set MASTER_ADDR=192.168.1.1
set MASTER_PORT=29500
set NCCL_DEBUG=INFO
set NCCL_DEBUG_FILE=/data/our runs/20261121-071500-sft-3f2a/logs/node0/nccl-%%p.log
set NCCL_DEBUG_SUBSYS=INIT,NET
set NCCL_IB_DISABLE=1
set NCCL_SOCKET_IFNAME==ens1f0
set NNODES=1
set NODE_RANK=0
set NPROC_PER_NODE=8
set OMP_NUM_THREADS=8
set PATH=/data/releases/0123456789ab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
set PYTHONFAULTHANDLER=1
set PYTHONNOUSERSITE=1
set PYTHONUNBUFFERED=1
set TENSORBOARD_LOGGING_DIR=/data/our runs/20261121-071500-sft-3f2a/logs/node0/tensorboard
set TORCHINDUCTOR_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/inductor
set TORCH_EXTENSIONS_DIR=/tmp/clusterctl-0/0123456789ab/torch_extensions
set TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/data/our runs/20261121-071500-sft-3f2a/logs/node0/nccl_trace_rank_
set TORCH_NCCL_DUMP_ON_TIMEOUT=1
set TORCH_NCCL_TRACE_BUFFER_SIZE=2000
set TP_SOCKET_IFNAME=ens1f0
set TRANSFORMERS_OFFLINE=1
set TRITON_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/triton
set WANDB_DIR=/data/our runs/20261121-071500-sft-3f2a/logs/node0
set WANDB_MODE=offline
set WANDB_NAME=20261121-071500-sft-3f2a
rem world_info: {"gpu01": [0, 1, 2, 3, 4, 5, 6, 7]}
/data/releases/0123456789ab/bin/python ^
    -u ^
    -m ^
    deepspeed.launcher.launch ^
    --world_info=eyJncHUwMSI6IFswLCAxLCAyLCAzLCA0LCA1LCA2LCA3XX0= ^
    --node_rank ^
    0 ^
    --master_addr ^
    192.168.1.1 ^
    --master_port ^
    29500 ^
    --no_python ^
    --no_local_rank ^
    /bin/sh ^
    -c ^
    ^"export LOCAL_RANK=$^(^(RANK - $1^)^); script=$2; shift 2; logs='/data/our runs/20261121-071500-sft-3f2a/logs/node0/ranks'/$$/attempt_0/$LOCAL_RANK; mkdir -p \^"$logs\^" ^&^& exec \^"$0\^" -u \^"$script\^" --local_rank=$LOCAL_RANK \^"$@\^" ^>\^"$logs/stdout.log\^" 2^>\^"$logs/stderr.log\^"^" ^
    /data/releases/0123456789ab/bin/python ^
    0 ^
    train.py ^
    --deepspeed_config ^
    ds.json
