"""Many questions at once with OpenAI's client for asyncio; they share the engine's steps.

modelmill serve smollm2.engine --port 8123
python examples/openai_async.py http://127.0.0.1:8123/v1
"""

import asyncio
import sys

from openai import APIConnectionError, AsyncOpenAI

COUNTRIES = ("France", "Italy", "Spain", "Japan")


async def main(url: str) -> None:
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        model = (await client.models.list()).data[0].id

        async def ask(country: str) -> str:
            prompt = f"The capital of {country} is"
            answer = await client.completions.create(
                model=model, prompt=prompt, max_tokens=4, temperature=0
            )
            return f"{country}:{answer.choices[0].text.rstrip()}"

        for line in await asyncio.gather(*map(ask, COUNTRIES)):
            print(line)


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    try:
        asyncio.run(main(address))
    except APIConnectionError:
        sys.exit(f"no server answers at {address}; start one: modelmill serve ENGINE")
