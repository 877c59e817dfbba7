"""JSON schemas at random, a check of values against them, and answers at random that a grammar
takes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from typing import Any

from modelmill.core.types import Grammar
from modelmill.text.grammar import GuideFactory

END = 256
NAMES = [
    "a",
    "b",
    "name",
    "arguments",
    "properties",
    "items",
    "if",
    "not",
    "additionalProperties",
    "$ref",
    "type",
    "é/~",
]
REFS = ["#", "#/$defs/x", "#/$defs/y", "#/definitions/x", "#/properties/a", "#/properties/b"]


class ByteTokenizer:
    """A vocabulary of 256 bytes and an end."""

    bos_id = None
    eos_ids = (END,)
    special = {"<end>": END}  # noqa: RUF012  never changed

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < END else b""

    def encode_pieces(self, pieces: Iterable[str]) -> list[int]:
        return [*"".join(pieces).encode()]


GUIDES = GuideFactory(ByteTokenizer(), 257, (END,))  # type: ignore[arg-type]


def random_answer(grammar: Grammar, rng: random.Random, max_tokens: int = 3000) -> str | None:
    """An answer of random bytes among those that are allowed, ends preferred; None where it takes
    too long.
    """
    guide, out = GUIDES.make_guide(grammar, (END,)), bytearray()
    for _ in range(max_tokens):
        bits = guide.mask()
        allowed = [id for id in range(257) if bits[id >> 3] >> (id & 7) & 1]
        if END in allowed:
            return out.decode()
        ends = [id for id in allowed if id in b'"}]']
        id = rng.choice(ends) if ends and rng.random() < 0.4 else rng.choice(allowed)
        out.append(id)
        guide.accept(id)
    return None


def random_parameters(rng: random.Random) -> dict[str, Any]:
    """What a function may be given as parameters."""
    out = _object(rng, 3) if rng.random() < 0.8 else _schema(rng, 3)
    draw = rng.random()
    if draw < 0.5 or "type" not in out:
        out["type"] = "object"
    elif draw < 0.6:
        out["type"] = ["null", "object"]
    elif out["type"] == "object":
        del out["type"]
    if rng.random() < 0.2:
        out["$schema"] = "http://json-schema.org/draft-07/schema#"
    return {
        **out,
        "$defs": {"x": _schema(rng, 2), "y": _object(rng, 1)},
        "definitions": {"x": _schema(rng, 1)},
    }


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_scalar, _scalar, _several, _object, _list, _reference]
    return rng.choice(makers if depth else [_scalar])(rng, depth - 1)


def _scalar(rng: random.Random, _: int) -> dict[str, Any]:
    return rng.choice([
        {"type": "integer", "minimum": rng.randint(-20, 0), "maximum": rng.randint(0, 20)},
        {"type": "boolean"},
        {"type": "string", "maxLength": rng.randint(0, 5)},
        {"type": "string", "pattern": "^[a-c]{1,4}$"},
        {"type": "null"}, {"const": rng.choice([None, "x", 3, {"k": [1]}])},
        {"enum": ["p", 1, None, {"q": "r"}]},
        {"type": "number", "minimum": 0, "maximum": 2.5},
        {"type": ["integer", "null"], "maximum": 5},
    ])  # fmt: skip


def _several(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(1, 3))]}
    objects = [_object(rng, depth) for _ in range(rng.randint(2, 3))]
    for place, branch in enumerate(objects):
        if rng.random() < 0.8:
            branch["properties"]["type"] = {"const": f"k{place}"}
            branch["required"] = [*dict.fromkeys([*branch.get("required", ()), "type"])]
    return {"oneOf": objects}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    out: dict[str, Any] = {"properties": {name: _schema(rng, max(depth, 0)) for name in names}}
    if rng.random() < 0.8:
        out["type"] = "object"
    if rng.random() < 0.6:
        out["required"] = [name for name in names if rng.random() < 0.4] + ["z"] * (
            rng.random() < 0.1
        )
    if rng.random() < 0.3:
        out["additionalProperties"] = rng.choice([False, False, True, {"type": "integer"}])
    if rng.random() < 0.05:
        out["anyOf"] = [{"properties": {"c": {"type": "integer"}}}, {"$ref": "#/$defs/y"}]
    return out


def _list(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "type": "array",
        "items": _schema(rng, depth),
        "minItems": rng.randint(0, 1),
        "maxItems": 2,
    }


def _reference(rng: random.Random, _: int) -> dict[str, Any]:
    return {"$ref": rng.choice(REFS)}


def is_endless(root: dict[str, Any]) -> bool:
    """Whether a reference leads to what no finite value can be: {"a": {"$ref":
    "#/properties/a"}}.
    """
    known: set[str] = set()
    there = [address for address in REFS if _pointed(address, root) is not None]
    for _ in there:
        known |= {address for address in there if _finite(_pointed(address, root), known)}
    return any(f'"{address}"' in json.dumps(root) for address in REFS if address not in known)


def _finite(schema: dict[str, Any], known: set[str]) -> bool:
    parts = [
        any(_finite(each, known) for each in schema[key])
        for key in ("anyOf", "oneOf")
        if key in schema
    ]
    if "$ref" in schema:
        parts.append(schema["$ref"] in known)
    if schema.get("type") == "array":
        parts.append(_finite(schema["items"], known))
    named = schema.get("properties", {})
    return all(parts) and all(
        _finite(named[name], known) for name in schema.get("required", ()) if name in named
    )


PYTHON_TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
    "boolean": bool,
    "null": type(None),
}  # fmt: skip


def is_valid(value: Any, schema: Any, root: dict[str, Any]) -> bool:
    """Whether a value is what a schema of the kind above asks for, by the rules of JSON Schema
    2020-12.
    """
    if isinstance(schema, bool):
        return schema
    checks = [
        "$ref" not in schema or is_valid(value, _pointed(schema["$ref"], root), root),
        "type" not in schema
        or any(_is(value, type_name) for type_name in _as_list(schema["type"])),
        "const" not in schema or _is_same_value(value, schema["const"]),
        "enum" not in schema or any(_is_same_value(value, each) for each in schema["enum"]),
        "anyOf" not in schema or any(is_valid(value, each, root) for each in schema["anyOf"]),
        "oneOf" not in schema or sum(is_valid(value, each, root) for each in schema["oneOf"]) == 1,
    ]
    if isinstance(value, dict):
        checks += _object_fits(value, schema, root)
    elif isinstance(value, list):
        checks.append(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)))
        checks += [is_valid(each, schema.get("items", True), root) for each in value]
    elif isinstance(value, str):
        checks.append(len(value) <= schema.get("maxLength", len(value)))
        checks.append(re.search(schema.get("pattern", ""), value) is not None)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        checks.append(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return all(checks)


def _object_fits(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any]) -> list[bool]:
    named = schema.get("properties", {})
    rest = schema.get("additionalProperties", True)
    checks = [name in value for name in schema.get("required", ())]
    return checks + [is_valid(each, named.get(name, rest), root) for name, each in value.items()]


def _is(value: Any, type_name: str) -> bool:
    if isinstance(value, bool):
        return type_name == "boolean"
    if type_name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, PYTHON_TYPES[type_name])  # type: ignore[arg-type]


def _is_same_value(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _pointed(address: str, root: dict[str, Any]) -> Any:
    target: Any = root
    for step in address.split("/")[1:]:
        target = target.get(step, {}) if step == "properties" else target.get(step)
    return target
