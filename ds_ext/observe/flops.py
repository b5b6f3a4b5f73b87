"""Peak FLOP/s of GPUs, for the MFU (PaLM, arXiv 2204.02311, appendix B)."""

from __future__ import annotations

# Dense 16-bit tensor-core TFLOP/s from NVIDIA's data sheets. The first name that the device's name contains counts.
_PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("V100", 125.0),
    ("T4", 65.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s; None for an unknown name."""
    words = device_name.replace("-", " ").split()
    for name, peak in _PEAK_TFLOPS:
        if set(name.split()) <= set(words):
            return peak
    return None
