"""SGD, Lion, Adagrad and LAMB: against torch or a written reference, and the same bits everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_arrays import ISAS, LENGTHS, MASTERS, Shard, Variant, automatic, gradient, widen

from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import Dtype, Hyper, MasterKind, StateKind, StepArrays
from offload.kernels.optimizers import LAMB, SGD, Adagrad, Lion

Doubles = npt.NDArray[np.float64]
VARIANTS = [Variant(grad, kind, emit) for grad in Dtype for kind, emit in MASTERS]
HYPERS = [
    Hyper(SGD(lr=1e-2, weight_decay=0.1), step=3, grad_scale=0.37),
    Hyper(SGD(lr=1e-2, momentum=0.9), step=1, grad_scale=0.37),
    Hyper(SGD(lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1), step=2, grad_scale=0.37),
    Hyper(SGD(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1), step=3),
    Hyper(Lion(lr=1e-3, weight_decay=0.1), step=3, grad_scale=0.37),
    Hyper(Adagrad(lr=1e-2, lr_decay=0.01, weight_decay=0.1), step=3, grad_scale=0.37),
    Hyper(LAMB(lr=1e-2, weight_decay=0.1), step=3, grad_scale=0.37),
]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with automatic():
        yield


@dataclass
class Trained:
    """A shard and the optimizer that updates it; the shard's moments are the states, as many as there are."""

    shard: Shard

    def arrays(self, hyper: Hyper, begin: int = 0, end: int | None = None) -> StepArrays:
        arrays = self.shard.arrays(begin, end)
        return replace(arrays, states=arrays.states[: len(hyper.spec.states)])

    def step(self, hyper: Hyper, *cuts: int) -> Trained:
        """Step range by range; LAMB measures all ranges first."""
        borders = [0, *cuts, len(self.shard.grad)]
        parts = [self.arrays(hyper, begin, end) for begin, end in zip(borders, borders[1:], strict=False)]
        if isinstance(hyper.spec, LAMB) and cuts:
            sums = 0.0, 0.0
            for part in parts:
                sums = cpu_adam.lamb_moments(part, hyper, before=sums)
            for part in parts:
                cpu_adam.lamb_apply(part, hyper, hyper.spec.step_size(*sums))
        else:
            for part in parts:
                cpu_adam.step(part, hyper)
        return self


@pytest.mark.few(24)
@pytest.mark.parametrize("hyper", HYPERS, ids=lambda h: type(h.spec).__name__)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("classes", [False, True], ids=["usual", "any-bits"])
def test_the_same_bits_on_every_path(variant: Variant, hyper: Hyper, classes: bool) -> None:
    for numel in LENGTHS:
        start = Shard.random(variant, numel, numel, classes=classes)
        cpu_adam.force_isa("scalar")
        cpu_adam.set_num_threads(1)
        want = Trained(start.copy()).step(hyper)
        for isa in ISAS:
            cpu_adam.force_isa(isa)
            for threads, offsets in ((1, (0,) * 5), (3, (1, 3, 5, 7, 9))):
                cpu_adam.set_num_threads(threads)
                got = Trained(start.copy(offsets)).step(hyper)
                want.shard.assert_same(got.shard, f"{isa}, {threads} threads, {numel} elements")


@given(data=st.data(), variant=st.sampled_from(VARIANTS), hyper=st.sampled_from(HYPERS))
def test_the_same_bits_for_any_division_into_ranges(data: st.DataObject, variant: Variant, hyper: Hyper) -> None:
    lamb = isinstance(hyper.spec, LAMB)
    numel = data.draw(st.integers(0, 200_000 if lamb else 3000))
    start = Shard.random(variant, numel, numel, classes=False)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=5)))
    if lamb:
        cuts = [cut // 65536 * 65536 for cut in cuts]
    want = Trained(start.copy()).step(hyper)
    cpu_adam.force_isa(data.draw(st.sampled_from(ISAS)))
    got = Trained(start.copy(data.draw(st.tuples(*[st.integers(0, 31)] * 5)))).step(hyper, *cuts)
    want.shard.assert_same(got.shard, f"cuts {cuts}")


def train(hyper: Hyper, steps: int, initial: float = 0.0, grad: Dtype = Dtype.FLOAT32) -> Iterator[Any]:
    """Yield (weights before, gradient, shard after) of each step."""
    rng = np.random.default_rng(1)
    shard = Shard.random(Variant(grad, MasterKind.FLOAT32), 4099, 2, classes=False)
    shard.exp_avg.view(np.float32)[:] = initial
    shard.exp_avg_sq[:] = 0
    for step in range(1, steps + 1):
        before = shard.weights().copy()
        shard.grad[:] = gradient(rng.standard_normal(4099) * 1e-2, grad)
        Trained(shard).step(replace(hyper, step=step))
        yield before, widen(shard.grad, grad).copy(), shard


@pytest.mark.parametrize("grad", Dtype)
@pytest.mark.parametrize(
    ("hyper", "make"),
    [
        (Hyper(SGD(lr=0.1)), lambda p: torch.optim.SGD(p, 0.1)),
        (Hyper(SGD(lr=0.1, weight_decay=0.01)), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
        (Hyper(SGD(lr=0.1), grad_scale=-1.0), lambda p: torch.optim.SGD(p, 0.1, maximize=True)),
        (Hyper(SGD(lr=0.1, momentum=0.9)), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
        (Hyper(SGD(None, 0.1, 0.9, 0.4, 0.01)), lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.4, 0.01)),
        (
            Hyper(SGD(None, 0.1, 0.9, 0.0, 0.01, True)),
            lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True),
        ),
        (Hyper(Adagrad(lr=0.1)), lambda p: torch.optim.Adagrad(p, 0.1)),
        (
            Hyper(Adagrad(None, 0.1, 0.01, 0.01, eps=1e-6)),
            lambda p: torch.optim.Adagrad(p, 0.1, 0.01, 0.01, initial_accumulator_value=0.5, eps=1e-6),
        ),
    ],
    ids=["sgd", "decay", "maximize", "momentum", "dampening", "nesterov", "adagrad", "adagrad-all"],
)
def test_forty_steps_as_in_torch(hyper: Hyper, make: Any, grad: Dtype) -> None:
    exact, theirs, optimizers, ours = None, None, [], None
    initial = 0.5 if isinstance(hyper.spec, Adagrad) and hyper.spec.lr_decay else 0.0
    for before, fresh, shard in train(hyper, 40, initial, grad):
        if exact is None:
            exact = torch.nn.Parameter(torch.from_numpy(before.astype(np.float64)))
            theirs = torch.nn.Parameter(torch.from_numpy(before.copy()))
            optimizers = [make([exact]), make([theirs])]
        exact.grad, theirs.grad = torch.from_numpy(fresh).double(), torch.from_numpy(fresh.copy())
        for optimizer in optimizers:
            optimizer.step()
        ours = shard.weights()
    our_error = np.abs(ours - exact.detach().numpy())
    their_error = np.abs(theirs.detach().numpy() - exact.detach().numpy())
    # fused multiply-adds: not further from float64 than torch, but for scatter
    assert our_error.mean() <= 1.05 * their_error.mean()
    assert our_error.max() <= 1.5 * their_error.max()


def test_lion_follows_its_paper() -> None:
    """In float64; a sign differs where the sum is a rounding error, which moves the weight by 2 lr."""
    hyper = Hyper(Lion(lr=1e-3, weight_decay=0.1))
    m: Doubles = np.zeros(4099)
    for before, fresh, shard in train(hyper, 40):
        g, p = fresh.astype(np.float64), before.astype(np.float64)
        want = p * (1 - 1e-3 * 0.1) - 1e-3 * np.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
        error = np.abs(shard.weights() - want)
        assert np.count_nonzero(error > 1e-8) <= 2
        assert error.max() <= 2e-3 + 1e-8
        np.testing.assert_allclose(shard.exp_avg.view(np.float32), m, rtol=0, atol=1e-8)


@pytest.mark.parametrize("isa", ISAS)
def test_lion_without_betas_takes_the_sign_of_the_gradient(isa: str) -> None:
    """However small it is beside the one before."""
    cpu_adam.force_isa(isa)
    shard = Shard.random(Variant(Dtype.FLOAT32, MasterKind.FLOAT32), 70, 3, classes=False)
    shard.exp_avg.view(np.float32)[:] = 1.0
    shard.grad.view(np.float32)[:] = -1e-9
    before = shard.weights().astype(np.float64)
    Trained(shard).step(Hyper(Lion(lr=0.5, betas=(0, 0.0))))
    np.testing.assert_array_equal(shard.weights(), (before + 0.5).astype(np.float32))
    np.testing.assert_array_equal(shard.exp_avg.view(np.float32), np.float32(-1e-9))


@pytest.mark.parametrize("isa", ISAS)
def test_lion_where_there_is_no_direction(isa: str) -> None:
    cpu_adam.force_isa(isa)
    shard = Shard.random(Variant(Dtype.FLOAT32, MasterKind.FLOAT32), 70, 3, classes=False)
    shard.exp_avg[:] = 0
    shard.grad[:] = np.array([0.0, np.inf, -np.inf, np.nan, -0.0] * 14, np.float32).view(np.uint32)
    before = shard.weights().astype(np.float64)
    Trained(shard).step(Hyper(Lion(lr=0.5)))
    move = np.array([0, -0.5, 0.5, np.nan, 0] * 14)
    np.testing.assert_array_equal(shard.weights(), (before + move).astype(np.float32))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_follows_its_paper(weight_decay: float) -> None:
    hyper = Hyper(LAMB(lr=1e-2, weight_decay=weight_decay))
    m, v = np.zeros(4099), np.zeros(4099)
    for step, (before, fresh, shard) in enumerate(train(hyper, 40), 1):
        g, p = fresh.astype(np.float64), before.astype(np.float64)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        u = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-6) + weight_decay * p
        want = p - 1e-2 * np.linalg.norm(p) / np.linalg.norm(u) * u
        np.testing.assert_allclose(shard.weights(), want, rtol=2e-6, atol=1e-9)


def test_lamb_takes_the_plain_step_where_a_norm_is_zero() -> None:
    spec = LAMB(lr=1e-2, weight_decay=0.0)
    hyper = Hyper(spec)
    assert spec.step_size(0.0, 4.0) == spec.step_size(4.0, 0.0) == 1e-2
    assert spec.step_size(4.0, 16.0) == 1e-2 * math.sqrt(4 / 16)
    shard = Shard.random(Variant(Dtype.FLOAT32, MasterKind.FLOAT32), 1000, 4, classes=False)
    shard.grad[:] = 0
    shard.exp_avg[:] = 0
    values = shard.weights().astype(np.float64)
    sums = cpu_adam.lamb_moments(Trained(shard).arrays(hyper), hyper)
    assert sums == (pytest.approx(float((values**2).sum()), rel=1e-12), 0.0)


def test_a_first_step_with_momentum_ignores_dampening_as_torch_does() -> None:
    shard = Shard.random(Variant(Dtype.FLOAT32, MasterKind.FLOAT32), 100, 5, classes=False)
    shard.exp_avg[:] = 0
    hyper = Hyper(SGD(lr=0.1, momentum=0.9, dampening=0.7))
    cpu_adam.step(Trained(shard).arrays(hyper), hyper)
    np.testing.assert_array_equal(shard.exp_avg, shard.grad)


def test_states_that_an_optimizer_does_not_have_are_refused() -> None:
    shard = Shard.random(Variant(Dtype.FLOAT32, MasterKind.FLOAT32), 256, 6, classes=False)
    lion, lamb = Hyper(Lion()), Hyper(LAMB())
    with pytest.raises(ValueError, match="states: expected 1 addresses but got 2; pass exp_avg"):
        cpu_adam.step(shard.arrays(), lion)
    compressed = replace(shard.arrays(), state_kind=StateKind.BFLOAT16)
    with pytest.raises(ValueError, match="state_kind: expected FLOAT32 for Lion but got BFLOAT16"):
        cpu_adam.step(replace(compressed, states=compressed.states[:1]), lion)
    for call in (
        lambda: cpu_adam.lamb_moments(compressed, lamb),
        lambda: cpu_adam.lamb_apply(compressed, lamb, 1.0),
    ):
        with pytest.raises(ValueError, match="state_kind: expected FLOAT32 for LAMB but got BFLOAT16"):
            call()
    empty = replace(shard.arrays(), numel=0)
    assert cpu_adam.lamb_moments(empty, lamb, before=(1.0, 2.0)) == (1.0, 2.0)
    cpu_adam.lamb_apply(empty, lamb, 1.0)
