"""Inference engines as workers: one interface, `Engine`, and one module for each kind of engine.

::

    caller                                   worker: an Engine
    group.generate(rows, sampling) ───────►  generate ── checks all prompts ──► answer_all ─┐
    group.request(prompt, sampling) ──────►  request ─── checks the prompt ───► answers     ├──► the engine itself
    group.tokens.stream(prompt, sampling) ►  tokens ──── checks the prompt ───► increments ─┘
    group.pause.all("keep") ──────────────►  pause, resume, abort, sleep, wake, reset_cache, metrics

`interface.py` has what all engines share, `sampling.py` how tokens are chosen, `answers.py` the values that come back,
and `vllm.py` the engine that runs vLLM. Nothing here imports torch or vLLM before a worker needs it.
"""
