"""The way to the nodes. The only folder that knows ssh: everything else sees ``model.Remote``.

- ``remote``: one connection a node, over Fabric and paramiko (``session``, ``client``, ``login``), for scripts
- ``openssh``, ``transfer``: many bytes, over the system's ssh, to many nodes at once
- ``wire``: what both say to a node's shell
- ``hostkeys``, ``prompts``, ``enrol``: whom to believe, what to ask, and the first contact
- ``fanout``: the same work on many nodes
"""
