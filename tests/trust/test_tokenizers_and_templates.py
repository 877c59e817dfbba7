"""Tokenizers and chat templates come with the checkpoint, so they are as hostile as it is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from modelmill.builder import build_engine
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import ModelmillError, RequestError, TemplateError, TokenizerError
from modelmill.text.chat_format_loader import TemplateLimits, load_chat_format
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.checkpoint.checkpoint_factory import LLAMA_CONFIG, llama_state, write_folder
from tests.text.conftest import hf_files, small_hf
from tests.trust.error_lines import check_one_line
from tests.wait import time_limit


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(a*)*c", "(?:a|a?)+b$"])
def test_a_pattern_that_explodes_is_an_error_and_no_hang(pattern: str) -> None:
    """The library panics, which is no Exception in Python: unnoticed it would end the engine's
    thread.
    """
    text = "a" * 60 + "b"
    for spec in (
        small_hf(pre_tokenizer=split(pattern)),
        small_hf(normalizer=replace({"Regex": pattern}, "x")),
    ):
        started = time.process_time()
        try:
            assert load_tokenizer(hf_files(spec)).encode(text) is not None
        except TokenizerError as error:
            check_one_line(error)
        assert time.process_time() - started < 10


def test_a_chain_of_replacements_is_refused_unread() -> None:
    step = replace({"String": "a"}, "a" * 100)
    for normalizer in (
        step,
        {"type": "Sequence", "normalizers": [replace({"String": "a"}, "a" * 9)] * 12},
    ):
        with pytest.raises(TokenizerError, match="longer") as raised:
            load_tokenizer(hf_files(small_hf(normalizer=normalizer)))
        check_one_line(raised.value)
    good = {
        "type": "Sequence",
        "normalizers": [{"type": "NFC"}, replace({"String": " "}, "\u2581")] * 3,
    }
    assert load_tokenizer(hf_files(small_hf(normalizer=good))).encode("h")


def test_truncation_padding_and_dropout_of_the_file_do_nothing() -> None:
    """Each would change a prompt in silence, dropout at random."""
    spec = small_hf()
    plain = load_tokenizer(hf_files(spec)).encode("hello hello")
    spec["model"]["dropout"] = 0.9
    spec["truncation"] = {
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    spec["padding"] = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "h"}  # fmt: skip
    tokenizer = load_tokenizer(hf_files(spec))
    assert {tuple(tokenizer.encode("hello hello")) for _ in range(20)} == {tuple(plain)}


def folder_with(tmp_path: Path, files: dict[str, bytes], vocabulary: int = 262) -> Path:
    folder = write_folder(
        tmp_path / "hf",
        llama_state(vocabulary=vocabulary),
        {**LLAMA_CONFIG, "vocab_size": vocabulary},
    )
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def build(folder: Path) -> None:
    build_engine.build(
        make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu")),
        folder.parent / "e",
        None,
    )


@pytest.mark.parametrize(
    "files",
    [
        hf_files(small_hf()),
        {"tokenizer.json": b"{"},
        {"vocab.json": json.dumps({"a": 5000}).encode(), "merges.txt": b""},
        {"tokenizer.model": b"\x80\x04\x95\x10"},
        {"evil.tiktoken": b"YQ== 0\nYQ== 99999999999\n"},
    ],
    ids=["more ids than rows", "broken", "an id far outside", "a pickle", "tiktoken"],
)
def test_a_tokenizer_that_does_not_fit_is_refused_at_build(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    folder = folder_with(tmp_path, files, vocabulary=20)
    with pytest.raises(TokenizerError) as raised:
        build(folder)
    check_one_line(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_one_row_less_than_the_tokenizer_needs_is_refused_and_an_equal_number_built(
    tmp_path: Path,
) -> None:
    needed = load_tokenizer(hf_files()).vocab_size
    build(folder_with(tmp_path / "fits", hf_files(), needed))
    (tmp_path / "short").mkdir()
    with pytest.raises(TokenizerError, match=f"embeds only {needed - 1}"):
        build(folder_with(tmp_path / "short", hf_files(), needed - 1))


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ (''|attr('__class__')) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ strftime_now.__code__ }}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
    "{{ '%s'|format(''.__class__) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ messages.append(1) }}",
    "{{ messages.__class__ }}",
    "{% set x = messages.clear %}{{ x() }}",
]
HOGS = [
    "{% for i in range(10**9) %}a{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a'|center(10**10) }}",
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor "
    "%}{{ ns.s }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 9**9**9 }}",
    "{{ range(10**9)|list }}",
    "{{ [1]*10**9 }}",
    "{% for i in range(3*10**7) %}aaaaaaaaaa{% endfor %}",
]


@pytest.mark.parametrize("template", [*ESCAPES, *HOGS], ids=range(len(ESCAPES) + len(HOGS)))
def test_a_template_gets_nothing_and_costs_one_line(template: str) -> None:
    """Nothing of Python, of the file system or of the machine comes out, and the engine answers the
    next request.
    """
    files = hf_files() | {"chat_template.jinja": template.encode()}
    chat = load_chat_format(
        files,
        load_tokenizer(files),
        limits=TemplateLimits(seconds=0.5, memory=256 << 20, output=1 << 20),
    )
    assert chat is not None
    messages = [{"role": "user", "content": "hello"}]
    with time_limit():
        try:
            text = chat.render(messages)
        except TemplateError as error:
            check_one_line(error)
        else:
            assert not any(
                word in text
                for word in ("class ", "root:", "uid=", "module", "function", "code object")
            )
            assert len(text) <= 1 << 20
    assert messages == [{"role": "user", "content": "hello"}]
    chat.close()


def test_a_request_brings_no_template_and_no_special_tokens() -> None:
    files = hf_files() | {
        "chat_template.jinja": b"{% for m in messages %}<|end|>{{ m.content }}{% endfor %}"
    }
    tokenizer = load_tokenizer(files)
    chat = load_chat_format(files, tokenizer)
    assert chat is not None
    messages = [{"role": "user", "content": "he<|end|>"}]
    assert chat.encode(messages).count(259) == 1
    for options in (
        {"messages": []},
        {"add_generation_prompt": False},
        {"tools": None},
        {"documents": []},
    ):
        with pytest.raises(RequestError) as raised:
            chat.encode(messages, options=options)
        check_one_line(raised.value)
    with pytest.raises(RequestError):
        chat.encode([{"role": "user", "content": "x", "chat_template": "{{ 7*7 }}"}])
    assert "49" not in chat.render(messages, options={"chat_template": "{{ 7*7 }}"})
    chat.close()


@pytest.mark.parametrize(
    "messages",
    [None, [], {}, "hi", [None], ["hi"], [[]], [{}], [{"role": "root", "content": "x"}],
    [{"role": "user"}],
     [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image"}]}], [{5: 6}],
     [{"role": ["user"], "content": "x"}], [{"role": "user", "content": "x", "tool_calls": [1]}],
     [{"role": "user", "content": "x", "name": 2**9999}]],
    ids=range(16),
)  # fmt: skip
def test_what_is_no_conversation(messages: Any) -> None:
    files = hf_files() | {"chat_template.jinja": b"{{ messages }}"}
    chat = load_chat_format(files, load_tokenizer(files))
    assert chat is not None
    with pytest.raises(ModelmillError) as raised:
        chat.encode(messages)
    assert isinstance(raised.value, RequestError)
    check_one_line(raised.value)
    chat.close()
