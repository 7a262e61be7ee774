"""The output of finished commands: a mapping for ``--json`` and a text. Pure."""
