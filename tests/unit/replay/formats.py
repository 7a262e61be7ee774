"""What the programs around a failure print: the libraries' own message formats, as functions that return lines.

A replayed case names a format and its values (``replays.py``). Each format has its source. The formats of torch depend
on its version, which is a case's ``formats: {torch: …}``. Recorded with: torch 2.13, a Python program that fails on
rank 1, two processes; earlier versions from the threads that the cases link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Values = Mapping[str, Any]

SITE = "/opt/conda/lib/python3.10/site-packages"
STAMP = "2024-06-11 10:21:37"
GLOG = "0611 10:21:37"

# Frames of tracebacks by what runs: file, line, function, source. The files are those of transformers 4.43,
# accelerate 0.32, DeepSpeed 0.14, datasets 2.20, LLaMA-Factory 0.8, torch 2.3.
FRAMES: Mapping[str, tuple[tuple[str, int, str, str], ...]] = {
    "factory": (
        ("/app/src/llamafactory/launcher.py", 23, "<module>", "launch()"),
        ("/app/src/llamafactory/launcher.py", 19, "launch", "run_exp()"),
        ("/app/src/llamafactory/train/tuner.py", 50, "run_exp", "run_sft(model_args, data_args, training_args)"),
    ),
    "script": (("/job/train.py", 214, "<module>", "main()"),),
    "dataset": (
        ("/app/src/llamafactory/train/sft/workflow.py", 47, "run_sft", "dataset_module = get_dataset(template)"),
        ("/app/src/llamafactory/data/loader.py", 261, "get_dataset", "dataset = _get_merged_dataset(data_args)"),
        (f"{SITE}/datasets/load.py", 2616, "load_dataset", "builder_instance.download_and_prepare("),
        (f"{SITE}/datasets/builder.py", 1029, "download_and_prepare", "self._download_and_prepare("),
    ),
    "map": (
        (f"{SITE}/datasets/arrow_dataset.py", 602, "wrapper", "out = func(self, *args, **kwargs)"),
        (f"{SITE}/datasets/arrow_dataset.py", 3253, "map", "for rank, done, content in iflatmap_unordered("),
    ),
    "load": (
        ("/app/src/llamafactory/model/loader.py", 160, "load_model", "model = load_class.from_pretrained(**init)"),
        (f"{SITE}/transformers/models/auto/auto_factory.py", 564, "from_pretrained", "return model_class.from_pretr"),
        (f"{SITE}/transformers/modeling_utils.py", 3677, "from_pretrained", ") = cls._load_pretrained_model("),
    ),
    "tokenizer": (
        ("/app/src/llamafactory/model/loader.py", 76, "load_tokenizer", "tokenizer = AutoTokenizer.from_pretrained("),
        (f"{SITE}/transformers/models/auto/tokenization_auto.py", 897, "from_pretrained", "return tokenizer_class("),
    ),
    "train": (
        (f"{SITE}/transformers/trainer.py", 1932, "train", "return inner_training_loop("),
        (f"{SITE}/transformers/trainer.py", 2268, "_inner_training_loop", "tr_loss_step = self.training_step(model)"),
        (f"{SITE}/transformers/trainer.py", 3307, "training_step", "loss = self.compute_loss(model, inputs)"),
    ),
    "forward": (
        (f"{SITE}/torch/nn/modules/module.py", 1532, "_wrapped_call_impl", "return self._call_impl(*args, **kwargs)"),
        (f"{SITE}/torch/nn/modules/module.py", 1541, "_call_impl", "return forward_call(*args, **kwargs)"),
    ),
    "ddp": (
        (f"{SITE}/torch/nn/parallel/distributed.py", 1589, "forward", "inputs, kwargs = self._pre_forward(*inputs)"),
        (f"{SITE}/torch/nn/parallel/distributed.py", 1480, "_pre_forward", "if self.reducer._rebuild_buckets():"),
    ),
    "ddp_init": (
        (f"{SITE}/accelerate/accelerator.py", 1452, "prepare_model", "model = DistributedDataParallel("),
        (f"{SITE}/torch/nn/parallel/distributed.py", 825, "__init__", "_verify_param_shape_across_processes("),
    ),
    "backward": (
        (f"{SITE}/accelerate/accelerator.py", 2147, "backward", "self.deepspeed_engine_wrapped.backward(loss)"),
        (f"{SITE}/deepspeed/runtime/engine.py", 1976, "backward", "self.optimizer.backward(loss)"),
        (f"{SITE}/torch/autograd/__init__.py", 267, "backward", "_engine_run_backward("),
    ),
    "step": (
        (f"{SITE}/deepspeed/runtime/engine.py", 2169, "step", "self._take_model_step(lr_kwargs)"),
        (f"{SITE}/deepspeed/runtime/engine.py", 2075, "_take_model_step", "self.optimizer.step()"),
    ),
    "ds_init": (
        (f"{SITE}/accelerate/accelerator.py", 1751, "_prepare_deepspeed", "engine = deepspeed.initialize(**kwargs)"),
        (f"{SITE}/deepspeed/__init__.py", 181, "initialize", "engine = DeepSpeedEngine(args=args,"),
        (f"{SITE}/deepspeed/runtime/engine.py", 307, "__init__", "self._configure_optimizer(optimizer)"),
    ),
    "ops": (
        (f"{SITE}/deepspeed/ops/adam/cpu_adam.py", 94, "__init__", "self.ds_opt_adam = CPUAdamBuilder().load()"),
        (f"{SITE}/deepspeed/ops/op_builder/builder.py", 478, "load", "return self.jit_load(verbose)"),
    ),
    "ds_load": (
        (f"{SITE}/transformers/integrations/deepspeed.py", 427, "deepspeed_load_checkpoint", "load_path, _ = ("),
        (f"{SITE}/deepspeed/runtime/engine.py", 2724, "load_checkpoint", "success = self._load_zero_checkpoint("),
    ),
    "save": (
        (f"{SITE}/transformers/trainer.py", 2291, "_inner_training_loop", "self._maybe_log_save_evaluate(tr_loss)"),
        (f"{SITE}/transformers/trainer.py", 2732, "_maybe_log_save_evaluate", "self._save_checkpoint(model, trial)"),
    ),
    "init": (
        (f"{SITE}/torch/distributed/c10d_logger.py", 86, "wrapper", "func_return = func(*args, **kwargs)"),
        (f"{SITE}/torch/distributed/distributed_c10d.py", 1177, "init_process_group", "store, rank, world_size = next"),
        (f"{SITE}/torch/distributed/rendezvous.py", 246, "_env_rendezvous_handler", "store = _create_c10d_store("),
        (f"{SITE}/torch/distributed/rendezvous.py", 174, "_create_c10d_store", "return TCPStore("),
    ),
    "barrier": (
        (f"{SITE}/torch/distributed/c10d_logger.py", 75, "wrapper", "return func(*args, **kwargs)"),
        (f"{SITE}/torch/distributed/distributed_c10d.py", 3683, "barrier", "work = default_pg.barrier(opts=opts)"),
    ),
    "evaluate": (
        (f"{SITE}/transformers/trainer.py", 3572, "evaluate", "output = eval_loop("),
        (f"{SITE}/transformers/trainer.py", 3757, "evaluation_loop", "loss, logits, labels = self.prediction_step("),
    ),
    "loader": (
        (f"{SITE}/torch/utils/data/dataloader.py", 631, "__next__", "data = self._next_data()"),
        (f"{SITE}/torch/utils/data/dataloader.py", 1133, "_try_get_data", "data = self._data_queue.get(timeout)"),
    ),
    "agent": (
        (f"{SITE}/torch/distributed/run.py", 879, "main", "run(args)"),
        (f"{SITE}/torch/distributed/launcher/api.py", 255, "launch_agent", "result = agent.run()"),
        (f"{SITE}/torch/distributed/elastic/agent/server/api.py", 680, "run", "result = self._invoke_run(role)"),
        (f"{SITE}/torch/distributed/elastic/agent/server/api.py", 829, "_invoke_run", "self._initialize_workers("),
    ),
    "import": (
        (f"{SITE}/transformers/utils/import_utils.py", 1603, "_get_module", "return importlib.import_module(name)"),
        ("<frozen importlib._bootstrap>", 1050, "_gcd_import", ""),
    ),
    "cuda": ((f"{SITE}/torch/cuda/__init__.py", 399, "set_device", "torch._C._cuda_setDevice(device)"),),
}


def _version(case: Values) -> tuple[int, int]:
    parts = str(case.get("formats", {}).get("torch", "2.3")).split(".")
    return int(parts[0]), int(parts[1])


def _rank_prefix(case: Values, rank: int | None) -> str:
    """``[rank3]: ``, which torch puts before a traceback from version 2.2 on "
    "(torch/distributed/distributed_c10d.py)."""
    return f"[rank{rank}]: " if rank is not None and _version(case) >= (2, 2) else ""


def trace(case: Values, values: Values) -> list[str]:
    """A traceback of Python: ``in`` names groups of frames, or is ``file:line function: source``; ``ends`` follows."""
    prefix = _rank_prefix(case, values.get("rank"))
    lines = ["Traceback (most recent call last):"]
    for group in values.get("in", ["script"]):
        if group in FRAMES:
            frames: Sequence[tuple[str, int, str, str]] = FRAMES[group]
        else:
            place, _, source = group.partition(": ")
            file, _, rest = place.partition(":")
            number, _, function = rest.partition(" ")
            frames = ((file, int(number), function, source),)
        for file, number, function, source in frames:
            lines.append(f'  File "{file}", line {number}, in {function}')
            if source:
                lines.append(f"    {source}")
    return [prefix + line for line in (*lines, *values["ends"].rstrip("\n").split("\n"))]


def text(case: Values, values: Values) -> list[str]:
    """Lines behind a rank's prefix."""
    prefix = _rank_prefix(case, values.get("rank"))
    return [prefix + line for line in values["lines"].rstrip("\n").split("\n")]


def torchrun(case: Values, values: Values) -> list[str]:
    """The start of torchrun (torch/distributed/run.py)."""
    version = _version(case)
    omp = (
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being "
        "overloaded, please further tune the variable for optimal performance in your application as needed. "
    )
    stars = "*" * 41
    if version < (2, 1):
        return ["WARNING:torch.distributed.run:", stars, omp, stars]
    head = (
        f"[{STAMP},930] torch.distributed.run: [WARNING] "
        if version < (2, 3)
        else f"W{GLOG}.930000 139955215721408 torch/distributed/run.py:757] "
    )
    return [head + line for line in ("", stars, omp, stars)]


def sigterm(case: Values, values: Any) -> list[str]:
    """torchrun stops its other processes (torch/distributed/elastic/multiprocessing/api.py)."""
    name = "SIGTERM"
    pids = values
    if isinstance(values, Mapping):
        name, pids = values["signal"], values["pids"]
    module = "torch.distributed.elastic.multiprocessing.api"
    version = _version(case)
    if version < (2, 1):
        return [f"WARNING:{module}:Sending process {pid} closing signal {name}" for pid in pids]
    if version < (2, 3):
        return [f"[{STAMP},102] {module}: [WARNING] Sending process {pid} closing signal {name}" for pid in pids]
    place = "84933 site-packages/torch/distributed/elastic/multiprocessing/api.py:900"
    return [f"W{GLOG}.102000 {place}] Sending process {pid} closing signal {name}" for pid in pids]


def report(case: Values, values: Values) -> list[str]:
    """torchrun's report about a failed process (torch/distributed/elastic/multiprocessing/errors/__init__.py)."""
    rank, local, code = values["rank"], values.get("local", values["rank"]), values.get("rc", 1)
    pid, host = values.get("pid", 4200 + local), values.get("host", "node01")
    program = values.get("program", "train.py")
    binary = f"failed (exitcode: {code}) local_rank: {local} (pid: {pid}) of binary: /opt/conda/bin/python"
    module = "torch.distributed.elastic.multiprocessing.api"
    version = _version(case)
    if version < (2, 1):
        first = f"ERROR:{module}:{binary}"
    elif version < (2, 3):
        first = f"[{STAMP},412] {module}: [ERROR] {binary}"
    else:
        first = f"E{GLOG}.412000 84933 site-packages/torch/distributed/elastic/multiprocessing/api.py:874] {binary}"
    why = (
        f"Signal {-code} ({values['signal']}) received by PID {pid}"
        if code < 0
        else "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    )
    others = []
    for number, (other, other_local) in enumerate(values.get("others", ()), 1):
        others += [
            f"[{number}]:",
            "  time      : 2024-06-11_10:21:37",
            f"  host      : {host}",
            f"  rank      : {other} (local_rank: {other_local})",
            f"  exitcode  : {values.get('others_rc', 1)} (pid: {4200 + other_local})",
            "  error_file: <N/A>",
            "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
        ]
    return [
        first,
        "Traceback (most recent call last):",
        '  File "/opt/conda/bin/torchrun", line 33, in <module>',
        "    sys.exit(load_entry_point('torch', 'console_scripts', 'torchrun')())",
        f'  File "{SITE}/torch/distributed/launcher/api.py", line 264, in launch_agent',
        "    raise ChildFailedError(",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        f"{program} FAILED",
        "-" * 60,
        "Failures:",
        *(others or ["  <NO_OTHER_FAILURES>"]),
        "-" * 60,
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2024-06-11_10:21:36",
        f"  host      : {host}",
        f"  rank      : {rank} (local_rank: {local})",
        f"  exitcode  : {code} (pid: {pid})" + (f" ({values['signal']})" if code < 0 else ""),
        "  error_file: <N/A>",
        f"  traceback : {why}",
        "=" * 60,
    ]


def rendezvous(case: Values, values: Values) -> list[str]:
    """torchrun cannot join the rendezvous (torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py)."""
    inner = values.get("inner", "")
    backend = f"{SITE}/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py:155 _create_tcp_store"
    first = trace(case, {"in": [f"{backend}: store = TCPStore("], "ends": inner}) if inner else []
    cause = ["", "The above exception was the direct cause of the following exception:", ""] if inner else []
    last = (
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has "
        "failed. See inner exception for details."
    )
    return [*first, *cause, *trace(case, {"in": ["agent"], "ends": last})]


def deepspeed(case: Values, values: Values) -> list[str]:
    """The start of DeepSpeed's launcher (deepspeed/launcher/launch.py) and of its engine's processes."""
    ranks = values.get("ranks", 4)
    return [
        f"[{STAMP},101] [INFO] [real_accelerator.py:203:get_accelerator] Setting ds_accelerator to cuda (auto detect)",
        f"[{STAMP},640] [INFO] [launch.py:146:main] WORLD INFO DICT: {{'localhost': {list(range(ranks))}}}",
        f"[{STAMP},641] [INFO] [launch.py:152:main] nnodes=1, num_local_procs={ranks}, node_rank=0",
        f"[{STAMP},641] [INFO] [launch.py:164:main] dist_world_size={ranks}",
        f"[{STAMP},642] [INFO] [launch.py:168:main] Setting CUDA_VISIBLE_DEVICES={','.join(map(str, range(ranks)))}",
        f"[{STAMP},977] [INFO] [comm.py:637:init_distributed] cdb=None",
        f"[{STAMP},977] [INFO] [comm.py:668:init_distributed] Initializing TorchBackend in DeepSpeed with backend nccl",
    ]


def deepspeed_end(case: Values, values: Values) -> list[str]:
    """DeepSpeed's launcher stops the other processes (deepspeed/launcher/launch.py)."""
    pids = values.get("pids", [6293, 6294, 6295, 6296])
    script = values.get("script", "train.py")
    command = f"['/opt/conda/bin/python', '-u', '{script}', '--local_rank=3', '--deepspeed', 'ds_config.json']"
    return [
        *(f"[{STAMP},207] [INFO] [launch.py:319:sigkill_handler] Killing subprocess {pid}" for pid in pids),
        f"[{STAMP},501] [ERROR] [launch.py:325:sigkill_handler] {command} exits with return code = {values['rc']}",
    ]


def accelerate_end(case: Values, values: Values) -> list[str]:
    """accelerate's simple launcher after its process failed (accelerate/commands/launch.py)."""
    where = f"{SITE}/accelerate/commands/launch.py:763 simple_launcher"
    raised = "raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)"
    ends = (
        "subprocess.CalledProcessError: Command '['/opt/conda/bin/python', 'train.py']' returned non-zero exit status "
        f"{values['rc']}."
    )
    return trace(case, {"in": [f"{where}: {raised}"], "ends": ends})


def nccl(case: Values, values: Values) -> list[str]:
    """NCCL_DEBUG=INFO while a communicator is created (NVIDIA/nccl: src/bootstrap.cc, src/init.cc, src/transport)."""
    host, ranks, count = values["host"], values["ranks"], values["nranks"]
    address, net = values["address"], values.get("net", "Socket")
    lines = []
    for local, rank in enumerate(ranks):
        at = f"{host}:{796 + local}:{822 + local} [{local}] NCCL INFO"
        lines += [
            f"{host}:{796 + local}:{796 + local} [{local}] NCCL INFO cudaDriverVersion 12020",
            f"{host}:{796 + local}:{796 + local} [{local}] NCCL INFO Bootstrap : Using {address}<0>",
            f"{at} NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
            *(
                [f"{at} NET/IB : No device found.", f"{at} NET/Socket : Using [0]{address}<0>"]
                if net == "Socket"
                else [f"{at} NET/IB : Using [0]mlx5_0:1/{net} [RO]; OOB {address}<0>"]
            ),
            f"{at} Using network {'Socket' if net == 'Socket' else 'IB'}",
            (
                f"{at} comm 0x4df81900 rank {rank} nranks {count} cudaDev {local} nvmlDev {local} "
                f"busId {local + 1}6000 "
                "commId 0x898b6d578585998c - Init START"
            ),
            f"{at} Setting affinity for GPU {local} to ffff,ffffffff",
        ]
        if values.get("complete"):
            lines += [
                f"{at} Channel 00/0 : {rank}[{local}] -> {(rank + 1) % count}[0] via "
                + values.get("via", "P2P/CUMEM/read"),
                f"{at} Connected all rings",
                (
                    f"{at} comm 0x4df81900 rank {rank} nranks {count} cudaDev {local} busId "
                    f"{local + 1}6000 - Init COMPLETE"
                ),
            ]
    return lines


def nccl_error(case: Values, values: Values) -> list[str]:
    """torch's exception for a failed call of NCCL (torch/csrc/distributed/c10d/NCCLUtils.hpp)."""
    kind, last = values["kind"], values.get("last", "")
    words = {
        "ncclSystemError": (
            "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "System call (e.g. socket, malloc) or external library call failed or device error. ",
        ),
        "ncclInternalError": (
            "internal error - please report this issue to the NCCL developers",
            "Internal check failed.",
        ),
        "ncclUnhandledCudaError": (
            "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            "Call to CUDA function failed.",
        ),
        "ncclInvalidUsage": (
            "invalid usage (run with NCCL_DEBUG=WARN for details)",
            "This usually reflects invalid usage.",
        ),
        "ncclRemoteError": (
            "remote process exited or there was a network error",
            "A call failed possibly due to a network error or a remote process exiting prematurely.",
        ),
    }[kind]
    name = "torch.distributed.DistBackendError" if _version(case) >= (2, 0) else "RuntimeError"
    version = case.get("formats", {}).get("nccl", "2.20.5")
    ends = (
        f"{name}: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, {words[0]}, NCCL version "
        f"{version}\n{kind}: {words[1]}\nLast error:\n{last}"
    )
    return trace(case, {"rank": values.get("rank"), "in": values.get("in", ["script", "barrier"]), "ends": ends})


def watchdog(case: Values, values: Values) -> list[str]:
    """torch's watchdog after a collective timed out (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp)."""
    version = _version(case)
    operation, limit = values["op"], values.get("limit", 1800000)
    lines = []
    for place, (rank, number) in enumerate(values["waits"].items()):
        size = f"NumelIn={values.get('numel', 1)}, NumelOut={values.get('numel', 1)}, " if version >= (2, 1) else ""
        where = (
            f"[E ProcessGroupNCCL.cpp:475] [Rank {rank}]"
            if version < (2, 2)
            else f"[rank{rank}]:[E{GLOG}.{664949121 + place} ProcessGroupNCCL.cpp:607] [Rank {rank}]"
        )
        lines.append(
            f"{where} Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, "
            f"OpType={operation}, {size}"
            f"Timeout(ms)={limit}) ran for {limit + 17 * (place + 1)} milliseconds before timing out."
        )
        if version >= (2, 4):
            lines.append(
                f"[rank{rank}]:[E{GLOG}.{665427695 + place} ProcessGroupNCCL.cpp:1664] [PG 1 Rank "
                f"{rank}] Exception (either "
                f"an error or timeout) detected by watchdog at work: {number}, last enqueued NCCL work: {number}, last "
                f"completed NCCL work: {number - 1}."
            )
    for rank, number in values.get("behind", {}).items():
        lines.append(
            f"[rank{rank}]:[E{GLOG}.704703955 ProcessGroupNCCL.cpp:1484] [PG 1 Rank {rank}] Received "
            "a dump signal due to a "
            f"collective timeout from this local rank, last enqueued NCCL work: {number}, last "
            f"completed NCCL work: {number}."
        )
    rank = next(iter(values["waits"]))
    lines += [
        (
            f"{_rank_prefix(case, rank).strip()}[E ProcessGroupNCCL.cpp:489] Some NCCL operations "
            "have failed or timed out. "
            "Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on "
            "corrupted/incomplete data."
        ),
        (
            f"{_rank_prefix(case, rank).strip()}[E ProcessGroupNCCL.cpp:495] To avoid data "
            "inconsistency, we are taking the "
            "entire process down."
        ),
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        (
            f"  what():  [PG 1 Rank {rank}] Process group watchdog thread terminated with exception: "
            f"[Rank {rank}] Watchdog "
            f"caught collective operation timeout: WorkNCCL(SeqNum={values['waits'][rank]}, OpType={operation}, "
            f"Timeout(ms)={limit}) ran for {limit + 17} milliseconds before timing out."
        ),
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f7b5ae35897 in libc10.so)",
        "frame #1: c10d::ProcessGroupNCCL::watchdogHandler() + 0x1a0 (0x7f7b5c113a80 in libtorch_cuda.so)",
        "frame #2: clone + 0x43 (0x7f7ba8e23133 in /lib/x86_64-linux-gnu/libc.so.6)",
    ]
    return lines


def peers(case: Values, values: Values) -> list[str]:
    """What other ranks print once a rank has gone (torch/csrc/distributed/c10d: TCPStore.cpp, ProcessGroupNCCL.cpp)."""
    lines = []
    for rank in values["ranks"]:
        match values.get("how", "store"):
            case "store":
                lines += [
                    (
                        f"[rank{rank}]:[W{GLOG}.539400006 TCPStore.cpp:125] [c10d] recvValue failed "
                        "on SocketImpl(fd=66, "
                        "addr=[::ffff:10.0.0.12]:50434, remote=[::ffff:10.0.0.11]:29500): failed to recv, got 0 bytes"
                    ),
                    (
                        "Exception raised from recvBytes at "
                        "/pytorch/torch/csrc/distributed/c10d/Utils.hpp:678 (most recent "
                        "call first):"
                    ),
                    (
                        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 "
                        "(0x7f7958777f86 in libc10.so)"
                    ),
                    (
                        f"[rank{rank}]:[W{GLOG}.540100006 ProcessGroupNCCL.cpp:1659] [PG ID 0 PG GUID "
                        f"0 Rank {rank}] Failed to "
                        'check the "should dump" flag on TCPStore, (maybe TCPStore server has shut '
                        "down too early), with "
                        "error: failed to recv, got 0 bytes"
                    ),
                ]
            case "unique":
                lines += trace(
                    case,
                    {
                        "rank": rank,
                        "in": ["script", "barrier"],
                        "ends": f"torch.distributed.DistBackendError: [{rank}] is setting up NCCL "
                        "communicator and retrieving "
                        "ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: "
                        "Connection reset by peer",
                    },
                )
            case "remote":
                lines += nccl_error(
                    case,
                    {
                        "rank": rank,
                        "kind": "ncclRemoteError",
                        "last": "NET/Socket : peer 10.0.0.12<46174> has closed the connection",
                        "in": ["script", "train"],
                    },
                )
            case "gloo":
                lines += trace(
                    case,
                    {
                        "rank": rank,
                        "in": ["script", "barrier"],
                        "ends": "RuntimeError: "
                        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
                        "peer [10.0.0.12]:50561. This is typically caused by a remote worker "
                        "crashing. Check the logs of "
                        "the remote worker before reporting an error.",
                    },
                )
    return lines


def factory(case: Values, values: Values) -> list[str]:
    """The start of llamafactory-cli (src/llamafactory/cli.py, data/loader.py)."""
    return [
        f"[{STAMP},101] [INFO] [real_accelerator.py:203:get_accelerator] Setting ds_accelerator to cuda (auto detect)",
        f"06/11/2024 10:21:40 - INFO - llamafactory.cli - Initializing distributed tasks at: {values['at']}",
        *torchrun(case, {}),
        (
            "06/11/2024 10:21:55 - INFO - llamafactory.hparams.parser - Process rank: 0, device: cuda:0, n_gpu: 1, "
            "distributed training: True, compute dtype: torch.bfloat16"
        ),
        f"[INFO|tokenization_utils_base.py:2159] {STAMP},930 >> loading file tokenizer.json",
        "06/11/2024 10:21:56 - INFO - llamafactory.data.template - Replace eos token: <|im_end|>",
    ]


def shards(case: Values, values: Any) -> list[str]:
    """transformers reads the files of a model."""
    return [
        f"Loading checkpoint shards: {25 * part:>3}%|{'█' * part}| {part}/4 [00:0{part}<00:03]"
        for part in range(values)
    ]


def training(case: Values, values: Any) -> list[str]:
    """The start of transformers' Trainer and its losses (transformers/trainer.py); the value counts the losses."""
    head = f"[INFO|trainer.py:2128] {STAMP},271 >> "
    return [
        f"{head}***** Running training *****",
        f"{head}  Num examples = 61,204",
        f"{head}  Total train batch size (w. parallel, distributed & accumulation) = 64",
        f"{head}  Total optimization steps = 2,868",
        *(
            f"{{'loss': {1.92 - 0.03 * number:.4f}, 'grad_norm': {1.31 - 0.01 * number:.4f}, 'learning_rate': 9.8e-06, "
            f"'epoch': {0.01 * (number + 1):.2f}}}"
            for number in range(values)
        ),
    ]


def slurm(case: Values, values: Values) -> list[str]:
    """slurmstepd and srun about an ended step (SchedMD/slurm: src/slurmd/slurmstepd, src/srun)."""
    host, job = values["host"], values.get("job", 494583)
    match values["why"]:
        case "time":
            return [
                "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
                f"slurmstepd: error: *** JOB {job} ON {host} CANCELLED AT 2024-06-11T10:21:37 DUE TO TIME LIMIT ***",
                f"slurmstepd: error: *** STEP {job}.0 ON {host} CANCELLED AT 2024-06-11T10:21:37 DUE TO TIME LIMIT ***",
            ]
        case "preempted":
            return [
                f"slurmstepd: error: *** JOB {job} ON {host} CANCELLED AT 2024-06-11T10:21:37 DUE TO PREEMPTION ***"
            ]
        case "requeue":
            return [
                f"slurmstepd: error: *** JOB {job} ON {host} CANCELLED AT 2024-06-11T10:21:37 DUE TO JOB REQUEUE ***",
                (
                    f"slurmstepd: error: *** STEP {job}.0 ON {host} CANCELLED AT 2024-06-11T10:21:37 DUE "
                    "TO JOB REQUEUE ***"
                ),
            ]
        case "memory":
            return [
                (
                    f"slurmstepd: error: Detected 1 oom_kill event in StepId={job}.0. Some of the "
                    "step tasks have been OOM "
                    "Killed."
                ),
                f"srun: error: {host}: task 1: Out Of Memory",
            ]
        case _:
            return [f"srun: error: {host}: task 1: Exited with exit code 1"]


FORMATS: Mapping[str, Callable[[Values, Any], list[str]]] = {
    each.__name__: each
    for each in (
        *(trace, text, torchrun, sigterm, report, rendezvous, deepspeed, deepspeed_end, accelerate_end, nccl),
        *(nccl_error, watchdog, peers, factory, shards, training, slurm),
    )
}
