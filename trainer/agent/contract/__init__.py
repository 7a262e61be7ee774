"""The formats that the controller and the agents share. It uses only the standard library of Python 3.8.

The code is in the agent's folder because it is sent to the nodes with the agent. Imports in this package are relative:
it is ``agent.contract`` on a node and ``trainer.agent.contract`` on the controller.
"""
