"""The endpoint over vLLM: chats, streams, tool calls, schemas, cache hits over turns, and an agent framework."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest
from small_vllm import OPTIONS

import bandmaster as bm
from bandmaster import rl
from bandmaster.serve import Endpoint, rows

IDS = {"return_token_ids": True}
AGENTS = Path(os.environ.get("BANDMASTER_AGENTS", Path(__file__).parents[2] / ".agents"))  # their own environment
DEADLINE_S = 120
SHORT = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory):
    import chat_model

    return chat_model.make(tmp_path_factory.mktemp("chat_model"))


@pytest.fixture(scope="module")
def engine(chat_path):
    options = {**OPTIONS, "max_model_len": 1024, "block_size": 32}
    with bm.ResourcePool([2], backend="local") as pool:
        yield bm.WorkerGroup(pool, rl.VLLM, chat_path, mesh=bm.Mesh(dp=2), tool_parser="hermes", **options)


@pytest.fixture(scope="module")
def shared(engine):
    with (
        Endpoint(engine, model="tiny", record=True, timeout=DEADLINE_S) as endpoint,
        openai.OpenAI(
            base_url=endpoint.url, api_key="any", max_retries=0, default_headers={"Connection": "close"}
        ) as client,
    ):
        client.models.list()
        yield endpoint, client


@pytest.fixture
def endpoint(shared):
    shared[0].take()
    return shared[0]


@pytest.fixture
def client(shared):
    return shared[1]


def chat(client, messages, **options):
    return client.chat.completions.create(
        model="tiny", messages=messages, **{"temperature": 0, "max_tokens": 60, **options}
    )


def question(a=2, b=3):
    import chat_model

    return [{"role": "user", "content": chat_model.question(a, b)}]


def tools():
    import chat_model

    return [chat_model.TOOL]


def figure(engine, name):
    return sum(figures[name] for figures in engine.metrics.all().result())


def test_a_tool_call_and_the_answer_to_its_result(client, endpoint):
    messages = question()
    first = chat(client, messages, tools=tools(), max_tokens=None, extra_body=IDS)  # the rest of the context
    (call,) = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    second = chat(client, messages, tools=tools(), extra_body=IDS)
    assert second.choices[0].message.content == "it is 5" and second.choices[0].finish_reason == "stop"
    before = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert second.usage.prompt_tokens_details.known_tokens == len(before)
    (episode,) = endpoint.take()
    assert episode.n_turns == 2
    assert episode.tokens.tolist() == second.prompt_token_ids + second.choices[0].token_ids
    said = first.choices[0].token_ids + second.choices[0].token_ids
    assert episode.tokens[episode.mask].tolist() == said


def test_a_stream_has_the_same_tool_call(client):
    with client.chat.completions.stream(
        model="tiny", messages=question(4, 5), tools=tools(), temperature=0, max_tokens=60
    ) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 4, "b": 5})
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=str)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_call_that_is_required_is_made_whatever_the_model_would_say(client, choice, is_stream):
    (tool,) = tools()
    strict = {**tool, "function": {**tool["function"], "strict": True}}  # else vLLM takes any JSON as arguments
    options = {"tools": [strict], "tool_choice": choice, "temperature": 1.0, "seed": 5, "max_tokens": 200}
    messages = [{"role": "user", "content": "nothing that it has learnt"}]
    if is_stream:
        with client.chat.completions.stream(model="tiny", messages=messages, **options) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
    else:
        message = chat(client, messages, **options).choices[0].message
    call = message.tool_calls[0]
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"a", "b"} and all(isinstance(value, int) for value in arguments.values())


def test_a_response_format_constrains_the_answer(client):
    schema = {
        "type": "object",
        "properties": {"q": {"enum": ["a", "b"]}},
        "required": ["q"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = chat(client, question(), response_format=wanted, max_tokens=100).choices[0].message.content
    assert json.loads(answer)["q"] in ("a", "b")


def test_the_answer_is_that_of_a_request_with_the_same_ids(client, engine):
    response = chat(client, question(), tools=tools(), max_tokens=8, logprobs=True, top_logprobs=3, extra_body=IDS)
    (answer,) = engine.request(response.prompt_token_ids, rl.Sampling(max_tokens=8, temperature=0, logprobs=3)).result()
    assert response.choices[0].token_ids == answer.tokens
    found = response.choices[0].logprobs.content
    assert [one.logprob for one in found] == pytest.approx(answer.log_probs, abs=1e-4)
    assert [len(one.top_logprobs) for one in found] == [3] * 8
    assert "".join(one.token for one in found).startswith("<tool_call>")
    again = client.completions.create(
        model="tiny", prompt=response.prompt_token_ids, max_tokens=8, temperature=0, extra_body=IDS
    )
    assert again.choices[0].token_ids == answer.tokens


def test_vllms_own_parameters_reach_it(client):
    plain = client.completions.create(model="tiny", prompt="what is", max_tokens=8, temperature=0)
    first = plain.choices[0].text[:1]
    banned = client.completions.create(
        model="tiny", prompt="what is", max_tokens=8, temperature=0, extra_body={"allowed_token_ids": [40, 41]}
    )
    assert banned.choices[0].text[:1] != first
    with pytest.raises(openai.BadRequestError, match="vLLM refuses"):
        client.completions.create(model="tiny", prompt="a", extra_body={"allowed_token_ids": [100_000]})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, "maximum context length"),
        ({"messages": [SHORT], "reasoning_effort": "enormous"}, "not valid"),
        (
            {"messages": [SHORT], "response_format": {"type": "nonsense"}},
            "not valid|refuses",
        ),
    ],
    ids=["long", "effort", "format"],
)
def test_what_vllm_refuses_is_the_clients_error(client, changes, said):
    with pytest.raises(openai.BadRequestError, match=said) as raised:
        client.chat.completions.create(model="tiny", **changes)
    assert ("context_length" in str(raised.value.code)) == ("context length" in said)


def test_turns_of_sampled_answers_keep_their_tokens_and_hit_the_cache(client, engine, endpoint):
    """Random answers are seldom cut as the tokenizer would cut them, so that any new rendering would show."""
    n_hits, n_queries, n_known = 0, 0, 0
    for number in range(3):
        messages, before = [{"role": "user", "content": "begin " * 20}], []
        for turn in range(8):
            hits, queries = (figure(engine, f"vllm:prefix_cache_{name}") for name in ("hits", "queries"))
            response = chat(
                client,
                messages,
                temperature=2.0,
                seed=100 * number + turn,
                max_tokens=40,
                extra_headers={"X-Session-ID": f"session {number}"},
                extra_body=IDS,
            )
            assert response.prompt_token_ids[: len(before)] == before
            if turn:
                n_hits += figure(engine, "vllm:prefix_cache_hits") - hits
                n_queries += figure(engine, "vllm:prefix_cache_queries") - queries
                n_known += len(before) // 32 * 32  # of whole blocks of the cache
            before = response.prompt_token_ids + response.choices[0].token_ids
            messages += [response.choices[0].message, {"role": "user", "content": f"turn {turn}"}]
    episodes = endpoint.take()
    assert [episode.n_turns for episode in episodes] == [8, 8, 8]
    print(f"hits {n_hits} of {n_known} tokens of whole blocks that were known, of {n_queries} tokens of prompts")
    assert n_hits >= 0.95 * n_known
    import chat_model  # noqa: F401
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine.facts().result().model)
    text = tokenizer.decode(episodes[0].tokens.tolist())
    assert tokenizer.encode(text, add_special_tokens=False) != episodes[0].tokens.tolist(), "no drift was possible"
    assert rl.padded(rows(episodes)["tokens"], 1024).shape == (3, 1024)


def test_the_log_probs_of_an_episode_are_those_of_the_model(client, endpoint, chat_path):
    import torch
    from transformers import LlamaForCausalLM

    messages = question()
    for turn in range(2):
        message = chat(client, messages, temperature=1.0, seed=turn, max_tokens=20).choices[0].message
        messages += [message, {"role": "user", "content": "go on"}]
    (episode,) = endpoint.take()
    tokens = torch.tensor(episode.tokens.astype("int64"))[None]
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(chat_path)(tokens[:, :-1]).logits[0].log_softmax(-1)
    expected = logits.gather(1, tokens[0, 1:, None])[:, 0].numpy()[episode.mask[1:]]
    assert episode.log_probs[episode.mask] == pytest.approx(expected, abs=1e-4)


def test_a_client_that_hangs_up_has_its_request_aborted(engine, endpoint):
    with openai.OpenAI(base_url=endpoint.url, api_key="any") as client:
        stream = client.chat.completions.create(
            model="tiny", messages=question(), stream=True, max_tokens=900, extra_body={"ignore_eos": True}
        )
        next(stream)
        stream.close()
    deadline = time.monotonic() + DEADLINE_S
    while figure(engine, "n_running"):
        assert time.monotonic() < deadline
    assert endpoint.take() == []


def test_a_head_without_an_end_is_cut_off(endpoint):
    host, port = endpoint.url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError, match=r"reset|Broken pipe"):  # rather than a timeout
            for number in range(4096):
                connection.sendall(b"X-%d: " % number + b"a" * 8000 + b"\r\n")


def test_metrics_have_those_of_the_engines(endpoint):
    with urllib.request.urlopen(endpoint.url.replace("/v1", "/metrics"), timeout=DEADLINE_S) as response:
        text = response.read().decode()
    assert 'vllm:prefix_cache_hits{replica="0"}' in text and 'vllm:num_requests_running{replica="1"}' in text


def test_tools_without_a_parser_are_an_error_that_names_the_parsers(chat_path):
    with bm.ResourcePool([1], backend="local") as pool:
        engine = bm.WorkerGroup(pool, rl.VLLM, chat_path, **{**OPTIONS, "max_model_len": 1024})
        prompt = rl.Prompt(messages=question(), tools=tools())
        with pytest.raises(bm.RemoteError, match=r"rl\.VLLM\(\.\.\., tool_parser=\.\.\.\).*hermes"):
            engine.complete(prompt).result()
        with pytest.raises(bm.RemoteError, match="is a field of Sampling itself, or unknown"):
            engine.request([1], rl.Sampling(extra={"nonsense": 1})).result()


@pytest.mark.parametrize("option", ["tool_parser", "reasoning_parser"])
def test_a_misspelt_parser_is_an_error_before_the_model_is_loaded(chat_path, option):
    with (
        bm.ResourcePool([1], backend="local") as pool,
        pytest.raises(bm.ConstructorError, match=rf"vLLM has no {option} 'qwen3_'; it has .*qwen3"),
    ):
        bm.WorkerGroup(pool, rl.VLLM, chat_path, **{option: "qwen3_"}, **OPTIONS)


FRAMEWORK = """
import asyncio
import sys
from agents import Agent, Runner, function_tool, set_default_openai_api, set_default_openai_client, set_tracing_disabled
from agents import ModelSettings
from openai import AsyncOpenAI

set_tracing_disabled(True)
set_default_openai_api("chat_completions")


@function_tool
def add(a: int, b: int) -> int:
    "Adds two numbers."
    return a + b


async def main():
    for number, (a, b) in enumerate([(2, 3), (4, 5), (7, 1)]):
        client = AsyncOpenAI(base_url=sys.argv[1], api_key="any", default_headers={"X-Session-ID": f"agent {number}"})
        set_default_openai_client(client)
        settings = ModelSettings(temperature=0, max_tokens=60)
        agent = Agent(
            name="calculator", instructions="Use the tool.", tools=[add], model="tiny", model_settings=settings
        )
        run = Runner.run_streamed if number == 2 else Runner.run
        result = run(agent, f"what is {a}+{b}?")
        if number == 2:
            async for _ in result.stream_events():
                pass
        else:
            result = await result
        print(result.final_output, flush=True)


asyncio.run(main())
"""


@pytest.mark.skipif(not (AGENTS / "bin" / "python").exists(), reason="`make test-vllm` installs the agents")
def test_an_agent_framework_runs_unmodified_and_its_episodes_are_recorded(endpoint, tmp_path):
    program = tmp_path / "agent.py"
    program.write_text(FRAMEWORK)
    done = subprocess.run(
        [str(AGENTS / "bin" / "python"), str(program), endpoint.url], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["it is 5", "it is 9", "it is 8"]
    assert endpoint.sessions() == ["agent 0", "agent 1", "agent 2"]
    for number in range(3):
        (episode,) = endpoint.take(f"agent {number}")
        assert episode.n_turns == 2 and episode.mask.sum() > 20


def test_a_model_is_served_from_the_command_line(chat_path):
    command = [sys.executable, "-m", "bandmaster.serve", chat_path, "--port", "0", "--tool-parser", "hermes"]
    command += ["--served-model-name", "tiny", "--max-model-len", "256", "--dtype", "float32", "--api-key", "k"]
    command += ["--engine", "kv_cache_memory_bytes=67108864", "--engine", "enforce_eager=true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stdout if "is served at" in line)
            with openai.OpenAI(base_url=line.split()[4], api_key="k") as client:
                assert chat(client, question(), tools=tools()).choices[0].message.tool_calls
        finally:
            process.terminate()
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
