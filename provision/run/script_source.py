"""Reads a script's source for its options and their defaults. The source is parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

_MODULES = 50  # of a script that are read
_BYTES = 1 << 20  # of a module
_CLI = {
    "tyro.cli",
    "fire.Fire",
    "typer.run",
    "CLI",
    "auto_cli",
    "jsonargparse.CLI",
    "tyro.extras.overridable_config_cli",
}


@dataclass(frozen=True)
class Option:
    """An option of a script.

    Attributes:
        text: as it is typed, such as ``--resume-from``, or ``resume_from=`` of Hydra.
        default: its default, if the source has it as a constant.
        flag: it takes no value.
        kind: the name of its type, such as ``int``; "" if it is not known.
        choices: the allowed values.
    """

    text: str
    default: Any = None
    flag: bool = False
    kind: str = ""
    choices: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """Its name as a variable: ``resume_from``."""
        return self.text.lstrip("-").replace("-", "_").lower()

    def with_value(self, value: str) -> str:
        """The option with a value, as typed."""
        return self.text + value if self.text.endswith("=") else f"{self.text} {value}"


@dataclass(frozen=True)
class Source:
    """The modules of a script: its own, and those of the same folder that it imports."""

    trees: tuple[ast.Module, ...] = ()
    texts: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, paths: Sequence[Path], folder: Path | None = None) -> Source:
        """Parse these modules, and those in ``folder`` that they import. What cannot be parsed is skipped."""
        trees: list[ast.Module] = []
        texts: list[str] = []
        pending, seen = list(paths), set(paths)
        while pending and len(trees) < _MODULES:
            path = pending.pop(0)
            try:
                if path.stat().st_size > _BYTES:
                    continue
                text = path.read_text(encoding="utf-8", errors="replace")
                tree = ast.parse(text)
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            trees.append(tree)
            texts.append(text)
            for each in _local(tree, path, folder) if folder is not None else ():
                if each not in seen:
                    seen.add(each)
                    pending.append(each)
        return cls(tuple(trees), tuple(texts))

    @property
    def text(self) -> str:
        """The source of all modules."""
        return "\n".join(self.texts)

    @property
    def own(self) -> Source:
        """The script's own module alone."""
        return Source(self.trees[:1], self.texts[:1])

    def walk(self) -> Iterator[ast.AST]:
        """Every node of the script's own module, then those of the others."""
        for tree in self.trees:
            yield from ast.walk(tree)

    def imports(self, name: str) -> bool:
        """Whether a module or name is imported: ``deepspeed``, ``TrainingArguments``."""
        for node in self.walk():
            if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == name for alias in node.names):
                return True
            if isinstance(node, ast.ImportFrom):
                inside = {alias.name for alias in node.names}
                if (node.module or "").partition(".")[0] == name or name in inside:
                    return True
        return False

    def globals(self) -> dict[str, Any]:
        """The constants that the script's own module assigns to names."""
        found: dict[str, Any] = {}
        for node in self.trees[0].body if self.trees else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, ast.Constant):
                found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
        return found

    def options(self) -> list[Option]:
        """The options of argparse, click, absl, and of functions and dataclasses for tyro, fire, typer and others."""
        found: list[Option] = []
        for node in self.walk():
            if isinstance(node, ast.Call):
                found += _declared(node)
        calls = {_dotted(node.func) for node in self.walk() if isinstance(node, ast.Call)}
        parsers = {"HfArgumentParser", "TrlParser", "ArgumentParser"}
        if any(call in _CLI or call.rpartition(".")[2] in ("Fire", *parsers) for call in calls) or self._click():
            nested = self._nested()
            fields = [each for node in self.walk() if getattr(node, "name", "") not in nested for each in _fields(node)]
            dashes = self.imports("typer")  # the other libraries accept both
            found += [replace(each, text=each.text.replace("_", "-")) if dashes else each for each in fields]
        if "exec(open(" in self.text.replace(" ", ""):  # nanoGPT's configurator sets globals: --NAME=VALUE
            found += [Option(f"--{name}", value, kind=type(value).__name__) for name, value in self.globals().items()]
        return found

    def defaults(self, names: Collection[str]) -> dict[str, Any]:
        """The defaults of options, by name; the script's own module has precedence."""
        found: dict[str, Any] = {}
        for option in self.options():
            if option.name in names and isinstance(option.default, str):
                found.setdefault(option.name, option.default)
        return found

    def _nested(self) -> set[str]:
        """Classes that are the type of a field in another: their options have a prefix that depends on the library."""
        inside = [node for each in self.walk() if isinstance(each, ast.ClassDef) for node in each.body]
        types = [node.annotation for node in inside if isinstance(node, ast.AnnAssign)]
        return {name.id for each in types for name in ast.walk(each) if isinstance(name, ast.Name)}

    def _click(self) -> bool:
        return self.imports("typer") or self.imports("tyro") or self.imports("jsonargparse")


def script_files(kind: str, target: str, folder: Path | None) -> list[Path]:
    """The file of a script or module in the folder that is sent."""
    if kind == "script":
        return [Path(target)]
    base = (folder or Path()) / target.replace(".", "/")
    return [path for path in (base.with_suffix(".py"), base / "__main__.py") if folder is not None and path.is_file()]


def _local(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    """Modules in the folder that a module imports."""
    for node in ast.walk(tree):
        names: list[str] = []
        bases = [path.parent, folder]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
            bases = [path.parents[min(node.level, len(path.parents)) - 1]] if node.level else bases
        for name in filter(None, names):
            for base in bases:
                for each in (base / (name.replace(".", "/") + ".py"), base / name.replace(".", "/") / "__init__.py"):
                    if each.is_file():
                        yield each


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def _constant(node: ast.AST | None) -> Any:
    """A constant, also in ``Path("out")`` and ``field(default="out")``; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "default":
                return _constant(keyword.value)
        if _dotted(node.func).rpartition(".")[2] == "Path" and len(node.args) == 1:
            return _constant(node.args[0])
    return None


def _declared(node: ast.Call) -> Iterator[Option]:
    """An option of ``add_argument``, click's ``option`` or absl's ``DEFINE_string``."""
    called = _dotted(node.func).rpartition(".")[2]
    words = [each for each in map(_constant, node.args) if isinstance(each, str)]
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    default = _constant(given.get("default"))
    kind = _dotted(given["type"]).rpartition(".")[2] if "type" in given else ""
    if called.startswith("DEFINE_") and words:
        value = _constant(node.args[1]) if len(node.args) > 1 else default
        yield Option(f"--{words[0]}", value, kind=called.removeprefix("DEFINE_"))
        return
    long = [word for word in words if word.startswith("--")] or [word for word in words if word.startswith("-")]
    if called not in ("add_argument", "option", "Option") or not long:
        return
    text = long[0].partition("/")[0]
    action = given.get("action")
    acts = str(_constant(action) or _dotted(action or ast.Pass()).rpartition(".")[2])
    flag = acts.startswith(("store_true", "store_false", "BooleanOptional")) or _constant(given.get("is_flag")) is True
    choices = given.get("choices")
    allowed = tuple(map(_constant, choices.elts)) if isinstance(choices, (ast.List, ast.Tuple)) else ()
    yield Option(text, default, flag or "/" in long[0], kind, allowed)


def _fields(node: ast.AST) -> Iterator[Option]:
    """The fields of a dataclass and the parameters of a function, as options."""
    if isinstance(node, ast.ClassDef) and any("dataclass" in ast.dump(each) for each in node.decorator_list):
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                yield Option(f"--{each.target.id}", _constant(each.value), kind=_type(each.annotation))
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in (
        "main",
        "train",
        "run",
        "cli",
        "app",
    ):
        arguments = [*node.args.posonlyargs, *node.args.args]
        defaults = [None] * (len(arguments) - len(node.args.defaults)) + list(node.args.defaults)
        pairs = [*zip(arguments, defaults, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        for argument, default in pairs:
            yield Option(f"--{argument.arg}", _constant(default), kind=_type(argument.annotation))


def _type(node: ast.AST | None) -> str:
    """The first name of an annotation that is a type: ``str`` of ``str | None``."""
    names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)] if node is not None else []
    return next((name for name in names if name in ("bool", "int", "str", "Path", "float")), "")
