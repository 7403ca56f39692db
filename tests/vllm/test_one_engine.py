"""One replica with hooks of its own: a stop condition and an adapter; and a controller that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from small_vllm import OPTIONS

import bandmaster as bm
from bandmaster import rl
from bandmaster.rl import Answer, Sampling
from bandmaster.serve import Endpoint

PROMPT = [5, 6, 7]
CHAT_TEMPLATE = "{% for message in messages %}9{{ message.content }}={% endfor %}"
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Hooked(Sampling):
    """What the hooks of a request do."""

    until: int = -1
    adapter: str = ""


class Rollout(rl.VLLM):
    def is_stopped(self, answer, sampling):
        return isinstance(sampling, Hooked) and sampling.until in answer.tokens

    def lora_request(self, sampling):
        from vllm.lora.request import LoRARequest

        path = sampling.adapter if isinstance(sampling, Hooked) else ""
        return LoRARequest("adapter", 1, path) if path else None


@pytest.fixture(scope="module")
def engine(model_path):
    with bm.ResourcePool([1], backend="local") as pool:
        options = {**OPTIONS, "enable_lora": True, "max_lora_rank": 8, "chat_template": CHAT_TEMPLATE}
        group = bm.WorkerGroup(pool, Rollout, model_path, **options)
        group.generate({"prompt": [PROMPT]}, GREEDY)
        group.metrics.all().result()
        Endpoint(group).close()  # descriptors by which event loops wait for requests stay
        yield group


def test_a_stop_condition_ends_answers(engine, reference):
    tokens = reference.greedy(PROMPT, 12)
    sampling = Hooked(max_tokens=12, temperature=0.0, ignore_eos=True, until=tokens[4])
    end = tokens.index(tokens[4]) + 1
    (answer,) = engine.request(PROMPT, sampling).result()
    assert answer.tokens == tokens[:end] and answer.finish_reason == "stop"
    assert len(answer.log_probs) == len(answer.versions) == end
    assert Answer.joined(list(engine.tokens.stream(PROMPT, sampling))) == answer
    rows = engine.generate({"prompt": [PROMPT] * 3}, sampling)
    assert [one.tolist() for one in rows["answer"]] == [tokens[:end]] * 3
    deadline = time.monotonic() + 30
    while engine.metrics().result()["n_running"]:  # as of the last step of the engine
        assert time.monotonic() < deadline
    assert engine.request(PROMPT, GREEDY).result()[0].tokens == tokens


def test_a_chat_template_of_the_engine_is_that_of_all_requests(engine):
    messages = [{"role": "user", "content": "1+2"}]
    completion = engine.complete(rl.Prompt(messages=messages), GREEDY).result()
    assert completion.ids.tolist() == engine.complete(rl.Prompt(text="91+2="), GREEDY).result().ids.tolist()
    (answer,) = engine.request(messages, GREEDY).result()
    assert answer == completion.choices[0].answer
    assert Answer.joined(list(engine.tokens.stream(messages, GREEDY))) == answer


def test_an_adapter_changes_the_answers_of_its_requests(engine, reference, tmp_path):
    rank, width = 8, 128
    weights = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        torch.manual_seed(layer)
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, width)
        weights[f"{name}.lora_B.weight"] = torch.randn(width, rank)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (adapted,) = engine.request(
        PROMPT, Hooked(max_tokens=12, temperature=0.0, ignore_eos=True, adapter=str(tmp_path))
    ).result()
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        delta = weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
        reference.model.model.layers[layer].self_attn.o_proj.weight.data += delta
    try:
        assert adapted.tokens == reference.greedy(PROMPT, 12)
    finally:
        for layer in range(2):
            name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
            delta = weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
            reference.model.model.layers[layer].self_attn.o_proj.weight.data -= delta
    assert engine.request(PROMPT, GREEDY).result()[0].tokens == reference.greedy(PROMPT, 12)


PROGRAM = """
import sys
import time
import bandmaster as bm
from bandmaster import rl
from small_vllm import OPTIONS

if __name__ == "__main__":
    with bm.ResourcePool([1]) as pool:
        group = bm.WorkerGroup(pool, rl.VLLM, sys.argv[1], **OPTIONS)
        print("ready", flush=True)
        time.sleep(600)
"""


def test_no_process_is_left_by_a_controller_that_is_killed(model_path, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(program), model_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as controller:
        assert any("ready" in line for line in controller.stdout)
        children = psutil.Process(controller.pid).children(recursive=True)
        assert any("EngineCore" in " ".join(child.cmdline()) for child in children)
        controller.send_signal(signal.SIGKILL)
        _, left = psutil.wait_procs(children, timeout=30)
        assert not left


# --- last, as the engine dies ---


def test_an_engine_that_has_died_says_so_and_gets_no_more_requests_if_others_can(engine):
    worker = psutil.Process(engine.workers[0].pid)
    (core,) = [child for child in worker.children() if "EngineCore" in " ".join(child.cmdline())]
    asked = engine.request(PROMPT, Sampling(max_tokens=200, ignore_eos=True))
    with Endpoint(engine, model="dead") as endpoint:
        core.kill()
        with pytest.raises(bm.RemoteError, match=r"the vLLM engine of rank 0 has died.*group\.replace\(rank\)"):
            asked.result(timeout=60)
        body = json.dumps({"model": "dead", "prompt": PROMPT}).encode()
        health = endpoint.url.removesuffix("/v1") + "/health"
        for url, data, said in ((health, None, "unusable"), (f"{endpoint.url}/completions", body, "has died")):
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(request, timeout=60)
            with raised.value as response:
                assert response.code == 503 and said in response.read().decode()
    with pytest.raises(bm.RemoteError, match="the vLLM engine of rank 0 has died"):
        engine.request(PROMPT, GREEDY).result(timeout=60)
    with pytest.raises(bm.RemoteError, match="the vLLM engine of rank 0 has died"):
        engine.generate({"prompt": [PROMPT]}, GREEDY)
