# gpu01: node 0 of 3, 8 processes, the first is rank 0
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
export LOCAL_WORLD_SIZE=8
export MASTER_ADDR=192.168.1.1
export MASTER_PORT=29500
export NCCL_DEBUG=INFO
export NCCL_DEBUG_FILE='/data/our runs/20261121-071500-sft-3f2a/logs/node0/nccl-%p.log'
export NCCL_DEBUG_SUBSYS=INIT,NET
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME='=ens1f0'
export NNODES=3
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
export WORLD_SIZE=14
for LOCAL_RANK in 0 1 2 3 4 5 6 7; do
export LOCAL_RANK RANK=$((0 + LOCAL_RANK))
/data/releases/0123456789ab/bin/python \
    train.py \
    --lr \
    1e-5 \
    --name \
    'two words' &
done
wait
)

# gpu02: node 1 of 3, 4 processes, the first is rank 8
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
export LOCAL_WORLD_SIZE=4
export MASTER_ADDR=192.168.1.1
export MASTER_PORT=29500
export NCCL_DEBUG=INFO
export NCCL_DEBUG_FILE='/data/our runs/20261121-071500-sft-3f2a/logs/node1/nccl-%p.log'
export NCCL_DEBUG_SUBSYS=INIT,NET
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME='=ens2f0'
export NNODES=3
export NODE_RANK=1
export NPROC_PER_NODE=4
export OMP_NUM_THREADS=16
export PATH=/data/releases/0123456789ab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONFAULTHANDLER=1
export PYTHONNOUSERSITE=1
export PYTHONUNBUFFERED=1
export TENSORBOARD_LOGGING_DIR='/data/our runs/20261121-071500-sft-3f2a/logs/node1/tensorboard'
export TORCHINDUCTOR_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/inductor
export TORCH_EXTENSIONS_DIR=/tmp/clusterctl-0/0123456789ab/torch_extensions
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE='/data/our runs/20261121-071500-sft-3f2a/logs/node1/nccl_trace_rank_'
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export TP_SOCKET_IFNAME=ens2f0
export TRANSFORMERS_OFFLINE=1
export TRITON_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/triton
export WANDB_DIR='/data/our runs/20261121-071500-sft-3f2a/logs/node1'
export WANDB_MODE=offline
export WANDB_NAME=20261121-071500-sft-3f2a
export WORLD_SIZE=14
for LOCAL_RANK in 0 1 2 3; do
export LOCAL_RANK RANK=$((8 + LOCAL_RANK))
/data/releases/0123456789ab/bin/python \
    train.py \
    --lr \
    1e-5 \
    --name \
    'two words' &
done
wait
)

# gpu03: node 2 of 3, 2 processes, the first is rank 12
(
cd '/data/our runs/20261121-071500-sft-3f2a/job' || exit
mkdir -p '/data/our runs/20261121-071500-sft-3f2a/logs/node2/ranks'
unset PYTHONPATH PYTHONHOME PYTHONUSERBASE LD_PRELOAD LD_LIBRARY_PATH
export CLUSTERCTL_NODE=gpu03
export CLUSTERCTL_RUN=20261121-071500-sft-3f2a
export GLOO_SOCKET_IFNAME=ens2f0
export HF_DATASETS_OFFLINE=1
export HF_HOME='/data/our runs/20261121-071500-sft-3f2a/cache/node2'
export HF_HUB_OFFLINE=1
export LANG=C.UTF-8
export LOCAL_WORLD_SIZE=2
export MASTER_ADDR=192.168.1.1
export MASTER_PORT=29500
export NCCL_DEBUG=INFO
export NCCL_DEBUG_FILE='/data/our runs/20261121-071500-sft-3f2a/logs/node2/nccl-%p.log'
export NCCL_DEBUG_SUBSYS=INIT,NET
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME='=ens2f0'
export NNODES=3
export NODE_RANK=2
export NPROC_PER_NODE=2
export OMP_NUM_THREADS=32
export PATH=/data/releases/0123456789ab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONFAULTHANDLER=1
export PYTHONNOUSERSITE=1
export PYTHONUNBUFFERED=1
export TENSORBOARD_LOGGING_DIR='/data/our runs/20261121-071500-sft-3f2a/logs/node2/tensorboard'
export TORCHINDUCTOR_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/inductor
export TORCH_EXTENSIONS_DIR=/tmp/clusterctl-0/0123456789ab/torch_extensions
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE='/data/our runs/20261121-071500-sft-3f2a/logs/node2/nccl_trace_rank_'
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export TP_SOCKET_IFNAME=ens2f0
export TRANSFORMERS_OFFLINE=1
export TRITON_CACHE_DIR=/tmp/clusterctl-0/0123456789ab/triton
export WANDB_DIR='/data/our runs/20261121-071500-sft-3f2a/logs/node2'
export WANDB_MODE=offline
export WANDB_NAME=20261121-071500-sft-3f2a
export WORLD_SIZE=14
for LOCAL_RANK in 0 1; do
export LOCAL_RANK RANK=$((12 + LOCAL_RANK))
/data/releases/0123456789ab/bin/python \
    train.py \
    --lr \
    1e-5 \
    --name \
    'two words' &
done
wait
)
