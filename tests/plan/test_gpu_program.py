"""A step with experts, compiled for H100s by the real compiler; no GPU is needed, only `pip install 'jax[cuda12]'`."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax import PipelineParams, build, make_mesh, pipeline_value_and_grad
from dualpipe_jax.config import ModelConfig
from dualpipe_jax.executor.execute import GradFn
from dualpipe_jax.gpu_options import compiler_options
from dualpipe_jax.model.model import Model, expert_specs
from dualpipe_jax.model.partition import partition, to_pipeline
from dualpipe_jax.plan.hlo import Program
from dualpipe_jax.plan.overlap import Transfer, exposed, steady_bodies, transfers
from dualpipe_jax.plan.topology import Topology, can_compile, compile_only_devices
from dualpipe_jax.schedule import MOE_COSTS, Memory, Placement, search
from dualpipe_jax.train_step import cast_for_compute
from moe.config import MoEConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_compile(), reason="needs XLA's compiler for CUDA: pip install 'jax[cuda12]'"),
]
RANKS, EXPERT_RANKS, MICROBATCHES, SEQ = 2, 4, 12, 2048
MODEL = ModelConfig(
    vocab_size=1024,
    d_model=2048,
    num_heads=16,
    num_kv_heads=16,
    d_ff=4096,
    num_dense_layers=0,
    moe=MoEConfig(d_ff=1024, num_experts=16, top_k=4),
)


@pytest.fixture(autouse=True)
def _as_users_compile():
    """Tests are compiled with few optimizations, and with a strictness under which JAX's bfloat16 attention fails; and
    from the persistent cache, from which programs for devices that are not here cannot be read."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_enable_compilation_cache", False)
    with jax.numpy_dtype_promotion("standard"):
        yield
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_disable_most_optimizations", True)


class Compiled(NamedTuple):
    """A gradient function, its arguments, and what the compiler made of them."""

    grad_fn: GradFn
    arguments: tuple
    executable: jax.stages.Compiled
    program: Program


def schedule_of(name):
    if name == "auto":
        return search([Placement("loop", RANKS, 3)], MICROBATCHES, MOE_COSTS, Memory(1.25 * RANKS)).schedule
    return build(name, num_ranks=RANKS, num_microbatches=MICROBATCHES, slot_rule="steady")


@cache
def compiled(name):
    schedule = schedule_of(name)
    devices = compile_only_devices(Topology.parse(f"h100-80gb:1x{RANKS * EXPERT_RANKS}"))
    mesh = make_mesh(RANKS, 1, EXPERT_RANKS, devices=devices)
    model = Model(MODEL, MICROBATCHES * EXPERT_RANKS, SEQ, "ep")
    stages = partition(schedule.placement.num_stages, 0, schedule.placement.num_stages)
    bfloat16 = partial(cast_for_compute, dtype=jnp.dtype("bfloat16"))
    shapes = jax.eval_shape(lambda: bfloat16(to_pipeline(model.init(jax.random.key(0)), stages, schedule.placement)))
    grad_fn = pipeline_value_and_grad(
        model.stage_fns(stages),
        schedule,
        mesh=mesh,
        stage_specs=expert_specs(shapes.stages[0]),
        shared_specs=expert_specs(shapes.shared),
    )

    def placed(tree, *axes):
        spec = lambda a, s: jax.ShapeDtypeStruct(  # noqa: E731
            a.shape, a.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes, *s))
        )
        return jax.tree.map(spec, tree, expert_specs(tree))

    params = PipelineParams(tuple(placed(t, "pp") for t in shapes.stages), placed(shapes.shared))
    leaf = partial(
        jax.ShapeDtypeStruct,
        (MICROBATCHES, EXPERT_RANKS, SEQ),
        sharding=NamedSharding(mesh, PartitionSpec(None, ("dp", "ep"))),
    )
    batch = {"tokens": leaf(jnp.int32), "targets": leaf(jnp.int32), "weights": leaf(jnp.float32)}
    options = compiler_options(mesh.devices.flat[0].platform)
    executable = jax.jit(grad_fn, compiler_options=options).lower(params, batch).compile()
    return Compiled(grad_fn, (params, batch), executable, Program.parse(executable.as_text()))


def steady_transfers(name) -> list[Transfer]:
    program = compiled(name).program
    bodies = steady_bodies(program)
    # DualPipe's two directions take turns; the searched schedule has one body, in which a rank selects its stage.
    assert len(bodies) == {"dualpipe": 2, "auto": 1}[name]
    return [t for body in bodies for t in transfers(program, body)]


@pytest.mark.parametrize("name", ["dualpipe", "auto"])
def test_the_steady_state_hides_its_messages(name):
    """Behind every all-to-all and every message to a neighbour there are matrix products."""
    found = steady_transfers(name)
    assert {t.kind for t in found} >= {"all-to-all", "collective-permute"}
    assert not exposed(found)


@pytest.mark.parametrize("name", ["dualpipe", "auto"])
def test_no_buffer_is_copied(name):
    """Neither what is kept from tick to tick, nor sums of gradients: in no loop of the program."""
    grad_fn, arguments, _, program = compiled(name)
    state = grad_fn.state_shapes(*arguments)
    kept = jax.tree.leaves((state.residual, state.weight_residual, state.cut, state.stage_grads))
    names = {"float32": "f32", "bfloat16": "bf16", "int32": "s32", "uint16": "u16", "bool": "pred"}
    buffers = {
        f"{names[a.dtype.name]}[{','.join(map(str, a.shape))}]" for a in kept if a.size * a.dtype.itemsize > 1 << 20
    }
    loops = (c for c in program.executed() if c.name != program.entry)
    copied = [(c.name, i.shape) for c in loops for i in c.find("copy") if i.shape.split("{")[0] in buffers]
    assert not copied


@pytest.mark.parametrize("name", ["dualpipe", "auto"])
def test_memory_is_the_plan(name):
    """Buffers in their planned slots, and what the largest cell needs, a copy of what it reads included."""
    grad_fn, arguments, executable, _ = compiled(name)
    planned = grad_fn.memory_plan(*arguments).total + max(grad_fn.cell_bytes(*arguments).values())
    assert executable.memory_analysis().temp_size_in_bytes <= 1.05 * planned
