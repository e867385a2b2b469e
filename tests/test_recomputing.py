"""Blocks that are computed again in backward: the same bits, and the model as it was at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import assert_equal, everything_on_device
from test_leaving import Net, loss_of, net, options, rows, run
from torch import nn

import offload
from offload.errors import ConfigError, StateError
from offload.memory.budget import Tier
from offload.module.recomputing import blocks_of

pytestmark = pytest.mark.usefixtures("single_torch_thread")


def test_the_same_bits_with_less_of_the_device(tmp_path: Path) -> None:
    """Dropout has the same masks again; parameters that live on the drive are away in between."""
    truth = run(net(), **everything_on_device())
    kept = truth.stats.peak_bytes["device"] - truth.plan.arena_bytes[Tier.DEVICE]
    for home in ("none", "nvme"):
        ours = run(net(), **options(tmp_path, home=home, activations="recompute"))
        assert_equal(ours, truth)
        if home == "none":
            assert ours.stats.peak_bytes["device"] - ours.plan.arena_bytes[Tier.DEVICE] < 0.6 * kept


def test_the_model_is_as_it_was(tmp_path: Path) -> None:
    model = net()
    before = [dict(vars(block)) for block in model.blocks]
    forwards = []
    model.blocks[0].forward = lambda x: (forwards.append(1), nn.Sequential.forward(model.blocks[0], x))[1]
    own = model.blocks[0].forward
    with offload.Engine(model, offload.AdamW(), **options(tmp_path, activations="recompute")) as engine:
        with torch.no_grad():
            engine(rows(0))
        assert len(forwards) == 1
        engine.backward(loss_of(engine, rows(0)))
        assert len(forwards) == 3  # and again in backward
        engine.step()
    assert model.blocks[0].forward is own
    for block, was in zip(model.blocks[1:], before[1:], strict=True):
        assert vars(block).keys() == was.keys()


def test_a_failed_engine_leaves_the_model(tmp_path: Path) -> None:
    model = net()
    small = {"device": "4KiB", "cpu": "4KiB"}
    with pytest.raises(offload.BudgetError):
        offload.Engine(model, offload.AdamW(), device="cpu", max_memory=small, activations="recompute")
    assert not any("forward" in vars(block) for block in model.blocks)


def test_blocks_are_the_outermost_that_repeat() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))

    layers = nn.ModuleList(Experts() for _ in range(3))
    model = nn.ModuleDict({"embed": nn.Linear(2, 2), "body": nn.ModuleDict({"layers": layers})})
    assert [name for name, _ in blocks_of(model)] == [f"body.layers.{number}" for number in range(3)]
    assert list(blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == []  # operators
    below = nn.Sequential(nn.Linear(2, 2), net())
    assert [name for name, _ in blocks_of(below)] == [f"1.blocks.{number}" for number in range(6)]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match='activations: "recompute" expected blocks that repeat.* found none in Linear'
    ):
        offload.Engine(nn.Linear(2, 2), offload.AdamW(), activations="recompute", **everything_on_device())


def test_buffers_that_a_forward_changes_are_refused(tmp_path: Path) -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block[0] = nn.BatchNorm1d(32)

    torch.manual_seed(0)
    with offload.Engine(Normed(), offload.AdamW(), **options(tmp_path, activations="recompute")) as engine:
        with pytest.raises(StateError, match=r"that of blocks\.0 changes 0\.num_batches_tracked"):
            engine(rows(0))


def test_a_model_of_transformers_does_it_in_its_own_way() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, vocab_size=64, num_attention_heads=2
    )
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for mode in ("keep", "recompute"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        memory = {"device": "16MiB", "cpu": "16MiB"}
        with offload.Engine(model, offload.AdamW(lr=1e-2), device="cpu", max_memory=memory, activations=mode) as engine:
            assert model.is_gradient_checkpointing == (mode == "recompute")
            for _ in range(2):
                loss = engine(input_ids=ids, labels=ids).loss
                losses.append(loss.item())
                engine.backward(loss)
                del loss
                engine.step()
        assert not model.is_gradient_checkpointing
    assert losses[:2] == losses[2:]
