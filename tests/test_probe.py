"""What is found out about an optimizer class by letting it step, and which classes are refused."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import logging
import math
import random
import re
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offload.errors import ConfigError
from offload.optim.probe import options_of, own_class, plain_torch
from offload.optim.rules import rule_of
from offload.planning.roles import MOMENTS


def parameters(*shapes: Sequence[int]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(tuple(shape))) for shape in shapes or ((6, 4), (4,))]


class Plain(torch.optim.Optimizer):
    """The frame of the classes below: `update` gets a parameter, its state and its group."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p -= group["lr"] * p.grad


class CountsInTheGroup(Plain):
    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["steps"] = group.get("steps", 0) + 1
        p -= group["lr"] / group["steps"] * p.grad


class CountsInTheGroupsLr(CountsInTheGroup):
    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["lr"] *= 0.5
        p -= group["lr"] * p.grad


class CountsInItself(Plain):
    seen = 0

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.seen += 1
        p -= group["lr"] / self.seen * p.grad


class Scheduled(Plain):
    """Has something in itself that a step changes: `seen` is asked for a number from 1 on."""

    def __init__(self, parameters: Iterable[nn.Parameter], held: Any, seen: Any) -> None:
        super().__init__(parameters)
        self._held, self._seen = held, seen

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p -= group["lr"] / self._seen(self, p) * p.grad


class Sched:
    """Counts, in a slot."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0

    def next(self) -> int:
        self.steps += 1
        return self.steps


def count_privately(self: Any, p: torch.Tensor) -> int:
    self._held += 1
    return int(self._held)


def remember_privately(self: Any, p: torch.Tensor) -> float:
    mean = self._held[p] = self._held.get(p, 0.0) + p.grad.abs().mean().item()  # type: ignore[union-attr]
    return 1 + mean


def count_in_the_states(self: Any, p: torch.Tensor) -> int:
    self.state["seen"] = self.state.get("seen", 0) + 1
    return int(self.state["seen"])


def append(self: Any, p: torch.Tensor) -> int:
    self._held.append(p.grad)
    return len(self._held)


COUNTING: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "_held": (lambda: 0, count_privately),
    "_held, by parameter": (dict, remember_privately),
    "_held, in an object": (Sched, lambda self, p: self._held.next()),
    "_held, deep down": (
        lambda: [{"a": types.SimpleNamespace(x=Sched())}],
        lambda self, p: self._held[0]["a"].x.next(),
    ),
    "_held, in a deque": (collections.deque, append),
    "_held, in an iterator": (lambda: itertools.count(1), lambda self, p: next(self._held)),
    "_held, in a set": (lambda: {0}, lambda self, p: self._held.add(max(self._held) + 1) or max(self._held)),
    "_held, in a tensor": (lambda: types.SimpleNamespace(x=torch.zeros(())), lambda self, p: self._held.x.add_(1)),
    "_held, of a generator": (lambda: random.Random(1), lambda self, p: 1 + self._held.random()),
    "_late": (lambda: 0, lambda self, p: setattr(self, "_late", getattr(self, "_late", 0) + 1) or self._late),
    "state['seen']": (lambda: 0, count_in_the_states),
}


@pytest.mark.parametrize("where", COUNTING)
def test_what_a_class_remembers_in_itself_is_found_wherever_it_is(where: str) -> None:
    make, seen = COUNTING[where]
    name = where.partition(",")[0]
    with pytest.raises(ConfigError, match=r"what it remembers in state\[parameter\] but a step changes") as caught:
        own_class(Scheduled(parameters(), make(), seen))
    assert name in str(caught.value)


class Itself:
    """Has itself, and another one that has it."""

    def __init__(self) -> None:
        self.me, self.other = self, [self]


CONSTANTS: dict[str, Callable[[], Any]] = {
    "object": lambda: types.SimpleNamespace(gain=2.0, inner=Sched()),
    "itself": Itself,
    "by object": lambda: {Sched(): 1, nn.Linear: 2, torch.float32: 3},
    "set": lambda: {Sched(), 1, "a"},
    "not a number": lambda: [math.nan, 1 + 2j, None, b"x"],
    "functions": lambda: [functools.partial(max, 1), math.sqrt, lambda: 1, Sched().next],
    "module": lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
    "generators": lambda: [random.Random(1), itertools.count(), torch.Generator()],
    "torch's": lambda: [torch.device("cpu"), torch.Size([1]), torch.nn.Parameter(torch.ones(2))],
    "without content": lambda: [torch.empty(2, device="meta")],
    "numpy's": lambda: [numpy.ones(3), numpy.float32(2), numpy.random.default_rng(0)],
    "others": lambda: [re.compile("a"), logging.getLogger("a"), collections.OrderedDict(a=1), Path("a"), range(3)],
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_class_may_have_constants_of_all_kinds(name: str) -> None:
    held = CONSTANTS[name]()
    assert own_class(Scheduled(parameters(), held, lambda self, p: 1 if self._held is not None else 2)).names == ()


class GlobalNorm(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        members = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in members]).norm()
        for p in members:
            p -= 0.1 * p.grad / norm


class Noise(Plain):
    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p -= group["lr"] * torch.randn_like(p) * p.grad


class KeepsParameters(Plain):
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.members = [p for group in self.param_groups for p in group["params"]]


class OddState(Plain):
    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["low"] = p.new_zeros(min(p.shape))


class NamedMaster(Plain):
    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["master"] = p.clone()


class Shares(Plain):
    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["p"] = p.detach()


class Large(Plain):
    """Wants matrices with at least 32 rows."""

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["blocks"] = p.unfold(0, 32, 1).amax(-1).new_zeros(p.shape)


REFUSED: dict[str, tuple[Any, str]] = {
    "lbfgs": (torch.optim.LBFGS, r"step\(\) needs no argument but LBFGS.step needs closure.*use offload.AdamW, with"),
    "sparse": (torch.optim.SparseAdam, "SparseAdam to step on dense tensors.*does not support dense gradients"),
    "group": (CountsInTheGroup, "a step changes 'steps' for all of them"),
    "group's lr": (CountsInTheGroupsLr, "a step changes 'lr' for all of them"),
    "attribute": (CountsInItself, "a step changes 'seen' for all of them"),
    "norm": (GlobalNorm, "the result depends on other parameters or on chance"),
    "noise": (Noise, "the result depends on other parameters or on chance"),
    "parameters": (KeepsParameters, "has some in an attribute of its own"),
    "shares": (Shares, "or one and the parameter, share theirs; clone"),
    "odd": (OddState, r"size follows from the parameter's but 'low' has \(5,\) for \(5, 7\)"),
    "master": (NamedMaster, "no state of NamedMaster with the name 'master'.*rename it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_on_one_parameter_after_the_other_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(ConfigError, match=text) as caught:
        own_class(make(parameters()))
    assert str(caught.value).startswith("optimizer: expected") and ";" in str(caught.value)


def test_states_by_the_number_of_dimensions() -> None:
    """Adafactor: rows and columns of matrices, all of vectors; what most elements have decides what is placed."""
    found = own_class(torch.optim.Adafactor(parameters((60, 40), (40,), ())))
    assert found.names == () and found.required == {"step"}
    # per parameter a step of 4 bytes; 60 rows and 40 columns; variances of the vector and of the scalar
    assert found.size.kept_bytes == 3 * 4 + 4 * (60 + 40) + 4 * 40 + 4
    vectors = own_class(torch.optim.Adafactor(parameters((40,), (2, 3))))
    assert vectors.names == ("variance",)
    assert vectors.size.kept_bytes == 2 * 4 + 4 * (2 + 3)


def test_how_torch_makes_a_step_is_not_heeded() -> None:
    """`capturable` is for a GPU: a dict of a run there may bring it into the groups."""
    how: dict[str, Any] = {"foreach": True, "capturable": True}
    found = own_class(torch.optim.NAdam(parameters((8, 8)), **how))
    assert found.names == own_class(torch.optim.NAdam(parameters((8, 8)))).names
    assert options_of({"lr": 0.1, **how, "params": []}) == {"lr": 0.1, "foreach": False, "capturable": False}


def test_groups_with_other_options_have_other_states() -> None:
    first, second = parameters((8, 8), (8, 8))
    groups: list[dict[str, Any]] = [{"params": [first], "momentum": 0.9}, {"params": [second], "centered": True}]
    found = own_class(torch.optim.RMSprop(groups))
    assert found.names == ("square_avg", "momentum_buffer", "grad_avg")
    assert found.required == {"step", "square_avg"}


def test_a_class_that_wants_large_tensors_gets_them() -> None:
    found = own_class(Large(parameters((100, 50))))
    assert found.names == ("blocks",) and found.size.kept_bytes == 0


def test_states_of_large_tensors_in_another_form_are_refused() -> None:
    """As those of 8 bits, which small tensors do not have: fp32 ones would take their place, silently."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Compressing(Plain):
        def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            if not state:
                state["m"] = TwoTensor(p.clone(), p.clone()) if p.numel() >= 4096 else p.clone()

    own_class(Compressing(parameters((10, 10))))
    with pytest.raises(ConfigError, match="expected plain states of Compressing but m is a TwoTensor"):
        own_class(Compressing(parameters((100, 100))))


def test_more_states_than_roles_stay_in_host_memory() -> None:
    class Many(Plain):
        def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            state.update((f"s{number}", p.clone()) for number in range(len(MOMENTS) + 2))

    found = own_class(Many(parameters((10, 10))))
    assert len(found.names) == len(MOMENTS) and found.size.kept_bytes == 2 * 400


@given(
    extents=st.permutations([0, 1, 2]).flatmap(
        lambda order: st.sampled_from([[order[:1]], [order[:1], order[1:]], [order], [[dim] for dim in order], []])
    ),
    constant=st.lists(st.integers(1, 9), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
)
def test_sizes_of_states_follow_from_the_parameters_extents(
    extents: list[list[int]], constant: list[int], dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """States with products of any of the extents and constants as their own; bytes are exact for every shape."""

    def sides(of: Sequence[int]) -> list[int]:
        return [math.prod(of[dim] for dim in dims) for dims in extents if dims] + constant

    class Some(Plain):
        def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            state["some"] = {"nested": [torch.zeros(sides(p.shape), dtype=dtype)], "number": 3}

    found = own_class(Some(parameters(shape)))
    assert found.names == ()
    assert found.size.kept_bytes == dtype.itemsize * math.prod(sides(shape))


def test_temporaries_are_those_of_the_parameter_that_needs_most() -> None:
    """Two tensors of its size at once beside the fp32 gradient; a copy of the master where it is split."""

    class Two(Plain):
        def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            twice = 2 * p.grad  # type: ignore[operator]
            four = twice + twice
            del twice
            p -= group["lr"] * four  # the product is the second one

    class Square(Plain):
        def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            p -= p.new_zeros(p.shape[0], p.shape[0]).sum()

    shapes = (300, 200), (100,)
    assert own_class(Two(parameters(*shapes))).size.step_bytes == 300 * 200 * 4 * 3
    assert own_class(Two(parameters(*shapes)), torch.bfloat16).size.step_bytes == 300 * 200 * 4 * 4
    assert own_class(Two(parameters(*shapes)), torch.float16).size.step_bytes == 300 * 200 * 4 * 3
    square = own_class(Square(parameters((256, 64)))).size.step_bytes  # measured on a smaller one with nearly its sides
    assert square == pytest.approx(4 * (256 * 64 + 256 * 256), rel=0.02)


def test_neither_model_nor_optimizer_nor_random_numbers_are_touched() -> None:
    members = parameters()
    optimizer = torch.optim.RMSprop(members, momentum=0.9)
    for p in members:
        p.grad = torch.ones_like(p)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # replaces optimizer.step
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a copy of the optimizer must not call hooks"))
    before = copy.deepcopy((members, optimizer.state_dict(), [p.grad for p in members]))
    random, lr = torch.get_rng_state(), scheduler.get_last_lr()
    made = rule_of(optimizer).own
    assert made is not None
    copy_of_it = made.make([])
    assert type(copy_of_it) is torch.optim.RMSprop and not copy_of_it.state and "step" not in vars(copy_of_it)
    assert torch.equal(torch.get_rng_state(), random) and scheduler.get_last_lr() == lr
    for ours, theirs in zip(members, before[0], strict=True):
        assert torch.equal(ours, theirs)
    assert str(optimizer.state_dict()) == str(before[1])
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(members, before[2], strict=True))  # type: ignore[arg-type]


def test_the_generators_of_accelerators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(5)
    own_class(torch.optim.RMSprop(parameters()))
    assert seeded == [5] and torch.initial_seed() == 5


class Overridden(torch.optim.AdamW):
    """A kind of AdamW with a step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p -= p.grad


class Inherited(torch.optim.AdamW):
    """A kind of AdamW that steps like it."""


def test_whose_steps_the_kernels_make() -> None:
    assert rule_of(Inherited(parameters())).own is None
    assert rule_of(torch.optim.Adam(parameters(), foreach=True)).own is None
    assert rule_of(Overridden(parameters())).own is not None
    assert rule_of(torch.optim.Adagrad(parameters(), initial_accumulator_value=0.5)).names == ("sum",)
    rule = rule_of(torch.optim.RMSprop(parameters(), foreach=True, maximize=True))
    hyper: Any = rule.hyper({"foreach": True, "lr": 0.1, "params": parameters()}, 1, 0.5)
    assert (hyper.options, hyper.grad_scale) == ({"foreach": False, "lr": 0.1}, 0.5)


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pytest.fail("the mode of a user sees nothing of a step")


def test_nothing_around_changes_what_an_operation_does() -> None:
    x = torch.randn(8, 8)
    expected = x @ x
    with Refusing(), torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        with plain_torch():
            made, product = torch.zeros(()), x @ x
    made += 1  # not made for inference
    assert made.item() == 1 and product.dtype == torch.float32 and torch.equal(product, expected)
