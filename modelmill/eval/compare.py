"""An engine against its checkpoint: template and tokens first, then layer by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelmill.checkpoint.open import Checkpoint
from modelmill.core.errors import ModelmillError

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

MARKERS = "osD^v"


@dataclass(frozen=True)
class TextCheck:
    """One text or conversation on both sides. equal None: the other side cannot tell, ``note`` says
    why.

    place: index of the first token (or character) that differs; ours, theirs: what stands there.
    """

    what: str
    subject: str
    against: str
    equal: bool | None
    place: int | None = None
    ours: str | None = None
    theirs: str | None = None
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def check_text(llm: Any, checkpoint: Checkpoint) -> list[TextCheck]:
    """Chat rendering and tokens of a few texts: the engine's against transformers', else the
    checkpoint's own files.

    Empty where the checkpoint has no tokenizer.
    """
    if not checkpoint.tokenizer_files():
        return []
    if llm.tokenizer is None:
        return [
            TextCheck(
                "tokens",
                "",
                "checkpoint",
                False,
                note="the checkpoint has a tokenizer, the engine has none",
            )
        ]
    judge = _transformers_reference(checkpoint) or _checkpoint_reference(checkpoint)
    return [*_check_templates(llm, judge), *_check_tokens(llm, judge)]


@dataclass(frozen=True)
class TextReference:
    """The other side.

    encode: a text's ids; render: a conversation as text, None where it has no template.
    """

    name: str
    encode: Callable[[str], list[int]]
    render: Callable[[list[dict[str, str]]], str] | None


def _transformers_reference(checkpoint: Checkpoint) -> TextReference | None:
    """transformers' tokenizer of a Hugging Face folder; None where it is absent or cannot read this
    one.
    """
    path = Path(checkpoint.path)
    if not path.is_dir() or not (path / "tokenizer.json").is_file():
        return None
    try:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception:
        # Whatever it stumbles over, the checkpoint's own files can still be compared.
        return None

    def render(talk: list[dict[str, str]]) -> str:
        return str(theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))

    # Control tokens in a user's text are text for us; transformers reads them unless told so.
    return TextReference(
        "transformers",
        lambda text: list(theirs(text, split_special_tokens=True)["input_ids"]),
        render if getattr(theirs, "chat_template", None) else None,
    )


def _checkpoint_reference(checkpoint: Checkpoint) -> TextReference:
    from modelmill.text.chat import load_chat
    from modelmill.text.tokenizer import load_tokenizer

    files = checkpoint.tokenizer_files()
    tokenizer = load_tokenizer(files)
    chat = load_chat(files, tokenizer)
    return TextReference(
        "the checkpoint's files", tokenizer.encode, chat.render if chat is not None else None
    )


def _check_templates(llm: Any, reference: TextReference) -> Iterable[TextCheck]:
    if llm.chat_format is None and reference.render is None:
        return
    if llm.chat_format is None or reference.render is None:
        side = "the engine" if llm.chat_format is None else reference.name
        yield TextCheck(
            "template", "", reference.name, False, note=f"only {side} has no chat template"
        )
        return
    for number, talk in enumerate(SAMPLE_CHATS, 1):
        subject = f"conversation {number}"
        try:
            theirs = reference.render([dict(turn) for turn in talk])
        except Exception as error:
            yield TextCheck(
                "template",
                subject,
                reference.name,
                None,
                note=f"{reference.name} cannot render it: {error}",
            )
            continue
        try:
            ours = llm.chat_format.render([dict(turn) for turn in talk], add_generation_prompt=True)
        except ModelmillError as error:
            yield TextCheck(
                "template",
                subject,
                reference.name,
                False,
                note=f"the engine cannot render it: {error}",
            )
            continue
        yield _make_check("template", subject, reference.name, ours, theirs)


def _check_tokens(llm: Any, reference: TextReference) -> Iterable[TextCheck]:
    for text in SAMPLE_TEXTS:
        yield _make_check(
            "tokens", text, reference.name, llm.tokenizer.encode(text), reference.encode(text)
        )


def _make_check(
    what: str, subject: str, against: str, ours: Sequence[Any], theirs: Sequence[Any]
) -> TextCheck:
    """Equal, or the first place where they are not."""
    if list(ours) == list(theirs):
        return TextCheck(what, subject, against, True)
    pairs = zip(ours, theirs, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    step = 20 if isinstance(ours, str) else 1
    return TextCheck(
        what,
        subject,
        against,
        False,
        place,
        _excerpt(ours, place, step),
        _excerpt(theirs, place, step),
    )


def _excerpt(values: Sequence[Any], position: int, step: int) -> str:
    return (
        "(ended)"
        if position >= len(values)
        else str(values[position : position + step] if step > 1 else values[position])
    )


def compare_to_checkpoint(
    llm: Any,
    checkpoint: Checkpoint,
    compare_layers: Callable[[], dict[str, Any]],
    checks: Sequence[TextCheck] | None = None,
) -> dict[str, Any]:
    """The whole comparison; ``compare()`` gives the layers' part: verdict, layer, module, layers,
    accepted.

    Adds ``text``, the checks of template and tokens, and ``passed``. Tokens that differ are the
    first thing to mend; where the layers are right they take the verdict, else they stand beside
    it.
    """
    checks = check_text(llm, checkpoint) if checks is None else checks
    found = compare_layers()
    result = {**found, "text": [check.to_dict() for check in checks]}
    wrong = next((check for check in checks if check.equal is False), None)
    result["passed"] = wrong is None and bool(found["accepted"])
    if wrong is not None and found["accepted"]:
        module = "tokenizer" if wrong.what == "tokens" else "chat template"
        subject = json.dumps(wrong.subject, ensure_ascii=False) if wrong.subject else wrong.note
        result |= {"verdict": f"the {module} differs: {subject}", "layer": None, "module": module}
    return result


def draw_errors(axes: Any, layers: Sequence[dict[str, Any]]) -> None:
    """Largest error by layer over the largest value, log scale, a line a module; what is out of
    tolerance is crossed.

    Errors of exactly 0 and infinite ones have no place on the scale; infinite ones are crossed at
    its top.
    """
    depth = max((layer["layer"] for layer in layers if layer.get("layer") is not None), default=0)
    modules: dict[str, list[tuple[int, float, bool]]] = {}
    for layer in layers:
        place = layer.get("layer")
        if place is None:
            place = -1 if layer["module"] == "embed" else depth + 1
        error = float(layer["max_rel"])
        modules.setdefault(str(layer["module"]), []).append(
            (place, error, bool(layer.get("ok", True)))
        )
    finite = [
        error for points in modules.values() for _, error, _ in points if 0.0 < error < math.inf
    ]
    top = 10.0 * max(finite, default=1.0)
    for number, (module, points) in enumerate(sorted(modules.items())):
        shown = [(place, error) for place, error, _ in points if 0.0 < error < math.inf]
        wrong = [(place, min(error, top)) for place, error, ok in points if not ok]
        look = {
            "color": f"C{number % 10}",
            "marker": MARKERS[number // 10 % len(MARKERS)],
            "linewidth": 0.9,
        }
        axes.plot(
            [place for place, _ in shown],
            [error for _, error in shown],
            markersize=4,
            label=module,
            **look,
        )
        axes.scatter(
            [place for place, _ in wrong],
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
