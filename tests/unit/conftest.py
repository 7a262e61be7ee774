import shutil
import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for case_table; last, so that it hides no module

# Files that take longer than most, the longest first. Every other one mostly waits, and leaves its core to the others.
LONG = (
    "test_agent_spares", "test_editable_real", "test_ops", "test_relocate_real", "test_agent_nodes", "test_truth",
    "test_agent_daemon", "test_large", "test_agent_keeping", "test_interchange_import", "test_reader_stream",
    "test_streams", "test_reader_pattern", "test_agent", "test_architecture", "test_workers", "test_checks_random",
    "test_tool", "test_extension_points", "test_service_file", "test_inventory_hostile", "test_reader_lines",
    "test_completion", "test_ssh_config", "test_run_hostile", "test_interchange_unpack", "test_split",
    "test_agent_silence",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    # Workers take files in this order: a long one must not start last, beside idle workers.
    rank = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="session")
def copy_tree():
    """Copies the source tree to a folder, with its compiled files: each program there would compile what it imports."""
    root = Path(__file__).parents[2]

    def copy(folder):
        for name in ("provision", "trainer", "templates"):
            being_written = shutil.ignore_patterns("*.pyc.*")
            shutil.copytree(root / name, folder / name, ignore=being_written)

    return copy


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder: its exit code, stdout and stderr."""
    from provision.cli import main  # most tests of this folder run no command

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in argv])
        return (end.value.code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, before)
