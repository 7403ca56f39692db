"""Values of random programs: data that renders to an expression, of which the value itself is made as well."""

from __future__ import annotations

from dataclasses import dataclass, replace

NUMPY = ["int64", "bool", "uint8", "int8", "uint16", "uint32", "uint64", "int32", "float16", "float32", "float64"]
NUMPY += [
    "complex64",
    "complex128",
    ">i4",
    ">f8",
    "U3",
    "S2",
    "M8[s]",
    "M8[ns]",
    "m8[ms]",
    "object",
    "longdouble",
    "i4,f8",
    "M8[D]",
    "V3",
]
TORCH = ["int64", "bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32", "float64", "complex64"]
SERIES = {
    "int64": "np.arange({0}, {1})",
    "float64": "np.arange({0}, {1}) / 2",
    "nan": "[float(i) if i % 2 else float('nan') for i in range({0}, {1})]",
    "ordered": "pd.Categorical(list(map(str, range({0}, {1}))), list('9876543210'), ordered=True)",
    "period": "pd.period_range('2024', periods={1}, freq='M')[{0}:]",
    "interval": "pd.interval_range(0, {1})[{0}:]",
    "nat": "pd.Series([pd.Timestamp(i, unit='D') if i % 2 else pd.NaT for i in range({0}, {1})], dtype='M8[ns]')",
    "Float32": "pd.array([i / 2 if i % 3 else None for i in range({0}, {1})], 'Float32')",
    "uint8": "np.arange({0}, {1}).astype('uint8')",
    "sparse": "pd.arrays.SparseArray(np.arange({0}, {1}) % 2)",
    "str": "list(map(str, range({0}, {1})))",
    "mixed": "pd.Series([(None, 'a', 2.5)[i % 3] for i in range({0}, {1})], dtype=object)",
    "category": "pd.Categorical(list(map(str, range({0}, {1}))))",
    "Int64": "pd.array([i if i % 3 else None for i in range({0}, {1})], 'Int64')",
    "boolean": "pd.array([i % 2 == 0 for i in range({0}, {1})], 'boolean')",
    "string": "pd.array(list(map(str, range({0}, {1}))), 'string')",
    "time": "pd.to_datetime(np.arange({0}, {1}), unit='h')",
    "zoned": "pd.to_datetime(np.arange({0}, {1}), unit='h', utc=True).tz_convert('Europe/Berlin')",
    "large": "pd.Series([bytes([65 + i % 99]) * 40000 for i in range({0}, {1})], dtype=object)",
    "delta": "pd.to_timedelta(np.arange({0}, {1}), unit='min')",
}
LISTS = {
    "int": "list(range({0}, {1}))",
    "mixed": "[(None, 'a', 2.5, b'b', (1, 2))[i % 5] for i in range({0}, {1})]",
    "array": "[np.arange(i) for i in range({0}, {1})]",
    "dict": "[{{'i': i}} for i in range({0}, {1})]",
    "large": "[[bytes([65 + i % 99]) * 40000] for i in range({0}, {1})]",
}
INDEXES = {
    "": "",
    "tens": ".set_axis(np.arange({0}) * 10)",
    "texts": ".set_axis(list(map(str, range({0}))))",
    "twice": ".set_axis(np.arange({0}) // 2)",
    "named": ".rename_axis('row')",
    "columns": ".rename_axis(columns='of')",
    "times": ".set_axis(pd.to_datetime(np.arange({0}), unit='D', utc=True))",
    "pairs": ".set_axis(pd.MultiIndex.from_arrays([np.arange({0}), np.arange({0})[::-1]], names=['i', 'j']))",
}
WIDE = 9000  # numbers in a row, with which a row takes 9 to 72 kB: such results stay on the ranks
OF_WIDE = ["int64", "uint8", "bool", "float32", "complex64"]  # dtypes
LAYOUTS = ["conj", "fixed", "", "[::-1]", ".T", "[::2]"]
OF_TORCH = ["sparse", "jagged", "grad"]  # layouts as well, of few dtypes


@dataclass(frozen=True)
class Leaf:
    """One array, tensor, list, Series: rows ``start`` to ``start + n``.

    Attributes:
        kind: ``"numpy"``, ``"torch"``, ``"list"`` or ``"series"``.
        dtype: One of those of the kind.
        width: Numbers in a row; 0 if a row is a number.
        layout: How the memory lies: what follows a larger array.
    """

    kind: str
    dtype: str
    n: int
    start: int = 0
    width: int = 0
    layout: str = ""

    def code(self) -> str:
        if self.kind in ("series", "list"):
            made = (SERIES if self.kind == "series" else LISTS)[self.dtype].format(self.start, self.start + self.n)
            if self.kind == "list":
                return made
            return f"pd.Series({made}{', name=' + repr(self.layout) if self.layout else ''})"
        if self.layout == "fixed":
            row = replace(self, n=1, layout="").code()
            shape = (self.n, self.width) if self.width else (self.n,)
            return f"{row}.expand({shape})" if self.kind == "torch" else f"np.broadcast_to({row}, {shape})"
        if self.layout == "conj":
            return replace(self, layout="").code() + (".conj()" if self.kind == "torch" else "")
        if self.layout == "sparse":
            return replace(self, layout="", width=2).code() + ".to_sparse()"
        if self.layout == "jagged" and not self.n:
            empty = f"torch.zeros(0, dtype=torch.{self.dtype})"
            return f"torch.nested.nested_tensor_from_jagged({empty}, torch.zeros(1).long())"
        if self.layout == "jagged":
            rows = [
                f"torch.arange({i}, {2 * i + 1}).to(torch.{self.dtype})" for i in range(self.start, self.start + self.n)
            ]
            return f"torch.nested.nested_tensor([{', '.join(rows)}], layout=torch.jagged)"
        if self.layout == "grad":
            return replace(self, layout="").code() + ".requires_grad_()"
        torch = self.kind == "torch"
        n, width, layout = self.n, self.width, self.layout if not (self.kind == "torch" and "-" in self.layout) else ""
        size = n * max(width, 1) * (2 if layout == "[::2]" else 1)
        numbers = f"{'torch' if torch else 'np'}.arange({self.start}, {self.start + size})"
        made = f"{numbers}.to(torch.{self.dtype})" if torch else f"{numbers}.astype({self.dtype!r})"
        if self.dtype == "bool":
            made = f"({numbers} % 2 == 0)"
        if width:
            rows = n * 2 if layout == "[::2]" else n
            made += f".reshape({width}, {rows})" if layout == ".T" else f".reshape({rows}, {width})"
        return made + (layout if width or layout != ".T" else "")

    def smaller(self):
        if self.n:
            yield from (replace(self, n=n) for n in sorted({0, self.n // 2, self.n - 1}))
        if self.width:
            yield replace(self, width=0)
        if self.layout:
            yield replace(self, layout="")
        if self.start:
            yield replace(self, start=0)
        plain = "int" if self.kind == "list" else "int64"
        if self.dtype != plain:
            yield replace(self, dtype=plain)
        if self.kind != "numpy":
            yield Leaf("numpy", "int64", self.n)

    def resized(self, n):
        return replace(self, n=n)


@dataclass(frozen=True)
class Columns:
    """Columns of equally many rows.

    Attributes:
        kind: ``"dict"``, ``"ordered"``, ``"frame"``, ``"tensordict"``, or for two columns ``"pair"`` and ``"record"``;
            ``"texts"`` has a list and an array, and is of a registered type.
        columns: Name and content of each. In a dict, one may have columns itself.
        index: That of a DataFrame, one of `INDEXES`.
    """

    kind: str
    columns: tuple[tuple[str, Leaf | Columns], ...]
    index: str = ""

    @property
    def n(self) -> int:
        return self.columns[0][1].n

    def code(self) -> str:
        if self.kind in ("pair", "record", "texts"):
            return f"{self.kind.title()}({', '.join(leaf.code() for _, leaf in self.columns)})"
        if self.kind != "frame":
            made = "{" + ", ".join(f"{name!r}: {leaf.code()}" for name, leaf in self.columns) + "}"
            if self.kind == "ordered":
                return f"collections.OrderedDict({made})"
            return made if self.kind == "dict" else f"tensordict.TensorDict({made}, batch_size=[{self.n}])"
        inner = ", ".join(
            f"{name!r}: {SERIES[leaf.dtype].format(leaf.start, leaf.start + leaf.n)}" for name, leaf in self.columns
        )
        made = f"pd.DataFrame({{{inner}}})"
        return made + INDEXES[self.index].format(self.n)

    def resized(self, n):
        return replace(self, columns=tuple((name, leaf.resized(n)) for name, leaf in self.columns))

    def smaller(self):
        if self.n:
            yield from map(self.resized, sorted({0, self.n // 2, self.n - 1}))
        if self.kind in ("pair", "record", "texts", "ordered"):
            yield replace(self, kind="dict")
        elif len(self.columns) > 1:
            for i in range(len(self.columns)):
                yield replace(self, columns=self.columns[:i] + self.columns[i + 1 :])
        if self.index:
            yield replace(self, index="")
        for i, (name, leaf) in enumerate(self.columns):
            for less in leaf.smaller():
                needed = {"frame": "series", "tensordict": "torch"}.get(self.kind)
                if less.n == leaf.n and needed in (None, less.kind):
                    yield replace(self, columns=(*self.columns[:i], (name, less), *self.columns[i + 1 :]))


def random_leaf(rng, n, kinds=("numpy", "numpy", "torch", "torch", "list", "series")):
    kind = rng.choice(kinds)
    if kind in ("numpy", "torch") and rng.random() < 0.15:
        return Leaf(
            kind, rng.choice(OF_WIDE), n, rng.randrange(5), WIDE, rng.choice(LAYOUTS) if rng.random() < 0.3 else ""
        )
    if kind == "torch" and n and rng.random() < 0.1:
        dtype = rng.choice(["float32", "float64"])
        return Leaf(kind, dtype, n, rng.randrange(1, 5), rng.choice([0, 3]), rng.choice(OF_TORCH))
    dtype = rng.choice({"numpy": NUMPY, "torch": TORCH, "list": list(LISTS), "series": list(SERIES)}[kind])
    width = rng.choice([0, 0, 1, 3]) if kind in ("numpy", "torch") else 0
    return Leaf(kind, dtype, n, rng.randrange(5), width, rng.choice(LAYOUTS) if rng.random() < 0.4 else "")


def random_value(rng, n=None, names="abc"):
    n = rng.choice([0, 1, 2, 3, 4, 5, 7, 7, 40] * 4 + [300]) if n is None else n
    if rng.random() < 0.35:
        return random_leaf(rng, n)
    kind = rng.choice(["dict"] * 8 + ["frame"] * 3 + ["tensordict", "pair", "record", "ordered", "texts"])
    if kind == "texts":
        return Columns(kind, (("texts", random_leaf(rng, n, ["list"])), ("lengths", Leaf("numpy", "int64", n))))
    chosen = "ab" if kind in ("pair", "record") else rng.sample(names, rng.randint(1, len(names)))
    chosen = list(map(str, chosen)) if kind == "tensordict" else chosen
    kinds = {"frame": ["series"], "tensordict": ["torch"]}.get(kind, ["numpy", "numpy", "torch", "list"])
    columns = [(name, random_leaf(rng, n, kinds)) for name in chosen]
    if kind == "tensordict":  # which cannot cut sparse tensors
        columns = [(name, replace(leaf, layout=leaf.layout.replace("sparse", ""))) for name, leaf in columns]
    if kind == "dict" and rng.random() < 0.1:
        columns[0] = (
            columns[0][0],
            Columns("dict", (("x", random_leaf(rng, n, kinds)), ("y", random_leaf(rng, n, kinds)))),
        )
    return Columns(kind, tuple(columns), rng.choice([*INDEXES, "", "", ""]) if kind == "frame" else "")
