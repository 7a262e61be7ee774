"""One pair of emulated machines for the whole session; a test that changes one restores it.

Fixtures: ``lab`` (scripts/lab/machine.py: ``lab.head``, ``lab.client``, ``lab.inventory(services)``) and ``clusterctl``
(runs the command against the lab), ``bundle`` (chrony for these machines, packed once) and ``chronyd`` (it is installed
on both). The machines have no route to anywhere; ``train`` logs in and may sudo.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLUSTERCTL = Path(sys.executable).with_name("clusterctl")
TIMEOUT = 1800  # the first test waits for the image; an emulated machine on a busy host is slow
# The packages that the other services need come from the bundle of the first.
ORDER = ("test_machine", "test_os_packages", "test_chrony", "test_nfs", "test_os_packages_undo")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in here:
        item.add_marker("root")
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT))
    rank = {name: number for number, name in enumerate(ORDER)}
    ordered = iter(sorted(here, key=lambda item: rank.get(item.path.stem, len(rank))))
    items[:] = [next(ordered) if item in here else item for item in items]


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """Two running machines, vm1 (the head) and vm2."""
    import machine

    if trouble := machine.missing():
        pytest.skip(trouble)
    with machine.machines(2, tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="session")
def clusterctl(lab):
    """Runs ``clusterctl WORDS…`` beside the lab's inventory.yaml; ``code`` is the exit code or a set of them."""

    def run(*words, code=0, env=None):
        done = subprocess.run(
            [CLUSTERCTL, *map(str, words)],
            check=False,
            cwd=lab.folder,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode in ({code} if isinstance(code, int) else code), (
            f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    return run


@pytest.fixture(scope="session")
def bundle(lab, clusterctl):
    """chrony and all that it needs, packed for the machines' release, beside the inventory."""
    release = lab.head.out('. /etc/os-release && echo "$ID$VERSION_ID"')
    path = lab.folder / f"{release}.osb"
    clusterctl("pack-os", "--release", release, "--output", path, "chrony")
    return path


@pytest.fixture(scope="session")
def chronyd(lab, bundle, clusterctl):
    """chrony is installed on both machines, from the bundle."""
    if any(machine.run("command -v chronyd", check=False).returncode for machine in lab.machines):
        lab.inventory("os_packages: {}")
        clusterctl("services", "apply", "os_packages", "--deadline", 1500)
