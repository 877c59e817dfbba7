"""The experts of a mixture for all tokens: grouped products with an activation between them.

Weights of all experts are stacked. Only those of the experts that have tokens need be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.moe_align_block_size import NO_EXPERT
from modelmill.ops.op_cost import OpCost, product_cost, tensor_bytes

SILU, GELU_TANH = "silu", "gelu_tanh"
GATE_ACTIVATIONS = (SILU, GELU_TANH)
"""Of the gate, in the fused MoE ops."""
RELU2 = "relu2"
"""The square of ReLU, of experts without a gate (Nemotron 3)."""


class SwigluOaiParams(NamedTuple):
    """gpt-oss's gate: (up + 1) · gate · sigmoid(alpha · gate), of bounded values.

    Attributes:
        alpha: See above.
        limit: Bound of gate from above, and of up on both sides.
    """

    alpha: float
    limit: float


def swiglu_oai(gate_up: torch.Tensor, clamp: SwigluOaiParams) -> torch.Tensor:
    """The gate of ``SwigluOaiParams`` over a fused [T, 2·I]: [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * gate * (gate * clamp.alpha).sigmoid()


class FusedMoEInputs(NamedTuple):
    """Activations, routing and the weights of all experts.

    Attributes:
        x: [T, H], floating point.
        topk_weights: [T, top_k] float32.
        topk_ids: [T, top_k] int32, each below E; with ``global_num_experts`` also NO_EXPERT, for an
            expert of another rank, of which nothing is read or added.
        gate_up: [E, 2·I, row]: the matrices of the first product, gate above up; [E, I, row]
            without a gate.
        down: [E, H, row]: those of the second.
        shared: [T, H] of x's dtype, added to the sum of a token's experts, or None.
        gate_up_scale: of quantized weights, [E, rows] or in groups [E, rows, ⌈H/group⌉].
        down_scale: [E, H] or [E, H, ⌈I/group⌉].
        gate_up_offset: as the scale, or None (symmetric).
        down_offset: as the scale, or None.
        group: columns that share a scale; 0 without groups.
        gate_up_bias: [E, rows of gate_up] of x's dtype, or None.
        down_bias: [E, H] of x's dtype, or None.
        activation: of the gate, one of GATE_ACTIVATIONS; or RELU2, where there is no gate.
        clamp: in the place of the activation, or None.
        global_num_experts: of how many experts tokens choose, where this rank has E of them; None:
            of E.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    gate_up_offset: torch.Tensor | None = None
    down_offset: torch.Tensor | None = None
    group: int = 0
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: str = SILU
    clamp: SwigluOaiParams | None = None
    global_num_experts: int | None = None

    @property
    def num_experts(self) -> int:
        """How many experts the tokens choose of."""
        return self.global_num_experts or len(self.gate_up)

    @property
    def is_gated(self) -> bool:
        """Whether the first product has the rows of a gate."""
        return self.activation != RELU2

    @property
    def inner_size(self) -> int:
        """Channels between the two products of an expert."""
        return self.gate_up.shape[1] // (2 if self.is_gated else 1)


EXPERT_WEIGHTS = tuple(
    name for name in FusedMoEInputs._fields if name.startswith(("gate_up", "down"))
)


def moe_cost(args: Mapping[str, Any], result: torch.Tensor, act_dtype: str | None = None) -> OpCost:
    """Count the weights of the chosen experts, each once, and the products of every pair.

    act_dtype: name of the 8-bit dtype that activations are rounded to, or None.
    """
    inputs = FusedMoEInputs(**args)
    pairs = inputs.topk_ids[inputs.topk_ids != NO_EXPERT]
    expert_bytes = tensor_bytes([args.get(name) for name in EXPERT_WEIGHTS])
    weight_bytes = expert_bytes // len(inputs.gate_up) * pairs.unique().numel()
    acts = (inputs.x, inputs.topk_weights, inputs.topk_ids, inputs.shared, result)
    products = inputs.gate_up.shape[1] + inputs.inner_size
    operations = 2 * pairs.numel() * inputs.x.shape[1] * products
    return product_cost(tensor_bytes(acts), weight_bytes, operations, act_dtype)


DECLARATION = OpDeclaration(inputs=FusedMoEInputs, cost=moe_cost)
MAX_DEQUANTIZED_MEMORY_FRACTION = 1 / 32
"""Of a GPU's memory: what a matrix of all experts of a layer may take in 16 bits for a while."""

TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}

Dequantize = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, int, torch.dtype], torch.Tensor
]
"""(weight, scale, offset, group, columns, dtype) of one expert → its matrix of that dtype."""


def fused_moe(inputs: FusedMoEInputs) -> torch.Tensor:
    """Compute Σ topk_weights · down(act(gate) · up) over the experts of each token, plus shared.

    Without a gate an expert is down(act(up)). Products are rounded to x's dtype, as single ops
    would do, and summed in float32.

    Returns:
        [T, H] of x's dtype.
    """
    return moe_reference_with_dequantize(inputs, lambda weight, *_: weight)


def moe_reference_with_dequantize(
    inputs: FusedMoEInputs,
    dequantize: Dequantize,
    quantize: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The op with the weights of each expert dequantized; every expert computes every token.

    Sizes do not depend on the routing, so that a CUDA graph can contain it.

    Args:
        inputs: of the op.
        dequantize: an expert's matrix of its stored tensors.
        quantize: rounds the input of a product, or None.
    """
    x, weights, ids = inputs.x, inputs.topk_weights, inputs.topk_ids
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)

    def matrix(name: str, expert: int, columns: int) -> torch.Tensor:
        grids = [getattr(inputs, name + suffix) for suffix in ("_scale", "_offset")]
        scale, offset = (None if grid is None else grid[expert] for grid in grids)
        weight = getattr(inputs, name)[expert]
        return dequantize(weight, scale, offset, inputs.group, columns, wide).to(wide)

    def product(name: str, expert: int, columns: torch.Tensor) -> torch.Tensor:
        rounded = columns if quantize is None else quantize(columns)
        out = rounded.to(wide) @ matrix(name, expert, columns.shape[1]).T
        bias = getattr(inputs, name + "_bias")
        return (out if bias is None else out + bias[expert].to(wide)).to(x.dtype)

    for expert in range(len(inputs.gate_up)):
        out = product(
            "down", expert, _apply_expert_activation(inputs, product("gate_up", expert, x))
        )
        total += out.to(wide) * (weights * (ids == expert)).sum(1, keepdim=True).to(wide)
    if inputs.shared is not None:
        total += inputs.shared.to(wide)
    return total.to(x.dtype)


def _apply_expert_activation(inputs: FusedMoEInputs, gate_up: torch.Tensor) -> torch.Tensor:
    """The first product → [T, I]."""
    if not inputs.is_gated:
        return F.relu(gate_up).square()
    if inputs.clamp is not None:
        return swiglu_oai(gate_up, inputs.clamp)
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) if inputs.activation == SILU else F.gelu(gate, approximate="tanh")) * up


Shape = tuple[int, int, int, int, int]  # tokens, hidden, inner, experts, top_k
SMALL_SHAPES: list[Shape] = [(1, 64, 32, 8, 2), (5, 64, 32, 4, 3), (21, 96, 64, 3, 2)]
# with biases: gpt-oss's clamped gate, or GELU where the number of tokens is even
BIASED_SHAPES: list[Shape] = [(1, 96, 64, 4, 3), (4, 64, 32, 3, 2)]
# without a gate, with biases
UNGATED_SHAPES: list[Shape] = [(1, 64, 64, 4, 2), (7, 96, 32, 3, 2), (33, 64, 64, 4, 2)]
UNGATED_INPUT_SCALE = 0.5
"""Of x there: squares have long tails, whose largest values set the grid of 8-bit activations."""
# of a rank that has half of the experts; its last token has none of them
EXPERT_PARALLEL_SHAPES: list[Shape] = [(1, 64, 32, 4, 3), (2, 64, 32, 2, 2), (22, 96, 64, 3, 2)]
QWEN3_30B_A3B_SHAPES: list[Shape] = [(rows, 2048, 768, 128, 8) for rows in (1, 8, 64, 1024)]


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill, with and without a shared expert; Qwen3-30B-A3B's on a GPU."""
    for shape in case_shapes(device):
        weights = {
            name: randn(experts, n, k, device=device, dtype=dtype, seed=n, scale=k**-0.5)
            for name, experts, n, k in expert_weight_shapes(shape)
        }
        yield make_moe_case(shape, device, dtype, weights)


def case_shapes(device: str) -> list[Shape]:
    """The shapes of the cases on a device."""
    small = [*SMALL_SHAPES, *BIASED_SHAPES, *EXPERT_PARALLEL_SHAPES, *UNGATED_SHAPES]
    return small if device == "cpu" else [*small, *QWEN3_30B_A3B_SHAPES]


def expert_weight_shapes(shape: Shape) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, experts, rows and columns of the weights of both products."""
    _, hidden, inner, experts, _ = shape
    yield "gate_up", experts, inner if shape in UNGATED_SHAPES else 2 * inner, hidden
    yield "down", experts, hidden, inner


def make_expert_weight_args(
    shape: Shape, draw: Callable[[int, int], dict[str, torch.Tensor | None]]
) -> dict[str, Any]:
    """The weights of both products, drawn for all experts at once.

    draw: (rows, columns) → weight, scale and offset of a matrix.
    """
    return {
        name if part == "weight" else f"{name}_{part}": (
            None if value is None else value.view(experts, n, -1)
        )
        for name, experts, n, k in expert_weight_shapes(shape)
        for part, value in draw(experts * n, k).items()
    }


def make_moe_case(
    shape: Shape, device: str, dtype: torch.dtype, weights: dict[str, Any], group: int = 0
) -> Case:
    """A case with these weights; an odd number of tokens has a shared expert's output.

    Those of BIASED_SHAPES and EXPERT_PARALLEL_SHAPES have biases and another gate as well, those of
    UNGATED_SHAPES biases and no gate.
    """
    tokens, hidden, inner, experts, top_k = shape
    total = 2 * experts if shape in EXPERT_PARALLEL_SHAPES else experts
    biased = shape in (*BIASED_SHAPES, *EXPERT_PARALLEL_SHAPES, *UNGATED_SHAPES)
    scores = torch.rand(tokens, total, generator=torch.Generator().manual_seed(tokens))
    topk_weights, ids = scores.topk(top_k, dim=-1)
    if total > experts:
        ids[-1] = NO_EXPERT
        ids[ids >= experts] = NO_EXPERT
    scale = UNGATED_INPUT_SCALE if shape in UNGATED_SHAPES else 1.0
    inputs = FusedMoEInputs(
        randn(tokens, hidden, device=device, dtype=dtype, seed=tokens + hidden, scale=scale),
        (topk_weights / topk_weights.sum(-1, keepdim=True)).to(device),
        ids.int().to(device),
        shared=(
            randn(tokens, hidden, device=device, dtype=dtype, seed=5)
            if tokens % 2 and tokens > 1
            else None
        ),
        **weights,
        group=group,
        global_num_experts=total if total > experts else None,
        **(_random_biases_and_gate_args(shape, device, dtype) if biased else {}),
    )
    tensors = [value for value in weights.values() if value is not None]
    read = nbytes(*tensors) * len(ids[ids != NO_EXPERT].unique()) // experts
    moved = read + nbytes(inputs.x, inputs.shared) + nbytes(inputs.x)
    suffix = (f" g{group}" if group else "") + (" bias" if biased else "")
    suffix += f" of {total}" if total > experts else ""
    halves = 2 if inputs.is_gated else 1
    name = f"{tokens}x{hidden}->{halves}x{inner} top {top_k} of {experts}{suffix}"
    return Case(name, inputs._asdict(), moved, 2 * (halves + 1) * tokens * top_k * hidden * inner)


def _random_biases_and_gate_args(shape: Shape, device: str, dtype: torch.dtype) -> dict[str, Any]:
    tokens, hidden, _, experts, _ = shape
    rows = next(expert_weight_shapes(shape))[2]
    gate = {"clamp": SwigluOaiParams(1.702, 1.5)} if tokens % 2 else {"activation": GELU_TANH}
    scale = UNGATED_INPUT_SCALE**2 if shape in UNGATED_SHAPES else 1.0
    return {
        "gate_up_bias": randn(experts, rows, device=device, dtype=dtype, seed=7, scale=scale),
        "down_bias": randn(experts, hidden, device=device, dtype=dtype, seed=8),
        **({"activation": RELU2} if shape in UNGATED_SHAPES else gate),
    }
