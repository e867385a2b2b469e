"""What commands say of the library's errors: options for Python's names, and nothing else changed."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from finetuning import chats, make_model_folder, write_rows
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.cli import main as cli
from offload.cli.finetune import report
from offload.cli.finetune import run as finetune
from offload.cli.finetune.settings import Settings
from offload.cli.heavy import QUANTIZERS, leave_out_quantizers
from offload.cli.models import as_in_memory, read_causal_model
from offload.cli.wording import in_options

FINETUNE = frozenset(vars(cli.build_parser().parse_args(["finetune", "--model", "m", "--data", "d"])))
PLAN = frozenset(vars(cli.build_parser().parse_args(["plan", "--model", "m"])))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'run_dir /a/run_dir: resume=True expects a run there; pass resume="auto" to begin one',
            "--run-dir /a/run_dir: --resume expects a run there; pass --resume auto to begin one",
        ),
        ('raise max_memory["device"]', "raise --device-memory"),
        ("max_memory['cpu']: unknown unit in '7 x'", "--cpu-memory: unknown unit in '7 x'"),
        ("a longer text (sequence_length), seed 0", "a longer text (--sequence-length), seed 0"),
        ("model m/resume.x: expected a model", "--model m/resume.x: expected a model"),
        ("device budget: activations need 1 GiB", "device budget: activations need 1 GiB"),
        ("pass --resume, or --max-grad-norm 0", "pass --resume, or --max-grad-norm 0"),
        ("call engine.f(x, resume=True)", "call engine.f(x, resume=True)"),
        ("unknown option 'x'; options: nvme_path", "unknown option 'x'; options: nvme_path"),
        ("config file nvme_path: cannot be read", "config file nvme_path: cannot be read"),
        ("threads: expected a whole number", "threads: expected a whole number"),  # only a file has it
    ],
)
def test_names_become_options(text: str, expected: str) -> None:
    assert in_options(text, FINETUNE) == expected


def test_a_command_has_its_own_options() -> None:
    text = 'smallest max_memory["cpu"] is 5; see nvme_path, run_dir and gradient_accumulation_steps'
    assert in_options(text, PLAN) == "smallest --cpu is 5; see --nvme, run_dir and --accumulate"
    assert in_options(text, ()) == text


@given(st.text(st.characters(codec="ascii"), max_size=60))
def test_other_words_stay(text: str) -> None:
    """What has no name of two words, no equals sign and no colon, is as it was."""
    if not set("_=:") & set(text):
        assert in_options(text, FINETUNE) == text


def test_every_option_of_an_engine_that_finetune_has_is_known() -> None:
    for field in dataclasses.fields(offload.Config):
        if field.name in FINETUNE:
            assert in_options(f"{field.name}: expected", FINETUNE).startswith("--"), field.name


# --- what a command does without ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    made = tmp_path_factory.mktemp("model")
    make_model_folder(made / "model")
    write_rows(made / "rows.jsonl", chats(6))
    return made


def test_a_process_of_its_own_says_nothing_beside(folder: Path) -> None:
    """No library that quantizes is imported, so none tells of what it lacks."""
    code = (
        "import sys; from offload.cli.main import own_process; code = own_process(); "
        f"sys.exit(code or [name for name in {QUANTIZERS} if sys.modules.get(name)] or None)"
    )
    words = ["generate", "--model", str(folder / "model"), "--prompt", "ab", "--max-new-tokens", "1", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1) and "tokens/s" in done.stderr


def test_quantizers_stay_where_they_are_needed(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in QUANTIZERS:
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}))
    parser = cli.build_parser()
    for words in (["doctor"], ["merge", "--model", str(tmp_path), "--adapter", "a", "--out", "o"]):
        leave_out_quantizers(parser.parse_args(words))
        assert not set(QUANTIZERS) & sys.modules.keys()
    leave_out_quantizers(parser.parse_args(["plan", "--model", "llama-3.1-8b"]))
    assert [sys.modules[name] for name in QUANTIZERS] == [None, None]
    (tmp_path / "config.json").write_text("[]")
    leave_out_quantizers(parser.parse_args(["plan", "--model", str(tmp_path)]))  # which tells it itself
    with pytest.raises(offload.ConfigError, match="expected a JSON object in config"):
        leave_out_quantizers(parser.parse_args(["generate", "--model", str(tmp_path), "--prompt", "a"]))


# --- models that need not be in memory ---


def test_files_that_must_be_in_memory_have_to_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import transformers

    whole = folder / "pickled"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    whole.mkdir()
    model.config.save_pretrained(whole)
    torch.save(model.state_dict(), whole / "pytorch_model.bin")
    found, weights = read_causal_model(whole)
    assert weights is None and not any(parameter.is_meta for parameter in found.parameters())
    monkeypatch.setattr("offload.memory.limits.free_host_bytes", lambda: 1)
    with pytest.raises(
        offload.ConfigError, match=r"expected .* of free memory, .* not in safetensors, but got 1 B; wh"
    ):
        read_causal_model(whole)
    found, weights = read_causal_model(folder / "model")
    assert weights is not None and all(parameter.is_meta for parameter in found.parameters())


def test_tied_parameters_stay_so() -> None:
    import torch

    with torch.device("meta"):
        first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    weight = first.weight
    with as_in_memory(model):
        assert first.weight is second.weight and first.weight.device.type == "cpu"
        first.weight.requires_grad_(False)
    assert first.weight is second.weight is weight and not weight.requires_grad


@pytest.mark.usefixtures("single_torch_thread")
@pytest.mark.parametrize("peft", [None, "lora"])
def test_a_model_that_is_never_whole_in_memory_trains_as_one_that_is(
    folder: Path, peft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is evaluated, either; adapters are initialised as PEFT does it beside a model in memory."""
    import transformers

    def trained(output: str) -> tuple[report.Report, bytes]:
        budgets = {"device": "64MiB", "cpu": "64MiB"}
        given = {"steps": 2, "sequence_length": 64, "sample_tokens": 2, "lr": 1e-2, "eval": "0", "save_model": True}
        places = {"model": folder / "model", "data": folder / "rows.jsonl", "output": folder / f"{output}{peft}"}
        engine = {"device": "cpu", "max_memory": budgets}
        out = io.StringIO()
        made = finetune.run(Settings(**given, **places, peft=peft, engine_options=engine), stream=out)
        assert "held" not in out.getvalue() and "6 rows to train on" in out.getvalue()
        (file,) = (folder / f"{output}{peft}").rglob("*.safetensors")
        return made, file.read_bytes()

    found, files = trained("parts")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    monkeypatch.setattr(finetune, "read_causal_model", lambda _: (whole, None))
    truth, expected = trained("whole")
    assert [(step.loss, step.grad_norm) for step in found.steps] == [(s.loss, s.grad_norm) for s in truth.steps]
    assert files == expected and found.evaluations == [] and found.loss_after is None
    assert json.loads((folder / f"parts{peft}" / "report.json").read_text())["perplexity_after"] is None
    assert (folder / f"parts{peft}" / "loss.png").is_file()
