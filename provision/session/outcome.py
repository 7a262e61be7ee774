"""The result of a stage: a value for every node that succeeded, and a reason for every node that failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from provision.errors import ClusterctlError, NodesFailedError, PreflightError, Reason, within
from provision.inventory import likely_typo
from provision.ssh.remote import DeadlineExceeded, NodeUnreachable, RemoteError, RootRefused

if TYPE_CHECKING:
    from provision.model import Inventory, Node, StepResult
    from provision.session.session import Session

T = TypeVar("T")
Kind = Literal["no answer", "timed out", "refused", "failed"]


class StepsFailedError(ClusterctlError):
    """A step failed; ``steps`` are the ones that ran."""

    def __init__(self, message: str, steps: tuple[StepResult, ...]) -> None:
        super().__init__(message)
        self.steps = steps


@dataclass(frozen=True)
class Failure:
    """Why a node failed.

    Attributes:
        reason: one sentence, with the likely typo in the node's address if there is one.
        kind: the kind of failure.
        hint: the fix; may be empty.
        steps: the steps that ran before the failure, and the failed one.
    """

    reason: str
    kind: Kind = "failed"
    hint: str = ""
    steps: tuple[StepResult, ...] = ()
    error: ClusterctlError | None = None

    @classmethod
    def of(cls, error: ClusterctlError, inventory: Inventory, node: Node) -> Failure:
        """The failure for an exception."""
        if not isinstance(error, RemoteError):
            steps = error.steps if isinstance(error, StepsFailedError) else ()
            return cls(Reason.about(str(error), node.name, node.address, node.port), steps=steps, error=error)
        typo = likely_typo(inventory, node)
        why = within(f"{{}} ({typo})", error.reason) if typo else error.reason
        kind: Kind = "no answer" if isinstance(error, NodeUnreachable) else "failed"
        kind = "timed out" if isinstance(error, DeadlineExceeded) else kind
        return cls(why, "refused" if isinstance(error, RootRefused) else kind, error.hint, error=error)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of a stage, by node name.

    Attributes:
        ok: the value of each node that succeeded.
        failed: the failure of each other node.
        changes: the stage changes nodes, so the nodes in ``ok`` are done even if others failed.
    """

    session: Session = field(repr=False, compare=False)
    ok: Mapping[str, T]
    failed: Mapping[str, Failure] = field(default_factory=dict)
    changes: bool = False

    @property
    def reasons(self) -> dict[str, str]:
        """Why each failed node failed."""
        return {name: failure.reason for name, failure in self.failed.items()}

    @property
    def hints(self) -> tuple[str, ...]:
        """The hints of the failures."""
        return tuple(dict.fromkeys(failure.hint for failure in self.failed.values() if failure.hint))

    def of(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """The nodes among ``nodes`` that succeeded."""
        return tuple(node for node in nodes if node.name in self.ok)

    def refuse(self, reasons: Mapping[str, str]) -> Outcome[T]:
        """The same outcome, in which the nodes in ``reasons`` are refused."""
        failed = {name: Failure(why, "refused") for name, why in reasons.items() if name in self.ok}
        ok = {name: value for name, value in self.ok.items() if name not in failed}
        return Outcome(self.session, ok, {**self.failed, **failed}, self.changes)

    def __and__(self, other: Outcome[Any]) -> Outcome[Any]:
        """Two stages as one. A node that failed in either stage failed, with its first reason."""
        failed = {**other.failed, **self.failed}
        ok = {name: value for name, value in {**self.ok, **other.ok}.items() if name not in failed}
        return Outcome(self.session, ok, failed, self.changes or other.changes)

    def hint(self, last: str) -> str:
        """The hints of the failures, then ``last``."""
        return "; ".join([*self.hints, last])

    def required(
        self, *flags: str, cannot: str = "", nothing: str = "nothing was changed", also: str = ""
    ) -> Mapping[str, T]:
        """The values of all nodes if every node succeeded, else one error for all failures.

        Args:
            flags: options for the command in the hint.
            cannot: what a refused node cannot do, such as ``cannot take the environment``.
            nothing: the statement for the case that no node was changed.
            also: another sentence for the hint.

        Raises:
            PreflightError: nodes were refused; nothing was changed.
            NodesFailedError: nodes failed, or did not answer.
        """
        if not self.failed:
            return self.ok
        total, count = len(self.ok) + len(self.failed), len(self.failed)
        if self.changes:
            total = max(total, len(self.session.nodes))
            others = "; the others are done" if count < total else ""
            raise NodesFailedError(
                f"{self.session.command} failed on {count} of {total} nodes{others}",
                reasons=self.reasons,
                hint=self.hint(
                    "; ".join(filter(None, (f"fix the errors above, then: {self.session.again(*flags)}", also)))
                ),
            )
        silent = [name for name, failure in self.failed.items() if failure.kind != "refused"]
        if not silent:
            text = f"{count} of {total} nodes {cannot}; {nothing}"
            raise PreflightError(text, reasons=self.reasons, hint=also)
        raise NodesFailedError(
            f"no answer from {len(silent)} of {total} nodes; {nothing}",
            reasons=self.reasons,
            hint=self.hint(self.session.without(silent, total)),
            nothing_done=True,
        )


def first_failure(steps: Sequence[StepResult]) -> str:
    """The step that failed, with its output; empty if none did."""
    broken = next((step for step in steps if step.state == "failed"), None)
    return f"{broken.name}: {broken.detail.strip() or 'failed without a message'}" if broken else ""
