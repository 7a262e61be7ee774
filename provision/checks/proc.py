"""Processes: the checks."""

from provision.checks.kit import Answer, Judgement, each_node, fail, many, ok, unread

# grep names the files first, so that only the few that matter are read again. A run's id has no character that sh or a
# pattern would take for its own; the brackets keep grep from finding itself.
_ORPHANS_PROBE = """\
grep -ls 'CLUSTERCTL_RUN=' /proc/[0-9]*/environ | while read -r file; do
    pid=${file#/proc/}
    pid=${pid%/environ}
    run=$(tr '\\0' '\\n' <"$file" 2>/dev/null | sed -n 's/^CLUSTERCTL_RUN=//p')
    [ -n "$run" ] || continue
    if grep -qs "runs/$run/[a]gent" /proc/[0-9]*/cmdline; then
        echo "owned $pid $run"
    else
        echo "orphan $pid $run $(tr '\\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)"
    fi
done
echo looked
"""


@each_node(
    "proc.orphans",
    "no process of an earlier run is left",
    probe=_ORPHANS_PROBE,
    root=True,
    why=(
        "A worker that outlived its run holds GPU memory and the rendezvous port: the next run fails or waits for ever."
    ),
)
def orphans(answer: Answer) -> Judgement:
    """FAIL with the processes and their run.

    Every process of a run carries ``CLUSTERCTL_RUN=<id>`` in its environment; its agent, which does not, has
    ``runs/<id>/agent`` in its arguments. Processes of other users are seen by root only.
    """
    if "looked" not in answer.lines:
        return unread(answer)
    lines = [line.split(None, 3) for line in answer.lines if line.startswith(("owned ", "orphan "))]
    orphans = [line for line in lines if line[0] == "orphan" and len(line) > 2]
    owned = {line[2] for line in lines if line[0] == "owned" and len(line) > 2}
    if orphans:
        runs = ", ".join(sorted({line[2] for line in orphans}))
        first = f" ({orphans[0][3][:80]})" if len(orphans[0]) > 3 else ""
        observed = f"{many(len(orphans), 'process', 'processes')} of {runs} without an agent{first}"
        fix = f"kill {' '.join(line[1] for line in orphans[:20])}"
        return fail(observed, expected="none", fix=fix)
    return ok(f"{', '.join(sorted(owned))} is running" if owned else "none")
