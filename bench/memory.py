"""How much memory does a run take? Peak RSS of a random bf16 Llama against its budgets, on a machine without a GPU.

The model (by default 1.07 B parameters: 20 layers x 2048) is built on the meta device and initialised unit by unit;
clipping is on, and gradient checkpointing unless told otherwise; states, parameters and even waiting gradients have to
go to NVMe. Bound: device + host budget + 64 MiB over the interpreter with torch imported. What the modelling library's
own import takes is printed beside it, not subtracted.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from _common import SLACK_BYTES, emit, initialise, meta_llama

from offload.activations.rss import reset_high_water, status_bytes
from offload.sizes import MIB, parse_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="1GiB")
    parser.add_argument("--cpu", default="1.5GiB")
    parser.add_argument("--nvme", default="20GiB")
    parser.add_argument("--path", default="/var/tmp")
    parser.add_argument("--offload-param", default="auto")
    parser.add_argument("--offload-optimizer", default="auto")
    parser.add_argument("--activation-memory", default=None)
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--smoke", action="store_true", help="50 M parameters, budgets to match")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.layers, arguments.hidden, arguments.vocabulary, arguments.tokens = 6, 768, 8000, 128
        arguments.device, arguments.cpu, arguments.nvme = "96MiB", "100MiB", "2GiB"
        if arguments.no_checkpointing:
            arguments.tokens, arguments.device, arguments.activation_memory = 768, "360MiB", "260MiB"

    torch.ones(2, 2) @ torch.ones(2, 2)
    baseline = status_bytes("VmRSS")
    import offload

    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.manual_seed(0)
    sizes = arguments.layers, arguments.hidden, arguments.vocabulary
    model = meta_llama(*sizes, checkpointing=not arguments.no_checkpointing)
    library = status_bytes("VmRSS") - baseline
    reset_high_water()

    budgets = {"device": arguments.device, "cpu": arguments.cpu, "nvme": arguments.nvme}
    engine = offload.Engine(
        model,
        offload.AdamW(lr=1e-5),
        device="cpu",
        max_memory=budgets,
        nvme_path=arguments.path,
        max_grad_norm=1.0,
        init_weights=initialise,
        activation_memory=arguments.activation_memory,
        offload_param=arguments.offload_param,
        offload_optimizer=arguments.offload_optimizer,
    )
    print(engine.plan)
    count = sum(slot.numel for unit in engine.plan.request.units for slot in unit.slots)
    ids = torch.randint(0, arguments.vocabulary, (1, arguments.tokens))
    seconds, losses = [], []
    for number in range(arguments.steps):
        begin = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        peak = status_bytes("VmHWM")
        print(f"step {number}: loss {losses[-1]:.4f}, {seconds[-1]:.2f} s, peak RSS {peak / MIB:.0f} MiB")
    peak = status_bytes("VmHWM") - baseline
    limit = sum(int(parse_bytes(budgets[tier], subject=tier)) for tier in ("device", "cpu")) + SLACK_BYTES
    stats = engine.stats()
    engine.close(restore=False)
    print(
        f"{count / 1e9:.2f} B parameters: peak RSS {peak / MIB:.0f} MiB over torch's (of it the modelling library "
        f"{library / MIB:.0f} MiB), limit {limit / MIB:.0f} MiB, measured / limit = {peak / limit:.3f}; "
        f"median step {statistics.median(seconds):.2f} s"
    )
    emit(
        arguments.json,
        {
            "parameters": count,
            "peak_bytes": peak,
            "library_bytes": library,
            "limit_bytes": limit,
            "losses": losses,
            "seconds": seconds,
            "hits": stats.hits,
            "misses": stats.misses,
            "budget_peaks": dict(stats.peak_bytes),
            "budgets": dict(stats.budget_bytes),
            "nvme_read": stats.links["nvme_read"].bytes,
            "nvme_write": stats.links["nvme_write"].bytes,
        },
    )


if __name__ == "__main__":
    main()
