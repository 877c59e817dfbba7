"""What tests read of the package's sources, each file parsed once."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent


class FunctionLines(NamedTuple):
    """A function: its first line, its name and the lines of its body without the docstring."""

    line: int
    name: str
    length: int


class SourceFacts(NamedTuple):
    """Imported modules with their lines, functions, and names of the classes of a file."""

    imports: tuple[tuple[str, int], ...]
    functions: tuple[FunctionLines, ...]
    classes: tuple[str, ...]


def parse(path: Path) -> ast.Module:
    """The file's syntax tree."""
    for _ in range(3):
        try:
            return ast.parse(path.read_text())
        except SystemError:  # CPython gh-106905: another thread parsed at the same time
            continue
    return ast.parse(path.read_text())


def each_file(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test of a check of a file, which names every file that fails.

    A case per file would cost more than the checks.
    """

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            errors: list[str] = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    errors.append(f"{path.relative_to(REPOSITORY)}: {error}")
            if errors:
                raise AssertionError("\n".join(errors))

        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        return test

    return decorate


@cache
def facts(path: Path) -> SourceFacts:
    """One walk over the file's tree; the tree is not kept."""
    imports: list[tuple[str, int]] = []
    functions: list[FunctionLines] = []
    classes: list[str] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += _imported(path, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
            length = (node.end_lineno or node.lineno) - body[0].lineno + 1
            functions.append(FunctionLines(node.lineno, node.name, length))
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
    return SourceFacts(tuple(imports), tuple(functions), tuple(classes))


def dotted_name(node: ast.expr) -> str:
    """``ast.unparse``, several times as fast for a name or the attributes of one."""
    attributes: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        attributes.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name):
        return ast.unparse(node)
    return ".".join((inner.id, *reversed(attributes)))


def _imported(path: Path, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
        return
    assert node.level == 0, f"{path}:{node.lineno}: relative import"
    module = node.module or ""
    yield module, node.lineno
    for alias in node.names:
        if (REPOSITORY / module.replace(".", "/") / f"{alias.name}.py").exists():
            yield f"{module}.{alias.name}", node.lineno
