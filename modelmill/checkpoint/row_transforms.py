"""Rename steps that order the rows of gated attention and of recurrences.

Functions of a shape, and of a tensor; ``rename.RENAME_STEPS`` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from modelmill.core.errors import TensorMismatch

Shape = tuple[int, ...]
SourceTensorIterator = Iterator[torch.Tensor]


def ungroup_rows_shape(shapes: Sequence[Shape], argument: str) -> Shape:
    """As the source, whose rows are ``groups`` times the parts."""
    (shape,), (groups, *sizes) = shapes, map(int, argument.split("/"))
    if not shape or shape[0] != groups * sum(sizes):
        raise TensorMismatch(
            f"shape {list(shape)} is not that of {groups} groups of "
            f"{' + '.join(map(str, sizes))} rows"
        )
    return shape


def ungroup_rows(
    sources: SourceTensorIterator, shape: Shape, _: torch.dtype, argument: str
) -> torch.Tensor:
    """Rows stored by group, each with some of every part, as one part after another."""
    groups, *sizes = map(int, argument.split("/"))
    rows = next(sources).reshape(groups, -1, *shape[1:])
    return torch.cat([part.reshape(-1, *shape[1:]) for part in rows.split(sizes, 1)])


def drop_output_gates_shape(shapes: Sequence[Shape], argument: str) -> Shape:
    """The source without the rows of gates."""
    (shape,), (heads, dim) = shapes, map(int, argument.split("/"))
    if not shape or shape[0] < 2 * heads * dim:
        raise TensorMismatch(
            f"shape {list(shape)} has not {heads} heads of {dim} rows, each with as many of gates"
        )
    return (shape[0] - heads * dim, *shape[1:])


def drop_output_gates(
    sources: SourceTensorIterator, shape: Shape, _: torch.dtype, argument: str
) -> torch.Tensor:
    """Of each of the first heads, the rows of q; then the rows behind these heads."""
    heads, dim = map(int, argument.split("/"))
    tensor = next(sources)
    first = tensor[: 2 * heads * dim].reshape(heads, 2, dim, *shape[1:])[:, 0]
    return torch.cat((first.reshape(-1, *shape[1:]), tensor[2 * heads * dim :]))


def select_output_gates_shape(shapes: Sequence[Shape], argument: str) -> Shape:
    """The rows of gates alone."""
    (shape,), (heads, dim) = shapes, map(int, argument.split("/"))
    if not shape or shape[0] != 2 * heads * dim:
        raise TensorMismatch(
            f"shape {list(shape)} is not that of {heads} heads of {dim} rows, each with as many "
            "of gates"
        )
    return (heads * dim, *shape[1:])


def select_output_gates(
    sources: SourceTensorIterator, shape: Shape, _: torch.dtype, argument: str
) -> torch.Tensor:
    """Of each head, the rows of its gate, which are behind those of q."""
    heads, dim = map(int, argument.split("/"))
    return next(sources).reshape(heads, 2, dim, *shape[1:])[:, 1].reshape(shape)


def flatten_depthwise_conv_shape(shapes: Sequence[Shape], _: str) -> Shape:
    """A convolution of each channel by itself, [C, 1, W] → [C, W]; a bias [C] stays one."""
    (shape,) = shapes
    if len(shape) == 1:
        return shape
    if len(shape) != 3 or shape[1] != 1:
        raise TensorMismatch(f"shape {list(shape)} is no convolution of single channels")
    return shape[0], shape[2]


def flatten_depthwise_conv(
    sources: SourceTensorIterator, shape: Shape, _: torch.dtype, __: str
) -> torch.Tensor:
    """The matrix that it is."""
    return next(sources).reshape(shape)


def select_row_ranges_shape(shapes: Sequence[Shape], argument: str) -> Shape:
    """Some ranges of the source's rows, of which there are as many as the argument ends with."""
    (shape,), (*ranges, total) = shapes, argument.split("/")
    if not shape or shape[0] != int(total):
        raise TensorMismatch(f"shape {list(shape)} has not {total} rows")
    return (sum(stop - first for first, stop in _parse_row_ranges(ranges)), *shape[1:])


def select_row_ranges(
    sources: SourceTensorIterator, _: Shape, __: torch.dtype, argument: str
) -> torch.Tensor:
    """The ranges one after another."""
    tensor = next(sources)
    ranges = _parse_row_ranges(argument.split("/")[:-1])
    return torch.cat([tensor[first:stop] for first, stop in ranges])


def _parse_row_ranges(texts: Sequence[str]) -> list[tuple[int, int]]:
    return [(int(first), int(stop)) for first, stop in (text.split("-") for text in texts)]


def scale_rows_shape(shapes: Sequence[Shape], argument: str) -> Shape:
    """The source's shape, whose rows are those of all ranges."""
    (shape,), counts = shapes, [count for count, _ in _parse_row_factors(argument)]
    if not shape or shape[0] != sum(counts):
        raise TensorMismatch(f"shape {list(shape)} has not {sum(counts)} rows")
    return shape


def scale_rows(
    sources: SourceTensorIterator, _: Shape, __: torch.dtype, argument: str
) -> torch.Tensor:
    """The rows times their factors; float32, so that a product is rounded once."""
    tensor = next(sources).float()
    counts, factors = zip(*_parse_row_factors(argument), strict=True)
    by_row = torch.repeat_interleave(torch.tensor(factors), torch.tensor(counts))
    return tensor * by_row.view(-1, *[1] * (tensor.dim() - 1))


def _parse_row_factors(argument: str) -> list[tuple[int, float]]:
    parts = (part.split("*") for part in argument.split("/"))
    return [(int(count), float(factor)) for count, factor in parts]
