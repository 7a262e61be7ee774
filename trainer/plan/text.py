"""A plan as text: lines of at most 80 columns, each with a style (``bold``, ``green``, ``dim``, or none)."""

from __future__ import annotations

import textwrap
from typing import Iterator, List, Tuple

from trainer.plan.plan import Plan
from trainer.plan.search import Option
from trainer.plan.wish import GIB, accumulation
from trainer.plan.write import gpt_options

WIDTH = 80
Styled = Tuple[str, str]


def lines(plan: Plan) -> List[Styled]:
    """Return all lines."""
    return [line for part in (_head, _memory, _speed, _pick, _ladder, _advice) for line in part(plan)]


def _head(plan: Plan) -> Iterator[Styled]:
    training, cluster, shape = plan.training, plan.cluster, plan.training.shape
    what = f"{training.method}, {training.precision}"
    if training.adapters:
        what += f", LoRA of rank {training.rank} ({training.trained / 1e6:.1f} M)"
    yield from _wrapped(f"{shape.name}, {shape.parameters / 1e9:.2f} B parameters: {what}", "bold")
    link = "" if cluster.nodes == 1 else f", {cluster.link:g} GB/s between nodes"
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    yield from _wrapped(f"{nodes} x {cluster.gpus} {cluster.gpu.name} with {cluster.memory:g} GB{link}")
    yield from _wrapped(
        f"{training.global_batch} samples of {training.seq} tokens per step: {training.tokens:,} tokens"
    )


def _memory(plan: Plan) -> Iterator[Styled]:
    yield "", ""
    states = f"{'param':>7}{'grad':>6}{'Adam':>7}"
    yield f"{'GiB per GPU':<21}{'batch':>6}{'ckpt':>5}{states}{'activ':>7}{'buff':>6}{'rest':>6}{'total':>8}", "bold"
    for each in plan.options:
        memory = each.memory
        activations = memory.activations + memory.logits
        parts = f"{_gib(memory.parameters):>7}{_gib(memory.gradients):>6}{_gib(memory.optimizer):>7}"
        others = f"{_gib(activations):>7}{_gib(memory.buffers):>6}{_gib(memory.rest):>6}{_gib(memory.total):>8}"
        yield f"{_name(plan, each)}{each.setup.micro_batch:>6}{_yes(each):>5}{parts}{others}", _style(plan, each)
    yield f"  at the peak of a step; a GPU has {plan.cluster.usable:.1f}. activ includes the logits", "dim"


def _speed(plan: Plan) -> Iterator[Styled]:
    yield "", ""
    yield (
        f"{'per step':<21}{'host GiB':>9}{'disk GiB':>9}{'net GB':>8}{'compute':>9}{'waiting':>9}{'tokens/s':>11}",
        "bold",
    )
    for each in plan.options:
        speed = each.speed
        sizes = f"{each.host / GIB:>9.0f}{each.disk / GIB:>9.0f}{speed.network / 1e9:>8.1f}"
        waiting = speed.waiting + speed.optimizer
        if each.fits:
            times = f"{speed.compute:>7.2f} s{waiting:>7.2f} s{speed.tokens:>11,.0f}"
        else:
            times = f"{'does not fit' if each.lacks else 'not supported':>29}"
        yield f"{_name(plan, each)}{sizes}{times}", _style(plan, each)
    yield "  host, disk: per node, for offload. net: sent by each node. waiting: network", "dim"
    yield f"  and Adam. tokens/s at {plan.training.efficiency:.0%} of the peak in matrix products", "dim"


def _pick(plan: Plan) -> Iterator[Styled]:
    yield "", ""
    best = plan.best
    if best is not None:
        passes = accumulation(plan.training, plan.cluster, best.setup)
        batch = f"{best.setup.micro_batch} x {passes} x {plan.cluster.world} = {plan.training.global_batch}"
        chunks = ", with Liger's loss in chunks" if best.setup.chunked_loss else ""
        checkpointing = "with" if best.setup.checkpointing else "without"
        yield from _wrapped(
            f"use {best.setup.name}, {checkpointing} gradient checkpointing{chunks}: "
            f"{best.speed.tokens:,.0f} tokens/s, {best.speed.mfu:.0%} MFU; batch x accumulation x GPUs: {batch}",
            "green",
        )
    if options := " ".join(gpt_options(plan)):
        yield from _wrapped(f"for trainer.gpt: {options}")
    for each in plan.why:
        yield from _wrapped(f"- {each}", "" if best is not None else "yellow")
    rate = plan.rate
    yield from _wrapped(
        f"learning rate: {rate.root:.1e} for Adam (square root rule), {rate.linear:.1e} for SGD (linear rule), from "
        f"{rate.base:g} at {rate.batch:,.0f} {rate.unit} ({rate.source})"
        + (": far from this batch, so also try lower rates" if rate.far else "")
    )


def _ladder(plan: Plan) -> Iterator[Styled]:
    yield "", ""
    yield f"{'when memory runs out, in this order':<52}{'saves':>7}{'then':>9}{'tokens/s':>12}", "bold"
    yield f"   {plan.ladder.start:<56}{plan.ladder.needs:>9.1f}{plan.ladder.tokens:>12,.0f}", "dim"
    for number, rung in enumerate(plan.ladder.rungs, 1):
        what = f"{number:>2} {rung.what}"
        yield f"{what:<52}{rung.saves:>7.1f}{rung.needs:>9.1f}{rung.tokens:>12,.0f}", "" if rung.fits else "dim"
    yield f"  GiB per GPU; each change includes those above. A GPU has {plan.cluster.usable:.1f}", "dim"
    yield "these do not help:", "bold"
    for what, does in plan.no_cures:
        yield from _wrapped(f"- {what}: {does}")


def _advice(plan: Plan) -> Iterator[Styled]:
    yield "", ""
    for each in plan.advice:
        yield from _wrapped(f"- {each}")


def _name(plan: Plan, option: Option) -> str:
    return f"{'>' if option is plan.best else ' '} {option.setup.name:<19}"


def _style(plan: Plan, option: Option) -> str:
    return "green" if option is plan.best else "" if option.fits else "dim"


def _yes(option: Option) -> str:
    return "yes" if option.setup.checkpointing else "no"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size < 1000 * GIB else f"{size / GIB:.0f}"


def _wrapped(text: str, style: str = "") -> Iterator[Styled]:
    indent = "  " if text.startswith("- ") else ""
    for row in textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False):
        yield row, style
