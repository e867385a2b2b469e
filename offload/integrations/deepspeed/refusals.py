"""What DeepSpeed has and this door has not, and what to use instead.

Owns the remedies by name, and the errors: of a name that is read, and of a module that is imported. Both are errors of
this package, and those that Python raises there. So ``hasattr`` and ``except ImportError`` answer as they should.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib.abc import MetaPathFinder
from typing import Any

from offload.errors import ConfigError, did_you_mean

_ONE_PROCESS = "each process has all of the model: "
_WEIGHTS = "weights would be others: leave it out"

# A name below ``deepspeed``, or its beginning if it ends in "_" -> what to use instead.
REMEDIES: Mapping[str, str] = {
    "DeepSpeedConfig": "deepspeed.config_from(config) reads and explains one",
    "DeepSpeedHybridEngine": "engine.module.generate works during training",
    "InferenceEngine": "offload.Engine(model) evaluates a model of any size",
    "OnDevice": 'take torch.device("meta") as a context, and offload.Engine(model, weights=...)',
    "PipelineModule": _ONE_PROCESS + "wrap an ordinary module",
    "accelerator.get_accelerator()": "take engine.device, engine.stats(), or torch's own function",
    "autotuning": "leave it out: budgets are planned",
    "checkpoint": "engine.load_checkpoint reads DeepSpeed's folders; python -m offload checkpoint converts them",
    "checkpointing.": "torch.utils.checkpoint keeps the random numbers; leave it out",
    "comm.": "use torch.distributed after deepspeed.init_distributed(), or leave it out",
    "compile": "leave it out: parameters come and go",
    "compression": _WEIGHTS,
    "elasticity": "set the batch sizes",
    "env_report": "python -m offload doctor reports the machine",
    "git_version_info": "take deepspeed.__version__",
    "inference": "offload.Engine(model) evaluates a model of any size",
    "init_inference": "offload.Engine(model) evaluates a model of any size",
    "launcher": "start the script with torchrun, or one process with python",
    "linear": "take PEFT: adapters over a frozen base that is offloaded",
    "model_implementations": "take the model of transformers",
    "module_inject": _ONE_PROCESS + "leave it out",
    "moe": "take the model's own experts: they are offloaded like other parameters",
    "monitor": "log engine.stats(), engine.get_lr() and engine.get_global_grad_norm() yourself",
    "nebula": "save_checkpoint writes the files itself",
    "ops.aio": "swap.SwapStore reads and writes tensors on NVMe",
    "ops.fp_quantizer": _WEIGHTS,
    "ops.lamb": "take offload.LAMB(...), as in the paper; DeepSpeed's clamps the trust ratio",
    "ops.op_builder": "kernels are built with the package: leave it out",
    "ops.random_ltd": "leave it out: layers see all tokens",
    "ops.sparse_attention": "take the model's own attention",
    "ops.transformer": "take torch.nn.TransformerEncoderLayer, or the model of transformers",
    "pipe": _ONE_PROCESS + "wrap an ordinary module",
    "profiling": "take torch.profiler and torch.utils.flop_counter",
    "runtime.activation_checkpointing": "take deepspeed.checkpointing, or torch.utils.checkpoint",
    "runtime.bf16_optimizer": 'set "bf16": {"enabled": true} in the configuration',
    "runtime.compiler": "leave it out: parameters come and go",
    "runtime.config": "deepspeed.config_from(config) reads and explains a configuration",
    "runtime.data_pipeline": "choose the data in the script",
    "runtime.fp16": "AdamW steps; gradients are not compressed; fp16 is of the configuration",
    "runtime.hybrid_engine": "engine.module.generate works during training",
    "runtime.pipe": _ONE_PROCESS + "wrap an ordinary module",
    "runtime.zero.config": "deepspeed.config_from(config) reads and explains a configuration",
    "runtime.zero.stage3": "print(engine.plan) says what is needed, and where it lives",
    "runtime.zero.stage_1_and_2": "print(engine.plan) says what is needed, and where it lives",
    "sequence": _ONE_PROCESS + "leave it out",
    "tp_model_init": _ONE_PROCESS + "leave it out",
    "utils.OnDevice": 'take torch.device("meta") as a context, and offload.Engine(model, weights=...)',
    "utils.groups": "all processes are one data-parallel group: take deepspeed.comm",
    "utils.nvtx": "torch.profiler shows what the engine does",
    "utils.safe_get_local_": "take safe_get_full_*",
    "utils.safe_set_local_": "take safe_set_full_*",
    "utils.timer": "take engine.stats(), or torch.profiler",
    "utils.zero_to_fp32": "engine.import_checkpoint, or python -m offload checkpoint export",
    "zero.TiledLinear": "units are split where the device budget asks for it: take torch.nn.Linear",
    "zero.TiledLinearReturnBias": "units are split where the device budget asks for it: take torch.nn.Linear",
    "zero.unwrap_model_for_generation": "engine.module.generate works as it is",
}


class MissingNameError(ConfigError, AttributeError):
    """A name of DeepSpeed's that this door has not; the text has the remedy."""


class MissingModuleError(ConfigError, ModuleNotFoundError):
    """A module of DeepSpeed's that this door has not, or a name imported from one; the text has the remedy."""


def missing(home: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return what to raise for a name that a module has not.

    Args:
        home: the module, as scripts call it.
        name: what was asked for.
        known: what the module has.
    """
    remedy = _remedy(f"{home}.{name}")
    names = ", ".join(known)
    if remedy is None:
        return AttributeError(f"{home} has no {name!r} here{did_you_mean(name, known)}; it has {names}")
    return MissingNameError(f"{home}.{name}: expected one of {names}; {remedy}")


def _remedy(path: str) -> str | None:
    below = path.removeprefix("deepspeed.")
    for start, remedy in REMEDIES.items():
        if below == start or below.startswith(start if start[-1] in "._" else f"{start}."):
            return remedy
    return None


class Refusals(MetaPathFinder):
    """Answers imports below this door that nobody else has found; leaves all others alone."""

    def __init__(self, *homes: str) -> None:
        """Prepare.

        Args:
            *homes: names under which the door is imported.
        """
        self._homes = tuple(f"{home}." for home in homes)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Refuse a module of the door, or what is imported from one.

        Raises:
            MissingModuleError: it is one.
        """
        home = next((home for home in self._homes if fullname.startswith(home)), None)
        if home is None:
            return
        below, _, name = f"deepspeed.{fullname.removeprefix(home)}".rpartition(".")
        parent = sys.modules.get(fullname.rpartition(".")[0])
        error = missing(below, name, getattr(parent, "__all__", ()))
        raise MissingModuleError(str(error)) from None
