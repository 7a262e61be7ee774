"""env.memory: the free memory is enough for the processes of a run.

A process for each GPU, or as many as the inventory says. torch with its CUDA context alone took 0.6 GiB (2.11, H200);
libraries, data loaders, pinned buffers and loading a checkpoint come on top. Both thresholds are this program's own
rules of thumb: optimizers that are offloaded to the CPU need far more.
"""

from provision.checks.kit import GIB, GPUS, MEMORY, Answers, Judgements, Plan, fail, human, kib, ok, pairs, unread, warn

TITLE = "the free memory is enough for the processes of a run"
PROBE = MEMORY + GPUS
LIMITS = {"process_gib": 8, "process_gib_least": 2}
WHY = "The kernel kills a rank for lack of memory (exit code -9) while all others wait for it."


def judge(seen: Plan, answers: Answers) -> Judgements:
    """Two thresholds for each process."""
    asked = {node.name: node.gpus for node in seen.nodes}
    for node, answer in answers.items():
        facts = pairs(answer)
        free = kib(facts.get("MemAvailable"))
        if free is None or not facts.get("gpus", "").isdecimal():
            yield node, unread(answer)
            continue
        processes = asked.get(node) or int(facts["gpus"]) or 1
        observed = f"{human(free)} free for {processes} process{'es' if processes > 1 else ''}"
        wanted = processes * seen.limits["process_gib"] * GIB
        fix = "end what holds the memory (ps -eo pid,user,rss,args --sort=-rss | head), or set gpus: to fewer"
        if free >= wanted:
            yield node, ok(observed)
        elif free >= processes * seen.limits["process_gib_least"] * GIB:
            yield node, warn(observed, expected=human(wanted), fix=fix)
        else:
            yield node, fail(observed, expected=human(wanted), fix=fix)
