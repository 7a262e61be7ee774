"""The command line: parses arguments, calls one task, and shows its result."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

import click

from provision import __version__
from provision.cli import SEPARATED, Leaving, wants_json
from provision.cli.examples import GROUPS, epilog
from provision.cli.usage import usage_error
from provision.errors import ClusterctlError, InterruptedByUser, UsageError
from provision.output import Reporter


def run(words: Sequence[str], closed: AbstractSet[str] = frozenset()) -> NoReturn:
    """Run one command and exit with its code; see ``provision.cli.main``.

    Args:
        words: the command line, without the program's name.
        closed: names of standard streams that were closed when the program was started.
    """
    reporter = Reporter(as_json=wants_json(words))
    try:
        signal.signal(signal.SIGTERM, _terminated)
        if "stdout" in closed:
            raise UsageError(
                "stdout is closed, so no result could be shown", hint=f"{shlex.join(['clusterctl', *words])} >/dev/null"
            )
        cli.main(args=list(words), prog_name="clusterctl", standalone_mode=False, obj=reporter)
        reporter.finish()
        code = 0
    except ClusterctlError as error:
        code = _failed(reporter, error)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        code = _refused(reporter, error, words)
    except (KeyboardInterrupt, click.Abort):
        code = _failed(reporter, InterruptedByUser("interrupted", hint="run the same command again"))
    except BrokenPipeError:
        code = NO_READER  # of the output (clusterctl ... | head): there is no reader for a message either
    except OSError as error:
        code = _failed(reporter, _unusable(error))
    finally:
        reporter.close()
        _let_go_of_streams()
    sys.exit(code)


def _failed(reporter: Reporter, error: ClusterctlError) -> int:
    """Show an error and return its exit code. An error that cannot be written is dropped."""
    with suppress(OSError):
        reporter.show_error(error)
    return error.exit_code


def _refused(reporter: Reporter, error: click.ClickException, words: Sequence[str]) -> int:
    """Show click's error as a ``UsageError``; the help if a command was called without arguments."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
        return UsageError.exit_code
    return _failed(reporter, usage_error(error, words))


def _let_go_of_streams() -> None:
    """Flush the streams. Output that cannot be written is dropped, or Python would fail again at exit."""
    for stream in (sys.stdout, sys.stderr):
        _let_go(stream)


def _let_go(stream: TextIO) -> None:
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def _unusable(error: OSError) -> UsageError:
    """An error for an ``OSError`` that no task has handled: a file or directory that cannot be used."""
    why = error.strerror or str(error)
    if error.filename is None and _no_folder():
        return _folder_gone()
    return UsageError(f"cannot use {error.filename}: {why}" if error.filename else why)


def _no_folder() -> bool:
    """Whether the working folder was deleted."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _folder_gone() -> UsageError:
    return UsageError("the working folder no longer exists", hint='cd "$HOME", then run the command again')


def _terminated(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM cleans up like Ctrl-C."""
    raise KeyboardInterrupt


NO_READER = 1  # exit code: the reader of the output went away

OVERVIEW = """Deploy a conda environment to air-gapped GPU nodes and train on them.

\b
  clusterctl pack-env          Pack the active environment into one file
  clusterctl init gpu01 gpu02  Enroll the nodes and write inventory.yaml
  clusterctl deploy            Install the file on every node
  clusterctl train --nodes 2   Train with LLaMA-Factory on the first two nodes
"""


MODULES = {
    "pack-env": "bundles",
    "pack-os": "bundles",
    "pack-tool": "bundles",
    "inspect": "bundles",
    "diff": "bundles",
    "deploy": "nodes",
    "releases": "nodes",
    "rollback": "nodes",
    "prune": "nodes",
    "verify": "nodes",
    "push": "nodes",
    "run": "commands",
    "services": "services",
    "bench": "bench",
    "check": "health",
    "diagnose": "diagnose",
    "status": "status",
    "train": "training",
    "logs": "runs",
    "stop": "runs",
    "metrics": "metrics",
    "resume": "runs",
    "collect": "runs",
    "completion": "completion",
    "ds-config": "ds_config",
    "plan": "plan",
    "init": "setup",
    "sandbox": "setup",
}


class _Commands(click.Group):
    """Imports only the command that is called: all commands together take much longer to import."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[SEPARATED] = len(args) - args.index("--") - 1 if "--" in args else None
        return super().parse_args(ctx, args)

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return sorted(MODULES)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        with Leaving(sys.argv[1:]):
            module = import_module(f"provision.cli.{MODULES[cmd_name]}")
            commands: Sequence[click.Command] = module.COMMANDS
            command = next(command for command in commands if command.name == cmd_name)
            _finish(command, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by subject."""
        width = max(map(len, MODULES))
        limit = formatter.width - 6 - width
        for title, names in GROUPS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), command.get_short_help_str(limit)) for name, command in commands if command]
                )


def _finish(command: click.Command, path: str) -> None:
    """Add examples to the help of a command and its subcommands, and completion of names for shells."""
    command.epilog = epilog(path)
    if isinstance(command, click.Group):
        for name, subcommand in command.commands.items():
            _finish(subcommand, f"{path} {name}")
    elif os.environ.get("_CLUSTERCTL_COMPLETE"):
        from provision.cli.completion import complete  # noqa: PLC0415 - only when a shell completes

        complete(command)


@click.group(
    cls=_Commands, help=OVERVIEW, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80}
)
@click.version_option(__version__, prog_name="clusterctl")
def cli() -> None:
    """The group of all commands."""
    if _no_folder():
        raise _folder_gone()
