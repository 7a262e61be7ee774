"""Archives of conda-pack go to nodes, and ours are opened there by plain tar. The environment is small and real."""

import os
import shutil
import warnings
from pathlib import Path

import conda_pack
import pytest
from command import run

from provision import sandbox as sandboxes
from provision.model import ignore
from provision.tasks.bundles import bundle_of, pack_archive

pytestmark = [pytest.mark.root, pytest.mark.lab]

NODE = "node01"


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    name = f"interchange-{os.getpid()}"
    with sandboxes.up(sandboxes.Options(nodes=1, name=name, directory=tmp_path_factory.mktemp("interchange"))) as box:
        yield box


def on(box, *argv):
    result = box.enter(NODE, argv)
    assert result.returncode == 0, result.stderr
    return result.stdout


def works(box, prefix):
    """The console scripts start by their paths with an empty environment, and pip finds nothing wrong."""
    assert f"from {prefix}/lib/python" in on(box, "env", "-i", f"{prefix}/bin/pip", "--version")
    assert "usage: hatchling" in on(box, "env", "-i", f"{prefix}/bin/hatchling", "--help")
    assert "No broken requirements" in on(box, "env", "-i", f"{prefix}/bin/python", "-m", "pip", "check")
    program = "import sys, sysconfig; print(sys.prefix, sysconfig.get_config_var('LIBDIR'))"
    message = on(box, "env", "-i", f"{prefix}/bin/python", "-I", "-c", program)
    assert message.split() == [prefix, f"{prefix}/lib"]


def made_elsewhere(env, archive):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that its cache does not hold
        conda_pack.pack(prefix=str(env), output=str(archive))
    return bundle_of(archive, emit=ignore)


def test_archives_that_conda_pack_made_are_deployed_and_work(box, small_env, tmp_path):
    bundle = made_elsewhere(small_env, tmp_path / "made-elsewhere.tar.gz")
    result = run("deploy", bundle, cwd=box.directory, timeout=280)
    assert result.returncode == 0, result.stderr
    assert "nothing changed" not in result.stdout
    release = on(box, "readlink", "-f", "/opt/llm/current").strip()
    works(box, release)
    shebang = on(box, "head", "-n", "1", f"{release}/bin/hatchling")
    assert shebang == f"#!{release}/bin/python\n"  # conda-pack left it to /usr/bin/env
    other = made_elsewhere(small_env, tmp_path / "made-elsewhere.tar.zst")  # the same files
    assert "nothing changed" in run("deploy", other, cwd=box.directory, timeout=280).stdout


def test_an_archive_opens_on_a_node_with_tar_and_its_own_conda_unpack(box, small_env, tmp_path):
    result = pack_archive(str(small_env), environ={}, output=tmp_path / "small.tar.gz", emit=ignore)
    shutil.copy(result.archive.path, Path(box.node_root(NODE), "root/small.tar.gz"))
    prefix = "/srv/my/env"
    on(box, "mkdir", "-p", prefix)
    on(box, "tar", "-xf", "/root/small.tar.gz", "-C", prefix)
    on(box, "env", "-i", f"{prefix}/bin/conda-unpack")
    works(box, prefix)
    activated = on(box, "env", "-i", "bash", "-c", f". {prefix}/bin/activate; command -v pip; pip --version")
    assert activated.startswith(f"{prefix}/bin/pip\npip ")
    packed = {e.path: e.size for e in result.manifest.files if e.type == "file" and not e.marks}
    listed = on(box, "find", prefix, "-type", "f", "-printf", "%P %s\\n").splitlines()
    there = {path: int(size) for path, _, size in (line.rpartition(" ") for line in listed)}
    differing = {path for path, size in packed.items() if there.get(path) != size}
    assert {path for path in differing if not path.endswith(".pyc")} == set()
