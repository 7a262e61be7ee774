"""os.logout: processes of a user survive logout.

``KillUserProcesses`` in logind.conf(5) and its drop-ins, of which the last file by name wins, one in /etc before one of
the same name in /run and in /usr/lib. Debian, Ubuntu and the Red Hat family are built with no as its default.
``KillExcludeUsers`` spares root.
"""

from provision.checks.kit import Answer, Judgement, ok, unread, warn

TITLE = "processes of a user survive logout"
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


def judge(answer: Answer) -> Judgement:
    """WARN where logind kills a login's processes."""
    if "looked" not in answer.lines:
        return unread(answer)
    values = _values(answer)
    where, value = values[-1] if values else ("", "no")
    if value.lower() not in _YES:
        return ok("logind kills nothing" if _files(answer) else "no logind")
    if "uid 0" in answer.lines:
        return ok("logind kills users' processes, but none of root")
    fix = f"KillUserProcesses=no in {where}, then systemctl restart systemd-logind between two runs"
    return warn(f"KillUserProcesses={value} in {where}", expected="KillUserProcesses=no", fix=fix)


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
