"""What can go wrong between memory and a file, with everything needed to act on it.

Owns: the exception classes of this package and the wording of an I/O error.
Must not know: engines, stores, tensors.
Next: `aio` turns results of the extension into these errors; `files` and `durable` those of a path.
"""

from __future__ import annotations

import errno as _errno
import os
from typing import Any


class SwapError(OSError):
    """An I/O operation or a swap store failed.

    The text names the subject, the range, the errno and the remedy; the attributes hold the same as values.

    Attributes:
        errno: errno of the failed call, or None when no system call failed.
        path: file or directory concerned, or None.
        offset_bytes: start of the range that failed, or None.
        length_bytes: length of the range that failed, or None.
        remedy: what the user can do, or "".
        detail: state of the engine at that moment, or "".
    """

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        path: str | None = None,
        offset_bytes: int | None = None,
        length_bytes: int | None = None,
        remedy: str = "",
        detail: str = "",
    ) -> None:
        super().__init__(errno, message)
        self.errno = errno
        self.message = message
        self.path = path
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self.remedy = remedy
        self.detail = detail

    def __str__(self) -> str:
        text = self.message
        if self.errno is not None:
            name = _errno.errorcode.get(self.errno, "errno")
            text += f" ({name} {self.errno}: {os.strerror(self.errno)})"
        text += f"; {self.remedy}" if self.remedy else ""
        return f"{text}\n{self.detail}" if self.detail else text

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("errno", "path", "offset_bytes", "length_bytes", "remedy", "detail")
        return (_rebuild, (type(self), self.message, {name: getattr(self, name) for name in names}))


class SwapDeadlineError(SwapError, TimeoutError):
    """A wait passed its deadline; the text holds a state dump of the engine.

    The operation is still in flight: its memory must not be reused or freed.
    """


class SwapFullError(SwapError):
    """No room: on the file system (ENOSPC) or in the store's fixed capacity; the text names the bytes."""


class SwapCorruptError(SwapError):
    """The bytes on disk are not those that were written; the text says where and what was expected instead."""


class SwapLockedError(SwapError):
    """Another process, or another store of this one, uses the run directory; the text says who."""


def error_class(code: int | None) -> type[SwapError]:
    """Return SwapFullError for an errno that means no room, else SwapError."""
    return SwapFullError if code in (_errno.ENOSPC, _errno.EDQUOT) else SwapError


def _rebuild(cls: type[SwapError], message: str, values: dict[str, Any]) -> SwapError:
    return cls(message, **values)


def format_bytes(size_bytes: int) -> str:
    """Format a size for a message, exact and readable: ``1.5 GiB (1610612736 bytes)``."""
    value = float(size_bytes)
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{size_bytes} bytes" if units[0] == "bytes" else f"{value:.4g} {units[0]} ({size_bytes} bytes)"
