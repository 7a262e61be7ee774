"""Clocks: the simple checks."""

from provision.checks.kit import Answer, Judgement, each_node, ok, unknown, warn

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
