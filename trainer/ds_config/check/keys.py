"""The keys of DeepSpeed's configuration: unknown ones, wrong types and values outside their range.

``keys.json`` is the table of one release, which ``scripts/lab/ds_keys.py`` writes. DeepSpeed refuses an unknown key in
a section with a pydantic model (``closed``) and ignores it elsewhere.
"""

from __future__ import annotations

import difflib
import functools
import json
import operator
from pathlib import Path as File
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from trainer.ds_config.check.finding import ERROR, WARNING, Finding
from trainer.ds_config.check.reading import Document, Path, plain

AUTO = "auto"
# Arguments of transformers and other programs that people write into the file, with where they belong.
ARGUMENTS = {
    "gradient_checkpointing": "it is an argument of the training: --gradient_checkpointing",
    "per_device_train_batch_size": "DeepSpeed's name is train_micro_batch_size_per_gpu",
    "micro_batch_size": "DeepSpeed's name is train_micro_batch_size_per_gpu",
    "max_grad_norm": "DeepSpeed's name is gradient_clipping",
    "learning_rate": "it is optimizer.params.lr",
    "lr": "it is optimizer.params.lr",
    "weight_decay": "it is optimizer.params.weight_decay",
    "warmup_steps": "it is scheduler.params.warmup_num_steps",
    "lr_scheduler": "DeepSpeed's name is scheduler",
    "save_steps": "it is an argument of the training: --save_steps",
    "num_train_epochs": "it is an argument of the training: --num_train_epochs",
    "distributed_type": "it belongs to the configuration of accelerate",
}
_NAMES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string", "object": "an object { }",
    "list": "a list [ ]",
}  # fmt: skip
_BOUNDS: Dict[str, Tuple[Callable[[Any, Any], bool], str]] = {
    "gt": (operator.gt, "more than"), "ge": (operator.ge, "at least"),
    "lt": (operator.lt, "less than"), "le": (operator.le, "at most"),
}  # fmt: skip
_CLOSE = 0.75
_LOSSLESS = 1 << 53


@functools.lru_cache(maxsize=1)
def table() -> Dict[str, Any]:
    """The table of DeepSpeed's keys, with its ``version``."""
    content: Dict[str, Any] = json.loads(File(__file__).with_name("keys.json").read_text(encoding="utf-8"))
    return content


def check_keys(document: Document, *, trainer: bool) -> Iterator[Finding]:
    """Findings about unknown keys, types and ranges.

    Args:
        document: the file.
        trainer: transformers fills in "auto".
    """
    if isinstance(document.data, dict):
        yield from _section(document, document.data, table()["keys"], (), closed=False, trainer=trainer)


def _section(
    document: Document, data: Dict[str, Any], keys: Dict[str, Any], path: Path, *, closed: bool, trainer: bool
) -> Iterator[Finding]:
    for name, value in data.items():
        if not closed and name.lower().strip("_/ ").startswith("comment"):
            continue  # people name remarks so
        here = (*path, name)
        key = keys.get(name)
        removed = table()["removed"].get(".".join(here))
        if removed is not None:
            why = f"DeepSpeed {table()['version']} refuses the file: {removed}"
            yield finding(document, here, ERROR, f"{'.'.join(here)} was removed from DeepSpeed", why, "remove it")
        elif key is None:
            yield _unknown(document, here, keys, closed=closed)
        elif value == AUTO:
            yield from _auto(document, here, key, trainer=trainer)
        elif isinstance(value, dict) and key["type"] in {"object", "any"}:
            if "keys" in key:
                yield from _section(document, value, key["keys"], here, closed=key["closed"], trainer=trainer)
        else:
            yield from _value(document, here, key, value, closed=closed)
        if key is not None and key.get("deprecated"):
            new = key["deprecated"]
            fix = f"write {new}" if isinstance(new, str) else "remove it"
            yield finding(document, here, WARNING, f"{'.'.join(here)} is deprecated", "", fix)


def _unknown(document: Document, path: Path, keys: Dict[str, Any], *, closed: bool) -> Finding:
    """A key that DeepSpeed does not have in this section."""
    name, dotted = path[-1], ".".join(path)
    level = ERROR if closed else WARNING
    why = "DeepSpeed refuses it" if closed else "DeepSpeed ignores it"
    if "." in name and (len(path) == 1 or closed) and _lookup(tuple(name.split("."))) is not None:
        section, _, last = name.rpartition(".")
        what = f'"{name}" is no key: DeepSpeed does not split keys at dots'
        return finding(document, path, level, what, why, f"write it as {last} in the section {section}")
    if name.lower() in ARGUMENTS:
        return finding(document, path, level, f"{dotted} is no key of DeepSpeed", why, ARGUMENTS[name.lower()])
    homes = [home for home in _homes(name) if home != path]
    close = difflib.get_close_matches(name.lower(), list(keys), n=1, cutoff=_CLOSE)
    fix = f"remove it; DeepSpeed {table()['version']} does not have it"
    if close:
        fix = f"write {close[0]}"
    elif homes:
        home = ".".join(homes[0][:-1])
        fix = f"move it into {home}" if home else "move it to the top of the file"
    return finding(document, path, level, f"{dotted} is no key of DeepSpeed", why, fix)


@functools.lru_cache(maxsize=256)
def _homes(name: str) -> Tuple[Path, ...]:
    """Where DeepSpeed has a key of this name."""
    return tuple(path for path in _paths(table()["keys"], ()) if path[-1] == name and name not in {"enabled", "type"})


def _paths(keys: Dict[str, Any], above: Path) -> Iterator[Path]:
    for name, key in keys.items():
        yield (*above, name)
        yield from _paths(key.get("keys", {}), (*above, name))


def _lookup(path: Path) -> Optional[Dict[str, Any]]:
    keys, key = table()["keys"], None
    for name in path:
        key = keys.get(name)
        if key is None:
            return None
        keys = key.get("keys", {})
    return key


def _auto(document: Document, path: Path, key: Dict[str, Any], *, trainer: bool) -> Iterator[Finding]:
    """``auto`` where transformers does not fill it in. The rule ``auto`` judges the keys that it fills in."""
    from trainer.ds_config.build import FILLED  # noqa: PLC0415 - it imports this package's parent

    dotted = ".".join(path)
    if trainer and dotted not in FILLED and key["type"] not in {"str", "any"}:
        level = WARNING if len(path) > 1 else ERROR
        why = "DeepSpeed takes its default" if len(path) > 1 else "DeepSpeed reads it as a string"
        yield finding(document, path, level, f'{dotted} is "auto", which transformers does not fill in', why,
                      "write a value, or remove the key")  # fmt: skip


def _value(document: Document, path: Path, key: Dict[str, Any], value: Any, *, closed: bool) -> Iterator[Finding]:
    """Findings about a value that is no section."""
    dotted, kind = ".".join(path), key["type"]
    if kind == "any" or (value is None and (key.get("null") or not closed)):
        return
    number = _number(value) if kind in {"int", "float"} else None
    if kind in {"int", "float"} and isinstance(value, str) and number is not None:
        level = WARNING if closed and (kind == "float" or value.strip().lstrip("+-").isdigit()) else ERROR
        why = "pydantic converts it" if level == WARNING else "DeepSpeed expects a number"
        yield finding(document, path, level, f"{dotted} is a string", why, f"write {plain(number)} without quotes")
    elif not _is_kind(value, kind):
        what = f"{dotted} must be {_NAMES[kind]}, not {_shown(value)}"
        yield finding(document, path, ERROR, what, "", _of_kind(kind, value))
        return
    tested = value if number is None else number
    choices: List[Any] = key.get("choices", [])
    if choices and tested not in choices and not (isinstance(tested, str) and tested.lower() in choices and not closed):
        known = ", ".join(str(each) for each in choices)
        close = difflib.get_close_matches(str(tested).lower(), [str(each) for each in choices], n=1)
        fix = f"write {close[0]}" if close else f"write one of {known}"
        yield finding(document, path, ERROR, f"{dotted} is {_shown(value)}, but must be one of {known}", "", fix)
    for sign, (is_right, words) in _BOUNDS.items():
        if sign in key and isinstance(tested, (int, float)) and not is_right(tested, key[sign]):
            limit = plain(key[sign])
            yield finding(document, path, ERROR, f"{dotted} is {_shown(value)}, but must be {words} {limit}", "",
                          f"write a number that is {words} {limit}")  # fmt: skip


def _is_kind(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind == "int":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer()) or _number(value) is not None
    if kind == "float":
        return isinstance(value, (int, float)) or _number(value) is not None
    return isinstance(value, {"str": str, "object": dict, "list": list}[kind])


def _of_kind(kind: str, value: Any) -> str:
    if kind == "bool":
        words = {"true": "true", "1": "true", "yes": "true", "on": "true"}
        return f"write {words.get(str(value).lower(), 'false')} without quotes"
    if kind == "object":
        return 'write { "enabled": true }' if value is True else "write an object"
    return f"write {_NAMES[kind]}"


def _number(value: Any) -> Optional[float]:
    """The number of a string; None if it is none."""
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not abs(number) <= _LOSSLESS:  # also NaN
        return None
    return int(number) if number.is_integer() else number


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


def finding(document: Document, path: Path, level: str, what: str, why: str = "", fix: str = "") -> Finding:
    """A finding at a key of the file."""
    line, column = document.place(path)
    return Finding(level, what, why, fix, line, column, ".".join(path))
