"""The documentation describes every command and option, and every command line, link and script in it exists."""

import itertools
import re
import shlex

import click
import pytest
from doc_blocks import FENCED, PAGES, ROOT, blocks, lines

from provision.cli import cli
from provision.cli.program import EXAMPLES

# A synopsis has [optional] words, CAPITALS or a|b outside quotes. It is not parsed.
PLACEHOLDER = re.compile(r"(?<![\w=.])\[|\b[A-Z]{3,}\b|\bN\b|…|\.\.\.|\w\|\w")
QUOTED = re.compile(r"'[^']*'")


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
        else:
            found.append(((*path, name), command))
    return found


def command_lines() -> list[tuple[str, str]]:
    """The lines of all blocks that start clusterctl, except synopses: these have capitals or brackets."""
    return [
        (page.name, line)
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"))
        for line in lines(block)
        if line.startswith("clusterctl ") and not PLACEHOLDER.search(QUOTED.sub("", line))
    ]


@pytest.mark.parametrize("path", [" ".join(path) for path, _ in commands(cli)])
def test_every_command_is_in_the_reference(path):
    assert f"\n## clusterctl {path}\n" in (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "command"), commands(cli), ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_every_option_is_in_its_section_of_the_reference(path, command):
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = text.split(f"\n## clusterctl {' '.join(path)}\n")[1].split("\n## ")[0]
    common = text.split("\n## ")[1]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            name = max(parameter.opts, key=len)
            assert f"`{name}" in section or f"`{name}" in common, f"clusterctl {' '.join(path)} {name}"


def test_there_are_command_lines_in_the_readme():
    readme = [line for page, line in command_lines() if page == "README.md"]
    for wanted in ("clusterctl pack-env", "clusterctl deploy --inventory inventory.yaml", "clusterctl train --nodes 2"):
        assert wanted in readme
    for command in ("status", "logs -f", "stop", "resume"):
        assert any(line.startswith(f"clusterctl {command}") for line in readme), command


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_every_command_line_in_the_docs_parses(page, line):
    words = shlex.shlex(line, posix=True, punctuation_chars="|>;")
    words.whitespace_split = True
    argv = list(itertools.takewhile(lambda word: word not in {"|", ">", ";"}, words))[1:]
    command: click.Command = cli
    while isinstance(command, click.Group):
        if argv[0] in ("--help", "--version"):
            return
        command = command.get_command(click.Context(command), argv.pop(0))
        assert command, argv
    command.make_context(command.name, argv)


@pytest.mark.parametrize(
    ("path", "command"), commands(cli), ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_every_command_has_an_example_that_parses(path, command):
    name = " ".join(path)
    assert EXAMPLES[name]
    for line in EXAMPLES[name]:
        argv = shlex.split(line.partition("<(")[2].rstrip(")") or line)
        assert argv[: 1 + len(path)] == ["clusterctl", *path]
        command.make_context(name, argv[1 + len(path) :])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("name", ["monitor.svg", "report.png"])
def test_the_pictures_are_small_and_embedded_and_load_nothing(name):
    picture = ROOT / "docs" / "assets" / name
    assert 10_000 < picture.stat().st_size < 200_000
    if picture.suffix == ".svg":
        assert not re.search(r"<script|(?:href|src)=|@import|url\((?!['\"]?#)|\d+\.\d+\.\d+\.\d+", picture.read_text())
    assert f"](docs/assets/{name})" in (ROOT / "README.md").read_text(encoding="utf-8").partition("```")[0]
    assert f"](assets/{name})" in (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")


def test_every_script_in_the_readme_exists():
    scripts = set(re.findall(r"scripts/[a-z-]+", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"scripts/demo", "scripts/test"} <= scripts
    for script in scripts:
        assert (ROOT / script).is_file()


def test_the_example_inventory_of_the_readme_loads(tmp_path):
    from provision.inventory import load

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    written = [block for language, block in FENCED.findall(readme) if language == "yaml"]
    assert written
    for block in written:
        path = tmp_path / "inventory.yaml"
        path.write_text(block, encoding="utf-8")
        assert load(path).nodes
