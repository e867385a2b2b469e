"""Each method of PEFT trains as in a plain loop: losses, norms, and the run that goes on from the middle.

The truth is PEFT with torch's AdamW and clipping. Engines have all in host memory, or all on NVMe, and a new one goes
on from the checkpoint in the middle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_tensors, everything_on_device, nvme
from models import VOCABULARY, architecture
from torch import nn
from trainers import LR, SMALL, assert_close, rows

from offload import Engine
from offload.classes import is_a
from offload.planning.partition import find_units
from offload.wrappers import inner_tensors

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("single_torch_thread"),
    pytest.mark.filterwarnings("ignore"),
]

TASK = {"task_type": "CAUSAL_LM"}
FEW = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
ALL = {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}
EXPERTS = {"target_modules": "all-linear"}  # which are parameters of three dimensions
OF_EXPERTS = architecture(
    "of experts",
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM",
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
)
TOTAL = 20  # steps that AdaLoRA plans


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of PEFT.

    Attributes:
        config: of the adapters.
        quantize: what is done to the base model before it gets them.
        dtype: of the base model and of the adapters.
        base: makes the base model.
    """

    config: Callable[[], Any]
    quantize: Callable[[Any], Any] = lambda base: base
    dtype: torch.dtype = torch.float32
    base: Callable[[], Any] = SMALL.build


def by_torchao(config: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def quantize(base: Any) -> Any:
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(base.model, config(torchao))
        return base

    return quantize


def by_bitsandbytes(base: Any) -> Any:
    bnb = pytest.importorskip("bitsandbytes")
    for layer in base.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    four = bnb.nn.Linear4bit(linear.in_features, linear.out_features, False, quant_type="nf4")
                    four.weight = bnb.nn.Params4bit(linear.weight.detach(), requires_grad=False, quant_type="nf4")
                    four.support_avx512bf16_for_cpu = False  # packs for the processor, which rounds
                    setattr(part, name, four)
    return base.to("cpu")


METHODS = {
    "LoRA": Method(lambda: peft.LoraConfig(r=4, **FEW, **TASK)),
    "LoRA, all linear": Method(lambda: peft.LoraConfig(r=4, **ALL, **TASK)),
    "LoRA, bfloat16": Method(lambda: peft.LoraConfig(r=4, **ALL, **TASK), dtype=torch.bfloat16),
    "LoRA, experts": Method(lambda: peft.LoraConfig(r=4, **EXPERTS, **TASK), base=OF_EXPERTS.build),
    "DoRA": Method(lambda: peft.LoraConfig(r=4, use_dora=True, **FEW, **TASK)),
    "PiSSA": Method(lambda: peft.LoraConfig(r=4, init_lora_weights="pissa", **FEW, **TASK)),
    "IA3": Method(lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "prefix": Method(lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK)),
    "prompt": Method(lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **TASK)),
    "AdaLoRA": Method(
        lambda: peft.AdaLoraConfig(init_r=6, target_r=2, tinit=2, tfinal=6, deltaT=1, total_step=TOTAL, **FEW, **TASK)
    ),
    "QLoRA, bitsandbytes": Method(lambda: peft.LoraConfig(r=4, **FEW, **TASK), by_bitsandbytes),
    "QLoRA, torchao int8": Method(
        lambda: peft.LoraConfig(r=4, **FEW, **TASK),
        by_torchao(lambda ao: ao.Int8WeightOnlyConfig(set_inductor_config=False)),
    ),
    "QLoRA, torchao float8": Method(
        lambda: peft.LoraConfig(r=4, **FEW, **TASK),
        by_torchao(lambda ao: ao.Float8WeightOnlyConfig(set_inductor_config=False)),
    ),
    "QLoRA, torchao int4": Method(
        lambda: peft.LoraConfig(r=4, **FEW, **TASK),
        by_torchao(lambda ao: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32))),
    ),
    "DoRA, torchao int8": Method(
        lambda: peft.LoraConfig(r=4, use_dora=True, **FEW, **TASK),
        by_torchao(lambda ao: ao.Int8WeightOnlyConfig(set_inductor_config=False)),
    ),
}
QUICK = ("LoRA, all linear", "LoRA, bfloat16", "LoRA, experts", "DoRA", "AdaLoRA", "prefix", "QLoRA, torchao int8")
CASES = [
    *(pytest.param(name, 4, id=name) for name in QUICK),
    *(pytest.param(name, TOTAL, id=f"{name}, {TOTAL} steps", marks=pytest.mark.nightly) for name in METHODS),
]


@dataclasses.dataclass
class Run:
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    state: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def build(name: str) -> Any:
    method = METHODS[name]
    torch.manual_seed(0)
    base = method.quantize(method.base().to(method.dtype).requires_grad_(False))
    torch.manual_seed(1)
    fp32 = method.dtype is torch.float32  # otherwise PEFT makes adapters of fp32 in a model of bf16
    model = peft.get_peft_model(base, method.config(), autocast_adapter_dtype=fp32).train()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {method.dtype}
    return model


def batch(number: int) -> dict[str, torch.Tensor]:
    ids = torch.stack([row["input_ids"] for row in rows(64)[2 * number : 2 * number + 2]])
    return {"input_ids": ids, "labels": ids}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, eps=1e-4)


def plain(name: str, steps: int) -> Run:
    model, run = build(name), Run()
    optimizer = adamw(model)
    for number in range(steps):
        loss = model(**batch(number)).loss
        loss.backward()
        run.losses.append(loss.item())
        unclipped = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
        run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        if name == "AdaLoRA":
            for parameter, gradient in unclipped.items():
                parameter.grad = gradient
            model.base_model.update_and_allocate(number)
        optimizer.zero_grad()
    return run


def allocator(model: Any) -> dict[str, Any]:
    """Return what AdaLoRA remembers, which neither PEFT nor an engine saves."""
    known = model.base_model.rankallocator
    pattern = model.peft_config["default"].rank_pattern
    return {"ipt": known.ipt, "avg": known.exp_avg_ipt, "unc": known.exp_avg_unc, "pattern": pattern}


def restore_allocator(model: Any, saved: dict[str, Any]) -> None:
    known = model.base_model.rankallocator
    known.ipt, known.exp_avg_ipt, known.exp_avg_unc = saved["ipt"], saved["avg"], saved["unc"]
    model.peft_config["default"].rank_pattern = saved["pattern"]


def train(
    name: str, steps: range, options: dict[str, Any], *, load: Path | None = None, save: Path | None = None
) -> Run:
    model, run = build(name), Run()
    adapts = name == "AdaLoRA"
    with Engine(model, adamw(model), max_grad_norm=1.0, **options) as engine:
        if load is not None:
            client = engine.load_checkpoint(load)
            if adapts:
                restore_allocator(model, client)
        for number in steps:
            loss = engine(**batch(number)).loss
            engine.backward(loss)
            run.losses.append(loss.item())
            gradients = {}
            if adapts:
                with engine.gather_gradients():
                    gradients = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
            engine.step()
            run.norms.append(float(engine.grad_norm))
            if adapts:
                with engine.gather(gradients, modify=True):
                    for parameter, gradient in gradients.items():
                        parameter.grad = gradient
                    model.base_model.update_and_allocate(number)
                    engine.optimizer.zero_grad()
            engine._manager.check()
            if save is not None and number == steps[len(steps) // 2] - 1:
                engine.save_checkpoint(save, client_state=allocator(model) if adapts else None)
        state = engine.state_dict()
        run.state = {f"{key}.{inner}": value for key, one in state.items() for inner, value in inner_tensors(one)}
    return run


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_training_is_that_of_plain_peft(name: str, steps: int, tmp_path: Path) -> None:
    truth, sizes = plain(name, steps), build(name)
    swap = tmp_path / "swap"
    swap.mkdir()
    at_once = 60 if name == "AdaLoRA" else 3  # its importances are of all adapters
    on_nvme = nvme(sizes, swap, unit_bytes=4096, units=at_once)
    in_memory = on_nvme | {"offload_param": "cpu", "offload_optimizer": "cpu"}
    ours = train(name, range(steps), on_nvme, save=tmp_path / "run")
    exact = METHODS[name].dtype is torch.float32
    assert_close(ours.losses, truth.losses, 1e-4 if exact else 2e-3)
    assert_close(ours.norms, truth.norms, 1e-4 if exact else 8e-3)  # one unit of bf16 in which torch rounds them
    assert ours.losses[-1] != ours.losses[0]
    if name == "AdaLoRA":
        ranks = torch.cat([value for key, value in ours.state.items() if "lora_E" in key])
        assert 0 < ranks.count_nonzero() < ranks.numel()
    other = train(name, range(steps), in_memory)
    assert (other.losses, other.norms) == (ours.losses, ours.norms)
    assert_same_tensors(other.state, ours.state)
    rest = train(name, range(steps // 2, steps), in_memory, load=tmp_path / "run")
    assert (rest.losses, rest.norms) == (ours.losses[steps // 2 :], ours.norms[steps // 2 :])
    assert_same_tensors(rest.state, ours.state)


def test_a_forward_around_experts_has_their_adapters_beside_them() -> None:
    """All at once, before it views any: a unit that is viewed cannot make room for a large one."""
    experts = nn.ParameterDict({name: nn.Parameter(torch.ones(4, 32, 32)) for name in ("up", "down")})
    base = nn.Sequential(nn.Linear(32, 32), nn.ModuleDict({"experts": experts}))
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.up", "experts.down"])
    model = peft.get_peft_model(base, config)
    tree = find_units(model, max_unit_bytes=4096)
    layers = [module for module in model.modules() if is_a(module, "peft", "ParamWrapper")]
    assert len(layers) == 2
    for layer in layers:
        below = {id(parameter) for parameter in layer.parameters()}
        lent = {id(parameter) for index in tree.leases[layer] for parameter in tree.parameters[index]}
        assert below <= lent


@pytest.mark.parametrize("place", ["device", "nvme", "recompute"])
def test_gradients_of_experts_are_those_of_plain_peft(place: str, tmp_path: Path) -> None:
    """To the last bit: wherever the base is, and if backward repeats the forward, which parametrizes its modules."""
    plain, model = build("LoRA, experts"), build("LoRA, experts")
    plain(**batch(0)).loss.backward()
    options = everything_on_device() if place == "device" else nvme(model, tmp_path, unit_bytes=4096)
    if place == "recompute":
        options["activations"] = place
    with Engine(model, adamw(model), **options) as engine:
        engine.backward(engine(**batch(0)).loss)
        with engine.gather_gradients():
            ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        engine.step()
        engine._manager.check()
    assert_same_tensors(ours, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})


def test_a_model_that_transformers_has_quantized_is_saved_as_by_itself(tmp_path: Path) -> None:
    """Weights of torchao are read when a file is written, like others."""
    torchao, transformers = pytest.importorskip("torchao.quantization"), pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    SMALL.build().save_pretrained(tmp_path / "base")
    how = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "base", quantization_config=how, dtype=torch.float32).requires_grad_(False)
    model.model.norm.weight.requires_grad_()
    model.save_pretrained(tmp_path / "plain")
    swap = tmp_path / "swap"
    swap.mkdir()
    with Engine(model, adamw(model), **nvme(model, swap, unit_bytes=4096)) as engine:
        engine.save_pretrained(tmp_path / "ours")
    saved = [safetensors.load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "plain")]
    assert "model.layers.0.mlp.up_proj._weight_qdata" in saved[0]
    assert_same_tensors(*saved)
