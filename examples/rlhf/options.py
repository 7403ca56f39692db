"""The options of the programs, and the groups of workers that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import bandmaster as bm
from bandmaster.testing import finite

__all__ = ["Options", "Places", "of_command_line", "option", "placed"]

PICTURES = {"timeline": (".html", ".svg", ".png"), "plot": (".svg", ".png", ".pdf", ".jpg", ".jpeg", ".webp", ".eps")}
PLACEMENTS = ("colocated", "split")


def option(default: Any, meaning: str, least: int | None = None, choices: Sequence[str] | None = None) -> Any:
    """A field that is an option of the command line: ``n_prompts`` is ``--n-prompts``."""
    return field(default=default, metadata={"help": meaning, "least": least, "choices": choices})


@dataclass
class Places:
    """Where the groups of a program run."""

    backend: str = option("local", "where workers run: local, ray or inprocess")
    nodes: int = option(1, "hosts of a Ray cluster that the ranks of each model are spread over", least=1)
    gpus: bool = option(False, "a GPU for each process")
    folder: str = option("", "folder for a model that is written first; all hosts reach it; by default a temporary one")
    timeline: str = option("", "file for the picture of the last step, such as last.html")
    plot: str = option("", "file to draw the curves to, such as curves.svg")

    def slots(self, n_slots: int) -> list[int]:
        """So many slots, spread over the hosts."""
        n_nodes = min(self.nodes, n_slots)
        return [n_slots // n_nodes + (node < n_slots % n_nodes) for node in range(n_nodes)]

    def pool(self, n_slots: int) -> bm.ResourcePool:
        """A pool of so many slots."""
        return bm.ResourcePool(self.slots(n_slots), backend=self.backend, use_gpu=self.gpus)

    def check(self) -> None:
        """Raise SystemExit if a number is too small, a picture has no known format, or options do not fit together."""
        for known in fields(self):
            least, value = known.metadata["least"], getattr(self, known.name)
            if least is not None and value < least:
                raise SystemExit(f"--{known.name.replace('_', '-')} must be at least {least}, got {value}")
        for name, suffixes in PICTURES.items():
            file = getattr(self, name)
            if file and Path(file).suffix.lower() not in suffixes:
                raise SystemExit(f"--{name} takes a file that ends with {', '.join(suffixes)}; got {file!r}")


@dataclass
class Options(Places):
    """What programs with layouts have in common."""

    placement: str = option("colocated", "models in the same processes, or each in its own", choices=PLACEMENTS)
    train: str = option("dp=2", "training layout of the models: sizes of dp and tp, such as dp=2,tp=2")
    generate: str = option("", "generation layout on the same ranks, such as tp=1; by default that of training")
    model: str = option("", "causal language model by hub name or local path; by default a tiny Llama, untrained")
    seed: int = option(0, "seed of weights, problems and answers")
    steps: int = option(25, "steps of reinforcement learning", least=0)
    n_prompts: int = option(64, "prompts per step", least=1)
    n_samples: int = option(8, "answers to each prompt, which are compared", least=2)
    n_batches: int = option(4, "updates per step, at most", least=1)
    lr: float = option(3e-4, "learning rate of the policy; 0 leaves it as it is")
    clip: float = option(0.2, "how far a token's probability may move in a step, relative to that when it was sampled")
    kl_weight: float = option(0.01, "weight of the divergence from the reference")
    warm_up: int = option(700, "steps of supervised learning before", least=0)
    warm_up_lr: float = option(4e-3, "highest learning rate of these")
    labels: str = option("noisy", "labels of these", choices=("noisy", "right"))
    eval_every: int = option(1, "steps between two evaluations on held-out problems; 0 for the last alone", least=0)
    save_every: int = option(10, "steps between two checkpoints; 0 for none", least=0)
    out: str = option("", "folder of metrics and checkpoints; by default none are written")
    log: str = option("tensorboard", "what else gets the metrics: tensorboard, wandb, trackio or none; needs --out")
    export: str = option("", "folder to write the trained model to at the end, as transformers and vLLM load it")
    resume: bool = option(False, "go on from the last checkpoint in that folder")
    check_finite: bool = option(False, "fail at the first method that gets or returns a number that is not finite")

    def mesh(self) -> bm.Mesh:
        """The training layout, refined by the generation layout."""
        train = _sizes("train", self.train, ("dp", "tp"))
        generate = _sizes("generate", self.generate or f"tp={train['tp']}", ("tp",))
        return bm.Mesh(**train).refine(gen_tp=generate["tp"])

    def check(self) -> None:
        """Raise SystemExit as `Places.check`, and if there is no folder to resume from."""
        super().check()
        if self.resume and not self.out:
            raise SystemExit("--resume needs --out, the folder of the checkpoints")


Given = TypeVar("Given", bound=Places)


def of_command_line(defaults: Given, description: str | None) -> Given:
    """The options that the command line gives. Raises SystemExit if one has no meaning."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for known in fields(defaults):
        default, name = getattr(defaults, known.name), "--" + known.name.replace("_", "-")
        kind: dict[str, Any] = {"type": type(default), "choices": known.metadata["choices"]}
        kind = {"action": "store_true"} if isinstance(default, bool) else kind
        parser.add_argument(name, default=default, help=known.metadata["help"], **kind)
    options = type(defaults)(**vars(parser.parse_args()))
    options.check()
    return options


def _sizes(name: str, text: str, axes: Sequence[str]) -> dict[str, int]:
    """The sizes of axes in a text such as "dp=2,tp=2"; 1 for those that it does not name."""
    sizes = dict.fromkeys(axes, 1)
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in sizes or not size.isdigit():
            example = ",".join(f"{axis}=2" for axis in axes)
            raise SystemExit(f"--{name} takes the sizes of {' and '.join(axes)}, such as {example}; got {text!r}")
        sizes[axis] = int(size)
    return sizes


@contextmanager
def placed(options: Options, **roles: tuple[Any, ...]) -> Iterator[SimpleNamespace]:
    """A group for each role, all on the same mesh: in the same processes, or each in processes of its own.

    Args:
        options: Where and how.
        **roles: By role: worker class, and the arguments of its constructor.

    Yields:
        The group of each role, as an attribute with its name; ``processes`` are the groups that can be restarted.
    """
    mesh = options.mesh()
    if options.check_finite:
        roles = {role: (finite(cls), *arguments) for role, (cls, *arguments) in roles.items()}
    is_split = options.placement == "split"
    with ExitStack() as stack:
        pools = [stack.enter_context(options.pool(mesh.size)) for _ in (roles if is_split else ["all"])]
        if is_split:
            with ThreadPoolExecutor() as executor:  # all groups start at the same time
                start = partial(bm.WorkerGroup, mesh=mesh)
                found = list(executor.map(lambda pool, said: start(pool, *said), pools, roles.values()))
        else:
            group = bm.colocate(pools[0], meshes=dict.fromkeys(roles, mesh), **roles)
            found = [getattr(group, role) for role in roles]
        processes = found if is_split else [group]
        yield SimpleNamespace(**dict(zip(roles, found, strict=True)), processes=processes)
