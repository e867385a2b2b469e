"""Tensors in, tensors out: parameters, masters and states through the tiers, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeStore, make_manager, make_plan_with, make_unit
from harness import WIDTH, assert_same_tensors, batch, everything_on_device, host, nvme, tight
from hypothesis import given
from hypothesis import strategies as st
from reference import to_bfloat16_half_up
from torch import nn

from offload import AdamW, Engine
from offload.checkpoint.values import (
    gather_masters,
    gather_parameters,
    gather_states,
    scatter_parameters,
    scatter_states,
)
from offload.errors import ConfigError, StateError
from offload.memory.budget import Tier
from offload.optim.recipe import StepCounts
from offload.planning.asked import Homes
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards.manager import Manager
from offload.shards.shard import State

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
DTYPES = ["float32", "bfloat16", "float16"]
CHUNK = 4096  # elements: most parameters below lie across a boundary of chunks
SIZES = (3000, 5000, 1, 9000)  # slots start at 0, 3072, 8192 and 8320: chunks end inside the second and fourth


@contextmanager
def managing(units: Sequence[Unit], homes: Sequence[Homes], **more: Any) -> Iterator[tuple[Manager, StepCounts]]:
    store = FakeStore()
    manager = make_manager(make_plan_with(units, homes, chunk_numel=CHUNK, **more), store)
    try:
        yield manager, StepCounts(units)
        assert not store.flying
        manager.check()
    finally:
        manager.close()


def random(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-3, 3, (size,), generator=generator)
    return spread.clamp(-3e4, 3e4)  # inside the range of float16


def rounded(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round fp32 as the runtime does: bfloat16 half up, float16 to nearest even."""
    return to_bfloat16_half_up(value) if dtype == "bfloat16" else value.to(getattr(torch, dtype))


def moments(size: int, seed: int) -> dict[str, Any]:
    return {"step": torch.tensor(3.0), "exp_avg": random(size, seed), "exp_avg_sq": random(size, seed + 1).abs()}


def masters(manager: Manager, counts: StepCounts) -> dict[tuple[int, int], torch.Tensor]:
    """Return the fp32 masters of what has been updated: a state of 16-bit parameters; fp32 ones are their own."""
    parameters = gather_parameters(manager)
    found = {}
    for at, entry in gather_states(manager, counts).items():
        found[at] = parameters[at] if parameters[at].dtype == torch.float32 else entry["master"]
    return found


homes = st.builds(lambda param, states: Homes(param, H, states), st.sampled_from(Tier), st.sampled_from(Tier))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Unit], list[Homes]]:
    sizes = st.lists(st.integers(1, 9000), min_size=1, max_size=4)
    kinds = draw(st.lists(st.tuples(sizes, st.sampled_from(DTYPES), homes), min_size=1, max_size=4))
    return [make_unit(i, sizes, dtype) for i, (sizes, dtype, _) in enumerate(kinds)], [home for _, _, home in kinds]


@given(cases())
def test_everything_comes_back_exactly_from_fp32(case: tuple[list[Unit], list[Homes]]) -> None:
    """Parameters are the given values rounded once; masters are the given values; moments are what was loaded."""
    units, where = case
    with managing(units, where) as (manager, counts):
        places = {(u.index, i): slot.numel for u in units for i, slot in enumerate(u.slots)}
        values = {at: random(size, 7 * at[0] + at[1]) for at, size in places.items()}
        states = {at: moments(size, 1000 + 13 * at[0] + at[1]) for at, size in places.items()}
        scatter_parameters(manager, values)
        scatter_states(manager, counts, states)
        parameters = gather_parameters(manager)
        assert parameters.keys() == places.keys()
        for at, value in values.items():
            assert torch.equal(parameters[at], rounded(value, units[at[0]].dtype))
        back = gather_states(manager, counts)
        assert back.keys() == places.keys()
        for at, master in masters(manager, counts).items():
            assert torch.equal(master, values[at])
        for at, entry in back.items():
            assert torch.equal(entry["exp_avg"], states[at]["exp_avg"])
            assert torch.equal(entry["exp_avg_sq"], states[at]["exp_avg_sq"])
            assert entry["step"] == 3.0
        assert all(count == 3 for unit in counts.counts.values() for count in unit)


@pytest.mark.parametrize("home", [Homes(D, H, N), Homes(H, H, H), Homes(N, H, N), Homes(N, H, H)])
@pytest.mark.parametrize("dtype", DTYPES)
class TestOneUnit:
    def test_values_of_the_stored_dtype_come_back_bit_by_bit(self, dtype: str, home: Homes) -> None:
        units = [make_unit(0, SIZES, dtype)]
        with managing(units, [home]) as (manager, counts):
            values = {(0, i): random(size, i).to(getattr(torch, dtype)) for i, size in enumerate(SIZES)}
            values[0, 0][:3] = torch.tensor([float("inf"), -0.0, float("nan")])
            scatter_parameters(manager, values)
            for at, tensor in gather_parameters(manager).items():
                assert tensor.dtype == getattr(torch, dtype) and tensor.is_contiguous()
                assert torch.equal(tensor.view(torch.uint8), values[at].view(torch.uint8))
            scatter_states(manager, counts, {at: moments(value.numel(), 5) for at, value in values.items()})
            for at, master in masters(manager, counts).items():  # the parameter is its own master
                assert torch.equal(master.nan_to_num(), values[at].float().nan_to_num())

    def test_a_part_leaves_the_rest_alone(self, dtype: str, home: Homes) -> None:
        units = [make_unit(0, SIZES, dtype)]
        with managing(units, [home]) as (manager, counts):
            old = {(0, i): random(size, i) for i, size in enumerate(SIZES)}
            scatter_parameters(manager, old)
            scatter_states(manager, counts, {at: moments(value.numel(), at[1]) for at, value in old.items()})
            new = random(SIZES[1], 99)
            scatter_parameters(manager, {(0, 1): new})
            for at, tensor in gather_parameters(manager).items():
                assert torch.equal(tensor, rounded(new if at == (0, 1) else old[at], dtype))
            for at, master in masters(manager, counts).items():
                assert torch.equal(master, new if at == (0, 1) else old[at])
            for at, entry in gather_states(manager, counts).items():
                assert torch.equal(entry["exp_avg"], moments(old[at].numel(), at[1])["exp_avg"])  # moments stay
            narrow = random(SIZES[3], 98).to(getattr(torch, dtype))
            scatter_parameters(manager, {(0, 3): narrow})
            assert torch.equal(masters(manager, counts)[0, 3], narrow.float())
            assert torch.equal(gather_parameters(manager, {(0, 3)})[0, 3], narrow)

    def test_the_wanted_ones_only(self, dtype: str, home: Homes) -> None:
        units = [make_unit(index, SIZES, dtype) for index in range(2)]
        with managing(units, [home, home]) as (manager, _):
            values = {(u, i): random(size, 9 * u + i) for u in range(2) for i, size in enumerate(SIZES)}
            scatter_parameters(manager, values)
            wanted = {(1, 0), (1, 3)}
            found = gather_parameters(manager, wanted)
            assert found.keys() == wanted
            assert all(torch.equal(found[at], rounded(values[at], dtype)) for at in wanted)

    def test_a_part_of_a_fresh_unit_gets_exact_masters(self, dtype: str, home: Homes) -> None:
        units = [make_unit(0, SIZES, dtype)]
        with managing(units, [home]) as (manager, counts):
            base = {(0, i): random(size, i).to(getattr(torch, dtype)) for i, size in enumerate(SIZES)}
            scatter_parameters(manager, base)
            wide = random(SIZES[1], 50)
            scatter_parameters(manager, {(0, 1): wide})
            scatter_states(manager, counts, {at: moments(value.numel(), 5) for at, value in base.items()})
            for at, found in masters(manager, counts).items():
                assert torch.equal(found, wide if at == (0, 1) else base[at].float())


@pytest.mark.parametrize("home", [Homes(D, H, N), Homes(H, H, H), Homes(N, H, N)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masters_in_a_state_win_over_the_parameters(dtype: str, home: Homes) -> None:
    units = [make_unit(0, SIZES, dtype)]
    with managing(units, [home]) as (manager, counts):
        scatter_parameters(manager, {(0, i): random(size, i) for i, size in enumerate(SIZES)})
        master = random(SIZES[3], 77)
        scatter_states(manager, counts, {(0, 3): {**moments(SIZES[3], 1), "master": master}})
        back = gather_states(manager, counts)
        assert back.keys() == {(0, 3)}  # the others have never been updated
        assert torch.equal(back[0, 3]["master"], master)
        assert torch.equal(gather_parameters(manager)[0, 3], rounded(master, dtype))


@pytest.mark.parametrize("home", [Homes(D, H, N), Homes(H, H, H), Homes(N, H, N)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masters_of_what_has_no_state(dtype: str, home: Homes) -> None:
    """A master that differs in one element, in one of several chunks, is one; None makes it the parameter again."""
    units = [make_unit(0, SIZES, dtype), make_unit(1, [100], "float32"), make_unit(2, [100], dtype, False)]
    with managing(units, [home, Homes(H, H, H), Homes(H, None, None)]) as (manager, counts):
        base = {(0, i): random(size, i).to(getattr(torch, dtype)) for i, size in enumerate(SIZES)}
        base[0, 1][:3] = torch.tensor([float("inf"), -0.0, float("nan")])
        scatter_parameters(manager, {**base, (1, 0): random(100, 8), (2, 0): random(100, 9)})
        assert gather_masters(manager, ()) == dict.fromkeys(base)
        wide = base[0, 3].float()
        wide[5] = 1.0 + 2.0**-20
        scatter_parameters(manager, {(0, 3): wide})
        found = gather_masters(manager, {(0, 0)})
        assert found.keys() == {(0, 1), (0, 2), (0, 3)}
        assert found.pop((0, 3)).equal(wide)  # type: ignore[union-attr]
        assert set(found.values()) == {None}
        before = gather_parameters(manager)
        scatter_states(manager, counts, {}, {(0, 1): None, (0, 3): None})
        assert gather_masters(manager, ()) == dict.fromkeys(base)
        scatter_states(manager, counts, {}, {(0, 3): wide})
        assert torch.equal(gather_masters(manager, ())[0, 3], wide)  # type: ignore[arg-type]
        for at, value in gather_parameters(manager).items():
            assert torch.equal(value.nan_to_num(), before[at].nan_to_num())
        assert counts.counts[0] == [0, 0, 0, 0]


def test_other_dtypes_are_converted_through_fp32() -> None:
    units = [make_unit(0, [100], "bfloat16"), make_unit(1, [100], "float32")]
    with managing(units, [Homes(H, H, H)] * 2) as (manager, counts):
        value = random(100, 3)
        scatter_parameters(manager, {(0, 0): value.half(), (1, 0): value.double()})
        scatter_states(manager, counts, {(0, 0): moments(100, 1)})
        assert torch.equal(gather_states(manager, counts)[0, 0]["master"], value.half().float())
        assert torch.equal(gather_parameters(manager)[1, 0], value)


def test_frozen_parameters_of_any_dtype() -> None:
    units = [make_unit(0, SIZES, "int8", False), make_unit(1, SIZES, "bfloat16", False)]
    for tier in Tier:
        with managing(units, [Homes(tier, None, None)] * 2) as (manager, counts):
            ints = {(0, i): (torch.arange(size) % 251 - 125).to(torch.int8) for i, size in enumerate(SIZES)}
            floats = {(1, i): random(size, i) for i, size in enumerate(SIZES)}
            scatter_parameters(manager, {**ints, **floats})
            back = gather_parameters(manager)
            assert all(torch.equal(back[at], value) for at, value in ints.items())
            assert all(torch.equal(back[at], rounded(value, "bfloat16")) for at, value in floats.items())
            assert gather_states(manager, counts) == {}


def test_tensors_need_not_be_contiguous_nor_detached() -> None:
    units = [make_unit(0, [6], "float32")]
    with managing(units, [Homes(N, H, N)]) as (manager, _):
        source = torch.arange(12.0).requires_grad_()
        scatter_parameters(manager, {(0, 0): source[::2]})
        assert gather_parameters(manager)[0, 0].tolist() == [0, 2, 4, 6, 8, 10]


def test_a_resident_working_copy_is_read_and_written_with_its_home() -> None:
    for tier in (H, N):
        units = [make_unit(0, [5000], "bfloat16")]
        with managing(units, [Homes(tier, H, N)], working_bytes=units[0].param_bytes) as (manager, _):
            scatter_parameters(manager, {(0, 0): random(5000, 1)})
            manager.acquire(0).close()
            new = rounded(random(5000, 2), "bfloat16")
            scatter_parameters(manager, {(0, 0): new})
            shard = manager.copies.get(0, Role.PARAM)
            assert shard is not None and shard.state is State.RESIDENT
            assert torch.equal(gather_parameters(manager)[0, 0], new)
            manager.working.evict(shard)
            assert shard.state is State.STORED
            assert torch.equal(gather_parameters(manager)[0, 0], new)  # now from home


# --- torch's own optimizer states -----------------------------------------------------------------------------------


def steps(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        for index, parameter in enumerate(parameters):
            parameter.grad = random(parameter.numel(), 100 * number + index)
        optimizer.step()


@pytest.mark.parametrize("home", [Homes(D, H, D), Homes(N, H, N)])
def test_states_of_torch_come_in_and_go_out(home: Homes) -> None:
    """Torch goes on with what came back as if it had never been away."""
    units = [make_unit(0, SIZES, "float32")]
    plain = [torch.nn.Parameter(random(size, i)) for i, size in enumerate(SIZES)]
    optimizer = torch.optim.AdamW(plain, lr=1e-2)
    steps(plain, optimizer, 0, 3)
    with managing(units, [home]) as (manager, counts):
        scatter_parameters(manager, {(0, i): p.detach() for i, p in enumerate(plain)})
        scatter_states(manager, counts, {(0, i): optimizer.state[p] for i, p in enumerate(plain)})
        parameters, states = gather_parameters(manager), gather_states(manager, counts)
    again = [torch.nn.Parameter(parameters[0, i]) for i in range(len(SIZES))]
    resumed = torch.optim.AdamW(again, lr=1e-2)
    fields = ("step", "exp_avg", "exp_avg_sq")
    packed = {i: {name: states[0, i][name] for name in fields} for i in range(len(SIZES))}
    resumed.load_state_dict({"state": packed, "param_groups": optimizer.state_dict()["param_groups"]})
    steps(plain, optimizer, 3, 5)
    steps(again, resumed, 3, 5)
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(optimizer.state[one][name], resumed.state[other][name]) for name in fields)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_wrong_shapes_and_missing_parts_are_refused_before_anything_is_written() -> None:
    units = [make_unit(0, [100, 50], "bfloat16")]
    with managing(units, [Homes(H, H, N)]) as (manager, counts):
        values = {(0, 0): random(100, 1), (0, 1): random(50, 2)}
        scatter_parameters(manager, values)
        with pytest.raises(ConfigError, match=r"u0.p1: expected shape \(50,\) but got \(51,\)"):
            scatter_parameters(manager, {(0, 0): random(100, 9), (0, 1): random(51, 9)})
        good = moments(50, 1)
        for wrong, text in (
            ({**good, "exp_avg": torch.zeros(49)}, "exp_avg of shape"),
            ({name: value for name, value in good.items() if name != "exp_avg_sq"}, "lacks 'exp_avg_sq'"),
            ({name: value for name, value in good.items() if name != "step"}, "lacks 'step'"),
        ):
            with pytest.raises(ConfigError, match=f"u0.p1: .*{text}"):
                scatter_states(manager, counts, {(0, 0): moments(100, 3), (0, 1): wrong})
        assert counts.counts == {0: [0, 0]}
        assert all(torch.equal(gather_parameters(manager)[at], rounded(v, "bfloat16")) for at, v in values.items())


def test_states_of_frozen_parameters_are_refused() -> None:
    units = [make_unit(0, [100], "bfloat16", False)]
    with managing(units, [Homes(H, None, None)]) as (manager, counts):
        scatter_parameters(manager, {(0, 0): random(100, 1)})
        with pytest.raises(ConfigError, match="u0.p0"):
            scatter_states(manager, counts, {(0, 0): moments(100, 1)})


@pytest.mark.parametrize("tier", list(Tier))
def test_what_was_never_loaded_is_refused(tier: Tier) -> None:
    with managing([make_unit(0, [100])], [Homes(tier, H, H)]) as (manager, _), pytest.raises(StateError, match="u0"):
        gather_parameters(manager)


# --- between the steps of an engine ---------------------------------------------------------------------------------

HALF = ["bfloat16", "float16"]
PLACES: dict[str, Callable[..., dict[str, Any]]] = {
    "device": lambda model, path, **more: {**everything_on_device(), **more},
    "host": lambda model, path, **more: {**host(model, unit_bytes=4608), **more},
    "nvme": tight,
}


class Net(nn.Module):
    """Blocks that are used one after the other, and one that is used when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, late: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return self.late(x) if late else x


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def train(engine: Engine, numbers: Sequence[int], *, late: bool = False) -> list[torch.Tensor]:
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for number in numbers:
        loss = engine(batch(number).to(dtype), late).float().sub(1).pow(4).mean()
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("dtype", HALF)
def test_values_loaded_while_the_first_updates_are_made_replace_the_masters(dtype: str, tmp_path: Path) -> None:
    """The first step makes masters, also where loading finishes it; what is loaded then counts, wherever things are."""
    found = []
    for name, place in PLACES.items():
        model = net(getattr(torch, dtype))
        path = tmp_path / name
        path.mkdir()
        with Engine(model, AdamW(lr=1e-2), **place(model, path, initial_loss_scale=8.0)) as engine:
            assert engine.optimizer is not None
            value = engine.state_dict()["blocks.5.weight"]
            train(engine, [0])
            engine.load_state_dict({"blocks.5.weight": value}, strict=False)
            states = engine.optimizer.state_dict()["state"]
            assert torch.equal(states[10]["master"], value.float())
            engine.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
            train(engine, [1])  # of no length
            assert torch.equal(engine.state_dict()["blocks.5.weight"], value)
            found.append({f"{at}.{key}": value for at, state in states.items() for key, value in state.items()})
    for other in found[1:]:
        assert_same_tensors(found[0], other)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"])
def test_defaults_of_torch_change_nothing(default: torch.dtype | str, tmp_path: Path) -> None:
    """States and parameters come out, and go in, as ever: whatever dtype or device torch would choose."""
    model = net(torch.bfloat16)
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        assert engine.optimizer is not None
        train(engine, [0, 1])
        parameters, packed = engine.state_dict(), engine.optimizer.state_dict()
        before = torch.get_default_dtype()
        with torch.device(default) if isinstance(default, str) else nullcontext():
            if isinstance(default, torch.dtype):
                torch.set_default_dtype(default)
            try:
                again = engine.optimizer.state_dict()
                assert_same_tensors(engine.state_dict(), parameters)
                engine.optimizer.load_state_dict({**packed, "state": {0: packed["state"][0]}})  # the others start anew
                engine.optimizer.load_state_dict(again)
            finally:
                torch.set_default_dtype(before)
        for found in (again, engine.optimizer.state_dict()):
            for position, state in packed["state"].items():
                assert_same_tensors(found["state"][position], state)
                assert all(value.dtype == torch.float32 for value in found["state"][position].values())


@pytest.mark.cpu("it names the device")
def test_a_model_on_the_meta_device_is_made_while_that_is_the_default() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        engine = Engine(model, AdamW(), **everything_on_device())
    with engine:
        assert all(value.device.type == "cpu" for value in engine.state_dict().values())
        assert engine(batch(0)).isfinite().all()


@pytest.mark.few
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_states_that_are_not_in_the_dict_start_anew(state_dtype: str, place: str, tmp_path: Path) -> None:
    """All of them, and some of them: the run is that of an engine that has never made the steps."""
    model = net()
    with Engine(model, AdamW(lr=1e-2), **PLACES[place](model, tmp_path, state_dtype=state_dtype)) as engine:
        assert engine.optimizer is not None
        first, nothing = engine.state_dict(), engine.optimizer.state_dict()
        truth = train(engine, range(3))
        engine.load_state_dict(first)
        engine.optimizer.load_state_dict(nothing)
        assert engine.optimizer.state_dict()["state"] == {}
        assert all(torch.equal(*pair) for pair in zip(truth, train(engine, range(3)), strict=True))
        packed = engine.optimizer.state_dict()
        del packed["state"][3]
        engine.optimizer.load_state_dict(packed)
        left = engine.optimizer.state_dict()["state"]
        assert left.keys() == packed["state"].keys()
        for position, state in left.items():
            assert_same_tensors(state, packed["state"][position])


@pytest.mark.few(6)
@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("made_in", ["float32", "16 bits"])
@pytest.mark.parametrize("dtype", HALF)
def test_a_run_goes_on_exactly_from_before_a_first_update(
    dtype: str, made_in: str, place: str, first: str, tmp_path: Path
) -> None:
    """The masters are in the state dict before the first step, and of what has not been used until it was made."""

    def load(engine: Engine, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
        assert engine.optimizer is not None
        loads = [lambda: engine.load_state_dict(saved[0]), lambda: engine.optimizer.load_state_dict(saved[1])]
        for action in loads if first == "model" else loads[::-1]:
            action()

    model = net(torch.float32 if made_in == "float32" else getattr(torch, dtype))
    options = {"dtype": dtype, "initial_loss_scale": 8.0}
    with Engine(model, AdamW(lr=1e-2), **PLACES[place](model, tmp_path, **options)) as engine:
        assert engine.optimizer is not None
        for late in (False, True):
            saved = engine.state_dict(), engine.optimizer.state_dict()
            torch.save(saved, tmp_path / "saved")
            saved = torch.load(tmp_path / "saved", weights_only=True)
            (tmp_path / "saved").unlink()
            missing = [position for position in range(14) if position not in saved[1]["state"]]
            assert missing == (list(range(12, 14)) if late else list(range(14)))
            masters = saved[1]["masters"]
            assert list(masters) == missing
            assert all((master is None) == (made_in != "float32") for master in masters.values())
            truth = train(engine, range(3), late=late)
            load(engine, saved)
            assert all(torch.equal(*pair) for pair in zip(truth, train(engine, range(3), late=late), strict=True))
    with Engine(net(), AdamW(lr=1e-2), **everything_on_device(), **options) as other:
        load(other, saved)
        assert all(torch.equal(*pair) for pair in zip(truth, train(other, range(3), late=True), strict=True))
        again = torch.optim.AdamW(net().parameters())
        again.load_state_dict(saved[1])
        assert len(again.state) == 12


@pytest.mark.few
@pytest.mark.parametrize("place", ["device", "nvme"])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_masters_beside_the_states_of_other_optimizers(
    kind: type[torch.optim.Optimizer], place: str, tmp_path: Path
) -> None:
    """Of one that makes its steps itself, and of kernels; each takes what its engine returned into torch, too."""
    options = {"momentum": 0.9, "dampening": 0.5} if kind is torch.optim.SGD else {}
    model = net()
    where = everything_on_device() if place == "device" else nvme(model, tmp_path, whole=True)
    with Engine(model, kind(model.parameters(), lr=1e-2, **options), dtype="bfloat16", **where) as engine:
        assert engine.optimizer is not None
        saved, packed = engine.state_dict(), engine.optimizer.state_dict()
        assert packed["state"] == {} and len(packed["masters"]) == 14
        truth = train(engine, range(3))
        engine.load_state_dict(saved)
        engine.optimizer.load_state_dict(packed)
        assert all(torch.equal(*pair) for pair in zip(truth, train(engine, range(3)), strict=True))
    plain = net()
    optimizer = kind(plain.parameters(), lr=1.0, **options)
    optimizer.load_state_dict(packed)
    plain(batch(0)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", HALF)
def test_a_state_dict_without_masters_leaves_them(dtype: str, tmp_path: Path) -> None:
    """As torch makes it: the model's fp32 values, which the engine was made of, stay what is trained."""
    model = net()
    values = [value.clone() for value in model.parameters()]
    with Engine(model, AdamW(), **tight(model, tmp_path, dtype=dtype)) as engine:
        assert engine.optimizer is not None
        engine.optimizer.load_state_dict(torch.optim.AdamW(net().parameters()).state_dict())
        masters = engine.optimizer.state_dict()["masters"]
        assert all(torch.equal(masters[position], value) for position, value in enumerate(values))


def test_masters_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(), **tight(model, tmp_path, dtype="bfloat16")) as engine:
        assert engine.optimizer is not None
        packed = engine.optimizer.state_dict()
        wrong = {**packed, "masters": {**packed["masters"], 0: packed["masters"][0] + 1, 13: torch.zeros(3)}}
        with pytest.raises(ConfigError, match=r"late\.bias: expected master of shape \(32,\) but got \(3,\)"):
            engine.optimizer.load_state_dict(wrong)
        assert torch.equal(engine.optimizer.state_dict()["masters"][0], packed["masters"][0])


# --- what cannot be loaded ------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def state(**values: Any) -> Change:
    return lambda packed: packed["state"][0].update(values)


def group(**values: Any) -> Change:
    return lambda packed: packed["param_groups"][0].update(values)


def put(part: str, value: Any) -> Change:
    return lambda packed: packed.update({part: value})


WRONG_STATES: list[tuple[Change, str]] = [
    (state(step=None), "step as a whole number of updates, 0 or more, but got None"),
    (state(step="3"), "step as a whole number of updates, 0 or more, but got 3"),
    (state(step=torch.tensor(float("nan"))), "step .* but got nan"),
    (state(step=float("inf")), "step .* but got inf"),
    (state(step=torch.zeros(3)), r"step .* but got a tensor of shape \(3,\)"),
    (state(step=torch.zeros((), device="meta")), "step .* but got a tensor .* on meta"),
    (state(step=torch.tensor(-5.0)), r"step .* but got -5\.0"),
    (state(step=2.5), r"step .* but got 2\.5"),
    (state(exp_avg=None), r"exp_avg of shape \(32, 32\) but got a value of type NoneType"),
    (state(exp_avg=1.0), "exp_avg of shape .* but got a value of type float"),
    (state(exp_avg_sq=torch.zeros(32)), r"exp_avg_sq of shape \(32, 32\) but got \(32,\)"),
    (state(exp_avg=torch.zeros(32, 32, dtype=torch.complex64)), "exp_avg of shape .*complex64; load real values"),
    (state(exp_avg=torch.zeros(32, 32, device="meta")), "exp_avg of shape .* meta device"),
    (state(exp_avg=torch.zeros(32, 32).to_sparse()), "exp_avg of shape .*sparse_coo"),
    (state(master="x"), "master of shape .* but got a value of type str"),
    (state(master=torch.zeros(3)), r"master of shape .* but got \(3,\)"),
    (group(lr=-1.0), "lr is out of range: -1"),
    (group(lr=float("nan")), "lr is out of range: nan"),
    (group(lr=None), "lr is out of range: None; take a finite number of at least 0"),
    (group(lr="0.1"), "lr is out of range: '0.1'"),
    (group(betas=(0.9,)), r"expected betas as two numbers but got \(0\.9,\)"),
    (group(betas=(0.9, 1.5)), r"betas\[1\] is out of range"),
    (group(params=[0]), r"groups of \[14\] parameters but got \[1\]"),
    (group(params=[[number] for number in range(14)]), "numbers in 'params'"),
    (group(params=None), "list of dicts with 'params'"),
    (put("param_groups", []), r"groups of \[14\] parameters but got \[\]"),
    (put("param_groups", None), "list of dicts with 'params'"),
    (put("param_groups", [None]), "list of dicts with 'params'"),
    (put("state", None), "'state' as a dict but got NoneType"),
    (put("state", [1]), "'state' as a dict but got list"),
    (put("masters", 1), "'masters' as a dict but got int"),
    (lambda packed: packed.pop("state"), r"'state' and 'param_groups' but got the keys \["),
    (lambda packed: packed.pop("param_groups"), r"'state' and 'param_groups' but got the keys \["),
    (lambda packed: packed["state"].update({99: packed["state"][0]}), "14 parameters but got 99"),
    (lambda packed: packed["state"].update({-1: packed["state"][0]}), "14 parameters but got -1"),
    (lambda packed: packed["state"].update({"0": packed["state"][0]}), "14 parameters but got '0'"),
    (lambda packed: packed["state"].update({0: None}), "states as dicts but got NoneType"),
    (lambda packed: packed["masters"].update({99: None}), "'masters' with the numbers .* but got 99"),
    (lambda packed: packed["masters"].update({12: 1.0}), "master of shape .* but got a value of type float"),
]


def results(engine: Engine) -> dict[str, Any]:
    """Return all that a checkpoint holds, flat."""
    assert engine.optimizer is not None
    found: dict[str, Any] = engine.state_dict()
    packed = engine.optimizer.state_dict()
    found.update({f"{at}.{key}": value for at, entry in packed["state"].items() for key, value in entry.items()})
    found.update({f"{at}.master": value for at, value in packed.get("masters", {}).items() if value is not None})
    options = [{key: value for key, value in of.items() if key != "params"} for of in packed["param_groups"]]
    return {**found, "options": torch.tensor([of["lr"] for of in options])}


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_a_wrong_optimizer_state_dict_changes_nothing(state_dtype: str, tmp_path: Path) -> None:
    """Everything is looked at before anything is written, and the run goes on as if nothing had been tried."""
    model = net()
    options = {"dtype": "bfloat16", "state_dtype": state_dtype}
    with Engine(model, AdamW(lr=1e-2), **everything_on_device(), **options) as whole:
        train(whole, range(2))
        truth = results(whole)
    model = net()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path, **options)) as engine:
        assert engine.optimizer is not None
        train(engine, [0])
        before, groups = results(engine), engine.optimizer.param_groups
        for change, text in WRONG_STATES:
            packed = engine.optimizer.state_dict()
            for entry in packed["state"].values():
                entry["exp_avg"].add_(1)  # a part that could be written
            packed["param_groups"][0]["lr"] = 0.5
            change(packed)
            with pytest.raises(ConfigError, match=text):
                engine.optimizer.load_state_dict(packed)
            assert engine.optimizer.param_groups is groups
            assert_same_tensors(results(engine), before)
        for nothing in ({}, None, []):
            with pytest.raises(ConfigError, match="expected a dict with 'state' and 'param_groups'"):
                engine.optimizer.load_state_dict(nothing)  # type: ignore[arg-type]
        train(engine, [1])
        assert_same_tensors(results(engine), truth)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (state(square_avg=None), "square_avg of shape .* but got a value of type NoneType"),
        (state(square_avg=torch.zeros(32, 32, dtype=torch.complex64)), "square_avg of shape .*complex64"),
        (state(step=None), "step as a whole number"),
        (group(lr=-1.0), "lr is out of range"),
    ],
)
def test_a_wrong_state_of_an_own_class_changes_nothing(change: Change, text: str, tmp_path: Path) -> None:
    model = net()
    with Engine(model, torch.optim.RMSprop(model.parameters()), **host(model, whole=True)) as engine:
        assert engine.optimizer is not None
        train(engine, [0])
        before, packed = results(engine), engine.optimizer.state_dict()
        packed["state"][1]["square_avg"].add_(1)
        change(packed)
        with pytest.raises(ConfigError, match=text):
            engine.optimizer.load_state_dict(packed)
        assert_same_tensors(results(engine), before)
        train(engine, [1])


def test_parameters_that_cannot_be_loaded_change_nothing(tmp_path: Path) -> None:
    units = [make_unit(0, [100, 50], "bfloat16"), make_unit(1, [50], "float32")]
    with managing(units, [Homes(N, H, N), Homes(H, H, H)]) as (manager, _):
        values = {(0, 0): random(100, 1), (0, 1): random(50, 2), (1, 0): random(50, 3)}
        scatter_parameters(manager, values)
        before = gather_parameters(manager)
        for wrong, text in (
            (None, "a tensor but got a value of type NoneType; load what state_dict"),
            (1.0, "a tensor but got a value of type float"),
            ([0.0] * 50, "a tensor but got a value of type list"),
            (torch.zeros(50, dtype=torch.complex64), "a tensor but got one of torch.complex64"),
            (torch.zeros(50, device="meta"), "meta device"),
            (torch.zeros(50).to_sparse(), "sparse_coo"),
            (torch.nested.nested_tensor([torch.zeros(50)], layout=torch.jagged), "nested"),
        ):
            for where in ((0, 1), (1, 0)):
                with pytest.raises(ConfigError, match=rf"u{where[0]}\.p{where[1]}: expected .*{text}"):
                    scatter_parameters(manager, {(0, 0): random(100, 9), where: wrong})  # type: ignore[dict-item]
                for at, value in gather_parameters(manager).items():
                    assert torch.equal(value, before[at])


class Counting(nn.Module):
    """Has a state that is no tensor, and notes the weight that it found when it got it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.state: Any = {"seen": 0}
        self.norm = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state, self.norm = state, float(self.inner.weight.detach().norm())


def counting() -> nn.Module:
    model = nn.Sequential(Counting(), nn.Linear(WIDTH, WIDTH), Counting())
    model.append(model[0])  # a module of two names
    return model


def test_extra_states_of_modules_are_loaded_as_torch_does() -> None:
    truth, model = counting(), counting()
    truth[0].state, truth[2].state = {"seen": 3}, torch.arange(3)
    packed = truth.state_dict()
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        engine.load_state_dict(packed)
        for name, value in engine.state_dict().items():
            assert value == packed[name] if isinstance(value, dict) else torch.equal(value, packed[name]), name
        assert model[0].norm == float(truth[0].inner.weight.detach().norm()) > 0  # behind the parameters
        engine.load_state_dict(engine.state_dict())
        before = engine.digests()
        del packed["2._extra_state"]
        packed["1._extra_state"] = {"seen": 9}
        with pytest.raises(ConfigError, match=r"missing \['2._extra_state'\], unexpected \['1._extra_state'\]; pass"):
            engine.load_state_dict({name: value + 1 if name == "1.bias" else value for name, value in packed.items()})
        assert engine.digests() == before and model[0].state == {"seen": 3}
        packed["0._extra_state"] = packed["3._extra_state"] = {"seen": 4}
        engine.load_state_dict(packed, strict=False)
        assert model[0].state == {"seen": 4} and torch.equal(model[2].state, torch.arange(3))


def test_empty_states_and_other_numbers_mean_what_they_mean_in_torch(tmp_path: Path) -> None:
    """An empty state is none; the numbers are those in the groups of the dict."""
    model = net()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        assert engine.optimizer is not None
        train(engine, [0])
        packed = engine.optimizer.state_dict()
        names = [f"p{number}" for number in range(14)]
        named = {names[number]: entry for number, entry in packed["state"].items()}
        named["p13"] = {}
        options = {**packed["param_groups"][0], "params": names}
        train(engine, [1])
        engine.optimizer.load_state_dict({"state": named, "param_groups": [options]})
        again = engine.optimizer.state_dict()["state"]
        assert again.keys() == packed["state"].keys()
        for number, entry in packed["state"].items():
            assert_same_tensors(again[number], entry)


@pytest.mark.parametrize("step", [None, torch.ones(3), torch.tensor(float("nan"))])
def test_an_optimizer_with_a_wrong_step_is_not_taken_over(step: Any, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.blocks[5].bias] = {"step": step, "exp_avg": torch.ones(32), "exp_avg_sq": torch.ones(32)}
    with pytest.raises(ConfigError, match=r"blocks\.5\.bias: expected step as a whole number"):
        Engine(model, optimizer, **tight(model, tmp_path))
    assert torch.equal(model(batch(0)), net()(batch(0)))
