"""What users do: ``docs/journeys.md`` names the tests that show it. Those without a file of their own are here."""

from __future__ import annotations

import ast
import contextlib
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import read
from harness import assert_same_tensors, host, nvme
from trainers import (
    Log,
    adam,
    arguments,
    assert_close,
    lightning_module,
    loader,
    logged,
    model,
    rows,
    word_tokenizer,
)

import offload

pytestmark = [pytest.mark.usefixtures("single_torch_thread"), pytest.mark.filterwarnings("ignore")]

TESTS = Path(__file__).resolve().parent
IDS = re.findall(r"`(test_\w+)\.py::(test_\w+)`", read("docs/journeys.md"))


def test_each_journey_names_tests() -> None:
    """Rows of three cells, of which the last has ids alone."""
    rows = [row.split("|")[1:-1] for row in read("docs/journeys.md").splitlines() if "`test_" in row and row[0] == "|"]
    assert len(rows) > 90 and all(len(row) == 3 for row in rows)
    wrong = [row for row in rows if re.sub(r"`test_\w+\.py::test_\w+`", "", row[2]).strip()]
    assert not wrong


@pytest.mark.parametrize("file", sorted({file for file, _ in IDS}))
def test_a_journey_has_its_tests(file: str) -> None:
    source = ast.parse((TESTS / f"{file}.py").read_text(encoding="utf-8"))
    there = {node.name for node in source.body if isinstance(node, ast.FunctionDef)}
    assert {name for own, name in IDS if own == file} <= there


def batch() -> dict[str, torch.Tensor]:
    return {name: value[None] for name, value in rows()[0].items()}


def test_adapters_are_switched_off_and_on(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(model(), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    plain = copy.deepcopy(module)
    with torch.no_grad(), offload.Engine(module, **nvme(module, tmp_path, offload_optimizer="auto")) as engine:
        on, truth = engine(**batch()).loss, plain(**batch()).loss
        with engine.module.disable_adapter(), plain.disable_adapter():
            off, base = engine(**batch()).loss, plain(**batch()).loss
        again = engine(**batch()).loss
    assert torch.equal(on, truth) and torch.equal(off, base) and torch.equal(again, on) and on != off


def test_adapters_that_come_after_the_engine_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    module = model()
    with offload.Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        late = peft.get_peft_model(module, peft.LoraConfig(task_type="CAUSAL_LM"))
        with pytest.raises(
            offload.StateError, match=r"lora_A.*or not there, when the engine was made; .*make a new one"
        ):
            late(**batch()).loss.backward()
            engine.step()


def test_an_optimizer_of_eight_bits_is_told_what_is_here(tmp_path: Path) -> None:
    library = pytest.importorskip("bitsandbytes")
    module = model()
    with pytest.raises(
        offload.ConfigError, match=r'^optimizer: .*AdamW8bit.* use offload.AdamW, with state_dtype="int8"'
    ):
        offload.Engine(module, library.optim.AdamW8bit(module.parameters()), **nvme(module, tmp_path))


def test_adafactor_of_transformers(tmp_path: Path) -> None:
    """It is no class of torch's, and its states have other shapes than parameters."""
    library = pytest.importorskip("transformers")

    def made(module: torch.nn.Module) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = library.optimization.Adafactor(
            module.parameters(), lr=1e-2, relative_step=False, scale_parameter=False
        )
        return found

    truth, module = model(), model()
    optimizer = made(truth)
    with offload.Engine(module, made(module), **nvme(module, tmp_path)) as engine:
        for _ in range(2):
            truth(**batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(**batch()).loss)
            engine.step()
        found = engine.state_dict()
    for name, value in truth.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name


def test_workers_and_a_schedule_by_losses(tmp_path: Path) -> None:
    """Batches come from another process, and the rate follows the losses."""

    def trained(module: torch.nn.Module, engine: offload.Engine | None) -> tuple[list[float], float]:
        optimizer = adam(module) if engine is None else engine.optimizer
        assert optimizer is not None
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        losses = []
        for given in torch.utils.data.DataLoader(rows(8), batch_size=2, num_workers=1):
            loss = module(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            schedule.step(10.0)  # nothing gets better
        return losses, optimizer.param_groups[0]["lr"]

    truth, rate = trained(model(), None)
    module = model()
    with offload.Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        losses, found = trained(module, engine)
        assert engine.stats().step == 4
    assert_close(losses, truth, 1e-4)
    assert found == rate < 1e-2


def test_autocast_around_fp32(tmp_path: Path) -> None:
    """Matrices are multiplied in bf16; NAdam steps itself, so that each bit is that of a plain loop."""

    def trained(place: dict[str, Any] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        module = model()
        optimizer = torch.optim.NAdam(module.parameters(), lr=1e-2)
        with contextlib.ExitStack() as ends:
            engine = ends.enter_context(offload.Engine(module, optimizer, **place)) if place else None
            losses = []
            for given in torch.utils.data.DataLoader(rows(6), batch_size=2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    output = module(**given)
                assert output.logits.dtype == torch.bfloat16
                output.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(output.loss.item())
            assert engine is None or engine.stats().step == 3
            return losses, (engine or module).state_dict()

    truth, values = trained(None)
    for place in (host(model()), nvme(model(), tmp_path)):
        losses, found = trained(place)
        assert losses == truth and truth[2] != truth[0]
        assert_same_tensors(found, values)


def test_copies_that_autocast_keeps_leave_if_it_does_not_cache_them() -> None:
    """Eight weights of 1 MiB, as bf16 4 MiB, beside 2 MiB for activations, which leave the device."""
    module = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
    options = {"max_memory": {"device": "5MiB", "cpu": "64MiB"}, "activation_memory": "2MiB", "unit_bytes": 1 << 20}
    with offload.Engine(module, offload.SGD(lr=0.1), device="cpu", activations="offload", **options) as engine:
        given = torch.ones(1, 512)
        with (
            pytest.raises(offload.BudgetError, match=r"torch\.autocast\(\.\.\., cache_enabled=False\)"),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            engine(given)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            loss = engine(given).sum()
        engine.backward(loss)
        assert engine.step()


def test_a_trainer_that_gets_an_engine_is_told_of_its_door(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    module = model()
    with offload.Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        with pytest.raises(
            AttributeError, match=r"^engine: expected a torch\.nn\.Module, .* offload\.hf\.OffloadTrainer"
        ):
            transformers.Trainer(model=engine, args=arguments(tmp_path), train_dataset=rows()).train()


# A script of each library, and the lines with which it trains through an engine.
SCRIPTS = {
    "transformers": (
        """
import transformers
trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
trainer.train()
""",
        """
import transformers, offload
trainer = offload.hf.OffloadTrainer(model=model, args=args, train_dataset=data, offload=options)
trainer.train()
""",
    ),
    "trl": (
        """
import trl
trainer = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
trainer.train()
""",
        """
import trl, offload
class SFT(offload.hf.OffloadTrainerMixin, trl.SFTTrainer): pass
trainer = SFT(model=model, args=args, train_dataset=data, processing_class=tokenizer, offload=options)
trainer.train()
""",
    ),
    "lightning": (
        """
import lightning
trainer = lightning.Trainer(**args)
trainer.fit(model, data)
""",
        """
import lightning, offload
trainer = lightning.Trainer(**args, strategy=offload.lightning.OffloadStrategy(**options))
trainer.fit(model, data)
""",
    ),
}


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_script_changes_by_three_lines_at_most(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    found = []
    for script in SCRIPTS[library]:
        module = model()
        names: dict[str, Any] = {"options": nvme(module, tmp_path)}
        if library == "lightning":
            log = Log()
            names |= {"model": lightning_module(module, adam, log), "data": loader()}
            names["args"] = {"max_steps": 3, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
        else:
            del names["options"]["device"]
            names |= {"model": module, "args": arguments(tmp_path, max_steps=3), "data": rows()}
            if library == "trl":
                texts = [{"text": " ".join(f"w{number}" for number in row["input_ids"])} for row in rows()]
                given = arguments(
                    tmp_path, pytest.importorskip("trl").SFTConfig, max_steps=3, gradient_checkpointing=False
                )
                data = pytest.importorskip("datasets").Dataset.from_list(texts)
                names |= {"args": given, "tokenizer": word_tokenizer(tmp_path), "data": data}
        exec(script, names)
        found.append(log.losses if library == "lightning" else logged(names["trainer"]).losses)
        owner = names["trainer"].strategy if library == "lightning" else names["trainer"]
        engine = getattr(owner, "engine", None)
        assert (engine is not None) == ("offload" in script)
        if engine is not None:
            assert engine.stats().step == 3
            engine.close()
    assert_close(found[1], found[0], 1e-4)
    plain, door = (set(script.splitlines()) for script in SCRIPTS[library])
    assert len(door - plain) <= 3
