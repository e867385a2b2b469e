"""Models with weights of bitsandbytes: as in plain torch, whatever they have been through, wherever they live."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_tensors, everything_on_device, host, nvme
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import AdamW, BudgetError, CheckpointError, ConfigError, Engine, StateError, plan
from offload.checkpoint.format.index import Index
from offload.checkpoint.restoring import read_state_dict, refuse_quantized
from offload.cli import main as cli

bnb = pytest.importorskip("bitsandbytes")

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("single_torch_thread")]

WIDTH = 256  # 32 KiB per 4-bit weight: a unit of its own
UNIT_BYTES = 40 << 10
BLOCKS = 8


class Block(nn.Module):
    """A frozen layer of 4-bit weights with an adapter beside it."""

    def __init__(self, *, bits: int = 4, **options: Any) -> None:
        super().__init__()
        if bits == 8:
            self.base = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False, threshold=options.pop("threshold", 0))
            self.base.requires_grad_(False)
        else:
            self.base = bnb.nn.Linear4bit(WIDTH, WIDTH, quant_type="nf4", **options).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x))) + x


class Net(nn.Module):
    def __init__(self, *, reentrant: bool | None = None, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(BLOCKS))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            if self.reentrant is None or not self.training:
                x = second(first(x))
            else:
                x = checkpoint(lambda x, f=first, s=second: s(f(x)), x, use_reentrant=self.reentrant)
        return x


def net(**options: Any) -> Net:
    """Return a net whose weights have not been quantized yet."""
    torch.manual_seed(0)
    return Net(**(options if options.get("bits") == 8 else {"compute_dtype": torch.float32, **options}))


def loss_of(forward: Callable[[torch.Tensor], torch.Tensor], number: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()
    return forward(x).float().sub(1).square().mean()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def plain_run(model: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses, the last of evaluation, and the state dict of a plain loop.

    Evaluation does not pack weights: some processors would, and that computes in bfloat16 and rounds nested scales.
    """
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    optimizer = adamw(model)
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(loss_of(model.eval(), 3))
    return losses, dict(model.state_dict())


def engine_run(model: nn.Module, **options: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return what :func:`plain_run` returns, and have the rest of the run in between."""
    with Engine(model, adamw(model), **options) as engine:
        losses = []
        for number in range(3):
            loss = loss_of(engine, number)
            engine.backward(loss)
            assert engine.step()
            losses.append(loss.detach())
            engine._manager.check()
            with torch.no_grad():
                loss_of(engine.eval(), 9)
            engine.train()
        with torch.no_grad():
            losses.append(loss_of(engine.eval(), 3))
        return losses, engine.state_dict()


@pytest.mark.parametrize("options", [{"compute_dtype": torch.bfloat16}, {"bits": 8}])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_plan_leaves_the_model_as_it_was(options: dict[str, Any], is_quantized: bool) -> None:
    """It counts the bytes that weights have when an engine has quantized them."""
    model = net(**options)
    if is_quantized:
        model.to("cpu")
    before = [(type(p), p.dtype, p.data_ptr(), dict(vars(p))) for p in model.parameters()]
    states = [dict(vars(getattr(block.base, "state", block.base))) for block in model.blocks]
    forecast = plan(model, device="cpu", max_memory={"device": "1GiB", "cpu": "1GiB"})
    assert [(type(p), p.dtype, p.data_ptr(), dict(vars(p))) for p in model.parameters()] == before
    assert all(
        a.keys() == b.keys() and all(a[name] is b[name] for name in a)
        for a, b in zip((vars(getattr(block.base, "state", block.base)) for block in model.blocks), states, strict=True)
    )
    frozen = sum(unit.param_bytes for unit in forecast.plan.request.units if not unit.trainable)
    assert frozen <= BLOCKS * (WIDTH * WIDTH * options.get("bits", 4) // 8 + 4 * 4096)  # weights, biases
    with pytest.raises(ConfigError, match=r"^parameter blocks\.0\.base\.weight: .* cannot be counted; leave batch out"):
        plan(model, batch=(torch.ones(2, WIDTH),), hardware="desktop")
    assert is_quantized or all(block.base.weight.dtype is torch.float32 for block in model.blocks)


def test_a_plan_of_weights_that_nobody_can_quantize_is_refused() -> None:
    with torch.device("meta"):
        model = net()
    with pytest.raises(ConfigError, match=r"^parameter blocks\.0\.base\.weight: expected .*; load the model"):
        plan(model, hardware="desktop")


def assert_close(ours: Any, theirs: Any) -> None:
    assert ours[1].keys() == theirs[1].keys()
    for name, value in theirs[1].items():
        same = torch.allclose if value.is_floating_point() else torch.equal
        assert same(ours[1][name], value, **({"rtol": 1e-4, "atol": 1e-5} if value.is_floating_point() else {})), name
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert torch.allclose(a, b, rtol=1e-4)


@pytest.fixture(scope="module")
def truth() -> Iterator[tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield plain_run(net().to("cpu"))
    torch.set_num_threads(threads)


def pack(model: nn.Module) -> nn.Module:
    """Do what an evaluation forward does on processors with bfloat16 in AVX-512."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.weight.data, module.weight.quant_state = _convert_weight_packed_for_cpu(
                module.weight.data, module.weight.quant_state
            )
    return model


def after_forward(model: nn.Module) -> nn.Module:
    loss_of(model.to("cpu"), 0)
    return model


PASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fresh": lambda model: model,
    "quantized": lambda model: model.to("cpu"),
    "used": after_forward,
}


@pytest.mark.parametrize("past", PASTS)
def test_training_is_that_of_the_plain_model(past: str, truth: Any, tmp_path: Path) -> None:
    """Whatever the model has been through, and with the same bits wherever it lives."""
    ours = engine_run(PASTS[past](net()), **everything_on_device())
    assert_close(ours, truth)
    sizes = net().to("cpu")
    for options in (host(sizes, unit_bytes=UNIT_BYTES), nvme(sizes, tmp_path, unit_bytes=UNIT_BYTES)):
        model = PASTS[past](net())
        other = engine_run(model, **options)
        assert [torch.equal(a, b) for a, b in zip(ours[0], other[0], strict=True)] == [True] * 4
        assert_same_tensors(other[1], ours[1])
        assert all(type(block.base.weight) is bnb.nn.Params4bit for block in model.blocks)


@pytest.mark.few
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_weights_that_wait_for_backward_are_not_on_the_device(
    compute: torch.dtype, reentrant: bool | None, tmp_path: Path
) -> None:
    """The function keeps its weight itself, not with autograd: eight wait where is room for three."""
    options = {"reentrant": reentrant, "compute_dtype": compute, "bias": False}
    model = net(**options).to("cpu")
    ours = engine_run(model, **nvme(model, tmp_path, unit_bytes=UNIT_BYTES))
    truth = plain_run(net(**options).to("cpu"))
    if compute is torch.float32:
        assert_close(ours, truth)
    assert all(torch.allclose(a, b, rtol=2e-3) for a, b in zip(ours[0], truth[0], strict=True))


def test_a_graph_is_run_twice() -> None:
    """With retain_graph, weights that wait are asked for again; a graph from before a change of theirs is stale."""
    model = net()
    with Engine(model, adamw(model), **everything_on_device()) as engine:
        loss = loss_of(engine, 0)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        assert engine.step()
        loss = loss_of(engine, 1)
        engine.load_state_dict(
            {name: p for name, p in engine.state_dict().items() if name.endswith("base.weight")}, strict=False
        )
        with pytest.raises(StateError, match="its graph is stale"):
            engine.backward(loss)


@pytest.mark.parametrize("packed", [False, True])
def test_processors_for_which_weights_are_packed(packed: bool, truth: Any, tmp_path: Path) -> None:
    """Evaluation packs weights there, in place; not while an engine has them, and again when it is closed."""
    model = net().to("cpu")
    before = [block.base.weight.detach().clone() for block in model.blocks]
    for block in model.blocks:
        block.base.support_avx512bf16_for_cpu = True
    if packed:
        pack(model)
        assert not torch.equal(model.blocks[0].base.weight.flatten(), before[0].flatten())
    with Engine(model, adamw(model), **nvme(net().to("cpu"), tmp_path, unit_bytes=UNIT_BYTES)) as engine:
        assert not any(block.base.support_avx512bf16_for_cpu for block in model.blocks)
        for number in range(2):
            loss = loss_of(engine.train(), number)
            assert torch.allclose(loss.detach(), truth[0][number], rtol=1e-4 if not packed else 1e-2)
            engine.backward(loss)
            engine.step()
            with torch.no_grad():
                loss_of(engine.eval(), 9)
        found = engine.state_dict()
        assert all(torch.equal(found[f"blocks.{n}.base.weight"], value) for n, value in enumerate(before))
    assert all(block.base.support_avx512bf16_for_cpu for block in model.blocks)
    assert all(torch.equal(block.base.weight, value) for block, value in zip(model.blocks, before, strict=True))
    assert not model.blocks[0].base._forward_hooks and not model.blocks[0].base._forward_pre_hooks


def test_a_bias_gets_the_dtype_that_its_module_computes_in(tmp_path: Path) -> None:
    """A first forward casts it for good; the engine does before it takes it."""
    options = {"compute_dtype": torch.bfloat16}
    truth = plain_run(net(**options).to("cpu"))
    model = net(**options)
    biases = [block.base.bias for block in model.blocks]
    assert {bias.dtype for bias in biases} == {torch.float32}
    ours = engine_run(model, **nvme(net().to("cpu"), tmp_path, unit_bytes=UNIT_BYTES))
    assert all(torch.allclose(a, b, rtol=2e-3) for a, b in zip(ours[0], truth[0], strict=True))
    assert {bias.dtype for bias in biases} == {torch.bfloat16}
    assert all(block.base.bias is bias for block, bias in zip(model.blocks, biases, strict=True))


def test_a_bias_of_another_dtype_is_refused() -> None:
    """Where the module computes in what it is first given, only its forward can tell."""
    model = net(compute_dtype=None)
    for block in model.blocks:
        block.base.bias.data = block.base.bias.data.bfloat16()
    with Engine(model, adamw(model), **everything_on_device()) as engine:
        text = r"^parameter blocks\.0\.base\.bias: expected torch\.float32, in which its module computes, but got"
        with pytest.raises(StateError, match=text):
            loss_of(engine, 0)
    model = net()
    with pytest.raises(
        ConfigError, match=r"^dtype: expected torch\.float32, in which the module of blocks\.0\.base\.weight"
    ):
        Engine(model, adamw(model), dtype="bfloat16", **everything_on_device())
    assert model.blocks[0].base.weight.dtype is torch.float32  # nothing was quantized


def test_weights_that_are_kept_as_another_dtype(truth: Any, tmp_path: Path) -> None:
    """Four bits each in what claims to be bfloat16: the same bytes, which a cast would destroy."""
    options = {"quant_storage": torch.bfloat16}
    model = net(**options)
    with pytest.raises(
        ConfigError, match=r"^dtype: expected torch\.bfloat16, in which blocks\.0\.base\.weight keeps its"
    ):
        Engine(model, adamw(model), dtype="float32", **everything_on_device())
    losses, found = engine_run(model, **nvme(net().to("cpu"), tmp_path, unit_bytes=UNIT_BYTES))
    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(losses, truth[0], strict=True))
    assert found["blocks.0.base.weight"].dtype is torch.bfloat16
    assert torch.equal(
        found["blocks.0.base.weight"].view(torch.uint8).flatten(), truth[1]["blocks.0.base.weight"].flatten()
    )


def test_what_cannot_be_had_is_refused() -> None:
    model = net()
    model.blocks[1].base.weight.requires_grad_()
    with pytest.raises(ConfigError, match=r"^parameter blocks\.1\.base\.weight: .*frozen but got requires_grad=True"):
        Engine(model, AdamW(), **everything_on_device())
    model = net(device="meta")
    with pytest.raises(ConfigError, match=r"^parameter blocks\.0\.base\.weight: .*got bitsandbytes Params4bit, which"):
        Engine(model, AdamW(), **everything_on_device())
    model = net().to("cpu")
    model.blocks[2].base.weight.quant_state = None
    with pytest.raises(ConfigError, match=r"^parameter blocks\.2\.base\.weight: .*with their scales but got none"):
        Engine(model, AdamW(), **everything_on_device())
    eight = net(bits=8)
    eight.blocks[1].base.weight.requires_grad_()
    with pytest.raises(ConfigError, match=r"^parameter blocks\.1\.base\.weight: .*frozen but got requires_grad=True"):
        Engine(eight, AdamW(), **everything_on_device())
    eight = after_forward(net(bits=8))
    eight.blocks[2].base.state.SCB = None
    with pytest.raises(ConfigError, match=r"^parameter blocks\.2\.base\.weight: .*with their scales but got none"):
        Engine(eight, AdamW(), **everything_on_device())
    words = nn.Sequential(bnb.nn.Embedding8bit(100, 64).requires_grad_(False), nn.Linear(64, 100)).to("cpu")
    text = r"^parameter 0\.weight: .*Int8Params outside a Linear8bitLt; load the model with 4-bit modules$"
    with pytest.raises(ConfigError, match=text):
        Engine(words, AdamW(), **everything_on_device())


def test_a_budget_that_will_not_do_leaves_a_model_that_can_be_used(truth: Any) -> None:
    """It is quantized, as `.to(device)` would have done."""
    model = net()
    with pytest.raises(BudgetError):
        Engine(model, adamw(model), device="cpu", max_memory={"device": "64KiB", "cpu": "64KiB"})
    assert torch.equal(plain_run(model)[0][0], truth[0][0])


def test_scales_are_where_the_engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are brought back: seen at the calls, for there is no other device here."""
    from bitsandbytes.functional import QuantState

    from offload.module.quantized import FourBitModules

    model = net().to("cpu")
    moves: list[torch.device] = []
    monkeypatch.setattr(QuantState, "to", lambda self, device: moves.append(device))
    four_bit = FourBitModules(model)
    saved: Any = None
    four_bit.attach(torch.device("cpu"), saved)
    four_bit.detach()
    assert moves == []
    four_bit.attach(torch.device("cuda", 1), saved)
    four_bit.detach()
    assert moves == [torch.device("cuda", 1)] * BLOCKS + [torch.device("cpu")] * BLOCKS
    four_bit.detach()
    assert len(moves) == 2 * BLOCKS


EIGHT_BYTES = 80 << 10  # a unit of one layer


@pytest.mark.few
@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("past", PASTS)
def test_eight_bits(past: str, threshold: float, tmp_path: Path) -> None:
    """As with four, and with as many bits the same wherever the model lives; it has its weights again afterwards."""
    options: dict[str, Any] = {"bits": 8, "threshold": threshold}
    truth = plain_run(net(**options).to("cpu"))
    ours = engine_run(PASTS[past](net(**options)), **everything_on_device())
    assert_close(ours, truth)
    sizes = net(**options).to("cpu")
    for place in (host(sizes, unit_bytes=EIGHT_BYTES), nvme(sizes, tmp_path, unit_bytes=EIGHT_BYTES)):
        model = PASTS[past](net(**options))
        other = engine_run(model, **place)
        assert [torch.equal(a, b) for a, b in zip(ours[0], other[0], strict=True)] == [True] * 4
        assert_same_tensors(other[1], ours[1])
        with torch.no_grad():
            assert torch.equal(loss_of(model, 3), other[0][3])
        for block in model.blocks:
            assert type(block.base.weight) is bnb.nn.Int8Params
            assert type(block.base.state) is bnb.MatmulLtState
            assert block.base.state.CB.data_ptr() == block.base.weight.data_ptr()


@pytest.mark.parametrize("reentrant", [False, True])
def test_eight_bits_with_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    truth = engine_run(net(bits=8), **everything_on_device())
    model = net(bits=8, reentrant=reentrant)
    ours = engine_run(model, **nvme(net(bits=8).to("cpu"), tmp_path, unit_bytes=EIGHT_BYTES))
    assert all(torch.equal(a, b) for a, b in zip(ours[0], truth[0], strict=True))
    assert_same_tensors(ours[1], truth[1])


def test_an_engine_that_is_not_made_leaves_eight_bits_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a module keep the memory of its weight while units are loaded."""
    from offload.checkpoint import values

    model, given = net(bits=8).to("cpu"), values.scatter_parameters
    truth = loss_of(model, 0)
    last = model.blocks[-1].base

    def fails(manager: Any, of: Any) -> None:
        if any(value.data_ptr() == last.weight.data_ptr() for value in of.values()):
            assert not any("CB" in vars(block.base.state) for block in model.blocks)
            raise OSError("none left")
        given(manager, of)

    monkeypatch.setattr(values, "scatter_parameters", fails)
    with pytest.raises(OSError, match="none left"):
        Engine(model, adamw(model), **everything_on_device())
    assert torch.equal(loss_of(model, 0), truth)
    assert type(last.state) is bnb.MatmulLtState and last.state.CB is not None


def test_eight_bits_that_are_lost_are_not_read_as_others() -> None:
    model = net(bits=8)
    engine = Engine(model, adamw(model), **everything_on_device())
    engine.close(restore=False)
    with pytest.raises(StateError, match="expected content but it has none"):
        loss_of(model, 0)
    with pytest.raises(StateError, match="expected content but it has none"):
        _ = model.blocks[0].base.state.CB


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = bnb.nn.EmbeddingNF4(100, 64).requires_grad_(False)
        self.head = nn.Linear(64, 100)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(numbers))


def test_an_embedding(tmp_path: Path) -> None:
    losses = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Words()
        numbers = torch.arange(40).view(4, 10)
        target = (numbers + 1).flatten()
        if not wrapped:
            model.to("cpu")
            losses.append(nn.functional.cross_entropy(model(numbers).flatten(0, 1), target).detach())
            continue
        with Engine(model, AdamW(lr=1e-2), **nvme(Words().to("cpu"), tmp_path)) as engine:
            loss = nn.functional.cross_entropy(engine(numbers).flatten(0, 1), target)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_is_not_exported_without_its_scales(
    bits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net(bits=bits)
    with Engine(model, adamw(model), **everything_on_device()) as engine:
        path = engine.save_checkpoint(tmp_path / "run")
    quantized = json.loads((path / "index.json").read_text())["quantized"]
    assert quantized == [f"blocks.{number}.base.weight" for number in range(BLOCKS)]
    for form in ("safetensors", "torch", "dcp"):
        words = ["export", str(tmp_path / "run"), "--output", str(tmp_path / form), "--to", form]
        assert cli.main(["checkpoint", *words]) == 1
        assert "expected plain weights but blocks.0.base.weight is quantized; make the model" in capsys.readouterr().err
        assert not (tmp_path / form).exists()
    with pytest.raises(CheckpointError, match="expected plain weights but"):
        read_state_dict(tmp_path / "run")
    index = Index.read(path / "index.json")
    del index.contents["quantized"]  # as older ones are
    with pytest.raises(CheckpointError, match=r"expected plain weights but blocks\.\d\.base\.weight is quantized"):
        refuse_quantized(path, index)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_peft_on_a_model_of_transformers(tmp_path: Path) -> None:
    """What people call QLoRA: quantized by transformers, made ready by peft, which leaves norms and biases in fp32."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "max_position_embeddings": 64}
    config = transformers.Qwen2Config(**sizes, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4)
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    numbers = torch.arange(64).view(4, 16)
    inputs = {"input_ids": numbers, "labels": numbers}

    def build() -> nn.Module:
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(tmp_path / "model", quantization_config=how, dtype=torch.bfloat16)
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).train()

    plain = build()
    assert plain.base_model.model.model.layers[0].self_attn.q_proj.base_layer.bias.dtype is torch.float32
    optimizer, truth = adamw(plain), []
    for _ in range(4):
        loss = plain(**inputs).loss
        truth.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model, folder = build(), tmp_path / "swap"
    folder.mkdir()
    with Engine(model, adamw(model), **nvme(build(), folder, unit_bytes=4096)) as engine:
        ours = []
        for _ in range(4):
            loss = engine(**inputs).loss
            ours.append(loss.item())
            engine.backward(loss)
            assert engine.step()
        engine.save_pretrained(tmp_path / "adapter")
    assert ours == pytest.approx(truth, rel=2e-3)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
