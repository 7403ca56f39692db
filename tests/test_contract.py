"""The contract that third parties test their backends with holds for the library's own, and for colocated roles."""

import contextlib

import pytest
from hosts import spread

import bandmaster as bm
from bandmaster.testing import BackendContract


class Sibling(bm.Worker):
    pass


class OfARole(BackendContract):
    """The group under test is that of a role, beside a sibling in the same processes."""

    test_a_group_can_be_restarted = test_a_rank_can_be_replaced = None  # the colocated group does so for all roles

    @contextlib.contextmanager
    def group(self, where, cls, *args, **kwargs):
        mesh = bm.Mesh(dp=where) if isinstance(where, int) else where
        tested = bm.ClassWithInitArgs(cls, *args, **kwargs)
        with bm.ResourcePool(self.nodes(mesh.size), backend=self.backend, **self.pool_options) as pool:
            both = bm.colocate(
                pool, sibling=Sibling, tested=tested, meshes={"tested": mesh}, start_timeout=self.timeout
            )
            both.set_default_options(timeout=self.timeout)
            yield both.tested


class TestInProcess(BackendContract):
    backend = "inprocess"
    has_processes = False


@pytest.mark.usefixtures("zygote")
class TestLocal(BackendContract):
    backend = "local"


@pytest.mark.usefixtures("ray_cluster")
class TestRay(BackendContract):
    backend = "ray"

    def nodes(self, size):
        return spread([size])


class TestInProcessRoles(OfARole, TestInProcess):
    pass


class TestLocalRoles(OfARole, TestLocal):
    pass


class TestRayRoles(OfARole, TestRay):
    pass
