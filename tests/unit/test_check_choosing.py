"""Which checks run, and an inventory's options for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from provision import checks
from provision.checks import choose, limits, problems
from provision.errors import InventoryError, UsageError
from provision.inventory import load
from provision.model import CheckOptions

NONE = CheckOptions()


def chosen(*only, level=0, off=(), bundle=False):
    return choose(CheckOptions(off=tuple(off)), level=level, only=only, bundle=bundle)


def test_by_default_every_passive_check_runs():
    found = set(chosen())
    assert {"gpu.driver", "net.mtu", "mem.shm"} <= found
    assert "net.ports" not in found or checks.load("net.ports").level == 0
    for each in checks.ids():
        about = checks.load(each)
        assert (each in found) == (about.level == 0 and not about.bundle), each


def test_level_1_and_a_bundle_add_checks():
    assert set(chosen(level=1, bundle=True)) == set(checks.ids())
    assert any(checks.load(each).level == 1 for each in chosen(level=1))


def test_kind_selects_all_its_checks_of_the_level():
    assert set(chosen("gpu")) == {each for each in chosen() if each.startswith("gpu.")}
    assert chosen("gpu.driver", "gpu.mig") == ("gpu.driver", "gpu.mig")


def test_named_check_runs_at_any_level_and_even_if_it_is_off():
    deep = next(each for each in checks.ids() if checks.load(each).level == 1)
    assert chosen(deep) == (deep,)
    assert chosen("gpu.driver", off=["gpu.driver"]) == ("gpu.driver",)
    assert "gpu.driver" not in chosen("gpu", off=["gpu.driver"])
    assert "gpu.driver" not in chosen(off=["gpu.driver"])


@pytest.mark.parametrize(
    ("only", "hint"),
    [
        ("gpu.drivr", "did you mean gpu.driver?"),
        ("gpus", "did you mean gpu?"),
        ("xyzzy", "known: clock, cpu"),
        ("a.b", "docs/checks.md"),
    ],
)
def test_unknown_check_is_refused_with_a_suggestion(only, hint):
    with pytest.raises(UsageError, match=f"unknown check {only!r}") as refused:
        chosen(only)
    assert hint in refused.value.hint


def test_missing_bundle_of_a_check_is_an_error():
    needy = next(each for each in checks.ids() if checks.load(each).bundle)
    with pytest.raises(UsageError, match="needs a bundle") as refused:
        chosen(needy)
    assert "clusterctl check BUNDLE" in refused.value.hint
    assert chosen(needy, bundle=True) == (needy,)


def test_with_every_check_off_nothing_runs():
    with pytest.raises(UsageError, match="no check is left"):
        chosen(off=checks.ids())


def test_limits_of_the_inventory_override_those_of_the_check():
    check = next(each for each in checks.ids() if len(checks.load(each).limits) > 1)
    (first, value), (second, other) = list(checks.load(check).limits.items())[:2]
    found = limits(check, CheckOptions({check: {first: 12345}}))
    assert found[first] == 12345 != value
    assert found[second] == other
    assert limits(check, NONE) == checks.load(check).limits


def inventory(tmp_path, section):
    file = tmp_path / "inventory.yaml"
    file.write_text(f"prefix: /opt/llm/current\nnodes:\n  gpu01: 192.168.20.14\nchecks: {section}\n", encoding="utf-8")
    return load(file)


def test_the_section_of_an_inventory(tmp_path):
    found = inventory(tmp_path, "{off: [gpu.persist], clock.skew: {skew_ms: 12.5, skew_max_ms: 2000}}").checks
    assert found == CheckOptions({"clock.skew": {"skew_ms": 12.5, "skew_max_ms": 2000}}, ("gpu.persist",))
    assert inventory(tmp_path, "").checks == NONE
    assert inventory(tmp_path, "{off: , clock.skew: }").checks == NONE


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("[gpu.driver]", "checks (line 4): must be a mapping"),
        ("{off: gpu.driver}", "checks.off (line 4): must be a list of check ids"),
        ("{off: [1]}", "checks.off (line 4): must be a list of check ids"),
        ("{off: [gpu.drivr]}", "checks.off (line 4): unknown check 'gpu.drivr'; did you mean gpu.driver?"),
        ("{gpu.drivr: {}}", "checks.gpu.drivr (line 4): unknown check; did you mean gpu.driver?"),
        (
            "{clock.skew: 5}",
            "checks.clock.skew (line 4): must be a mapping of thresholds, not 5;",
        ),
        (
            "{clock.skew: {skew: 5}}",
            "skew.skew (line 4): is no threshold of clock.skew; did you mean skew_ms?",
        ),
        ("{clock.skew: {skew_ms: much}}", "checks.clock.skew.skew_ms (line 4): must be a number, such as 50"),
        ("{clock.skew: {skew_ms: true}}", "checks.clock.skew.skew_ms (line 4): must be a number, such as 50"),
        ("{gpu.driver: {x: 1}}", "checks.gpu.driver.x (line 4): is no threshold of gpu.driver; it has none"),
    ],
)
def test_invalid_checks_section_of_an_inventory(tmp_path, section, problem):
    with pytest.raises(InventoryError) as refused:
        inventory(tmp_path, section)
    assert [each for each in refused.value.problems if problem in each], refused.value.problems


def test_every_id_and_limit_of_a_check_is_valid_in_an_inventory():
    wanted = {each: checks.load(each).limits for each in checks.ids()}
    assert list(problems(checks.ids(), wanted)) == []


def test_only_checks_that_an_inventory_names_are_imported(tmp_path):
    (tmp_path / "inventory.yaml").write_text(
        "prefix: /opt/llm/current\nnodes: {n1: 192.168.20.14}\nchecks: {off: [net.dns], clock.skew: {skew_ms: 9}}\n"
    )
    code = (
        "import sys; from pathlib import Path; from provision.inventory import load; load(Path('inventory.yaml'))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('provision.checks.')"
        " and '.kit' not in name))"
    )
    message = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert message.stdout.split() == ["provision.checks.clock_skew"]
