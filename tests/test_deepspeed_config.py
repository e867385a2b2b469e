"""DeepSpeed's configurations: each key is mapped, needless, left out or refused, and none is passed over in silence."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload import deepspeed
from offload.errors import ConfigError
from offload.integrations.deepspeed.config import FILLED, Translation, config_from, nvme_path_of
from offload.integrations.deepspeed.keys import ROWS, Does, find, markdown, names_in
from offload.integrations.deepspeed.schedules import BY_NAME, make_schedule

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"train_batch_size": 4}
# What a value may be that asks for something, where True is none.
ON: dict[str, Any] = {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["wo"], "data_parallel_size": 2}
ON |= {"sequence_parallel_size": 2, "managed_gradient_accumulation": False, "gradient_allreduce_op": "sum"}


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return a configuration with one key, and a batch size."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return {**SMALL, **value}


def paths(*kinds: Does) -> list[tuple[str, bool]]:
    """Return the paths of the keys to which one of these happens, and whether each is a section."""
    return [
        (".".join(filter(None, (row.section, name.removesuffix(".*")))), name.endswith(".*"))
        for row in ROWS
        if row.does in kinds
        for name in row.names
    ]


def message(config: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        config_from(config, **options)
    return str(error.value)


# --- the table ---


def test_keys_are_there_once() -> None:
    found = [path for path, _ in paths(*Does)]
    assert len(found) == len(set(found)) and all(find(path) is not None for path in found)


@pytest.mark.parametrize(("path", "is_section"), paths(Does.REFUSED))
def test_what_would_change_results_is_refused_by_name(path: str, is_section: bool) -> None:
    name = path.rpartition(".")[2]
    text = message(nested(path, ON.get(name, {"enabled": True} if is_section else True if name != "zenflow" else {})))
    row = find(path)
    assert row is not None and text.startswith(path) and text.endswith(row.here)
    for off in (None, *row.off, *([{}, {"enabled": False}] if is_section else [])):
        assert config_from(nested(path, off)).lines[-1].here == "off"


@pytest.mark.parametrize(("path", "is_section"), paths(Does.NEEDLESS, Does.LEFT_OUT))
def test_the_rest_is_taken_and_told(path: str, is_section: bool) -> None:
    found = config_from(nested(path, {"enabled": True} if is_section else 3))
    row = find(path)
    assert row is not None and (found.lines[-1].path, found.lines[-1].here) == (path, row.here)
    assert [line.path for line in found.left_out] == ([path] if row.does is Does.LEFT_OUT else [])
    assert row.here in str(found)
    assert found.options == config_from(SMALL).options


def test_the_document_has_the_table() -> None:
    assert markdown() in (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("config", "near"),
    [
        ({**SMALL, "gradient_cliping": 1.0}, "gradient_clipping"),
        ({**SMALL, "zero_optimisation": {"stage": 3}}, "zero_optimization"),
        (nested("zero_optimization.offload_params", {"device": "cpu"}), "offload_param"),
        (nested("zero_optimization.offload_optimizer.devise", "cpu"), "device"),
        (nested("fp16.loss_scale_windows", 100), "loss_scale_window"),
        (nested("optimizer.typ", "Adam"), "type"),
        (nested("zero_optimization.offload_param.device", "nvm"), "nvme"),
    ],
)
def test_unknown_names_get_a_suggestion(config: dict[str, Any], near: str) -> None:
    assert f"did you mean {near!r}" in message(config)


def test_names_of_a_section_are_those_below_it() -> None:
    assert {"stage", "offload_param", "zenflow"} <= set(names_in("zero_optimization"))
    assert "zero_optimization" in names_in("") and "device" not in names_in("")


# --- batch sizes ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, (8, 2, 4)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, (8, 2, 4)),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 4}, (8, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, (8, 2, 4)),
        ({"train_batch_size": 8}, (8, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, (2, 2, 1)),
    ],
)
def test_batch_sizes_follow_from_each_other(given: dict[str, Any], expected: tuple[int, int, int]) -> None:
    found = config_from(given)
    assert (found.batch.train, found.batch.micro, found.batch.accumulation) == expected
    assert found.options["gradient_accumulation_steps"] == expected[2]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, "8 != 3 * 2 * 1"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}, "8 != 1 * 2"),
        ({"train_batch_size": 3, "gradient_accumulation_steps": 4}, "3 != 0 * 4"),
        ({"gradient_accumulation_steps": 4}, "expected train_batch_size or train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 0}, "train_batch_size: expected a whole number"),
        ({"train_batch_size": "8"}, "train_batch_size: expected a whole number"),
    ],
)
def test_batch_sizes_that_contradict_each_other(given: dict[str, Any], text: str) -> None:
    assert text in message(given)


# --- what is mapped ---


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 0.5}),
        ({"gradient_clipping": 0.0}, {}),
        ({"wall_clock_breakdown": True}, {"log_every": 10}),
        ({"wall_clock_breakdown": True, "steps_per_print": 3}, {"log_every": 3}),
        ({"wall_clock_breakdown": True, "steps_per_print": float("inf")}, {"log_every": 2**31 - 1}),
        ({"wall_clock_breakdown": False, "steps_per_print": 3}, {}),
        ({"bf16": {"enabled": True}}, {"dtype": "bfloat16"}),
        ({"bfloat16": {"enabled": True}}, {"dtype": "bfloat16"}),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}}, {"dtype": "bfloat16"}),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False, "loss_scale_window": 7}}, {}),
        ({"fp16": {"enabled": True}}, {"dtype": "float16"}),
        (
            {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 5, "loss_scale_window": 7}},
            {"dtype": "float16", "initial_loss_scale": 32.0, "loss_scale_window": 7},
        ),
        (
            {"fp16": {"enabled": True, "hysteresis": 3, "min_loss_scale": 2}},
            {"dtype": "float16", "loss_scale_hysteresis": 3, "min_loss_scale": 2},
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 5}},
            {
                "dtype": "float16",
                "initial_loss_scale": 128.0,
                "min_loss_scale": 128.0,
                "loss_scale_window": 2**31 - 1,
            },
        ),
        ({"zero_optimization": True}, {}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"offload_optimizer": "cpu"}),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}},
            {"offload_optimizer": "cpu"},
        ),
        (
            {
                "zero_optimization": {
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                    "offload_param": {"device": "nvme", "nvme_path": "/a"},
                }
            },
            {"offload_param": "nvme", "offload_optimizer": "nvme", "nvme_path": "/a"},
        ),
        (
            {
                "zero_optimization": {
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
                    "offload_param": {"device": "nvme", "nvme_path": "/a"},
                }
            },
            {"offload_param": "nvme", "offload_optimizer": "nvme", "nvme_path": ["/a", "/b"]},
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": "/a"}}},
            {"offload_param": "cpu"},
        ),
        ({"offload": {"max_memory": {"cpu": "1GiB"}, "dtype": "bfloat16"}}, {"dtype": "bfloat16", "max_memory": ...}),
        ({"offload": {"activations": "auto"}}, {"activations": "auto"}),
    ],
)
def test_options_of_the_engine(more: dict[str, Any], options: dict[str, Any]) -> None:
    found = dict(config_from({**SMALL, **more}).options)
    if "max_memory" in options:
        options = {**options, "max_memory": {"cpu": "1GiB"}}
    plain = {"gradient_accumulation_steps": 1, "gradient_reduction": "mean"}
    assert found == {**plain, "offload_param": "auto", "offload_optimizer": "auto", **options}
    assert config_from({**SMALL, **more}).config.gradient_accumulation_steps == 1


def test_what_is_no_option_of_the_engine() -> None:
    config = {
        **SMALL,
        "steps_per_print": 10,
        "dataloader_drop_last": True,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "scheduler": {"type": "WarmupLR"},
        "fp16": {"enabled": True, "loss_scale": 8},
    }
    found = config_from(config)
    assert (found.steps_per_print, found.drop_last, found.stage, found.is_dynamic) == (10, True, 2, False)
    assert found.optimizer is not None and (found.optimizer.type, found.optimizer.params) == ("Adam", {"lr": 1e-4})
    assert found.scheduler is not None and (found.scheduler.type, found.scheduler.params) == ("WarmupLR", {})
    assert "bfloat16" not in config and config["optimizer"]["params"] == {"lr": 1e-4}  # type: ignore[index]


def test_keywords_come_on_top() -> None:
    config = {**SMALL, "bf16": {"enabled": True}, "offload": {"threads": 2, "device": "cuda"}}
    found = config_from(config, device="cpu", dtype="float16")
    assert (found.config.device, found.config.threads, found.config.dtype) == ("cpu", 2, "float16")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**SMALL, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "one of bf16 and fp16"),
        ({**SMALL, "data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype: expected fp32"),
        (nested("zero_optimization.stage", 4), "zero_optimization.stage"),
        (nested("zero_optimization.offload_param.device", "nvme"), "zero_optimization.offload_param.nvme_path"),
        (nested("zero_optimization.offload_param", "cpu"), "zero_optimization.offload_param: expected a section"),
        (nested("optimizer.type", 3), "optimizer.type"),
        (nested("gradient_clipping", "much"), "gradient_clipping: expected a number"),
        (7, "expected a dict or a JSON file"),
    ],
)
def test_values_that_make_no_sense(config: Any, text: str) -> None:
    assert text in message(config)


# --- files ---


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**SMALL, "gradient_clipping": 1.5}), encoding="utf-8")
    assert config_from(file).options["max_grad_norm"] == config_from(str(file)).options["max_grad_norm"] == 1.5
    for content, text in (('{"a": 1, "a": 2}', "'a' twice"), ("{", "expected a JSON file"), ("[]", "JSON object")):
        file.write_text(content, encoding="utf-8")
        assert text in message(file)
    assert "No such file" in message(tmp_path / "none.json")


def test_path_for_models_that_are_made() -> None:
    zero = {"offload_param": {"device": "nvme", "nvme_path": "/a"}, "offload_optimizer": {"nvme_path": "/b"}}
    assert nvme_path_of({"zero_optimization": zero}) == "/a"
    assert nvme_path_of({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}}) == "/b"
    assert nvme_path_of({"zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": "/a"}}}) is None
    for own in ("/c", Path("/c"), ["/c", "/d"]):
        assert nvme_path_of({"zero_optimization": zero, "offload": {"nvme_path": own}}) == "/c"
    assert nvme_path_of({"zero_optimization": zero, "offload": {"dtype": "bfloat16"}}) == "/a"
    assert nvme_path_of(None) is None and nvme_path_of({"zero_optimization": True}) is None


# --- "auto" ---

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def arguments(**more: Any) -> SimpleNamespace:
    """Return what Hugging Face's arguments look like."""
    return SimpleNamespace(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_grad_norm=1.0,
        learning_rate=3e-5,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-7,
        weight_decay=0.1,
        bf16=True,
        fp16=False,
        max_steps=200,
        warmup_steps=0,
        warmup_ratio=0.1,
        **more,
    )


def test_auto_is_filled_from_arguments() -> None:
    found = config_from(AUTO, args=arguments())
    assert (found.batch.train, found.batch.micro, found.batch.accumulation) == (8, 2, 4)
    assert found.options["max_grad_norm"] == 1.0 and found.options["dtype"] == "bfloat16"
    assert found.optimizer is not None and found.scheduler is not None
    assert found.optimizer.params == {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 20, "total_num_steps": 200}
    assert found.scheduler.params == warmup


@pytest.mark.parametrize(
    ("said", "steps"),
    [
        ({"warmup_steps": 100.0, "max_steps": 1000}, 100),  # transformers 5 has steps and shares in one float
        ({"warmup_steps": 100.0, "max_steps": -1}, 100),
        ({"warmup_steps": 1.0, "max_steps": 1000}, 1),
        ({"warmup_steps": 0.05, "max_steps": 1000}, 50),
        ({"warmup_steps": 0, "warmup_ratio": 0.0, "max_steps": -1}, 0),
        ({"warmup_steps": 0.0, "warmup_ratio": None, "max_steps": 1000}, 0),
    ],
)
def test_steps_of_warm_up_are_those_of_transformers(said: dict[str, Any], steps: int) -> None:
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    found = config_from({"train_batch_size": 1, "scheduler": section}, args=SimpleNamespace(**said))
    assert found.scheduler is not None and found.scheduler.params == {"warmup_num_steps": steps}
    assert make_schedule(torch_optimizer(), None, found.scheduler).warmup_num_steps == max(2, steps)  # as in DeepSpeed


@pytest.mark.parametrize("path", sorted(FILLED))
def test_auto_that_nobody_fills_is_named(path: str) -> None:
    assert message(nested(path, "auto")).startswith(path)
    assert message(nested(path, "auto"), args=SimpleNamespace()).startswith(path)


def test_auto_is_the_trainers_to_fill() -> None:
    told = message({"train_batch_size": 1, "bf16": {"enabled": "auto"}})
    assert told.startswith(
        'bf16.enabled: expected true or false but got "auto", and outside of Hugging Face\'s Trainer'
    )
    assert "write true or false into the configuration, or pass args=" in told
    assert "and args= does not say it" in message(nested("gradient_clipping", "auto"), args=SimpleNamespace())


def test_auto_that_means_nothing_else_is_named() -> None:
    assert message(nested("zero_optimization.stage", "auto")).startswith("zero_optimization.stage")


# --- schedules ---

# Rates before every third step, of DeepSpeed 0.19.8.
RECORDED = [
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 7},
        [0.0001, 0.0056892928, 0.009215744, 0.01, 0.01, 0.01, 0.01, 0.01],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 20, "warmup_max_lr": 3e-3, "warmup_num_steps": 5},
        [0.0, 0.0020478186, 0.003, 0.0024, 0.0018, 0.0012, 0.0006, 0.0],
    ),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 20,
            "warmup_min_lr": 1e-3,
            "warmup_max_lr": 3e-3,
            "warmup_num_steps": 5,
            "warmup_type": "linear",
        },
        [0.001, 0.0018, 0.003, 0.0026, 0.0022, 0.0018, 0.0014, 0.001],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 20, "warmup_num_steps": 5},
        [0.0, 0.0006826062, 0.0009890749, 0.0008345818, 0.000552309, 0.000250075, 4.33229e-05, 1e-07],
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 20,
            "warmup_num_steps": 5,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.05,
            "warmup_type": "linear",
        },
        [0.0, 0.00046, 0.0009896201, 0.000842837, 0.000574651, 0.0002875, 9.10659e-05, 5e-05],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 5,
            "cycle_second_step_size": 8,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
        },
        [0.0001, 0.00604, 0.0087625, 0.00505, 0.0013375, 7.5e-05, 5.45455e-05, 4.28571e-05],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 6,
            "cycle_second_step_size": 9,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
        },
        [0.0001, 0.0034, 0.01, 0.00505, 0.0001, 0.0001, 0.0001, 0.0001],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1e-3,
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
        [0.001, 0.001, 0.003, 0.005, 0.007, 0.007, 0.009, 0.011],
    ),
]
BETAS = [0.8, 0.8125, 0.8875, 1.05]  # of the first OneCycle, before every sixth step


def torch_optimizer() -> torch.optim.Optimizer:
    members = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    return torch.optim.AdamW([{"params": [members[0]]}, {"params": [members[1]], "lr": 2e-3}], lr=1e-3)


def seen(schedule: Any, steps: int) -> list[tuple[Any, ...]]:
    """Return rates and betas before each of so many steps."""
    found = []
    for _ in range(steps):
        found.append(tuple((group["lr"], group["betas"]) for group in schedule.optimizer.param_groups))
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(("name", "params", "expected"), RECORDED)
def test_schedules_have_the_rates_of_deepspeed(name: str, params: dict[str, Any], expected: list[float]) -> None:
    whole = seen(BY_NAME[name](torch_optimizer(), **params), 24)
    assert [groups[0][0] for groups in whole[::3]] == pytest.approx(expected, abs=6e-11)
    twice = 2.0 if name == "WarmupCosineLR" else 1.0  # only this one goes by the rates of the groups
    assert [groups[1][0] for groups in whole] == pytest.approx([twice * groups[0][0] for groups in whole])
    if "decay_mom_rate" in params:
        assert [groups[0][1] for groups in whole[::6]] == [(pytest.approx(beta), 0.99) for beta in BETAS]
    optimizer = torch_optimizer()
    first = BY_NAME[name](optimizer, **params)
    assert seen(first, 9) == whole[:9]
    assert first.state_dict() == {"last_batch_iteration": 8}
    earlier = torch.optim.lr_scheduler.LRScheduler.state_dict(first)  # what earlier versions have saved
    for state in (first.state_dict(), {**earlier, **dict.fromkeys(params, None)}):  # the configuration is the new one
        again = torch_optimizer()
        resumed = BY_NAME[name](again, **params)
        for group in again.param_groups:  # those of groups are loaded before
            group["lr"] = 0.25
        resumed.load_state_dict(state)
        assert resumed.last_batch_iteration == 8 and resumed.get_last_lr() == [0.25, 0.25]
        assert seen(resumed, 15)[1:] == whole[10:]


def test_a_schedule_that_begins_late_leaves_the_rates() -> None:
    optimizer = torch_optimizer()
    schedule = BY_NAME["WarmupLR"](optimizer, warmup_max_lr=1.0, warmup_num_steps=4, last_batch_iteration=7)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 2e-3]
    assert seen(schedule, 2)[1][0][0] == 1.0
    schedule.step(1)
    assert schedule.last_batch_iteration == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": -1}),
        ("WarmupLR", {"warmup_type": "cubic"}),
        ("WarmupLR", {"warmup_min_lr": [0.1]}),
        ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 1.5}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0}),
        ("LRRangeTest", {"lr_range_test_step_size": 0}),
    ],
)
def test_schedules_refuse_what_has_no_meaning(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        BY_NAME[name](torch_optimizer(), **params)


# --- the command line, and the module ---


def test_arguments() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    found = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (found.deepspeed, found.deepspeed_config) == (True, "ds.json")
    assert isinstance(config_from(SMALL), Translation)


def test_checkpoints_on_the_cpu_are_activations_that_leave() -> None:
    section = {"cpu_checkpointing": True, "number_checkpoints": 4, "partition_activations": True}
    found = config_from({"train_batch_size": 1, "activation_checkpointing": section})
    assert found.options["activations"] == "offload" and not found.left_out
    for other in ({"cpu_checkpointing": False}, {}):
        assert "activations" not in config_from({"train_batch_size": 1, "activation_checkpointing": other}).options
    own = {"train_batch_size": 1, "activation_checkpointing": section, "offload": {"activations": "keep"}}
    assert config_from(own).options["activations"] == "keep"
