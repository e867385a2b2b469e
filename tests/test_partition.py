"""Units found in module trees: real architectures of small size, and the awkward shapes of trees."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offload.errors import ConfigError
from offload.planning.partition import UnitTree, dtype_name, find_units, model_bytes
from offload.planning.units import SLOT_ALIGN_NUMEL

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

ALL = 1 << 60  # no limit


def check_tree(model: nn.Module, tree: UnitTree, dtype: torch.dtype | None = None) -> None:
    """Every parameter is in exactly one slot, with its name and shape; every use finds its units."""
    names = {id(p): name for name, p in model.named_parameters()}
    placed = {}
    assert [unit.index for unit in tree.units] == list(range(len(tree.units)))
    assert len({unit.name for unit in tree.units}) == len(tree.units)
    for unit, members in zip(tree.units, tree.parameters, strict=True):
        assert len(unit.slots) == len(members) > 0
        for slot, parameter in zip(unit.slots, members, strict=True):
            assert id(parameter) not in placed, slot.name
            placed[id(parameter)] = unit.index
            assert slot.name == names[id(parameter)]
            assert slot.shape == tuple(parameter.shape) and slot.numel == parameter.numel()
            stored = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            assert (unit.dtype, unit.itemsize) == (dtype_name(stored), stored.itemsize)
            assert unit.trainable == parameter.requires_grad
    assert placed.keys() == names.keys()
    assert sum(slot.numel for unit in tree.units for slot in unit.slots) == sum(p.numel() for p in model.parameters())
    for name, module in model.named_modules():
        below = {placed[id(p)] for p in module.parameters()}
        if not below:
            assert module not in tree.leases
            continue
        assert tree.module_names[module] == name
        own = {placed[id(p)] for p in module.parameters(recurse=False)}
        assert own <= set(tree.leases[module])  # what a forward uses itself is leased by its hook
        assert len(set(tree.leases[module])) == len(tree.leases[module])
        leased_below = {index for part in module.modules() for index in tree.leases.get(part, ())}
        assert below <= leased_below


def llama(**more: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=512, n_positions=64)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def t5() -> nn.Module:
    config = transformers.T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=512)
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
    )
    return transformers.BertForMaskedLM(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [llama, gpt2, t5, bert])
@pytest.mark.parametrize("max_bytes", [ALL, 100_000, 20_000, 1])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_architectures(make: Callable[[], nn.Module], max_bytes: int, dtype: torch.dtype | None) -> None:
    model = make()
    before = {name: (p, p.shape, p.dtype) for name, p in model.named_parameters()}
    check_tree(model, find_units(model, max_unit_bytes=max_bytes, dtype=dtype), dtype)
    after = {name: (p, p.shape, p.dtype) for name, p in model.named_parameters()}
    assert all(before[name][0] is after[name][0] and before[name][1:] == after[name][1:] for name in before)


def test_global_indices_depend_on_the_model_alone() -> None:
    """Every element has its own, whatever the units, their dtype and what is frozen."""
    found = []
    for max_bytes, dtype, frozen in ((ALL, None, False), (20_000, torch.bfloat16, True), (1, None, True)):
        model = gpt2()
        next(model.parameters()).requires_grad_(not frozen)
        slots = [slot for u in find_units(model, max_unit_bytes=max_bytes, dtype=dtype).units for slot in u.slots]
        found.append({slot.name: slot.global_numel for slot in slots})
        ranges = sorted((slot.global_numel, slot.global_numel + slot.numel) for slot in slots)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
        assert all(begin % SLOT_ALIGN_NUMEL == 0 for begin, _ in ranges)
    assert found[0] == found[1] == found[2]


def test_a_llama_has_one_unit_per_block_and_units_for_the_rest() -> None:
    tree = find_units(llama(), max_unit_bytes=ALL)
    names = [unit.name for unit in tree.units]
    assert names == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "lm_head"]
    blocks = tree.units[1:5]
    assert len({(unit.numel, len(unit.slots)) for unit in blocks}) == 1


def test_gpt2_holds_the_tied_weight_once() -> None:
    model: Any = gpt2()
    tree = find_units(model, max_unit_bytes=ALL)
    names = [unit.name for unit in tree.units]
    assert names[:2] == ["transformer.wte", "transformer.wpe"] and "lm_head" not in names
    assert [f"transformer.h.{i}" for i in range(3)] == [name for name in names if ".h." in name]
    head, embedding = model.lm_head, model.transformer.wte
    assert head.weight is embedding.weight
    assert tree.leases[head] == tree.leases[embedding] == (0,)  # both uses are announced


def test_t5_shares_one_embedding_between_encoder_and_decoder() -> None:
    model: Any = t5()
    tree = find_units(model, max_unit_bytes=ALL)
    names = [unit.name for unit in tree.units]
    # a T5 block is itself a list: attention (cross-attention in the decoder) and feed-forward are its elements
    elements = [("encoder", 2), ("decoder", 3)]
    blocks = [f"{side}.block.{i}.layer.{j}" for side, count in elements for i in range(2) for j in range(count)]
    assert [n for n in names if ".block." in n] == blocks
    holders = [unit for unit in tree.units for slot in unit.slots if slot.name == "shared.weight"]
    assert len(holders) == 1
    assert holders[0].index in tree.leases[model.shared]


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)


class MixtureBlock(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))


def test_experts_are_units_of_their_own() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "layers": nn.ModuleList(MixtureBlock(32, 4) for _ in "ab")})
    tree = find_units(model, max_unit_bytes=ALL)
    check_tree(model, tree)
    names = [unit.name for unit in tree.units]
    assert [n for n in names if "experts" in n] == [f"layers.{i}.experts.{e}" for i in range(2) for e in range(4)]
    assert {"layers.0.attention", "layers.1.attention"} <= set(names)
    block: Any = model["layers"][0]  # type: ignore[index]
    assert tree.leases[block] == ()  # the block itself holds nothing: running it must not bring its experts
    assert len(tree.leases[block.experts[1]]) == 1


class Nested(nn.Module):
    """A weight of its own, and another such module inside."""

    def __init__(self, depth: int, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.inner = Nested(depth - 1, width) if depth > 1 else None


def test_units_of_nested_modules_are_held_together() -> None:
    model = nn.ModuleList([Nested(4), Nested(2), Nested(1)])
    tree = find_units(model, max_unit_bytes=4096)  # each weight is a unit: in model order 0..3, 4..5, 6
    check_tree(model, tree)
    assert len(tree.units) == 7
    assert tree.held_together(model, more_than=3) == [frozenset(range(4))]
    assert frozenset({4, 5}) in tree.held_together(model, more_than=1)
    assert frozenset({5, 6}) not in tree.held_together(model, more_than=1)  # siblings come one after the other


def test_a_plain_sequential_has_one_unit_per_element() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    tree = find_units(model, max_unit_bytes=ALL)
    check_tree(model, tree)
    assert [unit.name for unit in tree.units] == ["0", "2", "3"]
    assert model[1] not in tree.leases


def test_a_single_module_is_one_unit_named_by_its_class() -> None:
    model = nn.Linear(4, 3)
    tree = find_units(model, max_unit_bytes=ALL)
    check_tree(model, tree)
    assert [unit.name for unit in tree.units] == ["Linear"]
    assert [slot.name for slot in tree.units[0].slots] == ["weight", "bias"]
    assert tree.module_names == {model: ""}


def test_dtypes_and_frozen_parts_are_separate_units() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    block[0].to(torch.bfloat16)
    block[0].bias.requires_grad_(False)  # type: ignore[union-attr]
    block.register_parameter("table", nn.Parameter(torch.zeros(8, dtype=torch.int8), requires_grad=False))
    holder = nn.Module()
    holder.block = Wrapped(block)
    tree = find_units(holder, max_unit_bytes=ALL)
    check_tree(holder, tree)
    kinds = {(unit.dtype, unit.trainable) for unit in tree.units}
    assert kinds == {("bfloat16", True), ("bfloat16", False), ("float32", True), ("int8", False)}


class Wrapped(nn.Module):
    """Holds the parameters of another module without being a list."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        for name, parameter in inner.named_parameters():
            self.register_parameter(name.replace(".", "_"), parameter)


def test_suffixes_tell_the_units_of_one_module_apart() -> None:
    layer = nn.Linear(8, 8)
    layer.bias.requires_grad_(False)
    names = [unit.name for unit in find_units(layer, max_unit_bytes=ALL).units]
    assert names == ["Linear [float32]", "Linear [float32, frozen]"]


def test_without_training_everything_is_frozen() -> None:
    tree = find_units(llama(), max_unit_bytes=ALL, train=False)
    assert not any(unit.trainable for unit in tree.units)


def test_large_elements_are_split_at_their_children() -> None:
    model = llama()
    block = sum(p.numel() * 4 for p in model.model.layers[0].parameters())  # type: ignore[union-attr, index]
    whole = find_units(model, max_unit_bytes=block)
    split = find_units(model, max_unit_bytes=block - 1)
    assert "model.layers.0" in {unit.name for unit in whole.units}
    names = {unit.name for unit in split.units}
    assert {"model.layers.0.self_attn", "model.layers.0.mlp"} <= names and "model.layers.0" not in names
    largest = max(slot.numel for unit in split.units for slot in unit.slots)
    for unit in split.units:  # what is still too large is one module without children, or one parameter
        assert unit.param_bytes <= max(block, 2 * largest * 4)


def test_the_cast_counts_in_bytes() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_parameter("table", nn.Parameter(torch.zeros(5, dtype=torch.int64), requires_grad=False))
    assert model_bytes(model, None) == 72 * 4 + 40
    assert model_bytes(model, torch.bfloat16) == 72 * 2 + 40  # integers keep their dtype


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="has none"):
        find_units(nn.ReLU(), max_unit_bytes=ALL)
    model = nn.Linear(2, 2).double()
    with pytest.raises(ConfigError, match="parameter weight: .*float64"):
        find_units(model, max_unit_bytes=ALL)
    find_units(model, max_unit_bytes=ALL, train=False)
    find_units(model, max_unit_bytes=ALL, dtype=torch.float32)
    find_units(model.requires_grad_(False), max_unit_bytes=ALL)


def test_a_module_used_twice_is_counted_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared)
    tree = find_units(model, max_unit_bytes=ALL)
    check_tree(model, tree)
    assert [unit.name for unit in tree.units] == ["0", "1"]


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    kind = draw(st.sampled_from(["linear", "list", "sequential", "block"] if depth else ["linear"]))
    if kind == "linear":
        layer = nn.Linear(draw(st.integers(1, 20)), draw(st.integers(1, 20)), bias=draw(st.booleans()))
        layer.weight.requires_grad_(draw(st.booleans()))
        return layer.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
    children = draw(st.lists(trees(depth=depth - 1), min_size=1, max_size=3))
    if kind == "list":
        return nn.ModuleList(children)
    if kind == "sequential":
        return nn.Sequential(*children)
    block = nn.Module()
    block.scale = nn.Parameter(torch.zeros(draw(st.integers(0, 5))))
    for number, child in enumerate(children):
        block.add_module(f"part{number}", child)
    if draw(st.booleans()):  # tie: a parameter of the first child under a second name
        block.tied = next(children[0].parameters())
    return block


@given(model=trees(), max_bytes=st.integers(1, 3000), dtype=st.sampled_from([None, torch.float16]))
def test_any_tree_is_covered_exactly_once(model: nn.Module, max_bytes: int, dtype: torch.dtype | None) -> None:
    check_tree(model, find_units(model, max_unit_bytes=max_bytes, dtype=dtype), dtype)


def test_parameters_on_the_same_bytes_are_refused() -> None:
    """Torch trains them as one; here each would have a place of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(ConfigError, match=r"parameter 0\.weight and parameter 1\.weight.*one nn\.Parameter"):
        find_units(model, max_unit_bytes=1 << 20)
    find_units(model, max_unit_bytes=1 << 20, train=False)
    whole = torch.zeros(32)
    model[0].weight, model[1].weight = nn.Parameter(whole[:16].view(4, 4)), nn.Parameter(whole[16:].view(4, 4).t())
    find_units(model, max_unit_bytes=1 << 20)  # neighbours, as a flattened RNN has them
    model[1].weight = nn.Parameter(whole[8:24].view(4, 4), requires_grad=False)
    with pytest.raises(ConfigError, match="share"):
        find_units(model, max_unit_bytes=1 << 20)
    model[0].weight.requires_grad_(False)
    find_units(model, max_unit_bytes=1 << 20)


def test_a_buffer_over_a_frozen_parameter_and_a_trained_one_is_refused() -> None:
    """Whatever lies between the buffer's beginning and what is trained."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    whole = torch.zeros(32)
    model[0].weight = nn.Parameter(whole[:16].view(4, 4), requires_grad=False)
    model[1].weight = nn.Parameter(whole[16:].view(4, 4))
    find_units(model, max_unit_bytes=1 << 20)
    model.register_buffer("whole", whole)
    with pytest.raises(ConfigError, match=r"buffer whole and parameter 1\.weight: expected memory of their own"):
        find_units(model, max_unit_bytes=1 << 20)
