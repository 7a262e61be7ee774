"""os.sudo: the login may become root where services are to be set up.

``sudo -n`` never asks (sudo(8)); its messages are those of sudo 1.8 and 1.9 in the locale C. Whether a password would
be accepted is known only when it is given: clusterctl asks once for all nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._host import unread
from provision.model import Finding

ID = "os.sudo"
LEVEL = 0
TITLE = "the login may become root where services are to be set up"
PROBE = """\
while read -r key uid rest; do
    [ "$key" != Uid: ] || break
done </proc/self/status
if [ "$uid" = 0 ]; then
    echo root
elif ! command -v sudo >/dev/null 2>&1; then
    echo absent
elif said=$(sudo -n true 2>&1); then
    echo passwordless
else
    echo "refused $said"
fi
"""
WHY = "`clusterctl deploy` cannot set up the services that the inventory names; the environment itself needs no root."

_TTY = "must have a tty"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL where services are named and root is out of reach."""
    for name, answer in answers.items():
        said = answer.lines[0] if answer.lines else ""
        told = answer.out.lower()
        if said == "root":
            yield ok(ID, name, "logs in as root")
        elif said == "passwordless":
            yield ok(ID, name, "sudo without a password")
        elif "password is required" in told:
            yield ok(ID, name, "sudo asks for a password")
        elif said != "absent" and not said.startswith("refused "):
            yield unread(ID, name, answer)
        elif not seen.inventory.services:
            yield ok(ID, name, "no sudo, and no service needs it")
        else:
            fix = f"as root on {name}: a file in /etc/sudoers.d with the line `USER ALL=(ALL) NOPASSWD: ALL`"
            if said == "absent":
                fix = f"install sudo on {name}, or log in as root (`user: root`)"
            elif _TTY in told:
                fix = f"as root on {name}: a file in /etc/sudoers.d with the line `Defaults !requiretty`"
            observed = "sudo is not installed" if said == "absent" else said.removeprefix("refused ")[:160]
            yield fail(ID, name, observed, expected="root by sudo or by login", fix=fix)
