import base64
import csv
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from provision.env import relocation
from provision.env.bundle.manifest import Entry, Manifest, Mark, PrefixFiles
from provision.env.bundle.reader import open_bundle
from provision.env.relocation import Search, relocate, uncompiled_modules
from provision.env.source import elf
from provision.errors import UsageError

OLD = "/opt/env"
SEARCH = Search(((OLD, ""),))


def of_length(length, tail="/env"):
    return PurePosixPath("/" + "n" * (length - 1 - len(tail)) + tail)


def manifest_of(*entries, relocations=((OLD, ""),)):
    return Manifest(
        name="a", tool="1", created="", platform="linux-64", python="3.11.7", source_prefix=OLD, chunks=(),
        prefix_files=PrefixFiles("", 0, 0, 0), files=entries, relocations=relocations,
    )  # fmt: skip


def file_of(path, data, *marks):
    return Entry(path, "file", 0o755, 1, len(data), "0" * 64, marks=marks)


def moved(data, new, kind="text", path="bin/x", room=0, programs=()):
    """What becomes of one file."""
    others = [Entry(f"bin/{name}", "link", 0o777, 1, target="x", chunks=(0,)) for name in programs]
    manifest = manifest_of(file_of(path, data, Mark(kind, "", room)), *others)
    result = relocate(manifest, {path: data}, PurePosixPath(new))
    return result, result.files[0][1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"/opt/env/bin", b"/new/bin"),
        (b"x=/opt/env", b"x=/new"),
        (b"/opt/env2 /opt/env-old /opt/env_x /opt/env.bak /opt/env+x", None),
        ("/opt/envé".encode(), None),
        (b"/opt/env%20copy", None),
        (b"installed in /opt/env.", b"installed in /new."),
        (b"/data/opt/env/x ../opt/env", None),
        (b"-I/opt/env/include -L/opt/env/lib", b"-I/new/include -L/new/lib"),
        (b"-Wl,-rpath,/opt/env/lib", b"-Wl,-rpath,/new/lib"),
        (b"file:///opt/env/x", b"file:///new/x"),
        (b"PATH=/opt/env/bin:/opt/env2/bin:/opt/env/sbin", b"PATH=/new/bin:/opt/env2/bin:/new/sbin"),
        (b'{"a": "/opt/env"}', b'{"a": "/new"}'),
        (b"/opt/env%s", b"/new%s"),
        (b"/opt/env\x94.", b"/new\x94."),
    ],
)
def test_boundaries(text, expected):
    assert SEARCH.replace(text, {"": "/new"}) == (text if expected is None else expected)
    assert bool(list(SEARCH.occurrences(text))) == (expected is not None)


def test_an_environment_inside_a_checkout_is_not_the_checkout():
    search = Search((("/home/u/proj", "src/proj"), ("/home/u/proj/env", "")))
    new = {"": "/new", "src/proj": "/new/src/proj"}
    text = b"/home/u/proj/env/bin /home/u/proj/src /home/u/proj/env2"
    assert search.replace(text, new) == b"/new/bin /new/src/proj/src /new/src/proj/env2"


def test_a_path_in_a_url_is_percent_encoded():
    search = Search((("/home/u/My Code/proj", "src/proj"), ("/opt/env", "")))
    new = {"": "/new dir", "src/proj": "/new dir/src/proj"}
    text = b'{"url": "file:///home/u/My%20Code/proj"} /home/u/My Code/proj file:///opt/env/x'
    expected = b'{"url": "file:///new%20dir/src/proj"} /new dir/src/proj file:///new%20dir/x'
    assert search.replace(text, new) == expected


def test_a_name_that_json_escapes():
    search = Search((("/home/ü/env", ""),))
    text = json.dumps({"a": "/home/ü/env/x"}).encode()
    assert json.loads(search.replace(text, {"": "/new"})) == {"a": "/new/x"}


@pytest.mark.parametrize("length", [20, 100, 110, 111, 112, 127, 128, 200, 300])
def test_a_python_script_has_a_first_line_that_linux_reads(length):
    new = of_length(length)
    result, data = moved(b"#!/opt/env/bin/python -I\nprint(1)\n", new, "shebang")
    line = f"#!{new}/bin/python -I".encode()
    if len(line) <= 127:
        assert data == line + b"\nprint(1)\n"
        assert not result.warnings
    else:
        assert data == f"""#!/bin/sh\n'''exec' "{new}/bin/python" -I "$0" "$@"\n' '''\nprint(1)\n""".encode()
        assert len(result.warnings) == 1
    compile(data, "script", "exec")


def test_a_space_needs_the_longer_form():
    _, data = moved(b"#!/opt/env/bin/python3.11\n", "/new env", "shebang")
    assert data == b"""#!/bin/sh\n'''exec' "/new env/bin/python3.11" "$0" "$@"\n' '''\n"""


def test_the_longer_form_becomes_short_again():
    _, data = moved(b"""#!/bin/sh\n'''exec' /opt/env/bin/python3 -s "$0" "$@"\n' '''\nx = 1\n""", "/new", "shebang")
    assert data == b"#!/new/bin/python3 -s\nx = 1\n"


@pytest.mark.parametrize(
    ("length", "line", "warning"),
    [
        (20, "#!{new}/bin/perl -w", None),
        (200, "#!{new}/bin/perl -w", "too long for Linux before 5.1"),
        (300, "#!/usr/bin/env -S perl -w", "only in the activated environment"),
    ],
)
def test_other_languages_have_no_longer_form(length, line, warning):
    new = of_length(length)
    result, data = moved(b"#!/opt/env/bin/perl -w\nprint '/opt/env'\n", new, "shebang")
    assert data == f"{line}\nprint '/opt/env'\n".replace("{new}", str(new)).replace("/opt/env", str(new)).encode()
    assert [warning in one for one in result.warnings] == [True] * len(result.warnings)
    assert len(result.warnings) == (warning is not None)


def test_another_language_in_a_prefix_with_a_space():
    _, data = moved(b"#!/opt/env/bin/Rscript\n", "/new env", "shebang")
    assert data == b"#!/usr/bin/env Rscript\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"#!/usr/bin/env python3\n", b"#!/new/bin/python3\n"),
        (b"#! /usr/bin/env  python3 \n", b"#!/new/bin/python3\n"),
        (b"#!/usr/bin/env -S python3 -I\n", b"#!/new/bin/python3 -I\n"),
        (b"#!/usr/bin/env perl\n", b"#!/new/bin/perl\n"),
        (b"#!/usr/bin/env bash\n", b"#!/usr/bin/env bash\n"),  # not in the environment
        (b"#!/usr/bin/env -i python3\n", b"#!/usr/bin/env -i python3\n"),
        (b"#!/usr/bin/env A=1 python3\n", b"#!/usr/bin/env A=1 python3\n"),
        (b"#!/usr/bin/env -S python3 -E -s\n", b"""#!/bin/sh\n'''exec' "/new/bin/python3" -E -s "$0" "$@"\n' '''\n"""),
    ],
)
def test_env_becomes_absolute_where_the_environment_has_the_program(line, expected):
    _, data = moved(line + b"x = '/opt/env'\n", "/new", "shebang", programs=("python3", "perl"))
    assert data == expected + b"x = '/new'\n"


def test_condas_longer_form_becomes_short_again():
    _, data = moved(b"""#!/bin/sh\n'''exec' "/opt/env/bin/python" "$0" "$@" #'''\nx = 1\n""", "/new", "shebang")
    assert data == b"#!/new/bin/python\nx = 1\n"


def test_several_options_stay_apart():
    data = b"""#!/bin/sh\n'''exec' /opt/env/bin/python -E -s "$0" "$@"\n' '''\n"""
    assert moved(data, "/new", "shebang")[1] == data.replace(b"/opt/env/bin/python", b'"/new/bin/python"')


@pytest.mark.parametrize("line", [b"#! /opt/env/bin/python\n", b"#!/opt/env/bin/python\r\n", b"#!/opt/env/bin/python"])
def test_odd_first_lines(line):
    assert relocation.split_script(line, SEARCH) == (b"/opt/env/bin/python", b"", b"")


def test_a_first_line_with_the_prefix_elsewhere_is_text():
    _, data = moved(b"#!/usr/bin/perl -I/opt/env/lib\n", "/new", "shebang")
    assert data == b"#!/usr/bin/perl -I/new/lib\n"


def test_a_binary_keeps_its_length_and_every_other_byte():
    old = b"\x7fELF\0/opt/env/share:/opt/env/lib\0share\0/opt/env2\0\1"
    result, data = moved(old, "/new", "binary")
    assert data == b"\x7fELF\0/new/////share:/new/////lib\0share\0/opt/env2\0\1".replace(b"/////", b"/" * 5)
    assert len(data) == len(old)
    assert not result.unrewritable


def test_binary_without_room_is_listed_and_unchanged():
    old = b"\x7fELF\0/opt/env/lib\0"
    result, data = moved(old, of_length(9), "binary")
    assert data == old
    ((path, why),) = result.unrewritable
    assert path == "bin/x"
    assert "room for a path of 8 bytes" in why


@pytest.mark.parametrize("length", [8, 4 + 2, 20, 127, 128, 200, 255])
def test_condas_placeholder_leaves_room(length):
    string = b"/opt/env/share:/opt/env/lib"
    old = b"\x7fELF" + string + bytes(2 * (255 - len(OLD)) + 1) + b"next\0"
    new = str(of_length(length)).encode()
    result, data = moved(old, new.decode(), "binary", room=255)
    assert len(data) == len(old)
    assert data[4:].split(b"\0")[0] == new + b"/share:" + new + b"/lib"
    assert data.endswith(b"\0next\0")
    assert not result.unrewritable


def test_binary_is_not_written_beyond_its_room():
    old = b"/opt/env/share\0\0\0next\0"
    result, data = moved(old, of_length(20), "binary", room=255)
    assert data == old
    assert "has 20" in result.unrewritable[0][1]


def test_an_archive_is_not_touched():
    data = b"PK\x03\x04\0/opt/env\0"
    content, left = relocation.rewrite_binary(data, SEARCH, {"": "/new"})
    assert content == data
    assert "archive" in left


def compiled(tmp_path, source):
    (tmp_path / "a.c").write_text(source)
    subprocess.run(["gcc", "-g", "-O1", "-o", tmp_path / "a", tmp_path / "a.c"], check=True)
    return (tmp_path / "a").read_bytes()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed here")
def test_a_compiled_program_with_shared_string_ends(tmp_path):
    source = '#include <stdio.h>\nint main(void) { puts("/opt/env/share/x"); puts("share/x"); return 0; }\n'
    content, left = relocation.rewrite_binary(compiled(tmp_path, source), SEARCH, {"": "/new"})
    (tmp_path / "a").write_bytes(content)
    assert subprocess.check_output([tmp_path / "a"], text=True) == "/new/////share/x\nshare/x\n"
    assert not left


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed here")
def test_debug_information_and_source_names_may_keep_a_path_that_does_not_fit(tmp_path):
    used = 'int main(void) { puts(W); return 0; }\n#line 1 "/opt/env/src/a.c"\nint unused;\n'
    program = compiled(tmp_path, "#include <stdio.h>\n" + used.replace("W", '"/opt/env/src/a.c"'))
    content, left = relocation.rewrite_binary(program, SEARCH, {"": "/longer/than/that"})
    assert content == program
    assert "in unused places" in left
    with pytest.raises(relocation.CannotRewrite):
        relocation.rewrite_binary(
            compiled(tmp_path, "#include <stdio.h>\n" + used.replace("W", '"/opt/env/share"')),
            SEARCH,
            {"": "/longer/than/that"},
        )


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed here")
@pytest.mark.parametrize("kind", ["--enable-new-dtags", "--disable-new-dtags"])
def test_a_path_that_the_loader_searches_becomes_relative_where_it_is_too_long(tmp_path, kind):
    old, new = tmp_path / "a", tmp_path / "a longer name"
    (tmp_path / "part.c").write_text("int part(void) { return 42; }\n")
    (tmp_path / "whole.c").write_text("int part(void);\nint main(void) { return part(); }\n")
    (old / "lib").mkdir(parents=True)
    (old / "bin").mkdir()
    subprocess.run(["gcc", "-shared", "-o", old / "lib/libpart.so", tmp_path / "part.c"], check=True)
    link = ["-L", old / "lib", "-lpart", f"-Wl,{kind},-rpath,/nowhere:{old}/lib"]
    subprocess.run(["gcc", "-o", old / "bin/whole", tmp_path / "whole.c", *link], check=True)
    old.rename(new)
    program = (new / "bin/whole").read_bytes()
    search = Search(((str(old), ""),))
    with pytest.raises(relocation.CannotRewrite):
        relocation.rewrite_binary(program, search, {"": str(new)})
    content, left = relocation.rewrite_binary(program, search, {"": str(new)}, path="bin/whole")
    assert (len(content), left) == (len(program), "")
    assert b":$ORIGIN/..///" in content
    (new / "bin/whole").write_bytes(content)
    assert subprocess.run([new / "bin/whole"], check=False).returncode == 42


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"\x7fELF\2\1" + bytes(60), b"\x7fELF\2\1" + b"\xff" * 200, b"#!/bin/sh"]
)
def test_a_file_that_is_no_whole_program_has_no_paths_for_the_loader(data):
    assert elf.run_paths(data) == ()


def test_a_file_too_large_to_be_rewritten_is_listed_without_its_bytes():
    large = Entry("lib/x.so", "file", 0o755, 1, 1 << 30, "0" * 64, chunks=(0,), raw=True, marks=(Mark("binary"),))
    result = relocate(manifest_of(large), {}, PurePosixPath("/new"))
    assert result.files == ()
    ((path, why),) = result.unrewritable
    assert path == "lib/x.so"
    assert "too large" in why
    assert OLD in why


def test_another_name_of_a_rewritten_file_has_its_hash_and_its_stale_compiled_file():
    text = b"X = '/opt/env'\n"
    listed = b"a.py,sha256=x,1\nb.py,sha256=x,1\nc.py,sha256=x,1\n"
    record = "lib/python3.11/site-packages/a-1.dist-info/RECORD"
    site = "lib/python3.11/site-packages"
    names = ("a", "b.c", "d")
    compiled = [f"{site}/__pycache__/{name}.cpython-311{opt}.pyc" for name in names for opt in ("", ".opt-1")]
    entries = [
        file_of(record, listed, Mark("record")),
        file_of(f"{site}/a.py", text, Mark("text")),
        Entry(f"{site}/b.c.py", "hard", 0o644, 1, target=f"{site}/a.py", chunks=(0,)),
        Entry(f"{site}/b.py", "hard", 0o644, 1, target=f"{site}/a.py", chunks=(0,)),
        Entry(f"{site}/d.py", "file", 0o644, 1, chunks=(0,)),
        Entry(f"{site}/e.py", "file", 0o644, 1, chunks=(0,)),
        Entry("bin/f.py", "file", 0o644, 1, chunks=(0,)),
        *(Entry(path, "file", 0o644, 1, chunks=(0,)) for path in compiled),
    ]
    files = {record: listed, f"{site}/a.py": text}
    result = relocate(manifest_of(*entries), files, PurePosixPath("/new"))
    assert result.stale_pyc == {path for path in compiled if "/d." not in path}
    cached = {name: f"{site}/__pycache__/{name}.cpython-311.pyc" for name in ("a", "b.c", "b", "e")}
    assert result.uncompiled == {f"{site}/{name}.py": path for name, path in cached.items()}
    rows = dict(result.files)[next(entry for entry, _ in result.files if entry.path == record)].decode().splitlines()
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"X = '/new'\n").digest()).rstrip(b"=").decode()
    assert rows == [f"a.py,sha256={digest},11", f"b.py,sha256={digest},11", "c.py,sha256=x,1"]


ODD = ("$(id)", "it's", 'a"b', "back\\slash", "`id`", "a;b", "a&b", "(a)", "a*", "#a", "a:b", "a$b", "a\nb")


@pytest.mark.parametrize("new", ["relative", "/", *(f"/opt/{odd}/current" for odd in ODD)])
def test_prefix_that_no_script_can_contain(new):
    with pytest.raises(UsageError, match="cannot be a prefix"):
        moved(b"/opt/env", new)


def test_hashes_are_updated(packed, helpers):
    bundle = open_bundle(packed)
    result = relocate(bundle.manifest, bundle.prefix_files(), PurePosixPath("/somewhere/else"))
    contents = {entry.path: data for entry, data in result.files}
    entries = {entry.path: entry for entry in bundle.manifest.files} | {entry.path: entry for entry, _ in result.files}
    checked = 0
    for path, data in contents.items():
        if path.endswith("/RECORD"):
            for name, digest, size in csv.reader(data.decode().splitlines()):
                if digest:
                    entry = entries[os.path.normpath(f"{helpers.SITE}/{name}")]
                    expected = base64.urlsafe_b64encode(bytes.fromhex(entry.sha256)).rstrip(b"=").decode()
                    assert (digest, int(size)) == (f"sha256={expected}", entry.size)
                    checked += 1
    assert checked > 40
    meta = json.loads(contents["conda-meta/python-3.11.7-0.json"])["paths_data"]["paths"]
    listed = {one["_path"]: one["sha256_in_prefix"] for one in meta}
    assert listed["lib/settings.txt"] == hashlib.sha256(contents["lib/settings.txt"]).hexdigest()


def test_no_source_path_is_left(packed, prefix, checkout, helpers):
    bundle = open_bundle(packed)
    new = PurePosixPath("/n")
    result = relocate(bundle.manifest, bundle.prefix_files(), new)
    search = Search(bundle.manifest.relocations)
    assert not [entry.path for entry, data in result.files if list(search.occurrences(data))]
    contents = {entry.path: (entry, data) for entry, data in result.files}
    assert contents["share/absolute"][0].target == "/n/lib/settings.txt"
    assert contents[f"{helpers.SITE}/__editable__.proj-0.1.pth"][1] == b"/n/src/proj/src\n"
    url = json.loads(contents[f"{helpers.SITE}/proj-0.1.dist-info/direct_url.json"][1])["url"]
    assert url == "file:///n/src/proj"
    assert f"{prefix}2/x /data{prefix}".encode() in contents[f"{helpers.SITE}/hello/__init__.py"][1]
    assert not result.unrewritable
    for entry, data in result.files:
        if entry.type == "file":
            assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_compiled_files_of_rewritten_sources_are_stale(packed, helpers):
    bundle = open_bundle(packed)
    result = relocate(bundle.manifest, bundle.prefix_files(), PurePosixPath("/somewhere/else"))
    assert result.stale_pyc == {f"{helpers.SITE}/hello/__pycache__/__init__.cpython-311.pyc"}


@pytest.mark.parametrize("length", [0, 127, 128, 200])
def test_scripts_run_at_the_new_prefix(packed, prefix, tmp_path, length):
    bundle = open_bundle(packed)
    new = tmp_path / ("x" * max(3, min(length - len(str(tmp_path)) - 1, 200)))
    result = relocate(bundle.manifest, bundle.prefix_files(), PurePosixPath(new))
    for entry, data in result.files:
        if entry.path.startswith("bin/"):
            path = new / entry.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(entry.mode)
    for name in ("python", "python3.11"):
        (new / "bin" / name).symlink_to((prefix / "bin" / name).readlink())
    prefix.rename(prefix.with_name("gone"))
    done = subprocess.run(["env", "-i", new / "bin/hello", "a b", "$c"], capture_output=True, text=True, check=True)
    assert done.stdout == "hello ['a b', '$c']\n"
    for name in ("hello-env", "hello-sh"):
        done = subprocess.run(["env", "-i", new / "bin" / name], capture_output=True, text=True, check=True)
        assert done.stdout == "hello\n"
    assert Path(new / "bin/hello").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["a\nb", "a\r/tmp/b", "x ", "a\u2028b", "a\x85"])
def test_modules_that_compileall_would_misread_are_skipped(name):
    top = "lib/python3.11"
    files = [Entry(path, "file", 0o644, 0) for path in (f"{top}/{name}/y.py", f"{top}/{name}.py", f"{top}/x.py")]
    lacking = uncompiled_modules(manifest_of(*files), frozenset())
    assert f"{top}/x.py" in lacking
    assert all(path.splitlines() == [path.strip()] for path in lacking)
