#!/usr/bin/env python3
"""Takes the pictures of ``clusterctl monitor`` and ``clusterctl report`` in the documentation, from a real run.

Rehearsal nodes train a small model with trainer.lm; a rank is killed on the way, and the run restarts from its
checkpoint. docs/assets/monitor.svg is the monitor's screen after that, docs/assets/report.png the start of the report
in chromium. Needs root, and chromium. Nothing of this machine may be in a picture: the texts are searched for its
names, paths and addresses.
"""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lab_env

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from provision import sandbox  # noqa: E402 - the path is known only now

ASSETS = ROOT / "docs" / "assets"
NAME = "clusterctl-pictures"
NODES = 4
STEPS, KILLED = 300, 140
PREFIX = "/opt/llm/current"
COMMAND = "from provision.cli import main; main()"
MODEL = (
    *("--data", "shards", "--n-layer", "2", "--n-head", "2", "--n-embd", "64", "--block-size", "64"),
    *("--batch-size", "4", "--max-iters", str(STEPS), "--eval-interval", "40", "--eval-iters", "1"),
    *("--save-interval", "40", "--trackers", "none", "--out", "out"),
)
WIDTH, HEIGHT = 1200, 940
ADDRESS = re.compile(r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b")
PATIENCE = 900.0  # seconds for a part of the run
CUT = ("configuration", "events")  # sections of the report with paths, which the picture does not reach anyway


class Folder:
    """The user's folder with the inventory."""

    def __init__(self, path: Path, environment: Path) -> None:
        self.path = path
        self._python = environment / "bin/python"
        self._environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

    def clusterctl(self, *words: str | Path) -> str:
        """The output of a command."""
        return self._output([sys.executable, "-c", COMMAND, *map(str, words)])

    def train_python(self, *words: str) -> str:
        """The output of a program of the training environment."""
        return self._output([str(self._python), *words])

    def _output(self, argv: Sequence[str]) -> str:
        done = subprocess.run(
            argv, cwd=self.path, env=self._environ, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if done.returncode:
            raise SystemExit(f"scripts/pictures: {' '.join(argv[-4:])} failed: {done.stderr[-2000:]}")
        return done.stdout


def main() -> int:
    if os.geteuid() or not (chromium := shutil.which("chromium")):
        print("scripts/pictures: needs root, for rehearsal nodes, and chromium", file=sys.stderr)
        return 1
    environment = Path(str(lab_env.build_env()["prefix"]))
    with tempfile.TemporaryDirectory(prefix="clusterctl-pictures-") as scratch:
        folder = Folder(Path(scratch), environment)
        for left in sandbox.list_all():  # of a run of this program that was killed
            if left.name == NAME:
                left.down()
        options = sandbox.Options(nodes=NODES, name=NAME, rootfs="host", directory=folder.path, prefix=PREFIX)
        with sandbox.up(options) as cluster:
            for node in cluster.nodes:  # they see this machine's disk, so nothing has to be sent
                link = 'mkdir -p "${2%/*}" && ln -sfn "$1" "$2"'
                cluster.enter(node.name, ["sh", "-c", link, "sh", str(environment), PREFIX]).check_returncode()
            take(folder, cluster, chromium)
    for picture in ("monitor.svg", "report.png"):
        print(f"docs/assets/{picture}: {(ASSETS / picture).stat().st_size / 1000:.0f} kB")
    return 0


def take(folder: Folder, cluster: sandbox.Sandbox, chromium: str) -> None:
    """Runs the training and takes both pictures."""
    texts = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    (folder.path / "text.txt").write_text("\n".join(path.read_text(encoding="utf-8") for path in texts))
    folder.train_python("-m", "trainer.lm.prepare", "text.txt", "--out", "shards")
    words = ("--nodes", str(NODES), "--name", "llm", "--restarts", "1", "--detach", "--json", "-m", "trainer.lm", "--")
    started = folder.clusterctl("train", *words, *MODEL)
    run = json.loads(started)["run"]
    wait(lambda: step_of(folder, run) >= KILLED, f"step {KILLED}")
    kill_rank(cluster, "node02", run)
    wait(lambda: shown(folder, run)["attempt"] == 2 and step_of(folder, run) > KILLED + 50, "the restart")
    monitor = folder.path / "monitor.svg"
    folder.clusterctl("monitor", run, "--picture", monitor, "--size", "120x36")
    wait(lambda: state_of(folder, run) == "finished", "the end")
    report = folder.path / "report.html"
    folder.clusterctl("report", run, "-o", report)
    page = report.read_text(encoding="utf-8")
    for section in CUT:
        page = re.sub(rf'<section id="{section}">.*?</section>', "", page, flags=re.DOTALL)
    report.write_text(page, encoding="utf-8")
    private = [str(folder.path), str(ROOT), platform.node()]
    refuse_private(texts_of(monitor.read_text(encoding="utf-8")), private)
    refuse_private(texts_of(page), private)
    picture = folder.path / "report.png"
    argv = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={folder.path / 'chromium'}", "--virtual-time-budget=10000",
            f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", report.as_uri()]  # fmt: skip
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    for made in (monitor, picture):
        shutil.copyfile(made, ASSETS / made.name)


def shown(folder: Folder, run: str) -> dict[str, Any]:
    """What ``status`` says about the run."""
    found = json.loads(folder.clusterctl("status", run, "--json"))
    return dict(found)


def step_of(folder: Folder, run: str) -> int:
    """The run's last step."""
    return int(shown(folder, run)["step"] or 0)


def state_of(folder: Folder, run: str) -> str:
    """The run's state."""
    state = str(shown(folder, run)["state"])
    if state in {"failed", "stopped"}:
        raise SystemExit(f"scripts/pictures: the run is {state}: {folder.clusterctl('diagnose', run)}")
    return state


def kill_rank(cluster: sandbox.Sandbox, node: str, run: str) -> None:
    """Kills the rank of a node."""
    script = f"grep -lz '^CLUSTERCTL_RUN={run}$' /proc/[0-9]*/environ | xargs grep -lz '^LOCAL_RANK=' 2>/dev/null"
    found = sorted(int(path.split("/")[2]) for path in cluster.enter(node, ["sh", "-c", script]).stdout.split())
    if not found:
        raise SystemExit(f"scripts/pictures: no rank on {node}: the run ended before it was killed")
    cluster.enter(node, ["kill", f"-{int(signal.SIGKILL)}", str(found[0])])


def wait(done: Callable[[], bool], what: str) -> None:
    """Waits for something of the run, which has no event here."""
    print(f"waiting for {what}", flush=True)
    until = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > until:
            raise SystemExit(f"scripts/pictures: no {what} in {PATIENCE:.0f} s")
        time.sleep(3)


def texts_of(page: str) -> str:
    """The texts of HTML or SVG, without styles, scripts and tags."""
    return re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL).replace("&#160;", " ")


def refuse_private(text: str, words: Iterable[str]) -> None:
    """Raises ``SystemExit`` if a text has an address, or a name or path of this machine."""
    found = [word for word in words if len(word) > 2 and word in text] + ADDRESS.findall(text)
    if found:
        raise SystemExit(f"scripts/pictures: a picture would show {', '.join(found)}")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
