"""The monitor's whole screen in three sizes and two languages, compared with files; and hostile terminals.

After an intended change: ``CLUSTERCTL_UPDATE_GOLDEN=1 python -m pytest tests/unit/test_monitor_screens.py``, and read
the difference.
"""

import asyncio
import html
import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from provision.cli.monitor_app import Actions, Monitor
from provision.cli.monitor_picture import svg_of
from provision.run.follow import Entry
from provision.run.sampled import Gpu, Traffic
from provision.run.view import Happening, NodeView, Point, View
from provision.summaries.monitor import SIGN_OF, TABLES, event_lines, head_lines, throttling
from provision.summaries.monitor_help import help_lines, hint_line
from provision.summaries.monitor_plots import speed_title
from provision.summaries.words import CHINESE, LANGUAGES, chinese, columns, cut, language_of, pad, wrapped
from trainer.agent.contract.expected import Expected

SCREENS = Path(__file__).parent / "monitor_screens"
SIZES = [(80, 24), (120, 40), (200, 60)]
BEGAN = 1795396000.0
CELL, ROW = 12.2, re.compile(r'<text [^>]*?x="([\d.]+)"[^>]*?clip-path="url\(#[^)]*line-(\d+)\)">(.*?)</text>')


def point(step):
    """A step: the loss falls, five steps have none that is finite, and a save slows one step down."""
    loss = float("nan") if 60 <= step < 65 else 1.5 + 3 / (1 + step / 20)
    return Point(step, BEGAN + step, loss, 1e-4, 1000, 9000 if step == 50 else 21000)


def line(second, node, rank, text):
    return Entry(f"2026-11-23T01:0{second // 60}:{second % 60:02}.000Z", node, rank, text)


VIEW = View(
    run="20261123-010653-sft-1a2b", now=BEGAN + 100, state="running", phase="training", step=100, total=400,
    loss=2.0, lr=1e-4, tokens=21000, pace=1.0, left=300, age=100, attempt=2, attempts=4, live=True, missing=1,
    nodes=(
        NodeView("gpu01", 0, "running", "training", 100, tuple(
            Gpu(index, 90 + index, (40 + index) << 30, 80 << 30, 300.5, 60 + index, 1400 + 100 * index, 1980, reasons)
            for index, reasons in enumerate([("hw_thermal_slowdown",), ("sw_power_cap",), (), ()])
        ), 16 << 30, 3.5, 1.2e9, 1.1e9, 2e12, 3.0, traffic=(
            Traffic("eth0", 2e5, 1e5), Traffic("mlx5_0/1", 1.1e9, 1.2e9),
        ), memory=60e9, memory_total=512e9),
        NodeView("gpu02", 1, "running", "training", 100, (Gpu(0), Gpu(1, 0, 1 << 30, 80 << 30)), age=75.0),
        NodeView("gpu03", 2, "no answer", silent="no route to host"),
    ),
    points=tuple(map(point, range(1, 101))),
    events=(
        Happening(BEGAN, "gpu01", "start", "attempt 1 from the start"),
        Happening(BEGAN + 30, "gpu01", "restart", "attempt 2 from checkpoint-20"),
        Happening(BEGAN + 50, "gpu01", "checkpoint", "saving"),
        Happening(BEGAN + 70, "gpu02", "warning", "数据盘快满了: 95 %"),
        Happening(BEGAN + 80, "gpu01", "warning", "the others wait for rank 1 on gpu02 18 % of the time"),
        Happening(BEGAN + 90, "gpu02", "hang", "rank 5: no step for 8 s"),
    ),
    lines=(
        line(1, "gpu01", 0, "开始训练 GPT-2 (303.4M 参数)"),
        *(line(second, "gpu01", 0, f"step {second} loss: 2.1{second}") for second in range(2, 9)),
        line(9, "gpu02", 4, "UserWarning: [bold]no markup[/bold]"),
        line(10, "gpu02", 4, "RuntimeError: CUDA error"),
    ),
    ranks=(0, 4), slow="slower than expected: 1.00 s per step, at most 0.96 s expected",
    expected=Expected("measured", (0.8, 0.96), (22000, 26000)),
)  # fmt: skip
OVER = replace(
    VIEW, state="failed", live=False, phase="", left=None, why="gpu02, rank 4: CUDA error",
    nodes=tuple(replace(node, state="failed", phase="", silent="") for node in VIEW.nodes),
)  # fmt: skip


def drawn(view, size, language="en", keys=""):
    """The screen as text, read from its picture."""
    nothing = Actions(lambda _: "", lambda: "", lambda: "", list)
    app = Monitor(lambda: view, nothing, 60.0, LANGUAGES[language])

    async def pilot():
        async with app.run_test(size=size) as hands:
            await hands.press(*keys.split())
            await hands.pause()
            return svg_of(app)

    rows = [""] * size[1]
    for x, row, text in ROW.findall(asyncio.run(pilot())):
        rows[int(row)] = pad(rows[int(row)], round(float(x) / CELL)) + html.unescape(text).replace("\xa0", " ")
    return "".join(f"{row.rstrip()}\n" for row in rows)


CASES = {
    **{f"{language}-{size[0]}x{size[1]}": (VIEW, size, language, "") for language in LANGUAGES for size in SIZES},
    "en-80x24-gpus-events": (VIEW, (80, 24), "en", "g e"),
    "zh-80x24-network": (VIEW, (80, 24), "zh", "g g"),
    "en-120x40-ranks": (VIEW, (120, 40), "en", "p 0 space 4 enter"),
    "zh-80x24-help": (VIEW, (80, 24), "zh", "question_mark"),
    "zh-80x24-over": (OVER, (80, 24), "zh", ""),
    "en-20x24": (VIEW, (20, 24), "en", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_screen_is_the_recorded_one(name):
    shown, file = drawn(*CASES[name]), SCREENS / f"{name}.txt"
    if os.environ.get("CLUSTERCTL_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8")
    assert all(columns(row) <= CASES[name][1][0] for row in shown.splitlines())


def test_no_colour_changes_no_text(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert drawn(VIEW, (80, 24)) == (SCREENS / "en-80x24.txt").read_text(encoding="utf-8")


def test_every_text_of_the_screen_is_known_in_chinese():
    asked = set()

    def say(text, *values):
        asked.add(text)
        return chinese(text, *values)

    for view in (VIEW, OVER):
        head_lines(view, 200, say)
        for (title, lines_of), shown in product(TABLES, (view, replace(view, nodes=(NodeView("gpu01", 0),)))):
            say(title)
            lines_of(shown, 200, 40, say)
        speed_title(view, say)
        event_lines(replace(view, events=view.events[:3]), say)
    for reason in (*SIGN_OF, "other"):
        throttling([Gpu(0, throttle=(reason,))], say)
    help_lines(say)
    hint_line(200, say)
    assert asked - set(CHINESE) <= {"", "GPUs"}


def test_words_that_the_report_also_has_are_the_same_there():
    script = (Path(__file__).parents[2] / "templates/report/report.js").read_text(encoding="utf-8")
    report = dict(re.findall(r'(\w+): "([^"]+)"', script.partition("const zh = {")[2].partition("};")[0]))
    shared = {"loss", "nodes", "events", "restart", "diagnosis", "run", "rank", "node"}
    names = {"run": "runs", "node": "NODE"}
    assert {name: CHINESE[names.get(name, name)] for name in shared} == {name: report[name] for name in shared}
    assert CHINESE["STATE"] == report["state"]
    assert CHINESE["tokens/s"] in report["speed"]


@pytest.mark.parametrize(
    ("environ", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_TW.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
    ],
)
def test_the_language_is_the_locales(environ, language):
    assert language_of(environ) == language


def test_wide_signs_need_two_columns():
    assert [columns(text) for text in ("abc", "训练", "é", "e\u0301", "█⠁")] == [3, 4, 1, 1, 2]
    assert [cut("训练中", width) for width in (6, 5, 4, 1, 0)] == ["训练中", "训练", "训练", "", ""]
    assert pad("训", 4) + "|" == "训  |"
    assert pad("训", 4, right=True) == "  训"
    assert wrapped("save a checkpoint\n保存检查点并停止", 8) == ["save a", "checkpoi", "nt", "保存检查", "点并停止"]
    assert wrapped("", 8) == [""]
