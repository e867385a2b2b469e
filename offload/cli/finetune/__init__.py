"""The command ``offload finetune``: fine-tunes a causal language model of Hugging Face on a text."""
