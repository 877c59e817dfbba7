"""Added tokens and what stands around a text, as the tokenizers library and transformers have
them.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import TokenizerError
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.text.conftest import hf_files, small_hf

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# what touches a token: letters, marks, digits of several kinds, joiners, spaces that Python and
# Unicode count apart
AROUND = "a_1é\u0301²Ⓐ\u200d\u200c-. \t\n\x1c\x85\u3000中"
CONTENTS = ("<x>", "<x>y", "tok", "<|end|>", "[I]")


def spec_with(flags: dict[str, dict[str, bool]], **changes: Any) -> dict[str, Any]:
    base = dict.fromkeys(FLAGS, False)
    added = [
        {"id": 259 + i, "content": text, **base, **flags[text]} for i, text in enumerate(flags)
    ]
    return small_hf(added_tokens=added, **changes)


def flagged(special: bool) -> st.SearchStrategy[dict[str, bool]]:
    return st.fixed_dictionaries({name: st.booleans() for name in FLAGS[:3]}).map(
        lambda flags: {**flags, "normalized": False, "special": special}
    )


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: flagged(True) for name in names})
    ),
    st.lists(st.sampled_from([*CONTENTS, *AROUND, "tokens"]), max_size=8).map("".join),
)
def test_control_tokens_are_found_where_the_library_finds_them(
    flags: dict[str, Any], text: str
) -> None:
    spec = spec_with(flags)
    expected = (
        tokenizers.Tokenizer.from_str(json.dumps(spec)).encode(text, add_special_tokens=False).ids
    )
    assert load_tokenizer(hf_files(spec)).encode(text, special=True, bos=False) == expected


@settings(deadline=None, max_examples=40)
@given(
    flagged(False),
    st.booleans(),
    st.lists(st.sampled_from(["<x>", "<X>", *AROUND]), max_size=8).map("".join),
)
def test_ordinary_added_tokens_are_found_in_any_text(
    flags: dict[str, bool], normalized: bool, text: str
) -> None:
    """They may be normalized first (here: made small letters)."""
    spec = spec_with({"<x>": {**flags, "normalized": normalized}}, normalizer={"type": "Lowercase"})
    expected = (
        tokenizers.Tokenizer.from_str(json.dumps(spec)).encode(text, add_special_tokens=False).ids
    )
    tokenizer = load_tokenizer(hf_files(spec))
    assert tokenizer.encode(text, bos=False) == expected
    assert tokenizer.encode(text, special=True, bos=False) == expected


def test_a_word_character_is_what_the_library_says() -> None:
    """Every character of the first plane but surrogates, and those in circles and squares."""
    spec = spec_with({"<x>": {"single_word": True, "special": True}})
    library, tokenizer = (
        tokenizers.Tokenizer.from_str(json.dumps(spec)),
        load_tokenizer(hf_files(spec)),
    )
    texts = [
        "<x>" + chr(c)
        for c in (*range(1, 0xD800), *range(0xE000, 0x10000), *range(0x1F100, 0x1F200))
    ]
    differ = [
        text
        for text, encoding in zip(texts, library.encode_batch(texts), strict=True)
        if (tokenizer.split_control_tokens(text)[0] == 259) != (encoding.ids[:1] == [259])
    ]
    # letters that one side's version of Unicode does not know yet
    unknown = [text for text in differ if unicodedata.category(text[-1]) == "Cn"]
    assert len(differ) - len(unknown) == 0, differ
    assert len(unknown) < 100


def template(bos: bool, eos: bool) -> dict[str, Any]:
    around = [{"SpecialToken": {"id": text, "type_id": 0}} for text in ("<|bos|>", "<|end|>")]
    single = [*around[:1] * bos, {"Sequence": {"id": "A", "type_id": 0}}, *around[1:] * eos]
    tokens = {"<|bos|>": 260, "<|end|>": 259}
    named = {text: {"id": text, "ids": [id], "tokens": [text]} for text, id in tokens.items()}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single],
        "special_tokens": named,
    }


POSTS = {
    "none": None,
    "byte-level": {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": False,
        "use_regex": True,
    },
    **{
        f"bos {bos}, eos {eos}": template(bos, eos)
        for bos in (False, True)
        for eos in (False, True)
    },
}
CLASSES = (None, "LlamaTokenizerFast", "GPT2Tokenizer")
SAID = ((None, None), (True, None), (False, None), (False, True), (True, True))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("post", POSTS)
def test_a_tokenizer_jsons_post_processor_wins(name: str | None, post: str, tmp_path: Path) -> None:
    """Whatever add_bos_token and add_eos_token beside it say, and whatever class is named."""
    transformers = pytest.importorskip("transformers")
    spec = small_hf(post_processor=POSTS[post])
    spec["added_tokens"] = [
        {"id": 259 + i, "content": text, **dict.fromkeys(FLAGS, False), "special": True}
        for i, text in enumerate(("<|end|>", "<|bos|>"))
    ]
    for bos, eos in SAID:
        config = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "tokenizer_class": name}
        config |= {"add_bos_token": bos, "add_eos_token": eos}
        files = hf_files(spec, **{key: value for key, value in config.items() if value is not None})
        for file, data in files.items():
            (tmp_path / file).write_bytes(data)
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert load_tokenizer(files).encode("hello") == hf_tokenizer("hello")["input_ids"], config


@pytest.mark.parametrize("flag", FLAGS[:4])
@pytest.mark.parametrize(
    "where", ["tokenizer.json", "config", "against tokenizer.json", "against the config"]
)
def test_flags_of_a_token_in_two_files(flag: str, where: str, tmp_path: Path) -> None:
    """transformers takes tokenizer_config.json's."""
    transformers = pytest.importorskip("transformers")
    off = {**dict.fromkeys(FLAGS, False), "special": True}
    on = {**off, flag: True}
    flags = {"<|end|>": off}
    if where != "config":
        flags["<x>"] = off if where == "against tokenizer.json" else on
    entries = {"259": {"content": "<|end|>", **off}, "260": {"content": "<x>", **off}}
    entries["260"] |= on if where in ("config", "against tokenizer.json") else {}
    config = {} if where == "tokenizer.json" else {"added_tokens_decoder": entries}
    files = hf_files(spec_with(flags), eos_token="<|end|>", **config)
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    hf_tokenizer, tokenizer = (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        load_tokenizer(files),
    )
    for text in ("a <x> b", "a<x>b", "a  <x>  b", "<x>", "A <X>"):
        assert (
            tokenizer.encode(text, special=True, bos=False)
            == hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        )


OLDER = {"<x>": 260, "<pad>": 261, "<extra>": 262, "he": 256}


@pytest.mark.parametrize("has_decoder", [False, True])
@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "vocab.json"])
def test_added_tokens_json_adds_what_the_vocabulary_lacks(
    vocabulary: str, has_decoder: bool, tmp_path: Path
) -> None:
    """As transformers: not where tokenizer_config.json has an added_tokens_decoder."""
    transformers = pytest.importorskip("transformers")
    spec = spec_with({"<|end|>": {**dict.fromkeys(FLAGS, False), "special": True}})
    entries = {"259": {"content": "<|end|>", **dict.fromkeys(FLAGS, False), "special": True}}
    config: dict[str, Any] = {"eos_token": "<|end|>", "pad_token": "<pad>"}
    config["extra_special_tokens"] = ["<extra>"]
    if has_decoder:
        config = {"eos_token": "<|end|>", "added_tokens_decoder": entries}
    config["tokenizer_class"] = "GPT2Tokenizer"
    files = hf_files(spec, **config) | {"added_tokens.json": json.dumps(OLDER).encode()}
    if vocabulary == "vocab.json":
        model = spec["model"]
        del files["tokenizer.json"]
        vocab = {**model["vocab"], "<|end|>": 259}
        merges = "\n".join(m if isinstance(m, str) else " ".join(m) for m in model["merges"])
        files |= {"vocab.json": json.dumps(vocab).encode(), "merges.txt": merges.encode()}
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(files)
    assert (260 in tokenizer.encode("<x>", special=True, bos=False)) != has_decoder
    for text in ("a <x> b", "hello<pad>", "<extra>he", "the <|end|>"):
        expected = hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, special=True, bos=False) == expected, text
        ids = [id for id in expected if id not in hf_tokenizer.all_special_ids]
        assert tokenizer.decode(ids) == hf_tokenizer.decode(ids), text
    if not has_decoder:
        assert {"<pad>", "<extra>"} <= tokenizer.special.keys()


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"<x>": 261}, "added_tokens.json gives '<x>' the id 261"),
        ({"<x>": "260"}, "must map token strings to ids"),
        ({"<x>": 260, "<y>": 260}, "'<x>' and '<y>' share the id 260"),
    ],
)
def test_added_tokens_json_that_does_not_fit(added: dict[str, Any], words: str) -> None:
    spec = spec_with({"<|end|>": {**dict.fromkeys(FLAGS, False), "special": True}})
    files = hf_files(spec) | {"added_tokens.json": json.dumps(added).encode()}
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(files)
