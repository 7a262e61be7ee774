"""The Python environment: versions, missing modules and libraries, ops compiled on the node."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

SUBJECT = "Compiling, versions, modules"
ORDER = 60

_PACK = "fix it in the environment that you pack, then clusterctl pack-env and clusterctl deploy"
_OPS = (
    "clusterctl pack-env --with-ops builds DeepSpeed's CPU ops while packing, so nodes need no compiler",
    "torch's optimizers (optim: adamw_torch, torch_adam in the DeepSpeed configuration) need no compiled op",
)

CAUSES = (
    Cause(
        id="env.version",
        says="{need} is required, but the environment has {found}",
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
        id="env.numpy",
        says="a compiled module needs NumPy 1, but the environment has NumPy 2",
        fix=(_PACK, "numpy<2 in that environment, or newer versions of torch and the module that the lines above name"),
        source="https://github.com/donahowe/AutoStudio/issues/38",
        lines=(r"numpy\.core\.multiarray failed to import", r"RuntimeError: Numpy is not available"),
    ),
    Cause(
        id="env.bitsandbytes",
        says="bitsandbytes has no library for this CUDA[: {name}]",
        fix=(
            "a version of bitsandbytes with a library for the environment's CUDA: " + _PACK,
            "BNB_CUDA_VERSION on the node must not choose another one; the CUDA libraries must be on LD_LIBRARY_PATH",
            "clusterctl check BUNDLE (env.cuda): without a working driver it looks for its library for the cpu",
        ),
        source="https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1559",
        lines=(
            r"OSError: \S*/(?P<name>libbitsandbytes_\w+\.so): cannot open shared object file",
            r"CUDA Setup failed despite (?:GPU|CUDA) being available",
        ),
    ),
    Cause(
        id="env.module",
        says="the module {name} is missing",
        fix=(
            _PACK,
            "your own code is sent with the run if the configuration names it by a relative path",
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
        says="a compiled module is incompatible: {what}",
        fix=(
            "incompatible versions (torch, flash-attn, DeepSpeed's ops): " + _PACK,
            "LD_LIBRARY_PATH and LD_PRELOAD on the node must not load other libraries",
        ),
        source="https://github.com/Dao-AILab/flash-attention/issues/620",
        lines=(r"(?P<what>undefined symbol: \w+)", r"(?P<what>version `(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found)"),
    ),
    Cause(
        id="env.library",
        says="a library is missing on the node: {name}",
        fix=(
            "install its system package on every node (services: os_packages: in the inventory), or add it to "
            "the environment: " + _PACK,
        ),
        source="recorded (Python)",
        lines=(r"(?:ImportError|OSError): (?P<name>lib[\w.+-]+): cannot open shared object file",),
        alone="; the other nodes have it",
    ),
    Cause(
        id="env.locale",
        says="Python reads and writes text as {name}, because the node has no locale",
        fix=(
            "LC_ALL: C.UTF-8 in train.env, or PYTHONUTF8: 1",
            "in your own script: open(path, encoding='utf-8')",
        ),
        source="https://github.com/datadreamer-dev/DataDreamer/issues/13",
        lines=(r"Unicode(?:De|En)codeError: '(?P<name>ascii|latin-1)' codec can't",),
    ),
    Cause(
        id="env.instruction",
        says="a program was built for a newer processor than the node's (illegal instruction)",
        fix=(
            "clusterctl pack-env --with-ops --cpu-baseline x86-64-v3 (or older) builds DeepSpeed's ops for it",
            "if the ops were built on another machine: remove the folder TORCH_EXTENSIONS_DIR on that node",
        ),
        source="https://man7.org/linux/man-pages/man7/signal.7.html",
        lines=(
            r"failed \(exitcode: -4\) local_rank: (?P<local_rank>\d+)",
            r"Fatal Python error: Illegal instruction",
            r"Signal 4 \(SIGILL\) received",
            r"exits with return code = -4",
            r"died with <Signals\.SIGILL: 4>",
        ),
    ),
    Cause(
        id="ops.cuda",
        says="DeepSpeed tried to compile an op, but the node has CUDA {installed} and torch needs {wanted}",
        fix=(*_OPS, "if only the minor versions differ: DS_SKIP_CUDA_CHECK=1 in train.env"),
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
        says="an op had to be compiled on the node, but ninja is missing",
        fix=(*_OPS, "install ninja into the environment; its bin must be on PATH, as clusterctl train sets it"),
        source="https://github.com/deepspeedai/DeepSpeed/issues/1687",
        lines=(r"Ninja is required to load C\+\+ extensions",),
    ),
    Cause(
        id="ops.compiler",
        says="an op had to be compiled on the node, but {name} is missing",
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
        fix=(*_OPS, "the compiler's errors are above it in the rank's log"),
        source="https://github.com/deepspeedai/DeepSpeed/issues/889",
        lines=(r"Error building extension '(?P<name>\w+)'", r"Unable to JIT load the (?P<name>\w+) op"),
    ),
    Cause(
        id="ops.lock",
        says="a rank waits for the lock of an op's build that was killed",
        fix=(
            (
                "if no build is running: delete the folder TORCH_EXTENSIONS_DIR (default: "
                "~/.cache/torch_extensions) on that node"
            ),
            *_OPS,
        ),
        source="recorded (torch 2.13, DeepSpeed 0.19, the build's process killed before)",
        events=({"event": "hang", "stacks": r"file_baton\.py"},),
        grade="ended",
    ),
    Cause(
        id="ops.echo",
        says="DeepSpeed's CPU Adam is missing because its op could not be compiled",
        fix=_OPS,
        source="https://github.com/deepspeedai/DeepSpeed/issues/3969",
        lines=(r"'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'",),
        grade="late",
    ),
    Cause(
        id="launcher.ssh",
        says="the launcher cannot log in to {name}",
        fix=(
            "start it with clusterctl train, which uses the inventory's logins",
            "by hand: a login by key without a question to every host of the hostfile, the launcher's own one too",
        ),
        source="https://github.com/deepspeedai/DeepSpeed/issues/4907",
        lines=(
            r"host=(?P<name>\S+) was not reachable via ssh",
            r"Command 'ssh .*?(?P<name>\S+) hostname' returned non-zero exit status 255",
            r"^(?:pdsh@\S+: )?(?P<name>\S+): (?:Host key verification failed|Permission denied \(publickey)",
        ),
    ),
    Cause(
        id="launcher.path",
        says="the launcher's paths do not exist on another node: {path}",
        fix=(
            "start it with clusterctl train: it sends the script, and clusterctl deploy brings the environment",
            "by hand: the script's folder and the Python environment at the same paths on every node",
        ),
        source="https://github.com/deepspeedai/Megatron-DeepSpeed/issues/126",
        lines=(
            r"sh: (?:line \d+: )?cd: (?P<path>\S+): No such file or directory",
            r"sh: (?:line \d+: )?(?P<path>/\S+/python[\d.]*): No such file or directory",
        ),
    ),
    Cause(
        id="launcher.hostfile",
        says="DeepSpeed cannot read its hostfile: {why}",
        fix=(
            "a line for each host: NAME slots=GPUS, without other words, and no host twice",
            "clusterctl train needs no hostfile",
        ),
        source="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/launcher/runner.py",
        lines=(
            r"Hostfile (?P<why>contains (?:a bad entry|multiple entries)[^,]*)",
            r"Hostfile (?P<why>is (?:empty or )?not formatted correctly)",
        ),
    ),
    Cause(
        id="launcher.pdsh",
        says="DeepSpeed's launcher needs {name}, which is not installed",
        fix=("start it with clusterctl train, which needs neither pdsh nor a hostfile",),
        source="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/launcher/runner.py",
        lines=(r"launcher '(?P<name>pdsh|openmpi|mpich|slurm)' not installed",),
    ),
    Cause(
        id="config.launcher",
        says="LLaMA-Factory must be started by torchrun",
        fix=("start it with clusterctl train; by hand: FORCE_TORCHRUN=1 llamafactory-cli train CONFIG",),
        source="https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/hparams/parser.py",
        lines=(r"Please use `FORCE_TORCHRUN=1`", r"Please launch distributed training with `llamafactory-cli`"),
    ),
    Cause(
        id="config.keys",
        says="the configuration has unknown keys: {what}",
        fix=("correct or remove them; names change between versions of LLaMA-Factory and transformers",),
        source="https://github.com/huggingface/transformers/blob/main/src/transformers/hf_argparser.py",
        lines=(
            (
                r"Some (?:specified arguments are not used by the HfArgumentParser|keys are not used by "
                r"the HfArgumentParser)"
                r": (?P<what>.+)"
            ),
            r"config file at \S+ had unknown keys \((?P<what>[^)]+)\)",
        ),
        traced=(
            (
                r"TypeError: \S*__init__\(\) got an unexpected keyword argument (?P<what>'\w+')",
                r"in from_yaml_file|in from_json_file|in load_config_from_file",
            ),
        ),
    ),
    Cause(
        id="config.accelerate",
        says="accelerate's configuration is invalid: {what}",
        fix=(
            "start it with clusterctl train, which gives accelerate its numbers of machines, processes and GPUs",
            "by hand: accelerate config writes a new file; options of accelerate launch replace its values",
        ),
        source="https://github.com/huggingface/accelerate/blob/main/src/accelerate/commands/launch.py",
        traced=((r"^ValueError: (?P<what>.+)", r"in _validate_launch_command"),),
    ),
    Cause(
        id="config.local_rank",
        says="the launcher passes --local-rank, which the program does not know",
        fix=(
            "start it with torchrun (clusterctl train), not python -m torch.distributed.launch",
            "in your own script: int(os.environ['LOCAL_RANK']), or accept both --local-rank and --local_rank",
        ),
        source="https://docs.pytorch.org/docs/stable/distributed.html#launch-utility",
        lines=(r"error: unrecognized arguments: .*--local[-_]rank",),
    ),
    Cause(
        id="config.arguments",
        says="the program refuses its command line: {why}",
        fix=(
            "correct it: the program's --help lists its options; they change between versions",
            "options of the launcher come before the script, the program's after it",
        ),
        source="https://docs.python.org/3/library/argparse.html",
        lines=(
            (
                r"^\S+: error: (?P<why>(?:unrecognized arguments|argument \S+|the following arguments are required"
                r"|ambiguous option): .+)"
            ),
        ),
    ),
)
