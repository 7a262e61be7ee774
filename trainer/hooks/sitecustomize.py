"""Mends two modules when a program imports them.

Goes with every run; nodes without GPUs and runs that save on SIGTERM have it in their PYTHONPATH.

``torch.load`` of checkpoints that several CPU processes have written: transformers and accelerate ask for a map to
``cpu:0``, and torch (2.11, ``torch/serialization.py``) knows ``cpu`` only: resuming fails with "don't know how to
restore data location of torch.storage.UntypedStorage (tagged with cpu:0)".

``enable_jit_checkpoint`` of transformers (5.6, ``trainer_jit_checkpoint.py``): every rank decides by a timer of its own
when to save and stop. Two timers on both sides of a step's end make one rank save step 56 and the other go on to 57,
where it waits for the first for ever, or reduces a gradient with something else.

Python imports a module of this name at every start, before anything else. So nothing is imported here: a module is
mended when the program itself has imported it. A ``sitecustomize`` of the environment's own still runs.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Optional


def load_cpu(serialization: Any) -> None:
    """Let ``torch.load`` read what lies on ``cpu:N``; torch's own rules keep their turn for all else."""
    serialization.register_package(
        5, lambda _storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
    )


def save_together(checkpoint: Any) -> None:
    """Let all ranks save behind the same step: the first at whose end one of them was asked to.

    It costs one number that all ranks reduce at the end of every step.
    """

    def on_step_end(self: Any, args: Any, _state: Any, control: Any, **_: Any) -> None:
        manager = self.jit_manager
        if manager is not None and _any_rank(manager.is_checkpoint_requested, args.device):
            control.should_save = False
            control.should_training_stop = True
            manager.execute_jit_checkpoint()

    def nothing(_self: Any, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """At other points of a step the ranks cannot tell one another."""

    callback = checkpoint.JITCheckpointCallback
    callback.on_step_end = on_step_end
    for name in ("on_step_begin", "on_pre_optimizer_step", "on_epoch_end"):
        setattr(callback, name, nothing)


def _any_rank(asked: bool, device: Any) -> bool:
    torch: Any = sys.modules["torch"]  # transformers has imported it
    ranks = torch.distributed
    if not (ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1):
        return asked
    flag = torch.tensor([int(asked)], device=device)
    ranks.all_reduce(flag, op=ranks.ReduceOp.MAX)
    return bool(flag.item())


MENDS: Dict[str, Callable[[Any], None]] = {
    "torch.serialization": load_cpu,
    "transformers.trainer_jit_checkpoint": save_together,
}


class Finder:
    """Finds the modules of ``MENDS`` as Python would, and mends each once it has been loaded."""

    _left = tuple(MENDS)

    @classmethod
    def find_spec(cls, name: str, _path: Any = None, _target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        """The module's spec, with a loader that mends; None for every other module."""
        if name not in cls._left:
            return None
        cls._left = tuple(each for each in cls._left if each != name)  # looking for the module comes here again
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            MENDS[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def chain() -> None:
    """Run the ``sitecustomize`` that Python would have found without this one."""
    here = Path(__file__).resolve().parent
    others = [folder for folder in sys.path if Path(folder).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, Finder)
chain()
