"""Editable installs made by real tools: packed, relocated, and used with the network cut and the originals gone."""

import base64
import csv
import hashlib
import json
import os
import shutil
import subprocess

import pytest

from provision.env.packing.pack import pack
from provision.env.source import elf
from provision.env.source.survey import scan_environment, survey
from provision.model import ignore

NO_NETWORK = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]

pytestmark = pytest.mark.skipif(
    subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode != 0
    or shutil.which("git") is None,
    reason="needs git, and unshare(1) to cut the network",
)

SETUPTOOLS = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
HATCHLING = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
EXTENSION = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", NULL, -1, methods};
PyMODINIT_FUNC PyInit__fast(void) { return PyModule_Create(&module); }
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def git(root, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def project(root, name, *, backend=SETUPTOOLS, source="src", requires=(), extra=""):
    """A package with a console script that prints its path and reads a data file."""
    module = name.replace("-", "_")
    write(
        root / "pyproject.toml",
        f'{backend}\n[project]\nname = "{name}"\nversion = "1.0"\ndependencies = {json.dumps(requires)}\n'
        f'[project.scripts]\n{name}-cli = "{module}.cli:main"\n{extra}',
    )
    package = root / source / module
    write(package / "__init__.py", f'NAME = "{name}"\n')
    write(
        package / "cli.py",
        "import importlib.resources, sys\n\n\ndef main():\n"
        f'    text = importlib.resources.files("{module}").joinpath("data.txt").read_text()\n'
        f'    print("{name}", text.strip(), *sys.argv[1:])\n',
    )
    write(package / "data.txt", f"data of {name}\n")
    return root


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return tmp_path_factory.mktemp("old") / "home"


@pytest.fixture(scope="module")
def env(small, old):
    """An environment with every kind of editable install; one pip for all, as starting it is what takes time."""
    prefix = small.make(old / "envs" / "llm")
    code = old / "code of ü"
    roots = [
        project(code / "flat", "flat", source=".", requires=["plain-src"]),
        project(code / "plain-src", "plain-src"),
        project(code / "My Cöde (new)" / "späce proj", "spaced"),
        project(code / "a" / "proj", "twin-a"),
        project(code / "b" / "proj", "twin-b"),
        project(prefix / "src" / "inner", "inner"),
        project(code / "outer", "outer"),
        project(code / "outer" / "plugins" / "nested", "nested", requires=["outer"]),
        project(code / "hatched", "hatched", backend=HATCHLING),
        project(
            code / "exact",
            "exact",
            backend=HATCHLING,
            extra="[tool.hatch.build]\ndev-mode-exact = true\n"
            '[tool.hatch.build.targets.wheel]\npackages = ["src/exact"]\n',
        ),
        mapped(code / "mapped"),
        compiled(code / "compiled"),
        monorepo(code / "mono"),
    ]
    small.install(prefix, "hatchling", "editables")
    small.install(prefix, *(word for root in roots for word in ("-e", root)))
    strict = project(code / "strict", "strict", extra='[tool.setuptools.package-data]\nstrict = ["data.txt"]\n')
    small.install(prefix, "--config-settings", "editable_mode=strict", "-e", strict)
    linked(prefix / small.site, code / "linked")
    aliased(prefix / small.site, code)
    small.install(prefix, "setuptools==69.5.1")  # over conda's
    develop(prefix, code / "developed")
    return prefix


def mapped(root):
    """Several packages from several folders, a namespace package and a single module: setuptools' finder."""
    write(
        root / "pyproject.toml",
        f'{SETUPTOOLS}\n[project]\nname = "mapped"\nversion = "1.0"\n[tool.setuptools]\n'
        'packages = ["alpha", "beta", "ns.part"]\npy-modules = ["lonely"]\n'
        '[tool.setuptools.package-dir]\nalpha = "lib/first"\nbeta = "code/second"\n"ns.part" = "ns_part"\n',
    )
    write(root / "lib/first/__init__.py", "NAME = 'alpha'\n")
    write(root / "code/second/__init__.py", "NAME = 'beta'\n")
    write(root / "ns_part/__init__.py", "NAME = 'part'\n")
    write(root / "lonely.py", "NAME = 'lonely'\n")
    return root


def compiled(root):
    """A git repository that ignores what its package needs: an extension, a generated version, its metadata."""
    project(root, "compiled", extra='[tool.setuptools.packages.find]\nwhere = ["src"]\n')
    write(
        root / "setup.py",
        "from setuptools import Extension, setup\n"
        "setup(ext_modules=[Extension('compiled.native._fast', ['src/fast.c'])])\n",
    )
    write(root / "src/fast.c", EXTENSION)
    write(root / "src/compiled/native/__init__.py", "from compiled.native._fast import answer\n")
    write(root / ".gitignore", "build/\n*.so\n_version.py\n*.egg-info/\n*.log\n_kernels/\nweights/\n")
    git(root, "init")
    git(root, "add", "-A")
    git(root, "commit", "-m", "x")
    write(root / "src/compiled/_version.py", "version = '1.0.dev3'\n")
    write(root / "src/compiled/_kernels/made.py", "MADE = True\n")
    write(root / "src/compiled/weights/model.bin", "x" * 100)
    write(root / "build/lib/compiled/__init__.py", "")
    write(root / "train.log", "")
    return root


def monorepo(top):
    """A package that is a subfolder of a repository, and imports only modules of its own folder."""
    project(top / "packages" / "one", "mono-one")
    project(top / "packages" / "two", "mono-two")
    write(top / "README.md", "mono")
    git(top, "init")
    git(top, "add", "-A")
    git(top, "commit", "-m", "x")
    return top / "packages" / "one"


def linked(site, root):
    """What ``flit install --symlink`` does."""
    write(root / "pyproject.toml", "[project]\nname = 'linked'\n")
    write(root / "linked/__init__.py", "NAME = 'linked'\n")
    (site / "linked").symlink_to(root / "linked")


def aliased(site, code):
    """A ``.pth`` file that names its folder by way of a symlink."""
    write(code / "aliased" / "aliased.py", "NAME = 'aliased'\n")
    (code / "by another name").symlink_to("aliased")
    write(site / "aliased.pth", f"{code}/by another name\n")


def develop(prefix, root):
    """``setup.py develop``, before PEP 660: an egg-link, easy-install.pth, and scripts that name the file."""
    write(
        root / "setup.py",
        "from setuptools import setup\nsetup(name='developed', version='1.0', package_dir={'': 'lib'}, "
        "packages=['developed'], scripts=['tool.py'], entry_points={'console_scripts': "
        "['developed-cli = developed:main']})\n",
    )
    write(root / "lib/developed/__init__.py", "NAME = 'developed'\n\n\ndef main():\n    print(NAME)\n")
    write(root / "tool.py", "#!/usr/bin/env python\nimport developed\nprint('tool of', developed.NAME)\n")
    write(root / ".gitignore", "*.egg-info/\n")
    git(root, "init")
    argv = ["env", "LC_ALL=C.UTF-8", prefix / "bin/python", "setup.py", "-q", "develop", "--no-deps"]
    subprocess.run(argv, cwd=root, check=True, capture_output=True)


@pytest.fixture(scope="module")
def found(env):
    return survey(scan_environment(env))


@pytest.fixture(scope="module")
def bundle(env, tmp_path_factory):
    out = tmp_path_factory.mktemp("bundle") / "llm.ccb"
    pack(env, out, name="llm", emit=ignore)
    return out


@pytest.fixture(scope="module")
def new(bundle, old, tmp_path_factory, helpers):
    """The environment at its new place; the old one and all checkouts are deleted."""
    prefix = tmp_path_factory.mktemp("new") / "releases" / "0123456789ab"
    relocated = helpers.place(bundle, prefix)
    helpers.compile_modules(prefix, relocated)
    old.rename(old.with_name("gone"))
    yield prefix
    old.with_name("gone").rename(old)


def run(*argv):
    environ = ["env", "-i", "PATH=/usr/bin:/bin", "HOME=/nonexistent", "LANG=C"]
    done = subprocess.run([*NO_NETWORK, *environ, *argv], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


PROJECTS = {
    "flat": "src/flat",
    "plain-src": "src/plain-src",
    "spaced": "src/späce-proj",
    "twin-a": "src/proj",
    "twin-b": "src/proj-2",
    "inner": "src/inner",
    "outer": "src/outer",
    "nested": "src/outer/plugins/nested",
    "hatched": "src/hatched",
    "exact": "src/exact",
    "compiled": "src/compiled",
    "mono-one": "src/one",
    "strict": "src/strict",
}


def test_checkouts_have_their_places(found, old):
    places = {os.path.relpath(source, os.path.realpath(old)): target for source, target in found.relocations}
    assert places["code of ü/outer/plugins/nested"] == "src/outer/plugins/nested"
    assert places["code of ü/mono/packages/one"] == "src/one"
    assert places["code of ü/by another name"] == places["code of ü/aliased"] == "src/aliased"
    assert not [path for path in places if path.startswith("envs/llm/")]


@pytest.mark.parametrize("name", PROJECTS)
def test_the_package_is_imported_from_its_new_place(new, name):
    module = name.replace("-", "_")
    place = run(new / "bin/python", "-c", f"import {module}; print({module}.__file__)").strip()
    assert place.startswith(f"{new}/{PROJECTS[name]}/")


@pytest.mark.parametrize("name", PROJECTS)
def test_the_console_script_runs_and_finds_its_data(new, name):
    assert run(new / f"bin/{name}-cli", "a b") == f"{name} data of {name} a b\n"


@pytest.fixture(scope="module")
def shown(new):
    """What pip shows of each project: one pip for all."""
    texts = run(new / "bin/python", "-m", "pip", "show", "-f", *PROJECTS).split("\n---\n")
    assert len(texts) == len(PROJECTS)
    return {text.partition("\n")[0].removeprefix("Name: "): text for text in texts}


@pytest.mark.parametrize("name", PROJECTS)
def test_pip_shows_it_with_its_files(new, shown, name):
    assert f"Editable project location: {new}/{PROJECTS[name]}\n" in shown[name]
    assert "direct_url.json" in shown[name]
    assert "Cannot locate" not in shown[name]


def test_pip_finds_nothing_broken(new):
    assert run(new / "bin/pip", "check") == "No broken requirements found.\n"
    listed = json.loads(run(new / "bin/pip", "list", "--format", "json"))
    places = {one["name"]: one.get("editable_project_location") for one in listed}
    assert places["spaced"] == f"{new}/src/späce-proj"
    assert places["setuptools"] is None


@pytest.mark.parametrize("module", ["alpha", "beta", "ns.part", "lonely", "linked", "aliased", "developed"])
def test_module_of_a_checkout_is_imported_at_the_new_prefix(new, module):
    where = run(new / "bin/python", "-c", f"import {module} as m; print(m.NAME, m.__file__)").split()
    assert where[0] == module.rpartition(".")[2]
    assert where[1].startswith(f"{new}/")


def test_setup_py_develop(new):
    assert run(new / "bin/developed-cli") == "developed\n"
    assert run(new / "bin/tool.py") == "tool of developed\n"
    shown = run(new / "bin/python", "-m", "pip", "show", "-f", "developed")
    assert f"Editable project location: {new}/src/developed/lib\n" in shown


def test_ignored_files_that_the_package_needs(new, found):
    program = "import compiled._version as v, compiled.native as n, compiled._kernels.made as m\n"
    program += "print(v.version, n.answer(), m.MADE)"
    assert run(new / "bin/python", "-c", program) == "1.0.dev3 42 True\n"
    root = new / "src/compiled"
    assert not (root / "build").exists()
    assert not (root / "train.log").exists()
    assert not (root / "src/compiled/weights").exists()
    assert [notice for notice in found.notices if "src/compiled/weights/" in notice]


def test_only_the_package_of_a_monorepo_is_packed(new):
    assert not list((new / "src").rglob("mono_two"))
    assert not list((new / "src").rglob("README.md"))


def test_nothing_names_the_old_places(new, old):
    wanted = [os.fsencode(old), json.dumps(str(old))[1:-1].encode(), os.fsencode(old.as_uri())]
    seen = 0
    for path in new.rglob("*"):
        if path.is_symlink():
            assert not str(path.readlink()).startswith(str(old))
        elif path.is_file() and path.suffix != ".pyc":
            data = path.read_bytes()
            if data.startswith(elf.MAGIC):  # what only a debugger reads may keep a path that does not fit
                data = b"".join(data[part.start : part.stop] for part in elf.loaded_ranges(data))
            assert not [text for text in wanted if text in data], path
            seen += 1
    assert seen > 1000


def test_every_record_is_correct(new, small):
    rows = 0
    for record in (new / small.site).glob("*.dist-info/RECORD"):
        for name, digest, size in csv.reader(record.read_text().splitlines()):
            if digest:
                data = (new / small.site / name).read_bytes()
                expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                assert (digest, int(size)) == (f"sha256={expected}", len(data)), name
                rows += 1
    assert rows > 500
