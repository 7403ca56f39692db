"""Transfer protocols are data: frozen, comparable, printed as they are written, refused when they contradict."""

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandmaster import (
    Broadcast,
    Concat,
    Dispatch,
    Gather,
    Only,
    PerRank,
    ProtocolError,
    Reduce,
    Route,
    Split,
    TransferProtocol,
    collect_all_to_all,
    register,
)
from bandmaster.plan.transfer import Custom, as_protocol

AXES = ["pp", "dp", "tp", "micro_dp"]
fixed = st.dictionaries(st.sampled_from(AXES), st.integers(-2, 2), max_size=2)


@st.composite
def selections(draw, kinds=(Concat, Gather, Only, Reduce)):
    kind, at = draw(st.sampled_from(kinds)), draw(fixed)
    axes = draw(st.permutations([axis for axis in AXES if axis not in at]))[: draw(st.integers(1, 2))]
    if kind is Only:
        return Only(**at)
    if kind is Reduce:
        op = draw(st.sampled_from(["sum", "mean", "min", "max"]))
        return Reduce(op, *axes, weights=draw(st.sampled_from([None, "rows"])) if op == "mean" else None, **at)
    return kind(*axes, **at)


outgoings = st.one_of(
    st.just(Broadcast()),
    st.just(PerRank()),
    st.lists(st.sampled_from(AXES), min_size=1, unique=True).map(lambda axes: Split(*axes)),
)
padded = st.lists(st.sampled_from(AXES), min_size=1, unique=True).map(lambda axes: Split(*axes, pad=True))
several = st.lists(selections(), min_size=1, max_size=3).map(tuple)
protocols = st.builds(TransferProtocol, outgoings, selections() | several) | st.builds(
    TransferProtocol, padded, selections(kinds=[Concat])
)


@given(outgoings | padded | selections() | protocols)
def test_what_is_printed_can_be_pasted(value):
    pasted = eval(repr(value))

    assert pasted == value
    assert hash(pasted) == hash(value)


@given(protocols)
def test_copies_are_equal(protocol):
    assert pickle.loads(pickle.dumps(protocol)) == protocol
    assert copy.deepcopy(protocol) == protocol


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Split("dp"), "Split('dp')"),
        (Split("dp", "micro_dp", pad=True), "Split('dp', 'micro_dp', pad=True)"),
        (Broadcast(), "Broadcast()"),
        (PerRank(), "PerRank()"),
        (Concat("dp", pp=-1, tp=0), "Concat('dp', pp=-1, tp=0)"),
        (Gather(), "Gather()"),
        (Gather("pp", tp=0, dp=0), "Gather('pp', dp=0, tp=0)"),
        (Only(pp=-1), "Only(pp=-1)"),
        (Reduce("mean", "dp", tp=0), "Reduce('mean', 'dp', tp=0)"),
        (Reduce("mean", "dp", tp=0, weights="rows"), "Reduce('mean', 'dp', weights='rows', tp=0)"),
        (
            TransferProtocol(Split("dp"), (Concat("dp"), Only())),
            "TransferProtocol(outgoing=Split('dp'), incoming=(Concat('dp'), Only()))",
        ),
        (
            TransferProtocol(Split("dp"), Concat("dp")),
            "TransferProtocol(outgoing=Split('dp'), incoming=Concat('dp'))",
        ),
    ],
)
def test_repr(value, text):
    assert repr(value) == text


def test_equal_means_the_same_kind_axes_and_coordinates():
    assert Concat("dp", pp=-1, tp=0) == Concat("dp", tp=0, pp=-1)
    assert Split("dp", "tp") != Split("tp", "dp")
    assert Split("dp") != Split("dp", pad=True)
    assert Concat("dp") != Gather("dp")
    assert Only() != Gather()
    assert Reduce("sum") != Reduce("mean") != Reduce("mean", weights="rows")
    assert TransferProtocol(Broadcast(), Only()) != TransferProtocol(Broadcast(), (Only(),))
    assert len({Split("dp"), Split("dp"), Broadcast(), Broadcast(), PerRank()}) == 3


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (Split("dp"), "axes"),
        (Split("dp"), "pad"),
        (Concat("dp"), "axes"),
        (Only(), "at"),
        (Reduce("sum"), "op"),
        (Dispatch.DP_PROTO.value, "outgoing"),
    ],
)
def test_nothing_can_be_changed(value, field):
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, ())


# --- the six ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "paper_name"),
    [
        (Dispatch.ONE_TO_ALL, "ONE_TO_ALL"),
        (Dispatch.THREE_D_PROTO, "3D_PROTO"),
        (Dispatch.THREE_D_ALL_MICRO_DP, "3D_ALL_MICRO_DP"),
        (Dispatch.THREE_D_PP_ONLY, "3D_PP_ONLY"),
        (Dispatch.DP_PROTO, "DP_PROTO"),
        (Dispatch.ALL_TO_ALL, "ALL_TO_ALL"),
    ],
)
def test_both_spellings_of_the_six(member, paper_name):
    assert member.paper_name == paper_name
    assert Dispatch.named(paper_name) is member
    assert Dispatch.named(member.name) is member
    assert as_protocol(paper_name) == as_protocol(member) == member.value


def test_there_are_six_and_that_of_requests():
    assert len(Dispatch) == 7 and Dispatch.named("REQUEST").value == TransferProtocol(Route("dp"), Only(tp=0))


@pytest.mark.parametrize("name", ["3D", "dp_proto", ""])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ProtocolError) as caught:
        Dispatch.named(name)
    assert str(caught.value) == (
        f"unknown transfer protocol {name!r}; use one of ONE_TO_ALL, 3D_PROTO, 3D_ALL_MICRO_DP, 3D_PP_ONLY, "
        "DP_PROTO, ALL_TO_ALL, REQUEST, or a TransferProtocol"
    )


# --- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: Split(), 'Split requires at least one axis, for example Split("dp")'),
        (lambda: Split("dp", "tp", "dp"), "Split names axis 'dp' twice"),
        (lambda: Split(("dp", "tp")), "the axes of Split must be strings, got ('dp', 'tp')"),
        (lambda: Concat(), 'Concat requires at least one axis, for example Concat("dp")'),
        (lambda: Concat("dp", dp=0), "Concat joins over axis 'dp' and also fixes dp=0; remove one of them"),
        (lambda: Reduce("sum", "tp", tp=1), "Reduce joins over axis 'tp' and also fixes tp=1; remove one of them"),
        (lambda: Gather(0), "the axes of Gather must be strings, got 0"),
        (lambda: Only(tp="0"), "the coordinate tp of Only must be an integer, got '0'"),
        (lambda: Only(tp=False), "the coordinate tp of Only must be an integer, got False"),
        (
            lambda: Reduce("prod"),
            "the operation of Reduce must be 'sum', 'mean', 'min', 'max' or a function, got 'prod'",
        ),
        (
            lambda: TransferProtocol(Concat("dp"), Concat("dp")),
            "outgoing must be a Split, Broadcast, PerRank or Route, got Concat('dp')",
        ),
        (
            lambda: TransferProtocol(Broadcast(), Broadcast()),
            "incoming must be a Concat, Gather, Reduce or Only, or a tuple of them, got Broadcast()",
        ),
        (
            lambda: TransferProtocol(Broadcast(), ()),
            "incoming must be a Concat, Gather, Reduce or Only, or a tuple of them, got ()",
        ),
        (
            lambda: TransferProtocol(Broadcast(), (Only(), (Only(),))),
            "incoming must be a Concat, Gather, Reduce or Only, or a tuple of them, got (Only(), (Only(),))",
        ),
        (lambda: TransferProtocol(Broadcast(), [Only()]), "or a tuple of them, got [Only()]"),
        (
            lambda: Reduce("mean", weights="tokens"),
            "weights of Reduce must be 'rows' or None, got 'tokens'",
        ),
        (
            lambda: Reduce("sum", weights="rows"),
            "Reduce supports weights only for 'mean', got 'sum'; remove weights='rows'",
        ),
        (
            lambda: Reduce(max, weights="rows"),
            "Reduce supports weights only for 'mean', got <built-in function max>; remove",
        ),
        (
            lambda: as_protocol(7),
            "a transfer protocol must be a member of bandmaster.Dispatch, its name, a TransferProtocol, or "
            "{'dispatch_fn': ..., 'collect_fn': ...}, got 7",
        ),
        (
            lambda: as_protocol({"dispatch_fn": print}),
            "a custom protocol must have the keys 'dispatch_fn' and 'collect_fn', got ['dispatch_fn']",
        ),
        (
            lambda: as_protocol({"dispatch_fn": print, "collect_fn": "print"}),
            "collect_fn of a custom protocol must be callable, got 'print'",
        ),
    ],
)
def test_contradictions_are_refused(mistake, message):
    with pytest.raises(ProtocolError) as caught:
        mistake()
    assert message in str(caught.value)


@pytest.mark.parametrize("incoming", [Gather(), Only(), Reduce("mean"), (Gather(), Only())], ids=repr)
def test_padding_needs_concat(incoming):
    with pytest.raises(ProtocolError, match="collect with Concat, or remove pad=True: the rows need not divide evenly"):
        TransferProtocol(Split("dp", pad=True), incoming)
    with pytest.raises(ProtocolError, match=r"adds padding, but .* cannot remove it"):
        register(TransferProtocol(Broadcast(), incoming), arguments={"x": Split("dp", pad=True)})(lambda self, x: x)


def test_padding_may_come_back_beside_what_it_is_cut_from():
    assert TransferProtocol(Split("dp", pad=True), (Gather(), Concat("dp"))).outgoing.pad


BY_ROWS = Reduce("mean", weights="rows")


@pytest.mark.parametrize(
    ("protocol", "rules", "splits"),
    [
        (TransferProtocol(Broadcast(), BY_ROWS), {}, "no Split"),
        (TransferProtocol(Broadcast(), (Only(), BY_ROWS)), {"x": PerRank()}, "no Split"),
        (TransferProtocol(Split("dp"), BY_ROWS), {"x": Split("tp")}, "Split('dp') and Split('tp')"),
    ],
)
def test_weights_need_one_split(protocol, rules, splits):
    def step(self, x): ...

    with pytest.raises(ProtocolError) as caught:
        register(protocol, arguments=rules)(step)
    assert "step collects with Reduce('mean', weights='rows'), which needs exactly one Split to weight" in str(
        caught.value
    )
    assert f"but its arguments have {splits}; split batches over the same axes" in str(caught.value)
    register(TransferProtocol(Broadcast(), BY_ROWS), arguments={"x": Split("dp")})(step)


def test_a_pair_of_functions_is_a_protocol():
    custom = as_protocol({"dispatch_fn": print, "collect_fn": collect_all_to_all})

    assert custom == Custom(print, collect_all_to_all)
    assert custom.collect(None, [1, 2]) == [1, 2]
