"""Figures of GPUs from their data sheets, for ``plan --gpu`` and the MFU (PaLM, arXiv 2204.02311, appendix B)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Shares of the peaks that published runs on A100 and H100 reach in matrix products and element-wise ops; see
# docs/clusters.md, "How accurate it is". Assumed for the others.
MATRIX_SHARE, BANDWIDTH_SHARE = 0.7, 0.8
_INSIDE_S, _BETWEEN_S = "2us", "10us"


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU on a host of 8.

    Args:
        memory_gb: memory in 10^9 bytes.
        peak_tflops: peak rate of dense matrices in 16 bits, without sparsity, in 10^12 per second.
        bandwidth_tb: peak rate of the memory, in 10^12 bytes per second.
        inside_gb: rate to the other GPUs of the host in one direction, half of the sum that data sheets give, in 10^9
            bytes per second.
        between_gb: rate of its network port, in 10^9 bytes per second.
        is_compared: whether step times of published runs were compared with those of `plan`.
    """

    memory_gb: int
    peak_tflops: float
    bandwidth_tb: float
    inside_gb: int
    between_gb: float
    is_compared: bool = False

    @property
    def flags(self) -> dict[str, Any]:
        """Values of the flags of ``plan`` that stand for this GPU."""
        return {
            "memory": f"{self.memory_gb}GB",
            "tflops": round(MATRIX_SHARE * self.peak_tflops, 1),
            "memory_bandwidth": f"{1000 * BANDWIDTH_SHARE * self.bandwidth_tb:.0f}GB",
            "inside": f"{self.inside_gb}GB,{_INSIDE_S}",
            "between": f"{self.between_gb:g}GB,{_BETWEEN_S}",
        }


# Peak rates for the MFU of GPUs that `plan` does not have, from NVIDIA's data sheets.
_OTHER_PEAKS: Mapping[str, float] = MappingProxyType(
    {"H100 PCIe": 756, "L40S": 362, "L4": 121, "A10G": 70, "A10": 125, "V100": 125, "T4": 65}
)
# All are modules on a host of 8 with one network port per GPU. bf16 rates of NVIDIA's sheets are with sparsity, twice
# the dense ones.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        # "NVIDIA A100 Tensor Core GPU" data sheet, June 2021: SXM, 600 GB/s NVLink. Ports of 200 Gb/s: "DGX A100
        # System" user guide, May 2020.
        "a100": Gpu(80, 312.0, 2.039, 300, 25, is_compared=True),
        # The same data sheets; 40 GB: May 2020.
        "a100-40gb": Gpu(40, 312.0, 1.555, 300, 25, is_compared=True),
        # "NVIDIA H100 Tensor Core GPU" data sheet, 2023: SXM, 900 GB/s NVLink. Ports of 400 Gb/s: "DGX BasePOD"
        # reference architecture, core components, DGX H200 and H100, 2024.
        "h100": Gpu(80, 989.0, 3.35, 450, 50, is_compared=True),
        # "NVIDIA H200 Tensor Core GPU" data sheet, November 2023: SXM, 900 GB/s NVLink. Ports as for h100.
        "h200": Gpu(141, 989.0, 4.8, 450, 50),
        # "NVIDIA DGX B200" data sheet, March 2024: 8 GPUs with 1,440 GB, 64 TB/s and 14.4 TB/s NVLink; "Blackwell
        # Architecture Technical Brief", 2024: HGX B200. Ports of 400 Gb/s: "DGX B200" user guide, 2025.
        "b200": Gpu(180, 2250.0, 8.0, 900, 50),
        # "AMD Instinct MI300X Accelerator" data sheet, December 2023: 7 links of 128 GB/s. Ports of 400 Gb/s: "AMD
        # Instinct MI300 Series Cluster Reference Guide", 63916, November 2024.
        "mi300x": Gpu(192, 1307.4, 5.3, 448, 50),
        # "AMD Instinct MI325X Accelerator" data sheet, October 2024: 7 links of 128 GB/s. Ports as for mi300x.
        "mi325x": Gpu(256, 1307.4, 6.0, 448, 50),
    }
)


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s for its name in torch; None for an unknown name."""
    words = {*device_name.replace("-", " ").split()}
    peaks = {**_OTHER_PEAKS, **{name.upper(): gpu.peak_tflops for name, gpu in GPUS.items()}}
    return next((peak for name, peak in peaks.items() if {*name.split()} <= words), None)
