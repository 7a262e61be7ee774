"""Any text is an inventory or an InventoryError with places, quickly: no traceback, no unbounded time or memory."""

# ruff: noqa: E501, PT017 - what a property asks of an exception, and of none

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from provision.errors import InventoryError, UsageError
from provision.inventory import load, select
from provision.inventory.names import check_address
from provision.inventory.schema import as_seconds, as_user
from provision.model import Inventory, Node

EXAMPLE = (Path(__file__).parents[2] / "inventory.example.yaml").read_text()
HEAD = "prefix: /opt/llm/current\n"
NODES = "nodes: {gpu01: 192.168.20.14, gpu02: 192.168.20.15}\n"
pytestmark = pytest.mark.timeout(3600)  # the nightly profile has 10,000 examples
FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

LOADS = """
import json, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from provision.errors import UsageError
from provision.inventory import load, select
said = {}
for name, limit in json.loads(sys.argv[1]).items():
    said[name] = ""
    try:
        select(load(Path(name)), limit=limit)
    except UsageError as error:
        said[name] = " | ".join([str(error), *getattr(error, "problems", ())])
    print(json.dumps(said), flush=True)
"""

LAYERS = "".join(f"a{n}: &a{n} {{{', '.join(f'k{m}: *a{n - 1}' for m in range(9))}}}\n" for n in range(1, 12))
REFUSED = {
    "numbers": (HEAD + "nodes:\n  ? gpu[" + ",".join(["1-4096"] * 20_000) + "]\n  : h\n", "more than 4096 numbers"),
    "long name": (
        HEAD + "nodes:\n  ? " + "g" * 300_000 + "[1-4096]\n  : h\n",
        "is too long: more than 1000 characters",
    ),
    "nodes": (HEAD + "nodes:\n" + "".join(f"  a{n}x[1-4096]: h\n" for n in range(3000)), "makes more than 4096 nodes"),
    "mistakes": (HEAD + NODES + "".join(f"key{n}: x\n" for n in range(10_000)), "and 9,900 more"),
    "checks": (HEAD + NODES + "checks: {off: [" + "gpu.persits, " * 10_000 + "]}", "has more than 1,000 checks"),
    "chain": (
        HEAD + NODES + "groups: {" + ", ".join(f"a{n}: '@a{n + 1}'" for n in range(990)) + "}",
        "there is no group @a990",
    ),
    "groups": (
        HEAD + NODES + "groups: {" + ", ".join(f"a{n}: '@all'" for n in range(2000)) + "}",
        "more than 1,000 groups",
    ),
    "flow": (HEAD + "x: " + "[" * 10_000, "nested too deeply"),
    "block": (HEAD + "x:\n" + "".join(" " * n + "a:\n" for n in range(1, 1300)), "nested too deeply"),
    "aliases": ("a0: &a0 {k: v}\n" + LAYERS, "more than 50,000 values"),
    "merges": (
        "a: &a {" + ", ".join(f"k{n}: v" for n in range(900)) + "}\nb: {<<: [" + "*a, " * 2000 + "]}\n",
        "more than 50,000 values",
    ),
}
LIMITS = ["gpu[1-999999999]", "gpu[1-4000][1-4000]", "gpu[1-4000,1-4000,1-4000]"]


@pytest.fixture(scope="module")
def message(tmp_path_factory):
    """The results of one process with a minute of CPU time and 1 GiB; it is killed beyond these limits."""
    folder = tmp_path_factory.mktemp("hostile")
    texts = {name: text for name, (text, _) in REFUSED.items()} | dict.fromkeys(LIMITS, HEAD + NODES)
    texts["many"] = HEAD + "nodes:\n" + "".join(f"  gpu{n:04}: 10.0.{n // 256}.{n % 256}\n" for n in range(4096))
    for name, text in texts.items():
        (folder / name).write_text(text)
    wanted = {str(folder / name): name if name in LIMITS else None for name in texts}
    argv = [sys.executable, "-c", LOADS, json.dumps(wanted)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    found = {Path(path).name: text for path, text in json.loads(lines[-1] if lines else "{}").items()}
    return lambda name: found[name] if name in found else pytest.fail(f"{done.returncode}: {done.stderr[-2000:]}")


def problems_of(tmp_path, text):
    path = tmp_path / "inventory.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InventoryError) as caught:
        load(path)
    return caught.value.problems


@pytest.mark.parametrize("name", REFUSED)
def test_short_texts_that_expand_hugely_are_refused_quickly(message, name):
    assert REFUSED[name][1] in message(name)


def test_largest_allowed_number_of_nodes(message):
    """The search for typing errors in addresses took minutes for these."""
    assert message("many") == ""


@pytest.mark.parametrize("size", [1 << 20, 100 << 20])
def test_a_large_file_is_refused_unread(tmp_path, size):
    path = tmp_path / "inventory.yaml"
    with path.open("wb") as file:
        file.write((HEAD + NODES).encode())
        file.truncate(size + 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InventoryError, match="is larger than 1 MiB: it is not an inventory"):
        load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


@pytest.mark.parametrize("limit", LIMITS)
def test_limit_that_expands_hugely_is_refused_quickly(message, limit):
    assert "has more than 4096" in message(limit)


@pytest.mark.parametrize(
    "user",
    ["-oProxyCommand=x", "a b", "a\tb", "a;id", "$(id)", "`id`", "a|b", "a&b", "%h", "root%r", "a'b", 'a"b', "a\\", "a:b", "~a"],
)  # fmt: skip
def test_login_name_with_special_characters_is_refused(user):
    with pytest.raises(ValueError, match=r"login name|control character"):
        as_user(user)


@pytest.mark.parametrize("user", ["root", "ü", "CORP\\ada", "ada@corp.example", "svc-1", "_x", "1000", "a.b"])
def test_valid_login_names(user):
    assert as_user(user) == user


@pytest.mark.parametrize("address", ["fe80::1%$(id)", "fe80::1%;id", "fe80::1%eth0 x", "fe80::1%", "-oX", "h;id", "%h"])
def test_address_with_special_characters_is_refused(address):
    with pytest.raises(ValueError, match=r"is not an IPv6 address|neither a host name"):
        check_address(address)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "1e9", "1_0", "٣", "0.01", "99999", "1e-300"])
def test_invalid_seconds(text):
    with pytest.raises(ValueError, match=r"is not a number of seconds \(0.1 to 3600\)"):
        as_seconds(text)


@pytest.mark.parametrize(("text", "seconds"), [("10", 10), ("0.5", 0.5), (".5", 0.5), ("1e3", 1000)])
def test_valid_seconds(text, seconds):
    assert as_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + NODES + "ssh: {key: " + "a" * 256 + "}", "is too long for a path"),
        (HEAD + NODES + "ssh: {user: " + "a" * 5000 + "}", "is longer than 4,096 characters"),
        (f"prefix: /{'a' * 256}/current\n{NODES}", "is too long for a path"),
        (HEAD + NODES + "train: {env: {A: " + "a" * 70_000 + "}}", "is longer than 65,536 bytes"),
        (HEAD + NODES + "checks: {mem.shm: {size_gib: 1.0e999}}", "must be a number"),
        (HEAD + NODES + "checks: {mem.shm: {size_gib: .inf}}", "must be a number"),
        (HEAD + NODES + "checks: {mem.shm: {size_gib: -1}}", "must not be negative"),
    ],
)
def test_every_value_has_a_limit(tmp_path, text, message):
    (problem,) = problems_of(tmp_path, text)
    assert message in problem
    assert len(problem) < 300


# --- any text ------------------------------------------------------------------------------------------

HOSTILE = st.sampled_from(
    [
        "-oProxyCommand=id", "$(id)", "`id`", "a;b", "%h", "%", "~", "~nobody-here/x", "a\\", "\x1b[31m", "\0", "\r", "\n", "\x85",
        "\u2028", "\ufeff", "\ud800", "'", '"', "*a", "&a", "@a", "@all", "!a", "gpu[1-999999999]", "gpu[01-04]", "gpu*", "[::1]:22",
        "root@h:22", "a@b@c:1:2", "::1%eth0", "0", "-1", "99999", "1e3", "nan", ".inf", "1.0e999", "true", "null", "0x10", "1_0", "\u0661",
        "<<", "!!python/object:os.system", "!vault", "10.0.0.300", "local", "x" * 300, "9" * 5000, "/" * 300, "[" * 50, "{a: {a: ",
    ]
)  # fmt: skip
LINES = EXAMPLE.splitlines(keepends=True)


@st.composite
def mutations(draw):
    """The example with a few lines or pieces removed, repeated, moved, or written over."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        kind = draw(st.sampled_from(["value", "key", "insert", "drop", "repeat", "indent", "crlf", "cut"]))
        if kind == "value":
            lines[at] = line.partition(":")[0] + ": " + draw(HOSTILE | st.text(max_size=20)) + "\n"
        elif kind == "key":
            lines[at] = "  " + draw(HOSTILE) + ":" + line.partition(":")[2]
        elif kind == "insert":
            where = draw(st.integers(0, len(line)))
            lines[at] = line[:where] + draw(HOSTILE | st.text(max_size=8)) + line[where:]
        elif kind == "drop":
            lines[at] = ""
        elif kind == "repeat":
            lines[at] = line * 2
        elif kind == "indent":
            lines[at] = draw(st.sampled_from(["\t", " ", "      "])) + line.lstrip()
        elif kind == "crlf":
            lines = [each.replace("\n", "\r\n") for each in lines]
        else:
            lines[at] = line[: draw(st.integers(0, len(line)))]
    return "".join(lines)


def loads_or_says_why(tmp_path, raw):
    path = tmp_path / "any.yaml"
    path.write_bytes(raw)
    try:
        inventory = load(path)
    except InventoryError as error:
        assert error.hint
        assert all(problem.isprintable() for problem in error.problems)
        return
    for node in inventory.nodes:
        assert not node.address.startswith("-")
        assert not (node.user or "").startswith("-")
        assert 1 <= (node.port or 22) <= 65535
    for name, members in inventory.groups.items():
        assert {node.name for node in select(inventory, limit=f"@{name}")} == set(members)


@FUZZ
@given(mutations())
def test_any_mutation_of_the_example(tmp_path, text):
    loads_or_says_why(tmp_path, text.encode("utf-8", "surrogatepass"))


VALUES = HOSTILE | st.text(max_size=30) | st.none() | st.booleans() | st.integers() | st.floats()
KEYS = st.sampled_from(
    ["prefix", "nodes", "groups", "ssh", "train", "services", "checks", "user", "port", "key", "known_hosts", "timeout",
     "address", "data_address", "gpus", "env", "config", "off", "mem.shm", "size_gib", "gpu[01-02]", "a", "nfs", "limits"]
)  # fmt: skip
TREES = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | HOSTILE, inner, max_size=5),
    max_leaves=15,
)


def as_yaml(value):
    """Flow YAML with every text in quotes, where any character may be written."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_yaml(str(key))}: {as_yaml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    if isinstance(value, str):
        safe = [each if each.isascii() and each.isalnum() else f"\\U{ord(each):08x}" for each in value]
        return '"' + "".join(safe) + '"'
    return {None: "", True: "true", False: "false"}.get(value, str(value))


@FUZZ
@example(None, {"\x1b[31m": "-oProxyCommand=id"}, {}, [])
@given(TREES, TREES, TREES, TREES)
def test_any_values(tmp_path, one, two, three, four):
    top = {"prefix": "/opt/a/b", "nodes": {"a": one, "b[1-2]": two}, "groups": {"g": three, "h": four}}
    for changed in (top, {**top, "nodes": {"a": "h"}, "ssh": one, "train": two}, {**top, "nodes": one, "checks": two}):
        loads_or_says_why(tmp_path, as_yaml(changed).encode())


@FUZZ
@given(st.lists(HOSTILE | st.sampled_from([",", "!", "&", "@g", "gpu*", "*", "?", " ", "[1-2]", "gpu01"]), max_size=8))
def test_any_limit(parts):
    inventory = Inventory(
        Path("/x/inventory.yaml"),
        PurePosixPath("/opt/llm/current"),
        (Node("gpu01", "192.168.20.14"), Node("gpu02", "192.168.20.15")),
        groups={"g": ("gpu01",)},
    )
    try:
        nodes = select(inventory, limit="".join(parts))
    except UsageError as error:
        assert error.hint
        assert str(error).isprintable()
    else:
        assert set(nodes) <= set(inventory.nodes)
