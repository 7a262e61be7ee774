"""The sections of an inventory and the form of each value.

Every ``as_…`` converts a value from YAML to the model's type, or raises a ``ValueError`` with one sentence.
"""

from __future__ import annotations

import difflib
import math
import os
import posixpath
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, create_model

from provision import services
from provision.inventory.document import shown
from provision.inventory.names import MAX_NODES, split_target

if TYPE_CHECKING:
    from provision.inventory.document import Document, Place

# While this module creates its models: pydantic would read the metadata of every installed package to find plugins.
_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
_plugins_before = os.environ.get(_PLUGINS)
os.environ[_PLUGINS] = "__all__"

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOGIN = re.compile(
    r"""[^\s/:'"`$;&<>|(){}\[\]*?!#%~-][^\s/:'"`$;&<>|(){}\[\]*?!#%~]{0,255}(?<!\\)"""
)  # %: a token of ssh
_SECONDS = re.compile(r"[0-9]{0,6}\.?[0-9]{1,9}(e[0-9])?")
MAX_TEXT = 4096  # characters of a value; a path has as many at most
MAX_VALUE = 65_536  # bytes of an environment variable; Linux takes 128 KiB with its name
MAX_PART = 255  # bytes between two slashes of a path
_TRUTH = "YAML reads this word as a truth value (true, yes, on, false, no, off)"


# --- values --------------------------------------------------------------------------------------


def as_text(value: object) -> str:
    """One line of text."""
    if value is True or value is False:
        raise ValueError(f"{_TRUTH}: put it in quotes")
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {_kind(value)}")  # noqa: TRY004 - pydantic collects ValueError
    if not value.strip():
        raise ValueError("is empty")
    if not value.isprintable():
        raise ValueError(f"contains a line break or a control character: {shown(value)}")
    if len(value) > MAX_TEXT:
        raise ValueError(f"is longer than {MAX_TEXT:,} characters")
    return value.strip()


def as_port(value: object) -> int:
    """A TCP port."""
    return _whole_number(value, "a port", 1, 65535)


def as_gpus(value: object) -> int:
    """The number of a node's processes."""
    return _whole_number(value, "a number of GPUs", 1, 1024)


def as_seconds(value: object) -> float:
    """A time span from 0.1 s to an hour."""
    text = as_text(value)
    seconds = float(text) if _SECONDS.fullmatch(text) else math.nan
    if not 0.1 <= seconds <= 3600:
        raise ValueError(f"{shown(text)} is not a number of seconds (0.1 to 3600)")
    return seconds


def as_user(value: object) -> str:
    """A login name."""
    text = as_text(value)
    if not _LOGIN.fullmatch(text):
        raise ValueError(f"{shown(text)} is not a login name")
    return text


def target(text: str) -> tuple[str | None, str, int | None]:
    """The login name, the address and the port of ``[USER@]ADDRESS[:PORT]``; the address is not validated.

    Raises:
        ValueError: the login name or the port is invalid.
    """
    user, address, port = split_target(text)
    return None if user is None else as_user(user), address, None if port is None else as_port(port)


def as_targets(value: object) -> tuple[str, ...]:
    """One ``[USER@]ADDRESS[:PORT]`` or a list of them, which are not validated further."""
    return tuple(as_text(each) for each in (value if isinstance(value, list) else [value]))


def as_file(value: object) -> str:
    """A path on this machine with ``~`` expanded; it need not exist."""
    text = as_text(value)
    expanded = os.path.expanduser(text)  # noqa: PTH111 - Path.expanduser raises for an unknown user
    if expanded.startswith("~"):
        raise ValueError(f"{shown(text)}: this machine has no such user")
    _check_path(expanded)
    return expanded


def _check_path(path: str) -> None:
    if len(path.encode()) > MAX_TEXT - 1 or any(len(part) > MAX_PART for part in path.encode().split(b"/")):
        raise ValueError(f"{shown(path)} is too long for a path ({MAX_PART} bytes between two slashes, 4,095 in all)")


def as_prefix(value: object) -> PurePosixPath:
    """The absolute path of the environment on every node, normalised."""
    text = as_text(value)
    if not text.startswith("/"):
        raise ValueError(f"{shown(text)} is not an absolute path: it must begin with /, such as /opt/llm/current")
    if ".." in text.split("/"):
        raise ValueError(f"{shown(text)} contains `..`: write the path without it")
    if ":" in text:
        raise ValueError(f"{shown(text)} contains a colon, which would split PATH")
    prefix = PurePosixPath(posixpath.normpath("/" + text.lstrip("/")))
    if prefix == PurePosixPath("/"):
        raise ValueError("/ is the whole system: choose a separate folder, such as /opt/llm/current")
    _check_path(str(prefix))
    if prefix.name in {"releases", "runs"}:
        raise ValueError(
            f"{shown(str(prefix))} is reserved: releases/ and runs/ are next to the prefix; use {prefix.parent}/current"
        )
    return prefix


def as_folder(value: object) -> PurePosixPath:
    """An absolute path of a folder on every node."""
    text = as_text(value)
    if not text.startswith("/"):
        raise ValueError(f"{shown(text)} is not an absolute path")
    _check_path(text)
    return PurePosixPath(text)


def as_env_name(value: object) -> str:
    """The name of an environment variable."""
    if not isinstance(value, str) or not _ENV_NAME.fullmatch(value):
        raise ValueError("is not the name of an environment variable (letters, digits and _, not a digit first)")
    return value


def as_env_value(value: object) -> str:
    """The value of an environment variable: text, or a number as it was written."""
    if value is None:
        raise ValueError('has no value: write "" for an empty one')
    if value is True or value is False:
        raise ValueError(f'{_TRUTH}: put the text in quotes, such as "1" or "true"')
    if not isinstance(value, str):
        raise ValueError(f"must be text or a number, not {_kind(value)}")  # noqa: TRY004
    if "\0" in value:
        raise ValueError("contains a NUL character, which an environment variable cannot")
    if len(value.encode()) > MAX_VALUE:
        raise ValueError(f"is longer than {MAX_VALUE:,} bytes")
    return value


def _whole_number(value: object, what: str, low: int, high: int) -> int:
    text = as_text(value)
    if re.fullmatch(r"0[0-9]+", text):
        raise ValueError(f"{shown(text)} is not {what}: omit the leading zero")
    if not re.fullmatch(r"0|[1-9][0-9]{0,17}", text) or not low <= int(text) <= high:
        raise ValueError(f"{shown(text)} is not {what} ({low}-{high})")
    return int(text)


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__


# --- sections ------------------------------------------------------------------------------------


def _scalar(**more: Any) -> WithJsonSchema:
    """The JSON schema of text, which YAML may read as a number."""
    return WithJsonSchema({"type": ["string", "number"], **more})


def _whole(high: int) -> WithJsonSchema:
    """The JSON schema of a whole number from 1, also in quotes."""
    return WithJsonSchema(
        {"type": ["integer", "string"], "minimum": 1, "maximum": high, "pattern": "^ *[1-9][0-9]* *$"}
    )


Text = Annotated[str, BeforeValidator(as_text), _scalar(pattern=r"\S", maxLength=MAX_TEXT)]
File = Annotated[str, BeforeValidator(as_file), _scalar(pattern=r"\S", maxLength=MAX_TEXT)]
User = Annotated[str, BeforeValidator(as_user), _scalar(pattern=r"\S", maxLength=MAX_TEXT)]
Port = Annotated[int, BeforeValidator(as_port), _whole(65535)]
Gpus = Annotated[int, BeforeValidator(as_gpus), _whole(1024)]
Targets = Annotated[
    tuple[str, ...],
    BeforeValidator(as_targets),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"\S"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_NODES},
            ]
        }
    ),
]
Seconds = Annotated[float, BeforeValidator(as_seconds), _scalar(minimum=0.1, maximum=3600)]
Env = dict[
    Annotated[
        str, BeforeValidator(as_env_name), WithJsonSchema({"type": "string", "pattern": f"^{_ENV_NAME.pattern}$"})
    ],
    Annotated[str, BeforeValidator(as_env_value), _scalar(maxLength=MAX_VALUE)],
]
Options = dict[str, Any]


class Section(BaseModel):
    """A mapping that accepts only its own keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


S = TypeVar("S", bound=Section)


class SshSection(Section):
    """``ssh:``."""

    user: User | None = Field(None, description="login name on the nodes; default: ssh's own")
    key: File | None = Field(None, description="private key, relative to this file")
    port: Port | None = Field(None, description="port of sshd on the nodes; default: 22")
    known_hosts: File = Field("known_hosts", description="file of the pinned host keys, relative to this file")
    timeout: Seconds = Field(10.0, description="seconds until a connection attempt fails")
    jump_hosts: Targets = Field((), description="any one of them leads to every node; names of nodes, or addresses")


class NodeSection(Section):
    """One entry of ``nodes:``; the addresses may be ranges."""

    address: Text = Field(description="ADDRESS, or USER@ADDRESS:PORT; a range for a range of names")
    data_address: Text | None = Field(None, description="address on the fast network, for training and copies")
    user: User | None = Field(None, description="login name on this node")
    port: Port | None = Field(None, description="port of this node's sshd")
    gpus: Gpus | None = Field(None, description="processes to start on this node; default: one per GPU")


class TrainSection(Section):
    """``train:``."""

    config: File | None = Field(None, description="a LLaMA-Factory configuration, relative to this file")
    port: Port | None = Field(None, description="MASTER_PORT; default: a free port of the first node")
    env: Env = Field(default_factory=dict, description="environment variables of every process")


# ``services:``, with a key for each service. The service's ``Options`` validate the keys below it.
_SERVICES: dict[str, Any] = dict.fromkeys(services.names(), (Options | None, None))
ServicesSection = create_model("ServicesSection", __base__=Section, **_SERVICES)


class TopSection(Section):
    """The file. Sections are validated one by one, so that a mistake in one does not hide others."""

    prefix: Annotated[PurePosixPath, BeforeValidator(as_prefix)]
    nodes: Any
    ssh: Any = None
    train: Any = None
    groups: Any = None
    services: Any = None
    checks: Any = None
    textfile: Annotated[PurePosixPath, BeforeValidator(as_folder)] | None = None
    notify: Text | None = None


if _plugins_before is None:
    del os.environ[_PLUGINS]
else:
    os.environ[_PLUGINS] = _plugins_before


# --- a section and its mistakes ------------------------------------------------------------------


def validate(document: Document, model: type[S], data: object, place: Place) -> S | None:
    """One section of the file; None after recording its mistakes in ``document``.

    A known key without a value counts as absent.
    """
    if data is None:
        data = {}
    if not isinstance(data, dict):
        document.mistake(place, f"must be a mapping of keys, not {'a list' if isinstance(data, list) else 'one value'}")
        return None
    given = {key: value for key, value in data.items() if value is not None or key not in model.model_fields}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            where = (*place, *(str(part) for part in entry["loc"] if part != "[key]"))
            document.mistake(where, _sentence(model, entry))
        return None


def _sentence(model: type[Section], entry: Any) -> str:
    name = str(entry["loc"][-1])
    match entry["type"]:
        case "value_error":
            return str(entry["ctx"]["error"])
        case "missing":
            return "is missing" + (" (a host name or an IP address)" if name == "address" else "")
        case "extra_forbidden":
            return f"unknown key; {_advice(model, name)}"
        case "dict_type":
            return "must be a mapping of keys"
        case "list_type" | "tuple_type":
            return "must be a list, such as [a, b]"
        case "int_type" | "int_parsing" | "int_from_float":
            return "must be a whole number"
        case "bool_type" | "bool_parsing":
            return "must be true or false"
    return str(entry["msg"])


def _advice(model: type[Section], name: str) -> str:
    """Advice about an unknown key: a similar key, another tool's synonym, or a key of another section."""
    lower = name.lower()
    meant = _SYNONYMS.get(lower.removeprefix("ansible_").removeprefix("ssh_"))
    if meant in model.model_fields:
        return f"did you mean {meant}?"
    if lower in model.model_fields:
        return f"did you mean {lower}?"
    for place, section in _SECTIONS.items():
        if lower in section.model_fields and section is not model and model is TopSection:
            return f"it belongs below {place}:"
    close = difflib.get_close_matches(lower[:100], model.model_fields, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(model.model_fields)}"


_SYNONYMS = {
    "host": "address", "hostname": "address", "ip": "address", "addr": "address", "slots": "gpus", "num_gpus": "gpus",
    "identity_file": "key", "identityfile": "key", "private_key": "key", "private_key_file": "key", "key_file": "key",
    "login": "user", "hosts": "nodes", "workers": "nodes", "environment": "env", "master_port": "port",
    "jump": "jump_hosts", "jump_host": "jump_hosts", "proxyjump": "jump_hosts", "proxy_jump": "jump_hosts",
    "gateway": "jump_hosts", "gateways": "jump_hosts", "bastion": "jump_hosts",
}  # fmt: skip
_SECTIONS: dict[str, type[Section]] = {"ssh": SshSection, "train": TrainSection, "services": ServicesSection}
