"""Fixes two modules when a program imports them.

Sent with every run. Nodes without GPUs and runs that save on SIGTERM have it in their PYTHONPATH.

``torch.load`` of checkpoints that several CPU processes wrote: transformers and accelerate ask for a map to ``cpu:0``,
but torch (2.11, ``torch/serialization.py``) only knows ``cpu``. Resuming fails with "don't know how to restore data
location of torch.storage.UntypedStorage (tagged with cpu:0)".

``enable_jit_checkpoint`` of transformers (5.6, ``trainer_jit_checkpoint.py``): every rank decides with its own timer
when to save and stop. If two timers fire before and after the end of a step, one rank saves step 56 and the other
continues to 57. There it waits for the first forever, or reduces a gradient with unrelated data.

Python imports a module of this name at every start, before anything else. So it imports nothing else: it fixes a
module when the program has imported it. A ``sitecustomize`` of the environment still runs.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Optional


def load_cpu(serialization: Any) -> None:
    """Let ``torch.load`` read tensors tagged ``cpu:N``. torch's rules still apply to all other tags."""
    serialization.register_package(
        5, lambda _storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
    )


def save_together(checkpoint: Any) -> None:
    """Make all ranks save after the same step: the first step at whose end some rank has received the signal.

    It costs an all-reduce of one number per step.
    """

    def on_step_end(self: Any, args: Any, _state: Any, control: Any, **_: Any) -> None:
        manager = self.jit_manager
        if manager is not None and _any_rank(manager.is_checkpoint_requested, args.device):
            control.should_save = False
            control.should_training_stop = True
            manager.execute_jit_checkpoint()

    def nothing(_self: Any, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Do nothing: the ranks only communicate at the end of a step."""

    callback = checkpoint.JITCheckpointCallback
    callback.on_step_end = on_step_end
    for name in ("on_step_begin", "on_pre_optimizer_step", "on_epoch_end"):
        setattr(callback, name, nothing)


def _any_rank(requested: bool, device: Any) -> bool:
    torch: Any = sys.modules["torch"]  # transformers has imported it
    ranks = torch.distributed
    if not (ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1):
        return requested
    flag = torch.tensor([int(requested)], device=device)
    ranks.all_reduce(flag, op=ranks.ReduceOp.MAX)
    return bool(flag.item())


FIXES: Dict[str, Callable[[Any], None]] = {
    "torch.serialization": load_cpu,
    "transformers.trainer_jit_checkpoint": save_together,
}


class Finder:
    """Finds the modules of ``FIXES`` as Python would, and fixes each after it is loaded."""

    _left = tuple(FIXES)

    @classmethod
    def find_spec(cls, name: str, _path: Any = None, _target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        """Return the module's spec with a loader that applies the fix; None for any other module."""
        if name not in cls._left:
            return None
        cls._left = tuple(each for each in cls._left if each != name)  # find_spec below calls this method again
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            FIXES[name](module)

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
