"""The engine against a plain PyTorch loop, and against itself with the bytes elsewhere.

Which operations differ from ``torch.optim.AdamW``: the update is one fused pass (fma, constants folded in double), and
the global norm is added up in double. Everything before it - forward, backward, gradients - is the same operators on
the same bytes, so gradients are compared with ``torch.equal``; whatever follows the first update in plain PyTorch is
compared with a tolerance, and between placements with ``torch.equal`` again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from harness import (
    ACTIVATION_BYTES,
    UNIT_BYTES,
    assert_equal,
    everything_on_device,
    host,
    nvme,
    plain,
    run,
    working_bytes,
)
from models import BY_NAME, CORE, MORE, Architecture, architecture
from torch import nn

import offload
from offload.kernels import cpu_adam
from offload.memory.budget import Tier
from offload.planning.asked import Homes
from offload.planning.partition import find_units

STEPS = 20
TORCH_ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
CHECKPOINTING = [None, False, True]  # none, non-reentrant, reentrant
MAIN = ["llama", "t5", "bert", "gpt2"]
NO_CHECKPOINTING = ["xlnet", "convnext", "resnet"]  # in transformers
# Of the long tail: experts, states instead of attention, windows, an encoder beside a decoder, convolutions, sound.
EVERY_DAY = (
    *("mixtral", "falcon", "gpt_neo", "gemma2", "gpt_oss", "mamba2", "rwkv", "deberta_v2", "modernbert", "xlnet"),
    *("longformer", "bart", "clip", "swin", "resnet", "wav2vec2"),
)


pytestmark = pytest.mark.usefixtures("single_torch_thread")


def build(name: str, dtype: torch.dtype = torch.float32, checkpointing: bool | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = BY_NAME[name].build().to(dtype)
    if checkpointing is not None:
        if not getattr(model, "supports_gradient_checkpointing", False):
            pytest.skip(f"{name} has no gradient checkpointing in transformers")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    return model


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batches(name: str, count: int) -> list[dict[str, Any]]:
    return [BY_NAME[name].batch(number) for number in range(count)]


def seeded(model: nn.Module) -> nn.Module:
    """Seed dropout before each forward as the harness does."""
    calls = 0

    def seed(module: nn.Module, args: object) -> None:
        nonlocal calls
        torch.manual_seed(1000 + calls)
        calls += 1

    model.register_forward_pre_hook(seed)
    return model


# --- against plain PyTorch --------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MAIN)
def test_fp32_follows_torch_adamw(name: str, tmp_path: Path) -> None:
    """Losses within 1e-5 relative after 20 steps of two micro-batches with clipping; parameters close as well."""
    data = batches(name, 2 * STEPS)
    truth = reference.train(
        seeded(plain(build(name))),
        data,
        lambda p: torch.optim.AdamW(p, **TORCH_ADAMW),
        max_grad_norm=1.0,
        accumulation=2,
    )
    model = build(name)
    ours = run(
        model,
        data,
        optimizer=offload.AdamW(**TORCH_ADAMW),
        max_grad_norm=1.0,
        gradient_accumulation_steps=2,
        **nvme(model, tmp_path),
    )
    assert torch.equal(ours.losses[0], truth.losses[0]) and torch.equal(ours.losses[1], truth.losses[1])
    assert len(ours.norms) == STEPS
    assert max(truth.norms) > 1.0, "clipping was never needed: the test would not see it"
    for mine, theirs in zip(ours.losses, truth.losses, strict=True):
        assert abs(mine - theirs) <= 1e-5 * abs(theirs)
    for mine, theirs in zip(ours.norms, truth.norms, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    # A parameter moves by at most about lr per step whatever the gradient; where g is almost 0, sign(g) / g noise is
    # amplified by 1/sqrt(v). 1 % of the way that it can have gone is far above noise, far below a wrong step.
    for key, value in truth.parameters.items():
        assert (ours.parameters[key] - value).abs().max() <= 0.01 * STEPS * TORCH_ADAMW["lr"], key


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MAIN)
def test_bf16_follows_fp32_masters(name: str, tmp_path: Path) -> None:
    """One step exactly to fp32 noise, twenty to the noise of bf16.

    The first step has identical gradients in both loops, so masters differ only by the fused arithmetic: a few fp32
    ulps of the update (lr = 1e-3), 1e-6 absolute. Then a parameter whose master lies within that noise of a rounding
    boundary may land on the other bf16 neighbour (relative 2**-8), which changes the next gradients: from there on
    the two loops are two samples of the same training. T5 also computes its loss in bf16, whose neighbours are up to
    2**-7 apart: losses stay within 2**-6, two of those.
    """
    data = batches(name, STEPS)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **TORCH_ADAMW)

    kept: list[torch.optim.Optimizer] = []
    first = reference.train(
        seeded(plain(build(name, torch.bfloat16))), data[:1], make, max_grad_norm=1.0, after_step=kept.append
    )
    model = build(name, torch.bfloat16)
    options = {"optimizer": offload.AdamW(**TORCH_ADAMW), "max_grad_norm": 1.0, **nvme(model, tmp_path)}
    ours = run(model, data[:1], **options)
    assert torch.equal(ours.losses[0], first.losses[0])
    assert ours.norms[0] == pytest.approx(first.norms[0], rel=1e-5)
    masters = kept[0].param_groups[0]["params"]
    assert len(ours.states) == len(masters)
    for position, master in enumerate(masters):
        state = ours.states[position]
        theirs = {key: value.cpu() for key, value in kept[0].state[master].items()}
        assert (state["master"] - master.cpu()).abs().max() <= 1e-6
        # (1 - beta1) * g in one rounding here, in two there: half an ulp each.
        assert torch.allclose(state["exp_avg"], theirs["exp_avg"], rtol=1e-5, atol=1e-12)
        assert torch.allclose(state["exp_avg_sq"], theirs["exp_avg_sq"], rtol=1e-5, atol=1e-16)
        # and the parameter is exactly the rounded master
        assert torch.equal(reference.to_bfloat16_half_up(state["master"]), _parameter(ours, model, position))

    truth = reference.train(seeded(plain(build(name, torch.bfloat16))), data, make, max_grad_norm=1.0)
    model = build(name, torch.bfloat16)
    ours = run(model, data, **{**options, **nvme(model, tmp_path)})
    for mine, theirs in zip(ours.losses, truth.losses, strict=True):
        assert abs(mine.float() - theirs.float()) <= 2**-6 * abs(theirs.float())


def _parameter(ours: Any, model: nn.Module, position: int) -> torch.Tensor:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    result: torch.Tensor = ours.parameters[names[position]]
    return result


def test_reference_differs_when_a_step_is_wrong() -> None:
    """The tolerances above see a missing bias correction, decay or clip: the comparison can fail."""
    data = batches("llama", 8)
    truth = reference.train(
        plain(build("llama")), data, lambda p: torch.optim.AdamW(p, **TORCH_ADAMW), max_grad_norm=1.0
    )
    for wrong, norm in (
        (offload.AdamW(lr=1e-3, weight_decay=0.0), 1.0),
        (offload.AdamW(**TORCH_ADAMW), None),
    ):
        ours = run(build("llama"), data, optimizer=wrong, max_grad_norm=norm, **everything_on_device())
        worst = max(float((ours.parameters[key] - value).abs().max()) for key, value in truth.parameters.items())
        assert worst > 1e-5


# --- gradients and placements, architecture by architecture -----------------------------------------------------------


def plain_gradients(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1000)
    loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach().cpu(), gradients


def engine_gradients(model: nn.Module, batch: dict[str, Any], **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return loss and gradients; with beta1 = 0 and no clipping, exp_avg after one step is the gradient itself."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ours = run(model, [batch], optimizer=offload.AdamW(lr=1e-3, betas=(0.0, 0.9)), **options)
    return ours, {names[position]: state["exp_avg"] for position, state in ours.states.items()}


def check_architecture(kind: Architecture, checkpointing: bool | None, path: Path) -> None:
    name = kind.name
    data = batches(name, 2)
    loss, truth = plain_gradients(plain(build(name, checkpointing=checkpointing)), data[0])
    model = build(name, checkpointing=checkpointing)
    ours, gradients = engine_gradients(model, data[0], **nvme(model, path))
    assert torch.equal(ours.losses[0], loss)
    assert gradients.keys() == truth.keys()
    for key, gradient in gradients.items():
        assert torch.equal(gradient, truth[key]), f"gradient of {key}"

    outcomes = []
    for placement in (lambda m: everything_on_device(), lambda m: nvme(m, path)):
        model = build(name, checkpointing=checkpointing)
        outcomes.append(run(model, data, max_grad_norm=0.5, **placement(model)))
    device, tight = outcomes
    assert_equal(tight, device)
    assert_evicted(tight)
    assert device.stats.misses + device.stats.stalls == 0
    assert not list(path.iterdir())


def assert_evicted(outcome: Any) -> None:
    """The working region is smaller than the parameters, and units have come back that had been there before."""
    units = outcome.plan.request.units
    assert outcome.plan.working_bytes < sum(unit.param_bytes for unit in units)
    assert outcome.stats.misses + outcome.stats.stalls > 0
    loaded = sum(unit.param_bytes for unit in units)
    moved = outcome.stats.links["nvme_read"].bytes + outcome.stats.links["h2d"].bytes
    assert moved > loaded, f"{moved} bytes moved: each unit came at most once"


@pytest.mark.few
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", CORE, ids=lambda kind: kind.name)
def test_architecture(kind: Architecture, checkpointing: bool | None, tmp_path: Path) -> None:
    """Gradients equal plain PyTorch's; two steps on NVMe equal two steps on the device."""
    check_architecture(kind, checkpointing, tmp_path)


def in_turn(kinds: list[Architecture]) -> list[Any]:
    """Return parameters for a test: each kind of every day with one checkpointing in turn, the others nightly."""
    nightly, found = pytest.mark.nightly, []
    for number, kind in enumerate(kinds):
        own = None if kind.name in NO_CHECKPOINTING else CHECKPOINTING[number % len(CHECKPOINTING)]
        for each in CHECKPOINTING:
            marks = [] if each is own and kind.name in EVERY_DAY else [nightly]
            found.append(pytest.param(kind, each, id=f"{kind.name}-{each}", marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "checkpointing"), in_turn(MORE))
def test_more_architectures(kind: Architecture, checkpointing: bool | None, tmp_path: Path) -> None:
    """As above, for the long tail."""
    check_architecture(kind, checkpointing, tmp_path)


NVME_PARAMETERS = ("nvme", "parameters on nvme", "gradients spilled", "no prefetch")
NOT_NVME_STATES = {"host": Tier.HOST, "parameters on nvme": Tier.HOST, "states on device": Tier.DEVICE}
WIDE_UNIT_BYTES = 128 << 10
_WIDTH = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
_T5_WIDTH = {
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
}
WIDE = [
    architecture("llama", "LlamaConfig", "LlamaForCausalLM", vocab_size=200, num_key_value_heads=2, **_WIDTH),
    architecture(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        vocab_size=200,
        n_embd=128,
        n_layer=4,
        n_head=4,
        n_positions=64,
    ),
    architecture(
        "t5",
        "T5Config",
        "T5ForConditionalGeneration",
        vocab_size=200,
        decoder_start_token_id=0,
        pad_token_id=0,
        **_T5_WIDTH,
    ),
    architecture("bert", "BertConfig", "BertForMaskedLM", vocab_size=200, max_position_embeddings=32, **_WIDTH),
]

# --- placements -------------------------------------------------------------------------------------------------------


def placements(model: nn.Module, path: Path, *, grad_itemsize: int) -> dict[str, dict[str, Any]]:
    """Return budgets that put the bytes of one of :data:`WIDE` in different places."""
    small = nvme(model, path, unit_bytes=WIDE_UNIT_BYTES)
    automatic = {key: value for key, value in small.items() if not key.startswith("offload_")}
    numel = sum(p.numel() for p in model.parameters())
    staging = 4 * 16 * 65536  # slots x bytes in all roles x elements of the smallest chunk
    grads = 4 * numel
    units = find_units(model, max_unit_bytes=WIDE_UNIT_BYTES).units
    # Slots without room for gradients, and a page less than all gradients need.
    spilling = 4 * 12 * 65536 + sum(grad_itemsize * unit.numel for unit in units) - 4096

    def with_host(options: dict[str, Any], cpu: int) -> dict[str, Any]:
        return {**options, "max_memory": {**options["max_memory"], "cpu": cpu}}

    in_memory = host(model, unit_bytes=WIDE_UNIT_BYTES)
    return {
        "host": in_memory,
        "states on device": {
            **in_memory,
            "max_memory": {"device": "96MiB", "cpu": "64MiB"},
            "offload_optimizer": "none",
        },
        "nvme": small,
        "states on nvme": {**small, "offload_param": "cpu"},
        "parameters on nvme": with_host({**small, "offload_optimizer": "cpu"}, 32 << 20),
        "mixed": with_host(automatic, staging + grads + grads // 2),
        "gradients spilled": with_host(small, spilling),
        "no prefetch": {**small, "prefetch": False},
    }


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("dtype", "accumulation"),
    [
        pytest.param(torch.float32, 1, id="fp32"),
        pytest.param(torch.bfloat16, 2, id="bf16, 2 micro-batches"),
        pytest.param(torch.bfloat16, 1, id="bf16", marks=pytest.mark.nightly),
        pytest.param(torch.float32, 2, id="fp32, 2 micro-batches", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("kind", WIDE, ids=lambda a: a.name)
def test_placement_never_changes_the_result(
    kind: Architecture, dtype: torch.dtype, accumulation: int, tmp_path: Path
) -> None:
    """Models larger than the optimizer's staging, so that budgets split them."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind.build().to(dtype)

    data = [kind.batch(number) for number in range(3 * accumulation)]
    common: dict[str, Any] = {"max_grad_norm": 0.5, "gradient_accumulation_steps": accumulation}
    truth = run(make(), data, **common, **everything_on_device())
    assert len(truth.norms) == 3
    shared = truth.plan.request.device_is_host
    near = Tier.DEVICE if shared or truth.plan.request.updates_on_device else Tier.HOST
    assert all(home == Homes(Tier.DEVICE, near, near) for home in truth.plan.homes), str(truth.plan)
    grad_itemsize = 4 if accumulation > 1 else dtype.itemsize
    for label, options in placements(make(), tmp_path, grad_itemsize=grad_itemsize).items():
        if label == "states on device" and not shared:
            continue
        if not shared:  # what passes through host memory, of units that the planner may not divide
            options["max_memory"]["cpu"] = _more(options["max_memory"]["cpu"], make())
        ours = run(make(), data, **common, **options)
        assert_equal(ours, truth)
        homes = ours.plan.homes
        params, grads, states = ({getattr(h, role) for h in homes} for role in ("param", "grad", "states"))
        assert ours.stats.misses + ours.stats.stalls > 0, label
        assert (Tier.NVME in grads) == (label == "gradients spilled"), str(ours.plan)
        if label == "mixed":
            assert {Tier.HOST, Tier.NVME} <= params | states, str(ours.plan)
        else:
            assert params == {Tier.NVME if label in NVME_PARAMETERS else Tier.HOST}, str(ours.plan)
            assert states == {NOT_NVME_STATES.get(label, Tier.NVME)}, str(ours.plan)
    assert not list(tmp_path.iterdir())


def _more(cpu: int | str, model: nn.Module) -> int | str:
    """Return a host budget with room for two fetches and for the gradients of a unit, if it is tight."""
    largest = max(unit.param_bytes for unit in find_units(model, max_unit_bytes=WIDE_UNIT_BYTES).units)
    return cpu if isinstance(cpu, str) else cpu + 3 * largest


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_dtypes_with_checkpointing(dtype: torch.dtype, checkpointing: bool | None, tmp_path: Path) -> None:
    data = batches("llama", 3)
    options: dict[str, Any] = {"max_grad_norm": 0.5}
    if dtype is torch.float16:
        options["initial_loss_scale"] = 256.0
    truth = run(build("llama", dtype, checkpointing), data, **options, **everything_on_device())
    model = build("llama", dtype, checkpointing)
    ours = run(model, data, **options, **nvme(model, tmp_path))
    assert len(ours.norms) == 3, "every step was taken"
    assert_equal(ours, truth)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_count_never_changes_the_result(threads: int, tmp_path: Path) -> None:
    before = cpu_adam.num_threads()
    data = batches("gpt2", 3)
    try:
        truth = run(build("gpt2"), data, max_grad_norm=0.5, threads=4, **everything_on_device())
        model = build("gpt2")
        seen = set[int]()
        model.register_forward_pre_hook(lambda *_: seen.add(cpu_adam.num_threads()))
        ours = run(model, data, max_grad_norm=0.5, threads=threads, chunk_numel=65536, **nvme(model, tmp_path))
        assert seen == {threads} and cpu_adam.num_threads() == before
    finally:
        cpu_adam.set_num_threads(before)
    assert_equal(ours, truth)


_FORCED_ISA = """
import hashlib, os, sys
import torch, torch._dynamo  # once: what each process needs, and what knows nothing of the kernels
for wanted in sys.argv[2:]:
    child = os.fork()
    if not child:
        os.environ["OFFLOAD_CPU_ADAM_ISA"] = wanted
        os.dup2(os.open(f"{sys.argv[1]}/{wanted}", os.O_WRONLY | os.O_CREAT), 2)
        break
    print(wanted, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
torch.set_num_threads(1)
from torch import nn
import offload
from offload.kernels import cpu_adam
digest = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(67, 67), nn.Tanh()) for _ in range(4))).to(dtype)
    options = dict(device="cpu", max_grad_norm=0.5, unit_bytes=1 << 14, nvme_path=sys.argv[1], offload_optimizer="nvme")
    with offload.Engine(model, offload.AdamW(lr=1e-2, weight_decay=0.1), **options) as engine:
        for number in range(3):
            x = torch.randn(4, 67, generator=torch.Generator().manual_seed(number)).to(dtype)
            engine.backward(engine(x).float().sub(1).pow(2).sum())
            engine.step()
            digest.update(repr(engine.grad_norm).encode())
        states = engine.optimizer.state_dict()["state"].values()
        for tensor in (*engine.state_dict().values(), *(t for state in states for t in state.values())):
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
print(cpu_adam.isa(), digest.hexdigest(), end=" ")
"""


def test_instruction_set_never_changes_the_result(tmp_path: Path) -> None:
    """The same training in fresh processes with each instruction set this processor has."""
    names = ("scalar", "avx2", "avx512")
    done = subprocess.run(
        [sys.executable, "-c", _FORCED_ISA, str(tmp_path), *names],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    digests: dict[str, str] = {}
    for wanted, line in zip(names, done.stdout.splitlines(), strict=True):
        *printed, name, status = line.split()
        errors = (tmp_path / wanted).read_text()
        assert name == wanted
        if status != "0" and wanted != "scalar" and wanted in errors:
            continue  # the processor lacks it, and the library says so
        assert status == "0", errors
        isa, digest = printed
        assert isa == wanted
        digests[isa] = digest
    assert len(digests) > 1 or cpu_adam.isa() == "scalar"
    assert len(set(digests.values())) == 1, digests


_FIRST_CALL = """
import torch
from offload.memory.cpu import CpuDevice
CpuDevice()
x = torch.arange(512 * 64, dtype=torch.float32).reshape(512, 64) + 1
first, second = torch.log(x), torch.log(x)
assert torch.equal(first, second), (first - second).abs().max()
"""


@pytest.mark.nightly
@pytest.mark.cpu("vector functions are those of the CPU")
def test_first_vector_function_of_a_process_is_like_the_others() -> None:
    """MKL loses digits in a first call that threads share: in 1 of 11 processes, where nothing has called it before."""
    for _ in range(40):
        done = subprocess.run([sys.executable, "-c", _FIRST_CALL], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_working_region_of_three_units_is_the_least(tmp_path: Path) -> None:
    """Exactly the three largest units are enough; a page less is refused with that number."""
    model = build("llama")
    options = nvme(model, tmp_path)
    least = options["max_memory"]["device"]
    assert least == ACTIVATION_BYTES + working_bytes(model, unit_bytes=UNIT_BYTES)
    run(build("llama"), batches("llama", 1), **options)
    options["max_memory"]["device"] = least - 4096
    with pytest.raises(offload.BudgetError, match=f"{least} bytes"):
        run(build("llama"), batches("llama", 1), **options)
