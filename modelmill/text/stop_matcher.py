"""Matcher of stop strings, used by the terminal, the server and evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from modelmill.core.errors import RequestError


class StopMatcher:
    """Ends a text that arrives in pieces before its first stop string.

    The match that is complete first wins; of several that end at the same character, the longest.
    The result does not depend on how the text was cut into pieces. Time is linear in the text: the
    stop strings form one automaton (Aho and Corasick, 1975), whose depth is the number of buffered
    characters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Build the automaton; raises RequestError for a stop that is empty or not a string."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError("stop strings must be a list of non-empty strings")
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            self._insert_stop_string(stop)
        self._build_failure_links()
        self._state = 0
        # the text that may still become a stop string; its length is the depth of the state
        self._pending = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, bool, str | None]:
        """Add text.

        Returns:
            The text that is now stable ("" after a stop), whether a stop string is complete, and
            which one.
        """
        if self._stopped is not None:
            return "", True, self._stopped
        buffer = self._pending + text
        state = self._state
        for index in range(len(self._pending), len(buffer)):
            state = self._next_state(state, buffer[index])
            matched = self._match[state]
            if matched is not None:
                self._stopped, self._pending = matched, ""
                return buffer[: index + 1 - len(matched)], True, matched
        keep = len(buffer) - self._depth[state]
        self._state, self._pending = state, buffer[keep:]
        return buffer[:keep], False, None

    def flush(self) -> str:
        """Return the buffered text if the text ends without a stop string; "" after a stop."""
        rest, self._pending, self._state = self._pending, "", 0
        return rest

    def _next_state(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][char]

    def _insert_stop_string(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][char]
        self._match[state] = stop

    def _build_failure_links(self) -> None:
        """Link each state to its longest proper suffix that is a state, breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self._next_state(self._fail[state], char)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)
