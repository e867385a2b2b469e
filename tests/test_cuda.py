"""The engine on a CUDA device: the same promises as on the CPU, where copies are asynchronous and memory is not shared.

Everything here needs a GPU and is skipped without one. What the CPU tests show of planning, bookkeeping, files and
kernels is not repeated.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from harness import ACTIVATION_BYTES, UNIT_BYTES, Outcome, assert_equal, run, working_bytes
from models import BY_NAME
from torch import nn

import offload
from offload import AdamW, Engine
from offload.memory import page_lock

pytestmark = pytest.mark.gpu
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA begins

MIB = 1 << 20
CHECKPOINTING = [None, False, True]  # none, non-reentrant, reentrant
MAIN = ["llama", "gpt2", "t5", "bert"]


@pytest.fixture(autouse=True)
def _kernels_that_repeat_their_bits() -> Iterator[None]:
    """What placements are compared in; docs/gpu.md says which kernels do not."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def build(name: str, dtype: torch.dtype = torch.float32, checkpointing: bool | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = BY_NAME[name].build().to(dtype)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    return model


def batches(name: str, count: int) -> list[dict[str, Any]]:
    return [{key: value.to("cuda") for key, value in BY_NAME[name].batch(i).items()} for i in range(count)]


def placed(home: str, model: nn.Module, path: Path, **more: Any) -> dict[str, Any]:
    """Options: parameters and states at `home`; unless that is the device, it has room for three units."""
    memory: dict[str, Any] = {"device": "256MiB", "cpu": "256MiB"}
    options: dict[str, Any] = {"device": "cuda", "max_memory": memory, "unit_bytes": UNIT_BYTES, **more}
    if home in ("device", "all"):
        return {**options, "offload_param": "none", "offload_optimizer": "cpu" if home == "device" else "none"}
    memory["device"] = ACTIVATION_BYTES + working_bytes(model, dtype=more.get("dtype"))
    options |= {"activation_memory": ACTIVATION_BYTES, "offload_param": home, "offload_optimizer": home}
    if home == "nvme":
        memory["nvme"] = "256MiB"
        options["nvme_path"] = path
    return options


def train(name: str, home: str, path: Path, **build_options: Any) -> Outcome:
    model = build(name, **build_options)
    return run(model, batches(name, 4), optimizer=AdamW(lr=1e-3), max_grad_norm=1.0, **placed(home, model, path))


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAIN)
def test_placement_changes_nothing(name: str, dtype: torch.dtype, checkpointing: bool | None, tmp_path: Path) -> None:
    truth = train(name, "device", tmp_path, dtype=dtype, checkpointing=checkpointing)
    for home in ("cpu", "nvme"):
        ours = train(name, home, tmp_path, dtype=dtype, checkpointing=checkpointing)
        assert_equal(ours, truth)
        assert ours.stats.links["h2d"].bytes > 0 and ours.stats.links["d2h"].bytes > 0


OPTIMIZERS = {
    "AdamW": (AdamW(lr=1e-3, weight_decay=0.1), {}),
    "AdamW, bf16 states": (AdamW(lr=1e-3, weight_decay=0.1), {"state_dtype": "bfloat16"}),
    "Adam": (offload.Adam(lr=1e-3, weight_decay=0.1), {}),
    "SGD": (offload.SGD(lr=1e-2), {}),
    "momentum": (offload.SGD(lr=1e-2, momentum=0.9, nesterov=True), {}),
    "Lion": (offload.Lion(lr=1e-3, weight_decay=0.1), {}),
    "Adagrad": (offload.Adagrad(lr=1e-2), {}),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_on_the_device_have_the_hosts_bits(
    name: str, dtype: torch.dtype, accumulation: int, tmp_path: Path
) -> None:
    optimizer, more = OPTIMIZERS[name]
    found = []
    for home in ("device", "all"):
        model = build("llama", dtype)
        options = placed(home, model, tmp_path) | more | {"gradient_accumulation_steps": accumulation}
        found.append(run(model, batches("llama", 4), optimizer=optimizer, max_grad_norm=0.5, **options))
        plan = found[-1].plan
        on_device = [plan.on_device(unit) for unit in plan.request.units if unit.trainable]
        assert all(on_device) if home == "all" else not any(on_device)
    assert_equal(found[1], found[0])


def test_all_of_it_is_on_a_device_with_room(tmp_path: Path) -> None:
    model = build("llama", torch.bfloat16)
    with Engine(model, AdamW(lr=1e-3), device="cuda", max_memory={"device": "1GiB", "cpu": "256MiB"}) as engine:
        assert all(engine.plan.on_device(unit) for unit in engine.plan.request.units), str(engine.plan)


def test_copies_over_the_ends_of_pieces_that_were_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses a copy from or to memory that two calls have locked."""
    truth = train("llama", "cpu", tmp_path)
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 3 * 4096)
    assert_equal(train("llama", "cpu", tmp_path), truth)


@pytest.mark.parametrize("name", MAIN)
def test_fp32_follows_torch_adamw(name: str, tmp_path: Path) -> None:
    """Losses within 1e-5 relative after 20 steps; the first one, before any update, to the bit."""
    data = batches(name, 20)
    plain = build(name).to("cuda")
    calls = iter(range(len(data)))
    plain.register_forward_pre_hook(lambda module, args: torch.manual_seed(1000 + next(calls)) and None)
    truth = reference.train(plain, data, lambda p: torch.optim.AdamW(p, lr=1e-3), max_grad_norm=1.0)
    model = build(name)
    options = placed("nvme", model, tmp_path)
    ours = run(model, data, optimizer=AdamW(lr=1e-3, weight_decay=0.01), max_grad_norm=1.0, **options)
    assert torch.equal(ours.losses[0].cpu(), truth.losses[0])
    for mine, theirs in zip((loss.cpu() for loss in ours.losses), truth.losses, strict=True):
        assert abs(mine - theirs) <= 1e-5 * abs(theirs)


def test_the_device_budget_holds_as_torch_counts_it(tmp_path: Path) -> None:
    """Sixteen blocks of 8 MiB in a device budget of five: arena, activations and gradients on their way included."""
    width, budget_bytes = 2048, 40 * MIB
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(16)))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    options: dict[str, Any] = {
        "device": "cuda",
        "max_memory": {"device": budget_bytes, "cpu": "512MiB", "nvme": "1GiB"},
        "nvme_path": tmp_path,
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
    }
    with Engine(model, AdamW(lr=1e-4), **options) as engine:
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(16, width, generator=generator).to("cuda", torch.bfloat16)
            engine.backward(engine(x).float().pow(2).mean())
            engine.step()
        assert engine.stats().misses > 0
        assert torch.cuda.max_memory_allocated() - before <= budget_bytes
    del engine, x
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + MIB


def test_an_overflow_skips_the_step(tmp_path: Path) -> None:
    model = build("llama")
    options = placed("cpu", model, tmp_path, dtype="float16")
    data = batches("llama", 3)
    with Engine(model, AdamW(lr=1e-3), initial_loss_scale=2.0**40, **options) as engine:
        before = engine.state_dict()
        engine.backward(engine(**data[0]).loss)
        assert not engine.step()
        after = engine.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())


def test_parameters_and_buffers_go_back_where_they_were(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            out: torch.Tensor = self.norm(x)
            return out

    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = Net().to(device)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with Engine(model, AdamW(lr=1e-3), **placed("cpu", model, tmp_path)) as engine:
            engine.eval()
            with torch.no_grad():
                expected = engine(torch.ones(2, 64, device="cuda"))
            weight = model.blocks[0].weight
            with engine.gather(weight):
                assert weight.device.type == "cuda" and torch.equal(weight.cpu(), before["blocks.0.weight"].cpu())
        for name, tensor in model.state_dict().items():
            assert tensor.device.type == device and torch.equal(tensor, before[name]), name
        model.eval()
        assert torch.allclose(model(torch.ones(2, 64, device=device)).cpu(), expected.cpu(), atol=1e-5)


def test_two_engines_share_the_device(tmp_path: Path) -> None:
    data = batches("llama", 3)
    alone = train("llama", "cpu", tmp_path)
    models = [build("llama"), build("llama")]
    engines = [Engine(m, AdamW(lr=1e-3), max_grad_norm=1.0, **placed("cpu", m, tmp_path)) for m in models]
    losses: list[list[torch.Tensor]] = [[], []]
    for number, batch in enumerate(data):
        for engine, kept in zip(engines, losses, strict=True):
            torch.manual_seed(1000 + number)
            loss = engine(**batch).loss
            kept.append(loss.detach().clone())
            engine.backward(loss)
            engine.step()
    for engine in engines:
        engine.close()
    for kept in losses:
        assert all(torch.equal(a, b) for a, b in zip(kept, alone.losses, strict=False))


def test_the_cache_may_be_emptied(tmp_path: Path) -> None:
    """Between all modules, in forward and backward, as some trainers do: the arena is in use and stays."""
    truth = train("llama", "cpu", tmp_path)
    model = build("llama")
    for block in model.model.layers:
        block.register_forward_hook(lambda *_: torch.cuda.empty_cache())
        block.register_full_backward_hook(lambda *_: torch.cuda.empty_cache())
    options = placed("cpu", model, tmp_path)
    ours = run(model, batches("llama", 4), optimizer=AdamW(lr=1e-3), max_grad_norm=1.0, **options)
    assert_equal(ours, truth)


def test_a_batch_on_the_host_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    with Engine(model, AdamW(), **placed("cpu", model, tmp_path)) as engine:
        with pytest.raises(offload.StateError, match="cpu"):
            engine(**BY_NAME["llama"].batch(0))
