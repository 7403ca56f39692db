"""`Arguments`: those of one request, from the moment it is submitted until it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bandmaster.calls.future import Claim, Future, claims_of
from bandmaster.calls.request import encode_group
from bandmaster.codec import Payload
from bandmaster.errors import ArgumentError
from bandmaster.plan.arguments import ArgumentGroup
from bandmaster.plan.batch import Portion

Beside = Sequence[tuple[str, Any]]  # keyword arguments that are not the method's, but the library's


class Arguments(NamedTuple):
    """The arguments of one request: values are encoded at once, and rows of futures are referred to when it is sent.

    Attributes:
        payloads: The values.
        rows: The futures, or portions of them.
        claims: The claims on the rows of these.
    """

    payloads: tuple[Payload, ...] = ()
    rows: tuple[ArgumentGroup, ...] = ()
    claims: Sequence[Claim] = ()

    @classmethod
    def of(cls, group: ArgumentGroup, method: str) -> Arguments:
        """The arguments of a group.

        Args:
            group: The group.
            method: ``"Class.method"``, for messages.

        Raises:
            ArgumentError: One of them cannot be pickled, or is a future without rows.
        """
        for _, value in group.items:
            if isinstance(value, Future | Portion):
                return cls._with_rows(group, method)
        return cls((encode_group(group, method).private(),))  # as most often

    @classmethod
    def _with_rows(cls, group: ArgumentGroup, method: str) -> Arguments:
        named = list(zip(group.items, group.names, strict=False))
        rows = [(item, name) for item, name in named if isinstance(item[1], Future | Portion)]
        values = [(item, name) for item, name in named if not isinstance(item[1], Future | Portion)]
        futures = [value.value if isinstance(value, Portion) else value for (_, value), _ in rows]
        for future, (_, name) in zip(futures, rows, strict=True):
            check_has_rows(future, name, method)
        payloads = (encode_group(_group(values, group), method).private(),) if values else ()
        return cls(payloads, (_group(rows, group),), claims_of(futures, {}))

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum([payload.nbytes for payload in self.payloads])

    def beside(self, others: Arguments) -> Arguments:
        """These, and arguments that several requests have in common."""
        return Arguments((*others.payloads, *self.payloads), (*self.rows, *others.rows), [*self.claims, *others.claims])


def check_has_rows(value: Any, name: str, method: str) -> None:
    """Raise ArgumentError for a future that has no rows; other values are fine."""
    if isinstance(value, Future) and not value._call.keeps_rows:
        raise ArgumentError(
            f"argument {name!r} of {method} is a future of {value._call.site.method}, which leaves no rows on the "
            "ranks; pass the value that `await` or result() returns"
        )


def _group(named: Sequence[tuple[tuple[int | str, Any], str]], like: ArgumentGroup) -> ArgumentGroup:
    items, names = zip(*named, strict=True)
    return like._replace(items=items, names=names)
