"""The scripts of the service os_packages under three shells, on this machine's own dpkg; nothing is installed.

That they install is shown in ``tests/nodes/test_os_packages.py``.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from provision.model import Step
from provision.ospackages import node
from provision.ospackages.bundle import Manifest, Member, OsBundle
from provision.ospackages.releases import Package
from provision.services.kit.scripts import apply_script

# SC2086, SC2046, SC2013, SC2012: lists of names of packages and units, which hold no spaces. SC2034, SC2154, SC2329:
# not every script needs every function and variable. SC1091: a node's own os-release. SC2016: scripts in scripts.
LEFT_OUT = "SC2086,SC2046,SC2013,SC2012,SC2034,SC2154,SC2329,SC1091,SC2016"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def choice(release, *names, wanted=()):
    packages = tuple(Package(name, "1", "all", f"debs/{name}.deb", 1, "a" * 64) for name in names)
    manifest = Manifest(release, "apt", "amd64", names, packages, (Member("Packages", 1, "b" * 64),))
    return node.Choice(OsBundle(Path("os.osb"), manifest, 1000, "c" * 64), wanted or names)


CHOSEN = (choice("debian12", "chrony", "opensm"), choice("ubuntu22.04", "chrony"))


def compiled(chosen=CHOSEN, replace=("systemd-timesyncd",)):
    return apply_script([Step("packages", node.install(chosen, replace), unless=node.present(chosen))], "TOKEN")


@pytest.mark.parametrize(
    "text",
    [compiled(), node.facts(CHOSEN), node.opening(CHOSEN[0]), node.absent(CHOSEN)],
    ids=["install", "facts", "open", "absent"],
)
def test_shellcheck(text, tmp_path):
    (tmp_path / "a.sh").write_text(text)
    argv = [SHELLCHECK, "-s", "sh", "-e", LEFT_OUT, tmp_path / "a.sh"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("name", ["transaction", "undo"])
def test_shellcheck_of_embedded_scripts(name, tmp_path):
    from provision.render import render

    functions = render("services/os_packages/apt/functions.sh.j2", bundles=[], names="")
    text = render(f"services/os_packages/apt/{name}.sh.j2", functions=functions, lock_seconds=1)
    (tmp_path / "a.sh").write_text(text)
    argv = [SHELLCHECK, "-s", "sh", "-e", LEFT_OUT, tmp_path / "a.sh"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


@pytest.fixture
def here():
    """A bundle for this machine with an installed package and one that does not exist."""
    if not shutil.which("dpkg"):
        pytest.skip("this machine has no dpkg")
    fields = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    architecture = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout
    release = (fields["ID"] + fields.get("VERSION_ID", "")).replace('"', "")

    def make(*names):
        made = choice(release, *names)
        manifest = made.bundle.manifest
        object.__setattr__(manifest, "architecture", architecture.strip())
        return (choice("debian12" if release != "debian12" else "debian13", "nobody"), made)

    return make


@pytest.mark.parametrize("shell", ["dash", "bash --posix", "busybox sh"])
def test_missing_packages_are_found_in_three_shells(shell, here):
    def ask(chosen):
        text = node.absent(chosen)
        return subprocess.run(
            [*shell.split(), "-c", text], capture_output=True, text=True, check=False, timeout=60
        ).stdout

    assert ask(here("dpkg", "nobody-has-this", "tar", "nor-this")) == "not installed: nobody-has-this nor-this\n"
    present = node.present(here("dpkg", "tar"))
    assert subprocess.run([*shell.split(), "-c", present], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("shell", ["dash", "bash --posix", "busybox sh"])
def test_values_of_a_manifest_stay_words(shell, tmp_path):
    mark = tmp_path / "owned"
    nasty = choice(f"x$(touch {mark})'\"`touch {mark}`", f"a;touch {mark}", f"$(touch {mark})")
    text = node.absent((nasty,)) + node.install((nasty,), (f"' $(touch {mark})",))
    subprocess.run([*shell.split(), "-c", text], capture_output=True, check=False, timeout=60)
    assert not mark.exists()
