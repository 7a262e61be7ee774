"""Two bundles side by side, read with nothing of the product: docs/bundle.md is the contract."""

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Chunk:
    """``digest`` is that of the compressed bytes. Sizes in bytes."""

    package: str
    digest: str
    compressed: int
    size: int


def chunks(bundle: Path) -> dict[str, Chunk]:
    """The chunks of a bundle by their key, which says what they hold whatever its times are."""
    with tarfile.open(bundle, "r:") as tar:
        member = tar.extractfile("manifest.json")
        assert member is not None
        manifest = json.load(member)
    return {
        each["key"]: Chunk(each["package"], each["digest"], each["compressed"], each["size"])
        for each in manifest["chunks"]
    }


def changed(old: Path, new: Path) -> list[Chunk]:
    """The chunks of ``new`` that ``old`` does not have."""
    known = chunks(old)
    return [chunk for key, chunk in chunks(new).items() if key not in known]
