"""What an optimizer class of torch remembers of a parameter, and needs to update it: found by letting it step.

Owns the refusal of classes that cannot work on one parameter after the other, the sizes of states and temporaries.
Everything happens in copies of the optimizer, on small tensors of its own: neither the user's model nor the optimizer
is touched. Knows nothing of units and tiers. Next: :mod:`offload.optim.torch_class` makes the steps.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.errors import ConfigError
from offload.nested import tensors_in
from offload.optim.copies import REMEDY, Copies, is_plain, own_attributes, same
from offload.planning.asked import OwnBytes
from offload.planning.roles import MOMENTS
from offload.torch_private import DispatchMode, no_functions, no_hooks_of_steps, no_modes
from offload.wrappers import is_wrapper

Options = Mapping[str, Any]  # of a param group, without its parameters

# Extents of the tensors on which a class is tried, by dimension: primes, so that the extents of a state tell which of
# the parameter's they are; the second ones in the opposite order of size, so that a minimum is not taken for an extent.
# The later pairs are for classes that do not take small tensors.
_EXTENTS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((5, 7, 3, 11, 2, 13), (17, 13, 19, 7, 23, 5)),
    ((37, 41), (101, 97)),
    ((257, 263), (277, 271)),
)
_STEPS = 2
_SAMPLE_NUMEL = 1 << 13  # of the tensors on which temporaries are measured


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """What a class may ask for of a parameter beside its content.

    Attributes:
        name: in the group's ``param_names``; None where it has none.
        attributes: those that the user has given it, as far as they are plain.
    """

    name: str | None
    attributes: dict[str, Any]

    def group(self, options: Options, parameters: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        """Return a param group of parameters that stand for this one, which get its attributes."""
        for parameter in parameters:
            vars(parameter).update(copy.deepcopy(self.attributes))
        names = {} if self.name is None else {"param_names": [self.name] * len(parameters)}
        return {**options, **names, "params": list(parameters)}


@dataclasses.dataclass(frozen=True, slots=True)
class OwnHyper:
    """What a step of a user's own class needs to know.

    Attributes:
        options: of the group.
        grad_scale: the factor on the gradient.
        make: returns copies of the optimizer as it was when the step was taken.
        members: of the group, as they were then, by the parameter's id.
    """

    options: dict[str, Any]
    grad_scale: float
    make: Copies
    members: Mapping[int, Member]


@dataclasses.dataclass(frozen=True, slots=True)
class OwnClass:
    """An optimizer whose own class makes the steps.

    Attributes:
        make: returns an instance like the user's, with these param groups and no states.
        names: states of the parameter's own shape, which are placed like Adam's moments.
        required: states that every parameter has after a step.
        size: what is kept and made outside the tiers.
    """

    make: Copies
    names: tuple[str, ...]
    required: frozenset[str]
    size: OwnBytes


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Let operations do what they do outside of all contexts: updates are made inside forwards, too."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_functions())
        stack.enter_context(no_modes())
        stack.enter_context(no_hooks_of_steps())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


def options_of(group: Options) -> dict[str, Any]:
    """Return a group's options as they are now, with one parameter at a time updated."""
    options = {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
    return {name: False if name in ("foreach", "fused", "capturable") else value for name, value in options.items()}


def members_of(group: Options) -> dict[int, Member]:
    """Return what a class may ask for of a group's parameters now."""
    names = itertools.chain(group.get("param_names") or (), itertools.repeat(None))
    members = {}
    for parameter, name in zip(group["params"], names, strict=False):
        plain = {key: value for key, value in vars(parameter).items() if is_plain(value)}
        members[id(parameter)] = Member(name, copy.deepcopy(plain))
    return members


def own_class(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None = None) -> OwnClass:
    """Find out what a user's optimizer remembers and needs.

    Args:
        optimizer: over the model's parameters; it is not changed.
        dtype: what parameters will be cast to; None where they keep theirs.

    Raises:
        ConfigError: its class needs a closure, or all parameters at once, or cannot step on a tensor of a parameter's
            number of dimensions; the text says why.
    """
    _refuse_closures(optimizer)
    states = dict(optimizer.state.items())  # empty where an engine has them
    return _tried(type(optimizer).__name__, Copies(optimizer), optimizer.param_groups, states, dtype)


def of_added(own: OwnClass, group: Options) -> OwnClass:
    """Find out what a class needs for one param group more. The states that are placed are those of before.

    Raises:
        ConfigError: as :func:`own_class`.
    """
    return _tried(own.size.name, own.make.current(), [group], {}, None, own.names)


def _tried(
    name: str,
    make: Copies,
    groups: Sequence[Options],
    states: Mapping[torch.Tensor, Mapping[str, Any]],
    dtype: torch.dtype | None,
    placed: tuple[str, ...] | None = None,
) -> OwnClass:
    found: list[tuple[torch.Tensor, _Memory, _Grouped]] = []
    memories: dict[tuple[str, str, int], _Memory] = {}
    with plain_torch(), torch.random.fork_rng(devices=[]):
        for group in groups:
            options, members = options_of(group), members_of(group)
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                grouped = _Grouped(options, members[id(parameter)])
                kind = (*grouped.key, parameter.dim())
                if kind not in memories:
                    memories[kind] = _memory(name, make, grouped, parameter, states.get(parameter) or {})
                found.append((parameter, memories[kind], grouped))
        names = _placed([(memory, parameter.numel()) for parameter, memory, _ in found]) if placed is None else placed
        kept = sum(memory.kept_bytes(parameter.shape, names) for parameter, memory, _ in found)
        step = _step_bytes(name, make, found, dtype)
    every = [frozenset(memory.keys) for _, memory, _ in found]
    required = frozenset.intersection(*every) if every else frozenset()
    return OwnClass(make, names, required, OwnBytes(name, kept, step))


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    needed = [
        parameter.name
        for parameter in inspect.signature(type(optimizer).step).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD,)
    ]
    if len(needed) > 1:  # beside self
        raise ConfigError(
            f"optimizer: expected a class whose step() needs no argument but {type(optimizer).__name__}.step needs "
            f"{', '.join(needed[1:])}: it computes the loss several times per step; {REMEDY}"
        )


# --- what is remembered -----------------------------------------------------------------------------------------------


class _Grouped:
    """What a step may depend on beside a parameter's content; of names, the first of a kind is tried."""

    def __init__(self, options: Options, member: Member) -> None:
        self._options, self._member = options, member
        self.key = repr(options), repr(member.attributes)

    def group(self, parameters: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        """Return a param group of parameters that stand for it, with options that a step may change."""
        return self._member.group(copy.deepcopy(dict(self._options)), parameters)


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    """Bytes of a tensor: `constant` times the product of these extents of the parameter."""

    constant: int
    extents: tuple[int, ...]

    def of(self, shape: Sequence[int]) -> int:
        return self.constant * math.prod(shape[extent] for extent in self.extents)


@dataclasses.dataclass(frozen=True, slots=True)
class _Memory:
    """What is remembered of a parameter with a certain number of dimensions.

    Attributes:
        keys: names of the states.
        whole: those of the parameter's shape in fp32.
        sizes: (state, size of a tensor in it).
        seeds: what the first step needs, as a function of the shape.
    """

    keys: tuple[str, ...]
    whole: tuple[str, ...]
    sizes: tuple[tuple[str, _Size], ...]
    seeds: Callable[[Sequence[int]], dict[str, Any]]

    def kept_bytes(self, shape: Sequence[int], placed: Sequence[str]) -> int:
        """Return the bytes of the states that are not placed."""
        away = set(placed) & set(self.whole)
        return sum(size.of(shape) for name, size in self.sizes if name not in away)


def _memory(
    name: str,
    make: Copies,
    grouped: _Grouped,
    parameter: torch.Tensor,
    state: Mapping[str, Any],
) -> _Memory:
    """Let a class step on tensors with as many dimensions as a parameter; `state` is what it has of that one."""
    problem: Exception | None = None
    for extents in _EXTENTS:
        if parameter.dim() > len(extents[0]) and extents is not _EXTENTS[0]:
            continue
        shapes = [(pair + (1,) * parameter.dim())[: parameter.dim()] for pair in extents]
        for seeds in (lambda shape: {}, lambda shape: _like(state, parameter.shape, shape)):
            try:
                first, second = (_try(name, make, grouped, shape, seeds) for shape in shapes)
            except ConfigError:
                raise
            except Exception as error:
                problem = problem or error
                continue
            keys = tuple(first)
            if "master" in keys:
                raise ConfigError(
                    f"optimizer: expected no state of {name} with the name 'master', which the engine gives to fp32 "
                    "masters; rename it"
                )
            whole = tuple(
                key for key in keys if parameter.dim() and all(map(_is_whole, (first[key], second.get(key)), shapes))
            )
            sizes = tuple(_sizes(name, first, second, shapes))
            return _Memory(keys, whole, sizes, seeds)
    assert problem is not None
    raise ConfigError(
        f"optimizer: expected {name} to step on dense tensors with {parameter.dim()} dimensions on the CPU, one by "
        f"one, but it raised {type(problem).__name__}: {problem}; {REMEDY}"
    ) from problem


def _like(state: Mapping[str, Any], shape: torch.Size, wanted: Sequence[int]) -> dict[str, Any]:
    """Return states as a class has made them for a parameter of `shape`, for one of the shape that is wanted."""
    made = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == shape and value.dim():
            fill = value.flatten()[0].item() if value.numel() else 0.0
            made[key] = torch.full(tuple(wanted), fill, dtype=torch.float32, device="cpu")
        else:
            made[key] = copy.deepcopy(value)
    return made


def _try(
    name: str,
    make: Copies,
    grouped: _Grouped,
    shape: tuple[int, ...],
    seeds: Callable[[Sequence[int]], dict[str, Any]],
) -> dict[str, Any]:
    """Step on two parameters of `shape` together and one by one; return the states of the first.

    Raises:
        ConfigError: the two are not independent of each other, or something else than states has changed.
    """

    def run(numbers: Sequence[int]) -> tuple[list[Any], list[dict[str, Any]]]:
        parameters = [torch.nn.Parameter(_noise(shape, number)) for number in numbers]
        group = grouped.group(parameters)
        given = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        optimizer = make([group])
        for parameter in parameters:
            if seed := seeds(shape):
                optimizer.state[parameter] = seed
        before = copy.deepcopy(own_attributes(optimizer))
        torch.default_generator.manual_seed(0)  # torch.manual_seed would reach the accelerators, too
        for step in range(_STEPS):
            for parameter, number in zip(parameters, numbers, strict=True):
                parameter.grad = _noise(shape, 10 + number + step)
            optimizer.step()
        changed = [key for key in group if key != "params" and not (key in given and same(group[key], given[key]))]
        after = own_attributes(optimizer)
        changed += [key for key in {**before, **after} if not same(before.get(key), after.get(key))]
        changed += [f"state[{key!r}]" for key in optimizer.state if not any(key is p for p in parameters)]
        if changed:
            raise ConfigError(
                f"optimizer: expected {name} to keep what it remembers in state[parameter] but a step changes "
                f"{changed[0]!r} for all of them; {REMEDY}"
            )
        return parameters, [dict(optimizer.state.get(parameter, {})) for parameter in parameters]

    together, alone = run((1, 2)), [run((1,)), run((2,))]
    for position, (parameters, states) in enumerate(alone):
        if not (same(together[0][position], parameters[0]) and same(together[1][position], states[0])):
            raise ConfigError(
                f"optimizer: expected {name} to update each parameter by itself, always in the same way, but the "
                f"result depends on other parameters or on chance; {REMEDY}"
            )
    parameter, state = alone[0][0][0], alone[0][1][0]
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors_in([parameter, state]) if tensor.numel()]
    if len(set(places)) < len(places):
        raise ConfigError(
            f"optimizer: expected states of {name} with memory of their own but two of them, or one and the parameter, "
            f"share theirs; clone what is remembered"
        )
    return state


def _noise(shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def _is_whole(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and tuple(value.shape) == tuple(shape)


def _sizes(
    name: str, first: Mapping[str, Any], second: Mapping[str, Any], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[str, _Size]]:
    """Find out how the sizes of states follow from the parameter's extents."""
    dims = range(len(shapes[0]))
    subsets = [subset for count in dims for subset in itertools.combinations(dims, count + 1)]
    for key in first:
        pairs = list(zip(tensors_in(first[key]), tensors_in(second.get(key)), strict=False))
        for left, right in pairs:
            constant, extents = left.element_size(), list[int]()
            matches = left.dim() == right.dim()
            for one, other in zip(left.shape, right.shape, strict=False):
                fitting = (
                    subset
                    for subset in subsets
                    if (one, other) == tuple(math.prod(shape[dim] for dim in subset) for shape in shapes)
                )
                subset = () if one == other else next(fitting, None)
                matches = matches and subset is not None
                constant *= one if one == other else 1
                extents += subset or ()
            if not matches:
                raise ConfigError(
                    f"optimizer: expected states of {name} whose size follows from the parameter's but {key!r} has "
                    f"{tuple(left.shape)} for {tuple(shapes[0])} and {tuple(right.shape)} for {tuple(shapes[1])}; "
                    f"{REMEDY}"
                )
            yield key, _Size(constant, tuple(extents))


def _placed(found: Sequence[tuple[_Memory, int]]) -> tuple[str, ...]:
    """Return the whole states of at least half of all elements; others (Adafactor's of vectors) are kept."""
    total = sum(numel for _, numel in found)
    weights: dict[str, int] = {}
    for memory, numel in found:
        for key in memory.whole:
            weights[key] = weights.get(key, 0) + numel
    return tuple(key for key, weight in weights.items() if weight * 2 >= total)[: len(MOMENTS)]


# --- temporaries ------------------------------------------------------------------------------------------------------


class _LiveBytes(DispatchMode):
    """Measures the most bytes of tensors that operations have made and that are alive at once."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in known:
            self._note(tensor, counts=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._note(tensor, counts=True)
        name = func.overloadpacket.__name__
        if name.endswith("mm") or "linalg" in name:  # these convert and reorder their operands inside
            inside = sum(4 * tensor.numel() for tensor in tensors_in([*args, result]))
            self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()) + inside)
        return result

    def _note(self, tensor: torch.Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self._live.setdefault(reference.cdata, (reference, storage.nbytes() if counts else 0))
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))


def _step_bytes(
    name: str,
    make: Copies,
    found: Sequence[tuple[torch.Tensor, _Memory, _Grouped]],
    dtype: torch.dtype | None,
) -> int:
    """Return what updating the parameter that needs most takes: fp32 copies, and what torch makes on the way."""
    ratios: dict[tuple[str, str, tuple[int, ...]], float] = {}
    most = 0.0
    for parameter, memory, grouped in found:
        shape, numel = tuple(parameter.shape), parameter.numel()
        key = (*grouped.key, shape)
        if key not in ratios:
            ratios[key] = _temporary_ratio(name, make, grouped, memory, shape)
        split = (dtype or parameter.dtype) == torch.bfloat16  # then its fp32 master is a copy, like the gradient always
        most = max(most, numel * (4 * (1 + split) + ratios[key]))
    return math.ceil(most)


def _temporary_ratio(
    name: str,
    make: Copies,
    grouped: _Grouped,
    memory: _Memory,
    shape: tuple[int, ...],
) -> float:
    """Return bytes of temporaries per element for a parameter of `shape`, measured on a small one with its sides."""
    shrink = min(1.0, (_SAMPLE_NUMEL / max(math.prod(shape), 1)) ** (1 / max(len(shape), 1)))
    sample = tuple(max(round(extent * shrink), min(extent, 2)) for extent in shape)
    if math.prod(sample) == 0:
        return 0.0
    parameter = torch.nn.Parameter(_noise(sample, 1))
    optimizer = make([grouped.group([parameter])])
    if seed := memory.seeds(sample):
        optimizer.state[parameter] = seed
    peak = 0
    torch.default_generator.manual_seed(0)
    for step in range(_STEPS):  # the first makes the states; they are copied to their places then
        parameter.grad = _noise(sample, 10 + step)
        with _LiveBytes([parameter, parameter.grad, *tensors_in(optimizer.state.get(parameter))]) as live:
            try:
                optimizer.step()
            except Exception as error:
                raise ConfigError(
                    f"optimizer: expected {name} to step on a tensor of shape {sample} but it raised "
                    f"{type(error).__name__}: {error}; {REMEDY}"
                ) from error
        peak = max(peak, live.peak_bytes)
    for key, value in optimizer.state.get(parameter, {}).items():  # of larger tensors, maybe, than were tried before
        if isinstance(value, torch.Tensor) and is_wrapper(value):
            raise ConfigError(
                f"optimizer: expected plain states of {name} but {key} is a {type(value).__name__}, whose bytes are in "
                f"other tensors; {REMEDY}"
            )
    return float(peak / math.prod(sample))
