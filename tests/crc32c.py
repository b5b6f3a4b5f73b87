"""The checksum of descriptors and frames, apart from the code under test."""

from __future__ import annotations


def crc32c(data: bytes) -> int:
    """The checksum bit by bit, independent of the table in the native code."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
