"""The stage that sends many bytes to nodes, which may pass them on to one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from provision.inventory import fold
from provision.output_text import size
from provision.session.outcome import Failure, Outcome
from provision.transfer import Target, transfer

if TYPE_CHECKING:
    from provision.model import Leg, Wire
    from provision.session.session import Session


@dataclass(frozen=True)
class Sent:
    """What became of a transfer. ``bytes`` left this machine, for all nodes together."""

    outcome: Outcome[Any]
    bytes: int = 0


def send(
    session: Session,
    key: str,
    what: str,
    targets: Sequence[Target],
    legs: Mapping[Wire, Sequence[Leg]],
    *,
    relay: bool = True,
) -> Sent:
    """Send legs to nodes; see ``transfer``.

    Args:
        session: the command's session.
        key: names the stage.
        what: what is sent, for the title.
        targets: the nodes; none: nothing is done.
        legs: by wire form.
        relay: nodes may pass bytes on to one another.
    """
    if not targets:
        return Sent(Outcome(session, {}, changes=True))
    nodes = {target.node.name: target.node for target in targets}
    with session.stage(key, f"Sending {what} to {fold(nodes)}", None, "bytes") as shown:
        result = transfer(
            session.inventory, targets, session.connections, legs, relay=relay, stage=key, emit=session.emit
        )
        failed = {
            name: Failure.of(error, session.inventory, nodes[name]) for name, error in result.errors.items() if error
        }
        shown.states = {name: failed[name].kind if name in failed else "received" for name in nodes}
        shown.summary = f"{size(result.sent)} left this machine"
    received: dict[str, None] = {name: None for name in nodes if name not in failed}
    return Sent(Outcome(session, received, failed, changes=True), result.sent)
