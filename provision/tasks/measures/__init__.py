"""What is measured with several nodes at once; one file a measure, whose name is what a check's ``MEASURE`` says.

Each has ``measure(plan: Plan, connections: Connections, emit: Emit) -> dict[str, Answer]``: an answer for every node;
what its lines say is written in ``provision/checks``, and one that could not be asked says why in ``err``.
"""
