"""Weights into inference engines: staged beside the running engines, and used once all replicas have staged them.

::

    controller: EngineSync     asks, passes handles and versions; no byte of a weight passes through it

    source: PacksWeights                              target: TakesWeights, a replica of an engine
      snapshot_weights   cast, kept for deltas          begin_weights    says which version is held
      pack_weights ────► rows, with checksums ────────► stage_weights    StagedWeights, a file in memory
                         (they stay where they are                │
                         made; the controller passes    use_weights ── pause, load, reset caches, resume ──► the engine
                         handles)                       revert_weights, confirm_weights
                                                        give_weights ──► rows for a replica that was replaced

`staged.py` has the tensors in memory, `changes.py` encodes the elements that have changed, `packing.py` what goes from
rank to rank, `source.py` and `target.py` the methods of workers, `checkpoint.py` the names that vLLM's loader expects,
`sync.py` the controller's side, and `healing.py` replaces replicas that die.
"""
