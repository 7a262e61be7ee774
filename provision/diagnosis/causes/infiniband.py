"""InfiniBand and RoCE errors in NCCL's log."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

SUBJECT = "InfiniBand and RoCE"
ORDER = 30

_FABRIC = "to find the node or the link: clusterctl check --level 1, and clusterctl bench nccl --pairs"

CAUSES = (
    Cause(
        id="nccl.ib.memory",
        says="InfiniBand cannot lock memory: {call} failed with {why}",
        fix=(
            "memlock must be unlimited: services: limits: in the inventory, then log in again",
            "clusterctl check (lim.memlock)",
        ),
        source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        lines=(
            (
                r"Call to (?P<call>ibv_(?:reg_mr|create_qp|create_cq|alloc_pd)\w*) failed with (?:error )?(?:\d+ )?"
                r"(?P<why>Cannot allocate memory)"
            ),
        ),
    ),
    Cause(
        id="nccl.ib.gid",
        says="the adapters of two nodes cannot reach each other: {call} failed with {why}[ on {device}]",
        fix=(
            (
                "RoCE: the GID index must belong to a routed IPv4 address with RoCE v2 on every node: show_gids, then "
                "NCCL_IB_GID_INDEX in train.env (clusterctl check: ib.gid)"
            ),
            "if adapters reach only those with the same number: NCCL_CROSS_NIC=0; to use only some: NCCL_IB_HCA",
            _FABRIC,
            "NCCL_IB_DISABLE=1 uses TCP instead, several times slower: only to confirm the cause",
        ),
        source="https://github.com/NVIDIA/nccl/issues/2013",
        lines=(
            (
                r"Call to (?P<call>ibv_modify_qp) failed with (?:error )?(?:\d+ )?(?P<why>[A-Z][a-z ]+?)"
                r"(?: errno \d+)?(?:, on dev (?P<device>[^,]+),.*)?$"
            ),
            r"Call to (?P<call>ibv_query_gid\w*) failed with (?:error )?(?:\d+ )?(?P<why>[A-Z][a-z ]+)",
            r"(?P<call>read) failed in ncclIbRoceGetVersionNum: (?P<why>[A-Z][a-z ]+)",
        ),
    ),
    Cause(
        id="nccl.ib.link",
        says="an InfiniBand adapter or its link failed: {event}",
        fix=(
            "look at the cable, the transceiver and the switch port: clusterctl check (ib.errors, ib.flap, ib.symbols)",
            "a local catastrophic error is the adapter's: dmesg -T | grep mlx5 there, its firmware, or replace it",
            "clusterctl train --exclude NODE continues without that node",
        ),
        source="https://github.com/NVIDIA/nccl/issues/905",
        lines=(
            (
                r"NET/IB.*Got async event ?: (?P<event>port error|local catastrophic error|device fatal "
                r"error|GID table change)"
            ),
        ),
    ),
    Cause(
        id="nccl.ib.register",
        says="the adapter cannot register GPU memory (GPUDirect): {call} failed with {why}",
        fix=(
            "load nvidia_peermem, or use the open driver with dma-buf: clusterctl check (rdma.gdr)",
            "a driver, an OFED and an NCCL of the same age; NCCL_DMABUF_ENABLE=0 or NCCL_CUMEM_ENABLE=0 in train.env",
            "NCCL_NET_GDR_LEVEL=LOC works without GPUDirect, but is slower: only to confirm the cause",
        ),
        source="https://github.com/NVIDIA/nccl/issues/778",
        lines=(
            (
                r"Call to (?P<call>ibv_reg_(?:mr|dmabuf_mr)\w*) failed with (?:error )?(?:\d+ )?"
                r"(?P<why>Invalid argument|Bad address|Operation not supported)"
            ),
        ),
    ),
    Cause(
        id="nccl.ib.failed",
        says="InfiniBand does not work on this node: {call} failed",
        fix=(
            "ibstat: every used port must be Active; Initializing means no subnet manager (services: opensm:)",
            "in a container: --device=/dev/infiniband and --ulimit memlock=-1",
            "clusterctl check (ib.state, ib.sm, lim.memlock)",
        ),
        source="https://github.com/NVIDIA/nccl/issues/1129",
        lines=(r"Call to (?P<call>ibv_\w+) failed", r"NET/IB : (?P<call>Unable to open device \S+)"),
    ),
    Cause(
        id="nccl.ib.completion",
        says="a message over InfiniBand was lost (status {status})[ on the way to {peer}]",
        fix=(
            "status 12: no answer from the other adapter; 4 and 11: its memory; 5: follows another error",
            (
                "RoCE: set NCCL_IB_GID_INDEX from show_gids, and lossless Ethernet (PFC) on the switches; "
                "InfiniBand: look for cable and port errors (clusterctl check: ib.errors, ib.flap)"
            ),
            "on a busy fabric NCCL_IB_TIMEOUT=22 waits longer",
            _FABRIC,
        ),
        source="https://github.com/NVIDIA/nccl/issues/426",
        lines=(
            r"NET/IBP? ?: ?Got completion (?:from peer (?P<peer>\S+) )?with (?:error|status)[ =](?P<status>\d+)",
            r"NET/IB.*Got async event : (?P<status>.+)",
        ),
        grade="late",
    ),
)
