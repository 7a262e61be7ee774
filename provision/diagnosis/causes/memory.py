"""Not enough memory: of a GPU, of the host, of /dev/shm.

The order of the fixes follows "ZeRO: Memory Optimizations" (arXiv 1910.02054) and DeepSpeed's page about memory.
``reduce_bucket_size`` 5e8 and ``stage3_max_live_parameters`` 1e9 are DeepSpeed's defaults, so setting them frees
nothing (https://www.deepspeed.ai/docs/config-json/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.diagnosis.cause import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping

SUBJECT = "Memory"
ORDER = 10

_OOM = r"CUDA out of memory\.? Tried to allocate (?P<wanted>[\d.]+ [KMG]iB)"
_SIZES = (
    _OOM
    + r".*?GPU (?P<gpu>\d+) has a total capac\w+ of (?P<total>[\d.]+ [MG]iB) of which (?P<free>[\d.]+ \w+) is free",
    (
        _OOM + r"[^(]*\(GPU (?P<gpu>\d+); (?P<total>[\d.]+ [MG]iB) total capacity;.*?(?P<free>[\d.]+ [KMG]iB) free"
        r"(?:; (?P<own>[\d.]+ [KMG]iB) reserved)?"
    ),
    _OOM,
    r"CUDA out of memory",
    r"(?:OutOfMemoryError|CUDA error): out of memory",
    r"Cuda failure (?:\d+ )?'out of memory'",
    r"_STATUS_ALLOC_FAILED",
)
_WHERE = "[: {wanted} more did not fit into GPU {gpu} with {total}, of which {free} were free]"
_LADDER = (
    (
        "lower per_device_train_batch_size and raise gradient_accumulation_steps by the same factor: the same "
        "training with less memory; accumulation alone frees nothing"
    ),
    "gradient_checkpointing: true (a step takes about a quarter to a third longer)",
    "use the next ZeRO stage, or more nodes: stages 1, 2 and 3 shard optimizer, gradients and parameters over the GPUs",
    "offload_optimizer to cpu (slower, and uses the host's memory instead)",
    "a shorter cutoff_len (block_size), or LoRA or QLoRA: these change the training",
    (
        "these do not help: smaller num_workers (host memory), empty_cache(), reduce_bucket_size 5e8 and "
        "stage3_max_live_parameters 1e9 (the defaults), a newer CUDA"
    ),
)

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MUCH = 0.25  # of the GPU's memory: a CUDA context and NCCL's buffers take less

OTHERS = Cause(
    id="cuda.oom.others",
    says="CUDA out of memory because another process holds {other} of the GPU[: {wanted} more did not fit]",
    fix=(
        "find the process: clusterctl run 'nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv'",
        "stop what an earlier run left there: clusterctl stop RUN",
        "clusterctl check finds busy GPUs before the next start",
    ),
    source="https://github.com/ragntune/code-llama-finetune/issues/3",
    lines=(_OOM + r".*Process (?P<pid>\d+) has (?P<other>[\d.]+ GiB) memory in use\..*this process has",),
)


def other_memory(captured: Mapping[str, str]) -> str | None:
    """The memory of other processes on a full GPU, from the numbers of PyTorch's message; None if it is not much."""
    if not {"total", "free", "own"} <= set(captured):
        return None
    total, free, own = (_bytes(captured[name]) for name in ("total", "free", "own"))
    other = total - free - own
    return f"{other / _UNITS['GiB']:.1f} GiB" if other > _MUCH * total else None


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * _UNITS[unit]


CAUSES = (
    Cause(
        id="memory.pinned",
        says="the host's memory could not be pinned for the GPU[ ({why})]",
        fix=(
            '"pin_memory": false beside offload_optimizer and offload_param: slower, but it needs no pinned memory',
            "offload less, or use more nodes: each rank pins its part of the optimizer's states",
            "in a container: --ulimit memlock=-1; clusterctl check (lim.memlock, mem.available)",
        ),
        source="https://github.com/deepspeedai/DeepSpeed/issues/3335",
        lines=(
            r"CUDA error: (?P<why>OS call failed or operation not supported on this OS|invalid argument|out of memory)",
        ),
        context=r"\bpin_memory\(|in pin_memory\b|cudaHost(?:Alloc|Register)",
    ),
    OTHERS,
    Cause(
        id="cuda.oom.fragmented",
        says="CUDA out of memory from fragmentation: {wanted} did not fit, but PyTorch holds {loose} unused in pieces",
        fix=(
            (
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment (with LLaMA-Factory also "
                "OPTIM_TORCH=0, otherwise it overwrites that)"
            ),
            *_LADDER[:2],
        ),
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#environment-variables",
        lines=(
            (
                r"CUDA out of memory\. Tried to allocate (?P<wanted>[\d.]+ MiB)\..*"
                r"and (?P<loose>[\d.]+ GiB) is reserved by PyTorch but unallocated"
            ),
        ),
    ),
    Cause(
        id="cuda.oom.evaluating",
        says="CUDA out of memory while evaluating" + _WHERE,
        fix=(
            "per_device_eval_batch_size: 1",
            (
                "eval_accumulation_steps: 1 moves the predictions to the host after each step; if only the loss is "
                "needed: prediction_loss_only: true"
            ),
            "bf16_full_eval: true (fp16_full_eval on GPUs before Ampere) helps only in evaluations",
        ),
        source="https://github.com/huggingface/transformers/issues/7232",
        lines=_SIZES,
        context=r"evaluation_loop|prediction_step|prediction_loop|nested_concat|in evaluate\b|estimate_loss",
    ),
    Cause(
        id="cuda.oom.optimizer",
        says="CUDA out of memory in the optimizer's first step" + _WHERE,
        fix=(
            (
                "its states take 12 bytes per parameter (Adam, mixed precision) with any batch: ZeRO stage 1 or more "
                "shards them over the GPUs, offload_optimizer moves them to the host"
            ),
            "or train fewer parameters: LoRA or QLoRA",
            "a smaller batch does not help here",
        ),
        source="https://arxiv.org/abs/1910.02054",
        lines=_SIZES,
        context=r"_init_group|exp_avg|initialize_optimizer_states|_initialize_optimizer_states",
    ),
    Cause(
        id="cuda.oom.loading",
        says="CUDA out of memory while the model was loaded" + _WHERE,
        fix=(
            (
                "the weights alone do not fit: ZeRO-3 shards them over the GPUs, QLoRA (quantization_bit: 4) makes "
                "them smaller, offload_param moves them to the host"
            ),
            "a smaller batch or gradient checkpointing does not help here",
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/4559",
        lines=_SIZES,
        context=r"from_pretrained|in load_model\b",
    ),
    Cause(
        id="cuda.oom",
        says="CUDA out of memory" + _WHERE,
        fix=_LADDER,
        source="https://github.com/hiyouga/LlamaFactory/issues/4026",
        lines=_SIZES,
    ),
    Cause(
        id="host.oom",
        says="the kernel killed a process because the host's memory was full[: {name}][ (pid {pid})]",
        fix=(
            "find what uses the memory: dmesg -T | grep -i oom, and clusterctl check (mem.available)",
            "lower preprocessing_num_workers and dataloader_num_workers; each worker has its own copy",
            ("remove offload_optimizer and offload_param, or use more nodes: they share the 16 bytes per parameter"),
            "low_cpu_mem_usage: true, so that ranks do not all load the whole model at once",
        ),
        source="https://docs.kernel.org/admin-guide/mm/concepts.html",
        lines=(
            r"[Oo]ut of memory: Killed process (?P<pid>\d+) \((?P<name>[^)]+)\)",
            r"Memory cgroup out of memory: Kill(?:ed)? process (?P<pid>\d+) \((?P<name>[^)]+)\)",
            r"oom-kill:constraint=\S*task=(?P<name>[^,]+),pid=(?P<pid>\d+)",
            r"oom_reaper: reaped process (?P<pid>\d+) \((?P<name>[^)]+)\)",
            r"^(?:slurmstepd: error: )?Detected \d+ oom[-_]kill event",
        ),
        events=({"event": "notice", "text": r"(?i)\boom[-_ ]?kill|out of memory"},),
    ),
    Cause(
        id="host.oom.worker",
        says="the kernel killed a data loader's worker (pid {pid}); the usual reason is that the host's memory is full",
        fix=(
            "lower dataloader_num_workers and its prefetch_factor",
            "find what used the memory: dmesg -T | grep -i oom on that node",
        ),
        source="https://github.com/pytorch/pytorch/issues/8976",
        lines=(r"DataLoader worker \(pid\(?s?\)? (?P<pid>[\d, ]+)\) (?:is|are) killed by signal: Killed",),
    ),
    Cause(
        id="host.allocation",
        says="the host has no memory for {wanted} bytes",
        fix=(
            "free memory on that node: clusterctl check (mem.available)",
            "lower preprocessing_num_workers, or remove offloading to the cpu",
        ),
        source="https://github.com/pytorch/pytorch/blob/main/c10/core/impl/alloc_cpu.cpp",
        lines=(
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (?P<wanted>\d+)",
            r"numpy\S*MemoryError: Unable to allocate (?P<wanted>\S+ \S+)",
        ),
    ),
    Cause(
        id="dataset.worker",
        says="a process that prepares the data set was killed; the usual reason is that the host's memory is full",
        fix=(
            "lower preprocessing_num_workers; every rank of a node starts as many",
            "find what used the memory: dmesg -T | grep -i oom on that node",
            "tokenise before the run: tokenized_path in LLaMA-Factory's configuration",
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/6762",
        lines=(r"One of the subprocesses has abruptly died during map operation",),
    ),
    Cause(
        id="shm.attach",
        says="a rank cannot attach to another rank's shared memory {path}, which does not exist here",
        fix=(
            "the ranks of a node must share /dev/shm: one container for all, or --ipc=host",
            "no other program may delete /dev/shm/nccl-*; another version of NCCL, if it is new",
            "NCCL_SHM_DISABLE=1 in train.env uses the network instead: only to confirm the cause",
        ),
        source="https://github.com/NVIDIA/nccl/issues/1589",
        lines=(r"Error while attaching to shared memory segment (?P<path>\S+) .*No such file or directory",),
    ),
    Cause(
        id="shm.full",
        says="shared memory (/dev/shm) is too small[: NCCL needs {size} bytes there]",
        fix=(
            "make it larger: mount -o remount,size=50% /dev/shm, or in a container --shm-size 16g or --ipc=host",
            "services: limits: in the inventory keeps the size after a reboot; clusterctl check (mem.shm) checks it",
            "until then: dataloader_num_workers: 0",
        ),
        source="https://github.com/pytorch/pytorch/issues/5040",
        lines=(
            r"killed by signal: Bus error",
            r"insufficient shared memory \(shm\)",
            r"Error while (?:creating|attaching to) shared memory segment (?P<path>\S+) \(size (?P<size>\d+)\)",
            r"Call to posix_fallocate failed ?: No space left on device",
            r"unable to (?:mmap|write to|allocate) (?:\d+ bytes (?:from|to) )?(?:file|shared memory)\S* .*/torch_",
            r"No space left on device.*/dev/shm",
            r"/dev/shm/\S+ .*No space left on device",  # noqa: S108 - what NCCL says
            r"failed \(exitcode: -7\) local_rank: (?P<local_rank>\d+)",
            r"exits with return code = -7",
            r"died with <Signals\.SIGBUS: 7>",
            r"Signal 7 \(SIGBUS\) received",
        ),
    ),
)
