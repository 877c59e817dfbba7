"""Ask a served model with OpenAI's client; with --stream print an answer as it is written.

modelmill serve smollm2.engine --port 8123
python examples/openai_sync.py http://127.0.0.1:8123/v1 [--stream]
"""

import sys

from openai import OpenAI


def ask(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three fruits."}],
        max_tokens=40,
        temperature=0,
    )
    print(answer.choices[0].message.content)
    print(
        f"[{answer.choices[0].finish_reason}; {answer.usage.prompt_tokens} + "
        f"{answer.usage.completion_tokens} tokens]"
    )


def stream(client: OpenAI, model: str) -> None:
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is a watermill? One sentence."}],
        max_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:  # the last chunk has the counts and no choices
            print(f"\n[{chunk.usage.completion_tokens} tokens]")


def main(url: str, *options: str) -> None:
    # the key is looked at only where the server was given one
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    if "--stream" in options:
        stream(client, model)
    else:
        ask(client, model)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["http://127.0.0.1:8000/v1"]))
