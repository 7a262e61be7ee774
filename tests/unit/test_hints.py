"""Hints are commands that work when they are pasted: the builder, the source, and the output of failing commands."""

from __future__ import annotations

import ast
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from provision.cli import cli, main
from provision.cli.options import typed as typed_of
from provision.diagnosis import Diagnosis
from provision.errors import NodesFailedError
from provision.hints import WITH_INVENTORY, again, complete, complete_fields
from provision.model import UNTYPED, CommandLine, Finding, Found, Notice
from provision.output import Reporter
from provision.summaries.diagnosis import fill_commands, wrap_line
from tests.unit.pasting import commands_in, parse, paste

ROOT = Path(__file__).parents[2]
SPACED = CommandLine("deploy", {"--inventory": ("my prod.yaml",), "--exclude": ("gpu09",), "--repair": ()}, ("x.ccb",))


# --- the builder ----------------------------------------------------------------------------------


def test_the_same_command_keeps_its_options_and_is_quoted():
    shown = again(SPACED, "deploy", "--accept-unrewritable", exclude="gpu[01,03]")
    assert shown == (
        "clusterctl deploy -i 'my prod.yaml' --exclude 'gpu09,gpu[01,03]' --repair --accept-unrewritable x.ccb"
    )
    assert again(SPACED, "deploy", drop=("--repair", "--exclude")) == "clusterctl deploy -i 'my prod.yaml' x.ccb"
    assert again(UNTYPED, "prune", keep="1") == "clusterctl prune --keep 1"


def test_another_command_keeps_the_inventory_only():
    assert again(SPACED, "stop", "--yes", words=("r1",)) == "clusterctl stop -i 'my prod.yaml' --yes r1"


def test_arguments_that_look_like_options_stay_arguments():
    line = CommandLine("train", {"--env": ("A=b c", "HF_TOKEN=hf_secret")}, ("train.py", "--lr", "3"))
    shown = again(line, "train", "--exclude-bad")
    assert shown == "clusterctl train --env 'A=b c' --env HF_TOKEN --exclude-bad -- train.py --lr 3"
    assert "hf_secret" not in shown


def test_every_other_command_of_a_text_gets_the_inventory_once():
    text = "look: clusterctl logs -f r1; clusterctl services apply --limit gpu[01-02] (clusterctl check's), then"
    shown = complete(SPACED, text)
    assert shown == (
        "look: clusterctl logs -i 'my prod.yaml' -f r1; clusterctl services apply -i 'my prod.yaml' "
        "--limit 'gpu[01-02]' (clusterctl check's), then"
    )
    assert complete(SPACED, shown) == shown
    assert complete(SPACED, "clusterctl pack-env; this version of clusterctl runs") == (
        "clusterctl pack-env; this version of clusterctl runs"
    )
    assert complete(UNTYPED, "clusterctl logs r1") == "clusterctl logs r1"


def test_fixes_and_hints_of_json_are_completed_and_node_output_is_not():
    data = {"fix": "clusterctl check", "out": "clusterctl check", "more": [{"hint": "clusterctl stop"}]}
    assert complete_fields(SPACED, data) == {
        "fix": "clusterctl check -i 'my prod.yaml'",
        "out": "clusterctl check",
        "more": [{"hint": "clusterctl stop -i 'my prod.yaml'"}],
    }


def test_the_advice_of_a_diagnosis_names_the_run_the_rank_and_the_node():
    message = "clusterctl resume RUN --exclude NODE; its log: clusterctl logs RUN --rank N, or clusterctl check"
    verdict = SimpleNamespace(rank=3, node="gpu02")
    shown = fill_commands(message, Diagnosis("r1", "failed", verdict))
    assert shown == "clusterctl resume r1 --exclude gpu02; its log: clusterctl logs r1 --rank 3, or clusterctl check"
    assert [each.info_name for each in paste(shown)] == ["resume", "logs", "check"]
    nobody = fill_commands("clusterctl logs RUN --rank N", Diagnosis("r1", "failed", None))
    assert nobody == "clusterctl logs r1"
    assert fill_commands(message, Diagnosis("", "failed", verdict)) == message  # log files of any launcher


def test_a_row_is_never_broken_between_the_program_and_its_command():
    for width in range(40, 80):
        rows = wrap_line("try: " + "x" * width + " clusterctl resume r1 goes on")
        assert not any(row.endswith("clusterctl") for row in rows), rows


def _leaves(group=cli, path=()):
    context = click.Context(cli)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _leaves(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_the_commands_that_take_an_inventory_are_those_that_get_one():
    taking = {name for name, command in _leaves() if any("-i" in param.opts for param in command.params)}
    assert set(WITH_INVENTORY) == taking


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            "deploy -i prod.yaml --limit gpu[1-2] --dry-run x.ccb",
            CommandLine(
                "deploy", {"--inventory": ("prod.yaml",), "--limit": ("gpu[1-2]",), "--dry-run": ()}, ("x.ccb",)
            ),
        ),
        ("services apply hosts nfs", CommandLine("services apply", {}, ("hosts", "nfs"))),
        ("check --no-root --only gpu --only ib", CommandLine("check", {"--only": ("gpu", "ib"), "--no-root": ()}, ())),
        (
            "train -n 2 --env A=1 t.yaml -- max_steps=3",
            CommandLine("train", {"--nodes": ("2",), "--env": ("A=1",)}, ("t.yaml", "max_steps=3")),
        ),
        ("run --root uptime -p", CommandLine("run", {"--root": ()}, ("uptime", "-p"))),
    ],
)
def test_typed_command_is_parsed_and_reproduced(argv, line):
    context = parse(f"clusterctl {argv}")
    read = typed_of(context)
    assert (read.command, dict(read.options), read.words) == (line.command, dict(line.options), line.words)
    assert typed_of(parse(again(read, read.command))) == read


@pytest.mark.parametrize(
    "typed",
    [
        "clusterctl train --nodes 2 -- script.py args",
        "clusterctl train --nodes 2 script.py -- args --lr 3",
        "clusterctl run -- uptime -- x",
        "clusterctl train --nodes 2 script.py args",
        "clusterctl run -- uptime",
        "clusterctl run uptime",
    ],
)
def test_the_same_command_keeps_its_separator(typed):
    read = typed_of(parse(typed))
    assert complete(read, "run the same command again") == typed
    assert again(read, "stop", words=("r1",)) == "clusterctl stop r1"


def test_every_output_completes_its_hints(capsys):
    reporter = Reporter()
    reporter.configure(as_json=True, typed=SPACED)
    reporter(Notice("gpu01: clusterctl verify --limit gpu01 names it"))
    reporter(Found(Finding("a", "gpu01", "WARN", "clusterctl check", fix="clusterctl check")))
    reporter.result({"findings": [{"fix": "clusterctl deploy"}]})
    reporter.show_error(NodesFailedError("x", reasons={"a": "b (clusterctl check)"}, hint="clusterctl status r1"))
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data["error"]["hint"] == "clusterctl status -i 'my prod.yaml' r1"
    assert data["findings"][0]["fix"] == "clusterctl deploy -i 'my prod.yaml'"
    assert "clusterctl verify -i 'my prod.yaml' --limit gpu01" in err
    assert "b (clusterctl check -i 'my prod.yaml')" in err
    assert "a  gpu01: clusterctl check\n" in err  # a node's own words
    assert "try: clusterctl check -i 'my prod.yaml'" in err


# --- the source -----------------------------------------------------------------------------------


def _texts(tree):
    """Every text of a module with its use: f-strings with a word for each value, without docstrings."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
        id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | inner):
            yield node.lineno, node.value


def _hints(tree):
    """The texts of ``hint=`` and ``fix=``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in {"hint", "fix"}:
            yield from _texts(ast.Module(body=[ast.Expr(value=node.value), ast.Pass()], type_ignores=[]))


SOURCES = [
    path
    for path in sorted((ROOT / "provision").rglob("*.py"))
    if "clusterctl " in path.read_text(encoding="utf-8") and "diagnosis" not in path.parts
]


def test_every_hint_in_the_source_parses():
    """A hint that is a text in the source is a whole command; the inventory joins it where it is shown."""
    for path in SOURCES:
        for _, text in _hints(ast.parse(path.read_text(encoding="utf-8"))):
            paste(text)


def test_no_text_names_an_inventory_or_an_option_that_does_not_exist():
    """``-i`` comes from the typed command, never from a text; and options in any text exist."""
    by_name = dict(_leaves())
    for path in SOURCES:
        for line, text in _texts(ast.parse(path.read_text(encoding="utf-8"))):
            for command in commands_in(text):
                words = command.split()[1:]
                name = next((" ".join(words[:size]) for size in (2, 1) if " ".join(words[:size]) in by_name), "")
                if not name or path.name == "hints.py":
                    continue
                where = f"{path.relative_to(ROOT)}:{line}: {command}"
                known = {option for param in by_name[name].params for option in (*param.opts, *param.secondary_opts)}
                until = words[: words.index("--")] if "--" in words else words  # what follows is the job's
                typed = {word for word in until if word.startswith("--")}
                own = name == "init" or path.parent.name == "foreign" or path.name == "program.py"  # they explain -i
                if name in WITH_INVENTORY and not own:
                    assert not {"-i", "--inventory"} & set(words), where
                assert name == "run" or typed <= known | {"--help"}, where


def test_hints_that_repeat_the_command_are_built_by_one_function():
    """ "the same command again" and "--exclude X" without a command cannot be pasted."""
    for path in SOURCES:
        for line, text in _hints(ast.parse(path.read_text(encoding="utf-8"))):
            assert "run the same command again" not in text or path.name in {"__init__.py", "gate_ask.py"}, (path, line)
            assert "to continue without: --exclude" not in text, (path, line)


# --- commands that fail ---------------------------------------------------------------------------

INVENTORY = """\
prefix: /opt/llm/current
nodes: {gpu01: 127.0.0.1, gpu02: 127.0.0.2}
ssh: {port: 9, timeout: 2}
services: {hosts: {}}
"""


CODES = {"prune": {2, 5}, "deploy": {2}, "diagnose": {2, 5}, "metrics": {2, 5}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my prod.yaml").write_text(INVENTORY)
    (tmp_path / "train.yaml").write_text("model_name_or_path: /data/m\noutput_dir: /data/out\n")
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def reported(argv, capsys):
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            main(argv)
    finally:
        signal.signal(signal.SIGTERM, before)
    out, err = capsys.readouterr()
    return end.value.code, out + err


@pytest.mark.parametrize(
    "argv",
    [
        ["releases"],
        ["rollback", "--to", "abc"],
        ["prune", "--keep", "3"],
        ["verify"],
        ["push", "train.yaml", "/data/x y"],
        ["services", "apply", "hosts"],
        ["services", "status"],
        ["services", "verify"],
        ["services", "undo"],
        ["run", "--", "uptime", "-p"],
        ["check", "--only", "clock"],
        ["status"],
        ["status", "abc"],
        ["logs"],
        ["stop", "r1"],
        ["resume", "r1"],
        ["collect", "r1", "--to", "here there"],
        ["diagnose", "r1"],
        ["metrics", "r1"],
        ["report", "r1"],
        ["train", "train.yaml", "--env", "A=b c"],
        ["train", "--dry-run", "train.yaml"],
        ["bench", "nccl"],
        ["init"],
        ["deploy", "--scripts", "x"],
    ],
    ids=" ".join,
)
def test_every_hint_of_a_command_that_fails_can_be_pasted(argv, folder, capsys):
    """Nothing listens on the nodes' port. Every command reports it, and suggests commands for this inventory."""
    words = argv[:2] if argv[0] in {"services", "bench"} else argv[:1]
    given = ["-i", "my prod.yaml"]
    code, message = reported([*words, *given, *argv[len(words) :]], capsys)
    assert code in CODES.get(argv[0], {5}), message
    contexts = paste(message, folder)
    with_inventory = [
        each for each in contexts if each.params.get("inventory_path") or (each.info_name == "init" and each.params)
    ]
    for each in with_inventory:
        path = each.params.get("inventory_path") or each.params.get("path")
        assert str(path) == "my prod.yaml", message
    assert with_inventory or "try:" not in message or "clusterctl" not in message, message


def test_the_hint_excludes_one_silent_node_from_the_typed_command(folder, capsys, monkeypatch):
    from provision.model import Result
    from provision.ssh import remote
    from provision.ssh.remote import NodeUnreachable

    class Node:
        def __init__(self, node):
            self.node = node

        def run(self, _script, *, on_line=None, **_options):
            if self.node.name == "gpu02":
                raise NodeUnreachable(self.node, "no route")
            if on_line:
                on_line("held gpu01 boot")
            return Result(0, "")

        def close(self):
            pass

    monkeypatch.setattr(remote.Connections, "__getitem__", lambda _self, node: Node(node))
    for argv in (["prune"], ["rollback"], ["services", "verify"], ["services", "apply"]):
        words = argv[:2] if argv[0] == "services" else argv[:1]
        _, message = reported([*words, "-i", "my prod.yaml", *argv[len(words) :]], capsys)
        hint = next(line for line in message.splitlines() if line.startswith("try: "))
        wanted = f"to continue without: clusterctl {' '.join(words)} -i 'my prod.yaml' --exclude gpu02"
        if words[1:] == ["apply"]:
            wanted = "clusterctl services apply -i 'my prod.yaml' --retry-failed"
        assert wanted in hint, (argv, message)


def test_the_hint_to_repeat_a_command_is_that_command():
    typed = CommandLine("deploy", {"--inventory": ("my prod.yaml",), "--limit": ("gpu[01-04]",)}, ("llm.ccb",))
    assert complete(typed, "run the same command again") == (
        "clusterctl deploy -i 'my prod.yaml' --limit 'gpu[01-04]' llm.ccb"
    )
    assert complete(UNTYPED, "run the same command again") == "run the same command again"


def test_hint_masks_exactly_the_secrets():
    """A hint without the value of a harmless variable would ask for a variable that is not set here."""
    typed = CommandLine("train", {"--env": ("TOKENIZERS_PARALLELISM=false", "HF_TOKEN=hf_x")})
    assert again(typed, "train") == "clusterctl train --env TOKENIZERS_PARALLELISM=false --env HF_TOKEN"
