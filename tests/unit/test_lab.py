import json
import stat
import subprocess
import zipfile
from pathlib import Path

import lab_debian
import lab_package
import lab_recipe
import lab_tree
import pytest
from lab_run import LabError, Log

PLACEHOLDER = lab_tree.PLACEHOLDER


@pytest.fixture
def tree(tmp_path):
    """A small package of an interpreter: a program, text with the prefix, a link and a binary."""
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "lib/python3.11/config-3.11").mkdir(parents=True)
    python = tree / "bin/python3.11"
    python.write_text(f"#!/bin/sh\necho {PLACEHOLDER}/lib\n")
    python.chmod(0o755)
    (tree / "bin/python").symlink_to("python3.11")
    (tree / "lib/python3.11/os.py").write_text("name = 'posix'\n")
    (tree / "lib/libfake.so").write_bytes(b"\x7fELF\0" + PLACEHOLDER.encode() + b"/lib\0\xff")
    return tree


def test_digest_covers_the_recipe_and_the_interpreter():
    python = {"version": "3.11.7", "prefix": "/opt/python"}
    first = lab_recipe.digest(python)
    assert first == lab_recipe.digest(dict(reversed(python.items())))
    assert len(first) == 12
    assert first != lab_recipe.digest({**python, "version": "3.11.8"})
    assert lab_recipe.digest(python, {"a.py": b"1"}) != lab_recipe.digest(python, {"a.py": b"2"})


def test_every_source_of_the_environment_is_part_of_the_digest():
    programs = {"build.py", "tiny_model.py"}  # they choose nothing that goes into the environment
    used = {path.name for path in lab_recipe.HERE.glob("lab_*.py")}
    assert set(lab_recipe.SOURCES) == used - programs


def test_every_pin_is_exact_and_given_once():
    names = [pin.partition("==")[0] for pin in lab_recipe.pins()]
    assert all(len(pin.split("==")) == 2 for pin in lab_recipe.pins())
    assert len(names) == len(set(names))


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("CLUSTERCTL_CACHE", str(tmp_path))
    assert lab_recipe.default_cache() == tmp_path
    monkeypatch.delenv("CLUSTERCTL_CACHE")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert lab_recipe.default_cache() == Path("/var/cache/clusterctl")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/u")
    assert lab_recipe.default_cache() == Path("/home/u/.cache/clusterctl")


def test_paths_json_declares_text_with_the_prefix_and_no_binary(tree):
    entries = {entry.pop("_path"): entry for entry in lab_package.paths_json(tree, PLACEHOLDER)["paths"]}
    assert sorted(entries) == ["bin/python", "bin/python3.11", "lib/libfake.so", "lib/python3.11/os.py"]
    assert entries["bin/python"] == {"path_type": "softlink"}
    program = entries["bin/python3.11"]
    assert (program["file_mode"], program["prefix_placeholder"]) == ("text", PLACEHOLDER)
    assert program["size_in_bytes"] == (tree / "bin/python3.11").stat().st_size
    assert "file_mode" not in entries["lib/libfake.so"]
    assert "file_mode" not in entries["lib/python3.11/os.py"]


def test_rattler_installs_the_packages_and_inserts_the_prefix(tree, tmp_path):
    channel, prefix = tmp_path / "channel", tmp_path / "envs/tiny"
    lab_package.write(lab_package.Package("python", "3.11.7", "linux-64"), tree, channel, placeholder=PLACEHOLDER)
    wheel = tmp_path / "Greeter-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("greeter.py", "def main(): print('hello')\n")
        archive.writestr("greeter-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: Greeter\nVersion: 1.0\n")
        archive.writestr("greeter-1.0.dist-info/entry_points.txt", "[console_scripts]\nGreet = greeter:main\n")
        archive.writestr("greeter-1.0.dist-info/RECORD", "greeter.py,,\n")
    lab_package.from_wheel(wheel, tmp_path / "scratch", channel, placeholder=PLACEHOLDER)

    installed = lab_package.create(channel, ["greeter"], prefix, tmp_path / "pkgs", "linux-64")

    assert sorted(installed) == ["greeter=1.0", "python=3.11.7"]
    assert (
        subprocess.run([prefix / "bin/python"], capture_output=True, text=True, check=True).stdout == f"{prefix}/lib\n"
    )
    assert (prefix / "bin/Greet").read_text().startswith(f"#!{prefix}/bin/python")
    assert stat.S_IMODE((prefix / "bin/Greet").stat().st_mode) & 0o111
    about = prefix / "lib/python3.11/site-packages/greeter-1.0.dist-info"
    assert (about / "INSTALLER").read_text() == "conda\n"
    assert PLACEHOLDER.encode() in (prefix / "lib/libfake.so").read_bytes()
    record = json.loads((prefix / "conda-meta/python-3.11.7-0.json").read_text())
    assert {path["_path"] for path in record["paths_data"]["paths"]} >= {"bin/python", "lib/libfake.so"}


def test_only_the_prefix_becomes_a_placeholder(tmp_path):
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/python3.11-config"
    script.write_text(
        "#!/usr/bin/env sh\nprefix=/usr\nA='-I/usr/include/python3.11 -L/usr/lib' B=/opt/usr/lib C=/usr2\n"
        "D=/usr/bin/perl\nexec /usr/bin/python3.11\n"
    )
    assert lab_tree.put_placeholders(tmp_path, "/usr") == [script]
    p = PLACEHOLDER
    assert script.read_text() == (
        f"#!/usr/bin/env sh\nprefix={p}\nA='-I{p}/include/python3.11 -L{p}/lib' B=/opt/usr/lib C=/usr2\n"
        f"D=/usr/bin/perl\nexec {p}/bin/python3.11\n"
    )


def test_glibc_is_not_packed_and_other_libraries_are():
    ldd = """/usr/bin/python3.11:
\tlinux-vdso.so.1 (0x00007ffc)
\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f01)
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f02)
\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f03)
\tlibcrypt.so.1 => /lib/x86_64-linux-gnu/libcrypt.so.1 (0x00007f04)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f05)
\tstatically linked
"""
    here = Path("/lib/x86_64-linux-gnu")
    assert lab_tree.needed_libraries(ldd) == {"libcrypt.so.1": here / "libcrypt.so.1", "libz.so.1": here / "libz.so.1"}
    with pytest.raises(LabError, match=r"libffi\.so\.8"):
        lab_tree.needed_libraries("\tlibffi.so.8 => not found\n")


def test_debians_layout_is_undone_or_refused(tmp_path):
    (tmp_path / "sysconfig.py").write_text("x = 'deb_system'\nprefix_scheme = 'posix_local'\n")
    (tmp_path / "site.py").write_text("dirs = ['dist-packages']\n")
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    program = tmp_path / "python3.11"
    program.write_bytes(b"\0dist-packages\0")
    assert lab_debian.is_debian(tmp_path)
    lab_debian.undo(tmp_path, program)
    assert "'posix_prefix'" in (tmp_path / "sysconfig.py").read_text()
    assert program.read_bytes() == b"\0site-packages\0"
    assert not (tmp_path / "EXTERNALLY-MANAGED").exists()
    with pytest.raises(LabError, match=r"sysconfig\.py looks different"):
        lab_debian.undo(tmp_path, program)


def test_old_python_is_refused_with_a_hint(tmp_path):
    facts = {"prefix": "/opt", "version": "3.10.1", "short": "3.10", "machine": "x86_64", "libc": "", "stdlib": "/opt"}
    old = tmp_path / "python3.10"
    old.write_text(f"#!/bin/sh\necho '{json.dumps(facts)}'\n")
    old.chmod(0o755)
    with pytest.raises(LabError, match=r"needs Python >= 3\.11, but .* is 3\.10\.1.*--python"):
        lab_tree.inspect(old)
    with pytest.raises(LabError, match="cannot run /nonexistent"):
        lab_tree.inspect(Path("/nonexistent"))


def test_a_failed_command_shows_its_last_lines(tmp_path):
    with pytest.raises(LabError, match=r"exited 3:\nthe last words\n"):
        Log(tmp_path / "log").run(["sh", "-c", "echo the last words >&2; exit 3"])
    assert "the last words" in (tmp_path / "log").read_text()


def test_stand_in_identifies_itself(tmp_path):
    with zipfile.ZipFile(lab_package.stand_in_wheel("thing", "1.0+standin", tmp_path, module=False)) as wheel:
        assert [name for name in wheel.namelist() if name.endswith(".py")] == []
        assert "Stand-in" in wheel.read("thing-1.0+standin.dist-info/METADATA").decode()


JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="one"/><testcase classname="a" name="two"><failure message="no"/></testcase>
<testcase classname="a" name="three"><skipped message="no GPU"/></testcase>
<testcase classname="a" name="four"><error message="fixture"/></testcase>
</testsuite></testsuites>"""


def test_summary_names_tests_that_passed_only_in_a_second_run(tmp_path, capsys):
    import counts

    first, again = tmp_path / "first.xml", tmp_path / "again.xml"
    first.write_text(JUNIT)
    again.write_text('<testsuite><testcase classname="a" name="two"/></testsuite>')
    assert counts.main([str(first)]) == 0
    assert counts.main([str(first), str(again)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 passed, 2 failed; 1 skipped: no GPU",
        "2 passed, 1 failed; 1 of these only when run again alone: a::two; 1 skipped: no GPU",
    ]


def test_many_failures_are_not_run_again(tmp_path):
    import counts

    path = tmp_path / "first.xml"
    path.write_text(JUNIT)
    assert counts.main(["--few", str(path)]) == 0
    case = '<testcase classname="a" name="{}"><failure/></testcase>'
    path.write_text(f"<testsuite>{''.join(case.format(i) for i in range(counts.FEW + 1))}</testsuite>")
    assert counts.main(["--few", str(path)]) == 1
    path.write_text('<testsuite><testcase classname="a" name="one"/></testsuite>')
    assert counts.main(["--few", str(path)]) == 1
