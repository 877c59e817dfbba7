"""Reads the heads of kernel files: fields ``Computes:``, ``Range:``, ``Technique:``, ``Ops:`` ...

A field starts a line and goes on in lines that are indented by four spaces. Native sources have
them in their first comment, Triton and other Python kernel files in the module's docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OPS = Path("modelmill/ops")
BACKENDS = ("cuda", "triton", "cpu")
FIELDS = ("Computes", "Dtypes", "Layout", "Range", "Technique")
CALLERS = ("Ops", "Used by")
NATIVE_SUFFIXES = (".cu", ".cuh", ".cpp", ".h")
_FIELD = re.compile(r"(\w[\w ]*): (.*)")


@dataclass(frozen=True)
class KernelHead:
    """Head of a kernel file.

    Attributes:
        path: From the root of the repository.
        title: The first sentence.
        fields: {field: text}.
    """

    path: Path
    title: str
    fields: Mapping[str, str]

    @property
    def backend(self) -> str:
        """Name of the backend's folder."""
        return self.path.relative_to(OPS).parts[0]

    @property
    def family(self) -> str:
        """Name of the sub-folder."""
        return self.path.parent.name

    @property
    def ops(self) -> tuple[str, ...]:
        """Ops that call the kernel."""
        return _names(self.fields.get("Ops", ""))

    @property
    def users(self) -> tuple[str, ...]:
        """Files that include or import the file, where no op calls it by itself."""
        return _names(self.fields.get("Used by", ""))

    def range_of(self, op: str) -> str:
        """The range for one op: what stands behind its name in parentheses, else all of it."""
        text = self.fields.get("Range", "")
        own = re.search(rf"[(;] ?{op}: ([^;)]*)", text)
        return own[1] if own else re.sub(r" \(\w+: .*?\)", "", text)


def _names(text: str) -> tuple[str, ...]:
    listed = text.partition(" (")[0]
    return tuple(name for name in listed.split(", ") if name)


def comment(path: Path) -> str:
    """The first comment of a native source, or the docstring of a Python module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return _docstring(text)
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line[2:].removeprefix(" "))
    return "\n".join(lines)


@cache
def _docstring(source: str) -> str:
    return ast.get_docstring(ast.parse(source)) or ""


def read_head(root: Path, path: Path) -> KernelHead:
    """The head of a file; ``path`` from ``root``."""
    fields: dict[str, str] = {}
    field = None
    title, _, rest = comment(root / path).partition("\n\n")
    for line in rest.splitlines():
        match = _FIELD.match(line)
        if match and match[1] in (*FIELDS, *CALLERS):
            field = match[1]
            fields[field] = match[2]
        elif field is not None and line.startswith("    "):
            fields[field] += f" {line.strip()}"
        else:
            field = None
    return KernelHead(path, " ".join(title.split()), fields)


def kernel_files(root: Path) -> Iterator[Path]:
    """Native sources and headers, and Python files whose docstring names ``Ops:`` or ``Used by:``.

    Paths are from ``root``.
    """
    for backend in BACKENDS:
        for path in sorted((root / OPS / backend).rglob("*.*")):
            python = path.suffix == ".py" and any(
                re.search(rf"^{field}: ", comment(path), re.MULTILINE) for field in CALLERS
            )
            if path.suffix in NATIVE_SUFFIXES or python:
                yield path.relative_to(root)


def read_heads(root: Path) -> list[KernelHead]:
    """The heads of all kernel files."""
    return [read_head(root, path) for path in kernel_files(root)]
