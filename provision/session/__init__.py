"""One command's session with the cluster, its stages, and their results."""

from provision.session.conversation import Conversation, run_conversations
from provision.session.lock import Lock, Sharing
from provision.session.outcome import Failure, Outcome
from provision.session.session import Session

__all__ = ["Conversation", "Failure", "Lock", "Outcome", "Session", "Sharing", "run_conversations"]
