"""Page-aligned memory with a known address, for tests of the I/O layers."""

from __future__ import annotations

import ctypes
import mmap

import numpy


class Memory:
    """An anonymous mapping of `size` bytes; `address` is a multiple of the page size."""

    def __init__(self, size: int) -> None:
        self.map = mmap.mmap(-1, size)
        self.size = size
        self._anchor = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._anchor)

    def __setitem__(self, at: slice, data: bytes) -> None:
        self.map[at] = data

    def __getitem__(self, at: slice) -> bytes:
        return self.map[at]

    def fill(self, data: bytes) -> None:
        """Set the start to `data` and the rest to zeros."""
        self.map[:] = data + bytes(self.size - len(data))


def pattern(length: int, seed: int = 0) -> bytes:
    """Bytes that differ in every 8-byte word and with every seed: position and seed, little endian."""
    words = numpy.arange(length // 8 + 1, dtype="<u8") | numpy.uint64((seed & 0xFFFFFFFF) << 32)
    return words.tobytes()[:length]
