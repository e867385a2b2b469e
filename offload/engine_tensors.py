"""The engine's calls that read and write tensors: parameters, gradients and states, by name or for a while.

Owns what they promise to users, who call them as methods of :class:`offload.Engine`. The work is done by
:mod:`offload.checkpoint.module_state` and :mod:`offload.module.gradient_tensors`. Next: :mod:`offload.engine`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.build import Parts
from offload.checkpoint.dict_memory import DictMemory
from offload.checkpoint.digests import take_digests
from offload.config import Config
from offload.life import Life
from offload.memory.budget import Tier
from offload.torch_private import IncompatibleKeys


class EngineTensors:
    """The part of :class:`offload.Engine` that reads and writes tensors. Its constructor makes the attributes."""

    module: nn.Module
    config: Config
    _parts: Parts
    _life: Life

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state dict with real tensors: parameters as CPU copies, buffers as they are.

        Copies that do not fit the host budget are on the drive, as those of ``optimizer.state_dict()``.

        Returns:
            Tensors by name, in the shapes and dtypes of the module.

        Raises:
            StateError: the engine is closed, asleep or unusable.
            swap.SwapFullError: the drive has no room for copies.
            swap.SwapError: another I/O error.

        Warns:
            UserWarning: the copies take more memory than the host budget, and there is no NVMe path.
        """
        return self._parts.tensors.state_dict()

    def deferred_state_dict(self, module: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """Return a state dict whose parameters are read from their homes when somebody needs their bytes.

        For writers of files that are larger than memory: names, joins, casts and parts of such tensors read nothing,
        ``data_ptr()`` does. What is read is the content of that moment.

        Args:
            module: a part of the module; None for all of it.

        Returns:
            Tensors by name, in the shapes and dtypes of the module.

        Raises:
            StateError: the engine is closed, asleep or unusable.
        """
        return self._parts.tensors.deferred_state(self.module if module is None else module)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Load parameters, buffers and extra states by name; masters follow the given values, moments are kept.

        A 16-bit value that equals the present parameter leaves its master as it is, so that it does not matter whether
        the optimizer's state is loaded before or after.

        Args:
            state_dict: tensors by name, on any device, in the shapes of the module; other dtypes are converted. Modules
                with ``set_extra_state`` get their states last, as they are.
            strict: refuse names that are missing, and those that the module does not have.

        Returns:
            Names in ``missing_keys`` and ``unexpected_keys``, as torch returns them. With `strict`, there are none.

        Raises:
            ConfigError: it is no mapping, or names or shapes do not fit (with `strict`, missing and unexpected names
                too).
            StateError: parameters are in use, inside :meth:`gather` or a forward. Nothing was loaded in either case.
        """
        return self._parts.tensors.load(state_dict, strict=strict)

    def gather_gradients(
        self, params: nn.Parameter | nn.Module | Iterable[nn.Parameter] | None = None, modify: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Let ``parameter.grad`` be a tensor with elements inside the ``with`` block.

        It is what the coming step would use: averaged, unscaled, times its factors; None where none has arrived.

        Args:
            params: a parameter, several, or a module; None for all that are trained.
            modify: keep what was changed: the elements, another tensor, or None. Gradients that are not changed keep
                their precision.

        Raises:
            BudgetError: they do not fit the device budget at once.
            ConfigError: `params` is something else.
            StateError: one is not trained by this engine, or was changed without `modify`, which undoes the change.
        """
        return self._parts.gradients.gather(params, modify=modify)

    def apply(
        self,
        function: Callable[[str, nn.Parameter], object],
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter] | None = None,
    ) -> None:
        """Call ``function(name, parameter)`` for parameters with real data on the device, and keep what it changes.

        They are gathered unit by unit, so the budgets hold however large the model is: for merging, averaging
        (``average[name].lerp_(parameter, 0.001)``), histograms and weight surgery.

        Args:
            function: gets the parameter's name in the module and the parameter, without gradients being recorded.
            params: a parameter, several, or a module; None for all.

        Raises:
            ConfigError, StateError: as :meth:`gather`. Units that came before keep what was changed.
        """
        self._parts.tensors.apply(function, self.module if params is None else params)

    def gather(
        self, params: nn.Parameter | nn.Module | Iterable[nn.Parameter], modify: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Give parameters real data on the device inside the ``with`` block.

        Args:
            params: a parameter, several, or a module.
            modify: write what was changed home; the fp32 masters of 16-bit elements that change become their new
                values, the others stay. Takes as much memory again as their units, to see what was changed; after an
                exception inside the block all is as before.

        Raises:
            BudgetError: they do not fit the device budget at once.
            ConfigError: `params` is something else.
            StateError: a parameter is not this engine's, or is in use already and to be modified, or one was changed
                in place without `modify` or without being gathered; what may be changed is kept. The change is undone
                with `modify`, and where there is a copy at home; elsewhere the next step refuses it again.
        """
        return self._parts.tensors.gather(params, modify=modify)

    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        """Save a Hugging Face model with its own ``save_pretrained``; holds one file in host memory at a time.

        A tied weight comes on top. Of a PEFT model, nothing but its adapters is read.

        Args:
            directory: for the files; made where it is missing.
            **kwargs: of the model's own method. ``max_shard_size`` says how large a file is: bytes, or a text like
                ``"4GB"``. Without it, files of transformers' models have 2 GB at most.

        Raises:
            StateError: the module has no ``save_pretrained``, or the engine is closed, asleep or unusable.
            swap.SwapError: an I/O error.
        """
        self._parts.tensors.save_pretrained(directory, **kwargs)

    def digests(self) -> dict[str, dict[str, str]]:
        """Return a short digest of the bits of every parameter, gradient and state: equal where the bits are equal.

        For whoever hunts a difference between two runs: the first digests that differ say where it began. They do not
        depend on budgets, homes or chunks; runs are compared that have the same model, dtype, optimizer and
        ``state_dtype``. Nothing is changed by looking: gradients wait as they did, and updates that were made during
        backward are kept. The last step is finished first, as by every reader. Takes staging buffers and a MiB.

        Several ranks call this together, and get the same, which is one process's, too. They send each other all of it;
        the bytes of a unit are in host memory meanwhile, or where the budget has no room, on the drive.

        Returns:
            Per parameter, by name, a digest of 16 hex digits per role: ``parameter`` (as stored), and of trained ones
            ``master`` (fp32, where the parameter has 16 bits), each state by its name in ``optimizer.state_dict()``
            (as stored; ``scales`` beside 8-bit ones), ``step``, and ``gradient`` where one waits for the next step (the
            sum over micro-batches, and what it was multiplied by). States without an update are zeros, and a master
            is the parameter then. Buffers of modules are not among them.

        Raises:
            StateError: the engine is closed or unusable, a step has lost the content, or gradients are gathered.
            RanksError: another rank has failed, is elsewhere, ended or not come.
            swap.SwapError: an I/O error.
        """
        manager = self._life.require_open()
        with manager.safe_point:
            self._parts.changes.adopt()
            self._parts.book.adopt()
            memory = DictMemory(self._parts.budgets[Tier.HOST], self.config.paths())
            return take_digests(manager, self._parts.steps.counts, self._parts.book.factors(), memory)
