"""``--launcher plain`` on two nodes without torch: real ranks that meet at MASTER_ADDR, and one that fails."""

import json
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


# A program whose lines no reader knows. It fails after step 20, and continues from its checkpoint.
ODD = """\
import pathlib, sys, time, zipfile
first = 0
if len(sys.argv) > 1:
    first = int(pathlib.Path(sys.argv[1]).stem.rpartition("_")[2])
out = pathlib.Path("out")
out.mkdir(exist_ok=True)
for step in range(first + 10, 50, 10):
    print(f"训练进度 | 第{step}步 | 误差→{3 - step / 100:.2f}", flush=True)
    with zipfile.ZipFile(out / f"step_{step}.pt", "w") as file:
        file.writestr("data.pkl", "x" * 1000)
    if step == 20:
        sys.exit("no more memory")
"""
PATTERN = r"第(?P<step>\d+)步 \| 误差→(?P<loss>[\d.]+)"


def numbers(folder, inventory, *words):
    """The state of the newest run as ``status`` has it, the rows of ``metrics``, and that command."""
    run = max((folder / "runs").iterdir()).name
    status = command.run("status", "--inventory", inventory, run, "--json", cwd=folder, timeout=60)
    shown = command.run("metrics", "--inventory", inventory, run, *words, "--json", cwd=folder, timeout=60)
    rows = [(row["step"], row["loss"]) for row in json.loads(shown.stdout)["rows"]] if not shown.returncode else []
    return json.loads(status.stdout), rows, shown


def test_a_pattern_reads_the_lines_of_an_unknown_program(nodes):
    folder = nodes.directory / "odd"
    (folder / "code").mkdir(parents=True)
    (folder / "code/odd.py").write_text(ODD)
    on = ["--inventory", nodes.inventory]
    train = ["train", *on, "--launcher", "plain", "--nodes", "1", "--gpus-per-node", "1", "--output", "out"]
    train += ["--resume-arg", "{checkpoint}", "code/odd.py"]
    dry = command.run(*train[:-1], "--dry-run", "--pattern", PATTERN, train[-1], cwd=folder, timeout=120)
    assert f"only this pattern reads steps and losses: {PATTERN}" in dry.stderr, dry.stderr
    failed = command.run(*train[:-1], "--pattern", PATTERN, train[-1], cwd=folder, timeout=120)
    assert failed.returncode == 6, failed.stderr + failed.stdout
    state, rows, _ = numbers(nodes.directory, nodes.inventory)
    assert (state["step"], state["loss"], state["pattern"]) == (20, 2.8, PATTERN)
    assert rows == [(10, 2.9), (20, 2.8)]
    resumed = command.run("resume", *on, state["run"], cwd=folder, timeout=120)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    state, rows, _ = numbers(nodes.directory, nodes.inventory)
    assert (state["state"], state["step"], state["loss"]) == ("finished", 40, 2.6)
    assert rows == [(10, 2.9), (20, 2.8), (30, 2.7), (40, 2.6)]
    _, rows, _ = numbers(nodes.directory, nodes.inventory, "--pattern", r"误差→(?P<loss>2[\d.]+)")
    assert rows == [(1, 2.9), (2, 2.8), (3, 2.7), (4, 2.6)]


def test_a_pattern_that_matches_no_line_is_reported(nodes):
    folder = nodes.directory / "none"
    (folder / "code").mkdir(parents=True)
    (folder / "code/none.py").write_text("print('step 3 loss 2.5', flush=True)\n")
    words = ["--launcher", "plain", "--nodes", "1", "--gpus-per-node", "1", "--pattern", r"it (?P<step>\d+)"]
    done = command.run("train", "--inventory", nodes.inventory, *words, "code/none.py", cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    assert r"no line of the log matched the pattern it (?P<step>\d+)" in " ".join(done.stderr.split())
    state, _, shown = numbers(nodes.directory, nodes.inventory)
    assert (state["step"], state["loss"]) == (None, None)
    assert shown.returncode == 2
    assert r"no line matches the pattern it (?P<step>\d+)" in " ".join(shown.stderr.split())
    text = command.run("status", "--inventory", nodes.inventory, state["run"], cwd=folder, timeout=60).stdout
    assert r"no line of the log matched its pattern: it (?P<step>\d+)" in " ".join(text.split())


SAVER = """\
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
folder = out / "checkpoint-1"
folder.mkdir()
(folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
(folder / "trainer_state.json").write_text('{"global_step": 1}')
print("saves to", out.resolve(), flush=True)
"""


def test_checkpoints_in_memory_lie_in_huge_pages_where_the_service_is_set_up(nodes, ssh):
    inventory = nodes.directory / "inventory.yaml"
    before = inventory.read_text()
    (nodes.directory / "code/saver.py").write_text(SAVER)
    inventory.write_text(before + "services:\n  tmpfs: {size: 600M}\n")
    try:
        applied = command.run("services", "apply", cwd=nodes.directory)
        assert applied.returncode == 0, applied.stderr
        words = ["--launcher", "plain", "--gpus-per-node", "1", "--save-to", "memory", "--output", "out"]
        script = ["code/saver.py", "--", "--output_dir", "out"]
        done = command.run("train", *words, *script, cwd=nodes.directory, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        texts = [text for text in logs(nodes).values() if "saves to" in text]
        assert len(texts) == 2
        assert all("saves to /run/clusterctl/memory/clusterctl-0/" in text for text in texts), texts
        for node in nodes.nodes:
            kept = ssh(nodes, node.name, "ls /opt/plain/runs/*saver*/job/out/checkpoint-1; ls /run/clusterctl/memory/*")
            assert b"model.safetensors" in kept.stdout, kept
            assert kept.stdout.count(b"saver") == 0  # nothing is left in RAM
    finally:
        undone = command.run("services", "undo", cwd=nodes.directory)
        inventory.write_text(before)
    assert undone.returncode == 0, undone.stderr
