"""Named axes over ranks: where each rank lies, who forms a group, and the second layout that `refine` adds."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandmaster import Mesh, MeshError

HYBRID_FLOW = Mesh(pp=1, dp=2, tp=4).refine(gen_pp=1, gen_tp=2)


@st.composite
def meshes(draw):
    """Training meshes with up to 64 ranks, the three axes in any order."""
    names = draw(st.permutations(["pp", "dp", "tp"]))
    return Mesh(**{name: draw(st.integers(1, 4)) for name in names})


@st.composite
def refined_meshes(draw):
    mesh = draw(meshes())
    divisors = {axis: [n for n in range(1, 5) if mesh.axis_size(axis) % n == 0] for axis in ("pp", "tp")}
    return mesh.refine(**{f"gen_{axis}": draw(st.sampled_from(sizes)) for axis, sizes in divisors.items()})


any_mesh = meshes() | refined_meshes()


# --- coordinates and ranks --------------------------------------------------------------------------------------


def test_the_first_axis_is_the_slowest():
    mesh = Mesh(pp=2, dp=2, tp=2)

    assert [tuple(mesh.coordinates(rank).values()) for rank in range(8)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert mesh.coordinates(6) == {"pp": 1, "dp": 1, "tp": 0}


def test_sizes_and_names():
    mesh = Mesh(pp=3, dp=2)

    assert (mesh.size, mesh.shape, mesh.axis_names) == (6, {"pp": 3, "dp": 2}, ("pp", "dp"))
    assert (mesh.axis_size("pp"), mesh.axis_size("dp")) == (3, 2)


def test_ranks_at_coordinates():
    mesh = Mesh(pp=2, dp=3, tp=2)

    assert mesh.ranks() == tuple(range(12))
    assert mesh.ranks(dp=1) == (2, 3, 8, 9)
    assert mesh.ranks(pp=1, tp=0) == (6, 8, 10)
    assert mesh.ranks(pp=1, dp=2, tp=1) == (11,)


def test_negative_coordinates_count_from_the_end():
    mesh = Mesh(pp=2, dp=3, tp=2)

    assert mesh.ranks(dp=-1) == (4, 5, 10, 11)
    assert mesh.ranks(dp=-3) == mesh.ranks(dp=0)


def test_what_a_mesh_answers_is_the_callers_own():
    mesh = Mesh(dp=2)
    mesh.shape["dp"] = 7
    mesh.coordinates(1)["dp"] = 7

    assert mesh.shape == {"dp": 2}
    assert mesh.coordinates(1) == {"dp": 1}


@given(any_mesh)
def test_coordinates_and_ranks_are_inverse(mesh):
    for rank in range(mesh.size):
        assert mesh.ranks(**mesh.coordinates(rank)) == (rank,)


def test_the_order_is_that_of_a_torch_device_mesh(fake_process_group):
    from torch.distributed import init_device_mesh

    mesh = Mesh(pp=2, dp=2, tp=2)
    theirs = init_device_mesh("cpu", tuple(mesh.shape.values()), mesh_dim_names=mesh.axis_names)

    assert theirs.mesh.tolist() == [[list(group) for group in mesh.groups("tp")[i : i + 2]] for i in (0, 2)]
    for axis in mesh.axis_names:
        assert theirs[axis].mesh.tolist() == list(mesh.groups(axis)[0])


@pytest.fixture
def fake_process_group():
    """Torch's own stand-in for a group of eight processes."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    distributed.destroy_process_group()


# --- groups, positions, select ----------------------------------------------------------------------------------


def test_groups_along_axes():
    mesh = Mesh(pp=2, dp=2, tp=2)

    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("dp", "tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("tp", "dp") == ((0, 2, 1, 3), (4, 6, 5, 7))
    assert mesh.groups() == ((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,))


def test_positions_number_the_coordinates_of_some_axes():
    mesh = Mesh(pp=2, dp=2, tp=2)

    assert mesh.positions("dp") == (0, 0, 1, 1, 0, 0, 1, 1)
    assert mesh.positions("pp", "tp") == (0, 1, 0, 1, 2, 3, 2, 3)
    assert mesh.positions("tp", "pp") == (0, 2, 0, 2, 1, 3, 1, 3)
    assert mesh.positions() == (0,) * 8


def test_select_takes_one_rank_per_coordinate():
    mesh = Mesh(pp=2, dp=2, tp=2)

    assert mesh.select("dp") == (0, 2)
    assert mesh.select("dp", pp=-1, tp=0) == (4, 6)
    assert mesh.select("tp", "dp", pp=1) == (4, 6, 5, 7)
    assert mesh.select(tp=1) == (1,)


@given(any_mesh, st.data())
def test_groups_partition_the_ranks(mesh, data):
    axis = data.draw(st.sampled_from(mesh.axis_names))
    groups = mesh.groups(axis)

    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert {len(group) for group in groups} == {mesh.axis_size(axis)}
    for group in groups:
        assert [mesh.coordinates(rank)[axis] for rank in group] == list(range(mesh.axis_size(axis)))


@given(meshes(), st.data())
def test_positions_and_select_agree(mesh, data):
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), unique=True))
    positions = mesh.positions(*axes)

    assert [positions[rank] for rank in mesh.select(*axes)] == list(range(math.prod(map(mesh.axis_size, axes))))


# --- refine -----------------------------------------------------------------------------------------------------


def test_the_grouping_of_the_hybrid_flow_paper():
    assert HYBRID_FLOW.groups("gen_tp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert HYBRID_FLOW.groups("micro_dp") == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_pp_is_cut_like_tp_with_the_micro_part_fastest():
    mesh = Mesh(pp=4, dp=1, tp=2).refine(gen_pp=2, gen_tp=1)

    assert mesh.groups("pp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.groups("gen_pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("micro_pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("micro_tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("micro_dp") == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_the_training_axes_stay_usable():
    assert HYBRID_FLOW.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert HYBRID_FLOW.shape == {"pp": 1, "dp": 2, "tp": 4}
    assert HYBRID_FLOW.axis_names == ("pp", "dp", "tp", "gen_pp", "micro_pp", "gen_tp", "micro_tp", "micro_dp")
    assert HYBRID_FLOW.axis_size("micro_dp") == 2
    assert HYBRID_FLOW.coordinates(6) == {
        "pp": 0, "dp": 1, "tp": 2, "gen_pp": 0, "micro_pp": 0, "gen_tp": 1, "micro_tp": 0, "micro_dp": 0,
    }  # fmt: skip


def test_other_axes_keep_their_place():
    mesh = Mesh(tp=2, ep=2, pp=1).refine(gen_tp=1)

    assert mesh.groups("ep") == ((0, 1), (2, 3))
    assert mesh.groups("micro_dp") == ((0, 2), (1, 3))


def test_without_sizes_nothing_is_cut():
    assert Mesh(pp=2, dp=1, tp=2).refine() == Mesh(pp=2, dp=1, tp=2).refine(gen_pp=2, gen_tp=2)
    assert Mesh(pp=2, dp=1, tp=2).refine().axis_size("micro_dp") == 1


@given(refined_meshes())
def test_micro_dp_times_generation_tiles_each_training_group(mesh):
    for training in mesh.groups("pp", "tp"):
        replicas = [group for group in mesh.groups("gen_pp", "gen_tp") if set(group) <= set(training)]
        assert len(replicas) == mesh.axis_size("micro_dp")
        assert sorted(rank for replica in replicas for rank in replica) == sorted(training)
        for peers in (group for group in mesh.groups("micro_dp") if set(group) <= set(training)):
            assert [sum(rank in replica for rank in peers) for replica in replicas] == [1] * len(replicas)


# --- a value ----------------------------------------------------------------------------------------------------


def test_equality_looks_at_names_sizes_and_order():
    assert Mesh(dp=2, tp=4) == Mesh(dp=2, tp=4)
    assert len({Mesh(dp=2, tp=4), Mesh(dp=2, tp=4), Mesh(tp=4, dp=2), Mesh(dp=4, tp=2)}) == 3
    assert Mesh(pp=1, dp=2, tp=4) != HYBRID_FLOW
    assert Mesh(dp=2) != "Mesh(dp=2)"


@given(any_mesh)
def test_the_repr_can_be_pasted(mesh):
    assert eval(repr(mesh)) == mesh


def test_repr():
    assert repr(HYBRID_FLOW) == "Mesh(pp=1, dp=2, tp=4).refine(gen_pp=1, gen_tp=2)"


@given(any_mesh)
def test_a_pickled_mesh_is_the_same_mesh(mesh):
    copy = pickle.loads(pickle.dumps(mesh))

    assert (copy, hash(copy), repr(copy)) == (mesh, hash(mesh), repr(mesh))
    assert copy.groups("dp") == mesh.groups("dp")


def test_a_pickle_holds_nothing_of_this_process():
    used, fresh = Mesh(dp=2), Mesh(dp=2)
    hash(used)  # another process hashes strings in its own way
    used.coordinates(0)

    assert pickle.dumps(used) == pickle.dumps(fresh)


def test_a_notebook_shows_every_rank():
    html = Mesh(dp=2, tp=1)._repr_html_()

    assert "Mesh(dp=2, tp=1)" in html
    assert "<tr><td>1</td><td>1</td></tr>" in html, "an axis of one coordinate tells nothing"


# --- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: Mesh(), "a mesh needs at least one axis, each with a name, for example Mesh(dp=8)"),
        (lambda: Mesh(4), "a mesh needs at least one axis, each with a name, for example Mesh(dp=8)"),
        (lambda: Mesh(dp=0), "the size of axis 'dp' must be a positive integer, got 0"),
        (lambda: Mesh(dp=2.0), "the size of axis 'dp' must be a positive integer, got 2.0"),
        (lambda: Mesh(dp=True), "the size of axis 'dp' must be a positive integer, got True"),
        (lambda: Mesh(dp=4).coordinates(4), "rank 4 is not on Mesh(dp=4), whose ranks are 0 to 3"),
        (lambda: Mesh(dp=4).coordinates(-1), "rank -1 is not on Mesh(dp=4), whose ranks are 0 to 3"),
        (lambda: Mesh(dp=4).ranks(dp=4), "dp=4 is outside axis 'dp' of size 4 in Mesh(dp=4)"),
        (lambda: Mesh(dp=4).ranks(dp=-5), "dp=-5 is outside axis 'dp' of size 4 in Mesh(dp=4)"),
        (lambda: Mesh(dp=4).ranks(dp=0.5), "dp=0.5 is outside axis 'dp' of size 4 in Mesh(dp=4)"),
        (lambda: Mesh(dp=4).groups("db"), "Mesh(dp=4) has no axis 'db', only 'dp'"),
        (
            lambda: Mesh(dp=4).select("dp", tp=0),
            "Mesh(dp=4) has no axis 'tp', only 'dp'; an axis that is not used has size 1: make the mesh with tp=1",
        ),
        (
            lambda: Mesh(dp=2, tp=2).positions("micro_dp"),
            "Mesh(dp=2, tp=2) has no axis 'micro_dp', only 'dp', 'tp'; "
            "Mesh(pp=..., dp=..., tp=...).refine(gen_pp=..., gen_tp=...) makes it",
        ),
        (
            lambda: HYBRID_FLOW.positions("tp", "gen_tp"),
            "axes 'tp' and 'gen_tp' of Mesh(pp=1, dp=2, tp=4).refine(gen_pp=1, gen_tp=2) overlap; name one of them",
        ),
        (lambda: HYBRID_FLOW.select("micro_dp", tp=0), "axes 'micro_dp' and 'tp' of"),
        (lambda: HYBRID_FLOW.groups("micro_tp", "micro_dp"), "axes 'micro_tp' and 'micro_dp' of"),
        (lambda: Mesh(tp=4).refine(gen_tp=3), "gen_tp=3 does not divide tp=4; choose a divisor of 4"),
        (lambda: Mesh(tp=4).refine(gen_tp=0), "gen_tp=0 does not divide tp=4; choose a divisor of 4"),
        (lambda: Mesh(tp=4).refine(gen_tp=8), "gen_tp=8 does not divide tp=4; choose a divisor of 4"),
        (lambda: Mesh(tp=4).refine(gen_pp=2), "gen_pp=2 splits axis 'pp', which Mesh(tp=4) does not have"),
        (lambda: Mesh(tp=4).refine(gen_tp=2).refine(), "is already refined; refine Mesh(tp=4) instead"),
        (
            lambda: Mesh(tp=4, gen_tp=2).refine(gen_tp=2),
            "Mesh(tp=4, gen_tp=2) already has an axis 'gen_tp', which refine() would add; rename that axis",
        ),
    ],
)
def test_mistakes_say_what_was_asked_and_what_there_is(mistake, message):
    with pytest.raises(MeshError) as caught:
        mistake()
    assert message in str(caught.value)
