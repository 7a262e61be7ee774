"""The wheel works in a clean virtual environment: the command starts, and the templates are found."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    # uv takes a tenth of pip's CPU time, but does not know an index that only pip's configuration names.
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "-q", "--python", python, wheel]
    if not uv[0].exists() or subprocess.run(uv, check=False, capture_output=True).returncode:
        # what is never imported is not compiled
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", wheel]
        subprocess.run(pip, check=True, capture_output=True)
    return python


def run(*argv):
    # From another folder and without PYTHONPATH, so that the checkout is not imported.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(argv, check=False, capture_output=True, text=True, cwd="/", timeout=60, env=environment)


def test_the_command_starts(installed):
    result = run(installed.with_name("clusterctl"), "--help")
    assert result.returncode == 0, result.stderr
    assert "pack-env" in result.stdout
    assert "deploy" in result.stdout


def test_a_template_renders_from_the_wheel(installed):
    program = (
        "import provision, provision.render as r; print(provision.__file__);"
        " print(r.render('release/remove.sh.j2', release='/a b', removing='/c'))"
    )
    result = run(installed, "-c", program)
    assert result.returncode == 0, result.stderr
    assert str(installed.parents[1]) in result.stdout
    assert "mv -T -- '/a b' /c" in result.stdout


def test_a_report_is_written_from_the_wheel(installed):
    program = "from provision.report import RunData, report_page; print(report_page([RunData('r1')], 0.0))"
    result = run(installed, "-c", program)
    assert "leeoniya/uPlot" in result.stdout, result.stderr


def test_the_agent_is_in_the_wheel(installed):
    program = "from provision.run.files import sources; print(*sources('agent'))"
    result = run(installed, "-c", program)
    assert {"agent/__main__.py", "agent/link/hub.py"} <= set(result.stdout.split()), result.stderr


def test_fab_lists_the_tasks():
    result = subprocess.run(
        [Path(sys.executable).with_name("fab"), "--list"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    for name in ("pack-env", "deploy", "train"):
        assert name in result.stdout
