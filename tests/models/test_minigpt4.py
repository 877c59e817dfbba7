"""MiniGPT-4 from its published files against transformers' parts in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from modelmill.core.config import BuildConfig
from modelmill.core.types import SamplingParams
from modelmill.llm import LLM, build_engine
from modelmill.vision.image_input import load_image_stretched_to_square
from tests.models.minigpt4_seeded import write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def pictures(count: int) -> list[PIL.Image.Image]:
    """Of several sizes and none square."""
    random = np.random.default_rng(0)
    sizes = [(90, 40), (33, 71), (300, 200)][:count]
    return [
        PIL.Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("minigpt4") / "files", shared)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    engine = folder.parent / "mini.engine"
    build_engine(folder, engine, BuildConfig(dtype="float32"), check=False)
    return LLM(engine, max_model_len=512, kv_cache_bytes=1 << 24)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    from tests.models.minigpt4_reference import MiniGpt4Reference

    return MiniGpt4Reference(folder)


def user(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in parts
    ]
    return {"role": "user", "content": content}


def check(llm: LLM, answer: Any, expected: list[int]) -> None:
    """The same ids, up to the first ### of their text."""
    output = answer.outputs[0]
    assert output.token_ids == expected[: len(output.token_ids)]
    assert llm.tokenizer is not None
    if len(output.token_ids) < len(expected):
        assert output.stop_reason == "###"
        assert "###" in llm.tokenizer.decode(output.token_ids)
    assert "###" not in llm.tokenizer.decode(output.token_ids[:-1])


def prompt_of(*turns: str) -> str:
    from tests.models.minigpt4_reference import SYSTEM

    return SYSTEM + "".join(turns) + "Assistant:"


def test_embeddings(llm: LLM, plain: Any) -> None:
    for picture in pictures(3):
        pixels, _ = load_image_stretched_to_square(picture, 56)
        batch = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        with torch.inference_mode():
            actual = llm.engine_core.model.encode_images(batch, llm.engine_core.ops)[0]  # type: ignore[operator]
        expected = plain.embed(picture)
        assert actual.shape == expected.shape == (8, 64)
        assert (actual - expected).norm() <= 1e-4 * expected.norm()


def test_one_picture(llm: LLM, plain: Any) -> None:
    [picture] = pictures(1)
    [answer] = llm.chat([user(picture, "What is this?")], GREEDY)
    prompt = prompt_of("Human: <Img><ImageHere></Img> What is this?###")
    check(llm, answer, plain.answer(prompt, [picture], 12))
    assert llm.chat_format is not None
    assert llm.chat_format.render([user(picture, "What is this?")]) == prompt


def test_three_pictures_and_three_turns(llm: LLM, plain: Any) -> None:
    one, two, three = pictures(3)
    messages = [
        user(one, "First."),
        {"role": "assistant", "content": " It is a dog. "},
        user(two, "And this?"),
    ]
    messages += [{"role": "assistant", "content": "A truck"}, user("Compare", three, "with them.")]
    prompt = prompt_of(
        "Human: <Img><ImageHere></Img> First.###Assistant: It is a dog.###",
        "Human: <Img><ImageHere></Img> And this?###Assistant: A truck###",
        "Human: Compare <Img><ImageHere></Img> with them.###",
    )
    [answer] = llm.chat(messages, GREEDY)
    check(llm, answer, plain.answer(prompt, [one, two, three], 12))
    # again, with the pages of the first time: their keys hold the pictures
    [again] = llm.chat(messages, GREEDY)
    assert again.cached_tokens > 0
    assert again.outputs[0].token_ids == answer.outputs[0].token_ids


def test_another_picture_in_the_same_words(llm: LLM, plain: Any) -> None:
    two_pictures = pictures(3)
    answers = [llm.chat([user(picture, "Look.")], GREEDY)[0] for picture in two_pictures]
    prompt = prompt_of("Human: <Img><ImageHere></Img> Look.###")
    for picture, answer in zip(two_pictures, answers, strict=True):
        check(llm, answer, plain.answer(prompt, [picture], 12))
    assert len({tuple(a.prompt_token_ids) for a in answers}) == 1, (
        "the prompts' ids tell nothing of the pictures"
    )


@pytest.mark.parametrize("penalty", [0.2, 1.5])
def test_penalties_count_the_answer_alone(llm: LLM, plain: Any, penalty: float) -> None:
    """The original gives its language model embeddings: neither the prompt's words nor a picture's
    places are ids.
    """
    [picture] = pictures(1)
    options = replace(GREEDY, repetition_penalty=penalty)
    for parts, images in (((picture, "What is this?"), [picture]), (("Only words.",), [])):
        turn = "Human: " + (
            "<Img><ImageHere></Img> What is this?###" if images else "Only words.###"
        )
        [answer] = llm.chat([user(*parts)], options)
        check(llm, answer, plain.answer(prompt_of(turn), images, 12, repetition_penalty=penalty))


def test_a_batch_of_eight_with_texts_between(llm: LLM, plain: Any) -> None:
    one, two, three = pictures(3)
    talks = [
        [user(one, "a")],
        [user("b")],
        [user(two, "c")],
        [user("d d")],
        [user(three, two, "e")],
    ]
    talks += [[user("f")], [user(one, "g g g")], [user("h")]]
    prompts = [
        ("Human: <Img><ImageHere></Img> a###", [one]),
        ("Human: b###", []),
        ("Human: <Img><ImageHere></Img> c###", [two]),
        ("Human: d d###", []),
        ("Human: <Img><ImageHere></Img> <Img><ImageHere></Img> e###", [three, two]),
        ("Human: f###", []),
        ("Human: <Img><ImageHere></Img> g g g###", [one]),
        ("Human: h###", []),
    ]
    answers = llm.chat(talks, GREEDY)
    for answer, (turn, images) in zip(answers, prompts, strict=True):
        check(llm, answer, plain.answer(prompt_of(turn), images, 12))


def test_upstreams_later_prompt_has_a_space_more(folder: Path, llm: LLM) -> None:
    from modelmill.text.image_chat import ImageChatFormat

    assert llm.tokenizer is not None
    first = ImageChatFormat(llm.tokenizer, 8).encode([user("Hi")])
    later = ImageChatFormat(llm.tokenizer, 8, "current").encode([user("Hi")])
    assert later == [*first, 29871]
