"""What NCCL says. Its WARN lines name the reason, where NCCL_DEBUG is WARN or INFO; torch's exception only the class.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
"""

from __future__ import annotations

from provision.diagnosis.cause import Cause

_FABRIC = "clusterctl check --level 1, and clusterctl bench nccl over pairs of nodes, name the node or the link"

CAUSES = (
    Cause(
        id="nccl.version",
        says="the nodes have different versions of {what}: {values}",
        fix=(
            "clusterctl verify compares the releases, clusterctl deploy makes them one",
            "clusterctl check (env.same); LD_LIBRARY_PATH and LD_PRELOAD must not bring another libnccl",
        ),
        source="https://github.com/NVIDIA/nccl/blob/master/src/init.cc",
        lines=(
            r"^NCCL version (?P<NCCL>\d[\w.]*(?:\+\w+[\d.]+)?)$",
            r"DeepSpeed info: version=(?P<DeepSpeed>[\w.+]+),",
            r'"transformers_version": "(?P<transformers>[^"]+)"',
            r"(?:PyTorch|torch) version(?: used)?[ :.=]+(?P<torch>\d[\w.+]*)$",
        ),
        differs=True,
    ),
    Cause(
        id="nccl.version.seen",
        says="NCCL finds ranks {first} and {second} with different versions of itself",
        fix=(
            "clusterctl verify compares the releases, clusterctl deploy makes them one",
            "LD_LIBRARY_PATH and LD_PRELOAD must not bring another libnccl on one of the nodes",
        ),
        source="https://github.com/NVIDIA/nccl/blob/master/src/init.cc",
        lines=(r"Mismatched NCCL version detected : rank (?P<first>\d+) version \d+ rank (?P<second>\d+) version \d+",),
    ),
    Cause(
        id="nccl.interface",
        says="NCCL finds no network interface to use",
        fix=(
            (
                "NCCL_SOCKET_IFNAME names one that this node does not have: see ip -br addr; names may "
                "differ between nodes"
            ),
            "clusterctl train sets the interface each node reaches rank 0 by: take NCCL_SOCKET_IFNAME out of train.env",
        ),
        source="https://github.com/NVIDIA/nccl/issues/1837",
        lines=(
            r"Bootstrap : no (?:socket|NCCL_SOCKET_IFNAME) interface found",
            r"connecting to address .* ?with family \d+ is neither AF_INET",
            r"No interface found in the same subnet as remote address (?P<peer>\S+)",
            r"Bootstrap : no socket interface",
        ),
    ),
    Cause(
        id="nccl.connect",
        says="NCCL cannot connect to {peer}: {why}",
        fix=(
            (
                "the nodes must reach each other on every port: no firewall between them (clusterctl check --level 1: "
                "net.master, net.fw)"
            ),
            (
                "NCCL_SOCKET_IFNAME must be the interface of their common network; bridges of containers "
                "(docker0, veth) "
                "lead nowhere"
            ),
        ),
        source="https://github.com/NVIDIA/nccl/issues/697",
        lines=(
            r"socketStartConnect: Connect to (?P<peer>\S+) failed : (?P<why>.+)",
            r"Call to connect (?:to (?P<peer>\S+) )?failed : (?P<why>.+)",
            r"socketPollConnect: [Cc]onnect(?:ing)? to (?P<peer>\S+) (?:returned|failed).*?\(?(?P<why>[A-Z][\w ]+)\)?",
        ),
        grade="late",
    ),
    Cause(
        id="nccl.mismatch",
        says="the ranks ask for different collectives at the same time",
        fix=(
            (
                "every rank must go the same way through the loop: evaluate, save and log on all ranks, "
                "and only write on "
                "rank 0; equal batch counts (drop_last)"
            ),
            "TORCH_DISTRIBUTED_DEBUG=DETAIL names the two collectives",
        ),
        source="https://github.com/NVIDIA/nccl/issues/296",
        lines=(r"Mismatched collective detected", r"Detected mismatch between collectives on ranks"),
    ),
    Cause(
        id="nccl.timeout.evaluating",
        says=(
            "the ranks lost each other around an evaluation: rank {rank} waited {waited} ms for {operation}"
            "[, which {missing} did not join]"
        ),
        fix=(
            (
                "every rank must evaluate, with equally many batches, and enter the same all_reduce: an "
                "evaluation, or an "
                "early end of it, on rank 0 alone leaves the others waiting"
            ),
            (
                "seeds that are set for the evaluation must be set back on every rank, else the ranks choose "
                "different data"
            ),
            "a long evaluation on purpose: ddp_timeout (seconds) above its length, or a larger eval_steps",
            "to switch evaluation off hides the fault and does not mend it",
        ),
        source="https://github.com/deepspeedai/DeepSpeed/issues/5394",
        lines=(
            (
                r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: "
                r"WorkNCCL\(.*?OpType=(?P<operation>\w+)"
                r".*?ran for (?P<waited>\d+) milliseconds"
            ),
        ),
        context=r"(?i)'eval_loss'|\*\*\*\*\* Running Evaluation|step \d+: train loss|\bevaluat|Generation Evaluation",
        grade="late",
    ),
    Cause(
        id="nccl.timeout",
        says="rank {rank} waited {waited} ms for {operation}[, which {missing} did not join]",
        fix=(
            "see what {missing} did instead: clusterctl logs RUN --rank {late}",
            (
                "find the rank that did not come: one without this line, one with the lowest 'last "
                "enqueued' number, one "
                "that hangs (clusterctl logs RUN --rank N)"
            ),
            (
                "slow work on one rank alone (tokenising, saving, downloading) while others wait: all ranks do it, or "
                "ddp_timeout (seconds) in the configuration is longer; NCCL_TIMEOUT is read by nobody"
            ),
            "the network: " + _FABRIC + "; NCCL_DEBUG=WARN tells what NCCL sees",
            "NCCL_IB_DISABLE=1 and NCCL_P2P_DISABLE=1 make it several times slower: to prove a cause, not to stay",
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/7396",
        lines=(
            (
                r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: "
                r"WorkNCCL\(.*?OpType=(?P<operation>\w+)"
                r".*?ran for (?P<waited>\d+) milliseconds"
            ),
        ),
        grade="late",
    ),
    Cause(
        id="nccl.timeout.plain",
        says="NCCL's communication timed out",
        fix=(
            "find the rank that did not come: one that hangs or has ended (clusterctl logs RUN --rank N)",
            "ddp_timeout (seconds) in the configuration is the limit; NCCL_TIMEOUT is read by nobody",
            _FABRIC,
        ),
        source="https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group",
        lines=(r"NCCL communication timeout", r"Watchdog caught collective operation timeout"),
        grade="late",
    ),
    Cause(
        id="nccl.system",
        says="NCCL: a call to the system failed (unhandled system error)",
        fix=(
            "the lines above it with NCCL WARN say which; NCCL_DEBUG=WARN in train.env brings them",
            "most often: an interface or a firewall (clusterctl check --level 1), memlock for InfiniBand, /dev/shm",
            "the GPUs need not be in one machine: NCCL works between nodes",
        ),
        source="https://github.com/NVIDIA/nccl/issues/975",
        lines=(r"unhandled system error", r"^ncclSystemError: "),
        grade="late",
        more=3,
    ),
    Cause(
        id="nccl.cuda",
        says="NCCL: a call to CUDA failed (unhandled cuda error)",
        fix=(
            "the lines above it with NCCL WARN say which; NCCL_DEBUG=WARN in train.env brings them",
            (
                "most often: driver and environment do not fit (clusterctl check BUNDLE), GPU memory is "
                "full, a GPU is gone"
            ),
        ),
        source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        lines=(r"unhandled cuda error", r"^ncclUnhandledCudaError: "),
        grade="late",
        more=3,
    ),
    Cause(
        id="nccl.internal",
        says="NCCL: internal error",
        fix=(
            "the lines above it with NCCL WARN say why; NCCL_DEBUG=WARN in train.env brings them",
            "most often: no usable interface, or versions that differ between nodes",
        ),
        source="https://github.com/NVIDIA/nccl/issues/795",
        lines=(r"^ncclInternalError: ", r"NCCL error in: .*, internal error"),
        grade="late",
        more=3,
    ),
    Cause(
        id="nccl.remote",
        says="NCCL lost another rank",
        fix=("that rank, or its node, failed first: its log says why (clusterctl logs RUN)", _FABRIC),
        source="https://github.com/NVIDIA/nccl/issues/795",
        lines=(
            r"^ncclRemoteError: ",
            r"remote process exited or there was a network error",
            r"NCCL WARN .*Connection closed by (?:remote peer|localRank)",
            r"NCCL WARN .*Call to (?:recv|send|poll)\w* .*failed",
            r"NCCL WARN .*(?:Connection reset by peer|Broken pipe)",
            r"Some NCCL operations have failed or timed out",
            r"To avoid data inconsistency, we are taking the entire process down",
            r"(?:NCCL|Process group) watchdog thread terminated with exception",
            r"NCCL communicator was aborted",
        ),
        grade="echo",
    ),
)
