"""Settings are refused with their value, the rule, and the nearest value that is accepted."""

import dataclasses

import pytest

from moe.config import MoEConfig

NO_LOSS = {"balance_loss_weight": 0.0, "z_loss_weight": 0.0}


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ({"d_ff": 0}, {"d_ff": 1}),
        ({"num_experts": 0}, {"num_experts": 1, "top_k": 1}),
        ({"top_k": 0}, {"top_k": 1}),
        ({"top_k": 9}, {"top_k": 8}),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, {"top_k": 2}),
        ({"num_groups": 3}, {"num_groups": 2}),
        ({"num_groups": 9}, {"num_groups": 8, "top_groups": 2}),
        ({"num_groups": 2, "top_groups": 3}, {"top_groups": 2}),
        ({"num_groups": 0}, {"num_groups": 1}),
        ({"top_groups": 0}, {"top_groups": 1}),
        ({"block_size": 0}, {"block_size": 1}),
        ({"num_shared_experts": -1}, {"num_shared_experts": 0}),
        ({"bias_rate": -1.0}, {"bias_rate": 0}),
        ({"bias_rate": float("nan")}, {"bias_rate": 0}),
        ({"balance_loss_weight": float("inf")}, {"balance_loss_weight": 0}),
        ({"z_loss_weight": -0.5}, {"z_loss_weight": 0}),
        ({"capacity_factor": 0.0}, {"capacity_factor": 1.0}),
        ({"capacity_factor": float("nan")}, {"capacity_factor": 1.0}),
        ({"top_k": 1, **NO_LOSS}, {"normalize_weights": False}),  # case 18
    ],
)
def test_wrong_values_are_named_with_the_nearest_valid_one(wrong, nearest):
    name = next(iter(nearest))
    with pytest.raises(ValueError, match=name) as caught:
        MoEConfig(**wrong)
    given = wrong.get(name, getattr(MoEConfig(), name))
    assert f"{name}={given}" in str(caught.value) or f"{name} makes" in str(caught.value)
    assert str(nearest[name]) in str(caught.value)
    MoEConfig(**{**wrong, **nearest})


def test_every_problem_is_said_at_once():
    with pytest.raises(ValueError, match=r"moe\.top_k=9.*moe\.scoring='tanh'.*moe\.bias_rate=-1"):
        MoEConfig(top_k=9, scoring="tanh", bias_rate=-1)


@pytest.mark.parametrize("loss", [{}, {"balance_loss_weight": 0.0, "z_loss_weight": 1e-3}])
def test_one_normalised_expert_needs_a_loss_that_reaches_the_router(loss):
    """Case 18: with such a loss the router learns, if slowly; the settings stand."""
    config = MoEConfig(top_k=1, **loss)
    assert config.normalize_weights
    with pytest.raises(ValueError, match="no gradient"):
        dataclasses.replace(config, **NO_LOSS)


def test_deepseek_v3_sizes_are_accepted():
    MoEConfig(d_ff=2048, num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, route_scale=2.5)
