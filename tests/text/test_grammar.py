"""Grammars over vocabularies: what a guide allows is what the grammar takes, byte for byte."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.text import grammar as grammars
from modelmill.text.tokenizer_loader import Tokenizer, load_tokenizer
from tests.hypothesis_examples import examples


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> Tokenizer:
    folder = shared / "data/models/stories260K"
    return load_tokenizer(
        {path.name: path.read_bytes() for path in folder.iterdir() if path.stat().st_size < 1 << 20}
    )


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> grammars.GuideFactory:
    return grammars.GuideFactory(tokenizer, tokenizer.vocab_size + 5, tokenizer.eos_ids)


def walk(
    guides: grammars.GuideFactory,
    tokenizer: Tokenizer,
    grammar: Grammar,
    seed: int,
    most: int = 200,
) -> str | None:
    """Random allowed tokens until the end; None where it takes too long."""
    rng, guide, ids = random.Random(seed), guides.make_guide(grammar, tokenizer.eos_ids), []
    for _ in range(most):
        bits = guide.mask()
        allowed = [id for id in range(tokenizer.vocab_size + 5) if bits[id >> 3] >> (id & 7) & 1]
        assert allowed
        assert max(allowed) < tokenizer.vocab_size
        id = tokenizer.eos_ids[0] if tokenizer.eos_ids[0] in allowed else rng.choice(allowed)
        if id in tokenizer.eos_ids:
            return b"".join(map(tokenizer.token_bytes, ids)).decode()
        ids.append(id)
        guide.accept(id)
    return None


NOTHING = [
    ("json", '{"$ref":"#"}'),
    ("json", '{"anyOf":[{"$ref":"#"}]}'),
    ("json", '{"allOf":[{"$ref":"#"}]}'),
    ("json", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'),
    ("lark", "start: a\na: a"),
    ("json", '{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}'),
    (
        "calls",
        '{"functions":[{"name":"f","arguments":{"type":"object","properties":'
        '{"a":{"$ref":"#"}},"required":["a"]}}],"most":1}',
    ),
]


@pytest.mark.parametrize(("grammar_type", "text"), NOTHING)
def test_what_has_no_text_is_refused(
    guides: grammars.GuideFactory, tokenizer: Tokenizer, grammar_type: str, text: str
) -> None:
    with pytest.raises(RequestError, match="cannot be used"):
        guides.make_guide(Grammar(grammar_type, text), tokenizer.eos_ids)


def test_an_empty_text_is_one(guides: grammars.GuideFactory, tokenizer: Tokenizer) -> None:
    guide = guides.make_guide(Grammar("regex", "a?"), tokenizer.eos_ids)
    bits = guide.mask()
    assert bits[tokenizer.eos_ids[0] >> 3] >> (tokenizer.eos_ids[0] & 7) & 1
    assert not guide.failed


def test_a_grammar_that_takes_too_much_work_is_lost_and_not_ended(
    guides: grammars.GuideFactory, tokenizer: Tokenizer
) -> None:
    """The text up to then does not match the grammar, so the answer must end with an error."""
    pattern = {"type": "string", "pattern": "^(.{1,80} ){1,50}$"}
    schema = {
        "type": "object",
        "properties": {"a": pattern},
        "required": ["a"],
        "additionalProperties": False,
    }
    rng, guide, ids = (
        random.Random(0),
        guides.make_guide(Grammar("json", json.dumps(schema)), tokenizer.eos_ids),
        [],
    )
    while not guide.failed:
        bits = guide.mask()
        allowed = [id for id in range(tokenizer.vocab_size) if bits[id >> 3] >> (id & 7) & 1]
        if guide.failed:
            assert set(allowed) <= set(tokenizer.eos_ids)
            break
        assert tokenizer.eos_ids[0] not in allowed
        assert len(ids) < 2000
        ids.append(rng.choice(allowed))
        guide.accept(ids[-1])
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid"):
        json.loads(b"".join(map(tokenizer.token_bytes, ids)))


@pytest.mark.parametrize("seed", range(6))
def test_random_walks_end_inside_the_grammar(
    guides: grammars.GuideFactory, tokenizer: Tokenizer, seed: int
) -> None:
    pattern = r"(ab|cd)+-[0-9]{2}"
    text = walk(guides, tokenizer, Grammar("regex", pattern), seed)
    assert text is not None
    assert re.fullmatch(pattern, text)
    words = ["yes", "no", "naïve", 'a"b', "日本"]
    assert walk(guides, tokenizer, Grammar("choice", json.dumps(words)), seed) in words
    schema: Any = {"type": "array", "items": {"enum": [1, "x", None]}, "minItems": 2, "maxItems": 3}
    document = walk(guides, tokenizer, Grammar("json", json.dumps(schema)), seed)
    assert document is not None
    assert 2 <= len(json.loads(document)) <= 3


def test_a_copy_goes_its_own_way(guides: grammars.GuideFactory, tokenizer: Tokenizer) -> None:
    guide = guides.make_guide(Grammar("regex", "ab"), tokenizer.eos_ids)
    other = guide.copy()
    before = other.mask().copy()
    guide.accept(
        next(id for id in range(3, tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"a")
    )
    assert (other.mask() == before).all()
    assert (guide.mask() != before).any()


def test_an_answer_without_an_end_is_refused(guides: grammars.GuideFactory) -> None:
    with pytest.raises(RequestError, match="end"):
        guides.make_guide(Grammar("regex", "ab"), ())


@pytest.mark.parametrize(
    ("grammar_type", "text"),
    [
        ("regex", "("), ("regex", "x" * 300000), ("json", "{"), ("json", "[]"),
        ("json", '{"type": "odd"}'),
        ("choice", "[]"), ("choice", "{}"), ("choice", "[1]"), ("lark", "nothing"),
        ("json", "[" * 10**5),
        ("json", '{"x": -1180591620717411303424}'), ("json", '{"maximum": 1e999}'),
        ("json", r'{"title": "\ud800"}'), ("regex", "\ud800"), ("lark", "\ud800"),
        ("choice", r'["\ud800"]'),
    ],
)  # fmt: skip
def test_what_is_no_grammar(grammar_type: str, text: str) -> None:
    with pytest.raises(RequestError) as error:
        grammars.check_grammar(Grammar(grammar_type, text))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_panic_of_the_library_is_a_refusal() -> None:
    """It cuts what it quotes of a schema at byte 100, be there a character's middle or not."""
    schema = {"properties": "object", "$ref": {}, "pattern": ["é" * 200]}
    text = json.dumps(schema, ensure_ascii=False)
    for shift in range(4):
        with pytest.raises(RequestError) as error:
            grammars.check_grammar(Grammar("json", text.replace("$ref", "$ref" + "x" * shift)))
        assert len(str(error.value)) < 400


WORDS = [
    "type",
    "properties",
    "items",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "pattern",
    "minimum",
    "required",
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["object", "#", "\ud800", "é"])
)
KEYS = st.sampled_from(WORDS) | st.text(max_size=4)
ANY = st.recursive(
    LEAVES, lambda of: st.lists(of, max_size=3) | st.dictionaries(KEYS, of, max_size=3)
)


@settings(deadline=None, max_examples=examples(200, 60))
@given(schema=st.dictionaries(KEYS, ANY, max_size=3))
def test_any_object_is_a_schema_or_refused_in_a_line(schema: dict[str, Any]) -> None:
    message = ""
    try:
        grammars.check_grammar(Grammar("json", json.dumps(schema)))
    except RequestError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 400
