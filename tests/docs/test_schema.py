"""The inventory's JSON schema accepts what ``load`` accepts, and marks mistakes."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from provision.errors import InventoryError
from provision.inventory import json_schema, load

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "provision" / "inventory" / "schema.json"


class Yaml12(yaml.SafeLoader):
    """YAML 1.2, which editors read: ``off`` is a word there, not a truth value."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own name for it
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":bool")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


Yaml12.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false"), list("tf"))


def parse(text):
    return yaml.load(text, Yaml12)


NODES = {"prefix": "/opt/llm/current", "nodes": {"gpu[01-02]": "10.0.0.[1-2]"}}


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(SHIPPED.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_example_inventory_is_valid(validator):
    validator.validate(parse((ROOT / "inventory.example.yaml").read_text(encoding="utf-8")))


def test_inventories_in_the_documentation_are_valid(validator):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)]
    whole = [data for block in blocks if (data := parse(block)) and "prefix" in data and "nodes" in data]
    assert whole
    for data in whole:
        validator.validate(data)


@pytest.mark.parametrize(
    "more",
    [
        {"ssh": None, "train": None, "groups": None, "services": None, "checks": None},
        {"ssh": {"user": "root", "port": 22, "key": None, "timeout": 2.5}},
        {"ssh": {"port": "22"}},
        {"train": {"config": "sft.yaml", "env": {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": 0}}},
        {"groups": {"one": "gpu01", "both": ["gpu01", "gpu02"]}},
        {"services": {"hosts": None, "limits": {"memlock": 65536, "nofile": 4096, "shm": "50%"}, "sysctl": {}}},
        {"services": {"sysctl": {"settings": {"vm.overcommit_memory": 1}}, "nfs": {"automount": True}}},
        {"services": {"os_packages": {"bundle": {"debian12": "a.osb"}, "packages": ["chrony"]}}},
        {"checks": {"off": ["gpu.persist"], "mem.shm": {"size_gib": 8}, "net.proxy": None}},
    ],
)
def test_schema_accepts_every_inventory_that_loads(validator, tmp_path, more):
    data = NODES | more
    path = tmp_path / "inventory.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    assert load(path).nodes
    validator.validate(data)


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        ({"nodes": {"gpu01": "10.0.0.1"}}, []),
        ({"prefix": "/opt/llm/current"}, []),
        (NODES | {"prefix": "opt/llm"}, ["prefix"]),
        (NODES | {"nodes": {}}, ["nodes"]),
        (NODES | {"nodes": {"gpu01": {"user": "root"}}}, ["nodes", "gpu01"]),
        (NODES | {"nodes": {"gpu01": {"address": "10.0.0.1", "slots": 8}}}, ["nodes", "gpu01"]),
        (NODES | {"hosts": {}}, []),
        (NODES | {"ssh": {"port": 70000}}, ["ssh", "port"]),
        (NODES | {"ssh": {"timeout": 0}}, ["ssh", "timeout"]),
        (NODES | {"train": {"env": {"NCCL_DEBUG": True}}}, ["train", "env", "NCCL_DEBUG"]),
        (NODES | {"train": {"env": {"1BAD": "x"}}}, ["train", "env"]),
        (NODES | {"services": {"ntp": {}}}, ["services"]),
        (NODES | {"services": {"nfs": {"threads": 0}}}, ["services", "nfs", "threads"]),
        (NODES | {"services": {"limits": {"memlock": "much"}}}, ["services", "limits", "memlock"]),
        (NODES | {"services": {"sysctl": {"settings": {}}}}, ["services", "sysctl", "settings"]),
        (NODES | {"checks": {"off": ["gpu.nothing"]}}, ["checks", "off", 0]),
        (NODES | {"checks": {"mem.shm": {"size": 8}}}, ["checks", "mem.shm"]),
        (NODES | {"checks": {"mem.shm": {"size_gib": -1}}}, ["checks", "mem.shm", "size_gib"]),
    ],
)
def test_a_mistake_is_marked_where_load_finds_it(validator, tmp_path, broken, where):
    errors = list(validator.iter_errors(broken))
    assert [list(error.absolute_path) for error in errors] == [where]
    path = tmp_path / "inventory.yaml"
    path.write_text(yaml.safe_dump(broken), encoding="utf-8")
    with pytest.raises(InventoryError):
        load(path)


def test_the_copy_beside_an_inventory_replaces_only_an_older_schema(tmp_path):
    copy = tmp_path / json_schema.FILE
    assert json_schema.copy_beside(tmp_path / "inventory.yaml")
    assert copy.read_bytes() == SHIPPED.read_bytes()
    copy.write_text('{"title": "clusterctl inventory"}', encoding="utf-8")
    assert json_schema.copy_beside(tmp_path / "inventory.yaml")
    assert copy.read_bytes() == SHIPPED.read_bytes()
    copy.write_text('{"title": "my own"}', encoding="utf-8")
    assert not json_schema.copy_beside(tmp_path / "inventory.yaml")
    assert copy.read_text(encoding="utf-8") == '{"title": "my own"}'


def test_the_line_that_init_writes_names_a_file_that_needs_no_network():
    assert f"# yaml-language-server: $schema={json_schema.FILE}\n" == json_schema.MODELINE
    assert "/" not in json_schema.FILE
