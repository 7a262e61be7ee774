"""NCCL's errors. With NCCL_DEBUG=WARN or INFO, its WARN lines name the reason; torch's exception only names the class.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
"""

from __future__ import annotations

from provision.diagnosis.cause import Cause

SUBJECT = "NCCL"
ORDER = 40

_FABRIC = "to find the node or the link: clusterctl check --level 1, and clusterctl bench nccl --pairs"

MISMATCH = Cause(
    id="nccl.mismatch",
    says="the ranks called different collectives at the same time[: {which}]",
    fix=(
        (
            "every rank must run the same collectives: evaluate, save and log on all ranks, and only write on "
            "rank 0; equal batch counts (drop_last)"
        ),
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the two collectives",
    ),
    source="https://github.com/NVIDIA/nccl/issues/296",
    lines=(r"Mismatched collective detected", r"Detected mismatch between collectives on ranks"),
)
STUCK = Cause(
    id="nccl.stuck",
    says="all {count} ranks joined {operation} {number}, but its data did not move",
    fix=(
        (
            "on one node: PCIe's ACS or the IOMMU breaks the traffic between GPUs: clusterctl check "
            "(pci.acs, pci.iommu, "
            "gpu.p2p); NCCL_P2P_DISABLE=1 in train.env confirms it, but is slower"
        ),
        "between nodes: the MTU, the GID index or a lossy link: clusterctl check --level 1 (net.mtu, ib.mtu, ib.gid)",
        _FABRIC,
        "if a GPU is at 100 % on one rank only, its kernel hangs: dmesg -T | grep -i xid there",
    ),
    source="https://github.com/NVIDIA/nccl/issues/2079",
    lines=(r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout",),
    grade="late",
)

CAUSES = (
    Cause(
        id="nccl.version",
        says="the nodes have different versions of {what}: {values}",
        fix=(
            "clusterctl verify compares the releases; clusterctl deploy brings the same one to every node",
            "clusterctl check (env.same); LD_LIBRARY_PATH and LD_PRELOAD must not load another libnccl",
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
        says="ranks {first} and {second} have different versions of NCCL",
        fix=(
            "clusterctl verify compares the releases; clusterctl deploy brings the same one to every node",
            "LD_LIBRARY_PATH and LD_PRELOAD must not load another libnccl on one of the nodes",
        ),
        source="https://github.com/NVIDIA/nccl/blob/master/src/init.cc",
        lines=(r"Mismatched NCCL version detected : rank (?P<first>\d+) version \d+ rank (?P<second>\d+) version \d+",),
    ),
    Cause(
        id="nccl.interface",
        says="NCCL found no usable network interface",
        fix=(
            (
                "NCCL_SOCKET_IFNAME names an interface that this node lacks: see ip -br addr; names may differ between "
                "nodes"
            ),
            "clusterctl train sets each node's interface to rank 0: remove NCCL_SOCKET_IFNAME from train.env",
        ),
        source="https://github.com/NVIDIA/nccl/issues/1837",
        lines=(
            r"Bootstrap : no (?:socket|NCCL_SOCKET_IFNAME) interface found",
            r"connecting to address .* ?with family \d+ is neither AF_INET",
            r"No interface found in the same subnet as remote address (?P<peer>\S+)",
            r"Bootstrap : no socket interface",
            r"Socket creation failed : Address family not supported",
        ),
    ),
    Cause(
        id="nccl.connect",
        says="NCCL's connection to {peer} failed: {why}",
        fix=(
            (
                "the nodes must reach each other on every port, without a firewall (clusterctl check --level 1: "
                "net.master, net.fw)"
            ),
            (
                "NCCL_SOCKET_IFNAME must be the interface of their common network, not a container bridge (docker0, "
                "veth)"
            ),
        ),
        source="https://github.com/NVIDIA/nccl/issues/697",
        lines=(
            r"socketStartConnect: Connect to (?P<peer>\S+) failed : (?P<why>.+)",
            r"Call to connect (?:to (?P<peer>\S+) )?(?:failed|timeout) : (?P<why>.+)",
            r"NCCL WARN Net : Connect to (?P<peer>\S+) failed : (?P<why>.+)",
            (
                r"Call to (?:recv|send)\w* (?:from|to) (?P<peer>\S+) failed : "
                r"(?P<why>Connection timed out|No route to host|Network is (?:unreachable|down))"
            ),
            r"socketPollConnect: [Cc]onnect(?:ing)? to (?P<peer>\S+) (?:returned|failed).*?\(?(?P<why>[A-Z][\w ]+)\)?",
        ),
        grade="late",
    ),
    Cause(
        id="nccl.topology",
        says="NCCL cannot use the machine's topology: {what}",
        fix=(
            (
                "NCCL_TOPO_FILE, or the file of a network plugin (aws-ofi-nccl), does not fit this machine: remove it, "
                "or update the plugin"
            ),
            "the nodes must have the same adapters: clusterctl check (ib.dev)",
        ),
        source="https://github.com/aws/aws-ofi-nccl/issues/785",
        lines=(
            r"NCCL WARN (?P<what>Attribute \S+ of node \S+ not found)",
            r"NCCL WARN (?P<what>Could not find (?:NET|GPU|NIC) with (?:id|rank) \S+)",
        ),
    ),
    MISMATCH,
    Cause(
        id="nccl.timeout.evaluating",
        says=(
            "the ranks diverged around an evaluation: rank {rank} waited {waited} ms for {operation}"
            "[, which {missing} did not join]"
        ),
        fix=(
            (
                "every rank must evaluate the same number of batches and call the same all_reduce: if only rank 0 "
                "evaluates, or stops early, the others wait"
            ),
            ("if the evaluation sets seeds, every rank must restore them, otherwise the ranks choose different data"),
            "for a long evaluation: ddp_timeout (seconds) above its length, or a larger eval_steps",
            "disabling evaluation hides the fault and does not fix it",
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
        id="nccl.timeout.preparing",
        says="a rank was still preparing the data set when the other ranks' waiting time ended",
        fix=(
            (
                "ddp_timeout (seconds) in the configuration above the time of tokenising: 180000000 "
                "waits as long as it takes"
            ),
            (
                "tokenise before the run: tokenized_path in LLaMA-Factory's configuration; then "
                "clusterctl push to every node"
            ),
            "a fast tokenizer (use_fast_tokenizer: true) and as many preprocessing_num_workers as the memory allows",
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/2424",
        lines=(
            r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d{1,2}, ",
            r"store->get\('\d+'\) got error: (?:Socket Timeout|Timeout waiting for key|wait timeout)",
        ),
        context=r"Running tokenizer on dataset|Converting format of dataset|main_process_first|Generating train split",
        anywhere=True,
        grade="late",
    ),
    Cause(
        id="nccl.timeout",
        says="rank {rank} waited {waited} ms for {operation}[, which {missing} did not join]",
        fix=(
            "see what {missing} did instead: clusterctl logs RUN --rank {late}",
            (
                "find the rank that did not arrive: it lacks this line, has the lowest 'last enqueued' number, or "
                "hangs (clusterctl logs RUN --rank N)"
            ),
            (
                "if one rank does slow work (tokenising, saving, downloading) while others wait: do it on all ranks, "
                "or raise ddp_timeout (seconds) in the configuration; NCCL_TIMEOUT has no effect"
            ),
            "the network: " + _FABRIC + "; NCCL_DEBUG=WARN shows NCCL's errors",
            "NCCL_IB_DISABLE=1 and NCCL_P2P_DISABLE=1 are several times slower: only to confirm a cause",
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
    STUCK,  # behind nccl.timeout: the ranks' numbers make one of the other (signs.py)
    Cause(
        id="nccl.timeout.plain",
        says="NCCL's communication timed out",
        fix=(
            "find the rank that did not arrive: one that hangs or has exited (clusterctl logs RUN --rank N)",
            "ddp_timeout (seconds) in the configuration is the limit; NCCL_TIMEOUT has no effect",
            _FABRIC,
        ),
        source="https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group",
        lines=(r"NCCL communication timeout", r"Watchdog caught collective operation timeout"),
        grade="late",
    ),
    Cause(
        id="nccl.system",
        says="NCCL: a system call failed (unhandled system error)",
        fix=(
            "the lines above it with NCCL WARN name the call; NCCL_DEBUG=WARN in train.env enables them",
            "usually an interface or a firewall (clusterctl check --level 1), memlock for InfiniBand, or /dev/shm",
            "the GPUs may be in different machines: NCCL works between nodes",
        ),
        source="https://github.com/NVIDIA/nccl/issues/975",
        lines=(r"unhandled system error", r"^ncclSystemError: "),
        grade="late",
        more=3,
    ),
    Cause(
        id="nccl.cuda",
        says="NCCL: a CUDA call failed (unhandled cuda error)",
        fix=(
            "the lines above it with NCCL WARN name the call; NCCL_DEBUG=WARN in train.env enables them",
            (
                "usually driver and environment are incompatible (clusterctl check BUNDLE), GPU memory is full, or a "
                "GPU stopped responding"
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
            "the lines above it with NCCL WARN name the reason; NCCL_DEBUG=WARN in train.env enables them",
            "usually no usable interface, or different versions on the nodes",
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
