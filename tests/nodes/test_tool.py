"""clusterctl as one file, where there is no network, no pip and no Python: a whole deploy to other machines from there.

The controller is node01 of a sandbox: a minimal Debian that reaches nothing but its subnet.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from command import run
from test_deploy import inventory, make_env

from provision import sandbox as sandboxes
from provision.model import ignore
from provision.tasks.bundles import pack_tool

pytestmark = pytest.mark.root

STICK = "/media/usb stick"
TOOL = f"{STICK}/clusterctl.run"
WORK = "/root/my cluster"
THEIRS = {"PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere", "LD_LIBRARY_PATH": "/nowhere", "PYTHONWARNINGS": "error"}
LARGEST = 60_000_000  # bytes of the file
STDLIB = f"python{sys.version_info.major}.{sys.version_info.minor}"

# glibc's own, which no tool carries.
GLIBC = {"ld", "libc", "libm", "libdl", "librt", "libpthread", "libutil", "libresolv", "libnss_files", "gconv"}

# Imports every extension module of the tool; prints how many, and what was loaded for them.
IMPORT_ALL = """
import importlib, json, os, sys
names = [name.partition(".")[0] for name in os.listdir(sys.path[1])]
for folder, _, files in os.walk(sys.path[2]):
    if not folder.endswith(".libs"):
        where = os.path.relpath(folder, sys.path[2]).replace("/", ".").strip(".")
        names += [f"{where}.{name.partition('.')[0]}".strip(".") for name in files if ".so" in name]
for name in names:
    importlib.import_module(name)
maps = [line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/" in line]
print(json.dumps([len(names), sorted({path for path in maps if ".so" in path})]))
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    return pack_tool(output=tmp_path_factory.mktemp("tool") / "clusterctl.run", emit=ignore)


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox, tool):
    """Three nodes; on the first lie the file, a bundle, an environment, and an inventory of the other two."""
    folder = tmp_path_factory.mktemp("sandbox")
    env = make_env(tmp_path_factory.mktemp("envs") / "tiny")
    with sandboxes.up(sandboxes.Options(nodes=3, name=f"tool-{os.getpid()}", directory=folder)) as box:
        packed = run("pack-env", env, cwd=folder)
        assert packed.returncode == 0, packed.stderr
        root = box.node_root("node01")
        stick, work = root / STICK[1:], inventory(box, root / WORK[1:], change=without_the_first)
        stick.mkdir(parents=True)
        shutil.copy(tool.file, stick)
        shutil.copy(folder / "tiny.ccb", work)
        shutil.copytree(env, root / "root/envs/tiny", symlinks=True)
        (root / "root/envs/tiny/share/weights.bin").write_bytes(os.urandom(40 << 20))  # worth a worker process
        yield box


def without_the_first(text):
    return re.sub(r"^ *node01:.*\n", "", text, flags=re.MULTILINE)


def controller(box, *argv, cwd="/", check=True, **env):
    """A command on node01, with the environment of a login."""
    done = box.enter("node01", ["env", "-C", cwd, *(f"{name}={value}" for name, value in env.items()), *argv])
    assert not check or done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def cached(box, home="/root"):
    """The names in a user's cache, hidden ones too."""
    return sorted(path.name for path in (box.node_root("node01") / home[1:] / ".cache/clusterctl").iterdir())


def test_a_whole_deploy_without_network_and_without_python(box, tool):
    # The controller has no way out of its subnet, and nothing that the tool could lean on.
    routes = controller(box, "cat", "/proc/net/route").stdout.splitlines()[1:]
    assert routes
    assert [line.split()[1] for line in routes if line.split()[1] == "00000000"] == []
    found = controller(box, "sh", "-c", "command -v python3 python pip conda rsync zstd", check=False)
    assert (found.returncode, found.stdout) != (0, ""), found.stdout
    assert found.stdout == ""

    first = controller(box, "sh", TOOL, "deploy", "--inventory", "inventory.yaml", cwd=WORK)
    assert first.stderr.count("unpacking in /root/.cache/clusterctl, this once") == 1
    assert "node[02-03]: deployed" in first.stdout
    for node in ("node02", "node03"):
        release = box.enter(node, ["readlink", "-f", "/opt/llm/current"]).stdout.strip()
        assert re.fullmatch(r"/opt/llm/releases/[0-9a-f]{12}", release)
        assert box.enter(node, ["env", "-i", "/opt/llm/current/bin/where"]).stdout == f"{release}/share\n"
    assert not (box.node_root("node01") / "opt/llm").exists()

    again = controller(box, "sh", TOOL, "deploy", "--inventory", "inventory.yaml", cwd=WORK)
    assert "nothing changed" in again.stdout
    assert "unpacking" not in again.stderr
    as_json = controller(box, TOOL, "deploy", "--json", "tiny.ccb", cwd=WORK)
    assert json.loads(as_json.stdout)["changed"] is False
    assert cached(box) == [f"tool-{tool.tool.digest[:12]}"]


def test_pack_env_works_with_the_tool(box):
    packed = controller(box, TOOL, "pack-env", "--json", "/root/envs/tiny", "-o", "/root/again.ccb")
    assert json.loads(packed.stdout)["bytes"] > 40 << 20
    done = controller(box, TOOL, "deploy", "--dry-run", "/root/again.ccb", cwd=WORK)
    assert "node[02-03]: would send" in done.stdout


def test_tool_prints_its_version(box):
    assert controller(box, TOOL, "--version").stdout == "clusterctl, version " + version("clusterctl") + "\n"
    commands = controller(box, TOOL, "--help").stdout
    assert "pack-env" in commands
    assert "deploy" in commands
    wrong = controller(box, TOOL, "deploy", "--limit", "node09", cwd=WORK, check=False)
    assert wrong.returncode == 2
    assert "node09" in wrong.stderr


def test_the_file_is_small_and_starts_at_once(box, tool):
    assert tool.file.stat().st_size < LARGEST
    controller(box, TOOL, "--version")
    home = f"/root/.cache/clusterctl/{cached(box)[0]}"

    def used(*argv):
        """Seconds of processor time, which other programs on this machine change little."""
        seconds = []
        for _ in range(3):
            before = os.times()
            controller(box, *argv)
            after = os.times()
            seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        return min(seconds)

    assert used(TOOL, "--version") - used(f"{home}/python", "-c", "import provision.cli.program") < 0.3


def test_tool_ignores_the_users_python_settings(box):
    controller(box, TOOL, "--version", **THEIRS)
    home = f"/root/.cache/clusterctl/{cached(box)[0]}"
    show = "import json, os, sys; print(json.dumps([sys.path, sys.executable, os.environ.get('LD_LIBRARY_PATH')]))"
    path, executable, theirs = json.loads(controller(box, f"{home}/python", "-c", show, **THEIRS).stdout)
    assert path == [f"{home}/lib/{name}" for name in (STDLIB, f"{STDLIB}/lib-dynload")] + [f"{home}/packages"]
    assert (executable, theirs) == (f"{home}/python", "/nowhere")
    # Its children see the user's variable, and never the tool's.
    start = "import subprocess; subprocess.run(['sh', '-c', 'echo ${LD_LIBRARY_PATH-none}'], check=True)"
    assert controller(box, f"{home}/python", "-c", start, **THEIRS).stdout == "/nowhere\n"
    assert controller(box, f"{home}/python", "-c", start).stdout == "none\n"


def test_every_bundled_library_is_loaded_from_the_tools_folder(box):
    controller(box, TOOL, "--version")
    home = f"/root/.cache/clusterctl/{cached(box)[0]}"
    done = controller(box, f"{home}/python", "-c", IMPORT_ALL)
    modules, libraries = json.loads(done.stdout)
    assert modules > 30
    outside = {path for path in libraries if not path.startswith(home)}
    assert {path.rpartition("/")[2].split(".")[0].split("-")[0] for path in outside} <= GLIBC


def test_python_can_be_started_again(box):
    controller(box, TOOL, "--version")
    home = f"/root/.cache/clusterctl/{cached(box)[0]}"
    program = (
        "import multiprocessing as m\n"
        "with m.get_context('spawn').Pool(2) as pool: print(pool.map(abs, [-1, -2]), flush=True)\n"
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import ssl, fabric, provision.cli.program; print(3)'], check=True)"
    )
    assert controller(box, f"{home}/python", "-c", program).stdout == "[1, 2]\n3\n"


def test_tool_packs_an_identical_tool(box, tool):
    controller(box, TOOL, "--version")
    home = f"/root/.cache/clusterctl/{cached(box)[0]}"
    program = (
        "from pathlib import Path; from provision.tasks.bundles import pack_tool; from provision.model import ignore\n"
        "print(pack_tool(output=Path('/root/again.run'), emit=ignore).tool.digest)"
    )
    assert controller(box, f"{home}/python", "-c", program).stdout.strip() == tool.tool.digest
    again = controller(box, "sha256sum", "/root/again.run").stdout.split()[0]
    assert again == hashlib.sha256(tool.file.read_bytes()).hexdigest()


def test_two_first_runs_of_an_ordinary_user_unpack_one_tool(box, ssh):
    both = f"sh '{TOOL}' --version & sh '{TOOL}' --version && wait $! && echo both >&2 && sh '{TOOL}' --version"
    done = ssh(box, "node01", both, user="trainer")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"clusterctl, version") == 3
    first, _, later = done.stderr.partition(b"both")
    assert b"this once" in first
    assert b"this once" not in later
    assert [name[:5] for name in cached(box, "/home/trainer")] == ["tool-"]


@pytest.fixture
def disk(box):
    """Mounts a new file system on node01, with the given options."""
    mounted = []

    def mount(options):
        place = controller(box, "mktemp", "-d", "/mnt/disk-XXXXXX").stdout.strip()
        controller(box, "mount", "-t", "tmpfs", "-o", options, "tmpfs", place)
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        controller(box, "umount", place)


def test_a_damaged_file_is_refused(box, tool):
    data = tool.file.read_bytes()
    bad = box.node_root("node01") / "root/bad.run"
    for at, some in (("cut off", data[: len(data) // 2]), ("one bit", flipped(data, len(data) * 2 // 3))):
        bad.write_bytes(some)
        done = controller(box, "sh", "/root/bad.run", "--version", HOME="/root/nobody", check=False)
        assert done.returncode == 3, at
        assert done.stderr.endswith("cut off or damaged: its checksum is wrong\ntry: copy it again\n")
        assert cached(box, "/root/nobody") == []


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("options", "says"),
    [("noexec", "mounted with noexec?"), ("size=20m", "the disk is full"), ("ro", "cannot make")],
)
def test_an_unusable_cache_is_explained(box, disk, options, says):
    place = disk(options)
    done = controller(box, "sh", TOOL, "--version", XDG_CACHE_HOME=place, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "--unpack FOLDER" in done.stderr
    assert controller(box, "find", place, "-name", "*tool*", "-o", "-name", ".new-*").stdout == ""


def test_tool_runs_from_a_given_folder(box, disk):
    place, none = disk("size=200m"), disk("ro")
    controller(box, "sh", TOOL, "--unpack", f"{place}/for all", HOME=none)
    done = controller(box, f"{place}/for all/clusterctl", "--version", HOME=none)
    assert done.stdout.startswith("clusterctl, version")


def test_tool_of_a_distribution_python_works(box, tmp_path):
    """Debian's Python has its standard library, its packages and its libraries in other places."""
    debian = "/usr/bin/python3"
    ask = [debian, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"]
    if (
        not shutil.which(debian)
        or subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip() != STDLIB
    ):
        pytest.skip(f"{debian} is not {STDLIB}: the packages of this environment are not for it")
    program = (
        "import sys; from pathlib import Path; from provision.tasks.bundles import pack_tool;"
        " from provision.model import ignore; print(pack_tool(output=Path(sys.argv[1]), emit=ignore).tool.digest[:12])"
    )
    file = tmp_path / "debian.run"
    places = os.pathsep.join((str(Path(__file__).parents[2]), *(path for path in sys.path if "site-packages" in path)))
    argv = [debian, "-c", program, file]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": places})
    assert done.returncode == 0, done.stderr
    shutil.copy(file, box.node_root("node01") / "root/debian.run")
    again = controller(box, "sh", "/root/debian.run", "deploy", "--inventory", "inventory.yaml", cwd=WORK)
    assert re.search("deployed|nothing changed", again.stdout)
    home = f"/root/.cache/clusterctl/tool-{done.stdout.strip()}"
    modules, libraries = json.loads(controller(box, f"{home}/python", "-c", IMPORT_ALL).stdout)
    assert modules > 30
    outside = {path for path in libraries if not path.startswith(home)}
    assert {path.rpartition("/")[2].split(".")[0].split("-")[0] for path in outside} <= GLIBC
