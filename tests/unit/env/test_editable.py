import shutil
import subprocess

import pytest

from provision.env import editable, scan
from provision.env.pack import pack
from provision.env.survey import survey
from provision.model import ignore

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed here")


def travelling(root, prefix, references=()):
    return {one.path for one in editable.checkout_tree(root, "src/p", prefix, references).found if one.type != "dir"}


def found_in(prefix):
    paths = frozenset(one.path for one in scan.environment(prefix).found)
    return editable.find_editables(prefix, ["lib/python3.11/site-packages"], paths)


def git(root, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def test_a_checkout_travels_without_caches(prefix, checkout, helpers):
    for name in (".git/HEAD", "__pycache__/a.pyc", ".venv/pyvenv.cfg", "x/pyvenv.cfg", "node_modules/a", "old.ccb"):
        helpers.write(checkout / name, "x")
    assert travelling(checkout, prefix) == {"src/p/pyproject.toml", "src/p/src/proj/__init__.py"}


@needs_git
def test_what_git_ignores_stays_behind_but_for_what_python_needs(prefix, checkout, helpers):
    helpers.write(checkout / ".gitignore", "out/\n*.so\n_version.py\n*.egg-info/\n*.log\n")
    helpers.write(checkout / "committed file.txt", "x")
    git(checkout, "init")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-m", "x")
    for name in ("out/a.py", "out/model.bin", "src/proj/fast.so", "src/proj/_version.py", "a.log", "untracked.py"):
        helpers.write(checkout / name, "x")
    helpers.write(checkout / "proj.egg-info" / "PKG-INFO", "x")
    (checkout / "pyproject.toml").unlink()
    assert travelling(checkout, prefix) == {
        "src/p/.gitignore",
        "src/p/committed file.txt",
        "src/p/proj.egg-info/PKG-INFO",
        "src/p/src/proj/__init__.py",
        "src/p/src/proj/_version.py",
        "src/p/src/proj/fast.so",
        "src/p/untracked.py",
    }
    # a strict editable install imports from a folder that git ignores
    assert "src/p/out/a.py" in travelling(checkout, prefix, [str(checkout / "out")])


def test_an_environment_inside_its_checkout(tmp_path, helpers):
    checkout = tmp_path / "proj"
    prefix = helpers.make_env(checkout / "env", checkout)
    manifest = pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore)
    assert manifest.relocations == ((str(checkout), "src/proj"), (str(prefix), ""))
    assert not [entry.path for entry in manifest.files if entry.path.startswith("src/proj/env")]


def test_setup_py_develop(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env")
    checkout = tmp_path / "old"
    helpers.write(checkout / "setup.py", "")
    helpers.write(checkout / "lib" / "mod.py", "")
    helpers.write(prefix / helpers.SITE / "old.egg-link", f"{checkout}/lib\n../")
    helpers.write(prefix / helpers.SITE / "easy-install.pth", f"{checkout}/lib\n")
    (only,) = found_in(prefix).checkouts
    assert (only.root, only.target) == (str(checkout), "src/old")


def test_a_checkout_inside_the_prefix_just_stays(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env", tmp_path / "env" / "src" / "proj")
    assert survey(prefix).relocations == ((str(prefix), ""),)


def test_two_checkouts_of_one_name(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env", tmp_path / "a" / "proj")
    helpers.add_editable(prefix, tmp_path / "b" / "proj", "proj2")
    targets = [one.target for one in found_in(prefix).checkouts]
    assert targets == ["src/proj", "src/proj-2"]


def test_home_and_dead_paths_stay_behind(tmp_path, helpers, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    prefix = helpers.make_env(tmp_path / "env")
    helpers.write(prefix / helpers.SITE / "paths.pth", f"{tmp_path}\n/does/not/exist\nimport os\n# note\nrelative\n")
    found = found_in(prefix)
    assert not found.checkouts
    assert [notice.split()[0] for notice in found.notices] == [str(tmp_path), "/does/not/exist"]
