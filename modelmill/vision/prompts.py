"""Prompts (points, boxes, masks), their checks, and their tensors for the prompt encoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote

PADDING_POINT_LABEL, BOX_CORNER_LABELS = -1, (2, 3)
MAX_POINTS = 256


@dataclass(frozen=True)
class Prompt:
    """One prompt, in pixels of the picture.

    Attributes:
        points: (x, y) each.
        labels: one per point; 1 for the object, 0 for the background.
        box: (x0, y0, x1, y1).
        mask: [4·grid, 4·grid] logits of an earlier result.

    Raises:
        RequestError: if it is empty or a value is invalid.
    """

    points: tuple[tuple[float, float], ...] = ()
    labels: tuple[int, ...] = ()
    box: tuple[float, float, float, float] | None = None
    mask: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.points and self.box is None and self.mask is None:
            raise RequestError("a prompt needs a point, a box or a mask")
        if len(self.points) != len(self.labels):
            raise RequestError(
                f"{len(self.points)} points have {len(self.labels)} labels; give one label per "
                "point"
            )
        if len(self.points) > MAX_POINTS:
            raise RequestError(f"{len(self.points)} points are more than {MAX_POINTS}; give fewer")
        if any(label not in (0, 1) for label in self.labels):
            raise RequestError(
                "a label is 1 (the object) or 0 (the background), not "
                f"{quote(list(self.labels), 80)}"
            )
        numbers = [*(c for point in self.points for c in point), *(self.box or ())]
        if not all(math.isfinite(n) for n in numbers):
            raise RequestError("coordinates must be finite numbers")
        if self.box is not None and (self.box[0] > self.box[2] or self.box[1] > self.box[3]):
            raise RequestError(
                f"a box must be x0,y0,x1,y1 with x0 <= x1 and y0 <= y1, not {quote(self.box, 80)}"
            )


def make_prompt(
    points: Sequence[Sequence[float]] | None = (),
    labels: Sequence[int] | None = None,
    box: Sequence[float] | None = None,
    mask: torch.Tensor | None = None,
) -> Prompt:
    """Make a prompt from a caller's values; points without labels mark the object.

    Raises:
        RequestError: if a value has the wrong type or range.
    """
    try:
        pairs = [tuple(point) for point in (() if points is None else points)]
        corners: Any = None if box is None else tuple(box)
        label_values = None if labels is None else tuple(labels)
    except TypeError:
        raise RequestError(
            "points are a list of (x, y), labels a list with one per point, a box four numbers"
        ) from None
    if any(len(pair) != 2 for pair in pairs):
        raise RequestError("a point must be two numbers: x and y")
    if corners is not None and len(corners) != 4:
        raise RequestError("a box must be four numbers: x0, y0, x1, y1")
    try:
        positions = tuple((float(x), float(y)) for x, y in pairs)
        corners = None if corners is None else tuple(float(v) for v in corners)
    except (TypeError, ValueError):
        raise RequestError("coordinates must be numbers") from None
    if label_values is None:
        label_values = (1,) * len(positions)
    return Prompt(positions, label_values, corners, mask)


def check_prompt_mask_shape(prompt: Prompt, side: int) -> None:
    """Raise RequestError if the prompt's mask is no logits [side, side]."""
    mask = prompt.mask
    if mask is not None and not (
        isinstance(mask, torch.Tensor) and tuple(mask.shape) == (side, side)
    ):
        actual = list(mask.shape) if hasattr(mask, "shape") else quote(type(mask).__name__)
        raise RequestError(
            f"a prompt's mask must be logits [{side}, {side}] of an earlier result, not {actual}"
        )


def check_prompt_inside_image(prompt: Prompt, size: tuple[int, int]) -> None:
    """Raise RequestError if a point or a corner of the box is outside the picture."""
    corners = [] if prompt.box is None else [prompt.box[:2], prompt.box[2:]]
    for name, positions in (("point", prompt.points), ("box corner", corners)):
        for x, y in positions:
            if not (0 <= x <= size[0] and 0 <= y <= size[1]):
                raise RequestError(
                    f"the {name} {x:g},{y:g} is outside the picture of {size[0]} × {size[1]} pixels"
                )


def make_prompt_tensors(
    prompts: Sequence[Prompt], size: tuple[int, int], encoder_size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the tensors of prompts of one shape (``group_prompts_by_shape``).

    The corners of a box come last, as two points; a prompt without a box ends with a padding point,
    as in the original.

    Args:
        prompts: the prompts.
        size: (width, height) of the picture.
        encoder_size: (width, height) of the picture inside the encoder's square input; each axis
            has its own scale.

    Returns:
        Points [N, P, 2] float32 in the encoder's pixels, and labels [N, P] int64.
    """
    scale = (encoder_size[0] / size[0], encoder_size[1] / size[1])
    rows, labels = [], []
    for prompt in prompts:
        row = [(x * scale[0], y * scale[1]) for x, y in prompt.points]
        row_labels = list(prompt.labels)
        if prompt.box is not None:
            x0, y0, x1, y1 = prompt.box
            row += [(x0 * scale[0], y0 * scale[1]), (x1 * scale[0], y1 * scale[1])]
            row_labels += BOX_CORNER_LABELS
        elif row:
            row.append((0.0, 0.0))
            row_labels.append(PADDING_POINT_LABEL)
        rows.append(row)
        labels.append(row_labels)
    shape = (len(rows), len(rows[0]))
    return torch.tensor(rows, dtype=torch.float32).view(*shape, 2), torch.tensor(
        labels, dtype=torch.int64
    ).view(shape)


def group_prompts_by_shape(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Group prompts of one shape, which can be decoded together.

    Padding the shorter ones with more padding points would change their masks slightly.

    Returns:
        For each group the indices of its prompts.
    """
    groups: dict[tuple[int, bool, bool], list[int]] = {}
    for i, prompt in enumerate(prompts):
        shape = (len(prompt.points), prompt.box is not None, prompt.mask is not None)
        groups.setdefault(shape, []).append(i)
    return list(groups.values())
