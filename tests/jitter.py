"""Lets threads and ranks meet in other orders: ``TEST_JITTER=0.002 pytest ...`` sleeps at so many calls of the package.

Each thread that begins in a test stops for up to 3 ms before some of its calls of functions in `offload/` and `swap/`,
chosen at random. So what a busy machine shows once in a hundred runs comes within minutes. A test that fails so says
what was wrong, not when it stopped: repeat it.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

SHARE = float(os.environ.get("TEST_JITTER") or 0.0)  # of calls
LONGEST_S = 3e-3
_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = tuple(f"{_ROOT / name}{os.sep}" for name in ("offload", "swap"))


@contextlib.contextmanager
def jittering(share: float = SHARE, packages: tuple[str, ...] = _PACKAGES) -> Iterator[None]:
    """Stop before a `share` of calls of functions whose files are in `packages`, in this thread and those it starts."""
    if not share:
        yield
        return
    chance = random.Random()  # from the system: another one in each process, also behind a fork

    def stop(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(packages) and chance.random() < share:
            time.sleep(chance.random() * LONGEST_S)

    before, before_here = threading.getprofile(), sys.getprofile()
    threading.setprofile(stop)
    sys.setprofile(stop)
    try:
        yield
    finally:
        sys.setprofile(before_here)
        threading.setprofile(before)  # type: ignore[arg-type]
