"""The guide of an answer that may use a list of token ids and no others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from modelmill.core.errors import RequestError


class AllowedTokensGuide:
    """Masks all tokens but a list, in every step; as ``core.types.Guide``."""

    failed = False

    def __init__(self, ids: Iterable[int], vocab: int) -> None:
        """Make the mask.

        Args:
            ids: the allowed tokens.
            vocab: size of the logits.

        Raises:
            RequestError: an id is not in the vocabulary.
        """
        allowed = np.zeros(-(-vocab // 8) * 8, np.uint8)
        for id in ids:
            if not 0 <= id < vocab:
                raise RequestError(f"allowed_token_ids: ids must be below {vocab}, not {id}")
            allowed[id] = 1
        self._mask = np.packbits(allowed, bitorder="little")

    def mask(self) -> np.ndarray:
        """See ``Guide.mask``."""
        return self._mask

    def accept(self, token: int) -> None:
        """See ``Guide.accept``: what was sampled changes nothing."""

    def copy(self) -> AllowedTokensGuide:
        """See ``Guide.copy``: there is no state."""
        return self
