"""Redeploying: one small package changed, and an environment built again from the same packages."""

from bench_bundle import changed, chunks
from bench_cluster import Deploy
from bench_context import Context
from bench_measure import BenchError, progress
from bench_table import Measured, Missing, Outcome, quantity

BASE, CHANGED, REBUILT = "base", "changed", "rebuilt"


def redeploying(context: Context) -> dict[str, Outcome]:
    """``changed`` and ``rebuilt``: bytes that leave the controller for one node that has the first release."""
    env = context.env
    base = context.bundle(env)
    with progress("redeploy: a module of a small package changes"):
        place = env.patch(context.work / "patched")
    bundles = {CHANGED: context.pack(env, place, CHANGED)}
    why = ""
    try:
        with progress("redeploy: the environment is built again from the same packages"):
            place = env.rebuild(context.work / "rebuilt")
        bundles[REBUILT] = context.pack(env, place, REBUILT)
    except BenchError as error:
        why = str(error)

    deploys: dict[str, Deploy] = {}
    with context.cluster("redeploy", 1) as cluster:
        for name, bundle in {BASE: base, **bundles}.items():
            with progress(f"redeploy: {name}") as report:
                deploys[name] = deploy = cluster.deploy(bundle, "llm")
                report(f"{deploy.usage.wall:.1f} s, {quantity(deploy.sent, 'bytes')} sent")
    raw = {name: {"sent": each.sent, "usage": each.usage.wall, "answer": each.answer} for name, each in deploys.items()}

    new = changed(base, bundles[CHANGED])
    packages = ", ".join(sorted({chunk.package for chunk in new}))
    found: dict[str, Outcome] = {
        CHANGED: Measured(
            deploys[CHANGED].sent,
            sum(chunk.compressed for chunk in new),
            f"{_words(deploys[CHANGED])}; {len(new)} of {len(chunks(base))} chunks changed: {packages}",
            raw,
        ),
        REBUILT: Missing(why),
    }
    if REBUILT in bundles:
        different = changed(base, bundles[REBUILT])
        digests = {chunk.digest for chunk in chunks(base).values()}
        newer = sum(chunk.digest not in digests for chunk in chunks(bundles[REBUILT]).values())
        count = f"of {len(chunks(base))} chunks {newer} have new times, {len(different)} differ in more"
        found[REBUILT] = Measured(
            deploys[REBUILT].sent, deploys[BASE].sent, f"{_words(deploys[REBUILT])}; {count}", raw
        )
    return found


def _words(deploy: Deploy) -> str:
    return (
        f"one node with zstd; counted on the controller's cable, deploy says {quantity(deploy.bytes_sent, 'bytes')}, "
        f"in {deploy.usage.wall:.1f} s"
    )
