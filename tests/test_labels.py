"""What the user's own profiler shows of the runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import WIDTH, batch, loss_of, tight
from torch import nn

from offload import AdamW, Engine
from offload.labels import labelled


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])


def shown(profile: torch.profiler.profile) -> dict[str, int]:
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("offload::")}


def test_a_step_is_labelled(tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for number in range(2):
                engine.backward(loss_of(engine, number))
                engine.step()
            engine(batch(0))
        found = shown(profile)
        assert found.keys() >= {f"offload::{name}" for name in ("fetch", "bind", "update", "write_back", "wait")}
        assert found["offload::bind"] >= 6 and found["offload::update"] >= 6


@pytest.mark.parametrize("profiled", [False, True])
def test_a_label_changes_neither_result_nor_error(profiled: bool) -> None:
    @labelled("divide")
    def divide(a: int, *, by: int) -> float:
        """Divide."""
        return a / by

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pass
    if profiled:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert divide(6, by=3) == 2
            with pytest.raises(ZeroDivisionError):
                divide(1, by=0)
    else:
        assert divide(6, by=3) == 2
        with pytest.raises(ZeroDivisionError):
            divide(1, by=0)
    assert shown(profile) == ({"offload::divide": 2} if profiled else {})
    assert divide.__name__ == "divide" and divide.__doc__ == "Divide."
