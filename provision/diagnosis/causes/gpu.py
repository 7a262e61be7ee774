"""The GPUs, their driver, and what they can and cannot do."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

_OUT_OF_SERVICE = (
    "take the node out: clusterctl train --exclude NODE, or --exclude-bad",
    (
        "look at dmesg -T | grep -i xid and nvidia-smi -q -d ECC there, reset the GPU (nvidia-smi --gpu-reset -i N) or "
        "reboot; where it comes back the hardware is faulty"
    ),
)

CAUSES = (
    Cause(
        id="cuda.ecc",
        says="a GPU's memory has an error that cannot be corrected (ECC)",
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
        says="a GPU has gone away",
        fix=_OUT_OF_SERVICE,
        source="https://github.com/NVIDIA/open-gpu-kernel-modules/issues/507",
        lines=(
            r"GPU has fallen off the bus",
            r"Unable to determine the device handle for (?:GPU|gpu)",
            r"CUDA error: (?:unspecified launch failure|unknown error|hardware stack error)",
            r"\bGPU is lost\b",
        ),
    ),
    Cause(
        id="cuda.fabric",
        says="the GPUs of this node are not ready: NVLink's fabric manager does not run",
        fix=(
            "systemctl enable --now nvidia-fabricmanager on that node; its version must be the driver's",
            "clusterctl check (gpu.fm) before the next start",
        ),
        source="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
        lines=(r"(?:Error 802|CUDA error): system not yet initialized", r"CUDA_ERROR_SYSTEM_NOT_READY"),
    ),
    Cause(
        id="cuda.driver.old",
        says="the NVIDIA driver is too old for this PyTorch[: it knows CUDA {found}, written as in 12040 for 12.4]",
        fix=(
            "update the driver of that node, or pack an environment whose PyTorch is built for an older CUDA",
            "clusterctl check BUNDLE (env.cuda) compares every node's driver with the environment",
        ),
        source="https://github.com/zai-org/ChatGLM3/issues/100",
        lines=(
            r"NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)",
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"system has unsupported display driver / cuda driver combination",
        ),
    ),
    Cause(
        id="cuda.none",
        says="no GPU is to be seen",
        fix=(
            "nvidia-smi on that node: without an answer the driver is not loaded",
            "where it answers: CUDA_VISIBLE_DEVICES names a GPU that is not there, or is empty",
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
        says="a rank wants a GPU that this node does not have, or that CUDA_VISIBLE_DEVICES hides",
        fix=(
            "as many processes as GPUs: gpus: of that node in the inventory, --gpus-per-node, nproc_per_node",
            "CUDA_VISIBLE_DEVICES counts from 0 and must list as many as there are processes",
        ),
        source="https://github.com/yunqing-me/WatermarkDM/issues/8",
        lines=(r"invalid device ordinal",),
    ),
    Cause(
        id="cuda.duplicate",
        says="ranks {first} and {second} use the same GPU ({device})",
        fix=(
            (
                "each process takes GPU LOCAL_RANK: "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), and no device is "
                "fixed in the script"
            ),
            "no more processes than GPUs: gpus: in the inventory, nproc_per_node",
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
            "install a PyTorch (and extensions such as flash-attn) built for this GPU, pack and deploy it again",
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
        says="bf16 is asked for, and this GPU, or this CUDA, cannot do it",
        fix=(
            "bf16 needs Ampere (A100, RTX 30) or newer: on older GPUs bf16: false and fp16: true",
            (
                "on a newer one: the driver and PyTorch must be of CUDA 11 or later: python -c 'import torch; "
                "print(torch.version.cuda, torch.cuda.is_bf16_supported())'"
            ),
            "in a DeepSpeed configuration the same in bf16.enabled and fp16.enabled; no kernel need be switched off",
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
        says="an index is out of its range on the GPU: most often a token or label that the model does not know",
        fix=(
            (
                "tokenizer and model must belong together: len(tokenizer) <= the embedding's rows; "
                "resize_vocab: true after "
                "tokens were added"
            ),
            "labels must be below num_labels; the run again with CUDA_LAUNCH_BLOCKING=1 names the line",
        ),
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution",
        lines=(r"Assertion `[^`]*(?:srcIndex|t >= 0|cur_target|index)[^`]*` failed", r"device-side assert triggered"),
    ),
    Cause(
        id="cuda.memory",
        says="a kernel on the GPU read or wrote outside its memory",
        fix=(
            "again with CUDA_LAUNCH_BLOCKING=1: then the traceback names the operation",
            (
                "versions of PyTorch, flash-attn, DeepSpeed and Triton that belong together; without flash_attn, "
                "torch.compile and liger kernels one after the other"
            ),
            "where it is always the same node, its GPU is faulty: nvidia-smi -q -d ECC",
        ),
        source="https://github.com/axolotl-ai-cloud/axolotl/issues/1473",
        lines=(r"an illegal memory access was encountered", r"CUDA error: misaligned address"),
    ),
    Cause(
        id="cuda.cublas",
        says="cuBLAS failed",
        fix=(
            "most often the GPU's memory is full: see the steps against CUDA out of memory",
            "else an index out of range before it: the run again with CUDA_LAUNCH_BLOCKING=1",
        ),
        source="https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CUDABlas.cpp",
        lines=(r"CUBLAS_STATUS_(?!ALLOC)\w+",),
        grade="late",
    ),
)
