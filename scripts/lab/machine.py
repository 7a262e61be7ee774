"""Emulated machines for tests: whole Debians with systemd and a kernel of their own, without hardware virtualisation.

``with machines(2) as lab`` starts them and ends with none of it left, however the test ends: everything hangs on
processes that the kernel kills with this one (``--pdeathsig``), and with them go the network namespace that holds the
switch, the cable to it, and the machines' disks, which have no names. The machines reach each other and this host's
end of the cable, and nothing else: they have no route.
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Network, ip_address
from pathlib import Path

import machine_image
import machine_parts
from lab_run import LabError

from provision.sandbox import network

PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "mke2fs": "e2fsprogs", "debootstrap": "debootstrap"}
MEMORY = 640  # MB
BOOT_SECONDS = 600  # about 20 on a quiet host
# mitigations: an emulated CPU leaks nothing, and emulated barriers cost much. panic: a crash ends the machine.
# norandmaps: QEMU translates a library again for each address that a process has it at, which doubled the cost of all.
# No audit=0: each login and sudo would have the kernel start modprobe a dozen times, for the socket that it then lacks.
_KERNEL = (
    "console=ttyS0 root=/dev/nvme0n1 rootfstype=ext4 rootflags=noinit_itable rw quiet panic=1 mitigations=off"
    " apparmor=0 random.trust_cpu=on nowatchdog net.ifnames=0 norandmaps modprobe.blacklist=ata_piix,ata_generic"
)


@dataclass
class Machine:
    """One emulated machine. ``console`` holds what its kernel and systemd print."""

    name: str
    address: str
    console: Path
    ssh: tuple[str, ...]  # argv of ssh up to the destination
    start: Callable[[], subprocess.Popen[bytes]]  # turns it on; the process ends when it shuts down or reboots
    process: subprocess.Popen[bytes] = field(init=False)
    boot: str = ""  # the kernel's boot id, of the last boot that was waited for
    _said: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        self.process = self.start()

    def run(
        self, command: str, *, user: str = "root", check: bool = True, seconds: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command line over ssh.

        Raises:
            LabError: it failed and ``check`` is set, or it took more than ``seconds``.
        """
        argv = [*self.ssh, f"{user}@{self.address}", command]
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{self.name}: `{command}` did not end in {seconds} s") from error
        if check and done.returncode:
            raise LabError(f"{self.name}: `{command}` exited {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def out(self, command: str, *, user: str = "root") -> str:
        """What a command that succeeds prints, without the last newline."""
        return self.run(command, user=user).stdout.rstrip("\n")

    def hang_up(self) -> None:
        """Ends the connections that ``run`` keeps, without informing the machine."""
        for path in self.console.parent.glob(f"{self.address}-*"):
            argv = [*self.ssh, "-O", "exit", f"{path.name.rpartition('-')[2]}@{self.address}"]
            subprocess.run(argv, capture_output=True, check=False, timeout=60)
            path.unlink(missing_ok=True)

    def reboot(self) -> None:
        """Shuts the machine down in order and waits until it is up again.

        Raises:
            LabError: it did not end or did not come back; with the last lines of its console.
        """
        self.run("systemctl reboot", check=False)  # the connection may break before the answer
        self.hang_up()
        try:
            self.process.wait(BOOT_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._trouble(f"has not shut down after {BOOT_SECONDS} s") from None
        self._power_on()
        self.wait_up()

    def power_cycle(self) -> None:
        """Takes the power away for a moment: nothing is shut down. Wait with ``wait_reached`` or ``wait_up``."""
        self.hang_up()
        self.process.kill()
        self.process.wait()
        self._power_on()

    def _power_on(self) -> None:
        """Starts QEMU again on the same disk: its reset of a running machine at times leaves one that does nothing."""
        self.process = self.start()
        self._said = b""

    def wait_reached(self, seconds: float = BOOT_SECONDS) -> None:
        """Waits until people can log in after a boot, also where something is still being started.

        Raises:
            LabError: the machine ended or it took too long; with the last lines of its console.
        """
        self.boot = self._line("reached", seconds)

    def wait_up(self, seconds: float = BOOT_SECONDS) -> None:
        """Waits until a boot is complete.

        Raises:
            LabError: the machine ended, it took too long, or units failed; with the last lines of its console.
        """
        self.boot, state, *failed = self._line("up", seconds).split()
        if state != "running":
            raise self._trouble(f"is {state}; failed: {' '.join(failed)}")

    def _line(self, word: str, seconds: float) -> str:
        """The rest of the machine's next line that starts with ``word``."""
        assert self.process.stdout is not None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" not in self._said:
                    if not selector.select(max(0.0, until - time.monotonic())):
                        raise self._trouble(f"is not up after {seconds:.0f} s")
                    data = os.read(self.process.stdout.fileno(), 4096)
                    if not data:
                        raise self._trouble("ended")
                    self._said += data
                line, _, self._said = self._said.partition(b"\n")
                first, _, rest = line.decode(errors="replace").strip().partition(" ")
                if first == word:
                    return rest

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Suspends the machine during the block: connections stay open, and nothing answers."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def _trouble(self, what: str) -> LabError:
        tail = "\n".join(self.console.read_text(errors="replace").splitlines()[-30:]) if self.console.exists() else ""
        return LabError(f"{self.name} {what}. The end of {self.console}:\n{tail}")


@dataclass(frozen=True)
class Lab:
    """Running machines and what clusterctl needs to reach them; the first one is the head."""

    machines: tuple[Machine, ...]
    folder: Path
    key: Path
    known_hosts: Path
    subnet: IPv4Network

    @property
    def head(self) -> Machine:
        """The first machine."""
        return self.machines[0]

    @property
    def client(self) -> Machine:
        """The second machine."""
        return self.machines[1]

    def inventory(self, services: str = "", *, name: str = "inventory.yaml", user: str = machine_image.USER) -> Path:
        """Writes an inventory of all machines. ``services`` is the YAML below ``services:``, not indented."""
        path = self.folder / name
        nodes = "".join(f"  {each.name}: {each.address}\n" for each in self.machines)
        below = "".join(f"  {line}\n" for line in services.splitlines())
        path.write_text(
            f"prefix: /opt/lab/current\nssh: {{user: {user}, key: {self.key}, known_hosts: {self.known_hosts}}}\n"
            f"nodes:\n{nodes}" + (f"services:\n{below}" if below else "")
        )
        return path


def missing() -> str:
    """Why no machine can be started here; empty when one can."""
    if os.geteuid():
        return "emulated machines need root, for a network namespace"
    lacking = [
        package for program, package in PROGRAMS.items() if not shutil.which(program, path=machine_parts.SYSTEM_PATH)
    ]
    return f"missing: apt-get install {' '.join(lacking)}" if lacking else ""


@contextlib.contextmanager
def machines(count: int, folder: Path | None = None) -> Iterator[Lab]:
    """Starts machines and waits until each is up; ``folder`` gets their consoles, key and known_hosts.

    Raises:
        LabError: a program is missing, the image cannot be built, or a machine does not start.
    """
    trouble = missing()
    if trouble:
        raise LabError(trouble)
    disk = machine_image.image()
    subnet = network.choose_subnet(network.taken_subnets())
    names = [f"vm{number}" for number in range(1, count + 1)]
    addresses = network.addresses(subnet, count)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clusterctl-machines-")))
        key, known_hosts = folder / "id", folder / "known_hosts"
        shutil.copy(disk.key, key)
        known_hosts.write_text("".join(f"{address} {disk.host_key}\n" for address in addresses))
        options = (  # a login costs the emulated CPU a second: a user's first connection serves the next calls too
            "BatchMode=yes", "IdentitiesOnly=yes", "ConnectTimeout=60", "ServerAliveInterval=60",
            "StrictHostKeyChecking=yes", f"UserKnownHostsFile={known_hosts}", "GlobalKnownHostsFile=/dev/null",
            "ControlMaster=auto", f"ControlPath={folder}/%h-%r", "ControlPersist=yes",
        )  # fmt: skip
        ssh = ("ssh", "-F", "none", "-i", str(key), *(word for each in options for word in ("-o", each)))
        switch = machine_parts.switch(stack, names, subnet)
        started = []
        for name, address in zip(names, addresses, strict=True):
            console = folder / f"{name}.console"
            own = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            own_disk = Path(f"/proc/{os.getpid()}/fd/{own.fileno()}")
            machine_parts.run(["cp", "--sparse=always", "--reflink=auto", str(disk.disk), str(own_disk)])
            words = _qemu(disk.kernel, own_disk, name, f"{address}/{subnet.prefixlen}", console, switch)
            started.append(Machine(name, address, console, ssh, partial(machine_parts.start, stack, words)))
            stack.callback(started[-1].hang_up)
        for machine in started:
            machine.wait_up()
        yield Lab(tuple(started), folder, key, known_hosts, subnet)


def _qemu(kernel: Path, disk: Path, name: str, address: str, console: Path, switch: int) -> list[str]:
    hardware = f"52:54:{ip_address(address.partition('/')[0]).packed.hex(':')}"
    return [
        "nsenter", f"--net=/proc/{switch}/ns/net", "setpriv", "--pdeathsig", "KILL",
        "qemu-system-x86_64", "-name", name, "-accel", "tcg,thread=multi", "-m", str(MEMORY), "-smp", "1",
        "-nodefaults", "-no-user-config", "-display", "none",
        "-kernel", str(kernel), "-action", "reboot=shutdown",
        "-append", f"{_KERNEL} systemd.hostname={name} lab.name={name} lab.address={address}",
        "-drive", f"file={disk},format=raw,if=none,id=disk,cache=unsafe", "-device", "nvme,drive=disk,serial=lab",
        "-netdev", f"tap,id=cable,ifname={name},script=no,downscript=no",
        "-device", f"virtio-net-pci,netdev=cable,mac={hardware},romfile=", "-device", "virtio-rng-pci",
        "-chardev", f"file,id=console,path={console},append=on", "-serial", "chardev:console", "-serial", "stdio",
    ]  # fmt: skip


if __name__ == "__main__":  # two machines to try things by hand
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell is started without
    with contextlib.suppress(KeyboardInterrupt), machines(2) as lab:
        print(f"{lab.inventory()}\n{' '.join(lab.machines[0].ssh)} root@{lab.machines[0].address}")
        signal.pause()
