"""The few system calls on whose order durability depends, in one place so that tests can fail or cut any of them.

Owns: complete writes, flushes, renames.
Must not know: what is written.
Next: `manifest` and `run_directory` do all their writing through a `Disk`.
"""

from __future__ import annotations

import os


class Disk:
    """The operating system. Every method raises OSError."""

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of `data` at `offset`; partial writes are continued."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view = view[written:]
            offset += written

    def sync(self, fd: int) -> None:
        """Return when the contents of a file, and its length, are on the drive."""
        os.fdatasync(fd)

    def truncate(self, fd: int, length: int) -> None:
        """Cut a file off."""
        os.ftruncate(fd, length)

    def replace(self, source: str, target: str) -> None:
        """Rename a file over another one: afterwards `target` is either, never a mixture, whatever happens."""
        os.replace(source, target)

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory are on the drive."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
