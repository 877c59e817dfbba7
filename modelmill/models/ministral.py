"""Ministral 8B: Mistral with a window in the layers that ``layer_types`` names, or in all."""

from __future__ import annotations

from modelmill.models import mistral

Model = mistral.Model
CHECKPOINT_LAYOUT = mistral.CHECKPOINT_LAYOUT
config_from_hf = mistral.config_from_hf
