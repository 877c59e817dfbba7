"""Large requests: long, deep and wide values, for every path that takes a body.

Each costs a careless server much more than its size, for example an error per element, or a list
for three bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Value = Callable[[int], bytes]
"""Makes JSON of about so many bytes."""


def repeat_element(element: bytes, last: bytes = b"") -> Value:
    """A list of the same element; the last one may differ."""
    return lambda size: (
        b"[" + (element + b",") * (size // (len(element) + 1)) + (last or element) + b"]"
    )


def object_with_keys(value: bytes) -> Value:
    """An object with many keys."""
    return lambda size: (
        b"{" + b",".join(b'"k%d":%b' % (i, value) for i in range(size // (10 + len(value)))) + b"}"
    )


def object_with_id_keys(size: int) -> bytes:
    """An object whose keys are ids."""
    return b"{" + b",".join(b'"%d":1' % i for i in range(size // 11)) + b"}"


def nested_lists(size: int) -> bytes:
    """Nested lists."""
    return b"[" * (size // 2) + b"]" * (size // 2)


def nested_objects(size: int) -> bytes:
    """Nested objects."""
    return b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6)


def long_string(unit: bytes) -> Value:
    """A long string."""
    return lambda size: b'"' + unit * (size // len(unit)) + b'"'


def whitespace_padded(size: int) -> bytes:
    """A number and much white space."""
    return b"[1," + b" " * size + b"1]"


VALUES: dict[str, Value] = {
    "texts": repeat_element(b'""', b"1"),
    "lists of texts": repeat_element(b'[""]', b"[1]"),
    "ids in lists": repeat_element(b"[1]"),
    "empty lists": repeat_element(b"[]"),
    "empty objects": repeat_element(b"{}"),
    "objects": repeat_element(b'{"a":1}'),
    "messages": repeat_element(b'{"role":"user","content":"x"}'),
    "ids": repeat_element(b"257"),
    "ids and a text": repeat_element(b"1", b'"x"'),
    "negative ids": repeat_element(b"-1"),
    "fractions": repeat_element(b"1.5"),
    "points": repeat_element(b"[1,2]"),
    "wrong points": repeat_element(b'["",""]'),
    "nulls": repeat_element(b"null"),
    "keys": object_with_keys(b"1"),
    "keys of lists": object_with_keys(b"[]"),
    "halves of pairs as keys": lambda size: (
        b"{" + b",".join(b'"\\ud800%d":1' % i for i in range(size // 16)) + b"}"
    ),
    "ids as keys": object_with_id_keys,
    "deep lists": nested_lists,
    "deep objects": nested_objects,
    "a text": long_string(b"a "),
    "a text of escapes": long_string(b"\\u00e9\\n"),
    "a text of pairs": long_string(b"\\ud83d\\ude00"),
    "a text of backslashes": long_string(b"\\\\"),
    "a text beyond ASCII": long_string("é😀".encode()),
    "a text of digits": long_string(b"1"),
    "base64": long_string(b"QUJD"),
    "white space": whitespace_padded,
    "a number": lambda size: b"1" * size,
    "commas": lambda size: b"[" + b"," * size + b"]",
    "no end": lambda size: b'["' + b"a" * size,
}
"""Large values by their content."""
FIELDS: dict[str, dict[str, bytes]] = {
    "/v1/completions": {
        "prompt": b'"x"', "stop": b'"x"', "logit_bias": b"{}", "stop_token_ids": b"[]",
        "metadata": b"{}", "structured_outputs": b"null", "user": b'"x"', "unknown": b"1",
        "temperature": b"0",
    },
    "/v1/chat/completions": {
        "messages": b'[{"role":"user","content":"x"}]', "tools": b"null", "metadata": b"{}",
        "modalities": b"null", "response_format": b"null", "tool_choice": b"null",
    },
    "/v1/chat/completions/input_tokens": {
        "messages": b'[{"role":"user","content":"x"}]', "tools": b"null",
    },
    "/v1/responses": {
        "input": b'"x"', "instructions": b'"x"', "tools": b"null",
        "metadata": b"{}", "include": b"[]", "text": b"null", "prompt": b"null",
        "conversation": b"null", "reasoning": b"null",
    },
    "/v1/responses/compact": {
        "input": b'"x"', "max_output_tokens": b"1", "instructions": b"null",
    },
    "/v1/responses/input_tokens": {
        "input": b'"x"', "instructions": b'"x"', "tools": b"null", "text": b"null",
    },
    "/v1/messages": {
        "messages": b'[{"role":"user","content":"x"}]', "max_tokens": b"1", "system": b'"x"',
        "tools": b"null", "stop_sequences": b"[]", "metadata": b"{}", "thinking": b"null",
    },
    "/v1/messages/count_tokens": {
        "messages": b'[{"role":"user","content":"x"}]', "system": b'"x"', "tools": b"null",
    },
    "/api/chat": {
        "messages": b'[{"role":"user","content":"x"}]', "options": b'{"num_predict":1}',
        "tools": b"null", "format": b"null", "keep_alive": b"null",
    },
    "/api/generate": {
        "prompt": b'"x"', "options": b'{"num_predict":1}', "images": b"null", "context": b"[]",
        "format": b"null",
    },
    "/v1/rerank": {"query": b'"x"', "documents": b'["x"]', "user": b'"x"'},
    "/v1/score": {"text_1": b'"x"', "text_2": b'["x"]', "user": b'"x"'},
    "/completion": {
        "prompt": b'"x"', "n_predict": b"1", "samplers": b"[]", "stop": b'"x"', "grammar": b"null",
        "allowed_token_ids": b"null", "bad_words": b"null", "dry_sequence_breakers": b"[]",
    },
    "/infill": {
        "input_prefix": b'"x"', "input_suffix": b'"x"', "input_extra": b"[]", "n_predict": b"1",
    },
    "/api/embed": {"input": b'"x"', "options": b"null"},
    "/api/embeddings": {"prompt": b'"x"', "options": b"null"},
    "/api/show": {"name": b'"stories"', "verbose": b"null"},
    "/v1/models/load": {"wait": b"null"},
    "/v1/models/unload": {"unknown": b"1"},
    "/v1/models/pin": {"pinned": b"null"},
    "/v1/models/reload": {"unknown": b"1"},
    "/v1/sessions/save": {"name": b'"a"', "tokens": b"[1]", "messages": b"null"},
    "/v1/sessions/restore": {"name": b'"a"', "cache_salt": b"null"},
    "/apply-template": {"messages": b'[{"role":"user","content":"x"}]', "tools": b"null"},
    "/v1/embeddings": {"input": b'"x"', "dimensions": b"1"},
    "/v1/segment": {
        "image": b'"x"', "points": b"[[1,2]]", "labels": b"[1]", "boxes": b"null",
        "prompts": b"null",
        "everything": b"null", "mask": b"null", "image_id": b"null",
    },
    "/tokenize": {"prompt": b'"x"', "messages": b"null", "model": b"null"},
    "/detokenize": {"tokens": b"[1]", "model": b"null"},
}  # fmt: skip
"""Fields that are made large on each path, with their normal values; null: left out."""


def body(path: str, field: str, value: bytes, model: str) -> bytes:
    """A request that is valid except for one field."""
    fields = {"model": b'"%b"' % model.encode(), **FIELDS[path]}
    if path.startswith("/v1/") and path.endswith("completions"):
        fields["max_tokens"] = b"1"
    if field == "prompt" and path == "/tokenize":
        fields["messages"] = b"null"
    fields[field] = value
    omitted = (
        {"messages": ("prompt",), "image_id": ("image",)}.get(field, ())
        if path in ("/tokenize", "/v1/segment")
        else ()
    )
    sent = {
        name: each
        for name, each in fields.items()
        if each != b"null" and name not in omitted and name != "unknown"
    }
    if field == "unknown":
        sent["unknown"] = value
    return (
        b"{" + b",".join(b'"%b":%b' % (name.encode(), each) for name, each in sent.items()) + b"}"
    )


def unknown_keys(size: int, model: str) -> bytes:
    """An object with unknown fields."""
    return b'{"model":"%b",' % model.encode() + object_with_keys(b"1")(size)[1:]


def random_large_request(
    rng: random.Random, model: str, segment_model: str | None
) -> tuple[str, bytes]:
    """Make a request of up to 4 MB; return (path, body).

    segment_model: None: no segmentation requests.
    """
    path = rng.choice(
        [path for path in FIELDS if segment_model is not None or path != "/v1/segment"]
    )
    size, name = (
        rng.choice((1 << 16, 1 << 19, 1 << 22)),
        segment_model or "" if path == "/v1/segment" else model,
    )
    if rng.random() < 0.1:
        return path, unknown_keys(size, name)
    return path, body(
        path, rng.choice(list(FIELDS[path])), rng.choice(list(VALUES.values()))(size - 400), name
    )
