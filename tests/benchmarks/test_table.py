"""The script that reruns the table: its sides, its rows, its printed lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import peer_setup as stages
from benchmarks import table
from benchmarks.figure_statistics import MeasuredFigure
from benchmarks.peer_process import Lengths, PeerError
from benchmarks.peer_setup import PeerSetup
from benchmarks.vllm_peer import engine_arguments
from modelmill.eval.provenance import git_commit

TRACE = "ContextTokens,GeneratedTokens\n100,10\n200,20\n3,9\n50,5\n"


class Fake:
    """A side without a process."""

    def __init__(self, name: str) -> None:
        self.name, self.start_time = name, 0.0
        self.facts = {"device": "card", "versions": {name: "1"}}

    def ready(self) -> dict[str, object]:
        if self.name == "vLLM" and Fake.broken:
            raise PeerError("vLLM: no such module")
        return self.facts

    def generate(self, lengths: Lengths, seed: int) -> float:
        return (
            sum(output for _, output in lengths)
            * (1.0 if self.name == "modelmill" else 2.0)
            / len(lengths)
        )

    def randomize_weights(self, weights: str) -> None:
        self.facts = self.facts | {"drawn": weights}

    def close(self) -> None: ...

    broken = False


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> table.SpeedTable:
    monkeypatch.setattr(PeerSetup, "start_peer", lambda _, name, *__: Fake(name))
    monkeypatch.setattr(PeerSetup, "engine", lambda _, shape: Path(shape))
    monkeypatch.setattr(Fake, "broken", False)
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    options = [
        "trace",
        "--peer",
        "kit",
        "--work",
        str(tmp_path),
        "--out",
        str(tmp_path / "rows.jsonl"),
    ]
    return table.SpeedTable(
        table.parse_args([*options, "--trace", str(trace), "--rounds", "1", "--limit", "1000"])
    )


def rows(bench: table.SpeedTable) -> list[dict[str, object]]:
    return [json.loads(line) for line in bench.options.out.read_text().splitlines()]


def test_a_line_gives_a_row_a_side_of_one_run(bench: table.SpeedTable) -> None:
    bench.run_parts(["first"], "qwen-7b")
    written = rows(bench)
    assert [(row["work"], row["subject"]) for row in written] == [
        ("first-1024", "modelmill"), ("first-1024", "vLLM"), ("first-4096", "modelmill"),
        ("first-4096", "vLLM"),
    ]  # fmt: skip
    assert {row["run"] for row in written} == {bench.run}
    for row in written:
        assert {"commit", "host_cpu", "load_1m", "calls_s"} <= set(row), (
            "where it comes from, and every call"
        )
        assert {
            "command",
            "device",
            "versions",
            "date",
            "unit",
            "spread",
            "statistic",
            "value",
        } <= set(row)
    assert written[0]["unit"] == "ms"
    assert written[1]["value"] == 2 * float(str(written[0]["value"]))


def test_marks_give_rows_that_say_in_which_order_they_were_taken(bench: table.SpeedTable) -> None:
    bench.run_parts(["marks"], "qwen-7b")
    written = rows(bench)
    assert len(written) == 2 * (7 + 4), "a line a block, and the first token of one sequence"
    assert all("3 of 144" in str(row["order"]) for row in written)
    assert {row["part"] for row in written} == {"marks"}


def test_rows_say_where_weights_are_drawn_another_way(
    bench: table.SpeedTable, tmp_path: Path
) -> None:
    options = [
        "marks",
        "--peer",
        "kit",
        "--mark",
        "1x1024",
        "--work",
        str(tmp_path),
        "--out",
        str(bench.options.out),
    ]
    other = table.SpeedTable(table.parse_args([*options, "--weights", "uniform"]))
    other.run_parts(["marks"], "qwen-7b")
    assert {row["weights"] for row in rows(other)} == {"uniform"}
    assert {row["drawn"] for row in rows(other)} == {"uniform"}, "sides were told so"
    other.options.out.unlink()
    bench.run_parts(["first"], "qwen-7b")
    assert not any("weights" in row for row in rows(bench))
    assert {row["drawn"] for row in rows(bench)} == {"normal"}


def test_the_trace_is_served_by_ours_again_after_the_peer(bench: table.SpeedTable) -> None:
    bench.run_trace()
    engine_row, peer = rows(bench)
    assert (engine_row["requests"], engine_row["input"], engine_row["output"]) == (3, 350, 35)
    assert (engine_row["spread"]["runs"], peer["spread"]["runs"]) == (3, 2)  # type: ignore[index]
    assert (engine_row["unit"], engine_row["subject"], peer["subject"]) == (
        "s",
        "modelmill",
        "vLLM",
    )


def test_both_sides_are_handed_the_trace_in_one_order(bench: table.SpeedTable) -> None:
    lengths = [(5, 1), (9, 7), (2, 3)]
    assert table.order_requests(lengths, "arrival") == lengths
    assert table.order_requests(lengths, "longest-first") == [(9, 7), (2, 3), (5, 1)]
    bench.run_trace()
    assert {(row["work"], row["order"]) for row in rows(bench)} == {("trace-3", "arrival")}
    bench.options.out.unlink()
    bench.options.order = "longest-first"
    bench.run_trace()
    assert {(row["work"], row["order"]) for row in rows(bench)} == {
        ("trace-3-longest-first", "longest-first")
    }


def test_the_commit_is_passed_where_there_is_no_checkout(
    bench: table.SpeedTable, tmp_path: Path
) -> None:
    assert git_commit(tmp_path) is None
    options = [
        "first",
        "--work",
        str(tmp_path),
        "--out",
        str(bench.options.out),
        "--commit",
        "0123abc",
    ]
    table.SpeedTable(table.parse_args(options)).run_parts(["first"], "qwen-7b")
    assert {row["commit"] for row in rows(bench)} == {"0123abc"}


@pytest.mark.parametrize(("requested", "limits_sent"), [(256, {"max_num_seqs"}), (None, set())])
def test_the_peers_other_limits_and_graphs_are_its_own_choice(
    requested: int | None, limits_sent: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        stages, "PeerProcess", lambda name, command, log, env=None: commands.append(list(command))
    )
    monkeypatch.setattr(PeerSetup, "synthetic_config", lambda self, shape: tmp_path)
    PeerSetup(tmp_path, peer=tmp_path).start_peer("vLLM", "qwen-7b", 0.45, requested)
    options = json.loads(commands[0][-1])
    fixed = {"gpu_memory_utilization", "max_model_len", "dtype"}
    assert options["run"].keys() == fixed | limits_sent
    assert "max_num_batched_tokens" not in engine_arguments(options)


def test_no_second_turn_where_the_time_is_over(bench: table.SpeedTable) -> None:
    bench.options.limit = 0
    bench.run_trace()
    assert rows(bench)[0]["spread"]["runs"] == 2  # type: ignore[index]


def test_a_variant_of_ours_takes_part_in_the_trace_and_says_its_options(
    bench: table.SpeedTable,
) -> None:
    bench.variants["modelmill-small"] = {"max_num_seqs": 8}
    bench.run_trace()
    assert [row["subject"] for row in rows(bench)] == ["modelmill", "modelmill-small", "vLLM"]
    assert rows(bench)[1]["options"] == {"max_num_seqs": 8}
    assert table.parse_variant('x={"max_num_seqs": 8}') == ("x", {"max_num_seqs": 8})


def test_a_peer_that_does_not_start_leaves_ours(
    bench: table.SpeedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "broken", True)
    bench.run_parts(["first"], "qwen-7b")
    assert {row["subject"] for row in rows(bench)} == {"modelmill"}


def test_starts_alternate_and_the_first_is_not_counted(bench: table.SpeedTable) -> None:
    bench.options.parts = ["startup"]
    bench.run_startup()
    assert [row["subject"] for row in rows(bench)] == ["modelmill", "vLLM"]
    assert rows(bench)[0]["spread"]["runs"] == 2  # type: ignore[index]


def test_without_a_peer_only_ours_is_measured(bench: table.SpeedTable) -> None:
    bench.options.peer = None
    assert bench.side_names("decode") == ["modelmill"]
    assert bench.side_names("gpt2") == ["modelmill", "transformers"]
    assert bench.side_names("eager") == ["modelmill", "transformers"]
    bench.options.only = ["transformers"]
    assert bench.side_names("gpt2") == ["transformers"]


def test_gpt2_is_measured_beside_two_peers_at_two_batches(bench: table.SpeedTable) -> None:
    bench.run_parts(["gpt2"], "gpt2-medium")
    written = rows(bench)
    assert [(row["work"], row["subject"]) for row in written] == [
        (work, side)
        for work in ("gpt2-1x128", "gpt2-64x128")
        for side in ("modelmill", "vLLM", "transformers")
    ]
    assert {row["run"] for row in written} == {bench.run}
    assert {row["unit"] for row in written} == {"ms/token", "ms"}


def test_a_printed_line_has_the_target_both_sides_and_the_ratio() -> None:
    engine_figure, peer = MeasuredFigure(3.7, 3.69, 3.72, 3), MeasuredFigure(4.84, 4.8, 4.9, 3)
    cells = table.table_line(
        "decode-1x128", {"modelmill": engine_figure, "vLLM": peer}, ["vLLM", "transformers"]
    )
    assert cells == [
        "decode, batch 1, prompt 128", "ms/token", "3.34", "3.8", "3.70 (3.69 … 3.72)",
        "4.84 (4.80 … 4.90)", "–",
        "1.31×",
    ]  # fmt: skip


def test_a_recorded_command_names_no_folder_of_this_machine() -> None:
    command = table.portable_command(
        "table", ["trace", "--peer", "/tmp/some/where/kit", "--out", "rows.jsonl"]
    )
    assert command == "python benchmarks/table.py trace --peer kit --out rows.jsonl"


def test_the_peer_finds_its_packages(tmp_path: Path) -> None:
    (tmp_path / "kit" / "site").mkdir(parents=True)
    python, env = PeerSetup(tmp_path, peer=tmp_path / "kit")._vllm()
    assert env["PYTHONPATH"] == str(tmp_path / "kit" / "site")
    assert python == stages.sys.executable
    python, env = PeerSetup(tmp_path, peer_python=Path("/venv/bin/python"))._vllm()
    assert python == "/venv/bin/python"
    assert "PYTHONPATH" not in env
