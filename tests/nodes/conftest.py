import fcntl
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count
from os import getpid
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from provision import sandbox as sandboxes
from provision.errors import UsageError
from provision.model import ignore

sys.path.append(str(Path(__file__).parent))  # for command and local_sshd; last, so that they hide no module

LONG = (  # groups that take minutes, the longest first
    "program_nodes", "training_nodes", "test_relay_failures", "plain_nodes", "test_slurm", "test_kills",
    "test_rehearse", "test_push_breaks", "test_deploy_relay",
    "test_releases", "test_tool", "test_deploy", "test_push",
)  # fmt: skip

NODES = ("program_nodes", "training_nodes", "plain_nodes")  # fixtures

_numbers = count(1)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    for item in items:
        if "require_sandbox" in getattr(item, "fixturenames", ()):
            item.add_marker("root")
    # Workers take groups in this order: long groups must not start last, beside an idle worker.
    items.sort(key=lambda item: _rank(_group(item.path)))


@cache
def _group(path):
    """The group of a test: one worker runs all tests of a file, and all tests that use the same nodes."""
    text = path.read_text(encoding="utf-8")
    return next((nodes for nodes in NODES if nodes in text), path.stem)


def _rank(group):
    return LONG.index(group) if group in LONG else len(LONG)


class Groups(LoadScopeScheduling):
    """Gives whole groups to workers, with any ``--dist``."""

    def _split_scope(self, nodeid):
        return _group(self.config.rootpath / nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config, log):
    # The marks of --dist loadgroup travel in names of tests, which pytest 9.2 no longer lets a plug-in change.
    return Groups(config, log)


@pytest.fixture(scope="session")
def require_sandbox():
    """Skips if no sandbox of minimal nodes can be made, with the reason."""
    try:
        sandboxes.require(sandboxes.Options(rootfs="minimal"))
    except UsageError as error:
        pytest.skip(f"{error}: {error.hint}")


@pytest.fixture(scope="session")
def sandbox(require_sandbox, tmp_path_factory):
    """Three minimal nodes that tests share: leave them as they were."""
    with sandboxes.up(sandboxes.Options(nodes=3, name=_name(), directory=tmp_path_factory.mktemp("sandbox"))) as box:
        yield box


@pytest.fixture
def make_sandbox(require_sandbox, tmp_path_factory):
    """Makes sandboxes that go at the end of the test: ``make_sandbox(nodes=2, link="1gbit")``."""
    with ExitStack() as stack:

        def make(nodes=2, *, emit=ignore, **options):
            options.setdefault("name", _name())
            options.setdefault("directory", tmp_path_factory.mktemp("sandbox"))
            box = sandboxes.up(sandboxes.Options(nodes=nodes, **options), emit)
            stack.callback(_down_if_there, box)
            return box

        yield make


@pytest.fixture(scope="session")
def ssh():
    """Runs a command on a node as a user would: the system's ssh, the written key, only pinned host keys."""

    def run(box, node, command, *, user="root", stdin=b""):
        address = {each.name: each.address for each in box.nodes}[node]
        options = ["BatchMode=yes", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes"]
        options += [f"UserKnownHostsFile={box.known_hosts}", "GlobalKnownHostsFile=/dev/null"]
        argv = ["ssh", "-F", "none", "-i", box.key, *(word for option in options for word in ("-o", option))]
        return subprocess.run([*argv, f"{user}@{address}", command], input=stdin, capture_output=True, check=False)

    return run


@pytest.fixture(scope="session")
def lab_bundle(lab_env, tmp_path_factory):
    """``clusterctl pack-env`` of the real environment, once for all workers: link it, never write to it."""
    return _bundle("lab-bundle", lab_env, tmp_path_factory)


def _bundle(name, env, tmp_path_factory):
    from command import run

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with _locked(folder):
        if not list(folder.glob("*.ccb")):
            packed = run("pack-env", cwd=folder, env={"CONDA_PREFIX": str(env)}, timeout=600)
            assert packed.returncode == 0, packed.stderr
    (bundle,) = folder.glob("*.ccb")
    return bundle


@pytest.fixture(scope="session")
def training_nodes(require_sandbox, lab_bundle, lab_project, tmp_path_factory):
    """Two nodes with the real environment, for an ordinary user, and that user's folder with a training project."""
    with _real_nodes("training", lab_bundle, lab_project, tmp_path_factory) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def program_nodes(require_sandbox, lab_bundle, lab_project, tmp_path_factory):
    """Two more such nodes, for tests that take minutes: another worker runs them."""
    with _real_nodes("program", lab_bundle, lab_project, tmp_path_factory) as nodes:
        yield nodes


@contextmanager
def _real_nodes(name, bundle, project, tmp_path_factory):
    from training import TRAINERS  # pytest rewrites its asserts only after this file

    with _nodes(name, TRAINERS, bundle, tmp_path_factory) as nodes:
        inventory = nodes.folder / "inventory.yaml"
        if "train:" not in inventory.read_text():
            # Every node sees all cores of this machine, and torch's threads wait for each other by spinning.
            with inventory.open("a") as file:
                file.write('train:\n  env:\n    OMP_NUM_THREADS: "1"\n')
        if not nodes.folder.joinpath("train.yaml").exists():
            shutil.copytree(project, nodes.folder, dirs_exist_ok=True)
        yield nodes


@pytest.fixture(scope="session")
def plain_nodes(require_sandbox, small_env, tmp_path_factory):
    """Two nodes with Python alone, for an ordinary user: a run starts there without the CPU time that torch needs."""
    from training import PLAIN

    bundle = _bundle("small-bundle", small_env, tmp_path_factory)
    with _nodes("plain", PLAIN, bundle, tmp_path_factory) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def three_nodes(require_sandbox, small_env, tmp_path_factory):
    """The same with three nodes, one of which a test may destroy."""
    from training import PLAIN

    bundle = _bundle("small-bundle", small_env, tmp_path_factory)
    with _nodes("three", PLAIN, bundle, tmp_path_factory, count=3) as nodes:
        yield nodes


@contextmanager
def _nodes(name, trainers, bundle, tmp_path_factory, count=2):
    from training import PREFIX, Training

    if there := os.environ.get(f"CLUSTERCTL_{name.upper()}"):  # while tests are written: a sandbox, all deployed
        (box,) = (box for box in sandboxes.list_all() if box.directory == Path(there))
        yield Training(Path(there), box, trainers)
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        (tmp_path_factory.getbasetemp().parent / name).mkdir()  # fails where another worker has such nodes too
    folder = tmp_path_factory.mktemp("job")
    with sandboxes.up(
        sandboxes.Options(nodes=count, name=_name(), directory=folder, user="trainer", prefix=PREFIX)
    ) as box:
        nodes = Training(folder, box, trainers)
        with _locked(bundle.parent):
            made = _release(nodes, bundle)
        yield nodes
        with _locked(bundle.parent):  # no other worker copies from nodes that go
            if made:
                made.unlink()


@contextmanager
def _locked(folder):
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _release(nodes, bundle):
    """Deploys the bundle, or copies what another fixture has deployed: a deploy's CPU time is many times a copy's.

    Returns:
        The file that says where to copy from, if it was deployed here.
    """
    made = bundle.with_suffix(".json")
    here = [str(nodes.box.node_root(name)) for name in nodes.nodes]
    if not made.exists():
        nodes.deploy(bundle)
        made.write_text(json.dumps({"roots": here, "stdout": nodes.deployed.stdout}))
        return made
    there = json.loads(made.read_text())
    if len(there["roots"]) != len(here) or not all(map(nodes.has_release, there["roots"])):  # a test ended a node
        nodes.deploy(bundle)
        return None
    for source, target in zip(there["roots"], here, strict=True):
        nodes.copy_release(source, target)
    nodes.link(bundle)
    nodes.deployed = subprocess.CompletedProcess("deploy", 0, there["stdout"], "")
    return None


def _name():
    return f"test-{getpid()}-{next(_numbers)}"


def _down_if_there(box):
    if box.name in {each.name for each in sandboxes.list_all()}:
        box.down()
