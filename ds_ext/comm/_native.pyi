from typing import Final

DESCRIPTOR_BYTES: Final[int]
ALIGNMENT: Final[int]
ELEMENT_TYPES: Final[tuple[tuple[str, int], ...]]

class DescriptorError(ValueError): ...

class Descriptor:
    dtype: int
    tag: int
    index: int
    count: int
    seq: int
    link_seq: int
    acknowledged: int
    offset: int
    nbytes: int
    body_bytes: int
    @property
    def shape(self) -> tuple[int, ...]: ...
    @shape.setter
    def shape(self, value: tuple[int, ...]) -> None: ...
    def __init__(self) -> None: ...

def pack(descriptor: Descriptor) -> bytes: ...
def unpack(data: bytes) -> Descriptor: ...
def pack_at(descriptor: Descriptor, address: int) -> None: ...
def unpack_at(address: int) -> Descriptor: ...
def sealed_at(address: int) -> bool: ...
