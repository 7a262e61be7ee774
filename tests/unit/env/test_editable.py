import os
import shutil
import subprocess

import pytest

from provision.env.bundle.reader import open_bundle
from provision.env.packing.pack import pack
from provision.env.source import editable, files
from provision.env.source.survey import find_aliases, scan_environment, survey
from provision.errors import UsageError
from provision.model import ignore

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed here")


def travelling(root, prefix, references=()):
    return {
        one.path for one in editable.list_checkout(root, "src/p", prefix, references).tree.sources if one.type != "dir"
    }


def found_in(prefix):
    paths = frozenset(one.path for one in files.walk_environment(prefix).sources)
    return editable.find_editables(prefix, ["lib/python3.11/site-packages"], paths)


def git(root, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def test_checkout_is_packed_without_caches(prefix, checkout, helpers):
    for name in (".git/HEAD", "__pycache__/a.pyc", ".venv/pyvenv.cfg", "x/pyvenv.cfg", "node_modules/a", "old.ccb"):
        helpers.write(checkout / name, "x")
    assert travelling(checkout, prefix) == {"src/p/pyproject.toml", "src/p/src/proj/__init__.py"}


@needs_git
def test_ignored_files_are_not_packed_unless_python_needs_them(prefix, checkout, helpers):
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


@needs_git
def test_ignored_code_of_a_package_is_packed_and_ignored_folders_of_a_project_are_not(tmp_path, helpers):
    root = tmp_path / "p"
    for name in ("src/p/__init__.py", "src/ns/part.py", "docs/conf.py", "setup.py", "src/c/notes.txt"):
        helpers.write(root / name, "x")
    helpers.write(root / ".gitignore", "*.so\nbuild/\n_build/\nmade/\n*.bin\ncache_of_p/\n")
    git(root, "init")
    git(root, "add", "-A")
    ignored = {
        "src/p/_C/fast.so": True,
        "src/p/_C/lib.so.1.2": True,
        "src/p/_C/notes.bin": False,
        "src/ns/ext/_e.so": True,
        "made/__init__.py": True,
        "made/sub/b.py": True,
        "made/__pycache__/b.cpython-311.pyc": False,
        "build/lib/p/__init__.py": False,
        "src/p/weights.bin": False,
        "src/c/a.so": True,
        "build/temp/fast.so": False,
    }
    for name in ignored:
        helpers.write(root / name, "x")
    found = editable.list_checkout(root, "src/p", tmp_path / "env")
    paths = {one.path.removeprefix("src/p/") for one in found.tree.sources}
    assert {name: name in paths for name in ignored} == ignored
    assert [notice for notice in found.notices if "src/p/weights.bin" in notice]


@needs_git
def test_nested_repositories_follow_their_own_gitignore(tmp_path, helpers):
    inner = tmp_path / "made"
    helpers.write(inner / "sub/__init__.py", "x")
    helpers.write(inner / ".gitignore", "*.so\n*.log\n")
    git(inner, "init")
    git(inner, "add", "-A")
    git(inner, "commit", "-m", "x")
    root = tmp_path / "p"
    helpers.write(root / "a.py", "x")
    git(root, "init")
    git(root, "-c", "protocol.file.allow=always", "submodule", "add", str(inner), "third/sub")
    git(root, "commit", "-am", "x")
    git(root, "clone", str(inner), "loose")
    for place in ("third/sub", "loose"):
        helpers.write(root / place / "sub/fast.so", "x")
        helpers.write(root / place / "sub/a.log", "x")
        helpers.write(root / place / "new.py", "x")
    paths = {path.removeprefix("src/p/") for path in travelling(root, tmp_path / "env")}
    for place in ("third/sub", "loose"):
        assert {f"{place}/sub/__init__.py", f"{place}/sub/fast.so", f"{place}/new.py"} <= paths
        assert f"{place}/sub/a.log" not in paths


@needs_git
def test_git_variables_of_the_caller_are_ignored(tmp_path, helpers, monkeypatch):
    root = tmp_path / "p"
    helpers.write(root / "a.py", "x")
    helpers.write(root / ".gitignore", "data/\n")
    helpers.write(root / "data/large.bin", "x")
    git(root, "init")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert travelling(root, tmp_path / "env") == {"src/p/a.py", "src/p/.gitignore"}


@needs_git
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_repository_of_another_user_is_listed_and_nothing_of_it_is_run(tmp_path, helpers):
    root = tmp_path / "p"
    helpers.write(root / "a.py", "x")
    helpers.write(root / ".gitignore", "data/\n")
    helpers.write(root / "data/large.bin", "x")
    git(root, "init")
    git(root, "config", "core.fsmonitor", f"touch {tmp_path}/run; false")
    for path in (root, *root.rglob("*")):
        os.chown(path, 65534, 65534)
    assert travelling(root, tmp_path / "env") == {"src/p/a.py", "src/p/.gitignore"}
    assert not (tmp_path / "run").exists()


@needs_git
def test_many_untracked_files_are_named(tmp_path, helpers):
    root = tmp_path / "p"
    helpers.write(root / "a.py", "x")
    git(root, "init")
    with (root / "model.bin").open("wb") as file:
        file.truncate(3 << 30)
    (notice,) = editable.list_checkout(root, "src/p", tmp_path / "env").notices
    assert "3.2 GB" in notice
    assert "model.bin" in notice


def test_link_that_leads_out_of_its_checkout_is_named(tmp_path, helpers):
    root = tmp_path / "p"
    helpers.write(root / "a.py", "x")
    (root / "inside").symlink_to("./a.py")
    (root / "outside").symlink_to("../q/data")
    (notice,) = editable.list_checkout(root, "src/p", tmp_path / "env").notices
    assert notice.startswith(f"{root}/outside links to ../q/data")


def test_nested_checkout_stays_in_its_place(tmp_path, helpers):
    outer, inner = tmp_path / "outer", tmp_path / "outer" / "plugins" / "inner"
    prefix = helpers.make_env(tmp_path / "env", outer)
    helpers.add_editable(prefix, inner, "inner")
    found = found_in(prefix)
    assert [one.target for one in found.checkouts] == ["src/outer", "src/outer/plugins/inner"]
    manifest = pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore)
    assert "src/outer/plugins/inner/src/inner/__init__.py" in {entry.path for entry in manifest.files}


def test_checkout_is_refused_if_its_place_is_not_a_folder(prefix, tmp_path):
    (prefix / "src").symlink_to("/mnt")
    with pytest.raises(UsageError, match=r"opt/env/src is not a folder, but checkouts must go there"):
        pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore)


@needs_git
def test_tracked_folder_replaced_by_a_link_is_packed_as_the_link(prefix, checkout, tmp_path):
    (checkout / "conf" / "inner").mkdir(parents=True)
    (checkout / "conf" / "inner" / "a.yaml").write_text("x")
    (checkout / "conf-too").write_text("x")  # sorts between the folder and its files
    git(checkout, "init")
    git(checkout, "add", "-A")
    (checkout / "conf").rename(tmp_path / "elsewhere")
    (checkout / "conf").symlink_to(tmp_path / "elsewhere")
    assert travelling(checkout, prefix) >= {"src/p/conf", "src/p/conf-too"}
    assert not [path for path in travelling(checkout, prefix) if path.startswith("src/p/conf/")]
    manifest = pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore)
    open_bundle(tmp_path / "b.ccb").verify(ignore)
    assert any("src/proj/conf links to" in text for text in manifest.notices)


def test_a_checkout_by_several_names_is_one_checkout(tmp_path, helpers):
    real = tmp_path / "data" / "proj"
    prefix = helpers.make_env(tmp_path / "env", real)
    (tmp_path / "home").symlink_to("data")
    (tmp_path / "into").symlink_to("data/proj/src")
    site = prefix / helpers.SITE
    helpers.write(site / "more.pth", f"{tmp_path}/home/proj/src\n{tmp_path}/into\n")
    found = found_in(prefix)
    assert [(one.root, one.target) for one in found.checkouts] == [(str(real), "src/proj")]
    assert found.relocations == (
        (str(real), "src/proj"),
        (f"{tmp_path}/home/proj", "src/proj"),
        (f"{tmp_path}/into", "src/proj/src"),
    )


def test_a_path_that_leads_into_the_prefix_is_an_alias(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env", tmp_path / "env" / "src" / "proj")
    (tmp_path / "proj").symlink_to("env/src/proj")
    (tmp_path / "same env").symlink_to("env")
    helpers.write(prefix / helpers.SITE / "more.pth", f"{tmp_path}/proj/src\n{tmp_path}/same env/src\n")
    found = found_in(prefix)
    assert not found.checkouts
    assert found.relocations == ((f"{tmp_path}/proj", "src/proj"), (f"{tmp_path}/same env", ""))


def test_a_checkout_that_is_a_link_in_the_prefix(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env")
    real = tmp_path / "proj"
    helpers.add_editable(prefix, real, "proj")
    (prefix / "src").mkdir()
    (prefix / "src" / "proj").symlink_to(real)
    helpers.write(prefix / helpers.SITE / "more.pth", f"{prefix}/src/proj/src\n")
    (only,) = found_in(prefix).checkouts
    assert (only.root, only.target) == (str(real), "src/proj-2")
    assert only.aliases == ((f"{prefix}/src/proj", "src/proj-2"),)


def test_paths_in_programs_and_links_of_site_packages_are_found(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env")
    site = prefix / helpers.SITE
    for name in ("hatched", "built", "flit"):
        helpers.write(tmp_path / name / "pyproject.toml", "")
        helpers.write(tmp_path / name / "pkg" / "__init__.py", "")
    hatched = f"F.map_module('pkg', '{tmp_path}/hatched/pkg/__init__.py')\n"
    helpers.write(site / "_editable_impl_hatched.py", hatched)
    helpers.write(site / "_built_editable.py", f"install({{'built': {str(tmp_path / 'built' / 'pkg')!r}}}, {{}})\n")
    helpers.write(site / "__editable___broken_finder.py", "MAPPING = {\n")
    (site / "flit").symlink_to(tmp_path / "flit" / "pkg")
    helpers.write(site / "_meson_editable_loader.py", "")
    found = found_in(prefix)
    assert [one.target for one in found.checkouts] == ["src/built", "src/flit", "src/hatched"]
    assert [notice.split()[0] for notice in found.notices] == ["_meson_editable_loader.py"]


def test_place_of_a_checkout_has_no_special_characters(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env", tmp_path / "it's my $proj (ü)")
    (only,) = found_in(prefix).checkouts
    assert only.target == "src/it-s-my-proj-ü"


def test_an_environment_that_was_moved_has_no_checkouts_here(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env", tmp_path / "proj")
    found = editable.find_moved(prefix, [helpers.SITE], str(prefix))
    assert not found.checkouts
    assert found.dist_infos == (f"{helpers.SITE}/proj-0.1.dist-info",)
    assert [notice.split()[0] for notice in found.notices] == [
        f"{tmp_path}/proj",
        f"{tmp_path}/proj/src",
        f"{tmp_path}/proj/src/proj",
    ]


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


def test_checkout_inside_the_prefix_stays(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env", tmp_path / "env" / "src" / "proj")
    assert survey(scan_environment(prefix)).relocations == ((str(prefix), ""),)


def test_two_checkouts_of_one_name(tmp_path, helpers):
    prefix = helpers.make_env(tmp_path / "env", tmp_path / "a" / "proj")
    helpers.add_editable(prefix, tmp_path / "b" / "proj", "proj2")
    targets = [one.target for one in found_in(prefix).checkouts]
    assert targets == ["src/proj", "src/proj-2"]


def test_home_folder_and_dead_paths_are_not_packed(tmp_path, helpers, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    prefix = helpers.make_env(tmp_path / "env")
    helpers.write(prefix / helpers.SITE / "paths.pth", f"{tmp_path}\n/does/not/exist\nimport os\n# note\nrelative\n")
    found = found_in(prefix)
    assert not found.checkouts
    assert [notice.split()[0] for notice in found.notices] == [str(tmp_path), "/does/not/exist"]


def test_relative_path_of_an_interpreter_is_no_alias(prefix, tmp_path, helpers, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(prefix)
    for name, spelled in (("one", "."), ("two", "opt/env"), ("three", str(link))):
        helpers.write(prefix / "bin" / name, f"#!{spelled}/bin/python\n", 0o755)
    for folder in (prefix, tmp_path):  # each of which makes one of them lead to the environment
        monkeypatch.chdir(folder)
        assert find_aliases(prefix) == (str(link),)


def test_checkouts_are_found_without_a_home(prefix, checkout, monkeypatch):
    def none(*_args):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", none)
    assert [one.root for one in found_in(prefix).checkouts] == [str(checkout)]
