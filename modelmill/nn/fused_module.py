"""What fused modules have in common: the children of a plain one under their names."""

from __future__ import annotations

from torch import nn


class FusedModule(nn.Module):
    """A plain module's children under their names, run in another way.

    ``plain`` itself is no child: names in the fused tree are those of the plain one, so that a
    profile of either names the same modules.
    """

    plain: nn.Module

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "plain", plain)
        for name, child in plain.named_children():
            self.add_module(name, child)
