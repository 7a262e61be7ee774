"""Failures while an environment is packed: each has its own error, and leaves no file."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from provision.env.packing import writer
from provision.env.packing.pack import PackOptions, pack
from provision.env.source import files
from provision.env.source.survey import Survey
from provision.errors import BundleError, UsageError
from provision.model import Notice, ignore

ROOT = Path(__file__).parents[3]

PACK = """
import sys
from pathlib import Path
from provision.env.packing.pack import PackOptions, pack
from provision.errors import ClusterctlError
options = PackOptions(split=int(sys.argv[3]))
try:
    pack(Path(sys.argv[1]), Path(sys.argv[2]), name="b", emit=lambda event: None, options=options)
except ClusterctlError as error:
    sys.exit(f"{error.exit_code}: {error} ({error.hint})")
"""


def change_while_packing(monkeypatch, change):
    """Change something when everything has been read, before the end."""
    real = Survey.check_folders

    def check(self):
        change()
        real(self)

    monkeypatch.setattr(Survey, "check_folders", check)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda prefix: (prefix / "share" / "new").write_text("x"), "share"),
        (lambda prefix: (prefix / "share" / "sp ace").unlink(), "share"),
        (lambda prefix: (prefix / "new").mkdir(), "env"),
        (lambda prefix: (prefix / "share" / "empty").rmdir(), "share"),
        (lambda prefix: (prefix / "share" / "dangling").rename(prefix / "share" / "other"), "share"),
        (lambda prefix: (prefix / "bin" / "link").symlink_to("x"), "bin"),
    ],
    ids=["added", "removed", "folder added", "folder removed", "renamed", "link added"],
)
def test_files_added_or_removed_while_packing_are_detected(prefix, tmp_path, helpers, monkeypatch, change, named):
    change_while_packing(monkeypatch, lambda: change(prefix))
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match=rf"/{named} changed while it was read: a file in it was added") as error:
        pack(prefix, tmp_path / "out" / "b.ccb", name="b", emit=ignore, options=PackOptions(limit=helpers.LIMIT))
    assert "run the same command again" in error.value.hint
    assert not list((tmp_path / "out").iterdir())


def test_file_replaced_by_one_of_equal_size_and_time_is_detected(prefix, tmp_path, helpers, monkeypatch):
    path = prefix / helpers.SITE / "other" / "7.py"
    status = path.stat()

    def replace():
        new = path.with_name(".7.py.new")
        new.write_bytes(path.read_bytes().replace(b"7", b"8"))
        os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
        new.replace(path)

    change_while_packing(monkeypatch, replace)
    with pytest.raises(BundleError, match="site-packages/other changed while it was read"):
        pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore, options=PackOptions(limit=helpers.LIMIT))


def test_folder_deleted_while_it_is_listed_is_named(prefix, tmp_path, monkeypatch):
    real = files.list_folder

    def inside(folder):
        if folder.endswith("share/empty"):
            (prefix / "share" / "empty").rmdir()
        return real(folder)

    monkeypatch.setattr(files, "list_folder", inside)
    with pytest.raises(BundleError, match="changed while it was read"):
        pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore)


def test_editing_a_checkout_is_no_change_of_the_environment(prefix, checkout, tmp_path, helpers, monkeypatch):
    change_while_packing(monkeypatch, lambda: helpers.write(checkout / ".notes.swp", "x"))
    assert pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore, options=PackOptions(limit=helpers.LIMIT))


def test_path_below_a_link_is_refused(prefix, tmp_path, helpers):
    (prefix / helpers.SITE / "linked").symlink_to(tmp_path)
    added = files.walk(helpers.write(tmp_path / "x", "x"), f"{helpers.SITE}/linked/x", skip=lambda *_: False).sources
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match=r"linked/x' is inside '.*/linked', which is not a folder") as error:
        pack(prefix, tmp_path / "out" / "b.ccb", name="b", emit=ignore, options=PackOptions(additions=added))
    assert "--exclude" in error.value.hint
    assert not list((tmp_path / "out").iterdir())


def test_setuid_setgid_and_sticky_bits_are_dropped(prefix, tmp_path, helpers):
    (prefix / "bin" / "hello").chmod(0o6755)
    (prefix / "share" / "empty").chmod(0o3777)
    modes = {entry.path: entry.mode for entry in pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore).files}
    assert modes["bin/hello"] == 0o755
    assert modes["share/empty"] == 0o777


def test_pipe_is_skipped_and_named(prefix, tmp_path):
    os.mkfifo(prefix / "share" / "pipe")
    events = []
    manifest = pack(prefix, tmp_path / "b.ccb", name="b", emit=events.append)
    reported = [event.text for event in events if isinstance(event, Notice)]
    assert "share/pipe is a socket, pipe or device and is not packed" in reported
    assert "share/pipe" not in {entry.path for entry in manifest.files}


def test_a_file_that_becomes_a_pipe_does_not_hang_the_pack(prefix, tmp_path, helpers, monkeypatch):
    real = files.walk_environment

    def environment(path, **options):
        tree = real(path, **options)
        (prefix / "share" / "sp ace").unlink()
        os.mkfifo(prefix / "share" / "sp ace")
        return tree

    monkeypatch.setattr(files, "walk_environment", environment)
    with pytest.raises(BundleError, match="sp ace changed"):
        pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
@pytest.mark.parametrize("split", [0, 1_000_000])
def test_a_disk_that_fills_up_is_an_error_and_is_empty_afterwards(prefix, tmp_path, helpers, split):
    for number in range(3):  # more than one process packs
        helpers.write(prefix / "share" / f"random-{number}", os.urandom(8 << 20))
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=6m none "$0" && shift && { "$@"; echo "rc=$? left=$(ls -A "$0")"; }'
    command = ["unshare", "--mount", "sh", "-c", script, tmp_path / "disk", "-"]
    run = [sys.executable, "-c", PACK, prefix, tmp_path / "disk" / "b.ccb", str(split)]
    done = subprocess.run([*command, *run], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    assert done.stdout == "rc=1 left=\n"
    assert "2: no space left for" in done.stderr
    assert "0.00 GB free" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize(("name", "message"), [("share/secret", "cannot read"), ("share/locked", "the folder")])
def test_unreadable_files_are_named(helpers, name, message):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders are root's alone
        top = Path(folder)
        top.chmod(0o777)
        prefix = helpers.make_env(top / "env")
        (prefix / "bin" / "python3.11").unlink()
        (prefix / "bin" / "python3.11").symlink_to("/bin/sh")  # a Python may lie where only root looks
        helpers.write(prefix / "share" / "secret", "x", 0o600)
        if name == "share/locked":
            (prefix / "share" / "secret").unlink()
            (prefix / name).chmod(0o700)
        demoted = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        if subprocess.run(
            [*demoted, sys.executable, "-c", "import provision"], capture_output=True, check=False
        ).returncode:
            pytest.skip(f"other users cannot read {ROOT}")
        run = [sys.executable, "-c", PACK, prefix, top / "b.ccb", "0"]
        done = subprocess.run([*demoted, *run], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("2: cannot read ")
    assert f"{name}: permission denied" in done.stderr
    assert message in done.stderr


def test_a_disk_without_large_files_gets_a_hint_to_split(prefix, tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(27, "File too large")

    monkeypatch.setattr(writer.Output, "patch", refuse)
    with pytest.raises(UsageError, match="does not support files of this size") as error:
        pack(prefix, tmp_path / "b.ccb", name="b", emit=ignore)
    assert "--split" in error.value.hint


def test_an_output_in_a_folder_that_is_a_loop(prefix, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match=r"cannot write .*Too many levels of symbolic links"):
        pack(prefix, tmp_path / "loop" / "b.ccb", name="b", emit=ignore)
