"""The worker class of random programs: its methods as text, which the library, the oracle and a script are made of."""

from __future__ import annotations

import re
import textwrap

# Transfer protocols that have no name in `Dispatch`, by the name that they have here.
PROTOCOLS = {
    "PADDED": 'bm.TransferProtocol(bm.Split("dp", pad=True), bm.Concat("dp"))',
    "SUM": 'bm.TransferProtocol(bm.Split("dp"), bm.Reduce("sum", "dp"))',
    "ONLY": "bm.TransferProtocol(bm.Broadcast(), bm.Only())",
    "BOTH": 'bm.TransferProtocol(bm.Split("dp"), (bm.Concat("dp"), bm.Gather("dp")))',
    "CELLS": 'bm.TransferProtocol(bm.Split("dp", "tp"), bm.Concat("dp", "tp"))',
}

# By name: the transfer protocol, and the definition. `self` has a rank on both sides; the oracle's has nothing else.
METHODS = {
    "same": ("DP_PROTO", "def same(self, rows): return rows"),
    "three": ("3D_PROTO", "def three(self, rows): return rows"),
    "micro": ("3D_ALL_MICRO_DP", "def micro(self, rows): return rows"),
    "everyone": ("ONE_TO_ALL", "def everyone(self, value): return self.rank, value"),
    "stages": ("3D_PP_ONLY", "def stages(self, value): return self.rank, value"),
    "each": ("ALL_TO_ALL", "def each(self, value): return self.rank, value"),
    "bumped": ("DP_PROTO", "def bumped(self, rows): return bump(rows)"),
    "bump_all": ("ONE_TO_ALL", "def bump_all(self, value): return bump(value)"),
    "second": ("DP_PROTO", "def second(self, a, b):\n    bump(a)\n    return b"),
    "pair": ("DP_PROTO", "def pair(self, a, b): return {'first': a, 'second': b}"),
    "slow": ("DP_PROTO", "def slow(self, rows):\n    __import__('time').sleep(0.01)\n    return rows"),
    "widen": ("DP_PROTO", "def widen(self, rows): return rows * 1.5 if self.rank % 2 else rows"),
    "keep": (
        "DP_PROTO",
        "def keep(self, rows):\n    self.__dict__.setdefault('kept', []).append(rows)\n    return rows",
    ),
    "kept_rows": ("ONE_TO_ALL", "def kept_rows(self): return self.__dict__.get('kept', [])"),
    "bump_kept": ("ONE_TO_ALL", "def bump_kept(self): bump(self.__dict__.get('kept', []))"),
    "forget": ("ONE_TO_ALL", "def forget(self): self.__dict__.pop('kept', None)"),
    "items": ("DP_PROTO", "def items(self, rows):\n    yield rows\n    yield bump(rows)"),
    "padded": ("PADDED", "def padded(self, rows): return rows"),
    "count": (
        "SUM",
        "def count(self, rows): return len(rows) if hasattr(rows, '__len__') else 1",
    ),
    "only": ("ONLY", "def only(self, value): return self.rank, bump(value)"),
    "both": ("BOTH", "def both(self, rows): return rows, self.rank"),
    "cells": ("CELLS", "def cells(self, rows): return rows"),
    "fail": (
        "DP_PROTO",
        "def fail(self, rows, at):\n    if self.rank in at: raise ValueError('asked to')\n    return rows",
    ),
    "hang": (
        "DP_PROTO",
        "def hang(self, rows, at):\n    while self.rank in at: __import__('time').sleep(0.005)\n    return rows",
    ),
    "die": (
        "DP_PROTO",
        "def die(self, rows, at):\n    if self.rank in at: __import__('os')._exit(3)\n    return rows",
    ),
    "apart": (
        "DP_PROTO",
        "def apart(self, rows, at):\n    if self.rank in at: raise ValueError('asked to')\n"
        "    __import__('time').sleep(0.03)\n    self.ended = __import__('time').monotonic()\n    return rows",
    ),
    "clock": (
        "ONE_TO_ALL",
        "def clock(self): return __import__('time').monotonic(), self.__dict__.pop('ended', 0.0)",
    ),
}
NOT_DRAWN = {"items", "fail", "forget", "hang", "die", "apart", "clock"}  # which steps of their own call

BUMP = '''
def bump(x):
    """Change everything in place."""
    if isinstance(x, dict | list):
        for key in x if isinstance(x, dict) else range(len(x)):
            x[key] = bump(x[key])
    elif isinstance(x, tuple):
        for one in x: bump(one)
    elif hasattr(x, "__dataclass_fields__"):
        bump(vars(x))
    elif type(x).__name__ == "TensorDict":
        for key in x.keys(): bump(x[key])
    elif isinstance(x, np.ndarray) and x.dtype.kind in "biufcmM":
        x[...] = ~x if x.dtype.kind == "b" else x + x.dtype.type(1) if x.dtype.kind in "iufc" else x + 1
    elif type(x).__module__ == "torch":
        x.copy_(~x if str(x.dtype) == "torch.bool" else x + 1)
    elif type(x).__name__ == "DataFrame":
        for name in x:
            x[name] = x[name].array[::-1]
    elif hasattr(x, "iloc") and "Sparse" not in str(x.dtype):
        x.iloc[:] = x.array[::-1].copy()
    return x
'''

SHOW = """
def show(x):
    name = type(x).__name__
    if isinstance(x, dict | list | tuple):
        inside = x.items() if isinstance(x, dict) else enumerate(x)
        return f"{name}({', '.join(f'{key!r}: {show(value)}' for key, value in inside)})"
    if hasattr(x, "__dataclass_fields__") or name == "TensorDict":
        inside = dict(x.items()) if name == "TensorDict" else vars(x)
        return f"{name} {list(getattr(x, 'batch_size', ''))} {show(inside)}"
    if hasattr(x, "iloc"):
        columns = [(c, x[c]) for c in x] if name == "DataFrame" else [(x.name, x)]
        columns = [(c, one.dtype, short(one.tolist())) for c, one in columns]
        return f"{name} {columns} at {x.index.dtype} {x.index.names} {x.index.tolist()}"
    if hasattr(x, "tolist"):
        n, numbers = (x.numel(), x.resolve_conj().numpy) if hasattr(x, "numel") else (x.size, x.copy)
        return f"{name} {x.dtype} {tuple(x.shape)} {x.tolist() if n < 999 else short(numbers().tobytes())}"
    return f"{name} {short(x)!r}"

def short(x):
    if isinstance(x, list):
        return list(map(short, x))
    return ("long", len(x), zlib.crc32(x)) if isinstance(x, bytes) and len(x) > 99 else x
"""

CLASSES = {
    "Pair": 'Pair = collections.namedtuple("Pair", "a b")',
    "Record": 'Record = dataclasses.make_dataclass("Record", ["a", "b"])',
}

HELPERS = {
    "late": """
def late(method, *args):
    try: return method.options(timeout=0.05)(*args)
    except bm.CallTimeout as error:
        error.future.cancel()
        raise
""",
    "cancelled": """
def cancelled(future):
    future.cancel()
    return future.result()
""",
    "fallen": """
def fallen(group, *args):
    try: return group.die(*args)
    finally: group.restart()
""",
    "fenced": """
def fenced(group, *args):
    failing, next_call = group.apart.submit(*args), group.clock.submit()
    times = next_call.result()
    try: return min(times[rank][0] for rank in args[-1]) >= max(ended for _, ended in times)
    finally: failing.exception()
""",
    "interrupted": """
def interrupted(call, seconds):
    timer = threading.Timer(seconds, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    with contextlib.suppress(KeyboardInterrupt):
        try:
            timer.start()
            call()
        finally:
            timer.cancel()
            timer.join()
""",
    "in_threads": """
def in_threads(n, call):
    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        return [one.result() for one in [pool.submit(call) for _ in range(n)]]
""",
    "awaited": """
async def awaited(future):
    return await future
""",
    "some_of": """
def some_of(stream, n):
    with contextlib.closing(stream):
        return len([item.result() for item in itertools.islice(stream, n)])
""",
}

# What begins a branch: the names of which one is used where the branch is needed, and how many lines it has.
BRANCHES = {
    'elif type(x).__module__ == "torch"': ("torch", 2),
    'elif type(x).__name__ == "DataFrame"': ("pd", 3),
    "elif isinstance(x, tuple)": ("Pair", 2),
    'elif hasattr(x, "__dataclass_fields__")': ("Record", 2),
    'elif type(x).__name__ == "TensorDict"': ("TensorDict", 2),
    'elif hasattr(x, "iloc") and "Sparse" not in str(x.dtype)': ("pd", 2),
    'if hasattr(x, "iloc")': ("pd", 4),
    'if hasattr(x, "__dataclass_fields__") or name == "TensorDict"': ("Record TensorDict", 3),
}

_NAMES = re.compile(r"\w+")


def class_code(methods, is_registered=True):
    """The class with these methods, as a script has it."""
    lines = ["class Subject(bm.Worker):" if is_registered else "class Subject:"]
    for method in methods:
        protocol, text = METHODS[method]
        lines += [f"    @bm.register({PROTOCOLS.get(protocol, repr(protocol))})"] if is_registered else []
        lines += [textwrap.indent(text, "    ")]
    return "\n".join(lines)


def words_of(code):
    """The names in some code."""
    return set(_NAMES.findall(code))


def without_branches(code, used):
    """The code of `bump` or `show`, without what values need of which the module is not used."""
    lines = code.strip().splitlines()
    for i in reversed(range(len(lines))):
        needed, size = BRANCHES.get(lines[i].strip().rstrip(":"), ("", 0))
        if needed and used.isdisjoint(needed.split()):
            del lines[i : i + size]
    return "\n".join(line for line in lines if not line.strip().startswith('"""')) + "\n"
