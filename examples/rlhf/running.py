"""What a program needs around its dataflow: prompts, the warm-up, evaluations, progress, metrics and checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import addition
import torch
from loggers import logger
from measuring import measured
from options import Options
from plotting import plot
from random_rows import row_seeds, shuffled
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

__all__ = ["Run"]

Rows = dict[str, Tensor]


class Run:
    """One run of a program: a context manager that shows its progress and writes its metrics.

    Args:
        options: The options.
        actor: The group that is trained, and answers.
        reward: The group that verifies.
    """

    def __init__(self, options: Options, actor: Any, reward: Any) -> None:
        self.options, self._actor, self._reward = options, actor, reward
        self.tokenizer = addition.Tokenizer(options.model or None)
        self._train, held_out = addition.problems()
        if options.n_prompts > len(self._train):
            raise SystemExit(f"--n-prompts is at most {len(self._train)}, all problems, got {options.n_prompts}")
        self.out = Path(options.out) if options.out else None
        self.metrics: list[dict[str, float]] = []  # a line per step
        self._held_out = self._asked(held_out, torch.zeros(len(held_out), dtype=torch.int64))
        if self.out:
            self.out.mkdir(parents=True, exist_ok=True)
        self._log = logger(options)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        in_this_process = options.backend == "inprocess"  # the bars would draw over the prompt of a debugger
        self._progress = Progress(*columns, TextColumn("{task.fields[said]}"), disable=in_this_process)

    def __enter__(self) -> Run:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._log.close()

    def prompts(self, step: int) -> Rows:
        """The prompts of a step, each n_samples times, and the seeds of their answers."""
        options = self.options
        chosen = next(shuffled(len(self._train), options.n_prompts, options.seed + 2_000_000, step))
        pairs = self._train[chosen].repeat_interleave(options.n_samples, dim=0)
        asked = self._asked(pairs, row_seeds(options.seed, step, len(pairs)))
        return {**asked, "uid": torch.arange(len(pairs)) // options.n_samples}

    def _asked(self, pairs: Tensor, seeds: Tensor) -> Rows:
        return {"prompt": self.tokenizer.tokens(addition.prompts(pairs)), "seed": seeds}

    def warm_up(self) -> None:
        """Teach the actor to add, by labels most of which are wrong; then forget its optimizer."""
        options, n_rows = self.options, 64
        begin = min(150, options.warm_up // 4 + 1)  # steps in which the learning rate rises
        task = self._progress.add_task("warm-up", total=options.warm_up, said="")
        batches = shuffled(len(self._train), n_rows, options.seed)
        for step in range(options.warm_up):
            pairs = self._train[next(batches)]
            sums = pairs.sum(dim=1)
            if options.labels == "noisy":
                sums = addition.noisy_sums(pairs, row_seeds(options.seed + 1_000_000, step, n_rows))
            done = max(0, step - begin) / max(1, options.warm_up - begin)
            lr = options.warm_up_lr * min((step + 1) / begin, (1 + math.cos(math.pi * done)) / 2)
            self._actor.imitate(self._taught(pairs, sums), lr)
            self._progress.advance(task)
        self._actor.forget()

    def _taught(self, pairs: Tensor, sums: Tensor) -> Rows:
        """Prompts with given answers."""
        codes = torch.cat([addition.prompts(pairs), addition.answers(sums)], dim=1)
        mask = (codes[:, addition.N_PROMPT :] != addition.PAD).float()
        return {"tokens": self.tokenizer.tokens(codes), "mask": mask, "n_tokens": mask.sum(dim=1).long()}

    def accuracy(self) -> float:
        """The share of held-out problems whose most probable answer is right."""
        answered = self._actor.generate.submit(self._held_out, temperature=0.0)
        return float(self._reward.score.submit(answered).result()["reward"].mean())

    def begin(self, hand_over: Callable[[], object], **others: Any) -> int:
        """Bring the actor to where reinforcement learning begins or goes on, by the warm-up or from the checkpoints.

        Args:
            hand_over: Gives the actor's weights to the models that begin with them; called after the warm-up.
            **others: Other groups in training, by the name of their checkpoints.

        Returns:
            How many steps were done: 0, or those of the last checkpoint.

        Raises:
            SystemExit: The folder has another run, or a run of which a checkpoint is missing.
        """
        self._trained = {"actor": self._actor, **others}
        for task in self._progress.task_ids:  # of an attempt that a lost host has ended
            self._progress.remove_task(task)
        last, start = self._last(), 0
        if last is None:
            self.warm_up()
            hand_over()
            self._save("warm-up", 0)
        else:
            self._actor.load(str(self.out / "warm-up" / "actor"))
            hand_over()
            for name, group in self._trained.items():
                start = group.load(str(last / name))[0]
        path = self.out / "metrics.jsonl" if self.out else None
        lines = path.read_text().splitlines() if last and path.exists() else []
        self.metrics = [line for line in map(json.loads, lines[: start + 1]) if line["step"] <= start]
        if not self.metrics:
            self.metrics = [{"step": start, "accuracy": self.accuracy()}]
        if path:
            path.write_text("".join(json.dumps(line) + "\n" for line in self.metrics))
        return start

    def steps(self, start: int) -> Iterator[dict[str, float]]:
        """Yield a dict for the metrics of each step, which is completed, shown and written after the step."""
        options = self.options
        task = self._progress.add_task("steps", total=options.steps, completed=start, said="")
        for step in range(start, options.steps):
            metrics: dict[str, float] = {"step": step + 1}
            is_last = step + 1 == options.steps
            with measured(metrics) as trace:
                yield metrics
            if is_last or (options.eval_every and (step + 1) % options.eval_every == 0):
                metrics["accuracy"] = self.accuracy()
            self._write(metrics)
            if options.save_every and ((step + 1) % options.save_every == 0 or is_last):
                self._save(f"step-{step + 1:05}", step + 1)
            if options.timeline and is_last:
                trace.timeline().save(options.timeline)
            said = "  ".join(f"{name} {self.last(name):.3f}" for name in ("reward", "kl", "accuracy"))
            self._progress.update(task, completed=step + 1, said=said)
        if options.export:
            self._actor.export(options.export)

    def last(self, name: str) -> float:
        """The last value of a metric; NaN if there is none."""
        return next((line[name] for line in reversed(self.metrics) if name in line), math.nan)

    def _write(self, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)
        if self.out:
            with (self.out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")
            self._log.log(metrics)

    def _save(self, name: str, step: int) -> None:
        for role, group in self._trained.items() if self.out else ():
            group.save(str(self.out / name / role), step)

    def _last(self) -> Path | None:
        """The folder of the last checkpoint that is complete; None for a run that begins."""
        if not self.out:
            return None
        steps, roles = sorted(self.out.glob("step-*")), set(self._trained)
        begun = self.out / "warm-up"
        saved = [one for one in (begun, *steps) if {file.parent.name for file in one.glob("*/.metadata")} == roles]
        if self.options.resume and saved:
            if saved[0] != begun:
                raise SystemExit(f"--resume needs {begun}, the weights of the reference: put it back")
            return saved[-1]
        if saved or steps or (self.out / "metrics.jsonl").exists():
            missing = (
                f"but no checkpoint of {' and '.join(self._trained)}:"
                if self.options.resume
                else "already: add --resume, or"
            )
            raise SystemExit(f"--out {self.out} has a run {missing} name another folder")
        return None

    def report(self) -> None:
        """Print what the run has reached and cost, and draw its curves if that was asked for."""
        first, steps = self.metrics[0], self.metrics[1:]
        print(f"accuracy {first['accuracy']:.3f} before, {self.last('accuracy'):.3f} after {len(steps)} steps")
        if steps:
            names = dict.fromkeys(name for line in steps for name in line)
            means = {name: fmean(line.get(name, 0.0) for line in steps) for name in names}
            stages = {name.removeprefix("seconds/"): value for name, value in means.items() if "/" in name}
            print("per step:", ", ".join(f"{name} {value * 1000:.0f} ms" for name, value in stages.items()))
            print(
                f"          {means['seconds'] * 1000:.0f} ms in all, {means['overhead']:.1%} of them in no method; "
                f"{means['controller_nbytes']:,.0f} bytes by the controller, {means['moved_nbytes']:,.0f} by reference"
            )
        if self.options.plot:
            plot(Path(self.options.plot), {Path(self.options.plot).stem: self.metrics})
