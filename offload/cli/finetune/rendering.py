"""How a row becomes tokens: messages by the chat template, and which tokens count.

Owns what columns a row may have, and where in its text the assistant's part is. Knows a tokenizer of transformers, and
neither files nor models. Next: :mod:`offload.cli.finetune.data`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offload.cli.finetune.rows import Row
from offload.cli.finetune.sequences import Tokens
from offload.cli.finetune.settings import FinetuneError

MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
Message = dict[str, Any]
Span = tuple[int, int]  # characters [begin, end) of a text

NO_TEMPLATE = (
    "expected a tokenizer with a chat template for rows with messages but it has none; pass --chat-template FILE, or "
    "rows with prompt and completion, or with text"
)


class Renderer:
    """Makes tokens of rows.

    Args:
        tokenizer: of transformers.
        everything: every token counts, not only those of the assistant or the completion.
    """

    def __init__(self, tokenizer: Any, *, everything: bool = False) -> None:
        self._tokenizer = tokenizer
        self._everything = everything
        self._template: str | None = tokenizer.chat_template

    def tokens(self, row: Row) -> Tokens:
        """Return a row's tokens.

        Raises:
            FinetuneError: the row has no columns that are known, or its messages cannot be rendered; names the row.
        """
        columns = {name: value for name, value in row.columns.items() if value is not None}
        if "messages" in columns:
            return self._chat(row, columns, _messages(row, columns["messages"], "messages"), 0)
        if {"prompt", "completion"} <= columns.keys():
            prompt, completion = columns["prompt"], columns["completion"]
            if isinstance(prompt, list) and isinstance(completion, list):
                before = _messages(row, prompt, "prompt")
                messages = [*before, *_messages(row, completion, "completion")]
                return self._chat(row, columns, messages, len(before))
            _require_strings(row, prompt=prompt, completion=completion)
            return self._plain(row, prompt + completion, len(prompt))
        if "text" in columns:
            _require_strings(row, text=columns["text"])
            return self._plain(row, columns["text"], 0)
        raise FinetuneError(
            f"{row.place}: expected messages, prompt and completion, or text but got "
            f"{', '.join(map(repr, columns)) or 'no columns'}; rename the columns, or fill them: null counts as missing"
        )

    def question(self, prompt: str, row: Row) -> list[int]:
        """Return the tokens of a prompt that is given as the rows are: as a user's message if `row` has messages."""
        if row.columns.get("messages") is None and not isinstance(row.columns.get("prompt"), list):
            return list(self._tokenizer(prompt)["input_ids"])
        text = self._rendered(row, [{"role": "user", "content": prompt}], {}, asks=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plain(self, row: Row, text: str, begin: int) -> Tokens:
        """Return the tokens of a text and an end-of-text token; those before character `begin` do not count."""
        ids, counts = self._encoded(row, text, [(begin, len(text))], special=True)
        end = self._tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids, counts = [*ids, end], [*counts, True]
        return Tokens(ids, counts)

    def _chat(self, row: Row, columns: Mapping[str, Any], messages: Sequence[Message], first: int) -> Tokens:
        """Return the tokens of messages; those of the assistant count, from message `first` on."""
        tools = columns.get("tools")
        given = {"tools": _tools(row, tools)} if tools else {}
        marked = MARKS_ASSISTANT.search(self._template or "") is not None
        chosen = [
            number >= first and message["role"] == "assistant" and message.get("weight") != 0
            for number, message in enumerate(messages)
        ]
        if not self._everything and not any(chosen):
            raise FinetuneError(
                f"{row.place}: expected a message of the assistant but got the roles "
                f"{', '.join(message['role'] for message in messages)}; add one, or pass --loss-on all"
            )
        if not self._everything and marked and chosen == [message["role"] == "assistant" for message in messages]:
            made = self._called(
                row, messages, given, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return Tokens(list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]])
        text = self._rendered(row, messages, given)
        spans = [(0, len(text))] if self._everything else self._spans(row, messages, given, text, chosen)
        return Tokens(*self._encoded(row, text, spans, special=False))

    def _spans(
        self, row: Row, messages: Sequence[Message], given: Mapping[str, Any], text: str, chosen: Sequence[bool]
    ) -> list[Span]:
        """Return where the chosen messages are in the rendered text: each beginning is rendered by itself."""
        spans = []
        for number in (number for number, yes in enumerate(chosen) if yes):
            if number:
                before = self._rendered(row, messages[:number], given, asks=True)
            else:  # no template renders nothing: what comes before any content
                others = ({**messages[0], "content": content} for content in "ab")
                before = os.path.commonprefix([self._rendered(row, [other], given) for other in others])
            through = self._rendered(row, messages[: number + 1], given)
            if not through.startswith(before) or not text.startswith(through):
                raise FinetuneError(
                    f"{row.place}: expected a chat template that only adds text for each message but it renders the "
                    f"beginning of these {len(messages)} messages in another way, so message {number + 1} cannot be "
                    "found; pass --loss-on all, or --chat-template with a template that has {% generation %} around "
                    "the assistant's text"
                )
            spans.append((len(before), len(through)))
        return spans

    def _rendered(self, row: Row, messages: Sequence[Message], given: Mapping[str, Any], *, asks: bool = False) -> str:
        """Return messages as text; with `asks`, up to where the assistant begins."""
        return str(self._called(row, messages, given, tokenize=False, add_generation_prompt=asks))

    def _called(self, row: Row, messages: Sequence[Message], given: Mapping[str, Any], **how: Any) -> Any:
        if self._template is None:
            raise FinetuneError(f"{row.place}: {NO_TEMPLATE}")
        return rendered(
            lambda: self._tokenizer.apply_chat_template(list(messages), **given, **how),
            row.place,
        )

    def _encoded(self, row: Row, text: str, spans: Sequence[Span], *, special: bool) -> tuple[list[int], list[bool]]:
        """Return the tokens of a text, and which of them begin in one of the spans."""
        if self._everything or spans == [(0, len(text))]:
            ids = list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
            return ids, [True] * len(ids)
        if not getattr(self._tokenizer, "is_fast", False):
            raise FinetuneError(
                f"{row.place}: expected a tokenizer that tells where in the text its tokens are but "
                f"{type(self._tokenizer).__name__} does not; pass --loss-on all"
            )
        made = self._tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        counts = []
        for (begin, end), is_added in zip(made["offset_mapping"], made["special_tokens_mask"], strict=True):
            at = begin if begin < end else begin - 1  # of nothing but spaces, which some tokenizers trim
            counts.append(not is_added and any(first <= at < last for first, last in spans))
        return list(made["input_ids"]), counts


def rendered(call: Callable[[], Any], place: str) -> Any:
    """Return what a chat template makes.

    Raises:
        FinetuneError: jinja2 is missing, or the template refuses the messages.
    """
    try:
        from jinja2 import TemplateError
    except ImportError as error:
        raise FinetuneError(
            f"{place}: jinja2, which chat templates need, is not installed; pip install jinja2"
        ) from error
    try:
        return call()
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise FinetuneError(
            f"{place}: the chat template refuses these messages: {str(error) or type(error).__name__}"
        ) from error


def _messages(row: Row, value: Any, column: str) -> list[Message]:
    """Return messages whose contents are strings, as templates of text models expect them."""
    if not isinstance(value, list) or not value:
        raise FinetuneError(f"{row.place}: {column}: expected a list of messages but got {value!r:.60}")
    return [_message(row, message, f"{column}[{number}]") for number, message in enumerate(value)]


def _message(row: Row, message: Any, name: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise FinetuneError(f"{row.place}: {name}: expected an object with role and content but got {message!r:.60}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise FinetuneError(f"{row.place}: {name}: expected text but got other content: {content!r:.60}")
        return {**message, "content": "".join(texts)}
    if content is not None and not isinstance(content, str):
        raise FinetuneError(f"{row.place}: {name}: expected text as content but got {content!r:.60}")
    if content is None and not message.get("tool_calls"):
        raise FinetuneError(f"{row.place}: {name}: expected content, or tool_calls, but got neither")
    # Templates ask which keys are there, but some of them whether content is None.
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _tools(row: Row, tools: Any) -> Any:
    """Return tools; files whose columns have one type keep them as JSON text."""
    try:
        return json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise FinetuneError(f"{row.place}: tools: expected JSON but got {tools!r:.60}") from error


def _require_strings(row: Row, **columns: Any) -> None:
    for name, value in columns.items():
        if not isinstance(value, str):
            raise FinetuneError(f"{row.place}: {name}: expected a string but got {value!r:.60}")
