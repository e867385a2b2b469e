"""What a store stands on: its files, the space in them, and what is committed there already.

Owns: the choice between scratch files and a run directory.
Must not know: transfers, keys.
Next: `files` for scratch files, `run_directory` for durable ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from swap.durable.disk import Disk
from swap.durable.run_directory import RunDirectory, grow, open_run
from swap.errors import SwapError
from swap.io.files import SwapFile, create_scratch, cut_back, open_error, reserve, sizes_of
from swap.space.allocation import Space
from swap.space.mapping import Version


class Mode(Enum):
    """What a store promises about puts.

    SCRATCH: a put takes effect by itself when it has been reaped; nothing survives the process.
    EXPLICIT: puts and deletes take effect together at `commit`, or not at all; nothing survives the process.
    DURABLE: as EXPLICIT, and what was committed is there when the paths are opened again, whatever ended the process.
        Keys are made of str, int, bool, None, bytes and tuples of these.
    """

    SCRATCH = "scratch"
    EXPLICIT = "explicit"
    DURABLE = "durable"


@dataclass(frozen=True, slots=True)
class Backing:
    """Open files and the space in them.

    Attributes:
        files: one per path, in their order.
        space: what is free in them.
        run: what a durable store found or made; None for the others.
        disk: how manifests are written.
    """

    files: tuple[SwapFile, ...]
    space: Space
    run: RunDirectory | None
    disk: Disk

    @property
    def versions(self) -> Mapping[Hashable, Version]:
        """What is committed there, by key."""
        return self.run.versions if self.run else {}

    @property
    def descriptors(self) -> list[int]:
        """Descriptors in the order in which they are to be closed; the locks come last."""
        return [file.fd for file in self.files] + (self.run.locks if self.run else [])

    def grow(
        self, more: Sequence[int], committed: Mapping[Hashable, Version], flush: Callable[[SwapFile], None]
    ) -> list[int]:
        """Make the files longer by so many bytes each; returns their sizes. No commit may be under way.

        Args:
            more: bytes per file.
            committed: what the last commit left, by key.
            flush: returns when the drive has what is in a file; of a durable store.

        Raises:
            SwapFullError: no room; the files are as long as before.
            SwapError: something could not be written or flushed; they are, too, unless the manifest is in doubt.
        """
        have = [allocator.capacity for allocator in self.space.allocators]
        sizes = [size + added for size, added in zip(have, more, strict=True)]
        if self.run is not None:
            try:
                grow(self.files, self.run.manifest, committed, sizes, flush)
                return sizes
            except OSError as error:
                if isinstance(error, SwapError):
                    raise
                raise open_error(self.files[0].directory, error) from None
        before = sizes_of(self.files)
        try:
            for file, first, size in zip(self.files, have, sizes, strict=True):
                if size > first:
                    reserve(file, size, first)
        except OSError:
            cut_back(self.files, before)
            raise
        return sizes

    def close_manifest(self) -> None:
        """Close the manifest if there is one. Idempotent."""
        if self.run is not None:
            self.run.manifest.close()

    def close(self) -> None:
        """Close everything; for a store that could not be opened after all."""
        self.close_manifest()
        for fd in self.descriptors:
            os.close(fd)


def open_backing(
    paths: Sequence[str], capacity_bytes: int, mode: Mode, weights: Sequence[float] | None, disk: Disk
) -> Backing:
    """Create the files of a store, or open those of a durable one that exists; see `SwapStore`."""
    if mode is Mode.DURABLE:
        run, space = open_run(paths, capacity_bytes, weights, disk)
        return Backing(tuple(run.files), space, run, disk)
    files, sizes = create_scratch(paths, capacity_bytes, weights)
    alignment = max(file.alignment for file in files)
    return Backing(tuple(files), Space(sizes, alignment, weights), None, disk)
