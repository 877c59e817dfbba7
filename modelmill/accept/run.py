"""The acceptance contract: a staged engine through the real runtime, against the float32 reference.

Modules, wiring and norms are judged one by one (``accept.engine``); then whole sequences run freely, in one batch,
partly as prefill and partly as decode, and their logits, next tokens and perplexity are judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from modelmill.accept.dropped import dropped_of_language, with_dropped
from modelmill.accept.ends import head_findings, table_findings
from modelmill.accept.engine import Bench
from modelmill.accept.finding import Finding
from modelmill.accept.own import is_low_bit, spoken
from modelmill.accept.place import Place, on_the_cpu, placed
from modelmill.accept.rounding import Rounding
from modelmill.accept.sequences import judge_sequences
from modelmill.accept.stages import row_of, short
from modelmill.artifact.quantization import read_quantization
from modelmill.artifact.store import Artifact, open_artifact
from modelmill.checkpoint.open import Checkpoint
from modelmill.core import log
from modelmill.core.config import RunConfig
from modelmill.core.quote import one_line
from modelmill.runtime.loop import Loop
from modelmill.text.tokenizer import load_tokenizer

_log = log.get(__name__)
Progress = Callable[[str, int, int], None]
SEQUENCES = 3
LENGTH = 96


def accept(staged: Path, checkpoint: Checkpoint, *, progress: Progress | None = None) -> dict[str, Any]:
    """Judge a staged engine. Returns the report: {"accepted", "reason", "verdict", "layer", "module", "layers", …}."""
    artifact = open_artifact(staged, staged=True)
    if artifact.manifest.kind == "segmentation":
        from modelmill.accept.segment import accept_segmentation

        return accept_segmentation(staged, checkpoint, progress=progress)
    config = RunConfig(
        device=artifact.manifest.build["target"] if torch.cuda.is_available() else "cpu",
        max_num_seqs=8,
        max_model_len=min(artifact.manifest.max_model_len, LENGTH),
        max_num_batched_tokens=LENGTH,
        kv_cache_bytes=_kv_bytes(artifact),
        kv_cache_dtype="activations",
        enable_prefix_caching=False,
        cuda_graphs=False,
        kernels=artifact.manifest.build["kernels"],
    )
    loop = Loop.open(artifact, config)
    return compare_engine(loop, checkpoint, sample_ids(artifact), progress=progress)


def sample_ids(artifact: Artifact) -> list[list[int]]:
    """Sequences to judge with: our own text, or seeded ids where the engine has no tokenizer."""
    limit = min(LENGTH, artifact.manifest.max_model_len)
    files = artifact.tokenizer_files()
    vocab = int(artifact.manifest.config.get("vocab_size") or artifact.manifest.config["padded_vocab_size"])
    if files:
        text = (resources.files("modelmill.accept") / "text.txt").read_text()
        ids = load_tokenizer(files).encode(text, bos=False)
    else:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab, (SEQUENCES * limit,), generator=generator).tolist()
    cuts = [ids[i * limit : (i + 1) * limit] for i in range(SEQUENCES)]
    return [cut for cut in cuts if len(cut) > 1] or [ids[:limit]]


def compare_engine(
    loop: Loop, checkpoint: Checkpoint, ids: Sequence[Sequence[int]], *, progress: Progress | None = None
) -> dict[str, Any]:
    """Compare an opened engine with its checkpoint on sequences of ids; every number is in the result.

    verdict: "numerical noise", or "bug at layer N, module M" with ``layer`` and ``module`` set.
    """

    def told(stage: str, done: int = 0, total: int = 1) -> None:
        if progress is not None:
            progress(f"acceptance: {stage}", done, total)

    if checkpoint.language is not None:
        from modelmill.accept.pictures import joined, judge_eyes

        told("eyes")
        return joined(judge_eyes(loop, checkpoint), compare_engine(loop, checkpoint.language, ids, progress=progress))
    on_gpu = torch.device(loop.device).type == "cuda"
    try:
        place = placed(checkpoint, loop, ids[0])
        on_gpu = place.device != "cpu"
        return _compared(loop, place, ids, told)
    except (RuntimeError, TypeError) as error:  # of torch: no room after all, or tensors in two places
        if not on_gpu:
            raise
        said = one_line(str(error), 200)
        _log.warning("the reference cannot compute on the GPU (%s): it does so on the CPU", said)
        again = on_the_cpu(checkpoint, f"on the GPU it failed ({said})")
    return _compared(loop, again, ids, told)


def _compared(loop: Loop, place: Place, ids: Sequence[Sequence[int]], told: Callable[..., None]) -> dict[str, Any]:
    """With the reference where it is. told: a stage, and how much of it is done."""
    reference = true = place.reference
    assert loop.artifact is not None, "a loop made by Loop.open knows its artifact"
    kinds, model = spoken(loop.artifact.manifest.weights), loop.runner.model
    # what a checkpoint brings in few bits is expanded by the reference itself: nothing was rounded here
    kept = loop.artifact.manifest.build["quantization"] == "keep"
    own = is_low_bit(kinds) and not kept
    rounded = not kept and bool(set(kinds.values()) - {"dense"})
    sequences = [list(s) for s in ids]
    # the first is the probe, all prompt; of the others the last quarter is decoded token by token
    starts = [len(sequences[0]), *(max(1, len(s) * 3 // 4) for s in sequences[1:])]
    dtype = loop.artifact.manifest.build["dtype"]
    rounding = None
    if rounded:
        quantized = read_quantization(loop.artifact)
        rounding = Rounding(
            true, model, kinds, dtype, list(zip(sequences, starts, strict=True)), own=own,
            folded={layer: scales for layer, (_, scales) in quantized.items()}, told=bool(quantized),
        )  # fmt: skip
        reference = rounding.reference()
    bench = Bench(loop, reference, sequences[0], list(zip(sequences[1:], starts[1:], strict=True)), own=own or kept)
    last = bench.modules(lambda done: told("modules of layers", done, reference.num_layers))
    told("wiring")
    bench.wiring()
    told("norms")
    bench.norms()
    told("sequences")
    if rounding is not None:
        rounding.rest()
    exact = (true, rounding.streams) if rounding is not None and own else None
    whole = judge_sequences(loop, reference, sequences, starts, [last, *bench.streams_of_others], exact)
    findings = list(table_findings(true, model, dtype))
    if rounding is not None:
        findings += [*rounding.findings, *head_findings(true, model, loop.artifact.manifest.weights, dtype)]
    report = _report(loop, [*findings, *bench.findings], whole) | {"reference": place.told}
    if rounding is not None and not report["recipe"]:
        report["recipe"] = rounding.cost
    told("done", 1)
    return with_dropped(report, dropped_of_language(true))


def _quantization(loop: Loop) -> list[dict[str, Any]]:
    """What a calibrated recipe told of each matrix: errors before and after, bits, outlier channels."""
    assert loop.artifact is not None, "a loop made by Loop.open knows its artifact"
    told = read_quantization(loop.artifact)
    return [
        {"layer": layer, "module": module, **fact}
        for layer, (facts, _) in sorted(told.items())
        for module, fact in facts.items()
    ]


def _report(loop: Loop, findings: list[Finding], whole: dict[str, Any]) -> dict[str, Any]:
    assert loop.artifact is not None, "a loop made by Loop.open knows its artifact"
    manifest = loop.artifact.manifest
    bad = [f for f in findings if not f.ok]
    first = _first(bad)
    if first is not None:
        where = "the embedding or head" if first.layer is None else f"layer {first.layer}"
        verdict = f"bug at {where}, module {first.module}"
        why = "; ".join(first.bound.broken_by(first.row))
        reason = f"{verdict}: {why}; compare tells more, another --dtype or --kernel {_try(first.module)} may help"
    elif not whole["ok"]:
        verdict = "bug between the modules: every module is right alone, whole sequences are not"
        reason = f"{verdict} ({'; '.join(whole['broken'])}); try another --dtype, or --kernel paged_attention=torch"
    else:
        verdict = reason = "numerical noise"
    return {
        "accepted": first is None and whole["ok"],
        "verdict": verdict,
        "reason": reason,
        "layer": None if first is None else first.layer,
        "module": None if first is None else first.module,
        "dtype": manifest.build["dtype"],
        "quantization": manifest.build["quantization"],
        "kernels": dict(loop.ops.chosen),
        "bytes": loop.artifact.nbytes(),
        "logits": {k: short(v) for k, v in whole.items()},
        "recipe": _quantization(loop),
        "layers": [row_of(f) for f in findings],
    }


def _first(bad: list[Finding]) -> Finding | None:
    """The finding to name: a module that is wrong alone beats a layer that is wrong as a whole; then the earliest."""
    alone = [f for f in bad if f.module != "layer"] or bad
    first = min(alone, key=lambda f: (_depth(f), alone.index(f))) if alone else None
    # a norm that is wrong because of its eps is far more wrong where the eps is half of it
    eps = next((f for f in bad if first is not None and f.name == f"{first.name}.eps"), None)
    if first is not None and eps is not None and eps.bound.excess(eps.row) > 3 * first.bound.excess(first.row):
        return eps
    return first


def _depth(finding: Finding) -> float:
    if finding.layer is not None:
        return finding.layer
    return -1 if finding.module == "embed" else math.inf


def _try(module: str) -> str:
    op = {
        "attn.mix": "paged_attention",
        "attn.rotate": "rope_cache",
        "attn_norm": "add_rms_norm",
        "mlp.act": "silu_mul",
    }
    return f"{next((o for m, o in op.items() if module.startswith(m)), 'linear')}=torch"


def _kv_bytes(artifact: Artifact) -> int:
    """Room for the judged sequences and nothing more: width 8192, 256 layers would still be 8 GiB in bfloat16."""
    config = artifact.manifest.config
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    hidden = int(config.get("hidden_size") or config.get("n_embd") or 1)
    dim = int(config.get("head_dim") or 0) * int(config.get("num_attention_heads") or 0)
    return 2 * layers * max(hidden, dim) * 4 * (SEQUENCES + 2) * (LENGTH + 64)
