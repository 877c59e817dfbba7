"""VaultGemma: Gemma 2 without the norms behind the branches."""

from __future__ import annotations

from tests.models.families.gemma2 import CASE as GEMMA2
from tests.models.family_cases import NULL, FamilyCase, fault, times

# scores without a cap are compared at the scale of a head of 16 channels
SCALE = {"query_pre_attn_scalar": 16}
CASE = FamilyCase(
    "vaultgemma",
    {**GEMMA2.base, "intermediate_size": 64, "query_pre_attn_scalar": 9},
    tuple(
        {**switch, **SCALE} if switch.get("attn_logit_softcapping", 1) in (None, NULL) else switch
        for switch in GEMMA2.switches
    ),
    {key: value for key, value in GEMMA2.refused.items() if key != "use_bidirectional_attention"},
    {**GEMMA2.faults, "eps x 10": fault("attn_norm.eps", eps=times(10))},
)
