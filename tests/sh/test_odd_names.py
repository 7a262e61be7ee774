"""Files whose names tempt a protocol of lines: packed, unpacked, verified and taken over under three shells."""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from provision.env.bundle.reader import open_bundle
from provision.env.packing.pack import pack
from provision.env.release import catalog, install
from provision.env.release.catalog import ReleasePaths
from provision.env.release.install import Payload, Recipe
from provision.env.relocation import relocate
from provision.model import Inventory, Node, ignore
from provision.script import compile_steps

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
OLD_ID = "0123456789ab"
ODD = tuple(
    os.fsdecode(name)
    for name in (
        b"cr\r",
        b"\rcr",
        b"a\rb",
        b"new\nline",
        b"end\n",
        b"\n",
        b"tab\there",
        b"back\\slash",
        b"\\",
        b"\\n",
        b"trail ",
        b" lead",
        b"-",
        b"-rf",
        b"--",
        b"*",
        b"[a]",
        b"?",
        b"it's",
        b'"quoted"',
        b"$(touch owned)",
        b"`touch owned`",
        b"x: OK",
        b"x: FAILED",
        b"x: FAILED open or read",
        b"end",
        b"\x0b\x0c\x1c\x1d\x1e",
        b"\x01\x7f\x1b[31m",
        b"\xff\xfe\x81\x82",
        b"\xff\n\r\\\xfe",
        "é".encode(),  # in both normal forms
        "e\u0301".encode(),
        "\x85\u2028\u2029\u202e".encode(),
        b"l" * 253,
    )
)


@pytest.fixture(params=SHELLS)
def shell(request, tmp_path_factory, monkeypatch):
    """A shell, and for that of busybox its own tools as well."""
    if request.param == "busybox":
        tools = tmp_path_factory.mktemp("busybox")
        (tools / "busybox").symlink_to(shutil.which("busybox"))
        subprocess.run(["busybox", "--install", "-s", tools], check=True)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return SHELLS[request.param]


def run(shell, script, stdin=b""):
    done = subprocess.run([*shell, "-c", script], check=False, input=stdin, capture_output=True, timeout=60)
    assert done.returncode == 0, done
    return done.stdout.decode("utf-8", "surrogateescape")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The bundle of an environment with every odd name: as a file, as a folder, as a link and its target."""
    prefix = tmp_path_factory.mktemp("odd") / "env"
    (prefix / "share/links").mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "bin/python3.11").symlink_to(os.path.realpath(sys.executable))
    (prefix / "bin/python").symlink_to("python3.11")
    (prefix / "conda-meta").mkdir()
    for name in ODD:
        (prefix / "share" / f"in{name}").mkdir()
        for path in (prefix / "share" / name, prefix / "share" / f"in{name}" / "file"):
            path.write_bytes(os.fsencode(name))
        (prefix / "share/links" / name).symlink_to(f"/nowhere/{name}")
    for name in ("-", "cr\r", "-n"):  # at the top nothing is before the name
        (prefix / name).write_text(name)
    os.link(prefix / "share/it's", prefix / "share/also it's\r")
    out = prefix.with_suffix(".ccb")
    pack(prefix, out, name="env", emit=ignore)
    return open_bundle(out)


@pytest.fixture
def places(tmp_path):
    inventory = Inventory(Path("i.yaml"), PurePosixPath(tmp_path / "llm/current"), (Node("n", "n"),))
    return ReleasePaths.of(inventory, OLD_ID)


def deploy(packed, places):
    """What a transfer and the step "complete" leave."""
    into = Path(places.incoming)
    into.mkdir(parents=True)
    relocated = relocate(packed.manifest, packed.prefix_files(), PurePosixPath(places.release))
    payload = Payload(packed, relocated)
    for part in payload.parts("plain"):
        assert part.kind != "range"
        data = b"".join(part.blocks()) + bytes(1024)
        subprocess.run(["tar", "-xpf", "-", "-C", into], input=data, check=True)
    complete = [step for step in install.activate_steps(places, packed.manifest, relocated) if step.name == "complete"]
    subprocess.run(["sh", "-c", compile_steps(complete, token="t")], check=True, capture_output=True)
    return Path(places.release), payload


def verified(shell, folder):
    return catalog.verify_finding("n", "x", run(shell, catalog.verify_script(str(folder))))


def differences(shell, folder):
    out = run(shell, catalog.verify_script(str(folder)))
    return {tuple(row.split(" ", 2)[1:]) for row in out.split("\n") if row.startswith("bad ")}


def test_release_with_every_accepted_name_verifies(shell, packed, places, tmp_path):
    folder, _ = deploy(packed, places)
    finding = verified(shell, folder)
    assert finding.verdict == "OK", finding.observed
    files = sum(
        path.is_file() and not path.is_symlink() for path in folder.rglob("*") if ".clusterctl" not in path.parts
    )
    assert f" {files} files " in finding.observed
    assert not list(tmp_path.rglob("owned"))


def test_each_change_of_an_odd_file_is_found_and_named(shell, packed, places):
    folder, _ = deploy(packed, places)
    (folder / "share/cr\r").write_text("changed")
    (folder / "share/new\nline").unlink()
    (folder / "share/in\n/file").write_text("changed")
    (folder / "-").write_text("changed")
    (folder / "share/links/end\n").unlink()
    (folder / "share/links/end\n").symlink_to("/nowhere/end")
    (folder / "share/plain").write_text("planted")
    assert differences(shell, folder) == {
        ("changed", "share/cr\\r"),
        ("missing", "share/new\\nline"),
        ("changed", "share/in\\n/file"),
        ("changed", "-"),
        ("link", "share/links/end\\n"),
        ("added", "share/plain"),
    }


PLANTED = {
    # Each would be taken for listed files, or for the end of the answer, by a reader of raw lines.
    "two listed names": (b"share/it's\n./share/trail ", "share/it's\\n./share/trail "),
    "a listed name and CR": (b"share/it's\r", "share/it's\\r"),
    "a name that is listed escaped": (b"share/new\\nline", "share/new\\\\nline"),
    "a newline alone": (b"planted\n", "planted\\n"),
    "in a folder with a newline": (b"share/in\n/planted", "share/in\\n/planted"),
    "a backslash": (b"pl\\anted", "pl\\\\anted"),
    "not UTF-8": (b"planted\n\xff\\", "planted\\n\udcff\\\\"),
    "the end of the answer": (b"x\nend", "x\\nend"),
    "a line feed for Python": (b"x\x0bend", "x\x0bend"),
    "another normal form": ("share/A\u030a".encode(), "share/A\u030a"),
    "in the folder of lists": (b".clusterctl/planted", ".clusterctl/planted"),
    "a hidden list": (b".clusterctl/files/.planted", ".clusterctl/files/.planted"),
}


def test_a_planted_file_cannot_hide_behind_its_name(shell, packed, places):
    folder, _ = deploy(packed, places)
    for name, _ in PLANTED.values():
        path = Path(os.fsdecode(os.fsencode(folder) + b"/" + name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("planted")
    out = run(shell, catalog.verify_script(str(folder)))
    assert {row for row in out.split("\n") if row.startswith("bad ")} == {
        f"bad added {shown}" for _, shown in PLANTED.values()
    }
    assert f"{len(PLANTED)} added" in catalog.verify_finding("n", "x", out).observed


def test_planted_pipes_and_sockets_are_found(shell, packed, places):
    """They contain no bytes, but a reader of the release could wait at one, or talk to the process that made it."""
    folder, _ = deploy(packed, places)
    os.mkfifo(folder / "share/pipe\n")
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.open(folder / "share", os.O_RDONLY)  # a socket's path has 107 bytes at most
        sock.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    assert differences(shell, folder) == {("added", "share/pipe\\n"), ("added", "share/socket")}


def test_file_replaced_by_a_link_to_equal_content_is_found(shell, packed, places, tmp_path):
    folder, _ = deploy(packed, places)
    copy = tmp_path / "elsewhere"
    (folder / "share/it's").rename(copy)
    (folder / "share/it's").symlink_to(copy)
    assert differences(shell, folder) == {("added", "share/it's")}


def test_extra_line_in_a_list_is_found(shell, packed, places):
    folder, _ = deploy(packed, places)
    name = next((folder / ".clusterctl/files").iterdir())
    name.write_bytes(name.read_bytes() + b"no digest  share/plain\n")
    (folder / "share/plain").write_text("planted")
    assert verified(shell, folder).verdict == "FAIL"


def test_a_list_of_an_earlier_version_with_a_bare_carriage_return_is_read(shell, packed, places):
    folder, _ = deploy(packed, places)
    for path in (folder / ".clusterctl/files").iterdir():
        lines = [
            line[1:].replace(b"\\r", b"\r") if b"\\r" in line and line.count(b"\\") == 2 else line
            for line in path.read_bytes().split(b"\n")
        ]
        path.write_bytes(b"\n".join(lines))
    assert verified(shell, folder).verdict == "OK"


def test_another_release_takes_over_chunks_with_odd_names(shell, packed, places, tmp_path):
    folder, payload = deploy(packed, places)
    later = ReleasePaths(places.root, places.link, "ffffffffffff")
    out = run(shell, install.gather_script(later), install.gather_input(payload.keys, Recipe()))
    assert {line for line in out.split("\n") if not line.startswith(("free ", "end"))} == {
        "",
        *(f"have {key}" for key in payload.keys),
    }
    for name in ODD:
        for path in (name, f"in{name}/file") if name != "it's" else ():  # a hard link comes last
            taken = Path(later.incoming) / "share" / path
            assert hashlib.sha256(taken.read_bytes()).digest() == hashlib.sha256(os.fsencode(name)).digest()
    (folder / "share/cr\r").write_text("changed")
    shutil.rmtree(later.incoming)
    assert "damaged " in run(shell, install.gather_script(later), install.gather_input(payload.keys, Recipe()))
    assert not list(tmp_path.rglob("owned"))
