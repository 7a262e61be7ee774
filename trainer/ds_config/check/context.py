"""The training that a configuration is checked against: which program reads it, its arguments, and the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, FrozenSet, Mapping, Optional

from trainer.ds_config.gpus import Gpu

TRAINER, ACCELERATE, OWN, UNKNOWN = "trainer", "accelerate", "own", "unknown"


@dataclass(frozen=True)
class Context:
    """What is known about the training.

    Attributes:
        program: who reads the file: ``trainer``, transformers' Trainer, which fills in "auto"; ``accelerate``, a script
            that uses accelerate without a Trainer; ``own``, a script that calls DeepSpeed; ``unknown``.
        reads_json: the script reads the file with ``json.load``, which accepts no comments.
        named: the script or configuration, for messages.
        arguments: by name, the arguments of the training that are known; None if the command line is not known.
        unknown: names of arguments whose value or default is not known.
        yaml: the arguments are keys of a YAML file, not options.
        world: the number of processes of all nodes.
        gpu: the GPU of the nodes.
    """

    program: str = UNKNOWN
    reads_json: bool = False
    named: str = ""
    arguments: Optional[Mapping[str, Any]] = None
    unknown: FrozenSet[str] = field(default_factory=frozenset)
    yaml: bool = False
    world: Optional[int] = None
    gpu: Optional[Gpu] = None

    @property
    def hjson(self) -> bool:
        """Whether DeepSpeed itself reads the file."""
        return self.program == OWN and not self.reads_json

    @property
    def steps(self) -> Optional[int]:
        """The optimizer steps of the training, if an argument sets them."""
        steps = self.value("max_steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    def value(self, name: str) -> Any:
        """The value of an argument; None if it is not given."""
        return (self.arguments or {}).get(name)
