"""`MethodOfGroup`: a method of a group with options, whether its calls go to all ranks or to one replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from bandmaster.calls.options import CallOptions
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import Submitter

if TYPE_CHECKING:
    from typing_extensions import Self


class MethodOfGroup:
    """A registered method of a group, with options.

    Attributes:
        beside: Keyword arguments that are not the method's, but the library's.

    Args:
        group: The group, which lives as long as the futures.
        submitter: Sends its calls.
        spec: The method.
        options: The limits of calls; None uses those of the group.
        how: The other options; None uses the defaults.
    """

    beside: Sequence[tuple[str, Any]] = ()
    _how: Any
    _kind: str

    def __init__(
        self, group: object, submitter: Submitter, spec: MethodSpec, options: CallOptions | None = None, how: Any = None
    ) -> None:
        self._group, self._submitter, self._spec, self._options = group, submitter, spec, options
        if how is not None:
            self._how = how
        self.__dict__.update(spec.described)

    def _but(self, limits: Mapping[str, Any], how: Any) -> Self:
        """A copy with some limits changed, and other options."""
        options = self._submitter.options_but(self._options, limits)
        return type(self)(self._group, self._submitter, self._spec, options, how)

    def __reduce__(self) -> NoReturn:
        self._submitter.__reduce__()

    def __repr__(self) -> str:
        spec = self._spec
        return f"<{self._kind} {spec.label}{spec.signature}, {spec.registration.protocol!r}>"
