"""The mover of an accelerator alone, on the simulated one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from simulated import LAZY, fixed, running

from offload.memory.accelerator import AcceleratorDevice, AcceleratorMover
from offload.memory.arena import Buffer
from offload.memory.budget import Tier
from offload.stats import Counters

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

PAGE = 4096
DEADLINE_S = 60.0


@pytest.fixture
def make_mover() -> Iterator[Callable[[], AcceleratorMover]]:
    """Makes movers whose staging has room for one gradient of a page; a function, so that a schedule is set before."""
    closing: list[Callable[[], None]] = []

    def make() -> AcceleratorMover:
        device = AcceleratorDevice(torch.device("sim", 0))
        host = device.host_arena(4 * PAGE)
        mover = device.mover(Counters(), host, fetch_bytes=2 * PAGE, gradient_bytes=PAGE, deadline_s=DEADLINE_S)
        closing.extend((mover.close, device.synchronize, host.close))
        return mover

    yield make
    for close in closing:
        close()


def gradient(value: float) -> torch.Tensor:
    return torch.full((PAGE // 4,), value, device="sim")


@pytest.mark.parametrize("error", [RuntimeError("the device was lost"), OSError("no space"), ValueError("a bug")])
def test_what_fails_in_a_gradients_copy_is_told_by_wait(
    error: Exception, make_mover: Callable[[], AcceleratorMover]
) -> None:
    """Not by the next gradient, in whose hook it would look like that one's."""
    used: list[int] = []

    def fail(address: int) -> None:
        used.append(address)
        if len(used) < 3:
            raise error if len(used) == 1 else RuntimeError("another")

    with running(LAZY) as seen:
        mover = make_mover()
        for number in range(4):
            mover.read_tensor(gradient(number), fail)  # of which one at a time is on its way
        with pytest.raises(type(error), match=str(error)):
            mover.wait(DEADLINE_S)
        assert len(used) == 4
        mover.wait(DEADLINE_S)  # told once
    assert seen.races == []


@pytest.mark.parametrize("distance", [PAGE, 2 * PAGE, 5 * PAGE])
def test_bytes_move_behind_all_that_reads_them_and_before_all_that_comes(
    distance: int, make_mover: Callable[[], AcceleratorMover]
) -> None:
    """Three pages, which overlap themselves where they move by less."""
    content = torch.randint(256, (3 * PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    old = torch.arange(8 * PAGE).to(torch.uint8)
    for schedule in fixed(3):
        with running(schedule) as seen:
            mover = make_mover()
            side = torch.Stream("sim:0")
            memory = old.pin_memory().to("sim", non_blocking=True)
            memory[distance : distance + 3 * PAGE].copy_(content.pin_memory(), non_blocking=True)
            side.wait_stream(torch.accelerator.current_stream(torch.device("sim:0")))
            with side:
                mover.enter()
                before = memory.add(0)
            base = memory.data_ptr()
            target = Buffer(Tier.DEVICE, base, 0, 3 * PAGE)
            mover.move(Buffer(Tier.DEVICE, base + distance, distance, 3 * PAGE), target, 3 * PAGE)
            with side:
                after = memory[: 3 * PAGE].add(0)
                assert torch.equal(after.cpu(), content), schedule.name
                assert torch.equal(before.cpu()[:distance], old[:distance]), schedule.name
        assert seen.races == [], schedule.name
