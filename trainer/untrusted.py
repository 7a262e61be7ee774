"""The agent's parser for untrusted bytes, for code that does not run on a node."""

from trainer.agent.contract.untrusted import DEPTH, LIMIT, UntrustedError, parse_json, parse_object

__all__ = ["DEPTH", "LIMIT", "UntrustedError", "parse_json", "parse_object"]
