"""clock.daemon: Whether exactly one program sets the clock.

Found by the names of processes, which needs neither systemd nor root; comm holds 15 characters of a name (proc(5)).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, unknown, warn
from provision.model import Finding

ID = "clock.daemon"
LEVEL = 0
TITLE = "one program sets the clock"
WHY = "Two that set the clock pull it to and fro; with none it drifts by seconds a day."
PROBE = """\
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


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN for none or several. ptp4l sets a network card's clock and phc2sys the system's after it: they are one."""
    for name, answer in answers.items():
        running = dict.fromkeys(line.split()[1] for line in answer.lines if line.startswith("daemon "))
        found = [_NAMES.get(each, each) for each in running if each != "ptp4l"]
        if len(found) > 1:
            extra = [each for each in found if each != "chronyd"] or found[1:]
            fix = f"systemctl disable --now {' '.join(extra)}"
            yield warn(ID, name, f"{' and '.join(found)} both run", expected=TITLE, fix=fix)
        elif found:
            yield ok(ID, name, f"{found[0]} runs")
        elif "all seen" not in answer.lines:
            yield unknown(ID, name, "other users' processes are hidden (hidepid)")
        else:
            fix = "services: chrony: {} in the inventory, or systemctl enable --now chrony"
            yield warn(ID, name, "no program sets the clock", expected=TITLE, fix=fix)
