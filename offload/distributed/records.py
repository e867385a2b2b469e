"""What a rank says when all of them meet: a record of one size, and the words for what two of them disagree on.

Owns the bytes of a record and the texts of disagreements. Pure Python over plain values: every rank has the same
records and so makes the same text of them. Next: :mod:`offload.distributed.processes` sends them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence

from offload.distributed.ranks import Fact
from offload.errors import InternalError

RECORD_BYTES = 512
MOST_NUMBERS = 32
_PLACE_BYTES = 160
_LAYOUT = struct.Struct(f"<{_PLACE_BYTES}s32sBBHI{MOST_NUMBERS}d")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What one rank says.

    Attributes:
        where: the place it is in.
        digest: of its facts.
        failed: it cannot go on.
        detail_bytes: of what it says more, if that is asked for.
        numbers: that the others are to know.
        wants: what it wants before it comes to the place; None where it is there.
    """

    where: str
    digest: bytes
    failed: bool
    detail_bytes: int
    numbers: tuple[float, ...]
    wants: int | None = None

    def pack(self) -> bytes:
        """Return the record as :data:`RECORD_BYTES` bytes."""
        if len(self.numbers) > MOST_NUMBERS:
            raise InternalError(f"agreement: expected at most {MOST_NUMBERS} numbers but got {len(self.numbers)}")
        padded = (*self.numbers, *[0.0] * (MOST_NUMBERS - len(self.numbers)))
        place = self.where.encode()[:_PLACE_BYTES]
        wish = 0 if self.wants is None else self.wants + 1
        head = _LAYOUT.pack(place, self.digest, self.failed, len(self.numbers), wish, self.detail_bytes, *padded)
        return head.ljust(RECORD_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        """Return the record that :meth:`pack` made."""
        place, digest, failed, count, wish, detail, *numbers = _LAYOUT.unpack_from(data)
        where = place.rstrip(b"\0").decode(errors="ignore")
        return cls(where, digest, bool(failed), detail, tuple(numbers[:count]), wish - 1 if wish else None)


def digest_of(facts: Mapping[str, Fact]) -> bytes:
    """Return 32 bytes that two ranks have in common where their facts are the same."""
    return hashlib.sha256(_text(facts)).digest()


def detail_of(facts: Mapping[str, Fact], error: BaseException | None) -> bytes:
    """Return what a rank says more: why it cannot go on, else its facts."""
    return _text(facts) if error is None else f"{type(error).__name__}: {error}".encode()


def _text(facts: Mapping[str, Fact]) -> bytes:
    return json.dumps(dict(facts), sort_keys=True).encode()


def all_agree(records: Sequence[Record]) -> bool:
    """Tell whether all ranks are in one place with the same facts, and can go on."""
    first = records[0]
    return not any(r.failed or r.where != first.where or r.digest != first.digest for r in records)


def disagreement(records: Sequence[Record], details: Sequence[bytes]) -> str:
    """Return what ranks disagree on, in the words of an error that is the same on all of them.

    Args:
        records: by rank.
        details: what each says more.
    """
    failed = [rank for rank, record in enumerate(records) if record.failed]
    if failed:
        return "; ".join(f"rank {rank}: {details[rank].decode(errors='replace')}" for rank in failed)
    places = by_value(record.where for record in records)
    if len(places) > 1:
        return (
            f"ranks: expected all in one place but got {told(places)}; call the same methods of the engine on all "
            f"ranks, as often and in one order{uneven(places)}"
        )
    where, facts = records[0].where, [json.loads(detail) for detail in details]
    for name in sorted(set().union(*facts)):
        values = by_value(json.dumps(fact[name]) if name in fact else "nothing" for fact in facts)
        if len(values) > 1:
            return f"ranks: expected one value of {name} in {where} but got {told(values)}; give all ranks the same"
    return f"ranks: expected the same facts in {where} but got others of one digest"


def uneven(places: Mapping[str, Sequence[int]]) -> str:
    """Return what is probable where some ranks are in a backward pass and others are not; else nothing."""
    ahead = sorted(rank for place, ranks in places.items() if place.startswith("backward") for rank in ranks)
    if not ahead or all(place.startswith("backward") for place in places):
        return ""
    return f" (probably {named(ahead)} had a batch more: deal as many to all, and leave out the last uneven ones)"


def by_value(values: Iterable[str]) -> dict[str, list[int]]:
    """Return the ranks that have each value."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def told(values: Mapping[str, Sequence[int]]) -> str:
    """Return ``"step on rank 0, save on ranks 1, 2"``."""
    return ", ".join(f"{value} on {named(ranks)}" for value, ranks in values.items())


def named(ranks: Sequence[int]) -> str:
    """Return ``"rank 1"`` or ``"ranks 0, 2"``."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
