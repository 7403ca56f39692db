"""The fields of requests: which there are, what each may be, and what they mean for an engine. Pure.

A field that would change the answer and is not understood is an error, as it is at OpenAI; a field that is null counts
as absent.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bandmaster import UsageError
from bandmaster.rl import Prompt, Sampling
from bandmaster.serve.errors import APIError, invalid
from bandmaster.serve.messages import checked_messages, checked_tools

Body = Mapping[str, Any]
MOST_CHOICES, MOST_PROMPTS, MOST_TOP, MOST_STOPS = 128, 256, 20, 16
LARGEST = 1e308  # of a number: JSON has whole ones that no float can hold
LONGEST = 18  # of a token id, in digits: Python reads no number of thousands


def _whole(least: int) -> tuple[Callable[[Any], bool], str]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least, f"a whole number of {least} or more"


def _number(least: float, most: float) -> tuple[Callable[[Any], bool], str]:
    bounds = f"from {least:g} to {most:g}" if most < math.inf else f"of {least:g} or more"
    most = min(most, LARGEST)
    return lambda v: isinstance(v, int | float) and not isinstance(v, bool) and least <= v <= most, f"a number {bounds}"


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def _is_stop(value: Any) -> bool:
    return (isinstance(value, str) and value != "") or (_is_texts(value) and len(value) <= MOST_STOPS)


def _is_bias(value: Any) -> bool:
    is_number = _number(-LARGEST, LARGEST)[0]
    return isinstance(value, dict) and all(
        k.isdecimal() and len(k) <= LONGEST and is_number(v) for k, v in value.items()
    )


TEXT = (lambda v: isinstance(v, str)), "a text"
FLAG = (lambda v: isinstance(v, bool)), "true or false"
OBJECT = (lambda v: isinstance(v, dict)), "an object"
ANYTHING = (lambda v: True), ""
SAMPLING: dict[str, tuple[Callable[[Any], bool], str]] = {  # fields of `rl.Sampling` by the same names
    "temperature": _number(0, math.inf),
    "top_p": _number(0, 1),
    "top_k": _whole(-1),
    "min_p": _number(0, 1),
    "min_tokens": _whole(0),
    "seed": ((lambda v: isinstance(v, int) and not isinstance(v, bool)), "a whole number"),
    "stop": (_is_stop, f"a text, or a list of at most {MOST_STOPS} texts, which are not empty"),
    "stop_token_ids": (_is_ids, "a list of token ids"),
    "ignore_eos": FLAG,
}
EXTRA: dict[str, tuple[Callable[[Any], bool], str, Any]] = {  # and of `Sampling.extra`; the value that changes nothing
    "frequency_penalty": (*_number(-2, 2), 0),
    "presence_penalty": (*_number(-2, 2), 0),
    "repetition_penalty": (*_number(0, math.inf), 1),
    "logit_bias": (_is_bias, "an object of numbers by token ids", {}),
    "bad_words": (_is_texts, "a list of texts", []),
    "allowed_token_ids": (_is_ids, "a list of token ids", []),
    "skip_special_tokens": (*FLAG, True),
    "include_stop_str_in_output": (*FLAG, False),
}
NOT_SENT = (lambda v: v is False), "false, as this endpoint does not do it"
STREAM_OPTIONS = {
    "include_usage": FLAG,
    "include_obfuscation": NOT_SENT,  # of OpenAI
    "continuous_usage_stats": NOT_SENT,  # of vLLM
}
COMMON = {
    **SAMPLING,
    **{name: (check, what) for name, (check, what, _) in EXTRA.items()},
    "model": TEXT,
    "n": ((lambda v: _whole(1)[0](v) and v <= MOST_CHOICES), f"a whole number from 1 to {MOST_CHOICES}"),
    "stream": FLAG,
    "stream_options": OBJECT,
    "max_tokens": _whole(1),
    "return_token_ids": FLAG,
    "session_id": TEXT,
    "prompt_cache_key": TEXT,
    # of no meaning here
    "user": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_retention": ANYTHING,
    "service_tier": ANYTHING,
    "store": ANYTHING,
    "metadata": ANYTHING,
}
CHAT = {
    **COMMON,
    "messages": ANYTHING,  # see `messages`
    "tools": ANYTHING,
    "tool_choice": ((lambda v: isinstance(v, str | dict)), "a text or an object"),
    "parallel_tool_calls": FLAG,
    "response_format": OBJECT,
    "reasoning_effort": TEXT,
    "chat_template_kwargs": OBJECT,
    "max_completion_tokens": _whole(1),
    "logprobs": FLAG,
    "top_logprobs": ((lambda v: _whole(0)[0](v) and v <= MOST_TOP), f"a whole number from 0 to {MOST_TOP}"),
}
COMPLETION = {
    **COMMON,
    "prompt": ANYTHING,  # see `prompts_of`
    "logprobs": ((lambda v: _whole(0)[0](v) and v <= MOST_TOP), f"a whole number from 0 to {MOST_TOP}"),
}
# Fields of OpenAI that no engine here does, with the values at which they ask for nothing.
NOT_DONE: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
OF_TEMPLATES = ("parallel_tool_calls", "response_format", "reasoning_effort", "chat_template_kwargs")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was checked.

    Attributes:
        prompts: What is to be answered, each as the sampling says.
        sampling: How. Its ``max_tokens`` is that of the request, or the rest of the context.
        is_stream: Whether the answers are to come as they grow.
        has_usage: Whether the last event of a stream says how many tokens there were.
        has_logprobs: Whether the client wants log-probabilities.
        n_top: How many of the most probable tokens it wants at each place.
        has_ids: Whether it wants token ids and versions.
        is_one_call: Whether it wants at most one tool call.
        session: The session that it names.
        session_field: The field that names it.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    is_stream: bool
    has_usage: bool
    has_logprobs: bool
    n_top: int
    has_ids: bool
    is_one_call: bool
    session: str | None
    session_field: str


def chat_of(body: Body, defaults: Sampling, max_model_len: int, is_recorded: bool) -> Asked:
    """Check the body of a chat request.

    Raises:
        APIError: A field is unknown, or not what it may be.
    """
    given = _checked(body, CHAT)
    messages, tools = checked_messages(given.get("messages")), checked_tools(given.get("tools"))
    options = {name: given[name] for name in OF_TEMPLATES if name in given}
    choice = given.get("tool_choice", "auto" if tools else "none")
    _check_choice(choice, tools)
    if tools:
        options["tool_choice"] = choice
    if options.get("response_format") == {"type": "text"}:
        del options["response_format"]
    n_top, has_logprobs = given.get("top_logprobs", 0), given.get("logprobs", False)
    if n_top and not has_logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    prompt = Prompt(messages=messages, tools=tools, options=options, wants_texts=has_logprobs)
    made = _asked(given, [prompt], defaults, most or max_model_len, n_top if has_logprobs else None, is_recorded)
    return replace(made, is_one_call=given.get("parallel_tool_calls") is False)


def completion_of(body: Body, defaults: Sampling, max_model_len: int, is_recorded: bool) -> Asked:
    """Check the body of a request for a completion.

    Raises:
        APIError: A field is unknown, or not what it may be.
    """
    given = _checked(body, COMPLETION)
    has_logprobs = "logprobs" in given
    prompts = [replace(prompt, wants_texts=has_logprobs) for prompt in _prompts(given.get("prompt"))]
    return _asked(given, prompts, defaults, given.get("max_tokens", 16), given.get("logprobs"), is_recorded)


def _checked(body: Body, known: Mapping[str, tuple[Callable[[Any], bool], str]], of: str = "") -> dict[str, Any]:
    """The fields that are there, each as it may be. Errors name a field of an object with the prefix ``of``."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in NOT_DONE:
            if value not in NOT_DONE[name]:
                raise invalid(f"{of}{name} is not supported; leave it out", of + name, "unsupported_parameter")
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise invalid(f"unknown field {_short(of + name)}{hint}", (of + name)[:80], "unknown_parameter")
        check, what = known[name]
        if not check(value):
            raise invalid(f"{of}{name} must be {what}, got {_short(value)}", of + name)
    return {name: value for name, value in given.items() if name in known}


def _asked(
    given: Body, prompts: Sequence[Prompt], defaults: Sampling, most: int, n_top: int | None, is_recorded: bool
) -> Asked:
    sampling = {name: given[name] for name in SAMPLING if name in given}
    if sampling.get("top_k") == -1:  # as vLLM spells that there is no limit
        sampling["top_k"] = 0
    own = {name: given[name] for name in EXTRA if name in given}
    if "logit_bias" in own:
        own["logit_bias"] = {int(token): float(bias) for token, bias in own["logit_bias"].items()}
    neutral = [name for name in own if own[name] == EXTRA[name][2]]  # which take a default away, and no engine refuses
    extra = {name: value for name, value in {**defaults.extra, **own}.items() if name not in neutral}
    is_greedy = sampling.get("temperature", defaults.temperature) == 0
    n = given.get("n", 1 if is_greedy else defaults.n)  # a default gives way to what the request says
    sampling.setdefault("min_tokens", min(defaults.min_tokens, most))
    if n > 1 and is_greedy:
        raise invalid(f"n is {n}, but with temperature 0 all answers are equal; ask for one", "n")
    try:
        made = replace(
            defaults,
            **sampling,
            n=n,
            max_tokens=most,
            logprobs=n_top if n_top is not None else 0 if is_recorded else None,
            extra=extra,
        )
    except UsageError as error:
        message = str(error).replace(" of Sampling", "")
        raise invalid(message, message.partition(" ")[0]) from None
    stream_options = _checked(given.get("stream_options", {}), STREAM_OPTIONS, "stream_options.")
    if stream_options and not given.get("stream"):
        raise invalid("stream_options needs stream to be true", "stream_options")
    session_field = "session_id" if "session_id" in given else "prompt_cache_key"
    return Asked(
        prompts=prompts,
        sampling=made,
        is_stream=given.get("stream", False),
        has_usage=stream_options.get("include_usage", False),
        has_logprobs=n_top is not None,
        n_top=n_top or 0,
        has_ids=given.get("return_token_ids", False),
        is_one_call=False,
        session=given.get(session_field),
        session_field=session_field,
    )


def _check_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or name not in names:
            raise invalid(f"tool_choice names the function {name!r}, but tools has {names}", "tool_choice")
    elif choice not in ("none", "auto", "required"):
        raise invalid(
            f"tool_choice must be none, auto, required or an object that names a function, got {_short(choice)}",
            "tool_choice",
        )
    elif choice == "required" and not tools:
        raise invalid("tool_choice is required, but there are no tools", "tool_choice")


def _prompts(value: Any) -> list[Prompt]:
    """The prompts of a completion: a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [Prompt(text=value)]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [Prompt(ids=value)]
        if len(value) > MOST_PROMPTS:
            raise invalid(f"prompt has {len(value)} prompts, above {MOST_PROMPTS}; send several requests", "prompt")
        if all(isinstance(one, str) for one in value):
            return [Prompt(text=one) for one in value]
        if all(_is_ids(one) and one for one in value):
            return [Prompt(ids=one) for one in value]
    raise invalid(f"prompt must be a text, a list of token ids, or a list of either, got {_short(value)}", "prompt")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def check_model(name: object, model: str) -> None:
    """Check that a request asks for the model that is served.

    Raises:
        APIError: It asks for another one, or for none.
    """
    if name is None:
        raise invalid(f"model is missing; this endpoint has {model!r}", "model")
    if name != model:
        raise APIError(
            404, f"there is no model {_short(name)}; this endpoint has {model!r}", param="model", code="model_not_found"
        )
