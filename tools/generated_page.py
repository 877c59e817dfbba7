"""The command line of a tool that writes pages from their source: write, or say which are stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(
    argv: Sequence[str] | None, description: str | None, target: str,
    stale: Callable[[Path], Iterable[object]], write: Callable[[Path], Iterable[object]],
) -> int:  # fmt: skip
    """Exit code: 0, or with --check 1 where a file is not what its template and rows give.

    description: what the tool does; target: of make, which writes. stale and write name the files,
    below a root.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.check:
        for name in write(options.root):
            print(name)
        return 0
    old = list(stale(options.root))
    for name in old:
        print(f"{name} is stale; run `make {target}`", file=sys.stderr)
    return 1 if old else 0


def run_pages(
    argv: Sequence[str] | None,
    description: str | None,
    target: str,
    render: Callable[[Path], Mapping[Path, str]],
    folder: Path | None = None,
) -> int:
    """``run`` for a tool that makes nothing but pages.

    render: the pages' texts by path, of a root; folder: one whose Markdown files are all generated.
    """
    return run(
        argv,
        description,
        target,
        lambda root: stale_pages(root, render(root), folder),
        lambda root: write_pages(root, render(root), folder),
    )


def stale_pages(root: Path, pages: Mapping[Path, str], folder: Path | None = None) -> list[Path]:
    """Pages whose file below ``root`` is another text, and files of ``folder`` that are no page.

    pages: text by path; folder: one whose Markdown files are all generated.
    """
    changed = [path for path, text in pages.items() if _read(root / path) != text]
    return changed + [path for path in _files(root, folder) if path not in pages]


def write_pages(root: Path, pages: Mapping[Path, str], folder: Path | None = None) -> list[Path]:
    """Write the pages, delete the files of ``folder`` that are no page; the pages' paths."""
    for path in _files(root, folder):
        if path not in pages:
            (root / path).unlink()
    for path, text in pages.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return list(pages)


def _files(root: Path, folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    return sorted(path.relative_to(root) for path in (root / folder).glob("*.md"))


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
