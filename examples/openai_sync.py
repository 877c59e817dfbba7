"""Ask a served model with OpenAI's client.

modelmill serve smollm2.engine --port 8123
python examples/openai_sync.py http://127.0.0.1:8123/v1
"""

import sys

from openai import OpenAI


def main(url: str) -> None:
    # the key is looked at only where the server was given one
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
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


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
