"""Peers whose workers are on the other hosts of a Ray cluster, half of them on each of two; see `benchmarks/hosts.py`.

`agents` is bandmaster, `plain_ray` is Ray by hand, `floor` bare sockets, and `monarch` is Monarch, which needs no Ray.
The hosts of `one_each` and `eight_each` are simulated.
"""
