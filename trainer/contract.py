"""The contract of controller and agents, for code that does not run on a node."""

from trainer.agent.contract.plan import (
    CHECKPOINT,
    LIMIT,
    PORT,
    VERSION,
    Hang,
    Link,
    Plan,
    PlanError,
    Resume,
    from_json,
    from_object,
)

__all__ = [
    "CHECKPOINT",
    "LIMIT",
    "PORT",
    "VERSION",
    "Hang",
    "Link",
    "Plan",
    "PlanError",
    "Resume",
    "from_json",
    "from_object",
]
