"""The marks beside the rows: reached, missed, or no row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools import quantization_targets as marks


def row(options: str, excess: float, **more: Any) -> dict[str, Any]:
    return {"options": options, "excess": excess, "kv_cache_dtype": "auto", **more}


def line_of(
    what: str, *rows: dict[str, Any], held_back: Mapping[str, tuple[float, float]] = {}
) -> str:
    """The cells behind what: must, measured and verdict; and those of other texts, if any."""
    lines = marks.targets_table(rows, held_back)
    (line_text,) = [line for line in lines if line.startswith(f"| {what}")]
    cells = [cell.strip() for cell in line_text.split("|")[2:-1]]
    assert len(cells) == 5
    return " | ".join(cells if any(cells[3:]) else cells[:3])


def test_what_has_no_row_says_so() -> None:
    lines = marks.targets_table([])
    assert len(lines) == 2 + len(marks.SINGLE_TARGETS) + 1 + len(marks.BEST_INT4)
    assert all(line.endswith("| no row |  |  |  |") for line in lines[2:])


def test_reached_and_missed() -> None:
    assert line_of("int8,", row("-q int8", 0.0025)) == "≤ +0.3 % | +0.25 % | reached"
    assert line_of("int8,", row("-q int8", 0.0035)) == "≤ +0.3 % | +0.35 % | missed"
    assert line_of("int8,", row("-q int8", 0.0025, kv_cache_dtype="int8")).endswith("no row | ")
    assert line_of("GGUF", row("-q keep", -1e-9)) == "≤ +0 % | +0.00 % | reached"


def test_the_mean_on_other_texts_is_held_against_the_same_mark() -> None:
    held_back = {"-q int8": (0.36, 0.75), "-q fp8": (1.71, 2.97), "-q int4": (11.62, 20.09)}
    measured = row("-q int8", 0.0025)
    line = line_of("int8,", measured, held_back=held_back)
    assert line == "≤ +0.3 % | +0.25 % | reached | +0.36, +0.75 % | missed"
    line = line_of("fp8,", held_back=held_back)
    assert line == "≤ +2.5 % | no row |  | +1.71, +2.97 % | reached"
    gptq = row("", 0.1, recipe="int4", group=128, method="gptq")
    line = line_of("int4, groups of 128, the best (gptq)", gptq, held_back=held_back)
    assert line.endswith("reached | +11.62, +20.09 % | reached")
    assert line_of("KV cache", held_back={"-q none": (0.0, 0.0)}).endswith("no row | ")


def test_w4a8_is_compared_with_its_own_weights() -> None:
    options = "-q rptq --bits w4a8 --copies 2"
    both = [row(options, 0.0616), row(options, 0.0492, whole_inputs=True)]
    assert line_of("rptq W4A8", *both) == "≤ 2 points | +1.24 points | reached"
    assert line_of("rptq W4A8", both[0]).endswith("no row | ")


def test_the_best_of_int4_and_each_method_against_nearest() -> None:
    rows = [
        row("", excess, recipe="int4", group=64, method=method)
        for method, excess in (("nearest", 0.42), ("gptq", 0.064), ("awq", 0.5))
    ]
    assert line_of("int4, groups of 64, the best (gptq)", *rows) == "≤ +25 % | +6.40 % | reached"
    assert (
        line_of("int4, groups of 64, gptq", *rows)
        == "better than nearest's +42.00 % | +6.40 % | reached"
    )
    assert line_of("int4, groups of 64, awq", *rows).endswith("+50.00 % | missed")
    same = [{**each, "excess": 0.1} for each in rows]
    assert line_of("int4, groups of 64, awq", *same).endswith("missed"), "as good is not better"
