"""What every language model does with its parts: embed, run the layers, norm, project."""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.embedding_and_head import LMHead, TokenEmbedding
from modelmill.nn.kv import ModelKVCacheSpec
from modelmill.nn.step import Step


class CausalLM(nn.Module):
    """Token ids → logits. A subclass makes the parts.

    Attributes:
        kv: The KV cache that a token needs.
        layers: Each takes and returns (branch, residual), whose sum is the layer's output; a
            residual of None: the branch is that sum.
        norm: Adds the last branch to the residual and normalises the sum.
    """

    kv: ModelKVCacheSpec
    embed: TokenEmbedding
    layers: nn.ModuleList
    norm: nn.Module
    head: LMHead

    def forward(self, step: Step) -> torch.Tensor:
        """Logits [R, V] float32 of the rows ``step.logit_rows``."""
        return self.head(self.hidden_states(step), step)

    def hidden_states(self, step: Step) -> torch.Tensor:
        """The input of the head: normed final states [R, H] of the rows ``step.logit_rows``."""
        return self.hidden_states_with_substitute_layers(self.layers, step)

    def hidden_states_with_substitute_layers(
        self, layers: nn.ModuleList, step: Step, norm: nn.Module | None = None
    ) -> torch.Tensor:
        """The same with these layers, and this last norm, in the place of its own."""
        x: torch.Tensor = self.embed(step.ids, step)
        residual: torch.Tensor | None = None
        rope, step = self.compute_rope_cos_sin(step), self.attach_per_layer_inputs(x, step)
        for layer, layer_step in zip(layers, step.iter_layer_steps()):
            x, residual = layer(x, residual, rope, layer_step)
        if step.logit_rows is not None:
            x = x[step.logit_rows]
            residual = None if residual is None else residual[step.logit_rows]
        x, _ = (norm or self.norm)(x, residual, step)
        return x

    def compute_rope_cos_sin(self, step: Step) -> RopeCosSin:  # noqa: ARG002
        """The step's rotation; empty where positions are learned."""
        return RopeCosSin()

    def attach_per_layer_inputs(self, x: torch.Tensor, step: Step) -> Step:  # noqa: ARG002
        """The step with what layers read beside the stream; x: the embeddings [T, H]."""
        return step
