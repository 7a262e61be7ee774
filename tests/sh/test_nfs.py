"""The sh of the nfs service under three shells: its files, its refusals, and shellcheck."""

import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from provision.model import Inventory, Node
from provision.render import render
from provision.services import nfs
from provision.services.kit import plans

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
NODES = (Node("gpu01", "10.0.0.1"), Node("gpu02", "fd00::2", "10.1.0.2"))
# A loop over one folder, ls of names that are ours, $ in quotes for another shell, variables that live in a subshell or
# are set and used outside it, and functions that a step does not call.
NOT_MEANT = "SC2012,SC2016,SC2030,SC2031,SC2034,SC2043,SC2154,SC2317,SC2329"


@pytest.fixture(params=SHELLS)
def shell(request):
    if shutil.which(SHELLS[request.param][0]) is None:
        pytest.fail(f"{request.param} is missing: apt-get install dash bash busybox")
    return SHELLS[request.param]


def inventory(**given):
    options = nfs.Options.model_validate({"exports": ["/data"], **given})
    return Inventory(Path("i.yaml"), PurePosixPath("/opt/llm/current"), NODES, services={"nfs": options})


def run(shell, text):
    return subprocess.run([*shell, "-c", text], capture_output=True, text=True, check=False)


def test_shellcheck_finds_nothing(tmp_path):
    parts = {}
    for automount in (False, True):
        cluster = inventory(automount=automount)
        for kind, plan in (("", plans.plan_services), ("verify-", plans.plan_verification)):
            for stage, of_nodes in plan(cluster, NODES, ("nfs",)).steps.items():
                steps = next(iter(of_nodes.values()))
                parts[f"{kind}{stage}-{automount}"] = "".join(f"(\n{s.unless}\n)\n(\n{s.do}\n)\n" for s in steps)
    for name in ("check", "unmount"):  # these run in a separate shell
        parts[name] = render(f"services/nfs/{name}.sh.j2")
    for name, text in parts.items():
        (tmp_path / f"{name}.sh").write_text(text)
    different = {text: tmp_path / f"{name}.sh" for name, text in parts.items()}
    assert len(different) == 7
    done = subprocess.run(
        [SHELLCHECK, "-s", "sh", "-e", NOT_MEANT, *different.values()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("kernel", "several"),
    [
        ("6.1.0-50-amd64", True),
        ("5.3.0", True),
        ("5.15.0-91-generic", True),
        ("5.2.21", False),
        ("4.18.0-553.el8", False),
    ],
)
def test_several_connections_from_linux_5_3_on(shell, kernel, several):
    text = render(
        "services/nfs/fstab.sh.j2", pairs=[("[fd00::1]:/data", "/data"), ("h:/b", "/b")], connections=8, automount=False
    )
    done = run(shell, f'uname() {{ echo {kernel}; }}\n{text}printf %s "$cc_lines"')
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [["[fd00::1]:/data", "/data", "nfs"], ["h:/b", "/b", "nfs"]]
    assert [("nconnect=8" in line, "nofail,bg" in line or ",bg " in line) for line in lines] == [(several, True)] * 2


PLACES = {
    "empty": ("", 0, ""),
    "not empty": ("touch PATH/mine PATH/.hidden", 1, r"PATH is not empty.*\.hidden mine"),
    "another mount": ("mount -t tmpfs other PATH", 1, r"PATH is already a mount of other \(tmpfs\)"),
    "another's line": ("echo nas:/x PATH nfs defaults 0 0 >>/etc/fstab", 1, r"fstab has a line for PATH.*nas:/x"),
    "a comment": ("echo '# nas:/x PATH nfs' >>/etc/fstab", 0, ""),
    "our block": (r"printf '# BEGIN clusterctl nfs\nh:/x PATH nfs a 0 0\n# END clusterctl nfs\n' >>/etc/fstab", 0, ""),
}


@pytest.mark.root
@pytest.mark.parametrize("place", PLACES)
def test_mount_point_must_be_empty_and_free_of_other_mounts(shell, place, tmp_path):
    """In a new mount namespace, with a separate table."""
    path, table = tmp_path / "place", tmp_path / "fstab"
    path.mkdir()
    table.write_text("/dev/sda1 / ext4 defaults 0 1\n")
    before, code, message = PLACES[place]
    look = render("services/nfs/look.sh.j2", path=path, source="h:/x") + render("services/nfs/free.sh.j2")
    library = render("services/library.sh.j2", state=tmp_path / "state")
    text = (
        f"mount --bind '{table}' /etc/fstab\n{before.replace('PATH', str(path))}\n{library}cc_service=nfs\n"
        f"{look}cc_free && exit 0\n{render('services/nfs/place.sh.j2', server='gpu01')}"
    )
    done = subprocess.run(["unshare", "--mount", *shell, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert re.search(message.replace("PATH", re.escape(str(path))), done.stderr.replace("\n", " ")), done.stderr
