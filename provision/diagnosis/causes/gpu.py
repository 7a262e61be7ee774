"""The GPUs, their driver and their capabilities."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

SUBJECT = "GPUs and their driver"
ORDER = 20

_OUT_OF_SERVICE = (
    "exclude the node: clusterctl train --exclude NODE, or --exclude-bad",
    (
        "look at dmesg -T | grep -i xid and nvidia-smi -q -d ECC there, reset the GPU (nvidia-smi --gpu-reset -i N) or "
        "reboot; if it happens again, the hardware is faulty"
    ),
)

CAUSES = (
    Cause(
        id="cuda.ecc",
        says="a GPU's memory has an uncorrectable error (ECC)",
        fix=_OUT_OF_SERVICE,
        source="https://github.com/vllm-project/vllm/issues/5222",
        lines=(r"uncorrectable ECC error", r"ECC_UNCORRECTABLE"),
    ),
    Cause(
        id="cuda.xid",
        says="the GPU driver reports Xid {xid}[ for {pci}]",
        fix=(
            "Xid 79: the GPU fell off the bus (power, heat, slot); 48, 63, 64, 94, 95: memory; 13, 31, 43: the program",
            *_OUT_OF_SERVICE,
        ),
        source="https://docs.nvidia.com/deploy/xid-errors/",
        lines=(r"NVRM: Xid \((?:PCI:)?(?P<pci>[\w:.]+)\): (?P<xid>\d+)",),
    ),
    Cause(
        id="cuda.lost",
        says="a GPU stopped responding",
        fix=_OUT_OF_SERVICE,
        source="https://github.com/NVIDIA/open-gpu-kernel-modules/issues/507",
        lines=(
            r"fallen off the bus",
            r"Unable to determine the device handle for (?:GPU|gpu)",
            r"(?:CUDA error: |Cuda failure (?:\d+ )?')unknown error",
            r"\bGPU is lost\b",
        ),
    ),
    Cause(
        id="cuda.fabric",
        says="the GPUs of this node are not ready: NVLink's fabric manager is not running",
        fix=(
            "systemctl enable --now nvidia-fabricmanager on that node; its version must match the driver",
            "clusterctl check (gpu.fm) before the next start",
        ),
        source="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
        lines=(
            r"(?:Error 802|CUDA error|cuda runtime error \(802\)) ?: system not yet initialized",
            r"Cuda failure (?:\d+ )?'system not yet initialized",
            r"CUDA_ERROR_SYSTEM_NOT_READY",
        ),
    ),
    Cause(
        id="cuda.driver.old",
        says="the NVIDIA driver is too old for this PyTorch[: it supports CUDA {found} (12040 means 12.4)]",
        fix=(
            "update the driver on that node, or pack an environment with a PyTorch for an older CUDA",
            "clusterctl check BUNDLE (env.cuda) compares every node's driver with the environment",
        ),
        source="https://github.com/zai-org/ChatGLM3/issues/100",
        lines=(
            r"NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)",
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"system has unsupported display driver / cuda driver combination",
            r"API call is not supported in the installed CUDA driver",
            r"the provided PTX was compiled with an unsupported toolchain",
        ),
    ),
    Cause(
        id="cuda.none",
        says="no GPU is visible",
        fix=(
            "run nvidia-smi on that node: if it fails, the driver is not loaded",
            "if it works: CUDA_VISIBLE_DEVICES is empty or names a GPU that does not exist",
        ),
        source="https://github.com/pytorch/pytorch/blob/main/torch/cuda/__init__.py",
        lines=(
            r"Found no NVIDIA driver on your system",
            r"No CUDA GPUs are available",
            r"no CUDA-capable device is detected",
            r"ProcessGroupNCCL is only supported with GPUs, no GPUs found",
            r"Torch not compiled with CUDA enabled",
        ),
    ),
    Cause(
        id="cuda.ordinal",
        says="a rank uses a GPU that this node does not have, or that CUDA_VISIBLE_DEVICES hides",
        fix=(
            "start one process for each GPU: gpus: of that node in the inventory, --gpus-per-node, nproc_per_node",
            "CUDA_VISIBLE_DEVICES counts from 0 and must list a GPU for each process",
        ),
        source="https://github.com/yunqing-me/WatermarkDM/issues/8",
        lines=(r"invalid device ordinal",),
    ),
    Cause(
        id="cuda.duplicate",
        says="ranks {first} and {second} use the same GPU ({device})",
        fix=(
            (
                "each process must use GPU LOCAL_RANK: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), without a "
                "fixed device in the script"
            ),
            "do not start more processes than GPUs: gpus: in the inventory, nproc_per_node",
        ),
        source="https://github.com/Peterande/D-FINE/issues/289",
        lines=(
            (
                r"Duplicate GPU detected ?: rank (?P<first>\d+) and rank (?P<second>\d+) both on CUDA device "
                r"(?P<device>\w+)"
            ),
        ),
    ),
    Cause(
        id="cuda.architecture",
        says="this environment has no code for the node's GPU[: {gpu} is {capability}]",
        fix=(
            "install a PyTorch (and extensions such as flash-attn) built for this GPU, then pack and deploy again",
            "clusterctl check BUNDLE (gpu.arch) compares every node's GPUs with the environment",
        ),
        source="https://github.com/Turoad/CLRNet/issues/83",
        lines=(
            r"^(?:.*?: )?(?P<gpu>NVIDIA .+?) with CUDA capability (?P<capability>sm_\d+) is not compatible",
            r"no kernel image is available for execution on the device",
            r"FlashAttention only supports Ampere GPUs or newer",
        ),
    ),
    Cause(
        id="cuda.bf16",
        says="the training uses bf16, which this GPU or this CUDA does not support",
        fix=(
            "bf16 needs Ampere (A100, RTX 30) or newer: on older GPUs bf16: false and fp16: true",
            (
                "on newer GPUs: the driver and PyTorch must be built for CUDA 11 or later: python -c 'import torch; "
                "print(torch.version.cuda, torch.cuda.is_bf16_supported())'"
            ),
            "in a DeepSpeed configuration set bf16.enabled and fp16.enabled; no kernel needs to be disabled",
        ),
        source="https://github.com/lm-sys/FastChat/issues/399",
        lines=(
            r"Your setup doesn't support bf16",
            r"[Bb](?:F|f)loat16 is not supported on (?:your|this|the)",
            r"Type BFloat16 is not supported on your current accelerator",
        ),
    ),
    Cause(
        id="cuda.assert",
        says="an index is out of range on the GPU: usually a token or label that the model does not have",
        fix=(
            (
                "tokenizer and model must match: len(tokenizer) <= the embedding's rows; resize_vocab: true if tokens "
                "were added"
            ),
            "labels must be below num_labels; run it again with CUDA_LAUNCH_BLOCKING=1 to see the line",
        ),
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution",
        lines=(r"Assertion `[^`]*(?:srcIndex|t >= 0|cur_target|index)[^`]*` failed", r"device-side assert triggered"),
    ),
    Cause(
        id="cuda.memory",
        says="a kernel on the GPU read or wrote outside its memory",
        fix=(
            "run it again with CUDA_LAUNCH_BLOCKING=1: the traceback then names the operation",
            (
                "use compatible versions of PyTorch, flash-attn, DeepSpeed and Triton; disable flash_attn, "
                "torch.compile and liger kernels one at a time"
            ),
            "if it is always the same node, its GPU is faulty: dmesg -T | grep -i xid, and nvidia-smi -q -d ECC there",
        ),
        source="https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
        lines=(
            r"an illegal memory access was encountered",
            r"(?:CUDA error: |Cuda failure (?:\d+ )?')(?:misaligned address|unspecified launch failure)",
            r"(?:CUDA error: |Cuda failure (?:\d+ )?')(?:hardware stack error|an illegal instruction was encountered)",
        ),
    ),
    Cause(
        id="cuda.cublas",
        says="cuBLAS failed",
        fix=(
            "usually the GPU's memory is full: see CUDA out of memory",
            "otherwise an index was out of range: run it again with CUDA_LAUNCH_BLOCKING=1",
        ),
        source="https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CUDABlas.cpp",
        lines=(r"CUBLAS_STATUS_(?!ALLOC)\w+",),
        grade="late",
    ),
)
