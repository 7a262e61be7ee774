"""What runs on a node during a transfer, under every sh that a node may have: chains of pipes instead of ssh."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePosixPath

import pytest
import zstandard

from provision.model import Inventory, Node, Part
from provision.render import quote, render, words
from provision.transfer import Target
from provision.transfer.chain import DIGESTS, batches, units
from provision.transfer.keys import (
    LIFE,
    LoginTarget,
    RelayKey,
    comment_prefix,
    forget,
    leftover_values,
    options,
    scope_of,
)
from provision.transfer.nodes import read_facts, survey_script
from provision.transfer.prepare import pack_zstd

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
UNIT = 1 << 16
INVENTORY = Inventory(Path("i.yaml"), PurePosixPath("/opt/test of the relay/current"), ())
BIG = os.urandom(5 * UNIT // 2)
ODD = "it's \udcff\n$(touch owned) \\x"  # of a file: no UTF-8, a newline


@pytest.fixture(params=SHELLS)
def shell(request):
    if shutil.which(SHELLS[request.param][0]) is None:
        pytest.fail(f"{request.param} is missing: apt-get install dash bash busybox")
    return SHELLS[request.param]


def tar(name, data, mode=0o640):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = len(data), mode, 1_600_000_000
        archive.addfile(info, io.BytesIO(data))
        end = archive.offset
    return out.getvalue()[:end]


def sample_parts(pack=bytes):
    """Two small tars, a large one, and a file in two ranges."""
    found = []
    for name, data in CONTENTS.items():
        wire = pack(tar(f"dir/{name}", data))
        found.append(Part(name, "tar", len(wire), partial(iter, [wire])))
    for at, data in ((0, BIG), (1, b"end")):
        wire = pack(data)
        place = (f"a b/{ODD}", at << 20, 0o444, 1_500_000_000)
        found.append(Part(f"r{at}", "range", len(wire), partial(iter, [wire]), *place))
    return found


CONTENTS = {"a": b"first", "b": b"second", "big": BIG}


def stream(nodes=1, lacking=None, kept=None, name="s1", parts=None):
    """The bytes of a whole stream, and each unit's own."""
    parts = parts or sample_parts()
    everything = {each.key for each in parts}
    pieces, number = [], 1
    for batch in batches(parts, lacking or [everything] * nodes, unit=UNIT):
        for unit in units(batch, kept or [()] * nodes, "b2sum", number, unit=UNIT):
            pieces.append(unit.header + b"".join(unit.data))
            number = unit.number + 1
    return [f"stream {name} {nodes}\n".encode(), *pieces, b"end\n"]


class Place:
    """A node's folders, with a name that tempts every shell."""

    def __init__(self, shell, root, number=0, hop="", wire="plain", **changes):
        self.shell, self.folder, self.into = shell, root / f"n{number} ü'$x/transfer", root / f"n{number} ü'$x/into"
        self.folder.mkdir(parents=True)
        self.into.mkdir()
        settings = {
            "me": number,
            "wire": wire,
            "digest": DIGESTS["b2sum"],
            "ahead": 64,
            "spare": 16,
            "abreast": 4,
            "settle": 1 << 30,
        } | changes
        self.write(
            "receive", render("transfer/receive.sh.j2", folder=str(self.folder), into=str(self.into), **settings)
        )
        self.write("alive", "")
        self.write("stream", "s1\n")
        if hop:
            self.write("hop", f"secret=\nset -- {hop}\n")

    def write(self, name, text):
        (self.folder / name).write_text(text)

    @property
    def command(self):
        return words([*self.shell, self.folder / "receive"])

    def receive(self, data, **options):
        return subprocess.run(
            [*self.shell, self.folder / "receive"],
            input=b"".join(data),
            capture_output=True,
            check=False,
            timeout=60,
            **options,
        )

    @property
    def have(self):
        """Its keys, sorted: parts that are unpacked side by side end in any order."""
        return sorted((self.folder / "have").read_text().split())

    def survey(self):
        target = Target(Node("n", ""), str(self.folder), str(self.into), "plain", has_ssh=True)
        script = survey_script(INVENTORY, target)
        done = subprocess.run([*self.shell, "-c", script], capture_output=True, text=True, check=True, timeout=60)
        return read_facts(done.stdout)

    def is_whole(self):
        found = {os.fsdecode(path.relative_to(self.into)) for path in self.into.rglob("*") if path.is_file()}
        large = self.into / "a b" / ODD
        return (
            found == {"dir/a", "dir/b", "dir/big", f"a b/{ODD}"}
            and all((self.into / "dir" / name).read_bytes() == data for name, data in CONTENTS.items())
            and large.read_bytes() == BIG + bytes((1 << 20) - len(BIG)) + b"end"
            and (large.stat().st_mode & 0o7777, large.stat().st_mtime) == (0o444, 1_500_000_000)
            and (self.into / "dir/a").stat().st_mode & 0o7777 == 0o640
        )


def reports(done, *kinds):
    lines = [line for line in done.stdout.decode().splitlines() if not kinds or line.split()[0] in kinds]
    return sorted(lines)


KEYS = sorted(each.key for each in sample_parts())


def test_a_chain_of_three(shell, tmp_path):
    last = Place(shell, tmp_path, 2)
    middle = Place(shell, tmp_path, 1, hop=last.command)
    first = Place(shell, tmp_path, 0, hop=middle.command)
    data = stream(3)
    done = first.receive(data)
    assert done.returncode == 0, done
    for place in (first, middle, last):
        assert place.is_whole()
        assert place.have == KEYS
        assert not (place.folder / "units").exists()
        assert not (place.folder / "kept").exists()
    assert reports(done, "end") == ["end 0", "end 1", "end 2"]
    for number in range(3):
        assert len([line for line in reports(done, "got") if line.startswith(f"got {number} ")]) == len(data) - 2
        assert len([line for line in reports(done, "did") if line.startswith(f"did {number} ")]) == 4
    assert reports(done, "bad", "fail", "lost") == []
    assert not list(tmp_path.rglob("owned"))


def test_compressed_parts(shell, tmp_path):
    place = Place(shell, tmp_path, wire="zstd")
    done = place.receive(stream(parts=sample_parts(zstandard.compress)))
    assert done.returncode == 0, (done, (place.folder / "log").read_text())
    assert place.is_whole()


@pytest.fixture
def without_zstd(tmp_path):
    """An environment whose PATH has this machine's programs, but not zstd."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for path in reversed(os.environ["PATH"].split(":")):
        for program in Path(path).glob("*"):
            if program.name != "zstd":
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return {"PATH": str(folder)}


def bring(place, archive, environment):
    script = render("transfer/bring_zstd.sh.j2", folder=str(place.folder), sample="zstd works")
    return subprocess.run(
        [*place.shell, "-c", script], input=archive, check=False, env=environment, timeout=60, capture_output=True
    ).returncode


def test_a_node_without_zstd_decompresses_with_the_controllers(shell, tmp_path, without_zstd):
    place = Place(shell, tmp_path, wire="zstd")
    data = stream(parts=sample_parts(zstandard.compress))
    assert place.receive(data, env=without_zstd).returncode != 0
    assert bring(place, pack_zstd(shutil.which("zstd")), without_zstd) == 0
    assert (place.folder / "zstd").stat().st_mode & 0o777 == 0o700
    assert place.receive(data, env=without_zstd).returncode == 0
    assert place.is_whole()


@pytest.mark.parametrize("damage", ["program", "loader", "archive"])
def test_a_zstd_that_does_not_work_on_the_node_is_not_kept(shell, tmp_path, without_zstd, damage):
    place = Place(shell, tmp_path)
    archive = pack_zstd(shutil.which("zstd"))
    if damage == "archive":
        archive = archive[: len(archive) // 2]
    else:
        with tarfile.open(fileobj=io.BytesIO(archive)) as whole:
            files = {member.name: whole.extractfile(member).read() for member in whole}
        files["zstd" if damage == "program" else "loader"] = b"\x7fELF of another machine"
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as changed:
            for name, data in files.items():
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), 0o700
                changed.addfile(member, io.BytesIO(data))
        archive = out.getvalue()
    assert bring(place, archive, without_zstd) == 1
    assert not list(place.folder.glob("zstd*"))


def test_a_machine_without_a_zstd_program_brings_none(tmp_path):
    script = tmp_path / "zstd"
    script.write_text('#!/bin/sh\nexec /opt/zstd/bin/zstd "$@"\n')
    assert pack_zstd(None) == pack_zstd(str(script)) == b""


def test_more_units_than_may_wait(shell, tmp_path):
    last = Place(shell, tmp_path, 1)
    first = Place(shell, tmp_path, 0, hop=last.command, ahead=2, spare=1)
    done = first.receive(stream(2))
    assert done.returncode == 0
    assert first.is_whole()
    assert last.is_whole()


def test_only_missing_parts_are_unpacked(shell, tmp_path):
    last = Place(shell, tmp_path, 2)
    middle = Place(shell, tmp_path, 1, hop=last.command)
    first = Place(shell, tmp_path, 0, hop=middle.command)
    done = first.receive(stream(3, lacking=[{"a"}, set(), {"big", "a"}]))
    assert done.returncode == 0
    assert [place.have if (place.folder / "have").exists() else [] for place in (first, middle, last)] == [
        ["a"],
        [],
        ["a", "big"],
    ]
    assert (last.into / "dir/big").read_bytes() == BIG
    assert not list(middle.into.iterdir())


def test_damaged_unit_is_found_and_later_units_are_not_used(shell, tmp_path):
    last = Place(shell, tmp_path, 1)
    first = Place(shell, tmp_path, 0, hop=last.command)
    data = stream(2)
    data[3] = data[3][:-1] + bytes([data[3][-1] ^ 1])
    done = first.receive(data)
    assert done.returncode == 3
    assert reports(done, "bad", "end", "lost", "fail") == ["bad 0 3"]
    assert first.have == last.have == ["a", "b"]
    assert not (first.into / "dir/big").exists()


def test_an_interrupted_stream_resumes_later(shell, tmp_path):
    first = Place(shell, tmp_path)
    data = stream()
    cut = [*data[:3], data[3][:-100]]  # in the middle of the large tar's second unit
    done = first.receive(cut)
    assert done.returncode == 3
    assert reports(done, "bad", "fail", "end") == []
    assert first.have == ["a", "b"]
    facts = first.survey()
    assert facts.have == {"a", "b"}
    rest = stream(lacking=[{*KEYS} - facts.have], kept=[facts.kept])
    assert b" s " in rest[1]
    assert b" n " in rest[2]
    assert len(b"".join(rest)) < len(b"".join(data)) - UNIT
    assert first.receive(rest).returncode == 0
    assert first.is_whole()
    assert first.have == KEYS
    assert not (first.folder / "kept").exists()


def test_node_passes_on_the_units_it_kept(shell, tmp_path):
    last = Place(shell, tmp_path, 1)
    first = Place(shell, tmp_path, 0, hop=last.command)
    alone = Place(shell, tmp_path, 2)
    alone.receive(stream()[:3])
    shutil.move(alone.folder / "units", first.folder / "units")
    facts = first.survey()
    data = stream(2, kept=[facts.kept, ()])
    assert [piece.split(b" ")[2] for piece in data[1:-1]][:3] == [b"nn", b"sn", b"nn"]
    done = first.receive(data)
    assert done.returncode == 0
    assert first.is_whole()
    assert last.is_whole()


@pytest.mark.parametrize(
    "hop",
    ["head -c 100000", "false", "sh -c 'exec 2>&1; echo no route >&2; exit 255'", "sh -c 'sleep 0.1; kill -KILL $$'"],
)
def test_dead_node_later_in_the_chain_stops_no_other(shell, tmp_path, hop):
    first = Place(shell, tmp_path, hop=hop)
    done = first.receive(stream(2))
    assert done.returncode == 0
    assert first.is_whole()
    assert len(reports(done, "lost")) == 1 or hop.startswith("head")
    assert "end 0" in reports(done, "end")


def test_transfer_continues_without_a_reader_of_its_reports(shell, tmp_path):
    last = Place(shell, tmp_path, 1)
    first = Place(shell, tmp_path, 0, hop=last.command)
    process = subprocess.Popen(
        [*shell, first.folder / "receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process.stdout.close()
    process.stdin.write(b"".join(stream(2)))
    process.stdin.close()
    process.wait(60)
    assert first.is_whole()
    assert last.is_whole()


def test_a_stream_of_another_name_changes_nothing(shell, tmp_path):
    place = Place(shell, tmp_path)
    before = sorted(path.name for path in place.folder.iterdir())
    assert place.receive(stream(name="old")).returncode == 3
    assert place.receive([b"rubbish\n"]).returncode == 3
    assert place.receive([]).returncode == 3
    assert sorted(path.name for path in place.folder.iterdir()) == before
    assert not list(place.into.iterdir())


def test_a_probe_reads_nothing(shell, tmp_path):
    place = Place(shell, tmp_path)
    done = place.receive(stream(), env={**os.environ, "SSH_ORIGINAL_COMMAND": "probe"})
    assert (done.returncode, done.stdout) == (0, b"probed\n")
    assert not list(place.into.iterdir())


def test_a_shared_file_is_copied_before_a_range_is_written(shell, tmp_path):
    place = Place(shell, tmp_path)
    (place.into / "a b").mkdir()
    old = tmp_path / "old"
    old.write_bytes(b"x" * len(BIG))
    old.chmod(0o400)
    os.link(old, place.into / "a b" / ODD)
    assert place.receive(stream()).returncode == 0
    assert place.is_whole()
    assert old.read_bytes() == b"x" * len(BIG)


def test_a_range_beyond_two_gibibytes(shell, tmp_path):
    place, at = Place(shell, tmp_path), 3 << 30
    part = Part("far", "range", 5, partial(iter, [b"a\0end"]), "large", at, 0o644, 1_500_000_000)
    assert place.receive(stream(parts=[part])).returncode == 0
    with (place.into / "large").open("rb") as file:
        file.seek(at)
        assert file.read() == b"a\0end"


def test_a_symlink_in_a_range_s_place_is_not_followed(shell, tmp_path):
    place = Place(shell, tmp_path)
    (place.into / "a b").mkdir()
    (tmp_path / "old").write_bytes(b"x")
    (place.into / "a b" / ODD).symlink_to(tmp_path / "old")
    assert place.receive(stream()).returncode == 0
    assert place.is_whole()
    assert (tmp_path / "old").read_bytes() == b"x"


def with_program(shell, tmp_path, name, script):
    """An environment in which a program is another one."""
    if shell[0] == "busybox":
        pytest.skip("runs its own programs")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / name).write_text(script)
    (programs / name).chmod(0o755)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}


def slow_tar(shell, tmp_path):
    """An environment whose tar records its start and end, and does not end before a second one has started."""
    log = quote(tmp_path / "log")
    script = f"""#!/bin/sh
echo begin >>{log}
{shutil.which("tar")} "$@" || exit
until [ "$(grep -c begin {log})" -ge 2 ]; do sleep 0.05; done
sleep 0.3
echo end >>{log}
"""
    return with_program(shell, tmp_path, "tar", script)


def tar_parts(count, last="tar"):
    """Parts that do not share a unit."""
    parts = []
    for number in range(count):
        wire = tar(f"dir/{number}", bytes([number]) * UNIT)
        kind = last if number == count - 1 else "tar"
        parts.append(Part(f"t{number}", kind, len(wire), partial(iter, [wire])))
    return parts


def test_parallel_tars_are_limited(shell, tmp_path):
    place = Place(shell, tmp_path, abreast=2)
    assert place.receive(stream(parts=tar_parts(5)), env=slow_tar(shell, tmp_path)).returncode == 0
    assert place.have == ["t0", "t1", "t2", "t3", "t4"]
    running = list(accumulate(1 if word == "begin" else -1 for word in (tmp_path / "log").read_text().split()))
    assert max(running) == 2


def test_last_part_waits_for_all_others(shell, tmp_path):
    place = Place(shell, tmp_path)
    assert place.receive(stream(parts=tar_parts(3, "last")), env=slow_tar(shell, tmp_path)).returncode == 0
    *others, begin, end = (tmp_path / "log").read_text().split()
    assert [begin, end] == ["begin", "end"]
    assert (others[:2], others[-1]) == (["begin", "begin"], "end")
    assert others.count("end") >= 2  # more if one of them loses a race for a new folder and is retried
    assert (place.folder / "have").read_text().split()[-1] == "t2"


def test_a_tar_that_loses_races_for_new_folders_is_retried(shell, tmp_path):
    first = quote(tmp_path / "first")
    script = f"""#!/bin/sh
if mkdir {first}1 2>/dev/null || mkdir {first}2 2>/dev/null || mkdir {first}3 2>/dev/null; then
    cat >/dev/null
    echo 'tar: dir/0: Cannot open: No such file or directory' >&2
    exit 2
fi
exec {shutil.which("tar")} "$@"
"""
    place = Place(shell, tmp_path)
    done = place.receive(stream(parts=tar_parts(2)), env=with_program(shell, tmp_path, "tar", script))
    assert done.returncode == 0
    assert reports(done, "fail") == []
    assert {path.name for path in (place.into / "dir").iterdir()} == {"0", "1"}


def test_failed_tar_is_reported_after_the_others_finish(shell, tmp_path):
    place = Place(shell, tmp_path)
    (place.into / "dir").mkdir()
    (place.into / "dir/1").mkdir()
    (place.into / "dir/1/full").write_text("")
    done = place.receive(stream(parts=tar_parts(4)), env=slow_tar(shell, tmp_path))
    assert done.returncode == 3
    assert "dir/1" in reports(done, "fail")[0]
    assert "t0" in place.have
    assert "t1" not in place.have


@pytest.mark.parametrize("missing", ["ln", "mkfifo"])
def test_file_system_without_links_or_fifos(shell, tmp_path, missing):
    env = with_program(shell, tmp_path, missing, "#!/bin/sh\nexit 1\n")
    last = Place(shell, tmp_path, 1)
    first = Place(shell, tmp_path, 0, hop=last.command)
    done = first.receive(stream(2), env=env)
    assert done.returncode == 0
    assert first.is_whole()
    assert last.is_whole()


def test_failed_part_is_reported_with_the_programs_message(shell, tmp_path):
    last = Place(shell, tmp_path, 1)
    first = Place(shell, tmp_path, 0, hop=last.command)
    (first.into / "dir").write_text("in the way")
    done = first.receive(stream(2))
    assert done.returncode == 3
    (line,) = reports(done, "fail")
    assert line.startswith("fail 0 ")
    assert "dir" in line
    assert reports(done, "end") == ["end 1"]
    assert last.is_whole()


# --- survey ------------------------------------------------------------------------------------------


def test_first_survey_finds_nothing(shell, tmp_path):
    place = Place(shell, tmp_path)
    shutil.rmtree(place.folder)
    place.folder.mkdir()
    facts = place.survey()
    assert (facts.have, facts.kept, facts.refused) == (frozenset(), frozenset(), "")
    assert facts.digest in DIGESTS
    assert facts.user


def test_survey_stops_a_running_transfer_and_keeps_its_parts(shell, tmp_path):
    last = Place(shell, tmp_path, 1)
    first = Place(shell, tmp_path, 0, hop=last.command)
    process = subprocess.Popen([*shell, first.folder / "receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(b"".join(stream(2)[:3]))
    process.stdin.flush()
    awaited = {b"did 0 1\n", b"did 1 1\n", b"got 0 2\n", b"got 1 2\n"}  # the first part, and the next unit
    for line in process.stdout:
        awaited.discard(line)
        if not awaited:
            break
    facts = [place.survey() for place in (first, last)]
    assert process.wait(60) != 0  # its input is still open: it was stopped
    process.stdin.close()
    process.stdout.close()
    assert [each.have for each in facts] == [{"a", "b"}, {"a", "b"}]
    assert all(facts)
    assert facts[0].kept & facts[1].kept


def test_an_interrupted_line_of_have_is_no_key_and_spoils_no_other(shell, tmp_path):
    place = Place(shell, tmp_path)
    place.write("have", "a\nbi")
    assert place.survey().have == {"a", "bi"}
    assert (place.folder / "have").read_text() == "a\nbi\n"


def test_keys_of_another_boot_do_not_count(shell, tmp_path):
    place = Place(shell, tmp_path)
    place.write("have", "a\nb\nbig\nr0\n")
    place.write("fresh.11111111-2222", "b\n")
    place.write("fresh.11111111-2222.settling", "big\n")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    place.write(f"fresh.{boot}", "r0\n")
    assert place.survey().have == {"a", "r0"}
    assert place.have == ["a", "r0"]
    assert [path.name for path in place.folder.glob("fresh.*")] == [f"fresh.{boot}"]


def test_parts_are_recorded_once_they_are_on_the_disk(shell, tmp_path):
    place = Place(shell, tmp_path, settle=1)
    assert place.receive(stream()).returncode == 0
    for _ in range(1200):  # it continues in the background
        if not list(place.folder.glob("fresh.*.settling")):
            break
        time.sleep(0.05)
    left = {key for file in place.folder.glob("fresh.*") for key in file.read_text().split()}
    assert left < set(KEYS)


# --- authorized_keys -----------------------------------------------------------------------------------

OWN = "ssh-ed25519 AAAAown me@home"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home that getent names, so that the tests never touch a real one."""
    place = tmp_path / "it's home"
    place.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "getent").write_text(f"#!/bin/sh\necho x:x:0:0::{quote(place)}:/bin/sh\n")
    (programs / "getent").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    return place


PLACE = "/opt/test of the relay/releases"


def arming(place, key, patience=100, at=PLACE, **changes):
    """The script that makes a node ready; ``at`` is the folder of its transfer."""
    before_key, expires = options("/opt/x y", (9, 2))
    values = {"receive": "echo it's\n", "options": before_key, "expires": expires, "patience": patience}
    values |= {"folder": str(place.folder), "stream": "s2", "line": key.line(INVENTORY, at)}
    return render("transfer/prepare.sh.j2", **values | dict(leftover_values(INVENTORY, at)) | changes)


def arm(shell, place, key, *, before="", **changes):
    """Whether the line was written; ``before`` are words of sh that come first: a function in place of a program."""
    script = before + arming(place, key, **changes)
    done = subprocess.run([*shell, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split()[-1:] == ["ready"], done
    assert (place.folder / "receive").read_text() == "echo it's\n"
    return "authorized" in done.stdout


def disarm(shell, at=PLACE):
    subprocess.run([*shell, "-c", forget(INVENTORY, at)], check=True, timeout=60)


@pytest.mark.parametrize("before", [None, "", f"{OWN}\n", f"# \\x é\n\n{OWN}"])
def test_key_is_added_and_removed(shell, home, tmp_path, before):
    file = home / ".ssh/authorized_keys"
    if before is not None:
        file.parent.mkdir(mode=0o700)
        file.write_text(before)
        file.chmod(0o640)
    place, first, second = Place(shell, tmp_path), RelayKey.new(), RelayKey.new()
    lines = [key.line(INVENTORY, PLACE) for key in (first, second)]
    assert arm(shell, place, first)
    added = file.read_text().splitlines()[-1]
    assert added.startswith('restrict,command="exec sh \'/opt/x y/receive\'",expiry-time="20')
    assert added.endswith(f" {lines[0]}")
    inode = file.stat().st_ino
    assert arm(shell, place, first)
    assert file.stat().st_ino == inode  # nothing to do
    assert arm(shell, place, second)
    assert file.read_text().splitlines()[-1].endswith(f" {lines[1]}")
    assert lines[0] not in file.read_text()
    disarm(shell)
    disarm(shell)
    kept = before or ""
    assert file.read_text() == (kept if not kept or kept.endswith("\n") else kept + "\n")
    assert file.stat().st_mode & 0o777 == (0o600 if before is None else 0o640)
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["authorized_keys"]


@pytest.mark.parametrize("other", [("/opt/other/current", PLACE), ("/opt/test of the relay/current", "/data/.push")])
def test_lines_of_another_transfer_stay(shell, home, tmp_path, other):
    line = RelayKey.new().line(Inventory(Path("i.yaml"), PurePosixPath(other[0]), ()), other[1])
    file = home / ".ssh/authorized_keys"
    file.parent.mkdir()
    file.write_text(f"{line}\n")
    assert arm(shell, Place(shell, tmp_path), RelayKey.new())
    disarm(shell)
    assert file.read_text() == f"{line}\n"


def test_old_lines_of_all_transfers_are_removed(shell, home, tmp_path):
    now = int(time.time())
    ours, other = (
        comment_prefix(INVENTORY, PLACE),
        comment_prefix(Inventory(Path("i.yaml"), PurePosixPath("/o/current"), ()), "/x"),
    )
    times = {"ended": now - 3 * LIFE, "1700000000": 1700000000, "late": now - LIFE, "running": now, "ahead": now + 9**9}
    stay = [f"ssh-ed25519 AAAA {other}{made}:{name}" for name, made in times.items() if name in {"late", "running"}]
    stay += [f"ssh-ed25519 AAAA {other}{times['ahead']}:ahead", f"ssh-ed25519 AAAA {other}", OWN]
    stay += [f"ssh-ed25519 AAAA {other}1x:a", f"ssh-ed25519 AAAA {other}{'9' * 30}:a", f"ssh-ed25519 AAAA {other}::"]
    go = [f"ssh-ed25519 AAAA {other}{times[name]}:{name}" for name in ("ended", "1700000000")]
    go += [f"ssh-ed25519 AAAA {ours}{made}:{name}" for name, made in times.items()]
    file = home / ".ssh/authorized_keys"
    file.parent.mkdir()
    file.write_text("".join(f"{line}\n" for pair in zip(go, [*stay, *[OWN] * 9], strict=False) for line in pair))
    stay = [line for line in file.read_text().splitlines() if line not in go]
    place = Place(shell, tmp_path)
    assert place.survey().left
    disarm(shell)
    assert file.read_text().splitlines() == stay
    assert not place.survey().left


HOUR = 3600
SHIFTS = [0, 30 * 24 * HOUR, -30 * 24 * HOUR, -50 * 365 * 24 * HOUR]


@pytest.mark.parametrize("shift", SHIFTS, ids=["right", "ahead", "behind", "at its beginning"])
def test_a_node_whose_clock_is_wrong(shell, home, tmp_path, shift):
    """The clock of a namespace cannot be set: the program that prints the time is replaced."""
    now = int(time.time())
    date = f'date() {{ if [ "$*" = +%s ]; then echo {max(now + shift, 5)}; else command date "$@"; fi; }}\n'
    running = f"ssh-ed25519 AAAA {comment_prefix(INVENTORY, '/data/.push')}{now - LIFE}:x"
    file = home / ".ssh/authorized_keys"
    file.parent.mkdir()
    file.write_text(f"{running}\n")
    assert arm(shell, Place(shell, tmp_path), RelayKey.new(), before=date)
    assert file.read_text().splitlines()[0] == running
    expires = file.read_text().partition('expiry-time="')[2].partition('"')[0]
    at = time.mktime(time.strptime(expires, "%Y%m%d%H%M"))
    # Neither for itself nor for the others that share its home it has expired already.
    assert abs(at - (now + max(shift, 0) + LIFE)) < 120


@pytest.mark.parametrize("shift", [30 * 24 * HOUR, -30 * 24 * HOUR])
def test_a_controller_whose_clock_is_wrong(shell, home, tmp_path, shift):
    now = int(time.time())
    running = f"ssh-ed25519 AAAA {comment_prefix(INVENTORY, '/data/.push')}{now - HOUR}:x"
    file = home / ".ssh/authorized_keys"
    file.parent.mkdir()
    file.write_text(f"{running}\n")
    assert arm(shell, Place(shell, tmp_path), RelayKey.new(), now=now + shift)
    assert file.read_text().splitlines()[0] == running
    expires = file.read_text().partition('expiry-time="')[2].partition('"')[0]
    assert time.mktime(time.strptime(expires, "%Y%m%d%H%M")) > now + LIFE - 120


def test_a_linked_file_stays_linked(shell, home, tmp_path):
    (home / ".ssh").mkdir()
    (home / "keys").mkdir()
    (home / "keys/mine").write_text(f"{OWN}\n")
    (home / ".ssh/authorized_keys").symlink_to("../keys/mine")
    assert arm(shell, Place(shell, tmp_path), RelayKey.new())
    assert len((home / "keys/mine").read_text().splitlines()) == 2
    disarm(shell)
    assert (home / "keys/mine").read_text() == f"{OWN}\n"
    assert (home / ".ssh/authorized_keys").is_symlink()


def test_abandoned_lock_is_taken_over(shell, home, tmp_path):
    (home / ".ssh/.clusterctl-lock").mkdir(parents=True)
    assert arm(shell, Place(shell, tmp_path), RelayKey.new(), patience=3)
    assert [path.name for path in (home / ".ssh").iterdir()] == ["authorized_keys"]


def test_an_unwritable_home_is_reported(shell, home, tmp_path):
    (home / ".ssh").write_text("a file")
    assert not arm(shell, Place(shell, tmp_path), RelayKey.new())


def test_concurrent_commands_write_one_line(shell, home, tmp_path):
    key, places = RelayKey.new(), [Place(shell, tmp_path, number) for number in range(6)]
    (home / ".ssh").mkdir()
    (home / ".ssh/authorized_keys").write_text(f"{OWN}\n")
    done = []
    threads = [threading.Thread(target=lambda place=place: done.append(arm(shell, place, key))) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 6
    lines = (home / ".ssh/authorized_keys").read_text().splitlines()
    assert lines[0] == OWN
    assert len(lines) == 2


def test_abandoned_lock_is_broken_by_one_of_many_commands(shell, home, tmp_path):
    """A killed writer's lock and copy, and sixteen nodes of two transfers: each round had a chance to lose the file."""
    file = home / ".ssh/authorized_keys"
    file.parent.mkdir()
    theirs = [OWN, *(f"ssh-rsa AAAA{number} other{number}" for number in range(40))]
    keys = {at: RelayKey.new() for at in (PLACE, "/data/.push")}
    places = [Place(shell, tmp_path, number) for number in range(16)]
    scripts = [arming(place, keys[at], at=at, patience=15) for place, at in zip(places, [*keys] * 8, strict=True)]
    for number in range(3):
        file.write_text("".join(f"{line}\n" for line in theirs))
        left_behind = home / ".ssh/.clusterctl-lock" / ("node09.4711.x" if number % 2 else "")
        left_behind.mkdir(parents=True)
        (home / ".ssh/authorized_keys.clusterctl.node09.4711.x").write_text("")
        running = [subprocess.Popen([*shell, "-c", script], stdout=subprocess.PIPE) for script in scripts]
        message = [process.communicate(timeout=60)[0] for process in running]
        assert message == [b"authorized\nready\n"] * 16
        lines = file.read_text().splitlines()
        assert lines[:41] == theirs, f"round {number}"
        assert sorted(line.split(" ", 1)[1].rpartition('" ')[2] for line in lines[41:]) == sorted(
            key.line(INVENTORY, at) for at, key in keys.items()
        )
        assert [path.name for path in (home / ".ssh").iterdir()] == ["authorized_keys"], f"round {number}"


def test_key_installation_and_relay_keys_exclude_each_other(shell, home, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(home))  # of enrol
    file = home / ".ssh/authorized_keys"
    file.parent.mkdir()
    file.write_text(f"{OWN}\n")
    file.with_name(".clusterctl-lock").mkdir()
    line = "ssh-ed25519 AAAAinstalled me@laptop"
    install = "set -e\n" + render("enrol/install_key.sh.j2", line=line, blob="AAAAinstalled", patience=15)
    key = RelayKey.new()
    scripts = [install, *(arming(Place(shell, tmp_path, number), key, patience=15) for number in range(8)), install]
    running = [subprocess.Popen([*shell, "-c", script], stdout=subprocess.DEVNULL) for script in scripts]
    assert [process.wait(60) for process in running] == [0] * 10
    lines = file.read_text().splitlines()
    assert sorted(lines)[1:] == sorted([OWN, line])
    assert lines[-1].endswith(key.line(INVENTORY, PLACE)) or lines[-2].endswith(key.line(INVENTORY, PLACE))
    assert [path.name for path in (home / ".ssh").iterdir()] == ["authorized_keys"]


@pytest.mark.parametrize(
    "dd",
    [
        "return 1",  # a quota, or a file server that reports late that it is full
        ': >"$fresh"',  # one that does not even report it
        'read -r first <"$fresh" && printf "%s\n" "$first" >"$fresh"',
        'rmdir "$lock/$me"',  # we stood still for so long that another one has taken over
    ],
)
def test_an_incomplete_copy_never_replaces_the_file(shell, home, tmp_path, dd):
    file = home / ".ssh/authorized_keys"
    file.parent.mkdir()
    file.write_text(f"# first\n{OWN}\n# last")
    inode = file.stat().st_ino
    place = Place(shell, tmp_path)
    assert not arm(shell, place, RelayKey.new(), before=f"dd() {{ {dd}; }}\n")
    assert file.read_text() == f"# first\n{OWN}\n# last"
    assert file.stat().st_ino == inode
    assert [path.name for path in file.parent.iterdir() if "lock" not in path.name] == ["authorized_keys"]


def test_line_added_by_the_user_at_the_same_moment_is_kept(shell, home, tmp_path):
    file = home / ".ssh/authorized_keys"
    file.parent.mkdir()
    file.write_text(f"{OWN}\n")
    by_hand = 'dd() { echo by-hand >>"$real"; command dd "$@"; }\n'
    assert not arm(shell, Place(shell, tmp_path), RelayKey.new(), before=by_hand)
    assert file.read_text() == f"{OWN}\nby-hand\n"
    assert arm(shell, Place(shell, tmp_path, 1), RelayKey.new())


@pytest.mark.parametrize("folder", ["transfer", ".transfer-0123456789ab"])
def test_traces_of_a_killed_transfer_are_found_and_removed(shell, home, tmp_path, folder):
    """On a node without /dev/shm the private key is in the transfer's folder."""
    place = Place(shell, tmp_path)
    own = place.folder.rename(place.folder.with_name(folder))
    place.folder = own
    at = scope_of(str(own))
    assert not place.survey().left
    key = RelayKey.new()
    secret = own / key.secret(INVENTORY, at)
    others = own / key.secret(INVENTORY, "/elsewhere")
    copy = home / ".ssh/authorized_keys.clusterctl.node09.4711.x"
    for trace in (secret, others):
        trace.mkdir()
        (trace / "key").write_text(key.private)
    assert place.survey().left
    disarm(shell, at)
    assert not secret.exists()
    assert others.exists()
    assert not place.survey().left
    (home / ".ssh").mkdir()
    copy.write_text("")
    assert place.survey().left
    disarm(shell, at)
    assert not copy.exists()
    assert not place.survey().left


def test_transfer_from_before_a_reboot_is_not_resumed(shell, tmp_path):
    place = Place(shell, tmp_path)
    place.write("boot", Path("/proc/sys/kernel/random/boot_id").read_text())
    assert not place.survey().refused
    place.write("boot", "11111111-2222\n")
    assert "run the same command again" in place.survey().refused


# --- the lock of a command -----------------------------------------------------------------------------


def hold(shell, lock, before="", timeout=60):
    """The output of the script that takes a lock, if its input ends at once; its waits take no time."""
    script = render("release/hold.sh.j2", lock=str(lock), releases="", id="mine", who="me", silent=15)
    done = subprocess.run(
        [*shell, "-c", (before or "sleep() { :; }\n") + script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=timeout,
    )
    return done.stdout.split()[:1]


def other_s_lock(folder, host="another-host 1234"):
    lock = folder / "x.lock"
    lock.mkdir()
    (lock / "beat").write_text("")
    (lock / "owner").write_text(f"theirs\n{host}\n1\n1\n1\nsomebody\n")
    return lock


YEAR = 365 * 24 * HOUR


@pytest.mark.parametrize("shift", [-20 * YEAR, -1, YEAR, 10 * YEAR])
def test_lock_without_a_heartbeat_is_taken_over_at_any_age(shell, tmp_path, shift):
    lock = other_s_lock(tmp_path)
    os.utime(lock / "beat", (time.time() + shift,) * 2)
    assert hold(shell, lock) == ["held"]
    assert not lock.exists()


@pytest.mark.parametrize("shift", [-20 * YEAR, -1, YEAR, 10 * YEAR])
def test_lock_with_a_heartbeat_stays_at_any_age(shell, tmp_path, shift):
    lock = other_s_lock(tmp_path)
    os.utime(lock / "beat", (time.time() - 5 * YEAR,) * 2)
    beat = f'sleep() {{ touch -d "@{int(time.time()) + shift}" "$lock/beat"; }}\n'
    assert hold(shell, lock, beat) == ["busy"]
    assert (lock / "owner").read_text().startswith("theirs\n")


def test_unkillable_worker_does_not_hold_the_lock(shell, tmp_path):
    """If the first process of a container collects no children, killed processes stay in the list."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    lock = other_s_lock(tmp_path, f"{os.uname().nodename} {boot}")
    with subprocess.Popen(["true"], start_new_session=True) as zombie:  # no process collects it until the end
        while Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        (lock / f"worker.{zombie.pid}.{os.uname().nodename}").write_text("")
        waited = tmp_path / "waited"
        assert hold(shell, lock, f"sleep() {{ echo >>{quote(waited)}; }}\n") == ["held"]
        assert 10 <= len(waited.read_text().splitlines()) <= 20
    assert not lock.exists()


# --- the way to the next node --------------------------------------------------------------------------


def test_only_an_open_route_is_kept(shell, tmp_path):
    place = Place(shell, tmp_path)
    secret = tmp_path / "it's secret"

    def probe(argv):
        ways = [{"argv": ["false"], "text": "no"}, {"argv": argv, "text": "set -- 'a b'"}]
        script = render(
            "transfer/probe.sh.j2",
            folder=str(place.folder),
            secret=str(secret),
            private="line 1\nline 2\n",
            known="host key\n",
            logins=ways,
        )
        return subprocess.run([*shell, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout

    assert probe(["sh", "-c", "echo Denied >&2; exit 255"]) == "failed Denied\n"
    assert not secret.exists()
    assert probe(["echo", "welcome", "probed"]) == "open\n"
    assert (place.folder / "hop").read_text() == "set -- 'a b'\n"
    assert (secret / "key").read_text() == "line 1\nline 2\n"
    assert (secret / "key").stat().st_mode & 0o777 == 0o600
    assert secret.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("nasty", [False, True])
@pytest.mark.parametrize("name", ["bring_zstd", "receive", "survey", "prepare", "probe", "forget"])
def test_shellcheck_finds_nothing(name, nasty, tmp_path):
    folder = '/opt/it\'s $(id) "x"/t' if nasty else "/opt/x/t"
    door = LoginTarget("clusterctl-1", "root", 22, ("10.0.0.1", "10.1.0.1"), ("ssh-ed25519", b"x"))
    key = RelayKey.new()
    values = {
        "folder": folder,
        "into": folder,
        "me": 1,
        "wire": "zstd" if nasty else "plain",
        "ahead": 64,
        "spare": 16,
        "abreast": 4,
    }
    values |= {"digest": DIGESTS["b2sum"], "settle": 1, "stream": "s", "receive": "x", "private": key.private}
    values |= {"options": options(folder, (9, 9))[0], "expires": nasty, "secret": "/s", "known": door.known}
    values |= {
        "sample": "zstd works",
        "patience": 9,
        "line": key.line(INVENTORY, folder) if nasty else "",
        **leftover_values(INVENTORY, folder),
    }
    (tmp_path / "a.sh").write_text(render(f"transfer/{name}.sh.j2", **values, logins=door.commands("/s")))
    # SC2016: a dollar in single quotes is what the nasty case is about.
    argv = [SHELLCHECK, "-s", "sh", "-e", "SC2016", tmp_path / "a.sh"]
    assert subprocess.run(argv, check=False, capture_output=True, text=True).stdout == ""
