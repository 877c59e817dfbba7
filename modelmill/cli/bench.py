"""``modelmill bench``: measure latency, throughput and start-up."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.bench_ops import (
    check_bench_ops_options,
    make_op_rows,
    measure_ops,
    plot_op_fractions,
    show_op_times,
)
from modelmill.cli.bench_report import make_result_rows, plot_bench_results, show_bench_table
from modelmill.cli.bench_serve import (
    check_load_test_options,
    make_serve_result_rows,
    run_load_test,
    show_load_test_results,
)
from modelmill.cli.engine_options import (
    ENGINE_HELP,
    ImplicitBuildOptions,
    open_llm,
    resolve_or_pull_model,
    share_gpu_with_reference,
)
from modelmill.cli.options import CommonArgs, config_field
from modelmill.cli.output import print_json, print_note, show_progress
from modelmill.core.config import (
    DTYPE_CHOICES,
    RunConfig,
    non_default_fields,
    option_field,
    path_option_field,
)
from modelmill.core.errors import TokenizerError, UsageError
from modelmill.core.packages import require_package

if TYPE_CHECKING:
    from modelmill.eval.bench_targets import BenchTarget
    from modelmill.eval.datasets import BenchRequest
    from modelmill.llm import LLM

HELP = (
    "Measure first token, tokens per second, start-up, optionally also of transformers; every "
    "kernel by itself."
)
EPILOG = """latency: all of a batch at once, prompt and answer of one length, for each batch size.

throughput: many requests at once, of one length, of a data set or of a trace.

startup: fresh processes, from their start to the first token.

serve: a server that speaks OpenAI's API, ours or another's, under load: first token, times between tokens, goodput.

ops: every kernel against what the memory and the arithmetic units give, measured in the same run; no engine is needed.

Examples:

  modelmill bench latency model.engine --batch-size 1,2,4,8 --input-len 128 --output-len 64 --plot latency.png

  modelmill bench latency model.engine --reference hf --checkpoint model.gguf

  modelmill bench throughput model.engine --dataset sharegpt.json --num-prompts 200

  modelmill bench throughput model.engine --trace trace.csv --num-prompts 500

  modelmill bench serve --url http://127.0.0.1:8000 --request-rate 4 --num-prompts 200 --first-ms 500 --token-ms 50

  modelmill bench ops --op linear --op rms_norm --dtype bfloat16"""  # noqa: E501

BENCHMARKS = ("latency", "throughput", "startup", "serve", "ops")
DEFAULT_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Command-line options of ``modelmill bench``."""

    what: str = option_field(
        help="latency, throughput, startup, serve, ops",
        positional=True,
        choices=BENCHMARKS,
        metavar="WHAT",
    )
    engine: Path | None = option_field(
        None, ENGINE_HELP + "; none for serve and ops", positional=True, metavar="ENGINE"
    )
    batch_size: tuple[int, ...] = option_field(
        (1,), "latency: batch sizes, measured one after another until memory is exhausted"
    )
    input_len: int = option_field(128, "tokens of a prompt; serve: words, each of a token or more")
    output_len: int = option_field(64, "tokens of an answer (end-of-text is ignored)")
    num_prompts: int | None = option_field(
        None, "throughput, serve: requests (default: 100; of a trace 500)"
    )
    dataset: Path | None = path_option_field(
        "throughput: ShareGPT json, or jsonl of prompts", "FILE"
    )
    trace: Path | None = path_option_field(
        "throughput, serve: lengths from a csv with ContextTokens and GeneratedTokens", "FILE.csv"
    )
    runs: int | None = option_field(None, "measured runs (default: 5; ops: 15 rounds)")
    warmup: int = option_field(1, "runs before them that are not counted")
    url: str | None = option_field(None, "serve: address of the server")
    model: str | None = option_field(
        None, "serve: model of the requests (default: the first that the server lists)"
    )
    api_key: str | None = option_field(None, "serve: key of the server")
    request_rate: float | None = option_field(
        None, "serve: requests a second, as Poisson arrivals (default: all at once)"
    )
    concurrency: int | None = option_field(None, "serve: maximum concurrent requests")
    endpoint: str = option_field(
        "completions",
        "serve: endpoint to measure, /v1/completions or chat",
        choices=("completions", "chat"),
    )
    ignore_eos: bool = option_field(
        True, "serve: request answers of full length; not for servers that refuse the field"
    )
    first_ms: float | None = option_field(
        None, "serve: a good request has its first token within so many ms"
    )
    token_ms: float | None = option_field(
        None, "serve: a good request takes at most so many ms a token"
    )
    op: tuple[str, ...] = option_field((), "ops: only this one (repeatable)")
    variant: tuple[str, ...] = option_field(
        (), "ops: only this variant, torch, triton, cuda or cpu (repeatable)"
    )
    case: str = option_field("", "ops: only cases whose name contains this")
    reference: str | None = option_field(
        None, "measure transformers, too, in turn with the engine", choices=("hf",)
    )
    checkpoint: Path | None = path_option_field(
        "checkpoint for the reference (default: ENGINE, where that is one)", "CHECKPOINT"
    )
    reference_dtype: str | None = option_field(
        None, "type of the reference (default: the engine's)", choices=DTYPE_CHOICES
    )
    reference_batch_size: int = option_field(
        8, "throughput: size of the reference's static batches"
    )
    plot: Path | None = path_option_field("draw the figures", "FILE.png")
    save: Path | None = path_option_field("append the figures as rows", "FILE.jsonl")
    build: ImplicitBuildOptions = config_field(
        ImplicitBuildOptions, "A checkpoint in the engine's place"
    )
    enable_prefix_caching: bool = option_field(
        False, "reuse equal prompt beginnings: repeated runs then measure the cache"
    )
    run: RunConfig = config_field(RunConfig, "Engine", exclude=("enable_prefix_caching",))


def run(args: Args) -> int:
    """Measure, print, plot and save the rows."""
    _check_options(args)
    if args.what == "serve":
        return _bench_serve(args)
    benchmarks = {
        "latency": _measure_latency,
        "throughput": _measure_throughput,
        "startup": _measure_startup,
        "ops": measure_ops,
    }
    measured = benchmarks[args.what](args)
    command = _redacted_command(sys.argv[1:])
    ops = args.what == "ops"
    rows = (make_op_rows if ops else make_result_rows)(command, measured)
    if args.save is not None:
        from modelmill.eval.report import append_rows

        append_rows(args.save, rows)
    print_json({"command": command, **measured, "rows": rows}) if args.json else (
        show_op_times if ops else show_bench_table
    )(measured)
    if args.plot is not None:
        from modelmill.eval.report import plot

        title = (
            f"{args.what}: {'' if args.engine is None else args.engine.name + ' '}on "
            f"{measured['device']}"
        )
        plot(
            args.plot,
            lambda axes: (plot_op_fractions if ops else plot_bench_results)(axes, measured),
            title,
        )
    return 1 if ops and any(each["failed"] for each in measured["results"]) else 0


def _bench_serve(args: Args) -> int:
    """Save the measurements before printing and plotting, so that a failure there loses nothing."""
    measured, drawn = run_load_test(args)
    command = _redacted_command(sys.argv[1:])
    rows = make_serve_result_rows(command, measured, args)
    if args.save is not None:
        from modelmill.eval.report import append_rows

        append_rows(args.save, rows)
    print_json(
        {"command": command, **measured, "rows": rows}
    ) if args.json else show_load_test_results(measured)
    if args.plot is not None:
        drawn(args.plot)
    return 1 if measured["failed"] else 0


def _redacted_command(words: Sequence[str]) -> str:
    """Return the command line as it is saved, without the server's API key."""
    kept: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        if kept and kept[-1].replace("_", "-") == "--api-key":
            word = "***"
        elif equals and name.replace("_", "-") == "--api-key":
            word = f"{name}=***"
        kept.append(word)
    return shlex.join(["modelmill", *kept])


def _check_options(args: Args) -> None:
    for name in ("input_len", "output_len", "runs", "num_prompts", "reference_batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if args.warmup < 0:
        raise UsageError(f"--warmup must be at least 0, not {args.warmup}")
    if not args.batch_size or any(size < 1 for size in args.batch_size):
        raise UsageError("--batch-size must be one or more integers of at least 1")
    if args.dataset is not None and args.trace is not None:
        raise UsageError("give one of --dataset and --trace")
    if args.what != "throughput" and (args.dataset or (args.trace and args.what != "serve")):
        raise UsageError(
            "--dataset and --trace belong to bench throughput, --trace to bench serve as well"
        )
    if args.reference is not None and args.what in ("startup", "serve", "ops"):
        raise UsageError("--reference belongs to bench latency and throughput")
    if args.reference is not None:
        require_package("--reference", "transformers", "eval")
    if args.plot is not None:
        from modelmill.eval.report import check_plot_path

        check_plot_path(args.plot)
    if args.what == "serve":
        check_load_test_options(args)
        return
    if args.url is not None:
        raise UsageError("--url belongs to bench serve")
    if args.what == "ops":
        check_bench_ops_options(args.engine, args.op, args.variant)
        return
    _require_engine_path(args)
    if args.op or args.variant or args.case:
        raise UsageError("--op, --variant and --case belong to bench ops")


def _require_engine_path(args: Args) -> Path:
    """Return the engine's path, which all but serve and ops need."""
    if args.engine is None:
        raise UsageError(
            f"ENGINE is missing: bench {args.what} measures an engine; bench ops needs none"
        )
    return args.engine


def _open_engine_and_reference(args: Args, **options: Any) -> tuple[LLM, list[BenchTarget]]:
    """Return the engine, and transformers if requested."""
    from modelmill.eval.bench_targets import EngineTarget, HfTarget

    settings = replace(args.run, enable_prefix_caching=args.enable_prefix_caching, **options)
    if args.reference is not None:
        settings = share_gpu_with_reference(settings)
    llm = open_llm(_require_engine_path(args), args.build, settings)
    subjects: list[BenchTarget] = [EngineTarget(llm.engine_core)]
    if args.reference is not None:
        from modelmill.artifact.store import is_engine_folder
        from modelmill.checkpoint.open import open_checkpoint
        from modelmill.eval.hf_reference import load_reference

        source = resolve_or_pull_model(args.checkpoint or _require_engine_path(args))
        if is_engine_folder(source):
            raise UsageError(
                "--reference hf needs --checkpoint CHECKPOINT, the one the engine was built from"
            )
        dtype = args.reference_dtype or str(llm.engine_core.dtype).removeprefix("torch.")
        print_note(f"loading {source} into transformers ({dtype})")
        reference = load_reference(open_checkpoint(source), dtype, llm.engine_core.device)
        batch = max(args.batch_size) if args.what == "latency" else args.reference_batch_size
        subjects.append(HfTarget(reference, batch, f"transformers {dtype}"))
    return llm, subjects


def _measure_latency(args: Args) -> dict[str, Any]:
    from modelmill.eval.latency import LatencyShape, sweep_shapes

    llm, subjects = _open_engine_and_reference(
        args, max_num_seqs=max(args.run.max_num_seqs, *args.batch_size)
    )
    shapes = [LatencyShape(batch, args.input_len, args.output_len) for batch in args.batch_size]
    with show_progress("latency", quiet=args.json) as on_progress:
        sweep_options = {
            "runs": args.runs or DEFAULT_RUNS,
            "warmup": args.warmup,
            "seed": args.run.seed,
            "on_progress": on_progress,
        }
        sweep = sweep_shapes(subjects, shapes, llm.engine_core.vocab, **sweep_options)
    if sweep.stop_reason is not None:
        print_note(f"the sweep ended before its last batch size: {sweep.stop_reason}")
    results = [each.to_dict() for each in sweep.results]
    return {
        **_common_row_facts(args, llm),
        "ended": sweep.stop_reason,
        "results": results,
        "speedups": _speedups(results, _latency_to_compare),
    }


def _measure_throughput(args: Args) -> dict[str, Any]:
    from modelmill.eval.throughput import measure_throughput

    llm, subjects = _open_engine_and_reference(args)
    work = _make_bench_requests(args, llm)
    with show_progress("throughput", quiet=args.json) as on_progress:
        measurements = measure_throughput(
            subjects,
            work,
            runs=args.runs or DEFAULT_RUNS,
            warmup=args.warmup,
            on_progress=on_progress,
        )
    results = [each.to_dict() for each in measurements]
    return {
        **_common_row_facts(args, llm),
        "results": results,
        "speedups": _speedups(results, lambda each: each["seconds"]),
    }


def _make_bench_requests(args: Args, llm: LLM) -> list[BenchRequest]:
    from modelmill.eval.datasets import (
        MAX_TRACE_REQUEST_TOKENS,
        random_requests,
        read_bench_requests,
        sample_request_lengths,
    )

    limit = llm.engine_core.max_model_len
    vocab = llm.engine_core.vocab
    seed = args.run.seed
    if args.trace is not None:
        return random_requests(
            sample_request_lengths(
                args.trace, args.num_prompts or 500, min(limit, MAX_TRACE_REQUEST_TOKENS)
            ),
            vocab,
            seed,
        )
    count = args.num_prompts or 100
    if args.dataset is not None:
        tokenizer = llm.tokenizer
        if tokenizer is None:
            raise TokenizerError(
                f"{args.engine} is an ids-only engine (no tokenizer); leave --dataset out"
            )
        work = read_bench_requests(args.dataset, count, tokenizer.encode, limit, args.output_len)
        if len(work) < count:
            print_note(f"{args.dataset} holds only {len(work)} prompts that fit, not {count}")
        return work
    return random_requests([(args.input_len, args.output_len)] * count, vocab, seed)


def _measure_startup(args: Args) -> dict[str, Any]:
    from modelmill.artifact.store import is_engine_folder, open_artifact
    from modelmill.eval.report import device_name
    from modelmill.eval.startup import measure_startup
    from modelmill.loader.device import ensure_cpu_kernels_compiled, resolve_device, set_cpu_threads

    # a checkpoint is built first; the build is not part of start-up
    path = _require_engine_path(args)
    engine = path if is_engine_folder(path) else open_llm(path, args.build, args.run).path
    device = resolve_device(args.run.device)
    if device == "cpu":
        set_cpu_threads(args.run.threads)
    with show_progress("startup", quiet=args.json) as on_progress:
        ensure_cpu_kernels_compiled(
            device, on_progress
        )  # compiled once per machine, so not part of start-up
        measurement = measure_startup(
            engine,
            non_default_fields(args.run),
            input_length=args.input_len,
            runs=args.runs or DEFAULT_RUNS,
            on_progress=on_progress,
        )
    build = open_artifact(engine).manifest.build
    facts = {"engine": str(args.engine), "device": device_name(device), "dtype": build["dtype"]}
    facts["quantization"] = build["quantization"]
    return {
        "what": "startup",
        **facts,
        "results": [{"subject": "modelmill", **measurement.to_dict()}],
    }


def _common_row_facts(args: Args, llm: LLM) -> dict[str, Any]:
    from modelmill.eval.report import device_name

    build = llm.engine_core.artifact.manifest.build  # type: ignore[union-attr]
    return {
        "what": args.what,
        "engine": str(args.engine),
        "device": device_name(llm.engine_core.device),
        "dtype": build["dtype"],
        "quantization": build["quantization"],
        "kernels": dict(llm.engine_core.ops.backends),
    }


def _latency_to_compare(result: Mapping[str, Any]) -> Mapping[str, Any]:
    return result["per_token_ms"] or result["first_token_ms"]


def _speedups(results: Sequence[Mapping[str, Any]], of: Any) -> list[dict[str, Any]]:
    """Return the reference's median over the engine's, for each shape with both measurements."""
    speedups = []
    for ours in results:
        for reference in results:
            same = ours.get("shape") == reference.get("shape")
            if same and ours["subject"] == "modelmill" and reference["subject"] != "modelmill":
                ratio = of(reference)["median"] / of(ours)["median"]
                speedups.append(
                    {"over": reference["subject"], "shape": ours.get("shape"), "speedup": ratio}
                )
    return speedups
