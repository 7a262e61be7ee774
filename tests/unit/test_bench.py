"""The benchmarks' arithmetic, their measures of a command, and that no documented figure is missing."""

import io
import json
import re
import sys
import tarfile
from pathlib import Path

import bench
import bench_bundle
import bench_envs
import bench_machine
import cuda_recipe
import lab_recipe
import pytest
from bench_measure import BenchError, Job, Usage, alternate, run
from bench_table import FIGURES, TARGETS, Figure, Measured, Missing, as_json, met, notes, quantity, ratio, row, table

ROOT = Path(__file__).resolve().parents[2]
WORDS = {"nodes": 16, "peer_nodes": 4, "large": "3 GiB"}

TOUCH = "b = bytearray({} << 20); b[::4096] = b'x' * len(b[::4096])"  # MiB that are really used

# The documented figures: name -> (must, aim, what is judged).
PROMISED = {
    "pack": (1.2, 1.05, "ratio"),
    "pack-conda-pack": (5, 7, "speedup"),
    "unpack": (1.05, 0.9, "ratio"),
    "deploy-many": (1.5, 1.2, "ratio"),
    "uplink": (1.3, 1.05, "ratio"),
    "changed": (1.2, 1.05, "ratio"),
    "rebuilt": (0.1, 0.02, "ratio"),
    "unchanged": (3, 1, "ours"),
    "broken": (1, None, "ratio"),
    "memory": (500e6, 200e6, "ours"),
}


def test_every_documented_figure_exists_with_its_limits():
    assert {each.name: (each.must, each.aim, each.judged) for each in TARGETS} == PROMISED


def test_every_figure_is_measured_by_exactly_one_group():
    assert sorted(name for names in bench.GROUPS for name in names) == sorted(FIGURES)


def test_every_figure_is_explained_in_the_docs():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    names = {name if not name.startswith("distribute-") else "distribute-*" for name in PROMISED}
    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(
    ("judged", "ours", "peer", "value", "verdict"),
    [
        ("ratio", 1.0, 1.0, 1.0, "aim"),
        ("ratio", 1.3, 1.0, 1.3, "yes"),
        ("ratio", 1.31, 1.0, 1.31, "no"),
        ("ratio", 0.0, 1.0, 0.0, "aim"),
        ("ours", 1.2, None, None, "yes"),
        ("ours", 1.4, 100.0, 0.014, "no"),
    ],
)
def test_ratios_are_judged_by_their_limits(judged, ours, peer, value, verdict):
    figure = Figure("x", "x", judged=judged, must=1.3, aim=1.05)
    measured = Measured(ours, peer)
    assert ratio(figure, measured) == pytest.approx(value)
    assert met(figure, measured) == verdict


def test_a_speedup_is_good_when_it_is_large():
    figure = FIGURES["pack-conda-pack"]
    assert met(figure, Measured(10, 70)) == "aim"
    assert met(figure, Measured(10, 50)) == "yes"
    assert met(figure, Measured(10, 49)) == "no"
    assert row(figure, Measured(10, 49), WORDS)[1:] == ("10.0 s", "49.0 s", "4.90", ">= 5", ">= 7", "no")


def test_unmeasured_figure_is_not_met_and_gives_the_reason():
    figure = FIGURES["uplink"]
    missing = Missing("no rehearsal cluster: not root")
    assert met(figure, missing) == "?"
    assert row(figure, missing, WORDS)[1] == "not measured"
    assert notes({"uplink": missing}) == ["- uplink: not measured: no rehearsal cluster: not root"]
    assert as_json({"uplink": missing}, WORDS)[0]["not_measured"] == missing.why
    assert met(figure, Measured(1.0, 0.0)) == "?", "nothing to divide by is no result"


def test_information_is_not_judged():
    assert met(FIGURES["distribute-rsync"], Measured(5.0, 1.0)) == ""


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3, "s", "3.00 s"),
        (31.52, "s", "31.5 s"),
        (999, "bytes", "999 B"),
        (605e6, "bytes", "605.0 MB"),
        (3e9, "bytes", "3.00 GB"),
    ],
)
def test_quantities_are_readable(value, unit, text):
    assert quantity(value, unit) == text


def test_the_table_is_markdown_that_reads_back():
    outcomes = {figure.name: Measured(2.0, 1.0) for figure in TARGETS}
    lines = table([row(FIGURES[name], outcome, WORDS) for name, outcome in outcomes.items()]).splitlines()
    assert len(lines) == 2 + len(TARGETS)
    assert len({len(line) for line in lines}) == 1, "the columns are aligned"
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert cells[0] == ["figure", "ours", "peer", "ratio", "must", "aim", "met"]
    assert {len(each) for each in cells} == {7}
    by_title = {each[0]: each for each in cells}
    assert by_title["redeploy with nothing changed, 16 nodes"][1:] == [
        "2.00 s",
        "1.00 s",
        "2.00",
        "<= 3 s",
        "<= 1 s",
        "yes",
    ]
    memory = by_title["peak memory packing, a file of 3 GiB inside"]
    assert memory[4:] == ["<= 500 MB", "<= 200 MB", "aim"]


def test_the_json_file_has_the_raw_numbers():
    series = {"ours": {"runs": [{"wall": 1.5}]}}
    (data,) = json.loads(json.dumps(as_json({"pack": Measured(3.0, 2.0, "note", series)}, WORDS)))
    assert (data["ratio"], data["must"], data["met"], data["raw"]) == (1.5, 1.2, "no", series)
    assert data["title"] == "pack, against `tar | zstd -T0 -3` of the same tree"


def test_a_command_is_measured_with_the_processes_it_starts():
    child = f"{TOUCH.format(60)}; sum(range(6_000_000)); import time; time.sleep(0.4)"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}])"
    program = f"import subprocess, sys; [p.wait() for p in [{start}, {start}]]"
    usage = run([sys.executable, "-c", program], memory=True).usage
    assert usage.wall > 0.4
    assert usage.cpu > 0.1, "that of the grandchildren"
    assert usage.peak > 120 << 20, "both of them together"
    assert run(["true"]).usage.peak == 0, "nobody looked"


def test_memory_that_is_shared_counts_once():
    program = f"import os, time; {TOUCH.format(80)}\nchild = os.fork()\ntime.sleep(0.5)\nchild and os.wait()\n"
    assert 80 << 20 < run([sys.executable, "-c", program], memory=True).usage.peak < 120 << 20


def test_failed_command_is_named_with_the_reason(tmp_path):
    with pytest.raises(BenchError, match=r"`sh -c echo so; exit 3` exited 3: so"):
        run(["sh", "-c", "echo so; exit 3"])
    with pytest.raises(BenchError, match="cannot be started"):
        run([tmp_path / "nothing"])


def test_a_job_can_be_watched_and_stopped():
    job = Job(["sh", "-c", "sleep 60 & wait"])
    assert job.running
    job.stop()
    done = Job(["sh", "-c", "cat; exit 5"], stdin=Path("/etc/hostname"))
    status, message = done.wait()
    assert (status, message.out) == (5, Path("/etc/hostname").read_text())


def test_sides_take_turns_after_a_warm_up_and_the_median_counts():
    walls = {"ours": iter([9.0, 3.0, 1.0, 2.0]), "peer": iter([9.0, 4.0, 4.0, 4.0])}
    order = []

    def side(name):
        def measure(memory):
            order.append((name, memory))
            return Usage(next(walls[name]), peak=7 if memory else 0)

        return measure

    series = alternate("x", {name: side(name) for name in walls}, 3)
    assert order == [(name, first) for first in (True, False, False, False) for name in ("ours", "peer")]
    assert (series["ours"].wall, series["peer"].wall, series["ours"].peak) == (2.0, 4.0, 7)


def bundle(path, *chunks):
    manifest = {
        "chunks": [dict(zip(("key", "digest", "package", "compressed", "size"), each, strict=True)) for each in chunks]
    }
    data = json.dumps(manifest).encode()
    with tarfile.open(path, "w") as tar:
        header = tarfile.TarInfo("manifest.json")
        header.size = len(data)
        tar.addfile(header, io.BytesIO(data))
    return path


def test_changed_chunks_are_those_with_other_contents(tmp_path):
    old = bundle(tmp_path / "old", ("k1", "d1", "torch", 10, 20), ("k2", "d2", "peft", 5, 9))
    new = bundle(tmp_path / "new", ("k1", "d9", "torch", 11, 20), ("k3", "d3", "peft", 6, 9))
    assert [(chunk.package, chunk.compressed) for chunk in bench_bundle.changed(old, new)] == [("peft", 6)]


def test_the_environment_of_the_cache_is_never_written_to(tmp_path):
    env = bench_envs.Env("e", tmp_path / "env", tmp_path / "src", tmp_path, ("build",), "lib/x.py")
    words = env.overlaid(tmp_path / "layer")
    assert words[:2] == ["unshare", "--mount"]
    assert words[-3:] == [str(env.prefix), str(tmp_path / "layer/upper"), str(tmp_path / "layer/work")]
    assert env.in_place_of(tmp_path / "s")[-2:] == [str(tmp_path), str(tmp_path / "s")]


def test_arguments_are_understood_and_unknown_figures_refused(tmp_path, capsys):
    arguments = bench.parse(["env", "--only", "pack,memory", "--env", "cuda", "--runs", "5", "--json", "x.json"])
    assert (arguments.only, arguments.env, arguments.runs) == ({"pack", "memory"}, "cuda", 5)
    context = bench.context_of(arguments, tmp_path)
    assert (context.variant, context.nodes, context.large) == ("cuda", 16, 3 << 30)
    assert bench.context_of(bench.parse(["env", "--quick"]), tmp_path).nodes == 4
    with pytest.raises(SystemExit):
        bench.parse(["env", "--only", "pack,speed"])
    assert "no figure speed" in capsys.readouterr().err


def test_a_group_that_fails_stops_no_other(tmp_path, monkeypatch):
    def fails(_context):
        raise BenchError("no network")

    groups = {("memory",): fails, ("unpack",): lambda _context: {"unpack": Measured(1.0, 1.0)}}
    monkeypatch.setattr(bench, "GROUPS", groups)
    context = bench.context_of(bench.parse(["env"]), tmp_path)
    found = bench.measure(context, ["unpack", "memory"])
    assert found == {"unpack": Measured(1.0, 1.0), "memory": Missing("no network")}


def test_the_machine_and_the_versions_are_named(tmp_path):
    assert re.match(
        r"\d+ cores of .+, \d+ GiB, .+, Linux \d.*; load \d+\.\d at the start$", bench_machine.machine(tmp_path)
    )
    text = bench_machine.versions(Path(sys.executable).with_name("clusterctl"))
    assert re.match(r"clusterctl \d+\.\d+\.\d+ \(.+\), Python 3\.\d+", text)
    assert re.search(r"tar 1\.\d+, (zstd 1\.|no zstd)", text)


def test_the_cuda_environment_has_a_separate_recipe():
    assert not set(lab_recipe.SOURCES) & {"cuda_recipe.py", "cuda_env.py"}, "else its changes rebuild the other one"
    assert set(cuda_recipe.SOURCES) == {*lab_recipe.SOURCES, "cuda_recipe.py", "cuda_env.py"}
    python = {"version": "3.11.7", "prefix": "/opt/python"}
    assert cuda_recipe.digest(python) != lab_recipe.digest(python)
    names = [pin.partition("==")[0] for pin in cuda_recipe.pins()]
    assert all(len(pin.split("==")) == 2 for pin in cuda_recipe.pins())
    assert len(names) == len(set(names))
    assert "torch==2.11.0" in cuda_recipe.pins()


def test_every_documented_figure_about_nodes_exists_and_is_explained():
    import nodes

    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert {each.name: (each.must, each.aim, each.judged) for each in nodes.FIGURES.values()} == {
        "second-pyinfra": (2, 4, "speedup"),
        "second-ansible": (8, 12, "speedup"),
        "second-latency": (2, 4, "speedup"),
        "round-trips": (2, 1, "ours"),
        "check": (10, 5, "ours"),
    }
    assert [name for name in nodes.FIGURES if f"| `{name}` |" not in page] == []
