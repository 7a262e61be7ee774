"""Clocks: the checks of single nodes, and of their time servers."""

import re
from collections.abc import Mapping

from provision.checks.kit import Answer, Answers, Judgement, Judgements, Plan, each_node, fail, ok, unknown, warn
from provision.checks.kit.measures import span
from provision.render import words

_DAEMON_PROBE = """\
for cc_path in /proc/[0-9]*/comm; do
  { IFS= read -r cc_name <"$cc_path"; } 2>/dev/null || continue
  case $cc_name in
    chronyd | ntpd | openntpd | systemd-timesyn | phc2sys | ptp4l) echo "daemon $cc_name" ;;
  esac
done
# Where others' processes are hidden (mount option hidepid), none that is seen means nothing.
if { IFS= read -r cc_name </proc/1/comm; } 2>/dev/null; then echo "all seen"; else echo "hidden"; fi
"""
_NAMES = {"systemd-timesyn": "systemd-timesyncd"}


@each_node(
    "clock.daemon",
    "one program sets the clock",
    probe=_DAEMON_PROBE,
    why="Two that set the clock pull it to and fro; with none it drifts by seconds a day.",
)
def daemon(answer: Answer) -> Judgement:
    """WARN for none or several. ptp4l sets a network card's clock and phc2sys the system's after it: they are one.

    Found by the names of processes, which needs neither systemd nor root; comm holds 15 characters of a name (proc(5)).
    """
    running = dict.fromkeys(line.split()[1] for line in answer.lines if line.startswith("daemon "))
    found = [_NAMES.get(each, each) for each in running if each != "ptp4l"]
    if len(found) > 1:
        extra = [each for each in found if each != "chronyd"] or found[1:]
        fix = f"systemctl disable --now {' '.join(extra)}"
        return warn(f"{' and '.join(found)} both run", fix=fix)
    if found:
        return ok(f"{found[0]} runs")
    if "all seen" not in answer.lines:
        return unknown("other users' processes are hidden (hidepid)")
    fix = "services: chrony: {} in the inventory, or systemctl enable --now chrony"
    return warn("no program sets the clock", fix=fix)


_SLOW = {"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"}


@each_node(
    "clock.source",
    "the kernel's clock is the processor's counter",
    probe="cd /sys/devices/system/clocksource/clocksource0 && cat current_clocksource available_clocksource",
    why=(
        "Profilers, NCCL and the kernel read the clock all the time: hpet and acpi_pm cost a call into slow hardware "
        "each."
    ),
)
def source(answer: Answer) -> Judgement:
    """WARN for a slow clock.

    /sys/devices/system/clocksource/clocksource0: the kernel falls back to hpet or acpi_pm when it finds the processors'
    own counters (tsc) to disagree; reading those takes a microsecond or more (kernel, timekeeping.rst).
    """
    if len(answer.lines) != 2:
        return unknown("the kernel does not name its clock")
    current, available = answer.lines
    if current in _SLOW:
        observed = f"{current} (available: {available})"
        fix = "dmesg | grep -i tsc says why; update the BIOS, or boot with tsc=reliable where it is known to be"
        return warn(observed, expected="tsc, or that of the hypervisor", fix=fix)
    return ok(current)


@each_node(
    "clock.sync",
    "chrony follows a clock",
    probe="chronyc -c -n tracking 2>&1",
    tool="chronyc",
    limits={"offset_ms": 10, "stratum": 14},  # 15 is as far as NTP counts; orphans of a site begin at 10
    why="A clock without a source drifts by seconds a day, differently on each node.",
)
def sync(plan: Plan, answer: Answer) -> Judgement:
    """FAIL without a source, WARN for a large offset; UNKNOWN where no chronyd answers.

    ``chronyc -c -n tracking``: one line of comma-separated fields, of which the third is the stratum, the fifth the
    offset in seconds and the last the leap status (chronyc(1); the order is that of ``process_cmd_tracking`` in its
    client.c).
    """
    fix = "chronyc -n sources; services: chrony: {} in the inventory sets it up"
    fields = answer.out.strip().split(",")
    if len(fields) != 14 or not fields[2].isdecimal() or not re.fullmatch(r"-?\d+\.\d+", fields[4]):
        observed = answer.out.strip() or answer.err or "no answer"
        return unknown(f"chronyc: {observed[:120]}", fix="systemctl enable --now chrony")
    stratum, offset, leap = int(fields[2]), float(fields[4]), fields[13]
    if leap == "Not synchronised":
        return fail("not synchronised", fix=fix)
    if stratum > plan.limits["stratum"]:
        return warn(f"stratum {stratum}", expected=f"at most {plan.limits['stratum']:g}", fix=fix)
    if abs(offset) * 1e3 > plan.limits["offset_ms"]:
        fix = "wait until chrony has caught up, or before a training: chronyc makestep"
        observed = f"{span(offset)} off {fields[1] or 'its clock'}"
        return warn(observed, expected=f"below {plan.limits['offset_ms']:g} ms", fix=fix)
    return ok(f"stratum {stratum}, {span(abs(offset))} off")


def _future_probe(plan: Plan) -> str:
    """The times of folders that are written to all the time, then the clock."""
    root = plan.inventory.root
    places = words(("/var/log", "/var/lib", "/run", "/etc", "/root", root, root / "releases", root / "runs"))
    return f'stat -c "%Y %n" -- {places} 2>/dev/null; echo "now $(date +%s)"'


def _age(seconds: int) -> str:
    units = ((86400, "d"), (3600, "h"), (60, "min"))
    return next((f"{seconds // size} {unit}" for size, unit in units if seconds >= 2 * size), f"{seconds} s")


@each_node(
    "clock.future",
    "no file of the node is from the future",
    probe=_future_probe,
    limits={"future_s": 60},
    why="The clock was set back or lost its battery: make, Python and logs take what is old for new.",
)
def future(node: str, answer: Answer, limits: Mapping[str, float]) -> Judgement:
    """WARN where a folder is more than ``future_s`` younger than now.

    A clock that was set back, or restarts at every boot (an empty battery), is earlier than the files of yesterday.
    """
    now = re.search(r"^now (\d+)$", answer.out, re.MULTILINE)
    times = [(int(match[1]), match[2]) for match in re.finditer(r"^(\d+) (/.*)$", answer.out, re.MULTILINE)]
    if not now or not times:
        return unknown(f"neither clock nor files can be read: {answer.err or 'no answer'}")
    latest, place = max(times)
    ahead = latest - int(now[1])
    if ahead > limits["future_s"]:
        observed = f"{place} was written {_age(ahead)} later than the node's clock is now"
        fix = f"date on {node}; set it (chronyc makestep), and hwclock --systohc"
        return warn(observed, fix=fix)
    return ok(f"the latest of {len(times)} folders is {_age(-ahead) if ahead < 0 else '0 s'} old")


_OWN_CLOCK = "7F7F0101"
_STATES = {"x": "disagrees with the others", "?": "does not answer", "~": "is too variable"}


def _read_sources(answer: Answer) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """The reference, and state and address of every source."""
    tracking, mark, listed = answer.out.partition("sources\n")
    fields = tracking.strip().split(",")
    if not mark or len(fields) != 14:
        return None
    rows = [line.split(",") for line in listed.splitlines()]
    return fields[0], tuple((row[1], row[2]) for row in rows if len(row) >= 10)


@each_node(
    "clock.sources",
    "chrony's servers answer, and all nodes follow the same clock",
    probe="chronyc -c -n tracking 2>&1; echo sources; chronyc -c -n sources 2>&1",
    tool="chronyc",
    why="Nodes that follow different clocks, or their own, drift apart although each calls itself synchronised.",
)
def sources(answers: Answers) -> Judgements:
    """WARN where no server is followed; of several nodes that follow their own clock only one may.

    ``chronyc -c -n sources``: a line for each, of which the second field is its state (``*`` followed, ``+`` combined,
    ``-`` not combined, ``?`` unreachable, ``x`` false, ``~`` too variable) and the third its address (chronyc(1)).
    A chronyd that follows its own clock has the reference 7F7F0101.
    """
    read = {name: _read_sources(answer) for name, answer in answers.items()}
    own = [name for name, found in read.items() if found and found[0] == _OWN_CLOCK]
    fix = (
        "services: chrony: {} in the inventory makes the first node the clock; or chronyc -n sources, and UDP port 123"
    )
    for name, found in read.items():
        if found is None:
            observed = next(iter(answers[name].lines), answers[name].err) or "no answer"
            yield name, unknown(f"chronyc: {observed[:120]}", fix="systemctl enable --now chrony")
            continue
        reference, sources = found
        followed = [address for state, address in sources if state == "*"]
        bad = [f"{address} {_STATES[state]}" for state, address in sources if state in _STATES]
        if followed:
            yield name, ok(f"follows {followed[0]}" + (f"; {', '.join(bad)}" if bad else ""))
        elif reference == _OWN_CLOCK and own[0] == name:
            yield name, ok("serves its own clock")
        elif reference == _OWN_CLOCK:
            observed = f"follows its own clock, as {own[0]} does" + (f": {', '.join(bad)}" if bad else "")
            yield name, warn(observed, fix=fix)
        else:
            observed = ", ".join(bad) or ("no server is followed yet" if sources else "has no server")
            yield name, warn(observed, fix=fix)
