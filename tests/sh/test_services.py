"""The library of node services, run for real under three shells: files, blocks, folders, and their undo."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from provision.model import Step
from provision.render import quote, render
from provision.script import compile_steps, parse
from provision.services.kit import changes
from provision.services.kit.plans import NodeSteps, collect_steps
from provision.services.kit.scripts import apply_script, undo_step, verify_script

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
NASTY = (
    "plain",
    "a b",
    "it's",
    "$(touch owned)",
    "`touch owned`",
    "back\\slash",
    "-n",
    "*",
    "a\nb",
    "",
    'x"y',
    "é\t%s",
)
# What sh can carry in a word: anything but NUL; a file's text may end in any number of newlines.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40)


@pytest.fixture(params=SHELLS)
def shell(request):
    if shutil.which(SHELLS[request.param][0]) is None:
        pytest.fail(f"{request.param} is missing: apt-get install dash bash busybox")
    return SHELLS[request.param]


class Node:
    """A node in a folder: ``etc`` has the steps' files, and the journals are beside it."""

    def __init__(self, shell, folder):
        self.shell, self.folder = shell, folder
        self.etc = folder / "etc it's"
        self.etc.mkdir(exist_ok=True)
        self.state = PurePosixPath(folder / "state/services")

    def apply(self, *steps, dry_run=False, service="svc"):
        plan = collect_steps([_Named], [(service, iter([NodeSteps("n", "base", steps)]))])
        named = [step for each in plan.steps.values() for step in each["n"]]
        return self.run(apply_script(named, "t", dry_run=dry_run, state=self.state))

    def undo(self, service="svc"):
        step = undo_step(service)
        there = str(self.state / service)
        step = Step(step.name, step.do, f"[ ! -d {quote(there)} ]")
        return self.run(apply_script([step], "t", state=self.state))

    def run(self, text):
        done = subprocess.run([*self.shell, "-c", text], check=False, capture_output=True, cwd=self.folder, timeout=60)
        assert not (self.folder / "owned").exists()
        results = parse("t", done.stdout.decode("utf-8", "surrogateescape"))
        return {step.name.partition(": ")[2]: step.state for step in results}, results, done

    def states(self, *steps, **options):
        return self.apply(*steps, **options)[0]

    def path(self, name):
        return str(self.etc / name)

    def snapshot(self):
        return {
            str(path.relative_to(self.etc)): (
                path.lstat().st_mode,
                None if path.is_dir() else path.lstat().st_mtime_ns,
                hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None,
            )
            for path in sorted(self.etc.rglob("*"))
        }


class _Named:
    name = "n"


@pytest.fixture
def node(shell, tmp_path):
    return Node(shell, tmp_path)


@pytest.mark.parametrize("text", NASTY)
def test_a_file_is_written_once_and_undone(node, text):
    old = node.etc / "old.conf"
    old.write_bytes(b"what was there\n\n")
    old.chmod(0o640)
    before = node.snapshot()
    steps = [
        changes.write_file("old", node.path("old.conf"), text),
        changes.write_file("new", node.path("a/b/$new"), text, mode=0o600),
    ]
    assert node.states(*steps, dry_run=True) == {"old": "would change", "new": "would change"}
    assert node.snapshot() == before
    assert node.states(*steps) == {"old": "changed", "new": "changed"}
    assert old.read_text() == (node.etc / "a/b/$new").read_text() == text
    assert (node.etc / "a/b/$new").stat().st_mode & 0o777 == 0o600
    assert node.states(*steps) == {"old": "ok", "new": "ok"}
    assert node.undo()[0] == {"undo": "changed"}
    assert node.snapshot() == before
    assert not Path(node.state / "svc").exists()
    assert node.undo()[0] == {"undo": "ok"}


def test_a_second_change_keeps_the_first_original(node):
    path = node.etc / "x"
    path.write_text("original")
    for text in ("first", "second"):
        assert node.states(changes.write_file("x", str(path), text)) == {"x": "changed"}
    node.undo()
    assert path.read_text() == "original"


def test_later_changes_by_the_user_are_kept(node):
    path = node.etc / "x"
    path.write_text("original")
    node.apply(changes.write_file("x", str(path), "ours"))
    path.write_text("theirs")
    assert node.states(changes.write_file("x", str(path), "ours")) == {"x": "changed"}
    assert (node.etc / "x.clusterctl-edited").read_text() == "theirs"
    path.write_text("theirs again")
    node.undo()
    assert path.read_text() == "original"
    assert (node.etc / "x.clusterctl-edited").read_text() == "theirs again"


def test_a_file_that_its_checker_refuses_changes_nothing(node):
    path = node.etc / "daemon.conf"
    path.write_text("good")
    step = changes.write_file(
        "conf", str(path), "bad", check='! grep -q bad "$cc_new" || { echo line 1 is bad; exit 1; }'
    )
    states, results, done = node.apply(step)
    assert states == {"conf": "failed"}
    assert results[0].detail == "line 1 is bad"
    assert done.returncode == 1
    assert path.read_text() == "good"


def test_interrupted_restart_is_done_by_the_next_apply(node):
    """A crash between the file and the restart: the next apply does the restart."""
    mark = node.folder / "restarted"
    conf = node.path("conf")
    assert node.states(changes.write_file("conf", conf, "x", then="false")) == {"conf": "failed"}
    assert Path(conf).read_text() == "x"
    step = changes.write_file("conf", conf, "x", then=f": >{quote(str(mark))}")
    assert node.states(step) == {"conf": "changed"}
    assert mark.exists()
    assert node.states(step) == {"conf": "ok"}


@pytest.mark.parametrize("at", ["top", "end"])
@pytest.mark.parametrize(
    "content", [b"", b"one\n", b"one\ntwo", b"\n\n", b"# BEGIN clusterctl other\nx\n# END clusterctl other\n"]
)
def test_block_leaves_other_lines_unchanged(node, content, at):
    path = node.etc / "hosts"
    path.write_bytes(content)
    path.chmod(0o604)
    before = path.read_bytes(), path.stat().st_mode
    step = changes.write_block("block", str(path), "1.2.3.4 it's $(touch owned)\n", mark="nodes", at=at)
    assert node.states(step) == {"block": "changed"}
    assert node.states(step) == {"block": "ok"}
    lines = path.read_text().splitlines()
    ours = ["# BEGIN clusterctl nodes", "1.2.3.4 it's $(touch owned)", "# END clusterctl nodes"]
    assert lines == [*ours, *content.decode().splitlines()] if at == "top" else [*content.decode().splitlines(), *ours]
    changed = changes.write_block("block", str(path), "5.6.7.8 x\n", mark="nodes", at=at)
    assert node.states(changed) == {"block": "changed"}
    assert path.read_text().splitlines() == [line.replace(ours[1], "5.6.7.8 x") for line in lines]
    assert node.undo()[0] == {"undo": "changed"}
    assert (path.read_bytes(), path.stat().st_mode) == before


def test_moved_block_and_added_lines_stay(node):
    path = node.etc / "hosts"
    path.write_text("a\nb\n")
    node.apply(changes.write_block("block", str(path), "1\n", mark="m"))
    path.write_text("a\n# BEGIN clusterctl m\n1\n# END clusterctl m\nb\nadded\n")
    node.apply(changes.write_block("block", str(path), "2\n", mark="m"))
    assert path.read_text() == "a\n# BEGIN clusterctl m\n2\n# END clusterctl m\nb\nadded\n"
    node.undo()
    assert path.read_text() == "a\nb\nadded\n"


def test_duplicate_block_is_removed(node):
    path = node.etc / "fstab"
    path.write_text("# BEGIN clusterctl m\n1\n# END clusterctl m\nx\n# BEGIN clusterctl m\n2\n# END clusterctl m\n")
    assert node.states(changes.write_block("block", str(path), "1\n", mark="m")) == {"block": "changed"}
    assert path.read_text() == "# BEGIN clusterctl m\n1\n# END clusterctl m\nx\n"


def test_a_truncated_block_is_not_repaired_by_guessing(node):
    path = node.etc / "fstab"
    path.write_text("# BEGIN clusterctl m\n1\nmine\n")
    states, results, _ = node.apply(changes.write_block("block", str(path), "1\n", mark="m"))
    assert states == {"block": "failed"}
    assert "do not match" in results[0].detail
    assert path.read_text() == "# BEGIN clusterctl m\n1\nmine\n"


def test_file_created_for_a_block_is_removed_with_it(node):
    path = node.etc / "new"
    node.apply(changes.write_block("block", str(path), "1\n", mark="m"))
    assert path.stat().st_mode & 0o777 == 0o644
    node.undo()
    assert not path.exists()


def test_undo_restores_a_link_as_a_link(node):
    (node.etc / "real").write_text("x")
    link = node.etc / "link"
    link.symlink_to("real")
    assert node.states(changes.write_file("link", str(link), "ours")) == {"link": "changed"}
    assert (node.etc / "real").read_text() == "x"
    node.undo()
    assert os.readlink(link) == "real"  # noqa: PTH115 - what it says, not where it leads


def test_folder_with_files_stays(node):
    steps = [changes.make_folder("one", node.path("x/y")), changes.make_folder("two", node.path("z"))]
    assert node.states(*steps) == {"one": "changed", "two": "changed"}
    assert node.states(*steps) == {"one": "ok", "two": "ok"}
    (node.etc / "x/y/data").write_text("theirs")
    node.undo()
    assert [str(path.relative_to(node.etc)) for path in sorted(node.etc.rglob("*"))] == ["x", "x/y", "x/y/data"]


def test_an_interrupted_undo_resumes(node):
    """The last change is undone first; one that cannot be undone yet keeps those before it for the next time."""
    first, second = node.etc / "first", node.etc / "second"
    first.write_text("1")
    second.write_text("2")
    node.apply(changes.write_file("first", str(first), "x"), changes.write_file("second", str(second), "x"))
    was = next(path for path in Path(node.state / "svc").glob("*.was") if path.read_text() == "1")
    was.rename(was.with_suffix(".gone"))
    assert node.undo()[0] == {"undo": "failed"}
    assert (first.read_text(), second.read_text()) == ("x", "2")
    was.with_suffix(".gone").rename(was)
    assert node.undo()[0] == {"undo": "changed"}
    assert first.read_text() == "1"


def test_two_services_are_undone_separately(node):
    a, b = node.etc / "a", node.etc / "b"
    node.apply(changes.write_file("a", str(a), "x"), service="one")
    node.apply(changes.write_file("b", str(b), "x"), service="two")
    node.undo("one")
    assert (a.exists(), b.exists()) == (False, True)


def test_verification_runs_every_check(node):
    steps = [
        changes.require("first", "true", "echo unused"),
        changes.require("second", "false", "echo two lines; echo of it"),
        changes.require("third", "[ -n x ]", "echo unused"),
        changes.require("fourth", "false", ":"),
    ]
    results = node.run(verify_script([Step(f"s: {s.name}", s.do, s.unless) for s in steps], "t"))[1]
    assert [step.state for step in results] == ["ok", "failed", "ok", "failed"]
    assert results[1].detail == "two lines\nof it"
    assert results[3].detail == "exit code 1"


def test_another_command_is_waited_for(node, monkeypatch):
    if shutil.which("flock") is None:
        pytest.fail("flock is missing: apt-get install util-linux")
    monkeypatch.setattr("provision.services.kit.scripts.LOCK_SECONDS", 1)
    Path(node.state.parent).mkdir()
    with subprocess.Popen(["flock", str(node.state.parent / "lock"), "sh", "-c", "echo held; read x"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:  # fmt: skip
        assert holder.stdout.readline() == b"held\n"
        _, results, done = node.apply(changes.write_file("x", node.path("x"), "1"))
        assert (results, done.returncode) == ((), 75)
        assert b"another clusterctl command is running on this node" in done.stderr
        assert node.states(changes.write_file("x", node.path("x"), "1"), dry_run=True) == {"x": "would change"}
        holder.stdin.close()
    assert node.states(changes.write_file("x", node.path("x"), "1")) == {"x": "changed"}


@pytest.mark.parametrize("name", SHELLS)
@settings(
    max_examples=settings.default.max_examples // 4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name_of_file=TEXT.filter(lambda t: t.strip("/. \n") and "/" not in t), text=TEXT, word=TEXT)
@example(name_of_file="$(touch owned)", text="'\n\n", word="a'\"$x`y`\\")
def test_any_value_reaches_the_node_unchanged(name, tmp_path_factory, name_of_file, text, word):
    node = Node(SHELLS[name], tmp_path_factory.mktemp("any"))
    where = node.etc / name_of_file.replace("\n", "")
    steps = (
        changes.write_file("file", str(where), text),
        Step("word", do=f"printf %s {quote(word)} >{quote(node.path('word of it'))}"),
    )
    assert node.states(*steps)["file"] == "changed"
    assert where.read_bytes() == text.encode()
    assert (node.etc / "word of it").read_bytes() == word.encode()
    assert node.states(steps[0]) == {"file": "ok"}
    node.undo()
    assert not where.exists()


def test_a_missing_template_variable_is_named():
    from provision.errors import ClusterctlError

    with pytest.raises(ClusterctlError, match=r"services/library\.sh\.j2.*'state' is undefined"):
        render("services/library.sh.j2")


def test_the_token_of_a_failed_step_is_not_its_output(node):
    """Output of a step is not mistaken for a marker of the script."""
    step = Step("liar", do='echo "@clusterctl:other:step:0:changed:0:1"; exit 3')
    text = compile_steps([step], token="t", keep_going=True)
    (result,) = node.run(text)[1]
    assert (result.state, result.detail) == ("failed", "@clusterctl:other:step:0:changed:0:1")
