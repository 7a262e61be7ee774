"""A real environment at prefixes of many lengths: all of it starts, every hash is correct, nothing is recompiled."""

import base64
import csv
import hashlib
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from real_env import SCRIPTS

from provision.env.bundle.reader import open_bundle

LENGTHS = (20, 127, 128, 200, 300)
HAS = {program: shutil.which(program) is not None for program in ("perl", "gcc")}
SINCE_5_1 = tuple(int(part) for part in platform.release().split(".")[:2]) >= (5, 1)
PRINTS = {
    "with-options": "{prefix} 1",
    "isolated": "{prefix} 1",
    "from-env": "{prefix}",
    "from-env-options": "{prefix} 1",
    "long-form-pip": "{prefix} ['a b', '$c']",
    "long-form-conda": "{prefix} ['a b', '$c']",
    "in-sh": "{prefix}",
    "in-perl": "{prefix} {prefix}/bin/perl",
    "in-perl-from-env": "{prefix}/bin/perl",
    "in-r": "--vanilla\n{prefix}/bin/in-r\na b\n$c",
}
PYTHON = {name for name, (first, _) in SCRIPTS.items() if "python" in first}
CHECK_CODE = """
import importlib.machinery, json, os, sys
compiled = []
class Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, **options):
        compiled.append(os.path.relpath(path, sys.prefix))
        return super().source_to_code(data, path, **options)
seen = 0
for top in sys.argv[1:]:
    for folder, folders, files in os.walk(top):
        for name in files:
            if name.endswith(".py"):
                seen += 1
                try:
                    Loader("m", os.path.join(folder, name)).get_code("m")
                except SyntaxError:
                    compiled.pop()
print(json.dumps([seen, sorted(compiled)]))
"""


def of_length(length, tmp_path_factory):
    """A path of exactly so many bytes that does not exist yet."""
    top = "/tmp/" if length < 60 else f"{tmp_path_factory.mktemp('new')}/"
    rest = length - len(top)
    parts = ["p" * min(rest, 100)]
    while (left := rest - len("/".join(parts))) > 0:
        parts.append("p" * min(left - 1, 100))
    path = Path(top + "/".join(parts))
    assert len(str(path)) == length
    return path


@pytest.fixture(scope="module", params=LENGTHS)
def placed(request, awkward_bundle, tmp_path_factory, helpers):
    """The environment at a prefix of that length, and relocation's messages; nothing has been run in it."""
    prefix = of_length(request.param, tmp_path_factory)
    top = next(path for path in (prefix, *prefix.parents) if path.parent.exists())
    try:
        yield prefix, helpers.place(awkward_bundle, prefix)
    finally:
        subprocess.run(["chmod", "-R", "u+w", top], check=True)
        shutil.rmtree(top)


@pytest.fixture(scope="module")
def prefix(placed):
    return placed[0]


def run(*argv, path="/usr/bin:/bin"):
    environ = ["env", "-i", f"PATH={path}", "HOME=/nonexistent", "LANG=C.UTF-8", "PYTHONDONTWRITEBYTECODE=1"]
    done = subprocess.run([*environ, *argv], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_knows_its_prefix(prefix):
    assert run(prefix / "bin/python", "-c", "import sys; print(sys.prefix)").strip() == str(prefix)


def test_pip_and_the_console_scripts_start(prefix):
    listed = {one["name"] for one in json.loads(run(prefix / "bin/pip", "list", "--format", "json"))}
    assert {"pip", "setuptools", "wheel", "hatchling", "overlaid"} <= listed
    assert run(prefix / "bin/overlaid-cli") == "pip\n"
    assert run(prefix / "bin/hatchling", "--help")
    assert run(prefix / "bin/wheel", "version")
    assert run(prefix / "bin/python", "-m", "pip", "check") == "No broken requirements found.\n"


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_starts_with_any_first_line(prefix, name):
    if "perl" in name and not HAS["perl"]:
        pytest.skip("perl is not installed here")
    path = "/usr/bin:/bin"
    if name not in PYTHON and name != "in-sh":
        if len(str(prefix)) > 240:
            path = f"{prefix}/bin:{path}"  # then it needs an activated environment, and relocation reports it
        elif len(str(prefix)) > 110 and not SINCE_5_1:
            pytest.skip("this Linux reads 127 bytes of a first line")
    argv = [] if name in ("in-sh", "in-perl", "in-perl-from-env") else ["a b", "$c"]
    assert run(prefix / "bin" / name, *argv, path=path) == PRINTS[name].replace("{prefix}", str(prefix)) + "\n"


def test_every_script_that_starts_in_another_way_is_named(placed):
    prefix, relocated = placed
    length = len(str(prefix))
    named = {warning.partition(":")[0] for warning in relocated.warnings if warning.startswith("bin/")}
    others = {"bin/in-perl", "bin/in-perl-from-env", "bin/in-r"}
    assert named == (set() if length == 20 else others)
    assert len([warning for warning in relocated.warnings if "through /bin/sh" in warning]) == (length > 20)


@pytest.mark.skipif(not HAS["gcc"], reason="gcc is not installed here")
def test_a_compiled_program_is_rewritten_or_listed(placed):
    prefix, relocated = placed
    if len(str(prefix)) <= 255:
        assert relocated.unrewritable == ()
        assert run(prefix / "bin/program") == f"{prefix}/share\n{prefix}/lib:{prefix}/lib64:/usr/lib\n"
    else:
        ((path, why),) = relocated.unrewritable
        assert path == "bin/program"
        assert "has 300" in why


def test_links_lead_into_the_new_place(prefix, awkward):
    assert (prefix / "share/into").resolve() == prefix / "share/settings.txt"
    assert (prefix / "share/into-a-folder").resolve() == prefix / "lib"
    assert str((prefix / "share/out").readlink()) == "/etc/hostname"
    assert str((prefix / "share/decoy").readlink()) == f"{awkward}2/lib"
    assert (prefix / "lib/libcudart.so").resolve() == prefix / "lib/libcudart.so.12.4.127"


def test_a_decoy_is_not_the_prefix(prefix, awkward):
    settings = f"{prefix}/lib {awkward}2/lib /data{awkward}/lib {awkward}.old\n"
    assert (prefix / "share/settings.txt").read_text() == settings
    assert (prefix / "share/settings-too.txt").read_text() == settings
    assert f"{awkward}2\0".encode() in (prefix / "share/binary.dat").read_bytes()


def false_rows(top, site):
    """The rows of every RECORD whose file is there and is another."""
    rows = {}
    for record in sorted((top / site).glob("*.dist-info/RECORD")):
        for name, digest, size in csv.reader(record.read_text().splitlines()):
            path = top / site / name
            if digest:
                data = path.read_bytes() if path.exists() else b""
                true = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                rows[os.path.relpath(path, top)] = (digest, int(size)) == (f"sha256={true}", len(data))
    assert len(rows) > 500
    return {path for path, is_true in rows.items() if not is_true}


def false_in_conda_meta(top):
    """The files whose hash in ``conda-meta`` is not theirs."""
    seen, found = 0, set()
    for package in sorted((top / "conda-meta").glob("*.json")):
        for one in json.loads(package.read_bytes())["paths_data"]["paths"]:
            path = top / one["_path"]
            if path.is_file() and not path.is_symlink():
                seen += 1
                digest = one.get("sha256_in_prefix") or one["sha256"]
                found |= set() if hashlib.sha256(path.read_bytes()).hexdigest() == digest else {one["_path"]}
    assert seen > 500
    return found


def test_every_hash_is_as_correct_as_before(prefix, awkward, small):
    assert false_rows(prefix, small.site) == false_rows(awkward, small.site) == set()
    # What pip laid over conda's package was not what conda knew before; what is rewritten has its true hash now.
    overlaid = f"{small.site}/overlaid/__init__.py"
    assert overlaid in false_in_conda_meta(prefix) <= false_in_conda_meta(awkward)


def test_only_rewritten_files_are_recompiled(placed, awkward_bundle, small, helpers):
    prefix, relocated = placed
    library = prefix / "lib" / f"python{small.short}"

    def compiled():
        return json.loads(run(prefix / "bin/python", "-I", "-c", CHECK_CODE, library))

    manifest = open_bundle(awkward_bundle).manifest
    rewritten = {f"{small.site}/where.py", f"{small.site}/where_too.py"}
    stale = {path for path in relocated.stale_pyc if path.startswith(small.site)}
    assert stale == {f"{small.site}/__pycache__/{name}.cpython-311.pyc" for name in ("where", "where_too")}
    seen, anew = compiled()
    assert seen > 1000
    packed = {entry.path for entry in manifest.files if entry.path.endswith(".pyc")} - relocated.stale_pyc
    assert set(anew) <= set(relocated.uncompiled)
    assert rewritten <= set(anew)
    assert len(packed) > 1000
    helpers.compile_modules(prefix, relocated)
    assert compiled() == [seen, []]
    value = run(prefix / "bin/python", "-I", "-c", "import where_too; print(where_too.PREFIX, where_too.__cached__)")
    assert value.startswith(f"{prefix} {prefix}/lib/")
    program = "import asyncio, email.mime.text, setuptools, pip._internal.cli.main"
    argv = ["env", "-i", prefix / "bin/python", "-v", "-c", program]
    verbose = subprocess.run(argv, capture_output=True, text=True, check=True).stderr
    assert "# code object from '" in verbose
    assert not [line for line in verbose.splitlines() if line.startswith("# code object from") and ".py'" in line]
    assert "# wrote" not in verbose


def test_the_python_version_in_names_of_compiled_files_is_not_part_of_the_module(placed):
    assert not [path for path in placed[1].uncompiled if "__pycache__" in path]
