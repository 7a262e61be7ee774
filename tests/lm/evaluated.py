"""Evaluations whose losses a test sets: rounding decides those of a few steps of a small model."""

from trainer.lm import __main__ as program

evaluate = program.evaluate


def decide(argv):
    """Take ``--evaluated 3,2,1`` out of a command line: the losses of its evaluations, one after the other."""
    argv = list(argv)
    program.evaluate = evaluate
    if "--evaluated" in argv:
        at = argv.index("--evaluated")
        reported = iter([float(loss) for loss in argv[at + 1].split(",")])
        program.evaluate = lambda *_: {"train": (loss := next(reported)), "val": loss}
        del argv[at : at + 2]
    return argv
