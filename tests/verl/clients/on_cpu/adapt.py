"""Has programs that are written for GPUs run on CPUs, and notes the metrics that a trainer logs.

"cuda" is the CPU, NCCL is Gloo, flash attention is that of torch, and sampling draws the same numbers in every run: the
n-th draw of a rank depends on its rank and n alone, so that two runs can be compared. Packages that a client imports
though a run on CPUs does not need them are stubs, if they are not installed.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import math
import os
import socket
import time
import types
from importlib.machinery import ModuleSpec

import engine  # beside this file

STUBS = {"flash_attn", "flash_attn.bert_padding", "torchvision", "liger_kernel", "deepspeed"}


def is_stub(name):
    """Whether a module is a stub if it is not installed; of a package that was asked for, all modules are."""
    asked_for = filter(None, os.environ.get("CLIENT_STUBS", "").split(","))
    return name in STUBS or any(name == stub or name.startswith(stub + ".") for stub in asked_for)


def with_engine(version):
    """`importlib.metadata.version` that knows the stub of vLLM; trainers choose between interfaces by the version."""

    @functools.wraps(version)
    def call(name):
        is_missing = name == "vllm" and is_stub(name) and importlib.util.find_spec(name).origin is None
        return engine.VERSION if is_missing else version(name)

    return call


class Adapts:
    """An import finder that calls a function of `ADAPTED` once the module of that name is imported."""

    def __init__(self):
        self.busy = set()

    def find_spec(self, name, path=None, target=None):
        if name in self.busy or (name not in ADAPTED and not is_stub(name)):
            return None
        self.busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        except (ModuleNotFoundError, ValueError):
            spec = None
        finally:
            self.busy.discard(name)
        if spec is None:
            return ModuleSpec(name, Stub(), is_package=True) if is_stub(name) else None
        if name in ADAPTED:
            executes = spec.loader.exec_module

            def exec_module(module):
                executes(module)
                ADAPTED[name](module)

            spec.loader.exec_module = exec_module
        return spec


class Stub:
    """The loader of a package that is not installed: its names are there, and calling one raises."""

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__version__ = "0.0.0"
        vars(module).update(engine.NAMES.get(module.__name__, {}))
        module.__getattr__ = functools.partial(_missing, module.__name__)


def _missing(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    if f"{module}.{name}" in engine.NAMES:
        return importlib.import_module(f"{module}.{name}")
    return type(name, (), {"__init__": functools.partialmethod(_refuse, module)})


def _refuse(self, module, *args, **kwargs):
    raise NotImplementedError(f"{module}.{type(self).__name__} needs {module}, which is not installed")


# --- torch ---


def on_cpu(device):
    """The CPU for a device that is a GPU; any other value as it is."""
    import torch

    is_cuda = (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
    return torch.device("cpu") if is_cuda else device


def _with_cpu(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    return call


def adapt_torch(torch):
    cpu = torch.device("cpu")
    cuda = torch.cuda
    for name in ("empty_cache", "synchronize", "set_device", "ipc_collect", "manual_seed", "manual_seed_all"):
        setattr(cuda, name, lambda *_, **__: None)  # one for each, as torch.compile keeps a table of functions
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.current_device = lambda: cpu
    cuda.mem_get_info = lambda *_: (1 << 33, 1 << 34)
    cuda.get_device_name = lambda *_: "CPU"
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.to, torch.nn.Module.to = _with_cpu(torch.Tensor.to), _with_cpu(torch.nn.Module.to)
    for name in ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros", "as_tensor", "load"):
        setattr(torch, name, _with_cpu(getattr(torch, name)))
    for name in ("ones_like", "zeros_like", "empty_like", "full_like"):
        setattr(torch, name, _with_cpu(getattr(torch, name)))
    torch.autocast = _autocast(torch.autocast)
    torch.amp.autocast = torch.autocast
    torch.multinomial = _repeatable(torch, torch.multinomial)
    torch.manual_seed(0)  # a sampler that shuffles rows draws its own seed from it
    entropy = torch.nn.functional.binary_cross_entropy  # under autocast a GPU has single precision where it is called
    torch.nn.functional.binary_cross_entropy = lambda input, *args, **kwargs: entropy(input.float(), *args, **kwargs)


def _autocast(real):
    class Autocast(real):
        def __init__(self, device_type, *args, **kwargs):
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return Autocast


def _repeatable(torch, multinomial):
    n_drawn = 0

    def draw(input, num_samples, replacement=False, *, generator=None, out=None):
        nonlocal n_drawn
        n_drawn += 1
        if generator is None:
            generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")) * 1_000_003 + n_drawn)
        return multinomial(input, num_samples, replacement, generator=generator)

    return draw


def adapt_distributed(distributed):
    real = distributed.init_process_group

    @functools.wraps(real)
    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return real("gloo" if backend is not None and "nccl" in str(backend) else backend, *args, **kwargs)

    distributed.init_process_group = init_process_group


def adapt_device_mesh(module):
    real = module.init_device_mesh
    module.init_device_mesh = lambda device_type, *args, **kwargs: real(
        "cpu" if device_type == "cuda" else device_type, *args, **kwargs
    )


def adapt_fsdp(module):
    module._check_module_states_for_sync_module_states = lambda states: None  # it refuses states on the CPU


def adapt_unshard(module):
    """Gathered weights are on the CPU already; to move them there would release them."""
    real = module._unshard_fsdp_state_params

    @functools.wraps(real)
    def unshard(module, state, writeback, rank0_only, offload_to_cpu, with_grads):
        return real(module, state, writeback, rank0_only, False, with_grads)

    module._unshard_fsdp_state_params = unshard


def adapt_tensordict(module):
    module.TensorDictBase.to = _with_cpu(module.TensorDictBase.to)


# --- transformers ---


def adapt_auto(module):
    base = module._BaseAutoModelClass
    for name in ("from_pretrained", "from_config"):
        setattr(base, name, classmethod(_with_torchs_attention(getattr(base, name).__func__)))


def adapt_modeling(module):
    base = module.PreTrainedModel
    for name in ("from_pretrained", "_from_config"):
        if hasattr(base, name):
            setattr(base, name, classmethod(_with_torchs_attention(getattr(base, name).__func__)))


def _with_torchs_attention(function):
    """With torch's attention in place of flash attention, and new weights, as of a critic's head, drawn from a seed."""

    @functools.wraps(function)
    def call(cls, *args, **kwargs):
        importlib.import_module("torch").manual_seed(0)
        if kwargs.get("attn_implementation") == "flash_attention_2":
            kwargs["attn_implementation"] = "sdpa"
        for config in (*args, kwargs.get("config")):
            if getattr(config, "_attn_implementation", None) == "flash_attention_2":
                config._attn_implementation = "sdpa"
        return function(cls, *args, **kwargs)

    return call


# --- verl ---


def adapt_device(module):
    module.is_cuda_available = True  # its functions look at this one
    module.get_nccl_backend = lambda: "nccl"


def adapt_waiting(module):
    """A fork's own controller asks 120 times, once a second, for its first worker; a busy machine takes longer."""
    if hasattr(module, "time"):
        module.time = types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(5 * seconds)})


def adapt_hf_rollout(module):
    """PRIME asks for several answers of a prompt, which its `hf` rollout does not know."""
    real = module.HFRollout.generate_sequences

    @functools.wraps(real)
    def generate_sequences(self, prompts):
        n_samples = prompts.meta_info.get("n_samples", 1)
        if n_samples > 1:
            prompts.batch = prompts.batch.repeat_interleave(n_samples, dim=0)
        return real(self, prompts)

    module.HFRollout.generate_sequences = generate_sequences


# --- metrics ---


def adapt_tracking(module):
    for name in ("Tracking", "Tracker"):
        cls = getattr(module, name, None)
        if cls is not None:
            cls.log = _noted(cls.log)


def _noted(log):
    @functools.wraps(log)
    def call(self, data, step, *args, **kwargs):
        numbers = {name: float(value) for name, value in data.items() if _is_number(value)}
        with open(os.environ["CLIENT_METRICS"], "a") as file:
            file.write(json.dumps({"step": step, "metrics": numbers}) + "\n")
        return log(self, data, step, *args, **kwargs)

    return call


def _is_number(value):
    try:
        return math.isfinite(float(value)) or True
    except (TypeError, ValueError):
        return False


def adapt_ray(module):
    real = module.init

    @functools.wraps(real)
    def init(*args, **kwargs):
        kwargs.update(num_cpus=100, num_gpus=8, include_dashboard=False, address="local")
        kwargs.setdefault("object_store_memory", 1 << 30)
        return real(*args, **kwargs)

    module.init = init
    node, services = module._private.node.Node, module._private.services
    node.start_monitor = node.start_api_server = lambda *_, **__: None  # two processes less to wait for
    services.get_node = _patient(services.get_node)
    node.__init__ = _with_ports(node.__init__)
    node.start_ray_processes = _with_ports_said(node.start_ray_processes)


def _with_ports(real):
    """With ports for the agents of the node: Ray waits only 15 s for them to choose ports and to say which."""

    @functools.wraps(real)
    def call(self, ray_params, *args, **kwargs):
        names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
        with contextlib.ExitStack() as stack:
            for name in names:
                listener = stack.enter_context(socket.create_server(("", 0)))
                setattr(ray_params, name, listener.getsockname()[1])
        return real(self, ray_params, *args, **kwargs)

    return call


def _with_ports_said(real):
    @functools.wraps(real)
    def call(self, *args, **kwargs):
        persist_port = importlib.import_module("ray._raylet").persist_port
        for name in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
            persist_port(self._session_dir, self._node_id, name, getattr(self._ray_params, name))
        return real(self, *args, **kwargs)

    return call


def _patient(get_node, n_attempts=8):
    """Ray waits for 30 s for its own processes; a busy machine takes longer."""

    @functools.wraps(get_node)
    def call(*args, **kwargs):
        for _ in range(n_attempts - 1):
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:
                time.sleep(5)
        return get_node(*args, **kwargs)

    return call


ADAPTED = {
    "numpy": lambda module: module.random.seed(0),
    "torch": adapt_torch,
    "torch.distributed": adapt_distributed,
    "torch.distributed.device_mesh": adapt_device_mesh,
    "torch.distributed.fsdp._init_utils": adapt_fsdp,
    "torch.distributed.fsdp._unshard_param_utils": adapt_unshard,
    "tensordict.base": adapt_tensordict,
    "transformers.models.auto.auto_factory": adapt_auto,
    "transformers.modeling_utils": adapt_modeling,
    "verl.single_controller.ray.base": adapt_waiting,
    "verl.workers.rollout.hf_rollout": adapt_hf_rollout,
    "verl.utils.device": adapt_device,
    "verl.utils.tracking": adapt_tracking,
    "verl.utils.logger.logger": adapt_tracking,
    "ray": adapt_ray,
}
