"""The environment of programs of verl's on CPUs."""

import os
from pathlib import Path

HERE = Path(__file__).parent


def environment(on, plugin="cpu_platform", **more):
    """The variables of a program whose single controller is verl's own or bandmaster's, with a plug-in of verl's."""
    return {
        **os.environ,
        "VERL_ON": on,
        "N_FAKE_GPUS": "8",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)]),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": plugin,
        "RAY_prestart_worker_first_driver": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        **more,
    }
