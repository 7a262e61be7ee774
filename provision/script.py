"""Compiles steps to one POSIX sh script, and parses its marker lines into results.

The script prints only marker lines. It captures a step's output, and prints it after the step's marker if the step
failed. Every step runs in a subshell under ``set -e``, without input unless ``Step.stdin`` is set.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from provision.errors import ClusterctlError
from provision.model import Step, StepResult, StepState
from provision.render import quote

if TYPE_CHECKING:
    from collections.abc import Sequence

# Runs the script on stdin. Nodes read the script itself byte by byte, which is slow for a long one.
FROM_INPUT = 'eval "$(cat)"'

DETAIL_LINES = 40  # of a failed step's output
_DETAIL_BYTES = 16000
_TOKEN = re.compile(r"[0-9A-Za-z]+")
_WHOLE = re.compile(r"-?[0-9]{1,19}")  # 64 bits

# Milliseconds if date supports %N (GNU), else seconds times 1000. dash and busybox use 64 bits.
_HEAD = """\
LC_ALL=C
export LC_ALL
cc_clock() {
  cc_now=$(date +%s%N)
  case $cc_now in
    *[!0-9]*) cc_now=$(date +%s)000 ;;
    ????????????????*) cc_now=${cc_now%??????} ;;
    *) cc_now=$(date +%s)000 ;;
  esac
}
cc_mark() {
  cc_clock
  echo "@clusterctl:TOKEN:step:$1:$2:$3:$((cc_now - cc_before))"
  cc_before=$cc_now
}
cc_clock
cc_before=$cc_now
"""

# The subshell must not be part of a condition, where sh would ignore its `set -e`.
_TEST = """\
echo {start}
(
set -e
{unless}
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark {index} ok 0
else
{otherwise}
fi
"""

# The exit code is sent after the output, because a pipeline returns only its last command's.
_DO = """\
cc_out=$({{ (
set -e
{do}
) {stdin}2>&1; echo "@rc:{token}:$?:"; }} | tail -n {lines} | tail -c {size})
cc_rc=${{cc_out##*@rc:{token}:}}
cc_rc=${{cc_rc%%:*}}
if [ "$cc_rc" != 0 ]; then
cc_mark {index} failed "${{cc_rc:=1}}"
printf %s "${{cc_out%@rc:{token}:*}}"
{end}
{otherwise}
cc_mark {index} changed 0{close}"""


def compile_steps(
    steps: Sequence[Step], *, token: str, dry_run: bool = False, prelude: str = "", keep_going: bool = False
) -> str:
    """One POSIX sh script that runs ``steps`` in order and stops at the first failure.

    Args:
        steps: the steps; a step with ``stdin`` reads the script's standard input, the others read nothing.
        token: letters and digits that no command's output can guess; new for every run.
        dry_run: run the tests and report what would change; the script does not contain ``do``.
        prelude: sh before the steps, with the functions that they call.
        keep_going: continue after a failed step; the script then exits with 0.

    The script exits with the failed step's exit code, or 0.
    """
    if not _TOKEN.fullmatch(token):
        raise ClusterctlError(f"{token!r} is not a token: letters and digits only")
    parts = [_HEAD.replace("TOKEN", token), prelude]
    for index, step in enumerate(steps):
        name = " ".join(step.name.split())
        do = _DO.format(
            do=step.do.rstrip("\n"),
            stdin="" if step.stdin else "</dev/null ",
            token=token,
            index=index,
            lines=DETAIL_LINES + 1,
            size=_DETAIL_BYTES,
            end="echo" if keep_going else 'exit "$cc_rc"',
            otherwise="else" if keep_going else "fi",
            close="\nfi" if keep_going else "",
        )
        parts.append(
            _TEST.format(
                start=quote(f"@clusterctl:{token}:start:{index}:{name}"),
                unless=step.unless.rstrip("\n"),
                index=index,
                otherwise=f'cc_mark {index} "would change" 0' if dry_run else do,
            )
        )
    return "".join([*parts, "exit 0\n"])


def parse(token: str, out: str) -> tuple[StepResult, ...]:
    """The results of the steps of ``compile_steps``, in order, without unfinished steps."""
    marker = re.compile(
        rf"^@clusterctl:{re.escape(token)}:"
        r"(?:start:(?P<start>[0-9]{1,9}):(?P<name>.*)"
        r"|step:(?P<index>[0-9]{1,9}):(?P<state>ok|changed|would change|failed)"
        r":(?P<rc>[0-9]{1,3}):(?P<ms>-?[0-9]{1,19}))$",
        re.MULTILINE,
    )
    names: dict[str, str] = {}
    results = []
    marks = list(marker.finditer(out))
    ends = [following.start() for following in marks[1:]] + [len(out)]
    for found, end in zip(marks, ends, strict=False):
        if found["start"] is not None:
            names[found["start"]] = found["name"]
            continue
        state = cast("StepState", found["state"])
        detail = ""
        if state == "failed":
            detail = printable(out[found.end() : end].strip("\n")) or f"exit code {found['rc']}"
        name = names.get(found["index"], f"step {found['index']}")
        results.append(StepResult(name, state, detail, max(0, int(found["ms"])) / 1000))
    return tuple(results)


def whole(text: str) -> int:
    """A whole number in a node's answer: bytes, a count, seconds since 1970.

    Raises:
        ValueError: it is not a number, or larger than any valid one.
    """
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a number")
    return int(text)


def printable(text: str) -> str:
    """``text`` without surrogates, which stand for bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
