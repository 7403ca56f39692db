"""Renders a failing program as a script that runs by itself."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import zlib

import tensordict
import torch

from fuzz.oracle import Expected
from fuzz.scenes import SCENES
from fuzz.steps import expectations
from fuzz.subject import BUMP, CLASSES, HELPERS, METHODS, SHOW, class_code, without_branches, words_of

PLAIN = (asyncio, collections, contextlib, dataclasses, itertools, os, resource, signal, subprocess, sys)
PLAIN += (tensordict, threading, time, torch, zlib)
IMPORTS = {"np": "import numpy as np", "pd": "import pandas as pd", "concurrent": "import concurrent.futures"}
IMPORTS |= {module.__name__: f"import {module.__name__}" for module in PLAIN}


def script_of(program, failure, backend, seed):
    """Python that ends with an AssertionError, or with the wrong error, as long as the program fails.

    Args:
        program: Up to the step that fails.
        failure: How.
        backend: Name of the backend.
        seed: Of which the program was made, before it was shrunk.
    """
    expected = expectations(program)
    lines = [line for step, want in zip(program[:-1], expected, strict=False) for line in _lines(step, want)]
    lines += _last_lines(program[-1], expected[-1])
    helpers = HELPERS | {name: scene.code for name, scene in SCENES.items()}
    used = words_of("\n".join(lines))
    for name in [name for name in helpers if name in used]:
        used |= words_of(helpers[name])
    methods = class_code([name for name in METHODS if name in used] or ["same"])
    helpers = "".join(text.lstrip() for name, text in helpers.items() if name in used)
    helpers += "".join(f"{text}\n" for name, text in CLASSES.items() if name in used)
    used |= words_of(helpers)
    bump = without_branches(BUMP, used) if "bump" in words_of(methods) | used else ""
    show = without_branches(SHOW, used) if "show" in used else ""
    used |= words_of(methods + bump + show)
    imports = [line for name, line in IMPORTS.items() if name in used]
    head = f"# Seed {seed}, backend {backend}: step {program[-1].out} {failure.kind}."
    text = "\n".join([head, *imports, "import bandmaster as bm", helpers + bump + show + methods, *lines, ""])
    other = "local" if backend == "inprocess" else "inprocess"
    return text.replace("backend=BACKEND", f"backend={backend!r}").replace("backend=OTHER", f"backend={other!r}")


def _lines(step, want):
    if isinstance(want, Expected):
        return [f"with contextlib.suppress({_error(want)}): {step.code()}"]
    return [step.code()]


def _error(want):
    return want.error if want.error == "AttributeError" else f"bm.{want.error}"


def _last_lines(step, want):
    if isinstance(want, Expected):
        of_ranks = f" of ranks {want.ranks}" if want.ranks else ""
        missing = f'    raise AssertionError("{want.error}{of_ranks} must come")'
        return [f"with contextlib.suppress({_error(want)}):", f"    {step.code()}", missing]
    if step.is_seen:
        return [step.code(), f"want = {want!r}", f"assert show({step.out}) == want, show({step.out})"]
    return [step.code()]
