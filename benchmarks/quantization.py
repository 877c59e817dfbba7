"""Build a quantization recipe, compare it with float32, and append a row of results.

    python benchmarks/quantization.py CHECKPOINT --text FILE.txt [--summaries FILE.jsonl] -- -q int4
    --method gptq python benchmarks/quantization.py --report

What stands behind ``--`` are options of ``modelmill build``, with paths from the repository's root;
the engine is built by that verb, with acceptance, in the work folder and is kept there for the next
run as long as the code that made it and the files it was made of are the same (--fresh builds it
again all the same). The float32 engine of the checkpoint is built beside it, and its logits are
kept. A row that stands already is not measured twice (--again does). A refused engine gives a row,
too. The text must not be what the recipe was calibrated on.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import engine_cache, result_rows  # noqa: E402
from benchmarks.fidelity import cached_logits, measure_fidelity, split_windows  # noqa: E402
from modelmill.core.progress_callback import Progress  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "quantization.jsonl"
FLOAT32 = ("--dtype", "float32")


def main(argv: Sequence[str]) -> int:
    """The script."""
    options, build = parse_args(argv)
    if options.report:
        report(read_rows(options.results))
        return 0
    row = measure_build(options, build, argv)
    if row is not None:
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        report([row])
    return 0


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and those of the build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--text", type=Path, help="UTF-8 text that is read")
    parser.add_argument(
        "--calibration",
        type=Path,
        help=f"default: {result_rows.CALIBRATION} beside the text, if it is there",
    )
    parser.add_argument(
        "--summaries",
        type=Path,
        help="jsonl of articles and highlights: ROUGE of their summaries, too",
    )
    parser.add_argument("--num", type=int, default=100, help="summaries")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument(
        "--whole-inputs",
        action="store_true",
        help="the same weights, inputs not rounded: W4A16 of W4A8",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "quantization")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--fresh", action="store_true", help="build the engine again")
    parser.add_argument("--again", action="store_true", help="measure even if the row is there")
    parser.add_argument("--report", action="store_true", help="print the table and end")
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    if not options.report and (options.checkpoint is None or options.text is None):
        parser.error("CHECKPOINT and --text FILE are needed")
    if options.summaries is not None and importlib.util.find_spec("rouge_score") is None:
        parser.error("--summaries needs rouge-score, which is not installed")
    for name in ("checkpoint", "text", "calibration", "summaries", "work"):
        path = getattr(options, name)
        setattr(options, name, None if path is None else path.resolve())
    return options, words[cut + 1 :]


def measure_build(
    options: argparse.Namespace, build: list[str], argv: Sequence[str]
) -> dict[str, Any] | None:
    """Build, measure; the row, or None where it stands already."""
    from modelmill.eval.datasets import read_text, refuse_calibration_file

    key, stands = result_rows.matching_rows(read_rows(options.results), options, build)
    if stands and not options.again:
        older = (
            ""
            if stands[-1].get("sources") == engine_cache.source_digest()
            else ", of other sources than today's"
        )
        engine_cache.note(
            f"this row stands already{older}: {shlex.join(build) or 'as it is'} (--again measures "
            "once more)"
        )
        return None
    folder = options.work / options.checkpoint.stem
    folder.mkdir(parents=True, exist_ok=True)
    plain, _ = engine_cache.build_or_reuse(options.checkpoint, FLOAT32, folder)
    assert plain is not None, "the float32 engine is accepted"
    words = (*result_rows.calibration_options(options, build), *dtype_options(build), *build)
    engine, seconds = engine_cache.build_or_reuse(options.checkpoint, words, folder, options.fresh)
    row: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/quantization.py", *argv]),
        "key": key,
    }
    row |= {
        "checkpoint": options.checkpoint.name,
        "options": shlex.join(build),
        "text": options.text.name,
    }
    row |= {
        "tokens": options.tokens,
        "window": options.window,
        "kv_cache_dtype": options.kv_cache_dtype,
    }
    row |= {
        "sources": engine_cache.source_digest(),
        "names": result_rows.option_names(options, build),
        "text_sha256": engine_cache.option_file_digests([str(options.text)])[0],
    }
    row |= {"whole_inputs": True} if options.whole_inputs else {}
    if engine is None:
        calibration = engine_cache.planned_calibration(options.checkpoint, words)
        return row | {"accepted": False, "calibration": calibration} | row_provenance("")
    loop = open_engine_core(engine, options, options.kv_cache_dtype)
    if options.whole_inputs:
        keep_inputs_unquantized(loop)
    refuse_calibration_file(options.text, loop.artifact.manifest.source)
    ids = encode_text(loop, read_text(options.text), options.tokens)
    windows = split_windows(ids, options.window)
    reference = folder / f"reference-{engine_cache.engine_content_digest(plain)}"
    expected = cached_logits(
        lambda: open_engine_core(plain, options, "auto"),
        windows,
        reference,
        make_progress("float32"),
    )
    exact = cached_perplexity(expected, windows, reference)
    began = time.perf_counter()
    fidelity = measure_fidelity(loop, windows, expected, make_progress(shlex.join(build)))
    row |= artifact_facts(loop.artifact) | {"tokens": len(ids), "windows": len(windows)} | fidelity
    row |= {"float32": exact, "excess": fidelity["perplexity"] / exact - 1}
    row |= {"build_seconds": seconds, "seconds": round(time.perf_counter() - began, 1)}
    device = str(loop.device)
    del loop
    if (articles := result_rows.rouge_articles(options)) is not None:
        row |= measure_rouge(engine, options) | {"articles": articles}
    return row | row_provenance(device)


def dtype_options(build: Sequence[str]) -> Sequence[str]:
    """Return build options with float32 activations by default, to measure the recipe alone."""
    return () if "--dtype" in build else FLOAT32


def measure_rouge(engine: Path, options: argparse.Namespace) -> dict[str, Any]:
    """ROUGE of an engine's greedy summaries in percent, by the verb."""
    summarize_args = [
        "--data",
        str(options.summaries),
        "--num",
        str(options.num),
        "--device",
        options.device,
    ]
    summarize_args += ["--kv-cache-dtype", options.kv_cache_dtype]
    summarize_args += [] if options.threads is None else ["--threads", str(options.threads)]
    command = [
        sys.executable,
        "-m",
        "modelmill",
        "summarize",
        str(engine),
        *summarize_args,
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"the summaries ended with {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    report = json.loads(done.stdout)["engine"]
    return {"rouge": report["rouge"], "summaries": report["items"]}


def open_engine_core(engine: Path, options: argparse.Namespace, kv: str) -> Any:
    """A loop that reads one window at a time."""
    from modelmill.core.config import RunConfig
    from modelmill.runtime.engine_core import EngineCore

    length = options.window
    fields = {
        "device": options.device,
        "threads": options.threads,
        "kv_cache_dtype": kv,
        "max_num_seqs": 1,
    }
    return EngineCore.open(
        engine,
        RunConfig(
            **fields, max_model_len=length, kv_cache_bytes=2**28, enable_prefix_caching=False
        ),
    )


def keep_inputs_unquantized(engine_core: Any) -> None:
    """Weights that round their inputs become dense ones of the same values."""
    from modelmill.nn.linear import Linear
    from modelmill.weights.dense import DenseWeight

    for module in engine_core.model_runner.model.modules():
        if isinstance(module, Linear) and hasattr(module.weight, "fake_quantize_input"):
            module.weight = DenseWeight(module.weight.dequantize())


def encode_text(engine_core: Any, text: str, count: int) -> list[int]:
    """The first ``count`` tokens, without BOS."""
    from modelmill.text.tokenizer_loader import load_tokenizer

    return load_tokenizer(engine_core.artifact.tokenizer_files()).encode(text, bos=False)[:count]


def cached_perplexity(
    reference_core: Any, windows: Sequence[Sequence[int]], reference: Path
) -> float:
    """The reference's own perplexity, kept in a small file beside its logits."""
    from benchmarks.fidelity import FidelitySums

    digest = hashlib.sha256(json.dumps(list(map(list, windows))).encode()).hexdigest()[:12]
    file = reference.with_name(f"{reference.name}-{digest}.json")
    if not file.exists():
        import torch

        sums, first = FidelitySums(), 0
        for window in windows:
            sums.add(
                reference_core[first : first + len(window)], None, torch.tensor([*window[1:], -1])
            )
            first += len(window)
        file.write_text(json.dumps(sums.facts()))
    return float(json.loads(file.read_text())["perplexity"])


def artifact_facts(artifact: Any) -> dict[str, Any]:
    """Recipe and options as the manifest has them, bytes on disk and of the linears."""
    manifest = artifact.manifest
    config = manifest.build
    format_counts: dict[str, int] = {}
    for module, weight_format in manifest.weight_formats.items():
        if not module.startswith("head"):
            format_counts[weight_format] = format_counts.get(weight_format, 0) + 1
    facts: dict[str, Any] = {
        "recipe": config["quantization"],
        "method": config.get("method"),
        "dtype": config["dtype"],
    }
    facts |= {
        "group": config.get("group_size"),
        "symmetric": config.get("symmetric"),
        "kinds": format_counts,
        "accepted": True,
    }
    calibration = manifest.source.get("calibration")
    facts["calibration"] = (
        None if calibration is None else {k: calibration[k] for k in engine_cache.CALIBRATION_KEYS}
    )
    return facts | {"bytes": sum(entry["bytes"] for entry in manifest.files.values())}


def row_provenance(device: str) -> dict[str, Any]:
    """Device and host, versions, date and commit."""
    from modelmill.eval.provenance import git_commit, host_and_gpu_info
    from modelmill.eval.report import device_name, versions

    now = datetime.now(UTC).isoformat("T", "seconds")
    return {
        "device": device_name(device or "cpu"),
        "versions": versions(),
        "date": now,
        "commit": git_commit(),
        **host_and_gpu_info(),
    }


def read_rows(file: Path) -> list[dict[str, Any]]:
    """All rows; an absent file has none."""
    return (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if file.exists()
        else []
    )


def report(rows: Sequence[dict[str, Any]]) -> None:
    """A table, the last row of each measurement, by checkpoint and excess."""
    from modelmill.cli.output import print_table
    from modelmill.core.byte_size import format_bytes

    last = {row["key"]: row for row in rows}.values()
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in last:
        groups.setdefault(
            (row["checkpoint"], row["text"], row["tokens"], row["window"]), []
        ).append(row)
    for (checkpoint, text, tokens, window), group in groups.items():
        cells = []
        names = [row_label(row) for row in group]
        for row in sorted(group, key=lambda row: row.get("excess", float("inf"))):
            name = row_label(row)
            if names.count(name) > 1:  # what else makes them two measurements
                calibrated = (row.get("calibration") or {}).get("name")
                name += f", {result_rows.without_threads(row['device'])}" + (
                    f", calibrated on {calibrated}" if calibrated else ""
                )
            if "perplexity" not in row:
                cells.append([name, "refused", *[None] * 5])
                continue
            numbers = [
                f"{row['perplexity']:.4f}",
                f"{100 * row['excess']:+.2f} %",
                f"{row['mean_kl']:.5f}",
            ]
            cells.append(
                [
                    name,
                    *numbers,
                    f"{100 * row['agreement']:.2f} %",
                    format_bytes(row["bytes"]),
                    row["seconds"],
                ]
            )
        title = f"{checkpoint}: {text}, {tokens} tokens in windows of {window}"
        columns = (
            "build",
            "perplexity",
            "over float32",
            "mean KL",
            "same next token",
            "on disk",
            "seconds",
        )
        print_table(columns, cells, title=title)


def row_label(row: dict[str, Any]) -> str:
    """What was built and how it was run."""
    name = f"{row['options']}{'' if row['kv_cache_dtype'] == 'auto' else ', KV ' + row['kv_cache_dtype']}"  # noqa: E501
    return name + ", inputs whole" * bool(row.get("whole_inputs")) or "as it is"


def make_progress(label: str) -> Progress:
    """Progress on stderr."""
    return lambda stage, done, total: print(
        f"\r{label}: {done}/{total} {stage}", end="\n" if done == total else "", file=sys.stderr
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
