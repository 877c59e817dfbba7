"""Prints the measurements that modelmill/accept/tolerances.py is built on: `… [CHECKPOINT.gguf]
[TOKENS]`.

Honest rounding and planted faults, in every dtype and recipe, on seeded Gaussian and heavy-tailed
models
and, where a GGUF file is given, on real weights reading our own text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from modelmill.accept.error_metrics import center_logits, compare_logits  # noqa: E402
from modelmill.accept.reference import ReferenceModel, open_reference  # noqa: E402
from modelmill.accept.tolerances import DTYPES_WITH_BOUNDS  # noqa: E402
from tests.accept.faultless_modules import FaultlessModules, arithmetic_of  # noqa: E402
from tests.accept.memory_checkpoint import MemoryCheckpoint, MemoryContainer, memory_checkpoint  # noqa: E402
from tests.accept.reference_faults import FAULTS, fault_rows  # noqa: E402
from tests.accept.seeded_checkpoint import seeded_decoder  # noqa: E402

SETTINGS = [
    (getattr(torch, dtype), recipe) for dtype in DTYPES_WITH_BOUNDS for recipe in ("none", "int8")
]


def gguf_checkpoint(path: Path) -> tuple[MemoryCheckpoint, Any]:
    """A GGUF file through the independent `gguf` package, and its reader."""
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {
        t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy())
        for t in reader.tensors
    }
    facts = {
        name: field.contents() for name, field in reader.fields.items() if "tokens" not in name
    }
    return MemoryCheckpoint(MemoryContainer(tensors, facts)), reader


def text_ids(reader: Any, text: str) -> list[int]:
    """The text in the file's byte-level BPE vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer.encode(text).ids


def faultless_lines(reference: ReferenceModel, ids: Tensor) -> Iterator[str]:
    worst: dict[Any, list[Any]] = {}
    faultless = {s: FaultlessModules(reference, *s) for s in SETTINGS}
    exact = reference.embed(ids)
    streams = {s: exact.to(s[0]) for s in SETTINGS}
    for index in range(reference.num_layers):
        weights = reference.layer_weights(index)
        trace = reference.run_layer(index, weights, exact, len(ids))
        for s in SETTINGS:
            for name, row in faultless[s].module_errors(index, weights, trace):
                now = worst.setdefault((s, arithmetic_of(name)), [0.0, 0.0, 0.0])
                now[:] = [
                    max(a, b)
                    for a, b in zip(now, (row.rel_l2, row.max_rel, abs(row.gain - 1)), strict=True)
                ]
            streams[s] = faultless[s].layer(index, weights, streams[s], trace)
        exact = trace["output"].output
    for (s, check), values in worst.items():
        yield (
            f"{str(s[0])[6:]:9} {s[1]:5} {check:11} l2 {values[0]:.1e} max {values[1]:.1e} gain "
            f"{values[2]:.1e}"
        )
    final = reference.head(exact)["logits"].output
    wide = center_logits(final)
    best = wide.topk(2).values
    margins = (best[:, 0] - best[:, 1]) / wide.std(-1)
    for s in SETTINGS:
        logits = faultless[s].head(streams[s])
        row = compare_logits("logits", logits, final)
        lost = margins[logits.argmax(-1) != final.argmax(-1)]
        yield (
            f"{str(s[0])[6:]:9} {s[1]:5} logits      l2 {row.rel_l2:.1e} "
            f"lost {len(lost)}/{len(ids)} at margins up to "
            f"{float(lost.max()) if len(lost) else 0:.1e}"
        )


def fault_lines(reference: ReferenceModel, ids: Tensor) -> Iterator[str]:
    for fault in FAULTS:
        for s in SETTINGS:
            rows = list(fault_rows(reference, fault, ids, *s))
            least = min(rows, key=lambda row: row.rel_l2)
            gain = min(abs(row.gain - 1) for row in rows)
            where = f"fault {fault:18} {str(s[0])[6:]:9} {s[1]:5}"
            yield f"{where} least l2 {least.rel_l2:.2e} ({least.name}) gain {gain:.2e}"


@torch.no_grad()
def main(arguments: list[str]) -> None:
    random_ids = torch.randint(0, 200, (96,), generator=torch.Generator().manual_seed(1))
    models = {
        f"{shape}-{layers}x{width}": (
            open_reference(
                memory_checkpoint(*seeded_decoder(layers=layers, hidden=width, shape=shape))
            ),
            random_ids,
        )
        for shape, layers, width in (
            ("gauss", 2, 64),
            ("gauss", 8, 256),
            ("gauss", 32, 128),
            ("heavy", 2, 64),
            ("heavy", 8, 256),
            ("heavy", 32, 128),
            ("heavy", 2, 1024),
        )
    }
    if arguments:
        checkpoint, reader = gguf_checkpoint(Path(arguments[0]))
        ids = torch.tensor(text_ids(reader, (ROOT / "modelmill/accept/text.txt").read_text()))
        count = int(arguments[1]) if len(arguments) > 1 else 128
        models["SmolLM2"] = (open_reference(checkpoint), ids[:count])
    for label, (reference, ids) in models.items():
        for line in (*faultless_lines(reference, ids), *fault_lines(reference, ids)):
            sys.stdout.write(f"{label:14} {line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
