"""Adapters of PEFT are merged as in plain PEFT: in place under an engine, and into a checkpoint that is streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_tensors, everything_on_device, host, nvme
from models import BY_NAME

import offload
from offload import AdamW, ConfigError, Engine, StateError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("single_torch_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

FEW = ["q_proj", "v_proj", "down_proj"]
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=FEW, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=FEW, use_dora=True, init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False),
    "whole": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    ),
    "both": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"], init_lora_weights=False),
    "experts": lambda: peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    "tokens": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], trainable_token_indices=[1, 5], init_lora_weights=False
    ),
}


def build(kind: str, dtype: torch.dtype = torch.float32, *, tied: bool = False, **sizes: int) -> Any:
    torch.manual_seed(0)
    base = BY_NAME["qwen3_moe" if kind == "experts" else "llama"].build()
    config = base.config
    config.tie_word_embeddings = tied
    for name, size in sizes.items():
        setattr(config, name, size)
    model = type(base)(config).to(dtype)
    model = peft.get_peft_model(model, KINDS[kind](), autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 8)
    return model


def on_the_drive(model: Any, path: Path) -> dict[str, Any]:
    swap = path / "swap"
    swap.mkdir()
    return nvme(model, swap)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, as they are in its files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(safetensors.load_file(path))
    return found


@pytest.mark.few
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_plain_peft_saves(kind: str, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    """Bit by bit, with the same configuration; and the engine's model is what it was before."""
    build(kind, dtype, tied=tied).merge_and_unload().save_pretrained(tmp_path / "truth")
    model = build(kind, dtype, tied=tied)
    with Engine(model, AdamW(), **on_the_drive(model, tmp_path)) as engine:
        before = engine.digests()
        offload.peft.merge_and_save(engine, tmp_path / "ours")  # one file, which shards take the place of
        offload.peft.merge_and_save(engine, tmp_path / "ours", max_shard_size="40KB")
        assert engine.digests() == before
    assert not (tmp_path / "ours" / "model.safetensors").exists()
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert_same_tensors(saved(tmp_path / "ours"), saved(tmp_path / "truth"))
    texts = [(tmp_path / folder / "config.json").read_text() for folder in ("ours", "truth")]
    assert texts[0] == texts[1]
    assert model.base_model.model.config.tie_word_embeddings == tied


TILED: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["tiles.1"]},
    {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "gate_proj"]},
]


def tiled(more: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = BY_NAME["llama"].build()
    for layer in (model.lm_head, model.model.layers[0].mlp.gate_proj):
        torch.nn.init.normal_(layer.weight)
    assert len(offload.ops.tile_(model, larger_than=4096)) > 2
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **more))


@pytest.mark.parametrize("more", TILED)
def test_tiled_layers_are_saved_whole(more: dict[str, Any], tmp_path: Path) -> None:
    """Beside the adapters, with adapters on a tile, and where an adapter is a copy of the layer."""
    merged = tiled(more).merge_and_unload()
    truth = offload.ops.join_tiles(merged, merged.state_dict())
    assert "lm_head.weight" in truth and not any("tiles" in name for name in truth)
    with Engine(tiled(more), AdamW(), **everything_on_device()) as engine:
        offload.peft.merge_and_save(engine, tmp_path / "ours", max_shard_size="40KB")
    assert_same_tensors(saved(tmp_path / "ours"), truth)


@pytest.mark.parametrize("more", TILED)
def test_adapters_of_tiled_layers_are_saved_as_plain_peft_does(more: dict[str, Any], tmp_path: Path) -> None:
    tiled(more).save_pretrained(tmp_path / "truth")
    with Engine(tiled(more), AdamW(), **everything_on_device()) as engine:
        engine.save_pretrained(tmp_path / "ours")
    assert_same_tensors(saved(tmp_path / "ours"), saved(tmp_path / "truth"))


def test_adapters_of_several_kinds_are_merged(tmp_path: Path) -> None:
    """Of PEFT's own class for them."""

    def mixed() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(BY_NAME["llama"].build(), config, mixed=True)
        model.add_adapter("other", peft.LoHaConfig(r=2, target_modules=["v_proj"], init_weights=False))
        model.set_adapter(["default", "other"])
        return model

    truth = mixed().merge_and_unload().state_dict()
    with Engine(mixed(), AdamW(), **everything_on_device()) as engine:
        offload.peft.merge_and_save(engine, tmp_path / "ours")
    assert_same_tensors(saved(tmp_path / "ours"), dict(truth))


def test_training_goes_on_after_it(tmp_path: Path) -> None:
    """A run that saves after each step has the bits of one that does not, and each file those of its step."""
    data, runs = BY_NAME["llama"].batch(0), []
    for saves in (False, True):
        model = build("dora")
        place = tmp_path / str(saves)
        place.mkdir()
        with Engine(model, AdamW(lr=1e-2), **on_the_drive(model, place)) as engine:
            for step in range(2):
                engine.backward(engine(**data).loss)
                assert engine.step()
                if saves:
                    folder = tmp_path / f"step{step}"
                    offload.peft.merge_and_save(engine, folder, safe_merge=True)
                    plain = build("dora")
                    plain.load_state_dict(engine.state_dict())
                    truth = dict(plain.merge_and_unload(safe_merge=True).state_dict())
                    assert_same_tensors(saved(folder), truth)
                    engine._manager.check()
            runs.append(engine.state_dict())
    assert_same_tensors(*runs)
    assert not torch.equal(*(saved(tmp_path / f"step{n}")["model.layers.0.self_attn.q_proj.weight"] for n in (0, 1)))


def test_adapters_are_chosen_by_name(tmp_path: Path) -> None:
    def both() -> Any:
        model = build("lora")
        torch.manual_seed(1)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        return model

    truth = both().merge_and_unload(adapter_names=["other"]).state_dict()
    with Engine(both(), AdamW(), **everything_on_device()) as engine:
        offload.peft.merge_and_save(engine, tmp_path / "other", adapter_names=["other"])
    assert_same_tensors(saved(tmp_path / "other"), dict(truth))


def test_memory_is_that_of_a_file_and_a_layer(tmp_path: Path) -> None:
    """Beside what the engine has; the model is four times what may be taken."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 24, "vocab_size": 64, "head_dim": 128}
    model = build("lora", **sizes)
    model_bytes = sum(p.nbytes for p in model.parameters())
    options = nvme(model, tmp_path, unit_bytes=4 << 20) | {
        "max_memory": {"device": "96MiB", "cpu": "64MiB", "nvme": "1GiB"}
    }
    with Engine(build("lora"), None, **everything_on_device()) as engine:
        offload.peft.merge_and_save(engine, tmp_path / "warm")  # imports
    with Engine(model, None, **options) as engine:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak begins anew
        before = resident("VmRSS")
        offload.peft.merge_and_save(engine, tmp_path / "out", max_shard_size="8MB")
        taken = resident("VmHWM") - before
        assert taken < model_bytes / 4
    assert model_bytes > 100 << 20


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


@pytest.mark.few
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_adapters_are_merged_in_place_and_taken_out_again(kind: str, place: str, tmp_path: Path) -> None:
    """With PEFT's own calls, as in plain torch."""
    model, plain = build(kind), build(kind)
    options = {
        "device": everything_on_device,
        "host": lambda: host(model),
        "nvme": lambda: on_the_drive(model, tmp_path),
    }[place]()
    with Engine(model, AdamW(), **options) as engine:
        model.merge_adapter()
        plain.merge_adapter()
        assert_same_tensors(engine.state_dict(), dict(plain.state_dict()))
        offload.peft.merge_and_save(engine, tmp_path / "merged")
        plain.unmerge_adapter()
        with torch.no_grad():
            model.unmerge_adapter()
        assert_same_tensors(engine.state_dict(), dict(plain.state_dict()))
        engine._manager.check()
    assert_same_tensors(saved(tmp_path / "merged"), dict(build(kind).merge_and_unload().state_dict()))


def test_a_graph_that_views_a_weight_is_in_its_way() -> None:
    """Taking DoRA's adapters out makes one, unless no gradients are recorded."""
    with Engine(build("dora"), AdamW(), **everything_on_device()) as engine:
        engine.module.merge_adapter()
        with pytest.raises(StateError, match=r"drop it, or compute the value under torch\.no_grad\(\), or take a copy"):
            engine.module.unmerge_adapter()


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with Engine(BY_NAME["llama"].build(), AdamW(), **everything_on_device()) as engine:
        with pytest.raises(ConfigError, match=r"^merge_and_save: expected a PeftModel .* got a LlamaForCausalLM"):
            offload.peft.merge_and_save(engine, target)
    with Engine(build("lora"), AdamW(), **everything_on_device()) as engine:
        merged = engine.module.merge_and_unload()
        with pytest.raises(ConfigError, match=r"^merge_and_save: expected adapters but they are merged and unloaded"):
            offload.peft.merge_and_save(engine, target)
        with pytest.raises(StateError, match=r"^save_pretrained: expected adapters but they are merged and unloaded"):
            engine.save_pretrained(target)
        assert not target.exists()
        merged.save_pretrained(target)
    assert_same_tensors(saved(target), dict(build("lora").merge_and_unload().state_dict()))


QUANTIZED = ["4 bits", "4 bits, nested", "8 bits", "torchao"]
ON_QUANTIZED: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=FEW, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=FEW, use_dora=True, init_lora_weights=False),
    "whole": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    ),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], init_r=4, total_step=9),
}


def quantization_of(kind: str) -> Any:
    if kind == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    pytest.importorskip("bitsandbytes")
    if kind == "8 bits":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=kind == "4 bits, nested",
    )


def load_quantized(folder: Path, kind: str) -> Any:
    """Return a model of transformers, its layers' weights quantized, the same one each time."""
    if not folder.exists():
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "max_position_embeddings": 64}
        config = transformers.Qwen2Config(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
        transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    how = quantization_of(kind)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, quantization_config=how, dtype=torch.bfloat16, device_map="cpu").requires_grad_(False)


def with_adapters(base: Any, adapters: str) -> Any:
    model = peft.get_peft_model(base, ON_QUANTIZED[adapters]())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ranknum" not in name and any(part in name for part in ("lora_", "ia3_", "to_save")):
                parameter.data = 1 + torch.randn(parameter.shape, generator=generator) / 8
    return model


def dequantized_by_transformers(base: Any, kind: str, dtype: torch.dtype) -> Any:
    """Return the model with ordinary layers in `dtype`: transformers leaves biases, and cannot do it for torchao."""
    layers = [name for name, module in base.named_modules() if name.endswith("_proj")]
    if kind == "torchao":
        for layer in map(base.get_submodule, layers):
            layer.weight = torch.nn.Parameter(layer.weight.dequantize(), requires_grad=False)
        base.hf_quantizer.remove_quantization_config(base)
    else:
        base.dequantize()
        base.is_loaded_in_4bit = base.is_loaded_in_8bit = False  # PEFT asks
    for name in layers:
        base.get_submodule(name).to(dtype)
    return base


@pytest.mark.parametrize("adapters", ON_QUANTIZED)
@pytest.mark.parametrize(("kind", "dtype"), list(zip(QUANTIZED, [torch.bfloat16, torch.float32] * 2, strict=True)))
def test_quantized_weights_are_saved_as_ordinary_ones(
    kind: str, adapters: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With the bits of plain PEFT on the model that transformers has dequantized; any program loads it."""
    plain = dequantized_by_transformers(load_quantized(tmp_path / "base", kind), kind, dtype)
    truth = with_adapters(plain, adapters).merge_and_unload()
    model = with_adapters(load_quantized(tmp_path / "base", kind), adapters)
    own = model.base_model.model
    with Engine(model, AdamW(), **on_the_drive(model, tmp_path)) as engine:
        before = engine.digests()
        offload.peft.merge_and_save(
            engine, tmp_path / "ours", dequantize=str(dtype).removeprefix("torch."), max_shard_size="100KB"
        )
        assert engine.digests() == before
        assert own.hf_quantizer is not None and own.config.quantization_config is not None
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert_same_tensors(saved(tmp_path / "ours"), dict(truth.state_dict()))
    assert "quantization_config" not in (tmp_path / "ours" / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    numbers = torch.arange(32).view(2, 16)
    with torch.no_grad():
        assert torch.equal(loaded(numbers).logits, truth.float()(numbers).logits)


def test_quantizing_again_gives_what_peft_merges(tmp_path: Path) -> None:
    """PEFT's own merge into 4 bits rounds once more, which is quantizing what is saved in fp32."""
    bnb = pytest.importorskip("bitsandbytes")
    theirs = with_adapters(load_quantized(tmp_path / "base", "4 bits"), "lora").merge_and_unload()
    model = with_adapters(load_quantized(tmp_path / "base", "4 bits"), "lora")
    with Engine(model, AdamW(), **on_the_drive(model, tmp_path)) as engine:
        offload.peft.merge_and_save(engine, tmp_path / "ours", dequantize="float32")
    ours = saved(tmp_path / "ours")
    for name in FEW[:2]:
        weight = theirs.model.layers[0].self_attn.get_submodule(name).weight
        whole = ours[f"model.layers.0.self_attn.{name}.weight"]
        again = bnb.nn.Params4bit(whole, requires_grad=False, quant_type="nf4", compress_statistics=False).to("cpu")
        assert torch.equal(again.data, weight.data)
        assert torch.equal(again.quant_state.absmax, weight.quant_state.absmax)


def test_weights_that_were_saved_quantized(tmp_path: Path) -> None:
    """What transformers does to read such files is not done backwards."""
    load_quantized(tmp_path / "base", "4 bits").save_pretrained(tmp_path / "four")
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = dequantized_by_transformers(load(tmp_path / "four"), "4 bits", torch.bfloat16)
    truth = with_adapters(plain, "lora").merge_and_unload()
    model = with_adapters(load(tmp_path / "four"), "lora")
    with Engine(model, AdamW(), **on_the_drive(model, tmp_path)) as engine:
        offload.peft.merge_and_save(engine, tmp_path / "ours", dequantize="bfloat16")
    assert_same_tensors(saved(tmp_path / "ours"), dict(truth.state_dict()))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_are_refused(kind: str, tmp_path: Path) -> None:
    """PEFT would round what it merges, and change what the layer shares with its copy; the remedies work as told."""
    library = "torchao" if kind == "torchao" else "bitsandbytes"
    model = with_adapters(load_quantized(tmp_path / "base", kind), "lora")
    model.save_pretrained(tmp_path / "adapter")
    with Engine(model, AdamW(), **on_the_drive(model, tmp_path)) as engine:
        text = rf"is quantized by {library}; pass dequantize=\"bfloat16\" .*, or load the base model in 16 bits, put"
        with pytest.raises(ConfigError, match=text):
            offload.peft.merge_and_save(engine, tmp_path / "ours")
        with pytest.raises(
            ConfigError, match=r"^dequantize: expected one of bfloat16, float16, float32 but got 'int8'$"
        ):
            offload.peft.merge_and_save(engine, tmp_path / "ours", dequantize="int8")
        assert not (tmp_path / "ours").exists()
        offload.peft.merge_and_save(engine, tmp_path / "first", dequantize="bfloat16")
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = peft.PeftModel.from_pretrained(load(tmp_path / "base", dtype=torch.bfloat16), tmp_path / "adapter")
    truth = dict(plain.merge_and_unload().state_dict())
    (tmp_path / "second swap").mkdir()
    adapted = peft.PeftModel.from_pretrained(load(tmp_path / "base", dtype=torch.bfloat16), tmp_path / "adapter")
    with Engine(adapted, None, **nvme(adapted, tmp_path / "second swap")) as engine:
        offload.peft.merge_and_save(engine, tmp_path / "second")
    assert_same_tensors(saved(tmp_path / "second"), truth)
    first = saved(tmp_path / "first")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(first[name], truth[name]) and torch.allclose(first[name], truth[name], rtol=0.02)


@pytest.mark.parametrize("tuner", ["randlora", "vera"])
def test_adapters_that_nobody_merges_into_quantized_weights_are_refused(tuner: str, tmp_path: Path) -> None:
    base = load_quantized(tmp_path / "base", "4 bits")
    configs = {"randlora": peft.RandLoraConfig, "vera": peft.VeraConfig}
    model = peft.get_peft_model(base, configs[tuner](r=4, target_modules=["q_proj"]))
    with Engine(model, AdamW(), **on_the_drive(model, tmp_path)) as engine:
        text = (
            rf"expected adapters of LoRA, AdaLoRA or IA3 on quantized weights but .* is of class peft\.tuners\.{tuner}"
        )
        with pytest.raises(ConfigError, match=text):
            offload.peft.merge_and_save(engine, tmp_path / "ours", dequantize="bfloat16")


@pytest.mark.parametrize("dequantize", [None, "bfloat16"])
def test_weights_of_other_quantizers_are_refused(dequantize: Any, tmp_path: Path) -> None:
    """Known by the configuration alone: their layers have no parameters."""
    model = build("lora")
    model.base_model.model.config.quantization_config = {"quant_method": "gptq"}
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        with pytest.raises(ConfigError, match=r"^merge_and_save: expected ordinary weights, or those of bitsandbytes"):
            offload.peft.merge_and_save(engine, tmp_path / "ours", dequantize=dequantize)
    assert not (tmp_path / "ours").exists()


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


def load_fp8(folder: Path, kind: str) -> Any:
    """Return a model whose files have weights of 8 bits, which transformers dequantizes where no GPU knows these."""
    if not folder.exists():
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 128, "moe_intermediate_size": 128}
        sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 2}
        config = getattr(transformers, f"{kind}Config")(**sizes, head_dim=64)
        getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
        whole = saved(folder)
        for name in [name for name in whole if name.endswith("proj.weight")]:
            scale = whole[name].abs().max().float() / 448  # one block of 128 x 128, or two alike
            whole[name] = (whole[name] / scale).to(torch.float8_e4m3fn)
            whole[f"{name}_scale_inv"] = scale.expand([size // 128 for size in whole[name].shape]).contiguous()
        safetensors.save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "quantization_config": FP8}))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3Moe"])
def test_weights_that_were_dequantized_while_they_were_read(kind: str, tmp_path: Path) -> None:
    """They are saved as they are then, with the names of the files: transformers would quantize them again."""
    pytest.importorskip("transformers.core_model_loading")
    plain = load_fp8(tmp_path / "base", kind)
    if getattr(plain.config, "quantization_config", None) is not None:
        pytest.skip("a GPU here computes with weights of 8 bits")
    names = {name for name in saved(tmp_path / "base") if not name.endswith("_scale_inv")}
    with Engine(plain, None, **everything_on_device()) as engine:
        engine.save_pretrained(tmp_path / "ours")
    assert saved(tmp_path / "ours").keys() == names and {v.dtype for v in saved(tmp_path / "ours").values()} == {
        torch.bfloat16
    }
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert_same_tensors(dict(loaded.state_dict()), dict(plain.state_dict()))
    truth = with_adapters(load_fp8(tmp_path / "base", kind), "lora").merge_and_unload()
    with Engine(with_adapters(load_fp8(tmp_path / "base", kind), "lora"), None, **everything_on_device()) as engine:
        offload.peft.merge_and_save(engine, tmp_path / "merged")
    assert saved(tmp_path / "merged").keys() == names
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert_same_tensors(dict(loaded.state_dict()), dict(truth.state_dict()))
