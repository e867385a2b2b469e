"""Keeps a drive busy at a given rate, until the process is ended: half of the bytes are read and half are written.

Its own work is small, so what somebody computes beside it is slower by what the drive takes of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from offload.memory.arena import HostArena
from offload.memory.budget import Tier
from offload.sizes import MIB
from swap import SwapStore

PIECE_BYTES = 16 * MIB  # requests have 4 MiB; with a call for each MiB, the calls take more than the drive does
TOGETHER = 2  # pieces that are under way at once
PIECES = 8


@contextlib.contextmanager
def busy_drive(path: str, bytes_per_second: float) -> Iterator[None]:
    """Have another process read and write files below `path` meanwhile."""
    command = [sys.executable, __file__, path, str(bytes_per_second)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                sys.exit(f"{Path(__file__).name}: expected it to begin but it has ended")
            yield
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("bytes_per_second", type=float)
    arguments = parser.parse_args()
    arena = HostArena(Tier.HOST, TOGETHER * PIECE_BYTES)
    addresses = [arena.base_address + number * PIECE_BYTES for number in range(TOGETHER)]
    with SwapStore(arguments.path, 2 * PIECES * PIECE_BYTES) as store:
        for number in range(PIECES):
            store.put(number, addresses[0], PIECE_BYTES).wait()
        print("ready", flush=True)
        begin, moved = time.monotonic(), 0
        for turn in itertools.count():
            keys = [(TOGETHER * turn + number) % PIECES for number in range(TOGETHER)]
            items = [(key, address, PIECE_BYTES) for key, address in zip(keys, addresses, strict=True)]
            for ticket in (store.put_many if turn % 2 else store.get_many)(items):
                ticket.wait()
            moved += TOGETHER * PIECE_BYTES
            time.sleep(max(moved / arguments.bytes_per_second - (time.monotonic() - begin), 0.0))


if __name__ == "__main__":
    main()
