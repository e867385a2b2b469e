"""How much memory this process really occupies, as the kernel counts it.

Owns the reading of the resident set and giving the allocator's empty pages back. Knows nothing of budgets: see
:mod:`offload.activations.ledger`, which compares.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path


def status_bytes(field: str) -> int:
    """Return a size that the kernel notes of this process, such as ``VmRSS``, or ``VmHWM``, the peak of it.

    Raises:
        OSError: the system does not tell (no ``/proc``).
        KeyError: the kernel notes no such size.
    """
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise KeyError(field)
    return int(found[1]) * 1024


def reset_high_water() -> None:
    """Let ``VmHWM`` begin anew, with what is resident now.

    Raises:
        OSError: the kernel cannot do it.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Rss:
    """Anonymous resident memory of this process: tensors and arenas, but neither code nor mapped files.

    Raises:
        OSError: the system does not tell (no ``/proc``).
    """

    notes_peaks = False  # the kernel notes the highest peak of the process's life

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._most_shared = 0  # pages

    def _pages(self) -> tuple[int, int]:
        _, resident, shared, _ = os.pread(self._statm, 128, 0).split(b" ", 3)  # 2 microseconds
        pages = int(resident), int(shared)
        self._most_shared = max(self._most_shared, pages[1])
        return pages

    def now_bytes(self) -> int:
        """Return the bytes that are resident now."""
        resident, shared = self._pages()
        return (resident - shared) * self._page_bytes

    def high_water_bytes(self) -> int:
        """Return the most that has been resident at once, as far as the kernel has noted it; 0 where it does not.

        The kernel counts mapped files, too, and may take their pages away at any time: of them as many are left out as
        were ever seen, so that this rises only with what the kernel has noted.
        """
        try:
            peak_bytes = status_bytes("VmHWM")
        except KeyError:
            return 0
        self._pages()
        return peak_bytes - self._most_shared * self._page_bytes

    def trim(self) -> None:
        """Give pages back that the C library keeps though nothing is left in them."""
        trim_heap()

    def forget_peak(self) -> None:
        """Nothing: samples tell of each pass, and the kernel's peak is the process's."""

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


def open_rss() -> Rss | None:
    """Return a meter, None where the system has none."""
    with contextlib.suppress(OSError):
        return Rss()
    return None


def trim_heap() -> None:
    """Give pages back that the C library keeps though nothing is left in them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)
