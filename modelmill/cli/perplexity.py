"""``modelmill perplexity``: the perplexity of a text file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.evaluation_options import (
    EvaluationArgs,
    load_transformers_reference,
    open_evaluated_engine,
    require_transformers_for_reference,
)
from modelmill.cli.output import print_json, print_table, show_progress
from modelmill.core.config import option_field
from modelmill.core.errors import TokenizerError, UsageError

if TYPE_CHECKING:
    from modelmill.eval.perplexity import Perplexity

HELP = "Measure the perplexity of a text file, by sliding windows."
EPILOG = """The file is tokenized once, without BOS or special tokens. Each token is scored once, in the first
window that contains it. The tokens before it in this window are its context. The first token of a window has no context, so it is
not scored there.

Examples:

  modelmill perplexity model.engine --data wiki.txt --max-length 1024 --stride 512 --limit-tokens 16384"""  # noqa: E501

MAX_DEFAULT_WINDOW_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Args(EvaluationArgs):
    """Command-line options of ``modelmill perplexity``."""

    data: Path | None = option_field(None, "UTF-8 text file", required=True, metavar="FILE")
    max_length: int | None = option_field(
        None,
        "tokens in a window (default: what the engine allows, at most "
        f"{MAX_DEFAULT_WINDOW_TOKENS})",
    )
    stride: int | None = option_field(
        None, "tokens from one window's begin to the next (default: --max-length)"
    )
    limit_tokens: int | None = option_field(None, "read only this many tokens of the file")


def run(args: Args) -> int:
    """Print the perplexity, and the reference's with the difference."""
    from modelmill.eval.bench_targets import EngineScorer
    from modelmill.eval.datasets import read_text
    from modelmill.eval.perplexity import measure_perplexity

    assert args.data is not None
    for name, value, minimum in (
        ("--max-length", args.max_length, 2),
        ("--limit-tokens", args.limit_tokens, 1),
    ):
        if value is not None and value < minimum:
            raise UsageError(f"{name} must be at least {minimum}, not {value}")
    require_transformers_for_reference(args)
    text = read_text(args.data)
    llm = open_evaluated_engine(args)
    if llm.tokenizer is None:
        raise TokenizerError(
            f"{args.engine} is an ids-only engine (no tokenizer); a perplexity needs one"
        )
    length = args.max_length or min(llm.engine_core.max_model_len, MAX_DEFAULT_WINDOW_TOKENS)
    if length > llm.engine_core.max_model_len:
        raise UsageError(
            f"--max-length {length} is more than this engine reads "
            f"({llm.engine_core.max_model_len})"
        )
    stride = args.stride if args.stride is not None else length
    ids = llm.tokenizer.encode(text, bos=False)[: args.limit_tokens]
    with show_progress("perplexity", quiet=args.json) as on_progress:
        measured = measure_perplexity(
            ids,
            EngineScorer(llm.engine_core),
            max_length=length,
            stride=stride,
            on_progress=on_progress,
        )
    result: dict[str, Any] = {**asdict(measured), "max_length": length, "stride": stride}
    if args.reference is not None:
        reference = _measure_reference_perplexity(args, ids, length, stride, llm.engine_core.device)
        result["reference"] = {**asdict(reference), "dtype": args.reference_dtype}
        result["relative_difference"] = measured.perplexity / reference.perplexity - 1.0
    print_json(result) if args.json else _show_perplexity(result)
    return 0


def _measure_reference_perplexity(
    args: Args, ids: list[int], length: int, stride: int, device: str
) -> Perplexity:
    from modelmill.eval.perplexity import measure_perplexity

    _, reference = load_transformers_reference(args, device)
    with show_progress("transformers", quiet=args.json) as on_progress:
        return measure_perplexity(
            ids, reference, max_length=length, stride=stride, on_progress=on_progress
        )


def _show_perplexity(result: dict[str, Any]) -> None:
    rows = [
        [
            "modelmill",
            result["perplexity"],
            result["nll"],
            result["tokens"],
            result["windows"],
            result["seconds"],
        ]
    ]
    reference = result.get("reference")
    if reference is not None:
        name = f"transformers, {reference['dtype']}"
        rows.append(
            [
                name,
                *[reference[key] for key in ("perplexity", "nll", "tokens", "windows", "seconds")],
            ]
        )
    shown = [[name, f"{ppl:.5f}", f"{nll:.6f}", *rest] for name, ppl, nll, *rest in rows]
    print_table(("", "perplexity", "nats per token", "tokens", "windows", "seconds"), shown)
    if reference is not None:
        print(f"difference: {100 * result['relative_difference']:+.4f} %")
