"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
from typing import Any

import torch


def _mend_interpreter() -> None:
    """Triton 3.6 reads loop bounds with int(array of one element), which NumPy 2.4 refuses."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _mend_interpreter()
