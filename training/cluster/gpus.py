"""What the plan knows of a GPU: three numbers of its data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from training.settings import suggestion


@dataclass(frozen=True)
class Gpu:
    memory: float  # GiB that a process can use
    tflops: float  # dense bfloat16, 1e12 a second
    bandwidth: float  # of the memory, 1e9 bytes a second


GPUS: dict[str, Gpu] = {
    "H100-80GB": Gpu(79, 989, 3350),
    "H800-80GB": Gpu(79, 989, 3350),
    "H200": Gpu(140, 989, 4800),
    "B200": Gpu(179, 2250, 8000),
    "A100-80GB": Gpu(79, 312, 2039),
    "A100-40GB": Gpu(39, 312, 1555),
    "A800-80GB": Gpu(79, 312, 2039),
    "L40S": Gpu(44, 362, 864),
    "A6000": Gpu(47, 155, 768),
    "RTX-4090": Gpu(23.5, 165, 1008),
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name. Raises: ValueError with the nearest name."""
    if name not in GPUS:
        raise ValueError(f"unknown GPU {name!r}; {suggestion(name, GPUS)} (known: {', '.join(GPUS)})")
    return GPUS[name]
