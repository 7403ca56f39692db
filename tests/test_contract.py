"""The contract that third parties test their backends with holds for the library's own."""

import pytest

from bandmaster.testing import BackendContract


class TestInProcess(BackendContract):
    backend = "inprocess"
    has_processes = False


@pytest.mark.usefixtures("zygote")
class TestLocal(BackendContract):
    backend = "local"


@pytest.mark.usefixtures("ray_cluster")
class TestRay(BackendContract):
    backend = "ray"
