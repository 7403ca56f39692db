"""An agent that adds up numbers with a calculator. It knows OpenAI's API, and nothing of how its model is trained.

python examples/rlhf/calculator_agent.py "47+85+16" --model gpt-5-mini
python examples/rlhf/calculator_agent.py "47+85+16" --model NAME --base-url http://127.0.0.1:8000/v1 --api-key any
"""

from __future__ import annotations

import argparse
import json

import openai

__all__ = ["solve"]

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def add(arguments: str) -> str:
    """The result of a call of the calculator, whose arguments are JSON."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) + int(given["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


def solve(client: openai.OpenAI, model: str, question: str, most_turns: int = 4) -> str:
    """The answer to a question such as "47+85+16"; "" if the model has none after some turns."""
    messages: list = [{"role": "user", "content": question}]
    for _ in range(most_turns):
        response = client.chat.completions.create(model=model, messages=messages, tools=[ADD], max_tokens=24)
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--model", required=True)
    parser.add_argument("--base-url", help="of the API; by default OpenAI's")
    parser.add_argument("--api-key", help="by default that of the environment variable OPENAI_API_KEY")
    given = parser.parse_args()
    print(solve(openai.OpenAI(base_url=given.base_url, api_key=given.api_key), given.model, given.question))
