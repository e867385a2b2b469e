"""``offload finetune --peft lora``, and what becomes of the adapters: resumed, loaded, generated with, merged."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning import CHAT, chats, make_model_folder, make_tokenizer, write_rows
from harness import assert_same_tensors

import offload
from offload.cli import main as cli
from offload.cli.finetune import report
from offload.cli.finetune import run as finetune
from offload.cli.finetune.progress import Progress
from offload.cli.finetune.settings import FinetuneError, Settings
from offload.cli.models import load_engine, load_tokenizer, read_causal_model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [pytest.mark.usefixtures("single_torch_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

BUDGETS = ["--device", "cpu", "--device-memory", "64MiB", "--cpu-memory", "64MiB"]


def settings(folder: Path, output: str, **changes: Any) -> Settings:
    budgets = {"device": "64MiB", "cpu": "64MiB", "nvme": "64MiB"}
    values: dict[str, Any] = {
        "model": folder / "model",
        "data": folder / "rows.jsonl",
        "output": folder / output,
        "steps": 6,
        "sequence_length": 64,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "lr": 1e-2,
        "warmup_steps": 1,
        "sample_tokens": 4,
        "evaluations": 2,
        "save_model": True,
        "peft": "lora",
        "lora_rank": 4,
        "engine_options": {"device": "cpu", "max_memory": budgets, "nvme_path": folder, "offload_param": "nvme"},
    }
    return Settings(**{**values, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, report.Report, str]:
    """Return a folder with a model, rows and a run's adapters; the report of the run, and what it showed."""
    folder = tmp_path_factory.mktemp("trained")
    make_model_folder(folder / "model")
    write_rows(folder / "rows.jsonl", chats(12))
    out = io.StringIO()
    return folder, finetune.run(settings(folder, "whole"), stream=out), out.getvalue()


def test_a_chunked_loss_is_the_same_but_for_rounding(trained: tuple[Path, report.Report, str]) -> None:
    folder, whole, _ = trained
    chunked = finetune.run(settings(folder, "chunked", steps=1, evaluations=1, chunked_loss=True), stream=io.StringIO())
    assert chunked.evaluations[0][1] == pytest.approx(whole.evaluations[0][1], rel=1e-4)
    assert chunked.steps[0].loss == pytest.approx(whole.steps[0].loss, rel=1e-4)
    assert chunked.steps[0].grad_norm == pytest.approx(whole.steps[0].grad_norm, rel=1e-2)


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return dict(safetensors.load_file(folder / "adapter_model.safetensors"))


def adapted(folder: Path) -> Any:
    """Return the model with its adapters, as PEFT loads them."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    return peft.PeftModel.from_pretrained(base, folder / "whole" / "adapter")


def test_adapters_learn_and_peft_loads_them(trained: tuple[Path, report.Report, str]) -> None:
    folder, made, shown = trained
    assert made.loss_after < made.loss_before - 0.05
    model = adapted(folder)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, set(config.target_modules)) == (4, 8, {"q_proj", "v_proj"})  # PEFT's defaults
    saved = adapters(folder / "whole" / "adapter")
    trained_numel = sum(value.numel() for value in saved.values())
    assert any(value.abs().sum() > 0 for name, value in saved.items() if "lora_B" in name)
    assert f"of which {trained_numel} in adapters are trained" in shown
    assert "11 rows to train on with" in shown and "1 rows held out with" in shown
    assert (folder / "whole" / "adapter" / "tokenizer.json").is_file() and not (folder / "whole" / "model").exists()
    # the loss that the run has reported last, of the one row that was held out
    held_out = json.loads((folder / "whole" / "report.json").read_text())["evaluations"][-1][1]
    assert held_out == made.loss_after


def test_training_is_that_of_plain_peft(trained: tuple[Path, report.Report, str]) -> None:
    """The first loss of the run, from PEFT's own model and the same batch."""
    folder, made, _ = trained
    from offload.cli.finetune.data import load_data
    from offload.cli.finetune.sequences import orders

    given = settings(folder, "whole")
    data = load_data(make_tokenizer(), given)
    order = orders(len(data.train), given)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4))
    batches = [data.train.batch(next(order)) for _ in range(2)]
    losses = [float(model(**batch.inputs).loss) * batch.targets for batch in batches]
    assert made.steps[0].loss == pytest.approx(sum(losses) / sum(batch.targets for batch in batches), rel=1e-6)


def test_a_resumed_run_has_the_same_adapters(trained: tuple[Path, report.Report, str]) -> None:
    """Interrupted in the fourth of six steps, with two steps between checkpoints."""
    folder, whole, _ = trained
    real = Progress.step

    def interrupted(self: Progress, record: report.StepRecord, *args: Any) -> None:
        if record.step == 4:
            raise KeyboardInterrupt
        real(self, record, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finetune.run(settings(folder, "parts", save_every=2, log="jsonl"), stream=io.StringIO())
    more = {"save_every": 2, "log": "jsonl", "resume": True}
    for name, value, message in (
        ("lora_alpha", 9, "lora_alpha None but got 9"),
        ("chunked_loss", True, "chunked_loss None but got True"),
        ("loss_on", "all", "tokens of the data '[0-9a-f]+' but got"),
    ):
        with pytest.raises(FinetuneError, match=f"resume: expected {message}"):
            finetune.run(settings(folder, "parts", **more, **{name: value}), stream=io.StringIO())
    resumed = finetune.run(settings(folder, "parts", **more), stream=io.StringIO())
    assert [(r.step, r.loss, r.tokens) for r in resumed.steps] == [(r.step, r.loss, r.tokens) for r in whole.steps]
    assert resumed.evaluations == whole.evaluations and resumed.sample_after == whole.sample_after
    assert_same_tensors(adapters(folder / "parts" / "adapter"), adapters(folder / "whole" / "adapter"))
    shutil.rmtree(folder / "parts" / "adapter")
    finetune.run(settings(folder, "parts", **more), stream=io.StringIO())  # all steps are taken
    assert_same_tensors(adapters(folder / "parts" / "adapter"), adapters(folder / "whole" / "adapter"))
    lines = [json.loads(line) for line in (folder / "parts" / "log" / "log.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in lines if "train/loss" in line] == [record.loss for record in whole.steps]
    assert [(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line] == whole.evaluations
    assert {"train/lr", "train/grad_norm", "train/tokens_per_second", "memory/nvme_bytes"} <= lines[1].keys()
    assert {"wait/parameters_seconds", "wait/updates_seconds"} <= lines[1].keys()


def test_packed_rows_train(trained: tuple[Path, report.Report, str]) -> None:
    """With every linear layer adapted, a template that is saved beside the adapters, and evaluated on a file."""
    folder, *_ = trained
    write_rows(folder / "eval.jsonl", chats(5))
    (folder / "other.jinja").write_text(f"hi {CHAT}")
    how = {
        "packing": True,
        "sequence_length": 128,
        "chat_template": folder / "other.jinja",
        "eval": str(folder / "eval.jsonl"),
        "eval_every": 4,
        "evaluations": None,
        "lora_targets": ["all-linear"],
    }
    out = io.StringIO()
    made = finetune.run(settings(folder, "packed", **how), stream=out)
    assert [step for step, _ in made.evaluations] == [0, 4, 6]
    assert made.loss_after < made.loss_before
    # as without packing and the three letters: 12 * 3 more
    assert "12 rows to train on with 488 tokens, of which 110 count, in 4 sequences of 128, 95% full" in out.getvalue()
    assert json.loads((folder / "packed" / "report.json").read_text())["perplexity_after"] > 1
    saved = transformers.AutoTokenizer.from_pretrained(folder / "packed" / "adapter")
    assert saved.chat_template == f"hi {CHAT}"


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main(["generate", *words, *BUDGETS, "--max-new-tokens", "5", "--temperature", "0"]) == 0
    shown = capsys.readouterr()
    assert "tokens/s" in shown.err
    return shown.out.removesuffix("\n")


def continued(model: Any, text: str) -> str:
    """Return what plain transformers generates."""
    tokenizer = make_tokenizer()
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    made = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=5, do_sample=False)
    return str(tokenizer.decode(made[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))


def test_generate_and_merge(
    trained: tuple[Path, report.Report, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is generated is what plain transformers and PEFT make; merged files are PEFT's, bit by bit."""
    folder, adapter = trained[0], str(trained[0] / "whole" / "adapter")
    base = ["--model", str(folder / "model"), "--nvme-path", str(tmp_path), "--offload-param", "nvme"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    chat = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nsay ab<|im_end|>\n<|im_start|>assistant\n"
    assert generated(capsys, *base, "--prompt", "say ab") == continued(plain, "say ab")
    words = ["--prompt", "say ab", "--chat", "--system", "be brief", "--adapter", adapter]
    with_adapter = generated(capsys, *base, *words)
    assert with_adapter == continued(adapted(folder), chat)

    merge = [
        "merge",
        *base,
        "--adapter",
        adapter,
        "--out",
        str(tmp_path / "merged"),
        "--max-shard-size",
        "8KB",
        *BUDGETS,
    ]
    assert cli.main(merge) == 0
    assert f"wrote {tmp_path / 'merged'}, with the tokenizer of {adapter}" in capsys.readouterr().out
    adapted(folder).merge_and_unload().save_pretrained(tmp_path / "truth")
    found = [
        {name: value for path in sorted((tmp_path / side).glob("*.safetensors")) for name, value in adapters_in(path)}
        for side in ("merged", "truth")
    ]
    assert_same_tensors(*found)
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    generated(capsys, "--model", str(tmp_path / "merged"), "--prompt", "say ab", "--chat")
    assert cli.main(merge) == 1
    assert "merged: expected an empty folder, or nothing, but it has " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "truth"]


def adapters_in(path: Path) -> Any:
    return safetensors.load_file(path).items()


def test_what_cannot_be_generated_or_merged(
    trained: tuple[Path, report.Report, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = trained[0], ["--model", str(trained[0] / "model")]

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert cli.main([*words, *BUDGETS]) == 1
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1 and "Traceback" not in shown
        return shown

    out = ["--out", str(tmp_path / "out")]
    assert "expected a folder with config.json" in refused("generate", "--model", str(tmp_path), "--prompt", "a")
    assert "expected a folder with adapter_config.json" in refused("merge", *model, "--adapter", str(tmp_path), *out)
    assert "--prompt: expected text but it is empty" in refused("generate", *model, "--prompt", "")
    assert "--max-new-tokens: expected" in refused("generate", *model, "--prompt", "a", "--max-new-tokens", "0")
    assert "--temperature: expected" in refused("generate", *model, "--prompt", "a", "--temperature", "nan")
    assert "--system: expected chat" in refused("generate", *model, "--prompt", "a", "--system", "b")
    assert "BudgetError" not in refused("generate", *model, "--prompt", "a", "--config", str(tmp_path / "none"))
    make_model_folder(tmp_path / "wide", hidden_size=32)
    wide = ["--model", str(tmp_path / "wide"), "--adapter", str(folder / "whole" / "adapter")]
    assert "cannot be put on the model" in refused("merge", *wide, *out)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    make_model_folder(tmp_path / "plain", None)
    plain = ["--model", str(tmp_path / "plain")]
    assert "it has none; pass --chat-template FILE, or leave --chat out" in refused(
        "generate", *plain, "--prompt", "a", "--chat"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "plain" / name).unlink()
    assert "expected a tokenizer beside the model but there is none" in refused("generate", *plain, "--prompt", "a")


def save_adapters(model: Any, folder: Path, *targets: str) -> Any:
    """Save adapters that change the model, as PEFT does; returns the model with them."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM")
    made = peft.get_peft_model(model, config)
    made.save_pretrained(folder)
    return made


def merged(folder: Path, adapter: Path, out: Path) -> dict[str, torch.Tensor]:
    words = ["merge", "--model", str(folder), "--adapter", str(adapter), "--out", str(out), *BUDGETS]
    assert cli.main(words) == 0
    return dict(safetensors.load_file(out / "model.safetensors"))


def assert_saved_as(found: dict[str, torch.Tensor], truth: Any, folder: Path) -> None:
    truth.merge_and_unload().save_pretrained(folder)
    assert_same_tensors(found, dict(safetensors.load_file(folder / "model.safetensors")))


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "Llama4ForConditionalGeneration"])
def test_adapters_of_a_part_of_the_model_and_of_all_of_it(kind: str, tmp_path: Path) -> None:
    """``finetune`` trains the text part of a model that sees; others train the whole."""
    text: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"hidden_size": 32, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_local_experts": 2}
    seen: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 28}
    seen |= {"num_attention_heads": 2, "patch_size": 14, "vision_output_dim": 32}
    seen |= {"projector_input_dim": 32, "projector_output_dim": 32}
    config = transformers.Llama4Config(text_config={"vocab_size": 64, **text}, vision_config=seen)
    transformers.Llama4ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    model = getattr(transformers, kind).from_pretrained(tmp_path / "base")
    truth = save_adapters(model, tmp_path / "adapter", "q_proj")
    found = merged(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert_saved_as(found, truth, tmp_path / "truth")


def test_adapters_of_a_model_whose_files_have_no_head(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model", tie_word_embeddings=True)
    transformers.AutoModel.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    truth = save_adapters(model, tmp_path / "adapter", "q_proj")
    found = merged(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert_saved_as(found, truth, tmp_path / "truth")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_on_embeddings(target: str, tied: bool, tmp_path: Path) -> None:
    """PEFT saves the embeddings beside such adapters: they take the place of the model's own, as PEFT loads them."""
    make_model_folder(tmp_path / "model", tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.get_submodule("lm_head" if target == "lm_head" else "model.embed_tokens").weight.mul_(2)
    truth = save_adapters(model, tmp_path / "adapter", "q_proj", target)
    assert any(".base_layer." in name for name in adapters(tmp_path / "adapter"))
    found = merged(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    assert_saved_as(found, truth, tmp_path / "truth")


def test_embeddings_of_another_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model_folder(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.resize_token_embeddings(300)
    save_adapters(model, tmp_path / "adapter", "lm_head")
    words = ["merge", "--model", str(tmp_path / "model"), "--adapter", str(tmp_path / "adapter"), "--out", "out"]
    assert cli.main([*words, *BUDGETS]) == 1
    assert "but got (300, 16); call resize_token_embeddings" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ImportError("no gptqmodel"), RuntimeError("GPU is required"), ValueError("new")])
def test_what_transformers_refuses_is_an_error_of_the_folder(
    error: Exception, trained: tuple[Path, report.Report, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained[0] / "model"

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", refuse)
    for load in (lambda: load_engine(folder, None, {"device": "cpu"}), lambda: read_causal_model(folder)):
        with pytest.raises(offload.ConfigError, match=f"^model {folder}: cannot be loaded: {error}$"):
            load()


def test_a_damaged_tokenizer_is_an_error_of_the_folder(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(offload.ConfigError, match=f"^model {tmp_path}: its tokenizer cannot be loaded: "):
        load_tokenizer(tmp_path)


def full_drive(*_: Any, **__: Any) -> None:
    from safetensors import SafetensorError

    raise SafetensorError("I/O error: No space left on device (os error 28)")


def test_what_merge_says_instead_of_merging(
    trained: tuple[Path, report.Report, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A size, a tokenizer, a full drive; errors of the swap store are not those of the output."""
    base = ["merge", "--model", str(trained[0] / "model"), "--out", str(tmp_path / "out"), *BUDGETS]
    words = [*base, "--adapter", str(trained[0] / "whole" / "adapter")]

    def refused(*words: str) -> str:
        assert cli.main(words) == 1
        assert not list(tmp_path.glob("*out*"))
        return capsys.readouterr().err

    (tmp_path / "file").write_text("")
    swap = ["--nvme-path", str(tmp_path / "file" / "nowhere"), "--nvme-memory", "64MiB", "--offload-param", "nvme"]
    nowhere = refused(*words, *swap)
    assert "nowhere: " in nowhere and "--out" not in nowhere
    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full_drive)
        assert "out: cannot be written to: I/O error: No space left" in refused(*words)
    with monkeypatch.context() as patch:
        patch.setattr("offload.cli.merge.load_engine", None)
        assert "--max-shard-size: " in refused(*words, "--max-shard-size", "2GX")
        assert "--max-shard-size: expected bytes" in refused(*words, "--max-shard-size", "50%")
        shutil.copytree(trained[0] / "whole" / "adapter", tmp_path / "adapter")
        (tmp_path / "adapter" / "tokenizer.json").write_text("no")
        assert "its tokenizer cannot be loaded" in refused(*base, "--adapter", str(tmp_path / "adapter"))
        assert "file/below: cannot be written to: Not a directory" in refused(*words, "--out", f"{tmp_path}/file/below")


def test_merge_into_the_folder_where_it_is(
    trained: tuple[Path, report.Report, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot be renamed, as a mounted drive cannot. A tokenizer may be one file alone."""
    shutil.copytree(trained[0] / "whole" / "adapter", tmp_path / "adapter")
    shutil.copytree(trained[0] / "model", tmp_path / "model")
    for side in ("adapter", "model"):
        (tmp_path / side / "tokenizer_config.json").unlink()
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    words = ["merge", "--model", str(tmp_path / "model"), "--adapter", str(tmp_path / "adapter"), "--out", "."]
    assert cli.main([*words, "--max-shard-size", "8KiB", *BUDGETS]) == 0
    assert f"with the tokenizer of {tmp_path / 'model'}" in capsys.readouterr().out
    found = sorted(path.name for path in Path().iterdir())
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(found) and found[0][0] != "."


def test_adapters_that_cannot_be_trained(trained: tuple[Path, report.Report, str]) -> None:
    folder, *_ = trained
    with pytest.raises(
        FinetuneError, match="peft: cannot put adapters on LlamaForCausalLM: .*name modules with --lora"
    ):
        finetune.run(settings(folder, "none", lora_targets=["q_prj"]), stream=io.StringIO())


def test_adapters_on_quantized_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, generated with, and merged into an ordinary model: that of transformers and PEFT."""
    pytest.importorskip("bitsandbytes")
    make_model_folder(tmp_path / "plain", hidden_size=64, intermediate_size=64)
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(tmp_path / "plain", quantization_config=how, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", chats(8))
    finetune.run(settings(tmp_path, "whole", steps=2, evaluations=1), stream=io.StringIO())
    base = ["--model", str(tmp_path / "model"), "--adapter", str(tmp_path / "whole" / "adapter")]
    generated(capsys, *base, "--prompt", "say ab")
    merge = ["merge", *base, "--out", str(tmp_path / "merged"), *BUDGETS]
    assert cli.main(merge) == 1
    assert "pass --dequantize bfloat16 to merge into" in capsys.readouterr().err
    assert cli.main([*merge, "--dequantize", "bfloat16"]) == 0
    model = load(tmp_path / "model").dequantize().to(torch.bfloat16)
    truth = peft.PeftModel.from_pretrained(model, tmp_path / "whole" / "adapter").merge_and_unload()
    found = safetensors.load_file(tmp_path / "merged" / "model.safetensors")
    assert_same_tensors(dict(found), {name: truth.state_dict()[name] for name in found})
    assert len(found) == len(truth.state_dict())
    assert generated(capsys, "--model", str(tmp_path / "merged"), "--prompt", "say ab") == continued(truth, "say ab")
