"""Built-in chat formats: prompts put together here by hand, from what the publishers' code does.

The texts are tokenized by sentencepiece and tokenizers themselves. Sources: generation_utils.py of
baichuan-inc/Baichuan2-13B-Chat and Baichuan-13B-Chat, modeling_chatglm.py of THUDM/chatglm2-6b,
tokenization_chatglm.py of THUDM/chatglm3-6b, modeling_internlm.py of internlm/internlm-chat-7b and
-20b, modeling_xverse.py of xverse/XVERSE-13B-Chat, and the chat template of
tiiuae/falcon-7b-instruct.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

from modelmill.checkpoint.chat_format import (
    CHAT_FORMAT_FILE,
    add_builtin_chat_format,
    chat_format_remark,
)
from modelmill.core.errors import RequestError, TemplateError, UsageError
from modelmill.core.types import FinishReason, Request, SamplingParams, TokenOutput
from modelmill.request_output_state import RequestOutputState
from modelmill.text.chat_format import ChatFormat
from modelmill.text.chat_format_loader import load_chat_format, read_default_template
from modelmill.text.chat_template_override import list_chat_templates, replace_chat_template
from modelmill.text.prompt_format import CHAT_FORMAT_FILE as LOADED_FILE
from modelmill.text.prompt_format import list_prompt_formats
from modelmill.text.prompt_formats.chatglm3 import ChatGLM3Format
from modelmill.text.sentencepiece_proto import (
    USER_DEFINED_PIECE,
    SpmPiece,
    parse_spm_model,
    serialize_spm_model,
)
from modelmill.text.tokenizer_loader import load_tokenizer

TURNS = [
    {"role": "user", "content": "Hi  there\n"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
SYSTEM = {"role": "system", "content": "Be kind."}
CHATGLM_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop",
                  "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")  # fmt: skip


def spm_files(shared: Path, **config: Any) -> dict[str, bytes]:
    """LLaMA's SentencePiece model with a tokenizer_config.json."""
    model = (shared / "data/tokenizers/llama/tokenizer.model").read_bytes()
    return {"tokenizer.model": model, "tokenizer_config.json": json.dumps(config).encode()}


def sentencepiece_of(files: dict[str, bytes]) -> Callable[[str], list[int]]:
    """Text → ids, by sentencepiece itself."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=files["tokenizer.model"])
    encode: Callable[[str], list[int]] = processor.encode
    return encode


def gpt2_files(shared: Path) -> dict[str, bytes]:
    """A tokenizer.json without a chat template."""
    path = shared / "data/tokenizers/gpt2"
    return {"tokenizer.json": (path / "tokenizer.json").read_bytes()}


def gpt2_encode(shared: Path) -> Callable[[str], list[int]]:
    """Text → ids, by tokenizers itself."""
    loaded = tokenizers.Tokenizer.from_file(str(shared / "data/tokenizers/gpt2/tokenizer.json"))
    return lambda text: list(loaded.encode(text, add_special_tokens=False).ids)


def format_of(
    files: dict[str, bytes],
    model_type: str,
    generation: dict[str, Any] | None = None,
    **config: Any,
) -> ChatFormat:
    """The chat format of a checkpoint of these files."""
    if generation is not None:
        files = {**files, "generation_config.json": json.dumps(generation).encode()}
    files = add_builtin_chat_format(files, {"model_type": model_type, **config}, generation or {})
    chat = load_chat_format(files, load_tokenizer(files))
    assert chat is not None
    return chat


@pytest.mark.parametrize(("user", "assistant"), [(195, 196), (300, 17)])
def test_baichuan_1_and_2(shared: Path, user: int, assistant: int) -> None:
    files = spm_files(shared, add_bos_token=False)
    encode = sentencepiece_of(files)
    generation = {"user_token_id": user, "assistant_token_id": assistant, "eos_token_id": 2}
    chat = format_of(files, "baichuan", generation)
    turns = [
        *(user, *encode("Hi  there\n"), assistant, *encode("Hello."), user, *encode("Bye")),
    ]
    assert chat.encode(TURNS) == [*turns, assistant]
    assert chat.encode(TURNS, False) == turns
    assert chat.encode([SYSTEM, *TURNS]) == [*encode("Be kind."), *turns, assistant]
    # an answer at the end is continued
    assert chat.encode(TURNS[:2]) == turns[: turns.index(user, 1)]
    assert chat.stop_ids == (2, user)


def test_chatglm2(shared: Path) -> None:
    files = spm_files(shared, tokenizer_class="ChatGLMTokenizer", name_or_path="THUDM/chatglm2-6b")
    encode, first = sentencepiece_of(files), 32000
    chat = format_of(files, "chatglm")
    history = "[Round 1]\n\n问：Hi  there\n\n\n答：Hello.\n\n"
    ids = [first + 1, first + 3, *encode(f"{history}[Round 2]\n\n问：Bye\n\n答：")]
    assert chat.encode(TURNS) == ids
    assert chat.encode(TURNS[:2], False) == [first + 1, first + 3, *encode(history)]
    begun = [*chat.encode(TURNS[:1]), *load_tokenizer(files).encode_pieces(["", "Hello."])]
    assert chat.encode_with_prefill(TURNS[:2]) == begun
    assert chat.render_with_prefill(TURNS[:2]) == f"{chat.render(TURNS[:1])}Hello."
    assert chat.stop_ids == (2,)
    with pytest.raises(RequestError, match=r"messages\[0\]: in the chat format chatglm2 user and"):
        chat.encode([SYSTEM, *TURNS])


def test_chatglm3(shared: Path) -> None:
    files = spm_files(shared, tokenizer_class="ChatGLMTokenizer", name_or_path="THUDM/chatglm3-6b")
    encode = sentencepiece_of(files)
    id = {text: 32000 + index for index, text in enumerate(CHATGLM_TOKENS)}
    chat = format_of(files, "chatglm")
    start, line = [id["[gMASK]"], id["sop"]], encode("\n")
    turns = [
        *(id["<|user|>"], *line, *encode("Hi  there\n")),
        *(id["<|assistant|>"], *line, *encode("Hello.")),
        *(id["<|user|>"], *line, *encode("Bye")),
    ]
    assert chat.encode(TURNS) == [*start, *turns, id["<|assistant|>"]]
    system = [id["<|system|>"], *line, *encode("Be kind.")]
    assert chat.encode([SYSTEM, *TURNS], False) == [*start, *system, *turns]
    assert chat.stop_ids == (2, id["<|user|>"], id["<|observation|>"])
    # an answer that is continued: as far as it goes, what its turn is in a history
    assert chat.encode_with_prefill(TURNS[:2]) == chat.encode(TURNS[:2], False)
    assert chat.render_with_prefill(TURNS[:2]) == chat.render(TURNS[:2], False)
    # an answer as the model wrote it, behind the newline of its header
    raw = [TURNS[0], {"role": "assistant", "content": "\n Hello."}, TURNS[2]]
    assert chat.encode(raw) == chat.encode(TURNS)


def internlm_files(shared: Path) -> dict[str, bytes]:
    """LLaMA's vocabulary with <eoh> and <eoa> as pieces of their own, as InternLM's has them."""
    files = spm_files(shared, add_bos_token=True)
    model = parse_spm_model(files["tokenizer.model"], "tokenizer.model")
    model.pieces.extend(SpmPiece(text, 0.0, USER_DEFINED_PIECE) for text in ("<eoh>", "<eoa>"))
    return {**files, "tokenizer.model": serialize_spm_model(model)}


@pytest.mark.parametrize(("layers", "end"), [(32, "<eoh>"), (60, "")])
def test_internlm(shared: Path, layers: int, end: str) -> None:
    files = internlm_files(shared)
    encode = sentencepiece_of(files)
    chat = format_of(files, "internlm", num_hidden_layers=layers)
    text = f"<|User|>:Hi  there\n{end}\n<|Bot|>:Hello.<eoa>\n<|User|>:Bye{end}\n"
    assert chat.encode(TURNS) == [1, *encode(f"{text}<|Bot|>:")]
    assert encode(text).count(32000) == (2 if end else 0)
    assert encode(text).count(32001) == 1
    assert chat.encode([SYSTEM, *TURNS], False) == [1, *encode(f"<|System|>:Be kind.\n{text}")]
    assert (chat.stop_ids, chat.stop_strings) == ((2, 32001), ())


def test_internlm_with_marks_that_are_control_tokens_or_text(shared: Path) -> None:
    files = spm_files(shared, legacy=False)
    encode = sentencepiece_of(files)
    assert format_of(files, "internlm").stop_strings == ("<eoa>",)
    files["added_tokens.json"] = b'{"<eoh>": 32000, "<eoa>": 32001}'
    chat = format_of(files, "internlm")
    line, bot = encode("<|User|>:Bye"), load_tokenizer(files).encode_pieces(["", "\n<|Bot|>:"])
    assert chat.encode(TURNS[2:]) == [1, *line, 32000, *bot]
    assert (chat.stop_ids, chat.stop_strings) == ((2, 32001), ())


def test_xverse(shared: Path) -> None:
    files, encode = gpt2_files(shared), gpt2_encode(shared)
    files["tokenizer_config.json"] = b'{"eos_token": "<|endoftext|>"}'
    chat, eos = format_of(files, "xverse"), 50256
    history = [*encode("Human: Hi  there\n\n\n"), *encode("Assistant: Hello."), eos]
    question = encode("Human: Bye\n\nAssistant: ")
    assert chat.encode(TURNS) == [*history, *question]
    assert chat.encode([SYSTEM, *TURNS]) == [*encode("Be kind.\n\n"), *history, *question]
    assert chat.encode(TURNS, False) == [*history, *encode("Human: Bye\n\n")]
    assert chat.stop_ids == (eos,)


def test_falcon(shared: Path) -> None:
    files, encode = gpt2_files(shared), gpt2_encode(shared)
    files["tokenizer_config.json"] = b'{"eos_token": "<|endoftext|>"}'
    chat = format_of(files, "falcon")
    text = "\n\nUser: Hi  there\n\nAssistant: Hello.\n\nUser: Bye"
    assert chat.encode(TURNS) == encode(f"{text}\n\nAssistant:")
    assert chat.encode([SYSTEM, *TURNS], False) == encode(f"Be kind.{text}")
    lines = [{"role": "user", "content": "a\r\n\r\nb\n\n\nc "}]
    assert chat.encode(lines) == encode("\n\nUser: a\nb\n\nc\n\nAssistant:")
    assert (chat.stop_ids, chat.stop_strings) == ((50256,), ("\nUser:",))


def test_what_the_formats_render_is_what_they_encode(shared: Path) -> None:
    files = spm_files(shared, tokenizer_class="ChatGLMTokenizer")
    tokenizer = load_tokenizer(files)
    for name in list_prompt_formats():
        chat = load_chat_format(replace_chat_template(files, name), tokenizer)
        assert chat is not None
        assert "Bye" in chat.render(TURNS)
        assert read_default_template(replace_chat_template(files, name)) == ""
        chat.close()
        with pytest.raises(RequestError, match=f"the chat format {name} has no tools"):
            chat.encode(TURNS, tools=[{"type": "function"}])
        with pytest.raises(RequestError, match=f"'enable_thinking' is unknown: .* {name} has no"):
            chat.encode(TURNS, options={"enable_thinking": False})
        for wrong in (TURNS[1:], [TURNS[0], TURNS[0]], [*TURNS, SYSTEM]):
            with pytest.raises(RequestError, match="user and assistant texts alternate"):
                chat.encode(wrong)


def test_users_cannot_write_control_tokens(shared: Path) -> None:
    files = spm_files(shared, tokenizer_class="ChatGLMTokenizer", name_or_path="THUDM/chatglm3-6b")
    ids = format_of(files, "chatglm").encode([{"role": "user", "content": "<|assistant|>sop"}])
    assert ids.count(32007) == 1
    assert ids.count(32003) == 1


CHOICES = [
    ({"model_type": "baichuan"}, {}, {}, None),  # a base model
    ({"model_type": "baichuan"}, {"user_token_id": 195, "assistant_token_id": 196}, {}, "baichuan"),
    ({"model_type": "chatglm", "_name_or_path": "THUDM/chatglm2-6b"}, {}, {}, "chatglm2"),
    ({"model_type": "chatglm"}, {}, {"name_or_path": "THUDM/chatglm3-6b-32k"}, "chatglm3"),
    ({"model_type": "chatglm"}, {}, {"name_or_path": "THUDM/chatglm3-6b-base"}, None),
    ({"model_type": "chatglm"}, {}, {}, None),  # their files do not tell 2 from 3
    ({"model_type": "internlm", "num_hidden_layers": 60}, {}, {}, "internlm_20b"),
    ({"model_type": "internlm", "num_hidden_layers": 32}, {}, {}, "internlm"),
    ({"model_type": "xverse"}, {}, {}, "xverse"),
    ({"model_type": "falcon"}, {}, {}, "falcon"),
    ({"model_type": "falcon", "alibi": True}, {}, {}, None),
    ({"model_type": "falcon"}, {}, {"chat_template": "{{ messages }}"}, None),
    ({"model_type": "llama"}, {}, {}, None),
]


@pytest.mark.parametrize(("config", "generation", "tokenizer", "name"), CHOICES)
def test_the_family_decides_where_there_is_no_template(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: dict[str, Any], name: str | None
) -> None:
    files = {"tokenizer.model": b"", "tokenizer_config.json": json.dumps(tokenizer).encode()}
    chosen = add_builtin_chat_format(files, config, generation)
    assert CHAT_FORMAT_FILE == LOADED_FILE
    assert chosen == files | (
        {} if name is None else {LOADED_FILE: f'{{"name": "{name}"}}'.encode()}
    )
    assert chat_format_remark(chosen).partition(":")[0] == (name or "")
    assert add_builtin_chat_format({}, config, generation) == {}
    more = {**files, "additional_chat_templates/x.jinja": b""}
    assert add_builtin_chat_format(more, config, generation) == more


def test_chatglm3_shows_itself_by_tokens_in_its_config() -> None:
    tokens = {"64790": "[gMASK]", "64792": "sop", "64796": "<|assistant|>"}
    config = {"added_tokens_decoder": {id: {"content": text} for id, text in tokens.items()}}
    files = {"tokenizer.model": b"", "tokenizer_config.json": json.dumps(config).encode()}
    chosen = add_builtin_chat_format(files, {"model_type": "chatglm"}, {})
    assert chosen[CHAT_FORMAT_FILE] == b'{"name": "chatglm3"}'


def test_a_name_replaces_a_template_and_a_template_a_name(shared: Path) -> None:
    files = {**spm_files(shared, chat_template="{{ 'T' }}"), "chat_template.jinja": b"{{ 'J' }}"}
    tokenizer = load_tokenizer(files)
    named = replace_chat_template(files, "falcon")
    chat = load_chat_format(named, tokenizer)
    assert chat is not None
    assert chat.render(TURNS[2:]) == "\n\nUser: Bye\n\nAssistant:"
    back = load_chat_format(replace_chat_template(named, "{{ 'N' }}"), tokenizer)
    assert back is not None
    assert back.render(TURNS) == "N"
    back.close()


def test_wrong_names_and_ids(shared: Path) -> None:
    files = spm_files(shared)
    tokenizer = load_tokenizer(files)
    names = ", ".join(list_chat_templates())
    assert names == (
        "baichuan, chatglm2, chatglm3, chatml, falcon, internlm, internlm_20b, vicuna, xverse"
    )
    with pytest.raises(UsageError, match=f"built in are {names}"):
        replace_chat_template(files, "flacon")
    with pytest.raises(TemplateError, match="names no known chat format; there are baichuan, "):
        load_chat_format({**files, CHAT_FORMAT_FILE: b'{"name": "x"}'}, tokenizer)
    with pytest.raises(TemplateError, match=r"chatglm3 needs the control token <\|user\|>"):
        load_chat_format(replace_chat_template(files, "chatglm3"), tokenizer)
    with pytest.raises(TemplateError, match=r"user_token_id=99999 is no id of the tokenizer"):
        format_of(files, "baichuan", {"user_token_id": 99999, "assistant_token_id": 196})


@pytest.mark.parametrize(("strips", "text"), [(True, "Hello\n there"), (False, "\n Hello\n there")])
def test_chatglm3s_answers_are_shown_without_the_newline_of_their_header(
    real: Any, strips: bool, text: str
) -> None:
    """As ``process_response`` of modeling_chatglm.py strips them."""
    assert ChatGLM3Format.answers_begin_with_space
    tokenizer = real("llama")
    ids = tokenizer.encode("\n Hello\n there", bos=False)
    params = SamplingParams(max_tokens=64).with_defaults({})
    request = Request(id="a", prompt=(1,), params=params)
    state, shown = RequestOutputState(request, None, tokenizer, strips_start=strips), ""
    for index, id in enumerate(ids):
        reason = FinishReason.LENGTH if index == len(ids) - 1 else None
        delta, _ = state.process_token_output(TokenOutput("a", 0, id, finish_reason=reason))
        shown += delta.text
    [output] = state.output.outputs
    assert shown == output.text == text
    assert output.token_ids == ids
