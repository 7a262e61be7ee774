"""What the controller and the agents agree on. Pure: the standard library of Python 3.8 and nothing else.

The code is in the agent's folder because it travels to the nodes with the agent, which imports it as ``contract``.
Everything else imports ``trainer.contract``. Imports in this package are relative: they are the same under both names.
"""
