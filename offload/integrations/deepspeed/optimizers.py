"""DeepSpeed's optimizers by their names: classes that scripts make, and the section of a configuration.

The classes are those of torch with DeepSpeed's arguments and defaults, so that a scheduler can be made for them before
the engine takes them over. Next: :mod:`offload.integrations.deepspeed.engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.errors import ConfigError, did_you_mean
from offload.integrations.deepspeed.config import Named
from offload.kernels.optimizers import Lion
from offload.spec import OptimizerSpec

logger = logging.getLogger(__name__)

_FP32_STATES = (
    "fp32_optimizer_states: expected True but got {!r}, with other roundings than DeepSpeed's; pass "
    'state_dtype="bfloat16" to initialize, or in the section "offload"'
)


class DeepSpeedCPUAdam(torch.optim.Adam):
    """AdamW; Adam with ``adamw_mode=False``. Unlike in torch, `weight_decay` is 0 if it is left out."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Make it for parameters or groups of them, as in ``torch.optim``.

        Raises:
            ConfigError: an option asks for another step.
        """
        subject = type(self).__name__
        if not fp32_optimizer_states:
            raise ConfigError(_FP32_STATES.format(fp32_optimizer_states))
        if not bias_correction:
            raise ConfigError(f"{subject}: expected bias correction but got bias_correction=False; leave it out")
        if amsgrad:
            raise ConfigError(f"{subject}: expected amsgrad=False but got True; pass torch.optim.AdamW(amsgrad=True)")
        super().__init__(
            model_params,
            lr=lr,
            betas=(betas[0], betas[1]),
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=bool(adamw_mode),
        )


class FusedAdam(DeepSpeedCPUAdam):
    """As :class:`DeepSpeedCPUAdam`, with the arguments of DeepSpeed's optimizer for GPUs."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """Make it; see :class:`DeepSpeedCPUAdam`."""
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Make it for parameters or groups of them, as in ``torch.optim``.

        Raises:
            ConfigError: an option asks for another step.
        """
        if amsgrad or not fp32_optimizer_states:
            raise ConfigError(_FP32_STATES.format(fp32_optimizer_states) if not amsgrad else "amsgrad: leave it out")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def DeepSpeedCPULion(
    model_params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> OptimizerSpec:
    """Return :class:`offload.Lion` with DeepSpeed's defaults; torch has none, so make schedulers in ``initialize``.

    As in the paper, an element whose gradients have all been zero gets no update. DeepSpeed's moves by the learning
    rate in each step, such as the rows of an embedding that no batch has. A warning says so.

    Raises:
        ConfigError: an option asks for another step.
    """
    if not fp32_optimizer_states:
        raise ConfigError(_FP32_STATES.format(fp32_optimizer_states))
    logger.warning(
        "Lion: elements whose gradients have all been zero get no update, as in the paper; DeepSpeed's move by the "
        "learning rate in each step"
    )
    beta1, beta2 = betas
    return Lion(model_params, lr=lr, betas=(beta1, beta2), weight_decay=weight_decay)


def FusedLion(
    params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> OptimizerSpec:
    """Return what :func:`DeepSpeedCPULion` does."""
    return DeepSpeedCPULion(params, lr, betas, weight_decay)


_REFUSED = {
    "lamb": "DeepSpeed's clamps the trust ratio; pass optimizer=offload.LAMB(...), as in the paper, to initialize",
    "muon": "pass optimizer=torch.optim.Muon(...) to initialize",
    "onebitadam": "gradients are not compressed; take AdamW",
    "zerooneadam": "gradients are not compressed; take AdamW",
    "onebitlamb": "gradients are not compressed; take AdamW",
    "muadam": "pass optimizer=mup.MuAdam(...) to initialize",
    "muadamw": "pass optimizer=mup.MuAdamW(...) to initialize",
    "musgd": "pass optimizer=mup.MuSGD(...) to initialize",
}
_OWN: Mapping[str, Callable[..., Any]] = {
    "adagrad": DeepSpeedCPUAdagrad,
    "lion": DeepSpeedCPULion,
}


def optimizer_from(section: Named, parameters: Any) -> OptimizerSpec | torch.optim.Optimizer:
    """Return the optimizer that a configuration names.

    As in DeepSpeed, ``Adam`` is AdamW unless ``adam_w_mode`` is false, and other names are those of ``torch.optim``.

    Args:
        section: its type and params.
        parameters: parameters or groups, as in ``torch.optim``.

    Raises:
        ConfigError: it is unknown, refused, or has an option that is.
    """
    name, options = section.type, dict(section.params)
    kind = name.lower()
    if kind in _REFUSED:
        raise ConfigError(f"optimizer.type: expected one that is known here but got {name}; {_REFUSED[kind]}")
    if "max_grad_norm" in options:
        raise ConfigError("optimizer.params.max_grad_norm: expected no such option; set gradient_clipping")
    try:
        if kind in ("adam", "adamw"):
            decoupled = options.pop("adam_w_mode", True) or kind == "adamw"
            if options.pop("torch_adam", False):
                options.pop("fp32_optimizer_states", None)
                return (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **options)
            return DeepSpeedCPUAdam(parameters, adamw_mode=decoupled, **options)
        if kind in _OWN:
            made: OptimizerSpec | torch.optim.Optimizer = _OWN[kind](parameters, **options)
            return made
        found = getattr(torch.optim, name, None)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            known = ("Adam", "AdamW", "Adagrad", "Lion", "SGD")
            raise ConfigError(
                f"optimizer.type: unknown {name!r}{did_you_mean(name, known)}; {', '.join(known)}, or another class of "
                "torch.optim"
            )
        return found(parameters, **options)
    except TypeError as error:
        raise ConfigError(f"optimizer.params: expected options of {name} but got: {error}; remove others") from error
