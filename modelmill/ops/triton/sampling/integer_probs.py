"""Integer probabilities for Triton kernels: the arithmetic of ``ops/sample.py``, step by step.

Computes: integer probabilities of logits
Dtypes: float32 and float64 to int64
Layout: registers
Range: any vocab below 2^22
Technique: exact steps without fused multiply-adds
Used by: sample.py, topk_topp.py

Kernels must be launched without fused multiply-adds (``enable_fp_fusion=False``), which would
change the last bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_C1, _C2, _C3 = (
    tl.constexpr(0.6931470632553101),
    tl.constexpr(0.2402293086051941),
    tl.constexpr(0.055485282093286514),
)
_C4, _C5 = tl.constexpr(0.00967545248568058), tl.constexpr(0.0012467841152101755)
_C6 = tl.constexpr(0.0002161293086828664)
NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))


@triton.jit
def bits_to_float(word):
    """Reinterpret int32 bits as float32."""
    return word.to(tl.float32, bitcast=True)


@triton.jit
def float_to_bits(real):
    """Reinterpret float32 as int32 bits."""
    return real.to(tl.int32, bitcast=True)


@triton.jit
def load_temperature_scaled_logits(row_ptr, at, vocab, temperature):
    """Logits times 1 / temperature; NaN and columns beyond the vocabulary are −inf."""
    x = tl.load(row_ptr + at, mask=at < vocab, other=NEG_INF)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    return tl.where(x == x, x, NEG_INF) * tl.math.div_rn(tl.full([], 1.0, tl.float32), divisor)


@triton.jit
def log2_ratio(x, row_max):
    """Base-2 logarithm of a token's probability relative to the most likely one, at least −60."""
    return tl.maximum(tl.where(x == row_max, 0.0, x - row_max) * _LOG2E, -60.0)


@triton.jit
def token_weight(x, row_max):
    """Weight of a token, with the same operations as the reference."""
    z = log2_ratio(x, row_max)
    whole = tl.floor(z)
    part = z - whole
    power = (((((part * _C6 + _C5) * part + _C4) * part + _C3) * part + _C2) * part + _C1) * part
    bits = ((power + 1.0) * 8388608.0).to(tl.int32).to(tl.int64)
    return tl.where(x > NEG_INF, (bits << 17) >> (-whole).to(tl.int32).to(tl.int64), 0)


@triton.jit
def float_to_key(x):
    """Integers in the same order as the floats, −0 equal to 0."""
    bits = float_to_bits(tl.where(x == 0.0, 0.0, x))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def key_to_float(key):
    """Return the float32 whose ``float_to_key`` is ``key``."""
    bits = key.to(tl.int32)
    return bits_to_float(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def ceil_fraction(p, total):
    """Compute ceil(p · total)."""
    exact = p.to(tl.float64) * total.to(tl.float64)
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)
