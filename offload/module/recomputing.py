"""Computes blocks of a model again in backward, where the model has no such way of its own.

Owns which blocks these are - elements of lists that are of one class, such as transformer layers - and their forwards,
in whose place it puts one that torch's checkpointing runs. It is put back at the end. A model of transformers is asked
to do it in its own way. Next: :mod:`offload.build`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.errors import ConfigError, StateError
from offload.interrupt import calls_users_code
from offload.module.block_state import BlockState
from offload.module.repetition import Repetition
from offload.torch_private import compared_by, flatten, is_of_a_transform, stops_repetitions, unflatten


class Recomputing:
    """Blocks of one model that are computed again. See the module's text.

    Attributes:
        given_up: the name of a block that could not be computed again, for which none is any more; else empty.
    """

    def __init__(self, model: nn.Module, *, may_give_up: bool = False) -> None:
        """Find the blocks; :meth:`attach` begins.

        Args:
            model: that has them.
            may_give_up: where a block cannot be computed again, none is from there on.

        Raises:
            ConfigError: there are none.
        """
        self.given_up = ""
        self._may_give_up = may_give_up
        self._model = model
        self._asks = _asks(model)
        self._blocks = [] if self._asks else list(blocks_of(model))
        self._before: list[tuple[nn.Module, Any, Any]] = []  # forwards that others had put in place, or None; and ours
        self._unseen = set[str]()  # blocks whose first repetition has not been compared
        self._is_on = False
        if not self._asks and not self._blocks:
            raise ConfigError(
                'activations: "recompute" expected blocks that repeat, as elements of a ModuleList or a Sequential, '
                f"but found none in {type(model).__name__}; use torch.utils.checkpoint in its forward, or "
                'activations="offload"'
            )

    def attach(self) -> None:
        """Compute the blocks again from now on."""
        if self._asks:
            model: Any = self._model
            if not _recomputes(model):
                enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
                enable({"use_reentrant": False})
                self._is_on = True
            return
        for name, block in self._blocks:
            before, ours = vars(block).get("forward"), self._repeated(name, block, block.forward)
            self._before.append((block, before, ours))
            block.forward = ours
            self._unseen.add(name)

    def detach(self) -> None:
        """Let the model be as it was. Idempotent."""
        if self._is_on:
            model: Any = self._model
            disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
            disable()
            self._is_on = False
        while self._before:
            block, before, ours = self._before.pop()
            if vars(block).get("forward") is not ours:
                continue  # somebody has another one in place by now, which may call ours
            if before is None:
                del block.forward
            else:
                block.forward = before

    def _repeated(self, name: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs a block's forward so that backward repeats it, with the signature of that forward."""
        if not isinstance(forward, types.MethodType):

            @functools.wraps(forward)
            def run(*args: Any, **kwargs: Any) -> Any:
                return self._run(name, block, forward, *args, **kwargs)

            return run

        @functools.wraps(forward.__func__)
        def run_method(_: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._run(name, block, forward, *args, **kwargs)

        return types.MethodType(run_method, forward.__self__)

    @calls_users_code
    def _run(self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward so that backward repeats it: with the same arguments, and with its state as it was.

        Raises:
            StateError: it changes a tensor of its state in place, which would happen twice; ``torch.func`` runs it; or
                in backward, the repetition does something else.
        """
        if not torch.is_grad_enabled() or not self._before:
            return forward(*args, **kwargs)
        leaves, form = flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(map(is_of_a_transform, tensors)):
            raise StateError(
                f"model: cannot be transformed by torch.func (vmap, jvp) while {name} is computed again in backward; "
                'use activations="offload" or "keep"'
            )
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        others = [None if is_one else leaf for leaf, is_one in zip(leaves, is_tensor, strict=True)]
        state = BlockState(block, others)
        if self._may_give_up and state.changes_buffers:  # before it has
            self._give_up(name)
            return forward(*args, **kwargs)
        repetition = Repetition(name, self._unseen, functools.partial(self._differs, name))
        stops = stops_repetitions()
        given = [(args, kwargs)]  # to the first run, which may change the caller's lists and dictionaries

        def run(*tensors: torch.Tensor) -> Any:
            if given:
                own_args, own_kwargs = given.pop()
                return forward(*own_args, **own_kwargs)
            if (key := state.changed()) is not None:
                raise self._changed(name, key, "since")
            there = iter(tensors)
            again = [next(there) if is_one else other for other, is_one in zip(others, is_tensor, strict=True)]
            same_args, same_kwargs = unflatten(again, form)
            with state.put_back(), repetition.naming_errors():
                output = forward(*same_args, **same_kwargs)
            if stops:  # torch would have
                raise repetition.refuse("it saves fewer tensors then")
            return output

        with compared_by(repetition.look) as comparison:
            output = checkpoint(run, *tensors, use_reentrant=False, determinism_check=comparison)
        if (key := state.changed()) is not None:
            raise self._changed(name, key, "by that forward")
        return output

    def _changed(self, name: str, key: str, when: str) -> StateError:
        """Return the error that a tensor is changed in place, which would happen twice."""
        return self._refuse(
            name,
            f"expected no change in place of {key}, which the forward of {name} may read and backward repeats, but it "
            f"is changed {when}",
        )

    def _differs(self, name: str, what: str) -> StateError:
        """Return the error that the repetition has done something else."""
        return self._refuse(
            name,
            f"expected the forward of {name} to do the same again when backward repeats it, but {what}; it depends on "
            "what is not put back, as caches and other objects, arrays of NumPy, iterators, and whether parameters are "
            "frozen",
        )

    def _refuse(self, name: str, text: str) -> StateError:
        """Return an error of a block with its remedy, or with what is done where this may give up."""
        if not self._may_give_up:
            return StateError(f'activations: {text}; use activations="offload"')
        self._give_up(name)
        return StateError(f'activations: {text}; from the next micro-batch on, "auto" is activations="offload"')

    def _give_up(self, name: str) -> None:
        """Compute no block again in later forwards, because of this one."""
        self.given_up = name
        self.detach()


def can_recompute(model: nn.Module) -> bool:
    """Tell whether a model has blocks that are not computed again so far."""
    if _asks(model):
        return not _recomputes(model)
    return next(blocks_of(model), None) is not None


def share_of_blocks(model: nn.Module) -> float:
    """Return the part of a model's parameters that blocks have: about their part of a forward."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    inside = {id(p): p.numel() for _, block in blocks_of(model) for p in block.parameters()}
    return sum(inside.values()) / numel if inside else 1.0


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a model that repeat, the outermost ones, with their paths."""

    def descend(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        alike = len(children) > 1 and len({type(child) for _, child in children}) == 1
        if alike and isinstance(module, (nn.ModuleList, nn.Sequential)) and all(map(_is_block, module.children())):
            yield from children
            return
        for name, child in children:
            yield from descend(name, child)

    yield from descend("", model)


def _recomputes(model: Any) -> bool:
    """Tell whether a model of transformers does it already; later versions have another name for it."""
    found = getattr(model, "is_activation_checkpointing", None)
    return bool(model.is_gradient_checkpointing if found is None else found)


def _asks(model: Any) -> bool:
    """Tell whether a model does it in its own way when it is asked, as those of transformers."""
    has = any(hasattr(model, name) for name in ("is_activation_checkpointing", "is_gradient_checkpointing"))
    return bool(getattr(model, "supports_gradient_checkpointing", False)) and has


def _is_block(module: nn.Module) -> bool:
    """Tell whether a module is more than one operator, and has something to train."""
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None
