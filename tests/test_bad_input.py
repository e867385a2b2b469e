"""Every mistake a user or a machine can make: a clear error, no hang, nothing left on disk, and never half an engine.

After an error the engine is either usable - then training goes on bit by bit as if the error had not been - or every
further call says that it is not, and close() still works.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import io
import logging
import os
import pickle
import re
import signal
import subprocess
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    ACTIVATION_BYTES,
    LINEAR_BYTES,
    WIDTH,
    assert_same_tensors,
    batch,
    collect,
    everything_on_device,
    guess_nothing,
    host,
    let_go,
    loss_of,
    one_torch_thread,
    tight,
)
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import offload
from offload import AdamW, Engine
from offload.kernels import cpu_adam
from offload.memory.arena import HostArena
from offload.memory.budget import Tier
from offload.planning import sizing
from offload.torch_private import in_backward
from swap import Fault, FaultAction, FaultTarget, SwapDeadlineError, SwapError, SwapFullError, SwapStore
from swap.io import aio as aio_file

STEPS = 3

# A wait without a deadline is a bug: find it in seconds, not in ten minutes.
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("single_torch_thread")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def step(engine: Engine, number: int) -> None:
    engine.backward(loss_of(engine, number))
    assert engine.step()


def results(engine: Engine) -> dict[str, torch.Tensor]:
    """Return parameters and states by name."""
    assert engine.optimizer is not None
    found = engine.state_dict()
    for position, state in engine.optimizer.state_dict()["state"].items():
        found.update({f"{position}.{name}": value for name, value in state.items()})
    return found


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    with one_torch_thread(), Engine(net(), AdamW(lr=1e-2), **everything_on_device()) as engine:
        for number in range(STEPS):
            step(engine, number)
        return results(engine)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    model = net()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        yield engine
    assert_nothing_left(tmp_path)


def assert_nothing_left(path: Path) -> None:
    """No file in the directory, and none open that has no name."""
    assert not list(path.iterdir())
    collect()
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    assert not [link for link in links if link.startswith(str(path))]


# --- before anything is loaded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_impossible_budget_names_the_smallest_that_would_do(tier: str, tmp_path: Path) -> None:
    """The number in the text is exact: with it the engine trains, with a page less it is refused."""
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = tight(model, tmp_path)
    options["max_memory"][tier] = 4096
    with pytest.raises(offload.BudgetError) as caught:
        Engine(model, AdamW(), **options)
    text = str(caught.value)
    assert text.startswith(f"{tier} budget:") and "4.00 KiB" in text
    found = re.search(r"smallest max_memory\[\"(\w+)\"\] that would do is (\d+) bytes", text)
    assert found is not None and found[1] == tier, text
    least = int(found[2])
    options["max_memory"][tier] = least - 4096
    with pytest.raises(offload.BudgetError, match=f"{least} bytes"):
        Engine(model, AdamW(), **options)
    assert_same_tensors(dict(model.state_dict()), before)
    model(batch(0))  # nothing was touched
    options["max_memory"][tier] = least
    with Engine(model, AdamW(), **options) as engine:
        step(engine, 0)
    assert_nothing_left(tmp_path)


@pytest.mark.cpu("states on the device")
def test_host_budget_without_nvme_is_refused() -> None:
    model = net()
    with pytest.raises(offload.BudgetError, match="cpu budget.*without an NVMe tier.*nvme_path"):
        Engine(
            model, AdamW(), max_memory={"device": "64KiB", "cpu": "64KiB"}, activation_memory="4KiB", unit_bytes=4608
        )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_grad_nrom": 1.0}, r"unknown option 'max_grad_nrom' \(did you mean 'max_grad_norm'\?\)"),
        ({"max_memory": {"npu": "1GiB"}}, r"keys device, cpu, nvme but got 'npu'"),
        ({"max_memory": {"nvem": "1GiB"}}, r"did you mean 'nvme'\?"),
        ({"max_memory": {"device": "lots"}}, r"max_memory\['device'\].*'lots'"),
        ({"max_memory": {"device": "8 parsec"}}, r"unknown unit in '8 parsec'"),
        ({"max_memory": {"device": -1}}, r"non-negative"),
        ({"max_memory": {"device": "120%"}}, r"percentage in \(0, 100\]"),
        ({"max_memory": {0: 1, "device": 2}}, r"given twice"),
        ({"dtype": "bfloat61"}, r"did you mean 'bfloat16'\?"),
        ({"dtype": "int8"}, r"bfloat16, float16, float32"),
        ({"offload_param": "nmve"}, r"did you mean 'nvme'\?"),
        ({"offload_optimizer": "nvme"}, r"nvme_path is missing"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps.*>= 1"),
        ({"max_grad_norm": -1.0}, r"max_grad_norm.*> 0"),
        ({"threads": 0}, r"threads.*>= 1"),
        ({"device": "gpu"}, r"device.*'gpu'"),
        ({"activation_memory": "50%"}, r"activation_memory"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unknown_or_invalid_option(options: dict[str, Any], text: str) -> None:
    with pytest.raises(offload.ConfigError, match=text):
        Engine(net(), AdamW(), **options)


def test_config_file_with_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    with pytest.raises(offload.ConfigError, match=r"options\.json.*cannot be read"):
        Engine(net(), AdamW(), path)
    path.write_text('["no", "object"]')
    with pytest.raises(offload.ConfigError, match=r"options\.json.*object"):
        Engine(net(), AdamW(), path)
    path.write_text('{"max_memroy": {}}')
    with pytest.raises(offload.ConfigError, match=r"did you mean 'max_memory'\?"):
        Engine(net(), AdamW(), path)


@pytest.mark.parametrize("value", [-1e-3, float("nan")])
def test_hyper_parameter_out_of_range(value: float) -> None:
    with pytest.raises(offload.ConfigError, match="lr"):
        AdamW(lr=value)


def test_optimizer_that_cannot_be_taken_over() -> None:
    model = net()
    for optimizer, text in (
        (torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (torch.optim.AdamW(model.parameters(), differentiable=True), "differentiable"),
        (torch.optim.AdamW(net().parameters()), "not one of the model's"),
    ):
        with pytest.raises(offload.ConfigError, match=text):
            Engine(model, optimizer, **everything_on_device())
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        step(engine, 0)


def test_a_model_that_is_frozen() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(offload.ConfigError, match=r"but all are frozen; call requires_grad_\(True\) .*leave the opt"):
        Engine(model, AdamW(), device="cpu")


def test_model_that_cannot_be_trained() -> None:
    with pytest.raises(offload.ConfigError, match=r"torch\.nn\.Module but got list"):
        Engine([1], AdamW())  # type: ignore[arg-type]
    with pytest.raises(offload.ConfigError, match="expected parameters but it has none"):
        Engine(nn.ReLU(), AdamW())
    with pytest.raises(offload.ConfigError, match=r"blocks\.0\.weight.*float64.*dtype"):
        Engine(net().double(), AdamW(), **everything_on_device())


@pytest.mark.parametrize("place", [tight, lambda model, path: everything_on_device()], ids=["nvme", "device"])
def test_what_fails_after_loading_leaves_the_model_as_it_was(place: Callable[..., Any], tmp_path: Path) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.blocks[5].bias] = {"step": 1, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    with pytest.raises(offload.ConfigError, match=r"blocks\.5\.bias: expected exp_avg of shape \(32,\)"):
        Engine(model, optimizer, **place(model, tmp_path))
    assert_nothing_left(tmp_path)
    assert_same_tensors(dict(model.state_dict()), before)
    step_on_plain(model)


@pytest.mark.parametrize("unit", [0, 2])
def test_a_unit_that_fails_while_it_is_loaded_is_as_it_was(unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been bound to memory that is freed then."""
    from offload.checkpoint import values

    model, given = net(), values.scatter_parameters
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def fails(manager: Any, of: Any) -> None:
        given(manager, of)
        if (unit, 0) in of:
            raise OSError("none left")

    monkeypatch.setattr(values, "scatter_parameters", fails)
    for options in (everything_on_device(), host(model)):
        with pytest.raises(OSError, match="none left"):
            Engine(model, AdamW(), **options)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_failed_way_back_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive fails while the model is loaded, and again when what was loaded is to come back."""

    class Dying(SwapStore):
        written = 0

        def put(self, *args: Any, **options: Any) -> Any:
            self.written += 1
            if self.written > 3:
                self.inject(Fault(forever=True))
            return super().put(*args, **options)

        def put_many(self, items: Any, **options: Any) -> Any:
            return [self.put(*item, **options) for item in items]

    monkeypatch.setattr(offload.checkpoint.loading, "SwapStore", Dying)
    model = net()
    with pytest.raises(SwapError, match="EIO"):
        Engine(model, AdamW(), **tight(model, tmp_path))
    assert_nothing_left(tmp_path)
    with pytest.raises(offload.StateError, match="load the model again"):
        Engine(model, AdamW(), **tight(model, tmp_path))


class Half(nn.Module):
    """One of two models with a weight in common."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.trunk.weight = shared
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(torch.tanh(self.trunk(x)))


@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_a_parameter_of_two_engines(place: str, tmp_path: Path) -> None:
    def options(model: nn.Module) -> dict[str, Any]:
        if place == "device":
            return everything_on_device()
        return host(model, unit_bytes=LINEAR_BYTES) if place == "host" else tight(model, tmp_path)

    torch.manual_seed(0)
    shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
    one, two = Half(shared), Half(shared)
    refused = pytest.raises(
        offload.StateError,
        match=r"^parameter trunk\.weight: expected one that no other engine has but got trunk\.weight of the engine on "
        r"Half; wrap one module that contains both, or close that engine first, which offload\.Engine\.of\(model\) "
        r"returns; closing frees",
    )
    before = {name: value.clone() for name, value in two.own.state_dict().items()}
    wanted = options(two)
    with Engine(one, AdamW(), **options(one)) as engine:
        with refused:
            Engine(two, AdamW(), **wanted)
        with refused:
            Engine(two, **wanted)
        assert_same_tensors(two.own.state_dict(), before)
        assert not two.own._forward_pre_hooks
        step(engine, 0)
    with Engine(two, AdamW(), **wanted) as engine:
        step(engine, 0)
        with refused:
            Engine(one, AdamW(), **options(two))
    both = nn.Sequential(one, two)
    with Engine(both, AdamW(), **options(both)) as engine:
        step(engine, 0)


def test_a_parameter_of_an_engine_that_was_collected() -> None:
    """It belongs to nobody then; what it held went with the engine."""
    shared = nn.Parameter(torch.ones(WIDTH, WIDTH))
    engine = Engine(Half(shared), AdamW(), **everything_on_device())
    step(engine, 0)
    let_go(engine)
    seen = weakref.ref(engine)
    del engine
    collect()
    assert seen() is None
    shared.data = torch.ones(WIDTH, WIDTH) / WIDTH
    with Engine(Half(shared), AdamW(), **everything_on_device()) as engine:
        step(engine, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_that_run_without_their_hooks() -> None:
    """TorchScript calls no hooks; wrappers of torch reduce gradients before they come to the engine."""
    with pytest.raises(offload.StateError, match="TorchScript.*wrap the module that it was made of"):
        Engine(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), AdamW(), device="cpu")
    with pytest.raises(offload.StateError, match=r"DataParallel: copies parameters.*wrap the \.module inside it"):
        Engine(nn.DataParallel(net()), AdamW(), device="cpu")
    model = net()
    model.blocks[1].compile(backend="eager")
    for module in (model, torch.compile(net(), backend="eager")):
        with pytest.raises(offload.StateError, match="is compiled.*wrap the module as it was before"):
            Engine(module, AdamW(), **everything_on_device())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: model.half(), id="half"),
        pytest.param(lambda model: model.to(torch.float64), id="to"),
        pytest.param(lambda model: setattr(model.blocks[2].bias, "data", torch.zeros(WIDTH + 1)), id="data"),
        pytest.param(lambda model: setattr(model.blocks[2].bias, "data", 3), id="no tensor"),
    ],
)
def test_conversions_of_parameters_are_refused(change: Callable[[nn.Module], object], tmp_path: Path) -> None:
    """The parameters keep their content and nothing of the change, so it is refused, wherever they are."""
    model = net()
    truth = {name: value.clone() for name, value in model.state_dict().items() if "blocks" in name}
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        loss_of(engine, 0).backward()  # the units used first, at last, are here
        with torch.no_grad():
            loss_of(engine, 0)  # and now those used last
        with pytest.raises(offload.StateError, match=r"parameter blocks\.\d\.\w+: expected a tensor of shape, dtype"):
            change(model)
        loss_of(engine, 1)
        engine._manager.check()
    for name, parameter in model.blocks.named_parameters():
        assert torch.equal(parameter, truth[f"blocks.{name}"]), name


def test_missing_nvme_path(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(SwapError, match=re.escape(str(tmp_path / "absent"))) as caught:
        Engine(model, AdamW(), **tight(model, tmp_path / "absent"))
    assert caught.value.errno == errno.ENOENT and caught.value.remedy
    assert not (tmp_path / "absent").exists()
    step_on_plain(model)


def test_nvme_path_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    model = net()
    with pytest.raises(SwapError, match=re.escape(str(path))) as caught:
        Engine(model, AdamW(), **tight(model, path))
    assert caught.value.remedy
    assert path.read_text() == "precious"
    step_on_plain(model)


def test_second_nvme_path_missing_leaves_nothing_in_the_first(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    model = net()
    with pytest.raises(SwapError, match="absent"):
        Engine(model, AdamW(), **{**tight(model, good), "nvme_path": [good, tmp_path / "absent"]})
    assert_nothing_left(good)
    step_on_plain(model)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts a tmpfs with options; skips where that is not allowed."""
    mounted: list[Path] = []

    def make(options: str) -> Path:
        path = tmp_path / f"mount{len(mounted)}"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting a tmpfs needs root: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def test_read_only_nvme_path(mount: Callable[..., Path]) -> None:
    path = mount("ro")
    model = net()
    with pytest.raises(SwapError, match=re.escape(str(path))) as caught:
        Engine(model, AdamW(), **tight(model, path))
    assert caught.value.errno in (errno.EROFS, errno.EACCES) and caught.value.remedy
    step_on_plain(model)


def test_disk_full_at_preallocation(mount: Callable[..., Path]) -> None:
    path = mount("size=2m")
    model = net()
    with pytest.raises(SwapFullError) as caught:
        Engine(model, AdamW(), **tight(model, path))
    text = str(caught.value)
    assert str(path) in text and caught.value.errno == errno.ENOSPC
    assert re.search(r"\d+ bytes", text), text
    assert_nothing_left(path)
    assert os.statvfs(path).f_bfree == os.statvfs(path).f_blocks, "the space is free again"
    step_on_plain(model)


def test_file_system_without_direct_io(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[str, torch.Tensor],
) -> None:
    """As tmpfs answers on older kernels; newer ones take O_DIRECT there."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real(path, flags, *args, **options)

    model = net()
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(os, "open", refusing)
        engine = Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path))
        monkeypatch.undo()
    said = [r.getMessage() for r in caplog.records if "O_DIRECT" in r.getMessage()]
    assert len(said) == 1 and str(tmp_path) in said[0]
    with engine:
        assert not store(engine).stats().direct
        for number in range(STEPS):
            step(engine, number)
        assert_same_tensors(results(engine), undisturbed)
    assert_nothing_left(tmp_path)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no writable /dev/shm")
def test_shared_memory_as_nvme_path(undisturbed: dict[str, torch.Tensor]) -> None:
    model = net()
    with Engine(model, AdamW(lr=1e-2), **tight(model, Path("/dev/shm"))) as engine:
        for number in range(STEPS):
            step(engine, number)
        assert_same_tensors(results(engine), undisturbed)


def step_on_plain(model: nn.Module) -> None:
    """Train the model without an engine: it was left as it was."""
    model(batch(0)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


# --- errors that leave the engine usable ------------------------------------------------------------------------------


def _raise(error: BaseException) -> None:
    raise error


def _hooked(engine: Engine, kind: str, action: Callable[[], None]) -> Any:
    """Let `action` run once in the middle of forward or backward; returns the handle of the hook."""
    block = engine.module.blocks[3]

    def once(*args: Any) -> None:
        handle.remove()
        action()

    if kind == "forward":
        handle = block.register_forward_hook(lambda *args: once())
    else:
        handle = block.register_full_backward_hook(lambda *args: once())
    return handle


def nan_loss(engine: Engine) -> None:
    with pytest.raises(offload.NonFiniteError, match="loss: expected a finite value but got nan"):
        engine.backward(loss_of(engine, 0) * float("nan"))


def infinite_loss(engine: Engine) -> None:
    with pytest.raises(offload.NonFiniteError, match="loss: expected a finite value but got inf"):
        engine.backward(loss_of(engine, 0) + float("inf"))


def nan_gradient(engine: Engine) -> None:
    """A finite loss whose gradient is not: the square root at zero."""
    y = engine(batch(0))
    engine.backward((y * 0).abs().sqrt().sum())
    with pytest.raises(offload.NonFiniteError, match=r"gradient of blocks\.0\.weight and 11 more.*step was skipped"):
        engine.step()


def nan_gradient_of_one_parameter(engine: Engine) -> None:
    engine.backward(loss_of(engine, 0))
    handle = engine.module.blocks[4].bias.register_hook(lambda g: g * float("inf"))
    engine.backward(loss_of(engine, 0))
    handle.remove()
    with pytest.raises(offload.NonFiniteError, match=r"gradient of blocks\.4\.bias: expected finite"):
        engine.step()


def step_without_backward(engine: Engine) -> None:
    with pytest.raises(offload.StateError, match="step.*none has arrived.*call backward first"):
        engine.step()
    loss_of(engine, 0)
    with pytest.raises(offload.StateError, match="step.*none has arrived.*call backward first"):
        engine.step()


def optimizer_step_without_backward(engine: Engine) -> None:
    assert engine.optimizer is not None
    before = engine.stats().step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said once, see test_takeover.py
        engine.optimizer.step()
    assert engine.stats().step == before


def backward_twice(engine: Engine) -> None:
    loss = loss_of(engine, 0)
    engine.backward(loss)
    with pytest.raises(offload.StateError, match="backward: called twice for the same loss"):
        engine.backward(loss)
    engine.zero_grad()


def plain_backward_twice(engine: Engine) -> None:
    loss = loss_of(engine, 0)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    engine.zero_grad()


def backward_of_no_tensor(engine: Engine) -> None:
    with pytest.raises(offload.StateError, match="loss as a tensor but got tuple"):
        engine.backward((loss_of(engine, 0),))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="scalar"):
        engine.backward(engine(batch(0)))
    with pytest.raises(RuntimeError, match="does not require grad"):
        engine.backward(torch.ones(()))


def batch_on_the_wrong_device(engine: Engine) -> None:
    with pytest.raises(
        offload.StateError, match=r"argument 0 is on meta but the engine computes on cpu.*engine\.device"
    ):
        engine(batch(0).to("meta"))
    with pytest.raises(offload.StateError, match="extra.*is on meta"):
        engine(batch(0), extra=batch(0).to("meta"))


def nested_batch_on_the_wrong_device(engine: Engine) -> None:
    with pytest.raises(offload.StateError, match="extra.*is on meta"):
        engine(batch(0), extra={"deep": [batch(0).to("meta")]})


def batch_of_the_wrong_shape(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        engine(torch.ones(3, 7))


def batch_too_large(engine: Engine) -> None:
    rows = ACTIVATION_BYTES // (WIDTH * 4)
    with pytest.raises(offload.BudgetError, match=r"device budget: activations needs.*raise max_memory\[\"device\"\]"):
        engine(torch.ones(rows, WIDTH))
    collect()  # what pytest has of the traceback


def error_in_forward(engine: Engine) -> None:
    _hooked(engine, "forward", lambda: _raise(KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        loss_of(engine, 0)


def error_in_backward(engine: Engine) -> None:
    _hooked(engine, "backward", lambda: _raise(KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        engine.backward(loss_of(engine, 0))


def error_in_plain_backward(engine: Engine) -> None:
    _hooked(engine, "backward", lambda: _raise(KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        loss_of(engine, 0).backward()
    engine.zero_grad()


def error_in_step_hook(engine: Engine) -> None:
    assert engine.optimizer is not None
    handle = engine.optimizer.register_step_pre_hook(lambda *args: _raise(KeyError("mine")))
    engine.backward(loss_of(engine, 0))
    with pytest.raises(KeyError, match="mine"):
        engine.step()
    handle.remove()
    engine.zero_grad()


def interrupt_in_forward(engine: Engine) -> None:
    _hooked(engine, "forward", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        loss_of(engine, 0)


def interrupt_in_backward(engine: Engine) -> None:
    _hooked(engine, "backward", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        engine.backward(loss_of(engine, 0))


def interrupt_in_plain_backward(engine: Engine) -> None:
    _hooked(engine, "backward", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        loss_of(engine, 0).backward()
    engine.zero_grad()


def interrupt_in_module_forward(engine: Engine) -> None:
    """Through ``engine.module``, as ``generate()`` does."""
    _hooked(engine, "forward", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        engine.module(batch(0))


def wrapped_twice(engine: Engine) -> None:
    with pytest.raises(offload.StateError, match="already wrapped by another engine"):
        Engine(engine.module, AdamW(), **everything_on_device())
    with pytest.raises(offload.StateError, match="already wrapped"):
        Engine(engine.module.blocks[2], AdamW(), **everything_on_device())
    with pytest.raises(offload.StateError, match="already wrapped"):
        Engine(nn.Sequential(nn.Linear(2, 2), engine.module), AdamW(), **everything_on_device())


def copied_or_pickled(engine: Engine) -> None:
    for module in (engine.module, engine.module.blocks[2]):
        for copying in (copy.deepcopy, pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
            with pytest.raises(offload.StateError, match=r"model: cannot be copied.*engine\.state_dict\(\)"):
                copying(module)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(offload.StateError, match="engine: cannot be copied"):
            copying(engine)
        with pytest.raises(offload.StateError, match=r"optimizer: cannot be copied.*optimizer\.state_dict"):
            copying(engine.optimizer)


def written_while_in_use(engine: Engine) -> None:
    """Whatever writes parameters inside gather is refused before anything is written."""
    assert engine.optimizer is not None
    other = {name: value + 1 for name, value in engine.state_dict().items()}
    packed = engine.optimizer.state_dict()
    weight = engine.module.blocks[3].weight
    in_use = pytest.raises(offload.StateError, match=r"parameters of .*3: cannot be written.*leave the engine\.gather")
    with engine.gather(weight):
        before = weight.clone()
        with in_use:
            engine.load_state_dict(other)
        with in_use, engine.gather(engine.module.blocks[3], modify=True):
            pass
        if packed["state"]:
            with in_use:
                packed["param_groups"][0]["lr"] = 3.0
                engine.optimizer.load_state_dict(packed)
        assert torch.equal(weight, before)
    engine.backward(loss_of(engine, 0))
    with engine.gather(weight), in_use:
        engine.step()


def values_that_are_no_parameters(engine: Engine) -> None:
    expected = "gather: expected a parameter, several, or a module but got a value of type "
    weight = engine.module.blocks[3].weight
    for value, got in [
        (None, "NoneType"),
        (1, "int"),
        ([1], "int in a list"),
        ([weight, None], "NoneType in a list"),
        ("blocks", "str in a str"),
        (dict(engine.module.named_parameters()), "str in a dict"),
    ]:
        for modify in (False, True):
            with pytest.raises(offload.ConfigError, match=f"{expected}{got}; pass"):
                engine.gather(value, modify=modify).__enter__()  # type: ignore[arg-type]
    with pytest.raises(
        offload.StateError, match=rf"gather: a parameter of shape \({WIDTH},\) is not one of this engine"
    ):
        engine.gather(torch.ones(WIDTH)).__enter__()
    for value in (None, 1, [1], "blocks", [("blocks.3.bias", weight)]):
        text = (
            f"state dict: expected a mapping of names to tensors but got a value of type {type(value).__name__}; load"
        )
        with pytest.raises(offload.ConfigError, match=text):
            engine.load_state_dict(value)  # type: ignore[arg-type]
    with pytest.raises(offload.ConfigError, match=r"unexpected \['x', 1\]"):
        engine.load_state_dict({**engine.state_dict(), "x": weight, 1: weight})  # type: ignore[dict-item]


def saved_tensor_changed_in_place(engine: Engine) -> None:
    """Torch itself looks only where no hooks are; the gradient would be wrong."""
    x = batch(0)
    loss = engine(x).pow(2).mean()
    x.add_(1)
    with pytest.raises(offload.StateError, match=r"changed in place after the forward had used it"):
        engine.backward(loss)


def traced(engine: Engine) -> None:
    with pytest.raises(offload.StateError, match="cannot be traced or compiled"):
        with warnings.catch_warnings(action="ignore"):  # torch deprecates it
            torch.jit.trace(engine.module, batch(0))


def compiled(engine: Engine) -> None:
    """Whoever compiles the engine, its model, a part of it, or a function that calls it."""

    def called(x: torch.Tensor) -> torch.Tensor:
        return engine(x) + 1

    for part in (engine, engine.module, called):
        with pytest.raises(offload.StateError, match="cannot be traced or compiled"):
            torch.compile(part, backend="eager")(batch(0))
    block = engine.module.blocks[1]
    block.compile(backend="eager")
    with pytest.raises(offload.StateError, match="cannot be traced or compiled"):
        loss_of(engine, 0)
    block._compiled_call_impl = None


def read_error_in_forward(engine: Engine) -> None:
    store(engine).inject(Fault(nth=1, target=FaultTarget.READS, forever=True))
    with pytest.raises(SwapError, match=r"EIO") as caught:
        loss_of(engine, 0)
    assert caught.value.errno == errno.EIO
    store(engine).clear_faults()


def read_error_in_backward(engine: Engine) -> None:
    loss = loss_of(engine, 0)
    store(engine).inject(Fault(nth=1, target=FaultTarget.READS, forever=True))
    with pytest.raises(SwapError, match=r"EIO"):
        engine.backward(loss)
    store(engine).clear_faults()


def read_error_in_an_update(engine: Engine) -> None:
    """An update whose bytes cannot be read is made when they can be: a read damages nothing."""
    assert engine.optimizer is not None
    if not engine.stats().step:  # states that have never been written are not read
        guess_nothing(engine)
        return
    store(engine).inject(Fault(nth=1, target=FaultTarget.READS, forever=True))
    for look in (engine.drain, engine.state_dict, engine.optimizer.state_dict, lambda: loss_of(engine, 0)):
        with pytest.raises(SwapError, match=r"EIO"):
            look()
    store(engine).clear_faults()


def short_read(engine: Engine) -> None:
    """A transfer that stops in the middle is continued; nobody notices."""
    store(engine).inject(Fault(nth=2, action=FaultAction.SHORT, short_bytes=4096, target=FaultTarget.READS))
    loss_of(engine, 0)
    store(engine).clear_faults()


def late_read(engine: Engine) -> None:
    """A read slower than everything else is waited for."""
    store(engine).inject(Fault(nth=1, action=FaultAction.DELAY, delay_s=0.05, target=FaultTarget.READS))
    engine.backward(loss_of(engine, 0))
    engine.zero_grad()


DISTURBANCES = [
    pytest.param(nan_loss, marks=pytest.mark.cpu("losses are looked at")),
    pytest.param(infinite_loss, marks=pytest.mark.cpu("losses are looked at")),
    nan_gradient,
    nan_gradient_of_one_parameter,
    step_without_backward,
    optimizer_step_without_backward,
    backward_twice,
    plain_backward_twice,
    backward_of_no_tensor,
    pytest.param(batch_on_the_wrong_device, marks=pytest.mark.cpu("it names the device")),
    nested_batch_on_the_wrong_device,
    batch_of_the_wrong_shape,
    batch_too_large,
    error_in_forward,
    error_in_backward,
    error_in_plain_backward,
    error_in_step_hook,
    interrupt_in_forward,
    interrupt_in_backward,
    interrupt_in_plain_backward,
    interrupt_in_module_forward,
    wrapped_twice,
    copied_or_pickled,
    written_while_in_use,
    values_that_are_no_parameters,
    pytest.param(saved_tensor_changed_in_place, marks=pytest.mark.cpu("batches are not copied")),
    traced,
    pytest.param(compiled, marks=pytest.mark.cpu("calls of modules are not wrapped")),
    read_error_in_forward,
    read_error_in_backward,
    read_error_in_an_update,
    short_read,
    late_read,
]


def store(engine: Engine) -> Any:
    assert engine._manager is not None and engine._manager.tiers.store is not None
    return engine._manager.tiers.store


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda f: f.__name__)
def test_training_goes_on_as_if_nothing_had_happened(
    disturb: Callable[[Engine], None], engine: Engine, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Before the first step, and between two steps."""
    handler = signal.getsignal(signal.SIGINT)
    for number in range(STEPS):
        if number != 1:
            disturb(engine)
            engine._manager.check()  # type: ignore[union-attr]
        step(engine, number)
    assert_same_tensors(results(engine), undisturbed)
    assert engine.stats().step == STEPS
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda f: f.__name__)
def test_close_right_after_an_error(disturb: Callable[[Engine], None], tmp_path: Path) -> None:
    """Nothing is left, and the model has its parameters back."""
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path))
    disturb(engine)
    engine.close()
    assert_nothing_left(tmp_path)
    assert_same_tensors(dict(model.state_dict()), before)
    step_on_plain(model)


# --- in the middle of a step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", [lambda engine: loss_of(engine, 2), Engine.state_dict, Engine.drain])
@pytest.mark.parametrize("nth", [1, 3, 6])
def test_interrupt_in_an_update_comes_through_when_nothing_is_half_done(
    nth: int,
    look: Callable[[Engine], object],
    engine: Engine,
    undisturbed: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step goes on where it was: no part of an update is made twice, or not at all."""
    real, calls = cpu_adam.step, 0

    def interrupted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            signal.raise_signal(signal.SIGINT)
        real(*arguments)

    guess_nothing(engine)
    step(engine, 0)
    engine.backward(loss_of(engine, 1))
    monkeypatch.setattr(cpu_adam, "step", interrupted)
    beside = engine._manager.tiers.worker.apart  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        assert engine.step()
        assert calls == 0 or beside, "it was left to do"
        look(engine)
        if beside:
            engine.drain()
    monkeypatch.undo()
    assert calls >= nth
    assert engine.stats().step == 2
    step(engine, 2)
    assert_same_tensors(results(engine), undisturbed)


class Checkpointed(Net):
    """The blocks in segments of two, which backward repeats; or in one that repeats these."""

    nested = False

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return checkpoint(self._segments, x, use_reentrant=False) if self.nested else self._segments(x)

    def _segments(self, x: torch.Tensor) -> torch.Tensor:
        for at in range(0, len(self.blocks), 2):
            x = checkpoint(self._segment, x, at, use_reentrant=False)
        return x

    def _segment(self, x: torch.Tensor, at: int) -> torch.Tensor:
        for block in self.blocks[at : at + 2]:
            x = torch.tanh(block(x)) + x
        return x


def saved_tensor_hooks_in_force() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@pytest.mark.parametrize("through", ["engine", "plain"])
@pytest.mark.parametrize("where", ["forward", "recomputation"])
@pytest.mark.parametrize("nested", [False, True])
def test_interrupt_in_a_checkpointed_segment(
    nested: bool, where: str, through: str, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Torch calls no forward hook then, and has thrown away what was in force in the failed backward."""

    def interrupt(*args: object) -> None:
        if in_backward() == (where == "recomputation"):
            raise KeyboardInterrupt

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def run(engine: Engine) -> None:
        if through == "engine":
            engine.backward(loss_of(engine, number))
        else:
            loss_of(engine.module, number).backward()

    torch.manual_seed(0)
    model = Checkpointed()
    model.nested = nested
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        for number in range(STEPS):
            with torch.autograd.graph.saved_tensors_hooks(keep, keep):  # of the user, and of no concern to us
                with engine.gather(model.blocks[0].weight), pytest.raises(KeyboardInterrupt):
                    handle = model.blocks[number].register_forward_pre_hook(interrupt)
                    run(engine)
                handle.remove()
                if through == "plain":
                    engine.zero_grad()
                assert saved_tensor_hooks_in_force() == (keep, keep)
            assert saved_tensor_hooks_in_force() is None
            assert torch._C._len_torch_function_stack() == 0
            engine._manager.check()  # type: ignore[union-attr]
            run(engine)
            assert engine.step()
        assert_same_tensors(results(engine), undisturbed)
    assert_nothing_left(tmp_path)


def test_an_interrupted_plain_backward_is_noticed_by_the_next_forward(
    undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Also where that is a part of the model."""
    torch.manual_seed(0)
    model = Checkpointed()
    interrupted = True

    def interrupt(*args: object) -> None:
        if interrupted and in_backward():
            raise KeyboardInterrupt

    model.blocks[5].register_forward_pre_hook(interrupt)
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        for number in range(STEPS):
            interrupted = True
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, number).backward()
            interrupted = False
            assert engine._parts.hooks._forwards.under_way
            model.blocks[2](batch(number))
            assert not engine._parts.hooks._forwards.under_way
            assert saved_tensor_hooks_in_force() is None
            step(engine, number)
        assert_same_tensors(results(engine), undisturbed)


def test_every_error_of_the_clean_up_leaves_the_first_one(
    engine: Engine, undisturbed: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the clean-up is made; an interrupt that comes meanwhile is raised at its end."""

    step(engine, 0)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine._parts.activations), "abandon_pass", lambda _: _raise(failures.pop()))
        for failure, expected in ((RuntimeError("second"), KeyError), (KeyboardInterrupt(), KeyboardInterrupt)):
            failures = [failure]
            _hooked(engine, "backward", lambda: _raise(KeyError("mine")))
            with pytest.raises(expected):
                engine.backward(loss_of(engine, 1))
            assert not failures
            assert not any(sum(engine._manager.gradients.arrived(unit.index)) for unit in engine._parts.tree.units)  # type: ignore[union-attr]
    step(engine, 1)
    step(engine, 2)
    assert_same_tensors(results(engine), undisturbed)


def test_interrupt_and_close(tmp_path: Path) -> None:
    """The usual end: Ctrl-C out of a ``with`` block."""
    model = net()
    with pytest.raises(KeyboardInterrupt), Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        step(engine, 0)
        _hooked(engine, "backward", lambda: signal.raise_signal(signal.SIGINT))
        engine.backward(loss_of(engine, 1))
    assert_nothing_left(tmp_path)
    step_on_plain(model)


def assert_unusable(engine: Engine, text: str) -> None:
    """Every call says what is wrong; close() works."""
    assert engine.optimizer is not None
    calls: list[Callable[[], Any]] = [
        lambda: engine(batch(0)),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
        engine.optimizer.step,
        engine.zero_grad,
        engine.state_dict,
        engine.optimizer.state_dict,
        lambda: engine.load_state_dict({}, strict=False),
        lambda: engine.save_pretrained("nowhere"),
        lambda: engine.gather(engine.module).__enter__(),
    ]
    for call in calls:
        with pytest.raises(offload.StateError, match=text):
            call()
    assert not Path("nowhere").exists()
    engine.stats()
    str(engine.plan)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_write_error_in_a_step(code: int, tmp_path: Path) -> None:
    """Disk full or broken in the middle of the update: the step is lost, which every further call says."""
    model = net()
    engine = Engine(model, AdamW(), **tight(model, tmp_path))
    guess_nothing(engine)
    step(engine, 0)
    engine.backward(loss_of(engine, 1))
    store(engine).inject(Fault(nth=5, errno=code, target=FaultTarget.WRITES))
    assert engine.step()
    with pytest.raises(SwapError) as caught:
        engine.drain()
    assert caught.value.errno == code and caught.value.length_bytes and caught.value.path
    assert errno.errorcode[code] in str(caught.value)
    assert isinstance(caught.value, SwapFullError) == (code == errno.ENOSPC)
    assert_unusable(engine, "a step failed half way.*close it")
    engine.close()
    assert_nothing_left(tmp_path)
    with pytest.raises(offload.StateError, match="closed"):
        model(batch(0))


@pytest.mark.cpu(reason="the drive reads into memory of the device")
def test_memory_that_the_kernel_holds_at_the_end_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that even closing cannot take back comes to addresses that are given to nobody again."""
    model = net()
    engine = Engine(model, AdamW(), **tight(model, tmp_path))
    step(engine, 0)
    engine.drain()
    tiers = engine._manager.tiers
    arena, key = tiers._arenas[Tier.DEVICE], next(iter(store(engine).keys()))
    aio, size_bytes = store(engine).aio, store(engine).length_of(key)
    native, sizes = aio._engine, [one.size_bytes for one in tiers._arenas.values()]

    class Held:
        """The engine as a kernel leaves it that does not let go of a request."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def close(self, timeout_s: float) -> tuple[bool, bool]:
            return False, False

    monkeypatch.setattr(aio, "_engine", Held())
    monkeypatch.setattr(aio_file, "_unended", [])
    store(engine).inject(Fault(action=FaultAction.DELAY, delay_s=0.5, target=FaultTarget.READS))
    store(engine).get(key, arena.base_address, size_bytes)
    del arena, tiers
    with pytest.raises(SwapDeadlineError, match="still held by the kernel"):
        engine.close(restore=False)
    others = [HostArena(Tier.HOST, size) for size in sizes * 4 if size]
    while native.counters()["in_flight"]:
        pass
    assert not any(any(ctypes.string_at(one.base_address, one.size_bytes)) for one in others)
    assert native.counters()["read_errors"] == 0
    native.close(1.0)


def test_hanging_read_ends_at_the_deadline_with_a_dump(tmp_path: Path) -> None:
    model = net()
    engine = Engine(model, AdamW(), **tight(model, tmp_path, io_deadline_s=0.3))
    step(engine, 0)
    store(engine).inject(Fault(nth=1, action=FaultAction.HANG, target=FaultTarget.READS, forever=True))
    with pytest.raises(SwapDeadlineError, match=r"0\.3") as caught:
        step(engine, 1)
    assert "in flight" in str(caught.value) or "in_flight" in str(caught.value)
    assert "blocks." in "".join(caught.value.__notes__), "the dump names what waits"
    with pytest.raises(SwapDeadlineError):
        engine.close()
    engine.close()
    assert_nothing_left(tmp_path)
    with pytest.raises(offload.StateError, match="closed"):
        model(batch(0))


@pytest.mark.parametrize("target", [FaultTarget.READS, FaultTarget.WRITES])
@pytest.mark.parametrize(
    "spill",
    [
        pytest.param(False, id="gradients in memory"),
        pytest.param(True, id="gradients on nvme", marks=pytest.mark.cpu("this budget has no room for staging")),
    ],
)
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.nightly), 7])
def test_every_single_transfer_may_fail(
    stride: int,
    spill: bool,
    target: FaultTarget,
    tmp_path: Path,
    undisturbed: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fail the Nth transfer of a training, for every N: the engine is usable and exact, or unusable and says so."""
    options = tight(net(), tmp_path)
    if spill:
        # Staging (4 slots x 16 B x 64 Ki elements) and three gradients of a unit (16 KiB each): the others spill. Slots
        # without room for gradients would leave so much that none of such a small model has to.
        slot_bytes = sizing.slot_bytes
        monkeypatch.setattr(sizing, "slot_bytes", lambda request, chunk, **_: slot_bytes(request, chunk))
        options["max_memory"]["cpu"] = 4 * 16 * 65536 + 3 * 16384

    def train(engine: Engine) -> int:
        """Return how many steps failed; stops where the engine says that it cannot go on."""
        failed = 0
        for number in range(STEPS + 1):
            for _ in range(2):
                try:
                    step(engine, number) if number < STEPS else engine.drain()
                    break
                except SwapError as error:
                    assert error.errno == errno.EIO
                    failed += 1
                    if engine._life.unusable is None:
                        engine._manager.check()  # type: ignore[union-attr]
            else:
                pytest.fail("a transfer that failed once failed again")
        return failed

    with Engine(net(), AdamW(lr=1e-2), **options) as engine:
        assert any(home.grad is offload.memory.budget.Tier.NVME for home in engine.plan.homes) == spill
        before = store(engine).stats()
        assert train(engine) == 0
        after = store(engine).stats()
    count = after.reads - before.reads if target is FaultTarget.READS else after.writes - before.writes
    assert count >= 2 * (STEPS - 1) * len(net().blocks), "parameters and states, each once per step"

    exact = unusable = 0
    runs = [(nth, True) for nth in range(1, count + 1, stride)]
    if target is FaultTarget.WRITES:  # nobody knows which updates are made during backward, so here none is
        runs.append((1, False))
    for nth, guesses in runs:
        model = net()
        engine = Engine(model, AdamW(lr=1e-2), **options)
        if not guesses:
            guess_nothing(engine)
        store(engine).inject(Fault(nth=nth, target=target))
        try:
            train(engine)
        except offload.StateError as error:
            assert "failed half way" in str(error)
            unusable += 1
        else:
            store(engine).clear_faults()
            assert_same_tensors(results(engine), undisturbed)
            assert engine.stats().step == STEPS
            exact += 1
        store(engine).clear_faults()
        engine.close()
        assert_nothing_left(tmp_path)
    # Everything is read again, a gradient that did not reach the drive is computed again, and what an update during
    # backward could not write is written after the step. Then it is lost.
    assert (unusable > 0) == (target is FaultTarget.WRITES)
    assert exact > 0


# --- closed -----------------------------------------------------------------------------------------------------------


def test_closed_engine(tmp_path: Path) -> None:
    model = net()
    engine = Engine(model, AdamW(), **tight(model, tmp_path))
    loss = loss_of(engine, 0)
    engine.close()
    assert_unusable(engine, "closed")
    with pytest.raises(offload.StateError, match="closed"):
        loss.backward()
    engine.close()
    with engine:
        pass
    assert_nothing_left(tmp_path)
    step_on_plain(model)


def test_wrapping_again_after_close(tmp_path: Path) -> None:
    model = net()
    for _ in range(2):
        with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
            step(engine, 0)
    engine = Engine(model, AdamW(), **tight(model, tmp_path))
    engine.close(restore=False)
    with pytest.raises(offload.StateError, match="closed without restoring"):
        model(batch(0))
    with pytest.raises(offload.StateError, match="without restoring.*load the model again"):
        Engine(model, AdamW(), **tight(model, tmp_path))
    assert_nothing_left(tmp_path)


class Segments(nn.Module):
    """Blocks, each in a segment of its own."""

    def __init__(self, first: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(first(64), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what has the shape of `x`."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("rows", [512, 64])
@pytest.mark.parametrize("frozen", ["forward", "backward"])
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_what_is_frozen_or_unfrozen_under_checkpointing_is_refused(activations: str, frozen: str, rows: int) -> None:
    """What is repeated keeps other tensors, and torch counted those of units in neither run: it took one for another.

    It tells them apart whatever the shape of a parameter is.
    """
    model = Segments(lambda width: nn.Linear(width, width))
    memory = {"device": "64MiB", "cpu": "64MiB"}
    with Engine(model, offload.AdamW(), device="cpu", max_memory=memory, activations=activations) as engine:
        x = torch.randn(rows, 64, requires_grad=True)
        model.requires_grad_(frozen == "backward")
        loss = engine(x).pow(2).sum()
        model.requires_grad_(frozen == "forward")
        with pytest.raises(CheckpointError, match="different metadata|A different number of tensors"):
            loss.backward()
        assert x.grad is None
        model.requires_grad_(False)  # all along
        engine(x).pow(2).sum().backward()
        assert x.grad is not None
        model.requires_grad_(True)


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("trains", [True, False])
def test_what_is_toggled_and_keeps_the_same_tensors_is_fine(trains: bool, around: Callable[[], Any]) -> None:
    """A layer norm keeps the same ones; and nothing is repeated for hooks of others."""
    torch.manual_seed(0)
    model = Segments(nn.LayerNorm) if around is contextlib.nullcontext else nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    grads = []
    for one in (copy.deepcopy(model), model):
        wrapped = one is model
        memory = {"device": "64MiB", "cpu": "64MiB"}
        with (
            Engine(one, AdamW(), device="cpu", max_memory=memory) if wrapped else contextlib.nullcontext(one) as forward
        ):
            x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()
            one.requires_grad_(trains)
            with around():
                loss = forward(x).pow(2).sum()
            one.requires_grad_(not trains)
            loss.backward()
            one.requires_grad_(True)
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_shallow_copy_of_a_module_is_refused_by_name() -> None:
    """It has the hooks of the one that the engine knows, and none of its parameters."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.also = nn.Linear(8, 8), list[nn.Module]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Run the copies, too: a list holds them, in which torch sees no modules."""
            for module in (self.first, *self.also):
                x = module(x)
            return x

    model, x = Model(), torch.ones(1, 8)
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        engine(x)
        for module in (copy.copy(model), copy.copy(model.first)):
            with pytest.raises(offload.StateError, match="is a copy of a module that an engine has"):
                module(x)
        model.also.append(copy.copy(model.first))
        with pytest.raises(offload.StateError, match="Linear is a copy of a module that an engine has"):
            engine(x)
        model.also.clear()
        assert engine(x).shape == x.shape
