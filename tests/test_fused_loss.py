"""Losses of other libraries that are given the head's weight, and not the head: as Liger's kernels, by stand-ins."""

from __future__ import annotations

import ctypes
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from harness import WIDTH, assert_equal, everything_on_device, nvme, run, tight
from test_chunk_loss import batch, llama
from torch import nn

import offload
from offload import ops
from offload.errors import StateError

pytestmark = pytest.mark.usefixtures("single_torch_thread")


def read_there(weight: torch.Tensor) -> torch.Tensor:
    """Return what a kernel finds that is given an address and strides, as Triton's are."""
    assert weight.stride() == (weight.shape[1], 1)
    there = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    return torch.frombuffer(there, dtype=weight.dtype).view(weight.shape)


class Fused(torch.autograd.Function):
    """Makes gradients in forward, a piece of rows at a time, as Liger's fused linear cross-entropy does."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, by_address: bool) -> Any:
        total, of_rows, of_weight = rows.new_zeros(()), torch.zeros_like(rows), torch.zeros_like(weight)
        count = (labels != -100).sum()
        for piece in (slice(begin, begin + 8) for begin in range(0, len(rows), 8)):
            matrix = read_there(weight) if by_address else weight
            logits, counts = rows[piece] @ matrix.t(), labels[piece] != -100
            classes = torch.where(counts, labels[piece], 0)
            losses = nn.functional.cross_entropy(logits, classes, reduction="none")
            total += torch.where(counts, losses, 0.0).sum() / count
            gradient = logits.softmax(-1) - nn.functional.one_hot(classes, len(weight))
            gradient *= counts.unsqueeze(1) / count
            of_rows[piece] = gradient @ matrix
            of_weight += gradient.t() @ rows[piece]
        ctx.save_for_backward(of_rows, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        of_rows, of_weight = ctx.saved_tensors
        return upstream[0] * of_rows, upstream[0] * of_weight, None, None


def patched(by_address: bool, **more: Any) -> Any:
    """Return a Llama with a forward as ``apply_liger_kernel_to_llama(model=model)`` puts it there."""

    def forward(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **kwargs)[0]
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        loss: Any = Fused.apply(hidden.view(-1, hidden.shape[-1]), self.lm_head.weight, shifted, by_address)
        return hf.modeling_outputs.CausalLMOutputWithPast(loss=loss)

    model = llama(**more)
    model.forward = types.MethodType(forward, model)
    return model


@pytest.mark.parametrize(
    ("by_address", "tied", "activations"),
    [(False, True, "recompute"), (False, False, "offload"), (True, True, "keep"), (True, False, "recompute")],
)
def test_the_same_bits_wherever_parameters_live(tmp_path: Path, by_address: bool, tied: bool, activations: str) -> None:
    """Also in a step of two micro-batches: the second one makes a tensor like a weight whose gradient waits."""
    batches, several = [batch(number) for number in range(4)], {"gradient_accumulation_steps": 2}
    truth = run(patched(by_address, tied=tied), batches, **everything_on_device(), **several)
    model = patched(by_address, tied=tied)
    ours = run(model, batches, **nvme(model, tmp_path, activations=activations), **several)
    assert ours.stats.links["nvme_read"].bytes > 0
    assert_equal(ours, truth)
    plainly = run(llama(tied=tied), batches, **everything_on_device(), **several)
    for mine, other in zip(truth.losses, plainly.losses, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


class Kept(torch.autograd.Function):
    """Wants the address of a weight in backward that it has kept by itself."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        if ctx.weight.isfinite().all():  # which has brought it
            return upstream[0] @ read_there(ctx.weight), None
        raise AssertionError("stand-in")


class Two(nn.Module):
    """Gives the weight of its second layer away."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> Any:
        x = Kept.apply(self.layers[0](x), self.layers[1].weight)  # type: ignore[no-untyped-call]
        for layer in self.layers[2:]:
            x = layer(x)
        return x.sum()


def test_an_address_in_backward_is_refused_where_nothing_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Two()
    with offload.Engine(model, offload.AdamW(), **tight(model, tmp_path)) as engine:
        loss = engine(torch.ones(2, WIDTH))
        with pytest.raises(  # whether it happens to be there or not
            StateError, match=r"parameter layers\.1\.weight .*data_ptr in a backward.*save_for_backward"
        ):
            engine.backward(loss)


def test_an_address_outside_of_forwards_brings_nothing(tmp_path: Path) -> None:
    """The first forward's units are on their way meanwhile, as many as the device has room for."""
    model = Two()
    with offload.Engine(model, offload.AdamW(), **tight(model, tmp_path)) as engine:
        total = sum(unit.param_bytes for unit in engine.plan.request.units)
        assert len({parameter.data_ptr() for parameter in model.parameters()}) == 16
        assert engine.stats().links["nvme_read"].bytes < total
        for parameter in model.parameters():
            parameter.sum()
        assert engine.stats().links["nvme_read"].bytes >= total


class Counted(nn.Sequential):
    """Tells parameters apart by their addresses, in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len({parameter.data_ptr() for parameter in self.parameters()})
        found: torch.Tensor = super().forward(x)
        return found


def test_addresses_of_more_than_the_device_has_room_for_are_refused_by_name(tmp_path: Path) -> None:
    model = Counted(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    with offload.Engine(model, offload.AdamW(), **tight(model, tmp_path)) as engine:
        with pytest.raises(
            offload.BudgetError, match=r"parameter .*: data_ptr in a forward keeps it .*id\(parameter\) tells"
        ):
            engine(torch.ones(2, WIDTH))


def test_chunked_losses_go_with_no_other() -> None:
    """Put on behind such a forward they are refused; put on before it, that forward does not ask for them."""
    model = patched(by_address=False)
    ops.chunk_loss(model)
    with pytest.raises(StateError, match=r"chunk_loss: .*another way.*leave chunk_loss out"):
        model(**batch(0))
    other = llama()
    ops.chunk_loss(other)
    truth = patched(by_address=False)
    other.forward = types.MethodType(truth.forward.__func__, other)
    assert torch.equal(other(**batch(0)).loss, truth(**batch(0)).loss)
