"""The inventory's ``checks:`` section: ``off``, and thresholds by check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.checks import problems
from provision.inventory.document import shown
from provision.model import CheckOptions

if TYPE_CHECKING:
    from provision.inventory.document import Document

_MAX_CHECKS = 1000


def check_options(document: Document, data: object) -> CheckOptions:
    """What the section asks for; its mistakes are noted in ``document``."""
    if data is None:
        return CheckOptions()
    if not isinstance(data, dict):
        document.mistake(("checks",), "must be a mapping: check ids with their thresholds, and off: [ids]")
        return CheckOptions()
    off = _off(document, data.get("off"))
    if max(len(data), len(off)) > _MAX_CHECKS:
        document.mistake(("checks",), f"has more than {_MAX_CHECKS:,} checks")
        return CheckOptions()
    limits: dict[str, dict[str, float]] = {}
    for check, values in data.items():
        if check == "off":
            continue
        if isinstance(values, dict):
            limits[check] = values
        elif values is not None:
            wish = f"must be a mapping of thresholds, not {shown(str(values))}; to skip it: off: [{check}]"
            document.mistake(("checks", check), wish)
    for place, sentence in problems(off, limits):
        document.mistake(("checks", *place), sentence)
    return CheckOptions(limits, tuple(off))


def _off(document: Document, off: object) -> list[str]:
    """The checks that are not run."""
    if off is None:
        return []
    if isinstance(off, list) and all(isinstance(each, str) for each in off):
        return off
    document.mistake(("checks", "off"), "must be a list of check ids, such as [gpu.persist, net.proxy]")
    return []
