"""An engine that gives its memory back goes on with the same bits. See test_simulated_sleeping.py, too."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import batch, everything_on_device
from test_checkpoints import NAMES, Run, assert_same, directory, placed, seed

from offload import BudgetError, Engine, StateError
from offload import sleeping as sleeping_module
from offload.interrupt import Deferral
from offload.life import Life
from offload.memory.arena import Buffer, HostArena
from offload.memory.budget import Tier
from offload.sleeping import PIECE_BYTES, Sleeping
from swap import Fault, FaultAction, FaultTarget, SwapDeadlineError, SwapError, SwapStore

pytestmark = pytest.mark.usefixtures("single_torch_thread")


def slept_and_gone_on(
    place: dict[str, Any], again: dict[str, Any], *, at: int, end: int, host: bool, **more: Any
) -> None:
    """Train `end` micro-batches in one go, and with a sleep after `at`; compare everything, losses included."""
    seed()
    whole = Run(place, **more)
    with whole.engine:
        whole.train(range(end))
        truth = whole.outcome()
    seed()
    run = Run(again, **more)
    with run.engine as engine:
        run.train(range(at))
        before = engine.stats().used_bytes
        engine.sleep(host=host)
        asleep = engine.stats().used_bytes
        assert asleep["device"] == 0 or not before["device"]
        assert not host or asleep["cpu"] < before["cpu"] or not before["cpu"]
        for call in (lambda: engine(batch(0)), lambda: engine.module(batch(0)), engine.drain, engine.state_dict):
            with pytest.raises(StateError, match="asleep; call engine.wake"):
                call()
        for parameter in engine.module.parameters():
            with pytest.raises(StateError, match="asleep; call engine.wake"):
                parameter.sum()
            break
        engine.wake()
        run.train(range(at, end))
        assert all(torch.equal(a, b) for a, b in zip(run.losses, whole.losses, strict=True))
        assert_same(run.outcome(), truth)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """One that has trained a step, with parameters on the device and states in host memory."""
    options = {**placed("device and host", tmp_path, "swap"), "nvme_path": directory(tmp_path, "more")}
    run = Run(options)
    with run.engine:
        run.train(range(1))
        yield run.engine


@pytest.mark.few
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("place", NAMES)
def test_goes_on(place: str, host: bool, tmp_path: Path) -> None:
    more = {"nvme_path": directory(tmp_path, "more")}
    first, again = placed(place, tmp_path, "one"), placed(place, tmp_path, "two")
    slept_and_gone_on(first, {**more, **again}, at=2, end=4, host=host, dtype=torch.bfloat16)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("place", ["device", "nvme", "host"])
def test_gradients_wait_meanwhile(place: str, host: bool, tmp_path: Path) -> None:
    more = {"nvme_path": directory(tmp_path, "more")}
    first, again = placed(place, tmp_path, "one"), placed(place, tmp_path, "two")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "gradient_accumulation_steps": 3, "max_grad_norm": 0.5}
    slept_and_gone_on(first, {**more, **again}, at=4, end=7, host=host, **options)


def test_calls_out_of_order(engine: Engine) -> None:
    before = engine.digests()
    with pytest.raises(StateError, match="expected to be asleep but it is awake"):
        engine.wake()
    with engine.gather(engine.module.odd), pytest.raises(StateError, match="in use"):  # type: ignore[arg-type]
        engine.sleep()
    view = engine.module.odd.data[1:]  # type: ignore[index]
    with pytest.raises(StateError, match="still views their device memory"):
        engine.sleep()
    assert engine.digests() == before
    del view
    engine.sleep()
    with pytest.raises(StateError, match="asleep; call engine.wake"):
        engine.sleep()
    assert "Engine" in repr(engine) and engine.stats().used_bytes["device"] == 0
    engine.wake()
    assert engine.digests() == before


@pytest.mark.parametrize("restore", [None, False])
def test_closed_while_asleep(restore: bool | None, engine: Engine) -> None:
    """Closing wakes it where parameters get ordinary memory again."""
    truth = engine.state_dict()
    engine.sleep(host=True)
    engine.close(restore=restore)
    if restore is None:
        assert all(torch.equal(value, truth[name]) for name, value in engine.module.state_dict().items())


def test_no_room_to_sleep(tmp_path: Path) -> None:
    with Run(everything_on_device()).engine as engine:
        with pytest.raises(BudgetError, match="sleep: .* host=True expects a drive; name one with nvme_path"):
            engine.sleep(host=True)
        budget = engine._parts.budgets[Tier.HOST]
        before = engine.digests()
        with budget.claim("others", budget.free_bytes), pytest.raises(BudgetError, match=r"raise max_memory\["):
            engine.sleep()
        assert engine.digests() == before


def test_a_machine_without_room_to_sleep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget has it again, and the engine is awake."""
    budget, before = engine._parts.budgets[Tier.HOST], engine.digests()
    free_bytes = budget.free_bytes

    def refused(*args: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched, pytest.raises(BudgetError, match="not give so much .* memory: Cannot alloc"):
        patched.setattr(sleeping_module.mmap, "mmap", refused)
        engine.sleep()
    assert budget.free_bytes == free_bytes
    engine.sleep()
    engine.wake()
    assert engine.digests() == before


def test_no_room_to_wake_up(engine: Engine) -> None:
    before = engine.digests()
    engine.sleep()
    budget = engine._parts.budgets[Tier.DEVICE]
    with budget.claim("others", budget.free_bytes):
        for _ in range(2):
            with pytest.raises(BudgetError, match="arena needs .*held: others"):
                engine.wake()
            with pytest.raises(StateError, match="asleep"):
                engine.digests()
    engine.wake()
    assert engine.digests() == before


def test_no_room_to_wake_up_to_close(engine: Engine) -> None:
    """It sleeps on, and nothing is lost; as it is closed then, with the parameters given back."""
    truth = engine.state_dict()
    engine.sleep()
    budget = engine._parts.budgets[Tier.DEVICE]
    with budget.claim("others", budget.free_bytes):
        with pytest.raises(BudgetError, match="close: the engine is asleep still.*held: others.*restore=False"):
            engine.close()
        with pytest.raises(StateError, match="asleep"):
            engine.digests()
    engine.close()
    assert all(torch.equal(value, truth[name]) for name, value in engine.module.state_dict().items())


def test_no_room_to_wake_up_at_the_end_of_a_block(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """An error that is on its way up comes first; the log has the other one."""
    before = engine.digests()
    engine.sleep()
    budget = engine._parts.budgets[Tier.DEVICE]
    with budget.claim("others", budget.free_bytes):
        with pytest.raises(KeyError), engine:
            raise KeyError
        assert "close: the engine is asleep still" in caplog.text
        with pytest.raises(BudgetError, match="asleep still"), engine:
            pass
    engine.wake()
    assert engine.digests() == before


def test_parameters_that_do_not_come_back_need_no_room_to_close(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.sleep()
    monkeypatch.setattr("offload.engine.may_restore", lambda parts, life: False)
    budget = engine._parts.budgets[Tier.DEVICE]
    with budget.claim("others", budget.free_bytes):
        engine.close()
    with pytest.raises(StateError, match="closed without restoring"):
        engine.module(batch(0))


@pytest.mark.parametrize("place", ["device", "host"])
def test_gradients_are_neither_read_nor_changed_meanwhile(place: str, tmp_path: Path) -> None:
    run = Run({**placed(place, tmp_path, "swap"), "nvme_path": directory(tmp_path, "more")})
    with run.engine as engine:
        run.train(range(1))
        engine.backward(engine(batch(1)).pow(2).mean())
        odd, first = engine.module.odd, engine.module.blocks[0].weight  # type: ignore[union-attr, index]
        assert odd.grad is not None  # a handle from now on
        before = {name: one["gradient"] for name, one in engine.digests().items() if "gradient" in one}
        loss = odd.sum()  # whose graph has no view of a parameter
        engine.sleep(host=True)
        looks = [
            lambda: odd.grad.norm(),
            lambda: odd.grad.norm(3.0),
            lambda: torch.isfinite(odd.grad).all(),
            lambda: odd.grad.zero_(),
            lambda: engine.grad_norm,
            lambda: loss.backward(retain_graph=True),
            lambda: engine.module(batch(1)),
        ]
        for look in looks:
            with pytest.raises(StateError, match="asleep; call engine.wake"):
                look()
        held, odd.grad = odd.grad, None
        given, first.grad = first.grad, torch.ones(first.shape)
        for _ in range(2):  # what they have become is taken when the engine is awake
            with pytest.raises(StateError, match="asleep; call engine.wake"):
                engine.module(batch(1))
        odd.grad, first.grad = held, given
        engine.wake()
        assert {name: one["gradient"] for name, one in engine.digests().items() if "gradient" in one} == before
        assert engine.step()


def test_an_interrupt_drops_no_gradients_that_sleep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes at the beginning of a call that would be refused."""
    engine.backward(engine(batch(1)).pow(2).mean())
    before = engine.digests()
    engine.sleep()

    def interrupted(self: Deferral) -> Deferral:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Deferral, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(torch.zeros((), requires_grad=True))
    engine.wake()
    assert engine.digests() == before


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_drive_that_fails(call: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling asleep is undone; waking up may be repeated."""

    def fail(*args: Any, **options: Any) -> Any:
        raise SwapError("broken")

    before = engine.digests()
    if call == "get":
        engine.sleep(host=True)
    with monkeypatch.context() as patch, pytest.raises(SwapError, match="broken"):
        patch.setattr(SwapStore, call, fail)
        engine.sleep(host=True) if call == "put" else engine.wake()
    if call == "get":
        engine.wake()
    assert engine.digests() == before


def test_a_piece_that_comes_late_comes_to_nobody_elses_memory(tmp_path: Path) -> None:
    """Beside a device that the host cannot address, pieces pass through memory of their own."""
    parts: Any = SimpleNamespace(device=SimpleNamespace(place=torch.device("cpu"), addressable=False))
    config: Any = None
    sleeping = Sleeping(config, parts, Life(trains=True), Deferral(), None)
    arena = HostArena(Tier.DEVICE, PIECE_BYTES)
    buffer = arena.take(PIECE_BYTES)
    ctypes.memset(buffer.address, 1, PIECE_BYTES)
    with SwapStore(tmp_path, 2 * PIECE_BYTES, deadline_s=0.1) as store:
        store.put("piece", buffer.address, PIECE_BYTES).wait(60.0)
        store.inject(Fault(action=FaultAction.DELAY, delay_s=0.5, target=FaultTarget.READS))
        with pytest.raises(SwapDeadlineError), sleeping._on_host(buffer, 0, PIECE_BYTES, write=True) as address:
            store.get("piece", address, PIECE_BYTES).wait()
        gc.collect()
        others = [mmap.mmap(-1, PIECE_BYTES) for _ in range(4)]
        store.drain(60.0)
        assert not any(any(other[:]) for other in others)
    sleeping.close()


def test_memory_of_a_piece_that_never_came_outlives_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = SimpleNamespace(device=SimpleNamespace(place=torch.device("cpu"), addressable=False))
    config: Any = None
    buffer = HostArena(Tier.DEVICE, PIECE_BYTES).take(PIECE_BYTES)
    for held in (False, True):
        monkeypatch.setattr(sleeping_module, "is_memory_held", lambda held=held: held)
        kept: list[object] = []
        monkeypatch.setattr(sleeping_module, "leave", kept.append)
        sleeping = Sleeping(config, parts, Life(trains=True), Deferral(), None)
        with pytest.raises(TimeoutError), sleeping._on_host(buffer, 0, PIECE_BYTES, write=True):
            raise TimeoutError
        sleeping.close()
        assert len(kept) == held and not sleeping._left


def is_resident(buffer: Buffer) -> bool:
    """Tell whether all pages of a buffer of host memory are."""
    pages = (ctypes.c_ubyte * (-(-(buffer.address % mmap.PAGESIZE + buffer.size_bytes) // mmap.PAGESIZE)))()
    begin = ctypes.c_void_p(buffer.address - buffer.address % mmap.PAGESIZE)
    if ctypes.CDLL(None, use_errno=True).mincore(begin, ctypes.c_size_t(len(pages) * mmap.PAGESIZE), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return all(page & 1 for page in pages)


def test_what_is_measured_as_activations_is_as_resident_awake_as_it_was_before(tmp_path: Path) -> None:
    """Staging, homes of gradients and room for a second version have no content that waking brings in."""
    run = Run(placed("device and host", tmp_path, "swap"))
    with run.engine as engine:
        run.train(range(1))
        tiers = engine._manager.tiers
        spare = [shard.spare_buffer for shard in tiers.copies if shard.spare_buffer is not None]
        homes = [shard.home_buffer for shard in tiers.copies if shard.home_buffer is not None]
        buffers = [buffer for buffer in (*tiers.staging, *homes, *spare) if buffer.tier is Tier.HOST]
        before = [is_resident(buffer) for buffer in buffers]
        engine.sleep(host=True)
        assert any(before) and not any(map(is_resident, buffers))
        engine.wake()
        assert [is_resident(buffer) for buffer in buffers] == before
