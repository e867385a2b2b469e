"""What a step would take: counted on the meta device, timed by a formula, and planned as an engine plans."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_planner import MIB, enlarged, named_budgets, requests
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import offload
from offload import predicting
from offload.activations.cross_entropy import _How
from offload.cli import heavy
from offload.cli.main import Process, main
from offload.errors import BudgetError, ConfigError
from offload.forecast import Clipping
from offload.known_models import KNOWN
from offload.memory import limits
from offload.memory.budget import Tier
from offload.memory.limits import HOST_HEADROOM
from offload.meta_models import made_on_meta
from offload.planning import meta_operators
from offload.planning import work as planning_work
from offload.planning.asked import Request
from offload.planning.hardware import DESKTOP, H200
from offload.planning.moved import lane_seconds
from offload.planning.planner import make_plan
from offload.planning.roles import Role
from offload.planning.shared import least_of
from offload.planning.timing import timing_of
from offload.planning.uses import Uses
from offload.planning.work import Work, work_of
from offload.sizes import figures, format_bytes

ROWS, WIDE, INNER = 6, 32, 64
FLOPS = 2 * ROWS * WIDE * INNER  # of one product


class Block(nn.Module):
    """Two products."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, INNER, bias=False), nn.Linear(INNER, WIDE, bias=False)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, WIDE)."""
        if not self.again:
            return self._inner(x)
        found: torch.Tensor = checkpoint(self._inner, x, use_reentrant=False)
        return found

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def tiny(**sizes: int):
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=sizes.get("layers", 2),
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )


# --- what a batch takes ---


def test_products_of_both_passes_are_counted() -> None:
    """Two products forward; backward two for each weight's gradient, and one for the input of the second layer."""
    work = work_of(Block(), [torch.ones(ROWS, WIDE)])
    assert sum(kernel.flops * many for kernel, many in work.forward.items()) == 2 * FLOPS
    assert sum(kernel.flops * many for kernel, many in work.backward.items()) == 3 * FLOPS
    assert work.flops == 5 * FLOPS


def test_what_is_computed_again_belongs_to_backward() -> None:
    """A checkpoint repeats the first product: the second one's result is not needed, and torch stops before it."""
    work = work_of(nn.Sequential(Block(again=True)), [torch.ones(ROWS, WIDE, requires_grad=True)])
    assert sum(kernel.flops * many for kernel, many in work.forward.items()) == 2 * FLOPS
    assert sum(kernel.flops * many for kernel, many in work.backward.items()) == (1 + 4) * FLOPS


def test_checkpoints_lower_the_peak_of_activations() -> None:
    kept, again = (
        work_of(nn.Sequential(*(Block(again=again) for _ in range(8))), [torch.ones(999, WIDE)])
        for again in (False, True)
    )
    assert again.peak_bytes < kept.peak_bytes / 2


def test_gradients_that_have_come_do_not_count_as_activations() -> None:
    """Weights of 8 KiB each, 64 layers: with all of their gradients the peak would be over 1 MiB."""
    work = work_of(nn.Sequential(*(Block() for _ in range(64))), [torch.ones(1, WIDE)])
    assert work.peak_bytes < 256 << 10


def test_attention_is_one_kernel_whose_scores_take_no_memory() -> None:
    """Scores of 4 heads over 4096 tokens would take 256 MiB in fp32."""
    with torch.device("meta"):
        model = pytest.importorskip("transformers").AutoModelForCausalLM.from_config(tiny())
    model.config.use_cache = False
    work = work_of(model, (1, 4096))
    assert work.peak_bytes < 200 << 20
    assert work.flops > 6 * sum(p.numel() for n, p in model.named_parameters() if "embed" not in n) * 4096


class Uneven(nn.Module):
    """Attention whose values are narrower than its keys, as of DeepSeek's models, or wider."""

    def __init__(self, keys: int, values: int) -> None:
        super().__init__()
        self.widths = keys, keys, values
        self.qkv, self.out = nn.Linear(WIDE, 4 * sum(self.widths)), nn.Linear(4 * values, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, length, WIDE)."""
        query, key, value = self.qkv(x).unflatten(-1, (4, -1)).transpose(1, 2).split(self.widths, -1)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("widths", [(24, 16), (16, 24)])
def test_values_of_attention_may_have_another_width_than_keys(widths: tuple[int, int]) -> None:
    work = work_of(Uneven(*widths), [torch.ones(1, 4096, WIDE)])
    assert all(work.operators) and work.peak_bytes < 64 << 20


class Attends(nn.Module):
    """Attention over tensors of any shape (..., length, WIDE)."""

    def __init__(self, shape: tuple[int, ...], mask: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.qkv, self.shape = nn.Linear(WIDE, 3 * WIDE), shape
        self.mask = None if mask is None else torch.ones(mask, dtype=torch.bool)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (length, WIDE)."""
        parts = (part.expand(*self.shape, WIDE) for part in self.qkv(x).chunk(3, -1))
        mask = None if self.mask is None else self.mask.to(x.device)
        return nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask)


@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("hardware", ["desktop", None])
@pytest.mark.parametrize(
    ("shape", "mask"),
    [
        ((64,), None),
        ((64,), (64, 64)),
        ((2, 64), None),
        ((2, 64), (2, 1, 64)),
        ((3, 2, 4, 64), None),
        ((3, 2, 4, 64), (2, 1, 64, 64)),
    ],
)
def test_attention_of_other_than_four_dimensions_makes_all_scores(
    shape: tuple[int, ...], mask: tuple[int, ...] | None, hardware: str | None, activations: str
) -> None:
    """Torch has no kernel for it on any device: forward has two products for each score."""
    options = {"activations": activations, "hardware": hardware, "device": None if hardware else "cpu"}
    found = offload.plan(Attends(shape, mask), batch=[torch.ones(64, WIDE)], **options)
    assert found.work is not None
    scores = math.prod(shape) * 64
    flops = sum(kernel.flops * many for kernel, many in found.work.forward.items())
    assert flops == 2 * 64 * WIDE * 3 * WIDE + 2 * 2 * scores * WIDE
    assert found.work.peak_bytes > 4 * scores


def test_attention_of_other_than_four_dimensions_has_no_kernel_of_torch() -> None:
    """As the forecast has it: of what runs here, nothing is a kernel for attention but with four dimensions."""

    class Seen(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    for shape in ((64,), (2, 64), (3, 2, 4, 64), (2, 4, 64)):
        Seen.names.clear()
        with Seen():
            Attends(shape)(torch.ones(64, WIDE))
        assert any("attention" in name for name in Seen.names) is (len(shape) == 3)


class Experts(nn.Module):
    """Products of groups of rows with a matrix for each."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, WIDE, 32, dtype=dtype))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return (rows, 32)."""
        return torch._grouped_mm(x.to(self.weight.dtype), self.weight, ends)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has none")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_experts_are_counted_in_any_dtype(dtype: torch.dtype) -> None:
    work = work_of(Experts(dtype), [torch.ones(ROWS, WIDE), torch.ones(4, dtype=torch.int32)])
    assert work.flops == 2 * 2 * ROWS * WIDE * 32  # forward, and the gradient of the weight


ATEN = torch.ops.aten


class Older:
    """Operators of a torch without products of groups."""

    def __getattr__(self, name: str) -> Any:
        if name == "_grouped_mm":
            raise AttributeError(name)
        return getattr(ATEN, name)


def test_a_torch_without_products_of_experts_counts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "aten", Older())
        older = runpy.run_path(meta_operators.__file__)
    for module in (meta_operators, planning_work):
        monkeypatch.setattr(module, "_aten", Older())
        monkeypatch.setattr(module, "GROUPED_MM", older["GROUPED_MM"])
    assert work_of(Block(), [torch.ones(ROWS, WIDE)]).flops == 5 * FLOPS


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_counted_as_dense_ones(make: type[nn.Embedding | nn.EmbeddingBag]) -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    sparse, dense = (work_of(make(64, WIDE, sparse=sparse), [ids]) for sparse in (True, False))
    assert sparse == dense


def test_counting_leaves_the_module_as_it_was() -> None:
    model = Block()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    work_of(model, [torch.ones(ROWS, WIDE)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Minding(nn.Module):
    """Counts its calls, keeps what it has made, and drops at random; `steps` is no buffer."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)
        self.calls, self.cos = 0, dict[int, torch.Tensor]()
        self.steps = torch.zeros(1) if counts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, wide)."""
        self.calls += 1
        if self.steps is not None:
            self.steps.add_(1)
        if len(x) not in self.cos:
            self.cos[len(x)] = torch.ones(len(x), 1, device=x.device).cos()
        kept: torch.Tensor = self.linear(x) * self.cos[len(x)]
        return kept if torch.rand([]) > random.random() else x + kept


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_plan_leaves_the_module_and_random_numbers_as_they_were(activations: str) -> None:
    model = nn.Sequential(nn.Sequential(Minding(counts=False)), nn.Sequential(Minding(counts=False)))
    before, drawn = torch.get_rng_state(), random.getstate()
    offload.plan(model, batch=[torch.ones(ROWS, WIDE)], hardware=DESKTOP, activations=activations)
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == drawn
    assert not any(part[0].calls or part[0].cos for part in model)
    model(torch.ones(ROWS, WIDE)).sum().backward()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_module_in_evaluation_mode_is_planned_as_it_trains(activations: str) -> None:
    """So are those that transformers loads: they compute again in training mode alone."""
    model = made_on_meta(tiny(), checkpointing=activations == "keep", chunked=False)

    def work() -> Work | None:
        return offload.plan(model, batch=(2, 64), hardware=DESKTOP, activations=activations).work

    trains = work()
    model.eval()
    assert work() == trains
    assert not any(module.training for module in model.modules())


def test_parts_that_are_frozen_in_evaluation_mode_stay_so() -> None:
    """A dropout in evaluation mode has no kernel."""
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(0.5))

    def kernels() -> int:
        work = offload.plan(model, batch=[torch.ones(ROWS, WIDE)], hardware=DESKTOP).work
        assert work is not None
        return sum(work.forward.values())

    trains = kernels()
    model[1].eval()
    assert kernels() < trains
    assert model.training and not model[1].training


def test_a_plan_refuses_a_forward_that_changes_what_cannot_be_put_back() -> None:
    with pytest.raises(ConfigError, match="model Minding: its forward changed steps in place"):
        offload.plan(Minding(counts=True), batch=[torch.ones(ROWS, WIDE)], hardware=DESKTOP)


class Alike(nn.Module):
    """Calls operators again with what looks like their arguments, and changes, views and shares what they made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, wide)."""
        counts = torch.ones_like(x, dtype=torch.int64)
        kept = [counts * 2, counts * 2.0, counts * True, x * 2, x * 2.0]  # of two dtypes
        for _ in range(3):
            kept += [x.t().contiguous(), x.clone().relu_(), x[:, ::2] + 1, x.t() + 1, x.to(torch.float64)]
            kept += [*x.split(4, 1), *torch.max(x, 1, keepdim=True), x.expand(2, *x.shape).contiguous()]
        return x + sum(tensor.sum() for tensor in kept)


@pytest.mark.parametrize("of", ["llama", "alike"])
def test_what_repeats_counts_as_if_each_operator_ran(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel, and each byte of the peak."""
    model: nn.Module = nn.Sequential(nn.Linear(WIDE, WIDE), Alike())
    batch: Any = [torch.ones(ROWS, WIDE)]
    if of == "llama":
        with torch.device("meta"):
            model = pytest.importorskip("transformers").AutoModelForCausalLM.from_config(tiny(layers=3))
        batch = (2, 64)
    found = work_of(model, batch)
    with monkeypatch.context() as patch:
        patch.setattr("offload.planning.work._is_told", lambda part: False)
        assert work_of(model, batch) == found


class Asks(nn.Module):
    """Needs a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many elements as the first one says."""
        return self.weight[: int(x.sum().item())]


def test_shapes_that_cannot_be_known_are_refused() -> None:
    with pytest.raises(offload.ConfigError, match=r"model Asks: what a batch takes cannot be told.*leave batch out"):
        work_of(Asks(), [torch.ones(3)])


@pytest.mark.parametrize("batch", [(0, 8), (1, 2, 3), "4x8", (), (True, 2), (10**20, 9), torch.ones(2, 3)])
def test_a_batch_that_is_none_is_refused(batch: object) -> None:
    with pytest.raises(offload.ConfigError, match="batch: expected"):
        work_of(Block(), batch)  # type: ignore[arg-type]


# --- how long it takes ---

SPEEDS = [
    field.name for field in dataclasses.fields(DESKTOP) if field.name.endswith("bytes_s") or field.name == "flops_16"
]
MEMORY = {"device": "2GiB", "cpu": "4GiB", "nvme": "40GiB"}


@pytest.fixture(scope="module")
def forecast() -> offload.Forecast:
    pytest.importorskip("transformers")
    return offload.plan("llama-3.2-1b", batch=(1, 128), hardware="desktop", max_memory=MEMORY)


@given(name=st.sampled_from(SPEEDS), factor=st.floats(1.0, 4.0), clips=st.booleans(), micro_batches=st.integers(1, 4))
def test_no_part_that_is_faster_makes_a_step_longer(
    forecast: offload.Forecast, name: str, factor: float, clips: bool, micro_batches: int
) -> None:
    assert forecast.work is not None
    faster = {name: getattr(DESKTOP, name) * factor}
    if name == "update_bytes_s":
        faster["host_bytes_s"] = DESKTOP.host_bytes_s * factor
    if name.startswith("drive_"):  # all of it: reads alone would take from writes beside them
        faster = {each: getattr(DESKTOP, each) * factor for each in SPEEDS if each.startswith("drive_")}
    seconds = [
        timing_of(forecast.plan, forecast.work, machine, micro_batches=micro_batches, clips=clips).step_s
        for machine in (DESKTOP, dataclasses.replace(DESKTOP, **faster))
    ]
    # By a little it may: units are updated in another order (R. L. Graham, Bounds on Multiprocessing Timing Anomalies).
    assert seconds[1] <= seconds[0] * 1.02


def test_the_bytes_of_lanes_are_those_of_the_plan(forecast: offload.Forecast) -> None:
    """The plan counts a step in which no working copy survives; the turn from forward to backward keeps some."""
    assert forecast.timing is not None
    moved, plan = forecast.timing.moved, forecast.plan
    assert moved.drive_write == plan.step_bytes["nvme_write"] > 0
    assert moved.d2h == plan.step_bytes["d2h"] > 0
    assert 0.5 * plan.step_bytes["h2d"] < moved.h2d < plan.step_bytes["h2d"]  # the region keeps some
    assert moved.drive_read <= plan.step_bytes["nvme_read"]


def test_clipping_takes_no_less_and_accumulation_takes_more(forecast: offload.Forecast) -> None:
    assert forecast.work is not None
    plain, clipped, many = (
        timing_of(forecast.plan, forecast.work, DESKTOP, micro_batches=count, clips=clips)
        for count, clips in ((1, False), (1, True), (3, False))
    )
    # Behind a step, new parameters come to the device from where they are updated; of those before it they are read.
    read_again = plain.moved.drive_read - clipped.moved.drive_read
    early = [unit.param_bytes for unit in forecast.plan.request.units if forecast.plan.updates_early(unit)]
    assert min(early) <= read_again < sum(early), "some units are updated before this short backward ends"
    assert clipped.bound_s == pytest.approx(plain.bound_s - read_again / DESKTOP.drive_mixed_bytes_s)
    assert many.step_s > plain.step_s
    homes = [dataclasses.replace(each, param=Tier.HOST) for each in forecast.plan.homes]
    in_host = dataclasses.replace(forecast.plan, homes=homes)
    plain, clipped = (
        timing_of(in_host, forecast.work, DESKTOP, micro_batches=1, clips=clips) for clips in (False, True)
    )
    ahead_s = 2 * in_host.ahead_bytes / DESKTOP.drive_mixed_bytes_s  # read in a backward that updates nothing
    assert clipped.step_s >= plain.step_s - ahead_s and clipped.moved == plain.moved


@given(requests(), st.booleans(), st.booleans(), st.sampled_from(["", "host", "drive"]))
def test_every_plan_beside_an_accelerator_has_seconds(request: Request, clips: bool, ties: bool, away: str) -> None:
    """The step that is played comes to its end, in any mix of homes, with a tied unit, and with activations away."""
    apart: dict[str, Any] = {"device_is_host": False, "world_size": 1, "nodes": 1, "rank": 0, "clips": clips}
    apart["optimizer_tier"] = None if request.optimizer_tier is Tier.DEVICE else request.optimizer_tier
    if away:
        apart |= {"activations": "offload", "host_activation_bytes": MIB, "activation_bytes": MIB}
        apart["nvme_activation_bytes"] = 4 * MIB * (away == "drive")
    plan = make_plan(enlarged(dataclasses.replace(request, **apart)))
    if away:
        size = MIB // 2 if away == "host" else 3 * MIB
        plan = plan.with_activations({"d2h": size, "h2d": size})
    order = tuple(unit.index for unit in plan.request.units)
    uses = Uses((*order, 0), (0, *order[:0:-1])) if ties else Uses(order, order[::-1])
    for accumulated in (1, 3):
        work = Work({}, {}, (0, 0), 0, 0, (1e-3, 2e-3), uses=uses)
        found = timing_of(plan, work, DESKTOP, micro_batches=accumulated, clips=clips)
        assert 3e-3 * accumulated <= found.step_s * (1 + 1e-9) < 1e3
        took = lane_seconds(found.moved, DESKTOP)
        for lane, least_s in least_of(plan, work, DESKTOP).items():
            assert lane not in took or least_s <= took[lane] * (1 + 1e-9), "a bound of one rank is a bound of several"


def test_what_auto_chooses_fits() -> None:
    memory = {"cpu": "1TB", "nvme": "1TB"}
    asked: dict[str, Any] = {"batch": (1, 65536), "activations": "auto", "chunk_loss": True, "hardware": "desktop"}
    found = offload.plan("mistral-7b", max_memory=memory, **asked)
    assert found.fits and "auto: offload, for it does not fit if blocks are computed again" in str(found.plan)


def test_with_everything_on_the_device_compute_alone_is_left() -> None:
    """And the fill is nothing but rounding."""
    pytest.importorskip("transformers")
    found = offload.plan(tiny(), batch=(1, 64), hardware=H200)
    assert found.plan.homes[0].param is Tier.DEVICE
    assert found.timing is not None
    assert found.timing.seconds["drive"] == 0


def test_the_device_updates_once_per_step() -> None:
    pytest.importorskip("transformers")
    machine = dataclasses.replace(H200, operator_s=0.0, device_bytes_s=1e6)  # updates take far longer than passes
    found = offload.plan(tiny(), batch=(1, 64), hardware=machine)
    assert found.work is not None
    plan = make_plan(dataclasses.replace(found.plan.request, updates_on_device=True))
    assert any(plan.on_device(unit) for unit in plan.request.units)
    passes, last = timing_of(plan, found.work, machine, micro_batches=2, clips=False).spans
    assert passes.bound_s < 0.9 * last.bound_s
    assert last.bound_s == timing_of(plan, found.work, machine, micro_batches=1, clips=False).spans[-1].bound_s


def test_a_pass_takes_as_long_as_the_host_gives_work_also_if_kernels_were_measured() -> None:
    found = offload.plan(Block(), batch=[torch.ones(ROWS, WIDE)], hardware=H200)
    assert found.work is not None
    work, machine = dataclasses.replace(found.work, measured_s=(1e-9, 1e-9)), dataclasses.replace(H200, operator_s=0.1)
    passes, _ = timing_of(found.plan, work, machine, micro_batches=8, clips=False).spans
    assert passes.bound_s == pytest.approx(0.7 * sum(work.operators))


def test_a_cpu_computes_and_then_does_the_hosts_part() -> None:
    """Operators, calls of modules by forward and backward, and gradients: no two of these are side by side."""
    memory = {"device": "64MiB", "cpu": "64MiB"}
    found = offload.plan(Block(), batch=[torch.ones(ROWS, WIDE)], device="cpu", max_memory=memory)
    assert found.work is not None and found.work.parts is not None
    machine = dataclasses.replace(H200, operator_s=0.0, hook_s=0.0, gradient_s=0.0)
    calls = sum(part.calls for parts in found.work.parts for part in parts.values())
    gradients = sum(unit.trainable * len(unit.slots) for unit in found.plan.request.units)
    assert calls and gradients

    def compute_s(**costs: float) -> float:
        machine_with = dataclasses.replace(machine, **costs)
        return timing_of(found.plan, found.work, machine_with, micro_batches=1, clips=False).seconds["compute"]

    costs = {"operator_s": 0.1, "hook_s": 0.01, "gradient_s": 0.001}
    more_s = 0.1 * sum(found.work.operators) + 0.01 * calls + 0.001 * gradients
    assert compute_s(**costs) - compute_s() == pytest.approx(more_s)


# --- where it would live ---


def test_the_plan_is_the_one_that_an_engine_makes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    memory = {"device": "4MiB", "cpu": "6MiB", "nvme": "64MiB"}
    model = transformers.AutoModelForCausalLM.from_config(tiny(layers=8))
    named = {"gpu": "4MiB", "host": "6MiB", "disk": "64MiB"}  # as an engine takes them, too
    found = offload.plan(model, offload.AdamW(lr=1e-3), device="cpu", max_memory=named, max_grad_norm=1.0)
    with offload.Engine(
        model, offload.AdamW(lr=1e-3), device="cpu", max_memory=memory, nvme_path=tmp_path, max_grad_norm=1.0
    ) as engine:
        assert str(found.plan) == str(engine.plan)
    assert found.timing is None
    assert "for the CPU of this machine as the device; name a machine" in str(found)


def test_a_durable_run_is_planned_before_its_directory_is_there(tmp_path: Path) -> None:
    budgets = {"device": "1MiB", "cpu": "32MiB"}
    forecast = offload.plan(Block(), device="cpu", max_memory=budgets, run_dir=tmp_path / "runs" / "one")
    assert not (tmp_path / "runs").exists()
    with offload.Engine(
        Block(), offload.AdamW(), device="cpu", max_memory=budgets, run_dir=tmp_path / "runs" / "one"
    ) as engine:
        assert engine.plan.homes == forecast.plan.homes


def test_a_forecast_prints_itself_and_is_json(forecast: offload.Forecast) -> None:
    text = str(forecast)
    for words in ("a micro-batch:", "a step on desktop:", "tokens/s", "binds", "bound", "with "):
        assert words in text
    found = json.loads(json.dumps(forecast.to_dict()))
    assert found["step_s"] == pytest.approx(found["bound_s"] + found["fill_s"])
    assert found["savings"] and 0 < found["early_units"] < len(forecast.plan.request.units)


def test_a_gpu_that_keeps_more_for_activations_than_they_need_is_told_so() -> None:
    """The rest would be for states, which it updates faster than the host; the told seconds are those of that plan."""
    pytest.importorskip("transformers")
    given: dict[str, Any] = {"batch": (2, 2048), "hardware": "h200"}
    told = offload.plan("llama-3.1-8b", **given)
    (option,) = (what for what in told.savings if what.startswith("activation_memory = "))
    named = option.removeprefix("activation_memory = ").replace(" ", "")
    assert told.timing is not None and told.savings[option] < 0.7 * told.timing.step_s
    found = offload.plan("llama-3.1-8b", activation_memory=named, **given)
    assert found.fits and found.timing is not None
    assert found.timing.step_s == pytest.approx(told.savings[option], rel=0.01)  # named in hundredths of a GiB
    assert not any(what.startswith("activation_memory") for what in found.savings)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_shows_what_is_being_done(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And keeps nothing of it; what is no terminal gets nothing."""
    pytest.importorskip("transformers")
    tiny(layers=1).save_pretrained(tmp_path)
    shown = stream()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", shown)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            assert main(["plan", "--model", str(tmp_path), "--batch", "1x8", "--hardware", "desktop"]) == 0
    lines = shown.getvalue().split("\r\x1b[K")
    expected = ["making the model without", "offload: model: its config names no dtype", "placing parameters"]
    expected += ["running a micro-batch", "looking for what would"]
    if stream is Terminal:
        assert [line[: len(head)] for line, head in zip(lines[1:], expected, strict=False)] == expected
    assert lines[-1] == "" and (stream is Terminal) == (len(lines) == 7)
    assert "a step on desktop" in capsys.readouterr().out


def test_activations_that_do_not_fit_are_told_with_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    call = ["plan", "--model", "llama-3.2-1b", "--batch", "8x4096", "--hardware", "desktop", "--device", "4GiB"]
    assert main(call) == 1
    out, err = capsys.readouterr()
    assert "DOES NOT FIT" in out
    assert "  fits with --chunk-loss and micro-batches of 1x4096\n" in out
    assert "it fits with --chunk-loss and micro-batches of 1x4096, or with --device " in err
    call[call.index("8x4096")] = "1x4096"
    assert main([*call, "--chunk-loss"]) == 0


def test_a_batch_of_a_million_rows_is_refused_soon(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked losses are not run over all of it, if a small part of it does not fit."""
    pytest.importorskip("transformers")
    chunks, pieces = list[slice](), _How.pieces

    def seen(how: _How, tokens: int) -> Iterator[slice]:
        for piece in pieces(how, tokens):
            chunks.append(piece)
            yield piece

    monkeypatch.setattr(_How, "pieces", seen)
    assert main(["plan", "--model", "llama-3.2-1b", "--batch", "1000000x2048", "--hardware", "desktop"]) == 1
    assert re.search(r"it fits with micro-batches of \d+x2048, or with --device", capsys.readouterr().err)
    assert 0 < len(chunks) < 2000


def test_budgets_that_do_not_do_are_told_with_those_that_would(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["plan", "--model", "llama-3.1-70b", "--hardware", "desktop"]) == 1
    said = capsys.readouterr().err
    assert "the tier needs" in said and "the smallest --cpu that would do is" in said
    assert said.rstrip().endswith("see --nvme, --offload-param and --offload-optimizer")
    assert main(["plan", "--model", "llama-3.1-70b", "--hardware", "desktop", "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert not plain["fits"] and plain["error"] in said
    (enough,) = plain["budgets"].values()
    assert f"the smallest --cpu that would do is {enough} bytes" in said and list(plain["budgets"]) == ["cpu"]
    call = ["plan", "--model", "llama-3.1-70b", "--hardware", "desktop", "--nvme", "2TB", "--json"]
    assert main(call) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["--model", "llama-3.1-8"], "did you mean 'llama-3.1-8b'"),
        (["--model", "m" * 300], "expected a folder with config.json that may be read"),  # no file system looks for it
        (["--model", "llama-3.1-8b", "--hardware", "desk"], "did you mean 'desktop'"),
        (["--model", "llama-3.1-8b", "--cpu", "much"], "error: --cpu: expected bytes"),
        (["--model", "llama-3.1-8b", "--stage", "2"], "error: --stage: expected ranks beside it"),
        (["--model", "llama-3.1-8b", "--measure-again"], "error: --measure-again: expected --hardware here"),
        (
            ["--model", "llama-3.1-8b", "--hardware", "h200", "--drive", "."],
            "error: --drive: expected --hardware here, or --nvme, beside it but got h200;",
        ),
    ],
)
def test_unknown_models_and_machines_are_refused(
    call: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert main(["plan", *call, "--json"]) == 2
    out, err = capsys.readouterr()
    plain = json.loads(out)
    assert message in err and plain["fits"] is None and plain["error"] in err and "budgets" not in plain


@pytest.mark.parametrize("where", [[], ["--hardware", "here"]])
def test_a_drive_that_is_named_is_planned_with(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With as much of it as an engine takes: 90 % of what is free."""
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(predicting, "free_bytes", lambda paths: 1000 if paths == (tmp_path,) else None)
    call = ["plan", "--model", str(tmp_path), "--json", *where]
    for drive, budget in (([], 0), (["--drive", str(tmp_path)], 900)):
        assert main([*call, *drive]) == 0
        assert json.loads(capsys.readouterr().out)["plan"]["bytes"]["nvme"]["budget"] == budget


def test_sequences_longer_than_a_table_of_positions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "gpt2", "n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    call = ["plan", "--model", str(tmp_path), "--hardware", "desktop", "--batch"]
    assert main([*call, "1x24"]) == 0
    assert main([*call, "1x25"]) == 2
    assert "--batch: expected sequences of at most 24 tokens" in capsys.readouterr().err
    assert offload.plan(tiny(), batch=(1, 4096), hardware="desktop").fits  # computes them, and its config names 2048
    with pytest.raises(ConfigError, match="batch: expected .rows, length."):
        offload.plan(tiny(), batch=(25,), hardware="desktop")
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(made_on_meta(tmp_path, checkpointing=False, chunked=False), peft.LoraConfig())
    assert offload.plan(adapted, batch=(1, 24), hardware="desktop").fits
    with pytest.raises(ConfigError, match="batch: expected sequences of at most 24 tokens"):
        offload.plan(adapted, batch=(1, 25), hardware="desktop")


def test_updates_of_lamb_read_twice() -> None:
    """In bf16, of each parameter: moments, and both halves of its master."""
    model = nn.Linear(WIDE, INNER, bias=False, dtype=torch.bfloat16)
    batch, options = [torch.ones(1, WIDE, dtype=torch.bfloat16)], {"hardware": "desktop", "offload_optimizer": "cpu"}
    once, twice = (offload.plan(model, kind(), batch=batch, **options) for kind in (offload.AdamW, offload.LAMB))
    assert once.timing is not None and twice.timing is not None
    assert twice.timing.moved.cpu - once.timing.moved.cpu == (8 + 2 + 2) * once.plan.request.units[0].numel


def test_a_forecast_says_that_an_optimizer_without_a_kernel_takes_longer() -> None:
    """Unless updates were measured."""
    block = Block()
    found = offload.plan(block, torch.optim.RMSprop(block.parameters()), batch=[torch.ones(1, WIDE)], hardware=DESKTOP)
    assert found.work is not None
    said = "those of RMSprop may take ten times as long"
    assert said in str(found) and said not in str(offload.plan(block, batch=[torch.ones(1, WIDE)], hardware=DESKTOP))
    measured = dataclasses.replace(found.work, measured_s=(1.0, 1.0))
    assert said not in str(dataclasses.replace(found, work=measured))


def test_a_model_that_sees_images_is_all_of_it() -> None:
    """Also where transformers would make what reads text; nothing of it keeps a cache."""
    transformers = pytest.importorskip("transformers")
    text: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "cross_attention_layers": [1]}
    sees = {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 4}
    sees |= {"intermediate_size": 64, "image_size": 32, "vision_output_dim": 64, "intermediate_layers_indices": [0]}
    config = transformers.MllamaConfig(text_config=text, vision_config=sees)
    made = made_on_meta(config, checkpointing=False, chunked=False)
    assert isinstance(made, transformers.MllamaForConditionalGeneration)
    assert not made.get_decoder().config.use_cache


class Heads(nn.Module):
    """Has a lookup, and as many heads as it is told to; it computes with the first one."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.lookup = nn.Embedding(WIDE, WIDE)
        self.heads = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(heads))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (rows, WIDE)."""
        return self.heads[0](self.lookup(ids))


@pytest.mark.parametrize("heads", [1, 3, 6])
def test_units_that_get_no_gradient_are_named(heads: int) -> None:
    ids = [torch.zeros(ROWS, dtype=torch.int64)]
    found = offload.plan(Heads(heads), batch=ids, hardware=DESKTOP, unit_bytes=4 * WIDE * (WIDE + 1))
    names = [f"heads.{number}" for number in range(1, heads)]
    assert found.without_gradient == found.to_dict()["without_gradient"] == names
    told = [line.partition(": ")[2] for line in str(found).splitlines() if "no gradient with this batch" in line]
    expected = "heads.1, heads.2, heads.3 and 2 more" if heads == 6 else ", ".join(names)
    assert told == ([f"{expected}; an engine leaves their updates out, seconds count them"] if names else [])


def test_without_transformers_a_forecast_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that nobody can make is no model that does not fit."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["plan", "--model", "llama-3.1-8b", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is None
    assert "offload: error: transformers: expected to be installed" in err and "pip install '.[hf]'" in err
    assert offload.plan(nn.Linear(8, 8)).fits


def test_a_config_that_is_no_json_is_told_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, too, which looks at it before."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(heavy, "QUANTIZERS", ())  # this process is others', too
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    (tmp_path / "config.json").write_text("{")
    assert main(["plan", "--model", str(tmp_path), "--json"], process=Process.OWN) == 2
    out, err = capsys.readouterr()
    plain = json.loads(out)
    assert plain["fits"] is None and plain["error"] in err


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_the_budget_that_a_refusal_names_does(tier: Tier) -> None:
    """Units are cut by the device budget, so a larger one has larger units; and states may stay on the device."""
    pytest.importorskip("transformers")
    memory: dict[str, Any] = {"device": "512MiB", "nvme": "1TB"} if tier is Tier.DEVICE else {"cpu": 0}
    with pytest.raises(BudgetError, match="the smallest max_memory") as caught:
        offload.plan("llama-3.2-1b", hardware="rtx4090", max_memory=memory)
    enough = named_budgets(caught.value)
    assert list(enough) == [tier]
    offload.plan("llama-3.2-1b", hardware="rtx4090", max_memory=memory | {tier.value: enough[tier]})
    with pytest.raises(BudgetError):
        offload.plan("llama-3.2-1b", hardware="rtx4090", max_memory=memory | {tier.value: enough[tier] - 4096})


def test_a_device_that_is_a_little_too_small_for_activations_is_told_what_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    call = ["plan", "--model", "llama-3.2-1b", "--batch", "1x512", "--hardware", "rtx4090", "--device"]
    assert main([*call, "1GiB"]) == 1
    found = re.search(r"it fits with --device (\w+) and --activation-memory (\w+)$", capsys.readouterr().err.strip())
    assert found is not None
    assert main([*call, found[1], "--activation-memory", found[2]]) == 0


def test_a_remedy_may_be_added_to_the_call(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also beside what it stands in place of; what has to be left out is named."""
    tiny(layers=8).save_pretrained(tmp_path)
    call = ["plan", "--model", str(tmp_path), "--hardware", "desktop", "--batch", "1x512", "--device", "8MiB"]
    main([*call, "--keep-activations", "--checkpointing"])
    kept = capsys.readouterr().out
    main([*call, "--checkpointing"])
    assert capsys.readouterr().out == kept
    assert main([*call, "--activations", "offload", "--activation-cpu-memory", "1MiB"]) == 1
    assert "--activations recompute without --activation-cpu-memory" in capsys.readouterr().err


def test_a_machine_as_fast_as_any_may_be_has_no_faster_one() -> None:
    machine = dataclasses.replace(DESKTOP, name="mine", h2d_bytes_s=1e15)
    found = offload.plan(Block(), batch=[torch.ones(2, WIDE)], hardware=machine)
    assert found.timing is not None and not any("link" in what for what in found.savings)


def test_a_model_without_shapes_is_refused_by_name() -> None:
    with pytest.raises(offload.ConfigError, match="parameter 0.weight: .* no shape yet; run one forward first"):
        offload.plan(nn.Sequential(nn.LazyLinear(4)), hardware="rtx4090")


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (nn.DataParallel, "copies parameters and reduces gradients itself"),
        (lambda net: nn.Sequential(net, nn.Embedding(4, 4, max_norm=1.0)), "max_norm"),
    ],
)
def test_what_an_engine_refuses_is_not_planned(wrap: Callable[[nn.Module], nn.Module], words: str) -> None:
    with pytest.raises((offload.ConfigError, offload.StateError), match=words):
        offload.plan(wrap(nn.Linear(4, 4)), hardware="rtx4090")


@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.AdamW, offload.AdamW])
def test_an_optimizer_that_an_engine_refuses_is_not_planned_with(make: Callable[[Any], Any]) -> None:
    model, other = nn.Linear(4, 4), nn.Linear(8, 4)
    with pytest.raises(ConfigError, match=r"^optimizer: a parameter of shape \(4, 8\) is not one of the model's"):
        offload.plan(model, make(other.parameters()), hardware="rtx4090")
    assert offload.plan(model, make(model.named_parameters()), hardware="rtx4090").fits


def test_a_frozen_model_is_planned_without_an_optimizer_alone() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    assert offload.plan(model, hardware="rtx4090").fits
    with pytest.raises(ConfigError, match=r"^model: expected parameters that require a gradient but all are frozen"):
        offload.plan(model, offload.AdamW(), hardware="rtx4090")


def test_what_several_ranks_refuse_is_not_planned_for_them() -> None:
    model = nn.Linear(4, 4)
    own, kernel = torch.optim.RMSprop(model.parameters()), torch.optim.AdamW(model.parameters())
    with pytest.raises(offload.ConfigError, match="optimizer RMSprop, whose own class makes .* not with several ranks"):
        offload.plan(model, own, hardware="h100", ranks=2)
    assert offload.plan(model, own, hardware="h100").fits and offload.plan(model, kernel, hardware="h100", ranks=2).fits


def test_gradients_count_wherever_a_forecast_is_asked_for() -> None:
    net, config = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tiny()

    def flops() -> list[float]:
        found = offload.plan(net, batch=[torch.ones(2, 8)]), offload.plan(config, batch=(1, 8))
        return [forecast.work.flops for forecast in found if forecast.work is not None]

    expected = flops()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert flops() == expected


def test_layers_that_are_dropped_at_random_are_counted() -> None:
    """The chance is small; the answer yes would drop them all."""

    class Drops(nn.Module):
        def __init__(self, probability: float) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.probability = probability

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if not (self.probability and torch.rand([]) < self.probability):
                    x = layer(x)
            return x

    whole, dropped = (work_of(Drops(probability), [torch.ones(4, 8)]) for probability in (0.0, 0.1))
    assert dropped.flops == whole.flops > 0
    assert (whole.assumed, dropped.assumed) == (0, 3)


def test_a_micro_batch_is_of_the_dtype_that_parameters_are_cast_to() -> None:
    def peak(made: torch.dtype, **options: Any) -> int:
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(made)
        found = offload.plan(net, batch=[torch.ones(256, 64, dtype=torch.bfloat16)], **options)
        assert found.work is not None
        return found.work.peak_bytes

    assert peak(torch.float32, dtype="bfloat16") == peak(torch.bfloat16)


def test_a_batch_may_be_a_list_and_options_a_file(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text('{"max_memory": {"device": "1GiB", "cpu": "1GiB", "nvme": "1GiB"}}')
    options = {"hardware": "rtx4090", "config": tmp_path / "options.json"}
    found = offload.plan(tiny(), batch=[2, 16], **options)
    assert found.tokens == offload.plan(tiny(), batch=[*np.array([2, 16])], **options).tokens == 32
    assert found.plan.request.budgets[Tier.NVME] == 1 << 30
    config = offload.Config()
    assert offload.plan(tiny(), config=config, max_memory={"nvme": "1GiB"}).plan.request.budgets[Tier.NVME] == 1 << 30


@pytest.mark.parametrize(("device", "words"), [("cpu", "an accelerator beside hardware"), ("banana", "a torch device")])
def test_a_device_that_the_machine_has_not_is_refused(device: str, words: str) -> None:
    with pytest.raises(offload.ConfigError, match=f"^device: expected {words}.* but got '{device}'"):
        offload.plan(nn.Linear(8, 8), hardware="desktop", config={"device": device})
    offload.plan(nn.Linear(8, 8), hardware="desktop", device="cuda")


def test_seconds_without_fetching_ahead_are_refused_and_bytes_are_not() -> None:
    given: dict[str, Any] = {"batch": [torch.ones(2, WIDE)], "prefetch": False}
    with pytest.raises(ConfigError, match="^prefetch: expected True beside a machine and a batch"):
        offload.plan(Block(), hardware=DESKTOP, **given)
    assert offload.plan(Block(), **given).fits and offload.plan(Block(), hardware=DESKTOP, prefetch=False).fits


def test_a_durable_run_is_told_that_its_commits_are_not_in_the_seconds(tmp_path: Path) -> None:
    given: dict[str, Any] = {"batch": [torch.ones(2, WIDE)], "hardware": DESKTOP, "max_memory": {"nvme": "1GiB"}}
    texts = [str(offload.plan(Block(), **given, **{name: tmp_path})) for name in ("run_dir", "nvme_path")]
    assert ["commits are not in these seconds" in text for text in texts] == [True, False]


@pytest.mark.parametrize("options", [{"config": 5}, {"measure_again": True, "hardware": "here"}])
def test_options_that_make_no_sense_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(offload.ConfigError, match=f"^{next(iter(options))}: expected"):
        offload.plan(tiny(), **options)


def test_a_file_of_options_that_keeps_activations_is_heeded(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text(json.dumps({"activations": "keep"}))
    asked: dict[str, Any] = {"batch": (2, 64), "hardware": "desktop"}
    again, *kept = (
        offload.plan(tiny(), config=config, **asked)
        for config in (None, {"activations": "keep"}, tmp_path / "options.json")
    )
    assert kept[0].work == kept[1].work != again.work


def test_a_model_that_cannot_compute_again_is_told_so_and_is_offered_what_can(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """If nobody has asked for it, its activations are kept; a batch that they are too large for has a remedy."""
    config = {"model_type": "ctrl", "vocab_size": 64, "n_embd": 32, "dff": 256, "n_layer": 4, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    call = ["plan", "--model", str(tmp_path), "--batch", "1x128", "--hardware", "desktop", "--device", "1MiB"]
    assert main([*call, "--checkpointing"]) == 2
    assert "--checkpointing: expected a model that computes activations again by itself" in capsys.readouterr().err
    assert main(call) == 1
    assert "fits with --activations recompute" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"checkpointing": False}, {"chunk_loss": True}])
def test_options_of_models_that_are_made_here_are_refused_beside_a_module(options: dict[str, Any]) -> None:
    with pytest.raises(offload.ConfigError, match=f"^{next(iter(options))}: expected a model that is made here"):
        offload.plan(nn.Linear(8, 8), **options)


def test_json_as_deep_as_nobody_writes_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for option in ("hardware", "config"):
        with pytest.raises(offload.ConfigError, match="cannot be read as JSON"):
            offload.plan(tiny(), **{option: tmp_path / "deep.json"})


def test_a_batch_of_which_no_machine_has_the_memory_is_offered_no_larger_device() -> None:
    found = offload.plan("llama-3.2-1b", batch=(100_000_000_000, 1), hardware="rtx4090")
    assert not found.fits
    assert found.remedies and all(re.fullmatch(r"micro-batches of \d+x1", text) for text in found.remedies)


def test_a_batch_that_cannot_be_read_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "--model", "llama-3.1-8b", "--batch", "4,2048"])
    assert left.value.code == 2
    assert "expected ROWSxLENGTH" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--model", "llama-3.1-8b", "--keep-activations", "--activations", "recompute"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_config_of_quantized_weights_is_refused(tmp_path: Path) -> None:
    """Nothing would be quantized, and all of it would be trained."""
    config = tiny(layers=1)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)
    for model in (config, tmp_path):
        with pytest.raises(
            offload.ConfigError, match=r"^model LlamaConfig: .* quantization_config; load it with from_"
        ):
            offload.plan(model, hardware="desktop")


def test_of_several_ranks_the_plan_is_that_of_one_of_their_engines() -> None:
    """And lanes are its bytes: of the drive and the host those of all ranks, of a link its own."""
    model, ranks = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), 4
    options: dict[str, Any] = {"max_memory": {"device": "8MiB", "cpu": "16MiB", "nvme": "64MiB"}, "hardware": "desktop"}
    options["offload_optimizer"] = "nvme"
    found = offload.plan(model, offload.AdamW(), batch=[torch.ones(2, 256)], ranks=ranks, stage=3, **options)
    request = found.plan.request
    assert (request.world_size, request.stage, request.rank) == (ranks, 3, 0)
    owned = sum(request.owned_numel(unit, Role.MASTER) for unit in request.units)
    assert owned * ranks == sum(unit.numel for unit in request.units)
    machine, moved = offload.Hardware.load("desktop"), found.plan.step_bytes
    assert found.timing is None and found.lanes["h2d"] == moved["h2d"] / machine.h2d_bytes_s
    assert found.lanes["collectives"] == 2 * ranks * moved["collectives"] / machine.host_bytes_s > 0
    both = ranks * (moved["nvme_read"] + moved["nvme_write"])
    assert found.lanes["drive"] >= both / machine.drive_mixed_bytes_s > 0
    assert found.to_dict()["lanes"] == found.lanes and "  each lane alone" in str(found)
    assert found.least is not None and found.work is not None
    binding, least_s = found.least
    assert binding == "drive" and least_of(found.plan, found.work, machine)["drive"] == least_s
    assert 0 < least_s <= found.lanes["drive"] == max(found.lanes.values())
    assert f"  a step takes at least {figures(least_s)} s: the lane drive alone takes that" in str(found)
    plain = json.loads(json.dumps(found.to_dict()))
    assert (plain["binding"], plain["bound_s"]) == (binding, least_s)
    whole = offload.plan(model, offload.AdamW(), ranks=ranks, hardware="desktop")
    assert whole.plan.request.stage == 2  # all of the parameters fit, as an engine's "auto" finds out
    assert whole.plan.request.budgets[Tier.HOST] == int(machine.host_bytes / ranks * HOST_HEADROOM)


def test_ranks_share_the_memory_that_is_free_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is the CPU, its part, too. What somebody has named is each rank's."""
    monkeypatch.setattr(limits, "free_host_bytes", lambda: 64 << 30)
    monkeypatch.setattr(predicting, "free_bytes", lambda paths: 8 << 30 if paths else None)
    options: dict[str, Any] = {"device": "cpu", "nvme_path": tmp_path}

    def budgets(ranks: int, **memory: Any) -> dict[Tier, int]:
        return dict(offload.plan(nn.Linear(8, 8), ranks=ranks, max_memory=memory, **options).plan.request.budgets)

    alone, together = budgets(1), budgets(4)
    assert all(0 < together[tier] <= alone[tier] // 4 for tier in Tier)
    assert budgets(4, cpu="50%", nvme="50%")[Tier.HOST] == 8 << 30
    assert budgets(4, cpu="50%", nvme="50%")[Tier.NVME] == 1 << 30
    assert budgets(4, cpu="2GiB")[Tier.HOST] == 2 << 30


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"ranks": 0}, "ranks: .* 0"),
        ({"ranks": 2, "stage": 4}, "stage: .* 4"),
        ({"ranks": 2, "hardware": "here"}, "ran"),
    ],
)
def test_ranks_that_make_no_sense_are_named(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(offload.ConfigError, match=words):
        offload.plan(nn.Linear(8, 8), **asked)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "nothing"}', "expected a config that transformers can read but got: .*nothing"),
        ("{}", "model_type"),
        ('{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}', "100.*7"),
        ('{"model_type": "vit"}', "ViTConfig: is no language model"),
        ('{"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}', "comes with code of its own, which no plan runs"),
    ],
)
def test_a_config_that_is_no_model_is_named(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(offload.ConfigError, match=rf"^model .*{words}"):
        offload.plan(tmp_path, hardware="desktop")
    assert main(["plan", "--model", str(tmp_path / "config.json")]) == 2
    assert capsys.readouterr().err.startswith("offload: error: --model ")


def test_a_config_may_be_a_file(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "mine.json")
    found = offload.plan(tmp_path / "mine.json", hardware="rtx4090")
    assert found.plan.to_dict() == offload.plan(tiny(), hardware="desktop").plan.to_dict()


def test_an_encoder_is_planned_beside_its_decoder() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"num_layers": 2, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 64}
    config = transformers.T5Config(**small, decoder_start_token_id=0)
    found = offload.plan(config, batch=(2, 8), hardware="desktop")
    assert found.timing is not None
    with pytest.raises(ConfigError, match=r"^chunk_loss: expected T5.* leave chunk_loss out"):
        offload.plan(config, batch=(2, 8), hardware="desktop", chunk_loss=True)
    whole = transformers.T5ForConditionalGeneration(config)
    numel = sum(parameter.numel() for parameter in whole.parameters())
    assert sum(slot.numel for unit in found.plan.request.units for slot in unit.slots) == numel
    heard = transformers.WhisperConfig(encoder_layers=1, decoder_layers=1)
    names = [unit.name for unit in offload.plan(heard, hardware="desktop").plan.request.units]
    assert any("encoder" in name for name in names), "not the decoder alone, which is a causal language model"


def test_a_folder_that_has_a_known_name_is_what_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fine-tuned one is often called so. Its config names no dtype, which is told."""
    tiny(layers=1).save_pretrained(tmp_path / "llama-3.2-1b")
    monkeypatch.chdir(tmp_path)
    found = offload.plan("llama-3.2-1b", hardware="desktop")
    assert sum(unit.numel for unit in found.plan.request.units) < 1_000_000
    assert "names no dtype" in caplog.text
    (tmp_path / "llama-3.1-8b").write_text("a log")
    assert sum(unit.numel for unit in offload.plan("llama-3.1-8b", hardware="desktop").plan.request.units) > 7e9


def test_every_known_model_can_be_made() -> None:
    transformers = pytest.importorskip("transformers")
    for name, shapes in KNOWN.items():
        few = {**shapes, "num_hidden_layers": 1}
        config = transformers.AutoConfig.for_model(few.pop("model_type"), **few)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert next(model.parameters()).is_meta, name


def test_budgets_that_the_machine_does_not_have_are_told(forecast: offload.Forecast) -> None:
    assert "NOT OF THIS MACHINE" not in str(forecast) and "beyond_machine" not in forecast.to_dict()
    model = nn.Linear(8, 8)
    more = {"device": int(DESKTOP.device_bytes) + 1, "cpu": int(DESKTOP.host_bytes) // 2}
    found = offload.plan(model, hardware="desktop", max_memory=more)
    said = str(found)
    assert found.to_dict()["beyond_machine"] == {"device": DESKTOP.device_bytes}
    assert 'NOT OF THIS MACHINE: max_memory["device"], 24.00 GiB, is more than the 24.00 GiB of desktop' in said
    assert "cpu" not in said.partition("NOT OF")[2]
    said = str(offload.plan(model, hardware="desktop", max_memory=more, ranks=3))
    assert 'NOT OF THIS MACHINE: 3 times max_memory["cpu"], 96.00 GiB, is more than the 192.00 GiB of desktop' in said


def test_peaks_have_what_an_optimizers_own_class_takes_and_gradients_that_become_fp32() -> None:
    model = nn.Linear(512, 512, dtype=torch.bfloat16)
    found = offload.plan(model, torch.optim.RMSprop(model.parameters()), hardware="desktop", offload_optimizer="cpu")
    plan = found.plan
    assert plan.request.own_bytes > 0 and plan.wide_bytes[Tier.HOST] == 2 * plan.request.units[0].numel
    assert found.peak_bytes[Tier.HOST] == sum(
        (plan.arena_bytes[Tier.HOST], plan.request.own_bytes, plan.wide_bytes[Tier.HOST])
    )


def test_peaks_are_those_of_the_plan_and_a_micro_batch(forecast: offload.Forecast) -> None:
    plan, work = forecast.plan, forecast.work
    assert work is not None
    assert forecast.peak_bytes[Tier.DEVICE] == plan.arena_bytes[Tier.DEVICE] + work.peak_bytes
    assert forecast.peak_bytes[Tier.HOST] == plan.arena_bytes[Tier.HOST] + plan.wide_bytes.get(Tier.HOST, 0)
    assert forecast.to_dict()["peak_bytes"]["device"] == forecast.peak_bytes[Tier.DEVICE]
    assert f"{format_bytes(plan.arena_bytes[Tier.HOST])} of cpu page-locked" in str(forecast)
    assert forecast.to_dict()["plan"]["page_locked_bytes"] == plan.arena_bytes[Tier.HOST]


@pytest.mark.parametrize(("rows", "left"), [(1200, 100), (1400, 80), (2000, 48)])
def test_peaks_of_a_batch_that_fits_are_within_the_budget_where_parameters_give_way(rows: int, left: int) -> None:
    """Of a CPU's 200 MiB, half are for activations; of eight units of 16 MiB, three must be there together."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
        batch = [torch.empty(rows, 2048)]
    memory = {"device": "200MiB", "cpu": "2GiB"}
    homes = {"offload_param": "cpu", "offload_optimizer": "cpu"}
    found = offload.plan(net, batch=batch, device="cpu", max_memory=memory, **homes)
    assert found.fits and found.work is not None and found.plan.working_bytes == 100 * MIB
    region = found.peak_bytes[Tier.DEVICE] - found.work.device_bytes
    assert left * MIB <= region < (left + 1) * MIB and region + found.work.device_bytes <= 200 * MIB


def test_figures_show_all_that_is_before_the_point() -> None:
    shown = {0.64249: "0.642", 45.32: "45.3", 999.7: "1,000", 2037.4: "2,037", 5.55e6: "5,550,000", 0.0: "0"}
    assert {value: figures(value) for value in shown} == shown


def test_a_config_stays_as_it_was_and_a_dtype_that_it_does_not_name_is_told(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    shapes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**shapes)
    before = config.to_dict()
    memory = {"device": "200MiB", "cpu": "200MiB"}
    for told, options in ((True, {}), (False, {"dtype": "float32"})):
        caplog.clear()
        offload.plan(config, device="cpu", max_memory=memory, **options)
        assert any("its config names no dtype" in message for message in caplog.messages) is told
    assert config.to_dict() == before


def test_more_micro_batches_than_can_be_counted_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    words = ["plan", "--model", str(tmp_path), "--hardware", "rtx4090", "--batch", "1x8", "--accumulate", str(10**10)]
    assert main(words) == 2
    assert "--accumulate: expected at most 100000 beside a batch" in capsys.readouterr().err


def test_whoever_follows_what_would_help_has_the_seconds_that_were_told() -> None:
    transformers = pytest.importorskip("transformers")
    shapes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**shapes, vocab_size=16000, dtype="bfloat16")
    memory: dict[str, Any] = {"device": 300 * MIB + 12345, "cpu": "2GiB"}
    savings = offload.plan(config, batch=(1, 256), hardware="rtx3090", max_memory=memory).savings
    told = {what: took for what, took in savings.items() if what.startswith('max_memory["device"]')}
    assert told, savings
    for what, took in told.items():
        memory["device"] = what.partition("= ")[2]
        again = offload.plan(config, batch=(1, 256), hardware="rtx3090", max_memory=memory)
        assert again.timing is not None and again.timing.step_s == pytest.approx(took)


@pytest.mark.parametrize("rows", [32, 16])
def test_whoever_follows_the_line_of_clipping_has_steps_near_the_bound(rows: int) -> None:
    """With half the rows, backward is too short for the drive to read enough in it: no host budget helps."""
    transformers = pytest.importorskip("transformers")
    shapes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**shapes, vocab_size=8000, dtype="bfloat16")

    def planned(cpu: str) -> tuple[offload.Forecast, Clipping, float]:
        memory = {"device": "4GiB", "cpu": cpu, "nvme": "100GiB"}
        asked: dict[str, Any] = {"offload_optimizer": "nvme", "max_grad_norm": 1.0, "max_memory": memory}
        found = offload.plan(config, batch=(rows, 1024), hardware="desktop", **asked)
        assert found.clipping is not None and found.timing is not None
        return found, found.clipping, found.timing.step_s

    found, clipping, step_s = planned("256MiB")
    assert found.work is not None and found.to_dict()["clipping"] == dataclasses.asdict(clipping)
    assert clipping.bound_s == timing_of(found.plan, found.work, DESKTOP, micro_batches=1, clips=False).bound_s
    assert step_s > 1.2 * clipping.bound_s
    bound, line = f"{figures(clipping.bound_s)} s", str(found).splitlines()[-1]
    assert f"  every step clips: {step_s / clipping.bound_s:.2f} of the bound without clipping, {bound}; " in line
    if rows == 16:
        assert line.endswith("; no host budget brings it to 1.15") and clipping.host_bytes is None
        assert planned("64GiB")[2] > 1.15 * clipping.bound_s
        return
    told = re.search(rf'; 1.15 of these {bound} with max_memory\["cpu"\] = (\d+ MiB)$', line)
    assert told is not None
    again, _, step_s = planned(told[1])
    assert step_s <= 1.15 * clipping.bound_s and again.plan.request.budgets[Tier.HOST] == clipping.host_bytes
