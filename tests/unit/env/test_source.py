import sys

import pytest

from provision.env.source.environment import find_env, known_envs
from provision.errors import UsageError


def make(prefix):
    (prefix / "conda-meta").mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(sys.executable)
    return prefix


@pytest.fixture
def root(tmp_path):
    root = make(tmp_path / "conda")
    make(root / "envs" / "llm")
    return root


def test_by_path(root):
    assert find_env(str(root / "envs" / "llm"), {}) == root / "envs" / "llm"
    assert find_env(f"{root}/envs/../envs/llm/", {}) == root / "envs" / "llm"


def test_an_existing_folder_needs_no_slash(root, monkeypatch):
    monkeypatch.chdir(root / "envs")
    assert find_env("llm", {}) == root / "envs" / "llm"


@pytest.mark.parametrize(
    "environ",
    [
        {"CONDA_EXE": "{root}/bin/conda"},
        {"CONDA_PREFIX": "{root}"},
        {"CONDA_PREFIX": "{root}/envs/other"},
        {"MAMBA_ROOT_PREFIX": "{root}"},
        {"CONDA_ENVS_PATH": "/nowhere:{root}/envs"},
        {"CONDA_ENVS_DIRS": "{root}/envs"},
        {"HOME": "{root}/home"},
    ],
)
def test_by_name(root, environ):
    (root / "home" / ".conda").mkdir(parents=True)
    (root / "home" / ".conda" / "environments.txt").write_text(f"/gone\n{root}/envs/llm\n")
    filled = {key: value.format(root=root) for key, value in environ.items()}
    assert find_env("llm", filled) == root / "envs" / "llm"
    assert root / "envs" / "llm" in list(known_envs(filled))


def test_base(root):
    assert find_env("base", {"CONDA_EXE": f"{root}/bin/conda"}) == root


def test_the_active_one(root):
    assert find_env(None, {"CONDA_PREFIX": str(root / "envs" / "llm")}) == root / "envs" / "llm"


def test_none_is_active():
    with pytest.raises(UsageError, match="no environment is active"):
        find_env(None, {})


def test_an_unknown_name_lists_the_known(root):
    with pytest.raises(UsageError, match="no conda environment named 'lm'; known: llm"):
        find_env("lm", {"CONDA_EXE": f"{root}/bin/conda"})


def test_folder_that_is_not_an_environment(tmp_path, root):
    with pytest.raises(UsageError, match="is not a folder"):
        find_env("/no/where", {})
    with pytest.raises(UsageError, match="no conda-meta"):
        find_env(str(tmp_path), {})
    python = root / "bin" / "python"
    python.unlink()
    with pytest.raises(UsageError, match="has no bin/python"):
        find_env(str(root), {})
    python.write_text("")
    with pytest.raises(UsageError, match="not executable"):
        find_env(str(root), {})


LONG = "x" * 300  # no file can have this name: root may read everything, and yet this is an OSError


def test_unreadable_listed_environments_are_skipped(root, tmp_path):
    (tmp_path / ".conda").mkdir()
    (tmp_path / ".conda" / "environments.txt").write_text(f"/{LONG}\n{root}/envs/llm\n")
    assert find_env("llm", {"HOME": str(tmp_path), "CONDA_ENVS_PATH": f"/{LONG}"}) == root / "envs" / "llm"


@pytest.mark.parametrize("spec", [f"/{LONG}", LONG, f"~{LONG}/env", "~nobody-of-this-name/env"])
def test_unreadable_path_is_named(spec):
    with pytest.raises(UsageError, match=r"cannot read .*name too long|no conda environment|is not a folder"):
        find_env(spec, {})


def test_another_users_environment_is_named(root, monkeypatch):
    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_dir", refuse)  # root may read everything
    with pytest.raises(UsageError, match=r"cannot read .*llm: permission denied") as error:
        find_env(str(root / "envs" / "llm"), {})
    assert "permission" in error.value.hint
