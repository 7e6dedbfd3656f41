"""Run a schedule: see `pipeline_value_and_grad`."""

from dualpipe_jax.executor.execute import pipeline_value_and_grad
from dualpipe_jax.executor.layout import owned_stages, stack_stages, unstack_stages
from dualpipe_jax.executor.mesh import PIPELINE_AXIS, data_axes, make_mesh
from dualpipe_jax.executor.program import Aux, PipelineParams
from dualpipe_jax.executor.stages import LastOutput, StageFns, StageOutput

__all__ = [
    "pipeline_value_and_grad",
    "PipelineParams",
    "Aux",
    "StageFns",
    "StageOutput",
    "LastOutput",
    "make_mesh",
    "data_axes",
    "PIPELINE_AXIS",
    "stack_stages",
    "unstack_stages",
    "owned_stages",
]
