"""The command line: arguments in, one task called, its result shown. Nothing is decided here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click

from provision import __version__
from provision.errors import ClusterctlError, InterruptedByUser, UsageError
from provision.output import Reporter


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code: 0 ok, 2 usage, 3 bundle, 4 refused, 5 nodes, 6 run, 130 interrupted."""
    signal.signal(signal.SIGTERM, _terminated)
    reporter = Reporter()
    try:
        cli.main(args=argv, prog_name="clusterctl", standalone_mode=False, obj=reporter)
        reporter.finish()
        code = 0
    except ClusterctlError as error:
        reporter.show_error(error)
        code = error.exit_code
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = UsageError.exit_code
    except (KeyboardInterrupt, click.Abort):
        reporter.show_error(InterruptedByUser("interrupted", hint="run the same command again"))
        code = InterruptedByUser.exit_code
    except BrokenPipeError:
        # The reader of our output went away (clusterctl ... | head): nothing to tell, and nobody to tell it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        reporter.show_error(_unusable(error))
        code = UsageError.exit_code
    finally:
        reporter.close()
    sys.exit(code)


def _unusable(error: OSError) -> UsageError:
    """What nobody nearer has found better words for: a file or folder of this machine that does not do what it must."""
    why = error.strerror or str(error)
    return UsageError(f"cannot use {error.filename}: {why}" if error.filename else why)


def _terminated(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM cleans up like Ctrl-C."""
    raise KeyboardInterrupt


OVERVIEW = """Move a conda environment into an air-gapped GPU cluster and train on it.

\b
  clusterctl pack-env                            the active environment becomes one file
  clusterctl deploy --inventory inventory.yaml   that file becomes every node's environment
  clusterctl train --nodes 2                     LLaMA-Factory runs on the first two nodes
"""


_MODULES = {
    "pack-env": "environment",
    "pack-os": "os_packages",
    "pack-tool": "tool",
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
    "ds-config": "ds_config",
    "plan": "plan",
    "init": "setup",
    "sandbox": "setup",
}


class _Commands(click.Group):
    """Imports a command when it is asked for: no command needs half of what they need together."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return sorted(_MODULES)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = import_module(f"provision.cli.{_MODULES[cmd_name]}")
        commands: Sequence[click.Command] = module.COMMANDS
        return next(command for command in commands if command.name == cmd_name)


@click.group(
    cls=_Commands, help=OVERVIEW, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="clusterctl")
def cli() -> None:
    """All commands; their help is what ``OVERVIEW`` and their docstrings say."""
