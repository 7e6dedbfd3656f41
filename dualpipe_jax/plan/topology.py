"""Devices that programs can be compiled for without having one, and how fast they are on paper."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceModel:
    """A kind of GPU: what XLA's compiler wants to know of it, and its peak rates.

    Attributes:
        description: as the driver names it. capability: CUDA compute capability (major, minor).
        sms: streaming multiprocessors. clock_ghz: boost clock.
        memory_bytes: of device memory as the driver reports it. memory_bandwidth: bytes/s.
        l2_bytes: second-level cache.
        shared_per_sm, shared_per_block: shared memory in bytes, the second is what one block may opt in to.
        bf16_flops, fp8_flops: dense peak rates; None: no such tensor cores.
        nvlink_bandwidth: bytes/s a direction, to all GPUs of the node together.
        network_bandwidth: bytes/s a direction a GPU, of the usual network card beside it.
        source: of the figures.
    """

    description: str
    capability: tuple[int, int]
    sms: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: float
    l2_bytes: int
    shared_per_sm: int
    shared_per_block: int
    bf16_flops: float
    fp8_flops: float | None
    nvlink_bandwidth: float
    network_bandwidth: float
    source: str

    def target_config(self) -> str:
        """The text form of XLA's `GpuTargetConfigProto`."""
        major, minor = self.capability
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_per_sm}
  threads_per_core_limit: 2048
  core_count: {self.sms}
  fpus_per_core: {64 if major == 8 else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bandwidth:.0f}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.shared_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{self.description}"
"""


_GIB = 2**30
_HOPPER: dict[str, Any] = {
    "capability": (9, 0),
    "sms": 132,
    "clock_ghz": 1.98,
    "l2_bytes": 50 * 2**20,
    "shared_per_sm": 228 * 1024,
    "shared_per_block": 227 * 1024,
    "bf16_flops": 989.4e12,
    "fp8_flops": 1978.9e12,
    "network_bandwidth": 50e9,  # one 400 Gbit/s card a GPU
}
DEVICES: dict[str, DeviceModel] = {
    "h100-80gb": DeviceModel(
        "NVIDIA H100 80GB HBM3",
        memory_bytes=84929347584,
        memory_bandwidth=3352.32e9,
        nvlink_bandwidth=450e9,
        source="NVIDIA H100 Tensor Core GPU Architecture, 2022, table 3 (SXM5)",
        **_HOPPER,
    ),
    "h800-80gb": DeviceModel(
        "NVIDIA H800",
        memory_bytes=84929347584,
        memory_bandwidth=3352.32e9,
        nvlink_bandwidth=200e9,
        source="as H100 SXM5; NVLink 400 GB/s both ways together (Insights into DeepSeek-V3, 2025, section 4.1)",
        **_HOPPER,
    ),
    "h200-141gb": DeviceModel(
        "NVIDIA H200",
        memory_bytes=139 * _GIB,
        memory_bandwidth=4.8e12,
        nvlink_bandwidth=450e9,
        source="NVIDIA H200 datasheet, 2024 (SXM)",
        **_HOPPER,
    ),
    "b200": DeviceModel(
        "NVIDIA B200",
        capability=(10, 0),
        sms=148,
        clock_ghz=1.965,
        memory_bytes=178 * _GIB,
        memory_bandwidth=7.7e12,
        l2_bytes=126 * 2**20,
        shared_per_sm=228 * 1024,
        shared_per_block=227 * 1024,
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        nvlink_bandwidth=900e9,
        network_bandwidth=50e9,
        source="NVIDIA DGX B200 datasheet, 2024, an eighth of the system's dense rates",
    ),
    "a100-80gb": DeviceModel(
        "NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        sms=108,
        clock_ghz=1.41,
        memory_bytes=79 * _GIB,
        memory_bandwidth=2.039e12,
        l2_bytes=40 * 2**20,
        shared_per_sm=164 * 1024,
        shared_per_block=163 * 1024,
        bf16_flops=312e12,
        fp8_flops=None,
        nvlink_bandwidth=300e9,
        network_bandwidth=25e9,
        source="NVIDIA A100 Tensor Core GPU Architecture, 2020, table 1; datasheet of the 80 GB SXM model, 2021",
    ),
}


@dataclass(frozen=True)
class Topology:
    """`nodes` machines of `gpus` devices each; within a machine they are joined by NVLink.

    Example:
        >>> Topology.parse("h800-80gb:256x8").num_devices
        2048
    """

    name: str
    nodes: int
    gpus: int

    @classmethod
    def parse(cls, text: str) -> Topology:
        """From "DEVICE:NODESxGPUS".

        Raises:
            ValueError: the text has another form, or the device is not known.
        """
        found = re.fullmatch(r"([\w-]+):(\d+)x(\d+)", text)
        if not found or not (int(found[2]) and int(found[3])):
            raise ValueError(f"topology {text!r} must be DEVICE:NODESxGPUS, for example h100-80gb:2x8")
        if found[1] not in DEVICES:
            raise ValueError(f"device {found[1]!r} is not known; valid are {', '.join(DEVICES)}")
        return cls(found[1], int(found[2]), int(found[3]))

    @property
    def device(self) -> DeviceModel:
        return DEVICES[self.name]

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus


def can_compile() -> bool:
    """Is XLA's compiler for CUDA here? It needs neither a GPU nor a driver."""
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None for version in (12, 13)
    )


def compile_only_devices(topology: Topology) -> list[Any]:
    """`jax.Device`s that programs can be compiled for, not run on; those of a node follow each other.

    Raises:
        ValueError: the compiler is not installed.

    Example:
        devices = compile_only_devices(Topology.parse("h100-80gb:1x8"))
        step = jax.jit(pipeline_value_and_grad(fns, schedule, mesh=make_mesh(4, 1, 2, devices=devices)))
        step.lower(params, batch).compile().memory_analysis()
    """
    if not can_compile():
        raise ValueError("XLA's compiler for CUDA is not installed: pip install 'jax[cuda12]' (no GPU is needed)")
    from jax.experimental import topologies  # imports the plugin

    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=topology.device.target_config(),
        topology=f"1x{topology.nodes}x{topology.gpus}",
    )
    return list(found.devices)
