"""After commands on runs: ``train``, ``resume``, ``stop``, ``logs``, ``collect`` and ``status``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from provision.inventory import fold
from provision.inventory.document import printable
from provision.output_text import Summary, duration, fold_equal, size, span
from provision.render import words
from provision.summaries.effective import effective_data, effective_text, interval_text
from trainer.agent.contract.untrusted import finite

if TYPE_CHECKING:
    from provision.run.found import Part, Run
    from provision.run.record import TrainResult
    from provision.tasks.collect import Collected
    from provision.tasks.logs import Logs
    from provision.tasks.runs import RunStatus, Stopped
    from provision.tasks.save import Saved
    from provision.tasks.written import WandbRuns


WIDTH = 80  # columns of a table, where the ids and the nodes leave room
_LEAST = ("AGE", "OWNER", "LEFT", "NODES", "LOSS")  # columns that a narrow table omits, in this order
ENDED_SHOWN = 5  # runs in the table that are not running


def runs_data(runs: Mapping[str, Run], now: float) -> list[dict[str, Any]]:
    """All runs for ``--json``, the newest first."""
    return [run_data(run, now) for run in reversed(list(runs.values()))]


def run_data(run: Run, now: float) -> dict[str, Any]:
    """A run for ``--json``; times are seconds."""
    head = run.head
    left = run.left()
    return {
        "run": run.id,
        "state": run.state,
        "nodes": list(run.nodes),
        "missing_nodes": run.missing,
        "excluded": head.fields.get("excluded") or {},
        "owner": run.owner,
        **{key: run.reporter.fields.get(key) for key in ("step", "total", "loss")},
        "phase": run.current(head).fields.get("phase"),
        **{key: head.fields.get(key) for key in ("attempt", "attempts")},
        **{
            key: head.fields.get(key)
            for key in ("checkpoint", "copied", "port", "world_size", "why", "began", "pattern")
        },
        "straggler": head.fields.get("straggler") if run.live else None,
        **{key: head.fields.get(key) for key in ("expected", "measured", "save_every")},
        "slow": run.slow or None,
        "networks": list(run.networks),
        "left": None if left is None else round(left, 1),
        "age": _age(run, now),
        "parts": {part.node: _part_data(part) for part in run.parts},
    }


def run_lines(runs: Mapping[str, Run], now: float, users: Mapping[str, int | None] | None = None) -> list[str]:
    """A table of the running runs and of the last runs before them.

    ``users``: by node name, the uid that the inventory logs in as. The table names owners if other users have runs.
    """
    newest = list(reversed(list(runs.values())))
    live = [run for run in newest if run.live]
    ended = [run for run in newest if not run.live]
    shown = [run for run in newest if run.live or run in ended[:ENDED_SHOWN]]
    if not shown:
        return []
    rows = [["RUN", "STATE", "NODES", "STEP", "LOSS", "LEFT", "AGE", "OWNER"]]
    others = len({run.owner for run in shown}) > 1 or any(_of_another(run, users or {}) for run in shown)
    rows += [_row(run, now, others=others) for run in shown]
    more = len(live) + len(ended) - len(shown)
    slow = [f"{run.id}: {printable(run.slow)}: clusterctl diagnose {run.id}" for run in live if run.slow]
    return [*fitted(rows, _LEAST), *slow, *([f"{more} older runs: clusterctl status RUN, or --json"] if more else [])]


def copied_text(copied: Mapping[str, Any]) -> str:
    """A checkpoint that other nodes have copies of: its step or name, and the nodes."""
    step = copied["checkpoint"] if copied.get("step") is None else f"step {copied['step']}"
    return printable(f"{step} on {fold(copied['on'])}")


def _copying(run: Run) -> list[str]:
    """The progress of the last copies, before the run ends."""
    return [f"  {printable(text)}" for part in run.parts if run.live and (text := part.fields.get("copying"))]


def run_output(result: RunStatus, now: float) -> Summary:
    """One run with each of its nodes."""
    run = result.run
    head = run.head
    judged = result.judged
    data = {**run_data(run, now), "effective": effective_data(judged), "unreachable": dict(result.unreachable)}
    about = [f"run {run.id}: {_state(run)}"]
    left = run.left()
    progress = [
        f"step {_steps(run.reporter)}" if run.reporter.number("step") is not None else "",
        f"loss {loss:.4g}" if (loss := run.reporter.number("loss")) is not None else "",
        f"{duration(left)} left" if left is not None else "",
        _attempt(head),
        f"from {head.fields['checkpoint']}" if head.fields.get("checkpoint") else "",
    ]
    if text := ", ".join(part for part in progress if part):
        about.append(f"  {text}")
    age = _age(run, now)
    about.append(
        f"  started {duration(age)} ago by {run.owner or '?'}" if age is not None else f"  by {run.owner or '?'}"
    )
    excluded = head.fields.get("excluded") or {}
    about += [f"  continues without {printable(node)}: {printable(why)}" for node, why in excluded.items()]
    about.append(f"  {effective_text(run.spent)}")
    if (every := head.number("save_every")) and run.live:
        about.append(f"  saves every {duration(every)} (--save-every)")
    about += [f"  {text}" for text in ((judged.advice, interval_text(judged)) if judged else ()) if text]
    if run.networks:
        about.append(f"  network that NCCL uses: {'; '.join(run.networks)}")
    kept = {str(part.fields["kept"]): part.node for part in reversed(run.parts) if part.fields.get("kept")}
    about += [f"  moved aside, because it could not be used: {node}:{path}" for path, node in kept.items()]
    if (copied := head.fields.get("copied")) is not None:
        about.append(f"  newest copied checkpoint: {copied_text(copied)}")
    about += _copying(run)
    if data["straggler"]:
        about.append(f"  {printable(data['straggler'])}")
    if run.unmatched is not None:
        about.append(f"  no line of the log matched its pattern: {printable(run.unmatched)}")
    if (band := run.expected) is not None and band.step_seconds:
        about.append(f"  expected: {seconds_of(band.step_seconds)} a step ({printable(band.basis)})")
    if run.slow:
        about.append(f"  {printable(run.slow)}")
    if why := _why(run):
        about.append(f"  {why}")
    rows = [["NODE", "RANK", "STATE", "PHASE", "STEP", "GPUS", "BUSY", "GPU MEMORY", "MEMORY", "TRAFFIC"]]
    total = next((total for part in run.parts if (total := part.number("total"))), None)  # only rank 0 may know it
    rows += [_part_row(run.current(part), total) for part in run.parts]
    lines = [*about, *_table(rows)]
    lines += [f"{names}: no answer: {why}" for why, names in fold_equal(result.unreachable).items()]
    lines.append(_next(run))
    return data, "\n".join(lines)


def _attempt(head: Part) -> str:
    """``attempt 2 of 3``; without the number of attempts if replacements of nodes have added some."""
    number, most = head.number("attempt") or 1, head.number("attempts") or 1
    if number > most:
        return f"attempt {number:.0f}"
    return f"attempt {number:.0f} of {most:.0f}" if most > 1 else ""


def _of_another(run: Run, users: Mapping[str, int | None]) -> bool:
    """Whether the run belongs to another user than the inventory's."""
    return any(
        (mine := users.get(part.node)) is not None and part.fields.get("uid") not in {None, mine} for part in run.parts
    )


def _row(run: Run, now: float, *, others: bool) -> list[str]:
    loss, left, age = run.reporter.number("loss"), run.left(), _age(run, now)
    nodes = fold(run.nodes) + (f" +{run.missing} ?" if run.missing else "")
    return [
        run.id,
        run.state,
        nodes,
        _steps(run.reporter),
        f"{loss:.4g}" if loss is not None else "-",
        span(left) if left is not None else "-",
        span(age) if age is not None else "-",
        (run.owner or "?") if others else "-",
    ]


def _part_row(part: Part, total: float | None) -> list[str]:
    sample = part.samples[-1] if part.samples else {}
    gpus = [gpu for gpu in sample.get("gpus") or () if isinstance(gpu, Mapping)]
    return [
        part.node,
        "-" if part.spare else str(part.rank),
        part.state,
        str(part.fields.get("phase") or "-") if part.live else "-",
        _steps(part, total),
        str(len(gpus)) if gpus else "-",
        _range([_number(gpu, "use") for gpu in gpus]),
        _most([_part_of(gpu, "memory", "memory_total") for gpu in gpus]),
        _bytes(_number(sample, "rss")),
        _traffic(sample),
    ]


def _part_data(part: Part) -> dict[str, Any]:
    return {
        "rank": None if part.spare else part.rank,
        "state": part.state,
        "alive": part.alive,
        **{
            key: part.fields.get(key)
            for key in ("phase", "step", "total", "loss", "time", "why", "left", "saved", "kept")
        },
        "sample": dict(part.samples[-1]) if part.samples else None,
    }


def _state(run: Run) -> str:
    phase = run.current(run.head).fields.get("phase")
    return f"{run.state}, {phase}" if run.live and phase and phase != run.state else run.state


def _steps(part: Part, of: float | None = None) -> str:
    step, total = part.number("step"), part.number("total") or of
    if step is None:
        return "-"
    return f"{step:.0f}/{total:.0f}" if total else f"{step:.0f}"


def _age(run: Run, now: float) -> float | None:
    began = run.head.number("began")
    return None if began is None else max(0.0, round(now - began, 1))


def _why(run: Run) -> str:
    for part in run.parts:
        why = part.fields.get("why")
        if isinstance(why, Mapping) and why.get("text"):
            rank = "" if why.get("rank") is None else f", rank {why['rank']}"
            return f"why: {why.get('node') or part.node}{rank}: {str(why['text']).splitlines()[0]}"
    return ""


def seconds_of(span: tuple[float, float]) -> str:
    """A range of seconds: ``0.4 to 0.6 s``."""
    return f"{span[0]:.3g} to {span[1]:.3g} s"


def _next(run: Run) -> str:
    if run.live and run.slow:
        return f"clusterctl diagnose {run.id}, clusterctl check"
    if run.live:
        return f"clusterctl logs -f {run.id}, clusterctl stop {run.id}"
    if run.state == "finished":
        return f"clusterctl collect {run.id}"
    return f"clusterctl diagnose {run.id}" + (f", clusterctl resume {run.id}" if run.resumable else "")


def _number(found: Mapping[str, Any], name: str) -> float | None:
    return finite(found.get(name))


def _part_of(found: Mapping[str, Any], name: str, whole: str) -> float | None:
    value, total = _number(found, name), _number(found, whole)
    return 100 * value / total if value is not None and total else None


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = f"{min(known):.0f}", f"{max(known):.0f}"
    return f"{low} %" if low == high else f"{low}-{high} %"


def _most(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.0f} %" if known else "-"


def _bytes(value: float | None) -> str:
    return "-" if value is None else size(value)


def _traffic(sample: Mapping[str, Any]) -> str:
    """What leaves the node a second, over the interface or the InfiniBand port that has most."""
    rates = [
        rate
        for key in ("network", "infiniband")
        for each in (sample.get(key) or {}).values()
        if isinstance(each, Mapping) and (rate := _number(each, "out")) is not None
    ]
    return f"{size(max(rates))}/s" if rates else "-"


def fitted(rows: Sequence[Sequence[str]], least: Sequence[str]) -> list[str]:
    """The table without the columns that do not fit; ``least``: the columns to omit, in this order."""
    lines, without = _table(rows), [name for name in least if name in rows[0]]
    while without and max(map(len, lines)) > WIDTH:
        index = list(rows[0]).index(without.pop(0))
        rows = [[*row[:index], *row[index + 1 :]] for row in rows]
        lines = _table(rows)
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the columns and omits empty ones."""
    columns = [column for column in zip(*rows, strict=True) if any(cell != "-" for cell in column[1:])]
    wide = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]


def save_output(result: Saved) -> Summary:
    """After ``save``."""
    data = {"run": result.run, "node": result.node, "processes": result.processes, "step": result.step}
    at = "" if result.step is None else f" after step {result.step}"
    text = f"run {result.run} saves a checkpoint{at} and continues; to see it: clusterctl logs {result.run}"
    return data, text


def stop_output(result: Stopped) -> Summary:
    """After ``stop``."""
    failed = dict(result.failed or {})
    data = {
        "run": result.run,
        "stopped": list(result.nodes),
        "before": result.already or "live",
        "saved_step": result.saved,
        "step": result.step,
        "port": result.port,
        "failed": failed,
    }
    if not result.nodes:
        return data, ""
    port = f", port {result.port} free" if result.port else ""
    proof = f"no process left, no GPU memory held{port}"
    if result.already:
        text = f"run {result.run} had already ended ({result.already}) on {fold(result.nodes)}: {proof}"
    else:
        text = f"run {result.run} stopped on {fold(result.nodes)}: {proof}"
        if result.saved is not None:
            text += f"\nsaved a checkpoint at step {result.saved}"
            text += f"; to continue: clusterctl resume {result.run}" if result.resumable else ""
        elif result.asked_to_save and result.resumable:
            text += f"\nno new checkpoint was saved; to continue from the newest one: clusterctl resume {result.run}"
        elif result.asked_to_save:
            text += "\nno checkpoint was saved: without --output the checkpoint directory is not known"
        elif result.step is not None:
            text += f"\nits last step was {result.step}"
    return data, text


def logs_data(result: Logs) -> dict[str, Any]:
    """The lines for ``--json``."""
    return {
        "run": result.run,
        "state": result.state,
        "lines": [
            {"time": line.time, "node": line.node, "rank": line.rank, "line": line.text} for line in result.lines
        ],
        "unreachable": dict(result.unreachable),
        "cut": result.cut,
    }


def collect_output(result: Collected) -> Summary:
    """After ``collect``."""
    data = {
        "run": result.run,
        "folder": str(result.folder),
        "files": result.files,
        "bytes": result.bytes,
        "already_here": result.there,
        "checkpoint": result.checkpoint.name,
        "step": result.checkpoint.step,
        "refused": dict(result.checkpoint.refused),
        "fp32": str(result.fp32) if result.fp32 else None,
        "effective": effective_data(result.judged),
        "failed": dict(result.failed),
    }
    here = f", {result.there} were already here" if result.there else ""
    lines = [f"run {result.run}: {result.files} files ({size(result.bytes)}) in {result.folder}{here}"]
    if result.checkpoint.name:
        lines.append(f"newest complete checkpoint: {result.folder / 'output' / result.checkpoint.name}")
    if result.fp32:
        lines.append(f"fp32 weights: {result.fp32}")
    lines.append(effective_text(result.judged.spent if result.judged else None))
    lines += [result.judged.advice] if result.judged and result.judged.advice else []
    return data, "\n".join(lines)


def wandb_output(result: WandbRuns) -> Summary:
    """After ``collect --wandb``; ``sync_command`` is the next line."""
    data = {
        "run": result.run,
        "folders": [str(folder) for folder in result.folders],
        "files": result.files,
        "bytes": result.bytes,
        "already_here": result.there,
        "sync": sync_command(result),
        "failed": dict(result.failed),
    }
    here = f", {result.there} were already here" if result.there else ""
    count = len(result.folders)
    text = f"run {result.run}: {count} W&B run{'s' * (count != 1)}, {result.files} files ({size(result.bytes)}){here}"
    return data, f"{text}\nto upload, where W&B can be reached:"


def sync_command(result: WandbRuns) -> str:
    """The command that uploads W&B runs."""
    return f"wandb sync {words(map(str, result.folders))}"


def train_output(result: TrainResult) -> Summary:
    """After ``train`` and ``resume``: a finished or a detached run."""
    data = {
        "run": result.run,
        "state": result.state,
        "nodes": list(result.nodes),
        "world_size": result.world_size,
        "steps": result.steps,
        "first_loss": result.first_loss,
        "last_loss": result.last_loss,
        "seconds": round(result.seconds, 1),
        "network": result.network,
        "effective": None if result.spent is None or result.spent.ratio is None else round(result.spent.ratio, 4),
        "output": result.output,
        "logs": str(result.folder),
        "unsent": [{"path": path, "bytes": size} for path, size in result.unsent.items()],
    }
    if result.state == "detached":
        return data, (
            f"run {result.run} is running on {fold(result.nodes)} (world size {result.world_size})\n"
            f"to check it: clusterctl status {result.run}; to follow it: clusterctl logs -f {result.run}\n"
            f"to stop it: clusterctl stop {result.run}"
        )
    losses = ""
    if result.first_loss is not None and result.last_loss is not None:
        losses = f", loss {result.first_loss:.4g} -> {result.last_loss:.4g}"
    # Without --output, the checkpoint directory and the number of steps of a script are not known.
    known = PurePosixPath(result.output).name != result.run
    steps = f"{result.steps} steps{losses}, " if result.steps is not None else ""
    effective = f"\n{effective_text(result.spent)}" if result.spent is not None else ""
    text = (
        f"logs in {result.folder}\n"
        f"{'checkpoint' if known else 'all of the run'} in {result.nodes[0]}:{result.output}\n"
        f"trained on {fold(result.nodes)} (world size {result.world_size}): {steps}{result.seconds:.0f} s"
        + (f"; NCCL used {result.network}" if result.network else "")
        + effective
    )
    return data, text
