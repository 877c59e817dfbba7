"""How far an honest segmentation engine may lie from the float32 reference: published per dtype.

Module-local, as accept.tolerances. Prompt encoder and decoder compute in float32 in every engine and are held to its
bounds. Measured on a CPU: MobileSAM with its real weights (14 blocks) and seeded ViTs of 2 blocks, three seeds, on
the sample picture and its 7 prompts; worst seen:

    dtype       module rel_l2   whole embedding rel_l2   mask logits rel_l2 (MobileSAM / seeded)   scores (MobileSAM)
    float32     3.5e-6          5.8e-7                   5.8e-7 / 3.6e-6                           3.6e-7
    float16     1.5e-3          1.6e-3                   1.2e-3 / 5.7e-3                           see the report
    bfloat16    1.2e-2          1.3e-2                   7.5e-3 / 4.3e-2                           see the report

Bounds are about three times that, more for float32, where a plain running sum over a thousand terms is honest too, and
for the whole, whose errors add up with the root of the depth (ViT-H has 32 blocks). IoU and scores are told and not
judged by themselves: a mask of an undecided prompt may turn over with its last bit; instead, of the pixels whose logits
lie further from 0 than twice the logits' bound, 99.9 % must fall on the reference's side.

Planted faults (two blocks, seeded): a weight × 1.05, swapped tables of relative positions, eps 1e-5 for 1e-6 in an
encoder's norm or the neck and 1e-6 for 1e-5 in the decoder, swapped labels, shifted mask tokens: each is named in every
dtype (tests/accept/test_segment.py).
"""

from __future__ import annotations

from modelmill.accept.tolerances import Bound

STAGES = {
    "float32": Bound(3e-5, 1e-4, 1e-5),
    "float16": Bound(6e-3, 2e-2, 3e-3),
    "bfloat16": Bound(5e-2, 1.5e-1, 2e-2),
}
EMBEDDING = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
LOGITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


def stage_bound(dtype: str) -> Bound:
    """The bound of one module on the reference's own input."""
    return STAGES[dtype]


def embedding_bound(dtype: str) -> float:
    """rel_l2 of a picture's embedding, the encoder run freely."""
    return EMBEDDING[dtype]


def logits_bound(dtype: str) -> float:
    """rel_l2 of mask logits, the whole engine run freely."""
    return LOGITS[dtype]
