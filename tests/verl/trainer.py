"""verl's own PPO trainer on CPUs: Ray is told of GPUs that do not exist. `rollouts.py` runs it."""

import os

import ray

if os.environ.get("VERL_ON") == "bandmaster":
    import bandmaster.compat.verl  # noqa: F401

_init = ray.init


def init(*args, **options):
    options = {**options, "num_cpus": 100, "num_gpus": int(os.environ["N_FAKE_GPUS"]), "include_dashboard": False}
    return _init(*args, **{**options, "address": "local"})


ray.init = init

if __name__ == "__main__":
    from verl.trainer.main_ppo import main

    main()
