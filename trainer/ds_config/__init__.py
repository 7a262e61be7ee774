"""DeepSpeed's configuration from a few wishes. Pure, with the standard library alone.

::

    config = make(Request(stage=2, target="own", gpu="A100", micro_batch=1, accumulation=32))
    text(config)    # what goes into ds_config.json

``python -m trainer.ds_config`` and ``clusterctl ds-config`` are the same on the command line.
"""

from __future__ import annotations

import json
from typing import Any, Dict

from trainer.ds_config.build import AUTO, FILLED, autos, make, notices
from trainer.ds_config.errors import ConfigError
from trainer.ds_config.gpus import GPUS, Gpu, find, with_memory
from trainer.ds_config.presets import PRESETS
from trainer.ds_config.request import Request, precision_of

__all__ = [
    "AUTO",
    "FILLED",
    "GPUS",
    "PRESETS",
    "ConfigError",
    "Gpu",
    "Request",
    "autos",
    "find",
    "make",
    "notices",
    "precision_of",
    "text",
    "with_memory",
]


def text(config: Dict[str, Any]) -> str:
    """The configuration as JSON, with a line end."""
    return json.dumps(config, indent=2) + "\n"
