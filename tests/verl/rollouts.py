"""verl's own trainers with `bandmaster.compat.verl_rollout`, on CPUs: three steps of GRPO, in which a replica dies.

    rollouts.py [v0] [v1] [v1-on-verl] [v0-balancer]

This runs verl's trainers before V1 and of V1, on bandmaster's single controller and on verl's own, and once with
verl's own client and load balancer in place of our agent loops. In each run one of two replicas dies in the middle of
an answer. The run has to end well, and the probabilities of all tokens have to be those that the trainer computes.
Prints a line for each run.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpu_environment import environment

HERE = Path(__file__).parent
N_STEPS = 3
LARGEST_DIFFERENCE = 0.01  # of probabilities: another version of the weights differs by more
RUNS = {  # whether it is V1, the single controller, whether agent loops are ours
    "v0": (False, "bandmaster", True),
    "v1": (True, "bandmaster", True),
    "v1-on-verl": (True, "verl", True),
    "v0-balancer": (False, "bandmaster", False),
}
PLUGIN = "bandmaster.compat.verl_rollout"


def main(*chosen):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, HERE / "clients" / "tiny.py", folder, folder, "{}"], check=True)
        failed = [name for name in chosen or RUNS if not passes(name, Path(folder), *RUNS[name])]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def passes(name, folder, is_v1, on, has_our_loops):
    """Run a trainer. Prints a line about it, and all that it printed if it fails."""
    settings = wanted(folder, folder / f"{name}-died")
    settings |= {"trainer.use_v1": is_v1, "trainer.default_local_dir": folder / name}
    if has_our_loops:
        settings["+actor_rollout_ref.rollout.agent.agent_loop_manager_class"] = f"{PLUGIN}.AgentLoops"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ray") as ray_folder:
        variables = environment(
            on,
            "cpu_trainer",
            VERL_ENGINE_DEVICE="cuda",
            RAY_DEDUP_LOGS="0",
            RAY_TMPDIR=ray_folder,
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
        )
        command = [sys.executable, HERE / "trainer.py", *[f"{key}={value}" for key, value in settings.items()]]
        run = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=600)
    said = run.stdout + run.stderr
    steps = list(dict.fromkeys(re.findall(r"\bstep:(\d+) - ", said)))
    differences = [float(one) for one in re.findall(r"training/rollout_probs_diff_max:([0-9.e+-]+)", said)]
    checks = {
        f"exit {run.returncode}": run.returncode == 0,
        f"steps {', '.join(steps)}": steps == [str(n) for n in range(1, N_STEPS + 1)],
        f"largest difference of a probability {max(differences, default=1):.1g}": max(differences, default=1)
        < LARGEST_DIFFERENCE,
        "a replica was replaced": (folder / f"{name}-died").exists() and "was replaced in" in said,
    }
    wrong = [what for what, is_so in checks.items() if not is_so]
    print(f"{name:12} {'failed' if wrong else 'passed'}: {'; '.join(checks)} ({time.monotonic() - begin:.0f} s)")
    if wrong:
        print(said, f"wrong: {', '.join(wrong)}", sep="\n", flush=True)
    return not wrong


def wanted(folder, dies):
    """verl's settings, by key."""
    model, rows = folder / "model", folder / "sums.parquet"
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": rows,
        "data.val_files": rows,
        "data.train_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "reward.num_workers": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.rollout.name": "bandmaster",
        "+actor_rollout_ref.rollout.custom.engine": "hf_engine.HuggingFaceEngine",
        "+actor_rollout_ref.rollout.engine_kwargs.bandmaster.model": model,
        "+actor_rollout_ref.rollout.engine_kwargs.bandmaster.dies": dies,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 2,
        "trainer.nnodes": 1,
        "trainer.total_training_steps": N_STEPS,
        "trainer.total_epochs": 1,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
    }
    for role in ("actor_rollout_ref", "critic"):
        settings[f"{role}.model.path"] = model
        settings[f"{role}.model.external_lib"] = PLUGIN
        settings[f"+{role}.model.override_config.attn_implementation"] = "sdpa"
    settings["actor_rollout_ref.model.use_remove_padding"] = False
    settings["actor_rollout_ref.model.enable_gradient_checkpointing"] = False
    for part in ("actor", "ref"):
        settings[f"actor_rollout_ref.{part}.strategy"] = "fsdp2"
        settings[f"actor_rollout_ref.{part}.fsdp_config.strategy"] = "fsdp2"
        settings[f"actor_rollout_ref.{part}.fsdp_config.use_torch_compile"] = False
        settings[f"actor_rollout_ref.{part}.fsdp_config.dtype"] = "float32"
        settings[f"actor_rollout_ref.{part}.use_torch_compile"] = False
    return settings


if __name__ == "__main__":
    main(*sys.argv[1:])
