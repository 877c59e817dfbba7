"""JSON schemas that the grammar library cannot express, made weaker, with the reasons.

pydantic and other libraries write ``oneOf``, ``uniqueItems``, ``contains``, names of properties as
``propertyNames``, formats of strings beyond those that the library knows, patterns that look
around, and bounds beyond 64 bits. A schema is coerced only if it cannot be used as it is; the
answer then matches the weaker schema, and the response's ``warnings`` say what was not enforced,
and where. A usable ``oneOf`` is kept, whatever else in the schema cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote, truncate_to_one_line
from modelmill.core.types import Grammar
from modelmill.serve.disjoint_schemas import are_alternatives_disjoint
from modelmill.text.grammar import check_grammar
from modelmill.text.parameter_types import resolve_pointer

ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats of strings that the grammar library enforces."""
_HARMLESS_PROPERTY_NAMES_KEYS = frozenset(("type", "title", "description"))
"""What propertyNames may say beside the names themselves."""
_NUMBER_TYPES = ("integer", "number")
_UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9]")
UNENFORCED_KEYWORDS = ("uniqueItems", "contains", "minContains", "maxContains")
_NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_COUNT_KEYWORDS = ("maxLength", "maxItems", "maxProperties")
BOUND_LIMIT = 2**63
"""The grammar library keeps bounds of integers in 64 bits, and writes others up to this one."""
BOUND_ROUNDING_MARGIN = 512
"""Integers that are so little below ``BOUND_LIMIT`` are that number as a double."""
COUNT_LIMIT = 2**32
"""No answer has as many characters or elements."""
_NAMED_SCHEMA_KEYS = ("properties", "patternProperties", "$defs", "definitions")
_LITERAL_VALUE_KEYS = ("enum", "const")
_EXAMPLE_VALUE_KEYS = ("default", "examples")
"""Nothing is enforced of them; their values may be what the grammar library does not read."""
MAX_ONE_OF_CHECKS = 16
"""How many ``oneOf`` are tried one by one."""
MAX_LISTED_REASONS = 32
"""Of one schema."""
MAX_PLACE_CHARS = 120


def relax_grammar(
    grammar: Grammar, kept_places: Collection[str] = ()
) -> tuple[Grammar, list[str], list[str]]:
    """Weaken the schemas of a grammar.

    Args:
        grammar: to weaken.
        kept_places: where ``oneOf`` is kept.

    Returns:
        The grammar, the same object if it needs no change, what it does not enforce, and the
        places of each ``oneOf`` that ``anyOf`` would weaken.
    """
    try:
        return _relax_schemas(grammar, kept_places)
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        return grammar, [], []


def _relax_schemas(
    grammar: Grammar, kept_places: Collection[str]
) -> tuple[Grammar, list[str], list[str]]:
    if grammar.grammar_type == "json":
        original = json.loads(grammar.text)
        relaxer = SchemaRelaxer(original, kept_places)
        schema = relaxer.relax_root()
        same = schema == original
        relaxed = grammar if same else Grammar("json", json.dumps(schema))
        return relaxed, relaxer.relaxation_reasons(), relaxer.one_of_places
    if grammar.grammar_type != "calls":
        return grammar, [], []
    value = json.loads(grammar.text)
    functions, all_reasons, all_places = [], list[str](), list[str]()
    for function in value["functions"]:
        relaxer = SchemaRelaxer(function["arguments"], kept_places, f"{function['name']}: ")
        functions.append({**function, "arguments": relaxer.relax_root()})
        all_reasons += relaxer.relaxation_reasons()
        all_places += relaxer.one_of_places
    if functions == value["functions"]:
        return grammar, [], all_places
    relaxed = Grammar("calls", json.dumps({**value, "functions": functions}))
    return relaxed, all_reasons, all_places


def relax_grammar_if_needed(grammar: Grammar, field: str) -> tuple[Grammar, list[str]]:
    """Return a grammar that compiles: the same, or a weaker one and what it does not enforce.

    Args:
        grammar: to check.
        field: of the request, in front of errors and reasons.

    Raises:
        RequestError: there is none; it says what is wrong with the grammar itself.
    """
    try:
        check_grammar(grammar)
    except RequestError as error:
        first_error = f"{field}: {str(error).removeprefix(f'{field}: ')}"
    else:
        return grammar, []
    weakest, reasons, places = relax_grammar(grammar)
    if weakest is grammar or not _compiles(weakest):
        raise RequestError(first_error)
    relaxed, reasons = _keep_enforceable_one_ofs(grammar, weakest, reasons, places)
    return relaxed, [f"{field}: {reason}" for reason in reasons]


def _keep_enforceable_one_ofs(
    grammar: Grammar, weakest: Grammar, reasons: list[str], places: Sequence[str]
) -> tuple[Grammar, list[str]]:
    """Keep each ``oneOf`` that can be used, of a grammar that was weakened as far as possible.

    Args:
        grammar: as sent.
        weakest: without any ``oneOf``.
        reasons: what that does not enforce.
        places: of all ``oneOf``.
    """
    best = weakest, reasons
    kept: list[str] = []
    # mostly all of them can, and something else is why the grammar could not be used
    groups = [list(places)] if len(places) > 1 else []
    groups += [[place] for place in places[:MAX_ONE_OF_CHECKS]]
    for group in groups:
        tried = [*kept, *group]
        candidate, candidate_reasons, _ = relax_grammar(grammar, tried)
        if _compiles(candidate):
            kept, best = tried, (candidate, candidate_reasons)
            if len(kept) == len(places):
                break
    return best


def _compiles(grammar: Grammar) -> bool:
    try:
        check_grammar(grammar)
    except RequestError:
        return False
    return True


def _cap_max_items_by_enum_size(schema: dict[str, Any]) -> None:
    """Of unique items there are at most as many as values: without it, a list might not end."""
    items = schema.get("items")
    values = items.get("enum") if isinstance(items, Mapping) else None
    if isinstance(values, list):
        most = schema.get("maxItems")
        schema["maxItems"] = min(most, len(values)) if type(most) is int else len(values)


class SchemaRelaxer:
    """Weakens one schema.

    Attributes:
        one_of_places: places of all ``oneOf``, kept or not, that ``anyOf`` would weaken.
    """

    def __init__(self, root: Any, kept_places: Collection[str] = (), prefix: str = "") -> None:
        """Start.

        Args:
            root: the schema.
            kept_places: where ``oneOf`` is kept.
            prefix: of all places.
        """
        self._root, self._kept, self._prefix = root, frozenset(kept_places), prefix
        self._reasons: dict[str, None] = {}
        self.one_of_places: list[str] = []

    def relax_root(self) -> Any:
        """Weaken the whole schema."""
        return self._relax(self._root, "#")

    def relaxation_reasons(self) -> list[str]:
        """What is not enforced, with its place, in order."""
        reasons = [f"{self._prefix}{reason}" for reason in self._reasons]
        more = len(reasons) - MAX_LISTED_REASONS
        if more > 0:
            reasons[MAX_LISTED_REASONS:] = [
                f"{self._prefix}{more} further keywords are not enforced"
            ]
        return reasons

    def _relax(self, schema: Any, place: str) -> Any:
        """Weaken a part of the schema; place: as a JSON pointer."""
        if isinstance(schema, list):
            return [self._relax(each, f"{place}/{index}") for index, each in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _EXAMPLE_VALUE_KEYS or self._record_if_unenforceable(
                key, value, schema, place
            ):
                continue
            inner = f"{place}/{_escape_pointer(key)}"
            if key in _NAMED_SCHEMA_KEYS and isinstance(value, Mapping):
                out[key] = {
                    name: self._relax(each, f"{inner}/{_escape_pointer(name)}")
                    for name, each in value.items()
                }
            else:
                out[key] = value if key in _LITERAL_VALUE_KEYS else self._relax(value, inner)
        if schema.get("uniqueItems") is True:
            _cap_max_items_by_enum_size(out)
        if "propertyNames" in out:
            self._relax_property_names(out, place)
        if "oneOf" in out:
            self._relax_one_of(out, place)
        return out

    def _record_if_unenforceable(
        self, key: str, value: Any, schema: Mapping[str, Any], place: str
    ) -> bool:
        """Whether a key is not enforced; records the reason."""
        if key in _MAX_COUNT_KEYWORDS and type(value) is int and value >= COUNT_LIMIT:
            return True
        if key in _NUMBER_BOUNDS and _is_bound_too_large(value, schema.get("type")):
            self._record_reason(place, f"{key} is not enforced: its magnitude is 2^63 or more")
            return True
        if key in UNENFORCED_KEYWORDS:
            if value is not False:
                self._record_reason(place, f"{key} is not enforced")
            return True
        if key == "format" and isinstance(value, str) and value not in ENFORCED_FORMATS:
            if schema.get("type") in _NUMBER_TYPES:
                return False
            self._record_reason(place, f"format {quote(value, 40)} is not enforced")
            return True
        if key == "pattern" and isinstance(value, str) and _UNSUPPORTED_PATTERN.search(value):
            self._record_reason(
                place, f"pattern {quote(value, 60)} is not enforced: it looks around or back"
            )
            return True
        return False

    def _relax_property_names(self, out: dict[str, Any], place: str) -> None:
        """propertyNames, of an object that lists no properties: the keys of pydantic's dict."""
        original = out.pop("propertyNames")
        names = self._resolve_ref(original)
        value = out.get("additionalProperties", {})
        listed = names.get("enum", [names["const"]] if "const" in names else None)
        pattern = names.get("pattern")
        open_object = not (out.keys() & {"properties", "patternProperties"})
        if open_object and isinstance(listed, list) and all(isinstance(k, str) for k in listed):
            out |= {"properties": dict.fromkeys(listed, value), "additionalProperties": False}
        elif open_object and isinstance(pattern, str) and not _UNSUPPORTED_PATTERN.search(pattern):
            out |= {"patternProperties": {pattern: value}, "additionalProperties": False}
        elif (
            names.keys() - _HARMLESS_PROPERTY_NAMES_KEYS
            or names.get("type", "string") != "string"
            or original is False
        ):
            self._record_reason(place, "propertyNames is not enforced")
            return
        ignored = (
            names.keys()
            - _HARMLESS_PROPERTY_NAMES_KEYS
            - ({"pattern"} if listed is None else {"enum", "const"})
        )
        if ignored:
            self._record_reason(place, f"{min(ignored)} of propertyNames is not enforced")

    def _relax_one_of(self, out: dict[str, Any], place: str) -> None:
        is_same = isinstance(out["oneOf"], list) and are_alternatives_disjoint(
            out["oneOf"], self._resolve_ref
        )
        if not is_same:
            name = f"{self._prefix}{place}"
            self.one_of_places.append(name)
            if name in self._kept:
                return
            self._record_reason(
                place, "oneOf is enforced as anyOf: an answer may fit several alternatives"
            )
        alternatives = {"anyOf": out.pop("oneOf")}
        if "anyOf" in out:
            out["allOf"] = [*out.get("allOf", []), alternatives]
        else:
            out |= alternatives

    def _resolve_ref(self, schema: Any) -> Mapping[str, Any]:
        """What a reference to a definition of the schema means; {} for another one."""
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema if isinstance(schema, Mapping) else {}
        target = resolve_pointer(schema["$ref"], self._root)
        is_plain = isinstance(target, Mapping) and "$ref" not in target
        return target if is_plain else {"$ref": schema["$ref"]}

    def _record_reason(self, place: str, reason: str) -> None:
        shown = "" if place == "#" else f"{truncate_to_one_line(place, MAX_PLACE_CHARS)}: "
        self._reasons[f"{shown}{reason}"] = None


def _is_bound_too_large(value: Any, value_type: Any) -> bool:
    """Whether the grammar library cannot enforce a bound of numbers."""
    if type(value) not in (int, float):
        return False
    rounded = 0 if value_type == "integer" else BOUND_ROUNDING_MARGIN
    return abs(value) >= BOUND_LIMIT - rounded


def _escape_pointer(name: str) -> str:
    """A key as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
