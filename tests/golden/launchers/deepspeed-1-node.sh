# gpu01: node 0 of 1, 8 processes, the first is rank 0
(
cd '/data/our runs/20261121-071500-sft-3f2a/job' || exit
mkdir -p '/data/our runs/20261121-071500-sft-3f2a/logs/node0/ranks'
unset PYTHONPATH PYTHONHOME PYTHONUSERBASE LD_PRELOAD LD_LIBRARY_PATH
export CLUSTERCTL_NODE=gpu01
export CLUSTERCTL_RUN=20261121-071500-sft-3f2a
export GLOO_SOCKET_IFNAME=ens1f0
export HF_DATASETS_OFFLINE=1
export HF_HOME='/data/our runs/20261121-071500-sft-3f2a/cache/node0'
export HF_HUB_OFFLINE=1
export LANG=C.UTF-8
export MASTER_ADDR=192.168.1.1
export MASTER_PORT=29500
export NCCL_DEBUG=INFO
export NCCL_DEBUG_FILE='/data/our runs/20261121-071500-sft-3f2a/logs/node0/nccl-%p.log'
export NCCL_DEBUG_SUBSYS=INIT,NET
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME='=ens1f0'
export NNODES=1
export NODE_RANK=0
export NPROC_PER_NODE=8
export OMP_NUM_THREADS=8
export PATH=/data/releases/0123456789ab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONFAULTHANDLER=1
export PYTHONNOUSERSITE=1
export PYTHONUNBUFFERED=1
export TENSORBOARD_LOGGING_DIR='/data/our runs/20261121-071500-sft-3f2a/logs/node0/tensorboard'
export TORCHINDUCTOR_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/inductor
export TORCH_EXTENSIONS_DIR=/tmp/clusterctl-0/0123456789ab/torch_extensions
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE='/data/our runs/20261121-071500-sft-3f2a/logs/node0/nccl_trace_rank_'
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export TP_SOCKET_IFNAME=ens1f0
export TRANSFORMERS_OFFLINE=1
export TRITON_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/triton
export WANDB_DIR='/data/our runs/20261121-071500-sft-3f2a/logs/node0'
export WANDB_MODE=offline
export WANDB_NAME=20261121-071500-sft-3f2a
# world_info: {"gpu01": [0, 1, 2, 3, 4, 5, 6, 7]}
exec /data/releases/0123456789ab/bin/python \
    -u \
    -m \
    deepspeed.launcher.launch \
    --world_info=eyJncHUwMSI6IFswLCAxLCAyLCAzLCA0LCA1LCA2LCA3XX0= \
    --node_rank \
    0 \
    --master_addr \
    192.168.1.1 \
    --master_port \
    29500 \
    --no_python \
    --no_local_rank \
    /bin/sh \
    -c \
    'export LOCAL_RANK=$((RANK - $1)); script=$2; shift 2; logs='"'"'/data/our runs/20261121-071500-sft-3f2a/logs/node0/ranks'"'"'/$$/attempt_0/$LOCAL_RANK; mkdir -p "$logs" && exec "$0" -u "$script" --local_rank=$LOCAL_RANK "$@" >"$logs/stdout.log" 2>"$logs/stderr.log"' \
    /data/releases/0123456789ab/bin/python \
    0 \
    train.py \
    --deepspeed_config \
    ds.json
)
