"""Which replica a request goes to: the one that has seen its beginning, unless that one has too much to do."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.serve.json_body import parse

SLACK = 8
"""Answers that a replica may have in hand beyond the least busy one and still be preferred."""
KEPT = 1 << 16
"""Beginnings that are remembered."""
CUTS = (64, 128, 256, *range(512, 16 * 1024 + 1, 512))
"""Characters after which a beginning is known; a page of 16 tokens is about 64."""


class Affinity:
    """What each replica has seen. Not for several threads at once."""

    def __init__(self, slack: int = SLACK, kept: int = KEPT) -> None:
        self._slack, self._kept = slack, kept
        self._home: OrderedDict[str, str] = OrderedDict()
        self._turn: dict[str, int] = {}
        self._turns = 0

    def order(self, prefix: Sequence[str], loads: Mapping[str, int]) -> list[str]:
        """All replicas, the best first. prefix: ``beginnings`` of the request. loads: answers in hand, by replica.

        The replica with the longest known beginning comes first while it has at most ``slack`` answers more than the
        least busy one. The others follow by load; of equals, whoever has waited longest for a new beginning.
        """
        ranked = sorted(loads, key=lambda name: (loads[name], self._turn.get(name, 0), name))
        if not ranked:
            return []
        home = next((found for key in reversed(prefix) if (found := self._home.get(key)) in loads), None)
        if home is None or loads[home] > loads[ranked[0]] + self._slack:
            return ranked
        return [home, *(name for name in ranked if name != home)]

    def routed(self, prefix: Sequence[str], replica: str) -> None:
        """A request with these beginnings has gone to a replica, which has them from now on."""
        if not prefix or self._home.get(prefix[0]) != replica:
            self._turns += 1
            self._turn[replica] = self._turns
        for key in prefix:
            self._home[key] = replica
            self._home.move_to_end(key)
        while len(self._home) > self._kept:
            self._home.popitem(last=False)

    def forget(self, living: Sequence[str]) -> None:
        """Replicas that are no more have seen nothing."""
        gone = set(self._turn) - set(living)
        if gone:
            self._turn = {name: turn for name, turn in self._turn.items() if name not in gone}
            self._home = OrderedDict((key, name) for key, name in self._home.items() if name not in gone)


def beginnings(body: bytes, tenant: str = "") -> list[str]:
    """Digests of a request's beginning at each of ``CUTS``, the shortest first; none for what has no prompt.

    Everything that stands before the prompt, or keeps caches apart, is part of them: model, cache_salt, tools, tenant
    (whose key it came with). Several prompts in one request count as their first. A body that a replica will refuse for
    what is in it has none.
    """
    try:
        asked = parse(body)
    except ValueError:
        return []
    if not isinstance(asked, dict):
        return []
    text = _prompt(asked)
    if not text:
        return []
    apart = [asked.get(name) for name in ("model", "cache_salt", "tools", "instructions")]
    digest = hashlib.sha256(json.dumps([*apart, tenant], sort_keys=True).encode())
    found, begin = [], 0
    for cut in CUTS:
        if cut > len(text):
            break
        digest.update(text[begin:cut].encode("utf-8", "surrogatepass"))
        begin = cut
        found.append(digest.hexdigest()[:32])
    return found


def _prompt(asked: dict[str, Any]) -> str:
    messages = asked.get("messages")
    if isinstance(messages, list):
        return "".join(map(_told, messages[:64]))
    prompt = asked.get("prompt", asked.get("input"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else _told(prompt)


def _told(value: Any) -> str:
    """JSON of a part, as long as the beginnings can be; what is longer is of no account."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return f"{str(value.get('role'))[:32]}\n{value['content'][: CUTS[-1]]}\n"
    if isinstance(value, list):
        value = value[:4096]
    return "" if value is None else json.dumps(_short(value))[: CUTS[-1]]


def _short(value: Any) -> Any:
    """JSON data without the greater part of its long texts: a picture is not written out to be cut off."""
    if isinstance(value, str):
        return value[: CUTS[-1]]
    if isinstance(value, list):
        return [_short(each) for each in value[:4096]]
    return {key: _short(each) for key, each in value.items()} if isinstance(value, dict) else value
