"""What ``agent statuses`` prints, and the controller reads: a JSON object per line.

``{"nodes": N}``
    First: how many nodes were asked.
``{"node", "out", "sent", "taken", "given", "received"}``
    ``out`` is the output of the node's ``SCRIPT``, compressed by zlib, in base64. The times are seconds since the
    epoch: when the question was ``sent`` and the answer ``received`` by the clock of the asked node, and when the
    question was ``taken`` and the answer ``given`` by the clock of the node itself.

A node that does not answer in time has no line. The controller asks it directly.
"""

from __future__ import annotations

QUESTION, ANSWER = "status?", "status"  # kinds of the agents' messages
SCRIPT = "status.sh"  # in the run's folder
PATIENCE = 5.0  # seconds for all answers
LARGEST = 256 << 10  # bytes of a script's output; a node that has more is asked directly
ENCODED = 128 << 10  # characters of an answer: text becomes three times shorter at least
