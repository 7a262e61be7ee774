"""``--launcher plain`` on two nodes without torch: real ranks that meet at MASTER_ADDR, and one that fails."""

import re
import subprocess

import command
import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(200)]

# Every rank reports to rank 0; then the rank that an argument names fails, and the others wait.
SCRIPT = """\
import os, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
print("rank", rank, "of", world, "local", os.environ["LOCAL_RANK"], "of", os.environ["LOCAL_WORLD_SIZE"],
      "node", os.environ["NODE_RANK"], flush=True)
if rank == 0:
    with socket.create_server(where) as server:
        heard = sorted(int(server.accept()[0].makefile().readline()) for _ in range(1, world))
    print("heard", heard, flush=True)
else:
    while True:
        try:
            with socket.create_connection(where) as master:
                master.sendall(b"%d\\n" % rank)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
if len(sys.argv) > 1:
    if rank == int(sys.argv[1]):
        sys.exit(7)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def nodes(require_sandbox, tmp_path_factory, ssh):
    """Two nodes with this machine's root, and an environment that is its Python."""
    from provision import sandbox as sandboxes

    folder = tmp_path_factory.mktemp("plain")
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"plain-{folder.name[-6:]}", directory=folder, rootfs="host")
    ) as box:
        for node in box.nodes:
            text = "mkdir -p {0}/bin && ln -sf $(command -v python3) {0}/bin/python".format("/opt/plain/current")
            assert ssh(box, node.name, text).returncode == 0
        inventory = box.inventory.read_text()
        box.inventory.write_text(re.sub(r"^prefix: .*$", "prefix: /opt/plain/current", inventory, flags=re.MULTILINE))
        (folder / "code").mkdir()
        (folder / "code/meet.py").write_text(SCRIPT)
        yield box


def train(box, *arguments):
    words = ["train", "--launcher", "plain", "--gpus-per-node", "2", "code/meet.py", *arguments]
    return command.run(*words, cwd=box.directory, timeout=120)


def logs(box):
    """By node and rank, what the ranks of the newest run printed."""
    run = max((box.directory / "runs").iterdir())
    return {(path.parent.name, path.stem): path.read_text() for path in run.glob("*/rank*.log")}


def test_ranks_meet_without_torchrun(nodes):
    result = train(nodes)
    assert result.returncode == 0, result.stderr + result.stdout
    found = logs(nodes)
    names = [node.name for node in nodes.nodes]
    for rank in range(4):
        ((name, text),) = [(name, text) for (name, file), text in found.items() if file == f"rank{rank}"]
        assert name == names[rank // 2]
        assert f"rank {rank} of 4 local {rank % 2} of 2 node {rank // 2}" in text
    assert any("heard [1, 2, 3]" in text for text in found.values())


def test_failed_rank_stops_all_ranks(nodes, ssh):
    result = train(nodes, "--", "3")
    assert result.returncode != 0
    assert "rank 3 exited with code 7" in result.stderr + result.stdout
    for node in nodes.nodes:
        assert ssh(nodes, node.name, "pgrep -f [m]eet.py").stdout == b""


# nanoGPT's way: the folder is joined with the data set's name, which a configuration in Python sets.
READS = """\
import os, sys
dataset = "none"
exec(open(sys.argv[1]).read())
print(open(os.path.join("data", dataset, "train.bin")).read(), flush=True)
try:
    open("nib.lav/gib"[::-1])  # a path that the text of the script does not have
except FileNotFoundError as error:
    sys.exit(f"FileNotFoundError: {error}")
"""


def test_ignored_data_is_sent_and_a_missing_ignored_file_is_explained(nodes):
    folder = nodes.directory / "reads"
    for name, text in {
        ".gitignore": "*.bin\n",
        "train.py": READS,
        "run.sh": 'cd "$(dirname "$0")"\nCONFIG=${1:-config/none.py}\nexport A=b\npython train.py "$CONFIG"\n',
        "config/small.py": "dataset = 'small'\n",
        "data/small/train.bin": "tokens of small",
        "big/val.bin": "x" * 1000,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True)
    options = ["--inventory", str(nodes.inventory), "--launcher", "plain", "--gpus-per-node", "1"]
    words = ["train", *options, "--", "bash", "run.sh", "config/small.py"]
    failed = command.run(*words, cwd=folder, timeout=120)
    assert failed.returncode == 6, failed.stderr + failed.stdout
    assert "run.sh means: A=b python train.py config/small.py" in failed.stderr
    assert "because config/small.py names it: data/small (15 B)" in failed.stderr
    assert "not sent, git-ignored: big/ (1.0 kB); --include PATTERN sends more" in failed.stderr
    assert all("tokens of small" in text for text in logs(nodes).values())
    explained = command.run("diagnose", "--inventory", str(nodes.inventory), cwd=folder, timeout=60)
    assert "big/val.bin: git-ignored, so it was not sent" in explained.stdout
    assert "--include big/val.bin" in " ".join(explained.stdout.split())
    words[1:1] = ["--include", "big/val.bin"]
    assert command.run(*words, cwd=folder, timeout=120).returncode == 0
