"""Print an answer as it is written, with OpenAI's client, and count its tokens at the end.

modelmill serve smollm2.engine --port 8123
python examples/openai_stream.py http://127.0.0.1:8123/v1
"""

import sys

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is a watermill? One sentence."}],
        max_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:  # the last chunk has the counts and no choices
            print(f"\n[{chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
