"""The Python environment: versions, missing modules and libraries, ops that are to be compiled on the node."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

_PACK = "mend it where the environment is packed, then clusterctl pack-env and clusterctl deploy"
_OPS = (
    "clusterctl pack-env --with-ops builds DeepSpeed's CPU ops when packing; nodes need no compiler then",
    "optimizers of torch (optim: adamw_torch, torch_adam in the DeepSpeed configuration) need none",
)

CAUSES = (
    Cause(
        id="env.version",
        says="{need} is wanted, and the environment has {found}",
        fix=(
            _PACK,
            "DISABLE_VERSION_CHECK=1 in train.env skips LLaMA-Factory's check at your own risk",
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/10392",
        lines=(
            (
                r"ImportError: (?P<need>\S+) is required for a normal functioning of this module, but found "
                r"(?P<found>\S+?)\.?$"
            ),
            r"The '(?P<need>[^']+)' (?P<found>distribution was not found)",
            r"ImportError: Using `\w+` requires (?P<need>.+?): (?P<found>.+)",
            r"(?P<need>numpy 1\.x) cannot be run in (?P<found>NumPy \S+)",
        ),
    ),
    Cause(
        id="env.module",
        says="the module {name} is not there",
        fix=(
            _PACK,
            "code of your own travels with the run when the configuration names it by a relative path",
            "clusterctl verify finds files of a release that are missing or changed",
        ),
        source="recorded (Python)",
        lines=(
            r"^(?:ModuleNotFoundError|ImportError): No module named '?(?P<name>[\w.]+)'?",
            r"python[\d.]*: No module named (?P<name>[\w.]+)",
        ),
        alone="; the other nodes have it",
    ),
    Cause(
        id="env.symbol",
        says="a compiled module does not fit: {what}",
        fix=(
            "versions that do not belong together (torch, flash-attn, DeepSpeed's ops): " + _PACK,
            "LD_LIBRARY_PATH and LD_PRELOAD of the node must not bring other libraries",
        ),
        source="https://github.com/Dao-AILab/flash-attention/issues/620",
        lines=(r"(?P<what>undefined symbol: \w+)", r"(?P<what>version `(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found)"),
    ),
    Cause(
        id="env.library",
        says="a library is missing on the node: {name}",
        fix=(
            "the system's package for it on every node: services: os_packages: in the inventory, or in "
            "the environment: " + _PACK,
        ),
        source="recorded (Python)",
        lines=(r"(?:ImportError|OSError): (?P<name>lib[\w.+-]+): cannot open shared object file",),
        alone="; the other nodes have it",
    ),
    Cause(
        id="env.instruction",
        says="a program was built for a newer processor than the node's (illegal instruction)",
        fix=(
            "clusterctl pack-env --with-ops --cpu-baseline x86-64-v3 (or an older one) builds DeepSpeed's ops for it",
            "ops that were built elsewhere: remove TORCH_EXTENSIONS_DIR on that node",
        ),
        source="https://man7.org/linux/man-pages/man7/signal.7.html",
        lines=(
            r"failed \(exitcode: -4\) local_rank: (?P<local_rank>\d+)",
            r"Fatal Python error: Illegal instruction",
            r"Signal 4 \(SIGILL\) received",
        ),
    ),
    Cause(
        id="ops.cuda",
        says="DeepSpeed would compile an op, and CUDA {installed} on the node is not the {wanted} of torch",
        fix=(*_OPS, "DS_SKIP_CUDA_CHECK=1 in train.env where only the minor versions differ"),
        source="https://github.com/deepspeedai/DeepSpeed/blob/master/op_builder/builder.py",
        lines=(
            (
                r"Installed CUDA version (?P<installed>\S+) does not match the version torch was compiled with "
                r"(?P<wanted>[\d.]*\d)"
            ),
            r"detected CUDA version \((?P<installed>[\d.]+)\) mismatches the version .* PyTorch \((?P<wanted>[\d.]+)\)",
        ),
    ),
    Cause(
        id="ops.ninja",
        says="an op would be compiled on the node, and ninja is not there",
        fix=(*_OPS, "ninja in the environment's bin, which must be on PATH: clusterctl train sets it"),
        source="https://github.com/deepspeedai/DeepSpeed/issues/1687",
        lines=(r"Ninja is required to load C\+\+ extensions",),
    ),
    Cause(
        id="ops.compiler",
        says="an op would be compiled on the node, and {name} is not there",
        fix=_OPS,
        source="https://github.com/deepspeedai/DeepSpeed/blob/master/op_builder/builder.py",
        lines=(
            r"No such file or directory: '(?:\S*/)?(?P<name>nvcc|g\+\+|gcc|c\+\+|which)'",
            r"(?P<name>CUDA_HOME) (?:environment variable is not set|does not exist)",
            r"(?P<name>nvcc|g\+\+|c\+\+)(?::| ).*(?:not found|command not found)",
            r"MissingCUDAException: (?P<name>CUDA_HOME)",
            r"Failed to find (?P<name>C compiler)",
        ),
    ),
    Cause(
        id="ops.build",
        says="the op {name} could not be compiled on the node",
        fix=(*_OPS, "the compiler's own words stand above it in the rank's log"),
        source="https://github.com/deepspeedai/DeepSpeed/issues/889",
        lines=(r"Error building extension '(?P<name>\w+)'", r"Unable to JIT load the (?P<name>\w+) op"),
    ),
    Cause(
        id="ops.lock",
        says="a rank waits for the lock of an op's build, which a killed build has left behind",
        fix=(
            (
                "remove it where no build runs: rm -rf the folder TORCH_EXTENSIONS_DIR (else "
                "~/.cache/torch_extensions) on "
                "that node"
            ),
            *_OPS,
        ),
        source="recorded (torch 2.13, DeepSpeed 0.19, the build's process killed before)",
        events=({"event": "hang", "stacks": r"file_baton\.py"},),
        grade="ended",
    ),
    Cause(
        id="ops.echo",
        says="DeepSpeed's CPU Adam is not there, because its op could not be compiled",
        fix=_OPS,
        source="https://github.com/deepspeedai/DeepSpeed/issues/3969",
        lines=(r"'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'",),
        grade="late",
    ),
    Cause(
        id="launcher.pdsh",
        says="DeepSpeed's own launcher wants {name}, which is not there",
        fix=(
            "clusterctl train starts DeepSpeed on every node itself (--no_ssh) and needs neither pdsh nor a hostfile",
        ),
        source="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/launcher/runner.py",
        lines=(r"launcher '(?P<name>pdsh|openmpi|mpich|slurm)' not installed",),
    ),
    Cause(
        id="config.launcher",
        says="LLaMA-Factory wants to be started by torchrun",
        fix=("clusterctl train does so; by hand FORCE_TORCHRUN=1 llamafactory-cli train CONFIG",),
        source="https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/hparams/parser.py",
        lines=(r"Please use `FORCE_TORCHRUN=1`", r"Please launch distributed training with `llamafactory-cli`"),
    ),
    Cause(
        id="config.keys",
        says="the configuration has keys that nobody knows: {what}",
        fix=("correct or remove them; names change between versions of LLaMA-Factory and transformers",),
        source="https://github.com/huggingface/transformers/blob/main/src/transformers/hf_argparser.py",
        lines=(
            (
                r"Some (?:specified arguments are not used by the HfArgumentParser|keys are not used by "
                r"the HfArgumentParser)"
                r": (?P<what>.+)"
            ),
        ),
    ),
)
