"""The peers: one module each, with a class `Peer` that does the same work by that library's own best means.

Every `Peer` has these methods, and its workers do what `peers.desk.Desk` does, whichever library carries the calls::

    start(n_workers)               workers are there and have answered
    noop()                         1 to every rank, and back: a list
    load_torch()                   every rank imports torch: a list of True
    broadcast(array)               the same array to every rank, which reads 64 places of it: a list of their sums
    broadcast_read_all(array)      the same, and every rank reads all of it
    split_inc_concat(array)        rows to the ranks, each adds 1, the results joined in order: one array
    gather(nbytes, token)          so many bytes from every rank, the first item being the token: a list of arrays
    chain(nbytes, token)           rows of so many bytes in all that hold the token, made by the ranks; n/2 workers more
                                   add 1; the ranks read them: a list of their sums. Not of Monarch
    hold(nbytes, n_rows, is_each_an_object)  the ranks make rows, which hold their numbers, and keep them; as an object
                                   each, if that is asked and there is such a thing. Not of Monarch and verl
    mini_batch(numbers)            these rows, split over the ranks: a list of the sums of their numbers
    long_tail(seconds)             rows that take so long are done by whoever is free: the same rows. Not of Monarch and
                                   verl. The floor knows beforehand how long each takes
    long_tail_split(seconds)       the same in equal parts; the floor does what it does for `long_tail`
    stop()

Peers on several hosts (`peers.on_hosts`) have these::

    make_on_first(nbytes, token)   rows that hold the token, made by a worker of the first host: what names them there
    await_rows(rows)               these rows are there
    read_on_second(rows)           a worker of the second host reads 64 places of them: a list of their sum
"""
