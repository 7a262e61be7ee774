"""A LLaMA-Factory config: what is wrong with it, and which files it needs on the nodes.

A *relative* path in it is relative to the config and travels with the run; an *absolute* one is a path on the nodes.
The keys are those of LLaMA-Factory 0.9.5 (``llamafactory/hparams``) and of transformers' TrainingArguments.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.run import config_keys
from provision.run.config_text import Document, read
from provision.run.luggage import LIMIT, WORK, Luggage, Travel
from provision.run.yaml_text import json_problem, read_text
from trainer.untrusted import UntrustedError, parse_json

STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
MODELS = ("model_name_or_path", "ref_model", "reward_model", "kt_weight_path", "kt_expert_checkpoint_path")
ADAPTERS = ("adapter_name_or_path", "ref_model_adapters", "reward_model_adapters")  # several, with commas between
FILES = ("deepspeed", "fsdp_config", "media_dir", "new_special_tokens_config", "hyper_parallel_args")
MAYBE = ("tokenized_path", "resume_from_checkpoint")  # taken along when there, made by the run when not
OUTPUTS = ("output_dir", "logging_dir", "cache_dir", "offload_folder", "profiler_output_dir", "swanlab_logdir")
TRAINER_LOG = "trainer_log.jsonl"
DATASET_INFO = "dataset_info.json"
_INFO = 16 << 20  # bytes of dataset_info.json
_HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MEDIA = ("images", "videos", "audios")
_PATH, _NAME = 4000, 255  # bytes of a path and of a name in it; Linux takes 4,096 with the run's folder before it
_NO_HUB = "the nodes have no internet: give a local folder, or an absolute path on the nodes"


def travel(
    config: Path,
    *,
    overrides: Sequence[str] = (),
    made: Mapping[str, bytes] | None = None,
    limit: int = LIMIT,
    any_key: bool = False,
) -> Travel:
    """Read a training config and find everything that goes with it.

    Args:
        config: the YAML file.
        overrides: ``KEY=VALUE`` as LLaMA-Factory takes them; they are written into the config that travels.
        made: files that are made here, by the name that the config or an override gives them; they lie beside it.
        limit: bytes that may travel.
        any_key: take keys that look like misspelled ones.

    Raises:
        UsageError: a mistake in the config, with its file, line and key; a file that is missing; too many bytes.
    """
    document = read(config, overrides)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", config.stem).lstrip("-.") or "train"
    luggage = Luggage(config.absolute().parent, frozenset({f"{WORK}/{name}.yaml"}))
    made = made or {}
    job = _Job(document, luggage, {}, {f"{WORK}/{each}": data for each, data in made.items()})
    job.check()
    notices = job.check_keys(any_key=any_key)
    for key in MODELS:
        job.model(key)
    for key in ADAPTERS:
        job.adapters(key)
    for key in FILES:
        job.file(key)
    for key in MAYBE:
        job.maybe(key)
    job.datasets()
    output = job.outputs()
    if document.data.get("do_train") is not True:
        notices.append(f"{config}: do_train is not set to true; LLaMA-Factory will not train")
    texts = job.texts | {f"{WORK}/{name}.yaml": document.rewritten(job.changes).encode()}
    return Travel(
        config=config,
        config_name=f"{name}.yaml",
        texts=texts,
        entries=tuple(entry for entry in luggage.pack(limit) if entry.arcname not in texts),
        progress=posixpath.normpath(posixpath.join(WORK, output, TRAINER_LOG)),
        notices=tuple(notices),
        output=posixpath.normpath(posixpath.join(WORK, output)),
        settings=document.data,
        there=tuple(dict.fromkeys(job.there())),
    )


class MisspelledKeyError(UsageError):
    """A key that looks misspelled; ``train --force`` takes it."""


@dataclass
class _Job:
    """One config being read. ``changes`` are values to replace in it, ``texts`` files that were made."""

    document: Document
    luggage: Luggage
    changes: dict[str, str]
    texts: dict[str, bytes]
    read_there: list[str] = field(default_factory=list)  # by entries of dataset_info.json

    def check(self) -> None:
        data = self.document.data
        if "model_name_or_path" not in data:
            if "distributed_type" in data and "compute_environment" in data:
                raise UsageError(
                    f"{self.document.path} is a config of accelerate's, not of LLaMA-Factory's",
                    hint=f"clusterctl train --accelerate-config {self.document.path} SCRIPT.py",
                )
            if "stage" not in data:
                raise UsageError(
                    f"{self.document.path} is not a LLaMA-Factory config: it has neither stage nor model_name_or_path"
                )
            raise UsageError(f"{self.document.path}: model_name_or_path is missing")
        if data.get("stage", "sft") not in STAGES:
            raise UsageError(f"{self.document.where('stage')}: {_shown(data['stage'])} is none of {', '.join(STAGES)}")

    def check_keys(self, *, any_key: bool) -> list[str]:
        """Refuse a misspelled key; a notice names the others that LLaMA-Factory does not have."""
        unknown = []
        for key in self.document.data:
            where = self.document.where(key)
            meant = config_keys.misspelled(key)
            if meant is not None and not any_key:
                raise MisspelledKeyError(
                    f"{where}: LLaMA-Factory {config_keys.VERSION} has no such key; did you mean {meant}?",
                    hint=f"write {meant}; if your release of LLaMA-Factory has {shown(key)}",
                )
            if meant is not None or not config_keys.is_known(key):
                unknown.append(where)
        if not unknown:
            return []
        what = "no such key and may refuse it" if len(unknown) == 1 else "no such keys and may refuse them"
        return [f"{', '.join(unknown)}: LLaMA-Factory {config_keys.VERSION} has {what}"]

    def text(self, key: str) -> str | None:
        """A path that travels: the value of ``key`` when it is one. None for absolute paths and interpolations."""
        value = self.document.data.get(key)
        if value is None or isinstance(value, (bool, dict)):
            return None
        if not isinstance(value, str) or not value:
            raise UsageError(f"{self.document.where(key)}: {_shown(value)} is not a path")
        return value if self.travels(key, value) else None

    def travels(self, key: str, value: str) -> bool:
        self.check_path(key, value)
        if value.startswith("~"):
            raise UsageError(
                f"{self.document.where(key)}: LLaMA-Factory does not expand {value}",
                hint="write the absolute path on the nodes, or a path relative to the config",
            )
        return not value.startswith("/") and "${" not in value

    def check_path(self, key: str, value: str) -> None:
        """Refuse what no file can be called, and what a log or a script would not show."""
        where = self.document.where(key)
        if not value.isprintable():
            raise UsageError(f"{where}: {shown(value)} holds a line break or a control character")
        if len(value.encode()) > _PATH or any(len(part.encode()) > _NAME for part in value.split("/")):
            raise UsageError(f"{where}: {shown(value)} is too long for a path")

    def local(self, value: str) -> Path:
        return Path(os.path.normpath(self.luggage.base / value))

    def take(self, key: str, value: str) -> str:
        """Take along what ``value`` names. Returns the path by which the config on the nodes names it."""
        path = self.local(value)
        if not path.exists():
            self.missing(key, value)
        return self.named(value, self.luggage.add(path, self.document.where(key)))

    def named(self, value: str, arcname: str) -> str:
        there = posixpath.relpath(arcname, WORK)
        return value if posixpath.normpath(value) == there and ".." not in value.split("/") else there

    def missing(self, key: str, value: str) -> None:
        where = self.document.where(key)
        elsewhere = Path.cwd() / value
        if elsewhere.exists() and elsewhere != self.local(value):
            raise UsageError(
                f"{where}: there is no {value} in {self.luggage.base}, though there is one in {Path.cwd()}",
                hint="relative paths are relative to the config: move it there, or change the path",
            )
        if key in MODELS + ADAPTERS and _HUB_ID.fullmatch(value):
            raise UsageError(
                f"{where}: {value} is not in {self.luggage.base}; it looks like a hub's model", hint=_NO_HUB
            )
        raise UsageError(
            f"{where}: there is no {value} in {self.luggage.base}",
            hint="a relative path is relative to the config and travels with the run; an absolute one is on the nodes",
        )

    def change(self, key: str, value: str) -> None:
        if value != self.document.data.get(key):
            self.changes[key] = value

    def model(self, key: str) -> None:
        value = self.text(key)
        if value is not None and not value.startswith(("http://", "https://")):  # reward_model may be a server
            self.change(key, self.take(key, value))

    def adapters(self, key: str) -> None:
        value = self.document.data.get(key)
        if not isinstance(value, str):
            return
        names = [name.strip() for name in value.split(",")]
        there = [self.take(key, name) if self.travels(key, name) else name for name in names]
        if there != names:
            self.change(key, ",".join(there))

    def file(self, key: str) -> None:
        value = self.text(key)
        if value is not None and f"{WORK}/{value}" not in self.texts:
            self.change(key, self.take(key, value))

    def maybe(self, key: str) -> None:
        value = self.text(key)
        if value is not None and self.local(value).exists():
            self.change(key, self.take(key, value))

    def outputs(self) -> str:
        for key in OUTPUTS:
            value = self.text(key)
            if value is not None and posixpath.normpath(value).split("/")[0] == "..":
                raise UsageError(
                    f"{self.document.where(key)}: {value} leads out of the run's folder",
                    hint="write a path inside it, or an absolute path on the nodes",
                )
        value = self.document.data.get("output_dir")
        if value is not None and not isinstance(value, str):
            raise UsageError(f"{self.document.where('output_dir')}: {_shown(value)} is not a path")
        if value is not None and "${" in value:
            raise UsageError(
                f"{self.document.where('output_dir')}: {value} is known on the nodes only, "
                "and clusterctl looks for checkpoints there",
                hint="write the path itself",
            )
        return value or "trainer_output"  # transformers' own default

    def there(self) -> Iterator[str]:
        """Absolute paths that are read on the nodes."""
        for key in (*MODELS, *ADAPTERS, *FILES, "dataset_dir"):
            value = self.document.data.get(key)
            names = value.split(",") if isinstance(value, str) and key in ADAPTERS else [value]
            for name in names:
                if isinstance(name, str) and name.strip().startswith("/") and "${" not in name:
                    yield posixpath.normpath(name.strip())
        yield from self.read_there

    def datasets(self) -> None:
        """``dataset_info.json`` and the files of the datasets that the config names."""
        named = [(key, name) for key in ("dataset", "eval_dataset") for name in self.names(key)]
        value = self.document.data.get("dataset_dir", "data")
        key = "dataset_dir"
        if value == "ONLINE" or str(value).startswith("REMOTE:"):
            raise UsageError(f"{self.document.where(key)}: {value} would download from a hub", hint=_NO_HUB)
        if not named or not isinstance(value, str) or not self.travels(key, value):
            return
        folder = self.local(value)
        if not (folder / DATASET_INFO).exists():
            self.missing(key, posixpath.join(value, DATASET_INFO))
        arcname = self.luggage.place(folder)
        if key in self.document.data:
            self.change(key, self.named(value, arcname))
        info = self.info(folder / DATASET_INFO)
        written = dict(info)
        for by, name in named:
            if name not in info:
                known = ", ".join(map(shown, sorted(info)[:20])) or "none"
                raise UsageError(
                    f"{self.document.where(by)}: {shown(name)} is not in {folder / DATASET_INFO}; it has {known}",
                    hint="add it there, or correct the name",
                )
            written[name] = self.dataset(by, name, info[name], folder, arcname)
        if written == info:
            self.luggage.add(folder / DATASET_INFO, self.document.where(key))
        else:
            self.texts[f"{arcname}/{DATASET_INFO}"] = json.dumps(written, indent=2, ensure_ascii=False).encode()
        if "media_dir" not in self.document.data and any(self.has_media(info[name]) for _, name in named):
            self.luggage.add(folder, self.document.where(key))  # LLaMA-Factory looks for media there

    def names(self, key: str) -> list[str]:
        value = self.document.data.get(key)
        if value is None:
            return []
        if not isinstance(value, (str, list)):
            raise UsageError(f"{self.document.where(key)}: {_shown(value)} is not the name of a dataset")
        return [str(name).strip() for name in (value.split(",") if isinstance(value, str) else value)]

    def info(self, path: Path) -> dict[str, Any]:
        text = read_text(path, limit=_INFO)
        try:
            info = parse_json(text, limit=_INFO)
        except UntrustedError as error:
            raise UsageError(json_problem(path, error)) from error
        if not isinstance(info, dict):
            raise UsageError(f"{path} is no JSON object with one entry for each dataset")
        return info

    def has_media(self, entry: dict[str, Any]) -> bool:
        columns = entry.get("columns")
        return isinstance(columns, dict) and any(kind in columns for kind in _MEDIA)

    def dataset(self, key: str, name: str, entry: Any, folder: Path, arcname: str) -> dict[str, Any]:
        """One dataset's entry, as it is to be on the nodes."""
        where = f"{self.document.where(key)}: {name} in {folder / DATASET_INFO}"
        if not isinstance(entry, dict):
            raise UsageError(f"{where} is no JSON object")
        source = next((field for field in ("file_name", "script_url") if isinstance(entry.get(field), str)), None)
        if source is None:
            kept = [str(entry[hub]) for hub in _HUBS if hub in entry]
            if kept and all(url.startswith("/") for url in kept):
                self.read_there += kept
                return entry
            what = f"comes from a hub ({kept[0]})" if kept else "has no file_name"
            raise UsageError(f"{where} {what}", hint="download it, and give the local file as file_name")
        there = {field: value for field, value in entry.items() if field not in _HUBS}  # a hub would be asked first
        value = entry[source]
        self.check_path(key, value)
        if not value.startswith("/"):
            path = Path(os.path.normpath(folder / value))
            if not path.exists():
                raise UsageError(f"{where}: there is no {path}")
            if not (path.is_relative_to(folder) and ".." not in Path(value).parts):
                there[source] = posixpath.relpath(self.luggage.place(path), arcname)
            self.luggage.add(path, self.document.where(key))
        else:
            self.read_there.append(posixpath.normpath(value))
        return there


def _shown(value: object) -> str:
    """A value as a message may quote it."""
    return shown(repr(value))
