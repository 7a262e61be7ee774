"""A plan as a script to paste, for sh, PowerShell and cmd: the commands that a node would run.

The plans are filled in for the first attempt (``launchers.filled``).

Values that look like secrets are hidden. The agent does not use these scripts: it starts lists of arguments.
"""

from __future__ import annotations

import base64
import json
import re
import shlex

from provision.masking import is_secret, mask_env, mask_words
from trainer.agent.contract.plan import OUTPUT, Plan

_WORLD = "--world_info="  # DeepSpeed's: base64 of JSON
# PowerShell reads typographic quotes as straight ones (language specification, 2.3.5.2).
_PS_QUOTES = re.compile("['\u2018-\u201b]")
_CMD_SIGNS = re.compile(r'[()!^"<>&|]')
_CMD_BREAKS = re.compile(r"[\r\n]")


def as_sh(plan: Plan) -> str:
    """For POSIX sh. The parentheses keep the shell that it is pasted into unchanged."""
    lines = [f"# {_title(plan)}", "(", f"cd {shlex.quote(plan.cwd)} || exit"]
    lines += [f"mkdir -p {shlex.quote(plan.rank_logs)}"] if plan.rank_logs else []
    lines += [f"unset {' '.join(plan.unset)}"] if plan.unset else []
    for name, value, hidden in _variables(plan):
        lines += [f"# {name} is not shown"] if hidden else []
        lines.append(f"export {name}={_sh(value)}")
    lines += [f"# {text}" for text in _explained(plan)]
    command = " \\\n    ".join(map(_sh, _argv(plan)))
    if plan.each_rank:
        lines += [f"for LOCAL_RANK in {' '.join(map(str, range(plan.processes)))}; do"]
        lines += [f"export LOCAL_RANK RANK=$(({plan.first_rank} + LOCAL_RANK))", f"{command} &", "done", "wait", ")"]
    else:
        lines += [f"exec {command}", ")"]
    return "\n".join(lines) + "\n"


def as_powershell(plan: Plan) -> str:
    """For Windows PowerShell 5.1 and PowerShell 7."""
    lines = [f"# {_title(plan)}", "$PSNativeCommandArgumentPassing = 'Legacy'  # quotes mean the same in 5.1 and 7"]
    lines.append(f"Set-Location -LiteralPath {_ps(plan.cwd)} -ErrorAction Stop")
    if plan.rank_logs:
        lines.append(f"New-Item -ItemType Directory -Force -Path {_ps(plan.rank_logs)} | Out-Null")
    lines += [f"Remove-Item Env:{name} -ErrorAction SilentlyContinue" for name in plan.unset]
    for name, value, hidden in _variables(plan):
        lines += [f"# {name} is not shown"] if hidden else []
        lines.append(f"$env:{name} = {_ps(value)}")
    lines += _first_rank(plan, "$env:{} = '{}'", "#")
    lines += [f"# {text}" for text in _explained(plan)]
    program, *rest = _argv(plan)
    lines.append(" `\n    ".join([f"& {_ps(program)}", *(_ps(_ps_argument(word)) for word in rest)]))
    return "\n".join(lines) + "\n"


def as_cmd(plan: Plan) -> str:
    """For cmd, as a ``.cmd`` file: there ``%%`` is a percent sign."""
    lines = ["@echo off", f"rem {_title(plan)}", "setlocal DisableDelayedExpansion", "chcp 65001 >nul"]
    lines.append(f"cd /d {_cmd_path(plan.cwd)} || exit /b")
    if plan.rank_logs:
        folder = _cmd_path(plan.rank_logs)
        lines.append(f"if not exist {folder} mkdir {folder}")
    lines += [f"set {name}=" for name in plan.unset]
    for name, value, hidden in _variables(plan):
        if _CMD_BREAKS.search(value):
            lines.append(f"rem {name} contains a line break, which cmd cannot set")
            continue
        lines += [f"rem {name} is not shown"] if hidden else []
        lines.append(f"set {name}={_escaped(value)}")
    lines += _first_rank(plan, "set {}={}", "rem")
    lines += [f"rem {text}" for text in _explained(plan)]
    lines.append(" ^\n    ".join(map(_cmd, _argv(plan))))
    return "\n".join(lines).replace("\n", "\r\n") + "\r\n"


def _title(plan: Plan) -> str:
    count = plan.processes
    ranks = f"{count} process{'es' if count != 1 else ''}"
    return f"{plan.node}: node {plan.node_rank} of {plan.nnodes}, {ranks}, the first is rank {plan.first_rank}"


def _variables(plan: Plan) -> list[tuple[str, str, bool]]:
    """Name, value, and whether the value was hidden."""
    return [(name, value, is_secret(name)) for name, value in sorted(mask_env(plan.env).items())]


def _first_rank(plan: Plan, assign: str, remark: str) -> list[str]:
    """Lines that set the node's first rank, if the command starts once for each rank."""
    if not plan.each_rank:
        return []
    more = [f"{remark} for each further rank: RANK and LOCAL_RANK one higher"] if plan.processes > 1 else []
    return [*more, assign.format("LOCAL_RANK", 0), assign.format("RANK", plan.first_rank)]


def _argv(plan: Plan) -> list[str]:
    """The command as the agent fills it. A person who types it saves to the output folder, not to memory."""
    output = plan.resume.output if plan.resume and plan.copies and plan.copies.memory else OUTPUT
    return [word.replace(OUTPUT, output) for word in mask_words(plan.argv)]


def _explained(plan: Plan) -> list[str]:
    """Comments that decode unreadable arguments."""
    found = [word.removeprefix(_WORLD) for word in plan.argv if word.startswith(_WORLD)]
    return [f"world_info: {json.dumps(json.loads(base64.urlsafe_b64decode(text)))}" for text in found]


def _sh(text: str) -> str:
    return f"'{text}'" if re.fullmatch(r"=[\w.,:@-]*", text) else shlex.quote(text)  # zsh reads =NAME as a program


def _ps(text: str) -> str:
    return "'" + _PS_QUOTES.sub(lambda match: match.group() * 2, text) + "'"


def _ps_argument(word: str) -> str:
    """A word so that PowerShell passes it on unchanged: PowerShell quotes words with spaces but escapes nothing."""
    if not word:
        return '""'
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', word)
    return re.sub(r"(\\+)$", r"\1\1", escaped) if re.search(r"\s", word) else escaped


def _cmd(word: str) -> str:
    """A word quoted for the C library's command line parser, and escaped from cmd's parser."""
    if word and not re.search(r'[\s"]', word):
        return _escaped(word)
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', word)
    return _escaped('"' + re.sub(r"(\\+)$", r"\1\1", escaped) + '"')


def _cmd_path(path: str) -> str:
    """A folder for cmd's built-in commands, which understand only quotes; no path there contains one."""
    return '"' + path.replace("%", "%%").replace("/", "\\") + '"'


def _escaped(text: str) -> str:
    return _CMD_SIGNS.sub(lambda match: f"^{match.group()}", text.replace("%", "%%"))
