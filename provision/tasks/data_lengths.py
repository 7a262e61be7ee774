"""Measures the lengths of a LLaMA-Factory configuration's samples, from a bounded part of its files.

At most ``SAMPLES`` records of at most ``PART`` bytes of each data set are read, evenly spaced. They are tokenized with
the model's ``tokenizer.json`` if the package ``tokenizers`` is installed here; otherwise a token counts as four bytes.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from provision.errors import UsageError
from provision.run.config_text import Document, json_problem, read_text
from trainer.agent.contract.untrusted import UntrustedError, parse_json, whole
from trainer.plan.lengths import Lengths

SAMPLES = 20_000  # records of all data sets together
PART = 64 << 20  # bytes of a data set
_INFO = 16 << 20  # bytes of dataset_info.json
_RECORD = 1 << 20  # characters of a record that are counted
_FILES = 1000  # of a data set that is a folder
_BYTES = 4.0  # per token, if no tokenizer is known
_MESSAGE = 5  # tokens of a template around each message: <|im_start|>user, a line end, <|im_end|>, a line end
# Of LLaMA-Factory 0.9.5's templates (``data/template.py``): a question and an answer without their texts, and what a
# record without a system prompt gets.
_PAIRS = dict.fromkeys(
    ("qwen", "qwen3", "qwen3_nothink", "qwen2_vl"),
    "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n",
)
_HELPFUL = "You are a helpful assistant."
_ASSISTANT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_SYSTEMS = {
    "qwen": f"You are Qwen, created by Alibaba Cloud. {_HELPFUL}",
    "qwen2_vl": _HELPFUL,
    **dict.fromkeys(("llava", "llava_next", "vicuna"), _ASSISTANT),
}
_MEDIA = ("images", "videos", "audios")
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}

Count = Callable[[str], int]


def measure(document: Document, model: Path | None, *, samples: int = SAMPLES) -> tuple[Lengths, bool]:
    """The lengths of a configuration's training data, and whether samples have images, videos or sounds.

    Args:
        document: the configuration.
        model: the model's folder; None: it is not on this machine.
        samples: the most records to count.

    Raises:
        UsageError: the data is not on this machine or cannot be read.
    """
    folder, entries = _datasets(document)
    count = _tokenizer(model)
    around = _around(document, count or _estimate)
    tokens: list[int] = []
    total, media = 0, False
    for name, entry in entries.items():
        records, known = _records(folder, name, entry)
        limit = _limit(document, known)
        step = max(1, -(-min(len(records), limit) * len(entries) // samples))
        tokens += [_length(record, entry, count or _estimate, around) for record in records[:limit:step]]
        total += limit
        columns = entry.get("columns")
        media = media or (isinstance(columns, Mapping) and any(kind in columns for kind in _MEDIA))
    if not tokens:
        raise UsageError(f"{document.where('dataset')}: the data has no records")
    return Lengths(tuple(max(1, each) for each in tokens), total, count is not None), media


def _limit(document: Document, known: int) -> int:
    return whole(document.data.get("max_samples"), known, 1) or known


def _datasets(document: Document) -> tuple[Path, dict[str, Mapping[str, Any]]]:
    """The folder of the data, and the entries of its data sets by their names."""
    value, names = document.data.get("dataset_dir", "data"), document.data.get("dataset")
    if not isinstance(value, str) or value == "ONLINE" or value.startswith("REMOTE:"):
        raise UsageError(f"{document.where('dataset_dir')}: the data is not on this machine", hint=_hint())
    if not isinstance(names, (str, list)):
        raise UsageError(f"{document.where('dataset')}: no data set is named")
    listed = [str(each).strip() for each in (names.split(",") if isinstance(names, str) else names)]
    folder = Path(os.path.normpath(document.path.absolute().parent / value))
    file = folder / "dataset_info.json"
    if not file.exists():
        raise UsageError(f"{document.where('dataset_dir')}: {file} is not on this machine", hint=_hint())
    try:
        info = parse_json(read_text(file, limit=_INFO), limit=_INFO)
    except UntrustedError as error:
        raise UsageError(json_problem(file, error)) from error
    entries = {name: info.get(name) if isinstance(info, dict) else None for name in listed}
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
            raise UsageError(f"{document.where('dataset')}: {name} has no file_name in {file}", hint=_hint())
    return folder, {name: entry for name, entry in entries.items() if isinstance(entry, dict)}


def _hint() -> str:
    return "plan needs the lengths of the samples: run it where the data is, or on a copy of a part of it"


def _records(folder: Path, name: str, entry: Mapping[str, Any]) -> tuple[list[Any], int]:
    """The records in the first part of a data set, and the number of all its records, scaled by its size."""
    path = folder / str(entry["file_name"])
    files = sorted(each for each in path.iterdir() if each.is_file())[:_FILES] if path.is_dir() else [path]
    found: list[Any] = []
    read = size = 0
    try:
        for file in files:
            size += file.stat().st_size
            if read < PART:
                records, used = read_records(file, PART - read)
                found, read = found + records, read + used
    except OSError as error:
        raise UsageError(f"data set {name}: {path} cannot be read: {error.strerror}", hint=_hint()) from error
    return found, round(len(found) * size / read) if read else 0


def read_records(file: Path, limit: int) -> tuple[list[Any], int]:
    """The records in the first ``limit`` bytes of a .json, .jsonl or .txt file, and the bytes that they take.

    Raises:
        UsageError: it is another kind of file, or has no records.
        OSError: it cannot be read.
    """
    if file.suffix.lower() not in {".json", ".jsonl", ".txt"}:
        raise UsageError(f"{file}: plan reads .json, .jsonl and .txt", hint="convert a part of it to .jsonl")
    with file.open("rb") as opened:
        data = opened.read(limit)
    text = data.decode("utf-8", "replace")
    if file.suffix.lower() == ".txt":
        rows: list[Any] = [{"text": row} for row in text.splitlines() if row.strip()]
    else:
        rows = list(_objects(text))
    if not rows:
        raise UsageError(f"{file} has no records that can be read")
    return rows, len(data)


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of an array or of lines. The last one may be cut off."""
    decoder = json.JSONDecoder()
    at = 0
    while (at := text.find("{", at)) >= 0:
        try:
            record, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield record


def _tokenizer(model: Path | None) -> Count | None:
    """Counts tokens with a model's tokenizer; None if it or the package is missing."""
    file = model / "tokenizer.json" if model is not None else None
    if file is None or not file.is_file():
        return None
    try:
        loaded = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    except ImportError:
        return None
    except Exception as error:  # the package's own errors have no narrower class
        raise UsageError(f"{file} is not a tokenizer: {str(error)[:200]}") from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def _estimate(text: str) -> int:
    return round(len(text.encode("utf-8", "replace")) / _BYTES)


def _around(document: Document, count: Count) -> tuple[float, int]:
    """Tokens that the template adds to each message, and to a record without a system prompt."""
    if document.data.get("stage") == "pt":
        return 0.5, 0  # the end of the text
    template = str(document.data.get("template"))
    system = document.data.get("default_system") or _SYSTEMS.get(template, "")
    message = count(_PAIRS[template]) / 2 if template in _PAIRS and count is not _estimate else _MESSAGE
    return message, round(count(str(system)) + message) if system else 0


def _length(record: Any, entry: Mapping[str, Any], count: Count, around: tuple[float, int]) -> int:
    """Tokens of a record with its template."""
    system, texts = _texts(record, entry) if isinstance(record, Mapping) else ([], [])
    message, without = around
    added = 0 if system or not texts else without
    return added + round(sum(count(text[:_RECORD]) + message for text in (*system, *texts)))


def _texts(record: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The system prompt and the messages of a record, in one of LLaMA-Factory's formats (``data/parser.py``)."""
    if set(record) == {"text"} and isinstance(record["text"], str):
        return [], [record["text"]]
    given, tags = entry.get("columns"), entry.get("tags")
    names = given if isinstance(given, Mapping) else {}
    if entry.get("formatting", "alpaca") == "alpaca":
        columns = names or _COLUMNS
        before = [each for turn in _list(record, columns, "history") if isinstance(turn, list) for each in turn[:2]]
        question = "\n".join((*_column(record, columns, "prompt"), *_column(record, columns, "query")))
        texts = [*map(str, before), question, *_column(record, columns, "response")]
        return _column(record, columns, "system"), texts
    openai = entry.get("formatting") == "openai"
    content = tags.get("content_tag") if isinstance(tags, Mapping) else None
    content = str(content or ("content" if openai else "value"))
    messages = _list(record, {**_COLUMNS, **names}, "messages")
    texts = [str(each.get(content) or "") for each in messages if isinstance(each, Mapping)]
    return _column(record, names, "system"), texts


def _column(record: Mapping[str, Any], columns: Mapping[str, Any], key: str) -> list[str]:
    """The texts of a column, none if it is empty."""
    value = record.get(str(columns.get(key)))
    return [str(each) for each in (value if isinstance(value, list) else [value]) if each]


def _list(record: Mapping[str, Any], columns: Mapping[str, Any], key: str) -> list[Any]:
    value = record.get(str(columns.get(key)))
    return value if isinstance(value, list) else []
