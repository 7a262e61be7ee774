"""The scripts of a deploy, run for real under three shells; and shellcheck of the golden ones."""

import hashlib
import os
import select
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import pytest

from provision.env.bundle.manifest import Entry, Manifest, PrefixFiles
from provision.env.release import catalog, examine, install
from provision.env.release.catalog import ReleasePaths
from provision.env.release.install import Recipe
from provision.env.relocation import Relocated
from provision.model import Inventory, Node
from provision.render import render
from provision.script import compile_steps, parse

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
GOLDEN = sorted((Path(__file__).parents[1] / "golden/scripts").glob("*.sh"))
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
NASTY = ("plain", "a b", "it's", "$(touch owned)", "new\nline", "back\\slash", "-n", "*")


@pytest.fixture(params=SHELLS)
def shell(request, tmp_path_factory, monkeypatch):
    """A shell, and for that of busybox its own tools as well."""
    if shutil.which(SHELLS[request.param][0]) is None:
        pytest.fail(f"{request.param} is missing: apt-get install dash bash busybox")
    if request.param == "busybox":
        tools = tmp_path_factory.mktemp("busybox")
        (tools / "busybox").symlink_to(shutil.which("busybox"))
        subprocess.run(["busybox", "--install", "-s", tools], check=True)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return SHELLS[request.param]


@pytest.fixture
def case(tmp_path):
    """An inventory and a manifest whose prefix is in a folder with special characters of every shell."""
    root = tmp_path / 'it\'s $(touch owned) "x"'
    inventory = Inventory(Path("i.yaml"), PurePosixPath(root / "current"), (Node("node01", "10.0.0.1"),))
    manifest = Manifest(
        name="tiny",
        tool="0.1.0",
        created="",
        platform="linux-64",
        python="3.11.7",
        source_prefix="/envs/tiny",
        chunks=(),
        prefix_files=PrefixFiles("", 0, 0, 0),
        files=(Entry("bin/torchrun", "file", 0o755, 0, 1, "a" * 64),),
        relocations=(("/envs/tiny", ""),),
    )
    return inventory, ReleasePaths.of(inventory, manifest.release_id), manifest


def run(shell, script, folder, stdin=b""):
    return subprocess.run([*shell, "-c", script], check=False, input=stdin, capture_output=True, cwd=folder, timeout=60)


def results(done):
    return {step.name: step.state for step in parse("t", done.stdout.decode())}


def gather(shell, places, folder, *keys, repair=False, base="", recipe=None):
    Path(places.releases).mkdir(parents=True, exist_ok=True)
    script = install.gather_script(places, repair=repair, base=base)
    done = run(shell, script, folder, install.gather_input(keys, recipe or Recipe()))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[-2].startswith("free ")
    assert lines[-1] == "end"
    return lines[:-2]


def arrive(places):
    """The result of a transfer: a Python that always succeeds, a launcher, and clusterctl's files."""
    incoming = Path(places.incoming)
    for name, text in (("bin/python", "#!/bin/sh\n"), ("bin/torchrun", "#!/bin/sh\necho usage\n")):
        (incoming / name).parent.mkdir(parents=True, exist_ok=True)
        (incoming / name).write_text(text)
        (incoming / name).chmod(0o755)
    (incoming / "old.pyc").write_text("stale")
    (incoming / ".clusterctl/files").mkdir(parents=True, exist_ok=True)
    (incoming / ".clusterctl/stale").write_text("old.pyc\n")
    (incoming / ".clusterctl/links").write_text("")
    (incoming / ".clusterctl/complete").write_text("")


def activate(shell, case, folder, *, uncompiled=(), dry_run=False, repair=False):
    _, places, manifest = case
    relocated = Relocated(PurePosixPath(places.release), (), uncompiled=dict(uncompiled))
    planned = install.activate_steps(places, manifest, relocated, repair=repair)
    return run(shell, compile_steps(planned, token="t", dry_run=dry_run), folder)


def facts(shell, case, folder):
    inventory, places, _ = case
    return examine.read_facts(
        run(shell, examine.examine(inventory, places.release_id, "clusterctl-relay:0123:"), folder).stdout.decode()
    )


def test_a_whole_deploy(shell, case, tmp_path):
    inventory, places, manifest = case
    before = facts(shell, case, tmp_path)
    assert (before.release, before.writable, before.prefix_link, before.others) == ("absent", True, None, 0)
    assert before.free_bytes
    assert not before.noexec
    refusal = examine.judge(before, inventory, manifest)
    assert refusal is None or "linux-" in refusal
    assert gather(shell, places, tmp_path, "aaa") == []
    arrive(places)
    done = activate(shell, case, tmp_path)
    assert set(results(done).values()) == {"changed"}, done
    after = facts(shell, case, tmp_path)
    assert examine.is_current(after, places)
    assert str(Path(places.link).readlink()) == places.target
    release = Path(places.release)
    assert not (release / "old.pyc").exists()
    assert all(path.lstat().st_mode & 0o222 == 0 for path in release.rglob("*"))
    assert sorted(path.name for path in Path(places.releases).iterdir()) == [
        ".history",
        release.name,
        f"{release.name}.ok",
    ]
    assert set(results(activate(shell, case, tmp_path)).values()) == {"ok"}
    assert not list(tmp_path.rglob("owned"))


def test_incomplete_files_are_not_activated(shell, case, tmp_path):
    _, places, _ = case
    gather(shell, places, tmp_path)
    arrive(places)
    (Path(places.incoming) / ".clusterctl/complete").unlink()
    done = activate(shell, case, tmp_path)
    assert results(done) == {"complete": "failed"}
    assert b"not everything has arrived" in done.stdout
    assert not Path(places.release).exists()


def test_a_dry_run_writes_nothing(shell, case, tmp_path):
    _, places, _ = case
    done = activate(shell, case, tmp_path, dry_run=True)
    assert set(results(done).values()) == {"would change", "ok"}
    assert results(done)["tidy"] == "ok"
    assert not Path(places.root).exists()


def test_files_compiled_on_the_node_are_listed(shell, case, tmp_path):
    _, places, _ = case
    gather(shell, places, tmp_path)
    arrive(places)
    (Path(places.incoming) / "bin/python").write_text(
        '#!/bin/sh\nwhile IFS= read -r file; do [ "$file" = bad.py ] || : >"${file%.py}.pyc"; done\n'
    )
    (Path(places.incoming) / "mod.py").write_text("")
    done = activate(shell, case, tmp_path, uncompiled={"mod.py": "mod.pyc", "bad.py": "bad.pyc"})
    assert results(done)["compile"] == "changed", done
    listed = (Path(places.release) / install.COMPILED).read_text()
    assert listed == f"{hashlib.sha256(b'').hexdigest()}  mod.pyc\n"


def older(places, key="k1", names=NASTY):
    """An existing release with one list; its files are read-only."""
    folder = Path(places.releases) / "0123456789ab"
    (folder / ".clusterctl/files").mkdir(parents=True)
    for name in names:
        path = folder / "share" / f"in {name}" / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
        os.utime(path, (1700000000, 1700000000))
        path.chmod(0o444)
    listed = subprocess.run(
        ["sha256sum", "--", *(f"share/in {name}/{name}" for name in names)], cwd=folder, capture_output=True, check=True
    )
    (folder / ".clusterctl/files" / key).write_bytes(listed.stdout)
    (folder / "share").chmod(0o555)
    return folder


def test_a_chunk_is_linked_from_another_release(shell, case, tmp_path):
    _, places, _ = case
    names = [name for name in NASTY if shell[0] != "busybox" or not set(name) & set("\n\\")]
    folder = older(places, names=names)  # busybox's sha256sum cannot read names that must be escaped
    assert gather(shell, places, tmp_path, "k0", "k1", "k2") == ["have k1"]
    for name in names:
        path = Path(places.incoming) / "share" / f"in {name}" / name
        assert path.read_text() == name
        assert path.stat().st_mtime == 1700000000
        if shell[0] != "busybox":  # whose cp has no --parents: there it is a copy
            assert path.samefile(folder / "share" / f"in {name}" / name)
    assert (Path(places.incoming) / ".clusterctl/files/k1").exists()
    assert gather(shell, places, tmp_path, "k0", "k1") == ["have k1"]  # again, after a broken transfer
    assert not list(tmp_path.rglob("owned"))


def test_files_that_differ_in_words_of_equal_length_are_derived_from_another_release(shell, case, tmp_path):
    _, places, _ = case
    folder = older(places, names=["plain"])
    (folder / "share").chmod(0o755)
    contents = {"bin/a b": b"#!/x/0123456789ab/python\n\0\xff\0 0123456789ab", "other": b"no word in it, changed since"}
    wanted = {"bin/a b": b"#!/x/ffffffffffff/python\n\0\xff\0 ffffffffffff", "other": b"the new other"}
    for name, data in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o555)
    entries = tuple(
        Entry(name, "file", 0o755, 0, len(data), hashlib.sha256(data).hexdigest()) for name, data in wanted.items()
    )
    recipe = Recipe(((b"0123456789ab", b"ffffffffffff"),), entries)
    message = gather(shell, places, tmp_path, base=folder.name, recipe=recipe)
    if shell[0] == "busybox":  # its tar takes no names with a NUL: then everything is sent
        assert message == []
    else:
        assert message == ["made 0"]
        assert (Path(places.incoming) / "bin/a b").read_bytes() == wanted["bin/a b"]
    assert gather(shell, places, tmp_path, base="gone", recipe=recipe) == []


def test_changed_chunk_is_reported_and_never_linked(shell, case, tmp_path):
    _, places, _ = case
    folder = older(places, names=["plain"])
    path = folder / "share/in plain/plain"
    path.chmod(0o644)
    path.write_text("plaim")
    assert gather(shell, places, tmp_path, "k1") == ["damaged 0123456789ab k1"]
    assert not (Path(places.incoming) / "share/in plain/plain").exists()


def test_leftovers_of_other_deploys_are_removed_and_of_this_one_are_used(shell, case, tmp_path):
    _, places, _ = case
    older(places)
    for name in (".incoming-other", ".transfer-other", ".removing-other"):
        (Path(places.releases) / name / "locked").mkdir(parents=True)
        (Path(places.releases) / name / "locked").chmod(0o555)
    assert gather(shell, places, tmp_path) == []
    assert sorted(path.name for path in Path(places.releases).iterdir() if path.name.startswith(".")) == [
        Path(places.incoming).name,
        Path(places.transfer).name,
    ]
    (Path(places.transfer) / "have").write_text("k7\n")
    (Path(places.incoming) / "kept").write_text("")
    assert gather(shell, places, tmp_path) == ["have k7"]
    assert (Path(places.incoming) / "kept").exists()
    (Path(places.transfer) / "boot").write_text("another start of this machine")  # what was written then may be lost
    assert gather(shell, places, tmp_path) == []
    assert not (Path(places.incoming) / "kept").exists()


def test_deploy_killed_before_its_cleanup_is_not_complete(shell, case, tmp_path):
    _, places, _ = case
    gather(shell, places, tmp_path)
    arrive(places)
    activate(shell, case, tmp_path)
    for left in (places.transfer, places.removing, places.incoming):
        Path(left).mkdir()
    found = facts(shell, case, tmp_path)
    assert (found.release, found.begun) == ("unpacked", True)
    done = results(activate(shell, case, tmp_path))
    assert done.pop("tidy") == "changed"
    assert set(done.values()) == {"ok"}
    assert facts(shell, case, tmp_path).release == "complete"


def test_a_user_who_is_not_root_may_have_folders_that_are_not_writable(shell, case, tmp_path):
    _, places, _ = case
    arrive(places)
    locked = Path(places.incoming) / "locked"
    locked.mkdir()
    (locked / "old.pyc").write_text("stale")
    (Path(places.incoming) / ".clusterctl/stale").write_text("locked/old.pyc\n")
    locked.chmod(0o555)
    for path in (places.root, *Path(places.root).rglob("*")):
        os.chown(path, 65534, 65534)
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(0o755)
    planned = install.activate_steps(places, case[2], Relocated(PurePosixPath(places.release), ()))
    script = compile_steps(planned, token="t")
    done = subprocess.run(
        [*shell, "-c", script], check=False, stdin=subprocess.DEVNULL, capture_output=True, user=65534, group=65534
    )
    assert set(results(done).values()) <= {"changed", "ok"}, done
    assert [path.name for path in (Path(places.release) / "locked").iterdir()] == []
    assert (Path(places.release) / "locked").stat().st_mode & 0o777 == 0o555


def test_removal_leaves_a_release_with_shared_files_unchanged(shell, case, tmp_path):
    inventory, places, _ = case
    folder = older(places, names=["plain"])
    gather(shell, places, tmp_path, "k1")
    arrive(places)
    activate(shell, case, tmp_path)
    shared = Path(places.release) / "share/in plain/plain"
    assert shared.stat().st_mode & 0o222 == 0
    done = run(
        shell, compile_steps([install.remove_step(ReleasePaths.of(inventory, folder.name))], token="t"), tmp_path
    )
    assert results(done) == {"remove": "changed"}, done
    assert not folder.exists()
    assert shared.stat().st_mode & 0o222 == 0


def test_foreign_folders_are_not_releases(shell, case, tmp_path):
    inventory, places, _ = case
    releases = Path(places.releases)
    for name in ("20240101", "my backup", "0123456789ag", ".incoming-0123456789ab", ".removing-x"):
        (releases / name).mkdir(parents=True)
    (releases / "aaaaaaaaaaaa").symlink_to("20240101")
    found = catalog.read_listing(run(shell, catalog.list_script(inventory), tmp_path).stdout.decode())
    assert (found.complete, found.broken) == ({}, ())
    assert found.left == (".incoming-0123456789ab", ".removing-x")
    script = render("release/hold.sh.j2", lock=f"{releases}/.lock", releases=str(releases), id="t", who="me", silent=15)
    done = run(shell, script, tmp_path)
    assert done.returncode != 0
    assert "is not clusterctl's" in done.stderr.decode()
    assert not (releases / ".clusterctl").exists()


def test_verify_works_under_another_locale(shell, case, tmp_path, monkeypatch):
    _, places, _ = case
    folder = older(places, names=["plain"])
    (folder / "share/in plain/plain").chmod(0o644)
    (folder / "share/in plain/plain").write_text("plaim")
    (folder / ".clusterctl/links").write_text("")
    real = shutil.which("sha256sum")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sha256sum").write_text(
        f'#!/bin/sh\n[ "$LC_ALL" = C ] && exec {real} "$@"\n{real} "$@" | sed s/FAILED/FEHLSCHLAG/\n'
    )
    (tmp_path / "bin/sha256sum").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert (
        catalog.verify_finding(
            "n", "x", run(shell, catalog.verify_script(str(folder)), tmp_path).stdout.decode()
        ).verdict
        == "FAIL"
    )


def test_repair_reuses_undamaged_files_of_the_release(shell, case, tmp_path):
    _, places, _ = case
    gather(shell, places, tmp_path)
    arrive(places)
    activate(shell, case, tmp_path)
    assert gather(shell, places, tmp_path, repair=True) == []
    arrive(places)
    (Path(places.incoming) / "new").write_text("")
    done = activate(shell, case, tmp_path, repair=True)
    assert results(done)["complete"] == results(done)["tidy"] == "changed", done
    assert (Path(places.release) / "new").exists()
    assert set(results(activate(shell, case, tmp_path, repair=True)).values()) == {"ok"}


def test_verify_and_list_and_remove(shell, case, tmp_path):
    inventory, places, _ = case
    folder = older(places, names=["plain", "a b"])
    (folder / "share").chmod(0o755)
    (folder / "link").symlink_to("share")
    (folder / ".clusterctl/links").write_text("link\nshare\n")
    assert (
        catalog.verify_finding(
            "n", "x", run(shell, catalog.verify_script(str(folder)), tmp_path).stdout.decode()
        ).verdict
        == "OK"
    )
    (folder / "link").unlink()
    (folder / "link").symlink_to("bin")
    (folder / "added by pip").write_text("")
    (folder / "share/in a b/a b").unlink()
    message = catalog.verify_finding(
        "n", "x", run(shell, catalog.verify_script(str(folder)), tmp_path).stdout.decode()
    ).observed
    assert message == ("release x: 1 missing (share/in a b/a b); 1 added (added by pip); 1 links changed (link)")
    found = catalog.read_listing(run(shell, catalog.list_script(inventory, used=True), tmp_path).stdout.decode())
    assert (found.current, found.broken) == (None, ("0123456789ab",))
    assert found.used == {}
    done = run(
        shell, compile_steps([install.remove_step(ReleasePaths.of(inventory, "0123456789ab"))], token="t"), tmp_path
    )
    assert results(done) == {"remove": "changed"}, done
    assert not list(Path(places.releases).iterdir())


@pytest.fixture
def hold(shell):
    """Starts the script that holds a lock: ``hold(lock, token, who)``."""
    with ExitStack() as stack:
        yield lambda lock, token, who="me": stack.enter_context(holder(shell, lock, token, who))


def holder(shell, lock, token, who):
    script = render("release/hold.sh.j2", lock=str(lock), releases="", id=token, who=who, silent=15)
    return subprocess.Popen(
        [*shell, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_lock_has_one_owner_and_is_released_with_its_input(hold, tmp_path):
    lock = tmp_path / "it's a $(touch owned) place/.lock"
    one = hold(lock, "one", "root on head, process 7")
    assert one.stdout.readline().startswith("held ")
    other = hold(lock, "two")
    while not select.select([other.stdout], [], [], 1)[0]:
        one.stdin.write("\n")  # a sign of life
        one.stdin.flush()
    word, seconds, who = other.stdout.readline().split(" ", 2)
    assert (word, who) == ("busy", "root on head, process 7\n")
    assert 0 <= int(seconds) < 60
    assert other.wait(10) == 0
    sharer = hold(lock, "one")  # another node that sees the same files
    assert sharer.stdout.readline().startswith(f"shared {os.uname().nodename} ")
    sharer.communicate("", timeout=10)
    assert lock.exists()
    one.communicate(timeout=10)
    assert not lock.exists()
    assert not list(tmp_path.rglob("owned"))


def test_lock_of_a_killed_owner_is_taken_over_and_its_processes_are_stopped(shell, hold, tmp_path):
    lock = tmp_path / ".lock"
    one = hold(lock, "one")
    assert one.stdout.readline().startswith("held ")
    guard = render("release/guard.sh.j2", lock=str(lock), id="one")
    argv = [*shell, "-c", f"{guard}\necho begun\nsleep 300\necho never"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as worker:
        assert worker.stdout.readline() == "begun\n"
        one.kill()
        one.wait()
        reaper = threading.Thread(target=worker.wait)  # a zombie would still count as alive
        reaper.start()
        two = hold(lock, "two")
        assert two.stdout.readline().startswith("held ")
        reaper.join(10)
        assert worker.returncode == -9
    # The first one's command was only silent: what it starts now must not run beside the second one's.
    late = subprocess.run([*shell, "-c", f"{guard}\necho ran"], capture_output=True, text=True, check=False)
    assert (late.returncode, late.stdout) == (1, "")
    assert not list(lock.glob("worker.*"))
    two.communicate(timeout=10)
    refused = subprocess.run([*shell, "-c", f"{guard}\necho ran"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "another command has taken over" in refused.stderr


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    # SC2016: a dollar in single quotes is what the nasty case is about. SC2089, SC2090: no variable is split here.
    argv = [SHELLCHECK, "-s", "sh", "-e", "SC2016,SC2089,SC2090", path]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_there_are_golden_scripts():
    assert len(GOLDEN) >= 20
