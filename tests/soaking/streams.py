"""Streams of plain methods, of generators and of maps: what is read from them, and whether that is right."""

import asyncio
from collections import Counter

import numpy as np
from soaking.expected import Wrong
from soaking.subject import same


class Reading:
    """A stream with the rows that it was made of.

    Args:
        rng: Draws the stream.
        group: Of `Subject`.
    """

    def __init__(self, rng, group):
        n = rng.choice([0, 1, 2, 3, rng.randrange(4, 40)])
        self._rows = rng.choice([[*range(n)], np.arange(3 * n).reshape(n, 3)])
        self._kind = rng.choice(["rows", "rows_async", "items", "items_async", "chunks"])
        self._n_most = rng.choice([None, None, 1, rng.randint(1, 20)])
        self._is_awaited = rng.random() < 0.3
        self._items, self._is_complete = [], False
        maxsize = rng.randint(1, 4)
        if self._kind == "chunks":
            self._stream = group.ask.map(self._rows, chunk=rng.randint(1, 5), maxsize=maxsize)
        else:
            self._stream = getattr(group, self._kind).options(maxsize=maxsize).stream(self._rows)

    def read(self, between):
        """Read items to the end, or some of them, and close the stream.

        Args:
            between: Called after each item.
        """
        with self._stream:
            if self._is_awaited:
                asyncio.run(self._read_awaiting())
                return
            for item in self._stream:
                between()
                if self._note(item):
                    return
            self._is_complete = True

    async def _read_awaiting(self):
        async for item in self._stream:
            if self._note(item):
                return
        self._is_complete = True

    def _note(self, item):
        """Whether that is enough."""
        self._items.append((item.rank, [*item.numbers], item.result()))
        return len(self._items) == self._n_most

    def check(self):
        """Compare the items with the rows.

        Raises:
            Wrong: An item is not what it should be; or all were read, and one did not come, or came twice.
        """
        read, places = [], Counter()
        for rank, numbers, value in self._items:
            if self._kind.startswith("items"):
                numbers = numbers[places[rank] : places[rank] + 1]  # the next one of that rank
                places[rank] += 1
                value = [value] if isinstance(self._rows, list) else np.stack([value])
            expected = self._rows[numbers] if isinstance(self._rows, np.ndarray) else numbers
            if not same(value, expected):
                raise Wrong(f"an item of {self._kind} from rank {rank} is {value!r} and not {expected!r}")
            read += numbers
        if self._is_complete and sorted(read) != [*range(len(self._rows))]:
            raise Wrong(f"of {len(self._rows)} rows, a stream of {self._kind} gave {sorted(read)}")
