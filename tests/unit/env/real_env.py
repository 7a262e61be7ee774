"""A real conda environment with files that are hard to move, and a comparison of two trees."""

import os
import shutil
import subprocess
import zipfile
from collections import defaultdict
from pathlib import Path

import lab_package
import lab_tree

TEXT = "CUDA libraries are linked like this.\n"
SCRIPTS = {  # in bin: what the first line asks for, and what the script prints
    "with-options": ("#!{prefix}/bin/python -Es", "import sys; print(sys.prefix, sys.flags.ignore_environment)"),
    "isolated": ("#!{prefix}/bin/python3 -I", "import sys; print(sys.prefix, sys.flags.isolated)"),
    "from-env": ("#!/usr/bin/env python", "import sys; print(sys.prefix)"),
    "from-env-options": ("#!/usr/bin/env -S python3 -I", "import sys; print(sys.prefix, sys.flags.isolated)"),
    "long-form-pip": (
        "#!/bin/sh\n'''exec' {prefix}/bin/python -E \"$0\" \"$@\"\n' '''",
        "import sys; print(sys.prefix, sys.argv[1:])",
    ),
    "long-form-conda": (
        "#!/bin/sh\n'''exec' \"{prefix}/bin/python\" \"$0\" \"$@\" #'''",
        "import sys; print(sys.prefix, sys.argv[1:])",
    ),
    "in-sh": ("#!/bin/sh", "exec {prefix}/bin/python -c 'import sys; print(sys.prefix)'"),
    "in-perl": ("#!{prefix}/bin/perl -w", 'print "{prefix} $^X\\n";'),
    "in-perl-from-env": ("#!/usr/bin/env perl", 'print "$^X\\n";'),
    "in-r": ("#!{prefix}/bin/Rscript --vanilla", 'cat("R\\n")'),
}
PROGRAM = """
#include <stdio.h>
const char *prefix = "PLACEHOLDER/share";
const char *several = "PLACEHOLDER/lib:PLACEHOLDER/lib64:/usr/lib";
int main(void) { printf("%s\\n%s\\n", prefix, several); return 0; }
"""


def write(path, data, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    path.chmod(mode)
    return path


class Channel:
    """A conda channel of the test's own: the small environment's packages and some more."""

    def __init__(self, small, folder):
        self.small = small
        self.folder = folder
        self.stage = folder / "stage"
        self.names = ["python", "pip", "setuptools", "wheel"]
        shutil.copytree(small.home / "channel", folder / "channel")

    def add(self, name, tree, *, paths=None):
        """A package of the files in ``tree``; ``paths`` gets each entry of paths.json and may change it."""
        listed = lab_package.paths_json(tree, lab_tree.PLACEHOLDER)
        for entry in listed["paths"]:
            if paths:
                paths(entry)
        package = lab_package.Package(name, "1.0", self.small.subdir)
        info = {"paths.json": listed}
        lab_package.write(package, tree, self.folder / "channel", placeholder=lab_tree.PLACEHOLDER, info=info)
        self.names.append(name)

    def add_wheel(self, wheel):
        lab_package.from_wheel(wheel, self.stage, self.folder / "channel", placeholder=lab_tree.PLACEHOLDER)
        self.names.append(wheel.name.split("-")[0])

    def install(self, prefix):
        return self.small.make(
            prefix, pkgs=self.folder / "pkgs", channel=self.folder / "channel", specs=list(self.names)
        )


def add_program(channel):
    """A compiled program that holds conda's placeholder, declared as conda-build does."""
    tree = channel.stage / "program"
    (tree / "bin").mkdir(parents=True)
    source = channel.stage / "program.c"
    source.write_text(PROGRAM.replace("PLACEHOLDER", lab_tree.PLACEHOLDER))
    subprocess.run(["gcc", "-O1", "-o", tree / "bin/program", source], check=True)

    def declare(entry):
        entry |= {"file_mode": "binary", "prefix_placeholder": lab_tree.PLACEHOLDER}

    channel.add("program", tree, paths=declare)


def wheel(folder, name, text, *, version="1.0"):
    """A wheel with one module, and a console script that prints ``text``."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    members = {
        f"{name}/__init__.py": f"TEXT = {text!r}\n\n\ndef main():\n    print(TEXT)\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": f"[console_scripts]\n{name}-cli = {name}:main\n",
    }
    members[f"{about}/RECORD"] = "".join(f"{member},,\n" for member in [*members, f"{about}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return path


def make_awkward(small, folder, prefix):
    """An environment at ``prefix`` with everything that docs/releases.md promises to carry."""
    channel = Channel(small, folder)
    if shutil.which("gcc"):
        add_program(channel)
    channel.add_wheel(wheel(folder / "conda", "overlaid", "conda"))
    channel.install(prefix)
    subprocess.run([prefix / "bin/python", "-m", "compileall", "-q", "-x", "lib2to3", prefix / "lib"], check=True)
    small.install(prefix, "--force-reinstall", "--no-deps", wheel(folder / "pip", "overlaid", "pip"))
    small.install(prefix, "hatchling")
    for name, (first, rest) in SCRIPTS.items():
        text = f"{first}\n{rest}\n".replace("{prefix}", str(prefix))
        write(prefix / "bin" / name, text, 0o755)
    if perl := shutil.which("perl"):
        shutil.copy2(perl, prefix / "bin/perl")
    write(prefix / "bin/Rscript", '#!/bin/sh\nprintf "%s\\n" "$@"\n', 0o755)
    write(prefix / "lib/libcudart.so.12.4.127", TEXT, 0o755)
    (prefix / "lib/libcudart.so.12").symlink_to("libcudart.so.12.4.127")
    (prefix / "lib/libcudart.so").symlink_to("libcudart.so.12")
    share = prefix / "share"
    write(share / "settings.txt", f"{prefix}/lib {prefix}2/lib /data{prefix}/lib {prefix}.old\n")
    write(share / "binary.dat", f"\0{prefix}/share\0{prefix}2\0".encode())
    write(share / "read-only", "x", 0o444)
    write(share / "only-mine", f"{prefix}\n", 0o400)
    write(share / "locked/inside/file", "x", 0o444)
    write(share / "fraction", "x")
    os.utime(share / "fraction", ns=(1, 1_600_000_000_987_654_321))
    (share / "empty/inside").mkdir(parents=True)
    (share / "into").symlink_to(share / "settings.txt")
    (share / "into-a-folder").symlink_to(prefix / "lib")
    (share / "out").symlink_to("/etc/hostname")
    (share / "decoy").symlink_to(f"{prefix}2/lib")
    (share / "dangling").symlink_to("nowhere at all")
    for name in (b"\xff\xfe.txt", b"new\nline", b"back\\slash", b"quo'\"te", b"sp ace", b"$(x)", b"l" * 255):
        Path(os.fsdecode(os.fsencode(share) + b"/" + name)).write_bytes(name)
    deep = share / ("d" * 120) / ("e" * 120)
    write(deep / "file", "x")
    os.link(share / "settings.txt", share / "settings-too.txt")
    os.link(share / "read-only", prefix / "lib/read-only-too")
    site = prefix / small.site
    write(site / "where.py", f"PREFIX = {str(prefix)!r}\n")
    os.link(site / "where.py", site / "where_too.py")
    with (share / "large.bin").open("wb") as file:
        file.truncate(70 << 20)
        file.seek(66 << 20)
        file.write(b"end of the first range")
    subprocess.run([prefix / "bin/python", "-m", "compileall", "-q", site], check=True)
    for path in (share / "locked/inside", share / "locked"):
        path.chmod(0o555)
    return prefix


def tree(top):
    """Path -> kind, mode, mtime in whole seconds, content or target; folders have no time."""
    found = {}
    for path in everything(top):
        status = path.lstat()
        key = str(path.relative_to(top))
        if path.is_symlink():
            found[key] = ("link", str(path.readlink()), int(status.st_mtime))
        elif path.is_dir():
            found[key] = ("dir", status.st_mode & 0o7777)
        else:
            found[key] = ("file", status.st_mode & 0o7777, int(status.st_mtime), path.read_bytes())
    return found


def everything(top):
    """Everything below a folder; links are not followed."""
    for folder, folders, files in os.walk(top):
        yield from (Path(folder, name) for name in (*folders, *files))


def same_file(top):
    """The sets of paths that are names of one file."""
    names = defaultdict(set)
    for path in everything(top):
        status = path.lstat()
        if path.is_file() and not path.is_symlink() and status.st_nlink > 1:
            names[status.st_dev, status.st_ino].add(str(path.relative_to(top)))
    return sorted(sorted(paths) for paths in names.values() if len(paths) > 1)
