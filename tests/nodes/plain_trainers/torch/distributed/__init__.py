"""In place of torch, for runs whose subject is the agent: it travels with the run and hides nothing but torchrun."""
