"""Forwards inside of forwards, where all parameters stay: what those around have done is not done again."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import WIDTH, batch, everything_on_device, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import SGD, Engine, StateError
from offload.module.hooks import Hooks

pytestmark = pytest.mark.usefixtures("single_torch_thread")


class Inner(nn.Module):
    """Has parameters of its block's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x)))


class Block(nn.Module):
    """A unit of a few modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.times = 0  # that it calls itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.times:
            self.times -= 1
            return x + 0.5 * self(x)
        return x + self.inner(x)


class Net(nn.Module):
    """Blocks, one of which is called in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.call: Callable[[Any, torch.Tensor], torch.Tensor] = lambda module, x: module(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_(torch.is_grad_enabled())
        for block in self.blocks:
            x = self.call(block, x)
        return x


def net(kind: type[nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def assert_trains_like_plain(model: Any, steps: int = 2) -> None:
    """Train a model and a copy of it."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with Engine(model, SGD(lr=0.1), **everything_on_device()) as engine:
        for number in range(steps):
            engine.backward(loss_of(engine, number))
            engine.step()
            loss_of(plain, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not engine._parts.hooks._forwards.under_way
        for (name, ours), truth in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours, truth, atol=1e-6), name


@pytest.mark.parametrize("repeated", [False, True])
def test_a_unit_is_lent_once(repeated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and each block begin, and no module in them; a segment's block begins again in backward."""
    begun: list[nn.Module] = []
    begin = Hooks._begin_forward
    monkeypatch.setattr(Hooks, "_begin_forward", lambda self, m, **more: (begun.append(m), begin(self, m, **more))[1])
    model = net()
    if repeated:
        model.call = lambda module, x: checkpoint(module, x, use_reentrant=False)
    with Engine(model, SGD(lr=0.1), **everything_on_device()) as engine:
        engine.backward(loss_of(engine, 0))
    assert begun == [model, *model.blocks, *(reversed(model.blocks) if repeated else ())]


def again(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a module inside of its own forward."""
    module.times = 2
    return module(x)  # type: ignore[no-any-return]


def failing_once(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Let a module inside of a module fail, and call it again."""

    def fail(*_: object) -> None:
        raise KeyError("of the user's")

    hook = module.inner.norm.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        module(x)
    hook.remove()
    return module(x)  # type: ignore[no-any-return]


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "as it is": lambda module, x: module(x),
    "its parts one by one": lambda module, x: x + module.inner.norm(torch.tanh(module.inner.linear(x))),
    "twice": lambda module, x: module(module(x)),
    "inside of itself": again,
    "with an error inside": failing_once,
    "checkpointed": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "checkpointed with reentrance": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "checkpointed inside": lambda module, x: x + checkpoint(module.inner, x, use_reentrant=False),
}


@pytest.mark.parametrize("call", CALLS)
def test_it_trains_like_plain_pytorch(call: str) -> None:
    model = net()
    model.call = CALLS[call]
    assert_trains_like_plain(model)


def test_hooks_of_the_user_inside_see_no_parameter() -> None:
    """A unit's bytes are nothing that somebody else may keep, whichever module of the unit is called there."""
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.untyped_storage().data_ptr())
        return tensor

    def call(module: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return module(x)  # type: ignore[no-any-return]

    model = net()
    with Engine(model, SGD(lr=0.1), **everything_on_device()) as engine:
        model.call = call
        engine.backward(loss_of(engine, 0))
        bases = set(engine._parts.hooks.binding._bases)
        assert seen and not bases & set(seen)
        engine.step()


def test_another_thread_may_not_go_on_inside() -> None:
    model = net()
    x = batch(0)
    errors: list[BaseException] = []

    def run(module: Any, x: torch.Tensor) -> None:
        try:
            module(x)
        except StateError as error:
            errors.append(error)

    def in_a_thread(module: Any, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=run, args=(module.linear, x))
        thread.start()
        thread.join()
        return x

    with Engine(model, SGD(lr=0.1), **everything_on_device()) as engine:
        inner = model.blocks[0].inner
        inner.forward = lambda x: in_a_thread(inner, x)
        engine(x)
        assert "expected one thread at a time" in str(errors[0])
        del inner.forward
        engine.backward(loss_of(engine, 0))
        engine.step()


def test_an_interrupted_evaluation_leaves_nothing_behind_once_the_model_is_called_again() -> None:
    """The model itself is under way by the books, and its frame is gone; a model that calls itself is in both."""
    model = net()
    reached: list[int] = []

    def interrupt(module: nn.Module, args: object) -> None:
        if reached:
            raise KeyboardInterrupt

    with Engine(model, SGD(lr=0.1), **everything_on_device()) as engine, torch.no_grad():
        handle = model.blocks[1].register_forward_pre_hook(interrupt)
        expected = model(batch(0))
        for _ in range(3):
            reached.append(1)
            with pytest.raises(KeyboardInterrupt):
                model(batch(0))
            reached.clear()
            assert torch.equal(model(batch(0)), expected)
            assert not engine._parts.hooks._forwards.under_way
        handle.remove()


def test_what_an_interrupt_has_left_is_taken_down_by_the_next_forward_of_the_model() -> None:
    """It tore out of a part that was called directly; the model has nothing lent for itself."""
    model = net()

    def interrupted(_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with Engine(model, SGD(lr=0.1), **everything_on_device()) as engine:
        block = model.blocks[0]
        block.register_forward_hook(lambda *_: None)
        begin, end = Hooks._after_forward, lambda *_: None
        Hooks._after_forward = end  # type: ignore[method-assign, assignment]
        try:
            block.inner.forward = interrupted
            with pytest.raises(KeyboardInterrupt):
                block(batch(0))
        finally:
            Hooks._after_forward = begin  # type: ignore[method-assign]
            del block.inner.forward
        assert engine._parts.hooks._forwards.under_way
        model(batch(0))
        assert not engine._parts.hooks._forwards.under_way
        engine.backward(loss_of(engine, 0))
        engine.step()
