"""Causal language models of transformers whose loss is computed in chunks: the same loss; refusals by behaviour."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from harness import assert_equal, everything_on_device, nvme, run
from torch import nn

import offload
from offload import ops
from offload.errors import ConfigError, StateError

pytestmark = pytest.mark.usefixtures("single_torch_thread")

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 200,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 200, "resid_pdrop": 0.0}


def llama(*, tied: bool = True) -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SHAPE, tie_word_embeddings=tied))


def gpt2() -> Any:
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2, embd_pdrop=0.0, attn_pdrop=0.0))


def qwen() -> Any:
    torch.manual_seed(0)
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**_SHAPE, num_key_value_heads=2))


def batch(number: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 200, (3, 11), generator=torch.Generator().manual_seed(number))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("make", [llama, lambda: llama(tied=False), gpt2, qwen])
def test_loss_and_gradients_are_those_of_transformers(make: Any) -> None:
    for more in ({}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"return_dict": False}):
        plain, model = make(), make()
        ops.chunk_loss(model, chunk=5)
        truth, ours = plain(**batch(0), **more), model(**batch(0), **more)
        if more.get("return_dict", True):
            assert ours.logits is None and "logits" not in ours and type(ours) is type(truth)
        else:
            assert len(ours) == len(truth) - 1
        torch.testing.assert_close(ours[0], truth[0], rtol=1e-6, atol=1e-6)
        truth[0].backward()
        ours[0].backward()
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_shifted_labels_and_positions() -> None:
    """The loss of a packed batch, and of one whose arguments have no names."""
    plain, model = llama(), llama()
    ops.chunk_loss(model, chunk=5)
    ids = batch(0)["input_ids"]
    given = {"shift_labels": torch.roll(ids, -2, 1), "labels": ids}
    torch.testing.assert_close(model(ids, **given).loss, plain(ids, **given).loss)
    by_place = (ids, None, None, None, None, batch(0)["labels"])
    assert model(*by_place).logits is None
    torch.testing.assert_close(model(*by_place).loss, plain(*by_place).loss)


def test_without_labels_nothing_changes() -> None:
    plain, model = llama(), llama()
    ops.chunk_loss(model)
    ids = batch(0)["input_ids"]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    logits = plain(ids).logits.detach()  # somebody's own
    assert torch.equal(
        model.loss_function(logits, ids, vocab_size=200), plain.loss_function(logits, ids, vocab_size=200)
    )
    model(**batch(0)).loss.backward()
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_model_of_its_own(copied: Any) -> None:
    model = llama()
    ops.chunk_loss(model, chunk=5)
    other = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(other(**batch(0)).loss, llama()(**batch(0)).loss)
    other(**batch(0)).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [True, False])
def test_the_same_bits_wherever_parameters_live(tmp_path: Path, *, tied: bool) -> None:
    model = llama(tied=tied)
    ops.chunk_loss(model, chunk=5)
    batches = [batch(number) for number in range(3)]
    truth = run(copy.deepcopy(model), batches, **everything_on_device())
    for activations in ("keep", "recompute", "offload"):
        ours = run(copy.deepcopy(model), batches, **nvme(model, tmp_path, activations=activations))
        assert ours.stats.links["nvme_read"].bytes > 0
        assert_equal(ours, truth)
    plainly = run(llama(tied=tied), batches, **everything_on_device())
    for mine, other in zip(truth.losses, plainly.losses, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_below_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    losses = []
    for chunked in (False, True):
        model = llama()
        if chunked:
            ops.chunk_loss(model, chunk=5)
        torch.manual_seed(1)
        adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
        with offload.Engine(adapted, offload.AdamW(), **everything_on_device()) as engine:
            found = engine(**batch(0))
            assert (found.logits is None) == chunked
            losses.append(found.loss.detach())
            engine.backward(found.loss)
            engine.step()
    torch.testing.assert_close(losses[1], losses[0])
    with pytest.raises(ConfigError, match="expected a causal language model of transformers but got PeftModelFor"):
        ops.chunk_loss(adapted)


def test_models_that_change_their_logits_are_refused() -> None:
    scaled = hf.CohereForCausalLM(hf.CohereConfig(**_SHAPE, logit_scale=0.5))
    capped = hf.Gemma2ForCausalLM(hf.Gemma2Config(**_SHAPE, head_dim=8, num_key_value_heads=2))
    for model in (scaled, capped):
        ids = batch(0)["input_ids"]
        before = model(ids).logits
        ops.chunk_loss(model)
        with pytest.raises(StateError, match="to give the output of its head to the loss as it is"):
            model(**batch(0))
        assert torch.equal(model(ids).logits, before)  # without labels it goes on


class WithZLoss(hf.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    """Adds to the loss what it makes of the logits, as people do."""

    def forward(self, **kwargs: Any) -> Any:
        output = super().forward(**kwargs)
        output.loss = output.loss + 1e-2 * output.logits.logsumexp(-1).pow(2).mean()
        return output


def test_models_that_use_their_logits_behind_the_loss_are_refused() -> None:
    """What stands for them are the hidden states: the loss was wrong, silently."""
    bamba = {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "attn_layer_indices": [0],
        "num_key_value_heads": 4,
        "z_loss_coefficient": 0.01,
    }
    looked = llama()
    looked.lm_head.register_forward_hook(lambda layer, given, logits: logits.softmax(-1).amax())
    for model in (WithZLoss(hf.LlamaConfig(**_SHAPE)), hf.BambaForCausalLM(hf.BambaConfig(**_SHAPE, **bamba)), looked):
        ops.chunk_loss(model)
        with pytest.raises(StateError, match="as it is, and to nothing else, but (logsumexp|softmax) uses it"):
            model(**batch(0))


def no_images(logits: torch.Tensor) -> None:
    logits[:, :, [3]] = torch.finfo(logits.dtype).min


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", [lambda logits: logits.clamp_(-1, 1), no_images], ids=["cap", "mask"])
def test_models_that_change_their_logits_in_place_are_refused(change: Any, mode: Any) -> None:
    model = llama()
    ops.chunk_loss(model)
    plain = model(**batch(0)).loss
    hook = model.lm_head.register_forward_hook(lambda layer, given, logits: change(logits))
    with mode(), pytest.raises(StateError, match="to give the output of its head to the loss as it is"):
        model(**batch(0))
    hook.remove()
    with mode():
        assert torch.equal(model(**batch(0)).loss, plain)


def test_models_with_a_loss_of_their_own_are_refused() -> None:
    model = hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=200, decoder_start_token_id=0)
    )
    ops.chunk_loss(model)
    with pytest.raises(
        StateError, match="T5ForConditionalGeneration to give .* as it is, and to nothing else, but size uses it"
    ):
        model(**batch(0))


class OfItsOwn(hf.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        return {"loss": hidden.mean(), "logits": self.lm_head(hidden)}


def test_a_loss_without_the_head_is_refused() -> None:
    model = OfItsOwn(hf.LlamaConfig(**_SHAPE))
    ops.chunk_loss(model)
    with pytest.raises(
        StateError, match="expected OfItsOwn to compute its loss by loss_function, of its head's output"
    ):
        model(**batch(0))


def test_what_is_no_such_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a causal language model of transformers but got Linear"):
        ops.chunk_loss(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="chunk, the tokens at a time, to be a whole number >= 1 but got 0"):
        ops.chunk_loss(llama(), chunk=0)
    twice = llama()
    ops.chunk_loss(twice)
    with pytest.raises(ConfigError, match="an nn.Linear but got one whose forward was replaced"):
        ops.chunk_loss(twice)
    tiled = llama(tied=False)
    ops.tile_(tiled, larger_than="8KiB")
    with pytest.raises(ConfigError, match="an nn.Linear but got TiledLinear"):
        ops.chunk_loss(tiled)
    base = llama().model
    with pytest.raises(ConfigError, match="an nn.Linear but got"):
        ops.chunk_loss(base)
    masked = hf.BertForMaskedLM(hf.BertConfig(**_SHAPE))
    with pytest.raises(ConfigError, match="expected the loss function ForCausalLMLoss but BertForMaskedLM has"):
        ops.chunk_loss(masked)
    other = llama(tied=False)
    ops.chunk_loss(other)
    other.set_output_embeddings(nn.Linear(32, 200, bias=False))
    with pytest.raises(ConfigError, match="expected the head that LlamaForCausalLM had but another one"):
        other(**batch(0))
