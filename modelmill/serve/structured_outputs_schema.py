"""Request fields that constrain the output: JSON, a regular expression, choices, a grammar."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.serve.strict_models import FAIL_FAST, MAX_ITEMS, JsonObject, StrictModel
from modelmill.text.gbnf import gbnf_to_lark_grammar
from modelmill.text.message_validation import check_json_data


class StructuredOutputs(StrictModel):
    """Constraint on the output; one of the fields."""

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FAIL_FAST, Field(max_length=MAX_ITEMS)] | None = None
    grammar: str | None = Field(
        None, description="in Lark's notation, as llguidance reads it, or in GBNF"
    )

    def to_grammar(self) -> Grammar:
        """Return the grammar.

        Raises:
            RequestError: not exactly one field is set.
        """
        check_json_data(self.json_, "structured_outputs: the JSON schema")
        grammars = [
            Grammar(grammar_type, value if isinstance(value, str) else json.dumps(value))
            for grammar_type, value in (
                ("json", self.json_),
                ("regex", self.regex),
                ("choice", self.choice),
            )
            if value is not None
        ]
        if self.grammar is not None:
            grammars.append(gbnf_to_lark_grammar(self.grammar, "structured_outputs: grammar"))
        if len(grammars) != 1:
            raise RequestError("structured_outputs takes one of json, regex, choice and grammar")
        return grammars[0]


class JsonSchema(StrictModel):
    """response_format's json_schema.

    name, strict and description have no effect: a schema is always enforced.
    """

    name: str | None = Field(None, min_length=1, max_length=256)
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Plain text, any JSON object, JSON of a schema, or text of a grammar."""

    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    schema_: JsonObject | None = Field(
        None, alias="schema", description="of the type json_object, as llama.cpp takes it"
    )
    grammar: str | None = Field(None, description="of the type grammar, in GBNF or Lark")

    def to_grammar(self) -> Grammar | None:
        """Return the grammar; None for plain text.

        Raises:
            RequestError: the fields contradict each other.
        """
        if (self.json_schema is not None) != (self.type == "json_schema"):
            needs = "needs" if self.json_schema is None else "takes no"
            raise RequestError(f"response_format of type {self.type} {needs} json_schema")
        if self.schema_ is not None and self.type != "json_object":
            raise RequestError(f"response_format of type {self.type} takes no schema")
        if (self.grammar is not None) != (self.type == "grammar"):
            needs = "needs" if self.grammar is None else "takes no"
            raise RequestError(f"response_format of type {self.type} {needs} grammar")
        if self.type == "text":
            return None
        if self.grammar is not None:
            return gbnf_to_lark_grammar(self.grammar, "response_format: grammar")
        schema = self.schema_
        if self.json_schema is not None:
            schema = self.json_schema.schema_
        elif schema is None:
            schema = {"type": "object"}
        check_json_data(schema, "response_format: the JSON schema")
        return Grammar("json", json.dumps({} if schema is None else schema))
