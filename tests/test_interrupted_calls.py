"""One Ctrl-C inside a call of the engine: the call is repeated, or was made, and nothing is lost or counted twice.

A second one, or a signal handler that raises, in the midst of the engine's work: every later call says so.
"""

from __future__ import annotations

import copy
import errno
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import AdamW, Engine
from offload.checkpoint import module_state, values
from offload.checkpoints import Checkpoints
from offload.deciding import Decision
from offload.interrupt import Deferral
from offload.life import Life
from offload.module.gradient_book import GradientBook
from offload.module.lending import Lending, Loan
from offload.optim.step import MicroBatches
from offload.shards.leases import Leases
from offload.shards.manager import Manager
from offload.shards.stream import Pipeline
from offload.shards.tiers import Tiers
from offload.training import Training
from offload.watching import Watch

MEMORY = {"max_memory": {"device": "32MiB", "cpu": "16MiB"}}


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(patch: pytest.MonkeyPatch, owner: Any, name: str, *, nth: int = 1, behind: bool = False) -> list[int]:
    """Let SIGINT come before or behind the nth call of a function, once; returns a list with the calls so far."""
    real, calls = getattr(owner, name), [0]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        now = calls[0] == nth
        if now and not behind:
            signal.raise_signal(signal.SIGINT)
        result = real(*args, **kwargs)
        if now and behind:
            signal.raise_signal(signal.SIGINT)
        return result

    patch.setattr(owner, name, wrapper)
    return calls


# --- backward -----------------------------------------------------------------------------------------------------


def accumulate(engine: Engine, micro_batch: int | None, arm: Callable[[pytest.MonkeyPatch], object]) -> float:
    """Take a step of two micro-batches; both again where one is interrupted, which is armed in `micro_batch`."""
    number, taken = 0, False
    while not taken:
        try:
            loss = engine(torch.full((2, 8), number + 1.0)).square().mean()
            with pytest.MonkeyPatch.context() as patch:
                if number == micro_batch:
                    arm(patch)
                engine.backward(loss)
            number += 1
            taken = engine.step()
        except KeyboardInterrupt:
            assert not engine._training.has_gradients()
            number, micro_batch = 0, None
    assert number == 2 and engine.grad_norm is not None
    return engine.grad_norm


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("owner", "name"), [(MicroBatches, "close"), (Training, "take_step")])
def test_an_interrupted_step_is_taken_or_drops_the_gradients(owner: type, name: str, behind: bool) -> None:
    def norm(arm: Callable[[pytest.MonkeyPatch], object]) -> float:
        torch.manual_seed(0)
        number, steps = 0, 0
        model = nn.Linear(8, 8)
        with Engine(model, offload.SGD(lr=0.1), device="cpu", gradient_accumulation_steps=2, **MEMORY) as engine:
            with pytest.MonkeyPatch.context() as patch:
                arm(patch)
                while not steps:
                    try:
                        engine.backward(engine(torch.full((2, 8), number + 1.0)).square().mean())
                        number += 1
                        engine.step()
                    except KeyboardInterrupt:
                        number = 0
                    steps = engine._parts.steps.run.steps
            assert engine.grad_norm is not None
            return engine.grad_norm

    assert norm(lambda patch: interrupt(patch, owner, name, behind=behind)) == norm(lambda patch: None)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Deferral, "__enter__"),
        (GradientBook, "adopt"),
        (MicroBatches, "note_backward"),
        (Watch, "note_loss"),
        (Watch, "passed"),
        (Deferral, "__exit__"),
    ],
)
def test_an_interrupted_backward_drops_the_gradients_of_the_step(owner: type, name: str, behind: bool) -> None:
    def norm(micro_batch: int | None) -> float:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        with Engine(model, offload.SGD(lr=0.1), device="cpu", gradient_accumulation_steps=2, **MEMORY) as engine:
            return accumulate(engine, micro_batch, lambda patch: interrupt(patch, owner, name, behind=behind))

    expected = norm(None)
    assert norm(0) == norm(1) == expected


# --- all other calls ----------------------------------------------------------------------------------------------


Run = Callable[[Callable[[], object]], None]  # makes the call that a test is of


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def options(path: Path) -> dict[str, Any]:
    homes = {"offload_param": "nvme", "offload_optimizer": "nvme", "nvme_path": path, "unit_bytes": 1 << 14}
    return {"device": "cpu", **homes, "max_memory": {"device": "32MiB", "cpu": "16MiB", "nvme": "64MiB"}}


def step(engine: Engine, number: int) -> None:
    engine.backward(engine(torch.full((2, 64), float(number))).square().mean())
    assert engine.step()


def bits(engine: Engine) -> list[torch.Tensor]:
    assert engine.optimizer is not None
    states = engine.optimizer.state_dict()["state"].values()
    moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return [*(value.clone() for value in engine.state_dict().values()), *moments]


def assert_same(ours: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    assert len(ours) == len(truth) and all(map(torch.equal, ours, truth))


def load_states(engine: Engine, path: Path, run: Run) -> None:
    assert engine.optimizer is not None
    packed = copy.deepcopy(engine.optimizer.state_dict())
    for state in packed["state"].values():
        state["exp_avg"].fill_(0.5)
    run(lambda: engine.optimizer.load_state_dict(packed))  # type: ignore[union-attr]


def load(engine: Engine, path: Path, run: Run) -> None:
    state = {name: value + 0.5 for name, value in engine.state_dict().items()}
    run(lambda: engine.load_state_dict(state))


def apply(engine: Engine, path: Path, run: Run) -> None:
    run(lambda: engine.apply(lambda name, parameter: parameter.fill_(0.25)))


def gather(engine: Engine, path: Path, run: Run) -> None:
    def change() -> None:
        with engine.gather(engine.module[2], modify=True), torch.no_grad():  # type: ignore[index]
            engine.module[2].weight.fill_(0.25)  # type: ignore[index,union-attr,operator]

    run(change)


def sleep(engine: Engine, path: Path, run: Run) -> None:
    run(lambda: engine._life.asleep or engine.sleep(host=True))
    engine.wake()


def wake(engine: Engine, path: Path, run: Run) -> None:
    engine.sleep()
    run(lambda: engine._life.asleep and engine.wake())


def look(engine: Engine, path: Path, run: Run) -> None:
    run(engine.state_dict)


def digest(engine: Engine, path: Path, run: Run) -> None:
    run(engine.digests)


def look_at_states(engine: Engine, path: Path, run: Run) -> None:
    run(lambda: engine.optimizer.state_dict())  # type: ignore[union-attr]


def save(engine: Engine, path: Path, run: Run) -> None:
    run(lambda: engine.save_checkpoint(path / "checkpoints", tag="one"))


@pytest.mark.parametrize(
    ("call", "owner", "name", "nth"),
    [
        (load_states, values, "_move_states", 2),
        (load_states, Leases, "close", 1),
        (load, values, "_write_parameter", 2),
        (apply, Lending, "lend", 2),
        (apply, Loan, "close", 1),
        (apply, values, "_write_parameter", 2),
        (gather, module_state._Seen, "take_out", 1),
        (gather, values, "scatter_parameters", 1),
        (gather, values, "_write_parameter", 1),
        (gather, Deferral, "__exit__", 1),
        (sleep, Tiers, "release", 1),
        (sleep, Life, "sleep", 1),
        (wake, Tiers, "take_again", 1),
        (wake, Life, "wake", 1),
        (wake, Manager, "go_on", 1),
        (look, Leases, "close", 1),
        (digest, Leases, "close", 1),
        (look_at_states, Leases, "close", 1),
        (save, Leases, "close", 1),
    ],
)
def test_an_interrupted_call_is_made_or_repeated(
    call: Callable[[Engine, Path, Run], None],
    owner: Any,
    name: str,
    nth: int,
    tmp_path: Path,
) -> None:
    def run(interrupted: bool) -> list[torch.Tensor]:
        def made(function: Callable[[], object]) -> None:
            if interrupted:
                with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    calls = interrupt(patch, owner, name, nth=nth)
                    function()
                assert calls[0] >= nth
            function()

        with Engine(net(), AdamW(lr=1e-2), **options(tmp_path)) as engine:
            step(engine, 1)
            call(engine, tmp_path, made)
            engine._manager.check()  # type: ignore[union-attr]
            step(engine, 2)
            return bits(engine)

    assert_same(run(interrupted=True), run(interrupted=False))


@pytest.mark.parametrize("call", [look, digest, look_at_states, save])
def test_a_long_read_ends_between_units(call: Callable[[Engine, Path, Run], None], tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(lr=1e-2), **options(tmp_path)) as engine:
        step(engine, 1)
        engine.drain()

        def made(function: Callable[[], object]) -> None:
            with pytest.MonkeyPatch.context() as patch:
                calls = interrupt(patch, Pipeline, "write", nth=0)
                function()
            whole = calls[0]
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                calls = interrupt(patch, Pipeline, "write", nth=2)
                function()
            assert calls[0] == 2 < whole

        call(engine, tmp_path, made)
        step(engine, 2)


def test_the_user_s_own_code_is_interrupted_at_once(tmp_path: Path) -> None:
    reached = False

    def function(name: str, parameter: nn.Parameter) -> None:
        nonlocal reached
        signal.raise_signal(signal.SIGINT)
        reached = True

    with Engine(net(), AdamW(lr=1e-2), **options(tmp_path)) as engine:
        before = bits(engine)
        with pytest.raises(KeyboardInterrupt):
            engine.apply(function)
        with pytest.raises(KeyboardInterrupt), engine.gather(engine.module, modify=True):
            function("", nn.Parameter())
        assert not reached
        assert_same(bits(engine), before)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Tiers, "drop_training_state"),
        (Manager, "reset"),
        (Manager, "close"),
        (values, "gather_parameters"),
        (Life, "close"),
        (Life, "end"),
    ],
)
def test_an_interrupted_close_gives_the_parameters_back(owner: Any, name: str, tmp_path: Path) -> None:
    engine = Engine(net(), AdamW(lr=1e-2), **options(tmp_path))
    step(engine, 1)
    expected = [value.clone() for value in engine.state_dict().values()]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, owner, name)
        engine.close()
    engine.close()
    assert_same(list(engine.module.state_dict().values()), expected)
    engine.module(torch.ones(1, 64))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Manager, "prefetch"), (Decision, "__init__"), (Training, "__init__"), (Checkpoints, "__init__"), (Life, "open")],
)
@pytest.mark.parametrize("behind", [False, True])
def test_an_engine_whose_making_was_interrupted_leaves_the_model(
    owner: Any, name: str, behind: bool, tmp_path: Path
) -> None:
    model = net()
    expected = [value.clone() for value in model.state_dict().values()]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, owner, name, behind=behind)
        Engine(model, AdamW(lr=1e-2), **options(tmp_path))
    assert_same(list(model.state_dict().values()), expected)
    assert not list(tmp_path.iterdir())
    with Engine(model, AdamW(lr=1e-2), **options(tmp_path)) as engine:
        step(engine, 1)


def test_states_that_failed_half_way_are_loaded_again(tmp_path: Path) -> None:
    with Engine(net(), AdamW(lr=1e-2), **options(tmp_path)) as engine:
        assert engine.optimizer is not None
        step(engine, 1)
        expected, packed = bits(engine), copy.deepcopy(engine.optimizer.state_dict())
        real, calls = values._move_states, [0]

        def fail(*args: Any, **kwargs: Any) -> None:
            calls[0] += 1
            if calls[0] == 2:
                raise OSError(errno.EIO, "broken")
            real(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="broken"):
            patch.setattr(values, "_move_states", fail)
            engine.optimizer.load_state_dict(packed)
        engine.optimizer.load_state_dict(packed)
        assert_same(bits(engine), expected)


# --- what is not held back ----------------------------------------------------------------------------------------


class TimeIsUp(Exception):
    """Of a signal handler."""


@pytest.fixture
def _alarm() -> Iterator[None]:
    def up(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp("late")

    before = signal.signal(signal.SIGALRM, up)
    yield
    signal.signal(signal.SIGALRM, before)


def alarm() -> None:
    signal.raise_signal(signal.SIGALRM)


def interrupt_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def alarm_in_disguise() -> None:
    try:
        alarm()
    except TimeIsUp as error:
        raise OSError("read failed") from error


def all_calls(engine: Engine, path: Path) -> list[Callable[[], object]]:
    assert engine.optimizer is not None
    model, weight = engine.module, next(engine.module.parameters())
    return [
        lambda: engine(torch.ones(2, 64)),
        lambda: model(torch.ones(2, 64)),
        lambda: engine.backward(torch.ones(1)),
        engine.step,
        engine.state_dict,
        model.state_dict,
        engine.optimizer.state_dict,
        engine.digests,
        engine.drain,
        engine.sleep,
        lambda: engine.apply(print),
        lambda: engine.gather(model).__enter__(),
        lambda: engine.save_checkpoint(path / "checkpoints"),
        lambda: weight.sum(),
    ]


@pytest.mark.usefixtures("_alarm")
@pytest.mark.parametrize(
    ("raised", "error"),
    [(alarm, TimeIsUp), (interrupt_twice, KeyboardInterrupt), (alarm_in_disguise, OSError)],
)
@pytest.mark.parametrize(
    ("place", "owner", "name"),
    [
        ("forward", Manager, "acquire"),
        ("backward", Manager, "add_gradient"),
        ("step", Training, "_note_end"),
        ("state_dict", Leases, "open"),
        ("wake", Life, "wake"),
    ],
)
def test_what_a_signal_handler_has_torn_out_of_is_not_relied_on(
    place: str, owner: Any, name: str, raised: Callable[[], None], error: type[BaseException], tmp_path: Path
) -> None:
    engine = Engine(net(), AdamW(lr=1e-2), **options(tmp_path))
    step(engine, 1)
    engine.drain()
    calls: dict[str, Callable[[], object]] = {"state_dict": engine.state_dict, "wake": engine.wake, "step": engine.step}
    if place == "wake":
        engine.sleep()
    elif place in ("backward", "step"):
        loss = engine(torch.ones(2, 64)).square().mean()
        calls["backward"] = lambda: engine.backward(loss)
        if place == "step":
            engine.backward(loss)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        patch.setattr(owner, name, lambda *args, **kwargs: raised())
        calls.get(place, lambda: engine(torch.ones(2, 64)))()
    for call in all_calls(engine, tmp_path):
        with pytest.raises(
            offload.StateError, match="a signal handler raised in the midst of its work.*(late|Keyb).*close it"
        ):
            call()
    engine.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(offload.StateError, match="without restoring it"):
        engine.module(torch.ones(2, 64))


@pytest.mark.usefixtures("_alarm")
@pytest.mark.parametrize(("raised", "error"), [(alarm, TimeIsUp), (interrupt_twice, KeyboardInterrupt)])
def test_a_signal_handler_may_raise_in_the_user_s_own_code(
    raised: Callable[[], None], error: type[BaseException], tmp_path: Path
) -> None:
    """As any error there."""

    def run(disturbed: bool) -> list[torch.Tensor]:
        model = net()
        with Engine(model, AdamW(lr=1e-2), **options(tmp_path)) as engine:
            step(engine, 1)
            for kind in ("register_forward_hook", "register_full_backward_hook") if disturbed else ():
                handle = getattr(model[2], kind)(lambda *args: raised())
                with pytest.raises(error):
                    step(engine, 5)
                handle.remove()
            if disturbed:
                with pytest.raises(error), engine.gather(model, modify=True):
                    raised()
            step(engine, 2)
            return bits(engine)

    assert_same(run(disturbed=True), run(disturbed=False))


def test_other_errors_are_no_signal_handler_s(tmp_path: Path) -> None:
    def fail(*args: object) -> None:
        raise OSError("read failed")

    with Engine(net(), AdamW(lr=1e-2), **options(tmp_path)) as engine:
        for raised in (fail, lambda *args: fail()):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="read failed"):
                patch.setattr(Manager, "acquire", raised)
                engine(torch.ones(2, 64))
            step(engine, 1)
