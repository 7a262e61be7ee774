"""Plans as scripts: the arguments that a program gets through sh, PowerShell or cmd."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from provision.run import shells
from trainer.agent.contract.plan import Plan

NASTY = [
    "",
    "two words",
    'a "quoted" word',
    "back\\slash\\",
    'end\\"',
    "$HOME `id` 'x'",
    "100%",
    "a&b|c<d>e^f!g",
    "配置",
]


def plan(tmp_path, argv, env=None, **fields):
    given = {"run": "r1", "node": "gpu01", "port": 29500, "cwd": str(tmp_path), "unset": ("LD_PRELOAD",)}
    more = {"rank_logs": str(tmp_path / "logs/ranks"), "argv": tuple(argv), "env": env or {}}
    return Plan(**(given | more | fields))


SAYS = "import json, os, sys; print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k[:2] == 'X_'}]))"


def test_sh_script_runs_the_plan(tmp_path):
    folder = tmp_path / "our 'runs' $HOME"
    folder.mkdir()
    env = {f"X_{number}": text for number, text in enumerate([*NASTY, "two\nlines"])}
    script = shells.as_sh(plan(folder, [sys.executable, "-c", SAYS, *NASTY], env))
    done = subprocess.run(["sh"], input=script + "pwd\n", capture_output=True, text=True, check=True, cwd="/")
    message, where = done.stdout.splitlines()
    assert json.loads(message) == [NASTY, env]
    assert where == "/"  # the user's shell stays in its folder
    assert (folder / "logs/ranks").is_dir()


def test_sh_stops_where_the_folder_is_missing(tmp_path):
    script = shells.as_sh(plan(tmp_path / "gone", ["echo", "ran"]))
    done = subprocess.run(["sh"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ran" not in done.stdout


@pytest.mark.parametrize("render", [shells.as_sh, shells.as_powershell, shells.as_cmd])
@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "DB_PASSWORD"])
def test_secrets_are_not_shown(tmp_path, render, name):
    text = render(plan(tmp_path, ["x"], {name: "hunter2", "TOKENIZERS_PARALLELISM": "false"}))
    assert "hunter2" not in text
    assert f"{name} is not shown" in text
    assert "false" in text


@pytest.mark.parametrize("render", [shells.as_sh, shells.as_powershell, shells.as_cmd])
def test_encoded_arguments_are_explained(tmp_path, render):
    world = base64.urlsafe_b64encode(b'{"gpu01": [0, 1]}').decode()
    assert 'world_info: {"gpu01": [0, 1]}' in render(plan(tmp_path, ["x", f"--world_info={world}"]))


def crt(line):
    """A command line as Microsoft's C library parses it ("Parsing C command-line arguments")."""
    words, word, quoted, started, at = [], "", False, False, 0
    while at < len(line):
        slashes = len(line) - at - len(line[at:].lstrip("\\"))
        if slashes:
            at += slashes
            if line[at : at + 1] == '"':
                word += "\\" * (slashes // 2)
                if slashes % 2:
                    word += '"'
                    at += 1
            else:
                word += "\\" * slashes
            started = True
        elif line[at] == '"':
            quoted, started, at = not quoted, True, at + 1
        elif line[at] in " \t" and not quoted:
            words += [word] if started else []
            word, started, at = "", False, at + 1
        else:
            word, started, at = word + line[at], True, at + 1
    return words + ([word] if started else [])


def powershells(text):
    """The command line that PowerShell in its legacy mode makes of ``& 'a' 'b'``."""
    literals = re.findall(r"'((?:[^'\u2018-\u201b]|['\u2018-\u201b]{2})*)'", text[text.index("& '") :])
    words = [re.sub(r"(['\u2018-\u201b])['\u2018-\u201b]", r"\1", literal) for literal in literals]
    return " ".join(f'"{word}"' if re.search(r"\s", word) else word for word in words)


def cmds(text):
    """The command line that cmd makes of the last command of a batch file: every special character must be quoted."""
    line = text[text.index("prog") :].replace(" ^\r\n    ", " ").removesuffix("\r\n")
    assert not re.search(r'(?<!\^)[&|<>"()!]', re.sub(r"\^\^", "", line)), line
    return re.sub(r"\^(.)", r"\1", line.replace("%%", "%"))


WORDS = st.lists(
    st.text(st.characters(blacklist_categories=["Cc", "Cs", "Zl", "Zp", "Zs"]) | st.just(" "), max_size=12)
)


@given(WORDS)
@example(NASTY)
@example(["it's", "\u2019typographic\u2018 quotes"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_powershell_and_cmd_pass_every_word(tmp_path, words):
    made = plan(tmp_path, ["prog", *words])
    assert crt(powershells(shells.as_powershell(made))) == ["prog", *words]
    assert crt(cmds(shells.as_cmd(made))) == ["prog", *words]


def test_cmd_names_what_it_cannot_set(tmp_path):
    text = shells.as_cmd(plan(tmp_path, ["x"], {"X_LINES": "a\nb", "X_SIGNS": "a&b %PATH%"}))
    assert "rem X_LINES contains a line break" in text
    assert "set X_SIGNS=a^&b %%PATH%%\r\n" in text
