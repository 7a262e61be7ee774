"""The scripts of a push, run for real under three shells: names of every kind, kills between any two lines, links."""

import os
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from provision import data
from provision.data import PushTarget, plan_parts, scan_tree
from provision.env.bundle import tar
from provision.model import Inventory

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
TOKEN = "0123456789abcdef"
ODD = (
    "new\nline",
    "\nfirst",
    "last\n",
    "vt\x0b",
    "nel\x85",
    "ls\u2028",
    "cr\r",
    "it's",
    "$(touch owned)",
    "-n",
    "*",
    "b\\s",
    " a ",
)
LIMIT = 4000


@pytest.fixture(params=SHELLS)
def shell(request, tmp_path_factory, monkeypatch):
    """A shell, and for that of busybox its own tools as well."""
    if shutil.which(SHELLS[request.param][0]) is None:
        pytest.fail(f"{request.param} is missing: apt-get install dash bash busybox")
    if request.param == "busybox":
        tools = tmp_path_factory.mktemp("busybox")
        (tools / "busybox").symlink_to(shutil.which("busybox"))
        subprocess.run(["busybox", "--install", "-s", tools], check=True)
        monkeypatch.setenv("PATH", str(tools))
    return SHELLS[request.param]


class Place:
    """A destination on "a node", which is a folder of this machine with a name that tempts every shell."""

    def __init__(self, shell, root, folder=True):
        self.shell, self.root, self.path = shell, root, root / 'it\'s $(touch owned) "x"'
        self.inventory = Inventory(Path("i.yaml"), PurePosixPath(root / "llm/current"), ())
        self.target = PushTarget.of(self.inventory, str(self.path), folder=folder)
        self.into = Path(self.target.into)
        self.have = Path(self.target.transfer) / "have"

    def run(self, script, stdin=b"", env=None):
        argv = [*self.shell, "-c", script]
        done = subprocess.run(
            argv,
            check=False,
            input=stdin,
            capture_output=True,
            cwd=self.root,
            timeout=60,
            env={**os.environ, **(env or {})},
        )
        assert not list(self.root.rglob("owned"))
        return done

    def ok(self, script, stdin=b""):
        done = self.run(script, stdin)
        assert done.returncode == 0, done
        return done.stdout.decode("utf-8", "surrogateescape")

    def ask(self, tree):
        return data.read_answer(self.ok(data.compare_script(self.target, TOKEN), data.compare_input(tree)), TOKEN)

    def begin(self, tree, *others):
        """The plan for the missing files, and space for them."""
        there = self.ask(tree)
        assert data.find_changes(tree, there, str(self.path)).refused == ""
        pushed = plan_parts(tree, data.differing(tree, there), limit=LIMIT)
        if self.target.folder:
            self.ok(data.open_script(self.target, tree.mode))
        keys = [*(part.key for part in pushed.parts), *others]
        self.ok(data.begin_script(self.target), data.begin_input(pushed, keys))
        return there, pushed

    def receive(self, pushed, count=None):
        """What a transfer would leave; only the first ``count`` parts of it. How many of them had to be sent."""
        have, sent = self.have.read_text().split(), 0
        for part in pushed.parts[:count]:
            if part.key in have:
                continue
            stream = b"".join(part.blocks())
            if part.kind == "tar":
                subprocess.run(["tar", "-xpf", "-", "-C", self.into], input=stream + tar.END, check=True)
            else:
                path = self.into / part.path
                path.touch()
                with path.open("r+b") as file:
                    file.seek(part.offset)
                    file.write(stream)
                path.chmod(part.mode)
                os.utime(path, (part.mtime, part.mtime))
            with self.have.open("a") as file:
                file.write(part.key + "\n")
            sent += 1
        return sent

    def moves(self, tree, there, pushed):
        return data.place_input(pushed, data.find_changes(tree, there, str(self.path)).folders)

    def push(self, source):
        """All of a push. How many parts were sent."""
        tree = scan_tree(source)
        there, pushed = self.begin(tree)
        sent = self.receive(pushed)
        message = self.ok(data.place_script(self.target), self.moves(tree, there, pushed))
        assert message.split()[-1] == "end"
        if "open" in message.split():
            self.ok(data.close_script(self.target))
        return sent

    def is_done(self, source):
        tree = scan_tree(source)
        there = self.ask(tree)
        return data.differing(tree, there) == frozenset() and not data.incomplete(tree, there)


@pytest.fixture
def place(shell, tmp_path):
    (tmp_path / "node").mkdir()
    return Place(shell, tmp_path / "node")


@pytest.fixture
def source(tmp_path):
    top = tmp_path / "set"
    (top / "sub/deep").mkdir(parents=True)
    for name in ("a", "b", "sub/c", "sub/deep/d"):
        (top / name).write_text(name)
        os.utime(top / name, (1000, 1000))
    (top / "large").write_bytes(b"0123456789" * 1000)
    return top


def mode(path):
    return path.stat().st_mode & 0o7777


def test_files_with_any_name_arrive_and_are_sent_once(place, source):
    for name in ODD:
        (source / "sub" / name).write_text(name)
        (source / f"to {name}").symlink_to(name)
        (source / f"of {name}").mkdir()
        (source / f"of {name}" / name).write_bytes(name.encode() * 1000)
    assert place.push(source) > 1
    for name in ODD:
        assert (place.path / "sub" / name).read_bytes() == name.encode()
        assert (place.path / f"to {name}").readlink() == Path(name)
        assert (place.path / f"of {name}" / name).read_bytes() == name.encode() * 1000
    assert place.is_done(source)
    assert sorted(path.name for path in place.path.iterdir()) == sorted(path.name for path in source.iterdir())


@pytest.mark.parametrize("make", [lambda _: None, lambda top: (top / "file").write_text("x")])
def test_a_folder_without_folders(place, tmp_path, make):
    (tmp_path / "flat").mkdir(mode=0o750)
    make(tmp_path / "flat")
    place.push(tmp_path / "flat")
    assert [path.name for path in place.path.iterdir()] == [path.name for path in (tmp_path / "flat").iterdir()]
    assert mode(place.path) == 0o750
    assert place.is_done(tmp_path / "flat")


def test_one_file(shell, tmp_path):
    (tmp_path / "node").mkdir()
    place = Place(shell, tmp_path / "node", folder=False)
    for content in (b"small", b"large" * 1000):
        (tmp_path / "file").write_bytes(content)
        assert place.push(tmp_path / "file") == -(-len(content) // LIMIT)
        assert place.path.read_bytes() == content
        assert place.is_done(tmp_path / "file")
    assert [path.name for path in place.root.iterdir()] == [place.path.name]


def test_existing_destination_keeps_its_mode(place, source):
    source.chmod(0o700)
    place.path.mkdir()
    place.path.chmod(0o2775)
    place.push(source)
    assert mode(place.path) == 0o2775


def test_mode_of_a_read_only_destination_is_set_last(place, source):
    source.chmod(0o555)
    tree = scan_tree(source)
    there, pushed = place.begin(tree)
    assert mode(place.path) == 0o755
    place.receive(pushed)
    place.ok(data.open_script(place.target, 0o555))  # of the push that resumes after the first was killed
    assert place.ok(data.place_script(place.target), place.moves(tree, there, pushed)) == "open\nend\n"
    assert mode(place.path) == 0o755
    lock = Path(place.target.staging + ".lock")
    lock.mkdir()
    place.ok(data.close_script(place.target))
    assert mode(place.path) == 0o755  # the owner of the lock must be able to release it
    lock.rmdir()
    place.ok(data.close_script(place.target))
    assert mode(place.path) == 0o555
    assert place.is_done(source)


def test_existing_links_do_not_lead_out_of_the_destination(place, source):
    """A folder replaces a link, and the link's target does not change."""
    elsewhere = place.root / "elsewhere"
    shutil.copytree(source / "sub", elsewhere)  # the very same files
    (elsewhere / "c").write_text("precious")
    place.path.mkdir()
    (place.path / "sub").symlink_to(elsewhere)
    (place.path / "a").symlink_to(elsewhere / "c")
    place.push(source)
    assert (elsewhere / "c").read_text() == "precious"
    assert (elsewhere / "deep/d").read_text() == "sub/deep/d"
    assert not (place.path / "sub").is_symlink()
    assert (place.path / "sub/deep/d").read_text() == "sub/deep/d"
    assert (place.path / "a").read_text() == "a"
    assert place.is_done(source)


def test_links_of_a_broken_push_do_not_lead_out_of_the_staging_folder(place, source, tmp_path):
    elsewhere = place.root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "c").write_text("precious")
    before = tmp_path / "before"
    shutil.copytree(source, before)
    shutil.rmtree(before / "sub")
    (before / "sub").symlink_to(elsewhere)
    _, pushed = place.begin(scan_tree(before))
    assert place.receive(pushed, 1) == 1
    assert next(iter(place.into.glob("small/*/sub"))).is_symlink()
    place.push(source)
    assert (elsewhere / "c").read_text() == "precious"
    assert (place.path / "sub/c").read_text() == "sub/c"


def test_leftovers_of_an_older_push_are_removed(place, source):
    tree = scan_tree(source)
    _, pushed = place.begin(tree)
    place.receive(pushed)
    kept = sorted(place.into.rglob("*"))
    (source / "large").write_bytes(b"changed" * 1000)
    _, changed = place.begin(scan_tree(source))
    assert set(changed.small) == set(pushed.small)
    assert sorted(place.into.rglob("*")) == [path for path in kept if path.parent.name != "large"]
    assert place.receive(changed) == 2  # the two ranges
    assert place.ask(scan_tree(source)).staged > 0
    shutil.rmtree(source)
    source.mkdir()
    place.push(source)
    assert list(place.path.iterdir()) == []


def test_parts_for_other_nodes_count_as_present(place, source):
    place.begin(scan_tree(source), "others", "others.0")
    assert place.have.read_text().split() == ["others", "others.0"]
    place.begin(scan_tree(source))
    assert place.have.read_text() == ""


def test_a_killed_push_resumes_even_after_a_reboot(place, source):
    _, pushed = place.begin(scan_tree(source))
    place.receive(pushed, 2)
    transfer = Path(place.target.transfer)
    (transfer / "boot").write_text("another\n")  # what earlier versions went by
    with place.have.open("a") as file:
        file.write(pushed.parts[-1].key)  # killed while it wrote: no newline
    place.begin(scan_tree(source))
    assert place.have.read_text().split() == [part.key for part in pushed.parts[:2]]


@pytest.mark.parametrize("lines", range(1, 16, 2))
def test_killed_anywhere_in_placing_only_the_rest_of_one_group_is_sent_again(place, source, lines):
    for number in range(6):
        (source / f"many{number}").write_bytes(bytes(1500))
    tree = scan_tree(source)
    there, pushed = place.begin(tree)
    assert len(pushed.small) > 2
    everything = place.receive(pushed)
    reported = place.moves(tree, there, pushed).splitlines(keepends=True)
    cut = data.place_script(place.target).replace(
        "while IFS= read -r line; do", f"for n in $(seq {lines}); do IFS= read -r line;"
    )
    cut = cut[: cut.index('\nmove "$@"\nif ')]
    assert len(reported) > 15 - 2
    place.run(cut, b"".join(reported))
    again = place.push(source)
    assert again <= 1 < everything
    assert place.is_done(source)


@pytest.mark.parametrize("gone", ["large", "small"])
def test_missing_staged_files_fail_the_push(place, source, gone):
    tree = scan_tree(source)
    there, pushed = place.begin(tree)
    place.receive(pushed)
    shutil.rmtree(place.into / gone)
    done = place.run(data.place_script(place.target), place.moves(tree, there, pushed))
    assert done.returncode != 0
    assert b"end" not in done.stdout
    place.push(source)
    assert place.is_done(source)


def test_contents_are_flushed_before_names(place, source, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sync").write_text(f'#!/bin/sh\nls -A "$DESTINATION" >>{tmp_path}/seen\nexec /bin/sync "$@"\n')
    (tools / "sync").chmod(0o755)
    tree = scan_tree(source)
    there, pushed = place.begin(tree)
    place.receive(pushed)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "DESTINATION": str(place.path)}
    # busybox would take its own sync
    script = data.place_script(place.target).replace("\nsync -f", f"\n{tools}/sync -f")
    assert place.run(script, place.moves(tree, there, pushed), env).returncode == 0
    assert (tmp_path / "seen").read_text() == ".clusterctl-push-folder\n"


def test_private_files_are_private_at_every_moment(place, source):
    (source / "sub").chmod(0o700)
    (source / "sub/deep").chmod(0o755)
    source.chmod(0o700)
    tree = scan_tree(source)
    there, pushed = place.begin(tree)
    assert mode(place.path) == mode(Path(place.target.staging)) == 0o700
    place.receive(pushed)
    reported = place.moves(tree, there, pushed)
    place.run(data.place_script(place.target), reported[: reported.index(b"group")])
    assert mode(place.path / "sub") == 0o700


def test_folder_becomes_private_before_files_are_placed_in_it(place, source):
    place.push(source)
    (source / "sub").chmod(0o700)
    (source / "sub/key").write_text("secret")
    tree = scan_tree(source)
    there, pushed = place.begin(tree)
    place.receive(pushed)
    reported = place.moves(tree, there, pushed)
    Path(place.target.staging, "mode").write_text("755\n")  # so that it does not tidy up
    place.run(data.place_script(place.target), reported[: reported.index(b"group")])
    assert mode(place.path / "sub") == 0o700


@pytest.mark.parametrize(
    ("make", "folder", "words"),
    [
        (lambda path: path.write_text(""), True, "is not a folder on the node but a folder here"),
        (lambda path: path.symlink_to("nowhere"), True, "is not a folder"),
        (lambda path: path.mkdir(), False, "is a folder on the node and a file here"),
        (os.mkfifo, False, "is not a file on the node"),
        (lambda path: path.symlink_to("llm/releases"), True, "where clusterctl keeps releases"),
        (lambda path: path.symlink_to("llm/current"), True, "where clusterctl keeps releases"),
    ],
)
def test_unusable_destination_is_refused(shell, tmp_path, source, make, folder, words):
    place = Place(shell, tmp_path, folder)
    (tmp_path / "llm/releases/one").mkdir(parents=True)
    (tmp_path / "llm/current").symlink_to("releases/one")
    make(place.path)
    tree = scan_tree(source if folder else source / "a")
    there = place.ask(tree)
    assert words in data.find_changes(tree, there, str(place.path)).refused


def test_destination_behind_a_link_is_the_links_target(place, source):
    (place.root / "disk").mkdir()
    place.path.symlink_to("disk")
    place.push(source)
    assert (place.root / "disk/sub/c").read_text() == "sub/c"
    assert place.path.is_symlink()


def test_staging_folder_of_another_user_is_replaced(place, source):
    place.path.mkdir()
    staging = Path(place.target.staging)
    staging.mkdir()
    (staging / "tree").symlink_to(place.root)
    os.chown(staging, 12345, 12345)
    place.begin(scan_tree(source))
    assert staging.stat().st_uid == os.getuid()
    assert not (staging / "tree").is_symlink()
    assert mode(staging) == 0o700
