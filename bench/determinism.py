"""Which circumstances change the bits of a plain PyTorch step? No engine is involved.

Each circumstance has a process of its own: forward and backward of one batch, several times, with the weights of one
model. Compared are the loss and a digest of each gradient: within the process, and with the first process, which has
no circumstance. "equal" is what a run may rely on; where "in itself" is no, torch's answer is another one each time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
from typing import Any

import torch
from _common import call_vector_functions, emit, load_model

PAGE = 4096
BUSY = "while True: pass"

# what is said of it: (environment, None where a variable is not set, arguments of the process, busy processes beside)
CIRCUMSTANCES: dict[str, tuple[dict[str, str | None], list[str], int]] = {
    "none": ({}, [], 0),
    "the same again": ({}, [], 0),
    "weights at another multiple of 64 bytes": ({}, ["--offset", "64"], 0),
    "weights at an odd multiple of 2 bytes": ({}, ["--offset", "2"], 0),
    "activations at other addresses each time": ({}, ["--shuffle"], 0),
    "memory filled with 0x55 before use": ({"MALLOC_PERTURB_": "170"}, [], 0),
    "threads share the first call of a vector function": ({}, ["--cold"], 0),
    "one thread of torch": ({}, ["--threads", "1"], 0),
    "three threads on two cores": ({}, ["--threads", "3"], 0),
    "another number of threads each time": ({}, ["--threads", "0"], 0),
    "threads that spin while they wait": ({"OMP_WAIT_POLICY": None}, [], 0),
    "busy processor": ({}, [], 3),
    "busy processor, threads that spin": ({"OMP_WAIT_POLICY": None}, [], 3),
    "MKL_DYNAMIC=FALSE": ({"MKL_DYNAMIC": "FALSE"}, [], 0),
    "OMP_DYNAMIC=TRUE": ({"OMP_DYNAMIC": "TRUE"}, [], 0),
    "OMP_DYNAMIC=TRUE, busy processor": ({"OMP_DYNAMIC": "TRUE"}, [], 3),
    "MKL_CBWR=COMPATIBLE": ({"MKL_CBWR": "COMPATIBLE"}, [], 0),
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, [], 0),
    "the same with one thread": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, ["--threads", "1"], 0),
    "the same with three threads": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, ["--threads", "3"], 0),
    "ATEN_CPU_CAPABILITY=avx2": ({"ATEN_CPU_CAPABILITY": "avx2"}, [], 0),
}


def move_weights(model: torch.nn.Module, offset_bytes: int) -> None:
    """Let every parameter begin `offset_bytes` behind the beginning of a page."""
    for parameter in model.parameters():
        raw = torch.empty(parameter.nbytes + 2 * PAGE, dtype=torch.uint8)
        begin = -raw.data_ptr() % PAGE + offset_bytes
        moved = raw[begin : begin + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = moved.copy_(parameter.data)


def shuffle_heap(model: torch.nn.Module) -> None:
    """Let modules find the heap in another state each time."""
    kept: list[torch.Tensor] = []
    rng = random.Random(0)

    def pass_by(module: torch.nn.Module, args: Any) -> None:
        kept.append(torch.empty(rng.randrange(1, 200_000), dtype=torch.uint8))
        if len(kept) > 100:
            del kept[rng.randrange(len(kept))]

    for module in model.modules():
        module.register_forward_pre_hook(pass_by)


def run_one(arguments: argparse.Namespace) -> list[list[Any]]:
    """Return per repetition the loss and the digest of the gradients."""
    model, vocabulary = load_model("tiny" if arguments.smoke else arguments.model)
    model.train()
    if not arguments.cold:
        call_vector_functions()
    if arguments.offset is not None:
        move_weights(model, arguments.offset)
    if arguments.shuffle:
        shuffle_heap(model)
    tokens = torch.randint(0, vocabulary, (1, arguments.tokens), generator=torch.Generator().manual_seed(0))
    found = []
    for number in range(arguments.repeats):
        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads or 1 + number % 3)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        known = hashlib.blake2b(digest_size=8)
        for parameter in model.parameters():
            assert parameter.grad is not None
            known.update(parameter.grad.contiguous().view(torch.uint8).numpy())
            parameter.grad = None
        found.append([str(loss.item()), known.hexdigest()])
    return found


def run(name: str, options: list[str]) -> list[list[Any]]:
    """Run a circumstance in a process of its own."""
    environment, more, busy = CIRCUMSTANCES[name]
    variables = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **environment}  # else threads spin, which takes long
    beside = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", *more, *options],
            env={key: value for key, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for process in beside:
            process.kill()
            process.wait()
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    found: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["tiny", "small", "real"], default="real")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=CIRCUMSTANCES, metavar="NAME", help="beside the first one")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, three circumstances")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--offset", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shuffle", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.tokens, arguments.repeats = 32, 2
        arguments.only = ["weights at an odd multiple of 2 bytes", "another number of threads each time"]
    if arguments.one:
        print(json.dumps(run_one(arguments)))
        return
    options = ["--model", arguments.model, "--tokens", str(arguments.tokens), "--repeats", str(arguments.repeats)]
    options += ["--smoke"] if arguments.smoke else []
    names = ["none", *(name for name in CIRCUMSTANCES if name != "none" and name in (arguments.only or CIRCUMSTANCES))]
    table: dict[str, dict[str, Any]] = {}
    first: list[list[Any]] = []
    print(f"{'circumstance':<44}{'in itself':>10}{'as without':>12}  losses")
    for name in names:
        found = run(name, options)
        steady = all(each == found[0] for each in found)
        first = first or found
        table[name] = {
            "steady": steady,
            "equal": steady and found[0] == first[0],
            "losses": [loss for loss, _ in found],
        }
        losses = ", ".join(dict.fromkeys(table[name]["losses"]))
        say = {True: "equal", False: "NO"}
        print(f"{name:<44}{say[steady]:>10}{say[table[name]['equal']]:>12}  {losses}", flush=True)
    emit(arguments.json, {"model": arguments.model, "tokens": arguments.tokens, "circumstances": table})


if __name__ == "__main__":
    main()
