"""CRC-32C, and that wrong bytes are found where they are needed."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from aligned_memory import Memory, pattern
from hypothesis import given
from hypothesis import strategies as st
from test_aio import engine  # noqa: F401 (fixture)

from swap import Aio, Fault, FaultAction, FaultTarget, IoTicket, Job, SwapCorruptError, SwapError
from swap.io.checksums import crc32c, crc32c_at, crc32c_kernel, parts_of_read, words

BLOCK = 4096


def bit_by_bit(data: bytes) -> int:
    """The definition: division by the polynomial 0x1EDC6F41, bits reversed, start and end inverted."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),  # the check value of the catalogue of CRCs
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected == bit_by_bit(data)


# Around the lanes of the kernel: 3 x 256 and 3 x 8192 bytes at a time.
LENGTHS = [0, 1, 7, 8, 15, 16, 17, 767, 768, 769, 1009, 24575, 24576, 24577, 3 * 24576 + 3 * 768 + 13]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("start", [0, 1, 7])
def test_kernels_agree(length: int, start: int) -> None:
    memory = Memory(128 << 10)
    memory.fill(random.Random(length).randbytes(128 << 10))
    expected = crc32c_at(memory.address + start, length, portable=True)
    assert crc32c_at(memory.address + start, length) == expected
    if length < 2000:
        assert expected == bit_by_bit(memory[start : start + length])
    half = length // 3
    first = crc32c_at(memory.address + start, half)
    assert crc32c_at(memory.address + start + half, length - half, first) == expected  # continued
    assert crc32c_kernel() in ("sse4.2", "portable")


def test_null_pointer_is_refused() -> None:
    with pytest.raises(ValueError, match="null pointer"):
        crc32c_at(0, 1)
    assert crc32c_at(0, 0) == 0


@given(blocks=st.integers(1, 12), granule=st.integers(1, 5), ends=st.tuples(st.integers(0, 11), st.integers(0, 11)))
def test_parts_cover_the_read_and_know_their_checksums(blocks: int, granule: int, ends: tuple[int, int]) -> None:
    first, last = min(ends) % blocks, max(ends) % blocks + 1
    if first >= last:
        first, last = last - 1, first + 1
    checksums = b"".join(struct.pack("I", i) for i in range(-(-blocks // granule)))
    at = first
    for part in parts_of_read(first, last, blocks, granule):
        assert part.wanted_first == at  # in order, without a gap
        at = part.wanted_last
        assert part.first <= part.wanted_first < part.wanted_last <= part.last
        assert part.first % granule == 0
        assert part.last % granule == 0 or part.last == blocks
        assert part.whole or part.last - part.first <= granule
        expected = range(part.first // granule, -(-part.last // granule))
        assert words(checksums, part.first, part.last, granule) == b"".join(struct.pack("I", i) for i in expected)
    assert at == last


# ---- beside the transfers ----


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield descriptor
    os.close(descriptor)


def write(aio: Aio, fd: int, offset: int, address: int, length: int) -> IoTicket:
    return aio.submit([Job(True, fd, offset, address, length, granule_bytes=BLOCK)])[0]


def read(aio: Aio, fd: int, offset: int, address: int, length: int, expected: bytes) -> IoTicket:
    return aio.submit([Job(False, fd, offset, address, length, granule_bytes=BLOCK, expected=expected)])[0]


@pytest.mark.parametrize("length", [1, 4095, 4096, 3 * 4096 + 13, 100_003])
def test_write_sums_and_read_compares(engine: str, fd: int, length: int) -> None:  # noqa: F811
    data = pattern(length, 3)
    memory = Memory(length)
    memory.fill(data)
    with Aio(engine=engine, block_bytes=BLOCK * 2) as aio:
        ticket = write(aio, fd, 7, memory.address, length)
        ticket.wait()
        granules = [data[at : at + BLOCK] for at in range(0, length, BLOCK)]
        assert ticket.checksums == b"".join(struct.pack("I", bit_by_bit(granule)) for granule in granules)
        memory.fill(b"")
        read(aio, fd, 7, memory.address, length, ticket.checksums).wait()
        assert memory[0:length] == data
        stats = aio.stats()
    assert (stats.reads, stats.writes, stats.in_flight) == (1, 1, 0)


def test_wrong_bytes_are_named(engine: str, fd: int) -> None:  # noqa: F811
    memory = Memory(4 * BLOCK)
    memory.fill(pattern(4 * BLOCK))
    with Aio(engine=engine) as aio:
        aio.register_file(fd, "/some/drive")
        ticket = write(aio, fd, BLOCK, memory.address, 4 * BLOCK)
        ticket.wait()
        wrong = bytearray(pattern(4 * BLOCK)[2 * BLOCK : 3 * BLOCK])
        wrong[100] ^= 1
        os.pwrite(fd, wrong, 3 * BLOCK)
        for _ in range(2):
            with pytest.raises(SwapCorruptError, match="/some/drive: expected checksum") as caught:
                read(aio, fd, BLOCK, memory.address, 4 * BLOCK, ticket.checksums).wait()
        error = caught.value
        assert (error.path, error.offset_bytes, error.length_bytes) == ("/some/drive", 3 * BLOCK, BLOCK)
        assert error.errno == errno.EBADMSG
        assert f"{bit_by_bit(pattern(4 * BLOCK)[2 * BLOCK : 3 * BLOCK]):#010x}" in str(error)
        assert f"{bit_by_bit(bytes(wrong)):#010x}" in str(error)
        assert aio.stats().read_errors == 2


@pytest.mark.parametrize("target", [FaultTarget.READS, FaultTarget.WRITES])
def test_lying_device_is_found_out(engine: str, fd: int, target: FaultTarget) -> None:  # noqa: F811
    """A read that brings a wrong byte, a write that never reached the drive: the second of 3 requests."""
    memory = Memory(3 * BLOCK)
    memory.fill(pattern(3 * BLOCK))
    os.pwrite(fd, bytes(3 * BLOCK), 0)
    with Aio(engine=engine, block_bytes=BLOCK, queue_depth=1, threads=1) as aio:
        aio.inject(Fault(nth=2, action=FaultAction.LIE, target=target))
        ticket = write(aio, fd, 0, memory.address, 3 * BLOCK)
        ticket.wait()
        with pytest.raises(SwapCorruptError) as caught:
            read(aio, fd, 0, memory.address, 3 * BLOCK, ticket.checksums).wait()
    assert caught.value.offset_bytes == 2 * BLOCK  # chunks go out as 0 2 1


def test_failed_transfers_say_why_and_not_that_the_sum_is_wrong(engine: str, fd: int) -> None:  # noqa: F811
    memory = Memory(BLOCK)
    with Aio(engine=engine) as aio:
        aio.inject(Fault())
        aio.inject(Fault(nth=2, target=FaultTarget.READS))
        for start in (
            lambda: write(aio, fd, 0, memory.address, BLOCK),
            lambda: read(aio, fd, BLOCK, memory.address, BLOCK, bytes(4)),
        ):
            with pytest.raises(SwapError, match="EIO|ENODATA") as caught:
                start().wait()
            assert type(caught.value) is SwapError


def test_checksums_of_the_wrong_length_are_refused(engine: str, fd: int) -> None:  # noqa: F811
    memory = Memory(BLOCK)
    with Aio(engine=engine) as aio:
        with pytest.raises(ValueError, match="expected 2 words of 4 bytes but got 4 bytes"):
            read(aio, fd, 0, memory.address, 2 * BLOCK, bytes(4))
        assert aio.stats().in_flight == 0


def test_close_with_a_stuck_write_that_is_summed(engine: str, fd: int) -> None:  # noqa: F811
    memory = Memory(BLOCK)
    aio = Aio(engine=engine)
    aio.inject(Fault(action=FaultAction.HANG))
    ticket = write(aio, fd, 0, memory.address, BLOCK)
    with pytest.raises(SwapError):
        aio.close(0.05)
    with pytest.raises(SwapError, match="ECANCELED"):
        ticket.wait(10)
