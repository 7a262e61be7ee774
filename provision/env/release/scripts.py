"""The steps that turn received files into a release, and make it the current one. Pure.

``conda activate NAME`` works on nodes with conda, mamba or micromamba. Conda looks for a name in ``~/.conda/envs`` (and
in its own ``envs`` folder, which may be another user's); mamba and micromamba look in theirs. A symlink there leads to
the inventory's prefix, which leads to the current release: the name stays right after every deploy and rollback. The
prefix is also listed in ``~/.conda/environments.txt``, like environments that conda creates. Source: conda 26.7,
``base/context.py`` (``envs_dirs``) and ``core/envs_manager.py``; mamba 2, ``libmamba/src/api/configuration.cpp``
(``envs_dirs_hook``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from provision.env.bundle.manifest import Manifest
from provision.env.release import payload
from provision.env.release.catalog import ReleasePaths
from provision.env.release.payload import Recipe
from provision.env.relocation.relocate import Relocated
from provision.model import Inventory, Step
from provision.render import quote, render, words

COMPILED = ".clusterctl/files/compiled"  # the list of files that the node compiled

# A release works if these can be imported and started; only packed ones are tried.
MODULES = ("torch", "deepspeed", "llamafactory")
COMMANDS = (("torchrun", "--help"), ("deepspeed", "--help"), ("llamafactory-cli", "help"))

# Where installers put conda by default; these folders are not in the PATH of ssh commands.
_KINDS = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "miniconda", "anaconda", "conda")
_TOPS = ("/opt", "/usr/local")
_MAMBAS = ("micromamba", ".local/share/mamba", "miniforge3", "mambaforge")  # in the home

_NAME = re.compile(r"[^/\s:#]+\Z")  # conda rejects these in a name


def gather_script(paths: ReleasePaths, *, repair: bool = False, base: str = "") -> str:
    """The script that creates a release's folder and links files from other releases; its input is ``wanted``.

    Args:
        paths: of the release.
        repair: replace an existing release, and only use its intact files.
        base: the release whose files the recipe changes into new ones; empty for none.
    """
    return render(
        "release/gather.sh.j2",
        releases=paths.releases,
        id=paths.release_id,
        replace="yes" if repair else "no",
        base=base,
    )


def gather_input(keys: Iterable[str], recipe: Recipe) -> bytes:
    """The input of ``gather``: keys, the files of the recipe, and its words, each ended by a line ``.``."""
    listed = payload.checksum_lines(recipe.entries)
    return b"".join((*(key.encode() + b"\n" for key in keys), b".\n", listed, b".\n", recipe.script))


def activate_steps(
    paths: ReleasePaths, manifest: Manifest, relocated: Relocated, *, repair: bool = False, naming: Sequence[Step] = ()
) -> tuple[Step, ...]:
    """The steps from received files to the current release. After a kill between two steps, a rerun continues there.

    Args:
        paths: of the release.
        manifest: of the bundle.
        relocated: its rewritten files.
        repair: replace an existing release.
        naming: steps that register the prefix, before it leads to this release.
    """
    release = paths.release
    marked = f"[ -e {quote(paths.mark)} ]"
    there = f"[ -e {quote(paths.incoming if repair else release)} ]"
    lacking = sorted(relocated.uncompiled)
    packed = {entry.path for entry in manifest.files}
    program = "import " + ", ".join(["sys", *(m for m in MODULES if manifest.versions.get(m))])
    commands = [argv for argv in COMMANDS if f"bin/{argv[0]}" in packed]
    compiling = (
        Step(
            "compile",
            render(
                "release/compile.sh.j2",
                release=release,
                sources=lacking,
                compiled=[relocated.uncompiled[path] for path in lacking],
                list=COMPILED,
            ),
            unless=f"[ -e {quote(release)}/{COMPILED} ]",
        ),
    )
    return (
        Step(
            "complete",
            render(
                "release/complete.sh.j2",
                incoming=paths.incoming,
                release=release,
                removing=paths.removing,
            ),
            unless=f"! {there}" if repair else there,
        ),
        *(compiling if lacking else ()),
        Step("seal", f"chmod -R a-w -- {quote(release)}", unless=marked),
        Step(
            "smoke test",
            render("release/smoke.sh.j2", release=release, program=program, commands=commands),
            unless=marked,
        ),
        Step("mark", f": >{quote(paths.mark)}", unless=marked),
        *naming,
        switch_step(paths),
        discard_step("tidy", [paths.transfer, paths.removing, paths.incoming]),
    )


def switch_step(paths: ReleasePaths) -> Step:
    """Make a release the current one with one rename."""
    return Step(
        "switch",
        render(
            "release/switch.sh.j2",
            root=str(paths.root),
            link=paths.link.name,
            target=paths.target,
            id=paths.release_id,
        ),
        unless=f't=$(readlink -- {quote(paths.link)}) && [ "$t" = {quote(paths.target)} ]',
    )


def discard_step(name: str, paths: Sequence[str]) -> Step:
    """Remove clusterctl's folders that are not releases."""
    return Step(
        name,
        render("release/discard.sh.j2") + f"discard {words(paths)}",
        unless=f'for path in {words(paths)}; do [ ! -e "$path" ] || exit 1; done',
    )


def remove_step(paths: ReleasePaths) -> Step:
    """Remove a release."""
    return Step(
        "remove",
        render("release/remove.sh.j2", release=paths.release, removing=paths.removing),
    )


def conda_name_steps(inventory: Inventory, manifest: Manifest) -> tuple[Step, ...]:
    """The step that registers the environment's name. Without conda it changes nothing, and it never fails."""
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
