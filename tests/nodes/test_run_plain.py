"""``--launcher plain`` on two nodes without torch: real ranks that meet at MASTER_ADDR, and one that fails."""

import re

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
