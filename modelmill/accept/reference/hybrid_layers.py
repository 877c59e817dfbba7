"""Decoders of which some layers have a recurrence in the place of attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder
from modelmill.accept.reference.plain_decoder import PlainDecoderReference


class HybridLayersMixin(PlainDecoderReference):
    """A decoder with attention or a recurrence in each layer.

    Attributes:
        recurrent: whether a layer has a recurrence, by layer.
    """

    recurrent: Sequence[bool]

    @abstractmethod
    def run_recurrent_mixer(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a layer's recurrence, with its output projection."""

    def run_token_mixer(
        self, index: int, r: LayerRecorder, normed: Tensor, prompt_length: int
    ) -> Tensor:
        """Run a layer's attention or recurrence."""
        if self.recurrent[index]:
            return self.run_recurrent_mixer(r, normed)
        return super().run_token_mixer(index, r, normed, prompt_length)
