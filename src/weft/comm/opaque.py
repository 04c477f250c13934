"""What a compiled graph carries without looking into it."""

from __future__ import annotations

from typing import Any

from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBaseMeta


class Opaque(metaclass=OpaqueBaseMeta):
    """An object that goes into a compiled graph and its operators as it is, as an axis or a sequence does.

    Another one in the next step needs no other graph. Only where a traced program reads one of its public attributes,
    the value is part of what the graph was compiled for.
    """

    __slots__ = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        names = {*vars(cls), *vars(cls).get("__annotations__", ())}
        members = {name: MemberType.INLINED for name in names if not name.startswith("_")}
        register_opaque_type(cls, typ="reference", members=members)


register_opaque_type(Opaque, typ="reference")
