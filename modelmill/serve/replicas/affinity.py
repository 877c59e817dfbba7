"""Which replica a request goes to: the one that has seen its beginning, unless that one has too
much to do.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.serve.json_body import parse

MAX_LOAD_IMBALANCE = 8
"""Answers that a replica may have in hand beyond the least busy one and still be preferred."""
MAX_PREFIXES = 1 << 16
"""Beginnings that are remembered."""
PREFIX_LENGTHS = (64, 128, 256, *range(512, 16 * 1024 + 1, 512))
"""Characters after which a beginning is known; a page of 16 tokens is about 64."""


class PrefixAffinity:
    """What each replica has seen. Not for several threads at once."""

    def __init__(
        self, max_imbalance: int = MAX_LOAD_IMBALANCE, max_prefixes: int = MAX_PREFIXES
    ) -> None:
        self._max_imbalance, self._max_prefixes = max_imbalance, max_prefixes
        self._prefix_owner: OrderedDict[str, str] = OrderedDict()
        self._last_routed: dict[str, int] = {}
        self._num_routed = 0

    def rank_replicas(self, prefix: Sequence[str], loads: Mapping[str, int]) -> list[str]:
        """All replicas, the best first. prefix: ``prefix_digests`` of the request. loads: answers
        in hand, by replica.

        The replica with the longest known beginning comes first while it has at most
        ``max_imbalance`` answers more than the least busy one. The others follow by load; of
        equals, whoever has waited longest for a new beginning."""
        ranked = sorted(loads, key=lambda name: (loads[name], self._last_routed.get(name, 0), name))
        if not ranked:
            return []
        home = next(
            (found for key in reversed(prefix) if (found := self._prefix_owner.get(key)) in loads),
            None,
        )
        if home is None or loads[home] > loads[ranked[0]] + self._max_imbalance:
            return ranked
        return [home, *(name for name in ranked if name != home)]

    def record_route(self, prefix: Sequence[str], replica: str) -> None:
        """A request with these beginnings has gone to a replica, which has them from now on."""
        if not prefix or self._prefix_owner.get(prefix[0]) != replica:
            self._num_routed += 1
            self._last_routed[replica] = self._num_routed
        for key in prefix:
            self._prefix_owner[key] = replica
            self._prefix_owner.move_to_end(key)
        while len(self._prefix_owner) > self._max_prefixes:
            self._prefix_owner.popitem(last=False)

    def retain(self, living: Sequence[str]) -> None:
        """Replicas that are no more have seen nothing."""
        gone = set(self._last_routed) - set(living)
        if gone:
            self._last_routed = {
                name: turn for name, turn in self._last_routed.items() if name not in gone
            }
            self._prefix_owner = OrderedDict(
                (key, name) for key, name in self._prefix_owner.items() if name not in gone
            )


def prefix_digests(body: bytes, tenant: str = "") -> list[str]:
    """Digests of a request's beginning at each of ``PREFIX_LENGTHS``, the shortest first; none for
    what has no prompt.

    Everything that stands before the prompt, or keeps caches apart, is part of them: model,
    cache_salt, tools, tenant (whose key it came with). Several prompts in one request count as
    their first. A body that a replica will refuse for what is in it has none.
    """
    try:
        asked = parse(body)
    except ValueError:
        return []
    if not isinstance(asked, dict):
        return []
    text = _prompt_text(asked)
    if not text:
        return []
    apart = [asked.get(name) for name in ("model", "cache_salt", "tools", "instructions")]
    digest = hashlib.sha256(json.dumps([*apart, tenant], sort_keys=True).encode())
    found, begin = [], 0
    for cut in PREFIX_LENGTHS:
        if cut > len(text):
            break
        digest.update(text[begin:cut].encode("utf-8", "surrogatepass"))
        begin = cut
        found.append(digest.hexdigest()[:32])
    return found


def _prompt_text(asked: dict[str, Any]) -> str:
    messages = asked.get("messages")
    if isinstance(messages, list):
        return "".join(map(_message_text, messages[:64]))
    prompt = asked.get("prompt", asked.get("input"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else _message_text(prompt)


def _message_text(value: Any) -> str:
    """JSON of a part, as long as the beginnings can be; what is longer is of no account."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return f"{str(value.get('role'))[:32]}\n{value['content'][: PREFIX_LENGTHS[-1]]}\n"
    if isinstance(value, list):
        value = value[:4096]
    return "" if value is None else json.dumps(_truncate_strings(value))[: PREFIX_LENGTHS[-1]]


def _truncate_strings(value: Any) -> Any:
    """JSON data without the greater part of its long texts: a picture is not written out to be cut
    off.
    """
    if isinstance(value, str):
        return value[: PREFIX_LENGTHS[-1]]
    if isinstance(value, list):
        return [_truncate_strings(each) for each in value[:4096]]
    return (
        {key: _truncate_strings(each) for key, each in value.items()}
        if isinstance(value, dict)
        else value
    )
