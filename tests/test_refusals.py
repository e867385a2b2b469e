"""What an engine cannot have is refused by name at the wrap, with the remedy; and what looks like it, but works.

Libraries that a user need not have are imported inside the tests.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, assert_same_tensors, batch, everything_on_device, loss_of, tight
from torch import nn

from offload import AdamW, ConfigError, Engine, StateError

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("single_torch_thread")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def step(engine: Engine, number: int) -> torch.Tensor:
    loss = loss_of(engine, number)
    engine.backward(loss)
    assert engine.step()
    return loss.detach()


def assert_refused(model: nn.Module, kind: type[Exception], text: str, optimizer: Any = None, **options: Any) -> None:
    """The model is refused for training and for evaluation, in words that match, and is as it was."""
    hooks = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    before = dict(model.named_parameters()), dict(model.named_buffers())
    addresses = {name: p.data_ptr() for name, p in before[0].items() if type(p) is nn.Parameter and not p.is_meta}
    for given in (optimizer or AdamW(), None):
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises(kind, match=text):
                Engine(model, given, device="cpu", max_memory={"nvme": "1MiB"}, nvme_path=folder, **options)
            assert not list(Path(folder).iterdir())
    assert all(value is before[0][name] for name, value in model.named_parameters())
    assert all(value is before[1][name] for name, value in model.named_buffers())
    assert addresses == {name: before[0][name].data_ptr() for name in addresses}
    assert hooks == {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}


# --- kinds of tensors -------------------------------------------------------------------------------------------------


class Strange(torch.Tensor):
    """A user's own class, with operations of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            made = func(*args, **(kwargs or {}))
        return strange(made) if func is torch.ops.aten.detach.default else made


def strange(tensor: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_subclass(Strange, tensor.data, False)


def quantized() -> nn.Module:
    """Return a net of which torchao has made one layer's weight a tensor of its own."""
    quantization = pytest.importorskip("torchao.quantization")
    model = net()
    quantization.quantize_(
        model, quantization.Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "blocks.1"
    )
    assert not model.blocks[1].weight.data_ptr()
    return model


def test_parameters_and_buffers_of_a_class_with_operations_of_its_own() -> None:
    model = net()
    model.blocks[2].weight = nn.Parameter(strange(model.blocks[2].weight))
    text = (
        r"^parameter blocks\.2\.weight: .*got test_refusals Strange, .*; make an ordinary torch\.nn\.Parameter of it$"
    )
    assert_refused(model, ConfigError, text)
    model = net()
    model.blocks[3].register_buffer("scale", strange(torch.ones(3)))
    assert_refused(model, ConfigError, r"^buffer blocks\.3\.scale: .*got test_refusals Strange")


def test_lazy_modules() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH))
    text = r"^parameter 1\.weight: .*has no shape yet; run one forward first"
    with pytest.raises(ConfigError, match=text):
        Engine(model, AdamW(), **everything_on_device())
    model(batch(0))
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        step(engine, 0)
    buffers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(ConfigError, match=r"^buffer 1\.running_mean: .*has no shape yet; run one forward first"):
        Engine(buffers, AdamW(), **everything_on_device())


def test_what_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = net()
    text = r"^parameter blocks\.0\.weight: .*made under torch\.inference_mode\(\); make the model outside of it"
    with pytest.raises(ConfigError, match=text):
        Engine(model, **everything_on_device())
    model = net()
    with torch.inference_mode():
        model.register_buffer("scale", torch.ones(3))
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        step(engine, 0)
        with torch.inference_mode():
            engine(batch(0))
            engine.close()
    model(batch(0)).sum().backward()  # parameters that were given back are ordinary ones


def test_other_layouts() -> None:
    """A parameter must be dense; a buffer may be what it is."""
    model = net()
    model.blocks[0].weight = nn.Parameter(torch.eye(WIDTH).to_sparse(), requires_grad=False)
    text = r"^parameter blocks\.0\.weight: .*sparse_coo; convert it to an ordinary dense tensor first$"
    with pytest.raises(ConfigError, match=text):
        Engine(model, AdamW(), **everything_on_device())
    model = net()
    model.register_buffer("mask", torch.eye(WIDTH).to_sparse())
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        step(engine, 0)
        engine.load_state_dict(engine.state_dict())
        assert engine.module.mask.is_sparse


class Named(nn.Parameter):
    """A parameter with something to remember: plain memory, and all operations are torch's."""

    def __new__(cls, data: torch.Tensor, note: str = "plain") -> Named:
        made = torch.Tensor._make_subclass(cls, data, True)
        made.note = note
        return made


class Product(nn.Module):
    """Autograd saves the weight itself, not a view that torch has made of it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) + x


def test_a_class_of_parameters_in_plain_memory_works(tmp_path: Path) -> None:
    """It stays what it is, is trained as any other, and waits for backward as a handle: on the device is no room."""
    found = []
    for make in (nn.Parameter, Named):
        torch.manual_seed(0)
        model = nn.Sequential(*(Product(make(torch.randn(WIDTH, WIDTH) / WIDTH)) for _ in range(8)))
        with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
            step(engine, 0)
            step(engine, 1)
            found.append(engine.state_dict())
        assert all(type(product.weight) is make for product in model)
    assert all(product.weight.note == "plain" for product in model)
    assert_same_tensors(found[1], found[0])


def test_a_class_of_parameters_on_the_meta_device() -> None:
    model = net()
    model.blocks[1].weight = Named(torch.empty(WIDTH, WIDTH, device="meta"))
    text = r"^parameter blocks\.1\.weight: .*on the meta device but got test_refusals Named.*load the model to the CPU"
    assert_refused(model, ConfigError, text)


# --- values for load_state_dict ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["blocks.1.weight", "offset"])
def test_values_without_an_address_are_not_loaded(name: str, tmp_path: Path) -> None:
    model = net()
    model.register_buffer("offset", torch.zeros(WIDTH, WIDTH))
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        before = engine.state_dict()
        wrong = {key: value + 1 for key, value in before.items()}
        for value, text in (
            (
                strange(wrong[name]),
                r"got test_refusals Strange, .*; convert it to an ordinary dense tensor first$",
            ),
            (quantized().blocks[1].weight, r"got torchao Int8Tensor, .*; load its dequantize\(\)$"),
            (wrong[name].to_sparse(), r"got one that is torch\.sparse_coo; convert it"),
            (wrong[name].to("meta"), r"got one on the meta device"),
        ):
            with pytest.raises(ConfigError, match=f"^{re.escape(name)}: expected a tensor but {text}"):
                engine.load_state_dict({**wrong, name: value})
            assert_same_tensors(engine.state_dict(), before)
        engine.load_state_dict({**wrong, "blocks.1.weight": quantized().blocks[1].weight.dequantize()})


@pytest.mark.filterwarnings("ignore")
def test_states_without_an_address_are_not_loaded(tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        step(engine, 0)
        packed = engine.optimizer.state_dict()
        packed["state"][0]["exp_avg"] = quantized().blocks[1].weight
        with pytest.raises(ConfigError, match=r"^blocks\.0\.weight: expected exp_avg of .* but got torchao Int8Tensor"):
            engine.optimizer.load_state_dict(packed)


# --- several ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Be the only rank."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def test_modules_of_fully_shard(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model.blocks[1], mesh=mesh)
    text = r"FSDPLinear: .* one of fully_shard \(FSDP2\).*has several ranks of its own; wrap the module as it was"
    with pytest.raises(StateError, match=text):
        Engine(model, AdamW(), **everything_on_device())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_modules_of_fsdp(use_orig_params: bool, mesh: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(net(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    with pytest.raises(StateError, match=r"got one of FullyShardedDataParallel \(FSDP\).*several ranks"):
        Engine(model, AdamW(), **everything_on_device())


@pytest.mark.filterwarnings("ignore")
def test_modules_that_reduce_gradients(mesh: Any) -> None:
    from torch.distributed._composable.replicate import replicate

    with pytest.raises(StateError, match=r"DistributedDataParallel: copies parameters.*wrap the \.module inside it"):
        Engine(nn.parallel.DistributedDataParallel(net()), AdamW(), **everything_on_device())
    with pytest.raises(StateError, match=r"got one of replicate \(DDP\)"):
        Engine(replicate(net()), AdamW(), **everything_on_device())


def test_parameters_of_tensor_parallelism(mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(net(), mesh, {"blocks.2": ColwiseParallel()})
    text = (
        r"^parameter blocks\.2\.weight: expected elements in memory of its own but got a DTensor, of which several "
        r"ranks have parts; .*several ranks of its own, tensor parallelism is not supported; wrap the module as it was"
    )
    with pytest.raises(ConfigError, match=text):
        Engine(model, AdamW(), **everything_on_device())
    with Engine(net(), AdamW(), **everything_on_device()) as engine:
        with pytest.raises(ConfigError, match=r"^blocks\.2\.weight: .* got a DTensor, .*; load its full_tensor\(\)$"):
            engine.load_state_dict(model.state_dict())


def test_one_of_several_processes_by_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("2", "16"):
        monkeypatch.setenv("WORLD_SIZE", text)
        wanted = (
            rf"^engine: expected one process but got {text} in WORLD_SIZE, which would train apart; pass stage=1 to "
            r"offload\.Engine for gradients and states in slices, stage=.apart. to evaluate in each process as a "
            r"whole, or start one process, without torchrun or accelerate launch$"
        )
        assert_refused(net(), StateError, wanted)
    with pytest.raises(StateError, match=r"got none, and WORLD_SIZE=16; call torch\.distributed\.init_process_group"):
        Engine(net(), AdamW(), **everything_on_device(), stage=1)
    with pytest.raises(ConfigError, match=r'^stage: expected an engine that only evaluates for "apart" but got an opt'):
        Engine(net(), AdamW(), **everything_on_device(), stage="apart")
    Engine(net(), **everything_on_device(), stage="apart").close()
    for text in ("", "1", "many"):
        monkeypatch.setenv("WORLD_SIZE", text)
        Engine(net(), AdamW(), **everything_on_device()).close()


def test_one_of_several_processes_in_a_group() -> None:
    distributed = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=3)
    try:
        assert_refused(net(), StateError, r"expected one process but got 3 in the process group")
    finally:
        distributed.destroy_process_group()


# --- hooks of accelerate ----------------------------------------------------------------------------------------------


def test_modules_that_accelerate_moves() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = net()
    accelerate.cpu_offload(model, execution_device="cpu")
    text = (
        r"^model Net: expected parameters that nobody else moves but got a hook of accelerate \(AlignDevicesHook\) "
        r"at the model itself; load the model without device_map, or take the hooks off with "
        r"accelerate\.hooks\.remove_hook_from_submodules\(model\)$"
    )
    assert_refused(model, StateError, text)
    accelerate.hooks.remove_hook_from_submodules(model)
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        step(engine, 0)


def test_a_model_partly_on_disk(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.disk_offload(net(), str(tmp_path), execution_device="cpu")
    assert_refused(model, StateError, "hook of accelerate")


def test_maps_of_devices(tmp_path: Path) -> None:
    """Of several devices they are refused; transformers makes one of a single device, too."""
    for placed, found in (
        ({"blocks.0": 0, "blocks.1": "cpu"}, "cpu, cuda:0"),
        ({"": "disk"}, "disk"),
        ({"blocks.0": 0, "blocks.1": 1}, "cuda:0, cuda:1"),
    ):
        model = nn.Sequential(net())
        model[0].hf_device_map = placed
        text = rf"^model Sequential: expected all of it on one device but got it on {found} \(hf_device_map\); load the"
        assert_refused(model, StateError, text)
    for placed in ({"": "cpu"}, {"": torch.device("cpu")}, {"a": 0, "b": "cuda:0", "c": "cuda"}, None):
        model[0].hf_device_map = placed
        Engine(model, AdamW(), **everything_on_device()).close()
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 16)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        numbers = torch.arange(8).view(1, 8)
        engine.backward(engine(input_ids=numbers, labels=numbers).loss)
        assert engine.step()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_renormalise_themselves_are_refused(kind: type[nn.Module]) -> None:
    """Torch writes to their weight in every forward."""
    model = nn.Sequential(kind(10, 4, max_norm=1.0), nn.Linear(4, 1))
    text = r"^module 0: expected weights that forwards leave alone but max_norm=1\.0 .*; set it to None"
    with pytest.raises(ConfigError, match=text):
        Engine(model, AdamW(), **everything_on_device())
    model[0].max_norm = None
    with Engine(model, AdamW(), **everything_on_device()):
        pass
