"""Options: every spelling that is accepted, and a clear refusal of everything else."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.config import Config
from offload.errors import BudgetError, ConfigError, OffloadError, did_you_mean
from offload.kernels.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, Lion
from offload.sizes import Share, format_bytes, parse_bytes

WEIGHT = torch.nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (12345, 12345),
        (3.0, 3),
        ("17", 17),
        ("17B", 17),
        ("1KiB", 1 << 10),
        ("2 MiB", 2 << 20),
        (" 8GiB ", 8 << 30),
        ("8gib", 8 << 30),
        ("1TiB", 1 << 40),
        ("5KB", 5_000),
        ("500 MB", 500_000_000),
        ("3GB", 3_000_000_000),
        ("1TB", 10**12),
        ("4k", 4 << 10),
        ("1.5G", 3 << 29),
        (".5M", 1 << 19),
        ("80%", Share(0.8)),
        ("100 %", Share(1.0)),
        ("0.5%", Share(0.005)),
    ],
)
def test_byte_counts(value: Any, size: int | Share) -> None:
    assert parse_bytes(value, subject="x") == size


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "8 XiB", "8GiBs", "-1", "-5GiB", "1e9", "1 2", "0%", "101%", "%", "eight", -1, 1.5]
    + [True, None, [8], b"8GiB", float("nan"), float("inf"), -float("inf"), 10**310, "9" * 310, "9" * 310 + "GiB"],
)
def test_what_is_not_a_byte_count_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="budget of"):
        parse_bytes(value, subject="budget of x")


@given(st.integers(0, 1 << 50))
def test_formatted_bytes_parse_back_within_rounding(size: int) -> None:
    back = parse_bytes(format_bytes(size), subject="x")
    assert isinstance(back, int)
    # two decimals of the unit shown, which is at most the size itself or 1 B: half of 0.01 units, rounded down
    assert abs(back - size) <= max(0.005 * max(size, 1), 1)


def test_formatted_bytes() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1024) == "1.00 KiB"
    assert format_bytes(3 << 29) == "1.50 GiB"
    assert format_bytes(5 << 40) == "5.00 TiB"
    assert format_bytes(5000 << 40) == "5000.00 TiB"


@pytest.mark.parametrize("key", ["device", "gpu", "cuda", 0, "0"])
def test_names_of_the_device_budget(key: Any) -> None:
    assert Config(max_memory={key: "1KiB"}).budgets() == {"device": 1024}


def test_names_of_the_other_budgets() -> None:
    assert Config(max_memory={"cpu": 1, "nvme": 2}, nvme_path="/x").budgets() == {"cpu": 1, "nvme": 2}
    assert Config(max_memory={"host": 1, "disk": "50%"}, nvme_path="/x").budgets() == {
        "cpu": 1,
        "nvme": Share(0.5),
    }
    assert Config().budgets() == {}


def test_a_budget_on_nvme_needs_a_path() -> None:
    for budgets in ({"nvme": "1GiB"}, {"disk": "50%"}, {"cpu": 1, "nvme": 1}):
        for paths in (None, ()):
            with pytest.raises(ConfigError, match="nvme_path"):
                Config(max_memory=budgets, nvme_path=paths)
    assert Config(max_memory={"nvme": 0}).budgets() == {"nvme": 0}  # none is wanted, none is there


@pytest.mark.parametrize(
    ("budgets", "text"),
    [
        ({0: 1, "device": 1}, "'device' is given twice"),
        ({"disk": 1, "nvme": 1}, "'nvme' is given twice"),
        ({"cpus": 1}, "did you mean 'cpu'"),
        ({"nvm": 1}, "did you mean 'nvme'"),
        ({1: 1}, "expected keys device, cpu, nvme but got 1"),
        ({"cpu": "lots"}, r"max_memory\['cpu'\]"),
        ({"cpu": -1}, r"max_memory\['cpu'\]"),
        ("8GiB", "max_memory"),
        (["8GiB"], "max_memory"),
    ],
)
def test_wrong_budgets(budgets: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Config(max_memory=budgets, nvme_path="/x")


WRONG: list[tuple[str, Any]] = [
    ("dtype", "bf16"),
    ("dtype", "float64"),
    ("dtype", torch.float64),
    ("state_dtype", "bf16"),
    ("state_dtype", "float16"),
    ("state_dtype", None),
    ("offload_param", "gpu"),
    ("offload_optimizer", "disk"),
    ("offload_optimizer", None),
    ("max_grad_norm", 0),
    ("max_grad_norm", -1.0),
    ("max_grad_norm", float("nan")),
    ("max_grad_norm", "1.0"),
    ("max_grad_norm", True),
    ("io_deadline_s", 0),
    ("io_deadline_s", None),
    ("initial_loss_scale", 0.0),
    ("initial_loss_scale", None),
    ("initial_loss_scale", float("inf")),
    ("min_loss_scale", -1),
    ("min_loss_scale", float("inf")),
    ("prefetch", "false"),
    ("visible", 0),
    ("background_checkpoints", None),
    ("gradient_accumulation_steps", 0),
    ("gradient_accumulation_steps", 1.0),
    ("gradient_accumulation_steps", True),
    ("gradient_accumulation_steps", None),
    ("chunk_numel", 0),
    ("chunk_numel", 65536.0),
    ("threads", 0),
    ("threads", True),
    ("threads", "2"),
    ("loss_scale_window", 0),
    ("loss_scale_window", None),
    ("loss_scale_hysteresis", 0),
    ("activation_memory", "50%"),
    ("activation_memory", -1),
    ("activation_memory", 2**70),
    ("unit_bytes", "1000000000TiB"),
    ("unit_bytes", "big"),
    ("unit_bytes", "10%"),
    ("nvme_path", 5),
    ("nvme_path", ["/x", None]),
    ("nvme_path", ""),
    ("nvme_path", ["/x", ""]),
]


@pytest.mark.parametrize(("option", "value"), WRONG)
def test_each_wrong_option_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        Config.load({option: value})


@pytest.mark.parametrize("mode", ["offload", "auto"])
def test_activations_need_something_of_the_device_to_pass_through(mode: str) -> None:
    with pytest.raises(ConfigError, match="activation_memory: expected at least 4096 bytes"):
        Config.load({"activations": mode, "activation_memory": 0})
    assert Config.load({"activations": mode, "activation_memory": 4096}).bytes_of("activation_memory") == 4096
    assert Config.load({"activation_memory": 0}).bytes_of("activation_memory") == 0


def test_percentages_are_advised_only_where_they_are_possible() -> None:
    for option in ({"activation_memory": "abc"}, {"max_memory": {"cpu": "abc"}}):
        with pytest.raises(ConfigError, match='expected bytes like "8GiB"') as caught:
            Config.load(option)
        assert ("80%" in str(caught.value)) == ("max_memory" in option)


def test_errors_are_of_the_package_and_of_the_standard_kind() -> None:
    assert issubclass(ConfigError, OffloadError) and issubclass(ConfigError, ValueError)
    assert issubclass(BudgetError, OffloadError) and issubclass(BudgetError, MemoryError)


@pytest.mark.parametrize("option", ["offload_param", "offload_optimizer"])
def test_a_home_on_nvme_needs_a_path(option: str) -> None:
    with pytest.raises(ConfigError, match="nvme_path"):
        Config.load({option: "nvme"})
    assert getattr(Config.load({option: "nvme", "nvme_path": "/x"}), option) == "nvme"


def test_dtypes_and_devices_may_be_given_as_torch_objects() -> None:
    config = Config(dtype=torch.bfloat16, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert (config.dtype, config.device) == ("bfloat16", "cpu")
    assert Config(dtype="float16").dtype == "float16"
    assert Config(state_dtype=torch.bfloat16).state_dtype == "bfloat16"  # type: ignore[arg-type]
    assert Config().state_dtype == "float32" and Config(state_dtype="int8").state_dtype == "int8"


def test_paths_in_every_form() -> None:
    assert Config().paths() == ()
    assert Config(nvme_path="/a").paths() == (Path("/a"),)
    assert Config(nvme_path=Path("/a")).paths() == (Path("/a"),)
    assert Config(nvme_path=["/a", Path("/b")]).paths() == (Path("/a"), Path("/b"))


def test_byte_options() -> None:
    config = Config(activation_memory="1MiB", unit_bytes=4096)
    assert config.bytes_of("activation_memory") == 1 << 20
    assert config.bytes_of("unit_bytes") == 4096
    assert Config().bytes_of("unit_bytes") is None


def test_load_takes_a_dict_a_config_and_a_file_with_options_on_top(tmp_path: Path) -> None:
    values = {"max_memory": {"0": "1GiB", "cpu": 5}, "max_grad_norm": 1.0, "gradient_accumulation_steps": 4}
    file = tmp_path / "offload.json"
    file.write_text(json.dumps(values))
    expected = Config(max_memory={"0": "1GiB", "cpu": 5}, max_grad_norm=0.5, gradient_accumulation_steps=4)
    for source in (values, Config(**values), file, str(file)):  # type: ignore[arg-type]
        assert Config.load(source, max_grad_norm=0.5) == expected  # type: ignore[arg-type]
    assert Config.load() == Config()
    assert Config.load(prefetch=False).prefetch is False
    assert values["max_grad_norm"] == 1.0  # the caller's dict is not changed


def test_unknown_options_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_memroy' \(did you mean 'max_memory'\?\)"):
        Config.load(max_memroy={})
    with pytest.raises(ConfigError, match="options: .*nvme_path"):
        Config.load({"zzzzzzzz": 1})


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing.json"):
        Config.load(tmp_path / "missing.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        Config.load(tmp_path / "list.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="broken.json"):
        Config.load(str(tmp_path / "broken.json"))


def test_a_config_is_a_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().threads = 3  # type: ignore[misc]
    assert Config(threads=3) == Config(threads=3) != Config(threads=4)


INF, NAN = float("inf"), float("nan")
RATES = [{"lr": -1e-3}, {"lr": NAN}, {"lr": INF}, {"lr": None}, {"weight_decay": -0.1}, {"weight_decay": INF}]
BETAS = [{"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"betas": (0.9, 1.0)}, {"betas": (0.9, NAN)}, {"betas": (0.9,)}]
RANGES: dict[Any, list[dict[str, Any]]] = {
    AdamW: [*RATES, *BETAS, {"eps": -1.0}],
    Adam: [*RATES, *BETAS, {"eps": NAN}],
    SGD: [*RATES, {"momentum": -0.1}, {"dampening": NAN}, {"nesterov": True}]
    + [{"nesterov": True, "momentum": 0.9, "dampening": 0.1}],
    Lion: [*RATES, *BETAS],
    Adagrad: [*RATES, {"lr_decay": -1}, {"lr_decay": INF}, {"eps": -1e-8}],
    LAMB: [*RATES, *BETAS, {"eps": 0}, {"eps": -1.0}],
}


@pytest.mark.parametrize(("kind", "wrong"), [(kind, wrong) for kind, cases in RANGES.items() for wrong in cases])
def test_hyper_parameters_out_of_range(kind: Any, wrong: dict[str, Any]) -> None:
    """In every place where options come from: all groups, one group, and what a group has become."""
    name = next(iter(wrong))
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}: (expected )?{name}"):
        kind(**wrong)
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}, param group 1: (expected )?{name}"):
        kind([{"params": [WEIGHT]}, {"params": [torch.nn.Parameter(torch.zeros(1))], **wrong}])
    with pytest.raises(ConfigError, match=rf"^param group: (expected )?{name}"):
        kind.of({**kind().options(), **wrong, "params": [WEIGHT], "name": "of a group"})


@pytest.mark.parametrize("kind", RANGES)
def test_a_param_group_gives_plain_numbers(kind: Any) -> None:
    """Whatever is in it beside, and if a learning rate is a tensor or betas are a list."""
    options = kind(lr=0.5).options()
    more = {"lr": torch.tensor(0.5), "betas": [*options.get("betas", ())], "params": [WEIGHT], "name": "of a group"}
    assert kind.of({**options, **more}) == kind(lr=0.5)
    assert type(kind.of({**options, **more}).lr) is float


def test_a_param_group_of_torch_says_if_decay_is_decoupled() -> None:
    for kind in (AdamW, Adam):
        options = AdamW().options()
        assert type(kind.of(options)) is kind
        assert type(kind.of({**options, "decoupled_weight_decay": True})) is AdamW
        assert type(kind.of({**options, "decoupled_weight_decay": False})) is Adam


OWN = tuple(RANGES)


def test_hyper_parameters_default_to_those_of_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    for kind in (AdamW, Adam, SGD, Adagrad):
        theirs = getattr(torch.optim, kind.__name__)([parameter])
        assert kind().options() == {name: theirs.defaults[name] for name in kind().options()}


def test_arguments_have_the_places_that_they_have_in_torch() -> None:
    """As far as torch's are known here; what torch has at another place can only be given by name."""
    for kind in (AdamW, Adam, SGD, Adagrad):
        theirs = [*inspect.signature(getattr(torch.optim, kind.__name__)).parameters]
        ours = [field.name for field in dataclasses.fields(kind) if not field.kw_only]
        assert ours == theirs[: len(ours)] and ours[0] == "params"
    with pytest.raises(TypeError, match="positional"):
        Adagrad([torch.nn.Parameter(torch.zeros(1))], 1e-2, 0.0, 0.0, 0.1)  # type: ignore[misc]


@pytest.mark.parametrize("kind", OWN)
def test_without_parameters_a_spec_is_a_plain_value(kind: Any) -> None:
    assert kind(lr=0.5) == kind(lr=0.5) == copy.deepcopy(kind(lr=0.5)) != kind(lr=0.25)
    assert hash(kind(lr=0.5)) == hash(kind(lr=0.5))
    assert dataclasses.replace(kind(lr=0.5), lr=0.25) == kind(lr=0.25) == kind(None, 0.25)
    assert dataclasses.asdict(kind(lr=0.5))["lr"] == 0.5


@pytest.mark.parametrize("kind", OWN)
def test_the_first_argument_is_parameters(kind: Any) -> None:
    """An iterator gives them only once: they are kept. Others of the same are other parameters."""
    model = torch.nn.Linear(2, 3)
    spec = kind(model.parameters(), lr=0.5)
    assert [[id(p) for p in group["params"]] for group in spec.params.copies()] == [[id(p) for p in model.parameters()]]
    assert "groups of 2 parameters" in repr(spec) and "tensor" not in repr(spec)
    assert spec == spec != kind(model.parameters(), lr=0.5)
    assert dataclasses.replace(spec, lr=0.25).params is spec.params
    named = kind(model.named_parameters())
    assert [name for name, _ in named.params.copies()[0]["params"]] == ["weight", "bias"]
    grouped = kind([{"params": model.weight, "lr": 0.1, "name": "w"}, {"params": iter([model.bias])}], 0.5)
    assert grouped.params.options() == [{"lr": 0.1, "name": "w"}, {}]
    assert [options["lr"] for options in grouped.options_by_group()] == [0.1, 0.5]


@pytest.mark.parametrize("kind", [AdamW, LAMB])
@pytest.mark.parametrize(
    ("params", "text"),
    [
        (1e-3, r"expected parameters as the first argument, as in torch, but got 0\.001; lr= is a keyword"),
        (WEIGHT, r"expected a list of parameters or groups but got a Parameter; put it in a list"),
        (torch.nn.Linear(1, 1), r"but got a Linear; pass its \.parameters\(\)"),
        ({"params": [WEIGHT]}, r"but got a dict; pass model\.parameters\(\), or a list of dicts with 'params'"),
        ({WEIGHT}, r"but got a set; pass model\.parameters\(\)"),
        ("weight", r"but got a str; pass model\.parameters\(\)"),
        (object(), r"but got a object; pass model\.parameters\(\)"),
        ([], r"expected parameters but got none; was the iterator used before\?"),
        ([WEIGHT, 3.0], r"but got a float at position 1; pass model\.parameters\(\)"),
        ([("a", "b")], r"but got a tuple at position 0"),
        ([{"lr": 0.1}], r"expected dicts with 'params' but got one without at position 0"),
        ([{"params": [WEIGHT]}, WEIGHT], r"expected dicts with 'params' but got a Parameter at position 1"),
        ([{"params": [WEIGHT]}, {"params": []}], r", param group 1: expected parameters but got none"),
        ([{"params": [WEIGHT], "lr": -1}], r", param group 0: lr is out of range: -1"),
        ([{"params": [WEIGHT], "betas": 0.9}], r", param group 0: expected betas as two numbers but got 0\.9"),
        (
            [{"params": [WEIGHT], "eps": "1e-8"}],
            r", param group 0: eps is out of range: '1e-8'; take a finite number ",
        ),
        ([{"params": [WEIGHT], "maximize": True}], r", param group 0: expected no maximize, .* but got True; "),
    ],
)
def test_other_first_arguments_are_refused(kind: Any, params: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{kind.__name__}(:|(?=,)).*{text}"):
        kind(params)


def test_options_of_torch() -> None:
    """Those that only say how a step is made change nothing here; those that change the step are refused."""
    for kind in OWN:
        assert kind(lr=0.5, fused=True, foreach=False, capturable=True) == kind(lr=0.5)
        assert kind(lr=0.5, maximize=False) == kind(lr=0.5)
        with pytest.raises(
            ConfigError, match=rf"^{kind.__name__}: unknown option 'weigth_decay' \(did you mean 'weight_"
        ):
            kind(weigth_decay=0.1)
    with pytest.raises(
        ConfigError, match=r"^AdamW: expected no amsgrad, .*; pass torch\.optim\.AdamW\(\.\.\., amsgrad=True"
    ):
        AdamW(amsgrad=True)
    for kind, option in ((Lion, "maximize"), (SGD, "amsgrad"), (AdamW, "differentiable")):
        with pytest.raises(
            ConfigError, match=rf"^{kind.__name__}: expected no {option}, .* but got True; leave it out$"
        ):
            kind(**{option: True})
    with pytest.raises(ConfigError, match="^Adam: expected no decoupled_weight_decay, .*; take offload.AdamW with it"):
        Adam(decoupled_weight_decay=True)  # type: ignore[call-arg]
    group = {"params": [WEIGHT], "decoupled_weight_decay": True}
    assert AdamW([group], decoupled_weight_decay=True).options() == AdamW().options()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="^SGD, param group 0: expected no decoupled_weight_decay"):
        SGD([group])


def test_did_you_mean_is_silent_without_a_likeness() -> None:
    assert did_you_mean("threds", ["threads", "device"]) == " (did you mean 'threads'?)"
    assert did_you_mean("qqq", ["threads", "device"]) == ""
