"""The command that says what fits on a cluster, what is fastest there, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import click

from provision.cli.options import reporting
from provision.errors import UsageError
from provision.output import Reporter
from provision.output_text import Line, Style
from trainer import ds_config
from trainer import plan as plans

_MORE = click.IntRange(min=1)
_LINK = 25.0  # GB/s: one HDR InfiniBand adapter


@click.command("plan")
@click.argument("model")
@click.option("--nodes", "-n", type=int, required=True, help="How many nodes.")
@click.option("--gpus", type=int, default=8, show_default=True, help="GPUs of each.")
@click.option("--gpu", default="A100", show_default=True, metavar="NAME", help="The card, as nvidia-smi names it.")
@click.option("--gpu-memory", type=float, metavar="GB", help="Its memory; the largest that the card is sold with.")
@click.option("--method", type=click.Choice(plans.METHODS), default="full", show_default=True, help="What is trained.")
@click.option("--seq", type=int, metavar="N", help="Tokens of a sample; 4096, or what the model has positions for.")
@click.option("--global-batch", type=int, default=256, show_default=True, help="Samples of an optimizer step.")
@click.option("--link", metavar="GB/S|FILE", help="Between nodes: GB/s, or a file of bench nccl --json.")
@click.option("--for", "program", type=click.Choice(plans.PROGRAMS), default="trainer", show_default=True,
              help="LLaMA-Factory and transformers, or an own GPT.")  # fmt: skip
@click.option("--lora-rank", type=int, default=8, show_default=True, help="Of LoRA and QLoRA.")
@click.option("--efficiency", type=float, default=0.65, show_default=True, help="Of the peak, in matrix products.")
@click.option("--overlap/--no-overlap", default=None,
              help="Stages 1 and 2 reduce gradients while others are computed; on --for own.")  # fmt: skip
@click.option("--host-memory", type=float, metavar="GIB", help="Of a node, for offload; not limited.")
@click.option("--cores", type=_MORE, metavar="N", help="Of a node, for the workers that prepare data.")
@click.option("--nvme-path", metavar="DIR", help="A folder on a fast local disk of every node, with --write.")
@click.option("--write", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="FILE.yaml: LLaMA-Factory's, with its ds_config; FILE.json: that alone.")  # fmt: skip
@reporting
def plan_command(reporter: Reporter, model: str, write: Path | None, nvme_path: str | None, **given: Any) -> None:
    """Plan a training: memory, network and speed of every ZeRO stage, what to take, and why.

    MODEL is a folder with a config.json, that file, or a name such as llama-3-8b, qwen2.5-7b or gpt2-xl.
    """
    try:
        training, cluster = _wish(model, given)
        overlap = training.program == "own" if given["overlap"] is None else given["overlap"]
        made = plans.plan(training, cluster, overlap=overlap)
        written = [] if write is None else _write(made, model, write, nvme_path)
    except (plans.PlanError, ds_config.ConfigError) as error:
        raise UsageError(str(error), hint=error.hint) from error
    reporter.show([Line(text, cast("Style", style), hang=None) for text, style in plans.lines(made)])
    reporter.result({**plans.data(made), "written": written}, "\n".join(f"wrote {each}" for each in written))


def _wish(model: str, given: dict[str, Any]) -> tuple[plans.Training, plans.Cluster]:
    shape = plans.load(model)
    gpu = ds_config.find(given["gpu"])
    memory = gpu.memory if given["gpu_memory"] is None else given["gpu_memory"]
    link = _LINK if given["link"] is None else _link(given["link"])
    cluster = plans.Cluster(given["nodes"], given["gpus"], gpu, memory, link, given["host_memory"], given["cores"])
    seq = min(4096, shape.context) if given["seq"] is None else given["seq"]
    precision = "bf16" if gpu.bf16 else "fp16"
    asked = {key: given[key] for key in ("method", "global_batch", "program", "efficiency")}
    return plans.Training(shape, seq=seq, precision=precision, rank=given["lora_rank"], **asked), cluster


def _link(text: str) -> float:
    """GB/s, typed or measured: of a measurement the all-reduce of the largest size.

    Raises:
        UsageError: it is neither a number nor such a file.
    """
    try:
        return float(text)
    except ValueError:
        file = Path(text)
    hint = "clusterctl bench nccl --json >bench.json, then --link bench.json; or a number such as --link 25"
    try:
        rows = json.loads(file.read_bytes())["rows"]
        measured = [(row["bytes"], row["busbw"] / 1e9) for row in rows if row["op"] == "all_reduce"]
    except OSError as error:
        raise UsageError(f"--link {text}: no number, and no file that can be read", hint=hint) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--link {text}: not what bench nccl --json prints", hint=hint) from error
    if not measured:
        raise UsageError(f"--link {text}: no all_reduce was measured", hint=hint)
    return float(max(measured)[1])


def _write(made: plans.Plan, model: str, file: Path, nvme_path: str | None) -> list[str]:
    """Write the files. Returns their names.

    Raises:
        UsageError: the name says neither YAML nor JSON.
        PlanError: nothing fits.
    """
    config = ds_config.text(plans.ds_config(made, nvme_path=nvme_path))
    if file.suffix == ".json":
        file.write_text(config, encoding="utf-8")
        return [str(file)]
    if file.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"--write {file}: neither .yaml nor .json", hint=f"--write {file}.yaml")
    beside = file.with_name(f"{file.stem}.ds.json")
    folder = str(Path(model).parent if model.endswith(".json") else model)
    beside.write_text(config, encoding="utf-8")
    file.write_text(plans.yaml(made, folder, beside.name), encoding="utf-8")
    return [str(file), str(beside)]


COMMANDS = (plan_command,)
