"""Control tokens in prompts, and prompts that fill in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelmill.cli import serve
from modelmill.core.errors import RequestError
from modelmill.serve import special_token_prompts
from modelmill.text.tokenizer_loader import Tokenizer, load_tokenizer
from tests.serve.dialect_calls import events, post
from tests.serve.service_thread import ServiceThread


@pytest.fixture(scope="module")
def qwen(shared: Path) -> Tokenizer:
    folder = shared / "data/tokenizers/qwen2.5"
    return load_tokenizer({path.name: path.read_bytes() for path in folder.iterdir()})


def test_text_becomes_control_tokens_only_where_asked(qwen: Tokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>"
    start, end = qwen.special["<|im_start|>"], qwen.special["<|im_end|>"]
    parsed = special_token_prompts.encode_text(qwen, text, parse_special=True)
    assert (parsed[0], parsed[-1]) == (start, end)
    plain = special_token_prompts.encode_text(qwen, text, parse_special=False)
    assert not {start, end} & set(plain)
    assert qwen.decode(plain) == text


def test_the_order_of_the_marks(qwen: Tokenizer) -> None:
    prefix, suffix, middle = (
        qwen.special[f"<|fim_{name}|>"] for name in ("prefix", "suffix", "middle")
    )
    ids, marks = special_token_prompts.encode_infill_with_fim_tokens(
        qwen, "def f(", "):\n    <|fim_middle|>"
    )
    assert ids[0] == prefix
    assert ids[-1] == middle
    assert ids.count(middle) == 1  # text of the client is no mark
    assert qwen.decode(ids[1 : ids.index(suffix)]) == "def f("
    assert {prefix, suffix, middle} <= set(marks.ends)


def test_marks_of_vocabularies() -> None:
    codestral = special_token_prompts.find_fim_tokens({"[PREFIX]": 3, "[SUFFIX]": 4})
    assert codestral is not None
    assert codestral.middle is None
    starcoder = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3, "<file_sep>": 9}
    marks = special_token_prompts.find_fim_tokens(starcoder)
    assert marks is not None
    assert (marks.prefix, marks.suffix, marks.middle, marks.ends) == (1, 2, 3, (9, 1, 2, 3))
    assert special_token_prompts.find_fim_tokens({"<fim_prefix>": 1}) is None


def test_a_vocabulary_without_marks(shared: Path) -> None:
    folder = shared / "data/tokenizers/gpt2"
    gpt2 = load_tokenizer({path.name: path.read_bytes() for path in folder.iterdir()})
    with pytest.raises(RequestError, match="suffix is not supported by this model"):
        special_token_prompts.encode_infill_with_fim_tokens(gpt2, "a", "b")


WRITTEN = "</s>Once upon a time"
WARNING = (
    "prompt: </s> is read as plain text; parse_special: true makes it the special token, and "
    "false says that text is meant"
)


def complete(running: ServiceThread, **more: Any) -> dict[str, Any]:
    body = {"prompt": WRITTEN, "max_tokens": 2, "return_token_ids": True, **more}
    answer: dict[str, Any] = post(running, "/v1/completions", body).json
    return answer


@pytest.mark.parametrize(
    ("more", "warnings"),
    [
        ({}, [WARNING]),
        ({"prompt": ["a </s> b", WRITTEN]}, [WARNING]),
        ({"parse_special": False}, None),
        ({"parse_special": True}, None),
        ({"prompt": "Once </ s>"}, None),
        ({"prompt": [1, 2, 3]}, None),
    ],
    ids=range(6),
)
def test_a_special_token_that_is_plain_text_is_told(
    running: ServiceThread, more: dict[str, Any], warnings: list[str] | None
) -> None:
    whole = complete(running, **more)
    assert whole.get("warnings") == warnings
    stream = {"prompt": WRITTEN, "max_tokens": 2, **more, "stream": True}
    first = next(events(post(running, "/v1/completions", stream).body))[1]
    assert first.get("warnings") == warnings


def test_many_special_tokens_are_told_in_one_line(qwen: Tokenizer) -> None:
    names = special_token_prompts.find_special_tokens(qwen, "".join([*qwen.special, *qwen.special]))
    assert names == list(qwen.special)
    line = special_token_prompts.plain_special_tokens_warning(names)
    assert line.startswith(f"prompt: {', '.join(names[:3])}, … is read as plain text")


def test_the_server_may_read_special_tokens_by_default(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = complete(running)["choices"][0]["prompt_token_ids"]
    tokens = complete(running, parse_special=True)["choices"][0]["prompt_token_ids"]
    assert plain != tokens
    monkeypatch.setattr(running.engine.text_processor, "parse_special", True)
    for requested, ids in ((None, tokens), (True, tokens), (False, plain)):
        answer = complete(running, parse_special=requested)
        assert answer["choices"][0]["prompt_token_ids"] == ids
        assert "warnings" not in answer
        body = {"prompt": WRITTEN, "parse_special": requested}
        assert post(running, "/tokenize", body).json["tokens"] == ids
    for parses, ids in ((None, tokens), (False, plain)):
        body = {"prompt": WRITTEN, "parse_special": parses, "n_predict": 1}
        evaluated = post(running, "/completion", body).json["tokens_evaluated"]
        assert evaluated == len(ids)


def test_messages_never_make_special_tokens(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.engine.text_processor, "parse_special", True)
    body = {"messages": [{"role": "user", "content": WRITTEN}], "max_tokens": 1}
    whole = post(running, "/v1/chat/completions", {**body, "return_token_ids": True}).json
    monkeypatch.undo()
    same = post(running, "/v1/chat/completions", {**body, "return_token_ids": True}).json
    assert whole["prompt_token_ids"] == same["prompt_token_ids"]


@pytest.mark.parametrize("parses", [False, True])
def test_the_flag_reaches_every_engine(stories: Path, parses: bool) -> None:
    args = serve.Args(engines=(stories, stories), parse_special=parses)
    messages = serve._make_open_messages(args)
    assert [each.parse_special for each in messages] == [parses, parses]
