"""Every tokenizer vector: ids as published, and back to the text."""

from __future__ import annotations

from pathlib import Path

from tools.verify.context import VerifyContext
from tools.verify.result import Fact, VerifyResult, make_result

TITLE = "Tokenizers: every vector"
SEPARATOR = "\n__ggml_vocab_test__\n"
# name, file or folder of data/tokenizers, vector
TOKENIZERS = (
    ("GPT-2 (Hugging Face)", "gpt2", "gpt-2"), ("Qwen (tiktoken)", "qwen.tiktoken", "qwen2"),
    ("Qwen2.5 (Hugging Face)", "qwen2.5", "qwen2"), ("Qwen3 (Hugging Face)", "qwen3", "qwen2"),
    ("LLaMA (SentencePiece)", "llama", "llama-spm"),
)  # fmt: skip


def run(context: VerifyContext) -> VerifyResult:
    """Vectors of llama.cpp, for each tokenizer."""
    from modelmill.text.tokenizer_loader import load_tokenizer

    data = context.shared / "data/tokenizers"
    rows = []
    for name, place, vector in TOKENIZERS:
        tokenizer = load_tokenizer(files_of(data / place))
        pairs = vectors(data / "vectors", vector)
        ids = sum(tokenizer.encode(text, bos=False) == expected for text, expected in pairs)
        texts = sum(tokenizer.decode(expected) == text for text, expected in pairs)
        summary = (
            f"{ids} of {len(pairs)} texts give the ids, {texts} of {len(pairs)} ids give the text"
        )
        rows.append(Fact(f"{name}: {vector}", summary, ids == texts == len(pairs) > 0))
    return make_result(
        rows,
        ["The vectors that llama.cpp publishes; without BOS, control tokens in a text are text."],
    )


def vectors(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    """(text, ids) pairs. Raises ValueError where texts and ids are not equally many."""
    texts = (folder / f"{name}.inp").read_bytes().decode().split(SEPARATOR)
    lines = (folder / f"{name}.out").read_text().split("\n")
    if lines and not lines[-1].strip() and len(lines) == len(texts) + 1:
        lines.pop()
    return [
        (text, [int(id) for id in line.split()]) for text, line in zip(texts, lines, strict=True)
    ]


def files_of(path: Path) -> dict[str, bytes]:
    """Tokenizer files as a checkpoint hands them over."""
    return {
        file.name: file.read_bytes()
        for file in ([path] if path.is_file() else sorted(path.iterdir()))
    }
