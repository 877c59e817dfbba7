"""Ask a served model with OpenAI's client; with --stream print an answer as it is written.

modelmill serve smollm2.engine --port 8123
python examples/openai_sync.py http://127.0.0.1:8123/v1 [--stream]
"""

import sys
from typing import Any

from openai import APIConnectionError, OpenAI


def chat(client: OpenAI, text: str, max_tokens: int, **options: Any) -> Any:
    return client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        temperature=0,
        **options,
    )


def ask(client: OpenAI) -> None:
    answer = chat(client, "Name three fruits.", 40)
    print(answer.choices[0].message.content)
    print(
        f"[{answer.choices[0].finish_reason}; {answer.usage.prompt_tokens} + "
        f"{answer.usage.completion_tokens} tokens]"
    )


def stream(client: OpenAI) -> None:
    counts = {"include_usage": True}
    text = "What is a watermill? One sentence."
    chunks = chat(client, text, 60, stream=True, stream_options=counts)
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:  # the last chunk has the counts and no choices
            print(f"\n[{chunk.usage.completion_tokens} tokens]")


def main(url: str, *options: str) -> None:
    # the key is looked at only where the server was given one
    client = OpenAI(base_url=url, api_key="none")
    if "--stream" in options:
        stream(client)
    else:
        ask(client)


if __name__ == "__main__":
    words = sys.argv[1:] or ["http://127.0.0.1:8000/v1"]
    try:
        main(*words)
    except APIConnectionError:
        sys.exit(f"no server answers at {words[0]}; start one: modelmill serve ENGINE")
