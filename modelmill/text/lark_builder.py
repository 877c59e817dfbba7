"""Builds a Lark grammar for llguidance: marks as control tokens or text, texts up to a mark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_META = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_CONTROL_CHAR_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}
NON_EMPTY_TEXT = "/(?s:.)+/"


def regex_literal(text: str) -> str:
    """Return a regular expression of a text, for use between slashes."""
    return "".join(_CONTROL_CHAR_ESCAPES.get(char) or _META.sub(r"\\\g<0>", char) for char in text)


class LarkBuilder:
    """Collects rules and sub-grammars.

    Marks that are control tokens are matched as tokens: a model writes them so, and no text can
    spell them.
    """

    def __init__(
        self, special: Mapping[str, int], to_grammar: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        """Start a grammar.

        Args:
            special: control tokens of the tokenizer: their text → id.
            to_grammar: converts a JSON schema to a grammar document of llguidance.
        """
        self._special, self._to_grammar = special, to_grammar
        self._lines: list[str] = []
        self._documents: list[dict[str, Any]] = []
        self._schema_names: dict[str, str] = {}
        self._names = 0

    def new_symbol_name(self, prefix: str) -> str:
        """Return a new name."""
        self._names += 1
        return f"{prefix}{self._names}"

    def add_rule(self, expression: str, options: str = "") -> str:
        """Add a rule; returns its name."""
        name = self.new_symbol_name("r")
        self._lines.append(f"{name}{options}: {expression}")
        return name

    def define(self, name: str, expression: str) -> None:
        """Add the rule of a name."""
        self._lines.append(f"{name}: {expression}")

    def add_terminal(self, expression: str) -> str:
        """Add a terminal; returns its name."""
        name = self.new_symbol_name("T")
        self._lines.append(f"{name}: {expression}")
        return name

    def add_json_schema(self, schema: dict[str, Any]) -> str:
        """Add a JSON schema as a document of its own, so that its references stay its own.

        The same schema again, such as the free arguments of many functions, is the same document.
        """
        key = json.dumps(schema)
        if key not in self._schema_names:
            self._schema_names[key] = self.add_subgrammar(self._to_grammar(schema))
        return self._schema_names[key]

    def add_subgrammar(self, document: dict[str, Any]) -> str:
        """Add another grammar; returns a reference to it."""
        name = self.new_symbol_name("g")
        self._documents.append({**document, "name": name})
        return f"@{name}"

    def literal(self, text: str) -> str:
        """Return the expression of a mark; "" for an empty one."""
        parts = []
        for piece in self._split_at_control_tokens(text):
            token = self._special.get(piece)
            parts.append(json.dumps(piece, ensure_ascii=False) if token is None else f"<[{token}]>")
        return " ".join(parts)

    def text_and_end_mark(self, mark: str, *, terms: Sequence[str] = (), empty: bool = True) -> str:
        """Return the expression of a text and the mark that ends it and does not occur in it.

        Args:
            mark: what ends the text.
            terms: regular expressions that the text matches.
            empty: whether an empty text matches them.
        """
        core = mark.strip()
        contains = f"~/(?s:.*){regex_literal(core)}(?s:.*)/"
        pieces = self._split_at_control_tokens(mark)
        if pieces and pieces[0] in self._special:
            body = self.add_terminal(" & ".join((NON_EMPTY_TEXT, *terms, contains)))
            return f"{body}{'?' if empty else ''} {self.literal(mark)}"
        head = next((i for i, piece in enumerate(pieces) if piece in self._special), len(pieces))
        # the text ends at the first mark; blanks after it are the mark's
        ending = "".join(pieces[:head])
        kept = ending.rstrip() or ending
        rest = self.literal(ending[len(kept) :] + "".join(pieces[head:]))
        if terms or kept != kept.lstrip():
            body = self.add_terminal(" & ".join(("/(?s:.*)/", *terms, contains)))
            whole = self.add_terminal(f"{body} {json.dumps(kept, ensure_ascii=False)}")
        else:
            whole = f"/(?s:.*){regex_literal(kept)}/"
        return " ".join(filter(None, (self.add_rule(whole, "[lazy]"), rest)))

    def text_without(self, excluded: tuple[str, ...], start: str = "") -> str:
        """Return the terminal of a text that is not empty and contains none of the marks."""
        marks = "|".join(map(regex_literal, excluded))
        without = f" & ~/(?s:.*)({marks})(?s:.*)/" if excluded else ""
        return self.add_terminal((start or NON_EMPTY_TEXT) + without)

    def is_control_token(self, mark: str) -> bool:
        """Whether a mark is a control token."""
        return mark in self._special

    def build(self, start: str) -> str:
        """Return the grammar in llguidance's format; start: expression of the whole answer."""
        lines = [r"BLANK: /\n?[ ]{1,12}|\n/", "s: BLANK?", f"start: {start}", *self._lines]
        return json.dumps(
            {"grammars": [{"lark_grammar": "\n".join(lines) + "\n"}, *self._documents]}
        )

    def _split_at_control_tokens(self, text: str) -> list[str]:
        """Split a text into control tokens and what is between them."""
        tokens = [token for token in self._special if token and token in text]
        if not tokens:
            return [text] if text else []
        tokens.sort(key=len, reverse=True)
        pattern = "|".join(map(re.escape, tokens))
        return [piece for piece in re.split(f"({pattern})", text) if piece]
