import fcntl
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

LAB = Path(__file__).resolve().parent.parent / "scripts/lab"
LAB_FIXTURES = {"lab_env", "lab_project"}
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
LAB_TIMEOUT = 1800  # the first test that needs the environment waits for its build

# A shell, and so some CI systems, start background jobs with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline and no warning about slow generators: on a busy machine an example may take any time.
BUSY = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
# The same examples in each run, so that a failure comes from a change. `scripts/test fuzz` tries 10,000 new ones.
hypothesis.settings.register_profile("clusterctl", max_examples=50, derandomize=True, **BUSY)
hypothesis.settings.register_profile("nightly", max_examples=10_000, print_blob=True, **BUSY)
hypothesis.settings.load_profile("clusterctl")

# last, so that these modules hide no installed one
sys.path += [str(LAB), str(LAB.parent / "benchmarks")]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without garbage collections, now and later: they would visit thousands of tests and free none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Each of several workers starts in another part of a folder: a file's compiled form is there when the others come.

    On a clean checkout every worker would otherwise compile all files at the same time, and rewrite their asserts.
    """
    report = yield
    if WORKER and report.passed and isinstance(collector, pytest.Directory):
        workers, number = int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), int(WORKER.removeprefix("gw"))
        first = len(report.result) * number // workers
        report.result = [*report.result[first:], *report.result[:first]]
    return report


@pytest.hookimpl(wrapper=True)  # before -m selects, and before the order of a folder's conftest
def pytest_collection_modifyitems(items):
    if WORKER:
        items.sort(key=lambda item: item.path)  # the same order in each worker
    for item in items:
        if LAB_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("lab")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LAB_TIMEOUT))
    return (yield)


@pytest.fixture(scope="session")
def lab_env():
    """The prefix of a real conda environment with torch, DeepSpeed and LLaMA-Factory; never written to."""
    if os.environ.get("CLUSTERCTL_SKIP_LAB") == "1":
        pytest.skip("CLUSTERCTL_SKIP_LAB=1: tests with the rehearsal environment are skipped")
    from lab_env import build_env

    return Path(build_env()["prefix"])


@pytest.fixture(scope="session")
def small():
    """A small real conda environment and the means to make more: see ``scripts/lab/small_env.py``."""
    if os.environ.get("CLUSTERCTL_SKIP_LAB") == "1":
        pytest.skip("CLUSTERCTL_SKIP_LAB=1: tests with an environment are skipped")
    from small_env import build_small

    return build_small()


@pytest.fixture(scope="session")
def small_env(small):
    """The prefix of the small environment; never written to."""
    return small.prefix


@pytest.fixture(scope="session")
def lab_project(lab_env, tmp_path_factory):
    """A folder with train.yaml, model/ and data/ that LLaMA-Factory trains in seconds; copy it before writing to it.

    It is made once for all workers.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if WORKER else base) / "lab-project"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            argv = [lab_env / "bin/python", LAB / "tiny_model.py", folder.with_suffix(".new")]
            subprocess.run(argv, check=True, capture_output=True, text=True)
            folder.with_suffix(".new").rename(folder)
    return folder
