"""The paths of a release on a node; docs/releases.md, "On a node", describes all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from provision.model import Inventory


@dataclass(frozen=True)
class ReleasePaths:
    """The paths of one release, as text for scripts."""

    root: PurePosixPath
    link: PurePosixPath
    release_id: str

    @classmethod
    def of(cls, inventory: Inventory, release_id: str) -> ReleasePaths:
        """The paths of a release under an inventory's root."""
        return cls(inventory.root, inventory.prefix, release_id)

    @property
    def releases(self) -> str:
        """The folder of all releases."""
        return f"{self.root}/releases"

    @property
    def release(self) -> str:
        """The environment's real prefix, which relocated files contain."""
        return f"{self.releases}/{self.release_id}"

    @property
    def target(self) -> str:
        """The target of the inventory's prefix, a symlink, if this release is the current one."""
        return f"releases/{self.release_id}"

    @property
    def mark(self) -> str:
        """Exists if the release is complete and passed its smoke test."""
        return f"{self.release}.ok"

    @property
    def incoming(self) -> str:
        """The release while it is unpacked."""
        return f"{self.releases}/.incoming-{self.release_id}"

    @property
    def transfer(self) -> str:
        """The state of a transfer: received legs, and units that are not unpacked yet."""
        return f"{self.releases}/.transfer-{self.release_id}"

    @property
    def removing(self) -> str:
        """A release that is being removed."""
        return f"{self.releases}/.removing-{self.release_id}"
