"""The estimate of a job's step time and memory as a range, which is as wide as the estimate has been wrong.

The factors are those by which measured runs differed from the estimate (docs/monitoring.md). The slow end decides
whether a run is reported as slow, so it is generous.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence, Tuple

from trainer.agent.contract.expected import Expected, Range
from trainer.plan.factory import Job, Settings, estimate
from trainer.plan.inputs import GIB, Cluster, Setup, Training
from trainer.plan.memory import gpu_memory
from trainer.plan.models import load
from trainer.plan.search import bucket
from trainer.plan.shape import PlanError
from trainer.plan.speed import speed

PROGRAM = "trainer.lm"  # whose options ``of_lm`` reads
_PEAK = 0.75  # fraction of a card's peak that no whole step reaches; the best measured is 0.68
_FP8 = 2.0  # times as fast as in 16 bits, at most
# Measured over estimated seconds: 0.47 to 0.96 compiled; 0.70 to 1.6 eager, where the node's
# processor counts; 1.18 to 1.35 for LLaMA-Factory, and 1.84 beside a slow processor.
_SLOWEST = {"compiled": 1.15, "eager": 2.0, "factory": 2.0}
_FSDP = 1.3  # gathering weights, as a factor of the time
_LENGTHS = 1.5  # without the model's tokenizer, as a factor of the time: a token counts as four bytes
_EAGER_FASTEST, _FACTORY_FASTEST = 0.6, 0.8
# Measured over estimated bytes: 0.82 to 1.02 for trainer.lm, 0.93 to 1.07 for DeepSpeed; torch's cache may keep more.
_MEMORY = (0.7, 1.3)


def of_factory(job: Job, settings: Settings) -> Expected:
    """The band of a LLaMA-Factory configuration on one node.

    Raises:
        PlanError: there is no estimate for its samples.
    """
    if job.media:
        raise PlanError("the sizes of the images in the data are not known")
    found = estimate(job, settings)
    slowest = _SLOWEST["factory"] * (1.0 if job.lengths.exact else _LENGTHS)
    step = found.seconds * _FACTORY_FASTEST, found.seconds * slowest
    useful = found.tokens * found.seconds
    memory = found.memory * GIB * _MEMORY[0], found.memory * GIB * _MEMORY[1]
    return Expected(_basis(job.cluster), step, _speeds(useful, step), memory)


def of_lm(words: Sequence[str], cluster: Cluster) -> Expected:
    """The band of ``trainer.lm`` with options as typed, on one node.

    Raises:
        PlanError: there is no estimate for these options; the text says why.
    """
    options = _options(words)
    training, setup = _lm_setup(options, cluster)
    compiled = options["compile"] != "off" and options["engine"] != "zero3"
    slowest = _SLOWEST["compiled" if compiled else "eager"] * (_FSDP if options["engine"] == "fsdp" else 1.0)
    flops = (2 if training.adapters else 3) * training.shape.flops(training.seq) * training.tokens
    fastest = flops / (cluster.world * cluster.gpu.tflops * 1e12 * _PEAK)
    # fsdp and stage 1 compute the same; the plan's own stage 3 includes DeepSpeed's hooks.
    timed = setup.with_(stage=1) if options["engine"] == "fsdp" else setup
    estimated = speed(training, cluster, timed).seconds
    fastest = fastest / (_FP8 if options["fp8"] != "off" else 1.0) if compiled else estimated * _EAGER_FASTEST
    step = min(fastest, estimated * slowest), estimated * slowest
    bytes_ = gpu_memory(training, cluster, setup).total
    memory = None if options["engine"] == "fsdp" else (bytes_ * _MEMORY[0], bytes_ * _MEMORY[1])
    return Expected(_basis(cluster), step, _speeds(training.tokens, step), memory)


def _options(words: Sequence[str]) -> Mapping[str, Any]:
    """All options of ``trainer.lm``, with defaults."""
    from trainer.lm import options  # noqa: PLC0415 - its parser is not needed otherwise
    from trainer.lm.errors import RefusedError  # noqa: PLC0415

    try:
        return vars(options.from_arguments(list(words)))
    except RefusedError as error:
        raise PlanError(str(error)) from error


def _lm_setup(options: Mapping[str, Any], cluster: Cluster) -> Tuple[Training, Setup]:
    unknown = {"optimizer": "muon", "offload": ("optimizer", "all"), "device": "cpu", "checkpointing": "selective"}
    for name, values in unknown.items():
        if options[name] in values:
            raise PlanError(f"the plan has no figures for --{name} {options[name]}")
    if options["resume"]:
        raise PlanError("the options of --resume are in its checkpoint")
    model = options["init"] if options["init"] not in ("scratch", "") else options["model"]
    if model == "custom":
        raise PlanError("the vocabulary of --model custom is in its data")
    micro, world = options["batch_size"], cluster.world
    samples = options["global_batch"] or micro * options["accumulation"] * world
    method = "full" if not options["lora_rank"] else "lora" if options["quantize"] == "none" else "qlora"
    training = Training(
        load(model),
        method,
        options["block_size"],
        max(samples // (micro * world), 1) * micro * world,
        program="own",
        rank=options["lora_rank"] or 8,
        eight_bit=options["optimizer"] == "adamw8bit",
    )
    stages = {"plain": 1 if world > 1 else 0, "fsdp": 3, **{f"zero{stage}": stage for stage in range(4)}}
    setup = Setup(
        stages[options["engine"]],
        checkpointing=options["checkpointing"] == "full",
        micro_batch=micro,
        chunked_loss=True,
        overlap=options["engine"] == "zero3",
    )
    return training, setup.with_(bucket=bucket(training, cluster))


def _speeds(tokens: float, step: Range) -> Range:
    return tokens / step[1], tokens / step[0]


def _basis(cluster: Cluster) -> str:
    return f"the plan's estimate for {cluster.world} {cluster.gpu.name}"
