"""Processes of a rehearsal cluster are stopped, and those that have already exited are no error."""

import os
import subprocess

import pytest

from provision.sandbox import host
from provision.sandbox.host import Process


@pytest.mark.parametrize("error", [ProcessLookupError, FileNotFoundError])
def test_a_process_that_has_just_ended_is_no_error(monkeypatch, error):
    def gone(_):
        raise error

    monkeypatch.setattr(os, "pidfd_open", gone)
    host.kill([Process(pid=1 << 22, started=1)])


def test_a_process_is_ended_and_a_reused_id_left_alone():
    with subprocess.Popen(["/bin/sleep", "600"]) as child:
        host.kill([Process(child.pid, started=1)])  # another one had this id
        assert child.poll() is None
        child.kill()
