"""A service is one file: dropped into a copy of the tree, it is in the schema, the help, the order and the plans."""

import subprocess
import sys

import pytest

MOTD = """
from provision.inventory.schema import Section, Text
from provision.services.kit.changes import require, write_file
from provision.services.kit.plans import NodeSteps

ABOUT = "a message for users who log in"
AFTER = ("chrony",)


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
USE = """
import sys
from pathlib import Path
from provision import services
from provision.inventory import load
from provision.services.kit import plans, scripts
inventory = load(Path("inventory.yaml"))
print(services.__file__, *plans.choose(inventory))
plan = plans.plan_services(inventory, inventory.nodes, plans.choose(inventory))
print(scripts.apply_script(plan.steps["base"]["gpu01"], "t"))
"""
CLUSTERCTL = ("-c", "from provision.cli import main; main()")
INVENTORY = (
    "prefix: /opt/llm/current\nnodes: {gpu01: 127.0.0.9}\nservices: {motd: {text: '%s'}, chrony: {}, hosts: {}}\n"
)


@pytest.fixture
def copy(tmp_path, copy_tree):
    copy_tree(tmp_path)
    (tmp_path / "provision/services/motd.py").write_text(MOTD)
    (tmp_path / "inventory.yaml").write_text(INVENTORY % "hello")
    return tmp_path


def python(folder, *argv):
    return subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_dropped_in_file_is_a_service(copy):
    used = python(copy, "-c", USE)
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith(f"{copy}/provision/services/__init__.py hosts chrony motd\n")
    assert "cc_stage /etc/motd 644 hello" in used.stdout
    shown = python(copy, *CLUSTERCTL, "services", "--help")
    assert "motd         a message for users who log in" in shown.stdout, shown.stderr


@pytest.mark.parametrize(
    ("text", "printed"),
    [("what now?", "services.motd.text (line 3): asks a question"), ("", "services.motd.text (line 3): is empty")],
)
def test_errors_in_its_options_are_reported_with_their_line(copy, text, printed):
    (copy / "inventory.yaml").write_text(INVENTORY % text)
    result = python(copy, *CLUSTERCTL, "services", "apply", "--dry-run")
    assert result.returncode != 0
    assert printed in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("old", "new", "printed"),
    [
        *((f"{name} ", f"{name}_ ", f"it does not define {name}") for name in ("ABOUT", "AFTER")),
        ("class Options", "class Choices", "it does not define Options"),
        *((f"def {name}", f"def no_{name}", f"it does not define {name}") for name in ("problems", "plan", "verify")),
        ('"chrony"', '"ntp"', "AFTER contains ntp, which is not a service"),
        ('"chrony"', '"motd"', "AFTER is circular: motd -> motd"),
    ],
)
def test_file_that_is_not_a_service_is_an_error_with_the_reason(copy, old, new, printed):
    (copy / "provision/services/motd.py").write_text(MOTD.replace(old, new))
    result = python(copy, *CLUSTERCTL, "services", "apply", "motd", "--dry-run")
    assert result.returncode not in (0, None)
    assert printed in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
