"""Operators that the meta device lacks, or has in another form than devices that compute.

Owns attention as one kernel, gradients of embeddings as an engine has them, and products of groups of any dtype.
Next: :mod:`offload.planning.work` counts what they take.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
GROUPED_MM = getattr(_aten, "_grouped_mm", None)  # older versions of torch have none


def run_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator; the meta device has products of groups in bf16 alone, others have it in more dtypes."""
    if func.overloadpacket is not GROUPED_MM or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    left, right = (torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in args[:2])
    output = func(left, right, *args[2:], **kwargs)
    return torch.empty_like(output, dtype=args[0].dtype)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Any, ...]:
    """Return the arguments of attention, in this order; torch's function tells no signature."""
    return query, key, value, attn_mask, dropout_p, is_causal


class AsDevicesHave(TorchFunctionMode):
    """Takes attention as one operator: the meta device has none, and would make all scores of all heads.

    That operator wants keys and values for each head. With `grouped`, what is kept of heads that share them, and of
    masks, is what other devices keep. A CPU has no kernel with dropout, for a bias that is trained, or for values of
    another width: it does make all scores. So do all devices if tensors have other than four dimensions: torch has no
    kernel for them. Gradients that are sparse are counted as dense, as an engine has them.
    """

    def __init__(self, *, grouped: bool, on_cpu: bool) -> None:
        super().__init__()
        self._grouped = grouped
        self._on_cpu = on_cpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return self._attention(func, args, kwargs)
        if func in (nn.functional.embedding, nn.functional.embedding_bag):
            given = inspect.signature(func).bind(*args, **kwargs)
            given.arguments["sparse"] = False
            return func(*given.args, **given.kwargs)
        return func(*args, **kwargs)

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        query, key, value, mask, dropout, causal = _attend(*args, **kwargs)
        features, trains = value.shape[-1], mask is not None and mask.requires_grad
        makes_scores = self._on_cpu and (dropout or trains or features != query.shape[-1])
        if makes_scores or any(tensor.dim() != 4 for tensor in (query, key, value)):
            return func(*args, **kwargs)
        if self._grouped:
            return _Grouped.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
        if key.shape[1] != query.shape[1]:  # heads that share keys and values
            many = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(many, 1) for tensor in (key, value))
        if features != query.shape[-1]:  # this operator has one width for all
            width = max(features, query.shape[-1])
            query, key, value = (
                nn.functional.pad(tensor, (0, width - tensor.shape[-1])) for tensor in (query, key, value)
            )
        output = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False)[0]
        return output if features == output.shape[-1] else output[..., :features]


class _Grouped(torch.autograd.Function):
    """Attention that keeps for backward what kernels of other devices keep, in their order."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        rows, heads, length, _ = query.shape
        output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype is torch.bool:
            mask = mask.to(query.dtype)  # as kernels want it
        ctx.save_for_backward(*(() if mask is None else (mask,)), key, query, value, sums, output)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        key, query, value, _, _ = ctx.saved_tensors[-5:]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
