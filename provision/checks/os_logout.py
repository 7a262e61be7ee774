"""os.logout: what a user started goes on after logout.

``KillUserProcesses`` in logind.conf(5) and its drop-ins, of which the last file by name wins, one in /etc before one of
the same name in /run and in /usr/lib. Debian, Ubuntu and the Red Hat family are built with no as its default.
``KillExcludeUsers`` spares root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._host import unread
from provision.model import Finding

ID = "os.logout"
LEVEL = 0
TITLE = "what a user started goes on after logout"
PROBE = """\
while read -r key uid rest; do
    [ "$key" != Uid: ] || break
done </proc/self/status
echo "uid $uid"
for file in /usr/lib/systemd/logind.conf /etc/systemd/logind.conf \\
    /usr/lib/systemd/logind.conf.d/*.conf /run/systemd/logind.conf.d/*.conf /etc/systemd/logind.conf.d/*.conf; do
    [ -r "$file" ] || continue
    echo "file $file"
    while read -r line; do
        case $line in KillUserProcesses*) echo "$line" ;; esac
    done <"$file"
done
echo looked
"""
WHY = "A training started by hand in tmux or with nohup dies when its owner's last connection ends."

_YES = frozenset({"1", "yes", "y", "true", "t", "on"})  # systemd.syntax(7)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where logind kills a login's processes."""
    for name, answer in answers.items():
        if "looked" not in answer.lines:
            yield unread(ID, name, answer)
            continue
        values = _values(answer)
        where, value = values[-1] if values else ("", "no")
        if value.lower() not in _YES:
            yield ok(ID, name, "logind kills nothing" if _files(answer) else "no logind")
        elif "uid 0" in answer.lines:
            yield ok(ID, name, "logind kills users' processes, but none of root")
        else:
            fix = f"KillUserProcesses=no in {where}, then systemctl restart systemd-logind between two runs"
            yield warn(ID, name, f"KillUserProcesses={value} in {where}", expected="KillUserProcesses=no", fix=fix)


def _files(answer: Answer) -> list[str]:
    return [line.removeprefix("file ") for line in answer.lines if line.startswith("file ")]


def _values(answer: Answer) -> list[tuple[str, str]]:
    """Every setting with its file, in the order in which logind reads them."""
    found: dict[str, tuple[str, str]] = {}
    place = ""
    for line in answer.lines:
        if line.startswith("file "):
            place = line.removeprefix("file ")
        elif "=" in line:
            # A drop-in hides one of the same name in a place read before it; the main file comes before all drop-ins.
            found[place.rpartition("/")[2] if ".conf.d/" in place else ""] = (place, line.partition("=")[2].strip())
    return [found[key] for key in sorted(found)]
