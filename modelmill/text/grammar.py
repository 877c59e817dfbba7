"""Structured output: masks of the tokens that a grammar allows next, computed with llguidance.

A guide belongs to one answer. Making one may take milliseconds, so it is made outside the engine's
loop; it is not cached beyond its answer.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from modelmill.core.errors import MissingDependency, RequestError
from modelmill.core.packages import install_command
from modelmill.core.quoting import truncate_to_one_line
from modelmill.core.types import Grammar
from modelmill.text.answer_grammar import build_answer_lark
from modelmill.text.chat_format_registry import FALLBACK_CHAT_FORMAT
from modelmill.text.endless_schemas import find_endless_reference
from modelmill.text.lark_builder import LarkBuilder
from modelmill.text.message_validation import check_json_data
from modelmill.text.rust_errors import is_rust_panic
from modelmill.text.thinking_budget import ThinkingBudget, ThinkingBudgetGuide
from modelmill.text.tokenizer_base import Tokenizer, replace_surrogates

MAX_GRAMMAR_CHARS = 1 << 18
"""Maximum characters of a schema, pattern or grammar."""
MAX_CHOICES = 1024
MAX_GRAMMAR_ERROR_CHARS = 200
"""Maximum characters of the library's message in an error."""
GRAMMAR_TYPE_NAMES = {
    "json": "JSON schema",
    "regex": "regex",
    "choice": "choice",
    "lark": "grammar",
    "calls": "schema of the functions",
    "answer": "schema of the answer",
}
JSON_WHITESPACE_PATTERN = r"\n?[ ]{0,12}"
"""Whitespace between the parts of JSON; bounded, since small models may repeat newlines."""


def check_grammar(grammar: Grammar) -> None:
    """Check that a grammar is valid and not too large.

    Raises:
        RequestError: with a message of one line if it is not.
    """
    lib = _import_llguidance()
    if inner_grammar_type(grammar) == "answer":
        return  # any text: only the thinking has a budget
    with _grammar_errors_as_request_errors(grammar):
        matcher = lib.LLMatcher(
            _byte_vocabulary(),
            _to_llguidance(grammar, lib),
            limits=_parser_limits(lib),
            log_level=0,
        )
    if matcher.is_error() and inner_grammar_type(grammar) == "calls":
        _raise_for_invalid_function(grammar)
    _check_by_first_mask(matcher, grammar)
    _refuse_endless_schema(grammar)


def _check_by_first_mask(matcher: Any, grammar: Grammar) -> None:
    """Compute the first mask, which is slow, and detects a grammar without any text.

    Raises:
        RequestError: the grammar has an error, no text, or takes too much work.
    """
    if matcher.is_error():
        raise RequestError(
            f"the {_type_name(grammar)} cannot be used: "
            f"{truncate_to_one_line(matcher.get_error(), MAX_GRAMMAR_ERROR_CHARS)}"
        )
    matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError(
            f"the {_type_name(grammar)} cannot be used: it has no text, or takes too much work"
        )


def _refuse_endless_schema(grammar: Grammar) -> None:
    """Raise RequestError if a JSON schema, or a part of it, has no finite value."""
    inner = _inner_grammar(grammar)
    if inner is None or inner.grammar_type not in ("json", "calls") or "$ref" not in inner.text:
        return
    value = json.loads(inner.text)
    if inner.grammar_type == "calls":
        schemas = [function["arguments"] for function in value["functions"]]
        if any(find_endless_reference(schema) is not None for schema in schemas):
            _raise_for_invalid_function(grammar)
    elif (ref := find_endless_reference(value)) is not None:
        raise RequestError(
            f"the {_type_name(grammar)} cannot be used: "
            f"{truncate_to_one_line(repr(ref), MAX_GRAMMAR_ERROR_CHARS)} requires itself, so that "
            f"no value of it ends; leave it out of required, or allow null"
        )


def filter_allowed_prefixes(grammar: Grammar, texts: Iterable[str]) -> list[str]:
    """Return the texts with which a text that a valid grammar allows may begin."""
    lib = _import_llguidance()
    matcher = lib.LLMatcher(
        _byte_vocabulary(), _to_llguidance(grammar, lib), limits=_parser_limits(lib)
    )
    return [
        text for text in texts if matcher.validate_tokens(list(text.encode())) == len(text.encode())
    ]


def _raise_for_invalid_function(grammar: Grammar) -> None:
    """Raise RequestError with the name of the first function whose parameters are invalid."""
    inner = _inner_grammar(grammar)
    assert inner is not None, "calls have a grammar"
    for function in json.loads(inner.text)["functions"]:
        try:
            check_grammar(Grammar("json", json.dumps(function["arguments"])))
        except RequestError as error:
            raise RequestError(f"the parameters of {function['name']}: {error}") from None


class GuideFactory:
    """Makes guides for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Iterable[int]) -> None:
        """Prepare a vocabulary.

        Args:
            tokenizer: the engine's tokenizer.
            vocab: vocabulary size of the logits.
            ends: all ids that may end an answer.

        Raises:
            RequestError: if no id ends an answer.
        """
        lib = _import_llguidance()
        self._lib, self._vocab = lib, vocab
        self._tokenizer = tokenizer
        self._special = {
            text: id for text, id in tokenizer.special.items() if text and 0 <= id < vocab
        }
        self._ends = sorted({id for id in (*ends, *tokenizer.eos_ids) if 0 <= id < vocab})
        if not self._ends:
            raise RequestError(
                "structured output needs an end-of-text token, and this engine has none"
            )
        words = _LlguidanceVocab(tokenizer, vocab, self._ends[0])
        self._tokens = lib.LLTokenizer(words, n_vocab=vocab, eos_token=self._ends)

    def make_guide(self, grammar: Grammar, ends: Iterable[int]) -> AnswerGuide:
        """Make the guide of one answer.

        Raises:
            RequestError: if the grammar cannot be used, or no id of ``ends`` ends an answer.
        """
        if grammar.grammar_type == "answer":
            return self._make_whole_answer_guide(grammar, ends)
        return self._make_grammar_guide(grammar, ends)

    def _make_whole_answer_guide(self, grammar: Grammar, ends: Iterable[int]) -> AnswerGuide:
        """Make the guide of an answer with thinking."""
        value = json.loads(grammar.text)
        guide = None if value["answer"] is None else self._make_grammar_guide(grammar, ends)
        if value["budget"] is None:
            assert guide is not None, "an answer has a grammar or a budget"
            return guide
        return ThinkingBudgetGuide(guide, ThinkingBudget(self._tokenizer, self._vocab, value))

    def _make_grammar_guide(self, grammar: Grammar, ends: Iterable[int]) -> GrammarGuide:
        with _grammar_errors_as_request_errors(grammar):
            text = _to_llguidance(grammar, self._lib, self._special)
            matcher = self._lib.LLMatcher(
                self._tokens, text, limits=_parser_limits(self._lib), log_level=0
            )
        _check_by_first_mask(matcher, grammar)
        _refuse_endless_schema(grammar)
        own_ends = set(ends)
        if not own_ends.intersection(self._ends):
            raise RequestError("structured output needs an end of the answer; leave ignore_eos out")
        return GrammarGuide(
            matcher, self._vocab, [id for id in self._ends if id not in own_ends], sorted(own_ends)
        )


class GrammarGuide:
    """The state of a grammar in one answer."""

    def __init__(self, matcher: Any, vocab: int, foreign: list[int], ends: list[int]) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._foreign, self._ends = foreign, ends
        self.failed = False

    def mask(self) -> np.ndarray:
        """Return the mask of the allowed tokens, never all zero.

        Returns:
            [ceil(V / 8)] uint8: bit t % 8 of byte t // 8 is set if token t is allowed.
        """
        matcher = self._matcher
        bits = np.zeros(-(-self._vocab // 8), dtype=np.uint8)
        if not matcher.is_stopped():
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            size = min(len(mask), len(bits))
            bits[:size] = mask[:size]
            _clear_bits(bits, self._foreign)
        if matcher.is_stopped() or matcher.is_error() or not bits.any():
            # the text is complete, or the grammar allows no token: the answer ends
            self.failed = matcher.is_error() or not (matcher.is_stopped() or matcher.is_accepting())
            bits[:] = 0
            _set_bits(bits, self._ends)
        return bits

    def accept(self, token: int) -> None:
        """Advance by the sampled token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def copy(self) -> GrammarGuide:
        """Return a copy in the same state."""
        return GrammarGuide(self._matcher.deep_copy(), self._vocab, self._foreign, self._ends)


AnswerGuide = GrammarGuide | ThinkingBudgetGuide
"""The guide of an answer, whatever is constrained."""


class _LlguidanceVocab:
    """A vocabulary with the interface that llguidance expects."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab: int, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab)]
        self.special_token_ids = sorted(
            {id for id in (*tokenizer.special.values(), end) if id < vocab}
        )
        special = set(self.special_token_ids)
        # a control token without bytes would be the begin of every other one
        for id in special:
            self.tokens[id] = self.tokens[id] or f"<control {id}>".encode()
        self._ids = {data: id for id, data in enumerate(self.tokens) if data and id not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize text inside an answer: the ids' bytes are exactly the text's."""
        data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        # the empty piece: the text does not start the prompt
        ids = self._tokenizer.encode_pieces(["", data.decode("utf-8", "replace")])
        if b"".join(self.tokens[id] for id in ids) == data:
            return ids
        return self._tokenize_greedily(data)

    def _tokenize_greedily(self, data: bytes) -> list[int]:
        """Tokenize with the longest token at each position; bytes without a token are skipped."""
        ids, at = [], 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self._ids), 0)
            if size:
                ids.append(self._ids[data[at : at + size]])
            at += max(size, 1)
        return ids


@contextlib.contextmanager
def _grammar_errors_as_request_errors(grammar: Grammar) -> Iterator[None]:
    """Convert llguidance's exceptions and Rust panics to RequestError."""
    what = _type_name(grammar)
    try:
        yield
    except UnicodeError:
        raise RequestError(f"the {what} has an unpaired surrogate") from None
    except ValueError as error:
        problem = truncate_to_one_line(str(error), MAX_GRAMMAR_ERROR_CHARS)
        integer = problem.removeprefix("Value is not JSON serializable: ")
        if integer.lstrip("-").isdecimal():
            problem = f"the grammar library takes no integer of more than 64 bits: {integer}"
        raise RequestError(f"the {what} cannot be used: {problem}") from None
    except BaseException as error:
        if not is_rust_panic(error):
            raise
        raise RequestError(f"the {what} cannot be used: its parser failed") from None


def _type_name(grammar: Grammar) -> str:
    return GRAMMAR_TYPE_NAMES[inner_grammar_type(grammar)]


def inner_grammar_type(grammar: Grammar) -> str:
    """Return the type of a grammar, or of the answer in it."""
    inner = _inner_grammar(grammar)
    return "answer" if inner is None else inner.grammar_type


def _inner_grammar(grammar: Grammar) -> Grammar | None:
    """A grammar, or that of the answer in it; None if the answer has none."""
    if grammar.grammar_type != "answer":
        return grammar
    answer = json.loads(grammar.text)["answer"]
    return None if answer is None else Grammar(answer["type"], answer["text"])


def _to_llguidance(grammar: Grammar, lib: Any, special: Mapping[str, int] | None = None) -> str:
    """Convert a grammar to llguidance's format; special: control tokens of the tokenizer."""
    if grammar.grammar_type != "answer" and len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"the {_type_name(grammar)} has {len(grammar.text)} characters, "
            f"at most {MAX_GRAMMAR_CHARS} are allowed"
        )
    if grammar.grammar_type == "regex":
        return str(lib.LLMatcher.grammar_from_regex(grammar.text))
    if grammar.grammar_type == "lark":
        return _wrap_lark_grammar(grammar.text)
    value = _parse_grammar_json(grammar)
    if grammar.grammar_type == "answer":
        inner = Grammar(value["answer"]["type"], value["answer"]["text"])
        documents = None
        if inner.grammar_type != "calls":
            (documents,) = json.loads(_to_llguidance(inner, lib))["grammars"]
        return build_answer_lark(
            value, LarkBuilder(special or {}, _make_schema_converter(lib)), documents
        )
    if grammar.grammar_type == "choice":
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(each, str) and each for each in value)
        ):
            raise RequestError("a choice must be a list of non-empty strings")
        if len(value) > MAX_CHOICES:
            raise RequestError(f"a choice must have at most {MAX_CHOICES} strings")
        if any(replace_surrogates(each) != each for each in value):
            raise RequestError("the choice has an unpaired surrogate")
        return _wrap_lark_grammar("start: " + " | ".join(json.dumps(each) for each in value))
    if grammar.grammar_type == "calls":
        answer = {"type": "calls", "text": grammar.text}
        value = {
            "format": FALLBACK_CHAT_FORMAT,
            "marks": None,
            "thinking": "free",
            "answer": answer,
        }
        return build_answer_lark(value, LarkBuilder({}, _make_schema_converter(lib)), None)
    if not isinstance(value, dict):
        raise RequestError("a JSON schema must be an object")
    return _schema_to_llguidance(value, lib)


def _wrap_lark_grammar(text: str) -> str:
    """A Lark grammar in the form that can be part of another one."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _schema_to_llguidance(value: dict[str, Any], lib: Any) -> str:
    # clients must not set llguidance's options
    value = {key: each for key, each in value.items() if key != "x-guidance"}
    return str(
        lib.LLMatcher.grammar_from_json_schema(
            value, overrides={"whitespace_pattern": JSON_WHITESPACE_PATTERN}
        )
    )


def _make_schema_converter(lib: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the conversion of a schema to a document of llguidance."""

    def convert(schema: dict[str, Any]) -> dict[str, Any]:
        (document,) = json.loads(_schema_to_llguidance(schema, lib))["grammars"]
        assert isinstance(document, dict)
        return document

    return convert


def _parse_grammar_json(grammar: Grammar) -> Any:
    try:
        value = json.loads(grammar.text)
    except (ValueError, RecursionError):
        raise RequestError(f"the {_type_name(grammar)} is not JSON") from None
    check_json_data(value, f"the {_type_name(grammar)}")
    return value


def _parser_limits(lib: Any) -> Any:
    """Return limits below the library's defaults: about 20 ms for the start, 5 ms per token."""
    return lib.LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


@functools.cache
def _byte_vocabulary() -> Any:
    """The vocabulary of single bytes, in which a grammar is checked without an engine's own."""
    return _import_llguidance().LLTokenizer("byte")


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise MissingDependency(
            f"structured output needs llguidance; install it with: {install_command('serve')}"
        ) from None
    return llguidance


def _set_bits(bits: np.ndarray, ids: Iterable[int]) -> None:
    for id in ids:
        bits[id >> 3] |= 1 << (id & 7)


def _clear_bits(bits: np.ndarray, ids: Iterable[int]) -> None:
    for id in ids:
        bits[id >> 3] &= 255 - (1 << (id & 7))
