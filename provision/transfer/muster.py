"""What is asked of the nodes before a stream begins: what they have, and which ways lead from one to another."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.render import render
from provision.ssh.fanout import fan_out
from provision.ssh.wire import RemoteError, reading
from provision.transfer import survey
from provision.transfer.chains import Place, form, ways
from provision.transfer.keys import PATIENCE, RelayKey, left, options, place_of, speakable
from provision.transfer.units import DIGESTS, Digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from provision.model import Inventory, Node, Result
    from provision.ssh.remote import Connections
    from provision.transfer.members import Member

AHEAD = 64  # units that may wait on a node for its unpacker
SPARE = 16  # units that may wait on a node for the one behind it, and would have to be sent again if it died
ABREAST = 4  # legs that a node unpacks at the same time at most
SETTLE = 128 << 20  # bytes after which what was unpacked is written to disk, so that a reboot does not lose it
_ROUNDS = 3  # of trying ways between nodes, since a shut one changes who follows whom
_PING = 15.0  # seconds; a command's lock hangs on the connection, which is given up where it would lose the lock anyway
_DEADLINE = 120.0  # seconds for a survey, which may have to hash what was kept


class Muster:
    """Surveys nodes and forms them into lanes."""

    def __init__(self, inventory: Inventory, connections: Connections, tell: Callable[[str], None]) -> None:
        self.refused: set[tuple[str, str]] = set()  # ways between nodes that do not work
        self._inventory = inventory
        self._connections = connections
        self._tell = tell
        self._key = RelayKey.new()

    def survey(self, members: Sequence[Member]) -> None:
        """Set what every member has and can do, or its error. Streams that still run there are ended."""

        def look(member: Member) -> None:
            target = member.target
            script = survey.script(self._inventory, target)
            result = ask(self._connections, target.node, script, fresh=member.door is None)
            if result.rc and not result.out:
                raise RemoteError(target.node, result.err.strip() or f"its folder {target.folder} cannot be entered")
            with reading(target.node):
                member.facts = survey.read(result.out)
            if member.facts.refused:
                raise RemoteError(target.node, member.facts.refused)
            key = self._connections[target.node].host_key
            member.door = survey.door(self._inventory, target, member.facts, f"clusterctl-{member.number}", key)
            member.passes = member.may_pass and survey.passes(target, member.facts)
            member.receives = member.may_receive and speakable(target.folder)

        self._each(members, look)

    def form(self, members: Sequence[Member], *, relay: bool) -> tuple[str, Digest, list[list[Member]]]:
        """Make members ready for streams, and say who follows whom; members that cannot be get their error.

        Returns:
            The name that all these streams have, what their units are verified with, and the lanes.
        """
        stream = secrets.token_hex(8)
        digest: Digest = "b2sum" if all(member.facts.digest == "b2sum" for member in members) else "sha256sum"
        relay = relay and any(len(lane) > 1 for lane in self._lanes(members, relay=True))
        self._each(members, lambda member: self._arm(member, stream, digest, relay=relay))
        ready = [member for member in members if not member.error]
        by_name = {member.name: member for member in ready}
        lanes = self._lanes(ready, relay=relay)
        led: dict[str, str] = {}
        for _ in range(_ROUNDS):
            untried = {before: behind for before, behind in ways(lanes) if led.get(before) != behind}
            if not untried:
                break
            for before, why in self._try_ways(untried, by_name).items():
                if why is None:
                    led[before] = untried[before]
                else:
                    self.refused.add((before, untried[before]))
                    self._tell(f"{before} cannot pass bytes on to {untried[before]}: {why or 'no reason given'}")
            lanes = self._lanes(ready, relay=relay)
        return stream, digest, [[by_name[name] for name in part] for lane in lanes for part in _parts(lane, led)]

    def _lanes(self, members: Sequence[Member], *, relay: bool) -> list[list[str]]:
        places = [Place(member.name, member.passes, member.receives) for member in members]
        return form(places, self.refused, relay=relay)

    def _arm(self, member: Member, stream: str, digest: Digest, *, relay: bool) -> None:
        target, facts, inventory = member.target, member.facts, self._inventory
        place = place_of(target.folder)
        receive = render(
            "transfer/receive.sh.j2",
            folder=target.folder,
            into=target.into,
            me=member.number,
            wire=target.wire,
            digest=DIGESTS[digest],
            ahead=AHEAD,
            spare=SPARE,
            abreast=ABREAST,
            settle=SETTLE,
        )
        before_key, expires = options(target.folder, facts.sshd)
        receives = relay and member.receives
        member.authorized = member.authorized or relay
        script = render(
            "transfer/arm.sh.j2",
            folder=target.folder,
            stream=stream,
            receive=receive,
            line=self._key.line(inventory, place) if receives else "",
            options=before_key,
            expires=expires,
            patience=PATIENCE,
            **left(inventory, place),
        )
        result = ask(self._connections, target.node, script)
        said = result.out.split()
        if said[-1:] != ["armed"]:
            with reading(target.node):
                free = (int(said[1]), int(said[2])) if said[:1] == ["failed"] else (1, 1)
            raise RemoteError(target.node, survey.reason(free, result.err.strip(), target.folder)[0])
        if receives and "authorized" not in said:
            member.receives = False
            self._tell(f"{member.name} takes no bytes from other nodes: its authorized_keys cannot be written")

    def _try_ways(self, untried: dict[str, str], members: dict[str, Member]) -> dict[str, str | None]:
        """For every node that is to pass bytes on None, or why it cannot log in to the next one."""

        def attempt(node: Node) -> str:
            member, behind = members[node.name], members[untried[node.name]]
            assert behind.door
            folder = member.target.folder
            secret = f"{member.facts.memory or folder}/{self._key.secret(self._inventory, place_of(folder))}"
            script = render(
                "transfer/probe.sh.j2",
                folder=folder,
                secret=secret,
                private=self._key.private,
                known=behind.door.known,
                ways=behind.door.ways(secret),
            )
            return self._connections[node].run(script, deadline=_DEADLINE).out.strip()

        answers = fan_out([members[name].target.node for name in untried], attempt)
        return {
            name: None if answer == "open" else str(answer).removeprefix("shut").strip()
            for name, answer in answers.items()
        }

    @staticmethod
    def _each(members: Sequence[Member], work: Callable[[Member], None]) -> None:
        """Do the same for every member; one that fails gets its error."""
        by_name = {member.name: member for member in members}
        answers = fan_out([member.target.node for member in members], lambda node: work(by_name[node.name]))
        for name, answer in answers.items():
            if isinstance(answer, ClusterctlError):
                by_name[name].error = answer


def ask(
    connections: Connections, node: Node, script: str, *, fresh: bool = True, deadline: float = _DEADLINE
) -> Result:
    """Run a script over a connection that may have died since it was last used; ``fresh`` says that it was just now."""
    remote = connections[node]
    if fresh:
        with suppress(RemoteError):
            return remote.run(script, deadline=deadline)
    try:
        remote.run(":", deadline=_PING)
    except RemoteError:
        remote.close()
    return connections[node].run(script, deadline=deadline)


def _parts(lane: Sequence[str], led: dict[str, str]) -> list[list[str]]:
    """A lane, cut where a way was not tried."""
    parts: list[list[str]] = []
    for name in lane:
        if parts and led.get(parts[-1][-1]) == name:
            parts[-1].append(name)
        else:
            parts.append([name])
    return parts
