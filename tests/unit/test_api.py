"""``provision.api`` has every option of the commands, with the same defaults and limits, and means the same by it."""

import inspect

import click
import pytest

from provision import api
from provision.cli.options import Number
from provision.cli.rehearse import rehearse_command
from provision.cli.train import train_command
from provision.errors import UsageError
from provision.model import Notice
from provision.output import Reporter
from provision.run import node_history
from provision.slurm import Options
from provision.tasks import rehearse, train
from provision.tasks.asked import BOUNDS

# The option's name on the command line, where it differs from Python's.
NAMES = {
    "words": "command", "count": "nodes", "per_node": "gpus_per_node", "variables": "env", "send": "include",
    "starter": "on", "inventory_path": "inventory",
}  # fmt: skip
OF_SLURM = {"partition", "limit_time", "account", "sbatch"}  # the fields of SlurmOptions
# Python has other ways for these: events and results are data, and a dry run prints commands.
NOT_IN_PYTHON = {"as_json", "quiet", "dry_run", "shell"}
INVENTORY = "prefix: /opt/llm/current\nnodes:\n" + "".join(f"  gpu0{n}: 10.0.0.{n}\n" for n in range(1, 6))


def options(command):
    """The options of a command, by their names in Python."""
    params = {param.name: param for param in command.params}
    assert not {"partition", "sbatch"} & set(params) or set(params) >= OF_SLURM
    return {NAMES.get(name, name): params[name] for name in params if name not in NOT_IN_PYTHON | OF_SLURM}


@pytest.mark.parametrize(
    ("command", "function"), [(train_command, api.train), (rehearse_command, api.rehearse)], ids=["train", "rehearse"]
)
def test_every_option_of_the_command_line_is_an_argument(command, function):
    known = options(command)
    arguments = dict(inspect.signature(function).parameters)
    assert arguments.pop("on_event")
    assert set(arguments) == set(known)
    for name, argument in arguments.items():
        param = known[name]
        assert f"        {name}: " in function.__doc__, f"{name} is not explained"
        if isinstance(param, click.Argument) or name == "inventory":
            continue
        # An option without a default has click's own mark for it.
        default = param.default if isinstance(param.default, int | float | str) else argument.default
        assert argument.default == default or (param.is_flag and argument.default is False), name
        if isinstance(param.type, Number):
            assert BOUNDS[name] == param.type.bound, name


EVERYTHING = {  # every argument that is part of the training, with the words of the command line
    "launcher": ("torchrun", "--launcher torchrun"), "gpus_per_node": (2, "--gpus-per-node 2"),
    "code": (".", "--code ."), "include": (["*.bin"], "--include *.bin"), "output": ("out", "--output out"),
    "resume_arg": ("--from {checkpoint}", ["--resume-arg", "--from {checkpoint}"]), "pattern": ("a", "--pattern a"),
    "env": ({"A": "1"}, "--env A=1"), "name": ("n", "--name n"), "restarts": (3, "--restarts 3"),
    "copies": (2, "--copies 2"), "copies_space": ("5G", "--copies-space 5G"),
    "copies_rate": ("6M", "--copies-rate 6M"), "save_to": ("memory", "--save-to memory"),
    "save_every": ("10min", "--save-every 10min"), "lost_after": (25.0, "--lost-after 25"),
    "hang_after": (30.0, "--hang-after 30"), "on_hang": ("warn", "--on-hang warn"), "spares": (1, "--spares 1"),
    "min_nodes": (1, "--min-nodes 1"), "notify": ("cat", "--notify cat"), "expected": ("1-2", "--expected 1-2"),
    "detach": (True, "--detach"), "force": (True, "--force"), "zero": ("2", "--zero 2"),
    "nodes": (2, "--nodes 2"), "limit": ("gpu[01-04]", "--limit gpu[01-04]"), "exclude": ("gpu01", "--exclude gpu01"),
}  # fmt: skip


class Started(Exception):  # noqa: N818 - it is no error
    """What would be started, and where."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an inventory, in which nothing is started: ``Started`` has what would be."""

    def start(session, asked):
        raise Started(asked, [node.name for node in session.nodes], dict(session.inventory.train.env))

    monkeypatch.setattr(train, "train", start)
    monkeypatch.setattr(rehearse, "rehearse", start)
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "a.py").write_text("")
    return tmp_path


def typed(command, *words):
    """What a command line starts."""
    with pytest.raises(Started) as started:
        command.main([*words, "--", "a.py"], command.name, standalone_mode=False, obj=Reporter())
    return started.value.args


def called(function, **arguments):
    with pytest.raises(Started) as started:
        function("a.py", **arguments)
    return started.value.args


def test_the_same_options_are_the_same_training(folder):
    rest = {"command", "inventory", "module", "accelerate_config", "exclude_bad", "on"}
    assert set(EVERYTHING) == set(options(train_command)) - rest  # the rest is below
    words = []
    for _, text in EVERYTHING.values():
        words += text if isinstance(text, list) else text.split()
    asked, nodes, env = called(api.train, **{name: value for name, (value, _) in EVERYTHING.items()})
    assert (asked, nodes, env) == typed(train_command, *words)
    assert (nodes, env) == (["gpu02", "gpu03", "gpu04"], {"A": "1"})
    assert (asked.spares, asked.min_nodes, asked.policy.copies.peers, asked.policy.copies.memory) == (1, 1, 2, True)


@pytest.mark.parametrize(("words", "seconds"), [((), 60), (("--spares", "1", "--nodes", "2"), 15)])
def test_a_silent_node_is_lost_sooner_where_a_spare_waits(folder, words, seconds):
    asked, _, _ = typed(train_command, *words)
    assert asked.policy.lost_after == seconds
    asked, _, _ = typed(train_command, *words, "--lost-after", "7")
    assert asked.policy.lost_after == 7


def test_the_other_options_are_the_same_training(folder):
    (folder / "fsdp.yaml").write_text("a: 1\n")
    same = called(api.train, accelerate_config="fsdp.yaml", exclude_bad=True, inventory="inventory.yaml")
    assert same == typed(train_command, "--accelerate-config", "fsdp.yaml", "--exclude-bad", "-i", "inventory.yaml")
    with pytest.raises(Started) as started:
        api.train("--x", module="pkg.a", code=".")
    assert started.value.args[0].words == ("-m", "pkg.a", "--x")


def test_slurm_from_python(folder, monkeypatch):
    words = ["--on", "slurm", "--partition", "main", "--time", "90", "--account", "a", "--sbatch-arg=--qos=high"]
    on = api.SlurmOptions("main", "90", "a", ("--qos=high",))
    asked, nodes, _ = called(api.train, on=on, nodes=2, spares=1)
    assert (asked, nodes, {}) == typed(train_command, *words, "--nodes", "2", "--spares", "1")
    assert (asked.on.options, len(nodes)) == (on, 5)  # Slurm chooses among all
    assert called(api.train, on="slurm")[0].on.options == Options()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[01-02]")
    assert called(api.train)[0].on.allocation.names == ("gpu01", "gpu02")
    assert called(api.train, on="ssh")[0].on is None
    with pytest.raises(UsageError, match="a Slurm job uses all of its nodes"):
        api.train("a.py", on="slurm", exclude_bad=True)


def test_a_rehearsal_from_python(folder):
    with pytest.raises(UsageError, match="kills processes"):
        api.rehearse("a.py")
    asked, nodes, _ = called(
        api.rehearse, yes=True, nodes=2, minutes=5, faults=["kill-rank"], lost_after=9.0, force=True
    )
    words = ["--yes", "--nodes", "2", "--minutes", "5", "--faults", "kill-rank", "--lost-after", "9", "--force"]
    expected, there, _ = typed(rehearse_command, *words)
    assert (asked.faults, asked.seconds, asked.force, nodes) == (expected.faults, 300.0, True, there)
    assert asked.training.policy == expected.training.policy


@pytest.mark.parametrize(
    "arguments",
    [
        {"spares": -1}, {"spares": "1"}, {"min_nodes": 0}, {"copies": 17}, {"copies": True}, {"save_to": "tape"},
        {"on": "pbs"}, {"on_hang": "kill"}, {"lost_after": float("nan")}, {"nodes": 0}, {"copies_space": "much"},
        {"nodes": 4, "spares": 2}, {"spares": 5}, {"on": api.SlurmOptions(time="soon")}, {"nodes": 1, "min_nodes": 2},
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_a_usage_error(folder, arguments):
    with pytest.raises(UsageError) as error:
        api.train("a.py", **arguments)
    assert error.value.hint


def test_excluded_nodes_are_listed_skipped_and_trusted(folder):
    node_history.exclude(folder / "inventory.yaml", "gpu02", "its power is off", "run-1")
    found = {each.node: each.excluded for each in api.nodes()}
    assert found["gpu02"].why == "its power is off"
    assert found["gpu01"] is None
    events = []
    assert called(api.train, on_event=events.append)[1] == ["gpu01", "gpu03", "gpu04", "gpu05"]
    assert [event.level for event in events if isinstance(event, Notice)] == ["warning"]
    assert list(api.trust("gpu[01-02]")) == ["gpu02"]
    assert len(called(api.train)[1]) == 5
    with pytest.raises(UsageError, match="no node"):
        api.trust()
