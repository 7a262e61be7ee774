"""The inventory's JSON schema: editors complete keys with it and mark mistakes while the user types.

``scripts/pages/schema.py`` writes it to ``schema.json``, next to this module. ``clusterctl init`` copies that file to
the inventory's folder, because an editor without a network can only read a local schema. The schema accepts every
inventory that ``load`` accepts; ``load`` finds more mistakes, such as two nodes with one address.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from provision import checks, services
from provision.inventory.schema import NodeSection, Section, SshSection, Text, TopSection, TrainSection

FILE = "inventory.schema.json"  # next to an inventory
MODELINE = f"# yaml-language-server: $schema={FILE}\n"
TITLE = "clusterctl inventory"
_SHIPPED = Path(__file__).with_name("schema.json")


def build() -> dict[str, Any]:
    """The schema, from the models that ``load`` uses. Imports every check and every service."""
    text = TypeAdapter(Text).json_schema()
    node = {"anyOf": [text, _section(NodeSection)]}
    properties: dict[str, Any] = {
        "prefix": {"type": "string", "pattern": "^ */", "description": "the environment's path on every node"},
        "nodes": {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": node,
            "description": "NAME: ADDRESS, or a mapping; names and addresses may be ranges, such as gpu[01-04]",
        },
        "ssh": _optional(_section(SshSection), "how the nodes are reached"),
        "train": _optional(_section(TrainSection), "defaults of `clusterctl train`"),
        "groups": _optional(
            {"type": "object", "additionalProperties": {"anyOf": [text, {"type": "array", "items": text}]}},
            "names for sets of nodes",
        ),
        "services": _optional(_closed({name: _service(name) for name in services.names()}), "what `deploy` sets up"),
        "checks": _optional(_closed(_checks()), "thresholds of `clusterctl check`, and the checks to skip"),
        "textfile": _optional(
            {"type": "string", "pattern": "^ */"}, "on every node, the folder of node_exporter's textfile collector"
        ),
        "notify": _optional(text, "shell command for ends, failures, restarts, hangs, slowdowns and full disks"),
    }
    assert properties.keys() == TopSection.model_fields.keys()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": TITLE,
        **_closed(properties),
        "required": ["prefix", "nodes"],
    }


def copy_beside(inventory: Path) -> bool:
    """Write the schema next to an inventory. Replaces an older schema, but no other file.

    Returns:
        Whether ``inventory.schema.json`` is now the inventory's schema.

    Raises:
        OSError: the file cannot be read or written.
    """
    path = inventory.parent / FILE
    if path.exists() and f'"title": "{TITLE}"' not in path.read_text(encoding="utf-8", errors="replace"):
        return False
    path.write_bytes(_SHIPPED.read_bytes())
    return True


def _section(model: type[Section]) -> dict[str, Any]:
    """A section's schema. Every optional key may have no value, as in ``load``."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    keys = {name: _key(value) for name, value in schema.get("properties", {}).items()}
    closed = _closed({name: key if name in required else _optional(key) for name, key in keys.items()})
    return {**closed, "required": required} if required else closed


def _key(schema: dict[str, Any]) -> dict[str, Any]:
    """A key's schema, from pydantic's: without null, which ``_optional`` adds, and closed to names of another form."""
    about = {key: schema[key] for key in ("description", "default") if schema.get(key) is not None}
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind != {"type": "null"}]
    kind = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    closed = {"additionalProperties": False} if "patternProperties" in kind else {}
    return {**{key: value for key, value in kind.items() if key not in {"title", "default"}}, **closed, **about}


def _service(name: str) -> dict[str, Any]:
    service = services.get(name)
    return _optional(_section(service.Options), service.ABOUT)


def _checks() -> dict[str, Any]:
    ids = sorted(checks.ids())
    off = {"type": "array", "items": {"enum": ids}, "description": "checks that are skipped"}
    found: dict[str, Any] = {"off": _optional(off)}
    for each in ids:
        check = checks.load(each)
        found[each] = _optional(
            _closed({key: {"type": "number", "minimum": 0, "default": value} for key, value in check.limits.items()}),
            check.title,
        )
    return found


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _optional(schema: dict[str, Any], description: str = "") -> dict[str, Any]:
    """The schema with null. A list of types instead of ``anyOf`` keeps an editor's mark at the key that is wrong."""
    about = {"description": description} if description else {}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}], **about}
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": [*types, "null"], **about}
