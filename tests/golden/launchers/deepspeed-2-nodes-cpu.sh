# gpu01: node 0 of 2, 2 processes, the first is rank 0
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
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME='=ens1f0'
export NNODES=2
export NODE_RANK=0
export NPROC_PER_NODE=2
export OMP_NUM_THREADS=1
export PATH=/data/releases/0123456789ab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONFAULTHANDLER=1
export PYTHONNOUSERSITE=1
export PYTHONPATH='/data/our runs/20261121-071500-sft-3f2a/hooks'
export PYTHONUNBUFFERED=1
export TENSORBOARD_LOGGING_DIR='/data/our runs/20261121-071500-sft-3f2a/logs/node0/tensorboard'
export TORCHINDUCTOR_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/inductor
export TORCH_EXTENSIONS_DIR=/tmp/clusterctl-0/0123456789ab/torch_extensions
export TP_SOCKET_IFNAME=ens1f0
export TRANSFORMERS_OFFLINE=1
export TRITON_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/triton
export WANDB_DIR='/data/our runs/20261121-071500-sft-3f2a/logs/node0'
export WANDB_MODE=offline
export WANDB_NAME=20261121-071500-sft-3f2a
# world_info: {"gpu01": [0, 1], "gpu02": [0, 1]}
exec /data/releases/0123456789ab/bin/python \
    -u \
    -m \
    deepspeed.launcher.launch \
    --world_info=eyJncHUwMSI6IFswLCAxXSwgImdwdTAyIjogWzAsIDFdfQ== \
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

# gpu02: node 1 of 2, 2 processes, the first is rank 2
(
cd '/data/our runs/20261121-071500-sft-3f2a/job' || exit
mkdir -p '/data/our runs/20261121-071500-sft-3f2a/logs/node1/ranks'
unset PYTHONPATH PYTHONHOME PYTHONUSERBASE LD_PRELOAD LD_LIBRARY_PATH
export CLUSTERCTL_NODE=gpu02
export CLUSTERCTL_RUN=20261121-071500-sft-3f2a
export GLOO_SOCKET_IFNAME=ens2f0
export HF_DATASETS_OFFLINE=1
export HF_HOME='/data/our runs/20261121-071500-sft-3f2a/cache/node1'
export HF_HUB_OFFLINE=1
export LANG=C.UTF-8
export MASTER_ADDR=192.168.1.1
export MASTER_PORT=29500
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME='=ens2f0'
export NNODES=2
export NODE_RANK=1
export NPROC_PER_NODE=2
export OMP_NUM_THREADS=1
export PATH=/data/releases/0123456789ab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONFAULTHANDLER=1
export PYTHONNOUSERSITE=1
export PYTHONPATH='/data/our runs/20261121-071500-sft-3f2a/hooks'
export PYTHONUNBUFFERED=1
export TENSORBOARD_LOGGING_DIR='/data/our runs/20261121-071500-sft-3f2a/logs/node1/tensorboard'
export TORCHINDUCTOR_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/inductor
export TORCH_EXTENSIONS_DIR=/tmp/clusterctl-0/0123456789ab/torch_extensions
export TP_SOCKET_IFNAME=ens2f0
export TRANSFORMERS_OFFLINE=1
export TRITON_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/triton
export WANDB_DIR='/data/our runs/20261121-071500-sft-3f2a/logs/node1'
export WANDB_MODE=offline
export WANDB_NAME=20261121-071500-sft-3f2a
# world_info: {"gpu01": [0, 1], "gpu02": [0, 1]}
exec /data/releases/0123456789ab/bin/python \
    -u \
    -m \
    deepspeed.launcher.launch \
    --world_info=eyJncHUwMSI6IFswLCAxXSwgImdwdTAyIjogWzAsIDFdfQ== \
    --node_rank \
    1 \
    --master_addr \
    192.168.1.1 \
    --master_port \
    29500 \
    --no_python \
    --no_local_rank \
    /bin/sh \
    -c \
    'export LOCAL_RANK=$((RANK - $1)); script=$2; shift 2; logs='"'"'/data/our runs/20261121-071500-sft-3f2a/logs/node1/ranks'"'"'/$$/attempt_0/$LOCAL_RANK; mkdir -p "$logs" && exec "$0" -u "$script" --local_rank=$LOCAL_RANK "$@" >"$logs/stdout.log" 2>"$logs/stderr.log"' \
    /data/releases/0123456789ab/bin/python \
    2 \
    train.py \
    --deepspeed_config \
    ds.json
)
