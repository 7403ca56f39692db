"""The tensors that a model's loader expects: those of the headers of its safetensors files."""

from __future__ import annotations

import json
import struct
from collections import Counter
from math import prod
from pathlib import Path

from bandmaster.rl.layout import NBYTES, Spec

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
NAME = "model.safetensors"
FLOATS = ("float16", "bfloat16", "float32", "float64")


def checkpoint_specs(folder: Path) -> dict[str, Spec] | None:
    """The tensors of the safetensors files of a model, in the order of their bytes; None if there are no such files.

    Args:
        folder: Its folder, which may have others beside them, such as the same weights in one file by other names.

    Source: https://huggingface.co/docs/safetensors, for the format of headers.
    """
    specs: dict[str, Spec] = {}
    for file in checkpoint_files(folder):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if one["dtype"] not in DTYPES:
                return None
            specs[name] = tuple(one["shape"]), DTYPES[one["dtype"]]
    return specs or None


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would load: the one of its name, or those of the index, or any."""
    index, alone = folder / f"{NAME}.index.json", folder / NAME
    if alone.exists() or not index.exists():
        return [alone] if alone.exists() else sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def as_engine_has_them(specs: dict[str, Spec], dtype: str) -> dict[str, Spec]:
    """The specs of tensors once an engine has loaded them: those of the checkpoint's main dtype have the engine's.

    A tensor of another dtype, such as a scale in float32 beside weights in bfloat16, keeps its own.
    """
    nbytes: Counter[str] = Counter()
    for shape, kind in specs.values():
        nbytes[kind] += prod(shape) * NBYTES[kind]
    main = max(nbytes, key=nbytes.__getitem__, default="")
    if main not in FLOATS:
        return specs
    return {name: (shape, dtype if kind == main else kind) for name, (shape, kind) in specs.items()}
