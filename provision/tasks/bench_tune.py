"""``clusterctl bench nccl --tune``: NCCL's socket settings are tried on the nodes, and the best are written down."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.errors import NodesFailedError, UsageError
from provision.inventory.env_edit import with_env
from provision.model import Emit, Inventory, Notice, Progress, StageFinished, StageStarted
from provision.netbench import rows
from provision.netbench.tuning import NAMES, Setting, Tuning, search
from provision.tasks.bench_nodes import MeasureFailedError, World, network_used, silent

if TYPE_CHECKING:
    from provision.run.found import Used
    from provision.tasks.bench_nodes import Event

LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}  # NCCL tells which network it uses
SECONDS = 1.0  # for each operation in each size


def write_tuning(inventory: Inventory, tuning: Tuning) -> bool:
    """Write the best settings into the inventory's ``train.env``, in one rename. Tells whether anything was changed.

    Raises:
        UsageError: the file cannot be edited; the hint has the lines.
    """
    if not tuning.worth_it:
        return False
    path = inventory.path.resolve()
    before = path.read_bytes().decode("utf-8")
    env = tuning.best.env
    after = with_env(before, env, without=frozenset(NAMES) - env.keys())
    if after == before:
        return False
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(after.encode("utf-8"))
            os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
            os.fsync(file.fileno())
        Path(fresh).replace(path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise
    return True


def refuse_tuning(ready: World, backend: str) -> None:
    """Refuse where NCCL's socket settings change nothing.

    Raises:
        UsageError: there is no NCCL, or it does not use sockets.
    """
    if backend != "nccl":
        raise UsageError(
            "--tune is about NCCL's sockets, and without GPUs on every node gloo is used, which has no such settings",
            hint="to measure it without --tune: clusterctl bench nccl",
        )
    if ready.rdma:
        raise UsageError(
            "--tune is about NCCL's sockets, and InfiniBand or RoCE is active on every node: NCCL sends nothing but "
            "its first words over sockets there",
            hint="to tune sockets all the same, set NCCL_IB_DISABLE: 1 in train.env; to measure without --tune: "
            "clusterctl bench nccl",
        )


def tune(ready: World, size: int, events: list[Event], emit: Emit) -> Tuning:
    """Try settings, each in new processes, by an all-reduce of ``size`` bytes.

    Args:
        ready: the nodes.
        size: in bytes.
        events: gets those of the first measurement, but for its row.
        emit: is told about the progress.

    Raises:
        UsageError: NCCL uses another network than sockets.
        NodesFailedError: a node is gone, or not even NCCL's defaults work.
    """
    began = time.monotonic()
    emit(StageStarted("tune", "Trying NCCL's socket settings", None, "steps"))
    work: dict[str, Any] = {"backend": "nccl", "ops": ["all_reduce"], "sizes": [size], "seconds": SECONDS}
    tried = 0
    failure: MeasureFailedError | None = None

    def measure(setting: Setting) -> float | None:
        nonlocal tried, failure
        try:
            said = ready.run(work, {**LOG, **setting.env}, [name for name in NAMES if name not in setting.env], silent)
        except MeasureFailedError as error:
            failure = failure or error
            emit(Notice(f"{setting}: {next(iter(error.reasons.values()), error)}", "warning"))
            return None
        if not tried:
            _refuse_other_networks(network_used(said))
            events.extend(event for event in said if event["event"] != "row")
        (row,) = rows(said)
        tried += 1
        emit(Progress("tune", tried, None, f"{row.busbw / 1e9:.1f} GB/s with {setting}"))
        return 0.0 if row.wrong else row.busbw

    try:
        tuning = search(measure, Setting.of(ready.spec.env))
    except ValueError as error:
        raise failure or NodesFailedError(str(error), reasons={}) from error
    emit(StageFinished("tune", time.monotonic() - began, {}))
    return tuning


def _refuse_other_networks(used: Used | None) -> None:
    if used is not None and used.kind != "TCP":
        raise UsageError(
            f"--tune is about NCCL's sockets, and NCCL uses something else here: {used}",
            hint="to measure it without --tune: clusterctl bench nccl",
        )
