"""Processes, agents and nodes that stop, crash or are killed, and the errors that follow from it."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

SUBJECT = "Processes, agents, nodes"
ORDER = 100

# The second alternative, like some below, is the text of earlier versions' agents.
_CRASHED = r"(?P<text>.*the agent (?:crashed|has failed, by a mistake).*)"
_LOST = (
    r"(?P<text>.*(?:(?:no heartbeat|not been heard) for"
    r"|agent (?:died without reporting|has ended without a word)).*)"
)

AGENT_FAILED = Cause(
    id="agent.failed",
    says="the agent of this node failed[: {text}]",
    fix=(
        "its agent.log has the traceback: report it as a bug of clusterctl",
        "clusterctl resume RUN starts new agents and resumes from the newest complete checkpoint",
    ),
    source="trainer/agent/supervisor/guard.py",
    events=(
        {"event": "end", "why": _CRASHED},
        {
            "event": "peer",
            "node": r"(?P<lost>.+)",
            "state": r"^failed$",
            "text": _CRASHED,
        },
    ),
    grade="ended",
)
NODE_SILENT = Cause(
    id="node.silent",
    says="the node was silent, but its machine was up all the time[: {text}]",
    fix=(
        "check its network: clusterctl check --level 1, and the link and the firewall at that time",
        "check its agent: clusterctl status, and agent.log in the run's logs on that node",
        "clusterctl resume RUN resumes from the newest complete checkpoint",
    ),
    source="trainer/agent/supervisor/control.py",
    events=({"event": "peer", "node": r"(?P<lost>.+)", "state": r"^lost$", "text": r"(?P<text>.*)"},),
    grade="ended",
)

# torch before version 2.2: a failed connection to the store is a plain RuntimeError.
_STORE = (
    r"^RuntimeError: (?P<message>Connection (?:reset by peer|refused)|Broken pipe|Socket Timeout|No route to host)$"
)

CAUSES = (
    Cause(
        id="rank.stopped",
        says="the rank was suspended (state T)[: {text}]",
        fix=(
            (
                "it received SIGSTOP (kill -STOP, Ctrl-Z, a debugger): kill -CONT PID continues it, if the others "
                "still wait"
            ),
            "clusterctl resume RUN resumes from the newest complete checkpoint",
        ),
        source="trainer/agent/hangs.py",
        events=({"event": "hang", "kind": r"^stopped$", "text": r"(?P<text>.*)"},),
        grade="ended",
    ),
    Cause(
        id="rank.dead",
        says="the rank's process exited[: {text}]",
        fix=(
            "look at the end of its log: clusterctl logs RUN --rank N",
            "if it has no error: dmesg -T on that node; the kernel kills processes when memory is full",
        ),
        source="trainer/agent/hangs.py",
        events=({"event": "hang", "kind": r"^dead$", "text": r"(?P<text>.*)"},),
        grade="ended",
    ),
    Cause(
        id="rank.hangs",
        says="the run stopped making progress[: {text}]",
        fix=(
            "the agent's events have the stacks of all ranks: look at the rank whose stack differs",
            (
                "ranks in a collective wait for a rank that did not call it: after an evaluation or a save, look for "
                "work that only rank 0 does"
            ),
            "if the work is slow on purpose: a longer hang limit (--hang-after), or none",
        ),
        source="trainer/agent/hangs.py",
        events=(
            {"event": "hang", "text": r"(?P<text>.*elsewhere than the others: rank (?P<odd>\d+).*)"},
            {"event": "hang", "text": r"(?P<text>.*)"},
        ),
        grade="late",
    ),
    AGENT_FAILED,
    Cause(
        id="agent.killed",
        says="the agent of this node was killed[: {text}]",
        fix=(
            "the guard has stopped the run's processes on this node; to continue: clusterctl resume RUN",
            (
                "it was killed by the kernel (dmesg -T | grep -i oom), by a user, or by logind: "
                "KillUserProcesses=yes kills a user's processes at logout"
            ),
        ),
        source="trainer/agent/supervisor/guard.py",
        events=(
            {
                "event": "end",
                "why": r"(?P<text>.*(?:agent|supervisor|guard) (?:was killed|has died|is gone|died(?! without)).*)",
            },
            {"event": "gone"},
        ),
        grade="ended",
    ),
    Cause(
        id="node.lost",
        says="the node is lost[: {text}]",
        fix=(
            "it lost power, crashed, or its network is down: look at its console, dmesg and last -x",
            "clusterctl check, then clusterctl resume RUN --exclude NODE, or on all nodes once it is back",
        ),
        source="trainer/agent/supervisor/control.py",
        events=(
            {"event": "peer", "node": r"(?P<lost>.+)", "state": r"^lost$", "text": r"(?P<text>.*)"},
            {
                "event": "end",
                "why": _LOST,
            },
        ),
        grade="ended",
    ),
    NODE_SILENT,  # behind node.lost: the machine's own uptime makes one of the other (signs.py)
    Cause(
        id="scheduler.stopped",
        says="the batch system stopped the job: {why}",
        fix=(
            "clusterctl resume RUN resumes from the newest complete checkpoint, in the next allocation",
            "a longer --time in the job's script, or checkpoints (save_steps) more often than the limit",
        ),
        source="https://github.com/facebookincubator/submitit/issues/1708",
        lines=(
            r"CANCELLED AT \S+ DUE TO (?P<why>[A-Z ]+[A-Z])",
            r"slurmstepd: error: \*\*\* (?:JOB|STEP) \S+ ON \S+ (?P<why>CANCELLED) AT",
        ),
    ),
    Cause(
        id="signal.hup",
        says="the terminal in which the run was started was closed (SIGHUP)",
        fix=("runs of clusterctl train survive a logout; by hand: nohup, tmux, systemd-run --user",),
        source="https://github.com/modelscope/ms-swift/issues/64",
        lines=(r"closing signal SIGHUP", r"got signal: (?:Signals\.SIGHUP|1)\b", r"Received Signals\.SIGHUP"),
    ),
    Cause(
        id="signal.int",
        says="the run was interrupted by Ctrl-C or SIGINT",
        fix=("clusterctl resume RUN resumes from the newest complete checkpoint",),
        source="recorded (torchrun, kill -INT)",
        lines=(r"^KeyboardInterrupt\b", r"closing signal SIGINT", r"got signal: (?:Signals\.SIGINT|2)\b"),
        grade="late",
    ),
    Cause(
        id="rank.killed",
        says="the process was killed with SIGKILL[ (pid {pid})]; no log says why",
        fix=(
            "usually the kernel killed it because the host's memory was full: dmesg -T | grep -i kill",
            "clusterctl run --root --limit {host} 'dmesg -T | grep -i kill'",
            "in that case: fewer preprocessing and data loader workers, no offloading to the cpu, or more nodes",
            "otherwise a user or a batch system did: clusterctl resume RUN resumes from the newest complete checkpoint",
        ),
        source="recorded (torchrun, kill -9 of a rank)",
        lines=(
            r"failed \(exitcode: -9\) local_rank: (?P<local_rank>\d+) \(pid: (?P<pid>\d+)\)",
            r"Signal 9 \(SIGKILL\) received by PID (?P<pid>\d+)",
            r"exits with return code = -9",
            r"died with <Signals\.SIGKILL: 9>",
            r"process \d+ terminated with signal SIGKILL",
        ),
        events=({"event": "end", "why": r"(?:command|rank \d+) was (?:killed|ended) by SIGKILL"},),
        grade="ended",
    ),
    Cause(
        id="rank.segfault",
        says="the process crashed in compiled code (SIGSEGV)",
        fix=(
            (
                "PYTHONFAULTHANDLER=1 (clusterctl train sets it) writes the stack into the rank's log: look at the "
                "topmost module"
            ),
            "incompatible versions (torch, flash-attn, tokenizers, pyarrow) crash like this on import",
        ),
        source="recorded (torchrun, kill -SEGV of a rank)",
        lines=(
            r"failed \(exitcode: -11\) local_rank: (?P<local_rank>\d+)",
            r"Fatal Python error: Segmentation fault",
            r"Signal 11 \(SIGSEGV\) received",
            r"exits with return code = -11",
            r"died with <Signals\.SIGSEGV: 11>",
            r"Caught signal 11 \(Segmentation fault",
        ),
        grade="ended",
        more=4,
    ),
    Cause(
        id="rank.fpe",
        says="the process divided by zero in compiled code (SIGFPE)",
        fix=(
            "on H20: nvidia-cublas-cu12 12.3.4.1 or later in the environment that you pack; earlier ones do this",
            "otherwise the stack in the rank's log names the library",
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/2750",
        lines=(
            r"failed \(exitcode: -8\) local_rank: (?P<local_rank>\d+)",
            r"Caught signal 8 \(Floating point exception",
            r"Signal 8 \(SIGFPE\) received",
            r"exits with return code = -8",
            r"died with <Signals\.SIGFPE: 8>",
            r"^Floating point exception \(core dumped\)",
        ),
        grade="ended",
        more=4,
    ),
    Cause(
        id="rank.aborted",
        says="the process aborted (SIGABRT)",
        fix=("the lines above it in the rank's log say why: clusterctl logs RUN --rank N",),
        source="https://github.com/InternLM/lmdeploy/issues/3258",
        lines=(
            r"failed \(exitcode: -6\) local_rank: (?P<local_rank>\d+)",
            r"Fatal Python error: Aborted",
            r"terminate called after throwing an instance of",
            r"Signal 6 \(SIGABRT\) received",
            r"exits with return code = -6",
            r"died with <Signals\.SIGABRT: 6>",
        ),
        grade="echo",
    ),
    Cause(
        id="gloo.closed",
        says="Gloo lost another rank",
        fix=("that rank, or its node, failed first: its log says why (clusterctl logs RUN)",),
        source="recorded (torch 2.13, kill -9 of a peer)",
        lines=(
            (
                r"gloo/transport/tcp/\S+\] (?:Read|Write|Connection|recv|Socket).*"
                r"(?:closed by peer|reset by peer|Broken pipe|Connection closed)"
            ),
            r"Connection closed by peer",
            r"\[c10d\].*(?:recvValue|sendBytes|recvVector|recv|send)\w* failed",
            r"ailed to recv, got 0 bytes",
            r"Failed to check the \"should dump\" flag on TCPStore",
            r"DistNetworkError: (?:Broken pipe|Connection reset by peer|failed to recv)",
            r"retr(?:ie|ei)ving ncclUniqueId from \[\d+\] .* got error",
        ),
        grade="echo",
    ),
    Cause(
        id="ranks.apart",
        says="a rank lost the others: {message}",
        fix=(
            "another rank failed or hangs: its log says why (clusterctl logs RUN)",
            "clusterctl check --level 1 tries every pair of nodes",
        ),
        source="https://docs.pytorch.org/docs/stable/distributed.html",
        lines=(r"Dist(?:Backend|Network|Store)Error: (?P<message>.+)", r"Rendezvous\w*Error: (?P<message>.+)", _STORE),
        grade="late",
    ),
    Cause(
        id="launcher.child",
        says="the launcher reports that one of its processes failed",
        fix=("the rank's log says why: clusterctl logs RUN --rank N",),
        source="recorded (torchrun 2.13)",
        lines=(
            r"ChildFailedError",
            r"failed \(exitcode: (?P<rc>-?\d+)\) local_rank: (?P<local_rank>\d+)",
            r"CalledProcessError: Command",
            r"\[launch\.py:\d+:sigkill_handler\]",
            r"exits with return code = -?\d+",
            r"Root Cause \(first observed failure\)",
            r"RendezvousClosedError",
            r"RendezvousGracefulExitError",
        ),
        grade="echo",
    ),
    Cause(
        id="signal.term",
        says="stopped with SIGTERM, because another process failed or the run was stopped",
        fix=("another rank failed first, or a user stopped the run: clusterctl logs RUN",),
        source="recorded (torchrun)",
        lines=(
            r"closing signal SIGTERM",
            r"got signal: (?:Signals\.SIGTERM|15)\b",
            r"Signal 15 \(SIGTERM\) received",
            r"Received \d+ death signal",
            r"exits with return code = -15",
        ),
        events=({"event": "exit", "signal": r"^SIG(?:TERM|KILL)$"}, {"event": "peer", "state": r"^failed$"}),
        grade="echo",
    ),
    Cause(
        id="python.exception",
        says="{type}[: {message}]",
        fix=(
            (
                "this exception has no row in the table of causes; its traceback names the file and the line "
                "(clusterctl logs RUN --rank N)"
            ),
        ),
        source="recorded (Python)",
        lines=(
            r"^(?P<type>(?:\w+\.)*\w*(?:Error|Exception|Timeout|Interrupt|Mismatch\w*|Failure)): (?P<message>.+)",
            r"^(?P<type>(?:\w+\.)*(?:\w+Error|\w+Exception))$",
        ),
        grade="unknown",
    ),  # last: any other row that matches the line explains it better
)
