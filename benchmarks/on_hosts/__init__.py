"""Parts of `hosts.py`: what calls and rows cost to ranks on other hosts.

::

    hosts.py ─► parts.py (one function per question) ─► stage.py: peers take turns, traffic is counted
                                                           │ lines of JSON, into the namespaces of host 0
                                                           ▼
                harness.child on host 0 ─► peers/on_hosts/<name>.py ─► ranks on hosts 1 and 2

`testbed.py` has the hosts, `peers.py` the peers, `goals.py` what is to be reached, `page.py` tables and the page.
"""
