"""What ``python -m offload tune`` has found out about the drives of this machine, kept for the engine.

Owns one small JSON file in the user's cache folder: settings and bandwidth per device. Knows neither how they are
measured (:mod:`offload.cli.drive.tune`) nor what a store is; :func:`store_options` only names its arguments. Losing the
file costs speed, nothing else: what cannot be read counts as not measured.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.cache import cache_folder
from offload.memory.kept import keep, read_kept
from offload.memory.machine import mount_of

logger = logging.getLogger(__name__)

_ENGINES = ("io_uring", "threads", "auto")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Settings that served a drive best, and what they gave.

    Attributes:
        engine: "io_uring" or "threads"; "auto" where there was no io_uring to compare threads with.
        queue_depth: requests given to the kernel at a time.
        block_bytes: largest request.
        threads: workers of the thread engine.
        read_gb_s, write_gb_s: bandwidth with them.
        date: day of the measurement, ISO 8601.
    """

    engine: str
    queue_depth: int
    block_bytes: int
    threads: int
    read_gb_s: float
    write_gb_s: float
    date: str

    def __post_init__(self) -> None:
        whole = (self.queue_depth, self.block_bytes, self.threads)
        if (
            self.engine not in _ENGINES
            or any(type(value) is not int or value < 1 for value in whole)
            or self.block_bytes % 4096
            or not all(0 < value < float("inf") for value in (self.read_gb_s, self.write_gb_s))
        ):
            raise ValueError(f"drive settings: {self} make no sense; measure again")


def cache_file() -> Path:
    """Return where measurements are kept."""
    return cache_folder() / "drives.json"


def device_of(path: str | Path) -> str | None:
    """Return the name under which the drive that holds `path` is kept; None where there is no telling."""
    mount = mount_of(path)
    return None if mount is None else f"{mount.model or mount.drive or mount.file_system} ({mount.device})"


def remember(path: str | Path, measured: Measured) -> Path | None:
    """Keep a measurement of the drive that holds `path`; returns the file, None where nothing could be kept."""
    device, file = device_of(path), cache_file()
    if device is None:
        return None
    try:
        keep(file, device, dataclasses.asdict(measured))
    except OSError as error:
        logger.warning("drive settings: not kept in %s (%s)", file, error)
        return None
    return file


def recall(path: str | Path) -> Measured | None:
    """Return what was measured of the drive that holds `path`, None where nothing was."""
    device, file = device_of(path), cache_file()
    found = read_kept(file).get(device) if device is not None else None
    if found is None:
        return None
    try:
        return Measured(**found)
    except (TypeError, ValueError) as error:
        logger.warning("drive settings: ignoring %s in %s (%s)", device, file, error)
        return None


def store_options(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Return arguments for :class:`swap.SwapStore` over `paths`: none where a drive has not been measured.

    Paths get shares in proportion to their bandwidth, both directions counted alike; the fastest one's settings hold
    for all. An engine that does not work here any more is not insisted on.
    """
    found = [recall(path) for path in paths]
    measured = [one for one in found if one is not None]
    if not measured or len(measured) < len(found):
        return {}
    speeds = [2 / (1 / one.read_gb_s + 1 / one.write_gb_s) for one in measured]
    best = measured[speeds.index(max(speeds))]
    options: dict[str, Any] = {
        "engine": "threads" if best.engine == "threads" else "auto",
        "queue_depth": best.queue_depth,
        "block_bytes": best.block_bytes,
        "threads": best.threads,
    }
    if len(measured) > 1:
        options["weights"] = speeds
    return options
