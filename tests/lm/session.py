"""Several trainings, one after the other in the same processes: importing torch takes longer than they do.

``session.py FILE``: FILE holds a list of argument lists, where ``--evaluated`` decides losses (``evaluated.py``).
Rank 0 prints the refusals, a JSON object a line.
"""

import json
import os
import sys
from pathlib import Path

import evaluated

from trainer.lm import __main__ as program
from trainer.lm import ranks
from trainer.lm.errors import RefusedError, exit_with

leave, ranks.leave = ranks.leave, lambda: None


def main():
    for argv in json.loads(Path(sys.argv[1]).read_text()):
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.write(f"session: {' '.join(argv)}\n")
        try:
            program.main(evaluated.decide(argv))
        except RefusedError as error:
            if os.environ.get("RANK", "0") == "0":
                message = {"what": str(error), "fix": error.fix, "code": error.code}
                sys.stdout.write(f"refused: {json.dumps(message)}\n")
    leave()


exit_with(main)
