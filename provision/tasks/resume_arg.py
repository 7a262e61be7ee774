"""The arguments by which a script resumes: typed, derived from its source, or asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from provision.errors import UsageError
from provision.launchers.kit.plans import split_resume_arg
from provision.masking import secret_option
from provision.run import Job, RunFiles
from trainer.agent.contract.plan import Plan

AskResume = Callable[[str], str]  # of a program's name, the arguments by which it resumes


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
