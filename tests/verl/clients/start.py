"""Runs a client's PPO trainer with a tiny model: its own configuration, of which only what is there is changed.

Not to be called by hand: `run.py` does, in an environment in which `verl` is the client's.
"""

import importlib
import json
import os
import sys
from pathlib import Path

N_WORKERS = 2


def wanted(model, folder, algorithm):
    """The settings, by key; those that the client's configuration does not have are left out."""
    model, rows = str(model), str(folder / "sums.parquet")
    found = {
        "data.train_files": rows,
        "data.val_files": rows,
        "data.train_batch_size": 4,
        "data.val_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "data.max_start_length": 16,
        "data.max_obs_length": 8,
        "data.shuffle": False,
        "data.shuffle_train_dataloader": False,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "algorithm.adv_estimator": algorithm,
        "max_turns": 1,
        "do_search": False,
        "env.env_name": None,
        "trainer.logger": ["console"],
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": N_WORKERS,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": 3,
        "trainer.val_before_train": False,
        "+trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.device": "cuda",
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.default_hdfs_dir": None,
    }
    for role in ("actor_rollout_ref", "critic", "reward_model"):
        found[f"{role}.model.path"] = model
        found[f"{role}.model.use_remove_padding"] = False
        found[f"{role}.model.enable_gradient_checkpointing"] = False
        found[f"{role}.model.use_fused_kernels"] = False
    for part, sizes in (
        ("actor", ("ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")),
        ("ref", ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu")),
        ("rollout", ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "micro_batch_size")),
    ):
        for size in sizes:
            found[f"actor_rollout_ref.{part}.{size}"] = 2 if size.endswith("per_gpu") else 4
        found[f"actor_rollout_ref.{part}.use_torch_compile"] = False
        found[f"actor_rollout_ref.{part}.strategy"] = "fsdp"
    found |= {
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.use_kl_loss": algorithm == "grpo",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.mode": "sync",
        "actor_rollout_ref.rollout.n": 2 if algorithm == "grpo" else 1,
        "actor_rollout_ref.rollout.n_agent": 1,
        "actor_rollout_ref.rollout.top_k": 0,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "critic.strategy": "fsdp",
        "critic.ppo_mini_batch_size": 4,
        "critic.ppo_micro_batch_size": 4,
        "critic.ppo_micro_batch_size_per_gpu": 2,
        "critic.forward_micro_batch_size": 4,
        "critic.forward_micro_batch_size_per_gpu": 2,
        "critic.optim.lr": 1e-3,
    }
    return found


def adjusted(config, settings, given):
    """The client's configuration with the settings that it has, and with all that were given on the command line."""
    from omegaconf import OmegaConf

    missing = object()
    for key, value in settings.items():
        parent, _, name = key.removeprefix("+").rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        if node is not None and name.endswith("micro_batch_size") and f"{name}_per_gpu" in node:
            continue  # the client refuses to have both
        has_it = node is not None and (OmegaConf.is_missing(node, name) or node.get(name, missing) is not missing)
        if node is not None and (has_it or key.startswith("+")):
            OmegaConf.update(config, key.removeprefix("+"), value, force_add=True)
    for setting in given:
        key, _, value = setting.partition("=")
        OmegaConf.update(config, key.lstrip("+"), OmegaConf.create(f"v: {value}").v, force_add=True)
    return config


def filled(value, client):
    """A value of the description with the folders and the algorithm of this run in their places."""
    if not isinstance(value, str):
        return value
    folder = Path(client["work"])
    places = {"model": folder.parent / "model", "rows": folder / "sums.parquet", "work": folder}
    for name, place in {**places, "checkout": client["checkout"], "algorithm": client["algorithm"]}.items():
        value = value.replace("{" + name + "}", str(place))
    return value


def as_argument(value):
    return value if isinstance(value, str) else json.dumps(value)


def main(description):
    client = json.loads(Path(description).read_text())
    settings = {key: filled(value, client) for key, value in client.get("settings", {}).items()}
    module = importlib.import_module(client["module"])
    import verl.single_controller.ray as controller

    with open(os.environ["CLIENT_METRICS"], "a") as file:
        file.write(json.dumps({"controller": controller.__name__, "file": controller.__file__}) + "\n")
    if client["call"] == "arguments":
        settings |= dict(setting.split("=", 1) for setting in client["given"])
        sys.argv = [module.__file__, *(f"{key}={as_argument(value)}" for key, value in settings.items())]
        module.main()
    else:
        config = composed(client, module, settings)
        module.main(config)


def composed(client, module, settings):
    """The client's configuration, with the settings for all clients, its own and those of the command line."""
    import hydra

    configs = Path(module.__file__).parent / "config"
    with hydra.initialize_config_dir(str(configs.resolve()), version_base=None):
        config = hydra.compose(client["config"])
    folder = Path(client["work"])
    common = wanted(folder.parent / "model", folder, client["algorithm"])
    own = [f"{key}={as_argument(value)}" for key, value in settings.items()]
    return adjusted(config, common, [*own, *client["given"]])


if __name__ == "__main__":
    main(*sys.argv[1:])
