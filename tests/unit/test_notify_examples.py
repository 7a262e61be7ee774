"""The commands of docs/runs.md for events of a run, with a real HTTP server, and stand-ins for sendmail and logger."""

from __future__ import annotations

import email
import http.server
import json
import os
import re
import shutil
import socketserver
import sys
import threading
from pathlib import Path

import pytest
import yaml

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import plan_of

from trainer.agent import notify
from trainer.agent.run_files import NodePlan

PAGE = (Path(__file__).parents[2] / "docs/runs.md").read_text(encoding="utf-8").partition("## Notifications\n")[2]
EXAMPLES = [yaml.safe_load(block)["notify"] for block in re.findall(r"```text\n(.*?notify: .*?)```", PAGE, re.DOTALL)]
CURL, SENDMAIL, LOGGER, CHAT = EXAMPLES
[SCRIPT] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EVENT = {
    "event": "failure", "run": "20261126-101500-sft-1a2b", "node": "gpu07", "rank": 12, "state": "failed", "step": 40,
    "attempt": 2, "text": 'rank 12 said "no";\n$(touch x) 内存不足', "time": 1795731468.5,
}  # fmt: skip
TOKEN = "s3cret-token-of-the-webhook"


class Webhook:
    """A webhook that answers with the next of ``codes``, then with 200; None: not at all. ``posts`` has the bodies."""

    def __init__(self):
        self.posts, self.codes, self.seen = [], [], []
        over = self.over = threading.Event()
        webhook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.posts.append((self.path, self.headers["Content-Type"], body))
                webhook.seen.append(
                    [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
                )
                code = webhook.codes.pop(0) if webhook.codes else 200
                if code is None:
                    over.wait()
                    return
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/{TOKEN}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def webhook():
    found = Webhook()
    yield found
    found.close()


@pytest.fixture
def curl(webhook, tmp_path):
    """The command with curl, for the test's webhook."""
    if shutil.which("curl") is None:
        pytest.skip("curl is missing: scripts/setup")
    file = tmp_path / "hook.curl"
    file.write_text(f'url = "{webhook.url}"\n')
    file.chmod(0o600)
    return CURL.replace("/etc/clusterctl/hook.curl", str(file))


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Put a program into PATH that saves its arguments and its input."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name):
        (folder / name).write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" >{folder}/{name}.arguments\ncat >{folder}/{name}.in\n'
        )
        (folder / name).chmod(0o755)
        return folder / f"{name}.arguments", folder / f"{name}.in"

    return make


def deliver(command, tmp_path):
    plan = NodePlan(plan_of(notify=command), tmp_path, tmp_path / "plan.json")
    return notify.deliver(plan, json.dumps(EVENT).encode())


def test_webhook_gets_the_event_and_no_process_shows_its_address(webhook, curl, tmp_path, capfd):
    assert deliver(curl, tmp_path) == 0
    [(path, kind, body)] = webhook.posts
    assert (path, kind, json.loads(body)) == (f"/{TOKEN}", "application/json", EVENT)
    [running] = webhook.seen
    assert any(b"curl" in each for each in running)
    assert not any(TOKEN.encode() in each for each in running)
    assert capfd.readouterr().err == ""


def test_webhook_that_fails_is_tried_again_and_the_log_has_no_secret(webhook, curl, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(notify, "PAUSE", 0.0)
    webhook.codes = [500, 503]
    assert deliver(curl, tmp_path) == 0
    assert len(webhook.posts) == 3
    webhook.close()
    assert deliver(curl, tmp_path) == 1
    logged = capfd.readouterr().err
    assert "notify failure, try 2 of 3: exited with code 22: curl: (22) The requested URL returned error: 503" in logged
    assert "notify failure, try 3 of 3: exited with code 7" in logged
    assert TOKEN not in logged


def test_webhook_that_does_not_answer_is_given_up(webhook, curl, tmp_path):
    webhook.codes = [None, None]
    own = curl.replace("--max-time 20", "--max-time 0.2")
    assert "exited with code 28" in notify.run_command(own, EVENT, tmp_path)
    without = curl.replace("--max-time 20 ", "")
    assert notify.run_command(without, EVENT, tmp_path, patience=0.5) == "took longer than 0.5 s"


def test_mail_has_its_head_and_the_event(stand_in, tmp_path):
    arguments, sent = stand_in("sendmail")
    assert deliver(SENDMAIL.replace("/usr/sbin/sendmail", "sendmail"), tmp_path) == 0
    assert arguments.read_text() == "-t\n"
    mail = email.message_from_string(sent.read_text())
    assert (mail["To"], mail["Subject"]) == ("ops@example.org", "failure 20261126-101500-sft-1a2b")
    assert json.loads(mail.get_payload()) == EVENT


def test_systems_log_gets_some_events(stand_in, tmp_path):
    arguments, _ = stand_in("logger")
    assert notify.run_command(LOGGER, {**EVENT, "event": "end"}, tmp_path) is None
    assert not arguments.exists()
    assert deliver(LOGGER, tmp_path) == 0
    text = f"failure of {EVENT['run']}: {EVENT['text']}"
    assert arguments.read_text() == f"-t\nclusterctl\n{text}\n"


def test_chat_gets_its_own_json(webhook, tmp_path):
    script = tmp_path / "chat.py"
    script.write_text(re.sub(r'URL = ".*"', f'URL = "{webhook.url}"', SCRIPT))
    command = CHAT.replace("python3", sys.executable).replace("/etc/clusterctl/chat.py", str(script))
    assert deliver(command, tmp_path) == 0
    [(_, _, body)] = webhook.posts
    text = f"failure: {EVENT['run']} on gpu07: {EVENT['text']}"
    assert json.loads(body) == {"msgtype": "text", "text": {"content": text}}
    webhook.codes = [500]
    problem = notify.run_command(command, EVENT, tmp_path)
    assert "HTTP Error 500" in problem
    assert TOKEN not in problem
