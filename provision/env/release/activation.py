"""``conda activate NAME`` on a node where conda, mamba or micromamba is installed.

Conda looks for a name in ``~/.conda/envs`` (and in its own ``envs`` folder, which may be another user's); mamba and
micromamba look in theirs. A symlink there leads to the inventory's prefix, which leads to the current release: the name
stays right after every deploy and rollback. The prefix is also listed in ``~/.conda/environments.txt``, as conda itself
lists what it creates. Source: conda 26.7, ``base/context.py`` (``envs_dirs``) and ``core/envs_manager.py``; mamba 2,
``libmamba/src/api/configuration.cpp`` (``envs_dirs_hook``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from provision.model import Inventory, Step
from provision.render import render

if TYPE_CHECKING:
    from provision.env.bundle.manifest import Manifest

# Where installers put conda when nobody says otherwise; ssh's own PATH does not lead there.
_KINDS = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "miniconda", "anaconda", "conda")
_TOPS = ("/opt", "/usr/local")
_MAMBAS = ("micromamba", ".local/share/mamba", "miniforge3", "mambaforge")  # in the home

_NAME = re.compile(r"[^/\s:#]+\Z")  # conda refuses these in a name


def steps(inventory: Inventory, manifest: Manifest) -> tuple[Step, ...]:
    """The step that makes the environment known by its name; it changes nothing where no conda is, and never fails."""
    name = manifest.name
    if not _NAME.match(name) or name in (".", "..", "base", "root"):
        return ()
    values = {
        "prefix": str(inventory.prefix),
        "name": name,
        "tops": [f"{top}/{kind}" for top in _TOPS for kind in _KINDS],
        "kinds": list(_KINDS),
        "mambas": list(_MAMBAS),
    }
    return (
        Step(
            "conda name",
            render("release/conda_name.sh.j2", change=True, **values),
            unless=render("release/conda_name.sh.j2", change=False, **values),
        ),
    )
