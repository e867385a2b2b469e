"""Units, and the slots of parameters in them: what travels together, and where in it each parameter lies.

Values only. Next: :mod:`offload.planning.partition` finds the units of a model, :mod:`offload.planning.planner` their
homes.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from offload.sizes import round_up

PAD_NUMEL = 4096  # units are padded to this many elements, so that every role is a whole number of 4 KiB pages
SLOT_ALIGN_NUMEL = 128  # parameters start at a block of 8-bit states, and on cache lines in every role


Where = tuple[int, int]  # unit index, slot index


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One parameter inside its unit.

    Attributes:
        name: path in the model.
        shape: of the parameter.
        numel: elements.
        offset_numel: elements from the unit's start to its first one, in every role.
        global_numel: index of its first element in the whole model: it depends on neither units nor placement.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    offset_numel: int
    global_numel: int

    @property
    def end_numel(self) -> int:
        """First element behind the parameter."""
        return self.offset_numel + self.numel


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that travel together: one module's, of one dtype, all trainable or all frozen.

    Attributes:
        index: position in model order; also the order of optimizer updates.
        name: module path, with a suffix where a module has several units.
        dtype: torch dtype name, e.g. ``"bfloat16"``.
        itemsize: bytes per element of the parameter.
        trainable: has gradients and optimizer states.
        numel: elements including padding, a multiple of :data:`PAD_NUMEL`.
        slots: the parameters.
        whole: no chunk divides a parameter.
        ranks: how many may have a slice each; these are of one length, and chunks end where they do.
        reference: of a reference model: evaluated only, and in no checkpoint.
    """

    index: int
    name: str
    dtype: str
    itemsize: int
    trainable: bool
    numel: int
    slots: tuple[Slot, ...]
    whole: bool = False
    ranks: int = 1
    reference: bool = False

    @property
    def param_bytes(self) -> int:
        """Bytes of the PARAM shard."""
        return self.numel * self.itemsize

    def overlaps(self, begin: int, end: int) -> Iterator[tuple[int, Slot, int, int]]:
        """Yield (position, slot, start, stop) of what parameters have of elements [begin, end), if that is any."""
        for position, slot in enumerate(self.slots):
            start, stop = max(slot.offset_numel, begin), min(slot.end_numel, end)
            if start < stop:
                yield position, slot, start, stop

    def chunks(self, chunk_numel: int) -> list[tuple[int, int]]:
        """Return the element ranges [begin, end) in which the unit is updated and swapped."""
        if not self.whole:
            length = self.numel // self.ranks
            slices = range(0, self.numel, length)
            return [(b, min(b + chunk_numel, s + length)) for s in slices for b in range(s, s + length, chunk_numel)]
        pieces = self._pieces()
        limit = max(chunk_numel, *(end - begin for begin, end in pieces))
        ranges = [pieces[0]]
        for begin, end in pieces[1:]:
            if end - ranges[-1][0] <= limit:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
        return ranges

    def chunk_lengths(self, chunk_numel: int, begin: int, end: int) -> Mapping[int, int]:
        """Return how many chunks have how many elements in [begin, end): of thousands, most are of one length."""
        found: Counter[int] = Counter()
        if self.whole:
            found.update(max(min(last, end) - max(first, begin), 0) for first, last in self.chunks(chunk_numel))
        else:
            length = max(self.numel // self.ranks, 1)
            for start in range(begin // length * length, end, length):
                first, last = max(begin, start), min(end, start + length)
                head = min((start - first) % chunk_numel, last - first)  # the rest of a chunk that begins before
                many, rest = divmod(last - first - head, chunk_numel)
                found.update({head: 1, chunk_numel: many})
                found[rest] += 1
        return {numel: many for numel, many in found.items() if numel and many}

    def chunk_limit(self, chunk_numel: int) -> int:
        """Return the most elements that a chunk has room for."""
        return max(chunk_numel, *(end - begin for begin, end in self._pieces())) if self.whole else chunk_numel

    def _pieces(self) -> list[tuple[int, int]]:
        """Return the smallest ranges that begin on a page in every role, and divide no parameter."""
        begins = {slot.offset_numel for slot in self.slots if slot.offset_numel % PAD_NUMEL == 0}
        starts = sorted({0} | (begins - {self.numel}))
        return list(zip(starts, [*starts[1:], self.numel], strict=True))


def without_reference(units: Iterable[Unit]) -> list[Unit]:
    """Return the units of the model itself; those of a reference model come behind them."""
    return [unit for unit in units if not unit.reference]


def aligned_numel(numel: int, multiple: int = SLOT_ALIGN_NUMEL) -> int:
    """Return the elements that a parameter of `numel` takes in its unit."""
    return round_up(numel, multiple)


def lay_out(
    sizes: Sequence[tuple[str, tuple[int, ...]]],
    global_numels: Sequence[int] | None = None,
    *,
    whole: bool = False,
    ranks: int = 1,
) -> tuple[tuple[Slot, ...], int]:
    """Place parameters one behind the other.

    Those of a page and more begin on one, and smaller ones lie inside one. So a cut at a page divides none of the
    blocks of elements whose squares are summed as one: the norm of slices is that of the whole, bit for bit.

    Args:
        sizes: (name, shape) of each parameter.
        global_numels: index of each one's first element in the model; None where the unit is all of it.
        whole: no chunk will divide a parameter, so that nothing else is on the pages of those of a page and more.
        ranks: how many slices of one length the unit will have.

    Returns:
        The slots, and the unit's padded number of elements.
    """
    slots, offset = [], 0
    for position, (name, shape) in enumerate(sizes):
        numel = math.prod(shape)
        if numel >= PAD_NUMEL or offset % PAD_NUMEL + numel > PAD_NUMEL:
            offset = round_up(offset, PAD_NUMEL)
        slots.append(Slot(name, shape, numel, offset, offset if global_numels is None else global_numels[position]))
        offset += aligned_numel(numel, PAD_NUMEL if whole and numel >= PAD_NUMEL else SLOT_ALIGN_NUMEL)
    return tuple(slots), max(round_up(offset, PAD_NUMEL * ranks), PAD_NUMEL * ranks)
