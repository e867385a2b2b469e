"""What users do, each with the test that shows that it works; those without a file of their own are here.

A journey is what somebody does with plain PyTorch or a trainer, and wants to do through an engine unchanged, or is told
by name why not.
"""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import nvme
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
# journey -> tests as FILE: NAMES
JOURNEYS = {
    "Trainer: losses, clipping, grad_norm": "hf: test_door",
    "Trainer without its door": "trainers: test_trainer test_trainer_on_a_torch_optimizer_that_was_taken_over",
    "Trainer with an optimizer of its own": "trainers: "
    "test_trainer_with_an_optimizer_of_its_own_is_refused_before_it_makes_states",
    "Trainer given an optimizer": "hf: test_takes_the_optimizer_that_it_is_given",
    "Trainer given an engine": "journeys: test_a_trainer_that_gets_an_engine_is_told_of_its_door",
    "Trainer: resume, best model": "hf: test_door test_loads_the_best_model "
    "test_resumes_what_the_plain_trainer_has_saved",
    "Trainer: torch_compile, saves that are missing, both sides": "hf: test_refuses",
    "Trainer: DataParallel, device_map": "hf: test_refuses_several_devices "
    "test_refuses_models_that_device_map_has_spread",
    "Trainer: data without labels": "hf: test_a_data_set_without_labels",
    "Trainer: figures in logs": "hf: test_logs_what_the_engine_does",
    "a library that is old or missing": "hf: test_refuses_a_library_that_is_old_or_missing",
    "SFT, DPO, GRPO, reward": "hf: test_door test_a_reference_model_in_an_engine_of_the_users",
    "DPO: sync_ref_model": "hf: test_mixes_the_model_into_its_reference",
    "generation inside training": "hf: test_evaluates_predicts_and_generates_between_steps",
    "adapters of eight methods": "peft_training: test_training_is_that_of_plain_peft",
    "adapters that are switched off": "journeys: test_adapters_are_switched_off_and_on",
    "adapters after the wrap": "journeys: test_adapters_that_come_after_the_engine_are_refused",
    "merging, DoRA too": "peft: test_what_is_saved_is_what_plain_peft_saves "
    "test_adapters_are_merged_in_place_and_taken_out_again",
    "a quantized base": "quantized: test_training_is_that_of_the_plain_model test_eight_bits",
    "a base that torchao has quantized": "wrappers: test_training_is_that_of_the_plain_model",
    "QLoRA of a model larger than the device": "example_qlora: test_qlora",
    "Accelerate": "accelerate: test_trains_as_without test_any_order_gives_the_same",
    "Accelerate: the engine after prepare": "accelerate: test_the_engine_may_be_made_after_prepare",
    "Accelerate: prepare without the door": "accelerate: test_an_engine_without_the_door_is_sent_to_it",
    "Accelerate: a state without the weights": "accelerate: test_a_state_without_the_weights_is_refused "
    "test_a_state_with_the_weights_is_not_refused",
    "Accelerate: its weights, for others": "accelerate: test_weights_for_others",
    "accelerate launch": "accelerate: test_accelerate_launch",
    "Lightning": "lightning: test_fits_as_without test_resumes_to_the_bit "
    "test_validates_checkpoints_with_a_live_engine",
    "Trainer, Accelerate, Lightning under torchrun": "trainers_ranks: test_trainer test_accelerate test_lightning",
    "DeepSpeed scripts under torchrun": "deepspeed_ranks: test_ranks_have_the_bits_of_one_process "
    "test_a_script_of_several_processes",
    "DeepSpeed scripts": "deepspeed: test_losses_are_those_of_a_plain_loop_for_every_placement test_examples",
    "DeepSpeed: every key": "deepspeed_config: test_what_would_change_results_is_refused_by_name "
    "test_the_rest_is_taken_and_told test_the_document_has_the_table",
    "DeepSpeed: unknown keys": "deepspeed_config: test_unknown_names_get_a_suggestion",
    "DeepSpeed: imports": "deepspeed_imports: ",
    "DeepSpeed: its checkpoints": "deepspeed: test_what_deepspeed_has_saved test_checkpoints",
    "a schedule of another optimizer": "deepspeed: test_a_schedule_of_another_optimizer_is_refused",
    "clip_grad_norm_": "handles: test_torchs_clipping test_placement_changes_nothing_when_torch_clips",
    "clip_grad_value_": "handles: test_gathered_gradients_have_elements",
    "accumulation, by whichever side": "handles: test_backward_passes_add_in_fp32 test_exactly_one_side_divides",
    "an average of weights": "recipes: test_torchs_average test_an_average_in_an_engine",
    "reading weights": "absent: test_every_method_on_a_parameter_that_is_away",
    "GradScaler": "recipes: test_torchs_grad_scaler_around_fp32 test_the_engines_own_scale_for_float16",
    "float16: resume with its scale": "handles: test_a_float16_run_resumes_with_its_loss_scale",
    "schedules": "recipes: test_a_schedule test_a_learning_rate_per_layer",
    "a schedule by losses, batches from other processes": "journeys: test_workers_and_a_schedule_by_losses",
    "freezing and unfreezing": "recipes: test_gradual_unfreezing test_unfreezing_with_a_new_engine",
    "torch.compile of parts": "recipes: test_a_compiled_loss test_a_compiled_frozen_part",
    "profiler, logs": "recipes: test_the_profiler_shows_the_engines_phases test_what_is_logged",
    "the user's own optimizer steps": "takeover: test_a_step_is_a_step_whoever_is_asked_for_it",
    "optimizers of 8 bits": "journeys: test_an_optimizer_of_eight_bits_is_told_what_is_here",
    "conversions of a wrapped model": "bad_input: test_conversions_of_parameters_are_refused",
    "tensors with operations of their own": "refusals: "
    "test_parameters_and_buffers_of_a_class_with_operations_of_its_own",
    "loading a model larger than memory": "pretrained: test_first_steps_are_those_of_from_pretrained "
    "test_peak_is_within_budgets",
    "fine-tuning a model larger than memory": "wording: "
    "test_a_model_that_is_never_whole_in_memory_trains_as_one_that_is",
    "saving within the budget": "pretrained: test_saving_holds_one_file_at_a_time",
    "kill -9": "durable_runs: ",
    "will it fit?": "forecast: test_the_plan_is_the_one_that_an_engine_makes "
    "test_budgets_that_do_not_do_are_told_with_those_that_would",
    "without the extension": "doctor: test_what_an_installation_without_extensions_says",
    "import": "architecture: test_import_is_quick",
    "completion": "completion: ",
    "examples": "examples: test_example",
}


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_journey_has_its_tests(journey: str) -> None:
    file, _, names = JOURNEYS[journey].partition(": ")
    source = ast.parse((TESTS / f"test_{file}.py").read_text(encoding="utf-8"))
    there = {node.name for node in source.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assert there and set(names.split()) <= there, journey


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
