"""The steps that make what has arrived a release, and the release the current one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from provision.env.bundle.manifest import Manifest
from provision.env.release import lists
from provision.env.release.derive import Recipe
from provision.env.release.places import Places
from provision.env.relocation.relocate import Relocated
from provision.model import Step
from provision.render import render

COMPILED = ".clusterctl/files/compiled"  # the list of what the node compiled itself

# Importing these and starting these is the proof that a release works; only those that were packed are tried.
MODULES = ("torch", "deepspeed", "llamafactory")
COMMANDS = (("torchrun", "--help"), ("deepspeed", "--help"), ("llamafactory-cli", "help"))


def gather(places: Places, *, repair: bool = False, base: str = "") -> str:
    """The script that begins a release and takes what it shares with others; its input is ``wanted``.

    Args:
        places: of the release.
        repair: a release that is there already is only a source of files that are as they should be.
        base: the release from whose files the recipe makes new ones; empty for none.
    """
    return render(
        "release/gather.sh.j2",
        releases=places.releases,
        id=places.release_id,
        replace="yes" if repair else "no",
        base=base,
    )


def wanted(keys: Iterable[str], recipe: Recipe) -> bytes:
    """The input of ``gather``: keys, the list of what the recipe makes, and its words, each ended by a line ``.``."""
    listed = lists.lines(recipe.entries)
    return b"".join((*(key.encode() + b"\n" for key in keys), b".\n", listed, b".\n", recipe.script))


def activate(
    places: Places, manifest: Manifest, relocated: Relocated, *, repair: bool = False, naming: Sequence[Step] = ()
) -> tuple[Step, ...]:
    """From everything that has arrived to the current release. Killed between any two steps, a rerun goes on there.

    Args:
        places: of the release.
        manifest: of the bundle.
        relocated: its files as they must be there.
        repair: a release that is there already is replaced.
        naming: steps that make the prefix known, before it leads to this release.
    """
    release = places.release
    marked = render("release/exists.sh.j2", path=places.mark)
    there = render("release/exists.sh.j2", path=places.incoming if repair else release)
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
            unless=render("release/exists.sh.j2", path=f"{release}/{COMPILED}"),
        ),
    )
    return (
        Step(
            "complete",
            render(
                "release/complete.sh.j2",
                incoming=places.incoming,
                release=release,
                removing=places.removing,
            ),
            unless=f"! {there}" if repair else there,
        ),
        *(compiling if lacking else ()),
        Step("seal", render("release/seal.sh.j2", release=release), unless=marked),
        Step(
            "smoke test",
            render("release/smoke.sh.j2", release=release, program=program, commands=commands),
            unless=marked,
        ),
        Step("mark", render("release/mark.sh.j2", release=release), unless=marked),
        *naming,
        switch(places),
        discard("tidy", [places.transfer, places.removing, places.incoming]),
    )


def switch(places: Places) -> Step:
    """Make a release the current one, in one rename."""
    return Step(
        "switch",
        render(
            "release/switch.sh.j2",
            root=str(places.root),
            link=places.link.name,
            target=places.target,
            id=places.release_id,
        ),
        unless=render("release/is_link.sh.j2", link=str(places.link), target=places.target),
    )


def discard(name: str, paths: Sequence[str]) -> Step:
    """Remove folders of ours that are no release."""
    return Step(
        name,
        render("release/tidy.sh.j2", paths=paths),
        unless=render("release/none.sh.j2", paths=paths),
    )


def remove(places: Places) -> Step:
    """Remove a release."""
    return Step(
        "remove",
        render("release/remove.sh.j2", release=places.release, removing=places.removing),
    )
