"""An engine of transformers on the CPU, as verl's trainers can use it where no vLLM is installed."""

import asyncio
import os
import signal
from pathlib import Path

import torch

from bandmaster import rl


class HuggingFaceEngine(rl.Engine):
    """Makes one token of each open request in turn.

    Args:
        model: Path of the model.
        max_model_len: Most tokens of a prompt with its answer.
        dies: A file. If it is not there, replica 1 makes it and dies in the middle of its tenth answer.
    """

    def __init__(self, model, max_model_len=256, dies=None):
        from transformers import AutoModelForCausalLM

        torch.manual_seed(self.rank)
        self.model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
        self.vocab_size, self.max_model_len = self.model.config.vocab_size, max_model_len
        self._end = self.model.config.eos_token_id
        self._dies, self._n_answers = dies, 0
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._is_asleep = False
        self._n_aborts = 0

    async def answers(self, prompt, sampling):
        found = []
        for _ in range(sampling.n):
            parts = [part async for part in self._parts(prompt, sampling)]
            found.append(rl.Answer.joined(parts))
        return found

    async def increments(self, prompt, sampling):
        async for part in self._parts(prompt, sampling):
            yield part

    async def _parts(self, prompt, sampling):
        self._n_answers += 1
        n_aborts, number = self._n_aborts, self._n_answers
        generator = None if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        for n in range(sampling.max_tokens):
            await asyncio.sleep(0)
            if not self._may_run.is_set() and n:
                yield rl.Answer([], [], [], "abort")
                return
            await self._may_run.wait()
            if n_aborts != self._n_aborts and n:
                yield rl.Answer([], [], [], "abort")
                return
            if self._dies and self.rank == 1 and number == 10 and n and not os.path.exists(self._dies):
                Path(self._dies).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt])).logits[0, -1].float()
            log_probs = logits.log_softmax(-1)
            scaled = logits / sampling.temperature if sampling.temperature else logits
            drawn = torch.multinomial(scaled.softmax(-1), 1, generator=generator)
            token = int(drawn if sampling.temperature else logits.argmax())
            prompt = [*prompt, token]
            is_last = n + 1 == sampling.max_tokens or len(prompt) >= self.max_model_len
            why = "stop" if token == self._end and not sampling.ignore_eos else "length" if is_last else None
            yield rl.Answer([token], [float(log_probs[token])], [self.version], why)
            if why:
                return

    async def pause(self, mode="abort"):
        await super().pause(mode)
        self._may_run.clear()

    async def resume(self):
        self._may_run.set()

    async def abort(self):
        self._n_aborts += 1

    async def sleep(self):
        self._is_asleep = True
        self._may_run.clear()

    async def wake(self):
        self._is_asleep = False
        self._may_run.set()

    async def reset_cache(self):
        pass

    @property
    def is_ready(self):
        return self._may_run.is_set()

    @property
    def is_asleep(self):
        return self._is_asleep

    def load_weights(self, weights):
        missing = self.model.load_state_dict(dict(weights), strict=False)
        assert not missing.missing_keys and not missing.unexpected_keys, missing
