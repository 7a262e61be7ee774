"""The stage that sends parts to nodes, which may relay them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from provision.inventory import fold
from provision.output_text import size
from provision.session.outcome import Failure, Outcome
from provision.transfer import Options, Target, transfer

if TYPE_CHECKING:
    from provision.model import Part, Wire
    from provision.session.session import Session


@dataclass(frozen=True)
class Sent:
    """The result of a transfer. ``bytes``: sent by this machine, for all nodes together."""

    outcome: Outcome[Any]
    bytes: int = 0


def send(
    session: Session,
    key: str,
    what: str,
    targets: Sequence[Target],
    parts: Mapping[Wire, Sequence[Part]],
    *,
    relay: bool = True,
) -> Sent:
    """Send parts to nodes; see ``transfer``.

    Args:
        session: the command's session.
        key: names the stage.
        what: names the content in the title.
        targets: the nodes; may be empty.
        parts: the parts by wire form.
        relay: nodes may pass bytes on to one another.
    """
    if not targets:
        return Sent(Outcome(session, {}, changes=True))
    nodes = {target.node.name: target.node for target in targets}
    with session.stage(key, f"Sending {what} to {fold(nodes)}", None, "bytes") as shown:
        options = Options(relay=relay, stage=key, emit=session.emit)
        result = transfer(session.inventory, targets, session.connections, parts, options)
        failed = {
            name: Failure.of(error, session.inventory, nodes[name]) for name, error in result.errors.items() if error
        }
        shown.states = {name: failed[name].kind if name in failed else "received" for name in nodes}
        shown.summary = f"{size(result.sent)} left this machine"
    received: dict[str, None] = {name: None for name in nodes if name not in failed}
    return Sent(Outcome(session, received, failed, changes=True), result.sent)
