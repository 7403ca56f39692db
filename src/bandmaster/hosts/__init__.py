"""Agents: the process on each other host that has the lanes to the workers there, and one link to the controller.

::

    controller                               another host
    AgentWorkers ── AgentLinks ── link ──► AgentServer ── HostRanks ── lanes ──► workers
      (a group)     (all links)              (a process)   (a group)
                                             serve_rows ◄─ connections of agents of other hosts, which fetch rows

A call is one message for each host, whatever the number of its ranks; the replies of a host come together. The bytes of
calls and replies are those of lanes (`bandmaster.wire.messages`). Nothing here knows what started the workers: that is
`bandmaster.backends.ray.agents`, or in tests anything else.
"""
