"""Several ranks with slices of parameters: what fails on one, or differs, is one named error on all."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from several_ranks import Ended, Raised, run
from test_stage_1_errors import error_of
from torch import nn

from offload import AdamW, Engine, several
from offload.distributed.processes import Processes, open_ranks
from offload.memory.arena import HostArena
from offload.memory.budget import Tier
from offload.module.absent import is_lost
from offload.module.hooks import Hooks
from offload.shards import manager
from offload.torch_private import start_all_gather
from swap import SwapFullError

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

WORLD = 3
LAYERS, WIDTH = 8, 64
DEADLINE_S = 2.0


class Chain(nn.Module):
    """Layers one after the other, each a unit; `before` is called with the number of each, `behind` in backward."""

    def __init__(
        self,
        before: Callable[[int], object] = lambda index: None,
        seed: int = 0,
        behind: Callable[[int], None] = lambda index: None,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.before, self.behind = before, behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            self.before(index)
            x = torch.tanh(layer(x))
            if x.requires_grad:
                x.register_hook(lambda gradient, index=index: self.behind(index))
        return x.square().mean()


def engine_of(model: nn.Module, **options: Any) -> Engine:
    settings = {"device": "cpu", "max_memory": {"device": "8MiB", "cpu": "8MiB"}, "unit_bytes": 1 << 14, "stage": 3}
    return Engine(model, AdamW(lr=0.01), **(settings | options))


def backward(engine: Engine) -> None:
    engine.backward(engine(torch.ones(2, WIDTH)))


def fail(rank: int, how: str) -> dict[str, Any]:
    """Let rank 1 fail in the middle of its second forward, or backward; return what this rank is told."""
    store = torch.distributed.distributed_c10d._get_default_store()
    armed = False

    def before(index: int) -> None:
        if not armed or rank != 1 or index != LAYERS // 2:
            return
        if how.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "silent":
            store.wait(["told 0", "told 2"])
        raise ValueError("layer 4 has a bad day")

    ranks: list[Any] = []
    several.open_ranks = lambda group, **more: ranks.append(open_ranks(group, **more)) or ranks[-1]
    model = Chain(behind=before) if how.endswith("in backward") else Chain(before)
    with engine_of(model) as engine:
        backward(engine)
        assert engine.step()
        armed = True
        if how == "silent":
            ranks[0]._meeting.deadline_s = DEADLINE_S  # not before: the ranks begin one after the other
        if how == "evaluation":
            with torch.no_grad():
                first = error_of(lambda: engine(torch.ones(2, WIDTH)))
        else:
            first = error_of(lambda: backward(engine))
        store.set(f"told {rank}", "1")
        afterwards = error_of(lambda: backward(engine))
    left = error_of(lambda: model(torch.ones(2, WIDTH)))
    return {"first": first, "afterwards": afterwards, "left": left}


@pytest.mark.parametrize("how", ["kill", "raise", "evaluation", "silent", "kill in backward", "raise in backward"])
def test_what_fails_between_units_is_told_to_all(how: str) -> None:
    every = run(fail, WORLD, how)
    one = every.pop(1)
    if how.startswith("kill"):
        assert one == Ended(-signal.SIGKILL)
    else:
        assert isinstance(one, dict) and one["afterwards"][0] == "RanksError", one
    text = {
        "raise": "rank 1: ValueError: layer 4 has a bad day",
        "evaluation": "rank 1: ValueError: layer 4 has a bad day",
        "kill": r"no word of rank 1, (ranks 0, 2 waiting in|rank 0 waiting in .*, rank 2 waiting in) .* of layers\.",
        "kill in backward": r"no word of rank 1, (ranks 0, 2 waiting in|rank 0 waiting in .*, rank 2 waiting in) ",
        "raise in backward": "rank 1: ValueError: layer 4 has a bad day",
        "silent": r"no word of rank 1, ranks 0, 2 waiting in parameters of layers\.",
    }[how]
    for found in every:
        assert not isinstance(found, (Raised, Ended)), found
        assert found["first"] == every[0]["first"] and re.search(text, found["first"][1]), found["first"]
        assert found["first"][0] == found["afterwards"][0] == "RanksError"
        assert "close the engine" in found["afterwards"][1]
        assert found["left"][0] == "StateError" and "parameter layers.0.weight" in found["left"][1]


def send_late(rank: int) -> tuple[str, bool]:
    """Let rank 1 fail where all have begun to gather, and send its slice when the others have closed their engines.

    Returns:
        the error, and whether memory that is mapped after that stays as it is.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    late: list[Callable[[], Any]] = []
    armed = False
    gather = Processes.gather

    def fail_instead(self: Processes, full: torch.Tensor, where: str) -> None:
        if armed and rank == 1:
            group, mine = self._groups[-1], torch.full((full.numel() // WORLD,), 1.0, dtype=full.dtype)
            late.append(lambda: start_all_gather(group, torch.empty_like(full), mine))
            raise ValueError("a bad day")
        gather(self, full, where)

    Processes.gather = fail_instead
    engine = engine_of(Chain())
    backward(engine)
    armed = True
    error = error_of(lambda: backward(engine))[0]
    engine.close(restore=False)
    if rank == 1:
        store.wait(["closed 0", "closed 2"])
        late[0]().wait()
        store.set("sent", "1")
        return error, True
    arenas = [HostArena(Tier.HOST, size_bytes) for size_bytes in [1 << 20, 8 << 20] * 8]
    store.set(f"closed {rank}", "1")
    store.wait(["sent"])
    time.sleep(0.1)
    return error, not any(any(ctypes.string_at(arena.base_address, arena.size_bytes)) for arena in arenas)


def test_what_comes_when_nobody_waits_any_more_is_written_nowhere() -> None:
    assert run(send_late, WORLD) == [("RanksError", True), ("ValueError", True), ("RanksError", True)]


def differ(rank: int) -> dict[str, Any]:
    """Let rank 1 differ in one thing after the other; return what each rank is told."""
    odd, found = rank == 1, dict[str, Any]()
    model = Chain(seed=int(odd))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found["values"] = error_of(lambda: engine_of(model))
    found["as it was"] = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    small = {"max_memory": {"device": "64KiB", "cpu": "8MiB"}} if odd else {}
    found["budget"] = error_of(lambda: engine_of(model, **small))
    found["stage"] = error_of(lambda: engine_of(model, stage=1 if odd else 3))
    with torch.device("meta"):
        empty = Chain()
    torch.manual_seed(int(odd))
    found["meta"] = error_of(lambda: engine_of(empty))
    engine = engine_of(Chain())
    with engine.gather(engine.module.layers[0], modify=odd):
        assert torch.isfinite(engine.module.layers[0].weight).all()
    backward(engine)
    found["nothing written"] = error_of(engine.step)

    def write() -> None:
        with engine.gather(engine.module.layers[0], modify=odd), torch.no_grad():
            if odd:
                engine.module.layers[0].bias.add_(1.0)
        backward(engine)

    found["written"] = error_of(write)
    engine.close()
    found["back"] = error_of(lambda: engine.module(torch.ones(2, WIDTH)))
    engine = engine_of(engine.module)
    if odd:
        engine.close()
    found["closed"] = error_of(lambda: backward(engine))
    engine.close()
    engine = engine_of(Chain())
    engine.close(restore=not odd)
    found["not by all"] = error_of(lambda: engine.module(torch.ones(2, WIDTH)))
    engine = engine_of(Chain(), prefetch=not odd)  # others ask ahead for what rank 1 never wants
    engine.close(restore=False)
    return found


def test_what_differs_is_named_on_all_ranks() -> None:
    every = run(differ, WORLD)
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        for what, text in (
            ("values", "expected one value of the values of layers.0.bias in loading but got"),
            ("stage", "expected one value of stage in making an engine but got 3 on ranks 0, 2, 1 on rank 1"),
            ("meta", "expected one value of the values of layers.0.bias in loading but got"),
            ("written", "writing parameters of layers.0 on rank 1"),
        ):
            assert found[what] == every[0][what] and found[what][0] == "RanksError", found[what]
            assert text in found[what][1], found[what]
        assert found["as it was"]
        assert found["budget"][0] == ("BudgetError" if rank == 1 else "RanksError")
        assert found["nothing written"] == found["back"] == ("nothing", "")
        assert found["not by all"][0] == "StateError" and "parameter layers.0.weight" in found["not by all"][1]
        assert found["closed"][0] == ("StateError" if rank == 1 else "RanksError")
        assert rank == 1 or "closing on rank 1" in found["closed"][1], found["closed"]


def fail_while_made(rank: int, how: str) -> tuple[tuple[str, str], list[int]]:
    """Let rank 1 fail in the midst of making its engine; return what each rank is told, and which layers it has not."""
    with torch.device("meta" if how == "initialised" else "cpu"):
        model = Chain()
    before = [layer.weight.detach().clone() for layer in model.layers]
    calls = LAYERS // 2 if how == "loaded" else 0

    def fail(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == LAYERS // 2 + 1:
            raise SwapFullError("a bad day")
        return real(*args, **options)

    if how == "written":  # the others write theirs
        manager.stream = functools.partial(fail, manager.stream)
    if how == "loaded":
        Hooks.attach = functools.partialmethod(lambda self, real: fail(real, self), Hooks.attach)
    more = {"init_weights": functools.partial(fail, nn.Linear.reset_parameters)} if how == "initialised" else {}
    error = error_of(lambda: engine_of(model, **more))

    def is_as_before(index: int) -> bool:
        weight = model.layers[index].weight
        return not is_lost(weight) and (before[index].is_meta or torch.equal(weight, before[index]))

    return error, [index for index in range(LAYERS) if not is_as_before(index)]


@pytest.mark.parametrize("how", ["initialised", "written", "loaded"])
def test_a_rank_that_fails_while_its_engine_is_made_is_told_to_all(how: str) -> None:
    for rank, found in enumerate(run(fail_while_made, WORLD, how)):
        assert not isinstance(found, (Raised, Ended)), found
        error, lost = found
        assert error == (
            ("SwapFullError", "a bad day") if rank == 1 else ("RanksError", "rank 1: SwapFullError: a bad day")
        )
        assert lost == ([LAYERS // 2] if how == "written" and rank != 1 else []), (rank, lost)
