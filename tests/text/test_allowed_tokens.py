"""The mask of a list of allowed tokens."""

from __future__ import annotations

import numpy as np
import pytest

from modelmill.core.errors import RequestError
from modelmill.text.allowed_tokens import AllowedTokensGuide


@pytest.mark.parametrize("vocab", [8, 13, 64])
def test_the_mask_has_the_listed_tokens(vocab: int) -> None:
    guide = AllowedTokensGuide([0, 3, vocab - 1], vocab)
    bits = np.unpackbits(guide.mask(), bitorder="little")
    assert np.flatnonzero(bits).tolist() == sorted({0, 3, vocab - 1})
    assert len(guide.mask()) == -(-vocab // 8)
    guide.accept(3)
    assert guide.copy().mask().tolist() == guide.mask().tolist()


def test_an_id_outside_the_vocabulary() -> None:
    with pytest.raises(RequestError, match="ids must be below 8, not 8"):
        AllowedTokensGuide([8], 8)
