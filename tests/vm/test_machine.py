"""The emulated machines themselves: what every other test of this ring takes for granted."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def test_both_machines_have_their_names_and_reach_only_each_other(lab):
    for each, other in ((lab.head, lab.client), (lab.client, lab.head)):
        command = "hostname; cat /etc/hostname; systemctl is-system-running; ip route show default"
        message = each.out(f"{command}; exec 3<>/dev/tcp/{other.address}/22 && head -c 4 <&3")
        assert message == f"{each.name}\n{each.name}\nrunning\nSSH-"
    assert lab.head.boot != lab.client.boot


def test_the_training_user_becomes_root_without_a_password(lab):
    assert lab.client.out("id -un; sudo -n id -un", user="train") == "train\nroot"


RTMGRP_LINK = 1  # linux/rtnetlink.h: links that come, change and go
KILLED = """
import signal, sys
sys.path.append(sys.argv[1])
import machine_parts
# A switch, a cable and a process on it, as machines() makes them; booting one would show nothing more.
import contextlib
from ipaddress import IPv4Network
stack = contextlib.ExitStack()
switch = machine_parts.switch(stack, ["vm1"], IPv4Network(sys.argv[2]))
sleeper = machine_parts.start(stack, ["nsenter", f"--net=/proc/{switch}/ns/net", "setpriv", "--pdeathsig", "KILL",
    "sh", "-c", "echo; exec sleep infinity"])
sleeper.stdout.read(1)
print(switch, sleeper.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_starter_leaves_no_process(lab, number):
    where = Path(sys.modules["machine"].__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, where, "198.18.254.0/24"], stdout=subprocess.PIPE, text=True
    ) as starter:
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert len(pids) == 2
        descriptors = [os.pidfd_open(pid) for pid in pids]
        cable = f"cclab{starter.pid}"
        assert cable in {name for _, name in socket.if_nameindex()}
        starter.send_signal(number)
        starter.wait(60)
    for descriptor in descriptors:
        select_ended(descriptor)
        os.close(descriptor)
    # The kernel removes a namespace in a separate worker, and logs it.
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as news:
        news.bind((0, RTMGRP_LINK))
        news.settimeout(60)
        while cable in {name for _, name in socket.if_nameindex()}:
            news.recv(65536)


def select_ended(descriptor):
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(60_000), "it outlives the one that started it"
