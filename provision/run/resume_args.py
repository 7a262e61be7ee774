"""Derives the arguments by which a script resumes from a checkpoint: from its source, which is parsed, or its help.

The arguments contain the words of ``trainer.agent.contract.plan.PLACES``: ``{checkpoint}`` is the checkpoint's path,
``{folder}`` its folder, ``{name}`` or ``{tag}`` its name there, ``{step}`` its step.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from provision.run.script_source import Option, Source
from provision.run.usage import options_of

# Usual names, the most specific first.
_NAMES = (
    *("resume_from_checkpoint", "resume_checkpoint", "resume_from", "resume_path", "resume_ckpt", "resume_dir"),
    *("resume", "load_checkpoint", "load_ckpt", "ckpt_path", "load_dir", "restore_from", "restore", "load"),
)
_TAGS = ("ckpt_id", "load_tag", "resume_tag", "tag", "ckpt_tag", "checkpoint_tag")
_STEPS = ("ckpt_step", "load_step", "resume_step", "start_step")
VARIABLE = "CLUSTERCTL_CHECKPOINT"
# What answers ``--help`` and exits, before a program does its work.
_PARSERS = (
    *("absl", "hydra", "fire", "tyro", "typer", "click", "jsonargparse", "LightningCLI", "HfArgumentParser"),
    *("TrlParser", "argparse"),
)
EXAMPLE = "--resume-arg '--resume_from {checkpoint}', or --resume-arg '' if it finds its newest checkpoint itself"


@dataclass(frozen=True)
class Resuming:
    """How a script resumes.

    Attributes:
        text: the arguments to add; "" for none; None: not known.
        source: what the text was read from, for a notice.
        never: why the script cannot resume.
        help: the option with which it prints its options, if these may tell what its source does not; "" if it might
            train instead.
    """

    text: str | None
    source: str = ""
    never: str = ""
    help: str = ""


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
    if resuming.help:
        return [
            f"which option makes {name} resume is not in its source: the start of the run asks {name} {resuming.help}"
        ]
    return [f"which option makes {name} resume is not known, so a run with checkpoints is not restarted: {EXAMPLE}"]


def derive(source: Source) -> Resuming:
    """How a script resumes, by its own module, or else with the modules that it imports."""
    own = _derive(source.own)
    found = own if own.text is not None else _derive(source)
    return found if found.text is not None or found.never else Resuming(None, help=_help(source))


def by_usage(text: str, source: Source) -> Resuming:
    """How a script resumes, by the text that it prints for ``--help``."""
    return _named(options_of(text), source, " (its --help)") or Resuming(None)


def _help(source: Source) -> str:
    """The option with which a script prints its options and exits; "" if it may not know any."""
    parser = next((name for name in _PARSERS if source.imports(name)), "")
    for node in source.walk():
        if isinstance(node, ast.keyword) and node.arg == "add_help" and parser == "argparse":
            return ""
        if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None and parser == "fire":
            return ""  # --help would be one more of its arguments
    return "--helpfull" if parser == "absl" else parser and "--help"


def _named(options: Mapping[str, Option], source: Source, where: str = "") -> Resuming | None:
    """How a script resumes, by the names of its options."""
    for name in _NAMES:
        text = _text(options[name], options, source) if name in options else None
        if text is not None:
            return Resuming(text, f"its option {options[name].text.rstrip('=')}{where}")
    return None


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
    if found := _named(options, source):
        return found
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


def _text(option: Option, options: Mapping[str, Option], source: Source) -> str | None:
    """The arguments for an option; None if its values are not understood."""
    if option.flag:
        return option.text
    if option.choices:
        auto = [each for each in ("auto", "latest", "last", "True", "true", "resume") if each in option.choices]
        return option.with_value(auto[0]) if auto else None
    if "bool" in option.kind.lower() or isinstance(option.default, bool):
        return option.with_value("True")
    if option.kind == "int":
        return option.with_value("{step}")
    parts = [option.with_value("{folder}")]
    parts += [options[name].with_value("{tag}") for name in _TAGS if name in options][:1]
    parts += [options[name].with_value("{step}") for name in _STEPS if name in options][: 0 if len(parts) > 1 else 1]
    megatron = option.name == "load" and source.imports("megatron")
    if len(parts) > 1 or option.name == "load_dir" or megatron or _loads_latest(source):
        return " ".join(parts)
    return option.with_value("{checkpoint}")


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
