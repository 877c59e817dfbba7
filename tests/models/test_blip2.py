"""transformers' BLIP-2 with a LLaMA-like language model: the same tokens, its questions, what is
refused.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, RequestError, UnknownArchitecture, UsageError
from modelmill.core.types import SamplingParams
from modelmill.llm import LLM, build_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, stop=())
SIDE, QUERIES, IMAGE = 56, 8, 31990


def write_checkpoint(folder: Path, tokenizer: Path, language: str = "llama") -> Path:
    """A checkpoint as transformers saves it, weights drawn so that answers depend on the
    picture.
    """
    import transformers

    torch.manual_seed(1)
    vision = transformers.Blip2VisionConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=SIDE,
        patch_size=14,
    )
    asking = transformers.Blip2QFormerConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=56,
        encoder_hidden_size=48,
        cross_attention_frequency=2,
    )  # fmt: skip
    text = transformers.AutoConfig.for_model(
        language.removesuffix("-tied"), hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=32000, max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=language.endswith("-tied"),
    )  # fmt: skip
    parts = {
        "vision_config": vision.to_dict(),
        "qformer_config": asking.to_dict(),
        "text_config": text.to_dict(),
    }
    config = transformers.Blip2Config(**parts, num_query_tokens=QUERIES, image_token_index=IMAGE)
    model = transformers.Blip2ForConditionalGeneration(config).float().eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.2 if parameter.dim() < 2 else parameter[0].numel() ** -0.5)
        if "norm" in name.lower() and name.endswith("weight"):
            parameter.data.add_(1)
    model.query_tokens.data.normal_(0, 1)
    model.save_pretrained(folder)
    shutil.copy(tokenizer, folder / "tokenizer.model")
    return folder


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3", "qwen3-tied"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared: Path
) -> Path:
    pytest.importorskip("transformers")
    tokenizer = shared / "data" / "tokenizers" / "llama" / "tokenizer.model"
    return write_checkpoint(
        tmp_path_factory.mktemp("blip2") / request.param, tokenizer, request.param
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    engine = folder.parent / "blip2.engine"
    report = build_engine(folder, engine, BuildConfig(dtype="float32"))
    assert report["accepted"], report
    modules = {row["module"] for row in report["layers"]}
    checked = ["vision_encoder.attn", "ln_vision", "qformer.crossattention", "proj", "attn.k_proj"]
    assert modules.issuperset(checked)
    return LLM(engine, max_model_len=256, kv_cache_bytes=1 << 24)


def picture(seed: int) -> PIL.Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 70, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def user(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in parts
    ]
    return {"role": "user", "content": content}


@torch.inference_mode()
def plain_answer(
    folder: Path, shown: PIL.Image.Image, text: str, ids: list[int], **options: Any
) -> list[int]:
    """transformers' own generate(): places of the picture, then the text's ids."""
    import transformers

    model = transformers.Blip2ForConditionalGeneration.from_pretrained(folder).float().eval()
    small = np.asarray(shown.resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC)).copy()
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    values = ((torch.from_numpy(small).float() / 255 - mean) / std).permute(2, 0, 1)[None]
    input_ids = torch.tensor([[IMAGE] * QUERIES + ids])
    assert text
    out = model.generate(
        pixel_values=values, input_ids=input_ids, attention_mask=torch.ones_like(input_ids),
        max_new_tokens=10,
        min_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0, **options,
    )  # fmt: skip
    return out[0].tolist()[-10:]


def test_the_same_tokens_as_transformers(folder: Path, llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "Question: What is this? Answer:"
    ids = llm.tokenizer.encode(text, bos=True)
    actual = []
    for seed in (1, 2):
        [answer] = llm.chat([user(picture(seed), "What is this?")], GREEDY)
        assert answer.prompt_token_ids == [0] * QUERIES + ids
        actual.append(answer.outputs[0].token_ids)
        expected = plain_answer(folder, picture(seed), text, ids)
        assert actual[-1] == expected[: len(actual[-1])]
        assert len(actual[-1]) == 10 or answer.outputs[0].stop_reason == "\n"
    assert actual[0] != actual[1], "the pictures make a difference"


@pytest.mark.parametrize("penalty", [1.5, 6.0])
def test_penalties_count_the_prompts_words_as_transformers_does(
    folder: Path, llm: LLM, penalty: float
) -> None:
    """transformers gives the language model ids beside the embeddings; of a picture, a token that
    is never written.
    """
    assert llm.tokenizer is not None
    text = "Question: What is this? Answer:"
    expected = plain_answer(
        folder, picture(1), text, llm.tokenizer.encode(text, bos=True), repetition_penalty=penalty
    )
    [answer] = llm.chat(
        [user(picture(1), "What is this?")], replace(GREEDY, repetition_penalty=penalty)
    )
    actual = answer.outputs[0].token_ids
    assert actual == expected[: len(actual)]
    assert len(actual) == 10 or answer.outputs[0].stop_reason == "\n"


def test_questions(llm: LLM) -> None:
    chat = llm.chat_format
    assert chat is not None
    messages = [
        user("Where is it?", picture(1)),
        {"role": "assistant", "content": " In a garden. "},
        user("Why?"),
    ]
    expected = "<ImageHere>Question: Where is it? Answer: In a garden. Question: Why? Answer:"
    assert chat.render(messages) == expected
    assert chat.render([user(picture(1))]) == "<ImageHere>", "a picture alone is described"
    ids, places = chat.encode_with_images([user(picture(1)), user(picture(2), "Both?")])  # type: ignore[attr-defined]
    assert [at for at, _ in places] == [0, QUERIES]
    assert ids[2 * QUERIES] == 1, "BOS stands behind the pictures"
    assert ids.count(1) == 1
    with pytest.raises(RequestError, match="no tools"):
        chat.render([user("x")], tools=[{"type": "function", "function": {"name": "f"}}])


def changed(folder: Path, target: Path, change: Any) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))
    return target


def update(part: str, **values: Any) -> Any:
    """Changes an object of the config."""
    return lambda config: config[part].update(values)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            update("text_config", model_type="opt"),
            UnknownArchitecture,
            "'opt'; known there are llama",
        ),
        (update("text_config", model_type="t5"), UnknownArchitecture, "t5'; known there are llama"),
        (
            lambda config: config.update(model_type="instructblip"),
            UnknownArchitecture,
            "InstructBLIP, whose Q-Former reads",
        ),
        (lambda config: config.pop("qformer_config"), CheckpointError, "lacks qformer_config"),
        (
            update("vision_config", hidden_act="quick_gelu"),
            UnknownArchitecture,
            "only gelu is known",
        ),
        (
            update("vision_config", num_attention_heads="many"),
            CheckpointError,
            "heads must be an integer",
        ),
        (
            update("vision_config", num_hidden_layers=2),
            CheckpointError,
            "vision encoder is 2, the weights have 3",
        ),
        (update("vision_config", layer_norm_eps=0), CheckpointError, "encoder must be above 0"),
        (
            update("qformer_config", use_qformer_text_input=True),
            UnknownArchitecture,
            "a variant of BLIP-2",
        ),
    ],
)
def test_what_is_not_known_is_reported_in_a_line(
    folder: Path, tmp_path: Path, change: Any, error: type[Exception], message: str
) -> None:
    if "llama" not in folder.name:
        pytest.skip("once is enough")
    wrong = changed(folder, tmp_path / "wrong", change)
    with pytest.raises(error, match=message) as caught:
        make_build_plan(open_checkpoint(wrong), BuildConfig(dtype="float32"))
    assert "\n" not in str(caught.value)


def test_a_vision_encoder_of_its_own_is_enough(folder: Path) -> None:
    with pytest.raises((CheckpointError, UsageError)):
        open_checkpoint(folder, vision=[folder / "model.safetensors"])
