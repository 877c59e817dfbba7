"""xverse: LLaMA under another name (XVERSE-13B's model card)."""

from __future__ import annotations

from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults


class XverseReference(PlainDecoderReference):
    """XverseForCausalLM."""

    DEFAULTS = ReferenceDefaults(positions=8192, theta=10000.0)


REFERENCE = XverseReference
