"""Adapters on a quantized base model (QLoRA) that stays on the drive: it is larger than the device budget.

Nothing is downloaded: the base is tiny and random. With ``--model DIR`` it is a model of transformers.
"""

import argparse
import pathlib
import tempfile

import peft
import torch
import transformers

import offload

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", metavar="DIR", help="a model of transformers; a tiny one is made without it")
parser.add_argument("--base", choices=["bitsandbytes", "torchao"], default="bitsandbytes", help="4 bits, or 8")
parser.add_argument("--nvme-path", metavar="DIR", default=tempfile.gettempdir(), help="on the drive to use")
parser.add_argument("--output", metavar="DIR", help="for the adapters; a temporary directory")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--device-memory", default="32MiB")
parser.add_argument("--cpu-memory", default="32MiB")
parser.add_argument("--nvme-memory", default="256MiB")
given = parser.parse_args()
output = pathlib.Path(given.output or tempfile.mkdtemp())

if not given.model:
    given.model = output / "base"
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 256, "num_hidden_layers": 20}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(given.model)

torch.manual_seed(0)
how: object
if given.base == "torchao":
    import torchao.quantization

    how = transformers.TorchAoConfig(torchao.quantization.Int8WeightOnlyConfig())
else:
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
model = transformers.AutoModelForCausalLM.from_pretrained(given.model, quantization_config=how, dtype=torch.bfloat16)
model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")).train()
numbers = torch.arange(64).view(4, 16)  # the data: each number follows from the one before

with offload.Engine(
    model,
    offload.AdamW(lr=1e-3),
    max_memory={"device": given.device_memory, "cpu": given.cpu_memory, "nvme": given.nvme_memory},
    nvme_path=given.nvme_path,
    offload_param="nvme",
    offload_optimizer="nvme",
) as engine:
    print(engine.plan)
    batch = numbers.to(engine.device)
    for step in range(given.steps):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        print(step, f"{loss.item():.3f}")
    engine.save_pretrained(output)  # the adapters
