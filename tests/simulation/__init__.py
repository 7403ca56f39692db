"""A simulated world: the true code of calls, requests, lanes and their threads under one seed, in one process.

::

    seed ──► program: threads of the controller that call, wait, cancel, ...           (`simulation.program`)
               │ steps of one kind: maps and streams, rows, faults                  (`simulation.maps`, ...)
               │ true code: groups, calls, requests, router, progress, watching, wire.client, lanes, poller
               │      its clock, locks, threads, polls and sockets are those of the world (`simulation.install`)
               ▼
             world: one thread runs at a time; the seed says which is next             (`simulation.world`)
               │ virtual time passes when no thread can run
               ▼
             ranks: read messages, run methods, reply, fail, hang, die, as the seed says (`simulation.ranks`)
               │    where workers call others, processes with the library's own loop  (`simulation.workers`)
               ▼
             history ──► checks: each call ends once, by its own value; order; leases    (`simulation.program`)

No worker process is started and nothing waits in real time. The path is not changed for it: modules get other objects
for `threading`, `time`, `select` and `os` while a program runs. ``python -m simulation --seed 7`` repeats a program.
"""
