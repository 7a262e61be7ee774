"""Recognizes secrets in environments and commands, and masks them.

Only its user can read a process's environment, but every user of the machine can read its arguments (``ps``). So
secrets are sent to the nodes in the environment, and masked wherever a command, a plan or a record is shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer.agent.contract.plan import Plan

HIDDEN = "***"

_VARIABLE = re.compile(r"TOKEN(?!IZ)|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
# Options of scripts and keys of configurations. `--pad_token` and `--eos-token` are not secrets.
_OPTION = re.compile(
    r"(^|_)(api_?key|secret|secret_key|access_key|account_key|private_key|password|passwd|passphrase|credentials"
    r"|(api|access|auth|bearer|refresh|session|hub|hf|huggingface|wandb|swanlab|github|gitlab)_token)$|^token$"
)
_HARMLESS = re.compile(r"(true|false|none|null|yes|no|[01]|<.*>)?", re.IGNORECASE)  # of use_auth_token, and `<pad>`
# Tokens by their shape. Text in front of one may be Chinese, which is no word boundary, so boundaries are ASCII's.
_TOKENS = (
    r"hf_[A-Za-z0-9]{30,}", r"api_org_[A-Za-z0-9]{30,}",  # Hugging Face
    r"gh[pousr]_[A-Za-z0-9]{30,}", r"github_pat_\w{30,}", r"gl(?:pat|ptt|dt|rt|cbt)-[\w-]{20,}",  # GitHub, GitLab
    r"sk-[A-Za-z0-9]{32,}", r"sk-(?:proj|ant|svcacct|or)-[\w-]{20,}",  # OpenAI, Anthropic, OpenRouter
    r"wandb_v\d_\w{20,}", r"ms-[0-9a-f]{8}-[0-9a-f-]{27}",  # W&B, ModelScope
    r"A(?:KIA|SIA)[0-9A-Z]{16}", r"LTAI[A-Za-z0-9]{12,30}", r"AKID[A-Za-z0-9]{13,40}",  # AWS, Aliyun, Tencent
    r"AKLT[A-Za-z0-9]{20,}", r"AIza[\w-]{35}", r"ya29\.[\w-]{20,}", r"GOCSPX-[\w-]{20,}",  # Volcengine, Google
    r"xox[abeoprs]-[\w-]{10,}", r"xapp-[\w-]{10,}", r"\d{8,10}:AA[\w-]{33}",  # Slack, Telegram
    r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}", r"SG\.[\w-]{16,}\.[\w-]{16,}", r"dapi[0-9a-f]{32}",  # Stripe, SendGrid
    r"npm_[A-Za-z0-9]{36}", r"pypi-[\w-]{16,}", r"dckr_(?:pat|oat)_[\w-]{20,}", r"do[opr]_v1_[0-9a-f]{40,}",
    r"(?:hv[sbr]|s)\.[A-Za-z0-9]{24,}", r"glsa_\w{32,}", r"AGE-SECRET-KEY-1[0-9A-Z]{40,}",  # Vault, Grafana, age
    r"eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)*",  # JSON Web Tokens
)  # fmt: skip
_SHAPES = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_TOKENS)})", re.ASCII)
_LOGIN = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")  # the password in a URL


def is_secret(variable: str) -> bool:
    """Whether an environment variable contains a secret, by its name."""
    return _VARIABLE.search(variable) is not None


def is_harmless(value: str) -> bool:
    """Whether a value of a secret's name is none, such as ``true`` or ``<pad>``."""
    return _HARMLESS.fullmatch(value) is not None


def mask_text(text: str) -> str:
    """A value without tokens of a known shape and passwords in URLs."""
    return _LOGIN.sub(rf"\g<1>{HIDDEN}@", _SHAPES.sub(HIDDEN, text))


def replace_tokens(text: str, replace: Callable[[str], str]) -> str:
    """A text with each token of a known shape replaced."""
    return _SHAPES.sub(lambda found: replace(found[0]), text)


def mask_env(env: Mapping[str, Any]) -> dict[str, str]:
    """An environment without its secrets."""
    return {name: HIDDEN if is_secret(name) else mask_text(str(value)) for name, value in env.items()}


def mask_words(words: Sequence[str]) -> list[str]:
    """A command without its secrets, such as the values of ``--hub_token``, ``hub_token=`` and ``WANDB_API_KEY=``."""
    found = {place: start for place, start, _ in secrets_in(words)}
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
    for _, _, name in secrets_in(words):
        return name
    for word in words:
        if match := _SHAPES.search(word):
            return f"{word[: match.start()]}{match[0][:3]}…"
    return None


def secrets_in(words: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """The secrets of a command: each word's index, the start of the secret at its end, and the option's name."""
    for place, word in enumerate(words):
        name, has, value = word.partition("=")
        if not names_secret(name):
            continue
        after = words[place + 1] if place + 1 < len(words) else ""
        if has and not is_harmless(value):
            yield place, len(name) + 1, name
        elif not has and name.startswith("-") and not after.startswith("-") and not is_harmless(after):
            yield place + 1, 0, name


def names_secret(name: str) -> bool:
    """Whether an option, a variable or a key of a configuration contains a secret, by its name."""
    bare = name.lstrip("-").replace("-", "_")
    if re.fullmatch(r"[A-Z][A-Z0-9_]*", bare):
        return is_secret(bare)
    return bool(re.fullmatch(r"[\w.]+", bare) and _OPTION.search(bare.rpartition(".")[2].lower()))
