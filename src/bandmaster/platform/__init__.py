"""Linux facilities that the other rooms use: processes, cgroups, hardware, signals, forks, threads and memory.

The modules here do not know about workers or calls. Import names from the modules; this package exports none.
"""
