"""A command that gets a signal at one of its events: the start or the end of a stage.

The number of progress events depends on the machine's speed, so they do not count.
"""

FIRST = """
import os, sys
from provision.model import StageFinished, StageStarted
from provision.output import Reporter

events = []
shown = Reporter.__call__

def show(reporter, event):
    shown(reporter, event)
    if isinstance(event, StageStarted | StageFinished):
        events.append(event)
        print("event", type(event).__name__, file=sys.stderr)
        if len(events) == {event}:
            os.kill(os.getpid(), {number})

Reporter.__call__ = show
"""


def signal_at(event, number):
    """Python that runs before a command, as ``command.run`` and ``forked.Command`` take it.

    Args:
        event: the number of the event at which the signal comes, from 1; 0: it never comes.
        number: the signal.
    """
    return FIRST.format(event=event, number=int(number))
