"""Adapters of PEFT are merged as in plain PEFT: in place under an engine, and into a checkpoint that is streamed."""

from __future__ import annotations

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
    "tokens": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], trainable_token_indices=[1, 5], init_lora_weights=False
    ),
}


def build(kind: str, dtype: torch.dtype = torch.float32, *, tied: bool = False, **sizes: int) -> Any:
    torch.manual_seed(0)
    config = BY_NAME["llama"].build().config
    config.tie_word_embeddings = tied
    for name, size in sizes.items():
        setattr(config, name, size)
    model = transformers.LlamaForCausalLM(config).to(dtype)
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
        offload.peft.merge_and_save(engine, tmp_path / "ours", max_shard_size="40KB")
        assert engine.digests() == before
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert_same_tensors(saved(tmp_path / "ours"), saved(tmp_path / "truth"))
    texts = [(tmp_path / folder / "config.json").read_text() for folder in ("ours", "truth")]
    assert texts[0] == texts[1]
    assert model.base_model.model.config.tie_word_embeddings == tied


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


@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "torchao"])
def test_quantized_weights_are_refused(kind: str, tmp_path: Path) -> None:
    """PEFT would round what it merges, and change what the layer shares with its copy."""
    library = "torchao" if kind == "torchao" else "bitsandbytes"
    module = pytest.importorskip(library)
    base = BY_NAME["llama"].build()
    layer = base.model.layers[0].self_attn
    shape = (layer.q_proj.in_features, layer.q_proj.out_features)
    if kind == "torchao":
        how = pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig(set_inductor_config=False)
        module.quantize_(layer.q_proj.requires_grad_(False), how)
    elif kind == "4 bits":
        layer.q_proj = module.nn.Linear4bit(*shape, False).requires_grad_(False)
    else:
        layer.q_proj = module.nn.Linear8bitLt(*shape, False, False).requires_grad_(False)
    model = peft.get_peft_model(base.to("cpu"), peft.LoraConfig(target_modules=["q_proj"]))
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        text = rf"is quantized by {library}; load the base model in 16 bits, put the adapters on it with"
        with pytest.raises(ConfigError, match=text):
            offload.peft.merge_and_save(engine, tmp_path)
