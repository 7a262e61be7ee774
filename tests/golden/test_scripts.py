"""Inventory and bundle in, scripts out: the scripts that a node gets, for review.

``CLUSTERCTL_UPDATE_GOLDEN=1 scripts/test golden`` rewrites the files.
"""

import dataclasses
import os
from pathlib import Path, PurePosixPath

import pytest

from provision import data as push
from provision import slurm
from provision.env.bundle.manifest import Entry, Manifest, PrefixFiles
from provision.env.release import catalog
from provision.env.release import install as release_scripts
from provision.env.release.catalog import ReleasePaths
from provision.env.release.examine import examine
from provision.env.relocation import Relocated
from provision.env.source.environment import source_of
from provision.model import Inventory, Node
from provision.render import render
from provision.script import compile_steps
from provision.session import Lock
from provision.tasks.slurm import job_script

HERE = Path(__file__).parent / "scripts"
RUN = "20261127-101500-sft-1a2b"
JOB = slurm.Chosen((Node("gpu01", "10.0.0.1"), Node("gpu02", "10.0.0.2")), {"gpu01": "n1", "gpu02": "n2"}, 8)
STALE = "lib/python3.11/__pycache__/_sysconfigdata.cpython-311.pyc"


def scripts(prefix):
    inventory = Inventory(Path("inventory.yaml"), PurePosixPath(prefix), (Node("node01", "10.0.0.1"),))
    manifest = Manifest(
        name="llm",
        tool="0.1.0",
        created="2026-11-21T08:00:00Z",
        platform="linux-64",
        python="3.11.7",
        source_prefix="/envs/llm",
        chunks=(),
        prefix_files=PrefixFiles("", 0, 0, 0),
        files=tuple(Entry(f"bin/{name}", "file", 0o755, 0, 1, "a" * 64) for name in ("deepspeed", "torchrun")),
        relocations=(("/envs/llm", ""),),
        versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
    )
    places = ReleasePaths.of(inventory, "0123456789ab")
    relocated = Relocated(PurePosixPath(places.release), (), frozenset({STALE}), {source_of(STALE): STALE})
    activate = release_scripts.activate_steps(places, manifest, relocated)
    repair = release_scripts.activate_steps(places, manifest, relocated, repair=True)
    lock = dataclasses.replace(Lock.of_releases(inventory), token="TOKEN")
    folder = push.PushTarget.of(inventory, str(PurePosixPath(prefix).parent / "data"), folder=True)
    file = push.PushTarget.of(inventory, str(PurePosixPath(prefix).parent / "model.bin"), folder=False)
    return {
        "examine": examine(inventory, places.release_id, "clusterctl-relay:0123:"),
        "hold": render(
            "release/hold.sh.j2", lock=lock.path, releases=places.releases, id="TOKEN", who="root on head", silent=15
        ),
        "gather": lock.guarded(release_scripts.gather_script(places, base="ba9876543210")),
        "activate": lock.guarded(compile_steps(activate, token="TOKEN")),
        "activate-dry-run": compile_steps(activate, token="TOKEN", dry_run=True),
        "activate-repair": lock.guarded(compile_steps(repair, token="TOKEN")),
        "list": catalog.list_script(inventory, used=True),
        "verify": catalog.verify_script(places.release),
        "remove": compile_steps([release_scripts.remove_step(places)], token="TOKEN"),
        "push-compare": push.compare_script(folder, "TOKEN"),
        "push-compare-file": push.compare_script(file, "TOKEN"),
        "push-open": push.open_script(folder, 0o750),
        "push-begin": Lock(f"{folder.staging}.lock", token="TOKEN").guarded(push.begin_script(folder)),
        "push-place": Lock(f"{folder.staging}.lock", token="TOKEN").guarded(push.place_script(folder)),
        "push-close": push.close_script(folder),
        "slurm-job": job_script(str(PurePosixPath(prefix).parent / "runs" / RUN), JOB),
        "slurm-job-spares": job_script(str(PurePosixPath(prefix).parent / "runs" / RUN), JOB.surviving(1, None)),
        "slurm-submit": render(
            "slurm/submit.sh.j2",
            seconds=30,
            options=slurm.arguments(slurm.Options("main", "2-12", "team", ("--qos=it's high",)), RUN, JOB),
        ),
    }


STAGES = sorted(scripts("/opt/llm/current"))


@pytest.mark.parametrize("case", ["plain", "nasty"])
@pytest.mark.parametrize("stage", STAGES)
def test_script(case, stage):
    prefix = {"plain": "/opt/llm/current", "nasty": '/opt/it\'s $(id) "x"/current'}[case]
    text = scripts(prefix)[stage]
    path = HERE / f"{stage}-{case}.sh"
    if os.environ.get("CLUSTERCTL_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_no_golden_script_is_left_over():
    assert {path.name for path in HERE.glob("*.sh")} == {f"{s}-{c}.sh" for s in STAGES for c in ("plain", "nasty")}
