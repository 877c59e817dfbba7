"""Published error bounds of an engine against the float32 reference.

They depend on dtype, recipe and module type. Those of a weight format stand in its recipe's file
(core/recipe_declaration.py); here are those of the arithmetic, and how all were measured.

Module-local: each engine module is fed the reference's own input, cast to the engine's dtype, so
nothing
accumulates and the first module out of bounds is the faulty one. Measured with
`tests/accept/measure_tolerances.py` (rounded modules, worst of the usual choices; seeded Gaussian
and
Student-t(3) weights, 2-32 layers, widths 64-1024, and SmolLM2-135M-Instruct reading our own text;
128 tokens).
Worst seen, as rel_l2 / max_abs over max |reference|; int8 (one scale a row) changes linear alone:

    kind         float32            float16            bfloat16           int8, any dtype
    norm         8.3e-8 / 3.2e-7    4.4e-4 / 1.1e-3    3.5e-3 / 9.0e-3
    linear       3.4e-7 / 8.8e-7    5.5e-4 / 8.6e-4    4.4e-3 / 7.6e-3    3.3e-2 / 1.0e-1
    rotary       2.9e-6 / 1.0e-5    3.9e-4 / 1.5e-3    3.0e-3 / 8.6e-3
    attention    2.2e-7 / 9.3e-7    1.1e-3 / 2.7e-3    9.2e-3 / 2.4e-2
    activation   same arithmetic    5.0e-4 / 1.4e-3    4.2e-3 / 8.3e-3
    residual     same arithmetic    6.7e-4 / 1.4e-3    4.1e-3 / 7.4e-3
    |gain - 1|   2.6e-7             6.7e-4             4.4e-3             5.3e-3

A softmax multiplies the errors of its scores, and these grow with the scores. Where the rounding of
q and k alone is out of bounds, attention is compared on the same rounded inputs
(accept/attention_inputs.py).

Bounds are about three times that. float32 gets more, since a plain running sum over ten thousand
terms is
honest too; its rotary bound grows with the position, because one unit in the last place of a
frequency
turns into an angle there.

Planted faults, least effect over all dtypes and recipes (SmolLM2 and seeded models): o_proj x 1.05
|gain - 1| 0.046; w1 and w2 swapped rel_l2 1.2; o_proj transposed 1.03, q transposed 1.13; k named v
1.0; the two
norms swapped 0.34; RoPE base 1e4 for 1e5 0.44; eps 1e-6 for 1e-5 on inputs of size √eps 0.33. The
loosest
rel_l2 bound is 0.1 and the loosest gain bound 0.016, so each is out of bounds everywhere.

Whole-model logits (centred per row) add up like √(layers + 2). Worst rel_l2 over that root: float32
3.5e-7,
float16 6.0e-4, bfloat16 4.8e-3; int8 7.6e-3 Gaussian, 6.8e-3 SmolLM2, 2.9e-2 Student-t. Bounds are
three times
that (int8: 4.6 times the first two, 1.2 times Student-t, so that agreement still tests something).
Next tokens
were lost at top-two margins up to (in standard deviations of the row) 0.002 float16, 0.062
bfloat16, 0.35 int8 Student-t at 32 layers and 0.053 int8 SmolLM2. The required margin is 2.5 times
the rel_l2 bound: for SmolLM2 it
leaves 52 % of 512 rows to test in bfloat16, 17 % in int8, all but a few in float32.

int4 errs too much for bounds on outputs to tell a fault from rounding (Gaussian to Student-t and
SmolLM2: linear
rel_l2 0.10-0.28, one scale a row 0.42, gain off by up to 0.06), so it is judged in two halves
(accept/quantized_reference.py). Its matrices against the checkpoint's, SmolLM2: rel_l2 0.09
nearest, 0.10-0.16 GPTQ and AWQ; max_rel 0.06 nearest, up to 0.27; gain within the rows' root mean
square off by 0.005 nearest, 0.008 GPTQ. The gain over all weights is off by more where ranges are
clipped for the sake of a few loud channels: in the last down_proj, whose loudest inputs have 60
times the mean energy, by 0.024 for the clipped grid alone (groups of 64; after GPTQ 0.023, within
the root mean square 0.004) and 0.035 in groups of 128. o_proj x 1.05 moves the gain by 0.05.

Fitted scales (GPTQ's refinement, rptq at 4 bits) shrink a matrix whose inputs lie in a few
directions: SmolLM2's first o_proj, W4A8 calibrated on random ids (95 % of the energy in one of 576
directions, 99.6 % in 32), to a gain of 0.955 (128 tokens) to 0.968 (49,152) at rel_l2 0.14 to 0.13;
on news to 0.992. Its outputs' gain is 0.9993 to 0.9998 (accept/output_gain.py). Elsewhere in a
SmolLM2 in W4A8 the weights' gain is 0.997 to 1.004. Gains of outputs, rounded to nearest (SmolLM2):
fp8 0.995 to 1.003, w8a8 0.998 to 1.001, int4 0.976 to 1.018, symmetric ones from 0.955.

These are matrices of many weights. Rounding errors e of n weights w within their rows' root mean
square move the gain by √(Σ e²w²) / Σ w² by chance alone: 0.003 for 64 × 64 in int4, 0.03-0.06 for a
shared expert's gate of one row of 36. The bound is the larger of the published one and a third of
it (the worst honest deviation above) plus four times that.

w8a8 and fp8 round activations, and the reference rounds its own in the same way: in float32 a
product is then as exact as any (6e-7 / 1.1e-6 in SmolLM2), with room for a value on the border of
two steps (4e-4 / 1e-3 there). Where inputs differ, some of them fall to the other side of a border
between two steps, and each layer adds as much again as rounding does: whole layers and sequences
are less conclusive. Worst on seeded llama, gpt2 and qwen, by token or static, bfloat16: linear
w8a8 7.9e-3 /
1.3e-2 (float16 2.2e-3 / 4.5e-3), fp8 1.3e-2 / 4.6e-2; a layer 3.8e-2 / 4.8e-2 and 7.4e-2 / 1.3e-1;
logits over the root 3.2e-2 and 5.9e-2 (SmolLM2 w8a8, float32: 7.8e-3). Tensor cores (H200, float32
engine of SmolLM2) were seen at 1.3e-3 / 3.4e-3 in fp8. Matrices against the checkpoint's: w8a8
1.3e-2, fp8 2.7e-2, gain off by 3.5e-3 at most. fp8 that carries its errors on moves single weights
as far as GPTQ does in int4: max_rel 0.32 in SmolLM2.

Parts of a matrix (accept/row_and_tile_errors.py), worst of SmolLM2 as row / tile / row's gain off
by: int8
0.064 / 0.026 / 0.0045, w8a8 0.068 / 0.11 / 0.004, fp8 0.22 / 0.29 / 0.025 (in the down_proj whose
first token is 500 times the others; 0.08 elsewhere), int4 nearest 0.23 / 0.23 / 0.04, GPTQ g128
0.27 / 0.27 / 0.18. Two rows swapped: row 1.4; a tile of wrong values across four of ours: 0.7; a
scale x 1.1: gain 0.1, which int4 exceeds anyway. Quantized heads are within the same
(accept/embedding_and_head.py). An embedding's tables are held to "embedding" as wholes, row by row
and tile by tile.

RPTQ engines, float32, SmolLM2 calibrated on 49,152 tokens, H200: products 4.6e-7 / 1e-6 (the last
of 11,
3.8e-6 / 9.7e-6, whose first token has 500 times the others' outputs), a layer 1.1e-3 / 1.4e-3,
logits over the root 1.1e-2; matrices w8a8 2.4e-2 / 4.4e-2, gain off by 6e-4. W4A8 with two columns
a channel, AVX-512: products 5.3e-6 / 1.1e-5 (down_proj, whose sums before the zero-points are 20 to
40 times the outputs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelmill.accept.error_metrics import MAX_GAIN_DEVIATION_SIGMAS, ErrorMetrics
from modelmill.core.errors import UsageError
from modelmill.core.recipe_declaration import (
    ActQuantTolerances,
    TotalErrorTolerances,
    tolerances_by_weight_format,
)

DTYPES_WITH_BOUNDS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ErrorBound:
    """Largest honest rel_l2, max_abs relative to the tensor's scale, and |gain - 1|."""

    rel_l2: float
    max_rel: float
    gain: float

    def describe_violations(self, metrics: ErrorMetrics) -> list[str]:
        """Describe the metrics that are out of bounds, with both numbers; empty if none is."""
        return [
            f"{what} {value:.2g} > {limit:.2g}"
            for what, (value, limit) in self._errors_and_limits(metrics).items()
            if not value <= limit
        ]

    def error_to_bound_ratio(self, metrics: ErrorMetrics) -> float:
        """Return the largest error relative to its bound; above 1 it is out of bounds."""
        return max(value / limit for value, limit in self._errors_and_limits(metrics).values())

    def gain_deviation_limit(self, metrics: ErrorMetrics) -> float:
        """Return the bound of |gain - 1| on the side of the metrics' gain.

        It is wider where few weights leave it to chance, and below 1 for a matrix whose outputs
        keep their size (accept/output_gain.py): there by rel_l2, which is as far as an error of
        that size can lower a gain at all (Cauchy and Schwarz). Outputs tell such a matrix from one
        x 0.95, whose outputs are smaller as well. Nothing honest makes a matrix larger, so that the
        upper side stays.
        """
        limit = self._limit_with_std(metrics.gain_std)
        shrunk = metrics.gain < 1 and self._output_gain_shows_no_shrinkage(metrics)
        return limit + metrics.rel_l2 if shrunk else limit

    def _errors_and_limits(self, metrics: ErrorMetrics) -> dict[str, tuple[float, float]]:
        """Return each error and its limit by what a verdict calls it."""
        output_limit = self._limit_with_std(metrics.output_gain_std)
        return {
            "rel_l2": (metrics.rel_l2, self.rel_l2),
            "max_rel": (metrics.max_rel, self.max_rel),
            "|gain - 1|": (abs(metrics.gain - 1), self.gain_deviation_limit(metrics)),
            # From above alone: clipped weights of loud inputs make honest outputs smaller, too, and
            # a matrix that is too small shows in the gain of its weights. One that is too large may
            # not, where fitted scales have shrunk the weights.
            "output gain - 1": (metrics.output_gain - 1, output_limit),
        }

    def _limit_with_std(self, std: float) -> float:
        """Return the bound of a gain with this standard deviation by chance.

        A third of the bound is the worst honest deviation of large matrices, where chance averages
        out.
        """
        return max(self.gain, self.gain / 3 + MAX_GAIN_DEVIATION_SIGMAS * std)

    def _output_gain_shows_no_shrinkage(self, metrics: ErrorMetrics) -> bool:
        """Return whether the outputs say that a matrix is not too small.

        They do within half of the bound, if chance is no more. The largest honest gain of outputs
        is 1.018, so that of a matrix x 0.95 is 0.968 at most, where the bound is 0.03.
        """
        half = self.gain / 2
        certain = MAX_GAIN_DEVIATION_SIGMAS * metrics.output_gain_std <= half
        return certain and metrics.output_gain >= 1 - half


@dataclass(frozen=True)
class LogitsBound:
    """Bounds of the final logits.

    rel_l2 of centred logits, and the top-two margin (in the row's standard deviations) beyond which
    the next token must agree.
    """

    rel_l2: float
    margin: float

    def with_amplification(self, factor: float) -> LogitsBound:
        """Return the bound of a model that amplifies rounding (rounding_amplification.py)."""
        rel_l2 = max(self.rel_l2, min(self.rel_l2 * factor, MAX_LOGITS_BOUND))
        return LogitsBound(rel_l2, MARGIN_PER_REL_L2 * rel_l2)


GAIN_DEVIATION_BOUNDS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.4e-2}
# arithmetic → dtype → (rel_l2, max_rel)
MODULE_BOUNDS: dict[str, dict[str, tuple[float, float]]] = {
    "norm": {"float32": (5e-6, 1e-5), "float16": (1.3e-3, 3.3e-3), "bfloat16": (1.1e-2, 2.7e-2)},
    "linear": {"float32": (1e-5, 3e-5), "float16": (1.7e-3, 2.6e-3), "bfloat16": (1.4e-2, 2.3e-2)},
    "rotary": {"float32": (3e-6, 1e-5), "float16": (1.2e-3, 4.5e-3), "bfloat16": (1.0e-2, 2.6e-2)},
    "attention": {
        "float32": (1e-5, 3e-5),
        "float16": (3.3e-3, 8.1e-3),
        "bfloat16": (2.8e-2, 7.2e-2),
    },
    "activation": {
        "float32": (2e-6, 5e-6),
        "float16": (1.5e-3, 4.2e-3),
        "bfloat16": (1.3e-2, 2.5e-2),
    },
    "residual": {
        "float32": (5e-7, 1e-6),
        "float16": (2.0e-3, 4.2e-3),
        "bfloat16": (1.3e-2, 2.3e-2),
    },
}
MODULE_BOUNDS["embedding"] = MODULE_BOUNDS["residual"]
# float32 rotary: added per token of length.
ROPE_BOUND_PER_TOKEN = (1e-7, 4e-7)
LOGITS_BOUND_PER_SQRT_DEPTH = {"float32": 5e-6, "float16": 1.8e-3, "bfloat16": 1.4e-2}
MAX_LOGITS_BOUND = 0.3
MARGIN_PER_REL_L2 = 2.5


def worst_block_bound(weight_format: str) -> ErrorBound | None:
    """Return the bounds of a format's worst row, tile of 32 × 32 and row by gain.

    None: matrices of the format are compared as a whole only.
    """
    tolerances = tolerances_by_weight_format().get(weight_format)
    return None if tolerances is None else ErrorBound(*tolerances.block)


def compares_with_folded_scales(weight_format: str) -> bool:
    """Return whether a format's columns are compared with the folded scales, not without them."""
    tolerances = tolerances_by_weight_format().get(weight_format)
    return tolerances is not None and tolerances.scaled_columns


def weight_formats_with_act_quant() -> set[str]:
    """Return the weight formats that round activations."""
    return {
        name for name, each in tolerances_by_weight_format().items() if each.act_quant is not None
    }


def formats_with_combined_tolerances() -> set[str]:
    """Return the weight formats whose arithmetic and rounding are checked together."""
    return {name for name, each in tolerances_by_weight_format().items() if each.whole is not None}


def act_quant_layer_bound(weight_format: str) -> ErrorBound | None:
    """Return the bound of a whole layer in a format that rounds activations; None for others."""
    rounded = _act_quant_tolerances(weight_format)
    return None if rounded is None else ErrorBound(*rounded.layer)


def _act_quant_tolerances(weight_format: str) -> ActQuantTolerances | None:
    tolerances = tolerances_by_weight_format().get(weight_format)
    return None if tolerances is None else tolerances.act_quant


def _get_combined_tolerances(weight_format: str) -> TotalErrorTolerances | None:
    tolerances = tolerances_by_weight_format().get(weight_format)
    return None if tolerances is None else tolerances.whole


def module_bound(
    arithmetic: str, dtype: str, recipe: str = "none", *, length: int = 0
) -> ErrorBound:
    """Return the bound for one module of an engine by its arithmetic (a key of MODULE_BOUNDS).

    length: tokens of the sequence, for RoPE.

    Raises:
        UsageError: if no tolerances are published for the dtype or recipe.
    """
    _check_tolerances_published(dtype, recipe)
    rel_l2, max_rel = MODULE_BOUNDS[arithmetic][dtype]
    gain = GAIN_DEVIATION_BOUNDS[dtype]
    if arithmetic == "rotary":
        rel_l2, max_rel = (
            rel_l2 + ROPE_BOUND_PER_TOKEN[0] * length,
            max_rel + ROPE_BOUND_PER_TOKEN[1] * length,
        )
    whole, rounded = _get_combined_tolerances(recipe), _act_quant_tolerances(recipe)
    if whole is not None and arithmetic in ("linear", "embedding"):
        rel_l2, max_rel, gain = *whole.linear, whole.gain
    if rounded is not None and arithmetic == "linear":
        rel_l2, max_rel = rounded.product[dtype]
        gain = max(gain, 1e-3)
    return ErrorBound(rel_l2, max_rel, gain)


def weight_bound(dtype: str, weight_format: str) -> ErrorBound:
    """Return the bound between stored and checkpoint weights, folded scales undone."""
    tolerances = tolerances_by_weight_format().get(weight_format)
    if tolerances is not None:
        return ErrorBound(*tolerances.weight)
    rel_l2, max_rel = MODULE_BOUNDS["residual"][dtype]
    return ErrorBound(rel_l2, max_rel, GAIN_DEVIATION_BOUNDS[dtype])


def logits_bound(dtype: str, recipe: str = "none", *, num_layers: int) -> LogitsBound:
    """Return the bound for the whole model's logits at this depth."""
    _check_tolerances_published(dtype, recipe)
    depth = math.sqrt(num_layers + 2)
    rel_l2 = LOGITS_BOUND_PER_SQRT_DEPTH[dtype] * depth
    for each in (_get_combined_tolerances(recipe), _act_quant_tolerances(recipe)):
        if each is not None:
            rel_l2 = min(max(rel_l2, each.logits * depth), MAX_LOGITS_BOUND)
    return LogitsBound(rel_l2, MARGIN_PER_REL_L2 * rel_l2)


def _check_tolerances_published(dtype: str, recipe: str) -> None:
    published = [
        "none",
        *(n for n, t in tolerances_by_weight_format().items() if t.whole or t.act_quant),
    ]
    if dtype not in DTYPES_WITH_BOUNDS or recipe not in published:
        raise UsageError(
            f"no tolerances are published for {dtype} with recipe {recipe}; "
            f"dtypes: {', '.join(DTYPES_WITH_BOUNDS)}; recipes: {', '.join(published)}"
        )
