# gpu01: node 0 of 1, 8 processes, the first is rank 0
$PSNativeCommandArgumentPassing = 'Legacy'  # quotes mean the same in 5.1 and 7
Set-Location -LiteralPath '/data/our runs/20261121-071500-sft-3f2a/job' -ErrorAction Stop
New-Item -ItemType Directory -Force -Path '/data/our runs/20261121-071500-sft-3f2a/logs/node0/ranks' | Out-Null
Remove-Item Env:PYTHONPATH -ErrorAction SilentlyContinue
Remove-Item Env:PYTHONHOME -ErrorAction SilentlyContinue
Remove-Item Env:PYTHONUSERBASE -ErrorAction SilentlyContinue
Remove-Item Env:LD_PRELOAD -ErrorAction SilentlyContinue
Remove-Item Env:LD_LIBRARY_PATH -ErrorAction SilentlyContinue
$env:CLUSTERCTL_NODE = 'gpu01'
$env:CLUSTERCTL_RUN = '20261121-071500-sft-3f2a'
$env:GLOO_SOCKET_IFNAME = 'ens1f0'
$env:HF_DATASETS_OFFLINE = '1'
$env:HF_HOME = '/data/our runs/20261121-071500-sft-3f2a/cache/node0'
$env:HF_HUB_OFFLINE = '1'
$env:LANG = 'C.UTF-8'
$env:MASTER_ADDR = '192.168.1.1'
$env:MASTER_PORT = '29500'
$env:NCCL_DEBUG = 'INFO'
$env:NCCL_DEBUG_FILE = '/data/our runs/20261121-071500-sft-3f2a/logs/node0/nccl-%p.log'
$env:NCCL_DEBUG_SUBSYS = 'INIT,NET'
$env:NCCL_IB_DISABLE = '1'
$env:NCCL_SOCKET_IFNAME = '=ens1f0'
$env:NNODES = '1'
$env:NODE_RANK = '0'
$env:NPROC_PER_NODE = '8'
$env:OMP_NUM_THREADS = '8'
$env:PATH = '/data/releases/0123456789ab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'
$env:PYTHONFAULTHANDLER = '1'
$env:PYTHONNOUSERSITE = '1'
$env:PYTHONUNBUFFERED = '1'
$env:TENSORBOARD_LOGGING_DIR = '/data/our runs/20261121-071500-sft-3f2a/logs/node0/tensorboard'
$env:TORCHINDUCTOR_CACHE_DIR = '/tmp/clusterctl-0/0123456789ab/inductor'
$env:TORCH_EXTENSIONS_DIR = '/tmp/clusterctl-0/0123456789ab/torch_extensions'
$env:TORCH_NCCL_DEBUG_INFO_TEMP_FILE = '/data/our runs/20261121-071500-sft-3f2a/logs/node0/nccl_trace_rank_'
$env:TORCH_NCCL_DUMP_ON_TIMEOUT = '1'
$env:TORCH_NCCL_TRACE_BUFFER_SIZE = '2000'
$env:TP_SOCKET_IFNAME = 'ens1f0'
$env:TRANSFORMERS_OFFLINE = '1'
$env:TRITON_CACHE_DIR = '/tmp/clusterctl-0/0123456789ab/triton'
$env:WANDB_DIR = '/data/our runs/20261121-071500-sft-3f2a/logs/node0'
$env:WANDB_MODE = 'offline'
$env:WANDB_NAME = '20261121-071500-sft-3f2a'
# world_info: {"gpu01": [0, 1, 2, 3, 4, 5, 6, 7]}
& '/data/releases/0123456789ab/bin/python' `
    '-u' `
    '-m' `
    'deepspeed.launcher.launch' `
    '--world_info=eyJncHUwMSI6IFswLCAxLCAyLCAzLCA0LCA1LCA2LCA3XX0=' `
    '--node_rank' `
    '0' `
    '--master_addr' `
    '192.168.1.1' `
    '--master_port' `
    '29500' `
    '--no_python' `
    '--no_local_rank' `
    '/bin/sh' `
    '-c' `
    'export LOCAL_RANK=$((RANK - $1)); script=$2; shift 2; logs=''/data/our runs/20261121-071500-sft-3f2a/logs/node0/ranks''/$$/attempt_0/$LOCAL_RANK; mkdir -p \"$logs\" && exec \"$0\" -u \"$script\" --local_rank=$LOCAL_RANK \"$@\" >\"$logs/stdout.log\" 2>\"$logs/stderr.log\"' `
    '/data/releases/0123456789ab/bin/python' `
    '0' `
    'train.py' `
    '--deepspeed_config' `
    'ds.json'
