"""Devices to compile for."""

import re

import pytest

from dualpipe_jax.plan import topology
from dualpipe_jax.plan.topology import DEVICES, Topology, compile_only_devices


def test_parse():
    found = Topology.parse("b200:3x8")
    assert (found.nodes, found.gpus, found.num_devices) == (3, 8, 24)
    assert found.device is DEVICES["b200"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("h100:1x8", ["'h100'", "h100-80gb"]),
        ("h100-80gb", ["DEVICE:NODESxGPUS", "h100-80gb:2x8"]),
        ("h100-80gb:0x8", ["'h100-80gb:0x8'", "DEVICE:NODESxGPUS"]),
    ],
)
def test_wrong_topologies_are_told(text, parts):
    with pytest.raises(ValueError, match=re.escape(parts[0])) as caught:
        Topology.parse(text)
    assert all(part in str(caught.value) for part in parts)


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topology, "can_compile", lambda: False)
    with pytest.raises(ValueError, match=r"pip install 'jax\[cuda12\]'"):
        compile_only_devices(Topology.parse("h100-80gb:1x1"))


@pytest.mark.parametrize("name", DEVICES)
def test_rates_are_in_the_units_they_say(name):
    """bytes/s and FLOP/s of the last three generations, within an order of magnitude of each other."""
    device = DEVICES[name]
    assert 1e12 < device.memory_bandwidth < 1e13
    assert 1e14 < device.bf16_flops < 1e16
    assert device.fp8_flops is None or device.fp8_flops == pytest.approx(2 * device.bf16_flops, rel=1e-3)
    assert device.network_bandwidth < device.nvlink_bandwidth < device.memory_bandwidth
    assert f"core_count: {device.sms}" in device.target_config()
    assert device.source
