"""DeepSpeed's ops are built while packing: the plan, and, on a real environment, that a node needs no compiler."""

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import types
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from provision.env import ops as op_builder
from provision.env.ops import BASELINES, FILE, Ops, choose, listing, prebuild, unbuilt, unbuilt_ops, update_record
from provision.env.packing.pack import PackOptions, pack
from provision.env.source.files import walk
from provision.errors import UsageError
from provision.model import ignore

BEFORE = (
    "version='0.19.8'\ngit_hash='unknown'\ninstalled_ops={'cpu_adam': False, 'async_io': False}\n"
    "accelerator_name='cpu'\ntorch_info={'version': '2.11', 'cuda_version': '0.0'}\n"
)


def test_baseline_is_the_given_one_or_the_platforms_default():
    assert choose(None, "linux-64").name == "x86-64-v3"
    assert choose("x86-64-v4", "linux-64").simd == "__AVX512__"
    assert choose(None, "linux-aarch64").name == "armv8-a"
    assert choose(None, "linux-s390x") is None
    with pytest.raises(UsageError, match="'armv8-a' is not a CPU baseline for linux-64"):
        choose("armv8-a", "linux-64")


def executed(text):
    module = types.ModuleType("git_version_info_installed")
    exec(text, vars(module))
    return module


def test_list_of_built_ops_is_valid_with_and_without_an_accelerator():
    module = executed(listing(BEFORE, names=["cpu_adam"], baseline="x", deepspeed="1", torch="2.13.0+cpu"))
    assert module.version == "0.19.8"
    assert module.installed_ops == {"cpu_adam": True, "async_io": False}
    assert module.torch_info == {"version": "2.13", "cuda_version": "0.0"}
    assert module.accelerator_name == "cpu" == module.accelerator_name
    assert module.accelerator_name == "cuda"
    assert module.accelerator_name != "npu"


def test_accelerator_of_earlier_built_ops_is_kept():
    before = BEFORE.replace("'async_io': False", "'async_io': True").replace("='cpu'", "='cuda'")
    module = executed(listing(before, names=["cpu_adam"], baseline="x", deepspeed="1", torch="2.13.0"))
    assert module.installed_ops == {"cpu_adam": True, "async_io": True}
    assert (module.accelerator_name == "cuda", module.accelerator_name == "cpu") == (True, False)


def test_deepspeed_checkout_without_a_list_of_ops():
    module = executed(listing(None, names=["cpu_lion"], baseline="x", deepspeed="0.20", torch="2.13.0"))
    assert (module.version, module.installed_ops, module.torch_info["version"]) == ("0.20", {"cpu_lion": True}, "2.13")


def test_record_lists_new_and_changed_files():
    def row(name, data):
        return f"{name},sha256={urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"

    before = "a.py,sha256=x,1\nb.py,sha256=y,2\nx.dist-info/RECORD,,\n"
    after = update_record(before, {"b.py": b"new", "c.so": b"elf"})
    assert after == "a.py,sha256=x,1\n" + row("b.py", b"new") + "x.dist-info/RECORD,,\n" + row("c.so", b"elf")


def test_without_building_the_missing_ops_are_named(tmp_path):
    site = "lib/python3.11/site-packages"
    assert unbuilt(tmp_path, [site]) == ()
    (tmp_path / site / "deepspeed").mkdir(parents=True)
    listed = tmp_path / site / "deepspeed" / FILE
    listed.write_text(BEFORE)
    (notice,) = unbuilt(tmp_path, [site])
    assert notice.startswith("DeepSpeed compiles async_io, cpu_adam on the nodes")
    listed.write_text(listing(BEFORE, names=["cpu_adam"], baseline="x", deepspeed="1", torch="2.13.0"))
    (notice,) = unbuilt(tmp_path, [site])
    assert notice.startswith("DeepSpeed compiles async_io on the nodes")
    listed.write_text("installed_ops = {")
    assert unbuilt(tmp_path, [site]) == ()


def test_failed_builds_are_named_with_their_reasons():
    ops = Ops("x86-64-v3", ("cpu_adam",), (("a", "no compiler"), ("b", "no compiler"), ("c", "no CUDA")))
    assert ops.notices == (
        "DeepSpeed's cpu_adam were built for x86-64-v3 and added",
        "DeepSpeed's a, b could not be built, and need a compiler on the nodes: no compiler",
        "DeepSpeed's c could not be built, and need a compiler on the nodes: no CUDA",
    )


def test_built_files_replace_existing_ones_in_the_bundle(prefix, tmp_path, helpers):
    folder = tmp_path / "built"
    helpers.write(folder / helpers.SITE / "hello/plain.py", "X = 2\n")
    helpers.write(folder / helpers.SITE / "hello/ops/new.so", b"\x7fELF", 0o755)
    found = walk(folder, "", skip=lambda _path, _name: False).sources
    additions = [one for one in found if one.type == "file" or not (prefix / one.path).exists()]
    manifest = pack(
        prefix, tmp_path / "b.ccb", name="b", emit=ignore, options=PackOptions(additions=additions, notices=("built",))
    )
    helpers.place(tmp_path / "b.ccb", tmp_path / "new")
    assert (tmp_path / "new" / helpers.SITE / "hello/plain.py").read_text() == "X = 2\n"
    assert (tmp_path / "new" / helpers.SITE / "hello/ops/new.so").read_bytes() == b"\x7fELF"
    assert manifest.notices[0] == "built"
    assert (prefix / helpers.SITE / "hello/plain.py").read_text() == "X = 1\n"


def test_environment_without_deepspeed_builds_nothing(tmp_path):
    assert prebuild(tmp_path, ["lib/python3.11/site-packages"], BASELINES[0], tmp_path / "cache") == Ops()
    assert not (tmp_path / "cache").exists()


def test_a_python_that_fails_is_a_reason(tmp_path):
    site = "lib/python3.11/site-packages"
    (tmp_path / site / "deepspeed/ops/op_builder").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    ops = prebuild(tmp_path, [site], BASELINES[0], tmp_path / "cache")
    assert ops.built == ops.additions == ()
    ((_, why),) = ops.missing
    assert "No module named" in why
    assert list((tmp_path / "cache/ops").iterdir()) == []


def test_a_record_may_hold_empty_lines():
    assert update_record("a,,\n\nb,,\n", {}) == "a,,\n\nb,,\n"


@pytest.mark.parametrize("text", ["installed_ops = {'a': x}", "x = dict.fromkeys()", "x = dict.fromkeys(y)", "\0"])
def test_unknown_format_of_the_list_of_ops_is_ignored(text):
    assert unbuilt_ops(text) == ()


@pytest.fixture
def with_deepspeed(prefix, helpers, monkeypatch):
    """An environment with a DeepSpeed, and a compiler that makes an op at once."""
    helpers.add_package(prefix, "deepspeed", {f"{helpers.SITE}/deepspeed/ops/op_builder/__init__.py": ""})

    def build(_prefix, scratch):
        (scratch / "op.so").write_bytes(b"\x7fELF")
        ops = [["cpu_adam", "deepspeed.ops.adam.cpu_adam_op", str(scratch / "op.so")]]
        result = {"deepspeed": "1", "torch": "2.4.0", "mtime": 1_600_000_000, "ops": ops, "missing": []}
        (scratch / "result.json").write_text(json.dumps(result))
        return ""

    monkeypatch.setattr(op_builder, "compile_ops", build)
    return prefix


@pytest.mark.parametrize("cache", ["file", "/proc/nowhere"])
def test_a_cache_that_cannot_be_used_is_a_reason(with_deepspeed, tmp_path, helpers, cache):
    helpers.write(tmp_path / "file", "x")
    ops = prebuild(with_deepspeed, [helpers.SITE], BASELINES[0], tmp_path / cache)
    assert ops.built == ops.additions == ()
    ((name, why),) = ops.missing
    assert name == "ops"
    assert cache in why


def test_a_record_that_cannot_be_understood_is_a_reason(with_deepspeed, tmp_path, helpers):
    (with_deepspeed / helpers.SITE / "deepspeed-1.0.dist-info" / "RECORD").write_bytes(b"\xff\xfe")
    ops = prebuild(with_deepspeed, [helpers.SITE], BASELINES[0], tmp_path / "cache")
    assert "can't decode" in ops.missing[0][1]


def test_each_environment_keeps_its_own_record(with_deepspeed, tmp_path, helpers):
    def record_of(prefix):
        ops = prebuild(prefix, [helpers.SITE], BASELINES[0], tmp_path / "cache")
        assert ops.built == ("cpu_adam",)
        (record,) = [one for one in ops.additions if one.path.endswith("RECORD")]
        return Path(record.file).read_text()

    first = record_of(with_deepspeed)
    own = with_deepspeed / helpers.SITE / "deepspeed-1.0.dist-info" / "RECORD"
    own.write_text(own.read_text() + "deepspeed/mine.py,,\n")
    assert record_of(with_deepspeed) == first.replace(
        "dist-info/RECORD,,\n", "dist-info/RECORD,,\ndeepspeed/mine.py,,\n"
    )
    other = tmp_path / "other"
    with_deepspeed.rename(other)
    assert record_of(other)
    assert len(list((tmp_path / "cache" / "ops").iterdir())) == 3


# --- on the real environment, which has cpu_adam and lacks cpu_lion ------------------------------------------------

SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
STEP = """
import torch
from deepspeed.ops.lion import DeepSpeedCPULion
weight = torch.nn.Parameter(torch.ones(1000))
optimizer = DeepSpeedCPULion([weight], lr=0.1)
weight.grad = torch.ones(1000)
optimizer.step()
print(optimizer.ds_opt_lion.__file__, round(weight.sum().item()))
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to lay a bare /usr/bin over this one")


@pytest.fixture(scope="module")
def ops(lab_env, tmp_path_factory):
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler is installed here")
    import lab_recipe

    compiler = tmp_path_factory.mktemp("compiler") / "c++"  # a third of the time: see lab_recipe
    compiler.write_text(f'#!/bin/sh\nexec c++ "$@" {lab_recipe.LIGHT}\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        return build(lab_env)


def build(prefix):
    from lab_recipe import default_cache

    return prebuild(prefix, [SITE], choose(None, "linux-64"), default_cache(), names=["cpu_lion"])


@pytest.fixture(scope="module")
def with_ops(lab_env, ops, tmp_path_factory):
    """A node's files: links to the environment's files, and the additions in their places."""
    prefix = tmp_path_factory.mktemp("node") / "env"
    package = prefix / SITE / "deepspeed"
    shutil.copytree(lab_env / SITE / "deepspeed", package, symlinks=True)
    for one in ops.additions:
        if one.type == "file":
            (prefix / one.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(one.file, prefix / one.path)
    return prefix


def without_compiler(argv, tmp_path):
    """Runs a command where /usr/bin and /usr/lib/gcc are as on a node: no compiler, no ninja."""
    bare = tmp_path / "bin"
    bare.mkdir(exist_ok=True)
    for name in ("sh", "env", "uname", "true", "cat", "ls"):
        shutil.copy2(shutil.which(name), bare / name)
    script = f'mount --bind {bare} /usr/bin && exec "$@"'
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    words = ["unshare", "--mount", "--net", "sh", "-c", script, "sh", *map(str, argv)]
    return subprocess.run(words, capture_output=True, text=True, env=environ, check=False)


def test_the_op_is_built_once_and_named(lab_env, ops, monkeypatch):
    assert ops.built == ("cpu_lion",)
    assert ops.baseline == "x86-64-v3"
    paths = {one.path.removeprefix(f"{SITE}/") for one in ops.additions if one.type == "file"}
    assert {"deepspeed/ops/lion/cpu_lion_op.so", "deepspeed/git_version_info_installed.py"} <= paths
    monkeypatch.setattr(op_builder, "compile_ops", lambda *_: pytest.fail("it is built again"))
    assert build(lab_env) == ops
    record = next(one for one in ops.additions if one.path.endswith("RECORD"))
    rows = {row[0]: row for row in csv.reader(Path(record.file).read_text().splitlines())}
    for one in ops.additions:
        if one.type == "file" and not one.path.endswith(("RECORD", ".pyc")):
            digest = urlsafe_b64encode(hashlib.sha256(Path(one.file).read_bytes()).digest()).rstrip(b"=").decode()
            assert rows[one.path.removeprefix(f"{SITE}/")][1] == f"sha256={digest}"


def test_op_contains_no_path_of_the_packing_machine(lab_env, ops):
    (library,) = [one for one in ops.additions if one.path.endswith(".so")]
    assert str(lab_env).encode() not in Path(library.file).read_bytes()


@needs_root
def test_built_op_works_without_a_compiler(lab_env, with_ops, tmp_path):
    program = f"import sys; sys.path.insert(0, {str(with_ops / SITE)!r})\n{STEP}"
    done = without_compiler([lab_env / "bin/python", "-I", "-B", "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
    file, total = done.stdout.splitlines()[-1].split()
    assert file == str(with_ops / SITE / "deepspeed/ops/lion/cpu_lion_op.so")
    assert int(total) == 900


@needs_root
def test_without_the_built_op_the_optimizer_fails(lab_env, tmp_path):
    done = without_compiler([lab_env / "bin/python", "-I", "-B", "-c", STEP], tmp_path)
    assert done.returncode != 0
    assert "DeepSpeedCPULion requires the cpu_lion op" in done.stderr
