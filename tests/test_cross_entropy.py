"""Chunked linear + cross-entropy: the values of torch within rounding, few logits at once, the bits of an engine."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import several_ranks
import torch
from harness import assert_equal, everything_on_device, nvme, run
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import offload
from offload import ops
from offload.errors import ConfigError, StateError

pytestmark = pytest.mark.usefixtures("single_torch_thread")

TOKENS, WIDTH, CLASSES = 19, 24, 37
RANKS = 3


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> list[torch.Tensor]:
    """Return hidden, weight, labels of which two do not count, and bias."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64) * 0.3
    labels = torch.randint(0, CLASSES, (TOKENS,), generator=generator)
    labels[[3, 11]] = -100
    offset = torch.randn(CLASSES, generator=generator, dtype=torch.float64)
    floats = [value.to(dtype).requires_grad_() for value in (hidden, weight, offset)]
    return [floats[0], floats[1], labels, *([floats[2]] if bias else [])]


def plain(hidden: Any, weight: Any, labels: Any, bias: Any = None, **options: Any) -> torch.Tensor:
    logits = functional.linear(hidden, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(wide).flatten(0, -2), labels.flatten(), **options)


def chunked(hidden: Any, weight: Any, labels: Any, bias: Any = None, **options: Any) -> torch.Tensor:
    return ops.linear_cross_entropy(hidden, weight, labels, bias=bias, **options)


def values(function: Any, given: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Return the loss, and the gradients of what needs some."""
    loss = function(*given, **options)
    wanted = [tensor for tensor in given if tensor.requires_grad]
    upstream = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, wanted, upstream)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 100, None])
def test_values_are_those_of_torch(reduction: str, chunk: int | None) -> None:
    for bias, smoothing, ignored in itertools.product((True, False), (0.0, 0.2), (-100, 5)):
        given = inputs(bias=bias)
        if ignored != -100:
            given[2] = given[2].clamp(min=0)
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
        for ours, theirs in zip(
            values(chunked, given, chunk=chunk, **options), values(plain, given, **options), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-23), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
def test_errors_are_those_of_rounding(dtype: torch.dtype, unit: float) -> None:
    """Against exact values of the rounded inputs: as near as plain torch is, or as a rounding per chunk."""
    given = inputs(dtype)
    exact = [tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor for tensor in given]
    truth = values(plain, exact)
    for ours, theirs, right in zip(values(chunked, given, chunk=4), values(plain, given), truth, strict=True):
        assert ours.dtype == theirs.dtype
        allowed = 2 * (theirs.double() - right).norm() + unit * right.norm()
        assert (ours.double() - right).norm() <= allowed


def test_the_weight_gradient_is_summed_in_float32() -> None:
    """Of 4096 equal tokens a bfloat16 sum would stall."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    ops.linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.long), reduction="sum", chunk=1).backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-2048.0, 2048.0]


def test_autocast_is_that_of_torch() -> None:
    given = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = chunked(*given, chunk=5), plain(*given)
    assert ours.dtype == theirs.dtype == torch.float32
    wanted = [tensor for tensor in given if tensor.requires_grad]
    pairs = zip(torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted), strict=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    for mine, other in pairs:
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=3e-2, atol=3e-3)


class _Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operator makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return result


def test_the_logits_of_all_tokens_never_exist() -> None:
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(64, 8, requires_grad=True)
    labels = torch.arange(512) % 64
    with _Largest() as seen:
        ops.linear_cross_entropy(hidden, weight, labels, chunk=16).backward()
    assert seen.most == 512 * 8  # hidden itself; all logits would be 512 * 64
    with _Largest() as seen:
        plain(hidden, weight, labels).backward()
    assert seen.most == 512 * 64


@pytest.mark.parametrize(
    ("classes", "tokens"),
    [
        (40_000, 384),  # 64 MiB / 4 / 40000 = 419, down to a multiple of 64
        (100_000, 256),  # at least
    ],
)
def test_without_a_given_chunk_it_follows_the_vocabulary(classes: int, tokens: int) -> None:
    with _Largest() as seen:
        ops.linear_cross_entropy(torch.zeros(1000, 2), torch.zeros(classes, 2), torch.zeros(1000, dtype=torch.long))
    assert seen.most == tokens * classes


def test_retained_graphs_and_single_gradients() -> None:
    given = inputs()
    loss = chunked(*given, chunk=4)
    first = torch.autograd.grad(loss, given[0], retain_graph=True)
    again = torch.autograd.grad(loss, [given[0], given[1]], retain_graph=True)
    assert torch.equal(first[0], again[0])
    frozen = [given[0], given[1].detach(), given[2], given[3].detach()]
    assert torch.equal(torch.autograd.grad(chunked(*frozen, chunk=4), given[0])[0], first[0])
    assert not chunked(*[tensor.detach() for tensor in given]).requires_grad


def test_gradients_of_gradients_are_refused() -> None:
    given = inputs()
    loss = chunked(*given)
    with pytest.raises(StateError, match="linear_cross_entropy: expected a backward pass without create_graph"):
        torch.autograd.grad(loss, given[0], create_graph=True)


def test_edges() -> None:
    hidden, weight, labels, bias = inputs()
    ignored = torch.full_like(labels, -100)
    assert chunked(hidden, weight, ignored).isnan()
    assert torch.equal(torch.autograd.grad(chunked(hidden, weight, ignored, reduction="sum"), weight)[0], 0 * weight)
    empty = ops.linear_cross_entropy(hidden[:0], weight, labels[:0], reduction="sum")
    assert empty.item() == 0 and torch.equal(torch.autograd.grad(empty, weight)[0], 0 * weight)
    shaped = ops.linear_cross_entropy(hidden[:18].view(3, 6, WIDTH), weight, labels[:18].view(3, 6), reduction="none")
    assert shaped.shape == (3, 6)
    large = ops.linear_cross_entropy(1e4 * hidden.float(), weight.float(), labels, reduction="none")
    assert large.isfinite().all()
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked(hidden, weight, labels + CLASSES, bias)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk, the tokens at a time"),
        ({"chunk": True}, "chunk, the tokens at a time"),
        ({"reduction": "avg"}, "reduction of mean, sum, none but got 'avg'"),
        ({"label_smoothing": 2.0}, r"label_smoothing in \[0, 1\] but got 2.0"),
        ({"labels": torch.zeros(TOKENS)}, "labels that are whole numbers but got torch.float32"),
        ({"labels": torch.zeros(TOKENS, dtype=torch.bool)}, "labels that are whole numbers but got torch.bool"),
        ({"labels": torch.zeros(TOKENS, dtype=torch.complex64)}, "whole numbers but got torch.complex64"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"a label for each of \(19,\) tokens"),
        ({"weight": torch.zeros(CLASSES, 3)}, r"weight \(37, 3\)"),
        ({"bias": torch.zeros(3)}, r"bias \(3,\)"),
        ({"weight": torch.zeros(CLASSES, WIDTH)}, "of one dtype but got torch.float64 and torch.float32"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    hidden, weight, labels, bias = inputs()
    given = {"weight": weight, "labels": labels, "bias": bias, **options}
    with pytest.raises(ConfigError, match=message):
        ops.linear_cross_entropy(hidden, given.pop("weight"), given.pop("labels"), **given)


# --- with an engine ---


class Tied(nn.Module):
    """An embedding whose weight is the head's, too, used where no hook announces it; blocks; and a layer of its own."""

    def __init__(self, *, pieces: int | None, own_head: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pieces = pieces
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
        self.head = ops.LinearCrossEntropy(32, 64, chunk=pieces) if own_head else None

    def forward(self, ids: torch.Tensor, *, segments: bool = False) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if segments else block(x)
        if self.head is not None:
            loss: torch.Tensor = self.head(x[:, :-1], ids[:, 1:])
            return loss
        if segments:
            return checkpoint(self.loss, x, ids, use_reentrant=False)  # type: ignore[no-any-return]
        return self.loss(x, ids)

    def loss(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return ops.linear_cross_entropy(x[:, :-1], self.embedding.weight, ids[:, 1:], chunk=self.pieces)


def rows(number: int) -> torch.Tensor:
    return torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(number))


def plain_steps(model: nn.Module, **options: Any) -> list[torch.Tensor]:
    """Return the losses of plain PyTorch, where the gradients of all parameters are there."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for number in range(3):
        loss = model(rows(number), **options)
        losses.append(loss.detach())
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("own_head", [False, True])
def test_the_same_bits_wherever_parameters_live(tmp_path: Path, *, segments: bool, own_head: bool) -> None:
    model = Tied(pieces=5, own_head=own_head)
    options = {"loss_of": lambda engine, ids: engine(ids, segments=segments)}
    ids = [rows(number) for number in range(3)]
    away = {**nvme(model, tmp_path), "unit_bytes": 4608}
    truth = run(copy.deepcopy(model), ids, **options, **everything_on_device())
    ours = run(copy.deepcopy(model), ids, **options, **away)
    assert ours.stats.links["nvme_read"].bytes > 0
    assert_equal(ours, truth)
    for mine, other in zip(truth.losses, plain_steps(model, segments=segments), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_outside_of_a_forward_a_parameter_is_brought(tmp_path: Path) -> None:
    model = Tied(pieces=5)
    x, ids = torch.randn(3, 9, 32), rows(0)
    truth = model.loss(x, ids).detach()
    with offload.Engine(model, offload.AdamW(), **nvme(model, tmp_path)) as engine:
        with torch.no_grad():
            engine(ids)
            assert torch.equal(model.loss(x, ids), truth)


def one_of_ranks(rank: int, world: int, stage: dict[str, int]) -> tuple[list[float], dict[str, bytes]]:
    """Train a model with a chunked loss of a tied weight, and with layers in tiles; a micro-batch per rank."""
    model = Tied(pieces=5)
    ops.tile_(model.blocks, larger_than=2048)
    budgets = {"device": "8MiB", "cpu": "8MiB"}
    options = {"device": "cpu", "max_memory": budgets, "unit_bytes": 1 << 12, "threads": 1, "offload_param": "cpu"}
    accumulated = RANKS // world
    losses = []
    with offload.Engine(model, offload.AdamW(), gradient_accumulation_steps=accumulated, **options, **stage) as engine:
        for number in range(rank, 3 * RANKS, world):
            loss = engine(rows(number))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses, {name: value.numpy().tobytes() for name, value in engine.state_dict().items()}


@pytest.mark.cpu(reason="ranks send each other what is in host memory")
def test_ranks_with_slices_of_parameters_have_the_same_bits() -> None:
    (one,) = several_ranks.run(one_of_ranks, 1, 1, {})
    every = several_ranks.run(one_of_ranks, RANKS, RANKS, {"stage": 3})
    for rank, found in enumerate(every):
        assert isinstance(found, tuple), found
        assert found == (one[0][rank::RANKS], one[1])


def test_as_many_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a label for each of"):
        ops.linear_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(3, 2, dtype=torch.long))


def test_the_bias_gradient_is_summed_in_float32() -> None:
    """Of 4096 equal tokens a bfloat16 sum of one token after the other would stall."""
    weight, bias = torch.zeros(2, 1, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    hidden, labels = torch.ones(4096, 1, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.long)
    ops.linear_cross_entropy(hidden, weight, labels, bias=bias, reduction="sum", chunk=1).backward()
    assert bias.grad.tolist() == [-2048.0, 2048.0]


def test_labels_of_bytes_are_classes_all_of_them() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(200, 4)
    labels = torch.tensor([156, 1, 199], dtype=torch.uint8)  # 156 is -100 in a byte
    for reduction in ("mean", "none"):
        ours = ops.linear_cross_entropy(hidden, weight, labels, reduction=reduction)
        assert torch.allclose(ours, functional.cross_entropy(hidden @ weight.T, labels.long(), reduction=reduction))
