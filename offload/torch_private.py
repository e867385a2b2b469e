"""What the package uses of torch that is not public: a new version of torch is checked against this file.

Owns the names and their types. Knows nothing of engines. The layers' test lets nobody else use ``torch._C``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, ValuesView
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

NO_GRAPH_TASK = -1  # torch's number where no backward pass is running

# Contexts in which nobody sees a call: not the classes of its tensors, not modes either, nor what is below.
no_subclasses = torch._C.DisableTorchFunctionSubclass
no_functions = torch._C.DisableTorchFunction
no_dispatch = torch._C._DisableTorchDispatch
no_modes = _disable_current_modes

# What a file of torch.save names to make tensors.
REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
REBUILD_TYPED_TENSOR = "torch._utils._rebuild_tensor_v3"
REBUILD_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
REBUILD_SUBCLASS = "torch._tensor._rebuild_from_type_v2"


class DispatchMode(TorchDispatchMode):
    """A mode that sees each operator of eager torch.

    ``torch.compile`` is not told to leave it alone: later versions would do so in each call, for more time than most
    operators take on the meta device.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


graph_task: Callable[[], int] = torch._C._current_graph_task_id
is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled")  # noqa: B009 - untyped
IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys  # what module.load_state_dict() returns
parse_to: Callable[..., Any] = torch._C._nn._parse_to

_CALL_MODULE = torch.nn.Module._call_impl.__code__
_MAKE_GRADIENTS = getattr(torch.autograd, "_make_grads").__code__  # noqa: B009 - untyped
_RUN_BACKWARD = getattr(torch.autograd.graph, "_engine_run_backward").__code__  # noqa: B009 - untyped
_autograd: Any = torch._C._autograd
_keep_version: Any = getattr(torch.autograd, "_unsafe_preserve_version_counter")  # noqa: B009 - untyped
may_have_hooks: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled


def top_hooks() -> SavedTensorHooks | None:
    """Return the saved-tensor hooks that are in force in this thread."""
    hooks: SavedTensorHooks | None = _autograd._top_saved_tensors_default_hooks(False)
    return hooks


def counts_tensors(pack: Callable[[torch.Tensor], Any]) -> bool:
    """Tell whether a saved-tensor hook is one of gradient checkpointing, which numbers the tensors that pass it."""
    return getattr(pack, "__module__", None) == checkpoint.__name__


StopsRepetition: type[Exception] = checkpoint._StopRecomputationError  # a repeated forward has saved all that it had

DEVICE_ERRORS: tuple[type[Exception], ...] = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))


def stops_repetitions() -> bool:
    """Tell whether a forward that gradient checkpointing runs now will be repeated until it has saved all."""
    return getattr(checkpoint, "_enable_checkpoint_early_stop", None) is not False


@contextlib.contextmanager
def compared_by(look: Callable[[torch.Tensor], object]) -> Iterator[str]:
    """Yield the ``determinism_check`` of gradient checkpointing that compares what `look` returns of what is saved."""
    name = f"offload {id(look)}"
    checkpoint._allowed_determinism_checks_to_fns[name] = look
    try:
        yield name
    finally:
        del checkpoint._allowed_determinism_checks_to_fns[name]


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Be where an ordinary tensor can be made, whatever mode or recording of torch's is in force."""
    with contextlib.ExitStack() as contexts:
        if torch.is_inference_mode_enabled():
            contexts.enter_context(torch.inference_mode(False))
        if torch._C._len_torch_dispatch_stack():
            contexts.enter_context(no_modes())
        yield


_parametrize: Any = torch.nn.utils.parametrize
_set_memory: Callable[[torch.Tensor, torch.Tensor], None] = _parametrize._maybe_set
_steps = sys.modules[torch.optim.Optimizer.__module__]
_HOOKS_OF_STEPS = {
    name: getattr(_steps, name) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
}
_hookless = [0]  # places where steps run without them
_hookless_lock = threading.Lock()


class _Here(threading.local):
    """Whether steps of this thread run without them."""

    is_hookless = False


class _ByThread(UserDict[int, Any]):
    """Hooks of a registry of torch's, which stay there; none for threads that step without."""

    def __init__(self, own: dict[int, Any]) -> None:
        self.data = own

    def values(self) -> ValuesView[Any]:
        return ({} if _here.is_hookless else self.data).values()


_here = _Here()
_HOOKS_BY_THREAD = {name: _ByThread(own) for name, own in _HOOKS_OF_STEPS.items()}


@contextlib.contextmanager
def no_hooks_of_steps() -> Iterator[None]:
    """Let optimizers of this thread step without the hooks that are registered for all of them.

    If there are any, torch gets other registries meanwhile. Its own stay as they are: a hook may run this while torch
    iterates over them.
    """
    if not any(_HOOKS_OF_STEPS.values()):
        yield
        return
    with _hookless_lock:
        _hookless[0] += 1
        vars(_steps).update(_HOOKS_BY_THREAD)
    before, _here.is_hookless = _here.is_hookless, True
    try:
        yield
    finally:
        _here.is_hookless = before
        with _hookless_lock:
            _hookless[0] -= 1
            if not _hookless[0]:
                vars(_steps).update(_HOOKS_OF_STEPS)


def below_wrappers(step: Any) -> Any:
    """Return the function of a step below what torch puts around it: hooks, schedulers' counters, ``no_grad``.

    Wrappers of others may do something of their own, so they are not looked through.
    """
    while True:
        step = getattr(step, "__func__", step)
        package = getattr(step, "__globals__", {}).get("__name__", "").partition(".")[0]
        if package != "torch" or not hasattr(step, "__wrapped__"):
            return step
        step = step.__wrapped__


def in_backward() -> bool:
    """Tell whether this thread is running a backward pass (and so a forward is a recomputation)."""
    return graph_task() != NO_GRAPH_TASK


def begins_backward_with(tensor: torch.Tensor, caller: FrameType) -> bool:
    """Tell whether torch is looking at a tensor that a backward pass is to begin with."""
    return caller.f_code is _MAKE_GRADIENTS and caller.f_locals.get("grad") is tensor


def runs_backward(thread: int | None) -> bool:
    """Tell whether a thread of this process is in a call of backward."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        if frame.f_code is _RUN_BACKWARD:
            return True
        frame = frame.f_back
    return False


def calls_under_way(module: torch.nn.Module) -> int:
    """Return how many calls of a module this thread is in."""
    frame, count = inspect.currentframe(), 0
    while frame is not None:
        count += frame.f_code is _CALL_MODULE and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


def at_end_of_backward(call: Callable[[], object]) -> None:
    """Have torch call this when the task of a backward pass that this thread is in has ended well."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine")  # noqa: B009 - untyped
    engine.queue_callback(call)


def watch_backward() -> weakref.ref[Any]:
    """Return a reference that is dead once the task of the backward pass that this thread is in is gone, well or not.

    Nothing is called then: where torch drops a task, nobody would see what a signal's handler raises.
    """
    held = functools.partial(bool)  # by the task, which calls it if it ends well
    at_end_of_backward(held)
    return weakref.ref(held)


def autocast_keeps_copies() -> bool:
    """Tell whether autocast is on, and keeps what it has made of parameters until its block ends."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()


def function_modes() -> list[Any]:
    """Return the modes of ``torch.overrides`` that are active in this thread, the outermost first."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def changes_buffers(module: torch.nn.Module) -> bool:
    """Tell whether a module is one of torch's that changes its buffers in place in each forward."""
    return isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats


def _set_other_memory(own: torch.Tensor, new: torch.Tensor) -> None:
    if own is not new or type(own).set_ is not torch.Tensor.set_:  # whose class decides by itself
        _set_memory(own, new)


def keep_versions_where_parametrized() -> None:
    """Let no parametrization give a tensor the memory that it has, which torch counts as a change in place.

    PEFT registers one in each forward of a layer whose parameter it adapts.
    """
    _parametrize._maybe_set = _set_other_memory


def is_of_a_transform(tensor: torch.Tensor) -> bool:
    """Tell whether a transform of ``torch.func`` has made a tensor, which has no memory of its own then."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def wraps_what_is_made() -> bool:
    """Tell whether a transform of ``torch.func`` wraps each tensor that is made now, as most do."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return innermost is not None and innermost.key() in (kinds.Grad, kinds.Jvp, kinds.Functionalize)


def is_transformed() -> bool:
    """Tell whether torch records or compiles what runs now, instead of just running it."""
    compiles = torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None
    return torch._C._get_tracing_state() is not None or compiles


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Return what nested tuples, lists and dictionaries contain, and the form of them for :func:`unflatten`."""
    return _pytree.tree_flatten(value)


def unflatten(leaves: list[Any], form: Any) -> Any:
    """Return new tuples, lists and dictionaries of a form, with these in them."""
    return _pytree.tree_unflatten(leaves, form)


def storage_at(address: int, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a torch storage over memory that somebody else owns."""
    construct: Callable[..., Any] = torch._C._construct_storage_from_data_pointer
    storage: torch.UntypedStorage = construct(address, device, size_bytes)
    return storage


def counted_by(counter: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `view`, of the same device as `counter`, whose changes in place count as this one's."""
    found = counter.detach()
    found.data = view
    return found


def have_one_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether a change in place of one tensor counts as one of the other, as it does for their views."""
    version = other._version
    with _keep_version(one):
        torch.autograd.graph.increment_version(one)
        return other._version != version


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and Python objects hold `storage` (the argument itself counts as one)."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


class WeakStorage:
    """What tells whether a storage is still there, without keeping it."""

    __slots__ = ("_weak",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = StorageWeakRef(storage)

    def get(self) -> torch.UntypedStorage | None:
        """Return it, None where it is gone."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return found


def storage_place(tensor: torch.Tensor) -> int:
    """Return what tells the storage of `tensor` from others that are alive, on the meta device, too."""
    return int(tensor.untyped_storage()._cdata)


def default_store() -> Any:
    """Return the store of the default process group, through which its processes have met."""
    return torch.distributed.distributed_c10d._get_default_store()


def timeout_of(group: Any) -> float:
    """Return the seconds that a process group, or the default one, was given as its timeout.

    0 where it was given none: a group has torch's own of 30 minutes then. Nor does every back end tell.
    """
    c10d = torch.distributed.distributed_c10d
    group = c10d._get_default_group() if group is None else group
    longest_s = 0.0
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout = group._get_backend(device).options._timeout
            if timeout != c10d.default_pg_timeout:
                longest_s = max(longest_s, timeout.total_seconds())
    return longest_s


def start_all_gather(group: Any, full: torch.Tensor, own: torch.Tensor) -> Any:
    """Return the work that fills `full` with each rank's `own`, which may be its place in `full`.

    `group` is one that torch has not registered under a name: those cannot be made anew in place of one that failed.
    """
    return group._allgather_base(full, own)
