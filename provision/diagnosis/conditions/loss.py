"""The loss: flat, oscillating, diverging, overfitting, or NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING

from provision.diagnosis.conditions.rules import Limit, Rule, noise, rolling, series, slope, steps

if TYPE_CHECKING:
    from provision.diagnosis.evidence import Evidence

_FEW = Limit(40, "points of the log: with fewer, a trend looks like noise")
_JUMPS = Limit(0.3, "of its value from point to point; single examples (batch 1) give about 0.15")


def _flat(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    losses = series(steps(evidence), "loss")
    if len(losses) < limits["points"].value or min(losses) <= 0 or noise(losses) > _JUMPS.value * median(losses):
        return
    part = max(5, len(losses) // 10)
    first, last = median(losses[:part]), median(losses[-2 * part :])
    _, certain = slope(losses)
    if (first - last) / first < limits["drop"].value and abs(certain) < limits["certain"].value:
        yield f"the loss does not fall: {first:.4g} at the start, {last:.4g} after {len(losses)} points"


def _oscillates(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    losses = series(steps(evidence), "loss")
    if len(losses) < limits["points"].value or median(losses) <= 0:
        return
    late = losses[len(losses) // 5 :]  # the first fifth falls fast in a healthy run
    jumps = noise(late) / median(late)
    if jumps > limits["jumps"].value:
        yield f"the loss jumps by {jumps:.0%} of its value from one point to the next (at {median(late):.4g})"


def _diverges(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    losses = series(steps(evidence), "loss")
    if len(losses) < limits["points"].value:
        return
    smooth = rolling(losses, 5)
    best, last = min(smooth), median(smooth[-5:])
    if last > limits["rise"].value * best and last - best > limits["noise"].value * noise(losses) and best > 0:
        where = smooth.index(best)
        yield f"the loss has risen again: {best:.4g} around point {where + 3} of {len(losses)}, {last:.4g} now"


def _nan(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    broken: list[int] = []
    zeros = 0
    for record in evidence.records:
        for event in record.events:
            if event.get("event") != "progress" or "loss" not in event:
                continue
            if event["loss"] is None:
                broken.append(int(event.get("step") or 0))
            zeros = zeros + 1 if event["loss"] == 0 else 0
    if broken:
        yield f"the loss is NaN or infinite since step {min(broken)}"
    elif zeros >= limits["zeros"].value:
        yield f"the loss is exactly 0 in the last {zeros} points: the gradients are NaN, or all labels are ignored"


def _overfits(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    found = steps(evidence)
    evals = [(place, float(event["eval_loss"])) for place, event in enumerate(found) if event.get("eval_loss")]
    if len(evals) < limits["evaluations"].value:
        return
    place, best = min(evals, key=lambda each: each[1])
    after = [value for later, value in evals if later > place]
    before, since = series(found[:place], "loss"), series(found[place + 1 :], "loss")
    if len(after) < 2 or not before or not since or min(after[-2:]) < limits["rise"].value * best:
        return
    part = max(1, min(len(before), len(since)) // 4)
    if median(since[-part:]) < median(before[-part:]):
        yield (
            f"overfitting: eval loss was {best:.4g} at step {found[place].get('step')} and is {after[-1]:.4g} now, "
            f"while the training loss keeps falling"
        )


def _no_rate(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    found = [event for event in steps(evidence) if isinstance(event.get("lr"), int | float)]
    last = found[-int(limits["points"].value) :]
    if len(last) < limits["points"].value or any(event["lr"] != 0 for event in last):
        return
    total, step = last[-1].get("total"), last[-1].get("step")
    if not isinstance(total, int) or not isinstance(step, int) or step < limits["of"].value * total:
        yield f"the learning rate is 0 in the last {len(last)} points: nothing is learned"


RULES = (
    Rule(
        id="loss.nan",
        title="The loss is NaN, or exactly 0",
        look=_nan,
        limits={"zeros": Limit(3, "points in a row: transformers logs 0.0 if a step's gradients were NaN")},
        fix=(
            "stop: NaN weights stay NaN; resume from a checkpoint before that step (clusterctl resume RUN)",
            "bf16 instead of fp16, a lower learning_rate, warm-up, max_grad_norm: 1.0",
            "look for examples whose answer is empty or cut off by cutoff_len: all their labels are ignored",
        ),
    ),
    Rule(
        id="loss.diverges",
        title="The loss rises again",
        look=_diverges,
        limits={
            "points": Limit(20, "points of the log: fewer may all be warm-up"),
            "rise": Limit(1.3, "times its best value: batches differ by less after smoothing over 5"),
            "noise": Limit(4, "standard deviations of its noise: by chance once in some ten thousand points"),
        },
        fix=(
            "a lower learning_rate (a third), longer warm-up (warmup_ratio: 0.03 to 0.1), max_grad_norm: 1.0",
            "a larger global batch by gradient_accumulation_steps; bf16 instead of fp16",
            "resume from the checkpoint before the rise: clusterctl resume RUN",
        ),
        leads=True,
    ),
    Rule(
        id="loss.overfits",
        title="Overfitting: the eval loss rises while the training loss falls",
        look=_overfits,
        limits={
            "evaluations": Limit(4, "evaluations: a best one followed by two worse ones is not chance"),
            "rise": Limit(1.02, "times the best eval loss: evaluations on the same data differ by less"),
        },
        fix=(
            "use the best checkpoint, not the last: load_best_model_at_end: true, or early stopping",
            "fewer epochs; more or more diverse data; lora_dropout, weight_decay, a smaller LoRA rank",
        ),
    ),
    Rule(
        id="loss.oscillates",
        title="The loss oscillates",
        look=_oscillates,
        limits={
            "points": _FEW,
            "jumps": _JUMPS,
        },
        fix=(
            "a lower learning_rate (a third), and longer warm-up (warmup_ratio: 0.03 to 0.1)",
            "a larger global batch: gradient_accumulation_steps up (needs no more memory)",
            "packing, or group_by_length, if examples differ much in length",
        ),
    ),
    Rule(
        id="loss.flat",
        title="The loss does not fall",
        look=_flat,
        limits={
            "points": _FEW,
            "drop": Limit(
                0.01, "of its first value: a training that works drops by several per cent in as many points"
            ),
            "certain": Limit(2.0, "(Student's t) below which a trend in either direction may be chance"),
        },
        fix=(
            "a higher learning_rate: 1e-5 is usual for full fine-tuning, 1e-4 for LoRA; check that it is not 0",
            (
                "look at a tokenized example in rank 0's log: template: must be the model's chat "
                "format, and labels must "
                "not all be -100"
            ),
            "the data's columns must match dataset_info.json; answers must not be empty or cut off by cutoff_len",
            "check in the log's trainable params that the intended parameters are trained",
        ),
    ),
    Rule(
        id="loss.no_rate",
        title="The learning rate is 0 in the middle of the run",
        look=_no_rate,
        limits={
            "points": Limit(20, "points in a row: the first step of a warm-up is rightly 0"),
            "of": Limit(0.95, "of all steps: later a schedule may rightly reach 0"),
        },
        fix=(
            (
                'set scheduler and learning_rate in one place: "scheduler" in the DeepSpeed configuration '
                "overrides the trainer's"
            ),
            "fp16 that skips every step (overflow) never advances the schedule: bf16, or a lower initial loss scale",
        ),
    ),
)
