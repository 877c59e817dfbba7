"""Compare an engine with its checkpoint: chat template and tokens first, then layer by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelmill.checkpoint.open import Checkpoint
from modelmill.core.errors import ModelmillError
from modelmill.eval.report import BenchResult

SAMPLE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  Two leading spaces,\ttabs\nand\n\nnew lines  ",
    "Zürich, 北京 and naïve café: 3.14159 × 10⁶ — 100%",
    "def f(x):\n    return {'a': x[0], \"b\": x ** 2}\n",
    "👩‍👩‍👧‍👦 emoji, e\u0301 combining, العربية",
    "<|im_end|> </s> typed by a user",
)
SAMPLE_CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Hello!\n\nHow are you?"},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": " Who are you? "},
    ],
)

PLOT_MARKERS = "osD^v"


@dataclass(frozen=True)
class TokenizerCheck(BenchResult):
    """Comparison of one text or conversation between the engine and a reference.

    equal: None if the reference cannot process it; ``note`` has the reason. place: index of the
    first token (or character) that differs. ours, theirs: the engine's and the reference's value
    there.
    """

    what: str
    subject: str
    against: str
    equal: bool | None
    place: int | None = None
    ours: str | None = None
    theirs: str | None = None
    note: str | None = None


def check_tokenizer_and_chat(llm: Any, checkpoint: Checkpoint) -> list[TokenizerCheck]:
    """Compare chat rendering and tokens of sample texts with a reference.

    The reference is the transformers tokenizer if it can be loaded, else the checkpoint's own
    files. The list is empty if the checkpoint has no tokenizer.
    """
    if not checkpoint.tokenizer_files():
        return []
    if llm.tokenizer is None:
        return [
            TokenizerCheck(
                "tokens",
                "",
                "checkpoint",
                False,
                note="the checkpoint has a tokenizer, the engine has none",
            )
        ]
    reference = _transformers_tokenizer_reference(checkpoint) or _checkpoint_tokenizer_reference(
        checkpoint
    )
    return [*_check_chat_templates(llm, reference), *_check_tokenization(llm, reference)]


@dataclass(frozen=True)
class TokenizerReference:
    """Tokenizer and chat template that the engine is compared with.

    encode: text to token ids. render: conversation to text; None if there is no chat template.
    """

    name: str
    encode: Callable[[str], list[int]]
    render: Callable[[list[dict[str, str]]], str] | None


def _transformers_tokenizer_reference(checkpoint: Checkpoint) -> TokenizerReference | None:
    """Load the transformers tokenizer of a Hugging Face folder.

    None if transformers is not installed or cannot load this tokenizer.
    """
    path = Path(checkpoint.path)
    if not path.is_dir() or not (path / "tokenizer.json").is_file():
        return None
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception:
        # After any failure the checkpoint's own files can still be compared.
        return None

    def render(messages: list[dict[str, str]]) -> str:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    # Control tokens in user text are plain text for us; transformers parses them by default.
    return TokenizerReference(
        "transformers",
        lambda text: list(tokenizer(text, split_special_tokens=True)["input_ids"]),
        render if getattr(tokenizer, "chat_template", None) else None,
    )


def _checkpoint_tokenizer_reference(checkpoint: Checkpoint) -> TokenizerReference:
    from modelmill.text.chat_format_loader import load_chat_format
    from modelmill.text.tokenizer_loader import load_tokenizer

    files = checkpoint.tokenizer_files()
    tokenizer = load_tokenizer(files)
    chat = load_chat_format(files, tokenizer)
    return TokenizerReference(
        "the checkpoint's files", tokenizer.encode, chat.render if chat is not None else None
    )


def _check_chat_templates(llm: Any, reference: TokenizerReference) -> Iterable[TokenizerCheck]:
    if llm.chat_format is None and reference.render is None:
        return
    if llm.chat_format is None or reference.render is None:
        side = "the engine" if llm.chat_format is None else reference.name
        yield TokenizerCheck(
            "template", "", reference.name, False, note=f"only {side} has no chat template"
        )
        return
    for number, messages in enumerate(SAMPLE_CHATS, 1):
        subject = f"conversation {number}"
        try:
            expected = reference.render([dict(message) for message in messages])
        except Exception as error:
            yield TokenizerCheck(
                "template",
                subject,
                reference.name,
                None,
                note=f"{reference.name} cannot render it: {error}",
            )
            continue
        try:
            actual = llm.chat_format.render(
                [dict(message) for message in messages], add_generation_prompt=True
            )
        except ModelmillError as error:
            yield TokenizerCheck(
                "template",
                subject,
                reference.name,
                False,
                note=f"the engine cannot render it: {error}",
            )
            continue
        yield _compare_sequences("template", subject, reference.name, actual, expected)


def _check_tokenization(llm: Any, reference: TokenizerReference) -> Iterable[TokenizerCheck]:
    for text in SAMPLE_TEXTS:
        yield _compare_sequences(
            "tokens", text, reference.name, llm.tokenizer.encode(text), reference.encode(text)
        )


def _compare_sequences(
    what: str, subject: str, against: str, actual: Sequence[Any], expected: Sequence[Any]
) -> TokenizerCheck:
    """Compare two sequences and describe the first difference."""
    if list(actual) == list(expected):
        return TokenizerCheck(what, subject, against, True)
    pairs = zip(actual, expected, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(actual), len(expected)))
    excerpt_len = 20 if isinstance(actual, str) else 1
    return TokenizerCheck(
        what,
        subject,
        against,
        False,
        place,
        _excerpt(actual, place, excerpt_len),
        _excerpt(expected, place, excerpt_len),
    )


def _excerpt(values: Sequence[Any], position: int, length: int) -> str:
    return (
        "(ended)"
        if position >= len(values)
        else str(values[position : position + length] if length > 1 else values[position])
    )


def compare_tokenizer_and_layers(
    llm: Any,
    checkpoint: Checkpoint,
    compare_layers: Callable[[], dict[str, Any]],
    checks: Sequence[TokenizerCheck] | None = None,
) -> dict[str, Any]:
    """Run the whole comparison: text checks, then layers.

    ``compare_layers`` returns verdict, layer, module, layers and accepted; the result adds ``text``
    (the template and token checks) and ``passed``. If the layers are accepted, a failed text check
    replaces the verdict.
    """
    checks = check_tokenizer_and_chat(llm, checkpoint) if checks is None else checks
    layer_result = compare_layers()
    result = {**layer_result, "text": [check.to_dict() for check in checks]}
    failed = next((check for check in checks if check.equal is False), None)
    result["passed"] = failed is None and bool(layer_result["accepted"])
    if failed is not None and layer_result["accepted"]:
        module = "tokenizer" if failed.what == "tokens" else "chat template"
        subject = json.dumps(failed.subject, ensure_ascii=False) if failed.subject else failed.note
        result |= {"verdict": f"the {module} differs: {subject}", "layer": None, "module": module}
    return result


def draw_layer_errors(axes: Any, layers: Sequence[dict[str, Any]]) -> None:
    """Draw the largest relative error by layer on a log scale, one line per module.

    Values out of tolerance are marked with a cross. Errors of exactly 0 are left out; infinite
    errors are marked at the top of the scale.
    """
    depth = max((layer["layer"] for layer in layers if layer.get("layer") is not None), default=0)
    modules: dict[str, list[tuple[int, float, bool]]] = {}
    for layer in layers:
        x = layer.get("layer")
        if x is None:
            x = -1 if layer["module"] == "embed" else depth + 1
        error = float(layer["max_rel"])
        modules.setdefault(str(layer["module"]), []).append((x, error, bool(layer.get("ok", True))))
    finite = [
        error for points in modules.values() for _, error, _ in points if 0.0 < error < math.inf
    ]
    top = 10.0 * max(finite, default=1.0)
    for number, (module, points) in enumerate(sorted(modules.items())):
        drawn = [(x, error) for x, error, _ in points if 0.0 < error < math.inf]
        wrong = [(x, min(error, top)) for x, error, ok in points if not ok]
        style = {
            "color": f"C{number % 10}",
            "marker": PLOT_MARKERS[number // 10 % len(PLOT_MARKERS)],
            "linewidth": 0.9,
        }
        axes.plot(
            [x for x, _ in drawn],
            [error for _, error in drawn],
            markersize=4,
            label=module,
            **style,
        )
        axes.scatter(
            [x for x, _ in wrong],
            [error for _, error in wrong],
            marker="x",
            color="red",
            zorder=3,
        )
    axes.set_yscale("log")
    axes.set_xlabel("layer (-1: embedding; last: final norm and head); red: out of tolerance")
    axes.set_ylabel("largest error / largest value")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
