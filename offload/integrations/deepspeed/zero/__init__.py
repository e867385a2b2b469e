"""``deepspeed.zero``: models that are made without being held in memory, and parameters that are gathered for a while.

Next: :mod:`offload.integrations.deepspeed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.mapped import memory_of
from offload.errors import ConfigError
from offload.initialisation import init
from offload.integrations.deepspeed.config import nvme_path_of
from offload.integrations.deepspeed.engine import DeepSpeedEngine, engine_of
from offload.integrations.deepspeed.refusals import missing
from offload.integrations.libraries import processes

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]

logger = logging.getLogger(__name__)


class Init(contextlib.AbstractContextManager["Init"]):
    """Makes models inside the ``with`` block on the drive, with the bits of ordinary construction.

    See :func:`offload.init`. The folder is the configuration's ``nvme_path``, or that for temporary files. If that is
    in memory itself, models are made in memory, which a warning says.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
        **others: Any,
    ) -> None:
        """Prepare.

        Args:
            module: made already: it stays as it is.
            data_parallel_group: has to be None: it is that of all processes.
            mem_efficient_linear: not heeded.
            remote_device: not heeded: the engine places parameters.
            pin_memory: not heeded.
            config_dict_or_path: where ``nvme_path`` is looked for.
            config: another name of `config_dict_or_path`.
            enabled: False does nothing.
            dtype: that floating point tensors are made with; None: torch's default.
            mpu: has to be None.
            **others: of DeepSpeed; not heeded if they are off.

        Raises:
            ConfigError: a group is given, or what is asked for would change results.
        """
        groups = {"data_parallel_group": data_parallel_group, "mpu": mpu, **others}
        for name, value in groups.items():
            if value not in (None, False) and name not in ("tensor_overrides", "param_swapper"):
                raise ConfigError(f"zero.Init: expected {name} to be off but got {value!r}; leave it out")
        self._enabled = enabled and module is None
        self._dtype = dtype
        self._path = nvme_path_of(config_dict_or_path if config is None else config)
        self._open: list[contextlib.ExitStack] = []

    def __enter__(self) -> Init:
        """Begin."""
        with contextlib.ExitStack() as stack:
            if self._enabled:
                if self._dtype is not None:
                    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                    torch.set_default_dtype(self._dtype)
                folder = Path(self._path or tempfile.gettempdir())
                if self._path is None and memory_of(folder) is not None:
                    logger.warning(
                        "zero.Init: %s is in memory, and so is the model; give a configuration with nvme_path", folder
                    )
                else:
                    stack.enter_context(init(folder))
            self._open.append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


class GatheredParameters(contextlib.AbstractContextManager[None]):
    """Gives parameters real data inside the ``with`` block; see :meth:`offload.Engine.gather`.

    Parameters that no engine has are left as they are.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """Prepare.

        Args:
            params: a parameter, or several.
            modifier_rank: the process whose changes all take over and write back, masters included; None: changes are
                refused.
            fwd_module: not heeded.
            enabled: False does nothing.

        Raises:
            ConfigError: there is no process with `modifier_rank`.
        """
        if modifier_rank is not None and modifier_rank not in range(processes()):
            raise ConfigError(f"modifier_rank: expected one of {processes()} processes but got {modifier_rank}; pass 0")
        self._params: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        self._modifier = modifier_rank
        self._enabled = enabled
        self._open: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        """Gather.

        Raises:
            BudgetError, StateError: see :meth:`offload.Engine.gather`.
        """
        with contextlib.ExitStack() as stack:
            places: dict[Any, list[nn.Parameter]] = {}
            for parameter in self._params if self._enabled else ():
                engine = engine_of(parameter)
                if engine is not None:
                    places.setdefault(engine, []).append(parameter)
            for engine, parameters in places.items():
                stack.enter_context(engine.gather(parameters, modify=self._modifier is not None))
                if self._modifier is not None:
                    stack.push(_Taking(engine, parameters, self._modifier).end)
            self._open.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


@dataclasses.dataclass(frozen=True, slots=True)
class _Taking:
    """Gathered parameters, of which all processes take over what one of them has."""

    engine: DeepSpeedEngine
    parameters: list[nn.Parameter]
    rank: int

    def end(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Take over, or learn of an error in one process's block."""
        self.engine.take_from(self.rank, self.parameters, error)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that another module uses is found when it is read."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: see :func:`register_external_parameter`."""


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.zero", name, __all__)
