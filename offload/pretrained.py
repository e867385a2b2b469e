"""Makes an engine of a checkpoint on the drive, without the model in memory in between.

Owns the one call. What transformers makes of the files is in :mod:`offload.checkpoint.pretrained`; the engine loads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from offload.checkpoint.pretrained import read_pretrained
from offload.config import Config
from offload.engine import Engine
from offload.spec import OptimizerSpec


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    optimizer: OptimizerSpec | None = None,
    cls: type | None = None,
    dtype: str | torch.dtype = "auto",
    model_options: Mapping[str, Any] | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **options: Any,
) -> Engine:
    """Return an engine with a model of transformers that is loaded from safetensors straight into its tiers.

    The same as ``Engine(cls.from_pretrained(path, dtype=dtype, **model_options), optimizer, **options)``, with the same
    bits, for models that do not fit in memory. What is unexpected or missing is logged; the latter is initialised.
    The module is in evaluation mode, as ``from_pretrained`` leaves it: to train, call ``engine.train()``.

    Args:
        path: a folder with ``config.json`` and ``model.safetensors``, or shards with their index.
        optimizer: as in :class:`offload.Engine`, of this package. For one of torch, which needs the model's parameters,
            make the model on the meta device, and pass `weights` to the engine.
        cls: class of transformers, perhaps an ``Auto`` one; None takes the one that the config names.
        dtype: of the model; ``"auto"`` for what the config says, or without that the files. Parameters are cast as they
            are read. To keep the full precision of the files as masters, leave it, and pass ``config={"dtype": ...}``.
        model_options: further arguments of ``from_pretrained``, such as ``attn_implementation`` or
            ``ignore_mismatched_sizes``, or of its config. None that chooses files.
        config: options as in :class:`offload.Engine`.
        **options: options of :class:`offload.Config`, on top of `config`; `stage`, `group` and `reference` as in
            :class:`offload.Engine`.

    Returns:
        The engine; its ``module`` is the model.

    Raises:
        ConfigError: files or options cannot be used; names file and tensor. Or transformers is not installed. See
            :class:`offload.Engine`, too.
        BudgetError: the budgets cannot hold the model; nothing has been loaded then.
        swap.SwapError: the NVMe path is missing, not writable, or full.
    """
    with torch.inference_mode(False):  # whoever only evaluates may be inside of it; the parameters are ordinary ones
        model, weights = read_pretrained(path, cls, dtype, model_options or {})
        return Engine(model, optimizer, config, weights=weights, **options)  # type: ignore[arg-type]
