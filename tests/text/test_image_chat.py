"""MiniGPT-4's conversations: cut at pictures, pieces tokenized apart, ended by ### in either of its
tokenizations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import RequestError, TemplateError
from modelmill.core.types import Request, SamplingParams, TokenOutput
from modelmill.request_output_state import RequestOutputState
from modelmill.text.image_chat import Blip2ChatFormat, ImageChatFormat, load_image_chat_format
from modelmill.text.tokenizer_loader import Tokenizer, load_tokenizer

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> Tokenizer:
    data = (shared / "data" / "tokenizers" / "llama" / "tokenizer.model").read_bytes()
    return load_tokenizer({"tokenizer.model": data})


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer) -> ImageChatFormat:
    return ImageChatFormat(tokenizer, 32)


def user(*content: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": c} if isinstance(c, str) else c for c in content],
    }


def test_the_published_prompt(chat: ImageChatFormat, tokenizer: Tokenizer, shared: Path) -> None:
    """Against sentencepiece itself: BOS on the first piece alone, a dummy prefix on each."""
    import sentencepiece

    plain = sentencepiece.SentencePieceProcessor(
        model_file=str(shared / "data" / "tokenizers" / "llama" / "tokenizer.model")
    )
    before = (
        "Give the following image: <Img>ImageContent</Img>. You will be able to see the image "
        "once I provide it to you."
        " Please answer my questions.###Human: <Img>"
    )
    after = "</Img> What is this?###Assistant:"
    ids, pictures = chat.encode_with_images([user(PICTURE, "What is this?")])
    head = [1, *plain.encode(before)]
    assert ids == [*head, *[0] * 32, *plain.encode(after)]
    assert [position for position, _ in pictures] == [len(head)]
    assert chat.render([user(PICTURE, "What is this?")]) == before + "<ImageHere>" + after


def test_what_a_user_types_is_text(chat: ImageChatFormat) -> None:
    """Marks and control tokens in a message place no picture and end nothing."""
    ids, pictures = chat.encode_with_images([{"role": "user", "content": "<ImageHere> <s> </s>"}])
    assert not pictures
    assert ids.count(1) == 1
    assert 2 not in ids


def test_a_system_message_stands_first(chat: ImageChatFormat) -> None:
    prompt = chat.render(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert prompt == "Be brief.###Human: Hi###Assistant:"


def test_without_the_question_to_go_on(chat: ImageChatFormat) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Yes. "}]
    assert chat.render(messages, add_generation_prompt=False).endswith(
        "###Human: Hi###Assistant: Yes.###"
    )


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one"),
        ("Hi", "must be a list"),
        ([{"role": "user"}], "content"),
        ([{"role": "assistant", "content": [PICTURE]}], "only user messages may have pictures"),
        (
            [{"role": "system", "content": [PICTURE]}, {"role": "user", "content": "a"}],
            "only user messages may have pictures",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
            "the system message must come first",
        ),
        ([{"role": "tool", "content": "a", "tool_call_id": "x"}], "system, user and assistant"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "image_url must be",
        ),
        ([{"role": "user", "content": [{"type": "video"}]}], "text"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png", "more": 1}]}], "text"),
        ([{"role": "user", "content": [PICTURE] * 33}], "33 pictures"),
        ([None], "object"),
    ],
)
def test_wrong_messages(tokenizer: Tokenizer, messages: Any, says: str) -> None:
    for chat in (ImageChatFormat(tokenizer, 32), Blip2ChatFormat(tokenizer, 32)):
        with pytest.raises(RequestError, match=says):
            chat.encode_with_images(messages)


def test_questions_have_the_pictures_in_front(tokenizer: Tokenizer) -> None:
    """As the paper asks: pictures, BOS, "Question: … Answer:"; nothing is asked about a picture
    without words.
    """
    chat = Blip2ChatFormat(tokenizer, 3)
    messages = [
        {"role": "system", "content": "Be brief."},
        user("What is", PICTURE, "this? "),
        {"role": "assistant", "content": "A dog."},
        user("And this?", PICTURE),
    ]
    prompt_text = "Be brief. Question: What is\nthis? Answer: A dog. Question: And this? Answer:"
    assert chat.render(messages) == "<ImageHere><ImageHere>" + prompt_text
    ids, pictures = chat.encode_with_images(messages)
    assert ids == [0] * 6 + tokenizer.encode(prompt_text, bos=True)
    assert [position for position, _ in pictures] == [0, 3]
    assert chat.render(messages, add_generation_prompt=False).endswith("Question: And this?")
    assert chat.encode_with_images([user(PICTURE)])[0] == [0] * 3 + tokenizer.encode("", bos=True)


def test_no_tools_and_no_options(chat: ImageChatFormat) -> None:
    with pytest.raises(RequestError, match="no tools"):
        chat.encode([user("Hi")], tools=[{"type": "function"}])
    with pytest.raises(RequestError, match="no option"):
        chat.encode([user("Hi")], options={"enable_thinking": True})


OTHER = [
    b"{}",
    b'{"format": "minigpt4"}',
    b'{"format": "minigpt4", "tokens": 0, "prompt": "first"}',
]


@pytest.mark.parametrize("file", OTHER)
def test_a_file_that_says_something_else(tokenizer: Tokenizer, file: bytes) -> None:
    with pytest.raises(TemplateError, match="rebuild"):
        load_image_chat_format({"image_chat.json": file}, tokenizer)


def run_answer(
    tokenizer: Tokenizer, chat: ImageChatFormat, ids: list[int]
) -> tuple[str, list[int], bool]:
    """(text, ids that were taken, whether a stop ended it) of an answer that would be ``ids``."""
    params = SamplingParams(stop=chat.stop_strings).with_defaults({})
    dialogue = RequestOutputState(Request(id="a", prompt=(1,), params=params), None, tokenizer)
    text = ""
    for id in ids:
        delta, stopped = dialogue.process_token_output(TokenOutput("a", 0, id))
        text += delta.text
        if stopped:
            return text, dialogue.output.outputs[0].token_ids, True
    return text, dialogue.output.outputs[0].token_ids, False


HASH, DOUBLE, TRIPLE = 29937, 2277, 835


def test_the_ids_of_the_mark(tokenizer: Tokenizer) -> None:
    """LLaMA's vocabulary, as the models' facts give them."""
    assert [tokenizer.token_bytes(i) for i in (HASH, DOUBLE)] == [b"#", b"##"]
    assert tokenizer.token_bytes(TRIPLE).strip() == b"###"


@pytest.mark.parametrize("mark", [[TRIPLE], [DOUBLE, HASH], [HASH, DOUBLE], [HASH, HASH, HASH]])
def test_ended_by_either_tokenization(
    tokenizer: Tokenizer, chat: ImageChatFormat, mark: list[int]
) -> None:
    words = tokenizer.encode("It is a dog.", bos=False)
    text, ids, stopped = run_answer(tokenizer, chat, [*words, *mark, *words])
    assert stopped
    assert text.strip() == "It is a dog."
    assert ids == [*words, *mark]


def test_a_lone_double_mark_ends_nothing(tokenizer: Tokenizer, chat: ImageChatFormat) -> None:
    words = tokenizer.encode("Use ## and # here", bos=False)
    assert DOUBLE in words or 444 in words
    text, ids, stopped = run_answer(
        tokenizer, chat, [*words, DOUBLE, *tokenizer.encode("end", bos=False)]
    )
    assert not stopped
    assert ids[: len(words)] == words
    assert "##" in text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([HASH, DOUBLE, TRIPLE, 263, 11203, 29889, 13]), max_size=12))
def test_the_text_decides(tokenizer: Tokenizer, chat: ImageChatFormat, ids: list[int]) -> None:
    """Whatever the tokens are, the answer ends where its text first holds ###."""
    text, consumed_ids, stopped = run_answer(tokenizer, chat, ids)
    full_text = tokenizer.decode(ids)
    assert stopped == ("###" in full_text)
    if stopped:
        assert text == full_text.split("###")[0]
        assert "###" in tokenizer.decode(consumed_ids)
        assert "###" not in tokenizer.decode(consumed_ids[:-1])
