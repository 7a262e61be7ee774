"""``python -m trainer.reader [FILE ...]`` prints the numbers of training logs as CSV. It reads stdin by default.

``clusterctl metrics`` shows them as a table; this needs only Python. The exit code is 1 if no line contains a number,
and 2 if a file cannot be read.
"""

import os
import sys
from typing import BinaryIO, Iterator, List, Optional

from trainer.reader import Series, as_csv, read

_BLOCK = 256 << 10


def main(argv: Optional[List[str]] = None) -> int:
    """Read the logs and print their numbers."""
    names = sys.argv[1:] if argv is None else argv
    if any(name.startswith("-") and name != "-" for name in names):
        sys.stderr.write((__doc__ or "") + "\n")
        return 0 if names in (["-h"], ["--help"]) else 2
    series = Series()
    try:
        for name in names or ["-"]:
            with sys.stdin.buffer if name == "-" else open(name, "rb") as file:  # noqa: PTH123 - the name as typed
                for reading in read(_blocks(file)):
                    series.add(reading)
        for line in as_csv(series, series.counted) if len(series) else ():
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        sys.stderr.write("cannot read %s: %s\n" % (error.filename, error.strerror))
        return 2
    return 0 if len(series) else 1


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while True:
        block = file.read(_BLOCK)
        if not block:
            return
        yield block


if __name__ == "__main__":
    sys.exit(main())
