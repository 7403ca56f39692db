"""Linux: processes, cgroups, hardware, signals, forks, threads and memory, as far as the other rooms need them.

The modules here know nothing of workers and calls, and do not depend on each other's state.
"""
