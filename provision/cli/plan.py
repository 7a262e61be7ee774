"""``clusterctl plan`` and ``ds-config``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click

from provision import launchers
from provision.cli import plan_config
from provision.cli.cluster import Selection, on_nodes
from provision.cli.options import Number, number, reporting
from provision.errors import UsageError
from provision.hints import again
from provision.model import Notice
from provision.output import Reporter
from provision.output_text import Line, Style
from provision.run import Job
from provision.tasks import ds_files
from trainer import ds_config
from trainer import plan as plans
from trainer.agent.contract.untrusted import UntrustedError, parse_object
from trainer.bounds import Bound
from trainer.ds_config import check
from trainer.ds_config.request import OPTIONS, Option, request_of

_LINK_HINT = "clusterctl bench nccl --json >bench.json, then --link bench.json; or a number, such as --link 25"
_BENCH = 16 << 20  # bytes; the largest file of bench nccl that is read


def _whole(option: str) -> Number:
    return Number(int, plans.BOUNDS[option])


def _real(option: str) -> Number:
    return Number(float, plans.BOUNDS[option])


_SECONDS, _CANDIDATES = Number(int, Bound(low=1, high=3600)), Number(int, Bound(low=2, high=100))


@click.command("plan")
@click.argument("model", metavar="MODEL|CONFIG.yaml")
@on_nodes
@number("--nodes", "-n", type=_whole("--nodes"), help="Number of nodes.  [with CONFIG: 1]")
@number("--gpus", type=_whole("--gpus"), default=8, show_default=True, help="GPUs per node.")
@click.option("--gpu", default="A100", show_default=True, metavar="NAME", help="GPU model, as nvidia-smi names it.")
@number("--gpu-memory", type=_real("--gpu-memory"), metavar="GB",
        help="Memory of one GPU.  [default: the model's largest]")  # fmt: skip
@click.option("--method", type=click.Choice(plans.METHODS), default="full", show_default=True, help="Training method.")
@number("--seq", type=_whole("--seq"), metavar="N", help="Tokens per sample.  [default: 4096, or the model's limit]")
@number("--global-batch", type=_whole("--global-batch"), default=256, show_default=True,
        help="Samples per optimizer step.")  # fmt: skip
@click.option("--link", metavar="GB/S|FILE", help="Bandwidth between nodes, or the output of bench nccl --json.")
@click.option("--for", "program", type=click.Choice(plans.PROGRAMS), default="trainer", show_default=True,
              help="Plan for the transformers Trainer, or your own script.")  # fmt: skip
@number("--lora-rank", type=_whole("--lora-rank"), default=8, show_default=True, help="Rank of LoRA and QLoRA.")
@number("--efficiency", type=_real("--efficiency"), default=0.65, show_default=True,
        help="Share of peak FLOPS that matrix products reach.")  # fmt: skip
@click.option("--overlap/--no-overlap", default=None,
              help="Stages 1 and 2: overlap reduction with backward.  [default: on with --for own]")  # fmt: skip
@click.option("--liger/--no-liger", default=None,
              help="Compute the loss in chunks with Liger.  [default: on if supported]")  # fmt: skip
@click.option("--optimizer", type=click.Choice(["adamw", "adamw_8bit"]), default="adamw", show_default=True,
              help="Adam's states in 32 bits, or in 8 bits by bitsandbytes.")  # fmt: skip
@number(
    "--host-memory",
    type=_real("--host-memory"),
    metavar="GIB",
    help="Host memory per node, for offload.  [default: unlimited]",
)
@number("--cores", type=_whole("--cores"), metavar="N", help="CPU cores per node, for data loading workers.")
@number("--disk", type=_real("--disk"), default=1.0, show_default=True, metavar="GB/S",
        help="Rate at which a node writes checkpoints.")  # fmt: skip
@number("--failures", type=_real("--failures"), metavar="N",
        help="Failures per 1,000 node hours.  [default: a published rate]")  # fmt: skip
@click.option("--nvme-path", metavar="DIR", help="With --write: directory on a fast local disk of every node.")
@click.option("--model-path", metavar="DIR", help="With --write: directory of the model, if MODEL is a name.")
@click.option("--write", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a LLaMA-Factory .yaml, or a DeepSpeed .json.")  # fmt: skip
@click.option(
    "--model-config", metavar="FILE", help="With CONFIG: the model's config.json, if it is only on the nodes."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="With CONFIG: the faster configuration.  [default: CONFIG.faster.yaml]")  # fmt: skip
@click.option("--force", is_flag=True, help="With CONFIG: overwrite existing files.")
@click.option("--tune", is_flag=True, help="With CONFIG: measure candidates on the nodes and keep the fastest.")
@number("--seconds", type=_SECONDS, default=60, show_default=True,
        help="With --tune: time of a measurement.")  # fmt: skip
@number("--candidates", type=_CANDIDATES, default=6, show_default=True,
        help="With --tune: how many candidates to measure.")  # fmt: skip
@reporting
def plan_command(
    reporter: Reporter,
    selection: Selection,
    model: str,
    write: Path | None,
    nvme_path: str | None,
    model_path: str | None,
    **given: Any,
) -> None:
    """Plan memory, network traffic and speed of a training run.

    Compares every ZeRO stage, recommends one and explains why. MODEL is a directory with a config.json, that file, or
    a name such as llama-3-8b, qwen2.5-7b or gpt2-xl.

    With a LLaMA-Factory configuration, CONFIG.yaml, it names what is slow in it, and writes a faster one that trains
    the same data with the same samples per step.
    """
    if Path(model).suffix in {".yaml", ".yml"}:
        plan_config.show(reporter, selection, Path(model), given)
        return
    refuse_without_config(given)
    try:
        training, cluster = _wish(reporter, model, given)
        overlap = training.program == "own" if given["overlap"] is None else given["overlap"]
        found = plans.plan(training, cluster, overlap=overlap, liger=given["liger"])
        written = [] if write is None else _write(found, write, model_path or _folder(model), nvme_path)
    except (plans.PlanError, ds_config.ConfigError) as error:
        raise UsageError(str(error), hint=error.hint) from error
    reporter.show([Line(text, cast("Style", style), hang=None) for text, style in plans.lines(found)])
    reporter.result({**plans.data(found), "written": written}, "\n".join(f"wrote {each}" for each in written))


def refuse_without_config(given: Mapping[str, Any]) -> None:
    """Refuse options of a configuration beside a model, and a missing number of nodes.

    Raises:
        UsageError: there is one.
    """
    names = plan_config.typed(plan_config.OWN)
    if names:
        raise UsageError(f"{', '.join(names)}: only with a LLaMA-Factory configuration, CONFIG.yaml")
    plan_config.refuse_without_tune(given)
    if given["nodes"] is None:
        raise UsageError("--nodes is missing", hint="clusterctl plan MODEL --nodes N")


def _wish(reporter: Reporter, model: str, given: dict[str, Any]) -> tuple[plans.Training, plans.Cluster]:
    shape = plans.load(model)
    cluster = plan_config.cluster_of(
        reporter, given, plan_config.LINK if given["link"] is None else _link(given["link"])
    )
    seq = min(4096, shape.context) if given["seq"] is None else given["seq"]
    precision = "bf16" if cluster.gpu.bf16 else "fp16"
    asked = {key: given[key] for key in ("method", "global_batch", "program", "efficiency")}
    asked["eight_bit"] = given["optimizer"] == "adamw_8bit"
    return plans.Training(shape, seq=seq, precision=precision, rank=given["lora_rank"], **asked), cluster


def _link(text: str) -> float:
    """The value of ``--link`` in GB/s: a number, or the largest all-reduce in a measurement.

    Raises:
        UsageError: neither a number in the range nor such a file.
    """
    bound = plans.BOUNDS["--link"]
    try:
        typed = float(text)
    except ValueError:
        return _measured(Path(text))
    if problem := bound.problem(typed):
        raise UsageError(f"--link {problem}", hint=_LINK_HINT)
    return typed


def _measured(file: Path) -> float:
    """The bus bandwidth of the largest all-reduce in a file of ``bench nccl --json``, in GB/s."""
    try:
        with file.open("rb") as opened:
            rows = parse_object(opened.read(_BENCH + 1), limit=_BENCH)["rows"]
        measured = [(row["bytes"], row["busbw"] / 1e9) for row in rows if row["op"] == "all_reduce"]
        largest = max(measured)[1] if measured else None
    except OSError as error:
        raise UsageError(f"--link {file}: neither a number nor a readable file", hint=_LINK_HINT) from error
    except (UntrustedError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(f"--link {file}: not the output of bench nccl --json", hint=_LINK_HINT) from error
    if largest is None:
        raise UsageError(f"--link {file}: contains no all_reduce measurement", hint=_LINK_HINT)
    if problem := plans.BOUNDS["--link"].problem(largest):
        raise UsageError(f"--link {file}: its largest all_reduce {problem} GB/s", hint=_LINK_HINT)
    return float(largest)


def _folder(model: str) -> str | None:
    """The model's directory; None if the model is given by name."""
    path = Path(model)
    return str(path if path.is_dir() else path.parent) if path.exists() else None


def _write(found: plans.Plan, file: Path, folder: str | None, nvme_path: str | None) -> list[str]:
    """Write the files. Returns their names.

    Raises:
        UsageError: the suffix is neither YAML nor JSON, or the model's directory is not known.
        PlanError: no configuration fits.
    """
    config = ds_config.text(plans.ds_config(found, nvme_path=nvme_path))
    if file.suffix == ".json":
        file.write_text(config, encoding="utf-8")
        return [str(file)]
    if file.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"--write {file}: neither .yaml nor .json", hint=f"--write {file}.yaml")
    if folder is None:
        name = found.training.shape.name
        raise UsageError(
            f"--write {file}: model_name_or_path needs the model's directory, and {name} is only a name",
            hint=f"--model-path models/{name}, or its directory instead of the name",
        )
    beside = file.with_name(f"{file.stem}.ds.json")
    beside.write_text(config, encoding="utf-8")
    file.write_text(plans.yaml(found, folder, beside.name), encoding="utf-8")
    return [str(file), str(beside)]


def _setting(option: Option) -> Callable[[Callable[..., None]], Callable[..., None]]:
    flag, name, text = option.flag, option.field, option.help
    if option.type is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    if option.bound is not None:
        return number(flag, name, type=Number(option.type, option.bound), metavar=option.metavar, help=text)
    kind = click.Choice(list(option.choices)) if option.choices else option.type
    return click.option(flag, name, type=kind, metavar=option.metavar, help=text)


def _settings(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(OPTIONS):
        command = _setting(option)(command)
    return command


@click.command("ds-config")
@click.option("--like", type=click.Choice(list(ds_config.PRESETS)), help="Start from a named configuration.")
@_settings
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write to FILE.  [default: stdout]",
)
@click.option("--check", "checked", type=click.Path(path_type=Path), metavar="FILE", help="Check FILE; write nothing.")
@click.argument("words", nargs=-1, metavar="[-- COMMAND...]")
@reporting
def ds_config_command(
    reporter: Reporter,
    like: str | None,
    output: Path | None,
    checked: Path | None,
    words: tuple[str, ...],
    **given: Any,
) -> None:
    """Write a DeepSpeed configuration, or check one.

    Values that the transformers Trainer fills in are "auto" unless you set them. A script that calls DeepSpeed itself
    (--for own) gets numbers. Contradictory options are refused. With --like, the matching arguments of the training
    are on stderr.

    With --check, COMMAND is the training's command line, or only its arguments. Every problem of the file and every
    contradiction between the two is listed, with what resolves it. The exit code is 2 if a problem prevents the run.
    """
    if checked is not None:
        refuse_others(like, output, given)
        _check(reporter, checked, words, given["world"], given["gpu"])
        return
    if words:
        raise UsageError(
            f"{shlex.join(words[:3])}: a command line is only checked",
            hint=f"clusterctl ds-config --check FILE -- {shlex.join(words)}",
        )
    if given["stage"] is not None:
        given["stage"] = int(given["stage"])
    try:
        request = request_of(given, like)
        config = ds_config.make(request)
    except ds_config.ConfigError as error:
        raise UsageError(str(error), hint=error.hint) from error
    for each in ds_config.notices(request):
        reporter(Notice(each))
    text = ds_config.text(config)
    matching = (
        {} if like is None else {"arguments": check.matching(config), "llamafactory": check.matching(config, yaml=True)}
    )
    if matching.get("arguments"):
        reporter(Notice(f"matching arguments: {' '.join(matching['arguments'])}"))
        reporter(Notice(f"matching keys of LLaMA-Factory: {'; '.join(matching['llamafactory'])}"))
    if output is None:
        # The text is the file itself, so it is not wrapped to the terminal's width.
        reporter.show([Line(row, hang=None) for row in text.splitlines()])
        reporter.result({"config": config, **matching} if matching else config)
        return
    output.write_text(text, encoding="utf-8")
    reporter.result({"file": str(output), "config": config, **matching}, f"wrote {output}")


def refuse_others(like: str | None, output: Path | None, given: Mapping[str, Any]) -> None:
    """Refuse options that write a configuration beside ``--check``.

    Raises:
        UsageError: there is one.
    """
    used = {"--like": like, "--output": output}
    used |= {each.flag: given[each.field] for each in OPTIONS if each.field not in {"world", "gpu"}}
    if names := [flag for flag, value in used.items() if value is not None]:
        raise UsageError(f"{', '.join(names)}: --check writes nothing", hint="omit --check, or these options")


def _check(reporter: Reporter, file: Path, words: Sequence[str], world: int | None, gpu: str | None) -> None:
    """Print the findings about a file. Exits with 2 if one prevents the run."""
    try:
        card = None if gpu is None else ds_config.find(gpu)
    except ds_config.ConfigError as error:
        raise UsageError(str(error), hint=error.hint) from error
    job = launchers.from_words(words) if words and not words[0].startswith("-") else Job("script", "", tuple(words))
    context = ds_files.context_of(job, ds_files.settings_of(job)) if words else check.Context()
    world = ds_files.world_of(job, ()) if world is None else world
    found = ds_files.check_file(file, str(file), replace(context, world=world, gpu=card))
    data = {"file": str(file), "program": context.program, "deepspeed": check.table()["version"],
            "findings": [each.data(str(file)) for each in found.findings]}  # fmt: skip
    reporter.result(data, "\n".join(found.lines) or f"{file}: no problem found")
    if bad := sum(each.level == check.ERROR for each in found.findings):
        count = "a problem prevents" if bad == 1 else f"{bad} problems prevent"
        raise UsageError(f"{file}: {count} the run", hint=f"correct it, then: {again(reporter.typed, 'ds-config')}")
