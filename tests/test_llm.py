"""The class a user imports, on a real tiny trained model: text, chats, streams, stops, asyncio."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelmill import LLM, AsyncLLM, SamplingParams
from modelmill.artifact.manifest import MANIFEST_FILE, Manifest
from modelmill.artifact.store import open_artifact
from modelmill.core.config import BuildConfig
from modelmill.core.errors import (
    CorruptArtifact,
    ModelmillError,
    RequestError,
    TokenizerError,
    UsageError,
)
from modelmill.core.generation_defaults import MODELMILL_DEFAULTS, OPENAI_DEFAULTS
from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import FinishReason, Request
from modelmill.llm import build_engine
from modelmill.runtime.input_processor import MakeGuide
from modelmill.text.chat_format_loader import read_chat_templates
from modelmill.text_processor import TextProcessor, replace_chat_template
from tests.wait import TIMEOUT_SECONDS

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
)
GREEDY = SamplingParams(temperature=0, max_tokens=40)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}[bot]{% endif %}"
)


@pytest.fixture(scope="module")
def engine(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("llm") / "stories.engine"
    report = build_engine(
        shared / "data/models/stories260K", out, BuildConfig(dtype="float32", target="cpu")
    )
    assert report["accepted"]
    return out


@pytest.fixture(scope="module")
def llm(engine: Path) -> LLM:
    return LLM(engine, device="cpu")


def text(llm: LLM, prompt: Any, **params: Any) -> str:
    return (
        llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 40, **params}))[0]
        .outputs[0]
        .text
    )


def test_the_known_story(llm: LLM) -> None:
    """The text that the checkpoint's note gives: greedy, from BOS alone."""
    answer = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=60))[0]
    assert answer.outputs[0].text.strip().startswith(STORY)
    assert answer.outputs[0].finish_reason == "length"
    assert len(answer.outputs[0].token_ids) == 60
    assert answer.prompt_token_ids == [1]


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once upon")  # type: ignore[union-attr]
    prompts = ["Once upon", {"prompt": "Once upon"}, {"prompt_token_ids": ids}, ids]
    texts = {a.outputs[0].text for a in llm.generate(prompts, GREEDY)}
    assert len(texts) == 1
    assert text(llm, "Once upon") in texts


def test_streamed_alone_and_in_a_batch_are_one_text(llm: LLM) -> None:
    prompts = ["Once upon a time", "The dog", "Lily said", "A"]
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=7, max_tokens=30)):
        batch = [a.outputs[0].text for a in llm.generate(prompts, params)]
        alone = [llm.generate(p, params)[0].outputs[0].text for p in prompts]
        streamed = ["".join(d.text for d in llm.stream(p, params)) for p in prompts]
        assert batch == alone == streamed


@pytest.mark.parametrize("cut", [1, 2, 5, 9])
def test_a_stop_string_ends_the_text_before_it(llm: LLM, cut: int) -> None:
    full_text = text(llm, "Once upon a time", max_tokens=60)
    stop = full_text[20 : 20 + cut]
    answer = llm.generate(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=60, stop=(stop,))
    )[0].outputs[0]
    assert answer.text == full_text[: full_text.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == stop
    params = SamplingParams(temperature=0, max_tokens=60, stop=(stop,), include_stop=True)
    assert (
        llm.generate("Once upon a time", params)[0].outputs[0].text
        == full_text[: full_text.index(stop)] + stop
    )
    assert llm.engine_core.stats().running == 0


def test_stop_token_ids_are_kept_out_of_the_text(llm: LLM) -> None:
    ids = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    end = ids[5]
    answer = llm.generate(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(end,))
    )[0]
    first = ids.index(end)
    assert answer.outputs[0].token_ids == ids[: first + 1]
    assert answer.outputs[0].finish_reason == "stop"
    assert answer.outputs[0].stop_reason == end
    assert (
        answer.outputs[0].text == llm.tokenizer.decode(ids[:first]).removeprefix(" ")
        or answer.outputs[0].text
    )  # type: ignore[union-attr]


def test_n_answers_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=11, max_tokens=20)
    first, again = (llm.generate("Once", params)[0] for _ in range(2))
    texts = [o.text for o in first.outputs]
    assert texts == [o.text for o in again.outputs]
    assert len(set(texts)) > 1


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    out = llm.generate("Once", SamplingParams(temperature=0, max_tokens=5, logprobs=3))[0].outputs[
        0
    ]
    assert out.logprobs is not None
    assert len(out.logprobs) == 5
    for id, table in zip(out.token_ids, out.logprobs, strict=True):
        assert table[id].rank == 1
        assert len(table) == 3
        assert max(table.values(), key=lambda e: e.logprob) == table[id]


def test_closing_a_stream_frees_the_engine(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=400))
    next(stream)
    stream.close()
    assert llm.engine_core.stats().running == 0
    assert [t.finish_reason for t in llm.engine_core.step()] == [
        FinishReason.ABORT
    ]  # the news of the abort is all that is left
    assert not llm.engine_core.has_work


def test_chat_needs_a_template_and_takes_one(engine: Path, llm: LLM) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    with_template = LLM(engine, device="cpu", chat_template=TEMPLATE)
    one = with_template.chat([{"role": "user", "content": "hi"}], GREEDY)
    two = with_template.chat(
        [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]], GREEDY
    )
    assert one[0].outputs[0].text == two[0].outputs[0].text
    assert len(two) == 2


def test_a_given_template_replaces_those_of_every_file(engine: Path, tmp_path: Path) -> None:
    files = {"additional_chat_templates/tool_use.jinja": b"t", "chat_template.jinja": b"c"}
    (tmp_path / "x.jinja").write_text("mine")
    replaced = replace_chat_template(files, tmp_path / "x.jinja")
    assert read_chat_templates(replaced) == {"default": "mine"}


def test_shipped_templates_by_name(engine: Path) -> None:
    llm = LLM(engine, device="cpu", chat_template="vicuna")
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "x"},
    ]
    assert llm.chat_format is not None
    rendered = llm.chat_format.render(messages)
    assert rendered.startswith("<s>A chat between a curious user")
    assert rendered.endswith(" USER: hi ASSISTANT: ho</s> USER: x ASSISTANT:")
    with pytest.raises(UsageError, match="built in are baichuan, chatglm2, "):
        LLM(engine, device="cpu", chat_template="vicunia")


@pytest.mark.parametrize(
    "prompt",
    [[], "x" * 20000, {"prompt_token_ids": [10**6]}, {"prompt_token_ids": [-1]},
    {"prompt_token_ids": "abc"}, {"no": 1},
     {"prompt_token_ids": [1.5]}, {"prompt_token_ids": []}],
    ids=lambda p: str(p)[:30],
)  # fmt: skip
def test_impossible_prompts_are_one_line_and_harm_nothing(llm: LLM, prompt: Any) -> None:
    if prompt == []:
        assert llm.generate(prompt, GREEDY) == []
        return
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, GREEDY)
    assert "\n" not in str(caught.value)
    assert text(llm, [1]).strip().startswith("Once upon a time")


def test_unknown_options_are_named(engine: Path) -> None:
    with pytest.raises(UsageError, match="max_model_length"):
        LLM(engine, max_model_length=3)
    with pytest.raises(UsageError, match="already"):
        LLM(engine, dtype="float16")


def test_sampling_keywords_belong_in_sampling_params(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("a", max_tokens=5),  # type: ignore[call-arg]
        lambda: llm.chat(conversation, max_tokens=5),
        lambda: list(llm.stream("a", max_tokens=5)),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"pass SamplingParams\(max_tokens=…\)"):
            call()
    with pytest.raises(UsageError, match=r"unknown option dimension; did you mean dimensions\?"):
        llm.embed("a", dimension=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"unknown option sampling_params; did you mean params\?"):
        llm.generate("a", sampling_params=GREEDY)  # type: ignore[call-arg]


def test_a_checkpoint_is_built_into_the_cache_once(
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path))
    folder = shared / "data/models/stories260K"
    first = LLM(folder, dtype="float32", device="cpu")
    assert "building an engine" in capsys.readouterr().err
    again = LLM(folder, dtype="float32", device="cpu")
    assert "building" not in capsys.readouterr().err
    assert first.path == again.path


def test_an_ids_only_engine_says_so(shared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((shared / "data/models/stories260K" / name).read_bytes())
    report = build_engine(
        folder, tmp_path / "ids.engine", BuildConfig(dtype="float32", target="cpu")
    )
    assert report["accepted"]
    llm = LLM(tmp_path / "ids.engine", device="cpu")
    assert len(llm.generate([[1]], GREEDY)[0].outputs[0].token_ids) == 40
    with pytest.raises(TokenizerError, match="ids-only"):
        llm.generate("Once", GREEDY)
    with pytest.raises(TokenizerError, match="stop_token_ids"):
        llm.generate([[1]], SamplingParams(stop=("a",)))


def test_an_engine_that_says_nothing_has_our_defaults_and_openais(engine: Path, llm: LLM) -> None:
    """The table of docs/serving.md; what a checkpoint says is in
    tests/core/test_generation_defaults.py.
    """
    assert llm.language.manifest.generation == {}
    client = TextProcessor.from_engine(engine)
    assert llm.defaults == dict(MODELMILL_DEFAULTS)
    assert client.defaults == dict(OPENAI_DEFAULTS)
    for ask in ("Once upon", [1, 2, 3]):
        options, openai = (
            llm.request(ask).request.params,
            client.request(ask).request.params,
        )
        assert (options.temperature, options.top_p, options.top_k, options.min_p) == (
            0.6,
            0.95,
            40,
            0.05,
        )
        assert (openai.temperature, openai.top_p, openai.top_k, openai.min_p) == (1.0, 1.0, 0, 0.0)
    assert client.checkpoint_defaults.values == llm.defaults


def test_a_generation_config_reaches_every_request(engine: Path) -> None:
    manifest = llm_manifest(
        engine, {"do_sample": True, "top_k": 7, "suppress_tokens": [3], "stop_strings": ["###"]}
    )
    for openai in (False, True):
        language = TextProcessor(
            engine,
            manifest,
            open_artifact(engine).tokenizer_files(),
            TEMPLATE,
            openai_defaults=openai,
        )
        messages = [{"role": "user", "content": "Hi"}]
        for state in (language.request("Once"), language.chat_request(messages, None)):
            options = state.request.params
            assert (options.temperature, options.top_k, options.stop) == (1.0, 7, ("###",))
            assert options.logits_processors == LogitsProcessors(suppress_tokens=(3,))


def test_what_has_no_effect_is_said_in_one_line_at_start(
    engine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "warned.engine"
    shutil.copytree(engine, copy)
    manifest = llm_manifest(engine, {"do_sample": True, "typical_p": 0.5})
    (copy / MANIFEST_FILE).write_text(manifest.to_json())
    assert LLM(copy, device="cpu").defaults == {}
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "without effect in generation_config: typical_p is not offered"
    ]


def test_a_manifest_whose_generation_config_makes_no_sense_is_refused(engine: Path) -> None:
    manifest = llm_manifest(engine, {"suppress_tokens": "x"})
    with pytest.raises(CorruptArtifact, match="suppress_tokens"):
        TextProcessor(engine, manifest, {})


def llm_manifest(engine: Path, generation: dict[str, Any]) -> Manifest:
    return replace(open_artifact(engine).manifest, generation=generation)


def test_streams_read_in_turns_do_not_starve_each_other(llm: LLM) -> None:
    """A step serves everything that is open: what it says of one stream must not be lost while
    another is read.
    """
    alone = [text(llm, p) for p in ("Once upon a time", "The dog", "Lily said")]
    first, second = llm.stream("Once upon a time", GREEDY), llm.stream("The dog", GREEDY)
    actual = [next(first).text, next(second).text]
    actual[0] += next(first).text
    third = text(llm, "Lily said")
    actual[1] += "".join(d.text for d in second)
    actual[0] += "".join(d.text for d in first)
    assert [*actual, third] == alone
    assert not llm.engine_core.has_work


def test_an_unread_stream_is_aborted_when_it_is_closed(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=400))
    next(stream)
    assert text(llm, "The dog") == text(llm, "The dog")
    stream.close()  # type: ignore[attr-defined]
    while llm.engine_core.has_work:
        llm.engine_core.step()
    assert llm.engine_core.stats().free_pages == llm.engine_core.num_pages


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    full_text = text(llm, "Once upon a time", max_tokens=60)
    stop = full_text[4]
    answer = llm.generate(
        "Once upon a time",
        SamplingParams(temperature=0, max_tokens=60, min_tokens=20, stop=(stop,)),
    )[0].outputs[0]
    assert len(answer.token_ids) > 20
    assert full_text.startswith(answer.text)
    assert len(answer.text) > len(text(llm, "Once upon a time", max_tokens=60, stop=(stop,)))


def test_a_salt_keeps_prefixes_apart(llm: LLM) -> None:
    ids = [1, *range(10, 80)]

    def count_cached(**more: Any) -> int:
        return llm.generate({"prompt_token_ids": ids, **more}, GREEDY)[0].cached_tokens

    count_cached(cache_salt="a")
    assert count_cached(cache_salt="a") > 0
    assert count_cached(cache_salt="b") == 0


def test_what_is_no_prompt_is_one_line(llm: LLM) -> None:
    bad = [[[]], [None], [1.5], [True], [{"prompt": 3}], [{"prompt": "a", "prompt_token_ids": [1]}],
        [{}],
           [{"prompt": "a", "temperature": 0}], [{"prompt": "a", "cache_salt": 7}], [["1"]],
           [[1.0]], [[10**30]],
           [[-1]], [{"prompt_token_ids": "12"}]]  # fmt: skip
    for prompts in bad:
        with pytest.raises(RequestError):
            llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    for prompts, message in ((5, "a prompt is a text, "), ([{"role": "user"}], r"use chat\(\)")):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="a prompt is a text, "):
        llm.embed(None)  # type: ignore[arg-type]
    for params in ({"temperature": 0}, [GREEDY, GREEDY], ["greedy"], 0):
        with pytest.raises(RequestError):
            llm.generate("Once", params)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a conversation"):
        llm.stream("Once", GREEDY, tools=[])
    assert not llm.engine_core.has_work
    assert text(llm, "Once upon a time").startswith(",")


@pytest.mark.parametrize("model", ["", "  ", None, 3])
def test_what_is_no_model_is_refused_in_one_line(model: Any) -> None:
    for opened in (LLM, AsyncLLM):
        with pytest.raises(UsageError, match="is no model: give the path of an engine"):
            opened(model, device="cpu")


def test_a_closed_engine_says_so(engine: Path) -> None:
    closed = AsyncLLM(engine, device="cpu")
    closed.close()
    with pytest.raises(ModelmillError, match="closed"):
        asyncio.run(closed.generate("Once upon a time", GREEDY))


def test_a_stream_that_begins_while_the_engine_closes_gets_an_error(engine: Path) -> None:
    many = AsyncLLM(engine, device="cpu")
    stepping, go_on, step = threading.Event(), threading.Event(), many.llm.step

    def blocking_step(running: Any) -> Any:
        stepping.set()
        assert go_on.wait(TIMEOUT_SECONDS)
        return step(running)

    many.llm.step = blocking_step  # type: ignore[method-assign]

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            first = asyncio.create_task(many.generate("Once", GREEDY))
            await asyncio.to_thread(stepping.wait)
            closing = asyncio.create_task(asyncio.to_thread(many.close))
            while many._commands.empty():
                await asyncio.sleep(0)
            late = asyncio.create_task(many.generate("Once", GREEDY))
            await asyncio.sleep(0)
            go_on.set()
            await closing
            for task in (first, late):
                with pytest.raises(ModelmillError, match="closed"):
                    await task

    asyncio.run(main())


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 0, [GREEDY]])
def test_what_is_no_sampling_is_reported_by_a_stream_too(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.stream("Once", params)
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.request({"prompt": "Once"}, params)
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.chat_request([{"role": "user", "content": "Hi"}], params)


def test_asyncio_goes_on_where_one_request_finds_no_memory(engine: Path, llm: LLM) -> None:
    """A picture is read where its request is queued, before any step."""
    many = AsyncLLM(engine, device="cpu")
    add = many.llm.engine_core.add

    def full(request: Request, make_guide: MakeGuide | None = None) -> None:
        if len(request.prompt) == 9:
            raise MemoryError
        add(request, make_guide)

    many.llm.engine_core.add = full  # type: ignore[method-assign]

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            with pytest.raises(MemoryError):
                await many.generate({"prompt_token_ids": [5] * 9}, GREEDY)
            answer = await many.generate("Once upon a time", GREEDY)
        assert answer.outputs[0].text == text(llm, "Once upon a time")

    asyncio.run(main())
    many.close()


def test_asyncio_streams_abort_and_errors(engine: Path, llm: LLM) -> None:
    expected = text(llm, "Once upon a time")
    many = AsyncLLM(engine, device="cpu")

    async def left() -> None:
        async for _ in many.stream("The dog", SamplingParams(temperature=0, max_tokens=400)):
            return

    async def main() -> None:
        answers = await asyncio.gather(
            *(many.generate("Once upon a time", GREEDY) for _ in range(4)),
            left(),
            return_exceptions=False,
        )
        assert [a.outputs[0].text for a in answers[:4]] == [expected] * 4  # type: ignore[union-attr]
        with pytest.raises(RequestError):
            await many.generate({"prompt_token_ids": [10**7]}, GREEDY)
        assert (await many.generate("Once upon a time", GREEDY)).outputs[0].text == expected

    asyncio.run(main())
    engine_core = many.llm.engine_core
    many.close()
    assert not engine_core.has_work
