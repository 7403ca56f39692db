"""What a user may do wrong: the code, and the error and the words that must come, which say what to do."""

from __future__ import annotations

from typing import NamedTuple


class Wrong(NamedTuple):
    """One mistake.

    Attributes:
        code: An expression, in which ``{g}`` is a group, ``{m}`` a method of it that takes ``rows``, ``{v}`` rows,
            ``{h}`` a handle of them, ``{n}`` their number, ``{more}`` one more, and ``{size}`` the number of ranks.
        error: The name of the class of the error.
        says: What its message has in it, with the same names.
    """

    code: str
    error: str
    says: tuple[str, ...]


def _group(arguments, cls="Subject"):
    """An attempt to make a group of one rank."""
    return f"bm.WorkerGroup(bm.ResourcePool([1], backend='inprocess'), {cls}{arguments})"


def _class(name, protocol="'ONE_TO_ALL'"):
    """A worker class with a method of this name and protocol."""
    return f"type('Wrong', (bm.Worker,), {{{{{name!r}: bm.register({protocol})(lambda self, rows: rows)}}}})"


MISTAKES = {
    # A call, whose arguments do not fit its signature, in each of the ways to call.
    "none": Wrong("{g}.{m}()", "ArgumentError", ("missing a required argument: 'rows'", "Subject.{m}(rows)")),
    "many": Wrong("{g}.{m}({v}, 1, 2)", "ArgumentError", ("too many positional arguments", "Subject.{m}(rows)")),
    "name": Wrong("{g}.{m}(row={v})", "ArgumentError", ("keyword argument 'row'; did you mean 'rows'",)),
    "name of submit": Wrong("{g}.{m}.submit(row={v})", "ArgumentError", ("argument 'row'; did you mean 'rows'",)),
    "name of stream": Wrong("{g}.{m}.stream(rowz={v})", "ArgumentError", ("argument 'rowz'; did you mean 'rows'",)),
    "name of all": Wrong("{g}.execute_all_async('{m}', row={v})", "ArgumentError", ("did you mean 'rows'",)),
    "name of zero": Wrong("{g}.execute_rank_zero_sync('{m}', row={v})", "ArgumentError", ("did you mean 'rows'",)),
    "other name": Wrong("{g}.{m}({v}, timeout=3)", "ArgumentError", ("keyword argument 'timeout'; the signature",)),
    "both": Wrong("{g}.{m}({v}, rows={v})", "ArgumentError", ("multiple values for argument 'rows'",)),
    "method": Wrong("{g}.{m}x({v})", "AttributeError", ("'{m}x'; did you mean '{m}'",)),
    "method of all": Wrong("{g}.execute_all_sync('{m}x', {v})", "ArgumentError", ("'{m}x'; did you mean '{m}'",)),
    # Values that do not fit.
    "few": Wrong("{g}.each([1] * 99)", "ArgumentError", ("'value' of Subject.each has 99 values for {size} ranks",)),
    "no list": Wrong("{g}.each(7)", "ArgumentError", ("one value per rank, got int", "a list of {size} values")),
    "unequal": Wrong("{g}.second({v}, [0] * {more})", "BatchError", ("'a' has {n}, 'b' has {more}",)),
    "no rows": Wrong("{g}.{m}(0.5)", "BatchError", ("no argument is a batch: 'rows' is float",)),
    "mixed": Wrong("{g}.{m}({{'a': [0] * {more}, 'b': 0.5}})", "BatchError", ("'a' has {more} rows, 'b' is float",)),
    "ragged": Wrong("{g}.{m}({{'a': [0] * {more}, 'b': []}})", "BatchError", ("'a' has {more}, 'b' has 0",)),
    "lock": Wrong("{g}.everyone(threading.Lock())", "ArgumentError", ("'value' of Subject.everyone (lock) cannot be",)),
    "method as value": Wrong("{g}.everyone({g}.{m})", "ArgumentError", ("cannot be pickled", "pass the group")),
    "no handle": Wrong("{g}.same({g}.everyone.submit({v}))", "UsageError", ("leaves no rows", "pass the value of")),
    "put": Wrong("{g}.put(3)", "BatchError", ("Subject.put takes a batch, got int",)),
    # Options.
    "timeout": Wrong("{g}.{m}.options(timeout=-1)({v})", "UsageError", ("timeout must be a non-negative", "got -1")),
    "grace": Wrong("{g}.{m}.options(grace='a')({v})", "UsageError", ("grace must be a non-negative", "got 'a'")),
    "chunk": Wrong("{g}.map_same.map({v}, chunk=0)", "UsageError", ("chunk must be a whole number", "got 0")),
    "maxsize": Wrong("{g}.{m}.options(maxsize=0).stream({v})", "UsageError", ("maxsize must be a whole", "got 0")),
    "on_error": Wrong("{g}.{m}.options(on_error='x')({v})", "UsageError", ("must be 'raise' or 'return', got 'x'",)),
    "option": Wrong(
        "{g}.{m}.options(time=3)({v})", "UsageError", ("no option 'time'", "timeout, grace, stall_after and on_stall")
    ),
    "pulls": Wrong("{g}.everyone.options(pull=2)({v})", "UsageError", ("pull= was removed", "map(rows, chunk=n)")),
    "maps none": Wrong("{g}.map_same.map(0.5)", "BatchError", ("got no batch", "'rows' is float")),
    "wait": Wrong("bm.wait([{h}], timeout=-1)", "UsageError", ("timeout of wait must be a non-negative", "got -1")),
    "wait for": Wrong("bm.wait([3])", "UsageError", ("wait takes futures returned by submit(), got int",)),
    # Operations of handles.
    "select": Wrong("{h}.select('nope').result()", "BatchError", ("cannot select", "columns")),
    "row": Wrong("{h}[[{n}]].result()", "BatchError", ("no row {n} among {n} rows",)),
    "rows": Wrong("{h}[0]", "UsageError", ("an array of numbers or a boolean mask, got 0", "rows[i:i+1]")),
    "mask": Wrong("{h}[[True] * {more}].result()", "BatchError", ("mask of {more} booleans was given for {n} rows",)),
    "join": Wrong("{h}.join(3)", "UsageError", ("join takes futures of calls, got int",)),
    "concat": Wrong("bm.concat([])", "UsageError", ("pass at least one future",)),
    # Meshes, pools, protocols and groups.
    "axis": Wrong("bm.Mesh(dp=0)", "MeshError", ("size of axis 'dp' must be a positive integer, got 0",)),
    "no axis": Wrong("bm.Mesh()", "MeshError", ("at least one axis", "Mesh(dp=8)")),
    "slots": Wrong("bm.ResourcePool([0])", "UsageError", ("at least 1, got 0 in [0]",)),
    "pool": Wrong("bm.ResourcePool('x')", "UsageError", ("one number per node, such as [4, 2], got 'x'",)),
    "backend": Wrong("bm.ResourcePool([1], backend='locl')", "UsageError", ("'locl'", "'local', 'inprocess'")),
    "protocol": Wrong("bm.register('DP_PROT')", "ProtocolError", ("unknown transfer protocol 'DP_PROT'", "DP_PROTO,")),
    "split": Wrong("bm.Split()", "ProtocolError", ('for example Split("dp")',)),
    "reduce": Wrong("bm.Reduce('sun')", "ProtocolError", ("'sum', 'mean', 'min', 'max' or a function, got 'sun'",)),
    "no pool": Wrong("bm.WorkerGroup([2], Subject)", "UsageError", ("must be a ResourcePool, got list",)),
    "no worker": Wrong(_group("", "dict"), "UsageError", ("<class 'dict'>", "bandmaster.Worker")),
    "mesh": Wrong(_group(", mesh=bm.Mesh(dp={more}, tp=2)"), "MeshError", ("has 1 slots", "with Mesh(dp=1)")),
    "constructor": Wrong(_group(", 1"), "ArgumentError", ("Subject.__init__() got too many positional arguments",)),
    "its name": Wrong(_group(", name=3"), "UsageError", ("name of WorkerGroup must be a string", "got 3")),
    "its start": Wrong(_group(", start_timeout=-1"), "UsageError", ("start_timeout of WorkerGroup", "got -1")),
    "reserved": Wrong(_group("", _class("close")), "UsageError", ("registers 'close'", "rename", "device", "restart")),
    "attribute": Wrong(_group("", _class("rank")), "UsageError", ("registers 'rank'", "rename", "close", "device")),
    "private": Wrong(_group("", _class("_own")), "UsageError", ("registers '_own'", "rename", "leading underscore")),
    "no such axis": Wrong(
        _group("", _class("one", "bm.TransferProtocol(bm.Split('ep'), bm.Concat('dp'))")),
        "MeshError",
        ("Wrong.one uses Split('ep'), but Mesh(dp=1) has no axis 'ep', only 'dp'",),
    ),
}
