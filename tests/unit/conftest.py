import signal

import pytest


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
