"""Lets ``module.load_state_dict()`` write through to where the parameters are.

Torch copies value after value to parameters that have no memory of their own. So what it copies is only noted, and goes
home when torch has come to the end without an error: a state dict that does not fit changes nothing. Torch's own report
is what the user gets. If somebody reads parameters before that, as hooks do, what has come so far goes home at once.

Owns what one call has noted. Where it goes is :mod:`offload.checkpoint.module_state`' business.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.errors import StateError
from offload.planning.units import Where


@dataclasses.dataclass(slots=True)
class _Load:
    """One call of ``load_state_dict`` under way.

    Attributes:
        module: the first of ours that it has come to, which it leaves last.
        strict: whether torch will raise where names are missing or unexpected; False where others decide on that.
        errors: torch's list of what does not fit, which only this call has.
        buffers: the module's buffers as they were.
        values: what is to be written.
    """

    module: nn.Module
    strict: bool
    errors: list[str]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    values: dict[Where, torch.Tensor] = dataclasses.field(default_factory=dict)


class ModuleLoad:
    """Watches the loading of one engine's module. See the module's text."""

    def __init__(self, modules: Iterable[nn.Module], write: Callable[[Mapping[Where, torch.Tensor]], None]) -> None:
        """Prepare; :meth:`attach` registers the hooks.

        Args:
            modules: all modules with parameters of the engine.
            write: writes parameters home.
        """
        self._modules = set(modules)
        self._write = write
        self._load: _Load | None = None
        self._handles: list[RemovableHandle] = []
        self._end: RemovableHandle | None = None

    def attach(self) -> None:
        """Watch."""
        for module in self._modules:
            self._handles.append(module.register_load_state_dict_pre_hook(self._begin))

    def detach(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget()

    @property
    def is_under_way(self) -> bool:
        """Whether a load is."""
        if self._load is None:
            return False
        frame, errors = _frame(), self._load.errors  # a frame has the user's state dict, so it is not kept
        return frame is not None and any(value is errors for value in frame.f_locals.values())

    def note(self, values: Mapping[Where, torch.Tensor]) -> None:
        """Note what is being copied to a parameter; a load is under way."""
        assert self._load is not None
        self._load.values.update(values)

    def flush(self) -> None:
        """Write home what the load under way in this thread has noted: somebody is about to read parameters."""
        if self._load is not None and self._load.values and self.is_under_way:
            values, self._load.values = self._load.values, {}
            self._write(values)

    def _begin(
        self,
        module: nn.Module,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise StateError(
                "load_state_dict: assign=True would replace the parameters that an engine has; load without it, or use "
                "engine.load_state_dict(state_dict)"
            )
        if torch.__future__.get_swap_module_params_on_conversion():
            raise StateError(
                "load_state_dict: torch is set to swap parameters, which would replace those that an engine has; use "
                "engine.load_state_dict(state_dict)"
            )
        if self.is_under_way:
            return
        self._forget()  # an earlier call was broken off by an exception
        frame = _frame()
        if frame is None:
            return
        outermost = frame.f_locals.get("self")
        own = outermost in self._modules and outermost is module
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
        self._load = _Load(module, own and bool(frame.f_locals.get("strict")), errors, buffers)
        self._end = module.register_load_state_dict_post_hook(self._finish)  # now: so that it is the last one

    def _finish(self, module: nn.Module, report: Any) -> None:
        load = self._load
        self._forget()
        assert load is not None
        if load.errors or (load.strict and (report.missing_keys or report.unexpected_keys)):
            with torch.no_grad():  # torch is about to raise
                for buffer, before in load.buffers:
                    buffer.copy_(before)
            return
        self._write(load.values)

    def _forget(self) -> None:
        self._load = None
        if self._end is not None:
            self._end.remove()
            self._end = None


def _frame() -> FrameType | None:
    """Return the frame of the innermost ``load_state_dict`` that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module.load_state_dict.__code__:
        frame = frame.f_back
    return frame
