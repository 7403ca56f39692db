"""The OpenAI-compatible endpoint, by the official client and by sockets, over an engine whose answers are known."""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from by_value import sent_by_value
from ctrl_c import interrupted_when, pressed_when
from ends import until
from later import Later

import bandmaster as bm
from bandmaster import Dispatch, register, rl
from bandmaster.serve import Endpoint, Options, Turn, app, rows
from bandmaster.serve.endpoint import _server
from bandmaster.serve.episodes import Recorder, episodes_of
from bandmaster.serve.fields import chat_of, completion_of
from bandmaster.serve.responses import Form

pytestmark = pytest.mark.backends("inprocess", "local")
openai = Later("openai")
TESTS = Path(__file__).parent
KEY = "the key"
HELLO = [{"role": "user", "content": "hello there"}]
COUNT = [{"role": "user", "content": "count"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
IDS = {"return_token_ids": True}
DEADLINE_S = 60


@pytest.fixture(scope="module", autouse=True)
def modules():
    with sent_by_value(TESTS, "byte_engine"):
        yield


@pytest.fixture(scope="module")
def engine(backend, modules):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, sys.modules["byte_engine"].ByteEngine)
        group.facts.all().result()
        group.metrics.all().result()
        list(group.completion_parts.stream(rl.Prompt(text="a"), rl.Sampling(max_tokens=1)))
        bm.WorkerGroup(pool, Given, group).close()  # the threads by which workers reach the group begin
        yield group


class Given(bm.Worker):
    """A worker that was given a group."""

    def __init__(self, group):
        pass


@pytest.fixture(scope="module")
def shared(engine):
    with (
        Endpoint(engine, api_key=KEY, record=True, timeout=DEADLINE_S) as made,
        client_of(made, default_headers={"Connection": "close"}) as client,
    ):
        client.models.list()
        yield made, client


@pytest.fixture
def endpoint(shared):
    shared[0].take()
    return shared[0]


@pytest.fixture
def client(shared):
    return shared[1]


def client_of(endpoint, **options):
    given = {"base_url": endpoint.url, "api_key": KEY, "max_retries": 0, "timeout": DEADLINE_S, **options}
    return openai.OpenAI(**given)


def chat(client, messages, **options):
    return client.chat.completions.create(model="bytes", messages=messages, **options)


def decode(ids):
    return sys.modules["byte_engine"].decode(ids)


def given_up(engine):
    return sum(figures["n_given_up"] for figures in engine.metrics.all().result())


@contextlib.contextmanager
def paused(engine):
    """The engines hold their requests in the block."""
    engine.pause.all("keep").result()
    try:
        yield
    finally:
        engine.resume.all().result()


def started(engine):
    """How many requests have begun in each replica."""
    return np.array([figures["n_started"] for figures in engine.metrics.all().result()])


def get(endpoint, path, key=KEY):
    request = urllib.request.Request(endpoint.url.removesuffix("/v1") + path)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# --- answers ---


def test_a_chat_is_answered_with_usage(client):
    response = chat(client, HELLO)
    (choice,) = response.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "you said hello there")
    assert choice.finish_reason == "stop" and choice.logprobs is None
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens
    assert response.usage.completion_tokens == 14 and response.model == "bytes"


def test_a_stream_has_the_same_text_and_usage(client):
    whole = chat(client, HELLO)
    chunks = list(chat(client, HELLO, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "you said hello there"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_comes_as_the_engine_makes_it(engine, client):
    with chat(client, COUNT, stream=True) as stream:
        engine.pause.all("keep").result()
        next(stream)
        engine.resume.all().result()


def test_n_choices_and_limits(client):
    response = chat(client, HELLO, n=3, max_tokens=2)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert {choice.message.content for choice in response.choices} == {"you"}
    assert {choice.finish_reason for choice in response.choices} == {"length"}
    assert response.usage.completion_tokens == 6
    chunks = list(chat(client, HELLO, n=3, max_completion_tokens=2, stream=True))
    for index in range(3):
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(part.delta.content or "" for part in parts) == "you"
        assert parts[-1].finish_reason == "length"


def test_a_stop_ends_the_answer_and_is_not_in_it(client):
    for stop in (" there", ["never", " there"]):
        (choice,) = chat(client, HELLO, stop=stop).choices
        assert (choice.message.content, choice.finish_reason) == ("you said hello", "stop")


def test_log_probs_of_tokens_and_their_rivals(client):
    (choice,) = chat(client, HELLO, logprobs=True, top_logprobs=2, max_tokens=2).choices
    first, second = choice.logprobs.content
    assert (first.token, first.logprob, bytes(first.bytes)) == ("yo", -0.5, b"yo")
    assert [(one.token, one.logprob) for one in first.top_logprobs] == [("yo", -0.5), ("B", -1.0)]
    assert second.token == "u"
    chunks = list(chat(client, HELLO, logprobs=True, max_tokens=2, stream=True))
    assert [one.token for chunk in chunks for one in chunk.choices[0].logprobs.content] == ["yo", "u"]
    completion = client.completions.create(model="bytes", prompt="ab", logprobs=1, max_tokens=3)
    found = completion.choices[0].logprobs
    assert found.tokens == ["ab", " ", "an"] and found.text_offset == [0, 2, 3]
    assert found.token_logprobs == [-0.5] * 3 and list(found.top_logprobs[0]) == ["ab"]
    several = client.completions.create(model="bytes", prompt="ab", logprobs=1, max_tokens=3, n=2)
    assert [choice.logprobs.text_offset for choice in several.choices] == [[0, 2, 3]] * 2


def test_a_token_that_cannot_be_has_a_log_prob_that_json_has():
    answer = rl.Answer([1, 2], [-math.inf, -0.5], [0, 0], "stop", "ab", 0, [{1: -math.inf}, {2: -0.5}])
    of_text = completion_of({"prompt": "a", "logprobs": 1}, rl.Sampling(), 100, False)
    of_chat = chat_of({"messages": HELLO, "logprobs": True, "top_logprobs": 1}, rl.Sampling(), 100, False)
    texts = {1: "a", 2: "b"}
    found = Form(of_text, "bytes", False).choice(rl.Choice(answer, {}), {}, texts, 0)["logprobs"]
    assert found["token_logprobs"] == [-9999.0, -0.5] and found["top_logprobs"] == [{"a": -9999.0}, {"b": -0.5}]
    content = Form(of_chat, "bytes", True).choice(rl.Choice(answer, {}), {}, texts, 0)["logprobs"]["content"]
    assert [one["logprob"] for one in content] == [-9999.0, -0.5]
    assert content[0]["top_logprobs"][0]["logprob"] == -9999.0


def test_completions_of_texts_and_of_token_ids(client):
    create = client.completions.create
    assert create(model="bytes", prompt="abc", max_tokens=100).choices[0].text == "abc and so on"
    assert create(model="bytes", prompt="a" * 50).usage.completion_tokens == 16, "as many as OpenAI's default"
    response = create(model="bytes", prompt=["abc", "xyz"], n=2, max_tokens=100, extra_body=IDS)
    assert [choice.text for choice in response.choices] == ["abc and so on"] * 2 + ["xyz and so on"] * 2
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert response.prompt_token_ids == [list(b"abc"), list(b"xyz")]
    ids = create(model="bytes", prompt=[97, 98, 99], max_tokens=100, extra_body=IDS)
    assert ids.choices[0].text == "abc and so on" and ids.prompt_token_ids == [97, 98, 99]
    assert decode(ids.choices[0].token_ids).startswith("abc and so on")
    texts = {}
    for chunk in create(model="bytes", prompt=["abc", [120], "xyz"][::2], max_tokens=100, stream=True):
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert texts == {0: "abc and so on", 1: "xyz and so on"}
    chunks = list(create(model="bytes", prompt=["abc", "xyz"], n=2, stream=True))
    texts = {index: [c.choices[0].text for c in chunks if c.choices[0].index == index] for index in range(4)}
    assert [text[0] for text in texts.values()] == ["ab", "ab", "xy", "xy"]


def test_contents_may_be_parts_and_developers_are_the_system(client):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be short"}, {"role": "user", "content": parts}]
    response = chat(client, messages, extra_body=IDS, response_format={"type": "text"})
    assert response.choices[0].message.content == "you said one\ntwo"
    assert decode(response.prompt_token_ids).startswith("<system:be short>")


def test_what_the_fields_of_a_request_mean_for_an_engine():
    def asked(**given):
        return chat_of({"messages": HELLO, **given}, rl.Sampling(top_k=7), 100, False)

    assert asked().sampling.max_tokens == 100 and asked(max_tokens=3).sampling.max_tokens == 3
    assert asked(max_tokens=3, max_completion_tokens=5).sampling.max_tokens == 5
    assert asked().sampling.top_k == 7 and asked(top_k=-1).sampling.top_k == 0
    assert asked(logit_bias={"5": 1}).sampling.extra == {"logit_bias": {5: 1.0}}
    assert asked(session_id="a", prompt_cache_key="b").session == "a"
    (prompt,) = asked(tools=[TOOL], tool_choice="required", reasoning_effort="low").prompts
    assert (prompt.tools, prompt.options) == ([TOOL], {"tool_choice": "required", "reasoning_effort": "low"})


def test_models(client, endpoint):
    (model,) = client.models.list().data
    assert model.id == endpoint.model == "bytes" and model.max_model_len == 4096
    assert client.models.retrieve("bytes").id == "bytes"
    with pytest.raises(openai.NotFoundError, match="this endpoint has 'bytes'"):
        client.models.retrieve("gpt/5")


# --- tools ---


def call_text(name, **arguments):
    return [{"role": "user", "content": f"use {name} {json.dumps(arguments)}"}]


def test_a_tool_is_called_and_its_result_answered(client):
    messages = call_text("add", a=2, b=3)
    (choice,) = chat(client, messages, tools=[TOOL]).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": 3}
    assert call.id
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    response = chat(client, messages, tools=[TOOL])
    assert response.choices[0].message.content == "it is 5"
    assert response.choices[0].finish_reason == "stop"


def test_a_stream_has_the_same_tool_call(client):
    with client.chat.completions.stream(model="bytes", messages=call_text("add", a=2, b=3), tools=[TOOL]) as stream:
        n_parts = sum(event.type == "tool_calls.function.arguments.delta" for event in stream)
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": 3}
    assert choice.finish_reason == "tool_calls" and n_parts > 2


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_wants_one_call_at_a_time_gets_one_and_goes_on(client, is_stream):
    tool = {"type": "function", "function": {"name": "twice", "parameters": {}}}
    messages = call_text("twice", a=2)
    both = chat(client, messages, tools=[tool])
    assert len(both.choices[0].message.tool_calls) == 2
    given = {"model": "bytes", "tools": [tool], "parallel_tool_calls": False, "extra_body": IDS}
    if is_stream:
        with client.chat.completions.stream(messages=messages, **given) as stream:
            list(stream)
            first = stream.get_final_completion()
    else:
        first = client.chat.completions.create(messages=messages, **given)
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 2}
    answer = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]}
    messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
    second = client.chat.completions.create(messages=messages, **given)
    assert second.usage.prompt_tokens_details.known_tokens > 0
    assert second.choices[0].message.content == "it is 4"


def test_without_a_call_the_text_is_the_content(client):
    (choice,) = chat(client, HELLO, tools=[TOOL]).choices
    assert choice.message.content == "you said hello there" and choice.finish_reason == "stop"
    text = "".join(c.choices[0].delta.content or "" for c in chat(client, HELLO, tools=[TOOL], stream=True))
    assert text == "you said hello there"


# --- conversations: the tokens of a turn begin with all tokens of the turns before ---


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_turns_keep_the_tokens_that_were_sampled(client, is_stream):
    messages, before = list(HELLO), []
    for turn in range(4):
        if is_stream:
            chunks = list(chat(client, messages, stream=True, extra_body=IDS))
            prompt = chunks[0].prompt_token_ids
            answer = [token for chunk in chunks for token in chunk.choices[0].token_ids]
            versions = [version for chunk in chunks for version in chunk.choices[0].versions]
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            response = chat(client, messages, extra_body=IDS)
            prompt, answer = response.prompt_token_ids, response.choices[0].token_ids
            versions, content = response.choices[0].versions, response.choices[0].message.content
            assert response.usage.prompt_tokens_details.known_tokens == len(before)
        assert prompt[: len(before)] == before
        assert len(versions) == len(answer)
        before = prompt + answer
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"more {turn}"}]
    rendered = chat(client, [*messages, {"role": "user", "content": "new"}], extra_headers={"X-Session-ID": "other"})
    assert rendered.usage.prompt_tokens > len(before), "the tokenizer would have cut the answers otherwise"


@pytest.mark.parametrize("has_text", [True, False], ids=["mark", "hidden"])
@pytest.mark.backends("inprocess")
def test_templates_without_end_tokens(backend, modules, has_text):
    with bm.ResourcePool([1], backend=backend) as pool:
        engine = bm.WorkerGroup(pool, sys.modules["byte_engine"].ByteEngine, has_ends=False, has_text=has_text)
        with Endpoint(engine, record=True) as endpoint, client_of(endpoint) as client:
            messages, before = list(HELLO), []
            for turn in range(3):
                response = chat(client, messages, extra_body=IDS)
                answer = response.choices[0].message
                assert answer.content == (f"you said more {turn - 1}" if turn else "you said hello there")
                assert (response.prompt_token_ids[: len(before)] == before) == (has_text or not turn)
                before = response.prompt_token_ids + response.choices[0].token_ids
                messages += [answer, {"role": "user", "content": f"more {turn}"}]
            assert [episode.n_turns for episode in endpoint.take()] == ([3] if has_text else [1, 1, 1])
            n = 0 if has_text else 2
            assert f"bandmaster_rerendered_turns_total {n}.0" in get(endpoint, "/metrics")[1]


def test_clients_may_change_what_does_not_matter(client):
    messages = call_text("add", a=2, b=3)
    first = chat(client, messages, tools=[TOOL], extra_body=IDS)
    call = {"id": "renamed", "type": "function", "function": {"name": "add", "arguments": '{"b":3,  "a":2}'}}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call], "name": "me"},
        {"role": "tool", "tool_call_id": "renamed", "content": [{"type": "text", "text": "5"}]},
    ]
    second = chat(client, messages, tools=[TOOL], extra_body=IDS)
    before = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert second.choices[0].message.content == "it is 5"


def test_a_changed_answer_is_rendered_anew(client, endpoint):
    first = chat(client, HELLO, extra_body=IDS)
    edited = [*HELLO, {"role": "assistant", "content": "I said nothing"}, {"role": "user", "content": "go on"}]
    second = chat(client, edited, extra_body=IDS)
    assert second.usage.prompt_tokens_details.known_tokens == 0
    assert "I said nothing" in decode(second.prompt_token_ids)
    assert first.choices[0].token_ids != second.choices[0].token_ids


def test_an_answer_that_was_cut_goes_on_with_an_end(client):
    first = chat(client, HELLO, max_tokens=3, extra_body=IDS)
    content = first.choices[0].message.content
    messages = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
    prompt = chat(client, messages, extra_body=IDS).prompt_token_ids
    before = first.prompt_token_ids + first.choices[0].token_ids
    assert prompt[: len(before)] == before
    assert decode(prompt[len(before) :]) == ">\n<user:go on>\n<assistant:"


def test_turns_of_a_session_go_to_one_replica(engine, endpoint):
    for name in range(6):
        with client_of(endpoint, default_headers={"X-Session-ID": f"session {name}"}) as client:
            before = started(engine)
            for turn in range(5):
                chat(client, [{"role": "user", "content": f"turn {turn}"}])
            assert sorted(started(engine) - before) == [0, 5]
    before = started(engine)
    with client_of(endpoint) as client:
        for turn in range(5):
            chat(client, [{"role": "user", "content": f"turn {turn}"}], prompt_cache_key="by the body")
    assert sorted(started(engine) - before) == [0, 5]
    with client_of(endpoint, default_headers={"X-Session-ID": "by the header"}) as client:  # the others do not matter
        chat(client, HELLO, prompt_cache_key="a" * 300)


def test_forgotten_conversations_are_rendered_anew(engine):
    with Endpoint(engine, max_session_tokens=200) as endpoint, client_of(endpoint) as client:
        histories = []
        for number in range(10):
            messages = [{"role": "user", "content": f"conversation {number}"}]
            messages += [chat(client, messages).choices[0].message, {"role": "user", "content": "go on"}]
            histories.append(messages)
        last = chat(client, histories[-1]).usage.prompt_tokens_details.known_tokens
        first = chat(client, histories[0]).usage.prompt_tokens_details.known_tokens
        assert first == 0 < last
        chat(client, histories[0][:1])
        for history in histories[1:8]:  # what is used again is not forgotten
            chat(client, history[:1])
            assert chat(client, histories[0]).usage.prompt_tokens_details.known_tokens > 0


def test_conversations_with_other_tools_or_of_another_session_are_rendered_anew(client):
    messages = [*HELLO, {"role": "assistant", "content": "you said hello there"}, {"role": "user", "content": "go on"}]
    chat(client, HELLO, prompt_cache_key="mine")
    for options in ({"prompt_cache_key": "other"}, {"prompt_cache_key": "mine", "tools": [TOOL]}):
        assert chat(client, messages, **options).usage.prompt_tokens_details.known_tokens == 0
    assert chat(client, messages, prompt_cache_key="mine").usage.prompt_tokens_details.known_tokens > 0


def test_tokens_are_counted_once(engine):
    with Endpoint(engine) as endpoint, client_of(endpoint) as client:
        first = chat(client, HELLO)
        n_remembered = figure(endpoint, "bandmaster_session_tokens")
        assert n_remembered == first.usage.total_tokens
        chat(client, HELLO)
        assert figure(endpoint, "bandmaster_session_tokens") == n_remembered, "it is the same conversation"
        messages = [*HELLO, first.choices[0].message, {"role": "user", "content": "go on"}]
        used = chat(client, messages).usage
        *_, last = chat(client, messages, stream=True, stream_options={"include_usage": True})
        assert last.usage == used and used.prompt_tokens_details.known_tokens > 0
        for name, n in (
            ("prompt_tokens_total", 2 * (first.usage.prompt_tokens + used.prompt_tokens)),
            ("answer_tokens_total", 2 * (first.usage.completion_tokens + used.completion_tokens)),
            ("known_tokens_total", 2 * used.prompt_tokens_details.known_tokens),
        ):
            assert figure(endpoint, f"bandmaster_{name}") == n, name
        until(lambda: figure(endpoint, "bandmaster_open_requests") == 0)


def figure(endpoint, name):
    """The value of a figure without labels."""
    (found,) = re.findall(rf"^{name} (\S+)$", get(endpoint, "/metrics")[1], re.MULTILINE)
    return float(found)


# --- episodes ---


def test_a_session_is_one_episode_with_what_was_sampled(endpoint):
    with client_of(endpoint, default_headers={"X-Session-ID": "a"}) as client:
        messages = list(HELLO)
        for turn in range(3):
            answer = chat(client, messages).choices[0].message
            messages += [answer, {"role": "user", "content": f"more {turn}"}]
    assert endpoint.sessions() == ["a"]
    (episode,) = endpoint.take("a")
    assert (episode.session, episode.n_turns, episode.finish_reason) == ("a", 3, "stop")
    said = decode(episode.tokens[episode.mask])
    assert said == "you said hello there>you said more 0>you said more 1>"
    assert set(episode.log_probs[episode.mask]) == {-0.5} and not episode.log_probs[~episode.mask].any()
    assert set(episode.versions[episode.mask]) == {0} and set(episode.versions[~episode.mask]) == {-1}
    assert endpoint.take("a") == endpoint.take() == endpoint.sessions() == []


def turn_of(prompt, answer, session="a"):
    n = len(answer)
    return Turn(
        session=session,
        prompt=np.array(prompt, np.int32),
        answer=np.array(answer, np.int32),
        log_probs=np.full(n, -0.5, np.float32),
        versions=np.zeros(n, np.int64),
        finish_reason="stop",
    )


def test_a_turn_goes_on_with_the_longest_sequence_that_it_begins_with():
    turns = [turn_of([1, 2, 3], [4]), turn_of([1], [2]), turn_of([1, 2, 3, 4, 5], [6]), turn_of([1, 9], [2])]
    episodes = episodes_of(turns)
    assert [episode.n_turns for episode in episodes] == [2, 1, 1]
    assert episodes[0].tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.flatnonzero(episodes[0].mask).tolist() == [3, 5]


def test_what_is_taken_makes_room_and_the_session_with_the_newest_turn_stays():
    recorder = Recorder(10, None, keeps=True)
    recorder.add(turn_of([1] * 5, [2], "a"))
    assert len(recorder.take("a")) == 1
    for session in ("a", "b", "a"):
        recorder.add(turn_of([1] * 2, [2], session))
    assert (recorder.sessions(), recorder.n_dropped) == (["b", "a"], 0)
    recorder.add(turn_of([1] * 2, [2], "c"))
    assert (recorder.sessions(), recorder.n_dropped) == (["a", "c"], 1)


def test_a_session_has_the_name_that_its_header_has_in_utf_8_or_else_in_latin_1(endpoint):
    for name, encoding in (("épisode 七", "utf-8"), ("épisode", "latin-1")):
        request = post(BODY, "X-Session-ID: NAME").replace(b"NAME", name.encode(encoding))
        assert answered(raw(endpoint, request))[0] == 200
        assert [episode.session for episode in endpoint.take()] == [name]


def test_the_name_of_a_session_is_a_text(endpoint):
    with pytest.raises(bm.UsageError, match="take needs the name of a session, a text, or None for all, got 7"):
        endpoint.take(7)


def test_several_answers_to_a_prompt_are_several_episodes(client, endpoint):
    chat(client, HELLO, n=3)
    episodes = endpoint.take()
    assert [episode.n_turns for episode in episodes] == [1, 1, 1]
    columns = rows(episodes)
    assert columns["n_tokens"].tolist() == [14, 14, 14]
    assert rl.padded(columns["tokens"], 64).shape == rl.padded(columns["mask"], 64).shape == (3, 64)
    assert len({*columns["session"]}) == 1


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_request_whose_client_hangs_up_leaves_no_turns_of_the_prompts_that_were_answered(engine, is_stream):
    body = {"model": "bytes", "prompt": ["one", "another"], "max_tokens": 4, "stream": is_stream}
    before = given_up(engine)
    with Endpoint(engine, api_key=KEY, record=True) as endpoint, client_of(endpoint) as client:
        n_started = started(engine)
        with paused(engine):
            connection = raw(endpoint, post(body, path="/v1/completions"))
            until(lambda: (started(engine) > n_started).all())
            engine.resume.options(replica=0)().result()
            until(lambda: "bandmaster_answer_tokens_total 4.0" in get(endpoint, "/metrics")[1])
            connection.close()
            until(lambda: given_up(engine) == before + 1)
        assert endpoint.take() == []
        made = client.completions.create(**body)
        assert [*made] if is_stream else made
        assert [len(episode.tokens[episode.mask]) for episode in endpoint.take()] == [4, 4]


def test_conversations_without_a_session_are_told_apart(client, endpoint):
    for content in ("one", "two"):
        messages = [{"role": "user", "content": content}]
        messages += [chat(client, messages).choices[0].message, {"role": "user", "content": "go on"}]
        chat(client, messages)
    assert [episode.n_turns for episode in endpoint.take()] == [2, 2]


def test_a_callback_gets_each_turn_and_its_errors_do_no_harm(engine, caplog):
    turns = []

    def on_turn(turn):
        turns.append(turn)
        raise ValueError("the callback is wrong")

    with Endpoint(engine, on_turn=on_turn) as endpoint, client_of(endpoint) as client:
        chat(client, HELLO)
        assert chat(client, HELLO, stream=True, max_tokens=2) is not None
        until(lambda: len(turns) == 2)
        with pytest.raises(bm.UsageError, match="record=True"):
            endpoint.take()
        chat(client, HELLO, n=3)
    assert decode(turns[0].answer) == "you said hello there>" and len(turns[1].answer) == 2
    assert [turn.number for turn in turns] == [0, 0, 0, 1, 2]
    assert "the callback is wrong" in caplog.text


def test_records_are_bounded_and_the_oldest_dropped(engine, caplog):
    with Endpoint(engine, record=True, max_recorded_tokens=200) as endpoint, client_of(endpoint) as client:
        for number in range(10):
            chat(client, HELLO, extra_headers={"X-Session-ID": str(number)})
        assert endpoint.sessions() == ["6", "7", "8", "9"]
        assert "bandmaster_dropped_turns 6.0" in get(endpoint, "/metrics")[1]
    assert "max_recorded_tokens=200" in caplog.text


# --- who may, and what is wrong ---


def test_a_wrong_key_is_refused_everywhere_but_for_health(endpoint):
    for key in ("wrong", f"{KEY}y"):
        with client_of(endpoint, api_key=key) as client:
            with pytest.raises(openai.AuthenticationError, match="the API key is wrong") as raised:
                chat(client, HELLO)
            assert raised.value.code == "invalid_api_key"
    request = post(BODY).replace(KEY.encode(), "ключ".encode())
    assert answered(raw(endpoint, request))[0] == 401
    assert answered(raw(endpoint, post(BODY).replace(b"Bearer", b"Basic")))[0] == 401
    assert get(endpoint, "/v1/models", key=None)[0] == 401
    assert get(endpoint, "/metrics", key=None)[0] == 401
    assert get(endpoint, "/health", key=None)[0] == 200


def test_an_open_address_needs_a_key(engine):
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):
        with pytest.raises(bm.UsageError, match="there is no api_key"):
            Endpoint(engine, host=host)
    with Endpoint(engine, host="localhost") as endpoint, client_of(endpoint, api_key="any") as client:
        assert chat(client, HELLO).choices


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hello"}, "messages", "at least one message"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "got 'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text alone"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls", "calls of functions"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
            "its name and arguments",
        ),
        ({"temperature": -1}, "temperature", "a number of 0 or more, got -1"),
        ({"temperature": 10**400}, "temperature", "a number of 0 or more, got 1000"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias", "an object of numbers by token ids"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "an object of numbers by token ids"),
        ({"temperature": "hot"}, "temperature", "got 'hot'"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"max_tokens": 0}, "max_tokens", "1 or more, got 0"),
        ({"max_tokens": True}, "max_tokens", "got True"),
        ({"max_tokens": 1 << 70}, "max_tokens", "max_tokens must be a whole number of 64 bits, got 11805916"),
        ({"seed": -(1 << 70)}, "seed", "seed must be a whole number of 64 bits, got -11805916"),
        ({"n": 1000}, "n", "from 1 to 128"),
        ({"n": 2, "temperature": 0}, "n", "all answers are equal"),
        ({"stop": ""}, "stop", "not empty"),
        ({"session_id": ""}, "session_id", "a text of 1 to 256 characters, got 0"),
        ({"prompt_cache_key": "a" * 300}, "prompt_cache_key", "a text of 1 to 256 characters"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        (
            {"stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "did you mean 'include_usage'",
        ),
        (
            {"stream": True, "stream_options": {"include_usage": "no"}},
            "stream_options.include_usage",
            "true or false, got 'no'",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "must be false, as this endpoint does not do it",
        ),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"audio": {"voice": "alloy"}}, "audio", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "a function with a name"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "names the function 'sub'",
        ),
        ({"frequency_penalty": 1.0}, None, "does not do frequency_penalty"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "messages", "5019 tokens, but the engine takes 4096"),
        ({"messages": [{"role": "function", "content": "a"}]}, None, "no role 'function'"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_bad_field_is_an_error_that_names_it(client, changes, param, said, is_stream):
    body = {"messages": HELLO, **changes, **({"stream": True} if is_stream and param != "stream_options" else {})}
    with pytest.raises(openai.BadRequestError) as raised:
        client.post("/chat/completions", body={"model": "bytes", **body}, cast_to=object)
    assert said in raised.value.message
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"
    assert chat(client, HELLO).choices, "the next request is answered"


@pytest.mark.parametrize(
    "neutral",
    [{"repetition_penalty": 1.0}, {"skip_special_tokens": True}, {"logit_bias": {}}, {"bad_words": []}],
    ids=lambda neutral: next(iter(neutral)),
)
def test_a_field_that_changes_nothing_overrides_the_default_of_the_endpoint(engine, neutral):
    (name,) = neutral
    defaults = rl.Sampling(extra={name: "of the endpoint"})  # which the engine refuses
    with Endpoint(engine, defaults=defaults) as endpoint, client_of(endpoint) as client:
        with pytest.raises(openai.BadRequestError, match=f"does not do {name}"):
            chat(client, HELLO)
        assert chat(client, HELLO, extra_body=neutral).choices


def test_a_default_of_the_endpoint_gives_way_to_what_a_request_says(engine):
    defaults = rl.Sampling(n=2, min_tokens=10, max_tokens=20)
    with Endpoint(engine, defaults=defaults) as endpoint, client_of(endpoint) as client:
        assert len(chat(client, HELLO).choices) == 2
        assert len(chat(client, HELLO, temperature=0).choices) == 1
        assert [choice.finish_reason for choice in chat(client, HELLO, max_tokens=5).choices] == ["length"] * 2
        for own, param in (({"n": 2, "temperature": 0}, "n"), ({"max_tokens": 5}, "min_tokens")):
            with pytest.raises(openai.BadRequestError) as raised:
                chat(client, HELLO, **own, extra_body={"min_tokens": 6})
            assert raised.value.param == param


def test_a_prompt_that_is_too_long_has_openais_code(client):
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, [{"role": "user", "content": "a" * 5000}])
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="bytes", prompt="a" * 5000)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [0.5], ["a", 1], {}, [10_000], [-1], "a" * 5000], ids=lambda p: str(p)[:9]
)
def test_a_bad_prompt_is_an_error(client, prompt):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="bytes", prompt=prompt)


def test_an_unknown_model_and_an_unknown_path_are_not_found(client, endpoint):
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'; this endpoint has 'bytes'") as raised:
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert raised.value.code == "model_not_found"
    status, body = get(endpoint, "/v1/embeddings")
    assert status == 404 and json.loads(body)["error"]["type"] == "invalid_request_error"
    status, body = get(endpoint, "/v1/chat/completions")
    assert status == 405 and "GET /v1/chat/completions" in json.loads(body)["error"]["message"]


# --- sockets: what no client should send ---


def raw(endpoint, data=b"", **options):
    made = socket.create_connection(address(endpoint), timeout=DEADLINE_S)
    made.sendall(data)
    return made


def address(endpoint):
    host, _, port = endpoint.url.removeprefix("http://").removesuffix("/v1").rpartition(":")
    return host, int(port)


def post(body, *headers, path="/v1/chat/completions", key=KEY, length=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: here", f"Authorization: Bearer {key}", "Content-Type: application/json"]
    head += [f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def answered(connection):
    """Status and JSON of a response."""
    with connection, connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        n_bytes = 0
        while (line := file.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                n_bytes = int(value)
        return status, json.loads(file.read(n_bytes))


BODY = {"model": "bytes", "messages": HELLO}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b'{"n": 1e999}', b"1" * 10_000],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_not_an_object_is_an_error(endpoint, body):
    status, found = answered(raw(endpoint, post(body)))
    assert status == 400 and found["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("half", [b"\\ud83d", b"\\uDE00", b"\xed\xa0\xbd"], ids=repr)
@pytest.mark.parametrize("place", [b"hello there", b"messages"], ids=["value", "name"])
def test_a_body_with_half_of_a_character_is_an_error(endpoint, half, place):
    status, found = answered(raw(endpoint, post(json.dumps(BODY).encode().replace(place, half))))
    assert status == 400 and "surrogates not allowed" in found["error"]["message"]


@pytest.mark.parametrize("is_escaped", [False, True], ids=["plain", "escaped"])
def test_a_body_may_have_any_character(endpoint, is_escaped):
    said = "\N{GRINNING FACE} \N{HANGUL SYLLABLE HAN}"
    body = {"model": "bytes", "messages": [{"role": "user", "content": said}], **IDS}
    status, found = answered(raw(endpoint, post(json.dumps(body, ensure_ascii=is_escaped).encode())))
    assert status == 200 and said in bytes(token for token in found["prompt_token_ids"] if token < 256).decode()


def test_a_body_of_another_type_is_refused(endpoint):
    request = post(BODY).replace(b"application/json", b"text/plain")
    assert answered(raw(endpoint, request))[0] == 415


def test_a_long_body_is_read(client):
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, [{"role": "user", "content": "a" * 3_000_000}])
    assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
def test_a_body_that_is_too_long_is_refused(engine, is_chunked):
    with Endpoint(engine, api_key=KEY, max_body_nbytes=1000) as endpoint:
        body = json.dumps({"model": "bytes", "messages": [{"role": "user", "content": "a" * 3000}]}).encode()
        request = post(body)
        if is_chunked:
            head, _, _ = post(b"").partition(b"Content-Length")
            request = (
                head + b"Transfer-Encoding: chunked\r\n\r\n" + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
            )
        status, found = answered(raw(endpoint, request))
        assert status == 413 and "longer than 1000 bytes" in found["error"]["message"]
        with client_of(endpoint) as client:
            assert chat(client, HELLO).choices
            with pytest.raises(openai.APIStatusError) as raised:
                chat(client, [{"role": "user", "content": "a" * 3000}])
            assert raised.value.status_code == 413


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/chat", post(b"", length=100)[:-1]], ids=["nothing", "head", "all but one"]
)
def test_a_client_that_sends_its_head_too_slowly_is_disconnected(engine, sent):
    with Endpoint(engine, api_key=KEY, stall_timeout=0.2) as endpoint, raw(endpoint, sent) as connection:
        assert connection.recv(100) == b"" if sent == b"" else closed(connection)


def closed(connection):
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_sends_its_body_too_slowly_gets_an_error(engine):
    with Endpoint(engine, api_key=KEY, stall_timeout=0.2) as endpoint:
        status, found = answered(raw(endpoint, post(b'{"model"', length=1000)))
        assert status == 408 and "0.2 s" in found["error"]["message"]


def test_a_client_that_takes_no_answer_is_disconnected_and_its_request_given_up(engine):
    before = given_up(engine)
    with Endpoint(engine, api_key=KEY, stall_timeout=0.3) as endpoint:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(address(endpoint))
        with connection:
            prompt = {"model": "bytes", "messages": COUNT, "stream": True, "return_token_ids": True, "n": 100}
            connection.sendall(post(prompt))
            until(lambda: given_up(engine) > before)
        assert 'status="499"' in get(endpoint, "/metrics")[1]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.backends("inprocess")
def test_a_client_that_takes_a_long_answer_slowly_gets_all_of_it(backend, modules, is_stream):
    class Verbose(sys.modules["byte_engine"].ByteEngine):
        async def _parts(self, prompt, sampling, number):
            yield rl.Answer([65], [0.0], [0], "stop", "a" * 6_000_000)

    with bm.ResourcePool([1], backend=backend) as pool:
        engine = bm.WorkerGroup(pool, Verbose)
        with Endpoint(engine, api_key=KEY, stall_timeout=0.5) as endpoint, socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
            connection.connect(address(endpoint))
            body = {"model": "bytes", "prompt": [65], "stream": is_stream}
            connection.sendall(post(body, "Connection: close", path="/v1/completions"))
            n_bytes, pace = 0, threading.Event()
            while part := connection.recv(40_000):
                n_bytes += len(part)
                pace.wait(0.01)
            assert n_bytes > 6_000_000


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_hangs_up_has_its_request_given_up_at_once(engine, endpoint, is_stream):
    before = given_up(engine)
    n_started = started(engine).sum()
    with paused(engine):
        connection = raw(endpoint, post({"model": "bytes", "messages": COUNT, "stream": is_stream}))
        until(lambda: started(engine).sum() > n_started)
        connection.close()
        until(lambda: given_up(engine) == before + 1)
    assert endpoint.take() == []


@pytest.mark.backends("inprocess")
def test_nothing_is_written_to_a_client_that_has_hung_up(endpoint, caplog):
    asked = [raw(endpoint, post({"model": "bytes", "messages": COUNT, "stream": True})) for _ in range(10)]
    for connection in asked:
        connection.recv(1)
        connection.close()
    until(lambda: "bandmaster_open_requests 0.0" in get(endpoint, "/metrics")[1])
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_request_may_take_longer_than_its_head(engine):
    with paused(engine), Endpoint(engine, api_key=KEY, stall_timeout=0.3) as endpoint:
        connection = raw(endpoint, post(BODY, "X-Forwarded-For: 10.0.0.1"))
        with raw(endpoint) as other:
            assert other.recv(1) == b"", "by now, a connection without a request was closed"
        engine.resume.all().result()
        assert answered(connection)[0] == 200


def test_a_request_that_follows_a_stream_on_its_connection_may_take_as_long_as_any(engine):
    held = post({**BODY, "session_id": "held"})
    with Endpoint(engine, api_key=KEY, stall_timeout=0.3) as endpoint:
        before = started(engine)
        with paused(engine):
            first = raw(endpoint, held)
            until(lambda: (started(engine) > before).any())
            engine.resume.options(replica=int((started(engine) == before).argmax()))().result()
            with raw(endpoint, post({**BODY, "stream": True}) + held) as connection, connection.makefile("rb") as file:
                while (line := file.readline()) != b"0\r\n":  # the end of the stream; an empty line comes behind it
                    assert line, "the connection was closed"
                with raw(endpoint) as other:
                    assert other.recv(1) == b"", "by now, a connection without a request was closed"
                engine.resume.all().result()
                assert [file.readline(), file.readline()] == [b"\r\n", b"HTTP/1.1 200 OK\r\n"]
            assert answered(first)[0] == 200


def test_what_is_no_http_is_refused(endpoint, client):
    with raw(endpoint, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10 + b"\r\n\r\n") as connection:
        assert b"400" in connection.recv(1000)
    with raw(endpoint) as connection:
        connection.sendall(b"GET /" + b"a" * 200_000)  # it is refused before its end
        assert b"400" in connection.recv(1000)
    with raw(endpoint) as connection, pytest.raises(OSError, match=r"reset|Broken pipe"):  # rather than a timeout
        for _ in range(1000):
            connection.sendall(b"a" * 100_000)
    assert chat(client, HELLO).choices


# --- limits ---


def test_more_requests_than_there_are_places_for_are_told_to_come_later(engine):
    with paused(engine), Endpoint(engine, api_key=KEY, max_open=2) as endpoint:
        held = [raw(endpoint, post(BODY)) for _ in range(2)]
        until(lambda: "bandmaster_open_requests 2.0" in get(endpoint, "/metrics")[1])
        with (
            client_of(endpoint) as client,
            pytest.raises(openai.RateLimitError, match="2 requests are open") as raised,
        ):
            chat(client, HELLO)
        assert raised.value.response.headers["retry-after"] == "1"
        engine.resume.all().result()
        assert [answered(connection)[0] for connection in held] == [200, 200]
        with client_of(endpoint) as client:
            assert chat(client, HELLO).choices


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_takes_too_long_is_given_up(engine, is_stream):
    before = given_up(engine)
    with paused(engine), Endpoint(engine, timeout=0.3) as endpoint, client_of(endpoint) as client:
        with pytest.raises(openai.APIStatusError, match=r"not answered within 0\.3 s") as raised:
            chat(client, COUNT, stream=is_stream)
        assert raised.value.status_code == 504
        until(lambda: given_up(engine) == before + 1)


def test_a_stream_that_takes_too_long_ends_with_an_error(engine):
    with Endpoint(engine, timeout=1.0) as endpoint, client_of(endpoint) as client:
        stream = chat(client, COUNT, stream=True)
        next(stream)
        with paused(engine), pytest.raises(openai.APIError, match="not answered within 1 s"):
            for _ in stream:
                pass


# --- health, and the end ---


def states(endpoint):
    return [one["state"] for one in json.loads(get(endpoint, "/health")[1])["replicas"]]


def test_health_and_metrics_tell_of_replicas(engine, endpoint, client):
    chat(client, HELLO)
    assert get(endpoint, "/health")[0] == 200 and states(endpoint) == ["ok", "ok"]
    with paused(engine):
        assert states(endpoint) == ["paused", "paused"]
    with Endpoint(engine, api_key=KEY) as other:
        with client_of(other) as client:
            chat(client, HELLO)
        text = get(other, "/metrics")[1]
    for line in (
        'bandmaster_requests_total{route="chat",status="200"} 1.0',
        "bandmaster_answer_tokens_total 14.0",
        'bandmaster_replica_up{replica="1"} 1.0',
        'engine_n_running{replica="0"} 0.0',
    ):
        assert line in text


@pytest.mark.backends("local")
def test_a_replica_that_dies_is_reported_and_the_other_one_answers(backend, modules):
    with bm.ResourcePool([2], backend=backend) as pool:
        engine = bm.WorkerGroup(pool, sys.modules["byte_engine"].ByteEngine)
        with Endpoint(engine) as endpoint, client_of(endpoint) as client:
            for name in range(4):
                chat(client, HELLO, extra_headers={"X-Session-ID": str(name)})
            os.kill(engine.workers[0].pid, signal.SIGKILL)
            until(
                lambda: [one["state"] for one in json.loads(get(endpoint, "/health")[1])["replicas"]] == ["dead", "ok"]
            )
            for name in range(4):
                assert chat(client, HELLO, extra_headers={"X-Session-ID": str(name)}).choices
            os.kill(engine.workers[1].pid, signal.SIGKILL)
            until(lambda: get(endpoint, "/health")[0] == 503)
            for is_stream in (False, True):
                with pytest.raises(openai.InternalServerError) as raised:
                    chat(client, HELLO, stream=is_stream)
                assert raised.value.status_code == 503
            assert 'bandmaster_replica_up{replica="0"} 0.0' in get(endpoint, "/metrics")[1]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.backends("local")
def test_a_request_whose_replica_dies_goes_to_the_other_one(backend, modules, is_stream):
    with bm.ResourcePool([2], backend=backend) as pool:
        engine = bm.WorkerGroup(pool, sys.modules["byte_engine"].ByteEngine)
        engine.pause.all("keep").result()
        with Endpoint(engine) as endpoint:
            connection = raw(endpoint, post({**BODY, "stream": is_stream}))
            until(lambda: started(engine).any())
            busy = int(started(engine).argmax())
            os.kill(engine.workers[busy].pid, signal.SIGKILL)
            engine.resume.options(replica=1 - busy)().result()
            with connection, connection.makefile("rb") as file:
                assert b"200" in file.readline()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_replica_whose_engine_has_died_is_reported_and_its_requests_go_to_the_other_one(backend, modules, is_stream):
    with bm.ResourcePool([2], backend=backend) as pool:
        engine = bm.WorkerGroup(pool, sys.modules["byte_engine"].ByteEngine)
        with Endpoint(engine) as endpoint:
            engine.pause.all("keep").result()
            connection = raw(endpoint, post({**BODY, "stream": is_stream}))
            until(lambda: started(engine).any())
            busy = int(started(engine).argmax())
            engine.die.options(replica=busy)().result()
            engine.resume.all().result()
            with connection, connection.makefile("rb") as file:
                assert b"200" in file.readline()
            assert get(endpoint, "/health")[0] == 200
            assert (states(endpoint)[busy], states(endpoint)[1 - busy]) == ("unusable", "ok")
            text = get(endpoint, "/metrics")[1]
            assert f'bandmaster_replica_up{{replica="{busy}"}} 0.0' in text
            assert f'bandmaster_replica_up{{replica="{1 - busy}"}} 1.0' in text
            engine.die.all().result()
            assert get(endpoint, "/health")[0] == 503
            status, found = answered(raw(endpoint, post({**BODY, "stream": is_stream})))
            assert status == 503 and "has died" in found["error"]["message"]


def test_close_ends_open_requests_and_is_not_repeated(engine, monkeypatch):
    monkeypatch.setattr("bandmaster.serve.endpoint.GRACE_S", 0)
    before = given_up(engine)
    with paused(engine):
        endpoint = Endpoint(engine, api_key=KEY)
        connection = raw(endpoint, post(BODY))
        until(lambda: "bandmaster_open_requests 1.0" in get(endpoint, "/metrics")[1])
        endpoint.close()
        endpoint.close()
        assert answered(connection)[0] == 503
        until(lambda: given_up(engine) == before + 1)
        assert "closed" in repr(endpoint)
        with pytest.raises(ConnectionRefusedError):
            raw(endpoint)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.backends("inprocess")
def test_close_ends_the_connection_of_a_client_that_takes_no_answer(backend, modules, monkeypatch, caplog, is_stream):
    class Verbose(sys.modules["byte_engine"].ByteEngine):
        async def _parts(self, prompt, sampling, number):
            for reason in (None, "stop"):
                yield rl.Answer([65], [0.0], [0], reason, "a" * 6_000_000)

    monkeypatch.setattr("bandmaster.serve.endpoint.GRACE_S", 0)
    monkeypatch.setattr("bandmaster.serve.endpoint.LAST_S", 0.2)
    with bm.ResourcePool([1], backend=backend) as pool:
        engine = bm.WorkerGroup(pool, Verbose)
        with socket.socket() as connection:
            with Endpoint(engine, api_key=KEY) as endpoint:
                connection.settimeout(5)
                connection.connect(address(endpoint))
                body = {"model": "bytes", "prompt": [65], "stream": is_stream}
                connection.sendall(post(body, path="/v1/completions"))
                assert connection.recv(1) == b"H"
            while not closed(connection):
                pass
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.backends("inprocess")
def test_close_after_ctrl_c_in_close_waits_for_open_requests(engine, monkeypatch):
    monkeypatch.setattr("bandmaster.serve.endpoint.GRACE_S", 1)
    before = given_up(engine)
    with paused(engine):
        endpoint = Endpoint(engine, api_key=KEY)
        with raw(endpoint, post(BODY)):
            until(lambda: "bandmaster_open_requests 1.0" in get(endpoint, "/metrics")[1])
            with interrupted_when(lambda frame, kind, _: kind == "call" and frame.f_code.co_name == "join"):
                endpoint.close()
            endpoint.close()
            assert "closed" in repr(endpoint) and given_up(engine) == before + 1


@pytest.mark.backends("inprocess")
def test_ctrl_c_as_an_endpoint_waits_for_its_engines_ends_it(backend):
    class Busy:
        """A group whose engines do not answer."""

        mesh = bm.Mesh(dp=1)
        complete = completion_parts = metrics = None

        async def facts(self):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.Event().wait()

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(KeyboardInterrupt):
        Endpoint(Busy(), port=port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.backends("inprocess")
def test_ctrl_c_as_an_endpoint_begins_to_listen_leaves_its_port_free(engine):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for place in (_server.__code__, threading.Event.wait.__code__):
        with (
            pytest.raises(KeyboardInterrupt) as kept,  # with its traceback, as a notebook keeps it
            pressed_when(lambda frame, kind, _, place=place: kind == "return" and frame.f_code is place),
        ):
            Endpoint(engine, port=port)
        Endpoint(engine, port=port).close()
        assert kept.value


class Agent(bm.Worker):
    """An agent whose worker has the group, and an endpoint of its own."""

    def __init__(self, rollout):
        self.endpoint = Endpoint(rollout, record=True)

    @register(Dispatch.ONE_TO_ALL)
    def talk(self):
        with openai.OpenAI(base_url=self.endpoint.url, api_key="any") as client:
            answer = client.chat.completions.create(model="bytes", messages=HELLO).choices[0].message.content
        return answer, len(self.endpoint.take())

    @register(Dispatch.ONE_TO_ALL)
    def end(self):
        self.endpoint.close()


def test_a_worker_that_was_given_the_group_can_serve_it(engine, make_group):
    agents = make_group(2, Agent, engine)
    assert agents.talk() == [("you said hello there", 1)] * 2
    agents.end()


def test_an_application_runs_under_another_server(engine):
    from starlette.testclient import TestClient

    with TestClient(app(engine, api_key=KEY)) as client:
        head = {"Authorization": f"Bearer {KEY}"}
        response = client.post("/v1/chat/completions", json=BODY, headers=head)
        assert response.json()["choices"][0]["message"]["content"] == "you said hello there"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/bytes", "/v1/chat/completions"])
def test_an_application_may_be_mounted_in_another_one(engine, path):
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.testclient import TestClient

    with TestClient(Starlette(routes=[Mount("/llm", app(engine))])) as client:
        response = client.post(f"/llm{path}", json=BODY) if "chat" in path else client.get(f"/llm{path}")
        assert response.status_code == 200
        found = response.json()
        if "chat" in path:
            assert found["choices"][0]["message"]["content"] == "you said hello there"
        else:
            (model,) = found.get("data", [found])
            assert (model["id"], model["max_model_len"]) == ("bytes", 4096)


def environment():
    """The environment of a program that imports from the folders of this process, and from this one."""
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


PROGRAM = """
import sys
import bandmaster as bm
from bandmaster.serve import Endpoint
from byte_engine import ByteEngine

if __name__ == "__main__":
    pool = bm.ResourcePool([1], backend="local")
    endpoint = Endpoint(bm.WorkerGroup(pool, ByteEngine))
    print(endpoint.url, flush=True)
"""


@pytest.mark.backends("local")
def test_a_program_that_ends_ends_its_endpoint(backend, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment(), timeout=DEADLINE_S
    )
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("http://127.0.0.1:")


RLHF = TESTS.parent / "examples" / "rlhf"


@pytest.mark.backends("local")
def test_an_episode_has_the_log_probs_of_the_model_that_a_trainer_computes(backend):
    with sent_by_value(RLHF, "toy_engine"), bm.ResourcePool([1], backend=backend) as pool:
        import models
        import torch

        engine = bm.WorkerGroup(pool, sys.modules["toy_engine"].ToyEngine, mesh=bm.Mesh(dp=1, tp=1))
        with Endpoint(engine, model="sums", record=True) as endpoint, client_of(endpoint) as client:
            messages = [{"role": "user", "content": "47+85="}]
            for seed in range(3):
                response = client.chat.completions.create(model="sums", messages=messages, seed=seed, max_tokens=6)
                messages += [response.choices[0].message, {"role": "user", "content": "1+2="}]
            (episode,) = endpoint.take()
        assert episode.n_turns == 3
        tokens = torch.from_numpy(rows([episode])["tokens"][0])[None]
        with torch.no_grad():
            logits = models.language_model(None, 0)(tokens[:, :-1]).logits[0].log_softmax(-1)
        expected = logits.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        assert np.allclose(episode.log_probs[1:][episode.mask[1:]], expected[episode.mask[1:]], atol=1e-5)


@pytest.mark.backends("local")
def test_an_agent_goes_on_after_an_answer_with_tokens_of_no_character(backend):
    with sent_by_value(RLHF, "toy_engine"), bm.ResourcePool([1], backend=backend) as pool:
        engine = bm.WorkerGroup(pool, sys.modules["toy_engine"].ToyEngine, mesh=bm.Mesh(dp=1, tp=1))
        with Endpoint(engine, model="sums", record=True) as endpoint, client_of(endpoint) as client:
            question = {"role": "user", "content": "47+85="}
            for seed in range(100):
                options = {"model": "sums", "seed": seed, "max_tokens": 6, "extra_headers": {"X-Session-ID": str(seed)}}
                said = client.chat.completions.create(messages=[question], **options).choices[0].message
                if "?" in said.content:
                    break
            client.chat.completions.create(messages=[question, said, question], **options)
            assert [episode.n_turns for episode in endpoint.take(str(seed))] == [2]


@pytest.mark.backends("local")
def test_the_example_trains_on_what_agents_said_and_their_next_words_are_of_the_new_weights(backend):
    with sent_by_value(RLHF, "openai_agents"):
        found = sys.modules["openai_agents"].train(steps=2, n_problems=2, n_samples=2)
    assert [metrics["versions"] for metrics in found] == [[0], [1]]
    assert all(0 <= metrics["reward"] <= 1 and np.isfinite(metrics["loss"]) for metrics in found)


@pytest.mark.backends("inprocess")
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "--tool-parser"),
        (["model", "--replicas", "0"], 2, "must be 1 or more, got 0"),
        (["model", "--engine", "dtype"], 2, "takes NAME=VALUE, got 'dtype'"),
        (["model", "--engine", "mesh=1"], 2, "mesh is given otherwise"),
        (["model", "--host", "0.0.0.0"], 2, "there is no api_key"),
        (["model", "--port", "65536"], 2, "must be from 0 to 65535, got 65536"),
        (["model", "--timeout", "-1"], 2, "timeout of an endpoint must be a positive number of seconds, got -1"),
    ],
    ids=["help", "replicas", "engine", "mesh", "host", "port", "timeout"],
)
def test_the_command_line(backend, arguments, status, said):
    command = [sys.executable, "-m", "bandmaster.serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == status and said in done.stdout + done.stderr


@pytest.mark.backends("inprocess")
def test_a_port_that_is_taken_is_named_before_the_engines_load_a_model(backend):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "bandmaster.serve", "nowhere", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment())
    assert done.returncode == 2 and "cannot listen on 127.0.0.1" in done.stderr


COMMAND = """
import sys
import threading
from pathlib import Path
from bandmaster import rl
from bandmaster.serve.__main__ import main
from byte_engine import ByteEngine

class Engine(ByteEngine):
    def __init__(self, model, loads):
        super().__init__()
        if loads:
            Path(model).touch()
            threading.Event().wait()

if __name__ == "__main__":
    rl.VLLM = Engine
    sys.exit(main())
"""


@pytest.mark.backends("local")
@pytest.mark.parametrize("loads", ["true", "false"], ids=["loads", "serves"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_the_command_ends_at_a_signal(backend, tmp_path, number, loads):
    program, model = tmp_path / "program.py", tmp_path / "model"
    program.write_text(COMMAND)
    command = [sys.executable, str(program), str(model), "--port", "0", "--engine", f"loads={loads}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            if loads == "true":
                until(model.exists)
            else:
                assert "is served at http://127.0.0.1:" in process.stdout.readline()
            process.send_signal(number)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"api_key": ""}, "api_key of an endpoint is empty"),
        ({"api_key": f"{KEY}\n"}, r"api_key of an endpoint has blanks or line ends around it.*key\.strip\(\)"),
        ({"api_key": "a\0b"}, "or control characters"),
        ({"model": 5}, "model of an endpoint must be a text that is not empty, got 5"),
        ({"max_open": 0}, "max_open of an endpoint must be a whole number of 1 or more, got 0"),
        ({"timeout": -1}, "timeout of an endpoint must be a positive number of seconds, got -1"),
        ({"defaults": 3}, r"must be a rl\.Sampling, got 3"),
        ({"on_turn": 3}, "on_turn of an endpoint must be a function"),
    ],
    ids=str,
)
def test_options_are_checked_where_they_are_made(options, said):
    with pytest.raises(bm.UsageError, match=said):
        Options(**options)
    assert KEY not in repr(Options(api_key=KEY))


def test_a_port_that_is_taken_and_a_group_of_no_engines_are_errors(engine, make_group):
    with Endpoint(engine) as endpoint, pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:"):
        Endpoint(engine, port=address(endpoint)[1])
    with pytest.raises(bm.UsageError, match=r"needs a group of rl\.Engine.*no method 'complete'"):
        Endpoint(make_group(1, bm.Worker))


def test_many_agents_at_a_time(endpoint, engine):
    async def agent(client, number):
        messages = [{"role": "user", "content": f"agent {number}"}]
        for turn in range(3):
            response = await client.chat.completions.create(
                model="bytes", messages=messages, extra_headers={"X-Session-ID": f"agent {number}"}
            )
            content = response.choices[0].message.content
            assert content == f"you said agent {number}" if turn == 0 else f"you said {number}.{turn - 1}"
            messages += [response.choices[0].message, {"role": "user", "content": f"{number}.{turn}"}]

    async def main():
        async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=KEY, max_retries=0) as client:
            await asyncio.gather(*[agent(client, number) for number in range(50)])

    asyncio.run(main())
    episodes = endpoint.take()
    assert len(episodes) == 50 and {episode.n_turns for episode in episodes} == {3}
