"""Derives the arguments by which a script resumes from a checkpoint, from its source. The source is never run.

The arguments contain the words of ``trainer.agent.contract.plan.PLACES``: ``{checkpoint}`` is the checkpoint's path,
``{folder}`` its folder, ``{name}`` or ``{tag}`` its name there, ``{step}`` its step.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from provision.run.script_source import Option, Source

# Usual names, the most specific first.
_NAMES = (
    *("resume_from_checkpoint", "resume_checkpoint", "resume_from", "resume_path", "resume_ckpt", "resume_dir"),
    *("resume", "load_checkpoint", "load_ckpt", "ckpt_path", "load_dir", "restore_from", "restore", "load"),
)
_TAGS = ("ckpt_id", "load_tag", "resume_tag", "tag", "ckpt_tag", "checkpoint_tag")
_STEPS = ("ckpt_step", "load_step", "resume_step", "start_step")
VARIABLE = "CLUSTERCTL_CHECKPOINT"
EXAMPLE = "--resume-arg '--resume_from {checkpoint}', or --resume-arg '' if it finds its newest checkpoint itself"


@dataclass(frozen=True)
class Resuming:
    """How a script resumes.

    Attributes:
        text: the arguments to add; "" for none; None: not known.
        source: what the text was read from, for a notice.
        never: why the script cannot resume.
    """

    text: str | None
    source: str = ""
    never: str = ""


def notices(resuming: Resuming, name: str, *, output_known: bool, typed: bool) -> list[str]:
    """What the user should know about a script's resume before it starts; nothing about typed arguments."""
    if not output_known:
        return [f"where {name} saves its checkpoints is not known, so the run cannot be resumed: --output DIR"]
    if typed or resuming.text == "":
        return []
    if resuming.text is not None:
        return [f"to resume, {name} gets {resuming.text}, by {resuming.source}; --resume-arg TEXT replaces it"]
    if resuming.never:
        return [f"{name} cannot resume: {resuming.never}; a run with checkpoints is not restarted, to keep them"]
    return [f"which option makes {name} resume is not known, so a run with checkpoints is not restarted: {EXAMPLE}"]


def derive(source: Source) -> Resuming:
    """How a script resumes, by its own module, or else with the modules that it imports."""
    own = _derive(source.own)
    return own if own.text is not None else _derive(source)


def _derive(source: Source) -> Resuming:
    if not source.trees:
        return Resuming(None)
    if VARIABLE in source.text:
        return Resuming("", f"it reads {VARIABLE}")
    options = {option.name: option for option in reversed(source.options())}
    if found := _configurator(source, options):
        return found
    if found := _library(source, options):
        return found
    for name in _NAMES:
        if name in options:
            found_text = _text(options[name], options, source)
            if found_text is not None:
                return Resuming(found_text, f"its option {options[name].text}")
    if "get_last_checkpoint(" in source.text:
        return Resuming("", "it calls get_last_checkpoint")
    return Resuming(None)


def _library(source: Source, options: dict[str, Option]) -> Resuming | None:
    """Scripts with the options of transformers' TrainingArguments, or of LightningCLI."""
    if any(source.imports(name) for name in ("TrainingArguments", "HfArgumentParser", "TrlParser")):
        if "resume_from_checkpoint" in source.text:
            return Resuming("--resume_from_checkpoint {checkpoint}", "TrainingArguments of transformers")
        if "get_last_checkpoint" not in source.text and not options.keys() & set(_NAMES):
            return Resuming(None, never="it does not pass resume_from_checkpoint to Trainer.train")
    if source.imports("LightningCLI"):
        return Resuming("--ckpt_path {checkpoint}", "LightningCLI")
    return None


def _configurator(source: Source, options: dict[str, Option]) -> Resuming | None:
    """nanoGPT: ``init_from`` is a global that the command line sets, and is compared with ``"resume"``."""
    option = options.get("init_from")
    if option is None:
        return None
    for node in source.walk():
        if not isinstance(node, ast.Compare) or getattr(node.left, "id", getattr(node.left, "attr", "")) != "init_from":
            continue
        if any(isinstance(each, ast.Constant) and each.value == "resume" for each in node.comparators):
            return Resuming(f"{option.text}=resume", f"its option {option.text}")
    return None


def _text(option: Option, options: dict[str, Option], source: Source) -> str | None:
    """The arguments for an option; None if its values are not understood."""
    if option.flag:
        return option.text
    if option.choices:
        auto = [each for each in ("auto", "latest", "last", "True", "true", "resume") if each in option.choices]
        return f"{option.text} {auto[0]}" if auto else None
    if "bool" in option.kind.lower() or isinstance(option.default, bool):
        return f"{option.text} True"
    if option.kind == "int":
        return f"{option.text} {{step}}"
    parts = [f"{option.text} {{folder}}"]
    parts += [f"{options[name].text} {{tag}}" for name in _TAGS if name in options][:1]
    parts += [f"{options[name].text} {{step}}" for name in _STEPS if name in options][: 0 if len(parts) > 1 else 1]
    megatron = option.name == "load" and source.imports("megatron")
    if len(parts) > 1 or option.name == "load_dir" or megatron or _loads_latest(source):
        return " ".join(parts)
    return f"{option.text} {{checkpoint}}"


def _loads_latest(source: Source) -> bool:
    """Whether DeepSpeed's ``load_checkpoint(folder)`` is called without a tag, which it then reads from ``latest``."""
    if not source.imports("deepspeed"):
        return False
    calls = [
        node
        for node in source.walk()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_checkpoint"
    ]
    return bool(calls) and all(_without_tag(call) for call in calls)


def _without_tag(call: ast.Call) -> bool:
    given: Sequence[str | None] = [keyword.arg for keyword in call.keywords]
    return len(call.args) <= 1 and "tag" not in given and None not in given
