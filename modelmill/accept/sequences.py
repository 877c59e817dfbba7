"""Whole sequences through the engine, in one batch, partly as prefill and partly token by token,
against the reference.

Judged are logits, next tokens where the reference is sure of them, and perplexity; what
quantization cost is told.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.metrics import compare_logits, kl_divergence, perplexity, top1_agreement
from modelmill.accept.quantized_reference import language_formats
from modelmill.accept.reference import ReferenceModel
from modelmill.accept.tolerances import ACT_QUANT_BOUNDS, LogitsBound, logits_bound
from modelmill.runtime.engine_core import EngineCore

# Of a prompt's rows every third is judged, of the decoded tokens every one: a vocabulary is wide.
PROMPT_ROW_STRIDE = 3
# Of the rows whose margin exceeds the tolerance, so many may be lost; of those beyond twice the
# margin, none.
MAX_MISMATCH_SHARE = 0.02


def check_sequences(
    engine_core: EngineCore,
    reference: ReferenceModel,
    ids: list[list[int]],
    prompt_lengths: list[int],
    streams: list[Tensor],
    checkpoint_reference: tuple[ReferenceModel, list[Tensor]] | None = None,
) -> dict[str, Any]:
    """Free runs in one batch against the reference's logits: every number, what is "broken", and
    whether it is "ok".

    prompt_lengths: of each sequence. streams: the reference's residual streams [T, H] at the end.
    checkpoint_reference: the checkpoint's and its streams, where ``reference`` has the engine's
    weights: what quantization cost is told
    from it.
    """
    rows = [
        [i for i in range(len(s)) if i >= start or i % PROMPT_ROW_STRIDE == 0]
        for s, start in zip(ids, prompt_lengths, strict=True)
    ]
    right = _reference_logits(reference, streams, rows)
    mine = _engine_logits(engine_core, ids, prompt_lengths, rows).to(right.device)
    row, bound = (
        compare_logits("logits", mine, right),
        _logits_bound(
            engine_core, reference.num_layers, uses_engine_weights=checkpoint_reference is not None
        ),
    )
    agreed = top1_agreement(mine, right, bound.margin)
    clear = top1_agreement(mine, right, 2 * bound.margin)
    places = [
        (s[i + 1] if i + 1 < len(s) else -1)
        for s, wanted in zip(ids, rows, strict=True)
        for i in wanted
    ]
    targets = torch.tensor(places, device=right.device)
    known = targets >= 0
    loss = [perplexity(logits[known], targets[known]) for logits in (mine, right)]
    change = (
        abs(math.log(loss[0]) - math.log(loss[1])) if all(map(math.isfinite, loss)) else math.inf
    )
    lost = agreed.num_sure - agreed.num_agreed
    broken = {
        f"logits off by {row.rel_l2:.2g}, bound {bound.rel_l2:.2g}": not row.rel_l2 <= bound.rel_l2,
        f"{lost} of {agreed.num_sure} sure next tokens differ": lost
        > max(1, MAX_MISMATCH_SHARE * agreed.num_sure),
        f"the next token differs at row {clear.first_mismatch}, where it is clear": not clear.all_agree,  # noqa: E501
        f"perplexity {loss[0]:.5g} for {loss[1]:.5g}": not change <= bound.rel_l2,
    }
    exact = (
        right if checkpoint_reference is None else _reference_logits(*checkpoint_reference, rows)
    )
    return {
        "agreement": float((mine.argmax(-1) == exact.argmax(-1)).float().mean()),
        "rel_l2": row.rel_l2,
        "bound": bound.rel_l2,
        "max_abs": row.max_abs,
        "mean_kl": float(kl_divergence(mine, exact).mean()),
        "tokens": sum(map(len, ids)),
        "decoded": sum(len(s) - start for s, start in zip(ids, prompt_lengths, strict=True)),
        "rows": len(mine),
        "sure_rows": agreed.num_sure,
        "agreed_rows": agreed.num_agreed,
        "clear_rows": clear.num_sure,
        "margin": bound.margin,
        "perplexity": loss[0],
        "reference_perplexity": perplexity(exact[known], targets[known]),
        "broken": [what for what, wrong in broken.items() if wrong],
        "ok": not any(broken.values()),
    }


def _reference_logits(
    reference: ReferenceModel, streams: list[Tensor], rows: list[list[int]]
) -> Tensor:
    """The reference's logits [sum of rows, V] of some rows of its residual streams; its vocabulary
    is read once.
    """
    wanted = torch.cat([x[each] for x, each in zip(streams, rows, strict=True)])
    return reference.head(wanted)["logits"].output


def _logits_bound(
    engine_core: EngineCore, layers: int, *, uses_engine_weights: bool
) -> LogitsBound:
    """uses_engine_weights: the reference computes with the engine's weights, so that their rounding
    is no part of the difference.
    """
    assert engine_core.artifact is not None, (
        "an engine core made by EngineCore.open knows its artifact"
    )
    manifest = engine_core.artifact.manifest
    weight_formats = set(language_formats(manifest.weight_formats).values())
    rounded = manifest.build["quantization"] != "keep" and "int8" in weight_formats
    recipe = next(
        iter(sorted(weight_formats & set(ACT_QUANT_BOUNDS))),
        "int8" if rounded and not uses_engine_weights else "none",
    )
    return logits_bound(manifest.build["dtype"], recipe, num_layers=layers)


def _engine_logits(
    engine_core: EngineCore, ids: list[list[int]], prompt_lengths: list[int], rows: list[list[int]]
) -> Tensor:
    """The engine's logits [sum of rows, V] float32 on the CPU, sequence after sequence."""
    wanted = [frozenset(r) for r in rows]
    kept: list[list[Tensor]] = [[] for _ in ids]
    engine_core.scorer().run(
        ids,
        prompt_lengths,
        lambda which, _, logits: kept[which].append(logits.float().cpu()),
        lambda i, at: at in wanted[i],
    )
    return torch.cat([part for parts in kept for part in parts])
