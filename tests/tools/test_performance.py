"""docs/performance.md: it is what the rows and the story give, and the rows are read rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.targets import TARGETS
from modelmill.ops import registry
from tools.performance import page, plots, tables
from tools.performance.__main__ import main
from tools.performance.cards_table import cards_table
from tools.performance.minigpt4_table import minigpt4_table
from tools.performance.ops_table import HOST_OPS, ops_table
from tools.performance.rows import (
    MeasuredFigure,
    cpu_groups,
    kernels,
    make_target_line,
    read_rows,
    rows_by_state,
)

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = "modelmill bench latency qwen7b.engine"


def bench(value: float, date: str, prompt: int = 128, **more: Any) -> dict[str, Any]:
    """A row of ``modelmill bench latency``."""
    shape = {"batch": 1, "input": prompt, "output": 64}
    row = {
        "command": BENCH,
        "figure": "latency.per_token_ms",
        "engine": "qwen7b.engine",
        "subject": "modelmill",
    }
    return {
        **row,
        "shape": shape,
        "value": value,
        "date": date,
        "device": "card",
        "versions": {"torch": "2"},
        **more,
    }


def table(subject: str, value: float, run: str, date: str, **more: Any) -> dict[str, Any]:
    """A row of ``benchmarks/table.py``."""
    spread = {"min": value - 0.1, "max": value + 0.1, "runs": 3}
    row = {
        "bench": "table",
        "work": "decode-1x128",
        "subject": subject,
        "run": run,
        "command": "python table",
    }
    versions = {"vllm": "0.25.1"} if subject == "vLLM" else {"modelmill": "0.1.0"}
    return {
        **row,
        "value": value,
        "date": date,
        "spread": spread,
        "device": "card",
        "versions": versions,
        **more,
    }


def op(case: str, variant: str, fraction: float, **more: Any) -> dict[str, Any]:
    """A row of ``benchmarks/ops.py``."""
    row = {"bench": "op", "op": "linear", "dtype": "bfloat16", "case": case, "variant": variant}
    return {**row, "fraction": fraction, **more}


def cpu(speed: float, ratio: float, note: str = "", prompt: int = 16) -> dict[str, Any]:
    """A row of ``benchmarks/llamacpp_peer.py``."""
    engine = {"dtype": "bfloat16", "quantization": "int8", "quantize_head": False}
    row = {"op": "llamacpp_peer", "phase": "decode", "prompt": prompt, "engine": engine, "busy": 0}
    row["device"] = "AMD EPYC (family 26 model 2), 2 cores"
    return {**row, "ours": speed, "ratio": ratio, "note": note}


def test_the_committed_page_is_what_the_rows_and_the_story_give() -> None:
    assert page.stale_files(ROOT) == [], "run `make performance` and commit what it writes"


def test_first_tokens_stand_card_by_card_and_draw_by_draw() -> None:
    def row(subject: str, value: float, card: int, **more: Any) -> dict[str, Any]:
        return table(
            subject, value, f"r-{card}", "2026-01-02", work="first-4096", card=card, **more
        )

    rows = [
        row("modelmill", 83.0, 1),
        row("vLLM", 100.0, 1),
        row("modelmill", 85.5, 2),
        row("vLLM", 90.0, 2),
    ]
    rows += [
        row("modelmill", 83.97, 2, weights="uniform"),
        row("modelmill", 50.0, 1, tried="an idea"),
    ]
    rows += [table("modelmill", 1.0, "r", "2026-01-01", work="first-4096")]
    rows += [
        table("modelmill", 2.0, "r", "2026-01-04", work="first-4096", **more)
        for more in ({"weights": "uniform"}, {"tried": "x"})
    ]
    rows += [row("modelmill", 9.0, 1) | {"date": "2026-01-01", "run": "an older one"}]
    heads, _, uniform, normal = cards_table(rows)
    assert heads.count("card") == 2
    assert "| uniform" in uniform
    assert uniform.endswith("| 84 | 0.950 |  | 84.0 | **83.97** reached |")
    assert "| normal" in normal
    assert normal.endswith("| 83.0 / 100 = 0.830 | 85.5 / 90.0 = 0.950 | **84.2** missed |")
    line = make_target_line("first-4096", rows)
    assert line.newest is not None
    assert line.newest.value == 1.0, "cards, other draws and what was tried are other lines"


def test_every_op_has_a_line_with_its_largest_cases() -> None:
    def row(case: str, us: float, bound: str, **more: Any) -> dict[str, Any]:
        rates = {
            "gbps": 1000.0,
            "tflops": 100.0,
            "chosen": True,
            "bound": bound,
            "date": "2026-01-02T03",
        }
        return op(case, "cuda", 0.5, value=us) | rates | more

    rows = [
        row("small", 10.0, "memory"),
        row("large", 30.0, "memory", gbps=500.0),
        row("large", 20.0, "memory"),
    ]
    rows += [
        row("large", 99.0, "memory", variant="torch", chosen=False),
        row("wide", 4.0, "products"),
    ]
    rows += [
        row("half", 900.0, "memory", dtype="float16"),
        row("other", 900.0, "memory", chosen=False),
    ]
    library = row("library", 8.0, "products", variant="torch", op="linear_add")
    bare = {
        name: value
        for name, value in row("bare", 5.0, "memory", op="sample", dtype="float32").items()
        if name != "fraction"
    }
    rows += [library, bare | {"bound": None}, row("tiny", 1.0, "memory", op="linear_add")]
    rows += [row("tiny", 1.0, "memory", op="gelu")]
    lines = {line.split("|")[1].strip() or "more": line for line in ops_table(rows)}
    assert lines["linear"].endswith(
        "| large | cuda | 20.0 | 1.00 | 100 | memory | **0.50** | 99.0 | 2026-01-02 |"
    )
    assert "| wide | cuda | 4.00 |" in lines["more"]
    assert "| library | torch | 8.00 |" in lines["linear_add"], (
        "what the registry leaves to a library has its line"
    )
    assert "| tiny |" in lines["gelu"], "there is no other"
    assert "| bare | cuda | 5.00 |" in lines["sample"]
    assert set(lines) - {"more", "op", "---"} == set(registry.op_names()) - set(HOST_OPS)
    assert lines["rms_norm"] == "| rms_norm |" + " – |" * 9, (
        "what was not measured is seen to be so"
    )


def test_rows_are_read_in_order_and_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert read_rows(file) == [{"a": 1}, {"a": 2}]
    assert read_rows(tmp_path / "none.jsonl") == []
    file.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_rows(file)


def test_without_a_peer_the_newest_row_counts_and_the_oldest_was_first() -> None:
    line = make_target_line(
        "decode-1x128",
        [bench(4.2, "01"), bench(3.7, "03"), bench(3.9, "02"), bench(9.0, "04", prompt=4096)],
    )
    assert line.newest is not None
    assert line.first is not None
    assert (line.newest.value, line.first.value, line.beside_peer, line.peers) == (
        3.7,
        4.2,
        None,
        {},
    )


def test_peers_come_from_the_newest_run_that_has_both_and_ours_from_the_newest() -> None:
    rows = [
        table("modelmill", 3.8, "a", "05"), table("vLLM", 4.9, "a", "05"),
        table("modelmill", 3.6, "b", "06"), table("vLLM", 4.8, "b", "06"),
        table("modelmill", 3.5, "c", "07"), table("modelmill", 0.5, "d", "08", layers=2),
        table("vLLM", 1, "d", "08"),
    ]  # fmt: skip
    line = make_target_line("decode-1x128", [*rows, bench(3.4, "09")])
    assert line.newest is not None
    assert line.beside_peer is not None
    assert (line.newest.value, line.beside_peer.value, line.peers["vLLM"].value) == (3.5, 3.6, 4.8)


def test_runs_with_other_options_are_other_figures() -> None:
    rows = [
        bench(3.7, "01"),
        bench(2.1, "02", command=f"{BENCH} --tp 2"),
        bench(2.2, "03", subject="transformers"),
    ]
    line = make_target_line("decode-1x128", rows)
    assert line.newest is not None
    assert line.newest.value == 3.7


@pytest.mark.parametrize(
    ("work", "row"),
    [
        ("first-1024", bench(21.0, "01", 1024, figure="latency.first_token_ms")),
        ("gpt2-1x128", bench(0.6, "01", engine="gpt2m.engine")),
        ("startup", bench(6.2, "01", figure="startup.total_s")),
        (
            "trace-500",
            bench(
                32.0,
                "01",
                figure="throughput.seconds",
                command="modelmill bench throughput --trace t.csv",
            ),
        ),
    ],
)
def test_each_kind_of_work_finds_its_rows(work: str, row: dict[str, Any]) -> None:
    names = {name for name in TARGETS if make_target_line(name, [row]).newest is not None}
    assert names == {work}


def test_a_speed_line_shows_target_spread_peer_and_ratio() -> None:
    rows = [bench(4.2, "01"), table("modelmill", 3.7, "b", "06"), table("vLLM", 4.84, "b", "06")]
    line = next(line for line in tables.speed_table(rows) if "prompt 128 |" in line)
    assert line == (
        "| decode, batch 1, prompt 128 | ms/token | 3.34 | 3.8 | 4.20 | **3.70** (3.60 … 3.80) | "
        "reached "
        "| ours 3.70, vLLM 0.25.1 4.84 (4.74 … 4.94) | **1.31** | 0.785 | **0.764** |"
    )
    slower = [table("modelmill", 3.7, "b", "06"), table("vLLM", 4.6, "b", "06")]
    assert any(line.endswith("| 0.785 | **0.804** missed |") for line in tables.speed_table(slower))
    missed = next(line for line in tables.speed_table([bench(4.2, "01")]) if "prompt 128 |" in line)
    assert "| missed |" in missed
    assert all(
        line.count("|") == tables.speed_table(rows)[0].count("|")
        for line in tables.speed_table(rows)
    )


def test_ratios_are_of_one_run_only() -> None:
    rows = [table("vLLM", 4.84, "other", "05"), table("modelmill", 3.7, "b", "06")]
    assert not any("vLLM" in line for line in tables.speed_table(rows))


def test_figures_on_several_gpus_stand_beside_those_of_one() -> None:
    decode = {"figure": "step.decode_ms", "batch": 1, "context": 128}
    total = {"figure": "sum.us", "tokens": 1, "width": 4096}
    rows = [
        {**decode, "tp": 1, "value": 3.6}, {**decode, "tp": 2, "value": 2.4},
        {**decode, "value": 9.9},
        {**total, "tp": 2, "value": 2.86, "nccl_us": 11.3},
    ]  # fmt: skip
    assert tables.gpus_table(rows) == [
        "| work | 1 GPU | 2 GPUs |",
        "|---|---|---|",
        "| one step, a graph, batch 1, 128 tokens held, ms | 3.60 | 2.40 (**1.50** ×) |",
        "| a sum over the ranks with residual and norm, 1 × 4096 bfloat16, µs (NCCL and a norm) | "
        " | **2.86** (11.3) |",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.6239, "0.624"), (3.712, "3.71"), (12.46, "12.5"), (102.3, "102"), (1234.5, "1,234")],
)
def test_numbers_have_three_digits_that_count(value: float, text: str) -> None:
    assert tables.number(value) == text


def test_a_figure_just_above_its_target_does_not_look_like_it() -> None:
    row = bench(
        29.0152,
        "01",
        figure="throughput.seconds",
        command="modelmill bench throughput --trace t.csv",
    )
    assert "| 29 | – | **29.02** | missed |" in tables.speed_table([row])[2]
    assert "| **28.9** | reached |" in tables.speed_table([row | {"value": 28.94}])[2]


def test_the_newest_row_of_each_kernel_counts_and_references_are_left_out() -> None:
    rows = [
        op("1x2", "triton", 0.5),
        op("1x2", "torch", 0.9),
        op("1x2", "triton", 0.8),
        op("1x2", "cuda", 0.9),
    ]
    assert [row["fraction"] for row in kernels(rows)] == [0.8, 0.9]
    assert plots.fractions(rows) == [("linear 1x2", {"triton": 0.8, "cuda": 0.9})]
    fast = [op("prefill", "cuda", 0.3, tflops=600.0), op("launch", "triton", 0.01)]
    assert plots.fractions(fast) == []
    assert plots.rates(fast) == [("linear prefill", {"cuda": 600.0})]


def test_states_are_compared_within_a_run_and_a_work() -> None:
    step = {"figure": "step.decode_ms", "batch": 1, "context": 128, "unit": "ms"}
    rows = [
        {**step, "state": "before", "run": "one", "value": 4.0},
        {**step, "state": "after", "run": "one", "value": 3.0},
        {**step, "state": "alone", "run": "two", "value": 3.5}, {**step, "value": 9.0},
    ]  # fmt: skip
    assert list(rows_by_state(rows)) == [("one", "decode, batch 1, context 128")]
    groups = plots.code_states(rows)
    assert [label for label, _ in groups] == [
        "decode, batch 1, context 128",
        "before: 4 ms",
        "after: 3 ms",
    ]
    assert groups[2][1] == {"over the first": 0.75}


def test_a_cpu_line_pairs_the_newest_before_and_now() -> None:
    rows = [cpu(150, 1.1), cpu(126, 0.8, "before our own threads"), cpu(215, 1.6)]
    pair = cpu_groups(rows)["`-q int8 --dtype bfloat16`"]["decode after 16 tokens"]
    assert pair.before is not None
    assert (pair.before["ours"], pair.after["ours"]) == (126, 215)
    assert "| 126 | 0.80 | 215 | **1.60** | 1 | reached |" in tables.cpu_table(rows)[2]
    assert "| – |  | 90 | **0.90** | 1 | missed |" in tables.cpu_table([cpu(90, 0.9)])[2]
    other = cpu(78, 1.2) | {"device": "Intel(R) Xeon(R) Processor (family 6 model 167), 2 cores"}
    elder = cpu(70, 1.1) | {"device": "AMD EPYC (family 25 model 17), 2 cores"}
    assert list(cpu_groups([*rows, other, elder])) == [
        "`-q int8 --dtype bfloat16`", "`-q int8 --dtype bfloat16`, Intel Xeon Processor",
        "`-q int8 --dtype bfloat16`, AMD EPYC (family 25 model 17)",
    ]  # fmt: skip
    assert cpu_groups([cpu(1, 1, "before all")]) == {"`-q int8 --dtype bfloat16`": {}}


def test_an_unknown_mark_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"nothing is known of \{\{ table sped"):
        page.render("{{ table sped }}", {"h200": [], "cpu": []})


def test_the_story_keeps_its_text() -> None:
    rendered = page.render(
        "# A\n\nBraces {{ inside }} a line stay.\n\n{{ plot speed }}\n", {"h200": [], "cpu": []}
    )
    assert rendered == (
        f"{page.NOTE}\n\n# A\n\nBraces {{{{ inside }}}} a line stay.\n\n"
        "![Time over what must be reached](img/performance-speed.svg)\n"
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a story and two rows."""
    (tmp_path / "docs").mkdir()
    (tmp_path / page.STORY).write_text("# P\n\n{{ table speed }}\n\n{{ plot speed }}\n")
    (tmp_path / page.RESULTS).mkdir(parents=True)
    rows = [bench(4.2, "01"), table("modelmill", 3.7, "b", "06"), table("vLLM", 4.84, "b", "06")]
    (tmp_path / page.RESULTS / "h200.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return tmp_path


def test_a_page_is_written_once_and_stale_after_a_new_row(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = root / page.plot_path("speed")
    assert main(["--root", str(root)]) == 0
    first = plot.read_bytes()
    assert main(["--root", str(root), "--check"]) == 0
    plot.unlink()
    assert main(["--root", str(root)]) == 0
    assert plot.read_bytes() == first, "the same data gives the same bytes"
    with (root / page.RESULTS / "h200.jsonl").open("a") as sink:
        sink.write(
            json.dumps(table("modelmill", 3.2, "c", "07"))
            + "\n"
            + json.dumps(table("vLLM", 4.8, "c", "07"))
        )
    assert main(["--root", str(root), "--check"]) == 1
    assert "docs/performance.md is stale; run `make performance`" in capsys.readouterr().err
    assert page.stale_files(root) == ["docs/performance.md", "docs/img/performance-speed.svg"]


def test_the_spread_of_one_run_is_not_shown() -> None:
    assert tables.format_spread(MeasuredFigure(3.7, 3.7, 3.7, 1, {})) == "3.70"
    assert tables.format_spread(MeasuredFigure(3.7, 3.6, 3.9, 3, {})) == "3.70 (3.60 … 3.90)"


@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_every_row_says_how_where_with_what_and_when_it_was_measured(device: str) -> None:
    rows = page.read_device_rows(ROOT)[device]
    assert rows
    for number, row in enumerate(rows, 1):
        missing = {"command", "device", "date"} - set(row)
        assert not missing, f"{device}.jsonl, line {number}: no {', '.join(sorted(missing))}"
        assert "versions" in row or "torch" in row, f"{device}.jsonl, line {number}: no versions"
        assert "layers" not in row, f"{device}.jsonl, line {number}: a rehearsal is no evidence"


def test_pictures_show_the_newest_run_of_each_work() -> None:
    def row(work: str, subject: str, value: float, date: str, count: int = 1) -> dict[str, Any]:
        facts = {
            "bench": "minigpt4",
            "work": work,
            "pictures": count,
            "subject": subject,
            "value": value,
            "date": date,
        }
        more = {"requests_per_s": 1e3 * count / value} if work == "many" else {}
        spread = {"min": value - 1, "max": value + 1, "runs": 3}
        versions = {"transformers": "5", "torch": "2"}
        return {
            **facts,
            **more,
            "spread": spread,
            "command": f"python {date}",
            "device": "card",
            "versions": versions,
        }

    rows = [
        row("request", "bfloat16", 500, "2026-01-01"),
        row("request", "bfloat16", 350, "2026-01-02"),
        row("request", "transformers", 1400, "2026-01-02"),
        row("request", "int4", 200, "2026-01-02"),
        row("request", "int4", 150, "2026-01-04"),
        row("many", "bfloat16", 800, "2026-01-01", 64),
        row("many", "bfloat16", 700, "2026-01-03", 7),
        {"bench": "op"},
    ]
    lines = minigpt4_table(rows)
    assert lines[0] == "| work | bfloat16 | int4 | transformers 5 | × ours, bfloat16 |"
    [request, newest] = [line for line in lines if line.startswith("| a request")]
    assert "**350** (349 … 351) (reached: 400) | **200** (199 … 201) (missed: 190)" in request
    assert request.endswith("| **1,400** (1,399 … 1,401) | **4.00** |")
    assert newest.endswith("(newest) | – | **150** (149 … 151) (reached: 190) | – |  |")
    [many] = [line for line in lines if "requests/s" in line]
    assert "**80.0** (reached: 60)" in many
    assert [line for line in lines if line.startswith("* ")] == [
        "* `python 2026-01-02`, card, transformers 5, torch 2, 2026-01-02",
        "* `python 2026-01-04`, card, transformers 5, torch 2, 2026-01-04",
        "* `python 2026-01-01`, card, transformers 5, torch 2, 2026-01-01",
    ]
