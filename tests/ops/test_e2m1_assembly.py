"""The PTX that converts E2M1 codes, computed instruction by instruction: no CPU runs it."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")
from modelmill.ops.mxfp4_linear import E2M1_VALUES
from modelmill.ops.triton.moe import grouped_gemm_int4, moe_decode_int4

MASK = 0xFFFFFFFF


def byte_permutation(low: int, high: int, selector: int) -> int:
    """``prmt``: each nibble of the selector names a byte of both; with bit 3 its sign, repeated."""
    result = 0
    for place in range(4):
        index = selector >> 4 * place & 15
        byte = (high << 32 | low) >> 8 * (index & 7) & 255
        result |= ((255 if byte & 128 else 0) if index & 8 else byte) << 8 * place
    return result


def run_ptx(text: str, operands: dict[str, int]) -> dict[str, int]:
    """The registers behind straight code of 32-bit operations."""
    registers = dict(operands)
    for line in re.findall(r"^ *(\w+)\.[bu]32 ([^;]+);$", text, re.MULTILINE):
        operation, (target, *sources) = line[0], [each.strip() for each in line[1].split(",")]
        values = [registers[each] if each in registers else int(each, 0) for each in sources]
        match operation, values:
            case "mov", [a]:
                result = a
            case "and", [a, b]:
                result = a & b
            case "shl", [a, b]:
                result = a << b
            case "shr", [a, b]:
                result = a >> b
            case "prmt", [a, b, selector]:
                result = byte_permutation(a, b, selector)
            case "lop3", [a, b, c, 0xF8]:
                result = a | (b & c)
            case _:
                raise AssertionError(line)
        registers[target] = result & MASK
    return registers


@pytest.mark.parametrize("shift", range(0, 256, 16))
def test_each_code_at_each_place(shift: int) -> None:
    """Sixteen words in which every byte differs, of all bytes over all parameters."""
    for first in range(shift, shift + 16):
        data = [(first + step) % 256 for step in (0, 67, 133, 211)]
        word = sum(byte << 8 * place for place, byte in enumerate(data))
        low = [E2M1_VALUES[byte & 15] for byte in data]
        high = [E2M1_VALUES[byte >> 4] for byte in data]
        floats = run_ptx(moe_decode_int4._E2M1_TO_FLOAT32_ASM.value, {"$8": word})
        bits = torch.tensor([floats[f"${i}"] for i in range(8)]).to(torch.uint32)
        assert bits.view(torch.float32).tolist() == [*low, *high]
        pairs = run_ptx(grouped_gemm_int4._E2M1_TO_BFLOAT16_ASM.value, {"$4": word})
        bits = torch.tensor([pairs[f"${i}"] for i in range(4)]).to(torch.uint32)
        assert bits.view(torch.bfloat16).tolist() == [*low, *high]
