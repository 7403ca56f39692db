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
    "EVEN": 'bm.TransferProtocol(bm.Split("dp", balance="a"), bm.Gather("dp"))',
    "ASKED": "'REQUEST', concurrency=4",
    "ASKED_AGAIN": "'REQUEST', concurrency=4, is_idempotent=True",
    "BALANCED": 'bm.TransferProtocol(bm.Split("dp", balance="a"), bm.Concat("dp"))',
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
    "drip": ("DP_PROTO", "def drip(self, rows):\n    yield rows\n    __import__('time').sleep(0.005)\n    yield rows"),
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
        "def hang(self, rows, at):\n    time = __import__('time')\n    class Slow:\n"
        "        def __del__(self): time.sleep(0.005)\n"
        "    while self.rank in at:\n        time.sleep(0.005)\n        Slow()\n    return rows",
    ),
    "die": (
        "DP_PROTO",
        "def die(self, rows, at):\n    if self.rank in at:\n"
        "        print('words', file=__import__('sys').stderr, flush=True)\n"
        "        __import__('time').sleep(0.02)\n"
        "        print('last words of rank', self.rank, file=__import__('sys').stderr, flush=True)\n"
        "        __import__('os')._exit(3)\n    return rows",
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
    "over": ("DP_PROTO", "def over(self, rows): return rows"),
    "order": (
        "DP_PROTO",
        "def order(self, rows): return dict(reversed(rows.items())) if type(rows) is dict and self.rank % 2 else rows",
    ),
    "endless": ("DP_PROTO", "def endless(self, rows):\n    while True: yield rows"),
    "crawl": (
        "DP_PROTO",
        "def crawl(self, rows):\n    while True:\n        __import__('time').sleep(0.02)\n        yield rows",
    ),
    "trickle": (
        "DP_PROTO",
        "def trickle(self, rows, at):\n    yield rows\n"
        "    if self.rank in at: raise ValueError('asked to')\n    yield rows",
    ),
    "not_one": (
        "DP_PROTO",
        "def not_one(self, rows):\n    if len(rows) == 1: raise ValueError('one row')\n    return rows",
    ),
    "waits": (
        "DP_PROTO",
        "async def waits(self, rows, at):\n    asyncio = __import__('asyncio')\n"
        "    async def dies(): raise ValueError('asked to')\n    dead = asyncio.ensure_future(dies())\n"
        "    try:\n        await asyncio.sleep(0)\n        while self.rank in at: await asyncio.sleep(0.005)\n"
        "    finally: dead.done() and dead.exception()\n    return rows",
    ),
    "sift": (
        "DP_PROTO",
        "def sift(self, rows):\n    found = rows[[bool((row < 4).all()) for row in rows]]\n"
        "    return found if len(found) else found * 1.5",
    ),
    "recat": (
        "DP_PROTO",
        "def recat(self, rows):\n"
        "    for name in list(rows) if type(rows).__name__ == 'DataFrame' else ():\n"
        "        if str(rows[name].dtype) == 'category':\n"
        "            rows[name] = rows[name].cat.remove_unused_categories()\n"
        "    is_category = type(rows).__name__ == 'Series' and str(rows.dtype) == 'category'\n"
        "    return rows.cat.remove_unused_categories() if is_category else rows",
    ),
    "unlike": ("DP_PROTO", "def unlike(self, rows): return list(rows) if len(rows) == 1 else rows"),
    "forks": (
        "DP_PROTO",
        "def forks(self, rows):\n    os = __import__('os')\n    child = os.fork()\n    if not child: os._exit(0)\n"
        "    os.waitpid(child, 0)\n    return rows",
    ),
    "fades": (
        "DP_PROTO",
        "def fades(self, rows, at):\n    yield rows\n    if self.rank in at: __import__('os')._exit(3)\n    yield rows",
    ),
    "deaf": (
        "DP_PROTO",
        "def deaf(self, rows, at):\n    time = __import__('time')\n    time.sleep(0.02)\n"
        "    if self.rank in at: raise ValueError('asked to')\n    while True:\n"
        "        try: time.sleep(1)\n        except KeyboardInterrupt: pass",
    ),
    "tidy": (
        "DP_PROTO",
        "def tidy(self, rows):\n    self.n_open = self.__dict__.get('n_open', 0) + 1\n    try:\n"
        "        while True: yield rows\n    finally: self.n_open -= 1",
    ),
    "left_open": ("ONE_TO_ALL", "def left_open(self): return self.__dict__.pop('n_open', 0)"),
    "costs": ("EVEN", "def costs(self, rows): return [float(cost) for cost in rows['a']]"),
    "evened": ("BALANCED", "def evened(self, rows): return rows"),
    "descriptors": ("ONE_TO_ALL", "def descriptors(self): return len(__import__('os').listdir('/proc/self/fd'))"),
    "pid": ("ONE_TO_ALL", "def pid(self): return __import__('os').getpid()"),
    "agents": (  # the processes of the library on this host, besides its ranks
        "",
        "def agents(self):\n    found = []\n    for name in __import__('os').listdir('/proc'):\n"
        "        try: is_one = name.isdigit() and 'BandmasterAgent' in open(f'/proc/{name}/cmdline').read()\n"
        "        except OSError: continue  # it has ended\n"
        "        if is_one: found.append(int(name))\n    return found",
    ),
    "sockets": (
        "ONE_TO_ALL",
        "def sockets(self):\n    os = __import__('os')\n    folders = [f'/proc/{pid}/fd/' for pid in self.agents()]\n"
        "    return sum('socket' in os.path.realpath(f + fd) for f in folders for fd in os.listdir(f))",
    ),
    "squeeze": (
        "ONE_TO_ALL",
        "def squeeze(self, n):\n    resource, os = __import__('resource'), __import__('os')\n"
        "    for pid in self.agents():\n        taken = set(map(int, os.listdir(f'/proc/{pid}/fd')))\n"
        "        free = [fd for fd in range(4096) if fd not in taken]\n"
        "        most = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]\n"
        "        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most if n is None else free[n], most))",
    ),
    "pause": (
        "ONE_TO_ALL",
        "def pause(self, seconds):\n    os, signal = __import__('os'), __import__('signal')\n"
        "    for pid in self.agents():\n"
        "        __import__('threading').Timer(seconds, os.kill, [pid, signal.SIGCONT]).start()\n"
        "        os.kill(pid, signal.SIGSTOP)",
    ),
    "stops": (
        "DP_PROTO",
        "async def stops(self, rows, at):\n    stage = 0\n    if self.rank in at: breakpoint()\n"
        "    stage = 1\n    await __import__('asyncio').sleep(0.005)\n"
        "    stage = 2\n    await __import__('asyncio').sleep(0.005)\n    stage = 3\n    return rows",
    ),
    "crowd": (
        "DP_PROTO",
        "async def crowd(self, rows, at):\n    asyncio = __import__('asyncio')\n"
        "    if self.rank in at: await asyncio.gather(*[asyncio.sleep(20) for _ in at])\n    return rows",
    ),
    "ask": (
        "ASKED",
        "async def ask(self, value, seconds=0.0):\n    await __import__('asyncio').sleep(seconds)\n"
        "    return bump(value)",
    ),
    "ask_items": (
        "ASKED",
        "async def ask_items(self, value, n):\n    value = bump(value)\n"
        "    for _ in range(n):\n        await __import__('asyncio').sleep(0)\n        yield value",
    ),
    "ask_safely": (
        "ASKED_AGAIN",
        "async def ask_safely(self, value, seconds=0.0):\n    await __import__('asyncio').sleep(seconds)\n"
        "    return bump(value)",
    ),
    "ask_version": (
        "ASKED",
        "async def ask_version(self, version=None):\n"
        "    if version is not None: __import__('bandmaster').report(self, version=version)\n    return self.rank",
    ),
    "ask_rank": ("ASKED", "async def ask_rank(self): return self.rank"),
    "ask_end": ("ASKED", "async def ask_end(self): __import__('os')._exit(3)"),
    "on_replace": ("", "def on_replace(self, rank, state): ..."),
}
# For methods whose rows a map sends in chunks: the same as a request, named "map_" and the name of the method.
MAPPED = ["same", "micro", "pair", "sift", "slow", "not_one", "unlike"]
METHODS |= {f"map_{name}": ("ASKED", METHODS[name][1].replace("def ", "async def map_", 1)) for name in MAPPED}
NOT_DRAWN = {
    "items",
    "drip",
    "fail",
    "forget",
    "hang",
    "die",
    "apart",
    "clock",
    "endless",
    "crawl",
    "trickle",
    "not_one",
}
NOT_DRAWN |= {
    "ask",
    "ask_items",
    "ask_safely",
    "ask_version",
    "ask_rank",
    "ask_end",
    "unlike",
    "forks",
    "fades",
    "deaf",
    "waits",
    "tidy",
    "left_open",
    "costs",
    "evened",
    "descriptors",
    "on_replace",
    "pid",
    "agents",
    "sockets",
    "squeeze",
    "pause",
    "stops",
    "crowd",
}  # which steps of their own call
NOT_DRAWN |= {f"map_{name}" for name in MAPPED}
INHERITED = {"over"}  # which are registered in a class above

BUMP = '''
def bump(x):
    """Change everything in place."""
    if isinstance(x, dict | list):
        for key in x if isinstance(x, dict) else range(len(x)):
            x[key] = bump(x[key])
    elif isinstance(x, tuple):
        for one in x: bump(one)
    elif hasattr(x, "__dataclass_fields__") or type(x).__name__ == "Texts":
        bump(vars(x))
    elif type(x).__name__ == "TensorDict":
        for key in x.keys(): bump(x[key])
    elif isinstance(x, np.ndarray) and x.dtype.kind in "biufcmM":
        x[...] = ~x if x.dtype.kind == "b" else x + x.dtype.type(1) if x.dtype.kind in "iufc" else x + 1
    elif type(x).__module__ == "torch" and x.layout is torch.strided:
        x.data.copy_(~x if str(x.dtype) == "torch.bool" else x + 1)
    elif type(x).__name__ == "NestedTensor":
        x.values().add_(1)
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
    if hasattr(x, "__dataclass_fields__") or name in ("TensorDict", "Texts"):
        inside = dict(sorted(x.items())) if name == "TensorDict" else vars(x)
        return f"{name} {list(getattr(x, 'batch_size', ''))} {show(inside)}"
    if hasattr(x, "iloc"):
        columns = [(c, x[c]) for c in x] if name == "DataFrame" else [(x.name, x)]
        columns = [(c, one.dtype, short(one.tolist())) for c, one in columns]
        names = [x.index.names, *([x.columns.names] if name == "DataFrame" else [])]
        return f"{name} {columns} at {x.index.dtype} {names} {x.index.tolist()}"
    if getattr(x, "is_sparse", False):
        return f"{name} {x.layout} {show(x.to_dense())}"
    if name == "NestedTensor":
        return f"{name} {x.dtype} {x.layout} {list(map(show, x.unbind()))}"
    if hasattr(x, "numel"): x = x.detach()
    if hasattr(x, "tolist") and (x.numel() if hasattr(x, "numel") else x.size) > 999 and str(x.dtype) != "object":
        x = x.float() if str(x.dtype) == "torch.bfloat16" else x
        numbers = np.array(x.resolve_conj() if hasattr(x, "numel") else x)
        numbers = numbers.astype("f8") if numbers.dtype == np.longdouble else numbers  # which has bytes without meaning
        return f"{name} {x.dtype} {tuple(x.shape)} {short(numbers.tobytes())}"
    if hasattr(x, "tolist"):
        return f"{name} {x.dtype} {tuple(x.shape)} {x.tolist()}"
    return f"{name} {short(x)!r}"
def short(x):
    if isinstance(x, list):
        return list(map(short, x))
    return ("long", len(x), zlib.crc32(x)) if isinstance(x, bytes) and len(x) > 99 else x
"""

CLASSES = {
    "Texts": """
class Texts:
    def __init__(self, texts, lengths): self.texts, self.lengths = texts, lengths
bm.register_batch_type(
    Texts, rows=lambda x: len(x.texts), split=lambda x, i, j: Texts(x.texts[i:j], x.lengths[i:j]),
    concat=lambda many: Texts([one for x in many for one in x.texts], np.concatenate([x.lengths for x in many])))
""",
    "Pair": 'Pair = collections.namedtuple("Pair", "a b")',
    "Record": 'Record = dataclasses.make_dataclass("Record", ["a", "b"])',
}

HELPERS = {
    "interrupted": """
def interrupted(call, seconds, at=0):
    def pressed(_, frame):
        while frame and frame.f_code is not call.__code__:
            if frame.f_code.co_name == "__del__": return  # Python would print it and forget it
            frame = frame.f_back
        if frame: raise KeyboardInterrupt  # in the call alone
    def counted(frame, event, what):
        nonlocal at
        is_made = event == "c_call" and what.__name__ in ("pipe", "start_new_thread", "fork_exec", "memfd_create")
        at = -at if at < 0 and is_made else at
        is_ours = frame.f_globals.get("__name__", "").startswith(("bandmaster", "subprocess"))
        is_ours = is_ours and frame.f_code.co_name != "__del__"
        at -= at > 0 and is_ours and event in ("call", "c_return")
        if not at:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)
    main = threading.get_ident()
    presses = [threading.Timer(one, signal.pthread_kill, [main, signal.SIGINT]) for one in seconds]
    before = signal.signal(signal.SIGINT, pressed)
    for one in presses: one.start()
    with contextlib.suppress(KeyboardInterrupt):
        if at: sys.setprofile(counted)
        call()
    sys.setprofile(None)
    for one in presses: one.join()
    signal.signal(signal.SIGINT, before)
""",
    "told": """
def told(future):
    word = threading.Event()
    future.add_done_callback(lambda _: word.set())
    return word
""",
    "heard": """
def heard(group, call, seconds, at):
    words = []
    for one in at:
        first = group.descriptors.submit()
        words.append(told(first))
        def both():
            call()
            first.result()
        interrupted(both, seconds, one)
    words.append(told(group.descriptors.submit()))
    return all([word.wait(20) for word in words])
""",
    "answered": """
def answered(group):
    asked = [group.ask(0) for _ in range(9)]  # more than have a place at a time
    return len([one.result(timeout=20) for one in asked]) == 9
""",
    "as_one_ends": """
async def as_one_ends(group, nth, ask, rows, n):
    async def outcome(k):
        try: return await ask(rows, 0.002 * (k % 4))
        except bm.WorkerDied as error: return error
    n_replicas = len(group.ask_rank.all().result())
    asked = [asyncio.ensure_future(outcome(k)) for k in range(n)]
    await asyncio.sleep(0.003)
    try: await group.ask_end.options(replica=nth % n_replicas)()
    except bm.WorkerDied: pass
    return n_replicas, await asyncio.gather(*asked)
""",
    "held_up": """
def held_up(nth):
    reached, numbers = threading.Event(), itertools.count(1)
    def hold(frame, event, _):
        is_ours = frame.f_globals.get("__name__", "").startswith("bandmaster")
        if event == "return" and is_ours and next(numbers) == nth:
            reached.set()
            time.sleep(0.05)  # as long as a group needs to be closed
    threading.setprofile(hold)
    return reached
""",
    "SlowTerminal": """
class SlowTerminal(io.StringIO):
    def write(self, text):
        time.sleep(0.05)
        return len(text)
""",
    "settled": """
def settled(most, name=""):
    from bandmaster.testing import held_resources
    end = time.monotonic() + 5
    while True:
        n = sum(name in one for one in held_resources(["segments"]).segments.values())
        if n <= most or time.monotonic() > end: return n
        time.sleep(0.02)
""",
    "awaited": """
async def awaited(future):
    return await future
""",
}

# What begins a branch: the names of which one is used where the branch is needed, and how many lines it has.
BRANCHES = {
    'elif type(x).__module__ == "torch" and x.layout is torch.strided': ("torch", 2),
    'elif type(x).__name__ == "NestedTensor"': ("nested", 2),
    'if getattr(x, "is_sparse", False)': ("to_sparse", 2),
    'if name == "NestedTensor"': ("nested", 2),
    'if hasattr(x, "numel"): x = x.detach()': ("torch", 1),
    'if hasattr(x, "tolist") and (x.numel() if hasattr(x, "numel") else x.size) > 999 and str(x.dtype) != "object"': (
        "9000",
        5,
    ),
    "def short(x)": ("9000 bytes", 4),
    'elif type(x).__name__ == "DataFrame"': ("pd", 3),
    "elif isinstance(x, tuple)": ("Pair", 2),
    'elif hasattr(x, "__dataclass_fields__") or type(x).__name__ == "Texts"': ("Record Texts", 2),
    'elif type(x).__name__ == "TensorDict"': ("TensorDict", 2),
    'elif hasattr(x, "iloc") and "Sparse" not in str(x.dtype)': ("pd", 2),
    'if hasattr(x, "iloc")': ("pd", 5),
    'if hasattr(x, "__dataclass_fields__") or name in ("TensorDict", "Texts")': ("Record TensorDict Texts", 3),
}

_NAMES = re.compile(r"\w+")


def class_code(methods, is_registered=True):
    """The class with these methods, as a script has it."""
    above = INHERITED.intersection(methods) if is_registered else ()
    lines = ["class Above(bm.Worker):", *(_method_code(name, "raise NotImplementedError") for name in above)] * bool(
        above
    )
    lines += [f"class Subject({'Above' if above else 'bm.Worker'}):" if is_registered else "class Subject:"]
    return "\n".join(
        lines + [_method_code(name, is_registered=is_registered and name not in above) for name in methods]
    )


def _method_code(name, body="", is_registered=True):
    protocol, text = METHODS[name]
    text = text.split(":")[0] + f": {body}" if body else text
    is_registered = is_registered and protocol
    head = f"    @bm.register({PROTOCOLS.get(protocol, repr(protocol))})\n" if is_registered else ""
    return head + textwrap.indent(text, "    ")


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
    text = "\n".join(line for line in lines if not line.strip().startswith('"""')) + "\n"
    return text if "def short" in text else text.replace("short(x)", "x").replace("short(one.tolist())", "one.tolist()")
