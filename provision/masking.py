"""Recognizes secrets in environments and commands, and masks them.

Only its user can read a process's environment, but every user of the machine can read its arguments (``ps``). So
secrets are sent to the nodes in the environment, and masked wherever a command, a plan or a record is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.agent.contract.plan import Plan

HIDDEN = "***"

_VARIABLE = re.compile(r"TOKEN(?!IZ)|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
# Options of scripts and keys of configurations. `--pad_token` and `--eos-token` are not secrets.
_OPTION = re.compile(
    r"(^|_)(api_?key|secret|secret_key|access_key|private_key|password|passwd|passphrase|credentials"
    r"|(api|access|auth|bearer|hub|hf|huggingface|wandb|swanlab|github|gitlab)_token)$|^token$"
)
_HARMLESS = re.compile(r"(true|false|none|null|yes|no|[01]|<.*>)?", re.IGNORECASE)  # of use_auth_token, and `<pad>`
# Tokens by their shape: Hugging Face, GitHub, GitLab, OpenAI, W&B, AWS, Slack.
_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|sk-[A-Za-z0-9]{32,}|sk-(proj|ant)-[\w-]{20,}|wandb_v\d_\w{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,})"
)
_LOGIN = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")  # the password in a URL


def is_secret(variable: str) -> bool:
    """Whether an environment variable contains a secret, by its name."""
    return _VARIABLE.search(variable) is not None


def mask_text(text: str) -> str:
    """A value without tokens of a known shape and passwords in URLs."""
    return _LOGIN.sub(rf"\g<1>{HIDDEN}@", _SHAPES.sub(HIDDEN, text))


def mask_env(env: Mapping[str, Any]) -> dict[str, str]:
    """An environment without its secrets."""
    return {name: HIDDEN if is_secret(name) else mask_text(str(value)) for name, value in env.items()}


def mask_words(words: Sequence[str]) -> list[str]:
    """A command without its secrets, such as the values of ``--hub_token``, ``hub_token=`` and ``WANDB_API_KEY=``."""
    found = {place: start for place, start, _ in _secrets(words)}
    return [
        f"{word[: found[place]]}{HIDDEN}" if place in found else mask_text(word) for place, word in enumerate(words)
    ]


def mask_plan(plan: Plan) -> Plan:
    """A node's plan without its secrets, for the record on this machine."""
    resume = plan.resume and plan.resume._replace(
        argv=tuple(mask_words(plan.resume.argv)), env=mask_env(plan.resume.env)
    )
    return plan._replace(
        argv=tuple(mask_words(plan.argv)),
        env=mask_env(plan.env),
        link=plan.link and plan.link._replace(token=HIDDEN),
        resume=resume,
        notify=plan.notify and HIDDEN,  # its address may contain a token
    )


def secret_option(words: Sequence[str]) -> str | None:
    """The first option or word of a command with a secret, without the value; None if there is none."""
    for _, _, name in _secrets(words):
        return name
    for word in words:
        if match := _SHAPES.search(word):
            return f"{word[: match.start()]}{match[0][:3]}…"
    return None


def _secrets(words: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """The index of each word that ends in a secret, the start of the secret in it, and the option's name."""
    for place, word in enumerate(words):
        name, has, value = word.partition("=")
        if not _names_secret(name):
            continue
        after = words[place + 1] if place + 1 < len(words) else ""
        if has and not _HARMLESS.fullmatch(value):
            yield place, len(name) + 1, name
        elif not has and name.startswith("-") and not after.startswith("-") and not _HARMLESS.fullmatch(after):
            yield place + 1, 0, name


def _names_secret(name: str) -> bool:
    bare = name.lstrip("-").replace("-", "_")
    if re.fullmatch(r"[A-Z][A-Z0-9_]*", bare):
        return is_secret(bare)
    return bool(re.fullmatch(r"[\w.]+", bare) and _OPTION.search(bare.rpartition(".")[2].lower()))
