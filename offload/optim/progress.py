"""How far a run has come: steps taken and skipped, and the loss scale of float16.

Owns these numbers, and their place in an optimizer's state dict. Next: :mod:`offload.optim.step` counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from offload.config import Config
from offload.errors import ConfigError


class LossScaler:
    """Dynamic loss scale for float16: halves after an overflow, doubles after `window` good steps.

    With `hysteresis` n, the scale is lowered only at the n-th overflow in a row of short runs, as DeepSpeed does.

    Source: Micikevicius et al., Mixed Precision Training, section 3.2.
    """

    def __init__(self, config: Config, *, enabled: bool, several_ranks: bool = False) -> None:
        self.enabled = enabled
        self._several_ranks = several_ranks
        self.scale = config.initial_loss_scale if enabled else 1.0
        self._is_applied = False
        self._window = config.loss_scale_window
        self._hysteresis = config.loss_scale_hysteresis
        self._minimum = config.min_loss_scale
        self._tolerance = self._hysteresis
        self._good_steps = 0

    @contextlib.contextmanager
    def applied(self) -> Iterator[float | None]:
        """Let gradients be taken inside the ``with`` block, which multiplies the loss by what this yields (or not)."""
        self._is_applied = True
        try:
            yield self.scale if self.enabled else None
        finally:
            self._is_applied = False

    def refuse_gradient(self) -> str | None:
        """Return why gradients are not taken now; None where they are."""
        if self.enabled and not self._is_applied:
            return "float16: the loss must be scaled; call engine.backward(loss) instead of loss.backward()"
        if self._several_ranks and not self._is_applied:
            return "several ranks add gradients up when backward ends; call engine.backward(loss), not loss.backward()"
        return None

    def overflowed(self) -> None:
        """Note a step whose gradients were not finite."""
        self._good_steps = 0
        self._tolerance -= 1
        if self._tolerance <= 0:
            self.scale = max(self.scale / 2, self._minimum)

    def succeeded(self) -> None:
        """Note a step that was taken."""
        self._good_steps += 1
        if self._good_steps % self._window == 0:
            self.scale *= 2
            self._tolerance = self._hysteresis

    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers."""
        return {"scale": self.scale, "tolerance": self._tolerance, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.scale = float(state["scale"])
        self._tolerance = int(state["tolerance"])
        self._good_steps = int(state["good_steps"])


class Progress:
    """Steps of one engine.

    Attributes:
        steps: taken.
        skipped: skipped, because float16 gradients overflowed.
        scaler: of the loss.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self.steps = 0
        self.skipped = 0
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, for the optimizer's state dict."""
        scale = {"loss_scale": self.scaler.state_dict()} if self.scaler.enabled else {}
        return {"step": self.steps, "skipped_steps": self.skipped, **scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, and :func:`check_state` has seen."""
        self.steps, self.skipped = int(state["step"]), int(state["skipped_steps"])
        if self.scaler.enabled and "loss_scale" in state:
            self.scaler.load_state_dict(state["loss_scale"])


def check_state(state: Any) -> None:
    """Check what claims to be :meth:`Progress.state_dict`.

    Raises:
        ConfigError: it is not.
    """
    expected: dict[str, float] = {"step": 0, "skipped_steps": 0}
    found = dict(state) if isinstance(state, Mapping) else {"step": state}
    if isinstance(found.get("loss_scale"), Mapping):
        expected |= {"scale": math.ulp(0.0), "tolerance": -math.inf, "good_steps": 0}
        found |= found["loss_scale"]
    for name, least in expected.items():
        value = found.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is None or not number or value < least or (name != "scale" and value != int(value)):
            raise ConfigError(
                f"optimizer state dict: expected {name} of 'run' as a number but got {value!r}; load what state_dict() "
                "returned, or remove 'run' to begin counting anew"
            )
