"""What is done to deferred tensors gives, range by range, the elements that torch gives."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offload.checkpoint.deferred import DeferredTensor, Kept, fill, uncast, whole
from offload.errors import ConfigError


class Stored:
    """Has a tensor's elements, and counts those that were read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.contiguous()
        self.read_numel = 0

    def read(self, begin: int, end: int, address: int) -> None:
        size = self.tensor.element_size()
        assert 0 <= begin <= end <= self.tensor.numel()
        ctypes.memmove(address, self.tensor.data_ptr() + begin * size, (end - begin) * size)
        self.read_numel += end - begin


def deferred(tensor: torch.Tensor) -> tuple[DeferredTensor, Stored]:
    stored = Stored(tensor)
    return DeferredTensor(tensor.to("meta"), stored), stored


def made(tensor: torch.Tensor, begin: int, end: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    out = torch.empty(end - begin, dtype=dtype or tensor.dtype)
    fill(tensor, begin, end, out, Kept())
    return out


def numbers(*shape: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OPERATIONS: dict[str, Operation] = {
    "cast": lambda a, b: a.to(torch.bfloat16).to(a.dtype),
    "join 0": lambda a, b: torch.cat([a, b, a], dim=0),
    "join last": lambda a, b: torch.cat([a, b], dim=-1),
    "join middle": lambda a, b: torch.cat([a, b], dim=a.dim() // 2),
    "stack 0": lambda a, b: torch.stack([a, b]),
    "stack last": lambda a, b: torch.stack([a, b, b], dim=-1),
    "chunk": lambda a, b: torch.chunk(a, 2, dim=-1)[-1].contiguous(),
    "split": lambda a, b: a.split([1, a.shape[0] - 1])[1],
    "narrow": lambda a, b: a.narrow(-1, a.shape[-1] - 1, 1),
    "slice": lambda a, b: a[..., -2:],
    "every other": lambda a, b: a[::2],
    "select": lambda a, b: a[-1] if a.dim() > 1 else a,
    "unbind": lambda a, b: a.unbind(0)[0] if a.dim() > 1 else a,
    "transpose": lambda a, b: a.transpose(0, -1),
    "flatten": lambda a, b: a.reshape(-1),
    "one more": lambda a, b: a.unsqueeze(0),
    "one less": lambda a, b: a.unsqueeze(0).squeeze(),
    "sum": lambda a, b: a + b,
    "permuted": lambda a, b: a.reshape(a.shape[0], -1).T.contiguous().reshape(a.shape),
}


@given(
    st.lists(st.integers(2, 4), min_size=1, max_size=3),
    st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=4),
    st.data(),
)
def test_ranges_are_those_of_torch(shape: list[int], names: list[str], data: st.DataObject) -> None:
    first, second = numbers(*shape) / 3, numbers(*shape, first=1000) / 3
    (ours, _), (other, _) = deferred(first), deferred(second)
    for name in names:
        truth = OPERATIONS[name](first, second)
        if truth.numel() == 0 or truth.numel() > 2000 or truth.dim() == 0:
            continue
        both = OPERATIONS[name](ours, other)
        first, second, ours, other = truth, truth.flip(0) + 1, both, deferred(truth.flip(0) + 1)[0]
    assert isinstance(ours, DeferredTensor)
    assert ours.shape == first.shape and ours.dtype == first.dtype and ours.device == first.device
    assert torch.equal(whole(ours), first)
    begin = data.draw(st.integers(0, first.numel()))
    end = data.draw(st.integers(begin, first.numel()))
    assert torch.equal(made(ours, begin, end), first.reshape(-1)[begin:end])
    assert torch.equal(made(ours, begin, end, torch.float16), first.reshape(-1)[begin:end].half())


def test_no_more_is_read_than_the_range() -> None:
    """Experts of a mixture, as transformers joins them: (2, 6, 5), of which each has two (3, 5)."""
    parts = [deferred(numbers(3, 5, first=100 * number)) for number in range(4)]
    gates, ups = torch.stack([parts[0][0], parts[1][0]]), torch.stack([parts[2][0], parts[3][0]])
    joined = nn.Parameter(torch.cat([gates, ups], dim=1).to(torch.bfloat16))
    assert made(joined.detach(), 14, 31).tolist() == [14, *range(200, 215), 100]
    assert [stored.read_numel for _, stored in parts] == [1, 1, 15, 0]


def test_what_is_computed_as_a_whole_is_computed_once() -> None:
    ours, stored = deferred(numbers(4, 6))
    kept, out = Kept(), torch.empty(24)
    turned = ours.T
    for begin in range(0, 24, 8):
        fill(turned, begin, begin + 8, out[begin : begin + 8], kept)
    assert torch.equal(out, numbers(4, 6).T.reshape(-1)) and stored.read_numel == 24
    other = deferred(numbers(2, 3))[0].T
    fill(other, 0, 6, out[:6], kept)
    fill(turned, 0, 8, out[:8], kept)
    assert stored.read_numel == 48, "only one is kept"


def test_comparisons_read() -> None:
    one, same, another = (deferred(numbers(3) + shift)[0] for shift in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, another)
    assert one.sum().item() == 3.0


def test_writing_makes_elements_at_once() -> None:
    """So random numbers come in the order in which they are asked for."""
    scale = deferred(torch.full((4,), 2.0))[0] * 1
    torch.manual_seed(0)
    scale.normal_()
    following = torch.rand(())
    torch.manual_seed(0)
    assert torch.equal(whole(scale), torch.empty(4).normal_()) and torch.equal(following, torch.rand(()))
    view = deferred(numbers(4))[0][1:]
    with pytest.raises(ConfigError, match=r"aten.fill_.*written to.*from_pretrained"):
        view.fill_(0.0)


def test_casts_can_be_undone() -> None:
    ours, _ = deferred(numbers(4) / 3)
    cast = nn.Parameter(ours.to(torch.bfloat16)).detach()
    assert cast.dtype == torch.bfloat16 and uncast(cast).dtype == torch.float32
    assert torch.equal(made(uncast(cast), 0, 4), numbers(4) / 3)
    joined: Any = torch.cat([cast, cast])
    assert uncast(joined) is joined
