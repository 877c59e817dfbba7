"""The logic of `make verify` itself: what is kept, what is run again, what the page says, how it
exits.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.verify import __main__ as verify
from tools.verify import report, result
from tools.verify.context import VerifyContext
from tools.verify.item_1_tokens import _cut_before_eos, _fact
from tools.verify.item_3_converted_checkpoints import qwen_config
from tools.verify.item_4_tokenizers import vectors
from tools.verify.item_7_builds import file_digests, same_files
from tools.verify.result import Fact, VerifyResult, make_result


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Two items in place of the real ones, a shared folder, and a page of their own."""
    runs: list[str] = []

    def item(number: str, ok: bool) -> Any:
        def run(_: VerifyContext) -> VerifyResult:
            runs.append(number)
            return make_result([Fact("promised | this", f"measured {number}", ok)])

        source = tmp_path / f"item_{number}.py"
        source.write_text("")
        return SimpleNamespace(TITLE=f"Item {number}", run=run, __file__=str(source))

    (tmp_path / "repo" / "modelmill").mkdir(parents=True)
    (tmp_path / "shared" / "data").mkdir(parents=True)
    fake_items = {"1": item("1", True), "2": item("2", True)}
    monkeypatch.setattr(verify, "find_items", lambda: fake_items)
    monkeypatch.setattr(verify, "ROOT", tmp_path / "repo")
    monkeypatch.setattr(verify, "PACKAGE", tmp_path / "repo" / "modelmill")
    monkeypatch.setattr(verify, "DOCUMENT", tmp_path / "repo" / "docs" / "verification.md")
    return {"runs": runs, "items": fake_items, "item": item, "root": tmp_path / "repo"}


def run(items: dict[str, Any], *argv: str) -> int:
    return verify.main(["--out", str(items["root"] / "out"), *argv])


def test_results_are_kept_until_the_sources_change(items: dict[str, Any]) -> None:
    assert run(items) == 0
    assert run(items) == 0
    assert items["runs"] == ["1", "2"]
    (items["root"] / "modelmill" / "new.py").write_text("x = 1")
    assert run(items, "--only", "2") == 0
    assert items["runs"] == ["1", "2", "2"], "item 1 is stale, and was not asked for"
    page = (items["root"] / "docs" / "verification.md").read_text()
    assert "| 1 | Item 1 | kept, of older code (20" in page
    assert "| 2 | Item 2 | kept |" in page
    assert run(items) == 0
    assert items["runs"][3:] == ["1"]


def test_force_runs_again_what_is_asked_for(items: dict[str, Any]) -> None:
    run(items)
    run(items, "--force", "--only", "1")
    assert items["runs"] == ["1", "2", "1"]


def test_a_failure_is_said_plainly_and_exits_1(items: dict[str, Any]) -> None:
    items["items"]["2"] = items["item"]("2", False)
    assert run(items) == 1
    page = (items["root"] / "docs" / "verification.md").read_text()
    assert "**Not kept: item 2.**" in page
    assert "| promised \\| this | measured 2 | **FAILED** |" in page


def test_an_item_that_breaks_is_a_failure_with_its_error(items: dict[str, Any]) -> None:
    def broken(_: VerifyContext) -> VerifyResult:
        raise RuntimeError("out of luck\nsecond line")

    items["items"]["1"].run = broken
    assert run(items) == 1
    page = (items["root"] / "docs" / "verification.md").read_text()
    assert "RuntimeError: out of luck" in page
    assert "second line" not in page


def test_without_the_shared_folder_one_line(
    items: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (items["root"].parent / "shared" / "data").rmdir()
    assert run(items) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unknown_item_is_named(
    items: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(items, "--only", "9") == 2
    assert "no item 9" in capsys.readouterr().err


def test_the_real_items_are_all_there() -> None:
    found_items = verify.find_items()
    assert set(found_items) == {"1", "2", "3", "4", "5", "6", "7", "8", "9"}
    assert all(isinstance(item.TITLE, str) and callable(item.run) for item in found_items.values())


def test_nothing_judged_is_not_good() -> None:
    assert not make_result([]).ok
    assert not make_result([Fact("a", "b", None)]).ok
    assert make_result([Fact("a", "b", None), Fact("a", "b", True)]).ok


def test_a_broken_result_file_is_as_good_as_none(tmp_path: Path) -> None:
    path = tmp_path / "item.json"
    assert result.load(path) is None
    path.write_text('{"ok": true, "rows": [{"nonsense": 1}]}')
    assert result.load(path) is None
    result.store(make_result([Fact("a", "b")]), path)
    assert result.load(path) == make_result([Fact("a", "b")])
    assert result.load(path, "another digest") is None


def test_what_has_not_run_is_not_hidden() -> None:
    items = {"1": ("One", None), "2": ("Two", make_result([Fact("a", "b")]))}
    page = report.render(items)["verification.md"]
    assert "| 1 | One | not run |" in page


def test_what_ran_elsewhere_stays_on_the_page(items: dict[str, Any]) -> None:
    """In a new checkout, which has the page and no stored results."""
    run(items)
    page = items["root"] / "docs" / "verification.md"
    before = page.read_text()
    for path in (items["root"] / "out").iterdir():
        path.unlink()
    assert run(items, "--only", "2") == 0
    after = page.read_text()
    assert "| 1 | Item 1 | kept, of older code (20" in after
    assert "| 2 | Item 2 | kept |" in after
    assert report.section_before(after, "1.") == report.section_before(before, "1.")
    assert "| promised \\| this | measured 1 | yes |" in after
    assert run(items, "--only", "2") == 0
    assert page.read_text() == after, "said once"


def test_what_failed_elsewhere_is_still_said_above(items: dict[str, Any]) -> None:
    items["items"]["1"] = items["item"]("1", False)
    run(items)
    for path in (items["root"] / "out").iterdir():
        path.unlink()
    run(items, "--only", "2")
    page = (items["root"] / "docs" / "verification.md").read_text()
    assert "| 1 | Item 1 | **FAILED**, of older code (20" in page
    assert "**Not kept: item 1.**" in page


def test_a_long_item_has_a_page_and_leaves_its_date_and_commit() -> None:
    long = make_result([Fact("x" * report.MAX_SECTION, "measured")])
    long.command, long.date, long.commit = "verify", "2026-12-01 15:09 UTC", "abc123"
    pages = report.render({"1": ("One", long)})
    main = pages["verification.md"]
    assert "xxx" in pages["verification-1.md"]
    assert "xxx" not in main
    assert "* `verify`: 0 s on , 2026-12-01 15:09 UTC; commit abc123" in main
    again = report.render({"1": ("One", None)}, main)["verification.md"]
    assert "| 1 | One | kept, of older code (2026-12-01) |" in again


def test_a_page_that_was_written_does_not_make_the_next_item_dirty(
    items: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "git_commit", lambda root, written: f"{written} of {root.name}")
    run(items)
    page = (items["root"] / "docs" / "verification.md").read_text()
    assert "commit docs/verification*.md of repo, " in page


def test_answers_of_transformers_are_kept_by_their_key(tmp_path: Path) -> None:
    context = VerifyContext(tmp_path, tmp_path, "d")
    made: list[int] = []

    def make() -> list[int]:
        made.append(1)
        return made

    assert context.cached_json("x", [1], make) == [1]
    assert context.cached_json("x", [1], make) == [1]
    assert context.cached_json("x", [2], make) == [1, 1]


def test_a_mismatch_tells_its_place_and_margin() -> None:
    expected = [
        {"ids": [1, 2, 3], "margins": [1.0, 0.5, 2e-6]},
        {"ids": [4], "margins": [1.0, 0.1]},
    ]
    assert _fact("alone", [[1, 2, 3], [4]], expected).passed
    wrong = _fact("alone", [[1, 2, 9], [4]], expected)
    assert not wrong.passed
    assert "prompt 0 at token 2 (margin there 2e-06)" in wrong.measured
    assert (
        "prompt 1 at token 1 (margin there 0.1)"
        in _fact("alone", [[1, 2, 3], [4, 5]], expected).measured
    )


def test_the_ending_id_does_not_count() -> None:
    assert _cut_before_eos([5, 6, 2], (2,)) == [5, 6]
    assert _cut_before_eos([5, 2, 6], (2,)) == [5, 2, 6]
    assert _cut_before_eos([], (2,)) == []


def test_vectors_must_pair_up(tmp_path: Path) -> None:
    (tmp_path / "v.inp").write_text("a b\n__ggml_vocab_test__\n\n__ggml_vocab_test__\nc")
    (tmp_path / "v.out").write_text(" 1 2\n\n 3\n")
    assert vectors(tmp_path, "v") == [("a b", [1, 2]), ("", []), ("c", [3])]
    (tmp_path / "v.out").write_text("1\n2")
    with pytest.raises(ValueError, match="shorter"):
        vectors(tmp_path, "v")


def test_the_relaid_config_counts_w1_and_w2_together() -> None:
    raw = {"hidden_size": 576, "num_attention_heads": 9, "intermediate_size": 1536,
        "rms_norm_eps": 1e-5,
           "max_position_embeddings": 8192, "num_hidden_layers": 30, "rope_theta": 1e5}  # fmt: skip
    config = qwen_config(raw, 49152)
    assert (config["intermediate_size"], config["kv_channels"], config["vocab_size"]) == (
        3072,
        64,
        49152,
    )
    assert not config["use_dynamic_ntk"]
    assert not config["use_logn_attn"]


def test_two_engines_are_compared_file_by_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "weights").mkdir(parents=True)
        (tmp_path / name / "weights" / "layer").write_text("same")
        (tmp_path / name / "acceptance.json").write_text(name)
    digests = file_digests(tmp_path / "a")
    assert set(digests) == {"weights/layer"}
    assert same_files(digests, file_digests(tmp_path / "b")) == ("1 of 1 files", True)
    (tmp_path / "b" / "manifest.json").write_text("{}")
    summary = "1 of 2 files; differ: manifest.json"
    assert same_files(digests, file_digests(tmp_path / "b")) == (summary, False)
    assert same_files({}, {}) == ("0 of 0 files", False)


def test_the_page_names_the_commit_of_a_result() -> None:
    outcome = make_result([Fact("a", "b")])
    assert "; **no commit**," in report.render({"1": ("One", outcome)})["verification.md"]
    outcome.commit = "0123456789ab"
    assert "; commit 0123456789ab," in report.render({"1": ("One", outcome)})["verification.md"]


def test_a_long_item_has_a_page_of_its_own() -> None:
    facts = [Fact(f"promise {number}", "measured") for number in range(300)]
    pages = report.render({"1": ("One", None), "2": ("Two", make_result(facts))})
    assert set(pages) == {"verification.md", "verification-2.md"}
    assert "(verification-2.md)" in pages["verification.md"]
    assert "promise 7 " not in pages["verification.md"]
    assert pages["verification-2.md"].startswith("# Verification, 2. Two")
    assert "promise 299" in pages["verification-2.md"]
