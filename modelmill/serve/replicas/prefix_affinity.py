"""Chooses a replica: the one with the longest cached prefix, unless it is overloaded."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.serve.gil_yielding_json_parser import parse_json

MAX_LOAD_IMBALANCE = 8
"""A preferred replica may have so many more active requests than the least loaded one."""
MAX_PREFIXES = 1 << 16
"""Prefixes that are remembered."""
PREFIX_LENGTHS = (64, 128, 256, *range(512, 16 * 1024 + 1, 512))
"""Lengths of remembered prefixes in characters; a page of 16 tokens is about 64."""


class PrefixAffinity:
    """Remembers which replica has cached which prefix. Not thread-safe."""

    def __init__(
        self, max_imbalance: int = MAX_LOAD_IMBALANCE, max_prefixes: int = MAX_PREFIXES
    ) -> None:
        self._max_imbalance, self._max_prefixes = max_imbalance, max_prefixes
        self._prefix_owner: OrderedDict[str, str] = OrderedDict()
        self._last_routed: dict[str, int] = {}
        self._num_routed = 0

    def rank_replicas(self, prefix: Sequence[str], loads: Mapping[str, int]) -> list[str]:
        """Return all replicas, the best first.

        The replica with the longest known prefix comes first while it has at most ``max_imbalance``
        requests more than the least loaded one. The others follow by load; among equals the one
        that received a new prefix longest ago.

        Args:
            prefix: ``prefix_digests`` of the request.
            loads: active requests by replica.
        """
        ranked = sorted(loads, key=lambda name: (loads[name], self._last_routed.get(name, 0), name))
        if not ranked:
            return []
        owner = next(
            (name for key in reversed(prefix) if (name := self._prefix_owner.get(key)) in loads),
            None,
        )
        if owner is None or loads[owner] > loads[ranked[0]] + self._max_imbalance:
            return ranked
        return [owner, *(name for name in ranked if name != owner)]

    def record_route(self, prefix: Sequence[str], replica: str) -> None:
        """Record that a request with these prefixes was sent to a replica, which caches them."""
        if not prefix or self._prefix_owner.get(prefix[0]) != replica:
            self._num_routed += 1
            self._last_routed[replica] = self._num_routed
        for key in prefix:
            self._prefix_owner[key] = replica
            self._prefix_owner.move_to_end(key)
        while len(self._prefix_owner) > self._max_prefixes:
            self._prefix_owner.popitem(last=False)

    def retain_replicas(self, living: Sequence[str]) -> None:
        """Forget replicas that are not in ``living``."""
        gone = set(self._last_routed) - set(living)
        if gone:
            self._last_routed = {
                name: turn for name, turn in self._last_routed.items() if name not in gone
            }
            self._prefix_owner = OrderedDict(
                (key, name) for key, name in self._prefix_owner.items() if name not in gone
            )


def prefix_digests(body: bytes, tenant: str = "") -> list[str]:
    """Digests of a request's prompt at each of ``PREFIX_LENGTHS``, the shortest first.

    They also depend on everything that precedes the prompt or separates caches: model, cache_salt,
    tools and tenant. Of several prompts in a request the first counts. A request without a prompt,
    or one that a replica will reject as invalid, has none.

    Args:
        body: of the request.
        tenant: of the request's key.
    """
    try:
        fields = parse_json(body)
    except ValueError:
        return []
    if not isinstance(fields, dict):
        return []
    text = _prompt_text(fields)
    if not text:
        return []
    separators = [fields.get(name) for name in ("model", "cache_salt", "tools", "instructions")]
    digest = hashlib.sha256(json.dumps([*separators, tenant], sort_keys=True).encode())
    digests, begin = [], 0
    for cut in PREFIX_LENGTHS:
        if cut > len(text):
            break
        digest.update(text[begin:cut].encode("utf-8", "surrogatepass"))
        begin = cut
        digests.append(digest.hexdigest()[:32])
    return digests


def _prompt_text(fields: dict[str, Any]) -> str:
    messages = fields.get("messages")
    if isinstance(messages, list):
        return "".join(map(_message_text, messages[:64]))
    prompt = fields.get("prompt", fields.get("input"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else _message_text(prompt)


def _message_text(value: Any) -> str:
    """JSON of a message, cut to the longest prefix length."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return f"{str(value.get('role'))[:32]}\n{value['content'][: PREFIX_LENGTHS[-1]]}\n"
    if isinstance(value, list):
        value = value[:4096]
    return "" if value is None else json.dumps(_truncate_strings(value))[: PREFIX_LENGTHS[-1]]


def _truncate_strings(value: Any) -> Any:
    """JSON data with long strings cut, so that images are not serialized."""
    if isinstance(value, str):
        return value[: PREFIX_LENGTHS[-1]]
    if isinstance(value, list):
        return [_truncate_strings(each) for each in value[:4096]]
    return (
        {key: _truncate_strings(each) for key, each in value.items()}
        if isinstance(value, dict)
        else value
    )
