"""Whole sequences through the engine, in one batch, partly as prefill and partly token by token, against the reference.

Judged are logits, next tokens where the reference is sure of them, and perplexity; what quantization cost is told.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.metrics import compare_logits, kl_divergence, perplexity, top1_agreement
from modelmill.accept.own import spoken
from modelmill.accept.reference import Reference
from modelmill.accept.tolerances import ROUNDED, LogitsBound, logits_bound
from modelmill.runtime.loop import Loop

# Of a prompt's rows every third is judged, of the decoded tokens every one: a vocabulary is wide.
EVERY = 3
# Of the rows whose margin exceeds the tolerance, so many may be lost; of those beyond twice the margin, none.
LOST = 0.02


def judge_sequences(
    loop: Loop,
    reference: Reference,
    ids: list[list[int]],
    starts: list[int],
    streams: list[Tensor],
    true: tuple[Reference, list[Tensor]] | None = None,
) -> dict[str, Any]:
    """Free runs in one batch against the reference's logits: every number, what is "broken", and whether it is "ok".

    starts: length of each sequence's prompt. streams: the reference's residual streams [T, H] at the end. true: the
    checkpoint's reference and its streams, where ``reference`` has the engine's weights: what quantization cost is told
    from it.
    """
    rows = [[i for i in range(len(s)) if i >= start or i % EVERY == 0] for s, start in zip(ids, starts, strict=True)]
    right = _ends(reference, streams, rows)
    mine = _logits(loop, ids, starts, rows).to(right.device)
    row, bound = compare_logits("logits", mine, right), _bound(loop, reference.num_layers, own=true is not None)
    agreed = top1_agreement(mine, right, bound.margin)
    clear = top1_agreement(mine, right, 2 * bound.margin)
    places = [(s[i + 1] if i + 1 < len(s) else -1) for s, wanted in zip(ids, rows, strict=True) for i in wanted]
    targets = torch.tensor(places, device=right.device)
    known = targets >= 0
    loss = [perplexity(logits[known], targets[known]) for logits in (mine, right)]
    change = abs(math.log(loss[0]) - math.log(loss[1])) if all(map(math.isfinite, loss)) else math.inf
    lost = agreed.sure - agreed.agreed
    broken = {
        f"logits off by {row.rel_l2:.2g}, bound {bound.rel_l2:.2g}": not row.rel_l2 <= bound.rel_l2,
        f"{lost} of {agreed.sure} sure next tokens differ": lost > max(1, LOST * agreed.sure),
        f"the next token differs at row {clear.first}, where it is clear": not clear.complete,
        f"perplexity {loss[0]:.5g} for {loss[1]:.5g}": not change <= bound.rel_l2,
    }
    exact = right if true is None else _ends(*true, rows)
    return {
        "agreement": float((mine.argmax(-1) == exact.argmax(-1)).float().mean()),
        "rel_l2": row.rel_l2,
        "bound": bound.rel_l2,
        "max_abs": row.max_abs,
        "mean_kl": float(kl_divergence(mine, exact).mean()),
        "tokens": sum(map(len, ids)),
        "decoded": sum(len(s) - start for s, start in zip(ids, starts, strict=True)),
        "rows": len(mine),
        "sure_rows": agreed.sure,
        "agreed_rows": agreed.agreed,
        "clear_rows": clear.sure,
        "margin": bound.margin,
        "perplexity": loss[0],
        "reference_perplexity": perplexity(exact[known], targets[known]),
        "broken": [what for what, wrong in broken.items() if wrong],
        "ok": not any(broken.values()),
    }


def _ends(reference: Reference, streams: list[Tensor], rows: list[list[int]]) -> Tensor:
    """The reference's logits [sum of rows, V] of some rows of its residual streams; its vocabulary is read once."""
    wanted = torch.cat([x[each] for x, each in zip(streams, rows, strict=True)])
    return reference.head(wanted)["logits"].output


def _bound(loop: Loop, layers: int, *, own: bool) -> LogitsBound:
    """own: the reference computes with the engine's weights, so that their rounding is no part of the difference."""
    assert loop.artifact is not None, "a loop made by Loop.open knows its artifact"
    manifest = loop.artifact.manifest
    kinds = set(spoken(manifest.weights).values())
    rounded = manifest.build["quantization"] != "keep" and "int8" in kinds
    recipe = next(iter(sorted(kinds & set(ROUNDED))), "int8" if rounded and not own else "none")
    return logits_bound(manifest.build["dtype"], recipe, layers=layers)


def _logits(loop: Loop, ids: list[list[int]], starts: list[int], rows: list[list[int]]) -> Tensor:
    """The engine's logits [sum of rows, V] float32 on the CPU, sequence after sequence."""
    wanted = [frozenset(r) for r in rows]
    kept: list[list[Tensor]] = [[] for _ in ids]
    loop.scorer().run(
        ids, starts, lambda which, _, logits: kept[which].append(logits.float().cpu()), lambda i, at: at in wanted[i]
    )
    return torch.cat([part for parts in kept for part in parts])
