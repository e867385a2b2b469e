"""A run that was saved and resumed is the run that was never stopped, bit by bit, whatever the budgets were and are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import forked
import numpy
import pytest
import torch
from harness import LINEAR_BYTES, WIDTH, assert_same_tensors, batch, everything_on_device, host, tight
from torch import nn

import offload
from offload import AdamW, Engine
from offload.run_state import drawn_so_far, set_drawn

pytestmark = pytest.mark.usefixtures("single_torch_thread")

ROOMY = {"max_memory": {"device": "64MiB", "cpu": "16MiB", "nvme": "256MiB"}}
PLACES: dict[str, Callable[[nn.Module, Path], dict[str, Any]]] = {
    "device": lambda model, path: everything_on_device(),
    "host": lambda model, path: host(model, unit_bytes=LINEAR_BYTES),
    "nvme": lambda model, path: tight(model, path),
    "host and nvme": lambda model, path: tight(model, path, offload_param="cpu"),
    "nvme and host": lambda model, path: tight(model, path, offload_optimizer="cpu"),
    "device and nvme": lambda model, path: {**tight(model, path, offload_param="none"), **ROOMY},
    "device and host": lambda model, path: {
        **tight(model, path, offload_param="none", offload_optimizer="cpu"),
        **ROOMY,
    },
    "host and device": lambda model, path: {
        **tight(model, path, offload_param="cpu", offload_optimizer="none"),
        **ROOMY,
    },
    "nvme and device": lambda model, path: {**tight(model, path, offload_optimizer="none"), **ROOMY},
    "two paths": lambda model, path: {
        **tight(model, path),
        "nvme_path": [directory(path, "first"), directory(path, "second")],
    },
    "small chunks": lambda model, path: {**tight(model, path), "chunk_numel": 4096, "unit_bytes": "1MiB", **ROOMY},
}


class Net(nn.Module):
    """Blocks with everything that decides on a step: dropout, buffers, a frozen layer, odd shapes, none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.odd = nn.Parameter(torch.randn(7, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.drop(torch.tanh(block(x))) + x
        x = self.norm(self.frozen(x)) * self.scalar
        return x + self.odd.sum() + self.empty.sum()


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    model = Net().to(dtype)
    model.norm.float()
    return model


def optimizer_of(model: nn.Module, **options: Any) -> AdamW:
    bare = [p for name, p in model.named_parameters() if p.requires_grad and "bias" in name]
    rest = [p for name, p in model.named_parameters() if p.requires_grad and "bias" not in name]
    return AdamW([{"params": rest}, {"params": bare, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2, **options)


class Run:
    """One engine's training, a micro-batch after the other."""

    def __init__(self, place: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> None:
        make = options.pop("optimizer", optimizer_of)
        self.build(net(dtype), make, {**place, **options})

    def build(self, model: nn.Module, make: Callable[[nn.Module], Any], options: dict[str, Any]) -> None:
        self.model = model
        self.engine = Engine(model, make(model), **options)
        assert self.engine.optimizer is not None
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.engine.optimizer, 40)
        self.losses: list[torch.Tensor] = []

    def train(self, numbers: range) -> None:
        for number in numbers:
            dtype = next(self.model.parameters()).dtype
            x = batch(number).to(dtype) * (1 + random.random() + float(numpy.random.rand()))
            loss = self.engine(x).float().sub(1).pow(4).mean()
            self.losses.append(loss.detach().clone())
            self.engine.backward(loss)
            if self.engine.step():
                self.schedule.step()

    def client_state(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict(), "micro_batches": len(self.losses)}

    def outcome(self) -> dict[str, Any]:
        engine = self.engine
        assert engine.optimizer is not None
        packed = engine.optimizer.state_dict()
        return {
            "digests": engine.digests(),
            "parameters": engine.state_dict(),
            "states": packed["state"],
            "groups": packed["param_groups"],
            "run": packed["run"],
            "norm": engine.grad_norm,
        }


def assert_same(ours: Mapping[str, Any], truth: Mapping[str, Any]) -> None:
    assert_same_tensors(ours["parameters"], truth["parameters"])
    assert ours["states"].keys() == truth["states"].keys()
    for position, state in ours["states"].items():
        assert_same_tensors(state, truth["states"][position])
    for name in ("digests", "groups", "run", "norm"):
        assert ours[name] == truth[name], name


def seed() -> None:
    torch.manual_seed(7)
    random.seed(8)
    numpy.random.seed(9)


def saved_and_resumed(
    first: dict[str, Any], second: dict[str, Any], path: Path, *, at: int, end: int, **options: Any
) -> None:
    """Train `end` micro-batches in one go, and in two engines; compare everything, losses included."""
    seed()
    whole = Run(first, **options)
    with whole.engine:
        whole.train(range(end))
        truth = whole.outcome()
    seed()
    before = Run(first, **options)
    with before.engine:
        before.train(range(at))
        before.engine.save_checkpoint(path, client_state=before.client_state())
        before.train(range(at, end))  # saving has changed nothing
        assert_same(before.outcome(), truth)
    torch.manual_seed(100)
    after = Run(second, **options)
    with after.engine:
        state = after.engine.load_checkpoint(path)
        assert state["micro_batches"] == at
        after.schedule.load_state_dict(state["schedule"])
        after.train(range(at, end))
        assert all(torch.equal(a, b) for a, b in zip(after.losses, whole.losses[at:], strict=True))
        assert_same(after.outcome(), truth)


def directory(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    return path


def placed(name: str, tmp_path: Path, which: str) -> dict[str, Any]:
    return PLACES[name](net(), directory(tmp_path, which))


NAMES = list(PLACES)
QUICK = [(NAMES[i], NAMES[(i + 3) % len(NAMES)]) for i in range(len(NAMES))]


@pytest.mark.few
@pytest.mark.parametrize(("first", "second"), QUICK)
def test_resumed_elsewhere(first: str, second: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if NAMES.index(first) % 2 else torch.float32
    kind = ("float32", "bfloat16", "int8")[NAMES.index(first) % 3]
    places = placed(first, tmp_path, "swap0"), placed(second, tmp_path, "swap1")
    saved_and_resumed(*places, tmp_path / "saved", at=3, end=6, dtype=dtype, state_dtype=kind)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(NAMES, NAMES)))
def test_resumed_after_twenty_steps(first: str, second: str, dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    places = placed(first, tmp_path, "swap0"), placed(second, tmp_path, "swap1")
    options = {"dtype": dtype, "state_dtype": kind, "initial_loss_scale": 2.0**20}
    saved_and_resumed(*places, tmp_path / "saved", at=20, end=40, **options)


@pytest.mark.parametrize(("first", "second"), [("nvme", "device"), ("host", "nvme")])
def test_resumed_in_the_middle_of_an_accumulation(first: str, second: str, tmp_path: Path) -> None:
    places = placed(first, tmp_path, "swap0"), placed(second, tmp_path, "swap1")
    options = {"dtype": torch.bfloat16, "gradient_accumulation_steps": 3, "max_grad_norm": 0.5}
    saved_and_resumed(*places, tmp_path / "saved", at=5, end=9, **options)


@pytest.fixture
def numpy_generator() -> Iterator[None]:
    """NumPy's own one, which the test may replace."""
    given = numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(given)


@pytest.mark.parametrize("run_dir", [False, True])
@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox", "SFC64"])
@pytest.mark.usefixtures("numpy_generator")
def test_numpy_draws_from_any_generator(kind: str, run_dir: bool, tmp_path: Path) -> None:
    options = {"run_dir": directory(tmp_path, "run")} if run_dir else {}
    numpy.random.set_bit_generator(getattr(numpy.random, kind)(3))
    numpy.random.standard_normal()
    with (run := Run(everything_on_device(), **options)).engine as engine:
        run.train(range(1))
        engine.save_checkpoint(tmp_path / "saved")
        drawn = numpy.random.standard_normal(3).tolist()
    other = "PCG64" if kind != "PCG64" else "MT19937"
    with Run(everything_on_device(), **options).engine as engine:
        if not run_dir:
            engine.load_checkpoint(tmp_path / "saved")
        assert numpy.random.standard_normal(3).tolist() == drawn
        numpy.random.set_bit_generator(getattr(numpy.random, other)(4))
        before = _state_of_numpy()
        with pytest.warns(
            UserWarning, match=f"of NumPy was saved as {kind} but is {other} here; it stays as it is"
        ) as told:
            engine.load_checkpoint(tmp_path / "saved")
        assert {each.filename for each in told if "NumPy" in str(each.message)} == {__file__}
        assert _state_of_numpy() == before


def _state_of_numpy() -> str:
    return repr(numpy.random.get_state(legacy=False))


@pytest.mark.parametrize("packed", [False, True])
def test_states_of_numpy_in_older_files(packed: bool) -> None:
    numpy.random.seed(9)
    numpy.random.standard_normal()
    states, drawn = drawn_so_far(), numpy.random.get_state()
    name, keys, *rest = drawn
    found = numpy.random.standard_normal(3).tolist()
    set_drawn({**states, "numpy": (name, keys.tobytes() if packed else keys.tolist(), *rest)})
    assert numpy.random.standard_normal(3).tolist() == found


def test_learning_rates_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    """As a table of rates or a schedule with `numpy.cos` leaves them in groups and in the user's own."""
    run = Run(everything_on_device())
    with run.engine as engine:
        rates = 1e-2 * numpy.cos(numpy.arange(3) / 10)
        engine.optimizer.param_groups[0].update(lr=rates[0], weight_decay=numpy.float32(0.25))
        run.train(range(1))
        engine.optimizer.param_groups[0]["lr"] = rates[1]
        engine.save_checkpoint(tmp_path, client_state={"rate": rates[1], "batch": numpy.int64(1)})
        truth = engine.digests()
    again = Run(everything_on_device())
    with again.engine as engine:
        state = engine.load_checkpoint(tmp_path)
        group = engine.optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (rates[1], 0.25) and state == {"rate": rates[1], "batch": 1}
        assert {type(value) for value in (group["lr"], group["weight_decay"], state["rate"])} == {float}
        assert type(state["batch"]) is int and engine.digests() == truth


OTHERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "sgd": lambda parameters: offload.SGD(parameters, lr=1e-6),
    "momentum": lambda parameters: offload.SGD(parameters, lr=1e-6, momentum=0.9),
    "lion": lambda parameters: offload.Lion(parameters, lr=1e-3),
    "lamb": lambda parameters: offload.LAMB(parameters, lr=1e-3),
    "taken over": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "own class": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "own class, small states": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


@pytest.mark.few
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_optimizers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What a class keeps beside the tiers is saved behind the updates that the last step has left to do."""

    def make(model: nn.Module) -> Any:
        return OTHERS[name]([p for p in model.parameters() if p.requires_grad])

    roomy = {"max_memory": {"device": "64MiB", "cpu": "64MiB", "nvme": "256MiB"}}
    first = {**tight(net(), directory(tmp_path, "swap")), **roomy}
    saved_and_resumed(first, everything_on_device(), tmp_path / "saved", at=3, end=5, dtype=dtype, optimizer=make)


AT_EXIT = """
import concurrent.futures.thread, sys
import torch
from offload import AdamW, Engine
engine = Engine(torch.nn.Linear(64, 64), AdamW(), device="cpu", max_memory={"device": "64MiB", "cpu": "64MiB"})
engine.backward(engine(torch.ones(2, 64)).sum())
engine.step()
concurrent.futures.thread._python_exit()  # what Python does before it calls what is registered with atexit
saved = engine.digests()
engine.save_checkpoint(sys.argv[1])
engine.apply(lambda name, parameter: parameter.zero_())
assert engine.digests() != saved
engine.load_checkpoint(sys.argv[1])
assert engine.digests() == saved
"""


def test_saves_and_loads_while_the_interpreter_ends(tmp_path: Path) -> None:
    """Executors take no more work then."""
    done = forked.run(AT_EXIT, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
