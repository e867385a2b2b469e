"""Lets a causal language model of transformers compute its loss without the logits of all tokens.

transformers gives the output of the head to ``model.loss_function``, which may be replaced. While a forward has labels,
the head here passes its input on, and the loss function gives it to the head again, with the labels. So the head's
weight is used inside the head's forward alone, whoever has the weight. A model, or a hook, that does anything else with
the head's output is refused by what it does, not by its name.

Owns these three forwards. Next: :mod:`offload.activations.cross_entropy`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.activations.cross_entropy import check_chunk, linear_cross_entropy
from offload.classes import is_a
from offload.errors import ConfigError, StateError
from offload.torch_private import no_subclasses


@dataclasses.dataclass(slots=True)
class _Loss:
    """How one model computes its loss.

    Attributes:
        of: class of the model.
        head: the layer whose output are the logits.
        chunk: tokens at a time.
        labelled: whether a forward with labels is under way.
        passed: what the head was given in it.
        shown: what stands for the logits then.
        changes: torch's count of those of `passed` then.
        asked: whether the model has asked for the loss of that.
    """

    of: str
    head: nn.Linear
    chunk: int | None
    labelled: bool = False
    passed: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    changes: int = 0
    asked: bool = False


class _Logits(torch.Tensor):
    """Stands for logits that nobody makes: it can be given to the loss, and nothing else."""

    of: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name
        if name in _TOLD or name in _CONVERSIONS:
            with no_subclasses():
                found = func(*args, **(kwargs or {}))
            if name in _TOLD or found is args[0]:
                return found
        of = next((value.of for value in args if isinstance(value, cls)), "the model")
        raise StateError(
            f"chunk_loss: expected {of} to give the output of its head to the loss as it is, and to nothing else, but "
            f"{name} uses it, as models do that scale, cap or cast logits, or add to the loss, and hooks that look at "
            "them; load the model again, and leave chunk_loss out"
        )


_TOLD = {"dtype", "device", "requires_grad", "dim", "ndim", "is_floating_point", "layout", "grad_fn"}
_CONVERSIONS = {"float", "contiguous", "to"}  # of what is that already


def chunk_loss(model: nn.Module, *, chunk: int | None = None) -> None:
    """Let a causal language model of transformers compute its loss a chunk of tokens at a time.

    If the model is given labels, its output has the loss, and no logits. The loss is that of transformers, computed by
    :func:`~offload.ops.linear_cross_entropy`: equal but for last bits. Without labels nothing changes. Call it before
    the engine is made, and before adapters are put on the model.

    Args:
        model: it is changed: its forward, the forward of its head, and its ``loss_function``.
        chunk: tokens at a time; None takes as many as have 64 MiB of logits in float32, but at least 256.

    Raises:
        ConfigError: it is no such model, its head is not an ``nn.Linear``, or its loss is another one.
        StateError: in a forward with labels, if the model changes its logits before the loss, as some scale them.
    """
    check_chunk(chunk, "chunk_loss")
    found: Any = model
    name = type(found).__name__
    if not is_a(found, "transformers", "PreTrainedModel"):
        raise ConfigError(
            f"chunk_loss: expected a causal language model of transformers but got {name}; in a model of your own "
            "use offload.ops.LinearCrossEntropy, and call this before adapters are put on"
        )
    head: Any = found.get_output_embeddings()
    kind = type(head)
    if kind is not nn.Linear or "forward" in vars(head):
        got = "one whose forward was replaced" if kind is nn.Linear else kind.__name__
        raise ConfigError(f"chunk_loss: expected a head of {name} that is an nn.Linear but got {got}; leave it out")
    plain = found.loss_function
    if getattr(plain, "__name__", "") != "ForCausalLMLoss":
        raise ConfigError(
            f"chunk_loss: expected the loss function ForCausalLMLoss but {name} has "
            f"{getattr(plain, '__name__', plain)}; leave it out"
        )
    state = _Loss(name, head, chunk)
    head.forward = functools.partial(_of_head, state, head.forward)
    found.loss_function = functools.partial(_of_labels, state, plain)
    found.forward = functools.wraps(found.forward)(functools.partial(_of_model, state, found, found.forward))


def _of_model(state: _Loss, model: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the model's forward."""
    labels = kwargs.get("labels")
    if labels is None and args:
        labels = inspect.signature(forward).bind_partial(*args, **kwargs).arguments.get("labels")
    if labels is None or state.labelled:
        return forward(*args, **kwargs)
    if model.get_output_embeddings() is not state.head:
        raise ConfigError(
            f"chunk_loss: expected the head that {type(model).__name__} had but another one is in its place; call "
            "chunk_loss behind what replaces it, or leave the head as it is"
        )
    state.labelled = True
    try:
        output = forward(*args, **kwargs)
        if not state.asked:
            raise StateError(
                f"chunk_loss: expected {type(model).__name__} to compute its loss by loss_function, of its head's "
                "output, but it has another way; load the model again, and leave chunk_loss out"
            )
        return _without(output, state.shown)
    finally:
        state.labelled, state.passed, state.shown, state.asked = False, None, None, False


def _of_head(state: _Loss, forward: Callable[..., Any], hidden: torch.Tensor, loss_of: Any = None) -> Any:
    """Run the head's forward: pass its input on, or return the loss of it."""
    if loss_of is not None:
        head = state.head
        return linear_cross_entropy(hidden, head.weight, bias=head.bias, chunk=state.chunk, **loss_of)
    if not state.labelled:
        return forward(hidden)
    if hidden.is_inference():  # whose changes nobody counts
        with torch.inference_mode(False):
            hidden = hidden.clone()
    with no_subclasses():
        shown = hidden.as_subclass(_Logits)
    shown.of = state.of
    state.passed, state.changes, state.shown = hidden, hidden._version, shown
    return shown


def _of_labels(
    state: _Loss,
    plain: Callable[..., Any],
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Return the loss as ``ForCausalLMLoss`` does, of what the head was given."""
    if not state.labelled:  # somebody's own logits
        return plain(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    state.asked = True
    hidden = state.passed
    as_it_is = hidden is not None and logits is state.shown and hidden._version == state.changes
    if hidden is None or not as_it_is or vocab_size != state.head.out_features:
        raise StateError(
            "chunk_loss: expected the output of the head to go to the loss as it is but this model changes it before, "
            "as some scale, cap or cast logits; load the model again, and leave chunk_loss out"
        )
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    wanted = {"labels": shift_labels.to(hidden.device), "ignore_index": ignore_index, "reduction": reduction}
    loss = state.head(hidden.reshape(*shift_labels.shape, hidden.shape[-1]), wanted)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _without(output: Any, shown: torch.Tensor | None) -> Any:
    """Return a model's output without what is in the place of logits."""
    if isinstance(output, tuple):
        return tuple(value for value in output if value is not shown)
    return type(output)(**{key: value for key, value in output.items() if value is not shown})
