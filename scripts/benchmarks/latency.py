"""Links with latency for benchmarks: a relay that passes every byte on after a delay.

The kernel's netem is missing on many virtual machines. The relay is a separate process, so both sides of a comparison
use the same one.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from bench_measure import BenchError


@contextmanager
def delayed(addresses: Mapping[str, str], milliseconds: float) -> Iterator[dict[str, int]]:
    """By name, a local port whose connections reach port 22 of the address with this round-trip time."""
    readable, writable = os.pipe()
    relay = os.fork()
    if relay == 0:
        os.close(readable)
        with suppress(KeyboardInterrupt):
            asyncio.run(_serve(addresses, milliseconds / 2e3, writable))
        os._exit(0)
    os.close(writable)
    try:
        with os.fdopen(readable, encoding="utf-8") as answer:
            ports = answer.readline()
        if not ports:
            raise BenchError("the relay with latency has not started")
        yield json.loads(ports)
    finally:
        os.kill(relay, 15)
        os.waitpid(relay, 0)


async def _serve(addresses: Mapping[str, str], delay: float, writable: int) -> None:
    ports = {}
    for name, address in addresses.items():
        server = await asyncio.start_server(_relay(address, delay), "127.0.0.1", 0)
        ports[name] = server.sockets[0].getsockname()[1]
    os.write(writable, json.dumps(ports).encode() + b"\n")
    os.close(writable)
    await asyncio.Event().wait()


def _relay(address: str, delay: float):  # noqa: ANN202 - asyncio's callback
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(address, 22)
        await asyncio.gather(_pass(reader, back, delay), _pass(there, writer, delay))

    return connected


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Pass bytes on, each after the delay; several may be on their way."""
    loop = asyncio.get_running_loop()

    def write(data: bytes) -> None:
        if not writer.is_closing():
            writer.write(data)

    with suppress(OSError):
        while data := await reader.read(1 << 16):
            loop.call_later(delay, write, data)
    loop.call_later(delay, writer.close)


if __name__ == "__main__":
    sys.exit("a part of scripts/bench nodes")
