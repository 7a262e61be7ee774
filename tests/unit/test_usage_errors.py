"""Usage errors have one style: what is wrong, and a command to type that works."""

import json
import shlex

import click
import pytest
from case_table import every_case

from provision.cli import cli


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        ("depoly", "clusterctl has no command depoly", "clusterctl deploy"),
        ("xyzzy", "clusterctl has no command xyzzy", "clusterctl --help"),
        ("services aply", "clusterctl services has no command aply", "clusterctl services apply"),
        ("--foo", "clusterctl has no option --foo", "clusterctl --help"),
        (
            "deploy --limt 'gpu[01-02]'",
            "clusterctl deploy has no option --limt",
            "clusterctl deploy --limit 'gpu[01-02]'",
        ),
        ("deploy --limt=gpu01", "clusterctl deploy has no option --limt", "clusterctl deploy --limit=gpu01"),
        ("deploy --bla", "clusterctl deploy has no option --bla", "clusterctl deploy --help"),
        ("deploy -x", "clusterctl deploy has no option -x", "clusterctl deploy --help"),
        ("deploy --limit", "--limit of clusterctl deploy needs a value", "clusterctl deploy --help"),
        ("deploy --relay onn", "--relay: 'onn' is not one of on, off", "clusterctl deploy --relay on"),
        ("deploy --relay=onn", "--relay: 'onn' is not one of on, off", "clusterctl deploy --relay=on"),
        ("deploy --relay maybe", "--relay: 'maybe' is not one of on, off", "clusterctl deploy --help"),
        ("releases more", "clusterctl releases takes no further argument: more", "clusterctl releases --help"),
        ("run", "clusterctl run needs CMD...", "clusterctl run --help"),
        (
            "prune --keep x",
            "--keep: 'x' is not a whole number; it must be at least 1 and at most 1000000",
            "clusterctl prune --help",
        ),
        (
            "logs -n x",
            "--lines: 'x' is not a whole number; it must be at least 0, or all",
            "clusterctl logs --help",
        ),
        # What may be secret is not shown again.
        ("train --env TOKEN=s3cret --nods 2", "clusterctl train has no option --nods", "clusterctl train --help"),
    ],
)
def test_a_usage_error_names_the_error_and_the_next_command(run, line, error, hint):
    code, out, err = run(*shlex.split(line))
    assert (code, out) == (2, "")
    assert err.splitlines() == [f"error: {error}", f"try: {hint}"]


def test_with_json_a_usage_error_is_the_one_object_on_stdout(run):
    code, out, err = run("deploy", "--json", "--limt", "gpu01")
    assert code == 2
    assert json.loads(out)["error"] == {
        "message": "clusterctl deploy has no option --limt",
        "exit_code": 2,
        "hint": "clusterctl deploy --json --limit gpu01",
    }
    assert err.startswith("error: clusterctl deploy has no option --limt\n")


def test_json_option_of_a_remote_command_does_not_change_the_error_format(run):
    code, out, _ = run("run", "--limt", "a", "--", "jq", "--json")
    assert (code, out) == (2, "")


def commands(command, path):
    yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            yield from commands(command.get_command(ctx, name), [*path, name])


@every_case("path", [path for path, _ in commands(cli, [])], ids=" ".join)
def test_every_command_refuses_an_unknown_option_in_this_style(run, path):
    code, out, err = run(*path, "--no-such-thing-at-all")
    assert (code, out) == (2, "")
    whole = " ".join(["clusterctl", *path, *(["list"] if path in (["runs"], ["nodes"]) else [])])  # as `runs list`
    assert err == f"error: {whole} has no option --no-such-thing-at-all\ntry: {whole} --help\n"
