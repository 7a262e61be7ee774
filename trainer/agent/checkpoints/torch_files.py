"""Files that ``torch.save`` wrote: a zip, or pickles followed by raw storages. Nothing in them is imported or run."""

from __future__ import annotations

import pickle
import struct
import zipfile
from typing import Any, BinaryIO, Dict

from .files import TornError

# What torch.serialization writes first without zip: its magic number and protocol version.
_LEGACY = (0x1950A86A20F9469CFC6C, 1001)
_SIZES = {  # bytes of an element, by the name of the storage's class
    **dict.fromkeys(("ComplexDouble",), 16),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Untyped"), 1),
}


def zip_members(file: BinaryIO) -> bytes:
    """Names, checksums and sizes of the members of a zip.

    Raises:
        TornError: it is truncated or damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            end = archive.start_dir
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OSError) as error:
        raise TornError("it is truncated: its zip directory is missing") from error
    if not members or members[0].header_offset or any(one.header_offset + one.compress_size > end for one in members):
        raise TornError("its zip directory does not match the file")
    return repr([(one.filename, one.CRC, one.file_size) for one in members]).encode()


class _Stub:
    """A stand-in for every class in a pickle: nothing of it is imported or run."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "_Stub":
        return _Stub()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """A pickle may fill a list."""

    def extend(self, _: Any) -> None:
        """The same."""

    def add(self, _: Any) -> None:
        """The same, for a set."""


class _Storages(pickle.Unpickler):
    """Reads from torch's pickle only the lengths of the storages that follow it."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.bytes: Dict[str, int] = {}

    def find_class(self, _: str, name: str) -> Any:
        """A stand-in class with that name."""
        return type(name, (_Stub,), {})

    def persistent_load(self, pid: Any) -> Any:
        """Note ``("storage", type, key, place, elements, …)``."""
        if isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage":
            self.bytes[str(pid[2])] = int(pid[4]) * _SIZES[pid[1].__name__.replace("Storage", "")]
        return _Stub()


def check_pickles(file: BinaryIO, size: int) -> None:
    """Check the length of a file without zip.

    It holds the magic number, the protocol, the system, the object and the keys of its storages. The elements and bytes
    of each storage follow.

    Raises:
        TornError: it is truncated or damaged.
    """
    try:
        begins = (_Storages(file).load(), _Storages(file).load()) == _LEGACY
        _Storages(file).load()
        storages = _Storages(file)
        storages.load()
        keys = _Storages(file).load()
        end = file.tell() + sum(8 + storages.bytes[str(key)] for key in keys)
    except Exception as error:  # a truncated pickle raises nearly anything
        raise TornError("its pickles are truncated") from error
    if not begins or end != size:
        raise TornError("it has %d of %d bytes" % (size, end))
