"""Agents: the process on each other host that has the lanes to the workers there, and one link to the controller.

::

    controller                               another host
    AgentWorkers ── Fabric ──── link ────► AgentServer ── Hosted ── lanes ──► workers
      (a group)     (all links)              (a process)   (a group)
                                             RowServer ◄── link ── agents of other hosts, which fetch rows

A call is one message for each host, whatever the number of its ranks; the replies of a host come together. Nothing here
knows what started the workers: that is `bandmaster.backends.ray.agents`, or in tests anything else.
"""
