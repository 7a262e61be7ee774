"""Training with DeepSpeed: ZeRO stages 0 to 3, with optimizer and parameters on the GPU or in host memory.

Written for DeepSpeed 0.19. The engine finds the state of each parameter in DeepSpeed's optimizers and writes
checkpoints in our format. Any number of ranks, any stage, and the engine without DeepSpeed can read them.

Where DeepSpeed stores the fp32 weights of each parameter:

=====  =================================================================================================================
stage
=====  =================================================================================================================
0      whole on every rank: in fp32 the parameter itself, else FP16_UnfusedOptimizer's ``fp32_groups``
1, 2   ``single_partition_of_fp32_groups``: a flat share of each group; ``_hp_mapping`` of a parameter maps its part of
       the share (deepspeed/utils/tensor_fragment.py)
3      ``fp32_partitioned_groups_flat``: every parameter is split into equal parts, the last one shorter;
       ``grad_position`` has their offsets (deepspeed/runtime/zero/stage3.py)
=====  =================================================================================================================

``parts`` checks these fields before the first step, because other versions may differ.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
from typing import Any, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Tuple, cast

import torch
from torch import nn

from trainer.lm import parts as model_parts
from trainer.lm import zero_config
from trainer.lm.batch import Batch
from trainer.lm.checkpoint import FROZEN, KINDS, Piece, Reader
from trainer.lm.config import Config
from trainer.lm.engine import Scale, run
from trainer.lm.errors import FailedError, RefusedError
from trainer.lm.log import Watch
from trainer.lm.model import Decoder, fill
from trainer.lm.model import put as put_whole
from trainer.lm.ranks import Ranks


class Zero:
    """DeepSpeed as an engine; see ``Engine``."""

    def __init__(
        self, model: Decoder, config: Config, ranks: Ranks, micro_steps: int, dtype: torch.dtype, watch: Watch
    ) -> None:
        stage = int(config.engine[-1])
        settings = zero_config.make(config, stage, micro_steps, dtype, ranks.device.type == "cuda")
        deepspeed = load_deepspeed(ranks)
        self.name = "ZeRO-%d" % stage
        self.scale: Any = Scale(is_used=False)
        self.updates = 0
        self._ranks = ranks
        self._watch = watch
        self._micro_steps = micro_steps
        self._model = model
        optimizer = _make_optimizer(model, config, ranks)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self._optimizer = self._engine.optimizer
        self._coalesces = config.coalesce and micro_steps > 1
        self._coalescing = contextlib.ExitStack()
        if self._coalesces:
            with private_fields():
                self._coalesce = self._engine.coalesce_grad_reduction
                self._engine.set_gradient_accumulation_boundary(is_boundary=True)  # one step() for all micro-steps
        self.model = cast("nn.Module", self._engine if stage == 3 else model)
        self._put = put if stage == 3 else put_whole
        if dtype == torch.float16:
            self.scale = _DeepSpeedScale(self._optimizer)
        self._lacks_norm = stage == 0 and dtype == torch.float32
        self._parts = parts(self._optimizer, model, stage, ranks)
        self._written = (
            self._parts if stage else self._parts[ranks.rank :: ranks.world]
        )  # if all ranks hold a part, one writes it

    def compile(self) -> None:
        """See ``Engine``."""
        self._model.compile_whole()

    def micro_step(self, batch: Batch, number: int) -> torch.Tensor:
        """See ``Engine``. From stage 2 on DeepSpeed reduces gradients in every micro-step, in the backward pass.

        With ``coalesce`` each rank sums its gradients, and they are reduced after the last micro-step.
        """
        is_last = number == self._micro_steps - 1
        if self._coalesces and number == 0:
            self._coalescing.enter_context(self._coalesce())
        with self._watch.part("forward"):
            loss = run(self._engine, batch)
        with self._watch.part("backward"):
            self._engine.backward(loss)
        if self._coalesces and is_last:
            with self._watch.part("communication"):
                self._coalescing.close()
        elif not self._coalesces and not is_last:
            self._engine.step()  # only counts micro-steps
        return loss.detach()

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """See ``Engine``."""
        if self.model is self._engine:
            return run(self._engine, batch)
        return run(self._model.forward, batch)

    def step(self, rate: float) -> torch.Tensor:
        """See ``Engine``.

        Raises:
            FailedError: fp16 overflows even at the smallest loss scale.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        before = self._engine.skipped_steps
        norm: Any = None
        if self._lacks_norm:  # in stage 0 gradients are already means
            gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        with self._watch.part("optimizer"):
            try:
                self._engine.step()
            except Exception as error:
                if "minimum" not in str(error):  # DeepSpeed raises a plain Exception for its loss scale
                    raise
                raise FailedError(str(error), "use --dtype bfloat16 or float32, or a lower --learning-rate") from error
        if self._engine.skipped_steps > before:
            return torch.tensor(math.inf, device=self._ranks.device)
        self.updates += 1
        norm = self._engine.get_global_grad_norm() if norm is None else norm
        return torch.as_tensor(norm, device=self._ranks.device)

    def pieces(self) -> List[Piece]:
        """See ``Engine``."""
        return [part.piece for part in self._written]

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Engine``."""
        return (part.numbers(kind) for part in self._written for kind in part.piece.kinds)

    @torch.no_grad()
    def load(self, reader: Reader, updates: Optional[int]) -> None:
        """See ``Engine``."""
        for part in self._parts:
            if not part.state:
                continue  # frozen weights are read below
            for kind in KINDS if updates is not None else KINDS[:1]:
                part.numbers(kind).copy_(reader.piece(kind, part.piece))
            part.set_updates(updates or 0)
        # The weights used in computation are copies of these parts, except in stage 0 with fp32.
        read = ((name, reader.whole(name, size)) for name, size in sizes_of(self._model).items())
        fill(self._model, read, self._put)
        self.updates = updates or 0


class _DeepSpeedScale:
    """DeepSpeed's loss scale, with the interface of ``Scale``."""

    is_used = True

    def __init__(self, optimizer: Any) -> None:
        with private_fields():  # stage 0 has a loss_scale_config
            self._holder = getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config
            self.value = self.value  # checks that it exists and can be set

    @property
    def value(self) -> float:
        return float(self._holder.cur_scale)

    @value.setter
    def value(self, scale: float) -> None:
        self._holder.cur_scale = scale


def _make_optimizer(model: Decoder, config: Config, ranks: Ranks) -> Any:
    """Create AdamW in the form that suits the place of its state.

    The rate is 0 until the first step: DeepSpeed runs some optimizers once without gradients to create their state.
    """
    size, factors = sizes_of(model), model_parts.factors(model, config)
    trained = {name: model.get_parameter(name) for name in factors}
    groups = model_parts.groups(trained, factors, config.weight_decay, lambda name: len(size[name]))
    betas = (config.beta1, config.beta2)
    if config.offload == "none" or ranks.device.type == "cpu":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=ranks.device.type == "cuda")
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415 - it is compiled on first use

    try:
        return DeepSpeedCPUAdam(groups, lr=0.0, betas=betas, eps=config.epsilon)
    except Exception as error:  # a failed compilation raises many types
        what = "cannot build DeepSpeed's CPU optimizer: %s" % str(error).strip().splitlines()[0]
        raise RefusedError(
            what, "pack the environment with clusterctl pack-env --with-ops, or use --offload none"
        ) from error


Found = Iterator[Tuple[Piece, Any, int]]  # with its tensor and the offset in it


class Part(NamedTuple):
    """A piece that this rank holds: in ``holder`` and the optimizer's state for it, starting at ``offset``.

    Frozen weights have no state.
    """

    piece: Piece
    holder: torch.Tensor
    state: Dict[str, Any]
    offset: int

    def numbers(self, kind: str) -> torch.Tensor:
        """A flat view of its numbers of one of ``KINDS``."""
        tensor = self.holder if kind == KINDS[0] else self.state[kind]
        return tensor.data.view(-1)[self.offset : self.offset + self.piece.numel]

    def set_updates(self, updates: int) -> None:
        """Set the number of updates."""
        if isinstance(self.state["step"], torch.Tensor):
            self.state["step"].fill_(updates)
        else:
            self.state["step"] = updates


def parts(optimizer: Any, model: Decoder, stage: int, ranks: Ranks) -> List[Part]:
    """Return this rank's parts of each parameter, in the model's order. In stage 0 all ranks hold all.

    Raises:
        RefusedError: this version of DeepSpeed stores them differently.
    """
    find = (_find_whole, _find_shares, _find_shares, _find_cut)[stage]
    adam = getattr(optimizer, "optimizer", optimizer)
    with private_fields():
        found = [
            Part(piece, holder, _adam_state(adam, holder), offset)
            for piece, holder, offset in find(optimizer, model, ranks.rank)
        ]
        found += [Part(piece, holder, {}, offset) for piece, holder, offset in _find_frozen(model, stage, ranks)]
        for part in found:
            if part.numbers(KINDS[0]).numel() != part.piece.numel:
                raise ValueError("%s is outside its tensor" % part.piece.name)
    mine = torch.tensor([sum(part.piece.numel for part in found)], dtype=torch.float64, device=ranks.device)
    held = ranks.gather(mine).sum().item()
    wanted = sum(size.numel() for size in sizes_of(model).values()) * (1 if stage else ranks.world)
    with private_fields():
        if held != wanted:
            raise ValueError("all ranks together hold %d of %d weights" % (held, wanted))
    return found


def _find_whole(optimizer: Any, model: Decoder, _: int) -> Found:
    named = dict(_trained(model))
    masters: Dict[Any, Any] = {parameter: parameter for parameter in named.values()}
    if any(parameter.dtype != torch.float32 for parameter in masters):
        for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups):  # noqa: B905 - both have the same groups
            masters.update(zip(low, high))  # noqa: B905
    for name, parameter in named.items():
        yield Piece(name, 0, parameter.numel()), masters[parameter], 0


def _find_shares(optimizer: Any, model: Decoder, _: int) -> Found:
    for name, parameter in _trained(model):
        here: Any = parameter._hp_mapping  # noqa: SLF001 - DeepSpeed's converters read it too
        if here is not None:
            piece = Piece(name, here.lp_fragment_address.start, here.lp_fragment_address.numel)
            flat = optimizer.single_partition_of_fp32_groups[here.param_group_index]
            yield piece, flat, here.hp_fragment_address.start


def _find_cut(optimizer: Any, model: Decoder, rank: int) -> Found:
    size = sizes_of(model)
    for name, parameter in _trained(model):
        group, offset, each = optimizer.grad_position[optimizer.get_param_id(parameter)]
        numel = min(each, size[name].numel() - rank * each)
        if numel > 0:
            yield Piece(name, rank * each, numel), optimizer.fp32_partitioned_groups_flat[group], offset


def _find_frozen(model: Decoder, stage: int, ranks: Ranks) -> Found:
    """Find frozen weights, which no optimizer has. In stages 1 and 2 all ranks hold all, and each writes a share."""
    for name, size in sizes_of(model).items():
        parameter: Any = model.get_parameter(name)
        if parameter.requires_grad:
            continue
        each = -(-size.numel() // ranks.world) if stage else size.numel()
        if stage == 3:
            each = parameter.ds_tensor.ds_numel
        start = ranks.rank * each if stage else 0
        numel = min(each, size.numel() - start)
        if numel > 0:
            held, offset = (parameter.ds_tensor, 0) if stage == 3 else (parameter, start)
            yield Piece(name, start, numel, FROZEN), held, offset


def _trained(model: Decoder) -> Iterator[Tuple[str, nn.Parameter]]:
    return (each for each in model.named_parameters() if each[1].requires_grad)


def sizes_of(model: nn.Module) -> Dict[str, torch.Size]:
    """Return the size of each parameter. In ZeRO-3 parameters have no shape but a field for it."""
    return {name: torch.Size(getattr(each, "ds_shape", each.shape)) for name, each in model.named_parameters()}


def _adam_state(adam: Any, holder: Any) -> Dict[str, Any]:
    """Return AdamW's state of a tensor, created if needed, so that a checkpoint can be loaded into it."""
    state: Dict[str, Any] = adam.state[holder]
    for kind in KINDS[1:]:
        if kind not in state:
            state[kind] = torch.zeros_like(holder.data)
    if type(adam).__name__ == "DeepSpeedCPUAdam":  # its step is a plain number
        state["step"] = 0
    else:
        state["step"] = torch.zeros((), device=holder.device if adam.defaults.get("fused") else "cpu")
    return state


def creation_context(config: Config, ranks: Ranks, micro_steps: int, dtype: torch.dtype) -> ContextManager[Any]:
    """Within it, new modules keep only this rank's share of their parameters, where the options put it.

    Raises:
        RefusedError: DeepSpeed is missing, or the configuration is invalid.
    """
    settings = zero_config.make(config, 3, micro_steps, dtype, ranks.device.type == "cuda")
    return cast("ContextManager[Any]", load_deepspeed(ranks).zero.Init(config_dict_or_path=settings))


def put(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter of ZeRO-3, from rank 0."""
    from deepspeed import zero  # noqa: PLC0415 - other engines need no DeepSpeed

    with zero.GatheredParameters(parameter, modifier_rank=0):
        parameter.copy_(tensor)


def load_deepspeed(ranks: Ranks) -> Any:
    """Import DeepSpeed and prepare it for these ranks.

    Raises:
        RefusedError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    try:
        import deepspeed  # noqa: PLC0415 - the plain engine does not need it

        theirs = importlib.import_module("deepspeed.comm.torch")  # the attribute of this name is torch itself
    except ImportError as error:
        raise RefusedError("DeepSpeed is not installed: %s" % error, "use --engine plain") from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if ranks.device.type == "cpu":
        # It would compile an all-reduce over shared memory for inference, which most nodes cannot compile.
        theirs.build_shm_op = lambda: None  # type: ignore[attr-defined]
    ranks.join_alone()
    for name, value in (("RANK", ranks.rank), ("LOCAL_RANK", ranks.local), ("WORLD_SIZE", ranks.world)):
        os.environ.setdefault(name, str(value))  # without these it asks MPI
    return deepspeed


@contextlib.contextmanager
def private_fields() -> Iterator[None]:
    """Wrap code that uses private fields of DeepSpeed.

    Raises:
        RefusedError: they differ from those of 0.19.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        version = importlib.import_module("deepspeed").__version__
        what = "DeepSpeed %s differs from 0.19, which this engine needs: %s" % (version, error)
        raise RefusedError(what, "use --engine plain, or an environment with DeepSpeed 0.19") from error
