"""What does it take to load a checkpoint that is larger than memory?

A synthetic checkpoint of a Llama, 4 B parameters in bf16 by default, is written as sharded safetensors and loaded with
``offload.load_pretrained``. The peak of the resident set while it loads is compared with the bound: device + host
budget + 64 MiB over the interpreter with torch, transformers and the model's classes imported. The seconds are compared
with those of reading the files once, piece by piece and cold, and with those of writing as many bytes to the drive.
Some parameters are compared with the files, bit by bit. Then the engine saves the model in files of the same size, and
what that takes of memory is compared with one file. All files are deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
from _common import SLACK_BYTES, emit

from offload.activations.rss import reset_high_water, status_bytes
from offload.sizes import MIB

PIECE_BYTES = 1 << 20


def write_checkpoint(folder: Path, model: torch.nn.Module, shard_bytes: int) -> int:
    """Write random values for a model on the meta device, a piece at a time; returns their bytes."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in model.state_dict().items():
        if filled + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    places, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= dict.fromkeys(shard, file)
        header, offset = {}, 0
        for name, tensor in shard.items():
            header[name] = {
                "dtype": "BF16",
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.nbytes],
            }
            offset += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor in shard.values():
                left = tensor.numel()
                while left:
                    values = torch.randn(min(left, PIECE_BYTES // 2)) * 0.02
                    values = values.bfloat16() if tensor.dim() > 1 else torch.ones(len(values), dtype=torch.bfloat16)
                    out.write(values.view(torch.uint8).numpy())
                    left -= len(values)
            out.flush()
            os.fsync(out.fileno())
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def forget(folder: Path) -> None:
    """Ask the kernel to drop the files from its cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(folder: Path) -> float:
    """Return the seconds that reading all files takes, in pieces."""
    buffer = bytearray(PIECE_BYTES)
    begin = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=38)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--device", default="768MiB")
    parser.add_argument("--cpu", default="1GiB")
    parser.add_argument("--nvme", default="20GiB")
    parser.add_argument("--shard-bytes", type=int, default=512 << 20)
    parser.add_argument("--path", default="/var/tmp", help="folder for the checkpoint and the swap file")
    parser.add_argument("--smoke", action="store_true", help="150 M parameters, budgets to match")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.layers, arguments.hidden, arguments.vocabulary, arguments.shard_bytes = 22, 768, 8000, 32 << 20
        arguments.device, arguments.cpu, arguments.nvme = "48MiB", "32MiB", "1GiB"

    torch.ones(2, 2) @ torch.ones(2, 2)
    torch_only = status_bytes("VmRSS")
    import transformers
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    import offload
    from offload.sizes import parse_bytes

    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 192,
        vocab_size=arguments.vocabulary,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    folder = Path(tempfile.mkdtemp(prefix="offload-load-", dir=arguments.path))
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        config.save_pretrained(folder)
        torch.manual_seed(0)
        size = write_checkpoint(folder, model, arguments.shard_bytes)
        count = sum(parameter.numel() for parameter in model.parameters())
        probes = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
        probes.append(f"model.layers.{arguments.layers - 1}.mlp.down_proj.weight")
        del model
        forget(folder)
        plain = read_seconds(folder)
        forget(folder)
        baseline = status_bytes("VmRSS")
        reset_high_water()
        budgets = {"device": arguments.device, "cpu": arguments.cpu, "nvme": arguments.nvme}
        limit = sum(int(parse_bytes(budgets[tier], subject=tier)) for tier in ("device", "cpu")) + SLACK_BYTES
        begin = time.perf_counter()
        engine = offload.load_pretrained(folder, device="cpu", max_memory=budgets, nvme_path=arguments.path)
        engine.drain()
        seconds = time.perf_counter() - begin
        peak = status_bytes("VmHWM") - baseline
        print(engine.plan)
        written = engine.stats().links["nvme_write"].bytes
        equal = _same(engine, folder, probes)
        ids = torch.arange(16)[None]
        with torch.no_grad():
            loss = float(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        used = status_bytes("VmHWM") - baseline
        reset_high_water()
        before = max(status_bytes("VmRSS"), baseline + limit - SLACK_BYTES)  # what the budgets allow may be taken up
        begin = time.perf_counter()
        engine.save_pretrained(folder / "saved", max_shard_size=arguments.shard_bytes)
        saving, save_seconds = status_bytes("VmHWM") - before, time.perf_counter() - begin
        equal = equal and _same(engine, folder / "saved", probes)
        engine.close(restore=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{count / 1e9:.2f} B parameters, {size / 1e9:.2f} GB of files: peak RSS {peak / MIB:.0f} MiB while loading, "
        f"limit {limit / MIB:.0f} MiB, measured / limit = {peak / limit:.3f} (with a forward {used / MIB:.0f} MiB; "
        f"imports before: {(baseline - torch_only) / MIB:.0f} MiB over torch)\n"
        f"{seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s; reading the files alone {plain:.1f} s; "
        f"{written / 1e9:.2f} GB written to the drive; measured / reading = {seconds / plain:.2f}; "
        f"{len(probes)} parameters {'equal to' if equal else 'DIFFER from'} the files; loss {loss:.3f}\n"
        f"saved again in {save_seconds:.1f} s; memory while saving: {saving / MIB:.0f} MiB beside the "
        f"budgets, for files of {arguments.shard_bytes / MIB:.0f} MiB"
    )
    emit(
        arguments.json,
        {
            "parameters": count,
            "file_bytes": size,
            "peak_bytes": peak,
            "peak_with_forward_bytes": used,
            "imports_bytes": baseline - torch_only,
            "limit_bytes": limit,
            "seconds": seconds,
            "read_seconds": plain,
            "nvme_write": written,
            "shard_bytes": arguments.shard_bytes,
            "peak_saving_bytes": saving,
            "save_seconds": save_seconds,
            "equal": equal,
            "loss": loss,
            "budgets": budgets,
        },
    )


def _same(engine: object, folder: Path, names: list[str]) -> bool:
    """Tell whether parameters have the bits of the files."""
    from safetensors import safe_open

    import offload

    assert isinstance(engine, offload.Engine)
    places = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    parameters = dict(engine.module.named_parameters())
    same = []
    for name in names:
        with safe_open(folder / places[name], "pt") as file, engine.gather(parameters[name]):
            same.append(torch.equal(parameters[name].detach(), file.get_tensor(name)))
    return all(same)


if __name__ == "__main__":
    main()
