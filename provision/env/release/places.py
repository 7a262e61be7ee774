"""Where things of one release lie on a node; docs/releases.md, "On a node", has the whole picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from provision.model import Inventory


@dataclass(frozen=True)
class Places:
    """The paths of one release, as text for scripts."""

    root: PurePosixPath
    link: PurePosixPath
    release_id: str

    @classmethod
    def of(cls, inventory: Inventory, release_id: str) -> Places:
        """The paths of a release under an inventory's root."""
        return cls(inventory.root, inventory.prefix, release_id)

    @property
    def releases(self) -> str:
        """The folder of all releases."""
        return f"{self.root}/releases"

    @property
    def release(self) -> str:
        """The environment's real prefix; everything relocated names this path."""
        return f"{self.releases}/{self.release_id}"

    @property
    def target(self) -> str:
        """What the inventory's prefix, a symlink, holds when this release is the current one."""
        return f"releases/{self.release_id}"

    @property
    def mark(self) -> str:
        """Exists when the release is whole and has passed its smoke test."""
        return f"{self.release}.ok"

    @property
    def incoming(self) -> str:
        """The release while it is unpacked."""
        return f"{self.releases}/.incoming-{self.release_id}"

    @property
    def transfer(self) -> str:
        """What a transfer keeps: which legs are there, units that were not unpacked yet."""
        return f"{self.releases}/.transfer-{self.release_id}"

    @property
    def removing(self) -> str:
        """A release that is on its way out; it is no release any more."""
        return f"{self.releases}/.removing-{self.release_id}"
