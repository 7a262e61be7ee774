"""What the shares measure brings back, by line, and the parts of its scripts' output. Pure.

::

    share 0 node01 /data          the share's number, the node that wrote first, where it is on this node
    mounted 0 nfs4 10.0.0.11:/data
    wrote 0 fine                  or hung, or why not
    read 0 fine                   or hung, absent, not tried, or why not
    back 0 fine                   whether node01 reads what this node wrote; or absent, not tried
    stuck 4242 cat                a process that waits in the kernel
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from provision.checks import Answer
from provision.checks._host import number

_NOTHING = {"No such file or directory", "Directory nonexistent", "nonexistent directory"}  # bash, dash, busybox
HUNG = 124  # the exit code of a step that was given up


@dataclass
class Side:
    """One share as one node sees it; the words are those of the lines above."""

    number: int
    server: str
    path: str
    type: str = ""
    source: str = ""
    wrote: str = "not tried"
    read: str = "not tried"
    back: str = "not tried"
    stuck: list[str] = field(default_factory=list)

    def lines(self) -> Iterable[str]:
        """As text."""
        yield f"share {self.number} {self.server} {self.path}"
        yield f"mounted {self.number} {self.type} {self.source}"
        for word in ("wrote", "read", "back"):
            yield f"{word} {self.number} {getattr(self, word)}"
        yield from (f"stuck {process}" for process in self.stuck)


def sides(answer: Answer) -> list[Side]:
    """The shares of one node."""
    found: list[Side] = []
    for line in answer.lines:
        key, _, rest = line.partition(" ")
        words = rest.split(" ", 2)
        if key == "share" and len(words) == 3 and (at := number(words[0])) is not None:
            found.append(Side(at, words[1], words[2]))
        elif key == "mounted" and found and len(words) == 3:
            found[-1].type, found[-1].source = words[1:]
        elif key == "stuck" and found:
            found[-1].stuck.append(rest)
        elif key in {"wrote", "read", "back"} and found:
            setattr(found[-1], key, rest.partition(" ")[2])
    return found


def steps(out: str) -> dict[tuple[str, int], tuple[int, str]]:
    """Exit code and output of every step of a script, by what it was and the share's number."""
    parts = re.findall(r"^begin (\w+) (\d+)\n(.*?)^end \1 \2 (\d+)$", out, re.MULTILINE | re.DOTALL)
    return {(what, int(number)): (int(rc), said) for what, number, said, rc in parts}


def outcome(step: tuple[int, str] | None, token: str) -> str:
    """The word for a step: ``token`` is what a file must hold ("" for a step that reads none)."""
    if step is None:
        return "not tried"
    rc, said = step
    if rc == HUNG:
        return "hung"
    if rc:
        text = " ".join(said.split()).rpartition(": ")[2] or f"status {rc}"
        return "absent" if text in _NOTHING else text
    return "fine" if not token or token in said else "absent"
