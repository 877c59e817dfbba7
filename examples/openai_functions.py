"""Let the model call a Python function: its call is streamed, the function runs here, and the model
goes on.

modelmill serve smollm2.engine --port 8123
python examples/openai_functions.py http://127.0.0.1:8123/v1
"""

import json
import sys

from openai import APIConnectionError, OpenAI


def weather(city: str) -> str:
    return f"Sunny, 21 degrees in {city}"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"model": model, "tools": [TOOL], "temperature": 0, "max_tokens": 200}

    # "required": the answer is a call and keeps to the parameters; with "auto" the model decides
    calls: dict[int, dict] = {}
    for chunk in client.chat.completions.create(
        messages=messages, tool_choice="required", stream=True, **options
    ):
        for piece in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(
                piece.index, {"id": piece.id, "name": piece.function.name, "arguments": ""}
            )
            call["arguments"] += piece.function.arguments

    made = [{"id": call["id"], "type": "function",
        "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls.values()]  # fmt: skip
    messages.append({"role": "assistant", "content": None, "tool_calls": made})
    for call in calls.values():
        print(f"{call['name']}({call['arguments']})")
        result = weather(**json.loads(call["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    answer = client.chat.completions.create(messages=messages, tool_choice="none", **options)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    try:
        main(address)
    except APIConnectionError:
        sys.exit(f"no server answers at {address}; start one: modelmill serve ENGINE")
