"""What is slow in a LLaMA-Factory configuration: the way from one setting to another, with every reason and figure.

What may change the loss (8-bit optimizers, ``pure_bf16``) is only a remark, for the user to decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

from trainer.plan.factory import Estimate, Job, Settings, estimate, rows_of
from trainer.plan.inputs import GIB

_UNCHANGED = 0.03  # of the samples per step
_WORKERS = 4
_CORES = 16  # processes that prepare the data
_DISK = 1.0  # GB/s of a checkpoint's disk; an estimate
_SAVING = 0.05  # of the time that checkpoints may take without a remark


@dataclass(frozen=True)
class Finding:
    """One slow thing, and its change.

    Attributes:
        what: what is slow.
        why: the reason, with its figures.
        changes: keys of the configuration and their new values; empty: a remark.
        before: estimated useful tokens per second before this change, after those above.
        after: and after it.
    """

    what: str
    why: str
    changes: Dict[str, Any]
    before: float = 0.0
    after: float = 0.0

    @property
    def gain(self) -> float:
        """Factor of the speed."""
        return self.after / self.before if self.before else 1.0


@dataclass(frozen=True)
class Faster:
    """A faster configuration.

    Attributes:
        base: the settings as they are.
        best: the settings that are recommended.
        now: what they cost.
        then: and what the recommended ones do.
        findings: the changes, in the order in which they are applied, and then remarks.
        stage: DeepSpeed's new stage; None: as before, or none.
    """

    base: Settings
    best: Settings
    now: Estimate
    then: Estimate
    findings: Tuple[Finding, ...]
    stage: Optional[int] = None

    @property
    def changes(self) -> Dict[str, Any]:
        """All changed keys."""
        return {key: value for each in self.findings for key, value in each.changes.items()}


def explain(job: Job, base: Settings, best: Settings, *, liger: bool = True, fa2: bool = False) -> Faster:
    """Explain the way from one setting to another. For ``liger`` and ``fa2`` see ``faster``."""
    findings = [*_changes(job, base, best), *_free(job, base), *_remarks(job, base, best, liger=liger, fa2=fa2)]
    stage = best.zero if best.zero != base.zero else None
    return Faster(base, best, estimate(job, base), estimate(job, best), tuple(findings), stage)


def keys(base: Settings, other: Settings) -> Dict[str, Any]:
    """Return the keys of a configuration that lead from one setting to another. DeepSpeed's file is not among them."""
    changes = _batch_keys(base, other)
    for key, name in (("flash_attn", "attention"), ("enable_liger_kernel", "liger")):
        if getattr(base, name) != getattr(other, name):
            changes[key] = getattr(other, name)
    if base.checkpointing != other.checkpointing:
        changes["disable_gradient_checkpointing"] = not other.checkpointing
    return changes


def _changes(job: Job, base: Settings, best: Settings) -> Iterator[Finding]:
    """The differences of two settings, one at a time, with the speed before and after each."""
    current = base
    steps: Sequence[Tuple[Sequence[str], Callable[[], Tuple[str, str, Dict[str, Any]]]]] = (
        (("attention",), lambda: _attention(job, best)),
        (("packing", "neat", "cutoff", "batch", "accumulation", "grouped"), lambda: _batching(job, base, best)),
        (("liger",), lambda: _liger(job, best)),
        (("checkpointing",), lambda: _checkpointing(job, best)),
        (("zero",), lambda: _zero(job, base, best)),
    )
    for names, describe in steps:
        after = current.with_(**{name: getattr(best, name) for name in names})
        if after == current:
            continue
        what, why, changes = describe()
        yield Finding(what, why, changes, estimate(job, current).tokens, estimate(job, after).tokens)
        current = after


def _attention(job: Job, best: Settings) -> Tuple[str, str, Dict[str, Any]]:
    if best.attention == "fa2":
        why = "flash-attn is in the release: packed samples need no mask for every pair of tokens"
        return "attention", why, {"flash_attn": "fa2"}
    longest = min(job.lengths.longest, best.cutoff)
    scores = 5.0 * job.shape.heads * longest * longest / GIB
    why = f"eager attention writes a matrix of all pairs: {scores:.2f} GiB per layer and sample of {longest} tokens"
    return "eager attention", why + "; torch's sdpa does not", {"flash_attn": "sdpa"}


def _liger(job: Job, best: Settings) -> Tuple[str, str, Dict[str, Any]]:
    logits = 12.0 * job.shape.vocab * best.batch * rows_of(job, best).widest / GIB
    why = (
        f"the logits of a pass, {job.shape.vocab:,} numbers per token, take {logits:.1f} GiB; Liger computes the "
        "loss in pieces and fuses norms and SwiGLU. The release needs liger-kernel"
    )
    return "logits", why, {"enable_liger_kernel": True}


def _batching(job: Job, base: Settings, best: Settings) -> Tuple[str, str, Dict[str, Any]]:
    now, then = estimate(job, base), estimate(job, best)
    changes = _batch_keys(base, best)
    per_pass = base.batch * now.rows.width
    if best.packing and not base.packing:
        why = (
            f"a pass has {per_pass:,.0f} tokens, {now.rows.padding:.0%} of them padding; samples have "
            f"{job.lengths.mean:,.0f} on average. Packed, a pass has {best.batch * best.cutoff:,} tokens with "
            f"{then.rows.padding:.0%} padding, and samples do not attend to each other (neat_packing)"
        )
        what = "no packing"
    elif best.packing and not base.neat:
        why, what = "packed samples attend to each other, which changes their loss", "packing without neat_packing"
    else:
        why = f"a pass has {per_pass:,.0f} tokens, {now.rows.padding:.0%} of them padding; a new one has "
        why += f"{best.batch * then.rows.width:,.0f} and {then.rows.padding:.0%}"
        if best.grouped and not base.grouped:
            why += ", because its samples have similar lengths"
        what = "small batch" if best.batch > base.batch else "batch"
    why += f". Samples per optimizer step: {now.samples:.0f} before, {then.samples:.1f} after"
    difference = then.samples / now.samples - 1
    if abs(difference) < _UNCHANGED:
        why += "; so steps, warm-up, saves and the learning rate keep their meaning"
    else:
        why += f"; so an epoch has {abs(difference):.0%} {'fewer' if difference > 0 else 'more'} steps"
    return what, why, changes


def _batch_keys(base: Settings, best: Settings) -> Dict[str, Any]:
    """The keys of batch and packing that differ."""
    pairs: Dict[str, Tuple[Any, Any]] = {
        "packing": (base.packing, best.packing),
        "neat_packing": (base.neat, best.neat),
        "cutoff_len": (base.cutoff, best.cutoff),
        "per_device_train_batch_size": (base.batch, best.batch),
        "gradient_accumulation_steps": (base.accumulation, best.accumulation),
    }
    changes = {key: new for key, (old, new) in pairs.items() if old != new}
    if base.grouped != best.grouped:
        changes["train_sampling_strategy"] = "group_by_length" if best.grouped else "random"
    return changes


def _checkpointing(job: Job, best: Settings) -> Tuple[str, str, Dict[str, Any]]:
    memory = estimate(job, best).memory
    why = (
        f"every forward pass is computed twice to save memory; without it a GPU needs about {memory:.0f} of "
        f"{job.cluster.usable:.0f} GiB"
    )
    return "gradient checkpointing", why, {"disable_gradient_checkpointing": True}


def _zero(job: Job, base: Settings, best: Settings) -> Tuple[str, str, Dict[str, Any]]:
    memory = estimate(job, best).memory
    fits = f"a GPU needs about {memory:.0f} of {job.cluster.usable:.0f} GiB"
    changes = {"deepspeed": f"ZeRO-{best.zero}"}
    if base.zero is None:
        why = f"without DeepSpeed all weights have 32 bits; ZeRO-{best.zero} computes with 16-bit ones beside a "
        return "32-bit weights", f"{why}32-bit copy: {fits}", changes
    why = f"ZeRO-{base.zero} gathers or reduces more than this model needs: with ZeRO-{best.zero} {fits}"
    return f"ZeRO-{base.zero}", why, changes


def free(job: Job, base: Settings) -> Dict[str, Any]:
    """Return the keys that every faster configuration has, whatever its other settings."""
    return {key: value for each in _free(job, base) for key, value in each.changes.items()}


def _free(job: Job, base: Settings) -> Iterator[Finding]:
    """Changes without an estimate, which cost nothing."""
    if base.workers == 0:
        why = "the training process itself collates every batch while the GPU waits"
        own = (job.cluster.cores or _WORKERS * job.cluster.gpus) // job.cluster.gpus  # cores of a GPU
        yield Finding("dataloader_num_workers 0", why, {"dataloader_num_workers": max(1, min(_WORKERS, own))})
    if base.preprocessing is None:
        cores = min(_CORES, max(1, (job.cluster.cores or 2 * _CORES) // 2))
        why = f"one process tokenizes {job.lengths.total:,} records before the first step"
        yield Finding("preprocessing_num_workers", why, {"preprocessing_num_workers": cores})


def _saving(job: Job, best: Settings) -> Iterator[Finding]:
    """Checkpoints that take a noticeable part of the time. Rarer ones lose more after a failure: the user decides."""
    if best.save_steps is None or best.method != "full":
        return
    gigabytes = (12.0 if best.states else 4.0) * job.shape.parameters / 1e9
    between = best.save_steps * estimate(job, best).seconds
    if gigabytes / _DISK > _SAVING * between:
        why = (
            f"a checkpoint of about {gigabytes:.0f} GB every {between:.0f} s takes {gigabytes / _DISK:.0f} s at "
            f"{_DISK:g} GB/s: save less often, or save_only_model: true without the means to resume"
        )
        yield Finding("save_steps", why, {})


def _remarks(job: Job, base: Settings, best: Settings, *, liger: bool, fa2: bool) -> Iterator[Finding]:
    """What the user may decide: it can change the loss, the data or the release."""
    yield from _of_data(job, base, best)
    yield from _of_numbers(job, base, best)
    yield from _saving(job, best)
    if best.packing and not fa2 and best.cutoff > 4096:
        why = "packing builds a mask for every pair of tokens; flash-attn in the release (flash_attn: fa2) avoids it"
        yield Finding("attention", why, {})
    if not liger and job.takes_liger and not base.liger:
        yield Finding("logits", "liger-kernel is not in the release: pip install it, then pack-env and deploy", {})


def _of_data(job: Job, base: Settings, best: Settings) -> Iterator[Finding]:
    """Lengths and cut samples."""
    if best.packing and not job.lengths.exact:
        why = (
            "they are estimates, so packed sequences may hold other numbers of samples: pip install tokenizers beside "
            "clusterctl counts them, and --tune measures"
        )
        yield Finding("lengths", why, {})
    cut = job.lengths.share_cut(base.cutoff)
    if cut:
        then = job.lengths.share_cut(best.cutoff)
        stays = "this stays so" if best.cutoff == base.cutoff else f"{then:.2%} at {best.cutoff}"
        yield Finding("cutoff_len", f"{cut:.2%} of the samples are cut at {base.cutoff} tokens; {stays}", {})


def _of_numbers(job: Job, base: Settings, best: Settings) -> Iterator[Finding]:
    """Precisions and the optimizer."""
    if base.upcast:
        why = "norms or logits in 32 bits take memory and time; bf16 trains without. It may change the loss"
        yield Finding(", ".join(base.upcast), why, {})
    if base.precision == "bf16" and best.zero is None and base.method == "full":
        gib = 16.0 * job.shape.parameters / GIB
        why = (
            f"bf16: true without DeepSpeed keeps weights, gradients and Adam in 32 bits, {gib:.0f} GiB; ZeRO-1 "
            "computes with 16-bit weights beside a 32-bit copy, also on one GPU. --tune tries it"
        )
        yield Finding("32-bit weights", why, {})
    if base.precision == "pure_bf16":
        yield Finding("pure_bf16", "fast, but 16-bit weights lose small updates: a worse loss was measured", {})
    if base.precision == "fp32":
        yield Finding("no bf16", "the training computes in 32 bits; bf16: true is several times faster", {})
    if base.eight_bit:
        yield Finding("optimizer", "8-bit Adam may change the loss: it was your decision, and stays", {})
    elif base.method == "full":
        saved = 6.0 * job.shape.parameters / GIB / (job.cluster.world if base.zero else 1)
        why = f"adamw_bnb_8bit saves {saved:.1f} GiB per GPU, and may change the loss: your decision"
        yield Finding("optimizer", why, {})
