"""The arguments by which a script resumes: typed, derived from its source or its ``--help``, or asked for.

A program's help needs its libraries, which only the nodes have. Rank 0's node is asked between the gate, which has sent
the program, and the plans, which the agents need for restarts; so any machine can resume the run later. It takes as
long as the program's imports, and only for a program whose source does not tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, UsageError
from provision.inventory.document import shown
from provision.launchers.kit.plans import split_resume_arg
from provision.masking import secret_option
from provision.model import Node, Notice
from provision.render import quote, words
from provision.run import WORK, Job, RunFiles
from provision.run.resume_args import Resuming, by_usage, notices
from provision.run.script_source import Source
from trainer.agent.contract.plan import Plan
from trainer.agent.contract.untrusted import UntrustedError, parse_object
from trainer.words import read

if TYPE_CHECKING:
    from provision.session import Session

AskResume = Callable[[str], str]  # of a program's name, the arguments by which it resumes

_DEADLINE = 60.0  # seconds; the agent kills the program after 30
_ANSWER = 4 << 20  # bytes of the agent's answer
_COMMAND = re.compile(r"[a-z][a-z0-9_-]*")


@dataclass(frozen=True)
class Place:
    """Where a program can be asked: a node that has the run's folder, and its release."""

    node: Node
    folder: PurePosixPath
    prefix: PurePosixPath


def learn_resume_arg(session: Session, job: Job, files: RunFiles, place: Place, ask: AskResume | None) -> Job:
    """The job with its script's arguments to resume, as ``choose_resume_arg``; the script's help is asked before."""
    if job.resume_arg is None and files.resuming is not None and files.resuming.help and files.output is not None:
        name = Path(job.target).name
        found = Resuming(None)
        with session.stage("help", f"Asking {name} how it resumes", None):
            try:
                found = ask_program(session, job, files, place)
            except ClusterctlError as error:
                session.emit(Notice(f"{name} {files.resuming.help}: {error}"))
        for text in notices(found, name, output_known=True, typed=False):
            session.emit(Notice(text))
        files = replace(files, resuming=found)
    return choose_resume_arg(job, files, ask)


def ask_program(session: Session, job: Job, files: RunFiles, place: Place) -> Resuming:
    """How a program resumes, by its ``--help``.

    Raises:
        ClusterctlError: it cannot be asked, or does not answer.
    """
    asks = files.resuming.help if files.resuming else ""
    argv = ["-m"] if job.kind == "module" else []
    first = next((option.values[:1] for option in read(job.args) if not option.typed), ())
    commands = [each for each in first if job.args[0] == each and _COMMAND.fullmatch(each)]  # of fit, evaluate, …
    path = {**session.inventory.train.env, **job.env}.get("PYTHONPATH", "")
    agent = f"{quote(place.prefix)}/bin/python -I {quote(place.folder)}/agent usage --path={quote(path)}"
    script = f"exec {agent} -- {quote(place.folder)}/{WORK} {words([*argv, files.config_name, *commands, asks])}\n"
    try:
        answer = parse_object(session.output(place.node, script, deadline=_DEADLINE), limit=_ANSWER)
    except UntrustedError as error:
        raise ClusterctlError(f"the agent's answer {error}") from None
    text, rc = answer.get("text"), answer.get("rc")
    if not isinstance(text, str) or rc not in ((0, 1) if asks == "--helpfull" else (0,)):  # absl exits with 1
        last = shown(str(text).strip().rpartition("\n")[2])
        why = "no answer in time" if rc is None else f"it ended with status {shown(str(rc))}"
        raise ClusterctlError(f"{why}: {last}" if last else why)
    return by_usage(text, files.source or Source())


def choose_resume_arg(job: Job, files: RunFiles, ask: AskResume | None) -> Job:
    """The job with its script's arguments to resume: typed, from its source, or the user's answer.

    None in the result: not known. clusterctl's own trainer and configurations need none. ``ask`` is not called if the
    folder of the checkpoints is not known: then there is nothing to resume from.
    """
    if job.resume_arg is not None:
        return job
    if files.resuming is None:
        return replace(job, resume_arg="")
    text = files.resuming.text
    if text is None and ask is not None and files.output is not None:
        text = ask(Path(job.target).name)
    return replace(job, resume_arg=text)


def with_resume_arg(plans: Sequence[Plan], text: str) -> list[Plan]:
    """The plans of a script with other arguments to resume.

    Raises:
        UsageError: the text is invalid, or a configuration's run resumes by its own option.
    """
    words = tuple(split_resume_arg(text))
    if (secret := secret_option(words)) is not None:
        raise UsageError(
            f"{secret}: every user of a node can read a command's arguments in the list of processes (ps)",
            hint="let the script read it from the environment",
        )
    if any(plan.launcher == "llamafactory" for plan in plans):
        raise UsageError(
            "--resume-arg is for scripts: LLaMA-Factory resumes with resume_from_checkpoint", hint="omit --resume-arg"
        )
    return [plan._replace(resume=plan.resume and plan.resume._replace(argv=words, known=True)) for plan in plans]
