"""Runs whole sequences in one batch, partly prefill, partly decode, and compares the logits.

Checked are logits, next tokens where the reference is confident, and perplexity; the effect of
quantization is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from modelmill.accept.error_metrics import (
    center_logits,
    compare_logits,
    confident_top1_agreement,
    kl_divergence_per_row,
    perplexity,
)
from modelmill.accept.quantized_reference import language_model_weight_formats
from modelmill.accept.reference import ReferenceModel
from modelmill.accept.rounding_amplification import (
    PlainAndNoisyReferenceRun,
    measure_rounding_amplification,
)
from modelmill.accept.step_embeddings_check import StepEmbeddingsCheck
from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.accept.tolerances import (
    LogitsBound,
    formats_with_combined_tolerances,
    logits_bound,
    weight_formats_with_act_quant,
)
from modelmill.nn.layer_spec import RoutingSpec, layer_spec
from modelmill.runtime.engine_core import EngineCore

# Every third row of a prompt is checked and every decoded token: a vocabulary is wide.
PROMPT_ROW_STRIDE = 3
# Allowed share of wrong tokens among rows beyond the margin; beyond twice the margin none may be
# wrong.
MAX_MISMATCH_SHARE = 0.02
MAX_GROUP_ERROR_RATIO = 2.0
"""Bound of a group's errors over the probe's, both over those that noise makes.

Seen in 30 right bfloat16 engines of small Qwen hybrids: 0.66-1.5. A forgotten KV page: 2.7.
"""


def check_sequence_logits(
    engine_core: EngineCore,
    reference: ReferenceModel,
    ids: list[list[int]],
    prompt_lengths: list[int],
    streams: list[Tensor],
    checkpoint_reference: tuple[ReferenceModel, list[Tensor]] | None = None,
    routings: Mapping[int, list[Tensor]] | None = None,
    rounding: PlainAndNoisyReferenceRun | None = None,
    embeddings: StepEmbeddingsCheck | None = None,
) -> dict[str, Any]:
    """Compare free runs in one batch with the reference's logits.

    Args:
        engine_core: the engine.
        reference: the reference.
        ids: the sequences.
        prompt_lengths: of each sequence.
        streams: the reference's final residual streams [T, H].
        checkpoint_reference: the checkpoint's reference and streams if ``reference`` has the
            engine's weights; used to report the effect of quantization.
        routings: the experts that the reference chose for each sequence, by layer; the engine takes
            them, since near a tie rounding decides between two experts, and no bound holds.
        rounding: how much this model's logits amplify it (rounding_amplification.py).
        embeddings: records the steps' embeddings.

    Returns:
        All numbers, what is "broken", and whether it is "ok".
    """
    rows = [
        [i for i in range(len(s)) if i >= start or i % PROMPT_ROW_STRIDE == 0]
        for s, start in zip(ids, prompt_lengths, strict=True)
    ]
    right = _reference_logits(reference, streams, rows)
    scorer = TeacherForcedScorer(engine_core)
    with use_reference_routing(scorer, routings or {}):
        actual = _engine_logits(scorer, ids, prompt_lengths, rows, embeddings).to(right.device)
    row = compare_logits("logits", actual, right)
    amplification = 1.0 if rounding is None else rounding.amplification
    bound = published_logits_bound(
        engine_core, reference.num_layers, uses_engine_weights=checkpoint_reference is not None
    ).with_amplification(amplification)
    agreed = confident_top1_agreement(actual, right, bound.margin)
    clear = confident_top1_agreement(actual, right, 2 * bound.margin)
    places = [
        (s[i + 1] if i + 1 < len(s) else -1)
        for s, sequence_rows in zip(ids, rows, strict=True)
        for i in sequence_rows
    ]
    targets = torch.tensor(places, device=right.device)
    known = targets >= 0
    loss = [perplexity(logits[known], targets[known]) for logits in (actual, right)]
    finite = all(map(math.isfinite, loss))
    change = abs(math.log(loss[0]) - math.log(loss[1])) if finite else math.inf
    lost = agreed.num_sure - agreed.num_agreed
    broken = {
        f"logits off by {row.rel_l2:.2g}, bound {bound.rel_l2:.2g}": not row.rel_l2 <= bound.rel_l2,
        f"{lost} of {agreed.num_sure} sure next tokens differ": lost
        > max(1, MAX_MISMATCH_SHARE * agreed.num_sure),
        f"the next token differs at row {clear.first_mismatch}, where it is clear": not clear.all_agree,  # noqa: E501
        f"perplexity {loss[0]:.5g} for {loss[1]:.5g}": not change <= bound.rel_l2,
    }
    if rounding is not None:
        noisy = _reference_logits(reference, rounding.noisy_streams, rows)
        groups = _checked_row_groups(rows, prompt_lengths)
        broken |= _row_group_violation_by_message(actual, right, noisy, groups)
    exact = (
        right if checkpoint_reference is None else _reference_logits(*checkpoint_reference, rows)
    )
    return {
        "agreement": float((actual.argmax(-1) == exact.argmax(-1)).float().mean()),
        "rel_l2": row.rel_l2,
        "bound": bound.rel_l2,
        "amplification": amplification,
        "max_abs": row.max_abs,
        "mean_kl": float(kl_divergence_per_row(actual, exact).mean()),
        "tokens": sum(map(len, ids)),
        "decoded": sum(len(s) - start for s, start in zip(ids, prompt_lengths, strict=True)),
        "rows": len(actual),
        "sure_rows": agreed.num_sure,
        "agreed_rows": agreed.num_agreed,
        "clear_rows": clear.num_sure,
        "margin": bound.margin,
        "perplexity": loss[0],
        "reference_perplexity": perplexity(exact[known], targets[known]),
        "broken": [what for what, wrong in broken.items() if wrong],
        "ok": not any(broken.values()),
    }


def _checked_row_groups(rows: list[list[int]], prompt_lengths: list[int]) -> dict[str, list[int]]:
    """Return the checked rows of the probe, of the other prompts, and the decoded ones."""
    groups: dict[str, list[int]] = {"probe": [], "prompt": [], "decoded": []}
    number = 0
    for sequence, (places, length) in enumerate(zip(rows, prompt_lengths, strict=True)):
        for place in places:
            name = "decoded" if place >= length else "prompt" if sequence else "probe"
            groups[name].append(number)
            number += 1
    return groups


def _row_group_violation_by_message(
    actual: Tensor, right: Tensor, noisy: Tensor, groups: Mapping[str, list[int]]
) -> dict[str, bool]:
    """Return whether the errors of a group of rows stand out, beside what noise does to its rows.

    A model amplifies rounding alike in all groups. What goes wrong in a batch or with one token at
    a time does not show in the probe, which is one prompt alone, and whose modules were checked.
    The upper quartile of a group counts, since in single rows both errors may be many times those
    of the others.
    """
    errors, expected = (
        torch.stack([center_logits(a - b).norm() for a, b in zip(each, right, strict=True)])
        for each in (actual, noisy)
    )
    ratios = errors / expected.clamp(min=1e-30)
    quartiles = {name: float(ratios[g].quantile(0.75)) for name, g in groups.items() if g}
    probe = quartiles.pop("probe")
    return {
        f"{name} rows are off {ratio / max(probe, 1e-30):.2g} times as much as the probe's, bound "
        f"{MAX_GROUP_ERROR_RATIO:g}": not ratio <= MAX_GROUP_ERROR_RATIO * probe
        for name, ratio in quartiles.items()
    }


def recheck_with_amplified_bound(
    engine_core: EngineCore,
    reference: ReferenceModel,
    split: Sequence[tuple[list[int], int]],
    checkpoint_reference: tuple[ReferenceModel, list[Tensor]] | None,
) -> dict[str, Any]:
    """Check the free runs again, with the bound of a model that amplifies rounding.

    It takes another two runs of the reference, so that only engines are checked like this whose
    modules are all right and whose sequences are beyond the published bound.

    Args:
        engine_core: the engine.
        reference: the reference.
        split: the sequences and the lengths of their prompts.
        checkpoint_reference: as for check_sequence_logits.

    Returns:
        As check_sequence_logits.
    """
    bound = published_logits_bound(
        engine_core, reference.num_layers, uses_engine_weights=checkpoint_reference is not None
    )
    measured = measure_rounding_amplification(reference, split, bound.rel_l2)
    ids, prompt_lengths = (list(each) for each in zip(*split, strict=True))
    return check_sequence_logits(
        engine_core, reference, ids, prompt_lengths, measured.streams, checkpoint_reference,
        measured.routings, measured,
    )  # fmt: skip


@contextmanager
def use_reference_routing(
    scorer: TeacherForcedScorer, routings: Mapping[int, list[Tensor]]
) -> Iterator[None]:
    """Within the block, layers with experts take those that the reference chose.

    Args:
        scorer: what runs the sequences.
        routings: by layer, the weights [T, E] of each sequence.
    """
    handles = []
    layers = scorer.runner.model.get_submodule("layers") if routings else nn.ModuleList()
    for index, layer in enumerate(layers.children()):
        if index in routings:
            for module in layer_spec(layer).modules_of_type(RoutingSpec):
                hook = _make_routing_hook(scorer, routings[index])
                handles.append(layer.get_submodule(module.path).register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _make_routing_hook(
    scorer: TeacherForcedScorer, routings: list[Tensor]
) -> Callable[..., Tensor]:
    """A forward hook that puts the reference's weights in the place of the engine's."""

    def hook(_: nn.Module, __: Any, weights: Tensor) -> Tensor:
        tokens = scorer.step_tokens
        if len(tokens) != len(weights):  # the last layer is computed for rows with logits alone
            tokens = [tokens[row] for row in scorer.step_logit_rows]
        chosen = torch.stack([routings[index][position] for index, position in tokens])
        return chosen.to(weights)

    return hook


def _reference_logits(
    reference: ReferenceModel, streams: list[Tensor], rows: list[list[int]]
) -> Tensor:
    """Return the reference's logits [sum of rows, V] of some rows of its residual streams.

    Its vocabulary matrix is read once.
    """
    selected = torch.cat([x[each] for x, each in zip(streams, rows, strict=True)])
    return reference.head(selected)["logits"].output


def published_logits_bound(
    engine_core: EngineCore, layers: int, *, uses_engine_weights: bool
) -> LogitsBound:
    """Return the bound of the logits, of models that do not amplify rounding.

    uses_engine_weights: the reference computes with the engine's weights, so that their rounding is
    not part of the difference.
    """
    manifest = engine_core.opened_artifact.manifest
    weight_formats = set(
        language_model_weight_formats(engine_core.model, manifest.weight_formats).values()
    )
    kept = manifest.build["quantization"] == "keep"
    whole = (
        []
        if kept or uses_engine_weights
        else sorted(weight_formats & formats_with_combined_tolerances())
    )
    recipe = next(iter([*sorted(weight_formats & weight_formats_with_act_quant()), *whole]), "none")
    return logits_bound(manifest.build["dtype"], recipe, num_layers=layers)


def _engine_logits(
    scorer: TeacherForcedScorer,
    ids: list[list[int]],
    prompt_lengths: list[int],
    rows: list[list[int]],
    embeddings: StepEmbeddingsCheck | None = None,
) -> Tensor:
    """Return the engine's logits [sum of rows, V] float32 on the CPU, sequence by sequence."""
    row_sets = [frozenset(r) for r in rows]
    kept: list[list[Tensor]] = [[] for _ in ids]
    with nullcontext() if embeddings is None else embeddings.recorded(scorer):
        scorer.run_sequences(
            ids,
            prompt_lengths,
            lambda which, _, logits: kept[which].append(logits.float().cpu()),
            lambda i, at: at in row_sets[i],
        )
    return torch.cat([part for parts in kept for part in parts])
