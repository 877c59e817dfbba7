"""Stream an answer with Python's standard library alone: server-sent events are lines that begin
with "data: ".

modelmill serve smollm2.engine --port 8123
python examples/plain_sse.py http://127.0.0.1:8123/v1
"""

import json
import sys
import urllib.error
import urllib.request


def events(url: str, body: dict):
    """The JSON objects of a stream, until [DONE]."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: "):
                continue  # blank lines end events; comments (": alive") keep the connection open
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield event
    raise RuntimeError("the stream ended before its time")


def main(url: str) -> None:
    with urllib.request.urlopen(f"{url}/models") as response:
        model = json.load(response)["data"][0]["id"]
    messages = [{"role": "user", "content": "Say hello."}]
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 30,
        "temperature": 0,
        "stream": True,
    }
    for event in events(f"{url}/chat/completions", body):
        print(event["choices"][0]["delta"].get("content", ""), end="", flush=True)
    print()


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    try:
        main(address)
    except urllib.error.HTTPError as error:  # such as 503 while the model is loaded
        sys.exit(f"{address} answers {error.code}: {error.read().decode(errors='replace')}")
    except urllib.error.URLError as error:
        sys.exit(
            f"no server answers at {address}: {error.reason}; start one: modelmill serve ENGINE"
        )
