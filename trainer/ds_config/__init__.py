"""DeepSpeed's configuration from a few options. It needs only the standard library.

::

    config = make(Request(stage=2, target="own", gpu="A100", micro_batch=1, accumulation=32))
    text(config)    # the content of ds_config.json

``python -m trainer.ds_config`` and ``clusterctl ds-config`` do the same on the command line.
"""

from __future__ import annotations

import json
from typing import Any, Dict

from trainer.ds_config.build import AUTO, FILLED, autos, make, notices
from trainer.ds_config.gpus import GPUS, ConfigError, Gpu, find, with_memory
from trainer.ds_config.request import PRESETS, Request, precision_of

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
    """Format the configuration as JSON, with a newline at the end."""
    return json.dumps(config, indent=2) + "\n"
