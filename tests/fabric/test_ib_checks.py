"""The checks' own probes on simulated hosts, with the real opensm and tools: each fault is named, and no other."""

import signal
import threading
import time

from ib_fabric import PATIENCE, star

from provision.render import render

SYSFS = ("ib.ports", "ib.state", "ib.phys", "ib.rate", "ib.width", "ib.lid", "ib.fw", "ib.board")
COUNTERS = ("ib.symbols", "ib.errors", "ib.flap")
MANAGERS = ("ib.sm", "ib.masters")
PORT = "ibsim0 port 1"


def test_no_subnet_manager(four, bad):
    assert "State: Initializing" in four.fabric.run("node02", "ibstat").stdout
    assert bad(four.fabric, four.hosts, *SYSFS, *MANAGERS) == {
        "ib.state": dict.fromkeys(four.hosts, ("FAIL", f"{PORT} is Initializing: no subnet manager has configured it")),
        "ib.sm": dict.fromkeys(four.hosts, ("FAIL", f"{PORT} waits for a subnet manager")),
    }


def test_one_subnet_manager(four, look):
    four.fabric.opensm("node01")
    found = look(four.fabric, four.hosts, *SYSFS, *MANAGERS, *COUNTERS)
    assert {finding.verdict for each in found.values() for finding in each.values()} <= {"OK", "N/A"}
    assert found["ib.state"]["node04"].observed == f"{PORT} Active"
    assert found["ib.sm"]["node04"].observed == "master 0x100001"
    assert found["ib.symbols"]["node04"].observed == "no errors"


def test_a_subnet_manager_that_died(four, bad):
    """All ports stay Active in ibstat; only a query shows it."""
    four.fabric.opensm("node01")
    four.fabric.kill("node01")
    assert "State: Active" in four.fabric.run("node02", "ibstat").stdout
    found = bad(four.fabric, four.hosts, *SYSFS, *MANAGERS)
    message = f"{PORT} is Active, but the subnet manager at LID 1 does not answer"
    assert found.pop("ib.sm") == dict.fromkeys(four.hosts, ("FAIL", message))
    assert found == {
        "ib.masters": dict.fromkeys(four.hosts, ("UNKNOWN", f"{PORT}: no list of subnet managers")),
    }


def test_without_root_the_verdict_is_unknown(four, look):
    four.fabric.opensm("node01")
    four.fabric.kill("node01")
    found = look(four.fabric, ["node02"], "ib.sm", root=False)
    assert found["ib.sm"]["node02"].verdict == "UNKNOWN"


def test_a_second_subnet_manager_in_reserve(four, look):
    four.fabric.opensm("node01", "-p", "5")
    four.fabric.opensm("node02", "-p", "1")
    found = look(four.fabric, four.hosts, *MANAGERS)
    assert {finding.verdict for each in found.values() for finding in each.values()} <= {"OK", "N/A"}
    assert four.fabric.run("node03", "sminfo", "3").stdout.rstrip().endswith("SMINFO_STANDBY")


def test_two_masters(make, bad):
    """A fabric that was in two parts, each with its own master, and is one again: both go on ruling."""
    net = """\
Switch 8 "SW1"
[1] "node01"[1]
[2] "node02"[1]
[8] "SW2"[8]

Switch 8 "SW2"
[1] "node03"[1]
[2] "node04"[1]
[8] "SW1"[8]
"""
    places = {"node01": "SW1", "node02": "SW1", "node03": "SW2", "node04": "SW2"}
    for number, (host, switch) in enumerate(places.items()):
        net += f'\nHca 1 "{host}"\n[1] "{switch}"[{number % 2 + 1}]\n'
    fabric = make(net)
    fabric.console('Unlink "SW1"[8]')
    fabric.opensm("node01", "-p", "1")
    second = fabric.opensm("node03", "-p", "14")
    fabric.console('ReLink "SW1"[8]')
    found = bad(fabric, list(places), *MANAGERS, "ib.lid", "ib.state")
    message = f"{PORT}: two masters, node[01-02] 0x100001, node[03-04] 0x100005"
    assert found.pop("ib.masters") == dict.fromkeys(places, ("FAIL", message))
    assert list(found) == ["ib.lid"]  # both have given the same addresses
    assert {verdict for verdict, _ in found["ib.lid"].values()} == {"FAIL"}
    assert all(
        message.endswith("another port of the same subnet has it too") for _, message in found["ib.lid"].values()
    )

    second.send_signal(signal.SIGHUP)  # sweep the fabric again: the second one finds the first, and stays in reserve
    deadline = time.monotonic() + PATIENCE
    while fabric.run("node04", "saquery", "SMIR").stdout.count("SMState...............3") < 2:
        assert time.monotonic() < deadline
    verdict, message = bad(fabric, ["node04"], "ib.masters")["ib.masters"]["node04"]
    assert (verdict, message) == ("FAIL", f"{PORT}: 2 masters, 0x100005 and 0x100001")
    masters = render("services/opensm/ports.sh.j2") + render("services/opensm/masters.sh.j2") + "cc_masters"
    assert fabric.sh("node04", masters).stdout == (
        f"{PORT} sees 2 masters: 0x0000000000100005 at LID 1, 0x0000000000100001 at LID 1; stop all but one\n"
    )


def test_unplugged_cable(four, bad):
    four.fabric.opensm("node01")
    four.fabric.console('Unlink "node03"[1]')
    assert bad(four.fabric, four.hosts, *SYSFS, *MANAGERS) == {"ib.phys": {"node03": ("FAIL", f"{PORT} is Polling")}}
    four.fabric.console('ReLink "node03"[1]')
    four.fabric.kill("node01")  # no subnet manager configures the port that comes back
    found = bad(four.fabric, four.hosts, *SYSFS)
    assert found == {"ib.state": {"node03": ("FAIL", f"{PORT} is Initializing: no subnet manager has configured it")}}


def test_a_slow_link(make, bad):
    hosts = ["node01", "node02", "node03", "node04"]
    fabric = make(star(hosts, links={"node02": "w=1"}))
    fabric.opensm("node01")
    assert bad(fabric, hosts, *SYSFS) == {
        "ib.rate": {"node02": ("FAIL", f"{PORT} runs at 2.5 Gb/s in place of 10")},
        "ib.width": {"node02": ("FAIL", f"{PORT} uses 1 lane (2.5 Gb/sec (1X))")},
    }
    assert "1X" in fabric.run("node02", "iblinkinfo", "-l").stdout


def test_errors_on_a_cable(four, bad, look):
    four.fabric.opensm("node01")
    for counter, value in (("SymbolErrorCounter", 17), ("LinkDownedCounter", 12), ("PortRcvErrors", 3)):
        four.fabric.console(f'PerformanceSet "node03"[1] PortCounters.{counter}={value}')
    assert "SymbolErrorCounter:..............17" in four.fabric.run("node03", "perfquery").stdout
    assert bad(four.fabric, four.hosts, *COUNTERS) == {
        "ib.symbols": {"node03": ("WARN", f"{PORT}: symbol_error 17")},
        "ib.flap": {"node03": ("WARN", f"{PORT}: link_downed 12")},
    }
    found = look(four.fabric, ["node03"], *COUNTERS)
    assert f"the cable of {PORT} to SW1 port 3" in found["ib.symbols"]["node03"].fix
    assert found["ib.errors"]["node03"].observed == f"{PORT}: port_rcv_errors 3"


def test_errors_that_grow(four, look):
    four.fabric.opensm("node01")
    stop = threading.Event()

    def wear():
        value = 1
        while not stop.is_set():
            value = min(value + 1, 65535)
            four.fabric.console(f'PerformanceSet "node03"[1] PortCounters.SymbolErrorCounter={value}')
            stop.wait(0.02)

    wearing = threading.Thread(target=wear)
    wearing.start()
    try:
        finding = look(four.fabric, ["node03"], "ib.symbols")["ib.symbols"]["node03"]
    finally:
        stop.set()
        wearing.join()
    assert finding.verdict == "FAIL"
    assert finding.observed.endswith("more within a second")


def test_64_adapters(make, bad):
    """One node of 64 has a cable that is out."""
    hosts = [f"node{number:02}" for number in range(1, 65)]
    fabric = make(star(hosts))
    fabric.opensm("node01")
    fabric.console('Unlink "node37"[1]')
    wanted = ("ib.state", "ib.phys", "ib.rate", "ib.width", "ib.lid", "ib.fw")  # one probe for all of them
    assert bad(fabric, hosts, *wanted) == {"ib.phys": {"node37": ("FAIL", f"{PORT} is Polling")}}
    message = fabric.run("node01", "sminfo").stdout
    assert message.startswith("sminfo: sm lid 1 sm guid 0x100001")
