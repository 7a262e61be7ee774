"""os.updates: nothing upgrades packages by itself.

On Debian and Ubuntu the timer ``apt-daily-upgrade.timer`` starts ``unattended-upgrade``, which acts where
``APT::Periodic::Unattended-Upgrade`` is set (apt.systemd.daily); on the rpm family a timer of ``dnf-automatic`` or
``yum-cron`` does. Whether they are enabled is read from the unit files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._host import pairs, unread
from provision.model import Finding

ID = "os.updates"
LEVEL = 0
TITLE = "nothing upgrades packages by itself"
TOOL = "systemctl"
PROBE = """\
systemctl list-unit-files --no-legend --no-pager apt-daily-upgrade.timer dnf-automatic.timer \\
    dnf-automatic-install.timer yum-cron.service 2>/dev/null
if command -v unattended-upgrade >/dev/null 2>&1; then
    echo "periodic $(apt-config dump --format '%v%n' APT::Periodic::Unattended-Upgrade 2>/dev/null)"
fi
echo looked
"""
WHY = "A driver that is upgraded under a job breaks NVML and every new process: 'Driver/library version mismatch'."

_RPM = ("dnf-automatic.timer", "dnf-automatic-install.timer", "yum-cron.service")
_APT = "apt-daily-upgrade.timer"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where such an upgrader is enabled, installed and switched on."""
    for name, answer in answers.items():
        told = pairs(answer)
        if "looked" not in told:
            yield unread(ID, name, answer)
            continue
        active = [unit for unit in _RPM if told.get(unit, "").startswith("enabled")]
        if told.get(_APT, "").startswith("enabled") and told.get("periodic", "") not in {"", "0"}:
            active.append(_APT)
        if active:
            fix = f"systemctl disable --now {' '.join(active)}; hold the driver: apt-mark hold 'nvidia-*' 'libnvidia-*'"
            yield warn(ID, name, f"{', '.join(active)} upgrades packages", expected="no upgrades unasked", fix=fix)
        else:
            yield ok(ID, name, "no upgrades unasked")
