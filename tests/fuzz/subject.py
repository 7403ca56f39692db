"""The worker class of random programs: its methods as text, which the library, the oracle and a script are made of."""

from __future__ import annotations

import re
import textwrap

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
    "fail": (
        "DP_PROTO",
        "def fail(self, rows, at):\n    if self.rank in at: raise ValueError('asked to')\n    return rows",
    ),
}

BUMP = '''
def bump(x):
    """Change everything in place."""
    if isinstance(x, dict | list):
        for key in x if isinstance(x, dict) else range(len(x)):
            x[key] = bump(x[key])
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
    if hasattr(x, "iloc"):
        columns = [(c, x[c].dtype, x[c].tolist()) for c in x] if name == "DataFrame" else [x.name, x.dtype, x.tolist()]
        return f"{name} {columns} at {x.index.dtype} {x.index.names} {x.index.tolist()}"
    return f"{name} {x.dtype} {tuple(x.shape)} {x.tolist()}" if hasattr(x, "tolist") else f"{name} {x!r}"
"""

# What begins a branch that only these values need, and how many lines it has.
BRANCHES = {
    'elif type(x).__module__ == "torch"': ("torch", 2),
    'elif type(x).__name__ == "DataFrame"': ("pd", 3),
    'elif hasattr(x, "iloc") and "Sparse" not in str(x.dtype)': ("pd", 2),
    'if hasattr(x, "iloc")': ("pd", 3),
}

_NAMES = re.compile(r"\w+")


def class_code(methods, is_registered=True):
    """The class with these methods, as a script has it."""
    lines = ["class Subject(bm.Worker):" if is_registered else "class Subject:"]
    for method in methods:
        protocol, text = METHODS[method]
        lines += [f'    @bm.register("{protocol}")'] if is_registered else []
        lines += [textwrap.indent(text, "    ")]
    return "\n".join(lines)


def words_of(code):
    """The names in some code."""
    return set(_NAMES.findall(code))


def without_branches(code, used):
    """The code of `bump` or `show`, without what values need of which the module is not used."""
    lines = code.strip().splitlines()
    for i in reversed(range(len(lines))):
        module, size = BRANCHES.get(lines[i].strip().rstrip(":"), (None, 0))
        if module not in (None, *used):
            del lines[i : i + size]
    return "\n".join(line for line in lines if not line.strip().startswith('"""')) + "\n"
