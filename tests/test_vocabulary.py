"""The project's words: class names are unique, words that said nothing stay gone, the glossary
names what exists.

A newcomer searches for the field's term. One term has one meaning: ``docs/glossary.md`` lists them.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_files import facts, parse

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "modelmill"
FOLDERS = (PACKAGE, *(ROOT / name for name in ("tests", "tools", "benchmarks", "examples")))
GLOSSARY = [ROOT / "docs" / name for name in ("glossary.md", "glossary-m-z.md")]
MAX_TERMS = 120

SHARED_CLASS_NAMES = {
    "Model": "each model file has one: the registry finds a family by its file",
    "Args": "each verb of the command line has one: the registry finds a verb by its file",
}
BANNED_IDENTIFIERS = frozenset(
    """
    HeldWeight Held shelf shelves Loop Flight Ledger Pace Crew Mesh ALONE Eyes Eye Still Sight Glance Viewer Told Begun
    Come Ticket News Gate Dialogue Language Mix RotateStore Wanted wants matmul_gated of_gate SPANS LITTLE AGAIN SOON
    SURE foresee foresight eyes mesh told seen wanted held said asked given heard meant lent taken mine whom whoever anew
    """.split()  # noqa: E501, SIM905
)
BANNED_MODULES = frozenset(
    """
    ahead aside known own parts ends shown pieces square drawn far lines values figures written quick early last still
    recorded joined warm tuned fit entry flight pace held shelf loop ledger eyes foresight mesh meeting ranks told
    """.split()  # noqa: E501, SIM905
)
# Participles, counterparts and feelings that named variables of tests and tools.
BANNED_OUTSIDE_THE_PACKAGE = BANNED_IDENTIFIERS | frozenset(
    "found kept honest theirs ours soon eye kinds forms KINDS FORMS form got hows talk".split()  # noqa: SIM905
)
# Names of other libraries, and of one report's fields.
OTHERS_NAMES = re.compile(
    r"^from hypothesis import .*|@given\b|torch\.eye\b|first\.(?:ours|theirs)\b", re.MULTILINE
)
BANNED_WORDS = re.compile(
    r"\b(told|whoever|somebody|nobody|copy engine|shelf|eyes|rehears\w*|reads along|given out)\b",
    re.IGNORECASE,
)
# The field's word → the file that does it, where a search for the word has to land.
FIELD_WORDS = {
    "GEMM": "modelmill/ops/cuda/gemm_16bit/gemm.py",
    "GEMV": "modelmill/ops/cuda/weight_only_gemm/wq_gemv.py",
    "dequant": "modelmill/ops/triton/weight_only_gemm/dequant.py",
    "all_reduce": "modelmill/parallel/tp_group.py",
    "chunked prefill": "modelmill/runtime/chunked_prefill.py",
    "continuous batching": "modelmill/runtime/scheduler.py",
    "fused": "modelmill/nn/fusion.py",
    "warpgroup": "modelmill/ops/cuda/common/smem_pipeline.cuh",
    "producer": "modelmill/ops/cuda/common/smem_pipeline.cuh",
    "prefetch": "modelmill/builder/build_engine.py",
    "prefix cach": "modelmill/runtime/kv_pages.py",
    "tensor.parallel": "modelmill/parallel/tp_group.py",
}


def _sources(folder: Path) -> list[Path]:
    """Modules of a folder; this one lists the banned words, so it is left out."""
    return sorted(path for path in folder.rglob("*.py") if path != Path(__file__).resolve())


def _names(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text()
    if not path.is_relative_to(PACKAGE):
        text = OTHERS_NAMES.sub("", text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def test_class_names_are_unique() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in facts(path).classes:
            places[name].append(str(path.relative_to(ROOT)))
    twice = {
        name: files
        for name, files in places.items()
        if len(files) > 1 and name not in SHARED_CLASS_NAMES
    }
    assert not twice


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_banned_identifiers_stay_gone(folder: Path) -> None:
    banned = BANNED_IDENTIFIERS if folder == PACKAGE else BANNED_OUTSIDE_THE_PACKAGE
    any_banned = re.compile(rf"\b(?:{'|'.join(banned)})\b")
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _sources(folder)
        if any_banned.search(path.read_text())  # tokenizing all takes seconds
        for line, name in _names(path)
        if name in banned
    ]
    assert not hits


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings and comments, with the line where each begins."""
    for node in ast.walk(parse(path)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                yield each.lineno, str(each.value.value)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_banned_words_stay_out_of_docstrings_and_comments(folder: Path) -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in _sources(folder)
        if BANNED_WORDS.search(path.read_text())
        for line, text in _prose(path)
        for match in BANNED_WORDS.finditer(text)
    ]
    assert not hits


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_banned_module_names_stay_gone(folder: Path) -> None:
    assert not [
        str(path.relative_to(ROOT))
        for path in _sources(folder)
        if path.stem.strip("_") in BANNED_MODULES
    ]


@pytest.mark.parametrize("word", FIELD_WORDS)
def test_a_search_for_the_fields_word_lands(word: str) -> None:
    assert re.search(
        word.replace(".", "[- ]"), (ROOT / FIELD_WORDS[word]).read_text(), re.IGNORECASE
    )


def test_the_glossary_names_what_exists() -> None:
    lines = [line for page in GLOSSARY for line in page.read_text().splitlines()]
    rows = [line for line in lines if re.match(r"\| (?!term |---)", line)]
    cells = [re.split(r"(?<!\\)\|", row.strip("|")) for row in rows]
    terms = [row[0].strip() for row in cells]
    assert 0 < len(terms) <= MAX_TERMS
    assert len(set(terms)) == len(terms)
    missing = [
        path
        for row in cells
        for path in re.findall(r"modelmill/[\w/.]+\.\w+", row[2])
        if not (ROOT / path).exists() and "*" not in row[2]
    ]
    assert not missing
