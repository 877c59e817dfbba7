"""The benchmark of MiniGPT-4 with a model of two narrow layers, beside vLLM's process and a fake.

The fake stands in the place of vLLM's package: what it is called with goes to the log.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import minigpt4
from benchmarks.blip2_folder import IMAGE_TOKEN_ID, blip2_config, random_images, write_blip2_folder
from benchmarks.peer_process import MIN_TOKEN_ID
from benchmarks.vllm_peer import engine_arguments, make_images

TOWER = {"width": 32, "depth": 2, "heads": 2, "inner": 64, "image": 28, "patch": 14}
QFORMER = {
    "width": 32, "depth": 2, "heads": 2, "inner": 64, "image_width": 32,
    "cross_attention_frequency": 2, "queries": 4,
}  # fmt: skip
NARROW = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
FAKE_VLLM = """
import json, sys, types

class SamplingParams:
    def __init__(self, **fields):
        self.tokens = fields["max_tokens"]
        assert fields["ignore_eos"]

class LLM:
    def __init__(self, **arguments):
        if arguments["max_num_seqs"] == 13:
            raise RuntimeError("no room for it")
        print("LLM", json.dumps(arguments), file=sys.stderr)

    def apply_model(self, function):
        print("randomised", file=sys.stderr)

    def generate(self, inputs, params, use_tqdm):
        for each in inputs[:1]:
            image = each["multi_modal_data"]["image"]
            shape = list(image.shape) if hasattr(image, "shape") else [list(image[0].shape)]
            seen = [len(inputs), len(each["prompt_token_ids"]), shape]
            print("generate", json.dumps(seen), file=sys.stderr)
        text = [types.SimpleNamespace(token_ids=[1] * each.tokens) for each in params]
        return [types.SimpleNamespace(outputs=[each]) for each in text]
"""


@pytest.fixture
def config() -> dict[str, Any]:
    return minigpt4.make_config(2, TOWER, QFORMER) | NARROW


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    folder = tmp_path / "kit"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    (folder / "vllm-0.0.1.dist-info").mkdir()
    (folder / "vllm-0.0.1.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.0.1\n")
    return folder


def test_vllm_gets_the_sizes_and_the_requests_of_every_side(
    config: dict[str, Any], kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minigpt4, "BATCH_SIZES", {"request": (1,), "many": (3,), "encoder": (1,)})
    options = minigpt4.parse_args(["--peer", str(kit), "--work", str(tmp_path / "work")])
    names = options.sides.split(",")
    assert names == ["bfloat16", "int4", "vLLM", "vLLM-embeddings", "transformers"]
    with minigpt4.vllm_sides(names, config, options) as sides:
        assert [side.name for side in sides] == ["vLLM", "vLLM-embeddings"]
        rows = minigpt4.measure_rows(sides, ["encoder", "request", "many"], 1)
    assert [(row["work"], row["subject"], row["facts"]["images"]) for row in rows] == [
        ("request", "vLLM", "pictures"), ("request", "vLLM-embeddings", "embeddings"),
        ("many", "vLLM", "pictures"), ("many", "vLLM-embeddings", "embeddings"),
    ]  # fmt: skip
    assert rows[0]["facts"]["versions"]["vllm"] == "0.0.1"
    assert all(len(row["calls_s"]) == 1 for row in rows), "calls that warm up are not counted"
    log = (tmp_path / "work" / "logs" / "vLLM.log").read_text().splitlines()
    arguments = json.loads(next(line for line in log if line.startswith("LLM"))[4:])
    assert arguments["max_model_len"] == 100 + 4 + 100
    assert arguments["limit_mm_per_prompt"] == {"image": 1}
    assert arguments["load_format"] == "dummy"
    calls = [json.loads(line[9:]) for line in log if line.startswith("generate")]
    assert calls[:2] == [[1, 100, [28, 28, 3]], [1, 100, [[4, 32]]]], "the text, and the picture"
    assert [3, 100, [28, 28, 3]] in calls
    assert "randomised" in log


def test_without_vllm_the_other_sides_are_measured(
    config: dict[str, Any], kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ["--vllm-options", '{"max_num_seqs": 13}']
    options = minigpt4.parse_args(["--peer", str(kit), "--work", str(tmp_path), *broken])
    with minigpt4.vllm_sides(["bfloat16", "vLLM"], config, options) as sides:
        assert sides == []
    assert "no room for it" in capsys.readouterr().err
    with minigpt4.vllm_sides(["bfloat16"], config, options) as sides:
        assert sides == []


def test_a_side_of_vllm_needs_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert minigpt4.parse_args([]).sides == "bfloat16,int4,transformers"
    assert "vLLM" in minigpt4.parse_args(["--peer-python", sys.executable]).sides
    with pytest.raises(SystemExit):
        minigpt4.parse_args(["--sides", "bfloat16,vLLM"])
    assert "--peer" in capsys.readouterr().err


def test_a_request_of_ours_is_timed_until_its_last_token(config: dict[str, Any]) -> None:
    side = minigpt4.modelmill_side("bfloat16", config, "cpu")
    rows = minigpt4.measure_rows([side], ["encoder", "first"], 1)
    assert [(row["work"], row["pictures"]) for row in rows] == [
        ("encoder", 1), ("encoder", 16), ("first", 1),
    ]  # fmt: skip
    assert all(row["value"] > 0 for row in rows)


def test_transformers_runs_the_same_sizes(config: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    side = minigpt4.transformers_side(config, "cpu")
    (row,) = minigpt4.measure_rows([side], ["first"], 1)
    assert row["subject"] == "transformers"


def test_a_folder_of_blip2_has_what_a_peer_without_network_reads(
    config: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_blip2_folder(config, tmp_path)
    read = transformers.AutoConfig.from_pretrained(folder)
    assert (read.text_config.hidden_size, read.vision_config.num_hidden_layers) == (32, 2)
    assert read.text_config.architectures == ["LlamaForCausalLM"]
    assert read.qformer_config.encoder_hidden_size == TOWER["width"]
    assert blip2_config(config)["num_query_tokens"] == QFORMER["queries"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab()["<image>"] == IMAGE_TOKEN_ID < MIN_TOKEN_ID
    assert len(tokenizer) == read.text_config.vocab_size
    assert tokenizer("<image><image> w7")["input_ids"] == [0, 0, 7]


def test_pictures_are_the_same_on_every_side() -> None:
    (picture,) = make_images({"seed": 3, "side": 28}, 1)
    assert (torch.from_numpy(picture) == random_images(1, 3, 28)[0]).all()
    ((first,), (second,)) = make_images({"seed": 3, "embeddings": 4, "width": 8}, 2)
    assert first.shape == (4, 8)
    assert (first != second).any()
    assert make_images(None, 2) == []


def test_arguments_of_a_run_stand_over_the_fixed_ones() -> None:
    text = engine_arguments({"config": "folder", "run": {"max_num_batched_tokens": 5}})
    assert (text["max_num_batched_tokens"], text["skip_tokenizer_init"]) == (5, True)
    assert "limit_mm_per_prompt" not in text
    pictures = engine_arguments({"config": "folder", "images": True, "run": {}})
    assert not pictures["skip_tokenizer_init"], "its processor of pictures asks the tokenizer"
