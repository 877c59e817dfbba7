"""Calls with a tag for each argument, named after it; lists and objects are nested tags.

A string is passed on as it comes. Any other argument waits for its closing tag, since only then its
JSON is known: a tag that comes again makes a list of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from modelmill.text.json_normalizer import escape_json_text
from modelmill.text.parameter_types import schema_types
from modelmill.text.tag_values import TagNode
from modelmill.text.tool_call_reader import (
    MAX_KEY_CHARS,
    ToolCallReader,
    longest_suffix_overlap_length,
    skip_whitespace,
)

_NAME = re.compile(r"<([^<>\s]+)")


class NestedTagCallReader(ToolCallReader):
    """Reads calls of the style ``tags``."""

    def _reset_to_first_state(self) -> Callable[[str, int], int]:
        syntax = self._syntax
        self._mark = syntax.tag_prefix
        self._tag = re.compile(re.escape(self._mark) + r"\s*<([^<>]+)>")
        self._section_tag = _tag_name(syntax.section[0])
        self._call_tag = _tag_name(syntax.call[0])
        head = syntax.call[0][len(self._mark) + 1 :]
        self._head = re.compile(re.escape(head) + '([^"]*)"')
        self._name, self._key = "", ""
        self._root: Mapping[str, Any] = {}
        self._nodes: list[TagNode] = []
        self._quoted_tags: list[str] = []  # open inside a string, of which they are a part
        self._num_arguments = 0
        return self._scan_section_or_call

    # -- tags

    def _match_tag(self, text: str, at: int) -> tuple[str | None, int]:
        """Match a tag; "" if there is none, None if more text is needed."""
        match = self._tag.match(text, at, at + MAX_KEY_CHARS)
        if match:
            return match[1], match.end()
        rest = text[at:]
        inside = rest.removeprefix(self._mark)
        begun = self._mark.startswith(rest) or (
            rest.startswith(self._mark)
            and len(rest) < MAX_KEY_CHARS
            and re.fullmatch(r"\s*(<[^<>]*)?", inside) is not None
        )
        return (None if begun else ""), at

    def _tool_called_by_tag(self, tag: str) -> str | None:
        """The declared function that a tag calls."""
        match = self._head.fullmatch(tag)
        return match[1] if match and match[1] in self._tools else None

    def _tag_ends_call(self, tag: str) -> bool:
        """Whether a tag ends a call, or shows that its end is missing."""
        ends = (f"/{self._call_tag}", f"/{self._section_tag}")
        return tag in ends or self._tool_called_by_tag(tag) is not None

    # -- states

    def _scan_section_or_call(self, text: str, at: int) -> int:
        """The mark of the section or of a call, or the end of the section."""
        tag, end = self._match_tag(text, skip_whitespace(text, at))
        if tag is None and self._final and self.cut and self.num_calls:
            self._drop_consumed_text()
            return self._mark_block_closed(len(text))
        if tag is None and (self.cut or not self._final):
            return at
        if tag == self._section_tag and not self.num_calls:
            return end
        if tag == f"/{self._section_tag}" and (self.num_calls or self._pending):
            self._drop_pending_as_call()  # also the mark of an empty section
            return self._mark_block_closed(end)
        name = self._tool_called_by_tag(tag or "")
        if name is None:
            return self._mark_block_closed(at) if self.num_calls else self._reject_block(at)
        self._name, self._num_arguments = name, 0
        self._root = self._tools.get(name) or {}
        self._emit_call_begin(name)
        self._output.add_arguments("{")
        self._drop_pending_as_call()
        self._state = self._scan_argument_or_end
        return end

    def _scan_argument_or_end(self, text: str, at: int) -> int:
        """The next argument, or the end of the call."""
        self._drop_consumed_text()
        place = text.find(self._mark, at)
        if place < 0:
            return self._wait_for_tag(text, at)
        tag, end = self._match_tag(text, place)
        if tag is None:
            return self._wait_for_tag(text, place) if self._final else place
        if not tag:
            return place + len(self._mark)
        if self._tag_ends_call(tag):
            self._output.add_arguments("}")
            self._state = self._scan_section_or_call
            return end if tag == f"/{self._call_tag}" else place
        if not tag.startswith("/"):
            self._enter_argument(tag)
        return end

    def _wait_for_tag(self, text: str, at: int) -> int:
        if not self._final:
            return len(text) - longest_suffix_overlap_length(text[at:], (self._mark,))
        if not self.cut:
            self._output.add_arguments("}")
        return self._mark_block_closed(len(text))

    def _enter_argument(self, key: str) -> None:
        separator = ", " if self._num_arguments else ""
        self._num_arguments += 1
        self._key, prefix = key, f'{separator}"{escape_json_text(key)}": '
        node = TagNode("", self._root).make_child_node(key, self._root)
        if node.schema is not None and schema_types(node.schema, self._root) == {"string"}:
            self._output.add_arguments(prefix + '"')
            self._quoted_tags = []
            self._state = self._scan_string
        else:
            self._prefix, self._nodes = prefix, [node]
            self._state = self._scan_value

    def _scan_string(self, text: str, at: int) -> int:
        """A string up to its closing tag, which may have a wrong name.

        A tag that opens inside is part of it, and so is the one that closes that tag.
        """
        self._drop_consumed_text()
        place = text.find(self._mark, at)
        whole = self._final and not self.cut
        if place < 0:
            stop = (
                len(text)
                if whole
                else len(text) - longest_suffix_overlap_length(text[at:], (self._mark,))
            )
            self._output.add_arguments(escape_json_text(text[at:stop]) + ('"' if whole else ""))
            if whole:
                self._state = self._scan_argument_or_end
            return len(text) if self._final else stop
        self._output.add_arguments(escape_json_text(text[at:place]))
        tag, end = self._match_tag(text, place)
        if tag is None and not whole:
            return len(text) if self._final else place
        if tag and self._tag_ends_string(tag):
            self._output.add_arguments('"')
            self._state = self._scan_argument_or_end
            return place if self._tag_ends_call(tag) else end
        self._output.add_arguments(escape_json_text(self._mark))
        return place + len(self._mark)

    def _tag_ends_string(self, tag: str) -> bool:
        """Whether a tag ends a string; counts those that are part of it."""
        if tag == f"/{self._key}" or self._tag_ends_call(tag):
            return True
        if not tag.startswith("/"):
            self._quoted_tags.append(tag)
            return False
        if tag[1:] not in self._quoted_tags:
            return True
        self._quoted_tags.remove(tag[1:])
        return False

    def _scan_value(self, text: str, at: int) -> int:
        """A value with its nested tags, up to its closing tag."""
        self._drop_consumed_text()
        node = self._nodes[-1]
        place = text.find(self._mark, at)
        stop = (
            place
            if place >= 0
            else len(text) - longest_suffix_overlap_length(text[at:], (self._mark,))
        )
        node.texts.append(text[at:stop])
        if place < 0:
            if self._final and not self.cut:
                self._close_tag_nodes(0)
            return len(text) if self._final else stop
        tag, end = self._match_tag(text, place)
        if tag is None:
            return len(text) if self._final else place
        if not tag:
            node.texts.append(self._mark)
            return place + len(self._mark)
        depths = [depth for depth, each in enumerate(self._nodes) if tag == f"/{each.tag}"]
        if depths or self._tag_ends_call(tag):
            self._close_tag_nodes(depths[-1] if depths else 0)
            return end if depths else place
        if not tag.startswith("/"):
            self._nodes.append(node.make_child_node(tag, self._root))
        elif not node.children and "".join(node.texts).strip():
            # a wrong name after a text: the innermost tag ends; elsewhere it is one too many
            self._close_tag_nodes(len(self._nodes) - 1)
        return end

    def _close_tag_nodes(self, depth: int) -> None:
        """Close the innermost tags down to a depth."""
        while len(self._nodes) > depth:
            node = self._nodes.pop()
            value = node.to_json(self._root)
            if self._nodes:
                self._nodes[-1].children.append((node.tag, value))
            else:
                self._output.add_arguments(self._prefix + value)
                self._state = self._scan_argument_or_end


def _tag_name(mark: str) -> str:
    match = _NAME.search(mark, mark.rfind("<"))
    assert match is not None, "the mark is a tag"
    return match[1].rstrip(">")
