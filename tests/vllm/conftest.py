"""What the tests of vLLM share: a tiny model, and a group of two replicas, as a start takes long."""

import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))  # a start takes minutes on a busy machine
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    import tiny_model

    return tiny_model.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def reference(model_path):
    import tiny_model

    return tiny_model.Reference(model_path)
