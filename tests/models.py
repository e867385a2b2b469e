"""Tiny models of many architectures, with the inputs of a training step, for the end-to-end tests.

A table of plain values: nothing here knows the runtime. In the nightly profile each has every kind of checkpointing.
In others all of ``CORE`` and some of ``MORE`` have one kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY = 200
Batch = dict[str, Any]

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
_BERT = {**_LLAMA, "max_position_embeddings": 32}
_GROUPED = {**_LLAMA, "num_key_value_heads": 2}
_MOE = {**_GROUPED, "num_experts_per_tok": 2, "head_dim": 8}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tokens(seed: int) -> Batch:
    """Return ids with the ids as labels, (2, 12)."""
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def classes(seed: int) -> Batch:
    """Return ids with a class per sequence."""
    batch = tokens(seed)
    return {**batch, "labels": torch.arange(2)}


def pictures(seed: int) -> Batch:
    """Return two pictures with a class each."""
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.arange(2)}


def speech(seed: int) -> Batch:
    """Return mel features (2, 8 bins, 24 frames) with a transcription."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_features": torch.randn(2, 8, 24, generator=generator),
        "labels": tokens(seed)["labels"][:, :6],
    }


def waves(seed: int) -> Batch:
    """Return raw audio with labels for CTC."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_values": torch.randn(2, 2000, generator=generator),
        "labels": torch.tensor([[3, 4], [5, 6]]),
    }


def captions(seed: int) -> Batch:
    """Return pictures and their texts for a contrastive model."""
    return {
        "pixel_values": pictures(seed)["pixel_values"],
        "input_ids": tokens(seed)["input_ids"],
        "return_loss": True,
    }


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How to build one tiny model.

    Attributes:
        name: of the test case.
        build: returns a fresh model; seed the generator before.
        batch: returns the inputs of micro-batch number n.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch] = tokens


def architecture(
    name: str,
    config: str,
    model: str,
    batch: Callable[[int], Batch] = tokens,
    **options: Any,
) -> Architecture:
    """Return the architecture of a transformers model, in training mode."""

    def build() -> nn.Module:
        result: nn.Module = getattr(hf, model)(getattr(hf, config)(**options))
        return result.train()

    return Architecture(name, build, batch)


_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 2,
    **_SPECIAL,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}

CORE = [
    architecture("llama", "LlamaConfig", "LlamaForCausalLM", **_GROUPED),
    architecture("gpt2", "GPT2Config", "GPT2LMHeadModel", n_embd=32, n_layer=4, n_head=4, vocab_size=VOCABULARY),
    architecture("t5", "T5Config", "T5ForConditionalGeneration", **_T5),
    architecture("bert", "BertConfig", "BertForMaskedLM", **_BERT),
    architecture(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        moe_intermediate_size=16,
        num_experts=4,
        **_MOE,
    ),
    architecture(
        "mamba", "MambaConfig", "MambaForCausalLM", hidden_size=32, num_hidden_layers=3, vocab_size=VOCABULARY
    ),
    architecture("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", head_dim=8, **_GROUPED),
    architecture(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        **{**_LLAMA, "num_hidden_layers": 3},
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    architecture("vit", "ViTConfig", "ViTForImageClassification", pictures, **_VISION),
    architecture(
        "whisper",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        speech,
        **{**_BART, "max_position_embeddings": 32},
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=16,
    ),
    architecture("albert", "AlbertConfig", "AlbertForMaskedLM", embedding_size=16, **_BERT),
]

MORE = [
    architecture("mistral", "MistralConfig", "MistralForCausalLM", sliding_window=6, **_GROUPED),
    architecture("mixtral", "MixtralConfig", "MixtralForCausalLM", num_local_experts=4, **_GROUPED),
    architecture("phi", "PhiConfig", "PhiForCausalLM", **_LLAMA),
    architecture("phi3", "Phi3Config", "Phi3ForCausalLM", **_GROUPED, **_SPECIAL),
    architecture(
        "falcon",
        "FalconConfig",
        "FalconForCausalLM",
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
    ),
    architecture(
        "opt",
        "OPTConfig",
        "OPTForCausalLM",
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
        **_SPECIAL,
    ),
    architecture(
        "bloom", "BloomConfig", "BloomForCausalLM", hidden_size=32, n_layer=4, n_head=4, vocab_size=VOCABULARY
    ),
    architecture("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", **_BERT),
    architecture(
        "gptj",
        "GPTJConfig",
        "GPTJForCausalLM",
        n_embd=32,
        n_layer=3,
        n_head=4,
        rotary_dim=4,
        vocab_size=VOCABULARY,
    ),
    architecture(
        "gpt_neo",
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=4,
        max_position_embeddings=32,
        vocab_size=VOCABULARY,
    ),
    architecture(
        "gpt_bigcode",
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        n_embd=32,
        n_layer=3,
        n_head=4,
        vocab_size=VOCABULARY,
    ),
    architecture("qwen2", "Qwen2Config", "Qwen2ForCausalLM", **_GROUPED),
    architecture("qwen3", "Qwen3Config", "Qwen3ForCausalLM", head_dim=8, **_GROUPED),
    architecture("gemma", "GemmaConfig", "GemmaForCausalLM", head_dim=8, **_GROUPED),
    architecture("gemma2", "Gemma2Config", "Gemma2ForCausalLM", head_dim=8, **_GROUPED),
    architecture("olmo2", "Olmo2Config", "Olmo2ForCausalLM", **_GROUPED, **_SPECIAL),
    architecture("olmoe", "OlmoeConfig", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, **_GROUPED),
    architecture("granite", "GraniteConfig", "GraniteForCausalLM", **_GROUPED),
    architecture("cohere", "CohereConfig", "CohereForCausalLM", **_GROUPED, **_SPECIAL),
    architecture("stablelm", "StableLmConfig", "StableLmForCausalLM", **_GROUPED),
    architecture("starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", **_GROUPED, **_SPECIAL),
    architecture("smollm3", "SmolLM3Config", "SmolLM3ForCausalLM", **_GROUPED, **_SPECIAL),
    architecture("glm", "GlmConfig", "GlmForCausalLM", head_dim=8, **_GROUPED, **_SPECIAL),
    architecture("gpt_oss", "GptOssConfig", "GptOssForCausalLM", num_local_experts=4, sliding_window=6, **_MOE),
    architecture(
        "mamba2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        hidden_size=32,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=4,
        vocab_size=VOCABULARY,
    ),
    architecture("rwkv", "RwkvConfig", "RwkvForCausalLM", hidden_size=32, num_hidden_layers=3, vocab_size=VOCABULARY),
    architecture("roberta", "RobertaConfig", "RobertaForMaskedLM", **_BERT, **_SPECIAL),
    architecture(
        "xlm_roberta", "XLMRobertaConfig", "XLMRobertaForSequenceClassification", classes, **_BERT, **_SPECIAL
    ),
    architecture(
        "distilbert",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        dim=32,
        hidden_dim=64,
        n_layers=3,
        n_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
    ),
    architecture("electra", "ElectraConfig", "ElectraForSequenceClassification", classes, embedding_size=16, **_BERT),
    architecture("deberta", "DebertaConfig", "DebertaForSequenceClassification", classes, **_BERT),
    architecture(
        "deberta_v2",
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        **_BERT,
    ),
    architecture(
        "modernbert",
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        **_BERT,
        **_SPECIAL,
        cls_token_id=1,
        sep_token_id=2,
    ),
    architecture(
        "mobilebert",
        "MobileBertConfig",
        "MobileBertForMaskedLM",
        embedding_size=16,
        intra_bottleneck_size=16,
        **_BERT,
    ),
    architecture(
        "xlnet",
        "XLNetConfig",
        "XLNetForSequenceClassification",
        classes,
        d_model=32,
        n_layer=3,
        n_head=4,
        d_inner=64,
        vocab_size=VOCABULARY,
    ),
    architecture(
        "longformer",
        "LongformerConfig",
        "LongformerForMaskedLM",
        attention_window=4,
        **_BERT,
        **_SPECIAL,
    ),
    architecture("big_bird", "BigBirdConfig", "BigBirdForMaskedLM", attention_type="original_full", **_BERT),
    architecture("bart", "BartConfig", "BartForConditionalGeneration", **_BART),
    architecture("pegasus", "PegasusConfig", "PegasusForConditionalGeneration", **_BART),
    architecture("marian", "MarianConfig", "MarianMTModel", **_BART),
    architecture("mt5", "MT5Config", "MT5ForConditionalGeneration", **_T5),
    architecture("umt5", "UMT5Config", "UMT5ForConditionalGeneration", **_T5),
    architecture(
        "clip",
        "CLIPConfig",
        "CLIPModel",
        captions,
        projection_dim=16,
        text_config={**_BERT, "num_hidden_layers": 2, **_SPECIAL},
        vision_config=_VISION,
    ),
    architecture(
        "siglip",
        "SiglipConfig",
        "SiglipModel",
        captions,
        text_config={**_BERT, "num_hidden_layers": 2, "projection_size": 32, **_SPECIAL},
        vision_config=_VISION,
    ),
    architecture("deit", "DeiTConfig", "DeiTForImageClassification", pictures, **_VISION),
    architecture("dinov2", "Dinov2Config", "Dinov2ForImageClassification", pictures, **_VISION),
    architecture(
        "swin",
        "SwinConfig",
        "SwinForImageClassification",
        pictures,
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    architecture(
        "convnext",
        "ConvNextConfig",
        "ConvNextForImageClassification",
        pictures,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_stages=2,
        patch_size=2,
    ),
    architecture(
        "resnet",
        "ResNetConfig",
        "ResNetForImageClassification",
        pictures,
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
    ),
    architecture(
        "wav2vec2",
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        waves,
        **{**_LLAMA, "vocab_size": 32},
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
    ),
]

BY_NAME = {kind.name: kind for kind in (*CORE, *MORE)}
