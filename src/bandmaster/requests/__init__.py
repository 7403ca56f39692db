"""Requests: calls of one replica each, which run beside each other, and come back in any order.

::

    RequestMethod ──► Request ──► Router: a replica for it, or it waits ──► Workers.request ──► ranks
    RequestStream ──► GeneratorRequest, whose items come as they are made, and MORE_ITEMS as they are taken
    Future        ◄── Request ◄── replies, read by the thread that waits, or by LoopReader in an event loop

    RequestMethod.map ──► map_rows  ──► MapFeed, a feed of `flow`: the next request when one has ended ──► Router
    Mapped: part by part, or the whole ◄──────┘
"""
