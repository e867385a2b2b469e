"""Gradients that have moved away are clipped all at once: torch's bits, without a call of torch per gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import WIDTH, batch, loss_of, tight
from torch import nn
from trainers import CLIPPING, calls_of_handles

from offload import SGD, Engine
from offload.module.clipping import clip_grad_norm_, handles_of

pytestmark = pytest.mark.usefixtures("single_torch_thread")

Clip = Callable[..., torch.Tensor]


def net(dtype: torch.dtype = torch.float32, count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("limit", [0.05, 1e6, math.inf])
def test_it_is_torchs_to_the_bit(limit: float, order: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """With the parameters in an order that is not the model's, twice in a step."""

    def trained(clip: Clip) -> tuple[list[torch.Tensor], list[float], object]:
        model = net(dtype)
        parameters = list(reversed(list(model.parameters())))
        norms: list[torch.Tensor] = []
        factors: list[float] = []
        with Engine(model, SGD(lr=0.1), **tight(model, tmp_path)) as engine:
            for number in range(2):
                engine.backward(engine(batch(number).to(dtype)).float().sub(1).pow(4).mean())
                norms += [clip(parameters, limit, norm_type=order), clip(iter(parameters), limit / 2, norm_type=order)]
                handles = handles_of(parameters)
                assert handles is not None and len(handles) == len(parameters)
                factors += [handle.value.factor for handle in handles]
                engine.step()
            return norms, factors, engine.digests()

    truth, ours = trained(torch.nn.utils.clip_grad_norm_), trained(clip_grad_norm_)
    assert ours[1:] == truth[1:]
    for norm, wanted in zip(ours[0], truth[0], strict=True):
        assert torch.equal(norm, wanted) and norm.dtype == wanted.dtype and norm.device == wanted.device


def test_what_is_not_a_handle_is_left_to_torch(tmp_path: Path) -> None:
    model, plain = net(), net()
    assert float(clip_grad_norm_(plain.parameters(), 1.0)) == 0.0
    with Engine(model, SGD(lr=0.1), **tight(model, tmp_path)) as engine:
        for one in (engine, plain):
            loss_of(one, 0).backward()
        model[0].weight.grad = plain[0].weight.grad.clone()  # a tensor among handles
        assert handles_of(model.parameters()) is None
        for parameters in (model.parameters(), [*model.parameters(), *plain.parameters()]):
            assert handles_of(parameters) is None
        ours, truth = (clip_grad_norm_(one.parameters(), 1e-3) for one in (model, plain))
        assert float(ours) == pytest.approx(float(truth), rel=1e-5)
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert float(total) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("count", [2, 6])
def test_calls_do_not_grow_with_the_model(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own function asks each gradient twice."""
    calls = calls_of_handles(monkeypatch)
    model = net(count=count)
    with Engine(model, SGD(lr=0.1), **tight(model, tmp_path)) as engine:
        engine.backward(loss_of(engine, 0))
        engine.clip_grad_norm_(1e-3)
        clip_grad_norm_(model.parameters(), 1e-4)
        assert not calls.keys() & CLIPPING
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-5)
        assert calls["linalg_vector_norm"] == calls["mul_"] == 2 * count
