"""The pages about services agree with provision/services."""

from pathlib import Path

import pytest

from provision import services
from provision.services import sysctl

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", services.names())
def test_a_service_has_a_page_with_its_options(name):
    text = (ROOT / "docs" / "services" / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    for key in services.get(name).Options.model_fields:
        assert key in text, key


def test_the_page_of_sysctl_has_every_key_default_and_bound():
    text = (ROOT / "docs" / "services" / "sysctl.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for key, ((low, high), *_) in sysctl.KEYS.items():
        assert any(f"`{key}`" in row and str(low) in row and str(high) in row for row in rows), key
    for key, value in sysctl.DEFAULTS.items():
        assert any(f"`{key}`" in row and f"| {value} |" in row for row in rows), key
