"""An inference engine of transformers behind the names of vLLM that trainers use inside of their workers.

It has no more than a run of a few steps needs: prompts are token ids, a rank has the whole model, and weights are
loaded from the trainer's. A run asks for it with ``CLIENT_STUBS=vllm``, if vLLM is not installed.
"""

import functools
import importlib
import types

VERSION = "0.8.5"  # the one whose names these are


class SamplingParams:
    """The parameters of sampling; those that have no meaning here are kept and not used."""

    def __init__(self, **given):
        known = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 16, "min_tokens": 0}
        known |= {"logprobs": None, "prompt_logprobs": None, "ignore_eos": False, "stop": None, "stop_token_ids": None}
        known |= {"seed": None, "detokenize": True, "skip_special_tokens": True, "logit_bias": None}
        known |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "best_of": None}
        known |= {"include_stop_str_in_output": False, "spaces_between_special_tokens": True, "allowed_token_ids": None}
        vars(self).update({**known, **given})


class RequestOutput:
    """The completions of one prompt."""

    def __init__(self, prompt_token_ids, outputs):
        self.prompt_token_ids, self.outputs, self.finished = prompt_token_ids, outputs, True


class LLM:
    """An engine of one process."""

    def __init__(self, model, **ignored):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        state = torch.get_rng_state()
        config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        torch.set_rng_state(state)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model.load_weights = self._load
        runner = types.SimpleNamespace(model=self.model)
        worker = types.SimpleNamespace(model_runner=runner)
        executor = types.SimpleNamespace(driver_worker=types.SimpleNamespace(worker=worker, model_runner=runner))
        self.llm_engine = types.SimpleNamespace(model_executor=executor, list_loras=list)

    def _load(self, weights):
        import torch

        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)

    def get_tokenizer(self):
        return self.tokenizer

    def sleep(self, level=1):
        pass

    def wake_up(self, tags=None):
        pass

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts=None, sampling_params=None, prompt_token_ids=None, use_tqdm=False, lora_request=None):
        if prompts is not None:
            prompt_token_ids = [self._ids(prompt) for prompt in prompts]
        return [
            RequestOutput(
                ids, [self._complete(list(ids), index, sampling_params) for index in range(sampling_params.n)]
            )
            for ids in prompt_token_ids
        ]

    def _ids(self, prompt):
        return self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt["prompt_token_ids"]

    def _complete(self, ids, index, params):
        import torch

        n_prompt, reason, noted = len(ids), "length", []
        while len(ids) - n_prompt < params.max_tokens:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1]
            odds = torch.softmax(logits / (params.temperature or 1.0), -1)
            token = int(torch.multinomial(odds, 1) if params.temperature else odds.argmax())
            noted.append({token: types.SimpleNamespace(logprob=float(logits.log_softmax(-1)[token]))})
            ids.append(token)
            if token == self.tokenizer.eos_token_id and not params.ignore_eos:
                reason = "stop"
                break
        answer = ids[n_prompt:]
        return types.SimpleNamespace(
            index=index,
            token_ids=answer,
            text=self.tokenizer.decode(answer) if params.detokenize else "",
            logprobs=noted if params.logprobs is not None else None,
            cumulative_logprob=sum(next(iter(note.values())).logprob for note in noted),
            finish_reason=reason,
            stop_reason=None,
        )


@functools.cache
def _group_of_one():
    """A process group of this rank alone, which the other ranks need not know of."""
    distributed = importlib.import_module("torch.distributed")
    return distributed.new_group([distributed.get_rank()], use_local_synchronization=True)


class _OneRank:
    """The state of a group of one rank."""

    world_size, rank_in_group = 1, 0

    @property
    def device_group(self):
        return _group_of_one()

    cpu_group = device_group


NAMES = {
    "vllm": {"LLM": LLM, "SamplingParams": SamplingParams, "RequestOutput": RequestOutput},
    "vllm.sampling_params": {"SamplingParams": SamplingParams},
    "vllm.outputs": {"RequestOutput": RequestOutput},
    "vllm.distributed.parallel_state": {
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_group": _OneRank,
        "get_tp_group": _OneRank,
    },
}
