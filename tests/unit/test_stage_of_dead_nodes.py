"""A command that failed on every node shows no stage as done, and its hint repeats what was typed."""

import socket

import pytest

from provision.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An inventory of two nodes that refuse connections."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.socket() as bound:  # bound and not listening: nothing else takes the port meanwhile
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        nodes = f"  gpu01: 127.0.0.1:{port}\n  gpu02: 127.0.0.2:{port}\n"
        (tmp_path / "my.yaml").write_text(f"prefix: /opt/llm/current\nnodes:\n{nodes}")
        yield tmp_path


def reported(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    shown = capsys.readouterr()
    return ended.value.code, shown.out + shown.err


@pytest.mark.parametrize(
    "words",
    [["run", "uptime"], ["verify"], ["status"], ["check"], ["diagnose"], ["metrics"], ["init"]],
    ids=lambda words: words[0],
)
def test_no_stage_of_a_command_that_failed_on_every_node_is_done(folder, capsys, words):
    code, message = reported([words[0], "-i", "my.yaml", *words[1:]], capsys)
    assert code == 5, message
    assert "failed after" in message
    assert ": done in" not in message


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["-i", "my.yaml", "sft.yaml"], "clusterctl train -i my.yaml --force sft.yaml"),
        (
            ["-i", "my.yaml", "--name", "one", "good.yaml", "--", "max_stesp=3"],
            "clusterctl train -i my.yaml --name one --force good.yaml -- max_stesp=3",
        ),
    ],
    ids=["file", "typed"],
)
def test_the_hint_about_a_misspelled_key_is_the_command_with_force(folder, capsys, words, hint):
    (folder / "good.yaml").write_text("model_name_or_path: /m\nstage: sft\n")
    (folder / "sft.yaml").write_text("model_name_or_path: /m\nstage: sft\nmax_stesp: 3\n")
    code, message = reported(["train", *words], capsys)
    assert code == 2, message
    assert message.splitlines()[-1].endswith(f"has max_stesp: {hint}"), message
    code, message = reported(hint.split()[1:], capsys)  # pasted
    assert code == 5, message
