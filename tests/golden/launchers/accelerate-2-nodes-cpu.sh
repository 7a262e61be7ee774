# gpu01: node 0 of 2, 1 process, the first is rank 0
(
cd '/data/our runs/20261121-071500-sft-3f2a/job' || exit
mkdir -p '/data/our runs/20261121-071500-sft-3f2a/logs/node0/ranks'
unset PYTHONPATH PYTHONHOME PYTHONUSERBASE LD_PRELOAD LD_LIBRARY_PATH
export ACCELERATE_USE_CPU=true
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
export NPROC_PER_NODE=1
export OMP_NUM_THREADS=2
export PATH=/data/releases/0123456789ab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PET_REDIRECTS=3
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
exec /data/releases/0123456789ab/bin/python \
    -m \
    accelerate.commands.launch \
    --multi_gpu \
    --num_processes \
    2 \
    --num_machines \
    2 \
    --machine_rank \
    0 \
    --main_process_ip \
    192.168.1.1 \
    --main_process_port \
    29500 \
    --same_network \
    --rdzv_backend \
    static \
    --log_dir \
    '/data/our runs/20261121-071500-sft-3f2a/logs/node0/ranks' \
    --gpu_ids \
    all \
    train.py
)

# gpu02: node 1 of 2, 1 process, the first is rank 1
(
cd '/data/our runs/20261121-071500-sft-3f2a/job' || exit
mkdir -p '/data/our runs/20261121-071500-sft-3f2a/logs/node1/ranks'
unset PYTHONPATH PYTHONHOME PYTHONUSERBASE LD_PRELOAD LD_LIBRARY_PATH
export ACCELERATE_USE_CPU=true
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
export NPROC_PER_NODE=1
export OMP_NUM_THREADS=2
export PATH=/data/releases/0123456789ab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PET_REDIRECTS=3
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
exec /data/releases/0123456789ab/bin/python \
    -m \
    accelerate.commands.launch \
    --multi_gpu \
    --num_processes \
    2 \
    --num_machines \
    2 \
    --machine_rank \
    1 \
    --main_process_ip \
    192.168.1.1 \
    --main_process_port \
    29500 \
    --same_network \
    --rdzv_backend \
    static \
    --log_dir \
    '/data/our runs/20261121-071500-sft-3f2a/logs/node1/ranks' \
    --gpu_ids \
    all \
    train.py
)
