"""Links of a documentation page to files outside docs/."""

from __future__ import annotations

import logging

import pytest

from tools.site_hooks import resolve_links


@pytest.mark.parametrize(
    ("source", "text", "url", "result"),
    [
        ("a.md", "see [x](../README.md)", None, "see x"),
        ("a.md", "[x](../README.md#top)", "https://e.org/m/", "[x](https://e.org/m/blob/main/README.md#top)"),
        ("cli/a.md", "[x](../../Makefile)", "https://e.org/m", "[x](https://e.org/m/blob/main/Makefile)"),
        ("cli/a.md", "[x](../run.md)", None, "[x](../run.md)"),
        ("a.md", "[x](run.md) ![y](../README.md)", None, "[x](run.md) ![y](../README.md)"),
    ],
)  # fmt: skip
def test_links(source: str, text: str, url: str | None, result: str) -> None:
    assert resolve_links(text, source, url) == result


def test_a_link_to_no_file_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve_links("[x](../nowhere.md)", "a.md", None)
    assert "a.md links to nowhere.md, which does not exist" in caplog.text
