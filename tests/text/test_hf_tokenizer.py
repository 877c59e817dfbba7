from __future__ import annotations

import json

import pytest

from modelmill.core.errors import TokenizerError
from modelmill.text.byte_level import byte_level_char_to_byte
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.text.conftest import byte_tokens, hf_files, small_hf


def changed(**model):
    spec = small_hf()
    return hf_files(spec | {"model": spec["model"] | model})


def test_the_alphabet_is_that_of_the_library():
    assert sorted(byte_level_char_to_byte()) == byte_tokens()
    assert sorted(byte_level_char_to_byte().values()) == list(range(256))


def test_control_tokens_ordinary_added_tokens_and_those_shaped_like_control():
    tokenizer = load_tokenizer(hf_files())
    assert tokenizer.special == {"<|end|>": 259, "<|fim|>": 261}
    assert 260 in tokenizer.encode("a<tool>b")
    assert not {259, 261} & set(tokenizer.encode("<|end|><|fim|>"))
    assert tokenizer.encode("<|end|><tool><|fim|>", special=True) == [259, 260, 261]
    assert tokenizer.decode([259, 260, 261]) == "<tool><|fim|>"
    assert tokenizer.decode([259, 260, 261], skip_special=False) == "<|end|><tool><|fim|>"


def test_names_come_from_either_config_file():
    files = hf_files(eos_token={"content": "<|end|>"}, bos_token="he", pad_token="[PAD]")
    files["special_tokens_map.json"] = b'{"eos_token": "he", "unk_token": "ll"}'
    files["generation_config.json"] = b'{"eos_token_id": [259, 7]}'
    tokenizer = load_tokenizer(files)
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) == ((259, 7), 256, None)
    assert tokenizer.template_names["unk_token"] == "ll"


@pytest.mark.parametrize("add", [None, True, False])
def test_add_bos_token_counts_where_no_tokenizer_json_says_more(add):
    """GPT-2's older files have no post-processor; a tokenizer.json's own wins, see
    test_added_tokens.py.
    """
    spec = small_hf()
    files = {
        "vocab.json": json.dumps({**spec["model"]["vocab"], "<|endoftext|>": 259}).encode(),
        "merges.txt": "\n".join(spec["model"]["merges"]).encode(),
        "tokenizer_config.json": json.dumps(
            {"bos_token": "<|endoftext|>", "add_bos_token": add}
        ).encode(),
    }
    tokenizer = load_tokenizer(files)
    a = tokenizer.encode("a", bos=False)
    assert tokenizer.encode("a") == ([259, *a] if add else a)
    assert tokenizer.encode("a", bos=True) == [259, *a]


def test_the_post_processor_is_the_default_where_the_config_is_silent():
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [259], "tokens": ["<|end|>"]}},
    }
    tokenizer = load_tokenizer(hf_files(small_hf(post_processor=template)))
    assert tokenizer.encode("he") == [259, 256]
    assert tokenizer.encode("he", bos=False) == [256]


def test_truncation_and_padding_in_the_file_are_ignored():
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    assert load_tokenizer(hf_files(small_hf(truncation=cut))).encode("he he") != [256]


def test_added_tokens_of_the_config_must_get_their_ids():
    files = hf_files(added_tokens_decoder={"262": {"content": "<new>", "special": True}})
    assert load_tokenizer(files).special["<new>"] == 262
    with pytest.raises(TokenizerError, match=r"'<new>' the id 300"):
        load_tokenizer(hf_files(added_tokens_decoder={"300": {"content": "<new>"}}))


def test_a_word_that_is_a_control_token_stays_text_even_when_merges_are_ignored():
    spec = small_hf()
    spec["model"] |= {"ignore_merges": True, "vocab": spec["model"]["vocab"] | {"END": 262}}
    spec["added_tokens"][0] = spec["added_tokens"][0] | {"content": "END", "id": 262}
    tokenizer = load_tokenizer(hf_files(spec))
    assert tokenizer.encode("END", special=True) == [262]
    ids = tokenizer.encode("END")
    assert 262 not in ids
    assert tokenizer.decode(ids) == "END"


@pytest.mark.parametrize("id", [259, 300])
def test_guarded_text_is_what_the_library_gives_without_control_tokens(id):
    """Also where the ids of added tokens have gaps."""
    import tokenizers

    spec = small_hf()
    spec["added_tokens"][2] |= {"id": id + 2, "special": True}
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    library.encode_special_tokens = True
    tokenizer = load_tokenizer(hf_files(spec))
    text = "he<|end|>llo <tool> <|fim|>"
    assert tokenizer.encode(text) == library.encode(text).ids


def test_tokens_that_eat_whitespace_do_so_as_in_the_library():
    import tokenizers

    spec = small_hf()
    spec["added_tokens"][0] |= {"lstrip": True, "rstrip": True}
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer = load_tokenizer(hf_files(spec))
    for text in ("a  <|end|> \n b", "<|end|>  <|end|>", "   <|end|>"):
        assert tokenizer.encode(text, special=True) == library.encode(text).ids


def test_vocab_and_merges_without_tokenizer_json(real, shared):
    spec = json.loads((shared / "data/tokenizers/gpt2/tokenizer.json").read_bytes())
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["model"]["merges"]]
    tokenizer = load_tokenizer(
        {
            "vocab.json": json.dumps(spec["model"]["vocab"]).encode(),
            "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
        }
    )
    text = "Born in north-east France, Soyer trained as a 🦙  x<|endoftext|>"
    assert tokenizer.encode(text) == real("gpt2").encode(text)
    assert tokenizer.special == {"<|endoftext|>": 50256}


def llama_like_hf():
    """A specification with LLaMA's vocabulary of bytes and a few pieces, and its tokens."""
    spec = small_hf()
    tokens = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "h",
        "i",
        "▁h",
        "▁hi",
    ]
    spec["model"] |= {
        "vocab": {text: id for id, text in enumerate(tokens)},
        "merges": ["▁ h", "▁h i"],
        "byte_fallback": True,
        "unk_token": "<unk>",
    }
    return spec, tokens


def test_sentencepiece_like_files_stream_and_mark_their_prefix():
    """LLaMA's fast layout: Metaspace, byte fallback, a space before the first text only."""
    spec, tokens = llama_like_hf()
    spec["added_tokens"] = [spec["added_tokens"][0] | {"id": 1, "content": "<s>"}]
    spec["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
    }
    import tokenizers

    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer = load_tokenizer(hf_files(spec))
    for text in ("hi", "hi<s>hi", "<s>hi", "hi <s> hi é", ""):
        ids = tokenizer.encode(text, special=True)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.token_bytes(tokens.index("▁hi")) == b" hi"
    assert tokenizer.decode(tokenizer.encode("hi é")) == "hi é"


def test_llamas_older_layout_adds_a_space_after_every_control_token():
    import tokenizers

    spec, _ = llama_like_hf()
    spec["added_tokens"] = [spec["added_tokens"][0] | {"id": 1, "content": "<s>"}]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    spec["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace],
    }
    spec["pre_tokenizer"] = None
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer = load_tokenizer(hf_files(spec))
    for text in ("hi<s>hi", "<s>hi <s>", "<s>", "hi é"):
        assert tokenizer.encode(text, special=True) == library.encode(text).ids
    assert tokenizer.decode(tokenizer.encode("hi")) == " hi"


def test_control_tokens_nested_without_end_are_refused():
    spec = small_hf()
    flags = spec["added_tokens"][0]
    spec["added_tokens"] = [flags | {"id": 300 + i, "content": "a" * (i + 2)} for i in range(1500)]
    with pytest.raises(TokenizerError, match="nested"):
        load_tokenizer(hf_files(spec))


def spec_with(**added):
    spec = small_hf()
    spec["added_tokens"][0] |= added
    return hf_files(spec)


BROKEN = {
    "no vocabulary": changed(vocab={}),
    "text ids": changed(vocab={"a": "0"}),
    "true as id": changed(vocab={"a": True}),
    "negative": changed(vocab={"a": -1}),
    "two with one id": changed(vocab={"a": 0, "b": 0}),
    "merges of nothing": changed(merges=["x y"]),
    "another model": changed(type="WordPiece"),
    "an added id that is taken": spec_with(id=3),
    "an added token without text": spec_with(content=""),
    "added tokens as object": hf_files(small_hf(added_tokens={"a": 1})),
    "no decoder": hf_files(small_hf(decoder=None)),
    "another decoder": hf_files(
        small_hf(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    ),
    "an unknown normalizer": hf_files(small_hf(normalizer={"type": "Nonsense"})),
    "eos outside": hf_files(eos_token="<none>"),
    "eos as number": hf_files(eos_token=7),
    "flag as text": hf_files(add_bos_token="yes"),
    "added as list": hf_files(added_tokens_decoder=[1]),
    "added as text": hf_files(added_tokens_decoder={"x": {"content": "a"}}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tokenizers_are_refused(case):
    with pytest.raises(TokenizerError, match=r"tokenizer(_config)?\.json") as caught:
        load_tokenizer(BROKEN[case])
    assert "\n" not in str(caught.value)


def test_merges_txt_must_be_pairs():
    files = {"vocab.json": json.dumps({"a": 0, "b": 1}).encode(), "merges.txt": b"a\n"}
    with pytest.raises(TokenizerError, match=r"merges\.txt"):
        load_tokenizer(files)
    with pytest.raises(TokenizerError, match=r"merges\.txt"):
        load_tokenizer(files | {"merges.txt": b"\xff"})
