"""How values and calls travel: the codec, and what runs in a worker process."""
