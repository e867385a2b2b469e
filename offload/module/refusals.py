"""What an engine cannot have, refused by name and with the remedy before anything is moved.

Owns the checks on a user's process, module, tensors, batches and losses, and their texts. Looks only: nothing is
changed, and no library is imported for it, classes of other libraries are known by their names. Next:
:mod:`offload.module.hooks`, which ties in what passes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offload.classes import is_a, package_of
from offload.errors import SAVE_FIRST, ConfigError, NonFiniteError, StateError
from offload.memory.arena import HOST
from offload.nested import tensors_in
from offload.planning.partition import UnitTree
from offload.wrappers import has_own_storage, inner_tensors, is_wrapper

LOST = (
    "expected content but it has none, its engine was closed without restoring it (it did not fit the budgets, or "
    "could not be read); load the model again, or close with restore=True"
)
OWN_RANKS = "offload.Engine(..., stage=1, 2, 3) has several ranks of its own"

# Classes of torch.distributed that a module gets, and who gives it them.
_SHARED_OUT = {
    "FullyShardedDataParallel": "FullyShardedDataParallel (FSDP)",
    "ReplicateModule": "replicate",
    "FSDPModule": "fully_shard (FSDP2)",
    "DDP": "replicate (DDP)",
}


_OF_HOOKS = "saved tensor hooks"  # in torch's refusal, which does not say whose they are


def explain_transform(error: BaseException) -> None:
    """Say whose hooks torch means where it refuses a transform of ``torch.func`` inside a forward.

    Raises:
        StateError: from `error`, if it is that.
    """
    if isinstance(error, RuntimeError) and "torch.func" in (text := str(error)) and _OF_HOOKS in text:
        raise StateError(
            "model: a forward cannot use torch.func (grad, vjp, jacrev, hessian) while an engine has it, for what "
            "autograd keeps has to be seen; use torch.autograd.grad or torch.func.jvp there, or close the engine first"
        ) from error


# --- the process ------------------------------------------------------------------------------------------------------


def refuse_ranks() -> None:
    """Refuse to be one of several processes that train together: gradients are not reduced between them.

    Raises:
        StateError: there are others.
    """
    text = os.environ.get("WORLD_SIZE", "").strip()
    counts = {"in WORLD_SIZE": int(text) if text.isdecimal() else 1}
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        counts["in the process group"] = torch.distributed.get_world_size()
    for source, count in counts.items():
        if count > 1:
            raise StateError(
                f"engine: expected one process but got {count} {source}, which would train apart; pass stage=1 to "
                'offload.Engine for gradients and states in slices, stage="apart" to evaluate in each process as a '
                "whole, or start one process, without torchrun or accelerate launch"
            )


def refuse_child(process: int) -> None:
    """Refuse to be in a child that was forked: the engine's memory and I/O are those of its parent.

    Args:
        process: identity of the process that made the engine.

    Raises:
        StateError: this is another one.
    """
    if os.getpid() != process:
        raise StateError(
            f"engine: expected the process that made it ({process}) but got one forked from it ({os.getpid()}), which "
            "has neither its memory nor its drive; read parameters before the fork, or hand engine.state_dict() over"
        )


# --- the module -------------------------------------------------------------------------------------------------------


def refuse_model(model: nn.Module) -> None:
    """Refuse modules whose calls or gradients are not seen, and tensors whose elements cannot be moved.

    Raises:
        ConfigError: a tensor is of a kind that cannot be moved.
        StateError: somebody else calls, moves or reduces what the engine would.
    """
    for path, module in model.named_modules():
        _refuse_placed_by_others(f"model {type(model).__name__}", path, module)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"module {path or type(model).__name__}: expected weights that forwards leave alone but max_norm="
                f"{module.max_norm} lets each forward renormalise them; set it to None, and renormalise in engine.apply"
            )
        if next(module.parameters(), None) is not None:
            _refuse_called_by_others(module)
    linear = {id(part.weight) for part in model.modules() if is_a(part, "bitsandbytes", "Linear8bitLt")}
    for name, parameter in model.named_parameters():
        if is_wrapper(parameter) and not is_a(parameter, "torch", "DTensor"):
            _refuse_wrapper(name, parameter)
        else:
            _refuse_tensor(f"parameter {name}", parameter)
        if is_a(parameter, "bitsandbytes", "Int8Params") and id(parameter) not in linear:
            raise ConfigError(
                f"parameter {name}: expected one that nobody else keeps but got {_class_of(parameter)} outside a "
                "Linear8bitLt; load the model with 4-bit modules"
            )
        if parameter.is_meta and type(parameter) is not nn.Parameter:
            raise ConfigError(
                f"parameter {name}: expected a torch.nn.Parameter on the meta device but got {_class_of(parameter)}, "
                "which nothing here can initialise; load the model to the CPU first"
            )
    for name, buffer in model.named_buffers():
        _refuse_tensor(f"buffer {name}", buffer, dense=False)


def refuse_reference(model: nn.Module, reference: object) -> None:
    """Refuse a reference model that cannot be evaluated beside the model.

    Raises:
        ConfigError: it is no module, the model itself, has a parameter that is trained, or is on the meta device, or as
            :func:`refuse_model`.
        StateError: as :func:`refuse_model`.
    """
    if not isinstance(reference, nn.Module) or reference is model:
        got = "the model itself" if reference is model else type(reference).__name__
        raise ConfigError(
            f"reference: expected another torch.nn.Module than the model but got {got}; pass copy.deepcopy(model), or "
            "leave it out"
        )
    refuse_model(reference)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for name, parameter in reference.named_parameters():
        if id(parameter) in trained:
            raise ConfigError(
                f"reference: expected parameters that nobody trains but {name} is one of the model's; pass "
                "copy.deepcopy(model)"
            )
        if parameter.is_meta:
            raise ConfigError(
                f"reference: expected values but parameter {name} is on the meta device; load it to the CPU first"
            )


def _refuse_called_by_others(module: nn.Module) -> None:
    subject = f"model {type(module).__name__}"
    if isinstance(module, torch.jit.ScriptModule):
        raise StateError(
            f"{subject}: is TorchScript, which runs without the hooks of its modules; wrap the module that it was made "
            "of"
        )
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        raise StateError(
            f"{subject}: is compiled (torch.compile), which cannot be had together with parameters that come and go; "
            "wrap the module as it was before"
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise StateError(
            f"{subject}: copies parameters and reduces gradients itself, before the engine has them; wrap the .module "
            "inside it"
        )
    for name, function in _SHARED_OUT.items():
        if is_a(module, "torch", name):
            raise StateError(
                f"{subject}: expected an ordinary module but got one of {function}, which moves parameters and reduces "
                f"gradients itself, and {OWN_RANKS}; wrap the module as it was before"
            )


def _refuse_placed_by_others(subject: str, path: str, module: nn.Module) -> None:
    if "_hf_hook" in vars(module):
        raise StateError(
            f"{subject}: expected parameters that nobody else moves but got a hook of accelerate "
            f"({type(module._hf_hook).__name__}) at {path or 'the model itself'}; load the model without device_map, "
            "or take the hooks off with accelerate.hooks.remove_hook_from_submodules(model)"
        )
    placed = vars(module).get("hf_device_map")
    devices = sorted({_device_name(device) for device in placed.values()}) if isinstance(placed, dict) else []
    if len(devices) > 1 or "disk" in devices:
        raise StateError(
            f"{subject}: expected all of it on one device but got it on {', '.join(devices)} (hf_device_map); load the "
            "model without device_map"
        )


def _device_name(device: Any) -> str:
    """Return what a device in a device map is called, of which an integer is one of CUDA."""
    return f"cuda:{device}" if isinstance(device, int) else "cuda:0" if str(device) == "cuda" else str(device)


# --- its tensors ------------------------------------------------------------------------------------------------------


def unreadable(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is whose elements do not lie at an address in their order; None where they do.

    Of one on the meta device this says nothing.
    """
    if is_lazy(tensor):
        return "one that has no shape yet"
    if is_a(tensor, "torch", "DTensor"):
        return "a DTensor, of which several ranks have parts"
    if _is_scattered(tensor):
        return f"one that is {'nested' if tensor.is_nested else 'quantized' if tensor.is_quantized else tensor.layout}"
    if not has_own_storage(type(tensor)):
        return f"{_class_of(tensor)}, which has operations of its own (__torch_dispatch__)"
    return None


def _is_scattered(tensor: torch.Tensor) -> bool:
    """Tell whether torch itself keeps the elements in several tensors, or scaled."""
    return tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided


def _class_of(tensor: torch.Tensor) -> str:
    return f"{package_of(type(tensor))} {type(tensor).__name__}"


def _refuse_tensor(subject: str, tensor: torch.Tensor, *, dense: bool = True) -> None:
    """Refuse a tensor of a module that cannot be moved; without `dense`, one of another layout may pass."""
    kind = unreadable(tensor)
    if kind is None and dense and tensor.is_inference():  # a buffer may be one
        raise ConfigError(
            f"{subject}: expected a tensor whose changes torch counts but it was made under torch.inference_mode(); "
            "make the model outside of it, and call the engine inside"
        )
    if kind is None:
        return
    if is_lazy(tensor):
        remedy = "run one forward first, which finds the shape of lazy modules out"
    elif is_a(tensor, "torch", "DTensor"):
        remedy = f"{OWN_RANKS}, tensor parallelism is not supported; wrap the module as it was before"
    elif _is_scattered(tensor):
        if not dense:
            return
        remedy = "convert it to an ordinary dense tensor first"
    elif is_wrapper(tensor):
        remedy = "register it as a frozen torch.nn.Parameter, or take its dequantize()"
    else:
        remedy = "make an ordinary torch.nn.Parameter of it"
    raise ConfigError(f"{subject}: expected elements in memory of its own but got {kind}; {remedy}")


def _refuse_wrapper(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter that is made of inner tensors where it is trained, or an inner one cannot be moved."""
    if parameter.requires_grad:
        raise ConfigError(
            f"parameter {name}: expected quantized weights to be frozen but got {_class_of(parameter)} with "
            "requires_grad=True; call requires_grad_(False) on it, and train adapters, or train the model as it was "
            "before it was quantized"
        )
    for inner, tensor in inner_tensors(parameter):
        _refuse_tensor(f"parameter {name}: its inner tensor {inner}", tensor)
        if not tensor.is_contiguous() and not tensor.is_meta:
            raise ConfigError(
                f"parameter {name}: expected inner tensors without gaps, in the order of their elements, but {inner} "
                f"of {_class_of(parameter)} has strides {tensor.stride()}; quantize the model with another "
                "configuration"
            )


def refuse_shared(tree: UnitTree, owner_of: Callable[[nn.Parameter], str | None]) -> None:
    """Refuse parameters that an engine on other modules has: each would train them with gradients of its own only.

    Args:
        tree: units of the model.
        owner_of: returns what a parameter is called in the engine that has it, None where none has.

    Raises:
        StateError: there is one.
    """
    for unit, parameters in zip(tree.units, tree.parameters, strict=True):
        for slot, parameter in zip(unit.slots, parameters, strict=True):
            owner = owner_of(parameter)
            if owner is not None:
                raise StateError(
                    f"parameter {slot.name}: expected one that no other engine has but got {owner}; wrap one "
                    "module that contains both, or close that engine first, which offload.Engine.of(model) returns; "
                    f"{SAVE_FIRST}"
                )


def refuse_used(tree: UnitTree, is_lost: Callable[[nn.Parameter], bool]) -> None:
    """Refuse parameters without content, and with a gradient.

    Args:
        tree: units of the model.
        is_lost: tells whether a parameter's content went with its engine.

    Raises:
        StateError: there is one.
    """
    for unit, parameters in zip(tree.units, tree.parameters, strict=True):
        for slot, parameter in zip(unit.slots, parameters, strict=True):
            if is_lost(parameter):
                raise StateError(f"parameter {slot.name}: {LOST}")
            if parameter.grad is not None:
                raise StateError(
                    f"parameter {slot.name}: has a gradient from before the engine; call model.zero_grad() first"
                )


# --- what a pass gets -------------------------------------------------------------------------------------------------


def refuse_batch(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> None:
    """Refuse arguments of a forward that are on another device than the engine's.

    Numbers and lengths may be in host memory, where some of torch's functions want them: tensors without a dimension,
    and integers with one. Torch refuses those that have to be elsewhere.

    Raises:
        StateError: one is; names it.
    """
    for name, argument in (*enumerate(args), *kwargs.items()):
        for value in tensors_in(argument):
            if value.device != device and not (value.device == HOST and _may_be_lengths(value)):
                raise StateError(
                    f"batch: argument {name!r} is on {value.device} but the engine computes on {device}; "
                    "move it with .to(engine.device), or call engine.module(...) if it has to be there"
                )


def _may_be_lengths(tensor: torch.Tensor) -> bool:
    counts = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return tensor.dim() == 0 or (tensor.dim() == 1 and counts)


def refuse_loss(loss: object, last: torch.Tensor | None, *, several_ranks: bool = False) -> None:
    """Refuse what backward cannot begin from.

    Args:
        loss: what the user gave.
        last: the loss whose graph the last backward has used up; None where nobody can have it any more.
        several_ranks: all of them drop the gradients that wait.

    Raises:
        NonFiniteError: it is NaN or infinite, and on the CPU: elsewhere, looking at it would wait for the device.
        StateError: it is no tensor, or `last` again.
    """
    if not isinstance(loss, torch.Tensor):
        raise StateError(f"backward: expected the loss as a tensor but got {type(loss).__name__}; pass output.loss")
    if loss is last:
        raise StateError("backward: called twice for the same loss; run the forward again, or pass retain_graph=True")
    if loss.device == HOST and not torch.isfinite(loss.detach()).all():
        unchanged = "nothing was changed"
        if several_ranks:
            unchanged = "no parameter was changed, and all ranks have dropped their gradients since the last step"
        raise NonFiniteError(
            f"loss: expected a finite value but got {loss.detach().flatten()[0].item()}; {unchanged}. "
            "Look at the batch and the learning rate, or for labels that are all ignored"
        )


def not_there(kind: str, name: str) -> str:
    """Return what is said of an attribute that an engine has not, as libraries ask for it that expect a module.

    Args:
        kind: name of the engine's class.
        name: of the attribute.
    """
    text = f"{kind!r} object has no attribute {name!r}"
    if not hasattr(nn.Module, name) and name not in nn.Module().__dict__:
        return text
    return (
        f"engine: expected a torch.nn.Module, which has {name}, but got an offload.Engine; pass engine.module, or take "
        "the door of the library: offload.hf.OffloadTrainer, offload.accelerate.prepare(accelerator, engine, ...), "
        f"offload.lightning.OffloadStrategy ({text})"
    )
