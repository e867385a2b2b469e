"""Several ranks that go on with another program's run: the bits of one process that does, or one error on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Ended, Raised, run
from test_import_foreign import save_dcp_by_name, save_torch
from test_rank_checkpoint_errors import error_of, instead
from test_stage_1 import Net, batch, net, options

from offload import Engine
from offload.checkpoint import values

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

WORLD = 3
NAMES = ("bfloat16-int8-nvme", "float32-float32-host")


def optimizer_of(model: torch.nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim < 2]}]
    return torch.optim.AdamW(groups, lr=lr)


def begun(*, seed: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    """Return a run in plain PyTorch after some steps."""
    model = net("float32")
    torch.manual_seed(seed)
    optimizer = optimizer_of(model, lr=5e-3)
    for number in range(seed):
        model(*batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh(name: str, path: str, world: int, stage: int) -> Engine:
    model = net(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    settings = options(name, path) | {"gradient_accumulation_steps": WORLD // world}
    return Engine(model, optimizer_of(model), **(settings | ({"stage": stage} if world > 1 else {})))


def go_on(rank: int, world: int, name: str, path: str, saved: str, stage: int) -> dict[str, Any]:
    losses = {}
    with fresh(name, path, world, stage) as engine:
        facts = engine.import_checkpoint(saved)
        digests = [engine.digests()]
        for number in range(rank, 2 * WORLD, world):
            loss = engine(*batch(number))
            engine.backward(loss)
            losses[number] = loss.item()
            engine.step()
        digests.append(engine.digests())
        rates = [group["lr"] for group in engine.optimizer.param_groups]
    return {"losses": losses, "digests": digests, "rates": rates, "facts": (facts.global_step, facts.epoch)}


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "stage", "program"), [(NAMES[0], 3, "DCP"), (NAMES[1], 1, "torch")])
def test_ranks_go_on_as_one_process(name: str, stage: int, program: str, tmp_path: Path) -> None:
    saved = str((save_dcp_by_name if program == "DCP" else save_torch)(*begun(), tmp_path))
    (one,) = run(go_on, 1, 1, name, str(tmp_path), saved, stage)
    assert not isinstance(one, (Raised, Ended)), one
    losses: dict[int, float] = {}
    for found in run(go_on, WORLD, WORLD, name, str(tmp_path), saved, stage):
        assert not isinstance(found, (Raised, Ended)), found
        losses |= found.pop("losses")
        assert found == {key: value for key, value in one.items() if key != "losses"}
    assert losses == one["losses"] and one["rates"] == [5e-3, 5e-3]


def fail(rank: int, path: str, saved: list[str], stage: int) -> dict[str, Any]:
    """Let rank 1 read something else, nothing, or fail half way; return what each rank is told."""
    odd, found, written = rank == 1, dict[str, Any](), 0

    def write(real: Any, *args: Any, **options: Any) -> Any:
        nonlocal written
        written += 1
        if odd and written == 4:
            raise MemoryError("no room")
        return real(*args, **options)

    with fresh(NAMES[1], path, WORLD, stage) as engine:
        before = engine.digests()
        found["missing"] = error_of(lambda: engine.import_checkpoint(f"{path}/none" if odd else saved[0]))
        found["strict"] = error_of(lambda: engine.import_checkpoint(saved[0], strict=odd))
        found["another"] = error_of(lambda: engine.import_checkpoint(saved[1 if odd else 0]))
        found["alone"] = error_of((lambda: engine.import_checkpoint(saved[0])) if odd else engine.step)
        engine.zero_grad()
        found["same"] = engine.digests() == before
        with instead(values, "_write_parameter", write):
            found["half"] = error_of(lambda: engine.import_checkpoint(saved[0]))
        found["unusable"] = error_of(engine.digests)
        engine.import_checkpoint(saved[0])
        found["digests"] = engine.digests()
        assert found["digests"] != before
        engine.backward(engine(*batch(rank)))
        found["step"] = engine.step()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_what_fails_on_one_rank_fails_on_all(stage: int, tmp_path: Path) -> None:
    saved = []
    for seed in (2, 3):
        (tmp_path / str(seed)).mkdir()
        saved.append(str(save_torch(*begun(seed=seed), tmp_path / str(seed))))
    every = run(fail, WORLD, str(tmp_path), saved, stage)
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["same"] and found["step"] and found["digests"] == every[0]["digests"]
        for what, kind, text in (("missing", "ConfigError", "none"), ("half", "MemoryError", "no room")):
            assert found[what][0] == (kind if rank == 1 else "RanksError") and text in found[what][1], found[what]
            assert rank == 1 or found[what][1].startswith(f"rank 1: {kind}: ")
        for what, text in (
            ("strict", "expected one value of strict in import_checkpoint but got false on ranks 0, 2, true on rank 1"),
            ("another", "expected one value of the states of blocks.0.0.bias in optimizer.load_state_dict but got"),
            ("alone", "step 1 on ranks 0, 2, import_checkpoint on rank 1"),
        ):
            assert found[what] == every[0][what] and found[what][0] == "RanksError" and text in found[what][1]
        assert found["unusable"][0] == "StateError" and "failed half way" in found["unusable"][1]
