"""Reads from the memory of another process of the same user, with Linux's `process_vm_readv`."""

import ctypes
import errno
import os

__all__ = ["has_bytes", "read_memory"]


class _Piece(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_process_vm_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _process_vm_readv is not None:
    _pieces = (ctypes.POINTER(_Piece), ctypes.c_ulong)
    _process_vm_readv.argtypes = (ctypes.c_int, *_pieces, *_pieces, ctypes.c_ulong)
    _process_vm_readv.restype = ctypes.c_ssize_t


def read_memory(process: int, address: int, into: int, num_bytes: int) -> None:
    """Copy from the memory of ``process`` to the address ``into``, without holding the GIL.

    Raises:
        OSError: the process is gone, or the system does not permit it.
    """
    if _process_vm_readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    done = 0
    while done < num_bytes:
        rest = num_bytes - done
        here, there = _Piece(into + done, rest), _Piece(address + done, rest)
        count = _process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += count


def has_bytes(process: int, address: int, expected: bytes) -> bool:
    """Whether this process can read the memory of ``process`` and finds ``expected`` there."""
    found = ctypes.create_string_buffer(len(expected))
    try:
        read_memory(process, address, ctypes.addressof(found), len(expected))
    except OSError:
        return False
    return found.raw == expected
