"""The tasks: what each command does, from its arguments to its result. They talk through events and never print."""
