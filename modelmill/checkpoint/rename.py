"""Rename rules: which tensors of a checkpoint become which tensors of a model, and how.

A model file lists its `Rule`s under the names Hugging Face gives the tensors. `plan_renames` checks
them
against what a checkpoint holds (nothing missing, nothing left over) before any value is read;
`apply` then
makes one target tensor at a time, so that no more than one target and one source are in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from modelmill.checkpoint import row_transforms
from modelmill.checkpoint.container import TensorInfo, format_names
from modelmill.core.errors import TensorMismatch

Shape = tuple[int, ...]
GetTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """One tensor of the model, made from one or more tensors of the checkpoint.

    how: a step, or several joined by "+", read left to right:
        "copy"        the one source as it is
        "cat0"        the sources' rows one after the other
        "cat1"        the sources' columns side by side
        "transpose"   [a, b] -> [b, a]
        "part0:i/n"   the i-th (from 0) of n equal parts of the rows
        "bias_q0v"    the biases of q and of v with zeros between them, for keys that have none
        "fold_weight" a convolution's weight with the batch norm behind it: weight; its weight,
        running_var
        "fold_bias"   the bias that the batch norm leaves: its bias, weight, running_mean, running_var
        "flatten"     all values one after another: [a, b] -> [a·b]
        "pointwise"   a convolution of 1×1 as the matrix that it is: [o, i, 1, 1] -> [o, i]
        "plus_one"    a norm's weight that is stored less 1
        "ones:axis"   as many ones as a source is long there, for a norm without weights; reads no value
        "unit_rows"   each row divided by its Euclidean norm
        "scale_rows:count*factor/…"  consecutive rows, each range times its factor
        "ungroup_qkv:kv/group/dim"  rows stored by KV head (its group's q, then k, then v) as all q, all k, all v
        "rope_rows:heads/dim/turned/layout"  the channels of the first heads so that both of a rotated
        pair are half a head apart; of their dim channels the first ``turned`` rotate, stored as
        "neighbours" (2i, 2i + 1) or "halves" (i, i + turned/2)
        "ungroup_rows:groups/size/…"  rows stored by group, each with some of every part, as one part after another
        "drop_gates:heads/dim"  of each of the first heads its rows of q, without those of its gate behind them
        "gates:heads/dim"   of each head the rows of its gate
        "rows:a-b/c-d/…/n"  the rows a … b − 1, then c … d − 1, … of n
        "depthwise"   a convolution of each channel by itself as a matrix: [c, 1, w] -> [c, w]; a bias as it is
        so "transpose+part0:0/3" takes q out of GPT-2's c_attn; `STEPS` is the list.
    optional: sources that are all absent make no target instead of an error.
    apart: the target's rows one after another under names of their own, which are read where the
    file has none of the sources (GGUFs of matrices that are one in a Hugging Face folder).
    """  # noqa: E501

    target: str
    sources: tuple[str, ...]
    how: str = "copy"
    optional: bool = False
    apart: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResolvedRule:
    """A rule whose sources are the names this checkpoint really uses."""

    target: str
    sources: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class TensorTransformStep:
    """Makes one tensor from several; `shape` computes the result's shape without reading values.

    compute: reads its sources itself, one at a time. Both raise TensorMismatch for shapes that do
    not fit.
    """

    shape: Callable[[Sequence[Shape], str], Shape]
    compute: Callable[[Iterator[torch.Tensor], Shape, torch.dtype, str], torch.Tensor]


def plan_renames(
    rules: Sequence[Rule],
    ignored: Sequence[str],
    available: Collection[str],
    prefixes: Sequence[str] = ("",),
) -> list[ResolvedRule]:
    """Match every rule with the checkpoint's names; the arguments are those of ``match_rules``.

    Raises:
        TensorMismatch: with up to a dozen missing and a dozen unused tensors.
    """
    resolved, missing, left = match_rules(rules, ignored, available, prefixes)
    if missing or left:
        raise TensorMismatch(_mismatch_message(missing, left))
    targets = [entry.target for entry in resolved]
    assert len(set(targets)) == len(targets), "two rules make the same target"
    return resolved


def match_rules(
    rules: Sequence[Rule],
    ignored: Sequence[str],
    available: Collection[str],
    prefixes: Sequence[str] = ("",),
) -> tuple[list[ResolvedRule], list[str], list[str]]:
    """Return the rules with the checkpoint's names, missing and unused tensors.

    Args:
        rules: the model's rules.
        ignored: regular expressions (matched in full, with and without a prefix) of unused tensors.
        available: the checkpoint's names.
        prefixes: what hub files add to names, or omit ("transformer.", "model.").
    """
    available = dict.fromkeys(available)
    resolved: list[ResolvedRule] = []
    used: set[str] = set()
    missing: list[str] = []
    for rule in rules:
        names = [find_source_name(source, available, prefixes) for source in rule.sources]
        apart = [find_source_name(source, available, prefixes) for source in rule.apart]
        if not any(names) and any(apart):
            how = "cat0" if len(apart) > 1 else "copy"
            rule, names = Rule(rule.target, rule.apart, how), apart
        if rule.optional and not any(names):
            continue
        if all(names):
            sources = tuple(name for name in names if name is not None)
            resolved.append(ResolvedRule(rule.target, sources, rule.how))
        used.update(name for name in names if name is not None)
        missing.extend(
            source for source, name in zip(rule.sources, names, strict=True) if name is None
        )
    dropped = [re.compile(drop) for drop in ignored]
    left = [
        name
        for name in available
        if name not in used and not _may_stay_unused(name, dropped, prefixes)
    ]
    return resolved, sorted(set(missing)), left


def apply_rule(
    rule: ResolvedRule, get: GetTensor, tensor_info: Callable[[str], TensorInfo] | None = None
) -> torch.Tensor:
    """Compute the target tensor, on the CPU, in its sources' (promoted) dtype.

    With `tensor_info` the target is allocated first and filled source by source, so that peak
    memory is the target and one source; without it all sources are in memory at once. The result
    may share a mapped file's memory: copy before writing.

    Raises:
        TensorMismatch: if the sources' shapes do not fit together.
    """
    sources: Iterator[torch.Tensor]
    if tensor_info is not None:
        facts = [
            (tensor_info(name).shape, tensor_info(name).decoded_dtype) for name in rule.sources
        ]
        sources = (get(name) for name in rule.sources)
    else:
        tensors = [get(name) for name in rule.sources]
        facts = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        sources = iter(tensors)
    shapes: list[Shape] = [shape for shape, _ in facts]
    dtype = reduce(torch.promote_types, (dtype_ for _, dtype_ in facts))
    try:
        for text in rule.how.split("+"):
            step, argument = _parse_step(text)
            shapes = [step.shape(shapes, argument)]
            sources = iter((step.compute(sources, shapes[0], dtype, argument),))
    except TensorMismatch as error:
        raise TensorMismatch(
            f"{rule.target} (from {format_names(rule.sources)}): {error}"
        ) from None
    return next(sources)


def result_tensor_info(rule: ResolvedRule, tensor_info: Callable[[str], TensorInfo]) -> TensorInfo:
    """Return shape, dtype and bytes of the result of `apply_rule`, without reading a value."""
    sources = [tensor_info(name) for name in rule.sources]
    shapes: list[Shape] = [source.shape for source in sources]
    try:
        for text in rule.how.split("+"):
            step, argument = _parse_step(text)
            shapes = [step.shape(shapes, argument)]
    except TensorMismatch as error:
        raise TensorMismatch(
            f"{rule.target} (from {format_names(rule.sources)}): {error}"
        ) from None
    dtype = reduce(torch.promote_types, (source.decoded_dtype for source in sources))
    result = TensorInfo(rule.target, shapes[0], str(dtype).removeprefix("torch."), 0)
    return TensorInfo(result.name, result.shape, result.dtype, result.numel * dtype.itemsize)


def find_source_name(
    source: str, available: Collection[str], prefixes: Sequence[str]
) -> str | None:
    """Return the checkpoint's name of `source`, also without or with a prefix; None if absent."""
    spellings = [source]
    spellings += [source.removeprefix(prefix) for prefix in prefixes if source.startswith(prefix)]
    spellings += [prefix + source for prefix in prefixes]
    return next((name for name in spellings if name in available), None)


def _may_stay_unused(
    name: str, patterns: Sequence[re.Pattern[str]], prefixes: Sequence[str]
) -> bool:
    spellings = {name, *(name.removeprefix(p) for p in prefixes), *(p + name for p in prefixes)}
    return any(pattern.fullmatch(spelling) for pattern in patterns for spelling in spellings)


def _mismatch_message(missing: Sequence[str], left_over: Collection[str]) -> str:
    parts = []
    if missing:
        parts.append(
            f"the model needs {len(missing)} tensor(s) the checkpoint lacks: "
            f"{format_names(missing)}"
        )
    if left_over:
        parts.append(
            f"the checkpoint holds {len(left_over)} tensor(s) the model has no place for: "
            f"{format_names(left_over)}"
        )
    counts = "is num_hidden_layers in config.json"
    if any(".experts." in name for name in (*missing, *left_over)):
        counts = "are num_hidden_layers and the number of experts in config.json"
    if missing and left_over:
        hint = "does config.json belong to these weights (model_type)?"
    elif missing:
        hint = f"is the download complete, and {counts} right?"
    else:
        hint = f"{counts} right, or is this a variant with extra parts?"
    return "; ".join(parts) + "; " + hint


def _parse_step(text: str) -> tuple[TensorTransformStep, str]:
    name, _, argument = text.partition(":")
    assert name in RENAME_STEPS, f"no rename step {name!r}; there are {', '.join(RENAME_STEPS)}"
    return RENAME_STEPS[name], argument


def _single_source_shape(shapes: Sequence[Shape]) -> Shape:
    assert len(shapes) == 1, "this rename step takes one source"
    return shapes[0]


def _make_concat_shape_function(axis: int) -> Callable[[Sequence[Shape], str], Shape]:
    def shape(shapes: Sequence[Shape], _: str) -> Shape:
        others = {(len(s), s[:axis] + s[axis + 1 :]) for s in shapes}
        if len(others) != 1 or len(shapes[0]) <= axis:
            raise TensorMismatch(
                f"shapes {', '.join(map(str, map(list, shapes)))} do not fit together"
            )
        first = shapes[0]
        return (*first[:axis], sum(s[axis] for s in shapes), *first[axis + 1 :])

    return shape


def _make_concat_function(
    axis: int,
) -> Callable[[Iterator[torch.Tensor], Shape, torch.dtype, str], torch.Tensor]:
    def join(
        sources: Iterator[torch.Tensor], shape: Shape, dtype: torch.dtype, _: str
    ) -> torch.Tensor:
        target = torch.empty(shape, dtype=dtype)
        start = 0
        for source in sources:
            target.narrow(axis, start, source.shape[axis]).copy_(source)
            start += source.shape[axis]
            del source  # before the next one is read
        return target

    return join


def _transpose_shape(shapes: Sequence[Shape], _: str) -> Shape:
    shape = _single_source_shape(shapes)
    if len(shape) != 2:
        raise TensorMismatch(f"shape {list(shape)} is not a matrix and cannot be transposed")
    return (shape[1], shape[0])


def _parse_part(argument: str) -> tuple[int, int]:
    index, _, count = argument.partition("/")
    assert index.isdigit(), f"part0:{argument}"
    assert count.isdigit(), f"part0:{argument}"
    assert int(index) < int(count), f"part0:{argument}"
    return int(index), int(count)


def _part_shape(shapes: Sequence[Shape], argument: str) -> Shape:
    shape, (_, count) = _single_source_shape(shapes), _parse_part(argument)
    if not shape or shape[0] % count:
        raise TensorMismatch(f"shape {list(shape)} does not split into {count} equal parts of rows")
    return (shape[0] // count, *shape[1:])


def _flat_shape(shapes: Sequence[Shape], _: str) -> Shape:
    return (torch.Size(_single_source_shape(shapes)).numel(),)


def _select_expert_shape(shapes: Sequence[Shape], argument: str) -> Shape:
    shape, (_, count) = _single_source_shape(shapes), _parse_part(argument)
    if len(shape) < 2 or shape[0] != count:
        raise TensorMismatch(f"shape {list(shape)} has not {count} experts in its first dimension")
    return shape[1:]


def _concat_q_zero_v_shape(shapes: Sequence[Shape], _: str) -> Shape:
    if len({*shapes}) != 1 or len(shapes[0]) != 1:
        raise TensorMismatch(
            f"shapes {', '.join(map(str, map(list, shapes)))} are not two biases of one length"
        )
    return (3 * shapes[0][0],)


def _concat_q_zero_v(
    sources: Iterator[torch.Tensor], shape: Shape, dtype: torch.dtype, _: str
) -> torch.Tensor:
    query, value = sources
    return torch.cat((query, torch.zeros(shape[0] // 3), value)).to(dtype)


BATCH_NORM_EPS = 1e-5  # torch's default for batch norms, which state dicts do not contain


def _fold_batch_norm_shape(shapes: Sequence[Shape], _: str) -> Shape:
    if any(len(s) != 1 or s[0] != shapes[0][0] for s in shapes[1:]):
        raise TensorMismatch(
            f"shapes {', '.join(map(str, map(list, shapes)))} are not a convolution and its batch "
            "norm"
        )
    return shapes[0]


def _fold_batch_norm_weight(
    sources: Iterator[torch.Tensor], _: Shape, dtype: torch.dtype, __: str
) -> torch.Tensor:
    """Fold a batch norm into a weight [O, …], in float64 so that folding adds no error."""
    weight, gain, variance = (source.double() for source in sources)
    factor = gain * torch.rsqrt(variance + BATCH_NORM_EPS)
    return (weight * factor.view(-1, *[1] * (weight.dim() - 1))).to(dtype)


def _fold_batch_norm_bias(
    sources: Iterator[torch.Tensor], _: Shape, dtype: torch.dtype, __: str
) -> torch.Tensor:
    """Fold a batch norm into a bias, from its bias, weight, mean and variance."""
    bias, gain, mean, variance = (source.double() for source in sources)
    return (bias - mean * gain * torch.rsqrt(variance + BATCH_NORM_EPS)).to(dtype)


def _pointwise_conv_shape(shapes: Sequence[Shape], _: str) -> Shape:
    shape = _single_source_shape(shapes)
    if len(shape) != 4 or shape[2:] != (1, 1):
        raise TensorMismatch(f"shape {list(shape)} is no convolution of 1×1")
    return shape[:2]


def _ones_shape(shapes: Sequence[Shape], argument: str) -> Shape:
    shape, axis = _single_source_shape(shapes), int(argument)
    if len(shape) <= axis:
        raise TensorMismatch(f"shape {list(shape)} has no dimension {axis}")
    return (shape[axis],)


def _plus_one(sources: Iterator[torch.Tensor], _: Shape, __: torch.dtype, ___: str) -> torch.Tensor:
    """Float32, so that the sum is rounded once, to the build's dtype."""
    return next(sources).float() + 1


def _l2_normalize_rows(
    sources: Iterator[torch.Tensor], _: Shape, dtype: torch.dtype, __: str
) -> torch.Tensor:
    return torch.nn.functional.normalize(next(sources).float()).to(dtype)


def _ungroup_qkv_shape(shapes: Sequence[Shape], argument: str) -> Shape:
    shape = _single_source_shape(shapes)
    kv_heads, group, dim = map(int, argument.split("/"))
    if not shape or shape[0] != kv_heads * (group + 2) * dim:
        raise TensorMismatch(
            f"shape {list(shape)} is not that of q, k and v of {kv_heads} KV heads with {group} "
            f"query heads each, of {dim} channels"
        )
    return shape


def _ungroup_qkv(
    sources: Iterator[torch.Tensor], shape: Shape, _: torch.dtype, argument: str
) -> torch.Tensor:
    kv_heads, group, dim = map(int, argument.split("/"))
    rows = next(sources).reshape(kv_heads, group + 2, dim, *shape[1:])
    parts = rows[:, :group], rows[:, group], rows[:, group + 1]
    return torch.cat([part.reshape(-1, *shape[1:]) for part in parts])


def rope_channel_order(dim: int, turned: int, layout: str) -> list[int]:
    """Return the channel of a head that is stored at each place by the step "rope_rows"."""
    rotated = list(range(turned))
    if layout == "neighbours":
        first, second = rotated[0::2], rotated[1::2]
    else:
        first, second = rotated[: turned // 2], rotated[turned // 2 :]
    rest = list(range(turned, dim))
    half = len(rest) // 2
    return [*first, *rest[:half], *second, *rest[half:]]


def _reorder_rope_rows_shape(shapes: Sequence[Shape], argument: str) -> Shape:
    shape, (heads, dim) = _single_source_shape(shapes), map(int, argument.split("/")[:2])
    if not shape or shape[0] < heads * dim:
        raise TensorMismatch(f"shape {list(shape)} has not {heads} heads of {dim} channels")
    return shape


def _reorder_rope_rows(
    sources: Iterator[torch.Tensor], shape: Shape, _: torch.dtype, argument: str
) -> torch.Tensor:
    heads, dim, turned = map(int, argument.split("/")[:3])
    order = torch.tensor(rope_channel_order(dim, turned, argument.rpartition("/")[2]))
    tensor = next(sources)
    rows = tensor[: heads * dim].reshape(heads, dim, *shape[1:])
    return torch.cat((rows[:, order].reshape(-1, *shape[1:]), tensor[heads * dim :]))


RENAME_STEPS: dict[str, TensorTransformStep] = {
    "copy": TensorTransformStep(
        lambda shapes, _: _single_source_shape(shapes), lambda sources, *_: next(sources)
    ),
    "cat0": TensorTransformStep(_make_concat_shape_function(0), _make_concat_function(0)),
    "cat1": TensorTransformStep(_make_concat_shape_function(1), _make_concat_function(1)),
    "transpose": TensorTransformStep(
        _transpose_shape, lambda sources, *_: next(sources).t().contiguous()
    ),
    "part0": TensorTransformStep(
        _part_shape,
        lambda sources, shape, _, argument: next(sources).narrow(
            0, _parse_part(argument)[0] * shape[0], shape[0]
        ),
    ),
    "expert": TensorTransformStep(
        _select_expert_shape,
        lambda sources, _, __, argument: next(sources)[_parse_part(argument)[0]],
    ),
    "bias_q0v": TensorTransformStep(_concat_q_zero_v_shape, _concat_q_zero_v),
    "fold_weight": TensorTransformStep(_fold_batch_norm_shape, _fold_batch_norm_weight),
    "fold_bias": TensorTransformStep(_fold_batch_norm_shape, _fold_batch_norm_bias),
    "plus_one": TensorTransformStep(lambda shapes, _: _single_source_shape(shapes), _plus_one),
    "ones": TensorTransformStep(
        _ones_shape, lambda _, shape, dtype, __: torch.ones(shape, dtype=dtype)
    ),
    "unit_rows": TensorTransformStep(
        lambda shapes, _: _single_source_shape(shapes), _l2_normalize_rows
    ),
    "scale_rows": TensorTransformStep(row_transforms.scale_rows_shape, row_transforms.scale_rows),
    "ungroup_qkv": TensorTransformStep(_ungroup_qkv_shape, _ungroup_qkv),
    "rope_rows": TensorTransformStep(_reorder_rope_rows_shape, _reorder_rope_rows),
    "ungroup_rows": TensorTransformStep(
        row_transforms.ungroup_rows_shape, row_transforms.ungroup_rows
    ),
    "drop_gates": TensorTransformStep(
        row_transforms.drop_output_gates_shape, row_transforms.drop_output_gates
    ),
    "gates": TensorTransformStep(
        row_transforms.select_output_gates_shape, row_transforms.select_output_gates
    ),
    "rows": TensorTransformStep(
        row_transforms.select_row_ranges_shape, row_transforms.select_row_ranges
    ),
    "depthwise": TensorTransformStep(
        row_transforms.flatten_depthwise_conv_shape, row_transforms.flatten_depthwise_conv
    ),
    "flatten": TensorTransformStep(_flat_shape, lambda sources, *_: next(sources).flatten()),
    "pointwise": TensorTransformStep(
        _pointwise_conv_shape, lambda sources, *_: next(sources).flatten(1)
    ),
}
