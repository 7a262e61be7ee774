"""``clusterctl plan CONFIG.yaml``: what is slow in a LLaMA-Factory configuration, and a faster one."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from provision.cli.cluster import Selection, session_on
from provision.errors import UsageError
from provision.hints import again
from provision.model import Emit, Event, LogLine
from provision.output import Reporter
from provision.output_text import Line
from provision.tasks import plan_config as tasks
from provision.tasks import tune as tuning
from provision.tasks.plan_config import Planned
from provision.tasks.tune import Tuned
from trainer import ds_config
from trainer import plan as plans

OWN = ("model_config", "out", "force", "tune", "seconds", "candidates")  # options that need a configuration
_MODELS = (
    "method",
    "seq",
    "global_batch",
    "program",
    "lora_rank",
    "overlap",
    "optimizer",
    "nvme_path",
    "model_path",
    "write",
)
LINK = 25.0  # GB/s: one HDR InfiniBand adapter
_ONLY_TUNE = ("seconds", "candidates", "inventory_path", "limit", "exclude")
_WIDTH = 80
_SHOWN = 0.02  # of a gain


def typed(names: Sequence[str]) -> list[str]:
    """The options among ``names`` that the user typed."""
    context = click.get_current_context()
    options = {each.name: each.opts[0] for each in context.command.params}
    return [str(options[name]) for name in names if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]


def refuse_without_tune(given: Mapping[str, Any]) -> None:
    """Refuse options of measurements beside a plan that connects to no node.

    Raises:
        UsageError: there is one.
    """
    if not given["tune"] and (names := typed(_ONLY_TUNE)):
        raise UsageError(f"{', '.join(names)}: only with --tune, because a plan connects to no node")


def cluster_of(reporter: Reporter, given: Mapping[str, Any], link: float) -> plans.Cluster:
    """The machines that the options describe.

    Raises:
        UsageError: the GPU is unknown.
    """
    try:
        gpu = ds_config.find(given["gpu"])
    except ds_config.ConfigError as error:
        raise UsageError(str(error), hint=again(reporter.typed, "plan", gpu="A100")) from error
    if given["gpu_memory"] is not None:
        gpu = replace(ds_config.with_memory(gpu, given["gpu_memory"]), memory=given["gpu_memory"])
    nodes = given["nodes"] or 1
    of_nodes = (given["host_memory"], given["cores"], given["disk"], given["failures"])
    return plans.Cluster(nodes, given["gpus"], gpu, gpu.memory, link, *of_nodes)


def show(reporter: Reporter, selection: Selection, config: Path, given: Mapping[str, Any]) -> None:
    """Print the findings of a configuration, and write a faster one.

    Raises:
        UsageError: an option, the configuration, the model or the data cannot be used.
    """
    if names := typed(_MODELS):
        raise UsageError(f"{', '.join(names)}: a configuration has this itself", hint=f"change it in {config}")
    refuse_without_tune(given)
    out = given["out"] or config.with_name(f"{config.stem}.faster{config.suffix}")
    tasks.refuse_existing(config, out, force=given["force"])
    cluster = cluster_of(reporter, given, link_of(given))
    try:
        if given["tune"]:
            _tune(reporter, selection, config, cluster, out, given)
            return
        abilities = tasks.Abilities(liger=given["liger"] is not False)
        planned = tasks.plan_config(config, cluster, model=given["model_config"], abilities=abilities)
        written = tasks.write(planned, out, force=given["force"]) if planned.found.changes else []
    except (plans.PlanError, ds_config.ConfigError) as error:
        raise UsageError(str(error), hint=error.hint) from error
    reporter.show([Line(row, hang=None) for row in lines(planned)])
    reporter.result({**tasks.record(planned), "written": written}, _wrote(written))


def _tune(
    reporter: Reporter,
    selection: Selection,
    config: Path,
    cluster: plans.Cluster,
    out: Path,
    given: Mapping[str, Any],
) -> None:
    """Measure candidates on the nodes, and write the fastest."""
    inventory = selection.load_or_here(reporter, nodes=given["nodes"], starts=True)
    nodes = selection.nodes(inventory, given["nodes"])
    with session_on(reporter, inventory, nodes, emit=_without_logs(reporter)) as session:
        tuned = tuning.tune(
            *(session, config, cluster),
            model=given["model_config"],
            liger=given["liger"] is not False,
            seconds=given["seconds"],
            most=given["candidates"],
        )
    best = tuning.refuse_unmeasured(tuned)
    planned = tuning.with_best(tuned, best)
    is_faster = best.candidate != tuned.results[0].candidate
    rows = [*lines(planned), ""] if is_faster else []
    reporter.show([Line(row, hang=None) for row in [*rows, *measured_lines(tuned)]])
    written = [str(out.with_name(f"{out.stem}.tune.json"))]
    if is_faster:
        written = [*tasks.write(planned, out, force=given["force"], head=tuning.head(tuned, best)), *written]
    data = {**tasks.record(planned), **tuning.record(tuned), "written": written}
    Path(written[-1]).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    reporter.result(data, _wrote(written))


def _without_logs(reporter: Reporter) -> Emit:
    """Passes events on without the lines that the candidates print."""

    def emit(event: Event) -> None:
        if not isinstance(event, LogLine):
            reporter(event)

    return emit


def measured_lines(tuned: Tuned) -> Iterator[str]:
    """The table of the measured candidates."""
    yield f"{'measured':<36}{'tokens/s':>10}{'loss':>10}{'+-':>8}{'GiB':>7}{'steps':>7}"
    for each in tuned.results:
        mark = ">" if tuned.best is not None and each.candidate == tuned.best.candidate else " "
        name = f"{mark} {each.candidate.name}"
        if each.steps and each.epochs:
            memory = f"{each.memory:>7.1f}" if each.memory else f"{'-':>7}"
            yield f"{name:<36}{each.tokens:>10,.0f}{each.loss:>10.4f}{each.error:>8.4f}{memory}{each.steps:>7}"
        else:
            yield name
        if each.dropped:
            yield from _wrap(f"    dropped: {each.dropped}", "    ")
    yield "  loss: mean of the second half of the steps. +-: its standard error"
    if tuned.best is not None and tuned.best.candidate == tuned.results[0].candidate:
        yield "no candidate of equal loss is faster than the configuration as it is"
    elif tuned.gain is not None:
        yield f"{tuned.gain:.2f} times as fast at an equal loss"


def link_of(given: Mapping[str, Any]) -> float:
    """GB/s between nodes for a configuration.

    Raises:
        UsageError: it is no number; a file of ``bench nccl`` goes with a model.
    """
    if given["link"] is None:
        return LINK
    try:
        return float(given["link"])
    except ValueError:
        raise UsageError(f"--link {given['link']}: with a configuration it is a number, in GB/s") from None


def _wrote(written: Sequence[str]) -> str:
    return "\n".join(f"wrote {each}" for each in written)


def lines(planned: Planned) -> Iterator[str]:
    """The output for a terminal."""
    shape, cluster, found, lengths = planned.job.shape, planned.job.cluster, planned.found, planned.job.lengths
    experts = f", {shape.active / 1e9:.2f} B of them per token" if shape.experts else ""
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    yield f"{planned.document.path}: {shape.name}, {shape.parameters / 1e9:.2f} B parameters{experts}"
    yield f"{nodes} x {cluster.gpus} {cluster.gpu.name} with {cluster.memory:g} GB"
    counted = "" if lengths.exact else f", estimated at {lengths.bytes:.2g} bytes per token"
    sizes = f"half have at most {lengths.percentile(50):,}, 99 % {lengths.percentile(99):,}"
    yield from _wrap(
        f"{lengths.total:,} records ({len(lengths.tokens):,} counted{counted}): {lengths.mean:,.0f} tokens on average, "
        f"{sizes}, the longest {lengths.longest:,}"
    )
    yield ""
    yield f"{'estimated':<24}{'tokens/s':>10}{'padding':>9}{'GiB/GPU':>9}{'samples/step':>14}{'s/step':>9}"
    for name, cost in (("as it is", found.now), ("faster", found.then)):
        figures = f"{cost.tokens:>10,.0f}{cost.rows.padding:>9.0%}{cost.memory:>9.1f}"
        yield f"{name:<24}{figures}{cost.samples:>14.1f}{cost.seconds:>9.2f}"
    yield "  tokens/s: of samples, without padding"
    yield ""
    for number, finding in enumerate((each for each in found.findings if each.changes), 1):
        gain = f" ({finding.gain:.2f} x)" if abs(finding.gain - 1) >= _SHOWN else ""
        yield from _wrap(f"{number}. {finding.what}{gain}: {finding.why}", "   ")
        yield from _wrap("   " + "; ".join(f"{key}: {_value(value)}" for key, value in finding.changes.items()), "   ")
    for finding in (each for each in found.findings if not each.changes):
        yield from _wrap(f"- {finding.what}: {finding.why}", "  ")
    if not found.changes:
        yield "nothing to change"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wrap(text: str, indent: str = "") -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
