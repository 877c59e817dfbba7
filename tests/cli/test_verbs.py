"""The verbs on a real, tiny model, from build to bench."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from modelmill.cli.output import tolerate_closed_output
from tests.cli.checkpoint_copy import change_config, copy_checkpoint

Cli = Callable[..., tuple[int, Any, str]]
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}<a>{% endif %}"
)


# -- build, inspect, doctor


def test_dry_run_plans_and_writes_nothing(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.engine"
    code, plan, _ = cli(
        "build", checkpoint, "-o", out, "--dry-run", "-q", "int8", "--max-model-len", 100, "--json"
    )
    assert code == 0
    assert not out.exists()
    assert (plan["build"]["quantization"], plan["max_model_len"], plan["layers"]) == (
        "int8",
        100,
        5,
    )
    assert plan["memory"]["weights"] > 0
    assert plan["memory"]["fits"]
    code, text, _ = cli("build", checkpoint, "--dry-run")
    assert code == 0
    assert "fits" in text
    assert "KV cache per token" in text


def test_build_tells_plan_and_result_as_json(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "int8.engine"
    code, output, _ = cli("build", checkpoint, "-o", out, "-q", "int8", "--json")
    assert code == 0
    assert output["acceptance"]["accepted"] is True
    assert output["plan"]["build"]["quantization"] == "int8"
    assert (out / "manifest.json").is_file()


def test_a_refused_build_names_the_layer_and_fails(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import modelmill.accept.run as accept

    refusal = {
        "accepted": False,
        "reason": "bug at layer 3, module attn.o_proj: rel_l2 0.05 > 1e-05",
    }
    monkeypatch.setattr(accept, "run_engine_acceptance", lambda *_, **__: refusal)
    code, out, err = cli("build", checkpoint, "-o", tmp_path / "x.engine")
    assert code == 1
    assert "bug at layer 3, module attn.o_proj" in err
    assert err.count("\n") == 1
    assert "is ready" not in out
    assert list(tmp_path.iterdir()) == []


def test_build_needs_an_output(cli: Cli, checkpoint: Path) -> None:
    code, _, err = cli("build", checkpoint)
    assert code == 2
    assert "-o ENGINE" in err


def test_inspect(cli: Cli, checkpoint: Path, engine: Path) -> None:
    code, output, _ = cli("inspect", engine, "--json", "--tensors", "--verify")
    assert code == 0
    assert (output["kind"], output["model_type"], output["sizes"]["layers"]) == (
        "engine",
        "llama",
        5,
    )
    assert output["tokenizer"]["vocab_size"] == 512
    assert output["acceptance"]["accepted"] is True
    assert output["parameters"] == sum(math.prod(t["shape"]) for t in output["tensors"])
    code, output, _ = cli("inspect", checkpoint, "--json")
    assert (output["kind"], output["container"], output["bytes_by_dtype"]) == (
        "checkpoint",
        "safetensors",
        {"float32": 1040128},
    )
    for path in (engine, checkpoint):
        code, text, _ = cli("inspect", path)
        assert code == 0
        assert "llama" in text


def test_inspect_says_ids_only(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    engine = tmp_path / "ids.engine"
    assert cli("build", tmp_path, "-o", engine, "--no-check")[0] == 0
    assert "ids-only engine (no tokenizer)" in cli("inspect", engine)[1]
    assert cli("inspect", engine, "--json")[1]["tokenizer"] is None
    code, _, err = cli("run", engine, "--prompt", "text")
    assert code == 1
    assert "ids-only" in err
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt_token_ids": [1, 403, 407]}\n')
    code, output, _ = cli(
        "run", engine, "--file", jobs, "--json", "--temperature", 0, "--max-tokens", 3
    )
    assert code == 0
    assert len(output[0]["outputs"][0]["token_ids"]) == 3
    assert cli("perplexity", engine, "--data", jobs)[0] == 1
    assert (
        cli("bench", "latency", engine, "--input-len", 4, "--output-len", 2, "--runs", 1, "--json")[
            0
        ]
        == 0
    )


def test_doctor_names_versions_that_were_not_tested(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelmill.core import packages

    untested = [
        packages.UntestedVersion("torch", "9.1", ">=2.11,<2.16"),
        packages.UntestedVersion("Python", "4.0", ">=3.11,<3.15"),
    ]
    monkeypatch.setattr(packages, "untested_versions", lambda: untested)
    code, output, _ = cli("doctor", "--json")
    assert code == 0
    assert output["outside"][0] == {"name": "torch", "version": "9.1", "tested": ">=2.11,<2.16"}
    text = " ".join(cli("doctor")[1].split())
    assert "outside what was tested" in text
    assert "9.1" in text
    monkeypatch.setattr(packages, "untested_versions", list)
    assert cli("doctor", "--json")[1]["outside"] == []
    assert "outside what was tested" not in cli("doctor")[1]


def test_doctor(cli: Cli) -> None:
    code, output, _ = cli("doctor", "--json")
    assert code == 0
    assert {"cpu", "gpus", "packages", "kernels", "missing", "compiler"} <= set(output)
    kernels = output["cpu_kernels"]
    assert (kernels["origin"] is None) == (kernels["reason"] is not None)
    assert all("torch" in each["available"] for each in output["kernels"])
    assert "Kernels" in cli("doctor")[1]


def test_what_is_no_engine(cli: Cli, tmp_path: Path) -> None:
    for words in (("run", tmp_path / "none", "--prompt", "x"), ("inspect", tmp_path / "none")):
        code, out, err = cli(*words)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1


# -- run, chat


def test_run_streams_and_tells_the_speed(cli: Cli, engine: Path) -> None:
    words = ("run", engine, "--prompt", "Once upon a time", "--temperature", 0, "--max-tokens", 12)
    code, text, err = cli(*words)
    assert code == 0
    assert text.startswith(", there was a little girl")
    assert "tokens/s" in err
    code, output, err = cli(*words, "--json")
    assert output["outputs"][0]["text"] + "\n" == text
    assert output["outputs"][0]["finish_reason"] == "length"
    assert len(output["outputs"][0]["token_ids"]) == output["timing"]["output_tokens"] == 12
    assert output["prompt_token_ids"] == [1, 403, 407, 261, 378]


def test_run_reads_stdin(cli: Cli, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n"))
    code, text, _ = cli("run", engine, "-p", "-", "--temperature", 0, "--max-tokens", 12)
    assert code == 0
    assert text.startswith(", there was a little girl")


def test_run_answers_a_file_in_its_order(cli: Cli, engine: Path, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.jsonl"
    template = tmp_path / "t.jinja"
    template.write_text(CHATML)
    lines: list[dict[str, Any]] = [
        {"text": "Once upon a time"},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt_token_ids": [1, 403, 407, 261, 378]},
        {"prompt": "Hi"},
    ]
    jobs.write_text("\n".join(map(json.dumps, lines)))
    words = (
        "run",
        engine,
        "--file",
        jobs,
        "--temperature",
        0,
        "--max-tokens",
        5,
        "--chat-template",
        template,
    )
    code, output, _ = cli(*words, "--json")
    assert code == 0
    ids = [each["prompt_token_ids"] for each in output]
    assert ids[0] == ids[2] == [1, 403, 407, 261, 378]
    assert output[0]["outputs"] == output[2]["outputs"]
    assert ids[1] == ids[3], "a prompt goes through the template, text does not"
    code, output, _ = cli(*words, "--json", "--raw")
    assert output[3]["prompt_token_ids"] != ids[3]
    assert cli(*words)[0] == 0


def test_run_samples_n_and_beams(cli: Cli, engine: Path) -> None:
    words = ("run", engine, "--prompt", "Once", "--max-tokens", 6, "--json")
    code, output, _ = cli(*words, "--n", 3, "--seed", 5, "--temperature", 1)
    assert code == 0
    assert len(output["outputs"]) == 3
    assert cli(*words, "--n", 3, "--seed", 5, "--temperature", 1)[1]["outputs"] == output["outputs"]
    code, output, _ = cli(*words, "--num-beams", 3, "--temperature", 0)
    assert code == 0
    assert output["outputs"][0]["token_ids"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give one of --prompt"),
        (("--prompt", "x", "--file", "y"), "give one of --prompt"),
        (("--prompt", "x", "--system", "y"), "chat template"),
        (("--prompt", "x", "--top-p", "-1"), "top_p"),
        (("--prompt", "x", "--quantization", "int8"), "quantization"),
        (("--prompt", "x", "--dump", "layers.0.atn.core", "f"), "matches no module"),
        (("--prompt", "x", "--dump", "layers.0.*", "/"), "cannot write /"),
        (("--file", "none.jsonl"), "cannot read"),
    ],
)
def test_run_refuses_in_one_line(
    cli: Cli, engine: Path, words: tuple[str, ...], message: str
) -> None:
    code, out, err = cli("run", engine, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_dump(cli: Cli, engine: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "d.safetensors"
    code, _, err = cli(
        "run",
        engine,
        "--prompt",
        "Once upon a time",
        "--max-tokens",
        1,
        "--dump",
        "layers.*.attn.core",
        out,
    )
    assert code == 0
    tensors = load_file(out)
    assert set(tensors) == {"ids", *(f"layers.{i}.attn.core" for i in range(5))}
    assert len(tensors["layers.0.attn.core"]) == len(tensors["ids"]) == 5
    assert "5 tensors" in err


def chat_words(engine: Path, template: Path, tokens: int) -> tuple[object, ...]:
    """A greedy chat with answers of so many tokens."""
    options = ("--chat-template", template, "--temperature", 0, "--max-tokens", tokens)
    return ("chat", engine, *options)


def test_chat_from_a_pipe(
    cli: Cli, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, saved = tmp_path / "t.jinja", tmp_path / "talk.json"
    template.write_text(CHATML)
    lines = (
        "/help\nHello\n\n/system Be kind\nAgain\n/save "
        f"{saved}\n/nonsense\n/reset\n/system\n/exit\nnever\n"
    )
    words = (*chat_words(engine, template, 4), "--system", "S")
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, text, err = cli(*words)
    assert code == 0
    assert "/reset" in text
    assert "there is no command /nonsense" in text
    assert text.rstrip().endswith("Be kind")
    assert err.count("tokens/s") == 2
    messages = json.loads(saved.read_text())
    assert [each["role"] for each in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert (messages[0]["content"], messages[3]["content"]) == ("Be kind", "Again")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAgain\n"))
    code, output, _ = cli(*words, "--json", "--no-stream")
    assert [each["role"] for each in output["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_a_long_talk_forgets_its_oldest_turns(
    cli: Cli, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(CHATML)
    monkeypatch.setattr(
        sys,
        "stdin",
        io.StringIO("\n".join(["Tell me a story, please"] * 6) + "\n" + "x" * 3000 + "\n"),
    )
    words = (*chat_words(engine, template, 20), "--max-model-len", 128)
    code, output, err = cli(*words, "--json", "--ignore-eos")
    assert code == 0
    assert "oldest turns forgotten" in err
    assert [each["role"] for each in output["messages"]][-2:] == ["user", "assistant"]
    assert output["messages"][-2]["content"].startswith("Tell"), "what is too long was never said"


def test_chat_needs_a_template(cli: Cli, engine: Path) -> None:
    code, _, err = cli("chat", engine)
    assert code == 2
    assert "--chat-template" in err


# -- compare, perplexity, summarize


def test_compare(cli: Cli, engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    plot = tmp_path / "errors.png"
    code, output, _ = cli("compare", engine, checkpoint, "--json", "--plot", plot)
    assert code == 0
    assert (output["verdict"], output["layer"], output["module"]) == (
        "rounding differences only",
        None,
        None,
    )
    keys = {"name", "max_abs", "mean_abs", "median_abs", "max_rel", "cosine", "tolerance"}
    assert all(keys <= set(layer) for layer in output["layers"])
    assert all(check["equal"] for check in output["text"])
    assert plot.stat().st_size > 1000
    code, text, _ = cli("compare", engine, checkpoint, "--all")
    assert "layers.4.mlp.act" in text
    assert "rounding differences only" in text


@pytest.mark.parametrize(
    "flag", ["--max-num-batched-tokens", "--max-model-len", "--kv-cache-dtype", "--tp"]
)
def test_compare_fixes_what_would_make_a_good_engine_differ(
    cli: Cli, engine: Path, checkpoint: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step shorter than the probe ended in a crash, rounded keys in a verdict against the
    engine.
    """
    value = "int8" if "dtype" in flag else "40"
    assert cli("compare", engine, checkpoint, flag, value)[0] == 2
    monkeypatch.setenv(f"MODELMILL_{flag[2:].replace('-', '_').upper()}", value)
    assert cli("compare", engine, checkpoint)[0] == 0


def test_compare_with_a_changed_checkpoint_fails(
    cli: Cli, engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.3.self_attn.o_proj.weight"] *= 1.05
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "pieces.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    code, output, _ = cli("compare", engine, tmp_path, "--json")
    assert code == 1
    assert output["passed"] is False
    assert (output["layer"], output["module"]) == (3, "attn.o_proj")


def test_perplexity_equals_transformers(
    cli: Cli, engine: Path, checkpoint: Path, shared: Path
) -> None:
    data = shared / "data/text/wikitext2_test_a.txt"
    words = ("perplexity", engine, "--data", data, "--limit-tokens", 600, "--reference", checkpoint)
    for stride in (128, 48):
        code, output, _ = cli(*words, "--max-length", 128, "--stride", stride, "--json")
        assert code == 0
        assert output["perplexity"] == pytest.approx(output["reference"]["perplexity"], rel=1e-4)
        assert (
            output["tokens"] == output["reference"]["tokens"] == (600 - 5 if stride == 128 else 599)
        )
    assert "difference" in cli(*words, "--max-length", 128)[1]
    assert cli("perplexity", engine, "--data", data, "--max-length", 4096)[0] == 2
    assert "--data is missing" in cli("perplexity", engine)[2]


def summarize_words(
    engine: Path, data: Path, articles: int, new_tokens: int, input_tokens: int
) -> tuple[object, ...]:
    """Summaries of the first articles, of so many tokens each."""
    limits = ("--max-new-tokens", new_tokens, "--max-input-tokens", input_tokens)
    return ("summarize", engine, "--data", data, "--num", articles, *limits)


def test_summaries_equal_transformers(
    cli: Cli, engine: Path, checkpoint: Path, shared: Path, tmp_path: Path
) -> None:
    data, saved = shared / "data/text/cnndm_eval.jsonl", tmp_path / "kept.jsonl"
    words = summarize_words(engine, data, 3, 12, 200)
    more = ("--reference", checkpoint, "--save", saved)
    code, output, _ = cli(*words, *more, "--check-accuracy", 0.5, "--json", "--texts")
    assert code == 0
    assert output["passed"] is True
    assert output["equal_summaries"] == output["engine"]["items"] == 3
    assert set(output["difference"]) == {"rouge1", "rouge2", "rougeL", "rougeLsum"}
    assert len(output["summaries"]) == 3
    assert len(saved.read_text().splitlines()) == 6
    rows = [json.loads(line) for line in saved.read_text().splitlines()]
    for row in rows[3:]:
        row["text"] = "words that no article has"
    saved.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text, _ = cli(*words, *more, "--check-accuracy", 0.0)
    assert (code, "NOT within" in text) == (1, True)
    assert "×, 3 at once against 1" in text
    assert cli(*words, "--check-accuracy", 1)[0] == 2


def test_kept_summaries_are_of_one_reference_and_one_way_to_run(
    cli: Cli, engine: Path, checkpoint: Path, shared: Path, tmp_path: Path
) -> None:
    data, saved, other = (
        shared / "data/text/cnndm_eval.jsonl",
        tmp_path / "kept.jsonl",
        tmp_path / "other",
    )
    words = summarize_words(engine, data, 2, 6, 60)
    shutil.copytree(checkpoint, other, copy_function=shutil.copyfile)  # files of another time
    lines = []
    for more in (
        (),
        (),
        ("--kv-cache-dtype", "int8"),
        ("--reference", checkpoint),
        ("--reference", other),
    ):
        assert cli(*words, *more, "--save", saved)[0] == 0
        lines.append(len(saved.read_text().splitlines()))
    # a share of the GPU beside transformers is another way to run, too
    assert lines == [2, 2, 4, 8, 10]
    before = data.read_bytes()
    code, _, err = cli(*words, "--save", data)
    assert (code, err.count("\n")) == (2, 1)
    assert "line 1: is not a saved summary; choose another file for --save" in err
    assert data.read_bytes() == before


# -- bench


def test_bench_latency(cli: Cli, engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    plot, rows = tmp_path / "l.png", tmp_path / "rows.jsonl"
    words = (
        "bench",
        "latency",
        engine,
        "--input-len",
        8,
        "--output-len",
        4,
        "--runs",
        2,
        "--batch-size",
        "1,2",
    )
    reference = ("--reference", "hf", "--checkpoint", checkpoint)
    code, output, _ = cli(*words, *reference, "--json", "--plot", plot, "--save", rows)
    assert code == 0
    assert [each["shape"]["batch"] for each in output["results"]] == [1, 1, 2, 2]
    assert len(output["speedups"]) == 2
    assert plot.stat().st_size > 1000
    saved = [json.loads(line) for line in rows.read_text().splitlines()]
    assert saved == output["rows"]
    assert all(
        {"command", "device", "versions", "date", "figure", "value", "unit"} <= set(row)
        for row in saved
    )
    assert cli(*words, "--reference", "hf")[0] == 2, "an engine alone has no reference"


def test_bench_sweep_ends_with_the_memory(cli: Cli, engine: Path) -> None:
    words = (
        "bench",
        "latency",
        engine,
        "--input-len",
        200,
        "--output-len",
        2,
        "--runs",
        1,
        "--batch-size",
        "1,2,64",
    )
    code, text, err = cli(*words, "--kv-cache-bytes", 1 << 20)
    assert code == 0
    assert "batch 64" in err
    assert "KV cache holds" in text


def test_bench_throughput(cli: Cli, engine: Path, shared: Path, tmp_path: Path) -> None:
    talks = [
        {"conversations": [{"value": f"Once upon a time {i}"}, {"value": "there was"}]}
        for i in range(5)
    ]
    data = tmp_path / "s.json"
    data.write_text(json.dumps(talks))
    words = ("bench", "throughput", engine, "--runs", 1, "--warmup", 0)
    code, output, _ = cli(*words, "--dataset", data, "--num-prompts", 4, "--json")
    assert (code, output["results"][0]["requests"]) == (0, 4)
    trace = tmp_path / "t.csv"
    trace.write_text("ContextTokens,GeneratedTokens\n10,3\n20,2\n3,3\n")
    code, output, _ = cli(*words, "--trace", trace, "--json")
    result = output["results"][0]
    assert (result["requests"], result["input_tokens"], result["output_tokens"]) == (2, 30, 5)
    code, text, _ = cli(*words, "--num-prompts", 3, "--input-len", 5, "--output-len", 3)
    assert code == 0
    assert "requests/s" in text


def test_bench_startup(cli: Cli, engine: Path) -> None:
    code, output, _ = cli("bench", "startup", engine, "--runs", 1, "--input-len", 4, "--json")
    assert code == 0
    result = output["results"][0]
    stages = sum(result[name]["median"] for name in ("import_s", "load_s", "first_s"))
    assert 0 < stages < result["total_s"]["median"]


@pytest.mark.parametrize(
    "words",
    [
        ("latency", "--dataset", "x"),
        ("throughput", "--dataset", "x", "--trace", "y"),
        ("startup", "--reference", "hf"),
        ("latency", "--runs", "0"),
        ("latency", "--batch-size", "0"),
        ("latency", "--batch-size", ","),
        ("latency", "--runs", "3", "--warmup", "-5"),
        ("throughput", "--warmup", "-1"),
        ("nonsense",),
    ],
)
def test_bench_refuses_in_one_line(cli: Cli, engine: Path, words: tuple[str, ...]) -> None:
    code, out, err = cli("bench", words[0], engine, *words[1:])
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_pull(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import modelmill.checkpoint.pull as source

    def fake(name: str, dest: Path, progress: Any) -> Path:
        dest.mkdir(parents=True, exist_ok=True)
        progress("pulling m.gguf", 1, 2)
        (dest / "m.gguf").write_bytes(b"12345")
        return dest / "m.gguf"

    monkeypatch.setattr(source, "pull", fake)
    code, output, _ = cli("pull", "demo", "-o", tmp_path / "m", "--json")
    assert (code, output) == (0, {"name": "demo", "path": str(tmp_path / "m/m.gguf"), "bytes": 5})
    code, text, _ = cli("pull", "demo", "-o", tmp_path / "m")
    assert text == f"{tmp_path / 'm/m.gguf'}\n"


# -- what a new user got wrong


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("perplexity", "--data", "README.md", "--max-length", "0"),
            "--max-length must be at least 2",
        ),
        (
            ("perplexity", "--data", "README.md", "--limit-tokens", "-5"),
            "--limit-tokens must be at least 1",
        ),
        (
            ("summarize", "--data", "README.md", "--max-new-tokens", "0"),
            "--max-new-tokens must be at least 1",
        ),
        (("bench-throughput", "--dataset", "nowhere.json"), "cannot read nowhere.json"),
        (("run", "--prompt", "x", "--dtype", "float16"), "decided when an engine is built"),
    ],
)
def test_wrong_values_are_named(
    cli: Cli, engine: Path, words: tuple[str, ...], message: str
) -> None:
    verb, rest = words[0].split("-"), words[1:]
    code, _, err = cli(*verb, engine, *rest)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert "is not JSON" not in err


def test_messages_must_be_a_list(cli: Cli, engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text('{"messages": "abc"}\n')
    code, _, err = cli("run", engine, "--file", file, "--chat-template", "chatml")
    assert code == 2
    assert "messages must be a list" in err


def test_an_engine_is_no_checkpoint(
    cli: Cli, engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    code, _, err = cli("build", engine, "-o", tmp_path / "x.engine")
    assert code == 2
    assert "is an engine already" in err
    code, _, err = cli("compare", checkpoint, engine)
    assert code == 2
    assert "modelmill compare ENGINE CHECKPOINT" in err
    assert f"-o {checkpoint}" not in err, "nobody should write an engine into a checkpoint"


def test_a_broken_chat_template_is_reported_at_build(
    cli: Cli, checkpoint: Path, tmp_path: Path
) -> None:
    folder = copy_checkpoint(checkpoint, tmp_path / "broken")
    (folder / "chat_template.jinja").write_text("{% if %}")
    code, _, err = cli("build", folder, "-o", tmp_path / "x.engine", "--json")
    assert code == 0
    assert "the chat template failed" in err
    assert "--chat-template" in err


def test_figures_come_before_a_plot_that_fails(
    cli: Cli, engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, out, err = cli("compare", engine, checkpoint, "--plot", tmp_path / "file" / "errors.png")
    assert code == 2
    assert "rounding differences only" in out
    assert "cannot write the plot" in err


def test_calibration_is_looked_for_and_its_path_kept_out(
    cli: Cli, checkpoint: Path, tmp_path: Path
) -> None:
    code, _, err = cli("build", checkpoint, "--dry-run", "--calibration", tmp_path / "none.jsonl")
    assert code == 2
    assert "there is no such file" in err
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "a"}\n')
    code, plan, _ = cli("build", checkpoint, "--dry-run", "--calibration", file, "--json")
    assert code == 0
    assert plan["build"]["calibration"] is None
    assert "not used" in plan["reasons"]["calibration"]


def test_a_stopped_build_says_how_to_go_on(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import modelmill.llm as llm

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "build_engine", interrupted)
    code, _, err = cli("build", checkpoint, "-o", tmp_path / "x.engine")
    assert code == 130
    assert "the same command goes on" in err


def test_compare_with_another_model_is_one_line(
    cli: Cli, engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    folder = copy_checkpoint(checkpoint, tmp_path / "wider")
    change_config(folder, hidden_size=128)
    code, _, err = cli("compare", engine, folder)
    assert code == 2
    assert "hidden size: 64 in the engine, 128 in" in err
    assert err.count("\n") == 1


def test_a_byte_order_mark_is_no_json_error(cli: Cli, engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text('\ufeff{"prompt": "Once"}\n', "utf-8")
    assert cli("run", engine, "--file", file, "--max-tokens", 1)[0] == 0


def test_bytes_that_are_no_text_do_not_end_a_chat(
    cli: Cli, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "talk.json"
    typed = io.BytesIO(b"caf\xe9\n/save " + os.fsencode(file) + b"\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed, encoding="latin-1"))
    words = ("chat", engine, "--chat-template", "chatml", "--max-tokens", 2)
    with tolerate_closed_output():
        assert cli(*words)[0] == 0
    assert json.loads(file.read_text("utf-8"))[0]["content"] == "caf\ufffd"


def test_a_small_dataset_is_reported(cli: Cli, engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"prompt": "Once upon a time"}\n')
    words = ("--num-prompts", 5, "--output-len", 2, "--runs", 1, "--warmup", 0)
    code, output, err = cli("bench", "throughput", engine, "--dataset", file, *words, "--json")
    assert code == 0
    assert output["results"][0]["requests"] == 1
    assert "only 1 prompts that fit, not 5" in err
