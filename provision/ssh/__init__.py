"""The way to the nodes. The only folder that knows ssh: everything else sees ``model.Remote``.

- ``remote``, with ``ssh_remote``, ``channel``, ``session``, ``client``, ``login``: one connection a node over
  Fabric and paramiko
- ``proxy``: ssh_config's ProxyCommand
- ``openssh``, ``transfer``: many bytes, over the system's ssh, to many nodes at once
- ``wire``, ``framing``: what both say to a node's shell
- ``become``: root's rights there
- ``hostkeys``, ``prompts``, ``enrol``: whom to believe, what to ask, and the first contact
- ``fanout``: the same work on many nodes
"""
