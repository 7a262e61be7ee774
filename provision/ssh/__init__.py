"""Connections to the nodes. Only this folder knows ssh; other code uses ``model.Remote``.

- ``remote``, with ``ssh_remote``, ``session`` and ``client``: one connection per node, over Fabric and paramiko
- ``proxy``: ssh_config's ProxyCommand
- ``local``: this machine as a node
- ``openssh``: large transfers over the system's ssh
- ``wire``: the protocol between this machine and a node's shell
- ``become``: root on a node
- ``hostkeys``, ``prompts``, ``enrol``: trusted keys, questions to the user, and the first contact
- ``fanout``: calls a function for many nodes
"""
