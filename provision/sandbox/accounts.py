"""Who may log in to a node: root, and the ordinary user ``trainer``. Pure functions over the texts of ``/etc``."""

from __future__ import annotations

from dataclasses import dataclass

TRAINER = "trainer"
_TRAINER_ID = 1000
_LAST_ID = 60000  # UID_MAX of login.defs(5)
# No password fits "*", and unlike "!" it does not lock the account: sshd without PAM refuses locked ones even by key.
_NO_PASSWORD = "*"  # noqa: S105 - it is the opposite


@dataclass(frozen=True)
class Accounts:
    """The texts of ``/etc/passwd``, ``/etc/group`` and ``/etc/shadow``, and who ``trainer`` is."""

    passwd: str
    group: str
    shadow: str
    trainer_id: int = _TRAINER_ID
    trainer_home: str = f"/home/{TRAINER}"


def with_trainer(before: Accounts, password_hash: str | None) -> Accounts:
    """Adds ``trainer`` (uid and gid 1000, or the next free number) and gives root and trainer their password.

    Args:
        before: the accounts of the root that the node is made from.
        password_hash: a crypt(5) hash; None for key logins only.
    """
    users = _entries(before.passwd, TRAINER)
    groups = _entries(before.group, TRAINER)
    used = {entry[2] for entry in (*users, *groups)}
    number = next(n for n in range(_TRAINER_ID, _LAST_ID) if str(n) not in used)
    users.append([TRAINER, "x", str(number), str(number), "", before.trainer_home, "/bin/bash"])
    groups.append([TRAINER, "x", str(number), ""])
    secret = password_hash or _NO_PASSWORD
    shadow = [
        [entry[0], secret, *entry[2:]] if entry[0] == "root" else entry for entry in _entries(before.shadow, TRAINER)
    ]
    shadow.append([TRAINER, secret, "20000", "0", "99999", "7", "", "", ""])
    return Accounts(_text(users), _text(groups), _text(shadow), number, before.trainer_home)


def _entries(text: str, without: str) -> list[list[str]]:
    return [line.split(":") for line in text.splitlines() if line and line.partition(":")[0] != without]


def _text(entries: list[list[str]]) -> str:
    return "".join(":".join(entry) + "\n" for entry in entries)
