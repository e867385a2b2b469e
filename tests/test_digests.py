"""Digests of bits: the same for every placement, different for one bit, and nothing is disturbed by looking."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, assert_same_tensors, batch, everything_on_device, host, tight
from torch import nn

from offload import AdamW, Engine, StateError
from offload.checkpoint.digests import MASTER_NUMEL
from offload.planning.roles import Role

DEPTH = 5
PLACEMENTS = ["device", "host", "nvme"]
Digests = dict[str, dict[str, str]]

pytestmark = pytest.mark.usefixtures("single_torch_thread")


def make(depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])


def open_engine(placement: str, path: Path, *, optimizer: Any = None, **more: Any) -> Engine:
    model = make()
    options: dict[str, Callable[[], dict[str, Any]]] = {
        "device": everything_on_device,
        "host": lambda: host(model, whole=optimizer is not None),
        "nvme": lambda: tight(model, path, whole=optimizer is not None, **more),
    }
    made = optimizer(model.parameters()) if optimizer else AdamW(lr=1e-3, weight_decay=0.1)
    return Engine(model, made, **{**options[placement](), **more})


def backward(engine: Engine, number: int) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(batch(number).to(dtype)).float().sub(1).pow(4).mean())


def train(engine: Engine, steps: int = 3) -> list[Digests]:
    """Return the digests from before and after each step."""
    found = []
    for number in range(steps):
        backward(engine, number)
        found.append(engine.digests())
        engine.step()
        found.append(engine.digests())
    return found


def differences(left: Digests, right: Digests) -> set[tuple[str, str]]:
    assert left.keys() == right.keys()
    return {
        (name, role)
        for name in left
        for role in left[name].keys() | right[name].keys()
        if left[name].get(role) != right[name].get(role)
    }


def flip_one_bit(engine: Engine, role: Role) -> None:
    """Flip the lowest bit of the first element of the first parameter of the first unit, in memory."""
    assert engine._manager is not None
    shard = engine._manager.copies.get(0, role)
    assert shard is not None and shard.home_buffer is not None
    byte = (ctypes.c_ubyte * 1).from_address(shard.home_buffer.address)
    byte[0] ^= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_every_placement_has_the_same_digests(dtype: str, state_dtype: str, tmp_path: Path) -> None:
    runs = []
    for placement in PLACEMENTS:
        with open_engine(placement, tmp_path, dtype=dtype, state_dtype=state_dtype) as engine:
            runs.append([engine.digests(), *train(engine)])
    assert runs[0] == runs[1] == runs[2]
    assert len({digests["0.weight"]["parameter"] for digests in runs[0]}) == 4, "the start, and three steps"
    roles = {"parameter", "exp_avg", "exp_avg_sq", "step"}
    roles |= {"master"} if dtype == "bfloat16" else set()
    roles |= {"scales"} if state_dtype == "int8" else set()
    assert all(found.keys() == roles for found in runs[0][-1].values())
    assert runs[0][0].keys() == {f"{layer}.{kind}" for layer in range(DEPTH) for kind in ("weight", "bias")}


def test_half_precision_has_masters_of_its_own(tmp_path: Path) -> None:
    runs = []
    for placement in PLACEMENTS:
        with open_engine(placement, tmp_path, dtype="float16") as engine:
            runs.append(train(engine))
    assert runs[0] == runs[1] == runs[2]
    assert "master" in runs[0][0]["0.weight"]


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adafactor])
def test_what_a_class_of_its_own_remembers_is_among_them(kind: Any, tmp_path: Path) -> None:
    runs = []
    for placement in PLACEMENTS:
        with open_engine(placement, tmp_path, optimizer=lambda parameters: kind(parameters, lr=1e-3)) as engine:
            runs.append(train(engine))
            state = engine.optimizer.state_dict()["state"][0]  # type: ignore[union-attr]
    assert runs[0] == runs[1] == runs[2]
    assert {"parameter", *state} <= runs[0][-1]["0.weight"].keys()
    assert runs[0][1]["0.weight"]["step"] != runs[0][3]["0.weight"]["step"]


def test_they_are_hashes_of_the_bytes(tmp_path: Path) -> None:
    with open_engine("nvme", tmp_path, dtype="bfloat16") as engine:
        train(engine, 2)
        found, real = engine.digests(), engine.state_dict()
        states = engine.optimizer.state_dict()["state"][0]  # type: ignore[union-attr]

    def digest(tensor: torch.Tensor) -> str:
        return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()

    assert {name: entry["parameter"] for name, entry in found.items()} == {
        name: digest(tensor) for name, tensor in real.items()
    }
    for role in ("exp_avg", "exp_avg_sq", "master"):
        assert found["0.weight"][role] == digest(states[role]), role


def test_masters_longer_than_what_is_joined_at_once_are_hashed_whole() -> None:
    runs = []
    for last in (1.0, 1.0 + 2**-20):  # of a master only: bfloat16 has 8 bits
        model = nn.Linear(1, MASTER_NUMEL + 3, bias=False)
        nn.init.ones_(model.weight)
        with torch.no_grad():
            model.weight[-1] = last
        with Engine(model, AdamW(lr=0.0, weight_decay=0.0), dtype="bfloat16", **everything_on_device()) as engine:
            runs.append(engine.digests())
    assert runs[0]["weight"]["parameter"] == runs[1]["weight"]["parameter"]
    assert runs[0]["weight"]["master"] != runs[1]["weight"]["master"]


@pytest.mark.parametrize(
    ("role", "name"),
    [(Role.PARAM, "parameter"), (Role.EXP_AVG, "exp_avg"), (Role.EXP_AVG_SQ, "exp_avg_sq"), (Role.GRAD, "gradient")],
)
def test_one_bit_is_seen(role: Role, name: str, tmp_path: Path) -> None:
    with open_engine("host", tmp_path) as engine:
        train(engine, 1)
        if role is Role.GRAD:
            backward(engine, 1)
        engine.drain()
        if role is Role.PARAM:
            assert engine._manager is not None
            engine._manager.discard_working_copy(0)
        before = engine.digests()
        flip_one_bit(engine, role)
        assert differences(before, engine.digests()) == {("0.weight", name)}
        flip_one_bit(engine, role)
        assert engine.digests() == before


def test_one_bit_of_a_remainder_is_seen_in_the_master_alone(tmp_path: Path) -> None:
    with open_engine("host", tmp_path, dtype="bfloat16") as engine:
        train(engine, 1)
        before = engine.digests()
        flip_one_bit(engine, Role.MASTER)
        assert differences(before, engine.digests()) == {("0.weight", "master")}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_are_there_between_backward_and_step_and_stay(placement: str, tmp_path: Path) -> None:
    with open_engine(placement, tmp_path) as engine:
        assert not any("gradient" in entry for entry in engine.digests().values())
        backward(engine, 0)
        with engine.gather_gradients():
            values = {name: p.grad.clone() for name, p in engine.module.named_parameters()}  # type: ignore[union-attr]
        found = engine.digests()
        assert all("gradient" in entry for entry in found.values()) and engine.digests() == found
        with engine.gather_gradients():
            assert_same_tensors(values, {name: p.grad for name, p in engine.module.named_parameters()})  # type: ignore[misc]
        assert engine.clip_grad_norm_(1e-3) > 1e-3
        clipped = engine.digests()
        assert differences(found, clipped) == {(name, "gradient") for name in found}, "they will be multiplied"
        assert engine.step()
        assert not any("gradient" in entry for entry in engine.digests().values())


def test_a_parameter_without_a_gradient_has_no_digest_of_one(tmp_path: Path) -> None:
    with open_engine("nvme", tmp_path) as engine:
        backward(engine, 0)
        next(engine.module.parameters()).grad = None
        found = engine.digests()
        assert "gradient" not in found["0.weight"] and "gradient" in found["0.bias"]


def test_accumulated_gradients(tmp_path: Path) -> None:
    runs = []
    for placement in PLACEMENTS:
        with open_engine(placement, tmp_path, dtype="bfloat16", gradient_accumulation_steps=2) as engine:
            found = []
            for number in range(4):
                backward(engine, number)
                found.append(engine.digests())
                engine.step()
            runs.append(found)
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0]["0.weight"]["gradient"] != runs[0][1]["0.weight"]["gradient"]


def test_updates_that_were_made_early_are_kept(tmp_path: Path) -> None:
    """Without clipping, units on NVMe are updated during backward; looking at digests undoes none of it."""
    counts = []
    for looks in (False, True):
        with open_engine("nvme", tmp_path) as engine:
            for number in range(4):
                backward(engine, number)
                if looks:
                    assert engine.digests() == engine.digests()
                engine.step()
            stats = engine.stats()
            counts.append((stats.early_units > 0, stats.early_units_dropped))
            last = engine.digests()
    assert counts == [(True, 0), (True, 0)]
    with open_engine("device", tmp_path) as engine:
        assert train(engine, 4)[-1] == last


def test_an_engine_that_only_evaluates_has_parameters(tmp_path: Path) -> None:
    model = make()
    with Engine(model, **everything_on_device()) as engine:
        assert all(entry.keys() == {"parameter"} for entry in engine.digests().values())


def test_frozen_parameters_have_no_states(tmp_path: Path) -> None:
    model = make()
    model[0].requires_grad_(False)
    with Engine(model, AdamW(lr=1e-3), **tight(model, tmp_path)) as engine:
        backward(engine, 0)
        engine.step()
        found = engine.digests()
    assert found["0.weight"].keys() == {"parameter"} and "exp_avg" in found["1.weight"]


def test_a_closed_engine_refuses(tmp_path: Path) -> None:
    engine = open_engine("device", tmp_path)
    engine.close()
    with pytest.raises(StateError, match="closed"):
        engine.digests()
