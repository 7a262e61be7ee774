"""``train --save-every``: how often a run saves, and which trainers can. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.run.job import Job
from trainer.agent.contract.interval import Failures, too_short
from trainer.agent.contract.plan import SaveEvery

AUTO = "auto"
_SPAN = re.compile(r"([0-9]{1,6})(s|min|h)")
_UNITS = {"s": 1, "min": 60, "h": 3600}
_BY_SIGNAL = ("trainer.lm", "trainer.vlm")  # save on SIGUSR2 and continue


def read_save_every(text: str) -> float | None:
    """The seconds of ``10min``; None for ``auto``.

    Raises:
        UsageError: it is neither, or too short.
    """
    if text == AUTO:
        return None
    match = _SPAN.fullmatch(text)
    if not match:
        raise UsageError(f"--save-every {shown(text)}: not a time span", hint="--save-every auto, 90s, 10min or 2h")
    seconds = float(int(match[1]) * _UNITS[match[2]])
    if why := too_short(seconds, None):
        raise UsageError(f"--save-every {text}: {why}", hint="--save-every auto")
    return seconds


def save_every(text: str | None, job: Job, settings: Mapping[str, Any], failures: Failures) -> SaveEvery | None:
    """How a job saves.

    Args:
        text: the option; None: as the trainer does.
        job: the job.
        settings: the values of a LLaMA-Factory configuration.
        failures: observed failures of other runs.

    Raises:
        UsageError: it is no time span, or the job's interval cannot be set.
    """
    if text is None:
        return None
    found = SaveEvery(read_save_every(text), failures.seen, failures.node_hours)
    if job.kind == "config":
        if settings.get("save_strategy", "steps") != "steps":
            raise UsageError(
                f"--save-every and save_strategy: {shown(str(settings['save_strategy']))} exclude each other",
                hint="omit save_strategy in the configuration",
            )
        return found._replace(argument="save_steps={steps}")
    if job.kind == "module" and job.target in _BY_SIGNAL:
        return found
    raise UsageError(
        f"--save-every: {shown(job.target)} has no interval that clusterctl can set",
        hint="omit --save-every, and give the program its own option; trainer.lm, trainer.vlm and LLaMA-Factory can",
    )
