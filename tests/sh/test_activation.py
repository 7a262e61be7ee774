"""``conda activate NAME`` on a node: the script under three shells, and what conda's own kind of lookup then finds."""

import os
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from provision.env.bundle.manifest import Manifest, PrefixFiles
from provision.env.release.install import conda_name_steps
from provision.env.source.environment import find_env
from provision.model import Inventory, Node
from provision.script import compile_steps, parse

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}


@pytest.fixture(params=SHELLS)
def shell(request):
    if shutil.which(SHELLS[request.param][0]) is None:
        pytest.fail(f"{request.param} is missing: apt-get install dash bash busybox")
    return SHELLS[request.param]


@pytest.fixture
def home(tmp_path):
    home = tmp_path / "home of $USER"
    home.mkdir()
    return home


@pytest.fixture
def prefix(tmp_path):
    """An inventory's prefix that leads to a release with a Python."""
    release = tmp_path / "it's llm" / "releases" / "0123456789ab"
    (release / "conda-meta").mkdir(parents=True)
    (release / "bin").mkdir()
    (release / "bin/python").symlink_to("/bin/true")
    prefix = tmp_path / "it's llm" / "current"
    prefix.symlink_to("releases/0123456789ab")
    return prefix


def steps(prefix, name="llm"):
    inventory = Inventory(Path("i.yaml"), PurePosixPath(prefix), (Node("node01", "10.0.0.1"),))
    manifest = Manifest(
        name=name, tool="1", created="", platform="linux-64", python="3.11.7", source_prefix="/p", chunks=(),
        prefix_files=PrefixFiles("", 0, 0, 0), files=(), relocations=(("/p", ""),),
    )  # fmt: skip
    return conda_name_steps(inventory, manifest)


def apply(shell, home, prefix, **environ):
    script = compile_steps(steps(prefix), token="t")
    environ = {"PATH": "/usr/bin:/bin"} | ({"HOME": str(home)} if home else {}) | environ
    done = subprocess.run([*shell, "-c", script], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (step,) = parse("t", done.stdout)
    return step.state


def install_conda(home):
    conda = home / "miniconda3" / "bin" / "conda"
    conda.parent.mkdir(parents=True)
    conda.write_text("#!/bin/sh\n")
    conda.chmod(0o755)


def test_without_conda_nothing_is_changed(shell, home, prefix):
    assert apply(shell, home, prefix) == "ok"
    assert list(home.iterdir()) == []
    assert apply(shell, None, prefix) == "ok"


def test_the_environment_is_known_by_its_name_and_its_path(shell, home, prefix):
    install_conda(home)
    assert apply(shell, home, prefix) == "changed"
    link = home / ".conda/envs/llm"
    assert str(link.readlink()) == str(prefix)
    assert (home / ".conda/environments.txt").read_text() == f"{prefix}\n"
    assert find_env("llm", {"HOME": str(home)}) == link
    assert apply(shell, home, prefix) == "ok"


def test_list_without_a_final_newline_stays_intact(shell, home, prefix):
    (home / ".conda").mkdir()
    (home / ".conda/environments.txt").write_text(f"/opt/conda\n{prefix}2")
    assert apply(shell, home, prefix) == "changed"
    assert (home / ".conda/environments.txt").read_text() == f"/opt/conda\n{prefix}2\n{prefix}\n"
    assert apply(shell, home, prefix) == "ok"


def identity(path):
    """The state that shows whether a file was touched; reading it may change its access time."""
    stat = os.lstat(path)
    return stat.st_ino, stat.st_mode, stat.st_mtime_ns


@pytest.mark.parametrize("kind", ["folder", "link", "dangling"])
def test_existing_name_is_not_changed(shell, home, prefix, tmp_path, kind):
    taken = home / ".conda/envs/llm"
    taken.parent.mkdir(parents=True)
    if kind == "folder":
        taken.mkdir()
    else:
        taken.symlink_to(tmp_path if kind == "link" else "/nowhere")
    before = identity(taken)
    assert apply(shell, home, prefix) == "changed"  # it is listed by its path all the same
    assert identity(taken) == before
    assert apply(shell, home, prefix) == "ok"


def test_mamba_finds_the_environment_in_its_folders(shell, home, prefix, tmp_path):
    (home / "micromamba/envs").mkdir(parents=True)
    (tmp_path / "root/envs").mkdir(parents=True)
    assert apply(shell, home, prefix, MAMBA_ROOT_PREFIX=str(tmp_path / "root")) == "changed"
    for place in (home / "micromamba/envs", tmp_path / "root/envs"):
        assert str((place / "llm").readlink()) == str(prefix)
    assert not (home / ".conda").exists()
    assert apply(shell, home, prefix, MAMBA_ROOT_PREFIX=str(tmp_path / "root")) == "ok"


def test_unwritable_home_does_not_fail_the_deploy(shell, home, prefix):
    (home / ".conda").write_text("")
    assert apply(shell, home, prefix) == "ok"
    install_conda(home)
    assert apply(shell, home, prefix) == "ok"
    assert apply(shell, "/nonexistent/home", prefix) == "ok"


@pytest.mark.parametrize("name", ["base", "..", "a b", "a/b", "a:b"])
def test_name_invalid_in_conda_is_not_registered(name, prefix):
    assert steps(prefix, name) == ()


def test_rattler_activates_the_environment_by_its_name(tmp_path, small_env):
    home = tmp_path / "home"  # rattler itself does not quote what sh would take for more than text
    home.mkdir()
    from rattler.shell import ActivationVariables, Shell, activate

    install_conda(home)
    assert apply(["sh"], home, small_env) == "changed"
    prefix = find_env("llm", {"HOME": str(home)})
    variables = ActivationVariables(current_path=["/usr/bin", "/bin"])
    script = activate(prefix, variables, Shell.bash).script
    program = f'{script}\nprintf "%s\\n" "$CONDA_PREFIX"; python -c "import sys; print(sys.prefix)"; command -v pip\n'
    message = subprocess.check_output(["env", "-i", "PATH=/usr/bin:/bin", "bash", "-c", program], text=True)
    assert message.splitlines() == [str(prefix), str(prefix), f"{prefix}/bin/pip"]
