"""What a run was started with and on, for its record: settings, variables, files, data, packages and hardware. Pure.

Equal nodes are one entry, so that the record of 1,000 nodes stays small. Secrets are masked, and each part is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from provision.masking import HIDDEN, mask_env, mask_text, mask_words

if TYPE_CHECKING:
    from provision.model import CommandLine
    from provision.run.files import RunFiles
    from provision.run.readiness import Content
    from provision.run.spec import Facts

STARTED_WITH = ("options", "settings", "variables", "files", "files_omitted", "data")
FILES = 2000  # digests of files in a record
SETTINGS = 2000  # values of a configuration
LONG = 2000  # characters of a value
_DEEP = 8  # levels of a configuration
_DIGEST = 16  # digits of a digest
# Options that select nodes, or say how the command follows the run. They cannot be a cause.
_NO_CAUSE = {"--inventory", "--limit", "--exclude", "--nodes", "--name", "--detach", "--json", "--quiet", "--notify"}
_ELSEWHERE = {"--env"}  # its variables are a part of the record


def started_with(
    typed: CommandLine, variables: Mapping[str, str], files: RunFiles, content: Mapping[str, Content]
) -> dict[str, Any]:
    """What the user chose.

    Args:
        typed: the command line of ``train``.
        variables: the inventory's variables and those of ``--env``.
        files: the files that the run sends.
        content: by path, the data and models on the first node.
    """
    digests = sorted(files.digests.items())
    options = {name: mask_words(values) for name, values in typed.options.items() if name not in _NO_CAUSE | _ELSEWHERE}
    return {
        "options": options if typed.command == "train" else {},
        "settings": dict(islice(flat_settings(files.settings), SETTINGS)),
        "variables": mask_env(variables),
        "files": {name: digest[:_DIGEST] for name, digest in digests[:FILES]},
        "files_omitted": max(0, len(digests) - FILES),
        "data": {path: _content(each) for path, each in islice(content.items(), FILES)},
    }


def started_on(facts: Mapping[str, Facts]) -> dict[str, Any]:
    """The nodes' packages and hardware, by the facts of each node."""
    return {
        "packages": _alike({name: dict(each.versions) for name, each in facts.items()}),
        "hardware": _alike({name: _machine(each) for name, each in facts.items()}),
    }


def _machine(facts: Facts) -> dict[str, str]:
    ports = [
        f"{port.get('rate') or 0:g} Gb/s {port.get('link_layer')}"
        for port in facts.infiniband
        if port.get("state") == "ACTIVE" and isinstance(port.get("rate"), int | float)
    ]
    return {
        "Python": facts.python,
        "cores": str(facts.cpus),
        **({"number of GPUs": str(facts.gpus)} if facts.gpus else {}),
        **(
            {"network ports": ", ".join(f"{ports.count(each)} x {each}" for each in sorted(set(ports)))}
            if ports
            else {}
        ),
        **{name: value[:LONG] for name, value in facts.hardware.items()},
    }


def _alike(values: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """The nodes grouped by equal values, in the order of their ranks."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, each in values.items():
        groups.setdefault(tuple(sorted(each.items())), []).append(name)
    return [{"nodes": names, "values": dict(key)} for key, names in groups.items()]


def _content(content: Content) -> str:
    """The data at a path: equal texts mean equal names and sizes, and equal content where it was read."""
    digest = content.names[:_DIGEST] if content.partial else f"{content.names[:_DIGEST]} {content.content[:_DIGEST]}"
    return f"{content.files} files, {content.bytes} bytes, {digest.strip() or content.error or content.state}"


def flat_settings(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a configuration by their paths, without secrets: numbers, words, and texts for anything else."""
    for key, value in flat("", content):
        word = mask_words([f"{key.rpartition('.')[2]}={value}"])[0].partition("=")[2]
        if word == HIDDEN or not isinstance(value, bool | int | float | None):
            yield key, HIDDEN if word == HIDDEN else shown(value)
        else:
            yield key, value


def flat(path: str, content: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """The values of mappings, also of those in lists, so that each has the name that shows whether it is a secret."""
    if isinstance(content, Mapping):
        inner: Sequence[tuple[Any, Any]] = list(content.items())
    elif isinstance(content, list) and any(isinstance(each, dict | list) for each in content):
        inner = list(enumerate(content))
    else:
        yield path, content
        return
    if depth == _DEEP:
        yield path, "\N{HORIZONTAL ELLIPSIS}"
        return
    for key, value in inner:
        yield from flat(f"{path}.{key}" if path else str(key), value, depth + 1)


def shown(value: object) -> str:
    """A value as bounded text without secrets."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return mask_text(text)[:LONG]
