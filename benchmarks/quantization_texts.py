"""Judge one quantization on texts of several kinds that took no part in choosing anything.

    python benchmarks/quantization_texts.py CHECKPOINT --text news=cnndm_eval.jsonl
    --text wikipedia=wikitext2.txt@65536 -- -q rptq

Each ``--text KIND=FILE[@SKIP]`` gives a row of results/quantization_texts.jsonl: perplexity of
the engine and of the checkpoint's float32 engine on the same windows. SKIP tokens are left out at
the beginning, such as those of a part that was looked at while a recipe was chosen. A jsonl file is
read as its texts one after another. What stands behind ``--`` are options of ``modelmill build``;
engines are kept as benchmarks/quantization.py keeps them. A file that the recipe was calibrated on
is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import engine_cache, quantization  # noqa: E402
from benchmarks.fidelity import measure_fidelity, split_windows  # noqa: E402
from modelmill.eval.provenance import provenance  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "quantization_texts.jsonl"
JSONL_KEYS = ("article", "turns", "text")


@dataclass(frozen=True)
class TextSource:
    """A text to judge on.

    Attributes:
        kind: what the table calls it.
        path: UTF-8 text, or jsonl of texts.
        skip: tokens left out at its beginning.
    """

    kind: str
    path: Path
    skip: int = 0


def parse_source(word: str) -> TextSource:
    """Parse KIND=FILE[@SKIP]; raises ArgumentTypeError, one line."""
    kind, equals, rest = word.partition("=")
    name, _, skip = rest.partition("@")
    if not (kind and equals and name and (skip.isdecimal() or "@" not in rest)):
        raise argparse.ArgumentTypeError(f"{word!r} is not KIND=FILE or KIND=FILE@SKIP")
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name} is no file")
    return TextSource(kind, Path(name), int(skip or 0))


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and those of the build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=parse_source, action="append", required=True)
    parser.add_argument("--calibration", type=Path, help="of recipes that calibrate")
    parser.add_argument("--windows", type=int, default=16, help="of each text")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--engine", type=Path, help="judge this engine instead of building one")
    parser.add_argument("--note", default="", help="what else the table says of the build")
    parser.add_argument("--kernel", action="append", default=[], help="OP=BACKEND, build and run")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "quantization")
    parser.add_argument("--results", type=Path, default=RESULTS)
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:cut]), words[cut + 1 :]


def main(argv: Sequence[str]) -> int:
    """The script."""
    options, build = parse_args(argv)
    folder = options.work.resolve() / options.checkpoint.stem
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = options.checkpoint.resolve()
    plain, _ = engine_cache.build_or_reuse(checkpoint, quantization.FLOAT32, folder)
    assert plain is not None, "the float32 engine is accepted"
    engine = options.engine
    if engine is None:
        engine, _ = engine_cache.build_or_reuse(checkpoint, _build_words(options, build), folder)
    if engine is None:
        raise SystemExit("the acceptance contract refused this build; there is nothing to judge")
    with options.results.open("a", encoding="utf-8") as file:
        for row in measure_texts(options, build, engine, plain):
            command = shlex.join(
                ["python", "benchmarks/quantization_texts.py", *map(portable, argv)]
            )
            file.write(json.dumps({"command": command, **row}) + "\n")
            file.flush()
            print(f"{row['options']}: {row['kind']} {100 * row['excess']:+.2f} %", flush=True)
    return 0


def portable(word: str) -> str:
    """Return a word of the command line without the folders of this machine."""
    kind, equals, path = word.rpartition("=")
    return f"{kind}{equals}{Path(path).name}" if path.startswith(("/", "..")) else word


def _build_words(options: argparse.Namespace, build: Sequence[str]) -> list[str]:
    words = [] if "--dtype" in build else list(quantization.FLOAT32)
    if options.calibration is not None and build:
        words += ["--calibration", str(options.calibration.resolve())]
    for each in options.kernel:
        words += ["--kernel", each]
    return [*words, *build]


def measure_texts(
    options: argparse.Namespace, build: Sequence[str], engine: Path, plain: Path
) -> Any:
    """Yield a row for each text; the two engines are opened once."""
    from modelmill.eval.datasets import refuse_calibration_file

    core = open_core(engine, options)
    reference: Any = None
    known = BaselineFile(plain.parent / f"texts-{engine_cache.engine_content_digest(plain)}.json")
    shared = {
        "checkpoint": options.checkpoint.name,
        "options": shlex.join(build),
        "note": options.note,
        **provenance(),
        "sources": engine_cache.source_digest(),
        **quantization.artifact_facts(core.artifact),
    }
    for source in options.text:
        refuse_calibration_file(source.path, core.artifact.manifest.source)
        windows = read_windows(core, source, options.windows, options.window)
        if known.get(windows) is None:
            reference = reference or open_core(plain, options)
            base = measure_fidelity(reference, windows, None, quantization.make_progress("float32"))
            known.put(windows, base["perplexity"])
        base_perplexity = known.get(windows)
        assert base_perplexity is not None, "it was measured just now"
        measured = measure_fidelity(core, windows, None, quantization.make_progress(source.kind))[
            "perplexity"
        ]
        yield {
            **shared,
            "kind": source.kind,
            "text": source.path.name,
            "text_sha256": hashlib.sha256(source.path.read_bytes()).hexdigest(),
            "skip": source.skip,
            "tokens": sum(map(len, windows)),
            "window": options.window,
            "perplexity": measured,
            "float32": base_perplexity,
            "excess": measured / base_perplexity - 1,
            **quantization.row_provenance(str(core.device)),
        }


class BaselineFile:
    """Perplexities of the float32 engine by their windows, in a small file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, windows: Sequence[Sequence[int]]) -> float | None:
        """Return the perplexity, or None if it is not measured."""
        value = self._read().get(_digest(windows))
        return None if value is None else float(value)

    def put(self, windows: Sequence[Sequence[int]], perplexity: float) -> None:
        """Add a measurement."""
        self.path.write_text(json.dumps({**self._read(), _digest(windows): perplexity}))

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}


def _digest(windows: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(w) for w in windows]).encode()).hexdigest()[:16]


def read_windows(core: Any, source: TextSource, count: int, length: int) -> list[list[int]]:
    """Return up to ``count`` whole windows of a text behind the skipped tokens.

    Raises:
        SystemExit: if the text has not one whole window there.
    """
    ids = quantization.encode_text(core, read_source(source.path), source.skip + count * length)
    whole = [w for w in split_windows(ids[source.skip :], length) if len(w) == length]
    if not whole:
        raise SystemExit(
            f"{source.path.name} has no window of {length} tokens behind {source.skip}; "
            "take a smaller --window or skip less"
        )
    return whole


def read_source(path: Path) -> str:
    """Return a text file, or the texts of a jsonl one after another, an empty line between."""
    from modelmill.eval.datasets import read_numbered_jsonl, read_text

    if path.suffix != ".jsonl":
        return read_text(path)
    parts = []
    for number, value in read_numbered_jsonl(path):
        text = next((value[key] for key in JSONL_KEYS if key in value), None)
        if text is None:
            raise SystemExit(f"{path.name}, line {number}: has none of {', '.join(JSONL_KEYS)}")
        parts.append(text if isinstance(text, str) else "\n".join(text))
    return "\n\n".join(parts)


def open_core(engine: Path, options: argparse.Namespace) -> Any:
    """An engine core that reads one window at a time."""
    from modelmill.core.config import RunConfig
    from modelmill.runtime.engine_core import EngineCore

    fields = {
        "device": options.device,
        "threads": options.threads,
        "max_num_seqs": 1,
        "max_model_len": options.window,
        "kv_cache_bytes": 2**28,
        "enable_prefix_caching": False,
        "kernels": dict(each.split("=", 1) for each in options.kernel),
    }
    return EngineCore.open(engine, RunConfig(**fields))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
