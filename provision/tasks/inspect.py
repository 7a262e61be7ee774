"""``clusterctl inspect`` and ``clusterctl diff``: what is in a bundle, and how two differ. They reach no node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.env.bundle.reader import open_bundle
from provision.env.report.difference import Difference, compare
from provision.env.report.difference_text import difference_data, difference_text
from provision.env.report.overview import Overview
from provision.env.report.overview_text import overview_data, overview_text
from provision.model import Emit


@dataclass(frozen=True)
class Inspection:
    """A bundle that was looked at; ``verified``: all of it was read."""

    bundle: Path
    overview: Overview
    verified: bool


def inspect(bundle: Path, *, verify: bool = False, emit: Emit) -> Inspection:
    """Look into a bundle.

    Args:
        bundle: its path.
        verify: read everything, and check it against the manifest.
        emit: receives events.

    Raises:
        BundleError: it is no bundle, damaged, truncated or too new.
        UsageError: it cannot be read.
    """
    opened = open_bundle(bundle)
    if verify:
        opened.verify(emit)
    return Inspection(bundle, Overview(opened.manifest, opened.slices.size), verify)


def diff(old: Path, new: Path) -> Difference:
    """Compare two bundles.

    Raises:
        BundleError: one of them is no bundle, damaged, truncated or too new.
        UsageError: one of them cannot be read.
    """
    return compare(open_bundle(old), open_bundle(new))


def inspected(
    result: Inspection, *, packages: bool = False, files: bool = False, prefix: bool = False
) -> tuple[Mapping[str, Any], str]:
    """After ``inspect``: one mapping for ``--json``, one text for people. The flags say what the text lists whole."""
    data = {"bundle": str(result.bundle), "verified": result.verified, **overview_data(result.overview)}
    text = overview_text(result.overview, packages=packages, files=files, prefix=prefix, verified=result.verified)
    return data, text


def differed(result: Difference, *, files: bool = False) -> tuple[Mapping[str, Any], str]:
    """After ``diff``: one mapping for ``--json``, one text for people. ``files``: the text lists every path."""
    return difference_data(result), difference_text(result, files=files)
