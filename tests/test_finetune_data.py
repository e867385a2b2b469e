"""Rows of ``offload finetune``: what is read, which tokens count, how rows share sequences, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning import CHAT, MARKED, chats, make_tokenizer, write_rows
from hypothesis import given
from hypothesis import strategies as st

from offload import SGD, Engine
from offload.cli.finetune.data import load_data
from offload.cli.finetune.packing import Packed, fitted, require_apart
from offload.cli.finetune.past import Past
from offload.cli.finetune.rendering import Renderer
from offload.cli.finetune.rows import Row, read_rows
from offload.cli.finetune.run import evaluate, take_step
from offload.cli.finetune.sequences import IGNORED, Rows, Tokens
from offload.cli.finetune.settings import FinetuneError, Settings

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")

pytestmark = pytest.mark.usefixtures("single_torch_thread")
CPU = torch.device("cpu")
QUESTION = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "so."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def settings(path: Path, **changes: Any) -> Settings:
    return Settings(**{"model": Path("m"), "data": path, "sequence_length": 64, **changes})


def counted(tokenizer: Any, columns: dict[str, Any], template: str | None = None, **how: Any) -> tuple[str, str]:
    """Return a row as text, and the part of it that counts."""
    if template is not None:
        tokenizer = make_tokenizer(template)
    made = Renderer(tokenizer, **how).tokens(Row("here", columns))
    ids = [token for token, counts in zip(made.ids, made.counts, strict=True) if counts]
    return tokenizer.decode(made.ids), tokenizer.decode(ids)


# --- which tokens count ---


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_the_assistants_tokens_count(tokenizer: Any, template: str) -> None:
    text, part = counted(tokenizer, {"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}, template=template)
    assert text == 2 * "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso.<|im_end|>\n"
    assert part == 2 * "so.<|im_end|>\n"
    assert (
        counted(tokenizer, {"messages": [QUESTION, ANSWER]}, template=template, everything=True)[1]
        == text[: len(text) // 2]
    )


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_some_answers_are_left_out(tokenizer: Any, template: str) -> None:
    """By OpenAI's weights, and because they are part of a prompt."""
    other = {"role": "assistant", "content": "no"}
    ignored = {**other, "weight": 0}
    assert (
        counted(tokenizer, {"messages": [QUESTION, ignored, QUESTION, ANSWER]}, template=template)[1]
        == "so.<|im_end|>\n"
    )
    row = {"prompt": [QUESTION, other, QUESTION], "completion": [ANSWER]}
    assert counted(tokenizer, row, template=template)[1] == "so.<|im_end|>\n"


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_an_answer_may_come_first(tokenizer: Any, template: str) -> None:
    """As of who greets: no template renders an empty conversation, which would tell where it begins."""
    text, part = counted(tokenizer, {"messages": [ANSWER, QUESTION, ANSWER]}, template=template)
    assert text.startswith("<|im_start|>assistant\nso.<|im_end|>\n<|im_start|>user") and part == 2 * "so.<|im_end|>\n"


def test_spaces_count_where_a_tokenizer_trims_them() -> None:
    from tokenizers import processors

    tokenizer = make_tokenizer()
    tokenizer._tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    row = {"prompt": "if x:", "completion": "\n   y\n    "}
    assert counted(tokenizer, row)[0] == "if x:\n   y\n    <|im_end|>"
    made = Renderer(tokenizer).tokens(Row("here", row))
    assert [bool(count) for count in made.counts] == [False] * 5 + [True] * 11


def test_completions_and_texts(tokenizer: Any) -> None:
    row = {"prompt": "2 + 2 =", "completion": " 4", "messages": None}
    assert counted(tokenizer, row) == ("2 + 2 = 4<|im_end|>", " 4<|im_end|>")
    assert counted(tokenizer, row, everything=True)[1] == "2 + 2 = 4<|im_end|>"
    assert counted(tokenizer, {"text": "one"}) == ("one<|im_end|>", "one<|im_end|>")


def test_contents_in_parts_and_tools_as_text(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "wh"}, {"type": "text", "text": "y?"}]
    row = {"messages": [{**QUESTION, "content": parts}, ANSWER]}
    assert counted(tokenizer, row)[0] == counted(tokenizer, {"messages": [QUESTION, ANSWER]})[0]
    template = "{{ tools[0]['name'] }}" + CHAT
    assert counted(tokenizer, {**row, "tools": '[{"name": "add"}]'}, template=template)[0].startswith("add<|im_start|>")


def test_nulls_in_messages_are_no_keys_but_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some templates ask whether content is None, which some versions of transformers leave them."""
    tokenizer, seen = make_tokenizer(), list[Any]()
    call = [{"function": {"name": "f", "arguments": {}}}]
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda messages, **_: seen.append(messages) or "")
    row = {"messages": [{**QUESTION, "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": call}]}
    Renderer(tokenizer, everything=True).tokens(Row("here", row))
    assert seen[0] == [QUESTION, {"role": "assistant", "content": None, "tool_calls": call}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"question": "a", "label": 1},
            "expected messages, prompt and completion, or text but got 'question', 'label'",
        ),
        ({}, "but got no columns"),
        ({"messages": []}, "messages: expected a list of messages but got"),
        ({"messages": [{"from": "human"}]}, r"messages\[0\]: expected an object with role and content"),
        ({"messages": [QUESTION]}, "expected a message of the assistant but got the roles user; add one"),
        ({"messages": [{**QUESTION, "content": [{"type": "image_url"}]}]}, r"messages\[0\]: expected text but got"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: expected content, or tool_calls"),
        ({"messages": [{**QUESTION, "content": 3}]}, "expected text as content but got 3"),
        ({"prompt": "a", "completion": 3}, "completion: expected a string but got 3"),
        ({"text": ["a"]}, "text: expected a string"),
        ({"messages": [QUESTION, ANSWER], "tools": "{"}, "tools: expected JSON"),
    ],
)
def test_rows_that_cannot_be_used(tokenizer: Any, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(FinetuneError, match=f"here: .*{message}"):
        counted(tokenizer, columns)


def test_templates_that_cannot_be_used(tokenizer: Any) -> None:
    row = {"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}
    with pytest.raises(FinetuneError, match="has none; pass --chat-template FILE"):
        counted(make_tokenizer(None), row)
    with pytest.raises(FinetuneError, match="the chat template refuses these messages: no users"):
        counted(tokenizer, row, template="{{ raise_exception('no users') }}")
    with pytest.raises(FinetuneError, match="the chat template refuses these messages"):
        counted(tokenizer, row, template="{% for %}")
    other = "{% for message in messages %}{{ '!' if loop.last }}{{ message['content'] }}{% endfor %}"
    with pytest.raises(FinetuneError, match="message 2 cannot be found; pass --loss-on all, or --chat-template"):
        counted(tokenizer, row, template=other)
    assert counted(tokenizer, row, template=other, everything=True)[1] == "why?so.why?!so."


# --- files ---


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_every_format_has_the_same_rows(tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    rows = list(read_rows(write_rows(tmp_path / name, chats(3))))
    assert [row.columns for row in rows] == chats(3)
    assert rows[1].place == f"data {tmp_path / name}, {'line' if name.endswith('l') else 'row'} 2"


def test_parquet_has_no_keys_of_other_rows(tmp_path: Path) -> None:
    """A column of structs has the keys of all rows: those that a row has not would be rendered as null."""
    pytest.importorskip("pyarrow")
    calls = [[{"function": {"name": "f", "arguments": {key: ["x", None]}}}] for key in ("city", "query")]
    rows = [{"messages": [QUESTION, {"role": "assistant", "tool_calls": call}], "n": n} for n, call in enumerate(calls)]
    assert [row.columns for row in read_rows(write_rows(tmp_path / "rows.parquet", rows))] == rows


def test_lines_may_be_empty_and_begin_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \n{"text": "b"}')
    assert [row.place.split(", ")[1] for row in read_rows(tmp_path / "rows.jsonl")] == ["line 1", "line 4"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n' * 6 + b'{"text": }\n',
            "a.jsonl, line 7: expected one JSON object .* at column 10",
        ),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2: expected a JSON object but got an array"),
        ("a.jsonl", b'{"text": "a"}\n"\xff"\n', "line 2: expected UTF-8 but byte 1 does not fit"),
        ("a.jsonl", b"", "is empty"),
        (
            "a.json",
            b'{"text": "a"}\n{"text": "b"}\n',
            "name a file with one object on each line .jsonl .* at line 2, column 1",
        ),
        ("a.json", b'{"text": "a"}', "expected an array of JSON objects but got an object"),
        ("a.json", b'[{"text": "a"}, 3]', "a.json, row 2: expected a JSON object but got a number"),
        ("a.json", b"[" * 100_000, "a.json: expected an array of JSON objects"),
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
        ("a.csv", b"text\na\n", "expected .jsonl, .ndjson, .json, .parquet or a text but got .csv"),
        ("a.jsonl", b'{"text": "a"}\n', "expected at least 2 rows, of which one is held out, but got 1"),
        ("a.jsonl", None, "cannot be read: No such file"),
        ("a.parquet", None, "cannot be read: "),
    ],
)
def test_files_that_cannot_be_used(
    tokenizer: Any, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FinetuneError, match=message):
        load_data(tokenizer, settings(tmp_path / name))


# --- what is held out, cut, left out ---


def test_rows_are_held_out_by_the_seed_and_none_is_lost(tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": chr(ord("a") + number)} for number in range(20)])

    def texts(**how: Any) -> tuple[list[str], list[str]]:
        data = load_data(tokenizer, settings(path, eval="0.2", **how))
        both = []
        for part in (data.train, data.held_out):
            both.append([tokenizer.decode(part.batch([n]).inputs["input_ids"][0])[0] for n in range(len(part))])
        return both[0], both[1]

    train, held_out = texts()
    assert len(held_out) == 4 and sorted(train + held_out) == [chr(ord("a") + number) for number in range(20)]
    assert texts() == (train, held_out) != texts(seed=1)
    few = texts(evaluation_sequences=2)
    assert few == (train, [held_out[0], held_out[3]])


def test_a_file_is_evaluated_whole(tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", chats(4))
    other = write_rows(tmp_path / "more.json", chats(11))
    data = load_data(tokenizer, settings(path, eval=str(other)))
    assert (len(data.train), len(data.held_out)) == (4, 11)
    (tmp_path / "text").write_text("some text " * 20)
    data = load_data(tokenizer, settings(path, eval=str(tmp_path / "text"), sequence_length=32, prompt="hi"))
    assert len(data.held_out) == 200 // 32
    assert tokenizer.decode(data.prompt) == "hi"
    with pytest.raises(FinetuneError, match="eval: expected a share .* or a file but there is no file .*none.jsonl"):
        load_data(tokenizer, settings(path, eval=str(tmp_path / "none.jsonl")))


def test_a_text_is_evaluated_on_another_file(tokenizer: Any, tmp_path: Path) -> None:
    """All of the text is trained on; the other file may be a text or rows."""
    (tmp_path / "text").write_text("x" * 640)
    (tmp_path / "other").write_text("y" * 200)
    rows = write_rows(tmp_path / "rows.jsonl", chats(3))
    for other, count, prompt in ((tmp_path / "other", 3, "y" * 200), (rows, 3, "say ab")):
        data = load_data(tokenizer, settings(tmp_path / "text", eval=str(other)))
        assert (len(data.train), len(data.held_out)) == (10, count)
        assert prompt in tokenizer.decode(data.prompt)
    (tmp_path / "other").write_text("y" * 20)
    with pytest.raises(FinetuneError, match="text: expected at least 64 tokens .* but got 20"):
        load_data(tokenizer, settings(tmp_path / "text", eval=str(tmp_path / "other")))
    with pytest.raises(FinetuneError, match="packing: expected rows but .* is a text"):
        load_data(tokenizer, settings(tmp_path / "text", packing=True))


def test_what_is_cut_and_left_out_is_said(tokenizer: Any, tmp_path: Path) -> None:
    long = {"prompt": "p" * 70, "completion": "c"}  # nothing counts within 64 tokens
    cut = {"prompt": "p" * 60, "completion": "c" * 20}
    path = write_rows(tmp_path / "rows.jsonl", [long, cut, *chats(2)])
    write_rows(tmp_path / "eval.jsonl", chats(1))
    data = load_data(tokenizer, settings(path, eval=str(tmp_path / "eval.jsonl")))
    assert len(data.train) == 3
    # 72 and 81 tokens with the end of the text: 8 and 17 too many
    assert data.notes[1] == "2 rows to train on are longer than 64 tokens: 25 tokens at their ends are cut"
    assert data.notes[2] == "1 rows to train on are left out: no token counts within the first 64"
    write_rows(path, [long, long])
    with pytest.raises(
        FinetuneError,
        match="line 1: .* within the first 64 .sequence_length., here or in 1 others to train on, but there are none",
    ):
        load_data(tokenizer, settings(path, eval=str(tmp_path / "eval.jsonl")))


def test_the_sample_continues_what_is_asked(tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", chats(4))
    begin = "<|im_start|>assistant\n"
    assert tokenizer.decode(load_data(tokenizer, settings(path)).prompt).endswith(begin)
    lists = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in chats(4)]
    for file in (path, write_rows(tmp_path / "lists.jsonl", lists)):
        asked = tokenizer.decode(load_data(tokenizer, settings(file, prompt="hi")).prompt)
        assert asked == f"<|im_start|>user\nhi<|im_end|>\n{begin}"
    texts = write_rows(tmp_path / "texts.jsonl", [{"messages": None, "text": "some text"}] * 4)
    assert tokenizer.decode(load_data(tokenizer, settings(texts, prompt="hi")).prompt) == "hi"


def test_the_digest_tells_data_apart(tokenizer: Any, tmp_path: Path) -> None:
    def digest(count: int, **how: Any) -> str:
        path = write_rows(tmp_path / "rows.jsonl", chats(count))
        write_rows(tmp_path / "eval.jsonl", chats(1))
        found = load_data(tokenizer, settings(path, eval=str(tmp_path / "eval.jsonl"), **how)).digests
        return found["tokens of the data"]

    same = {digest(5), digest(5)}
    assert len(same) == 1
    others = {digest(6), digest(5, loss_on="all"), digest(5, packing=True), digest(5, packing="joined")}
    assert len(others) == 4 and not same & others


def test_digests_tell_apart_what_is_held_out_and_asked(tokenizer: Any, tmp_path: Path) -> None:
    path, other = write_rows(tmp_path / "rows.jsonl", chats(5)), write_rows(tmp_path / "other.jsonl", chats(2))
    found = [
        load_data(tokenizer, settings(path, **{"eval": str(path), "prompt": "a", **how})).digests
        for how in ({}, {"eval": str(other)}, {"eval": "0"}, {"prompt": "b"})
    ]
    assert len({each["tokens of the data"] for each in found}) == 1
    assert len({each["tokens held out"] for each in found}) == 3
    assert len({each["tokens of the prompt"] for each in found}) == 2


def test_a_run_goes_on_with_the_same_data_alone(tmp_path: Path) -> None:
    names = ("tokens of the data", "tokens held out", "tokens of the prompt")
    run, digests = settings(tmp_path / "rows.jsonl", steps=2), dict.fromkeys(names, "a")
    state = Past().to_state(run, digests, {})
    assert Past.of_state(state, run, digests).done == 0
    for name in names:
        with pytest.raises(FinetuneError, match=f"resume: expected {name} 'a' but got 'b'"):
            Past.of_state(state, run, {**digests, name: "b"})
    for name in names[1:]:  # older checkpoints do not have them
        del state["data"][name]
    assert Past.of_state(state, run, {**digests, "tokens held out": "b"}).done == 0


# --- batches ---


def rows_of(*lengths: int) -> Rows:
    """Return rows of tokens that are all different, of which the last two count."""
    first, made = 1, []
    for length in lengths:
        made.append(Tokens(range(first, first + length), [place >= length - 2 for place in range(length)]))
        first += length
    return Rows(made, pad=0)


def test_batches_are_padded_and_masked() -> None:
    batch = rows_of(4, 3, 4).batch([0, 1])
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert batch.inputs["labels"].tolist() == [[IGNORED, IGNORED, 3, 4], [IGNORED, 6, 7, IGNORED]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert (batch.tokens, batch.targets) == (7, 4)
    assert "attention_mask" not in rows_of(4, 3, 4).batch([0, 2]).inputs


@given(st.lists(st.integers(1, 20), max_size=40))
def test_every_row_is_in_one_sequence(lengths: list[int]) -> None:
    bins = fitted(lengths, 20)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    sums = [sum(lengths[row] for row in rows) for rows in bins]
    assert all(0 < size <= 20 for size in sums)
    assert len([size for size in sums if size <= 10]) <= 1  # two such would have become one


def test_packed_rows_begin_anew() -> None:
    packed = Packed(rows_of(3, 4, 2), 8, apart=True)
    assert len(packed) == 2 and packed.filled == 9 / 16
    batch = packed.batch([0, 1])
    assert batch.inputs["input_ids"].tolist() == [[4, 5, 6, 7, 1, 2, 3, 0], [8, 9, 0, 0, 0, 0, 0, 0]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5]]
    labels = batch.inputs["labels"].tolist()
    assert labels[0] == [IGNORED, IGNORED, 6, 7, IGNORED, 2, 3, IGNORED]
    assert labels[1] == [IGNORED, 9, *[IGNORED] * 6]  # of the two that count, nothing predicts the first
    assert (batch.tokens, batch.targets) == (9, 5)
    assert Packed(rows_of(3, 4, 2), 8, apart=False).batch([0]).inputs.keys() == {"input_ids", "labels"}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **shape, **more))


OPTIONS = {"device": "cpu", "max_memory": {"device": "64MiB", "cpu": "64MiB"}}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_changes_no_loss(attention: str) -> None:
    """The mean over the tokens that count: of padded rows, of packed rows, and of each row alone in plain torch."""
    rows, model = rows_of(5, 9, 3, 4, 11, 7), llama(attn_implementation=attention)
    with torch.no_grad():
        losses = [(float(model(**rows.batch([n]).inputs).loss), rows.batch([n]).targets) for n in range(len(rows))]
    truth = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    with Engine(model, None, **OPTIONS) as engine:
        require_apart(engine, 2, CPU)
        for sequences in (rows, Packed(rows, 16, apart=True)):
            found = evaluate(engine, sequences, settings(Path("d"), batch_size=2), CPU)
            assert found == pytest.approx(truth, rel=1e-5)
        joined = evaluate(engine, Packed(rows, 16, apart=False), settings(Path("d"), batch_size=2), CPU)
        assert abs(joined - truth) > 1e-4


def test_models_that_mix_rows_are_refused() -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1}
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, state_size=4, use_cache=False, **shape)
    )
    with Engine(mamba, None, **OPTIONS) as engine, pytest.raises(FinetuneError, match="MambaForCausalLM takes no pos"):
        require_apart(engine, 1, CPU)

    class Mixing(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **more: Any) -> Any:
            mask = torch.ones_like(input_ids)
            return super().forward(input_ids=input_ids, position_ids=position_ids, attention_mask=mask, **more)

    mixing = Mixing(llama().config)
    with Engine(mixing, None, **OPTIONS) as engine:
        with pytest.raises(FinetuneError, match="a row's logits change by .* with the tokens of the row before"):
            require_apart(engine, 1, CPU)


def test_micro_batches_count_by_their_tokens() -> None:
    """Three micro-batches with 1, 2 and 9 tokens that count train as the mean over 12 tokens does in plain torch."""
    made = [Tokens(range(1, 12), [place >= 11 - count for place in range(11)]) for count in (1, 2, 9)]
    rows, plain = Rows(made, pad=0), llama()
    inputs = rows.batch([0, 1, 2]).inputs
    loss = plain(**inputs).loss
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    with Engine(llama(), SGD(lr=0.5), gradient_accumulation_steps=3, **OPTIONS) as engine:
        assert take_step(engine, [rows.batch([n]) for n in range(3)], CPU) == pytest.approx(loss.item(), rel=1e-6)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_rows_are_read_lazily_from_their_json(tmp_path: Path) -> None:
    """The error of a row comes when it is reached: those before it were good."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\nnonsense\n")
    reader = read_rows(path)
    assert next(reader).columns == {"text": "a"}
    with pytest.raises(FinetuneError, match="line 2"):
        next(reader)
