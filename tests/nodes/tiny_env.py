"""A small fake environment and inventories for it: what tests of deploys share."""

import json
import re
import shutil
from pathlib import Path

from command import run

NASTY = ("a b.py", 'quote\'s "both".txt', "$(touch owned).txt", "new\nline.txt", "täst-日本.txt", "-rf", "`id`;*")


def make_env(prefix: Path, text: str = "one") -> Path:
    """A prefix that looks like a conda environment; its Python is a shell script that always succeeds."""
    site = prefix / "lib/python3.11/site-packages"
    (site / "tool").mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta/history").write_text("")
    python = {
        "name": "python",
        "version": "3.11.7",
        "build": "0",
        "files": ["bin/python"],
        "channel": "",
        "depends": [],
    }
    (prefix / "conda-meta/python-3.11.7-0.json").write_text(json.dumps(python))
    (prefix / "bin/python").write_text("#!/bin/sh\nexit 0\n")
    (prefix / "bin/tool").write_text(f"#!{prefix}/bin/python\nimport tool\n")
    (prefix / "bin/where").write_text(f"#!/bin/sh\nexec echo {prefix}/share\n")
    for script in ("python", "tool", "where"):
        (prefix / "bin" / script).chmod(0o755)
    (prefix / "bin/python3").symlink_to("python")
    (site / "tool/__init__.py").write_text(f"version = {text!r}\n")
    (prefix / "empty").mkdir()
    odd = prefix / "share/odd names"
    odd.mkdir(parents=True)
    for name in NASTY:
        (odd / name).write_text(name)
    return prefix


def pack(env: Path, out: Path) -> Path:
    """The bundle of an environment."""
    result = run("pack-env", env, "-o", out, cwd=out.parent)
    assert result.returncode == 0, result.stderr
    return out


def inventory(box, folder, *, prefix="/opt/llm/current", extra="", change=lambda text: text):
    """A new folder with an inventory for a sandbox's nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    line = f"prefix: {json.dumps(str(prefix))}"
    text = re.sub(r"^prefix: .*$", lambda _: line, box.inventory.read_text(), flags=re.MULTILINE)
    for name in ("id_ed25519", "known_hosts"):
        shutil.copy2(box.directory / name, folder / name)
    (folder / "inventory.yaml").write_text(change(text) + extra)
    return folder


def as_trainer(text):
    return text.replace("user: root", "user: trainer")


def on(box, node, *argv):
    result = box.enter(node, argv)
    assert result.returncode == 0, result.stderr
    return result.stdout
