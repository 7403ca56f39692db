"""`NamedCPUWorker`: vLLM's worker for CPUs, whose shared memory has a name of its own. Imported by vLLM alone."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from bandmaster.rl.engines.vllm_start import SHARED_MEMORY_NAME


class NamedCPUWorker(CPUWorker):  # type: ignore[misc]  # vLLM is not there when types are checked
    """A worker whose ranks talk through shared memory of a name that no other engine on the host has.

    vLLM takes the name from behind the last colon of the init method, which is the same for all engines of
    ``external_launcher``. The method itself is not used: ``torch.distributed`` is initialised before.
    """

    def init_device(self) -> None:
        """Initialise the device, with a name for the shared memory."""
        self.distributed_init_method = f"env://:{self.vllm_config.additional_config[SHARED_MEMORY_NAME]}"
        super().init_device()
