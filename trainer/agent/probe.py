"""The facts of a node that a launcher needs. It does not import torch, so that it answers quickly.

=====================  ===========================================================================
``error``              the reason why this node cannot take part, or null
``hostname``           the node's own name; ``hostname_resolves``: "address", "loopback" or "no"
``master_ip``          the master's address; ``master_loopback``: it is this machine's loopback address
``ip``, ``interface``  the local address from which the master is reached, and its interface (``lo``,
                       ``eth0``); on the master itself the interface of the master's address
``port``               rank 0: the requested port, or a free one outside the range of outgoing connections
``port_free``          rank 0: whether the requested port is free; null if none was requested
``link_port``          another free port, for the link between the agents
``gpus``, ``cpus``     counts; ``memory_available`` and ``disk_free`` in bytes
``infiniband``         ``[{"device", "port", "state": "ACTIVE", "link_layer": "InfiniBand", "rate": Gbit/s,
                       "gid_index": of Ethernet's RoCE v2 address over IPv4}]``; unknown values are null
``hardware``           what can differ between machines, see ``hardware``
``packages``           names of the distributions in the environment that runs this, lower case, ``_`` for ``-``
``versions``           by such a name, the version, if the folder's name has it
``ops``                names of DeepSpeed's ops that are compiled in this environment
``compilers``          which of c++, ninja and nvcc a process of the run finds
``leaks``              variables that would change what Python imports
``runs``               runs with processes here, see ``runs``
``clock``              seconds since the epoch; ``boot_id``, ``uid``, ``python`` and ``rank``
=====================  ===========================================================================
"""

from __future__ import annotations

import array
import fcntl
import os
import platform
import pwd
import random
import re
import shutil
import socket
import struct
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from .processes import RUN, Stat, read, stat_of

# ``python -I <root>/runs/<run>/agent COMMAND``; commands that only read are not a sign of a running run.
_AGENT = re.compile(rb"\0(?:[^\0]*/)?runs/([^/\0]+)/agent\0([^\0]+)\0")
_LOOKS = (b"probe", b"digest", b"talk", b"follow", b"stop")
_MARK = re.compile(rb"\0%s=([^\0]+)\0" % RUN.encode())
_VISIBLE = re.compile(rb"\0CUDA_VISIBLE_DEVICES=([^\0]*)\0")


class _Process(NamedTuple):
    stat: Stat
    user: int
    run: str  # by its mark; "" without one
    agent: str  # the run whose agent it is
    visible: Optional[str]


def runs() -> List[Dict[str, Any]]:
    """List every run with living processes on this node, so that two runs do not share a GPU.

    Each has ``run``, ``user``, ``agent`` (whether its agent is running), ``pids`` (its processes without the agent's)
    and ``visible`` (their CUDA_VISIBLE_DEVICES; null if unset or another user's).

    A run's processes have its mark in their environment. Another user's environment is not readable; that user's
    processes are found as descendants of their agent, whose command line is readable. A run without an agent is a
    leftover.
    """
    table = _processes()
    found: Dict[str, Dict[str, Any]] = {}
    for pid, process in sorted(table.items()):
        run = process.agent or process.run or _above(table, pid)
        if not run:
            continue
        about = found.setdefault(
            run, {"run": run, "user": _name(process.user), "agent": False, "pids": [], "visible": None}
        )
        if process.agent:
            about["agent"] = True
        else:
            about["pids"].append(pid)
        if about["visible"] is None:
            about["visible"] = process.visible
    return [found[run] for run in sorted(found)]


def _processes() -> Dict[int, _Process]:
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - a Path for each process is slow
        stat = stat_of(int(name)) if name.isdigit() else None
        if stat is None or stat.state in "ZX":
            continue
        environment = b"\0" + read("/proc/%s/environ" % name) + b"\0"
        line = _AGENT.search(b"\0" + read("/proc/%s/cmdline" % name) + b"\0")
        mark, visible = _MARK.search(environment), _VISIBLE.search(environment)
        try:
            user = os.stat("/proc/%s" % name).st_uid  # noqa: PTH116
        except OSError:  # it has ended
            continue
        table[int(name)] = _Process(
            stat,
            user,
            os.fsdecode(mark.group(1)) if mark else "",
            os.fsdecode(line.group(1)) if line and line.group(2) not in _LOOKS else "",
            os.fsdecode(visible.group(1)) if mark and visible else None,
        )
    return table


def _above(table: Dict[int, _Process], pid: int) -> str:
    """The run of the nearest agent among a process's ancestors."""
    seen = set()
    while pid in table and pid not in seen:
        seen.add(pid)
        if table[pid].agent:
            return table[pid].agent
        pid = table[pid].stat.parent
    return ""


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


# SELF others

LEAKS = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "LD_PRELOAD", "LD_LIBRARY_PATH", "CONDA_PREFIX", "VIRTUAL_ENV")
PATIENCE = 5.0  # seconds for a name: a node without network may have a dead name server
_LONG = 300  # characters of a value of ``hardware``
PORTS = range(20000, 30000)  # below ip_local_port_range's default, 32768 to 60999, so that no connection takes it

_SIOCGIFCONF = 0x8912  # <linux/sockios.h>
_IFREQ = 40  # bytes of struct ifreq on 64-bit Linux


def facts(master: str, rank: int, *, port: Optional[int], folder: str) -> Dict[str, Any]:
    """Collect the facts of this node, for a run whose rank 0 is at ``master``."""
    hostname = socket.gethostname()
    found: Dict[str, Any] = {
        "error": None,
        "rank": rank,
        "hostname": hostname,
        "hostname_resolves": _kind(resolve(hostname)),
        "python": platform.python_version(),
        "gpus": gpus(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_available": memory_available(),
        "disk_free": shutil.disk_usage(folder).free,
        "infiniband": infiniband(),
        "hardware": hardware(),
        "packages": packages(),
        "versions": versions(),
        "ops": ops(),
        "compilers": compilers(),
        "leaks": {name: os.environ[name] for name in LEAKS if name in os.environ},
        "runs": runs(),
        "boot_id": _text(Path("/proc/sys/kernel/random/boot_id")),
        "uid": os.getuid(),
        "clock": time.time(),
        "master": master,
        "master_ip": None,
        "master_loopback": None,
        "ip": None,
        "interface": None,
        "port": None,
        "port_free": None,
        "link_port": None,
    }
    found["error"] = _reach(found, master, rank, port)
    return found


def _reach(found: Dict[str, Any], master: str, rank: int, port: Optional[int]) -> Optional[str]:
    """Add the facts about the way to the master. Returns an error, or None."""
    addresses = resolve(master)
    if not addresses:
        return "cannot resolve %s, the name of rank 0" % master
    found["master_ip"] = addresses[0]
    found["master_loopback"] = is_loopback(addresses[0])
    try:
        found["ip"] = local_address(addresses[0])
    except OSError as error:
        return "no route to rank 0 at %s: %s" % (addresses[0], error.strerror)
    found["interface"] = interfaces().get(found["ip"])
    if found["interface"] is None:
        return "no interface has %s, the address from which rank 0 is reached" % found["ip"]
    if rank != 0:
        found["link_port"] = free_port(found["ip"])  # for a run that survives the loss of rank 0's node
        return None
    if found["ip"] != addresses[0]:
        return "%s (%s) is not an address of this node, which has rank 0" % (master, addresses[0])
    found["link_port"] = free_port(addresses[0], port)
    if port is not None:
        found["port"] = port
        found["port_free"] = can_listen(addresses[0], port)
        return None if found["port_free"] else "port %d is in use" % port
    found["port"] = free_port(addresses[0], found["link_port"])
    return None if found["port"] else "no free port between %d and %d" % (PORTS[0], PORTS[-1])


def resolve(name: str) -> List[str]:
    """The addresses of a name, IPv4 first; empty if it has none or no server answers in time."""
    found: List[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError):
            return
        found.extend(sorted((str(answer[4][0]) for answer in answers), key=lambda address: ":" in address))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return list(dict.fromkeys(found))


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    return address == "::1" or address.startswith("127.")


def _kind(addresses: List[str]) -> str:
    if not addresses:
        return "no"
    return "loopback" if any(is_loopback(address) for address in addresses) else "address"


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def local_address(master: str) -> str:
    """The source address of packets to ``master``. Sends nothing: connecting a UDP socket only looks up the route."""
    with socket.socket(_family(master), socket.SOCK_DGRAM) as sock:
        sock.connect((master, 9))
        return str(sock.getsockname()[0])


def interfaces() -> Dict[str, str]:
    """Address -> interface, for every address of this machine."""
    found = {}
    size = 32 * _IFREQ
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        while True:
            space = array.array("B", bytes(size))
            asked = struct.pack("iL", size, space.buffer_info()[0])
            used = struct.unpack("iL", fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, asked))[0]
            if used <= size - _IFREQ:
                break
            size *= 2
    for at in range(0, used, _IFREQ):
        entry = space[at : at + _IFREQ].tobytes()
        label = os.fsdecode(entry[:16].split(b"\0", 1)[0])
        found[socket.inet_ntoa(entry[20:24])] = label.split(":", 1)[0]  # eth0:1 is a second address of eth0
    for line in _text(Path("/proc/net/if_inet6")).splitlines():
        fields = line.split()
        found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))] = fields[5]
    return found


def interface_to(master: str) -> Optional[str]:
    """The interface from which ``master`` is reached; None if that is not known."""
    addresses = resolve(master)
    try:
        return interfaces().get(local_address(addresses[0])) if addresses else None
    except OSError:
        return None


def can_listen(address: str, port: int) -> bool:
    """Whether rank 0 can listen there now. torch's store listens on every address, this tests one."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen(1)
        except (OSError, OverflowError):
            return False
    return True


def free_port(address: str, taken: Optional[int] = None) -> Optional[int]:
    """A port to listen on at ``address``, other than ``taken``."""
    return next((port for port in random.sample(PORTS, 200) if port != taken and can_listen(address, port)), None)


def gpus() -> int:
    """The number of NVIDIA GPUs that the driver shows."""
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", path.name)]
    return len(devices) or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def memory_available() -> Optional[int]:
    """Bytes that are available without swapping."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def infiniband(root: str = "/sys/class/infiniband") -> List[Dict[str, Any]]:
    """The ports of the RDMA devices. ``link_layer`` distinguishes InfiniBand from RoCE."""
    ports = []
    for path in sorted(Path(root).glob("*/ports/*")):
        state = _text(path / "state")  # "4: ACTIVE"
        rate = re.match(r"[\d.]+", _text(path / "rate"))  # "200 Gb/sec (4X HDR)"
        link_layer = _text(path / "link_layer")
        ports.append(
            {
                "device": path.parent.parent.name,
                "port": int(path.name),
                "state": state.split(":")[-1].strip(),
                "link_layer": link_layer,
                "rate": float(rate.group()) if rate else None,
                "gid_index": _gid_index(path) if link_layer == "Ethernet" else None,
            }
        )
    return ports


def _gid_index(port: Path) -> Optional[int]:
    """The first GID that is an IPv4 address spoken as RoCE v2 (kernel: ``ABI/stable/sysfs-class-infiniband``)."""
    types = [path for path in (port / "gid_attrs" / "types").glob("*") if path.name.isdigit()]
    for path in sorted(types, key=lambda each: int(each.name)):
        mapped = _text(port / "gids" / path.name).startswith("0000:0000:0000:0000:0000:ffff:")
        if mapped and _text(path) == "RoCE v2":  # reading an empty entry is an error
            return int(path.name)
    return None


def hardware(root: str = "/") -> Dict[str, str]:
    """Kernel, system, processor, and models and firmware of GPUs and network cards, from ``/proc`` and ``/sys``.

    Equal parts are counted: ``8 x NVIDIA H100 80GB HBM3``. Unknown values are omitted. It starts no program, because
    nvidia-smi can take seconds.
    """
    proc, sys_class = Path(root) / "proc", Path(root) / "sys/class/infiniband"
    version = re.search(r"\b\d{3,4}(\.\d+){1,3}\b", _text(proc / "driver/nvidia/version"))
    system = re.search(r'^PRETTY_NAME="?([^"\n]*)', _text(Path(root) / "etc/os-release"), re.MULTILINE)
    processor = re.search(r"^model name\s*:\s*(.*)", _text(proc / "cpuinfo"), re.MULTILINE)
    gpus = [_text(path) for path in sorted((proc / "driver/nvidia/gpus").glob("*/information"))]
    cards = [path for path in sorted(sys_class.glob("*")) if path.is_dir()]
    found = {
        "kernel": _text(proc / "sys/kernel/osrelease"),
        "system": system.group(1) if system else "",
        "processor": processor.group(1) if processor else "",
        "driver": version.group() if version else "",
        "GPUs": _counted([_line_of(each, "Model") for each in gpus]),
        "GPU firmware": _counted([_line_of(each, "GPU Firmware") for each in gpus]),
        "GPU VBIOS": _counted([_line_of(each, "Video BIOS") for each in gpus]),
        "network cards": _counted([_text(path / "hca_type") for path in cards]),
        "network card firmware": _counted([_text(path / "fw_ver") for path in cards]),
    }
    return {name: value[:_LONG] for name, value in found.items() if value}


def _line_of(text: str, name: str) -> str:
    match = re.search(r"^%s:[ \t]*(.*)" % name, text, re.MULTILINE)
    return match.group(1).strip() if match else ""


def _counted(values: List[str]) -> str:
    known = [value for value in values if value and not value.startswith("??")]  # a GPU that is not initialized
    return ", ".join("%d x %s" % (known.count(value), value) for value in sorted(set(known)))


def packages(folders: Optional[List[str]] = None) -> List[str]:
    """The names of the distributions in ``site-packages``, from folder names; also of editable installs."""
    return sorted(_distributions(folders))


def versions(folders: Optional[List[str]] = None) -> Dict[str, str]:
    """By name, the versions of the distributions whose folder names have one."""
    return {name: version for name, version in sorted(_distributions(folders).items()) if version}


def _distributions(folders: Optional[List[str]]) -> Dict[str, str]:
    found: Dict[str, str] = {}
    for folder in _site() if folders is None else folders:
        for path in Path(folder).glob("*"):
            match = re.match(r"(.+?)(?:-(\d.*))?\.(?:dist-info|egg-info|egg-link)$", path.name)
            if match:
                name = re.sub(r"[-_.]+", "_", match.group(1)).lower()
                found[name] = match.group(2) or found.get(name, "")
    return found


def _site() -> List[str]:
    return [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]


def ops(folders: Optional[List[str]] = None) -> List[str]:
    """The names of DeepSpeed's compiled ops: ``deepspeed/ops/adam/cpu_adam_op.so`` is cpu_adam."""
    found = set()
    for folder in _site() if folders is None else folders:
        for path in Path(folder).glob("deepspeed/ops/*/*_op*.so"):
            found.add(path.name.partition(".")[0][: -len("_op")])
    return sorted(found)


def compilers() -> List[str]:
    """The compilers that torch's extensions use, as a process of the run finds them."""
    cuda = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath), cuda + "/bin"])  # noqa: PTH118
    named = {"c++": os.environ.get("CXX", "c++"), "ninja": "ninja", "nvcc": "nvcc"}
    return [name for name, program in named.items() if shutil.which(program, path=path)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
