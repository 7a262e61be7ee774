import threading

import pytest

from provision.env.packing import writer
from provision.errors import UsageError


def test_growing_file_is_flushed_to_the_disk_regularly(tmp_path, monkeypatch):
    synced = []
    enough = threading.Event()

    def sync(path):
        synced.append(path)
        if len(synced) == 2:
            enough.set()

    monkeypatch.setattr(writer, "flush_file", sync)
    flusher = writer.Flusher()
    for size in range(0, 3 * writer.FLUSH, writer.FLUSH // 4):
        flusher.report(tmp_path / "file", size)
    assert enough.wait(30)
    flusher.close()
    assert synced == [tmp_path / "file"] * 2


def test_disk_error_during_a_flush_is_raised_at_the_end(tmp_path, monkeypatch):
    def fail(_path):
        raise OSError(5, "Input/output error")

    def write():
        with writer.create_output(tmp_path / "x") as out:
            out.write(bytes(writer.FLUSH))

    monkeypatch.setattr(writer, "flush_file", fail)
    with pytest.raises(UsageError, match=r"cannot write .*: Input/output error"):
        write()
    assert not list(tmp_path.iterdir())


def test_other_errors_are_raised_unchanged(tmp_path):
    def fail():
        with writer.create_output(tmp_path / "x"):
            (tmp_path / "elsewhere" / "y").read_bytes()

    with pytest.raises(FileNotFoundError, match="elsewhere"):
        fail()


def test_folder_at_the_output_path(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(UsageError, match="cannot write"), writer.create_output(tmp_path / "x"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
