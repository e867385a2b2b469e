"""Cross-entropy of a linear layer's output, without the output of all tokens at once.

With a large vocabulary, the logits are the largest tensor of a language model. Here they are formed for a chunk of
tokens at a time: in forward for the losses, and again in backward for the gradients.

Owns the chunks and their arithmetic. Next: :mod:`offload.activations.causal_loss` brings it to models of transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import is_autocast_available
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from offload.errors import ConfigError, StateError
from offload.sizes import MIB

CHUNK_LOGITS_BYTES = 64 * MIB  # of one chunk in float32, if nothing else is asked for
LEAST_CHUNK = 256  # tokens: each chunk reads the weight three times, and adds to its gradient in memory
_CHUNK_UNIT = 64
_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk: int | None = None,
) -> torch.Tensor:
    """Return ``cross_entropy(linear(hidden, weight, bias).float(), labels)`` with the logits of a chunk at a time.

    Matrix products are in the dtype of the inputs, or of autocast; all else is in float32 (float64 if the products
    are). The gradient of ``weight`` is summed over chunks in float32, each chunk's part rounded to the products' dtype.
    Backward forms the logits once more, so one more matrix product is the price. Bits depend on ``chunk``, and on
    nothing that an engine decides. Inside a module's forward, ``weight`` may be any parameter of an engine's model.

    Args:
        hidden: (..., features) what the layer would be given.
        weight: (classes, features).
        labels: (...) whole numbers, each a class or `ignore_index`.
        bias: (classes,) or None.
        ignore_index: label of tokens that do not count.
        reduction: ``"mean"`` over tokens that count, ``"sum"``, or ``"none"`` for one loss per token.
        label_smoothing: share in [0, 1] that is spread over all classes.
        chunk: tokens at a time; None takes as many as have 64 MiB of logits in float32, but at least 256.

    Returns:
        float32, or float64: a scalar, or (...) with ``reduction="none"``.

    Raises:
        ConfigError: shapes or options do not fit.
        StateError: in backward, if it is asked for gradients of gradients.
    """
    tensors = (hidden, weight, labels, bias)
    if has_torch_function(tensors):  # so that an engine brings a parameter once, for the whole call
        return handle_torch_function(
            linear_cross_entropy,
            tensors,
            hidden,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            chunk=chunk,
        )
    _check(hidden, weight, labels, bias, reduction, label_smoothing, chunk)
    labels = labels.long()  # of bytes, no label is -100
    how = _How.of(hidden, weight, ignore_index, label_smoothing, chunk)
    apply: Any = _Losses.apply
    losses: Any = apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), how)
    if reduction == "none":
        return losses.view(labels.shape)  # type: ignore[no-any-return]
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()  # type: ignore[no-any-return]


class LinearCrossEntropy(nn.Linear):
    """An ``nn.Linear`` that returns the cross-entropy of its output when it is given labels, too.

    With labels, its forward is :func:`linear_cross_entropy`. Without, it is that of ``nn.Linear``. Parameters, their
    names and their initialisation are those of ``nn.Linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        chunk: int | None = None,
    ) -> None:
        """Make the layer; the options are those of :func:`linear_cross_entropy`."""
        super().__init__(in_features, out_features, bias, device, dtype)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.chunk = chunk

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of (..., features) with labels (...); without them, the logits (..., classes)."""
        if labels is None:
            return super().forward(hidden)
        return linear_cross_entropy(
            hidden,
            self.weight,
            labels,
            bias=self.bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            chunk=self.chunk,
        )


def check_chunk(chunk: object, subject: str) -> None:
    """Refuse what is no number of tokens.

    Raises:
        ConfigError: it is none.
    """
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ConfigError(f"{subject}: expected chunk, the tokens at a time, to be a whole number >= 1 but got {chunk}")


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
    chunk: int | None,
) -> None:
    subject = "linear_cross_entropy"
    check_chunk(chunk, subject)
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"{subject}: expected a reduction of {', '.join(_REDUCTIONS)} but got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"{subject}: expected label_smoothing in [0, 1] but got {label_smoothing}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise ConfigError(
            f"{subject}: expected labels that are whole numbers but got {labels.dtype}; for probabilities of classes "
            "use torch.nn.functional.cross_entropy"
        )
    fits = weight.dim() == 2 and hidden.dim() > 0 and hidden.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and tuple(bias.shape) != tuple(weight.shape[:1])):
        shapes = f"{tuple(weight.shape)}, bias {None if bias is None else tuple(bias.shape)}"
        raise ConfigError(
            f"{subject}: expected hidden (..., features), weight (classes, features) and bias (classes,) but got "
            f"hidden {tuple(hidden.shape)}, weight {shapes}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ConfigError(
            f"{subject}: expected a label for each of {tuple(hidden.shape[:-1])} tokens but got labels of shape "
            f"{tuple(labels.shape)}; shift them before, for a language model"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _How:
    """How the losses of one call are computed.

    Attributes:
        device: kind of device, as autocast has it.
        dtype: of matrix products.
        wide: dtype of all else.
        ignore_index: label of tokens that do not count.
        smoothing: share that is spread over all classes.
        chunk: tokens at a time.
    """

    device: str
    dtype: torch.dtype
    wide: torch.dtype
    ignore_index: int
    smoothing: float
    chunk: int

    @staticmethod
    def of(hidden: torch.Tensor, weight: torch.Tensor, ignore_index: int, smoothing: float, chunk: int | None) -> _How:
        device, dtype = hidden.device.type, hidden.dtype
        if is_autocast_available(device) and torch.is_autocast_enabled(device) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device)
        elif dtype != weight.dtype:
            raise ConfigError(
                f"linear_cross_entropy: expected hidden and weight of one dtype but got {dtype} and {weight.dtype}; "
                "convert one, or use torch.autocast"
            )
        wide = torch.promote_types(dtype, torch.float32)
        if chunk is None:
            chunk = CHUNK_LOGITS_BYTES // (4 * max(len(weight), 1)) // _CHUNK_UNIT * _CHUNK_UNIT
            chunk = max(chunk, LEAST_CHUNK)
        return _How(device, dtype, wide, ignore_index, smoothing, chunk)

    def pieces(self, tokens: int) -> Iterator[slice]:
        """Yield the chunks."""
        for begin in range(0, tokens, self.chunk):
            yield slice(begin, min(begin + self.chunk, tokens))

    def plainly(self) -> contextlib.AbstractContextManager[object]:
        """Return what keeps autocast from converting: dtypes are chosen already."""
        known = is_autocast_available(self.device)  # the meta device has none
        return torch.autocast(self.device, enabled=False) if known else contextlib.nullcontext()

    def converted(self, *tensors: torch.Tensor | None) -> list[Any]:
        """Return tensors in the dtype of matrix products."""
        return [tensor if tensor is None else tensor.detach().to(self.dtype) for tensor in tensors]

    def classes(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens count, and (tokens, 1) the class of each, 0 if it does not."""
        counts = labels != self.ignore_index
        return counts, torch.where(counts, labels, 0).long().unsqueeze(1)


class _Losses(torch.autograd.Function):
    """(tokens,) losses. It keeps its inputs, and two numbers per token that make logits probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        how: _How,
    ) -> torch.Tensor:
        losses, tops, sums = (rows.new_empty(len(rows), dtype=how.wide) for _ in range(3))
        with how.plainly():
            matrix, offset = how.converted(weight, bias)
            for piece in how.pieces(len(rows)):
                logits = functional.linear(rows[piece].detach().to(how.dtype), matrix, offset).to(how.wide)
                counts, classes = how.classes(labels[piece])
                top = logits.amax(-1, keepdim=True)
                logits.sub_(top)
                chosen = logits.gather(1, classes)
                spread = logits.mean(-1, keepdim=True) if how.smoothing else 0.0
                log_sum = logits.exp_().sum(-1, keepdim=True).log_()
                loss = log_sum - (1.0 - how.smoothing) * chosen - how.smoothing * spread
                losses[piece] = torch.where(counts, loss.squeeze(1), 0.0)
                tops[piece], sums[piece] = top.squeeze(1), log_sum.squeeze(1)
                del logits
        ctx.save_for_backward(rows, weight, bias, labels, tops, sums)
        ctx.how = how
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise StateError(
                "linear_cross_entropy: expected a backward pass without create_graph but got one with it, and has no "
                "gradients of gradients; use torch.nn.functional.cross_entropy on the logits"
            )
        rows, weight, bias, labels, tops, sums = ctx.saved_tensors
        how: _How = ctx.how
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_rows = torch.empty_like(rows) if needs_rows else None
        of_weight = torch.zeros_like(weight, dtype=how.wide) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=how.wide) if needs_bias else None
        with how.plainly():
            matrix, offset = how.converted(weight, bias)
            for piece in how.pieces(len(rows)):
                given = rows[piece].to(how.dtype)
                logits = functional.linear(given, matrix, offset).to(how.wide)
                counts, classes = how.classes(labels[piece])
                factor = torch.where(counts, upstream[0][piece], 0.0).unsqueeze(1)
                logits.sub_(tops[piece].unsqueeze(1)).sub_(sums[piece].unsqueeze(1)).exp_().mul_(factor)
                if how.smoothing:
                    logits.sub_(factor * (how.smoothing / len(weight)))
                logits.scatter_add_(1, classes, factor * (how.smoothing - 1.0))
                if of_bias is not None:
                    of_bias += logits.sum(0)
                gradient = logits.to(how.dtype)
                del logits
                if of_rows is not None:
                    of_rows[piece] = gradient @ matrix
                if of_weight is not None and how.dtype == how.wide:
                    of_weight.addmm_(gradient.t(), given)
                elif of_weight is not None:
                    of_weight += gradient.t() @ given
                del gradient
        found = (of_weight, weight), (of_bias, bias)
        return of_rows, *(None if total is None else total.to(like.dtype) for total, like in found), None, None
