"""A check, a service, a launcher and a failure cause are one file each.

Each test drops one file into a copy of the tree and uses it through the real command line, without any other change.
"""

import json
import subprocess
import sys

import pytest

CHECK = """
from provision.checks.kit import equal

KERNEL = equal(
    "site.motto",
    "the same motto on every node",
    probe="echo onward",
    read=lambda answer: answer.out.strip() or None,
    fix="write the same motto on every node",
    noun="motto",
    why="Users read it at every login.",
)
"""
SERVICE = """
from provision.inventory.schema import Section, Text
from provision.services.kit.changes import require, write_file
from provision.services.kit.plans import NodeSteps

ABOUT = "a message for users who log in"
AFTER = ("hosts",)


class Options(Section):
    text: Text


def problems(options, inventory):
    if "?" in options.text:
        yield "text", "asks a question"


def plan(options, inventory):
    for node in inventory.nodes:
        yield NodeSteps(node.name, "base", (write_file("message", "/etc/motd", options.text),))


def verify(options, inventory):
    for node in inventory.nodes:
        yield NodeSteps(node.name, "base", (require("message", "[ -s /etc/motd ]", "echo none"),))
"""
LAUNCHER = """
from provision.launchers.kit import Command, Options
from provision.run import Job

NAME = "gnu"
ABOUT = "GNU parallel on every node"
COMMANDS = ("parallel",)
KINDS = ("script",)
REQUIRES = ()
OPTIONS = Options()


def suits(job):
    return False


def parse(command, words):
    return Job("script", words[0], tuple(words[1:]), launcher=NAME)


def command(spec, rank):
    return Command(["parallel", spec.config, *spec.job.args], {})
"""
CAUSE = """
from provision.diagnosis.cause import Cause

SUBJECT = "Licences"
ORDER = 5
CAUSES = (
    Cause(
        id="licence.expired",
        says="the licence of {product} has expired",
        fix=("renew the licence of {product}", "restart the licence server"),
        source="recorded (a licence server)",
        lines=(r"RuntimeError: licence of (?P<product>\\w+) has expired",),
    ),
)
"""
LOG = """\
step 1: loss 2.5
Traceback (most recent call last):
  File "train.py", line 7, in <module>
    main()
RuntimeError: licence of Solver has expired
"""
INVENTORY = "prefix: /opt/llm/current\nnodes: {here: local}\nservices: {motd: {text: '%s'}}\n"


@pytest.fixture
def tree(tmp_path, copy_tree):
    """A copy of the tree, with the function that runs clusterctl in it."""
    copy_tree(tmp_path)

    def drop(path, text):
        assert not (tmp_path / path).exists()
        (tmp_path / path).write_text(text)

    def clusterctl(*words, code="from provision.cli import main; main()"):
        return subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )

    return drop, clusterctl


def test_a_check_is_one_file(tree):
    drop, clusterctl = tree
    assert clusterctl("check", "--only", "site.motto").returncode == 2
    drop("provision/checks/site.py", CHECK)
    found = clusterctl("check", "--only", "site.motto", "--verbose")
    assert found.returncode == 0, found.stderr
    assert "site.motto" in found.stdout
    assert "onward" in found.stdout


def test_a_check_with_another_subject_is_named(tree):
    drop, clusterctl = tree
    drop("provision/checks/site.py", CHECK.replace("site.motto", "os.motto"))
    found = clusterctl("check", "--only", "os.motto")
    assert "site.py declares the check os.motto: its ids must start with site." in found.stderr
    assert "Traceback" not in found.stderr


def test_a_service_is_one_file(tree, tmp_path):
    drop, clusterctl = tree
    (tmp_path / "inventory.yaml").write_text(INVENTORY % "hello")
    assert clusterctl("services", "apply", "--dry-run").returncode == 2
    drop("provision/services/motd.py", SERVICE)
    planned = clusterctl("services", "apply", "--dry-run", "--scripts", "out")
    assert planned.returncode == 0, planned.stderr
    assert "motd  here: would change: message" in planned.stdout
    assert "/etc/motd" in (tmp_path / "out/here-01-base.sh").read_text()
    assert "a message for users who log in" in clusterctl("services", "--help").stdout
    (tmp_path / "inventory.yaml").write_text(INVENTORY % "why?")
    refused = clusterctl("services", "apply", "--dry-run")
    assert refused.returncode == 2
    assert "asks a question" in refused.stderr


def test_a_launcher_is_one_file(tree):
    drop, clusterctl = tree
    use = (
        "from provision.launchers import from_words, get; import sys; job = from_words(sys.argv[1:]); "
        "print(job.launcher, job.target, *job.args, get(job.launcher).ABOUT)"
    )
    assert clusterctl("parallel", "train.py", "--lr", "1", code=use).returncode != 0
    drop("provision/launchers/gnu.py", LAUNCHER)
    typed = clusterctl("parallel", "train.py", "--lr", "1", code=use)
    assert typed.stdout == "gnu train.py --lr 1 GNU parallel on every node\n", typed.stderr
    assert "gnu" in clusterctl("train", "--help").stdout


def test_a_failure_cause_is_one_file(tree, tmp_path):
    drop, clusterctl = tree
    (tmp_path / "train.log").write_text(LOG)
    before = json.loads(clusterctl("diagnose", "--log", "train.log", "--json").stdout)
    assert "licence.expired" not in json.dumps(before)
    drop("provision/diagnosis/causes/licences.py", CAUSE)
    found = clusterctl("diagnose", "--log", "train.log")
    assert found.returncode in (0, 1)
    assert "the licence of Solver has expired" in found.stdout, found.stderr
    assert "renew the licence of Solver" in found.stdout
    subjects = clusterctl(code="from provision.diagnosis.causes import SUBJECTS; print(*SUBJECTS, sep='; ')")
    assert subjects.stdout.startswith("Licences; Memory; GPUs and their driver; ")


@pytest.mark.parametrize("missing", ["SUBJECT", "ORDER", "CAUSES"])
def test_a_file_of_causes_without_a_name_is_named(tree, missing):
    drop, clusterctl = tree
    drop("provision/diagnosis/causes/licences.py", CAUSE.replace(missing, f"NO_{missing}", 1))
    found = clusterctl("diagnose", "--log", "train.log")
    assert found.returncode != 0
    assert f"licences.py is not a file of failure causes: it does not define {missing}" in found.stderr
