"""Linear layers in tiles: the values of the whole layer, room for one tile, and the names of the user's checkpoints."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ACTIVATION_BYTES, assert_equal, everything_on_device, run
from torch import nn

import offload
from offload import ops
from offload.activations import tiling
from offload.activations.tiling import MOST_TILES
from offload.cli.main import main
from offload.errors import BudgetError, ConfigError
from offload.planning.partition import find_units

pytestmark = pytest.mark.usefixtures("single_torch_thread")


def layer(*sizes: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(*sizes, bias=bias, dtype=dtype)


def through(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return output, gradient of the input, and those of the parameters with the names of the whole layer."""
    x = x.clone().requires_grad_()
    output = module(x)
    output.float().pow(2).sum().backward()
    assert x.grad is not None
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return output.detach(), x.grad, ops.join_tiles(module, gradients)


@pytest.mark.parametrize("bias", [True, False])
def test_values_are_those_of_the_whole_layer(*, bias: bool) -> None:
    whole = layer(29, 23, bias=bias).double()
    x = torch.randn(4, 5, 29, dtype=torch.float64)
    truth = through(copy.deepcopy(whole), x)
    for in_splits, out_splits in itertools.product((1, 3, 29), (1, 4, 23)):
        tiled = ops.TiledLinear(whole, in_splits=in_splits, out_splits=out_splits)
        assert len(tiled.tiles) == in_splits * out_splits
        output, of_input, gradients = through(tiled, x)
        torch.testing.assert_close(output, truth[0], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(of_input, truth[1], rtol=1e-13, atol=1e-12)
        torch.testing.assert_close(gradients, truth[2], rtol=1e-12, atol=1e-12)


def test_sums_of_input_splits_are_rounded_once() -> None:
    """1 and many halves of a last bit: added in bfloat16 one by one they would vanish."""
    whole = layer(65, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        whole.weight.fill_(2**-9)
        whole.weight[0, 0] = 1.0
    tiled = ops.TiledLinear(whole, in_splits=65)
    assert tiled(torch.ones(1, 65, dtype=torch.bfloat16)).item() == 1.125


@pytest.mark.parametrize(("weight", "bias"), [(False, False), (False, True), (True, False)])
def test_whole_is_the_way_back(weight: bool, bias: bool) -> None:
    whole = layer(8, 6)
    whole.weight.requires_grad_(weight)
    whole.bias.requires_grad_(bias)
    back = ops.TiledLinear(whole, in_splits=2, out_splits=3).eval().whole()
    assert type(back) is nn.Linear and not back.training
    assert torch.equal(back.weight, whole.weight) and torch.equal(back.bias, whole.bias)
    assert back.weight.requires_grad is weight and back.bias.requires_grad is bias


def test_a_new_one_is_initialised_as_the_whole_layer_is() -> None:
    tiled = ops.TiledLinear((400, 50), in_splits=8, out_splits=2, dtype=torch.bfloat16)
    values = torch.cat([parameter.flatten() for parameter in tiled.parameters()]).float().abs()
    assert 0.9 / 20 < values.max() <= 1 / 20 + 1e-3  # 1 / sqrt(400); of a tile it would be 1 / sqrt(50)
    assert ops.TiledLinear((4, 4), bias=False, device="meta").tiles[0].weight.is_meta
    assert "out_splits=2" in repr(tiled)
    assert tiled.bias.shape == (50,) and ops.TiledLinear((4, 4), bias=False).bias is None
    assert torch.equal(
        copy.deepcopy(tiled)(torch.ones(1, 400, dtype=torch.bfloat16)), tiled(torch.ones(1, 400).bfloat16())
    )


def test_a_tiled_layer_tells_the_form_of_its_weight_and_nothing_else() -> None:
    """As forwards of other modules ask for it, T5's for the dtype."""
    tiled = ops.TiledLinear(layer(40, 6, dtype=torch.bfloat16).requires_grad_(False), in_splits=8, out_splits=2)
    weight: Any = tiled.weight
    assert isinstance(weight, torch.Tensor) and not weight.requires_grad
    assert (weight.shape, weight.dtype, weight.device.type) == ((6, 40), torch.bfloat16, "cpu")
    assert (weight.nbytes, weight.numel(), weight.dim(), weight.is_floating_point()) == (480, 240, 2, True)
    assert ops.TiledLinear((4, 4), device="meta").weight.is_meta
    assert "weight of a layer in tiles: torch.bfloat16, (6, 40), cpu" in repr(weight)
    for use in (
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight.requires_grad_(True),
        lambda: setattr(weight, "requires_grad", True),
        lambda: torch.cat([weight]),
        lambda: nn.init.zeros_(weight),
    ):
        with pytest.raises(ConfigError, match="TiledLinear: has no weight.* in one piece; its tiles have theirs"):
            use()
    with pytest.raises(KeyError, match="already exists"):
        tiled.weight = nn.Parameter(torch.ones(6, 40))


def test_tiles_of_tiles_have_the_names_of_the_whole_layer() -> None:
    model = nn.Sequential(layer(64, 64), nn.Linear(64, 4, bias=False))
    model[0].bias.requires_grad_(False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ops.tile_(model, larger_than=4096)
    assert len(ops.tile_(model, larger_than=1024)) == 4
    joined = ops.join_tiles(model, model.state_dict())
    assert joined.keys() == state.keys() and all(torch.equal(joined[name], state[name]) for name in state)
    assert ops.split_tiles(model, joined).keys() == model.state_dict().keys()
    whole = model[0].whole()
    assert torch.equal(whole.weight, state["0.weight"]) and torch.equal(whole.bias, state["0.bias"])
    assert whole.weight.requires_grad and not whole.bias.requires_grad


def test_tiles_on_the_meta_device_begin_with_the_values_of_a_whole_layer() -> None:
    """Each is initialised by itself, as all of it has a place of its own: 1 / sqrt(400), not 1 / sqrt(50)."""
    with torch.device("meta"):
        model = nn.Sequential(ops.TiledLinear((400, 50), in_splits=8), nn.Linear(50, 4))
        ops.tile_(model, larger_than=2048)
    assert isinstance(model[0].tiles[0], ops.TiledLinear), "tiles are tiled again"
    with offload.Engine(model, offload.AdamW(lr=1e-3), **everything_on_device()) as engine:
        values = torch.cat([value.flatten() for name, value in engine.state_dict().items() if name.startswith("0.")])
    assert 0.9 / 20 < values.abs().max() <= 1 / 20


def test_state_dicts_of_both_kinds_are_loaded() -> None:
    model = nn.Sequential(layer(8, 6), nn.Tanh(), layer(6, 4))
    state = model.state_dict()
    tiled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in tiled.parameters():
            parameter.zero_()
    assert ops.tile_(tiled, larger_than=100) == ["0"]
    own = tiled.state_dict()
    assert [name for name in own if name.startswith("0.")] == [
        f"0.tiles.{number}.{kind}" for number in range(2) for kind in ("weight", "bias")
    ]
    for found in (state, ops.split_tiles(tiled, state)):
        target = copy.deepcopy(tiled)
        report = target.load_state_dict(found)
        assert not report.missing_keys and not report.unexpected_keys
        joined = ops.join_tiles(target, target.state_dict())
        assert list(joined.keys() - state.keys()) == [] and all(
            torch.equal(joined[name], state[name]) for name in state
        )
    assert all(name in state for name in ("0.weight", "0.bias"))  # the user's dict is as it was
    with pytest.raises(RuntimeError, match="Unexpected key"):
        tiled.load_state_dict({**state, "0.weight": torch.zeros(6, 9)})
    with pytest.raises(ConfigError, match="join_tiles: expected all tiles in the state dict but 0.tiles.1.weight is"):
        ops.join_tiles(tiled, {name: value for name, value in own.items() if name != "0.tiles.1.weight"})


def test_the_rule_tiles_what_is_larger() -> None:
    shared = layer(64, 64)
    model = nn.ModuleDict(
        {"wide": layer(2048, 3), "tall": layer(16, 1000), "small": layer(16, 16), "a": shared, "b": shared}
    )
    names = ops.tile_(model, larger_than="4KiB")
    assert sorted(names) == ["a", "b", "tall", "wide"]
    assert model["a"] is model["b"] and type(model["small"]) is nn.Linear
    assert (model["wide"].in_splits, model["wide"].out_splits) == (2, 3)
    assert (model["tall"].in_splits, model["tall"].out_splits) == (1, 16)
    for module in model.values():
        for part in getattr(module, "tiles", []):
            assert part.weight.nbytes <= 4096
    assert ops.tile_(model, larger_than="4KiB") == []


def test_what_cannot_be_tiled_is_refused_and_nothing_is_changed() -> None:
    embedding = nn.Embedding(64, 32)
    model: Any = nn.ModuleDict({"first": layer(64, 64), "embedding": embedding, "head": layer(32, 64, bias=False)})
    model["head"].weight = embedding.weight
    with pytest.raises(ConfigError, match="tile_: head has 8.00 KiB, but it shares a parameter with embedding.weight"):
        ops.tile_(model, larger_than=4096)
    assert type(model["first"]) is nn.Linear
    hooked = nn.Sequential(layer(8, 8))
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="tile_: 0 has 256 B, but it has hooks"):
        ops.tile_(hooked, larger_than=16)
    used = nn.Sequential(layer(8, 8))
    used(torch.ones(1, 8)).sum().backward()
    with pytest.raises(ConfigError, match="it has a gradient, which would be lost"):
        ops.tile_(used, larger_than=16)
    with pytest.raises(ConfigError, match=r"TiledLinear: expected out_splits to be a whole number in 1..8 but got 9"):
        ops.TiledLinear(layer(8, 8), out_splits=9)
    with pytest.raises(ConfigError, match="TiledLinear: expected a plain nn.Linear but it is a Conv1d"):
        ops.TiledLinear(nn.Conv1d(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected larger_than to be a number of bytes >= 1 but got '10%'"):
        ops.tile_(model, larger_than="10%")
    with pytest.raises(ConfigError, match="expected a model that has layers but got one"):
        ops.tile_(layer(8, 8), larger_than=1)


# --- with an engine ---


class Wide(nn.Module):
    """Layers between which one is far larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.large = nn.Linear(32, 2048)
        self.last = nn.Linear(2048, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.large(self.first(x).tanh()).tanh()).pow(2).mean()  # type: ignore[no-any-return]


LARGE_BYTES = 33 * 2048 * 4


def small_device(path: Path, device: int) -> dict[str, Any]:
    """Options: parameters on NVMe, and this much room for working copies."""
    return {
        "device": "cpu",
        "max_memory": {"device": ACTIVATION_BYTES + device, "cpu": "16MiB", "nvme": "64MiB"},
        "activation_memory": ACTIVATION_BYTES,
        "nvme_path": path,
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
    }


def steps(model: nn.Module, **options: Any) -> Any:
    batches = [torch.randn(4, 32, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    return run(model, batches, loss_of=lambda engine, x: engine(x), **options)


def test_a_layer_larger_than_the_device_trains_in_tiles(tmp_path: Path) -> None:
    """The engine names the remedy, and with it the bits are those of the tiled model where everything has room."""
    options = small_device(tmp_path, 96 << 10)
    model = Wide()
    before = dict(model.named_modules())
    with pytest.raises(BudgetError, match=r"or tile large layers before: offload.ops.tile_\(model, larger_t") as caught:
        steps(model, **options)
    named = caught.value.larger_than
    assert named is not None and f"tile_(model, larger_than={named}) does with these budgets" in str(caught.value)
    assert dict(model.named_modules()) == before and list(model._modules) == ["first", "large", "last"]
    for larger_than in (named, named + LARGE_BYTES // MOST_TILES):
        tiled = Wide()
        ops.tile_(tiled, larger_than=larger_than)
        with contextlib.nullcontext() if larger_than == named else pytest.raises(BudgetError):
            offload.Engine(tiled, offload.AdamW(), **options).close()
    assert ops.tile_(model, larger_than="16KiB") == ["large"]
    ours, truth = steps(copy.deepcopy(model), **options), steps(copy.deepcopy(model), **everything_on_device())
    assert_equal(ours, truth)
    units = find_units(model, max_unit_bytes=LARGE_BYTES).units
    assert max(unit.param_bytes for unit in units) == 32 << 10  # a weight of 16 KiB, and a bias on pages of its own
    whole = steps(Wide(), **everything_on_device())
    for mine, other in zip(ours.losses, whole.losses, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert torch.allclose(ops.join_tiles(model, ours.parameters)["large.weight"], whole.parameters["large.weight"])


def test_a_plan_that_tiles_make_possible_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=4096, tie_word_embeddings=False, dtype="bfloat16")
    memory = {"device": "1MiB", "cpu": "64MiB"}  # the embedding and the head have 512 KiB each
    with pytest.raises(BudgetError, match="larger_than") as caught:
        offload.plan(config, hardware="desktop", max_memory=memory)
    named = caught.value.larger_than
    assert named is not None and 64 * 256 * 2 < named < 512 << 10
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert ops.tile_(model, larger_than=named) == ["lm_head"]
    assert offload.plan(model, hardware="desktop", max_memory=memory).fits
    config.save_pretrained(tmp_path)
    call = ["plan", "--model", str(tmp_path), "--hardware", "desktop", "--device", "1MiB", "--cpu", "64MiB", "--json"]
    assert main(call) == 1
    assert json.loads(capsys.readouterr().out)["larger_than"] == named


def test_a_tied_head_stays_whole_and_the_layers_below_are_tiled() -> None:
    """As the guide says: it is the embedding, which is in one piece."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=4096, tie_word_embeddings=True, dtype="bfloat16")
    memory = {"device": "1MiB", "cpu": "64MiB"}  # three of 512 KiB each do not fit
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(BudgetError) as caught:
        offload.plan(model, hardware="desktop", max_memory=memory)
    assert caught.value.larger_than is None and "larger_than=...) may do" in str(caught.value)
    with pytest.raises(ConfigError, match="lm_head has 512.00 KiB, but it shares a parameter with model.embed_tokens"):
        ops.tile_(model, larger_than="64KiB")
    assert len(ops.tile_(model.model, larger_than="64KiB")) == 6
    assert offload.plan(model, hardware="desktop", max_memory=memory).fits


def test_the_largest_tiles_that_do_are_found() -> None:
    model = nn.ModuleDict({"a": layer(64, 640, bias=False), "b": layer(64, 64), "c": nn.Embedding(8, 8)})
    model["b"].weight.requires_grad_(False)
    before, seen = dict(model.named_modules()), list[bool]()

    def does() -> bool:
        sizes = [p.nbytes for p in model.parameters()]
        seen.append(isinstance(model["b"], ops.TiledLinear))
        if seen[-1]:
            assert {t.weight.requires_grad for t in model["b"].tiles} == {False} and model["b"].tiles[
                0
            ].bias.requires_grad
        return max(sizes) <= 7000

    found = tiling.largest_tiles(model, does)
    assert found is not None and 7000 - 64 * 640 * 4 // MOST_TILES**2 <= found - 1 < 7000 + 256, "rows have 256 bytes"
    assert any(seen) and dict(model.named_modules()) == before
    assert tiling.largest_tiles(model, lambda: False) is None
    assert tiling.largest_tiles(nn.Embedding(8, 8), lambda: True) is None, "there is no layer to be tiled"
    model["b"].register_forward_hook(print)
    assert tiling.largest_tiles(model, does) is None, "tile_ would refuse it"
    assert dict(model.named_modules()) == before


def test_tiles_of_a_small_part_of_a_model_are_units_if_it_is_too_large() -> None:
    """Blocks of a model of 80 are not split further, but for tiles."""
    block = nn.Sequential(nn.Linear(128, 128, bias=False, device="meta"), nn.Linear(128, 128, device="meta"))
    model = nn.ModuleList(copy.deepcopy(block) for _ in range(80))
    assert len(find_units(model, max_unit_bytes=32 << 10).units) == 80
    ops.tile_(model, larger_than=32 << 10)
    units = find_units(model, max_unit_bytes=32 << 10).units
    assert len(units) == 80 * 2 * 2 and max(slot.numel for unit in units for slot in unit.slots) == 64 * 128
    assert len(find_units(model, max_unit_bytes=1 << 20).units) == 80


def test_an_engine_loads_state_dicts_of_whole_layers(tmp_path: Path) -> None:
    state = {name: torch.randn_like(value) for name, value in Wide().state_dict().items()}
    model = Wide()
    ops.tile_(model, larger_than="16KiB")
    with offload.Engine(model, offload.AdamW(), **small_device(tmp_path, 96 << 10)) as engine:
        with pytest.raises(ConfigError, match="its parameters are of class AbsentParameter.* tile before"):
            ops.tile_(model, larger_than=16)
        engine.load_state_dict(state)
        found = ops.join_tiles(model, engine.state_dict())
        assert all(torch.equal(found[name], state[name]) for name in state)
        zeros = {name: torch.zeros_like(value) for name, value in state.items()}
        model.load_state_dict(zeros)
        deferred = ops.join_tiles(model, engine.deferred_state_dict())
        assert deferred.keys() == state.keys()
        assert all(not torch.as_tensor(value.clone()).any() for value in deferred.values())


def test_save_pretrained_writes_whole_layers(tmp_path: Path) -> None:
    """A folder of a tiled model is one that transformers loads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = ops.tile_(model, larger_than="4KiB")
    assert "lm_head" in names and "model.layers.1.mlp.down_proj" in names
    assert "model.layers.1.mlp.down_proj.tiles.0" in ops.tile_(model, larger_than="1KiB"), "tiles are tiled again"
    options = small_device(tmp_path, 96 << 10)
    with offload.Engine(model, offload.AdamW(lr=0.1), **options) as engine:
        ids = torch.arange(12).view(1, 12)
        engine.save_pretrained(tmp_path / "before")
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.save_pretrained(tmp_path / "after", max_shard_size="20KB")
        trained = ops.join_tiles(model, engine.state_dict())
    before = LlamaForCausalLM.from_pretrained(tmp_path / "before").state_dict()
    after = LlamaForCausalLM.from_pretrained(tmp_path / "after").state_dict()
    assert before.keys() == after.keys() == state.keys() == trained.keys()
    for name, value in state.items():
        assert torch.equal(before[name], value) and torch.equal(after[name], trained[name])
        assert not torch.equal(after[name], value), name


def test_t5_asks_a_tiled_layer_for_its_dtype() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    config = T5Config(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.arange(6).view(1, 6)
    truth = model(input_ids=ids, labels=ids).logits
    assert len(ops.tile_(model, larger_than=2048)) == 6
    torch.testing.assert_close(model(input_ids=ids, labels=ids).logits, truth)


def test_an_encoder_of_torch_evaluates_with_tiled_layers(tmp_path: Path) -> None:
    """Its fast path, of other operators, takes weights of whole layers."""
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(32, 2, 128, batch_first=True)
    model = nn.TransformerEncoder(one, 2).eval()
    x, padding = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    truth = model(x, src_key_padding_mask=padding)
    assert len(ops.tile_(model, larger_than="4KiB")) == 4
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(plain, truth)
    with offload.Engine(model, offload.AdamW(), **small_device(tmp_path, 48 << 10)) as engine:
        engine.eval()
        with torch.no_grad():
            assert torch.equal(engine(x, src_key_padding_mask=padding), plain)


def test_a_tiled_layer_of_two_names_has_whole_tensors_by_both() -> None:
    shared = nn.Linear(6, 8)
    model = nn.ModuleDict({"one": shared, "two": shared})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert ops.tile_(model, larger_than=shared.weight.nbytes // 2) == ["one", "two"]
    assert model["one"] is model["two"]
    joined = ops.join_tiles(model, model.state_dict())
    assert list(joined) == list(before)
    assert all(torch.equal(joined[name], value) for name, value in before.items())
    assert ops.split_tiles(model, joined).keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    "hook",
    [
        lambda layer: layer.register_full_backward_pre_hook(print),
        lambda layer: layer.register_full_backward_hook(print),
        lambda layer: layer.register_state_dict_pre_hook(print),
        lambda layer: layer.register_load_state_dict_post_hook(print),
        lambda layer: layer.weight.register_hook(print),
        lambda layer: layer.weight.register_post_accumulate_grad_hook(print),
        lambda layer: setattr(layer, "forward", torch.nn.functional.relu),
    ],
)
def test_no_hook_is_lost(hook: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    hook(model[0])
    with pytest.raises(ConfigError, match="0 has .*, but it has hooks"):
        ops.tile_(model, larger_than=16)
