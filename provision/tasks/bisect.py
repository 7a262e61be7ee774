"""``clusterctl compare --bisect``: starts short jobs with mixtures of two runs' settings until the cause is known.

``provision/run/bisect.py`` decides; this module starts the rounds, judges them, and keeps them in the bad run's folder
on this machine (``bisect.json``), so that the same command resumes after an interruption.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from provision.errors import NodesError, PreflightError, RunFailedError, UsageError
from provision.model import Emit, Notice
from provision.output_text import duration
from provision.run.bisect import (
    Ask,
    Conclusion,
    Measured,
    Mixture,
    Space,
    Verdict,
    judge,
    most_rounds,
    search,
    threshold,
    usual_rounds,
)
from provision.run.difference import error_line
from provision.run.history import Wanted
from provision.run.record import make_private
from provision.tasks import train
from provision.tasks.history import prune
from provision.tasks.logs import read_run
from provision.tasks.start import Following, stop_detached
from trainer.reader import FIELDS, Row

if TYPE_CHECKING:
    from provision.session import Session

FILE = "bisect.json"
_SPEEDS = ("tokens_per_second", "ms")
_METRIC = re.compile(r"([a-z_]+)(?:@([0-9]{1,15}))?")
_NAMED = 12  # settings in a sentence
_LINE = 200  # characters of a reason

Prepare = Callable[[Mixture], AbstractContextManager[tuple["Session", train.Training]]]


@dataclass(frozen=True)
class Limits:
    """How a round is bounded and judged.

    Attributes:
        seconds: the longest time of a round.
        steps: the steps of a round; None: until the job ends, or the time is over.
        metric: the value that decides, with the step after ``@``; None: whether the job fails.
    """

    seconds: float = 300.0
    steps: int | None = None
    metric: str | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown value.

        Raises:
            UsageError: the metric is not one that a log has.
        """
        if self.metric is not None and self.name not in FIELDS:
            raise UsageError(f"--metric {self.metric[:_LINE]}: unknown value", hint=f"one of {', '.join(FIELDS)}")

    @property
    def name(self) -> str:
        """The value's name without its step."""
        match = _METRIC.fullmatch(self.metric or "")
        return match[1] if match else ""

    @property
    def step(self) -> int | None:
        """The step of the value; None: a speed's median, or the last value."""
        match = _METRIC.fullmatch(self.metric or "")
        return int(match[2]) if match and match[2] else None

    @property
    def enough(self) -> int | None:
        """The step at which a round is stopped."""
        return self.steps if self.step is None else max(self.step, self.steps or 0)


@dataclass(frozen=True)
class Round:
    """A finished round.

    Attributes:
        settings: the places of the settings with the bad run's values.
        again: it repeats an earlier one.
        verdict: ``good``, ``bad`` or ``unclear``.
        failed: whether the job failed.
        value: the measured value; None without one.
        text: why, in a few words.
        seconds: how long it took.
        run: the id of its run; "" if it did not start.
    """

    settings: tuple[int, ...]
    again: bool
    verdict: Verdict
    failed: bool
    value: float | None
    text: str
    seconds: float
    run: str = ""


@dataclass(frozen=True)
class Bisected:
    """The result."""

    space: Space
    conclusion: Conclusion
    rounds: tuple[Round, ...]
    limit: float | None = None


@dataclass
class Bisection:
    """A bisection that runs.

    Attributes:
        space: the settings.
        limits: how a round is bounded and judged.
        prepare: opens the session of a mixture, with its training.
        emit: receives one line for each round.
        folder: the bad run's folder on this machine.
        rounds: the finished rounds.
    """

    space: Space
    limits: Limits
    prepare: Prepare
    emit: Emit
    folder: Path
    rounds: list[Round] = field(default_factory=list)

    def result(self) -> Bisected:
        """Run rounds until the cause is known.

        Raises:
            NodesFailedError: nodes do not answer; the same command resumes.
            InterruptedByUser: Ctrl-C; the same command resumes.
        """
        kept = self._kept()
        self.emit(Notice(plan_text(self.space, self.limits)))
        if kept:
            self.emit(Notice(f"{len(kept)} rounds of the interrupted bisection are kept"))
        rounds = search(len(self.space.settings))
        ask = next(rounds)
        while True:
            old = kept.pop(0) if kept else None
            if old is not None and (frozenset(old.settings), old.again) == ask:
                self.rounds.append(old)
            else:
                kept = []
                self._add(ask)
            try:
                ask = rounds.send(self.rounds[-1].verdict)
            except StopIteration as done:
                (self.folder / FILE).unlink(missing_ok=True)
                good, bad = ([measured(each) for each in self.rounds[:2]] + [Measured(True)] * 2)[:2]
                return Bisected(self.space, done.value, tuple(self.rounds), threshold(good, bad))

    def _add(self, ask: Ask) -> None:
        number = len(self.rounds) + 1
        done = self._round(ask)
        self.rounds.append(done)
        self._keep()
        left = usual_rounds(len(self.space.settings)) - number
        pace = sum(each.seconds for each in self.rounds) / number
        eta = f"; about {duration(max(1, left) * pace)} left" if left > 0 else ""
        self.emit(Notice(f"round {number}: {round_text(self.space, done)}{eta}"))

    def _round(self, ask: Ask) -> Round:
        """Start the job of a round and judge it."""
        before = time.monotonic()
        run = ""
        with self.prepare(self.space.mixture(ask.chosen)) as (session, asked):
            limit = _Limit(self.limits)
            try:
                result = train.train(session, replace(asked, following=Following(enough=limit)))
            except RunFailedError as error:
                failed, value, text = True, None, _reason(error)
            except PreflightError as error:
                verdict: Verdict = "unclear"
                text = f"did not start: {_reason(error)}"
                return Round(
                    tuple(sorted(ask.chosen)), ask.again, verdict, False, None, text, time.monotonic() - before
                )
            else:
                stop_detached(session, result)
                run = result.run
                value = self._value(session, run)
                failed, text = limit.failed(result.steps, left=result.state == "detached")
                if not failed and self.limits.metric:
                    text = (
                        f"{self.limits.metric} {value:.6g}"
                        if value is not None
                        else f"no {self.limits.name} in its log"
                    )
            measures = self.limits.metric is not None
            first, second = ([*map(measured, self.rounds[:2]), None, None])[:2]
            verdict = judge(Measured(failed, value), first, second, measures=measures)
            if verdict == "good" and run:
                prune(session, Wanted(), lambda plan, more: (*plan.runs, *more), words=[run])
        seconds = round(time.monotonic() - before, 1)
        return Round(tuple(sorted(ask.chosen)), ask.again, verdict, failed, value, text, seconds, run)

    def _value(self, session: Session, run: str) -> float | None:
        if self.limits.metric is None:
            return None
        try:
            return value_of_rows(list(read_run(session, run).series), self.limits.name, self.limits.step)
        except UsageError:  # it has printed no number
            return None

    @property
    def _key(self) -> str:
        """Equal for equal bisections: rounds of another one are not used."""
        about = [self.space.settings, self.space.job, self.space.good.get("run"), asdict(self.limits)]
        return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()

    def _keep(self) -> None:
        make_private(self.folder)
        content = {"key": self._key, "rounds": [asdict(each) for each in self.rounds]}
        temporary = self.folder / f"{FILE}.new"
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        temporary.replace(self.folder / FILE)

    def _kept(self) -> list[Round]:
        """The rounds of an interrupted bisection."""
        try:
            content = json.loads((self.folder / FILE).read_text(encoding="utf-8"))
            if content["key"] != self._key:
                return []
            return [Round(**{**each, "settings": tuple(each["settings"])}) for each in content["rounds"]]
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is of another version
            return []


class _Limit:
    """When a round is over: after its steps, or its time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._until = time.monotonic() + limits.seconds

    def __call__(self, step: int | None) -> bool:
        enough = self._limits.enough
        return time.monotonic() > self._until or (enough is not None and step is not None and step >= enough)

    def failed(self, step: int | None, *, left: bool) -> tuple[bool, str]:
        """Whether a job that has ended without an error, or was left, counts as failed; and what it did."""
        enough, took = self._limits.enough, f"within {duration(self._limits.seconds)}"
        if left and step is None:
            return True, f"no step {took}"
        if left and enough is not None and (step or 0) < enough:
            return True, f"only {step} of {enough} steps {took}"
        return False, f"{step} steps without an error" if step is not None else "ended without an error"


def measured(each: Round) -> Measured:
    """What the judge knows of a round."""
    return Measured(each.failed, each.value)


def value_of_rows(rows: Sequence[Row], name: str, step: int | None) -> float | None:
    """The value that decides: at a step, or the median of a speed, or the last one."""
    known = [(row.step, value) for row in rows if (value := getattr(row, name)) is not None]
    if step is not None:
        return next((float(value) for at, value in reversed(known) if at <= step), None)
    if not known:
        return None
    if name in _SPEEDS:
        return float(median(value for _, value in known[len(known) // 4 :]))  # the first steps compile and warm up
    return float(known[-1][1])


def _reason(error: NodesError) -> str:
    """One line about a job that failed or did not start."""
    return error_line("\n".join(error.reasons.values())) or str(error)


def plan_text(space: Space, limits: Limits) -> str:
    """What the bisection does, before it starts."""
    count = len(space.settings)
    usual, most = usual_rounds(count), most_rounds(count)
    names = ", ".join(each.label for each in space.settings[:_NAMED]) + (
        f" and {count - _NAMED} more" if count > _NAMED else ""
    )
    how = limits.metric or "whether the job fails"
    longest, together = duration(limits.seconds), duration(most * limits.seconds)
    lines = (
        f"{count} settings differ that train can set: {names}",
        f"{usual} jobs find one cause, at most {most} several; judged by {how}",
        f"A job trains at most {longest}, all jobs together {together}",
    )
    return ". ".join(lines)


def round_text(space: Space, done: Round) -> str:
    """A round in one line."""
    every = len(done.settings) == len(space.settings)
    names = [space.settings[at].label for at in done.settings[:_NAMED]]
    more = len(done.settings) - len(names)
    some = "GOOD" if not done.settings else "BAD" if every else f"GOOD with {', '.join(names)}"
    some += f" and {more} more of BAD" if more > 0 and not every else " of BAD" if names and not every else ""
    return f"{some}{' again' if done.again else ''}: {done.verdict} ({done.text}), {duration(done.seconds)}"


def as_data(found: Bisected, commands: Mapping[str, str]) -> dict[str, Any]:
    """The result for ``--json``."""
    settings = found.space.settings
    return {
        "settings": [
            {"kind": each.kind, "name": each.label, "good": each.text(bad=False), "bad": each.text(bad=True)}
            for each in settings
        ],
        "not_tested": dict(found.space.untested),
        "rounds": [{**asdict(each), "settings": [settings[at].label for at in each.settings]} for each in found.rounds],
        "cause": [settings[at].label for at in found.conclusion.cause],
        "sure": found.conclusion.sure,
        "why": found.conclusion.why,
        "threshold": found.limit,
        "commands": dict(commands),
    }
