"""The search for NCCL's socket settings."""

import itertools

import pytest

from provision.netbench import MOST_SETTINGS, VARIABLES, Setting, search_settings


def test_a_setting_is_its_variables():
    setting = Setting.of({VARIABLES[0]: "4", VARIABLES[1]: "many", VARIABLES[2]: "8", "OTHER": "1"})
    assert setting == Setting(4, None, 8)
    assert setting.env == {VARIABLES[0]: "4", VARIABLES[2]: "8"}
    assert str(Setting()) == "NCCL's defaults"


@pytest.mark.parametrize(
    ("setting", "allowed"), [((16, 4), True), ((8, 8), True), ((16, 8), False), ((32, 1), False), ((1, 64), True)]
)
def test_settings_that_nccl_allows(setting, allowed):
    assert Setting(*setting).allowed is allowed


def two_h200s(setting):
    """Near what was measured between two H200 over a virtual link: more sockets and channels help, up to a point."""
    threads, sockets, channels = setting.threads or 1, setting.sockets or 1, setting.channels or 2
    rate = 4.2e9 * min((threads * sockets) ** 0.38, 2.9) * min((channels / 2) ** 0.5, 1.7)
    return rate * (0.6 if threads > 4 else 1.0)


def flat(_setting):
    return 1.1e9


def test_the_search_finds_a_better_setting_within_its_bounds():
    asked = []

    def measure(setting):
        asked.append(setting)
        return two_h200s(setting)

    tuning = search_settings(measure, Setting())
    assert all(setting.allowed for setting in asked)
    assert len(tuning.tried) <= MOST_SETTINGS
    assert len(asked) <= MOST_SETTINGS + 3
    every = [Setting(*values) for values in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (2, 4, 8, 16, 32))]
    possible = max(two_h200s(setting) for setting in every if setting.allowed)
    assert tuning.best_busbw >= 0.9 * possible
    assert tuning.factor == pytest.approx(tuning.best_busbw / 4.2e9)
    assert tuning.worth_it


def test_a_second_search_changes_nothing():
    first = search_settings(two_h200s, Setting())
    second = search_settings(two_h200s, first.best)
    assert not second.worth_it
    assert second.gain < 1.05


def test_search_without_improvement_stops_early_and_keeps_the_settings():
    tuning = search_settings(flat, Setting())
    assert tuning.best == Setting()
    assert len(tuning.tried) < 14
    assert not tuning.worth_it


def test_single_good_measurement_decides_nothing():
    seen = {}

    def measure(setting):
        seen[setting] = seen.get(setting, 0) + 1
        return 1.3e9 if setting == Setting(threads=2) and seen[setting] == 1 else 1.0e9 if seen[setting] == 1 else 0.8e9

    tuning = search_settings(measure, Setting())
    assert tuning.best_busbw == pytest.approx(1.05e9)
    assert tuning.default == pytest.approx(0.9e9)


def test_failed_settings_are_skipped():
    tuning = search_settings(lambda setting: None if setting.channels else two_h200s(setting), Setting())
    assert tuning.best.channels is None
    assert tuning.worth_it
    assert (Setting(tuning.best.threads, tuning.best.sockets, 4), None) in tuning.tried


def test_failing_current_settings_are_replaced():
    tuning = search_settings(
        lambda setting: None if setting == Setting(channels=1) else flat(setting), Setting(channels=1)
    )
    assert tuning.worth_it
    assert tuning.best == Setting()


def test_defaults_that_fail_end_the_search():
    with pytest.raises(ValueError, match="defaults"):
        search_settings(lambda _: None, Setting())
