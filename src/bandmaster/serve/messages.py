"""Chat messages in OpenAI's form: checks, and what makes two of them the same. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bandmaster.serve.errors import invalid

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def checked_messages(value: Any) -> list[Message]:
    """Messages as templates take them: contents are texts, and ``developer`` is ``system``.

    Raises:
        APIError: One of them is not a message.
    """
    if not isinstance(value, list) or not value:
        raise invalid("messages must be a list of at least one message", "messages")
    return [_checked(one, f"messages[{number}]") for number, one in enumerate(value)]


def _checked(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise invalid(f"{where} must be an object, got {type(value).__name__}", where)
    role = value.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", f"{where}.role")
    made = {name: one for name, one in value.items() if one is not None}
    made["role"] = "system" if role == "developer" else role
    if "content" in made:
        made["content"] = _text(made["content"], f"{where}.content")
    elif role != "assistant":
        raise invalid(f"{where}.content is missing", f"{where}.content")
    if "tool_calls" in made:
        if not isinstance(made["tool_calls"], list) or not all(map(_is_call, made["tool_calls"])):
            field = f"{where}.tool_calls"
            raise invalid(f"{field} must be a list of calls of functions, each with its name and arguments", field)
        if not made["tool_calls"]:
            del made["tool_calls"]
    if role == "assistant" and "content" not in made and "tool_calls" not in made:
        made["content"] = ""
    return made


def _text(value: Any, where: str) -> str:
    """The text of a content: a text, or a list of parts that are texts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(f"{where} must be a text or a list of parts, got {type(value).__name__}", where)
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{where}[{number}] is a part of type {kind!r}; this endpoint takes text alone", where)
    return "\n".join(part["text"] for part in value)


def _is_call(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str)
    )


def checked_tools(value: Any) -> list[Mapping[str, Any]]:
    """The tools of a request.

    Raises:
        APIError: One of them is not a function.
    """
    if value is None or value == []:
        return []
    if not isinstance(value, list):
        raise invalid(f"tools must be a list, got {type(value).__name__}", "tools")
    for number, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{number}] must be a function with a name", f"tools[{number}]")
    return value


def digests(first: object, messages: Sequence[Message]) -> Iterator[bytes]:
    """Digests of the first message, the first two, and so on.

    Messages of an assistant are the same if they say the same and call the same functions with the same arguments, as
    clients change the white space around texts, the form of arguments, and the ids of calls.

    Args:
        first: What else has to be the same, as JSON.
        messages: The messages.
    """
    last = hashlib.blake2b(_json(first), digest_size=16).digest()
    for message in messages:
        last = behind(last, message)
        yield last


def behind(digest: bytes, message: Message) -> bytes:
    """The digest of messages of that digest, and one more."""
    return hashlib.blake2b(digest + _json(_essence(message)), digest_size=16).digest()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=repr, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _essence(message: Message) -> object:
    if message["role"] != "assistant":
        return message
    calls = [
        (call["function"]["name"], _arguments(call["function"].get("arguments", "")))
        for call in message.get("tool_calls", ())
    ]
    return ["assistant", (message.get("content") or "").strip(), calls]


def _arguments(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
