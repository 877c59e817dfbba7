"""MkDocs hook: links from docs/ to other files of the repository.

On the site they lead to the repository's address (``repo_url`` of mkdocs.yml), or become plain text
if it has none. A link to a file that does not exist is a warning, an error under ``--strict``.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.site_hooks")


def on_page_markdown(markdown: str, *, page: Any, config: Mapping[str, Any], files: Any) -> str:
    """The page's text with its links to files outside docs/ resolved; called by MkDocs."""
    del files
    return resolve_links(markdown, page.file.src_uri, config.get("repo_url"))


def resolve_links(markdown: str, source: str, repo_url: str | None) -> str:
    """``markdown`` of the page ``source`` (below docs/) without links out of docs/."""

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target))
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which does not exist", source, path)
        return f"[{text}]({repo_url.rstrip('/')}/blob/main/{path}{anchor})" if repo_url else text

    return LINK.sub(replaced, markdown)
