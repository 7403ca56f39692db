"""The picture of a run: a few steps of a loop like that of GRPO, with sleeping in place of models.

``python examples/timeline.py run.html`` writes a page that can be zoomed; ``run.svg`` or ``run.png`` need matplotlib.
One of the trainer's ranks is slower than the others, and one answer of each step is long: the sentence above the
picture says so.
"""

import argparse
import asyncio
import random
import time

import numpy as np

import bandmaster as bm
from bandmaster import Dispatch, register


class Rollout(bm.Worker):
    @register(Dispatch.REQUEST, concurrency=4)
    async def answer(self, n_tokens):
        await asyncio.sleep(n_tokens / 2000)
        return n_tokens

    @register(Dispatch.ONE_TO_ALL)
    def load(self, version):
        time.sleep(0.015)
        bm.report(self, version=version)


class Trainer(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def log_probs(self, rows):
        time.sleep(0.06 if self.rank == 3 else 0.035)
        return {"log_probs": -rows["tokens"].sum(axis=1)}

    @register(Dispatch.DP_PROTO)
    def update(self, rows):
        time.sleep(0.08)
        return rows["log_probs"]


def main(path):
    random.seed(0)
    with bm.ResourcePool([2]) as servers, bm.ResourcePool([4]) as pool:
        rollout, trainer = bm.WorkerGroup(servers, Rollout), bm.WorkerGroup(pool, Trainer)
        rollout.load(0)
        trainer.update(trainer.log_probs({"tokens": np.ones((4, 2000))}))
        rollout.answer.map([1] * 8).result()
        with bm.trace() as trace:
            for step in range(1, 4):
                lengths = [random.randint(60, 140) for _ in range(22)] + [500]
                rollout.answer.map(lengths, in_flight=24).result()
                rows = {"tokens": np.ones((64, 2000))}
                trainer.update(trainer.log_probs(rows))
                rollout.load(step)
    print(trace)
    trace.timeline().save(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", default="run.html", help="the file to write: .html, .svg or .png")
    main(parser.parse_args().path)
