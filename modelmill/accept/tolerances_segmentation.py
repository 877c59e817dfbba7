"""How far an honest segmentation engine may lie from the float32 reference: published per dtype.

Bounds of a weight format stand in its recipe's file (core/recipe_declaration.py); here are those of
the arithmetic, and how all were measured.

Module-local, as accept.tolerances. Prompt encoder and decoder compute in float32 in every engine
and are held to its bounds. Measured on a CPU: MobileSAM with its real weights (14 blocks) and
seeded ViTs of 2 blocks, three seeds, on
the sample picture and its 7 prompts; worst seen:

    dtype       module rel_l2   whole embedding rel_l2   mask logits rel_l2 (MobileSAM / seeded)   scores (MobileSAM)
    float32     3.5e-6          5.8e-7                   5.8e-7 / 3.6e-6                           3.6e-7
    float16     1.5e-3          1.6e-3                   1.2e-3 / 5.7e-3                           see the report
    bfloat16    1.2e-2          1.3e-2                   7.5e-3 / 4.3e-2                           see the report

Bounds are about three times that, more for float32, where a plain running sum over a thousand terms
is honest too, and for the whole, whose errors add up with the root of the depth (ViT-H has 32
blocks). IoU and scores are reported and not judged by themselves: a mask of an undecided prompt may
turn over with its last bit; instead, of the pixels whose logits lie further from 0 than twice the
logits' bound, 99.9 % must fall on the reference's side.

Encoders in 8 bits are judged in two halves (accept.quantized_vision_reference): each module
against a reference that holds the engine's matrices and rounds activations as the engine does, the
matrices against the checkpoint's, and the whole against the checkpoint's own embedding and masks,
where the cost of rounding shows. The same models and seeds, worst:

    recipe  dtype       module rel_l2 / max_rel / gain   matrices   embedding   logits (MobileSAM / seeded)
    int8    float32     1.7e-4 / 3.5e-3 / 1.1e-6         9.3e-3     1.0e-2      8.4e-3 / 7.3e-2
    int8    float16     6.8e-3 / 1.1e-2 / 4.2e-4         9.3e-3     1.1e-2               6.8e-2
    int8    bfloat16    1.3e-2 / 2.2e-2 / 1.2e-3         9.3e-3     1.6e-2      1.2e-2 / 6.5e-2
    fp8     float32     4.0e-7 / 1.2e-6 / 6e-8           2.5e-2     4.5e-2               2.1e-1
    fp8     float16     1.6e-2 / 4.8e-2 / 5.6e-4         2.5e-2     4.5e-2               2.1e-1
    fp8     bfloat16    3.4e-2 / 5.6e-2 / 2.2e-3         2.6e-2     4.6e-2      2.6e-2 / 2.3e-1

Their matrices row by row and tile by tile (accept/row_and_tile_errors.py, bounds in accept.tolerances), row /
tile / row's gain off by: MobileSAM int8 1.7e-2 / 1.0e-2 / 2.8e-3, fp8 3.2e-2 / 2.9e-2 / 1.4e-2;
five seeded ViTs int8 1.0e-2 / 6.9e-3 / 3.2e-3, fp8 3.4e-2 / 2.7e-2 / 2.0e-2. One row's scale x 1.3,
or two rows in each other's place, is out of them.

In float32 a module differs where a value lies on the border of two steps; fp8's leaves room for
tensor cores. The IoU of the masks is held to what the reference's own masks leave of each other
when they are cut a margin above and below 0.

Planted faults (two blocks, seeded): a weight × 1.05, swapped tables of relative positions, eps 1e-5
for 1e-6 in an encoder's norm or the neck and 1e-6 for 1e-5 in the decoder, swapped labels, shifted
mask tokens: each is named in every dtype and recipe (tests/accept/test_segmentation.py).
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable

from modelmill.accept.tolerances import ErrorBound
from modelmill.core.recipe_declaration import ImageTolerances, tolerances_by_weight_format

STAGE_BOUND_BY_DTYPE = {
    "float32": ErrorBound(3e-5, 1e-4, 1e-5),
    "float16": ErrorBound(6e-3, 2e-2, 3e-3),
    "bfloat16": ErrorBound(5e-2, 1.5e-1, 2e-2),
}
WHOLE_MODEL_BOUNDS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


def encoder_formats_with_act_quant() -> set[str]:
    """Return the weight formats of encoders whose modules round activations."""
    return {name for name, images in _encoder_tolerances_by_format().items() if images.module}


def stage_bound(dtype: str, weight_format: str = "none") -> ErrorBound:
    """Return the bound of one module on the reference's own input.

    weight_format: the format that rounds its activations.
    """
    images = _encoder_tolerances_by_format().get(weight_format)
    if images is None or not images.module:
        return STAGE_BOUND_BY_DTYPE[dtype]
    return ErrorBound(*images.module[dtype])


def image_embedding_bound(dtype: str, weight_formats: Iterable[str] = ()) -> float:
    """Return the bound on rel_l2 of an image embedding to the checkpoint's own."""
    images = _encoder_tolerances_by_format()
    bounds = [images[each].embedding for each in weight_formats if each in images]
    return max([WHOLE_MODEL_BOUNDS[dtype], *bounds])


def mask_logits_bound(dtype: str, weight_formats: Iterable[str] = ()) -> float:
    """Return the bound on rel_l2 of the whole engine's mask logits to the checkpoint's own."""
    images = _encoder_tolerances_by_format()
    bounds = [images[each].mask_logits for each in weight_formats if each in images]
    return max([WHOLE_MODEL_BOUNDS[dtype], *bounds])


def _encoder_tolerances_by_format() -> dict[str, ImageTolerances]:
    """Return what the recipes of encoders declare, by weight format."""
    tolerances = tolerances_by_weight_format().items()
    return {name: each.images for name, each in tolerances if each.images is not None}
