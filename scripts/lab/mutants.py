"""A mutation sample: one small change of the code at a time, and whether a test fails on it.

A mutant is the source text with one expression or statement replaced. The mutants of a group are a sample with a fixed
seed, so two runs compare. They run in a copy of the tree, in a forked process that has loaded pytest and other packages
before. A mutant is killed if a test fails, or if the tests time out: they take four times as long as without it. The
score counts both, and the output names the second. A mutant in ``EQUIVALENT`` is neither tried nor counted.

mutmut and cosmic-ray do not fit here: mutmut's mutants import mutmut, which the agent's processes on the nodes do not
have, and cosmic-ray starts pytest again for each mutant, which takes longer than most of these tests.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261124
COPIED = ("provision", "trainer", "templates", "tests", "scripts", "docs", "pyproject.toml", "inventory.example.yaml")


@dataclass(frozen=True)
class Group:
    """Modules to change, the number of mutants, and two sets of tests: the second runs if the first passes."""

    modules: tuple[str, ...]
    number: int
    first: tuple[str, ...]
    second: tuple[str, ...]


def unit(*names: str, folder: str = "tests/unit") -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py" for name in names)


PACKER = "tests/unit/env"
GROUPS = {
    "quoting": Group(
        ("provision/render.py", "provision/script.py"),
        80,
        unit("script", "render"),
        (*unit("compiled_scripts", folder="tests/sh"), "tests/golden/test_scripts.py"),
    ),
    "checkpoints": Group(
        ("trainer/agent/checkpoints/*.py",), 80, unit("agent_checkpoints", "checkpoint_layouts"), unit("agent_hostile")
    ),
    "link": Group(
        ("trainer/agent/link/*.py",),
        90,
        unit("agent_copying", "agent_link_hostile"),
        unit("agent_links", "agent_relays"),
    ),
    "packer": Group(
        ("provision/env/packing/*.py",),
        70,
        unit("formats", "hard_links", "temporary", "keys", "pack", folder=PACKER),
        (
            f"{PACKER}/test_large.py::test_file_that_cannot_be_rewritten_is_named_and_packed_in_ranges",
            *unit("marks", "pack_faults", "split", "workers", "truth", folder=PACKER),
        ),
    ),
}

# Mutants that behave like the original, with the reason: by file, line without its indent, and replacement.
EQUIVALENT = {
    (
        "provision/script.py",
        'state = cast("StepState", found["state"])',
        "'StepStateXX'",
    ): "cast ignores its first argument",
}

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.LShift: ">>", ast.BitOr: "&",
    ast.Mod: "+",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """``text`` replaces the bytes from ``start`` to ``end`` of a file."""

    file: str
    line: int
    start: int
    end: int
    was: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """``outcome`` is ``failed`` (a test), ``timed out`` or ``survived``; ``seconds`` are those of the last tests."""

    mutant: Mutant
    outcome: str
    seconds: float

    @property
    def killed(self) -> bool:
        return self.outcome != "survived"


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a module. Annotations, docstrings and the texts of errors stay as they are."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    raw = source.encode()

    def mutant(node: ast.expr | ast.stmt, text: str) -> Mutant:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Mutant(file, node.lineno, start, end, raw[start:end].decode(), text)

    for node in walk(tree):
        if isinstance(node, (ast.expr, ast.stmt)):
            yield from (mutant(*change) for change in [*changes_of_values(node), *changes_of_flow(node)])


def changes_of_values(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """The expressions below a node to replace, with their replacements."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = (ast.unparse(each) for each in (node.left, node.comparators[0]))
        yield node, f"(({left}) {COMPARISONS[type(node.ops[0])]} ({right}))"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({word.join(f'({ast.unparse(each)})' for each in node.values)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not is_text(node):
        yield node, f"(({ast.unparse(node.left)}) {ARITHMETIC[type(node.op)]} ({ast.unparse(node.right)}))"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, f"({node.value} + 1)"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and node.value:
        yield node, repr(node.value + ("XX" if isinstance(node.value, str) else b"XX"))


def changes_of_flow(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """The statements to replace, with their replacements."""
    if isinstance(node, ast.Return) and node.value is not None and not is_none(node.value):
        yield node, "return None"
    elif isinstance(node, ast.If):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield node, "continue" if isinstance(node, ast.Break) else "break"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are worth a change."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_comment"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child)


def is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, (str, bytes)))
        for each in (node.left, node.right)
    )


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def sample(tree: Path, group: Group, number: int) -> list[Mutant]:
    """The mutants to try: each change of a text once, spread over all modules of the group."""
    found = []
    for pattern in group.modules:
        for path in sorted(tree.glob(pattern)):
            source = path.read_text(encoding="utf-8")
            for each in dict.fromkeys(mutants(str(path.relative_to(tree)), source)):
                changed = source.encode()[: each.start] + each.text.encode() + source.encode()[each.end :]
                try:
                    compile(changed, each.file, "exec")
                except SyntaxError:
                    continue
                if equivalent(each, source) is None:
                    found.append(each)
    random.Random(SEED).shuffle(found)
    return found[:number]


def equivalent(each: Mutant, source: str) -> str | None:
    """The reason why no test can notice the mutant, or None."""
    return EQUIVALENT.get((each.file, source.splitlines()[each.line - 1].strip(), each.text))


def run_tests(tree: Path, tests: tuple[str, ...], limit: float) -> tuple[str, float]:
    """The outcome of the tests in the tree, in a forked process, and the seconds that they take; at most ``limit``."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(os.devnull, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path.insert(0, str(tree))
        sys.dont_write_bytecode = True
        import pytest  # noqa: PLC0415 - loaded before the fork

        base = tempfile.mkdtemp(prefix="mutant-")
        status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={base}", *tests])
        shutil.rmtree(base, ignore_errors=True)
        os._exit(int(status))
    while time.monotonic() - started < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            kill(child)
            outcome = "failed" if os.waitstatus_to_exitcode(status) else "survived"
            return outcome, time.monotonic() - started
        time.sleep(0.05)
    kill(child)
    os.waitpid(child, 0)
    return "timed out", time.monotonic() - started


def kill(session: int) -> None:
    """Kills a mutant's processes: its tests start some, and a mutant may not end them."""
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        return


def attempt(tree: Path, group: Group, each: Mutant, limit: float) -> Verdict:
    path = tree / each.file
    original = path.read_bytes()
    path.write_bytes(original[: each.start] + each.text.encode() + original[each.end :])
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
    try:
        outcome, seconds = run_tests(tree, group.first, limit)
        if outcome == "survived":
            outcome, seconds = run_tests(tree, group.second, limit)
    finally:
        path.write_bytes(original)
    return Verdict(each, outcome, seconds)


def kills(file: Path, name: str) -> dict[Mutant, Verdict]:
    """The killed mutants of a group in a file of an earlier run."""
    found = json.loads(file.read_text(encoding="utf-8")).get(name, [])
    verdicts = [Verdict(Mutant(**one["mutant"]), one["outcome"], one["seconds"]) for one in found]
    return {one.mutant: one for one in verdicts if one.killed}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=GROUPS, action="append", help="this group; may be repeated")
    parser.add_argument("--number", type=int, metavar="N", help="mutants of each group")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="the K-th of N parts of each group")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every mutant and its verdict there")
    parser.add_argument("--resume", action="store_true", help="try only mutants that FILE does not have as killed")
    given = parser.parse_args()
    if given.resume and not (given.json and given.json.is_file()):
        parser.error("--resume needs --json with the file of an earlier run")
    for name in ("pytest", "jinja2", "pydantic", "zstandard", "cryptography.hazmat.primitives.hashes"):
        import_module(name)  # else every mutant would load them

    verdicts: dict[str, list[Verdict]] = {}
    written = json.loads(given.json.read_text(encoding="utf-8")) if given.resume else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, tree / name)
        compileall.compile_dir(tree / "provision", quiet=2)
        compileall.compile_dir(tree / "trainer", quiet=2)
        for name in given.only or GROUPS:
            group = GROUPS[name]
            earlier = kills(given.json, name) if given.resume else {}
            outcome, seconds = run_tests(tree, group.first, 900)
            also, more = run_tests(tree, group.second, 900)
            if {outcome, also} != {"survived"}:
                print(f"{name}: the tests do not pass without a change ({outcome}, {also})", file=sys.stderr)
                return 1
            first, step = given.part
            chosen = sample(tree, group, given.number or group.number)[first - 1 :: step]
            print(f"{name}: {len(chosen)} mutants, {seconds:.1f} and {more:.1f} s without a change", flush=True)
            verdicts[name] = []
            for each in chosen:
                verdict = earlier.get(each) or attempt(tree, group, each, 4 * max(seconds, more) + 20)
                verdicts[name].append(verdict)
                if verdict.outcome != "failed":
                    where = f"{each.file}:{each.line}: {each.was!r:.90} -> {each.text!r:.90}"
                    print(f"  {verdict.outcome}: {where}", flush=True)
                if given.json:
                    text = json.dumps(written | as_json(verdicts), indent=1)
                    given.json.write_text(text, encoding="utf-8")
            report(name, verdicts[name])
    report("all", [each for found in verdicts.values() for each in found])
    return 0


def part(text: str) -> tuple[int, int]:
    """``2/4``: a machine with many cores tries several parts at once."""
    number, total = (int(word) for word in text.split("/"))
    if not 1 <= number <= total:
        raise ValueError
    return number, total


def as_json(verdicts: dict[str, list[Verdict]]) -> dict[str, list[dict[str, object]]]:
    return {name: [asdict(one) | {"killed": one.killed} for one in found] for name, found in verdicts.items()}


def report(name: str, found: list[Verdict]) -> None:
    killed = sum(each.killed for each in found)
    late = sum(each.outcome == "timed out" for each in found)
    share = 100 * killed / max(1, len(found))
    print(f"{name}: {killed} of {len(found)} killed, {share:.1f} %; {late} of them by a timeout", flush=True)


if __name__ == "__main__":
    sys.exit(main())
