"""The tables of docs/performance.md: ratios of one run, medians, and which rows are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tools.performance import gpu_tables, plots, provenance, runs, vllm_tables
from tools.performance.rows import Row

CLAIM = {"commit": "abc1234", "device_id": "GPU-a"}
H200 = {"device": "NVIDIA H200", "versions": {"modelmill": "0.1.0", "numpy": "2"}}


def mark(subject: str, value: float, run: str, **changed: Any) -> dict[str, Any]:
    """A row of ``benchmarks/table.py marks`` that can carry a claim."""
    return {
        **H200, "bench": "table", "part": "marks", "work": "first-4096", "subject": subject,
        "value": value, "run": run, "device_id": f"GPU-{run[0]}", "commit": "abc1234",
        "date": "2026-01-02T03", "command": "python benchmarks/table.py marks --out x.jsonl",
        **changed,
    }  # fmt: skip


def pair(engine: float, peer: float, run: str, **changed: Any) -> list[dict[str, Any]]:
    return [mark("modelmill", engine, run, **changed), mark("vLLM", peer, run, **changed)]


def line_of(lines: list[str], title: str) -> str:
    [line] = [line for line in lines if line.startswith(f"| {title}")]
    return line


def test_a_claim_is_a_median_over_cards_beside_its_least_favourable_run() -> None:
    rows = [*pair(80.0, 100.0, "a1"), *pair(90.0, 99.0, "b1"), *pair(70.0, 105.0, "c1")]
    lines = vllm_tables.vllm_table(rows)
    assert line_of(lines, "first token, 1 × 4,096").endswith(
        "| 73.7 | 84 | **80.0** | ✓, missed on 1 | 100 | **1.25** | 1.10 | 3 |"
    )
    assert lines[-1] == (
        "NVIDIA H200; modelmill 0.1.0; 2026-01-02; commit `abc1234 (age unknown)`; "
        "`python benchmarks/table.py marks`"
    )
    assert plots.speed(rows) == [
        ("first token, 1 × 4,096, ms", {"median over cards": 1.25, "least favourable run": 1.1})
    ]


def test_of_a_card_the_newest_run_counts() -> None:
    rows = [*pair(80.0, 100.0, "a2", date="2026-01-03"), *pair(50.0, 100.0, "a1")]
    assert "| **80.0** | ✓ | 100 | **1.25** | 1.25 | 1 |" in vllm_tables.vllm_table(rows)[2]


def test_a_missed_target_is_told_and_does_not_look_reached() -> None:
    assert "| **84.01** | missed |" in vllm_tables.vllm_table(pair(84.01, 90.0, "a"))[2]


@pytest.mark.parametrize(
    "changed",
    [
        {"commit": None}, {"device_id": None}, {"device": "NVIDIA H100"}, {"layers": 2},
        {"weights": "uniform"}, {"tried": "an idea"}, {"part": "first"},
        {"device_id": vllm_tables.UNEVEN_PEER_CARDS[0]},
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_carry_no_claim_are_refused(changed: dict[str, Any]) -> None:
    assert len(vllm_tables.vllm_table(pair(80.0, 100.0, "a", **changed))) == 2


def test_sides_of_two_runs_make_no_ratio() -> None:
    rows = [mark("vLLM", 100.0, "a1"), mark("modelmill", 80.0, "a2")]
    assert len(vllm_tables.vllm_table(rows)) == 2


def test_a_trace_counts_in_one_order_and_arrival_stands_first() -> None:
    trace = {"part": "trace"}
    longest = pair(28.0, 34.0, "a2", work="trace-500-longest-first", order="longest-first", **trace)
    arrival = pair(30.0, 35.0, "a3", work="trace-500", order="arrival", **trace)
    unnamed = pair(20.0, 35.0, "a4", work="trace-500", date="2026-02-02", **trace)
    lines = vllm_tables.vllm_table([*longest, *arrival, *unnamed])
    assert "order of arrival" in lines[2]
    assert "| **30.0** | missed | 35.0 |" in lines[2]
    assert "both sides" in lines[3]


def peer_row(bench: str, subject: str, value: float, date: str, **more: Any) -> dict[str, Any]:
    """A row of ``benchmarks/sam.py`` or ``minigpt4.py``."""
    row = {"bench": bench, "subject": subject, "value": value, "date": date, "command": "python x"}
    return {**H200, **CLAIM, **row, **more}


def test_runs_beside_transformers_give_a_median_and_the_least() -> None:
    encoder = {"work": "encoder", "batch": 1}
    rows = [
        peer_row("sam", "bfloat16", 10.0, "2026-01-01", **encoder),
        peer_row("sam", "transformers", 40.0, "2026-01-01", **encoder),
        peer_row("sam", "bfloat16", 20.0, "2026-01-02", **encoder),
        peer_row("sam", "transformers", 40.0, "2026-01-02", **encoder),
        peer_row("sam", "bfloat16", 1.0, "2026-01-03", **encoder),
        peer_row("sam", "bfloat16", 1.0, "2026-01-02", depth=2, **encoder),
        peer_row("minigpt4", "bfloat16", 800.0, "2026-01-01", work="many", pictures=64)
        | {"requests_per_s": 50.0},
        peer_row("minigpt4", "transformers", 1600.0, "2026-01-01", work="many", pictures=64)
        | {"requests_per_s": 25.0},
        peer_row("minigpt4", "bfloat16", 8.0, "2026-01-01", work="eyes", pictures=16),
        peer_row("minigpt4", "transformers", 16.0, "2026-01-01", work="eyes", pictures=16),
    ]
    lines = gpu_tables.fastest_peer_table(rows)
    assert line_of(lines, "Segment Anything").endswith(
        "| 12.5 | **15.0** | missed | 40.0 transformers | **3.00** | 2.00 | 2 |"
    )
    assert line_of(lines, "… 64 such requests").endswith(
        "| 60 | **50.0** | missed | 25.0 transformers | **2.00** | 2.00 | 1 |"
    ), "a rate: more is better"
    assert "| **8.00** |  | 16.0 transformers |" in line_of(lines, "MiniGPT-4, vision encoder")
    assert gpu_tables.fastest_peer_table([row | {"commit": None} for row in rows])[2:] == []


def encoder_rows(date: str, **milliseconds: float) -> list[Row]:
    """Rows of one run of the encoder; side by its name, with ``_`` for ``-``."""
    return [
        peer_row("sam", name.replace("_", "-"), value, date, work="encoder", batch=1)
        for name, value in milliseconds.items()
    ]


def test_the_fastest_peer_of_a_run_is_named() -> None:
    rows = encoder_rows(
        "2026-01-02",
        bfloat16=10.0,
        transformers=40.0,
        transformers_max_autotune=18.0,
        segment_anything_fast=15.0,
        segment_anything_fast_int8=9.0,
    )
    line = line_of(gpu_tables.fastest_peer_table(rows), "Segment Anything")
    assert "| 15.0 segment-anything-fast | **1.50** | 1.50 | 1 |" in line, "of 16 bits as ours is"


def test_of_runs_beside_different_peers_the_smallest_ratio_counts() -> None:
    eager = encoder_rows("2026-01-05", bfloat16=10.0, transformers=40.0)
    compiled = encoder_rows("2026-01-01", bfloat16=10.0, transformers_compiled=20.0)
    table = gpu_tables.fastest_peer_table
    assert "| 20.0 transformers-compiled | **2.00** |" in line_of(table([*eager, *compiled]), "Seg")
    more = encoder_rows(
        "2026-01-02", bfloat16=10.0, transformers=40.0, transformers_max_autotune=16.0
    )
    again = encoder_rows(
        "2026-01-03", bfloat16=10.0, transformers=14.0, transformers_max_autotune=18.0
    )
    line = line_of(table([*eager, *compiled, *more, *again]), "Segment Anything")
    assert "| 15.0 transformers-max-autotune or transformers | **1.50** | 1.40 | 2 |" in line
    slower = encoder_rows(
        "2026-01-04", bfloat16=10.0, transformers=40.0, transformers_reduce_overhead=19.0,
        transformers_max_autotune=18.0,
    )  # fmt: skip
    assert line_of(table([*more, *again, *slower]), "Segment Anything") == line


def test_embeddings_that_were_made_before_a_call_are_no_peer() -> None:
    request = {"work": "request", "pictures": 1}
    rows = [
        peer_row("minigpt4", subject, value, "2026-01-02", **request)
        for subject, value in (
            ("bfloat16", 300.0), ("vLLM", 450.0), ("vLLM-embeddings", 290.0),
            ("transformers", 2000.0),
        )
    ]  # fmt: skip
    line = line_of(gpu_tables.fastest_peer_table(rows), "… 132 tokens")
    assert "| 450 vLLM | **1.50** |" in line


def test_gpt2_has_a_line_for_each_batch() -> None:
    rows = [
        mark(subject, value, "a1", part="gpt2", work=f"gpt2-{batch}x128")
        for batch in (1, 64)
        for subject, value in (("modelmill", 0.5), ("vLLM", 1.0), ("transformers", 9.0))
    ]
    lines = gpu_tables.fastest_peer_table(rows)
    assert "| 0.8 | **0.500** | ✓ | 1.00 vLLM | **2.00** |" in line_of(lines, "GPT-2 medium")
    assert "| 1.00 vLLM | **2.00** |" in line_of(lines, "… batch 64")


def test_without_a_peer_the_newest_row_stands_with_its_commit() -> None:
    rows = [
        peer_row("sam", "bfloat16", 3.5, "2026-01-02", work="click", commit="abc1234"),
        peer_row("sam", "bfloat16", 1.0, "2026-01-01", work="click"),
        peer_row("sam", "bfloat16", 1.0, "2026-01-03", work="click", commit=None),
    ]
    lines = gpu_tables.alone_table(rows)
    assert lines[-1].endswith("| 3 | **3.50** | missed | 2026-01-02 | `abc1234 (age unknown)` |")


def test_figures_on_several_gpus_stand_beside_those_of_one() -> None:
    step = {
        **H200,
        **CLAIM,
        "figure": "step.decode_ms",
        "batch": 1,
        "context": 128,
        "command": "python x",
    }
    step["date"] = "2026-01-02"
    total = {**step, "figure": "sum.us", "tokens": 1, "width": 4096, "device": "NVIDIA H200 x2"}
    loop = {**step, "figure": "loop.decode_ms", "batch": 64, "context": 1024}
    rows: list[Row] = [
        {**step, "tp": 1, "value": 3.6}, {**step, "tp": 2, "value": 2.4}, {**step, "value": 9.9},
        {**total, "tp": 2, "value": 2.86, "nccl_us": 11.3},
        {**loop, "tp": 1, "value": 10.2}, {**loop, "tp": 2, "value": 6.1},
    ]  # fmt: skip
    lines = gpu_tables.parallel_table(rows)
    assert lines[:4] == [
        "| ms | 1 GPU | 2 GPUs |",
        "|---|---|---|",
        "| decode, 1 × 128 | 3.60 | 2.40 (**1.50** ×) |",
        "| all-reduce and norm, 1 × 4096, µs (NCCL) |  | **2.86** (11.3) |",
    ]
    assert not any("loop" in line for line in lines), "10.2 ms lie below the floor of the step"
    slower = [{**loop, "tp": 1, "value": 12.2}, {**loop, "tp": 2, "value": 6.1}]
    assert gpu_tables.parallel_table([*rows, *slower]) == lines, "it has no line of its step"
    steps = [{**row, "figure": "step.decode_ms"} for row in slower]
    lines = gpu_tables.parallel_table([*rows, *slower, *steps])
    assert lines[3:5] == [
        "| decode, 64 × 1,024 | 12.2 | 6.10 (**2.00** ×) |",
        "| … through the engine's loop | 12.2 | 6.10 (**2.00** ×) |",
    ]


def parallel_row(figure: str, tp: int, value: float, run: int = 2, **more: Any) -> dict[str, Any]:
    """A row of ``benchmarks/tensor_parallel.py``."""
    row = {"figure": figure, "tp": tp, "value": value, "batch": 1, "command": "python x"}
    return {**H200, **CLAIM, **row, "date": f"2026-01-{run:02}", **more}


def test_a_ratio_over_one_gpu_is_of_one_run() -> None:
    rows: list[Row] = [
        parallel_row("step.decode_ms", 1, 4.0, 3, context=128),
        parallel_row("step.decode_ms", 2, 2.0, 3, context=128),
        parallel_row("step.decode_ms", 1, 3.6, 2, context=128),
        parallel_row("step.decode_ms", 4, 1.2, 2, context=128),
        parallel_row("step.decode_ms", 8, 1.0, 1, context=128),
    ]
    assert line_of(gpu_tables.parallel_table(rows), "decode, 1 ×") == (
        "| decode, 1 × 128 | 4.00 | 2.00 (**2.00** ×) | 1.20 (**3.00** ×) | 1.00 |"
    )


def test_a_first_step_says_how_it_ran_and_old_rows_were_launched() -> None:
    rows: list[Row] = [
        parallel_row("step.prefill_ms", 1, 20.0, tokens=1024),
        parallel_row("step.prefill_ms", 2, 40.0, tokens=1024),
        parallel_row("step.prefill_ms", 1, 19.0, 3, tokens=1024, captured=True),
        parallel_row("step.prefill_ms", 4, 36.0, 3, tokens=1024, captured=False),
    ]
    lines = gpu_tables.parallel_table(rows)
    assert line_of(lines, "first step, as a graph, 1 × 1,024").endswith("| 19.0 |  |  |")
    assert line_of(lines, "first step, launched, 1 × 1,024").endswith(
        "| 20.0 | 40.0 (**0.50** ×) | 36.0 |"
    )


def test_a_first_token_of_the_loop_counts_where_no_call_captured() -> None:
    def loop(tp: int, first: float, context: int, **more: Any) -> dict[str, Any]:
        return parallel_row(
            "loop.decode_ms", tp, 4.0, context=context, first_token_ms=first, **more
        )

    rows: list[Row] = [
        loop(1, 80.0, 512), loop(1, 16.0, 512), loop(2, 90.0, 512), loop(2, 8.0, 512),
        loop(1, 70.0, 128), loop(1, 21.0, 1024, rounds=3), loop(2, 1300.0, 1024, batch=64),
    ]  # fmt: skip
    lines = gpu_tables.parallel_table(rows)
    first = [line for line in lines if line.startswith("| first token")]
    title = "| first token through the loop, 1 ×"
    assert first == [
        f"{title} 512 | 16.0 | 8.00 (**2.00** ×) |",
        f"{title} 1,024 | 21.0 |  |",
    ]


def test_a_claim_needs_a_commit_and_a_card() -> None:
    row = mark("modelmill", 1.0, "a")
    assert runs.can_carry_a_claim(row)
    assert not runs.can_carry_a_claim({**row, "commit": ""})
    assert not runs.can_carry_a_claim({**row, "commit": "abc1234-dirty"})
    assert not runs.can_carry_a_claim({**row, "device_id": None})
    cpu = {**row, "device": "Some CPU", "device_id": None}
    assert not runs.can_carry_a_claim(cpu)
    assert runs.can_carry_a_claim({**cpu, "host_cpu": "Some CPU"})


def test_provenance_names_the_newest_command_of_each_script_and_every_commit() -> None:
    rows = [
        mark("modelmill", 1.0, "a", date="2026-01-05", command="python t.py marks --blocks 3"),
        mark("modelmill", 1.0, "a", command="python t.py marks --no-check --save s.jsonl"),
        mark("modelmill", 1.0, "a", command="modelmill bench x.engine --commit f", commit=None),
    ]
    assert provenance.provenance_line(rows) == (
        "NVIDIA H200; modelmill 0.1.0; 2026-01-02 to 2026-01-05; `abc1234 (age unknown)`, "
        "**no commit**; "
        "`python t.py marks --blocks 3`, `modelmill bench x.engine`"
    )
    assert provenance.provenance_line(rows[:1], commands=False).endswith("; commit abc1234")


def test_a_commit_that_is_younger_than_its_row_says_so() -> None:
    rows = [mark("modelmill", 1.0, "a", commit="d24415f"), mark("modelmill", 1.0, "b")]
    line = provenance.without_ages(provenance.provenance_line(rows))
    assert "; commits `d24415f` (made after the run), `abc1234`; " in line
    line = provenance.provenance_line(rows, commands=False)
    assert line.endswith("; commits d24415f (made after the run), abc1234")


def test_an_age_counts_the_commits_that_changed_what_a_row_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = []

    def run(command: list[str], **_: object) -> object:
        paths.append(command[command.index("--") + 1 :])
        return type("Answer", (), {"stdout": "7\n"})()

    monkeypatch.setattr(provenance.subprocess, "run", run)
    kernel, language, picture = ({"bench": name} for name in ("op", "suite", "sam"))
    for row in (kernel, language, picture):
        assert provenance.age("some commit", provenance.timed_paths(row)) == "7"
    assert paths[0] == ["modelmill/ops"]
    assert "modelmill/vision" not in paths[1]
    assert paths[2] == [*paths[1], "modelmill/vision"]
    provenance.age.cache_clear()
    assert provenance.without_ages("commit a (age 7), b (age unknown)") == "commit a, b"


def test_the_two_orders_of_a_trace_are_two_commands() -> None:
    trace = "python benchmarks/table.py trace --trace azure --order"
    first, second = (provenance.script_and_part(f"{trace} {order}") for order in ("a", "b"))
    assert first != second
    assert provenance.script_and_part(f"{trace} a --rounds 3") == first
    suite = "python benchmarks/suite.py --shape llama-3-8b"
    parts = [provenance.script_and_part(f"{suite}{more}") for more in ("", " --weight-format int8")]
    assert parts[0] != parts[1] != provenance.script_and_part(suite.replace("3-8b", "7b"))
