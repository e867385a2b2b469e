"""Notices an accelerator of accelerate that would save its state, or load one, without an engine's weights.

An accelerator saves the models that it was given, and looks at nothing of an engine. Where one calls into the engine
(its optimizer is prepared, or its loss goes backward), it is found among the callers, and gets hooks of its own public
kind that refuse. Accelerate is not imported. Next: :mod:`offload.integrations.accelerate` is the door.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from offload.classes import is_a
from offload.errors import StateError
from offload.torch_private import no_subclasses

# Modules whose engine an accelerator saves itself, by accelerator.
_told: weakref.WeakKeyDictionary[Any, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def note_told(accelerator: object, module: nn.Module) -> None:
    """Note that an accelerator saves and loads the engine of a module."""
    _told.setdefault(accelerator, weakref.WeakSet()).add(module)


class LeftOut:
    """The accelerators that one engine has met. See the module's text."""

    def __init__(self, model: nn.Module) -> None:
        """Prepare.

        Args:
            model: of the engine.
        """
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()

    def look(self, optimizer: object = None) -> None:
        """Give the accelerator among the callers, if there is one that was not met yet, hooks that refuse."""
        if "accelerate" not in sys.modules:
            return
        accelerator = _among_callers()
        if accelerator is not None and accelerator not in self._met:
            self._met.add(accelerator)
            met = weakref.ref(accelerator)
            accelerator.register_save_state_pre_hook(
                lambda models, weights, output_dir: self._refuse("save_state", met(), models)
            )
            accelerator.register_load_state_pre_hook(
                lambda models, input_dir: self._refuse("load_state", met(), models)
            )

    def end(self) -> None:
        """Refuse nothing from now on: the engine is closed."""
        self._model = None

    def _refuse(self, subject: str, accelerator: Any, models: Iterable[nn.Module]) -> None:
        """Refuse a state without the engine's weights.

        Raises:
            StateError: neither has the accelerator the module, nor does it save the engine.
        """
        model = None if self._model is None else self._model()
        if model is None or model in _told.get(accelerator, ()):
            return
        with no_subclasses():
            theirs = {id(parameter) for one in models for parameter in one.parameters()}
            if all(id(parameter) in theirs for parameter in model.parameters()):
                return
        raise StateError(
            f"{subject}: expected an accelerator that has the engine but got one without its module, so the weights "
            "would be left out; call offload.accelerate.prepare(accelerator, engine, ...) in the place of "
            "accelerator.prepare"
        )


def _among_callers() -> Any:
    """Return the innermost accelerator whose method has led here; None where there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.accelerator":
            found = frame.f_locals.get("self")
            if is_a(found, "accelerate", "Accelerator"):
                return found
        frame = frame.f_back
    return None
