"""Extensions that DeepSpeed would compile on the nodes, built while packing instead."""
