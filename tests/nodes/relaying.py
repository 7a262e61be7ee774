"""Payloads of the relay tests, and their changes of nodes."""

import ctypes
import io
import os
import random
import signal
import tarfile
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import zstandard

from provision.model import Part
from provision.transfer import Options, Target, transfer

ROOT = "/opt/it's a ünïx"  # the quote keeps a forced command from naming it: see PLAIN
PLAIN = "/opt/a ünïx"
LARGE = b"large \xff name"  # no UTF-8


_numbers = count(1)


def new_name():
    """A name for a sandbox that no other has."""
    return f"relay-{os.getpid()}-{next(_numbers)}"


class Payload:
    """A tree of about ``megabytes``: half in tar parts, half in one large file, as parts of both wire forms.

    Args:
        megabytes: its size.
        seed: of its bytes.
        part: bytes of a part of the large file; a tar part is half as large again.
    """

    def __init__(self, megabytes, seed=1, *, part=2 << 20):
        chance = random.Random(seed)
        half = megabytes << 19
        self.files = {}  # path: (mode, mtime, content)
        self.keys = []
        tars = []
        count = max(1, half // (part * 3 // 2))
        for number in range(count):
            names = [f"dir {number}/ä {file}".encode() for file in range(20)]
            size = half // count // len(names)
            added = {
                os.fsdecode(name): (
                    0o755 if chance.random() < 0.5 else 0o444,
                    1_600_000_000 + number,
                    chance.randbytes(size),
                )
                for name in names
            }
            self.files |= added
            tars.append((f"t{number}", tar_of(added)))
        large = chance.randbytes(half // 2) + bytes(half - half // 2)
        path = "sub dir/" + os.fsdecode(LARGE)
        self.files[path] = (0o444, 1_500_000_000, large)
        ranges = [(f"r{at}", at, large[at : at + part]) for at in range(0, half, part)]
        self.parts = {
            wire: tuple(
                [Part(key, "tar", len(pack(data)), blocks(pack(data)), group="all") for key, data in tars]
                + [
                    Part(key, "range", len(pack(data)), blocks(pack(data)), path, at, 0o444, 1_500_000_000, group="all")
                    for key, at, data in ranges
                ]
            )
            for wire, pack in (("plain", bytes), ("zstd", zstandard.compress))
        }

    def size(self, wire="plain"):
        return sum(part.size for part in self.parts[wire])

    def differing(self, into):
        """The paths that are not under ``into`` as they should be, or that should not be there."""
        there = {str(path.relative_to(into)) for path in Path(into).rglob("*") if not path.is_dir()}
        wrong = set(self.files) ^ there
        for path in there - wrong:
            mode, mtime, content = self.files[path]
            stat = Path(into, path).stat()
            same = Path(into, path).read_bytes() == content
            if not same or stat.st_mode & 0o7777 != mode or stat.st_mtime != mtime:
                wrong.add(path)
        return wrong


def tar_of(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for path, (mode, mtime, content) in files.items():
            info = tarfile.TarInfo(path)
            info.mode, info.mtime, info.size = mode, mtime, len(content)
            tar.addfile(info, io.BytesIO(content))
        end = tar.offset
    return out.getvalue()[:end]


def blocks(data):
    return lambda: (data[start : start + 100_000] for start in range(0, len(data), 100_000))


class Nodes:
    """A sandbox's nodes as targets; every test has a separate folder there."""

    def __init__(self, box, inventory, connections, root=PLAIN):
        self.box, self.inventory, self.connections, self.root = box, inventory, connections, root
        self.names = [node.name for node in inventory.nodes]
        self.folder, self.into = f"{root}/transfer", f"{root}/into"
        for node in inventory.nodes:
            self.run(node, f'rm -rf "{root}"; mkdir -p "{root}/into"; mkdir -m 700 "{root}/transfer"')

    def run(self, node, script):
        result = self.connections[node].run(script, deadline=30)
        assert result.rc == 0, result
        return result.out

    def targets(self, *names, **changes):
        chosen = [node for node in self.inventory.nodes if not names or node.name in names]
        options = {"folder": self.folder, "into": self.into, "wire": "plain", "has_ssh": True} | changes
        return [Target(node, **options) for node in chosen]

    def send(self, payload, targets=None, **options):
        options = {"relay_from": 0} | options
        return transfer(self.inventory, targets or self.targets(), self.connections, payload.parts, Options(**options))

    def differing(self, payload, *names):
        return {name: payload.differing(f"{self.box.node_root(name)}{self.into}") for name in names or self.names}

    def traces(self, *names):
        """Traces of a relay that must not remain on a node: keys, lines, and processes, after a moment to exit."""
        for _ in range(30):
            if not (found := self.left(*names)):
                break
            time.sleep(0.1)
        return found

    def left(self, *names):
        """The traces of this moment, by node."""
        found = {}
        for name in names or self.names:
            root = self.box.node_root(name)
            files = [root / home / ".ssh/authorized_keys" for home in ("root", "home/trainer")]
            lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
            found[name] = [line for line in lines if " clusterctl-relay:" in line]
            found[name] += [str(path) for path in (root / "dev/shm").iterdir()]
        running = processes_of(self.box, found, "transfer/receive", "clusterctl-relay")
        return {name: both for name, each in found.items() if (both := each + running[name])}

    def identical(self, payload, *names):
        wrong = {name: paths for name, paths in self.differing(payload, *names).items() if paths}
        return wrong == {}


def processes(box, name, word):
    """Pids on this machine of a node's processes whose command line contains a word."""
    return processes_of(box, [name], word)[name]


def processes_of(box, names, *words):
    """By node, such pids for any of the words."""
    node = {Path(f"/proc/{box.init_process(name).pid}/ns/pid").readlink(): name for name in names}
    found = {name: [] for name in names}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has exited
            if name := node.get((path / "ns/pid").readlink()):
                line = (path / "cmdline").read_bytes()
                if any(word.encode() in line for word in words):
                    found[name].append(int(path.name))
    return found


def kill(box, name, word, number=signal.SIGKILL):
    """A signal to a node's processes; there must be some."""
    found = processes(box, name, word)
    assert found, f"no {word} on {name}"
    for pid in found:
        with suppress(ProcessLookupError):  # it has exited meanwhile, maybe with the one before
            os.kill(pid, number)


def share_folder(box, source, names, place):
    """Mount a folder of this machine on nodes, as an NFS home would be."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in names:
        namespace = os.open(f"/proc/{box.init_process(name).pid}/ns/mnt", os.O_RDONLY)
        child = os.fork()
        if not child:
            # The system calls open_tree and move_mount: mount(8) cannot take a folder into another namespace.
            tree = libc.syscall(428, -100, os.fsencode(source), 1)
            done = tree >= 0 and not libc.setns(namespace, 0x20000)
            done = done and not libc.syscall(429, tree, b"", -100, os.fsencode(place), 4)
            os._exit(0 if done else 1)
        os.close(namespace)
        assert os.waitpid(child, 0)[1] == 0, f"{place} cannot be mounted on {name}"
