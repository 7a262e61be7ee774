"""The import directions and the picture of docs/architecture.md, who may print, and how long a file may be."""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
from pathlib import Path

import pytest
from case_table import every_case

ROOT = Path(__file__).parents[2]
LONGEST = 600  # lines; a file that needs more does more than one thing

# A module's place: its folder or file below provision/. It may import from its own place and from those above it.
LAYERS = (
    {"__init__", "errors", "model"},
    # pure: everything that decides
    {"inventory", "render", "script", "env", "data", "checks", "services", "launchers", "output_text", "run", "tool"}
    | {"ospackages", "netbench", "slurm", "diagnosis", "hints", "masking", "stages", "registry", "typed", "report"}
    | {"rehearsal"},
    # what reaches nodes
    {"ssh", "sandbox", "transfer"},
    {"session"},
    {"tasks"},
    # what users call: the commands, which print, and the Python API
    {"api", "output", "screen", "cli", "summaries"},
)
PURE = LAYERS[0] | LAYERS[1]
PRINTS = {"output", "cli"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """``provision/env/scan.py`` -> ``env``, ``provision/render.py`` -> ``render``."""
    return path.relative_to(ROOT / "provision").parts[0].removesuffix(".py")


def layer(name: str) -> int | None:
    return next((index for index, names in enumerate(LAYERS) if name in names), None)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that is imported anywhere in the file, also inside functions; ``from a import b`` is ``a.b``."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folder = path.relative_to(ROOT).parts[: -node.level]
                base = ".".join([*folder, *([base] if base else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found)


@pytest.fixture(scope="module", autouse=True)
def few_collections():
    """The syntax trees have millions of objects: a garbage collection visits all of them and frees none."""
    gc.disable()
    yield
    tree.cache_clear()
    gc.enable()


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def ours(path: Path) -> set[str]:
    """The places in ``provision`` that the file imports from."""
    parts = [name.split(".") for name in imports(path) if name.partition(".")[0] == "provision"]
    folder = ROOT / "provision"
    found = set()
    for _, *rest in parts:
        module = rest[0] if rest else "__init__"
        is_module = (folder / f"{module}.py").exists() or (folder / module).is_dir()
        found.add(module if is_module else "__init__")
    return found


def test_the_finder_sees_every_kind_of_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "provision" / "env" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("import a.b\nfrom c import d\ndef f():\n    import e\nfrom . import g\nfrom ..h import i\n")
    assert imports(file) == {"a.b", "c.d", "e", "provision.env.g", "provision.h.i"}


def test_imports_go_inwards():
    found = []
    for path in sources("provision"):
        mine = layer(name_of(path))
        assert mine is not None, f"{path.name}: give it a place in LAYERS here and in docs/architecture.md"
        if outward := {name for name in ours(path) if (layer(name) or 0) > mine}:
            found.append(f"{path.relative_to(ROOT)} imports {', '.join(sorted(outward))}, which builds on it")
    assert not found, "\n".join(found)


PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PICTURE = PAGE.partition("```mermaid\n")[2].partition("```")[0]
DRAWN = ("name", "decide", "reach", "run_stages", "act", "show")  # the subgraphs, in the order of LAYERS


def test_the_picture_has_every_place_in_its_layer():
    drawn = {}
    for name, body in re.findall(r"subgraph (\w+)\[.*?\]\n(.*?)\n    end", PICTURE, re.DOTALL):
        drawn[name] = set(body.split())
    assert drawn.pop("nodes") == {"trainer"}
    assert drawn == {name: LAYERS[index] - {"__init__"} for index, name in enumerate(DRAWN)}


def test_the_picture_has_every_import_between_layers_and_no_other():
    real = set()
    for path in sources("provision"):
        mine = layer(name_of(path)) or 0
        real |= {(DRAWN[mine], DRAWN[theirs]) for theirs in map(layer, ours(path)) if theirs not in {None, mine}}
        if "trainer" in tops(path):
            real.add((DRAWN[mine], "nodes"))
    assert set(re.findall(r"(\w+) --> (\w+)", PICTURE)) == real


@every_case("file, function", re.findall(r"`((?:provision|trainer)/[\w/]+\.py):(\w+)`", PAGE))
def test_a_function_of_the_paths_exists(file, function):
    assert function in {node.name for node in ast.walk(tree(ROOT / file)) if isinstance(node, ast.FunctionDef)}


def test_the_paths_are_checked():
    paths = PAGE.partition("## Paths through the code\n")[2].partition("\n## ")[0]
    assert paths.count(".py:") == len(re.findall(r"`[\w/]+\.py:\w+`", paths)) >= 20
    for template in re.findall(r"`(templates/[^`]+)`", paths):
        assert (ROOT / template).is_file(), template


def test_model_and_errors_import_no_other_module():
    for name in ("model", "errors"):
        assert not tops(ROOT / "provision" / f"{name}.py") & {"provision", "trainer"}


LENT = {"trainer.ds_config", "trainer.plan", "trainer.reader"}  # pure, and also separate programs


def lent_part(name: str) -> str:
    """``trainer.plan`` of ``trainer.plan.rates.Rate``; of the agent, also the part."""
    return ".".join(name.split(".")[: 3 if name.startswith("trainer.agent.") else 2])


def test_provision_and_trainer_never_import_each_other():
    """But for what decides on both sides: the commands may use the trainer's pure packages."""
    for path in sources("provision"):
        theirs = {lent_part(name) for name in imports(path) if name.partition(".")[0] == "trainer"}
        lent = set(LENT) if name_of(path) in {"tasks", "cli", "diagnosis", "report"} else set()
        lent |= {"trainer.agent.checkpoints"} if name_of(path) == "run" else set()
        assert theirs <= lent | {"trainer.bounds", "trainer.words", "trainer.agent.contract"}, path
    for path in sources("trainer"):
        assert "provision" not in tops(path), path


CONNECTS = {"ssh_remote.py", "channel.py", "session.py", "client.py", "login.py"}


def test_only_the_connection_imports_fabric_and_paramiko():
    for path in sources("provision") + sources("trainer"):
        if path.parent != ROOT / "provision/ssh" or path.name not in CONNECTS:
            assert not tops(path) & {"fabric", "paramiko", "invoke"}, path.relative_to(ROOT)
    fabfile = ROOT / "fabfile.py"
    if fabfile.exists():
        assert "paramiko" not in tops(fabfile)


SHOWS = {
    "stages",
    "session",
    "output",
    "output_text",
}  # what makes the events of stages, keeps their times, prints them


def test_one_place_runs_and_shows_stages():
    """A task calls its session: it neither emits the start and end of a stage nor fans out to nodes."""
    events = {"provision.model.StageStarted", "provision.model.StageFinished"}
    for path in sources("provision"):
        if name_of(path) not in SHOWS | {"env"}:  # env: the packer's, which knows no session, still emits its own
            assert not imports(path) & events, path.relative_to(ROOT)
        if name_of(path) not in {"session", "ssh", "transfer"}:
            fans = {name for name in imports(path) if name.endswith(".fan_out")}
            assert not fans, path.relative_to(ROOT)


def test_tasks_use_no_private_names_of_others():
    for path in sources("provision/tasks") + sources("provision/session"):
        private = {name for name in imports(path) if any(part.startswith("_") for part in name.split(".")[1:])}
        assert private <= {"__future__.annotations"}, path.relative_to(ROOT)


def test_only_output_and_cli_import_rich_and_click():
    for path in sources("provision"):
        if name_of(path) not in PRINTS | {"screen"}:
            assert not tops(path) & {"rich", "click"}, path.relative_to(ROOT)


def test_the_pure_modules_open_no_connection():
    for path in sources("provision"):
        if name_of(path) in PURE:
            assert not tops(path) & {"fabric", "paramiko", "click", "rich", "socket", "asyncio"}, path.relative_to(ROOT)


def test_only_output_and_cli_print():
    for path in sources("provision"):
        if name_of(path) in PRINTS:
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Name) and node.id == "print":
                pytest.fail(f"{path.relative_to(ROOT)}:{node.lineno} prints")
            if isinstance(node, ast.Attribute) and node.attr in {"stdout", "stderr", "__stdout__", "__stderr__"}:
                is_sys = isinstance(node.value, ast.Name) and node.value.id == "sys"
                assert not is_sys, f"{path.relative_to(ROOT)}:{node.lineno} uses sys.{node.attr}"


def test_no_source_file_is_long():
    kinds = {".py", ".sh", ".j2"}
    files = [ROOT / "fabfile.py"] + [
        path for folder in ("provision", "trainer", "templates", "scripts") for path in (ROOT / folder).rglob("*")
    ]
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in files
        if path.is_file() and (path.suffix in kinds or not path.suffix) and "__pycache__" not in path.parts
    }
    assert lengths
    assert {name: count for name, count in lengths.items() if count > LONGEST} == {}


PRIVATE = re.compile(r"_[A-Za-z]\w*")
NAMES_PRIVATE = re.compile(r"\b_(?!_)\w")  # a file without any is not parsed
PUBLIC = {"_asdict", "_replace", "_exit"}  # of named tuples and ``os``
IN_TEXT = re.compile(r"\b(?:[A-Z]\w*|(?:provision|trainer)(?:\.\w+)*)\._\w+")  # of a class, or of a module's full name
SETTERS = {"setattr", "getattr", "delattr", "hasattr", "object"}  # the second argument may be a name


def defined(source: ast.AST) -> set[str]:
    """The private functions, classes, variables and attributes that a file defines."""
    found = set()
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if PRIVATE.fullmatch(name)}


@functools.cache
def private_names() -> set[str]:
    """The private names of ``provision`` and ``trainer``."""
    names = set().union(*(defined(tree(path)) for path in sources("provision") + sources("trainer")))
    return names - PUBLIC


def private_uses(source: ast.AST, names: set[str]) -> set[str]:
    """The uses of private names as attributes, in ``setattr`` and its like, in dotted strings and in programs as text.

    A test's own class may have private attributes: ``self._name`` is allowed in a file that defines ``_name``.
    """
    own = defined(source)
    found = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and node.attr in names:
            is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"} and node.attr in own
            if not is_own:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {each for each in IN_TEXT.findall(node.value) if each.rpartition(".")[2] in names}
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in SETTERS:
                texts = {each.value for each in node.args[1:2] if isinstance(each, ast.Constant)}
                found |= texts & names
    return found


def private_imports(source: ast.AST) -> set[str]:
    """The private names that ``from provision... import`` and ``from trainer... import`` bring in."""
    return {
        f"{node.module}.{alias.name}"
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in {"provision", "trainer"}
        for alias in node.names
        if any(re.match(r"_(?!_)", part) for part in [*(node.module or "").split("."), alias.name])
    }


def test_the_finder_sees_private_imports():
    source = (
        "from provision.x import _a, b\nfrom trainer._y import c\nfrom trainer import __doc__\nfrom os import _exit"
    )
    assert private_imports(ast.parse(source)) == {"provision.x._a", "trainer._y.c"}


def test_the_finder_sees_private_uses():
    source = """
import provision.x as x
x._a(), box.part._b.c, self._own, self._a
monkeypatch.setattr(x, "_a", 1)
monkeypatch.setattr("provision.x._b", 1)
PROGRAM = "Spoke._b = None"
class Own:
    def _own(self): return row._replace(a=1), "_a", torch._foreign
"""
    wanted = {"x._a", "box.part._b", "self._a", "_a", "provision.x._b", "Spoke._b"}
    assert private_uses(ast.parse(source), {"_a", "_b", "_own"}) == wanted


def test_tests_use_no_private_names():
    names, found = private_names(), {}
    for path in sources("tests"):
        text = path.read_text(encoding="utf-8")
        if not NAMES_PRIVATE.search(text):
            continue
        source = ast.parse(text, str(path))
        bad = private_imports(source)
        if path.name != Path(__file__).name:  # its texts show such uses
            bad |= private_uses(source, names)
        if bad:
            found[str(path.relative_to(ROOT))] = bad
    assert not found
