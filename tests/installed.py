"""Says which packages are installed on which some tests depend."""

from importlib.util import find_spec


def has_vllm():
    """Whether vLLM can be imported; the folder of its tests has its name."""
    found = find_spec("vllm")
    return found is not None and found.origin is not None
