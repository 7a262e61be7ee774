"""``clusterctl inspect`` and ``clusterctl diff``: describe a bundle, and compare two. Nodes are not involved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.env.bundle.reader import open_bundle
from provision.env.difference import Difference, compare, difference_data, difference_text
from provision.env.overview import Overview, overview_data, overview_text
from provision.model import Emit


@dataclass(frozen=True)
class Inspection:
    """A bundle's description; ``verified``: all of the bundle was read and is intact."""

    bundle: Path
    overview: Overview
    verified: bool


def inspect(bundle: Path, *, verify: bool = False, emit: Emit) -> Inspection:
    """Describe a bundle.

    Args:
        bundle: its path.
        verify: read all of it, and compare it with the manifest.
        emit: receives events.

    Raises:
        BundleError: it is not a bundle, damaged, truncated or too new.
        UsageError: it cannot be read.
    """
    opened = open_bundle(bundle)
    if verify:
        opened.verify(emit)
    return Inspection(bundle, Overview(opened.manifest, opened.storage.size), verify)


def diff(old: Path, new: Path) -> Difference:
    """Compare two bundles.

    Raises:
        BundleError: one of them is not a bundle, damaged, truncated or too new.
        UsageError: one of them cannot be read.
    """
    return compare(open_bundle(old), open_bundle(new))


def inspection_output(
    result: Inspection, *, packages: bool = False, files: bool = False, prefix: bool = False
) -> tuple[Mapping[str, Any], str]:
    """The output of ``inspect``: data for ``--json``, and text. The flags select what the text lists in full."""
    data = {"bundle": str(result.bundle), "verified": result.verified, **overview_data(result.overview)}
    text = overview_text(result.overview, packages=packages, files=files, prefix=prefix, verified=result.verified)
    return data, text


def difference_output(result: Difference, *, files: bool = False) -> tuple[Mapping[str, Any], str]:
    """The output of ``diff``: data for ``--json``, and text. With ``files`` the text lists every path."""
    return difference_data(result), difference_text(result, files=files)
