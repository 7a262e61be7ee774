"""The report of ``clusterctl report`` in a real browser: its curves, its languages, and no request to any host."""

import json
import math
import re

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from provision.report import NodeData, RunData, report_page
from provision.report.data import Sample
from trainer.reader import Row

BEGAN = 1_795_396_000.0
POINTS = 500_000
DRAWN = "return [...document.querySelectorAll('figure[data-drawn]')].map(each => each.dataset.key)"


def run(name="r1", steps=200, **more):
    rows = tuple(Row(step, 9 / step, 1e-4, eval_loss=math.nan if step == 50 else None) for step in range(1, steps))
    nodes = tuple(
        NodeData(
            f"gpu0{rank}",
            rank,
            ({"event": "attempt", "time": BEGAN + 60, "attempt": 2, "checkpoint": "/out/<b>"},),
            tuple((step, BEGAN + step - (90 if step == 100 else 0)) for step in range(1, steps)),
            tuple(Sample(BEGAN + at, at, {"gpu": at % 100}) for at in range(0, steps, 10)),
        )
        for rank in range(2)
    )
    return RunData(name, "failed", nodes, rows, **more)


@pytest.fixture
def show(browser, tmp_path):
    def show(*runs):
        page = tmp_path / "report.html"
        page.write_text(report_page(runs, BEGAN))
        browser.errors()
        return browser.open(page)

    return show


def drawn(browser):
    return browser.driver.execute_script(DRAWN)


def test_curves_appear_without_errors_and_requests(show):
    browser = show(run(record={"expected": {"version": 1, "step_seconds": [0.4, 0.6]}}), run("r2", 100))
    browser.wait(lambda: {"loss", "lr", "ms"} <= set(drawn(browser)))
    assert "expected 400 \N{EN DASH} 600" in browser.all("figure[data-key=ms] figcaption")[0].text
    assert not browser.external(browser.requested())
    assert not browser.errors()
    box = browser.all("figure[data-key=loss] canvas")[0]
    assert box.size["width"] > 300


def test_alignment_smoothing_and_zoom_keep_the_curves(show):
    browser = show(run())
    browser.wait(lambda: "loss" in drawn(browser))
    for mode in ("elapsed", "clock", "step"):
        browser.driver.execute_script(f"const a = document.getElementById('align'); a.value = '{mode}'; a.onchange()")
        assert browser.all("figure[data-key=loss] canvas"), mode
    browser.driver.execute_script("const s = document.getElementById('smooth'); s.value = 0.9; s.onchange()")
    browser.driver.execute_script("document.getElementById('log').click(); document.getElementById('marks').click()")
    plot = browser.all("figure[data-key=loss] .plot")[0]
    for key in ("+", "+", Keys.ARROW_RIGHT, "-", "0"):
        plot.send_keys(key)
    shown = [each.text for each in browser.all("figure[data-key=loss] .u-legend th") if each.is_displayed()]
    assert [each.strip(":") for each in shown] == ["Step", "r1"]
    assert not browser.errors()


def ranges(browser):
    """What each drawn chart shows, by its key."""
    script = "return [...document.querySelectorAll('figure[data-range]')].map(e => [e.dataset.key, e.dataset.range])"
    return {key: [float(end) for end in text.split()] for key, text in browser.driver.execute_script(script)}


def test_a_zoom_is_that_of_all_curves_and_stays(show):
    browser = show(run())
    browser.wait(lambda: {"loss", "lr"} <= set(ranges(browser)))
    whole = ranges(browser)["loss"]
    plot = browser.all("figure[data-key=loss] .plot")[0]
    plot.send_keys("+")
    browser.wait(lambda: ranges(browser)["loss"] != whole)
    near = ranges(browser)["loss"]
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2, rel=0.02)
    browser.wait(lambda: ranges(browser)["lr"] == near)
    browser.driver.execute_script("const s = document.getElementById('smooth'); s.value = 0.5; s.onchange()")
    browser.wait(lambda: ranges(browser)["lr"] == near == ranges(browser)["loss"])
    area = browser.all("figure[data-key=lr] .u-over")[0]
    ActionChains(browser.driver).move_to_element(area).click_and_hold().move_by_offset(60, 0).release().perform()
    browser.wait(lambda: ranges(browser)["loss"][1] - ranges(browser)["loss"][0] < 50)
    ActionChains(browser.driver).double_click(area).perform()
    browser.wait(lambda: ranges(browser)["loss"] == whole == ranges(browser)["lr"])
    assert not browser.errors()


def test_texts_of_a_run_do_not_run(show):
    evil = "</script><script>document.title='evil'</script><img src=https://example.invalid/x onerror=alert(1)>"
    browser = show(run(evil, diagnosis=evil, missing={evil: evil}))
    browser.wait(lambda: "loss" in drawn(browser))
    assert browser.driver.title == evil
    assert not browser.all("img")
    assert not browser.external(browser.requested())


def test_a_run_without_numbers_is_only_tables(show):
    browser = show(RunData("r1", "running"))
    assert browser.all("#summary table")
    assert not browser.all("canvas")
    assert not browser.errors()


def test_the_text_is_chinese_in_a_chinese_browser(chinese, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(report_page([run()], BEGAN))
    chinese.open(page)
    assert chinese.driver.execute_script("return document.documentElement.lang") == "zh"
    assert chinese.all("#summary h2")[0].text == "概要"
    assert not [each.text for each in chinese.all("h2") if each.text.isascii()]
    assert not chinese.errors()


def test_without_scripts_tables_and_pictures_remain(show):
    browser = show(run())
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.driver.refresh()
        assert len(browser.all("noscript svg polyline")) >= 3
        assert browser.all("#curves table")[0].is_displayed()
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def violations(browser, axe):
    """What axe-core finds that keeps people from reading or using the page."""
    browser.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
    judged = browser.driver.execute_cdp_cmd(
        "Runtime.evaluate",
        {"expression": "axe.run().then(JSON.stringify)", "awaitPromise": True, "returnByValue": True},
    )
    found = json.loads(judged["result"]["value"])
    assert found["passes"], "nothing was judged"
    return [
        (each["id"], each["nodes"][0]["html"][:200])
        for each in found["violations"]
        if each["impact"] in {"serious", "critical"}
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(show, axe, scheme):
    preflight = {"checks": {"OK": 9}, "problems": [{"check": "fs.tmp", "verdict": "WARN", "nodes": ["gpu00"]}]}
    browser = show(run(diagnosis="rank 1 failed", missing={"gpu09": "no answer"}, record={"preflight": preflight}))
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    try:
        browser.driver.refresh()
        browser.wait(lambda: "loss" in drawn(browser))
        assert violations(browser, axe) == []
        assert not browser.external(browser.requested())
        assert not browser.errors()
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_axe_finds_nothing_serious_without_scripts(axe, browser, tmp_path):
    """The page's own scripts are gone, and what is in <noscript> is shown, as a browser without scripts shows it."""
    page = re.sub(
        r"<script\b.*?</script>|</?noscript>|<meta http-equiv[^>]*>", "", report_page([run()], BEGAN), flags=re.DOTALL
    )
    file = tmp_path / "report.html"
    file.write_text(page)
    browser.errors()
    browser.open(file)
    assert browser.all("svg polyline")
    assert violations(browser, axe) == []
    assert not browser.external(browser.requested())
    assert not browser.errors()


def test_every_curve_is_printed(show):
    browser = show(run())
    browser.driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert "gpu" in drawn(browser)
    assert not browser.errors()


def test_a_phone_shows_no_horizontal_bar(show):
    browser = show(run())
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.driver.refresh()
        browser.wait(lambda: "loss" in drawn(browser))
        assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_half_a_million_points_open_quickly(show):
    """The usual time is half a second; the limit is larger, because other tests share the cores."""
    times = tuple((step, BEGAN + step * 0.5 + (step * 7919 % 97) / 500) for step in range(POINTS))
    rows = tuple(Row(step, 1 + (step * 7919 % 1009) / 1e3) for step in range(POINTS))
    browser = show(RunData("big", "finished", (NodeData("gpu01", times=times),), rows))
    browser.wait(lambda: "loss" in drawn(browser))
    at = int(browser.all("figure[data-key=loss]")[0].get_attribute("data-drawn"))
    assert at < 5000, at
    assert not browser.errors()
