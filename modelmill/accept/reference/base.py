"""The shape of every reference, and the dense arithmetic they share.

A reference computes a whole sequence at once, in float32 (or float64), holding the weights of one
layer.
Every step is recorded under one set of module names, the same for all families:

    input_norm · q · k · v · q_rot · k_rot · attn · o_proj · post_attn_residual ·
    mlp_norm · gate · up (gpt2: fc) · act · down · output          then  final_norm · logits

``num_q_heads``, ``k``, ``v`` are the projections [T, heads·dim]; ``q_rot``, ``k_rot`` come after
head norms, rotation and logn; ``attn`` is what enters o_proj; ``output`` is the
residual stream out of the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from modelmill.accept.reference.tensor_source import TensorSource

HEAD_WEIGHT = "lm_head.weight"
# Query rows computed at a time: bounds the score matrix to QUERY_ROWS_PER_BLOCK × T per head.
QUERY_ROWS_PER_BLOCK = 512


class ModuleIO(NamedTuple):
    """Input and output of a module.

    function: computes the output of other inputs; only attention has one.
    """

    inputs: tuple[Tensor, ...]
    output: Tensor
    function: Callable[..., Tensor] | None = None


class ModuleWeights(NamedTuple):
    """The weights of one module: a projection's weight is [out, in], a norm's is [width].

    fake_quantize: rounds a projection's input (engines whose activations are quantized).
    """

    weight: Tensor
    bias: Tensor | None = None
    fake_quantize: Callable[[Tensor], Tensor] | None = None


class NonLayerModuleIO(NamedTuple):
    """A module outside the layers: what it reads, its output, and the arithmetic of its bound."""

    inputs: tuple[Tensor, ...]
    output: Tensor
    arithmetic: str


ExtraModuleTrace: TypeAlias = dict[str, NonLayerModuleIO]
"""By the engine's path of the module."""
LayerTrace: TypeAlias = dict[str, ModuleIO]
HeadTrace: TypeAlias = dict[str, ModuleIO]
LayerWeights: TypeAlias = dict[str, ModuleWeights]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
}


class LayerRecorder:
    """Records what the modules of one layer read and return."""

    def __init__(self, weights: LayerWeights) -> None:
        self.weights = weights
        self.trace: LayerTrace = {}

    def record(self, name: str, output: Tensor, *inputs: Tensor) -> Tensor:
        """Record a module; returns its output."""
        self.trace[name] = ModuleIO(inputs, output)
        return output

    def compute(self, name: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Compute a module's output and record it with its function."""
        self.trace[name] = ModuleIO(inputs, function(*inputs), function)
        return self.trace[name].output

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a projection and record it."""
        return self.record(name, project(x, self.weights[name]), x)


class ReferenceModel(ABC):
    """One checkpoint, computed plainly; families define the weights and the layer.

    Attributes:
        qkv_bound: of the absolute values of q, k and v behind their norms, or None.
        gate_bound: of the gate and up of an MLP, or None.
        softcap: a bound that the logits approach, or None.
    """

    HEAD = HEAD_WEIGHT
    """The source name of a head of its own."""

    qkv_bound: float | None = None
    gate_bound: float | None = None
    softcap: float | None = None

    num_layers: int
    hidden_size: int
    eps: float
    config: dict[str, Any]

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        self.source = source
        self.dtype, self.device = source.dtype, source.device
        self.config = config
        self._head_name: str | None = None

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids [T]: the residual stream [T, hidden] that enters layer 0."""

    def bind_to_sequence(self, ids: Sequence[int]) -> ReferenceModel:  # noqa: ARG002
        """Return the reference of one sequence, where layers read more of it than the stream."""
        return self

    def extra_module_trace(self) -> ExtraModuleTrace:
        """Return the sequence's modules outside the layers, beside embedding, norm and head."""
        return {}

    def unused_tensor_patterns(self) -> dict[str, str]:
        """Return tensors that the family's definition does not use: pattern of names → what."""
        return {}

    @abstractmethod
    def layer_weights(self, index: int) -> LayerWeights:
        """Read a layer's weights by module name; nothing is cached."""

    @abstractmethod
    def run_layer(
        self, index: int, weights: LayerWeights, x: Tensor, prompt_length: int
    ) -> LayerTrace:
        """Run one layer on x [T, hidden] with weights read before."""

    @abstractmethod
    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return the weights of one norm of layer ``index``, or of (None, "final_norm")."""

    def norm_eps(self, index: int | None, name: str) -> float:
        """Return the epsilon of that norm (today one for all norms of a checkpoint)."""
        if (index is None) != (name == "final_norm"):
            raise KeyError(f"final_norm has no layer index, the others need one: {index}, {name}")
        return self.eps

    @abstractmethod
    def apply_norm(self, x: Tensor, weights: ModuleWeights, eps: float) -> Tensor:
        """Apply the family's norm over the last axis."""

    @property
    @abstractmethod
    def config_ties_embeddings(self) -> bool:
        """Return whether the config ties the head to the embedding."""

    def head_weight_name(self) -> str:
        """Return the source name of the head's matrix.

        A head in the checkpoint is used whatever the config says, unless it equals the embedding.
        """
        if self._head_name is None:
            embedding = self.embedding_table_names()["weight"]
            own = self.source.has(self.HEAD) and not (
                self.config_ties_embeddings and self.source.have_equal_values(self.HEAD, embedding)
            )
            self._head_name = self.HEAD if own else embedding
        return self._head_name

    @abstractmethod
    def embedding_table_names(self) -> dict[str, str]:
        """Return the tables that an embedding adds up: engine suffix → source name."""

    def extra_embedding_table_names(self) -> dict[str, str]:
        """Return the tables that are looked up elsewhere: the engine's path → source name."""
        return {}

    def run_norm(self, index: int | None, name: str, x: Tensor) -> Tensor:
        """Run the reference norm on any input [..., width].

        Tiny inputs (rms ≈ √eps) reveal the epsilon.
        """
        return self.apply_norm(
            x.to(self.device, self.dtype),
            self.norm_weights(index, name),
            self.norm_eps(index, name),
        )

    def norm_and_rope_queries(self, index: int, flat: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return queries [T, heads·dim] after QK norm and RoPE; None without QK norm."""
        return None

    def clamped_gated_activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of gate and up; families with a ``gate_bound`` have one."""
        raise NotImplementedError

    def scan_extreme_time_steps(
        self,
        index: int,  # noqa: ARG002
        mixed: Tensor,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> list[tuple[Tensor, Tensor]]:
        """Return steps [T, heads] of a recurrence beyond each limit, and the states [1, …] behind.

        mixed: what it reads beside the steps. dtype: the steps are rounded to it.
        """
        return []

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Apply what follows the head's product: a bias, a factor."""
        return logits

    @torch.no_grad()
    def head_logits(self, normed: Tensor) -> Tensor:
        """Compute logits [T, vocab] of normed rows, the vocabulary in blocks of rows."""
        with no_tf32():
            blocks = [normed @ rows.T for rows in self.source.row_blocks(self.head_weight_name())]
        return self.finish_logits(torch.cat(blocks, dim=-1))

    @torch.no_grad()
    def head(self, x: Tensor) -> HeadTrace:
        """Compute final norm and logits [T, vocab]."""
        x = x.to(self.device, self.dtype)
        normed = self.run_norm(None, "final_norm", x)
        return {
            "final_norm": ModuleIO((x,), normed),
            "logits": ModuleIO((normed,), self.head_logits(normed)),
        }


@contextmanager
def no_tf32() -> Iterator[None]:
    """Disable TF32, which drops 13 bits of every factor of a float32 product on a GPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def rms_norm(x: Tensor, weights: ModuleWeights, eps: float) -> Tensor:
    """Compute x / √(mean x² + eps) · weight over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weights.weight


def layer_norm(x: Tensor, weights: ModuleWeights, eps: float) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias over the last axis."""
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weights.weight
    return scaled if weights.bias is None else scaled + weights.bias


def project(x: Tensor, weights: ModuleWeights) -> Tensor:
    """Compute x · weightᵀ + bias, with x rounded first where activations are quantized."""
    x = x if weights.fake_quantize is None else weights.fake_quantize(x)
    with no_tf32():
        y = x @ weights.weight.T
    return y if weights.bias is None else y + weights.bias


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
    slopes: Sequence[float] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal softmax attention, dense.

    Query head h reads key head h // (heads / kv_heads). With a window w, position i attends to the
    positions i-w+1 .. i. Fewer queries than keys are those of the last positions.

    Args:
        q: [T, heads, dim].
        k: [T, kv_heads, dim].
        v: [T, kv_heads, dim].
        scale: factor of the scores.
        window: w, or None.
        softcap: bound c of the scores, c · tanh(score / c) (arXiv:2408.00118); None: no bound.
        slopes: of each head, times the distance to a key it is subtracted (arXiv:2108.12409).
        sinks: [heads], a score beside those of the keys, without a value (arXiv:2508.10925).

    Returns:
        [T, heads·dim].
    """
    count, heads, dim = q.shape
    group = heads // k.shape[1]
    out = torch.empty_like(q)
    column = torch.arange(len(k), device=q.device)
    for start in range(0, count, QUERY_ROWS_PER_BLOCK):
        row = column[len(k) - count :][start : start + QUERY_ROWS_PER_BLOCK, None]
        hidden = column[None, :] > row
        if window is not None:
            hidden |= column[None, :] <= row - window
        for head in range(heads):
            with no_tf32():
                scores = (
                    q[start : start + QUERY_ROWS_PER_BLOCK, head] @ k[:, head // group].T * scale
                )
                if softcap is not None:
                    scores = (scores / softcap).tanh() * softcap
                if slopes is not None:
                    scores = scores - (row - column[None, :]) * slopes[head]
                scores = scores.masked_fill(hidden, float("-inf"))
                if sinks is not None:
                    sink = sinks[head].to(scores).expand(len(scores), 1)
                    scores = torch.cat((scores, sink), dim=-1)
                weights = scores.softmax(dim=-1)[:, : len(k)]
                out[start : start + QUERY_ROWS_PER_BLOCK, head] = weights @ v[:, head // group]
    return out.reshape(count, heads * dim)
