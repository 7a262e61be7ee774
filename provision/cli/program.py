"""The command line: the commands by subject with their examples, and how one of them runs and ends."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from provision import __version__
from provision.cli import SEPARATED, Leaving, wants_json
from provision.cli.options import usage_error
from provision.errors import ClusterctlError, InterruptedByUser, UsageError
from provision.output import Reporter

NO_READER = 1  # exit code: the reader of the output went away

OVERVIEW = """Deploy a conda environment to air-gapped GPU nodes and train on them.

\b
  clusterctl pack-env          Pack the active environment into one file
  clusterctl init gpu01 gpu02  Enroll the nodes and write inventory.yaml
  clusterctl deploy            Install the file on every node
  clusterctl train --nodes 2   Train with LLaMA-Factory on the first two nodes
"""

GROUPS: Mapping[str, Mapping[str, str]] = {  # by subject: the commands, each with its module
    "Environment": {
        "pack-env": "bundles",
        "inspect": "bundles",
        "diff": "bundles",
        "deploy": "nodes",
        "releases": "nodes",
        "rollback": "nodes",
        "prune": "nodes",
        "verify": "nodes",
    },
    "Nodes": {
        "init": "init",
        "nodes": "node_history",
        "check": "check",
        "status": "runs",
        "top": "top",
        "run": "nodes",
        "push": "nodes",
        "services": "services",
        "pack-os": "bundles",
        "bench": "bench",
        "tunnel": "tunnel",
        "jupyter": "tunnel",
    },
    "Training": {
        "train": "train",
        "rehearse": "rehearse",
        "monitor": "monitor",
        "logs": "logs",
        "runs": "history",
        "save": "runs",
        "stop": "runs",
        "resume": "train",
        "collect": "logs",
        "metrics": "logs",
        "report": "report",
        "compare": "compare",
        "diagnose": "logs",
        "tensorboard": "tunnel",
        "webui": "tunnel",
    },
    "Planning": {"plan": "plan", "ds-config": "plan"},
    "This machine": {"completion": "completion", "pack-tool": "bundles", "sandbox": "init"},
}
MODULES = {command: module for commands in GROUPS.values() for command, module in commands.items()}

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "bench": ("clusterctl bench nccl --nodes 2",),
    "bench nccl": ("clusterctl bench nccl --nodes 2", "clusterctl bench nccl --pairs"),
    "check": ("clusterctl check", "clusterctl check --limit 'gpu[01-04]' llm.ccb"),
    "collect": ("clusterctl collect sft --fp32",),
    "compare": (
        "clusterctl compare sft-a sft-b",
        "clusterctl compare sft-a sft-b --bisect --steps 20 -- train.py",
    ),
    "completion": ("source <(clusterctl completion bash)",),
    "deploy": ("clusterctl deploy llm.ccb", "clusterctl deploy --dry-run"),
    "diagnose": ("clusterctl diagnose sft",),
    "diff": ("clusterctl diff old.ccb new.ccb",),
    "ds-config": ("clusterctl ds-config --stage 2 --gpu A100 -o ds.json",),
    "init": (
        "clusterctl init --user root 'gpu[01-02]=192.168.20.[14-15]'",
        "clusterctl init --from hostfile",
    ),
    "inspect": ("clusterctl inspect llm.ccb",),
    "jupyter": ("clusterctl jupyter", "clusterctl jupyter gpu02 --port 8888"),
    "logs": ("clusterctl logs -f", "clusterctl logs sft --node gpu01"),
    "metrics": ("clusterctl metrics sft", "clusterctl metrics train.log"),
    "monitor": ("clusterctl monitor", "clusterctl monitor sft --every 1"),
    "nodes": ("clusterctl nodes",),
    "nodes list": ("clusterctl nodes list --limit 'gpu[01-04]'",),
    "nodes trust": ("clusterctl nodes trust gpu03",),
    "pack-env": ("clusterctl pack-env llm", "clusterctl pack-env --exclude '*.a' --split 4G"),
    "pack-os": ("clusterctl pack-os --release debian12",),
    "pack-tool": ("clusterctl pack-tool -o clusterctl.run",),
    "plan": ("clusterctl plan llama-3-8b --nodes 2", "clusterctl plan sft.yaml --gpus 8 --gpu H200"),
    "prune": ("clusterctl prune --keep 2 --dry-run",),
    "push": ("clusterctl push ./datasets /data/datasets",),
    "rehearse": (
        "clusterctl rehearse --nodes 2 sft.yaml",
        "clusterctl rehearse --faults kill-rank,cut-network --minutes 5 train.py -- --lr 1e-4",
    ),
    "releases": ("clusterctl releases",),
    "report": ("clusterctl report sft", "clusterctl report sft-a sft-b -o compare.html"),
    "resume": ("clusterctl resume sft", "clusterctl resume sft --exclude gpu03"),
    "rollback": ("clusterctl rollback", "clusterctl rollback --to 773efc33"),
    "run": ("clusterctl run -- nvidia-smi -L", "clusterctl run 'cat /proc/loadavg | cut -c1-4'"),
    "runs": ("clusterctl runs list --state failed",),
    "runs list": ("clusterctl runs list --since 7d", "clusterctl runs list --state failed --name sft"),
    "runs prune": (
        "clusterctl runs prune --older-than 30d --keep 5 --dry-run",
        "clusterctl runs prune 20261123-101500-sft-1a2b",
    ),
    "sandbox": ("clusterctl sandbox up --nodes 3",),
    "sandbox down": ("clusterctl sandbox down",),
    "sandbox list": ("clusterctl sandbox list",),
    "sandbox up": ("clusterctl sandbox up --nodes 3",),
    "save": ("clusterctl save sft",),
    "services": ("clusterctl services apply --dry-run",),
    "services apply": ("clusterctl services apply", "clusterctl services apply hosts chrony --dry-run"),
    "services status": ("clusterctl services status",),
    "services undo": ("clusterctl services undo nfs",),
    "services verify": ("clusterctl services verify chrony",),
    "status": ("clusterctl status", "clusterctl status sft --watch"),
    "stop": ("clusterctl stop sft --save",),
    "tensorboard": ("clusterctl tensorboard sft", "clusterctl tensorboard /data/logs --node gpu02"),
    "top": ("clusterctl top", "clusterctl top --limit 'gpu[01-04]' --once"),
    "train": (
        "clusterctl train --nodes 2 sft.yaml",
        "clusterctl train --nodes 2 --restarts 3 --detach train.py -- --lr 1e-4",
        "clusterctl train --nodes 2 -- torchrun --nproc_per_node 8 train.py",
    ),
    "tunnel": ("clusterctl tunnel gpu01:8080", "clusterctl tunnel gpu01 -- python -m http.server -b 127.0.0.1 {port}"),
    "verify": ("clusterctl verify --limit gpu01",),
    "webui": ("clusterctl webui",),
}


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
        _flush_streams()
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


def _flush_streams() -> None:
    """Flush the streams. Output that cannot be written is dropped, or Python would fail again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # noqa: PERF203 - two streams
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
            commands = (each for each in vars(module).values() if isinstance(each, click.Command))
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


def epilog(path: str) -> str | None:
    """The text at the end of a command's help: its examples, each on a separate line."""
    if path not in EXAMPLES:
        return None
    title = "Examples:" if len(EXAMPLES[path]) > 1 else "Example:"
    return "\n".join(("\b", title, *(f"  {line}" for line in EXAMPLES[path])))


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
