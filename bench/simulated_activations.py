"""What do activations that leave an accelerator cost beside other ways? Virtual seconds on machines that are not here.

An 8 B Llama in bf16 trains in a dry run of the simulated device, as in ``bench/simulated.py``, a micro-batch per step:

* keep: activations stay on the device.
* offload: they go to host memory.
* save_on_cpu: torch's hooks around the forward, not page-locked, which is its default.
* checkpoint: the model's own gradient checkpointing, non-reentrant.
* checkpoint, offload: the same, and what its blocks are given goes to host memory.
* checkpoint, save_on_cpu: reentrant checkpointing inside of torch's hooks. It stands for DeepSpeed's
  ``checkpoint_in_cpu``, which copies the same tensors while compute waits, and knows no simulated device.
* nowhere: nothing is kept; backward is given memory without content, in no time. With checkpointing, likewise. If this
  does not train in a budget, no way does.

All modes train with the same engine, so that they differ by activations alone. What is page-locked makes no difference
to the simulated link. The last three then share smaller and smaller device budgets: parts of what save_on_cpu has taken
at its most. Of the first steps, one tells what comes, and up to four adapt; the last two are counted.

Beside it stand the bounds of forward and backward together, with what leaves or comes back in each, and what
``offload.plan`` predicts. To reach: 1.15 of the bound, less memory and less time than the other ways.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from _common import emit
from _llama import FULL, SEQUENCE, SMALL, engine_of, made, memory_of, tokens
from simulated import load
from simulated.engine import engine_clock
from simulated.figures import Figures, watched
from torch import nn

import offload
from offload.planning.hardware import PRESETS
from offload.sizes import GIB

TIGHT = (1.01, 0.95, 0.85, 0.8)  # of what ON_CPU takes where it has the whole device
WARM = 5  # steps before those that are counted
CHECKPOINT, ON_CPU, OFFLOAD, NOWHERE = "checkpoint", "save_on_cpu", "offload", "nowhere"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A machine, a batch, and room.

    Attributes:
        param: home of parameters; states are in host memory.
        near: of the device, for activations and temporaries, where it is not as tight as others'.
        host: for activations, without checkpointing, and with it.
        rows: of the batch, likewise.
    """

    machine: str
    param: str
    near: str
    host: tuple[str, str]
    rows: tuple[int, int]


SETTINGS = (
    Setting("h200", "none", "12GiB", ("100GiB", "4GiB"), (6, 6)),
    Setting("desktop", "cpu", "12GiB", ("32GiB", "4GiB"), (2, 4)),
)
MODES = ("keep", ON_CPU, OFFLOAD, CHECKPOINT, f"{CHECKPOINT}, {ON_CPU}", f"{CHECKPOINT}, {OFFLOAD}")
TIGHT_MODES = (NOWHERE, ON_CPU, OFFLOAD)


def net(sizes: dict[str, int], mode: str) -> nn.Module:
    """Return the model on the meta device, checkpointed as a mode says."""
    model = made(sizes)
    if CHECKPOINT not in mode:
        model.model.gradient_checkpointing_disable()
    elif ON_CPU in mode or NOWHERE in mode:
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def hooks_of(mode: str) -> contextlib.AbstractContextManager[None]:
    """Return what is around the forward: hooks of the modes that have some."""
    if ON_CPU in mode:
        return torch.autograd.graph.save_on_cpu()
    if NOWHERE in mode:
        return torch.autograd.graph.saved_tensors_hooks(forget, made_anew)
    return contextlib.nullcontext()


def forget(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what makes memory like a tensor's."""
    return functools.partial(
        torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def made_anew(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return memory like that of what was saved."""
    return make()


def options_of(setting: Setting, mode: str, device_bytes: int | None) -> dict[str, Any]:
    """Return the engine's options; with `device_bytes`, as tight as that."""
    hardware = PRESETS[setting.machine]
    memory = memory_of(hardware)
    memory["device"] = device_bytes or memory["device"]
    options: dict[str, Any] = {"max_memory": memory, "offload_param": setting.param, "offload_optimizer": "cpu"}
    if setting.param != "none":  # so that all ways have as much room for parameters
        options["activation_memory"] = memory["device"] - 6 * GIB if device_bytes is None else device_bytes - 4 * GIB
    if OFFLOAD in mode:
        options |= {"activations": "offload", "activation_cpu_memory": setting.host[CHECKPOINT in mode]}
        if device_bytes is None:
            options["activation_memory"] = setting.near
        elif setting.param == "none":
            options["activation_memory"] = "512MiB"
    return options


def of_engine(sizes: dict[str, int], setting: Setting, mode: str, rows: int, options: dict[str, Any]) -> Figures:
    """Return what steps take."""
    hardware = PRESETS[setting.machine]
    load().reset_peak(0)  # the engine looks at the highest ever
    with engine_clock(hardware, dry=True) as watch, engine_of(net(sizes, mode), **options) as engine:
        ids = tokens(rows)

        def step() -> None:
            with hooks_of(mode):
                loss = engine(ids)
            engine.backward(loss)
            engine.step()

        return watched(watch, hardware, step, warm=WARM)


def run_mode(sizes: dict[str, int], setting: Setting, mode: str, device_bytes: int | None = None) -> dict[str, Any]:
    """Measure a mode, print it and return its figures, or the error where the device has too little memory."""
    hardware, rows = PRESETS[setting.machine], setting.rows[CHECKPOINT in mode]
    options = options_of(setting, mode, device_bytes)
    try:
        figures = of_engine(sizes, setting, mode, rows, options)
    except offload.BudgetError as error:
        print(f"  {mode}: {error}")
        return {"mode": mode, "device_budget": options["max_memory"]["device"], "error": str(error)}
    found = {
        "mode": mode,
        "rows": rows,
        "device_budget": options["max_memory"]["device"],
        "step_s": figures.step_s,
        "peak_bytes": figures.peak_bytes,
        "moved_bytes": dict(figures.moved_bytes),
        "work_s": dict(figures.work_s),
        "overlapped": {lane: figures.hidden_s[lane] / figures.busy_s[lane] for lane in ("h2d", "d2h")},
    }
    if ON_CPU not in mode and NOWHERE not in mode:
        told = offload.plan(
            net(sizes, mode),
            optimizer=offload.AdamW(lr=1e-4),
            batch=[torch.empty(rows, SEQUENCE, dtype=torch.int64, device="meta")],
            hardware=hardware,
            **options,
        )
        found |= {"predicted_s": told.timing.step_s, "bound_s": told.timing.bound_s}
    print(
        f"  {mode}: step {found['step_s']:.2f} s, at most {found['peak_bytes'] / GIB:.2f} GiB of the device, copies "
        f"{figures.moved_bytes.get('d2h', 0) / 1e9:.0f} and {figures.moved_bytes.get('h2d', 0) / 1e9:.0f} GB"
        + (f", predicted {found['predicted_s']:.2f} s" if "predicted_s" in found else "")
    )
    return found


def run_setting(sizes: dict[str, int], setting: Setting) -> dict[str, Any]:
    """Measure all modes, and then some in smaller and smaller budgets."""
    print(
        f"{setting.machine}: parameters {setting.param}, {setting.rows[0]} rows, {setting.rows[1]} with checkpointing"
    )
    found = {mode: run_mode(sizes, setting, mode) for mode in MODES}
    tight = []
    for before in ("", f"{CHECKPOINT}, "):
        for share in TIGHT:
            device_bytes = int(found[before + ON_CPU]["peak_bytes"] * share)
            print(f"in {device_bytes / GIB:.2f} GiB of the device:")
            tight += [run_mode(sizes, setting, before + way, device_bytes) for way in TIGHT_MODES]
    return {**dataclasses.asdict(setting), "modes": found, "tight": tight}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a model of three layers on one machine")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    load()
    sizes, settings = (SMALL, SETTINGS[:1]) if arguments.smoke else (FULL, SETTINGS)
    emit(arguments.json, {"model": sizes, "settings": [run_setting(sizes, setting) for setting in settings]})


if __name__ == "__main__":
    main()
