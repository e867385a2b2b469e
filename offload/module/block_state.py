"""What the forward of a block reads beside its parameters and arguments, kept for its repetition in backward.

Owns which state that is, and putting it back while the forward is repeated: attributes, buffers, parameters and hooks
of the block's modules, the content of containers among them and in these, and generators of random numbers that torch's
checkpointing does not know. A tensor that is changed in place cannot be put back, and is told. What cannot be put
back either, as objects of other classes, :mod:`offload.module.repetition` finds out. Next:
:mod:`offload.module.recomputing` repeats.
"""

from __future__ import annotations

import array
import contextlib
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from offload.torch_private import changes_buffers

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # attributes that have a place of their own here, or none
_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks")))
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})  # have nothing inside that changes
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)  # and subclasses
_BYTES: tuple[Any, ...] = (bytearray, array.array)


class BlockState:
    """That of one block, as it is now. See the module's text.

    Attributes:
        changes_buffers: a module is there that changes buffers in place in its forward, as BatchNorm in training.
    """

    def __init__(self, block: nn.Module, arguments: Iterable[Any]) -> None:
        """Keep it, with the `arguments` of the forward that are no tensors."""
        self.changes_buffers = False
        self._kept: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []  # what reads it, and writes it
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        self._keep(random.getstate, random.setstate)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._keep_numpys(numpy.random)
        held = [("an argument", argument) for argument in arguments]
        for path, module in block.named_modules():
            other = _OF_TORCH | {"forward"} if module is block else _OF_TORCH  # that of the block is what is repeated
            read = functools.partial(_attributes, module, other)
            attributes = self._keep(read, functools.partial(_set_attributes, module, other))
            buffers = module._buffers
            for own in (buffers, module._parameters):
                if own:
                    self._keep(functools.partial(dict, own), functools.partial(_refill, own))
            self.changes_buffers |= changes_buffers(module)
            if module is not block:  # whose hooks are not repeated
                hooks = [vars(module)[name] for name in _HOOKS]
                self._keep(functools.partial(_contents, hooks), functools.partial(_refill_all, hooks))
            held += [
                (f"{path}.{key}" if path else key, value) for key, value in (*attributes.items(), *buffers.items())
            ]
        self._keep_content(held)

    def changed(self) -> str | None:
        """Return the name of a tensor that was changed in place since this was made, None where there is none."""
        return next((key for key, tensor, version in self._tensors if tensor._version != version), None)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Let everything be in the ``with`` block as it was when this was made."""
        now = [read() for read, _, _ in self._kept]
        try:
            for _, write, before in self._kept:
                write(before)
            yield
        finally:
            for (_, write, _), state in zip(self._kept, now, strict=True):
                write(state)

    def _keep(self, read: Callable[[], Any], write: Callable[[Any], object]) -> Any:
        state = read()
        self._kept.append((read, write, state))
        return state

    def _keep_numpys(self, random_state: Any) -> None:
        """Keep the state of a ``RandomState`` of NumPy, or of the one that the whole process has."""
        self._keep(functools.partial(random_state.get_state, legacy=False), random_state.set_state)

    def _keep_content(self, held: list[tuple[str, Any]]) -> None:
        """Keep what may change inside of attributes with these names, and inside of that."""
        seen, numpy = set[int](), sys.modules.get("numpy")
        while held:
            key, value = held.pop()
            if type(value) in _PLAIN or id(value) in seen:
                continue
            seen.add(id(value))
            inner: Iterable[tuple[Any, Any]] = ()
            if isinstance(value, torch.Tensor):
                if not (value.is_inference() or value.is_meta):  # which have no counter, or no content
                    self._tensors.append((key, value, value._version))
            elif isinstance(value, torch.Generator):
                self._keep(value.get_state, value.set_state)
            elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
                self._keep(value.getstate, value.setstate)
            elif isinstance(value, _CONTAINERS):
                content = self._keep(functools.partial(_content, value), functools.partial(_refill, value))
                inner = content.items() if isinstance(content, dict) else enumerate(content)
            elif isinstance(value, _BYTES):
                self._keep(functools.partial(value.__getitem__, slice(None)), functools.partial(_refill, value))
            elif isinstance(value, tuple):
                inner = enumerate(value)
            elif numpy is not None and isinstance(value, numpy.random.RandomState):
                self._keep_numpys(value)
            elif hasattr(value, "bit_generator"):  # numpy's
                generator = value.bit_generator
                self._keep(
                    functools.partial(getattr, generator, "state"), functools.partial(setattr, generator, "state")
                )
            held += [(f"{key}[{place!r}]", one) for place, one in inner if type(one) not in _PLAIN]
            if isinstance(value, (types.SimpleNamespace, *_CONTAINERS)):
                held.append((key, getattr(value, "__dict__", None)))


def _attributes(module: nn.Module, other: frozenset[str]) -> dict[str, Any]:
    """Return those of a module, but for `other` ones."""
    return {key: value for key, value in vars(module).items() if key not in other}


def _set_attributes(module: nn.Module, other: frozenset[str], attributes: dict[str, Any]) -> None:
    own = vars(module)
    for key in _attributes(module, other).keys() - attributes.keys():
        del own[key]
    own.update(attributes)


def _contents(containers: Sequence[dict[Any, Any]]) -> list[dict[Any, Any]]:
    return [dict(container) if container else {} for container in containers]


def _refill_all(containers: Sequence[dict[Any, Any]], contents: Sequence[dict[Any, Any]]) -> None:
    for container, content in zip(containers, contents, strict=True):
        if container or content:
            _refill(container, content)


def _content(container: Any) -> Any:
    """Return what is in one of :data:`_CONTAINERS`."""
    for kind in (dict, set):
        if isinstance(container, kind):
            return kind(container)
    return list(container)


def _refill(container: Any, content: Any) -> None:
    """Let a container have this content, by the methods of its kind: a subclass may count in its own."""
    if isinstance(container, _BYTES):
        container[:] = content
        return
    kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    kind.clear(container)
    (kind.update if hasattr(kind, "update") else kind.extend)(container, content)
