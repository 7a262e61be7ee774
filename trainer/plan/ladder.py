"""What to do when memory runs out: first the changes that cost no speed, then those that cost least.

The list starts at the plan's pick, with the figures of its table. Each change is computed for the model itself, so the
GiB are this model's. The page also lists common advice that does not help, and what it really does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, List, Tuple

from trainer.plan.inputs import GIB, Cluster, Setup, Training
from trainer.plan.memory import gpu_memory
from trainer.plan.search import bucket
from trainer.plan.speed import speed

State = Tuple[Training, Setup]
_FREE = 0.02  # fraction of the speed that a free change may cost
_WORTH = 0.05  # GiB; smaller savings are not listed
_FEW = 100_000_000  # parameters that stage 3 gathers at a time; DeepSpeed's default is 1e9


@dataclass(frozen=True)
class Rung:
    """One change that saves memory.

    Attributes:
        what: what to change.
        saves: GiB per GPU.
        needs: GiB per GPU after it and all changes above.
        tokens: per second, after it.
        fits: whether the result fits.
    """

    what: str
    saves: float
    needs: float
    tokens: float
    fits: bool


@dataclass(frozen=True)
class Ladder:
    """The changes, and the setup that they start from.

    Attributes:
        start: description of the setup.
        needs: GiB per GPU of that setup.
        tokens: per second, of that setup.
        rungs: the changes, in order.
    """

    start: str
    needs: float
    tokens: float
    rungs: Tuple[Rung, ...]


def _rungs(
    training: Training, cluster: Cluster, setup: Setup, first: int
) -> List[Tuple[str, Callable[[State], State]]]:
    """List every change that is still possible, with its description. ``first`` is the initial sequence length."""
    small = max(bucket(training, cluster) // 4, 5_000_000)
    own, knows = training.program == "own", training.shape.family != "gpt2"  # LLaMA-Factory 0.9.5, liger_kernel.py
    liger = " (a change to your loop)" if own else " (enable_liger_kernel)"
    found: List[Tuple[str, Callable[[State], State], bool]] = [
        ("FlashAttention (sdpa or fa2)", _set(flash=True), not setup.flash),
        ("loss in chunks" + liger, _set(chunked_loss=True), not setup.chunked_loss and (own or knows)),
        ("batch 1 per GPU, accumulate the rest", _set(micro_batch=1), setup.micro_batch > 1),
        ("gradient checkpointing", _set(checkpointing=True), not setup.checkpointing),
        (f"ZeRO-{setup.stage + 1}", _set(stage=setup.stage + 1), _next_stage(training, cluster, setup)),
        ("smaller buckets", _set(bucket=small), setup.bucket > small and setup.stage > 0),
        (
            "Adam on the CPU" + (" (ZeRO-2)" if setup.stage < 2 else ""),
            _set(stage=max(setup.stage, 2), optimizer_at="cpu"),
            setup.optimizer_at == "gpu",
        ),
        (
            "parameters on the CPU" + (" (ZeRO-3)" if setup.stage < 3 else ""),
            _set(stage=3, optimizer_at="cpu", parameters_at="cpu"),
            setup.parameters_at == "gpu" and setup.optimizer_at == "cpu" and training.method != "qlora",
        ),
        ("stage3_max_live_parameters 1e8", _set(live=_FEW), setup.stage == 3 and setup.live > _FEW),
        ("half the sequence length", _halve, training.seq == first),
    ]
    return [(what, change) for what, change, possible in found if possible]


def ladder(training: Training, cluster: Cluster, start: Setup, word: str = "the pick") -> Ladder:
    """List all changes that save memory, starting from a setup.

    Args:
        training: what to train.
        cluster: the machines.
        start: the first setup.
        word: its description.

    The next change is always the one that saves most for its cost in speed; free changes come first. Half the sequence
    length comes last, whatever it saves, because it changes the training.
    """
    state = (training, start)
    first = needs, tokens = _cost(cluster, state)
    rungs: List[Rung] = []
    while True:
        tried = [(what, change(state)) for what, change in _rungs(state[0], cluster, state[1], training.seq)]
        costs = [(what, after, *_cost(cluster, after)) for what, after in tried]
        useful = [each for each in costs if needs - each[2] > _WORTH]
        if not useful:
            return Ladder(f"{word}: {start.name}, batch {start.micro_batch}", *first, tuple(rungs))
        what, state, after, left = max(useful, key=lambda each: _value(each, needs, tokens))
        rungs.append(Rung(what, needs - after, after, left, after <= cluster.usable))
        needs, tokens = after, left


def no_cures(training: Training, cluster: Cluster) -> Tuple[Tuple[str, str], ...]:
    """Common advice against full GPU memory that does not help: the advice, and what it does."""
    plain = Setup(2, bucket=bucket(training, cluster), overlap=True)
    larger = plain.with_(bucket=500_000_000)
    more = 2.0 * 3 * (larger.bucket - plain.bucket) / GIB
    return (
        ("reduce_bucket_size 5e8", f"DeepSpeed's default; takes {more:.1f} GiB more than {plain.bucket / 1e6:.0f}e6"),
        ("stage3_max_live_parameters 1e9", "DeepSpeed's default; only a smaller value saves memory"),
        ("fp16_full_eval", "only affects evaluation; training needs as much as before"),
        ("ZeRO-3 for a model larger than all GPUs together", "the total stays the same; only offload reduces it"),
    )


def _set(**changes: object) -> Callable[[State], State]:
    return lambda state: (state[0], state[1].with_(**changes))


def _halve(state: State) -> State:
    return replace(state[0], seq=state[0].seq // 2), state[1]


def _next_stage(training: Training, cluster: Cluster, setup: Setup) -> bool:
    last = 2 if training.method == "qlora" else 3
    return setup.stage < last and cluster.world > 1


def _cost(cluster: Cluster, state: State) -> Tuple[float, float]:
    training, setup = state
    return gpu_memory(training, cluster, setup).total / GIB, speed(training, cluster, setup).tokens


def _value(each: Tuple[str, State, float, float], needs: float, tokens: float) -> Tuple[bool, bool, float]:
    what, _, after, left = each
    cost = 1 - left / tokens
    return not what.startswith("half"), cost < _FREE, (needs - after) / max(cost, _FREE)
