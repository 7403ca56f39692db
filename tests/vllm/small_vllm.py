"""The options of vLLM in tests: small, and the same numbers as transformers."""

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 27,
}
