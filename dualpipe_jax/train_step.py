"""One optimizer step: the pipeline's gradients, the clipped AdamW update, the routers' bias update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dualpipe_jax.config import Config
from dualpipe_jax.executor import PIPELINE_AXIS, PipelineParams, data_axes, make_mesh, pipeline_value_and_grad
from dualpipe_jax.executor.specs import Specs
from dualpipe_jax.gpu_options import compiler_options
from dualpipe_jax.model.model import Model, expert_specs, with_weights
from dualpipe_jax.model.partition import StageLayers, from_pipeline, partition, to_pipeline
from dualpipe_jax.non_finite import NonFinite, Walk
from dualpipe_jax.optimizer import apply_gradients, learning_rate_schedule, make_optimizer, names_of, zero1_shardings
from dualpipe_jax.schedule import Schedule, build
from dualpipe_jax.schedule.placement import SlotRule
from moe.router import update_bias

PyTree = Any


class TrainState(NamedTuple):
    """What changes from step to step.

    Attributes:
        step: int32, optimizer steps done.
        params: float32 master weights, sharded as the optimizer's state.
        optimizer: optax state.
        key: key data of the run's random key; a step's randomness is folded in from (step, ...).
    """

    step: jax.Array
    params: PipelineParams
    optimizer: PyTree
    key: jax.Array


class StepMetrics(NamedTuple):
    """Of one step, each a scalar on all devices.

    Attributes:
        loss: nats per token, auxiliary losses included. cross_entropy: without.
        grad_norm: before clipping. learning_rate: of this step.
        expert_load_max_over_mean: the fullest expert's assignments over the mean, in the worst layer; 1 is even.
        dropped_tokens: assignments that found no room.
        finite: whether loss and gradients were; if not, the step changed nothing but its count.
    """

    loss: jax.Array
    cross_entropy: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    expert_load_max_over_mean: jax.Array
    dropped_tokens: jax.Array
    finite: jax.Array


@dataclass(frozen=True)
class Trainer:
    """Everything static about a run, derived from its configuration.

    Example:
        trainer = Trainer(config)
        state = trainer.init()
        state, metrics = trainer.step(state, batch)
    """

    config: Config

    @cached_property
    def schedule(self) -> Schedule:
        p = self.config.pipeline
        # On CPU the fewest programs compile fastest; elsewhere the steady state should be one program on all ranks.
        steady = jax.default_backend() != "cpu" if p.slot_rule == "auto" else p.slot_rule == "steady"
        rule: SlotRule = "steady" if steady else "depth"
        return build(p.schedule, num_ranks=p.pp, num_microbatches=p.num_microbatches, slot_rule=rule)

    @cached_property
    def mesh(self) -> Mesh:
        p = self.config.pipeline
        return make_mesh(p.pp, p.dp, p.ep)

    @cached_property
    def model(self) -> Model:
        c = self.config
        axis = "ep" if c.pipeline.ep > 1 else None
        return Model(c.model, c.data.batch_size, c.data.seq_len, axis, c.pipeline.recompute == "full")

    @cached_property
    def stages(self) -> tuple[StageLayers, ...]:
        return partition(self.config.model.num_layers, self.model.num_dense, self.schedule.placement.num_stages)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.config.optimizer, self.config.train.steps)

    # ---------------------------------------------------------------- layout

    @cached_property
    def param_shapes(self) -> PipelineParams:
        """Shapes of the parameters as the pipeline has them."""
        return jax.eval_shape(
            lambda: to_pipeline(self.model.init(jax.random.key(0)), self.stages, self.schedule.placement)
        )

    @cached_property
    def compute_specs(self) -> PipelineParams:
        """How the computation has each leaf: stages over "pp", experts over "ep", the rest whole."""
        staged = jax.tree.map(
            lambda s: PartitionSpec(PIPELINE_AXIS, *s),
            expert_specs(self.param_shapes.stages),
            is_leaf=lambda s: isinstance(s, PartitionSpec),
        )
        return PipelineParams(staged, expert_specs(self.param_shapes.shared))

    @cached_property
    def state_shardings(self) -> TrainState:
        """How a state is spread between steps: a `NamedSharding` in place of each array."""
        whole: Any = NamedSharding(self.mesh, PartitionSpec())
        params = zero1_shardings(self.param_shapes, self.compute_specs, self.mesh)
        shapes = jax.eval_shape(self.optimizer.init, self.param_shapes)
        moments = optax.tree.map_params(
            self.optimizer, lambda _, s: s, shapes, params, transform_non_params=lambda _: whole
        )
        return TrainState(whole, params, moments, whole)

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Batch leaves [num_microbatches, rows, seq]: rows over the data axes."""
        return NamedSharding(self.mesh, PartitionSpec(None, data_axes(self.mesh)))

    # ---------------------------------------------------------------- functions

    @cached_property
    def grad_fn(self) -> Callable[..., Any]:
        """`(params, batch) -> ((loss, aux), grads)`, see `pipeline_value_and_grad`."""
        return pipeline_value_and_grad(
            self.model.stage_fns(self.stages),
            self.schedule,
            mesh=self.mesh,
            stage_specs=expert_specs(self.param_shapes.stages[0]),
            shared_specs=expert_specs(self.param_shapes.shared),
        )

    def init(self) -> TrainState:
        """The state before the first step."""

        def fresh(key_data: jax.Array) -> TrainState:
            key = jax.random.wrap_key_data(key_data)
            params = to_pipeline(self.model.init(key), self.stages, self.schedule.placement)
            return TrainState(jnp.int32(0), params, self.optimizer.init(params), key_data)

        key_data = jax.random.key_data(jax.random.key(self.config.train.seed))
        return jax.jit(fresh, out_shardings=self.state_shardings)(key_data)

    @cached_property
    def step(self) -> Callable[[TrainState, PyTree], tuple[TrainState, StepMetrics]]:
        """Compiled `(state, batch) -> (state, metrics)`; the old state's memory is used again."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(self.state_shardings, self.batch_sharding),
            out_shardings=(self.state_shardings, whole),
            compiler_options=compiler_options(self.mesh.devices.flat[0].platform),
        )

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepMetrics]:
        params = cast_for_compute(state.params, jnp.dtype(self.config.train.dtype))
        (loss, aux), grads = self.grad_fn(params, with_weights(batch))
        grads = jax.lax.with_sharding_constraint(grads, self.state_shardings.params)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updated, moments = apply_gradients(self.optimizer, grads, state.optimizer, state.params)
        if self.config.model.moe:
            updated = _update_router_biases(updated, aux, self.config.model.moe.bias_rate)
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)  # noqa: E731
        metrics = self._metrics(state.optimizer, loss, aux, grad_norm, finite)
        state = TrainState(state.step + 1, keep(updated, state.params), keep(moments, state.optimizer), state.key)
        return state, metrics

    def _metrics(
        self, optimizer: PyTree, loss: jax.Array, aux: Any, grad_norm: jax.Array, finite: jax.Array
    ) -> StepMetrics:
        """Args: optimizer: its state before the step, whose count of updates the learning rate goes by."""
        plan = learning_rate_schedule(self.config.optimizer, self.config.train.steps)
        with jax.numpy_dtype_promotion("standard"):  # as in `apply_gradients`
            rate = plan(optax.tree.get_all_with_path(optimizer, "count")[0][1])
        load, dropped = jnp.float32(1), jnp.int32(0)
        if self.config.model.moe:
            counts = _expert_counts(aux)
            load = jnp.max(counts.max(-1) / jnp.maximum(counts.mean(-1), 1.0))
            dropped = sum((jnp.sum(s["dropped"]) for s in aux.stages), jnp.int32(0))
            dropped += aux.last["mtp"]["dropped"] if "mtp" in aux.last else 0
        entropy = aux.last["cross_entropy"]
        return StepMetrics(loss, entropy, grad_norm, jnp.asarray(rate, jnp.float32), load, dropped, finite)

    # ---------------------------------------------------------------- not finite

    def find_non_finite(self, state: TrainState, batch: PyTree) -> NonFinite | None:
        """Where the step that was skipped, from `state` (it changed no parameter) and `batch`, was not finite.

        All processes call it; see `dualpipe_jax.find_non_finite`.
        """
        return self._walk.find(self._compute_params(state.params), jax.jit(with_weights)(batch))

    @cached_property
    def _walk(self) -> Walk:
        stage, shared = (expert_specs(tree) for tree in (self.param_shapes.stages[0], self.param_shapes.shared))
        return Walk(self.model.stage_fns(self.stages), self.schedule, self.mesh, Specs(stage), Specs(shared))

    @cached_property
    def _compute_params(self) -> Callable[[PipelineParams], PipelineParams]:
        """Compiled: the parameters as a step computes with them, gathered over the data axes once."""
        is_spec = lambda s: isinstance(s, PartitionSpec)  # noqa: E731
        shardings = jax.tree.map(lambda s: NamedSharding(self.mesh, s), self.compute_specs, is_leaf=is_spec)
        return jax.jit(lambda p: cast_for_compute(p, jnp.dtype(self.config.train.dtype)), out_shardings=shardings)

    # ---------------------------------------------------------------- canonical form

    def canonical(self, params: PipelineParams) -> PyTree:
        """Parameters (or moments) by layer, whatever the layout: what a checkpoint holds."""
        return from_pipeline(params, self.stages, self.schedule.placement)

    def arranged(self, params: PyTree) -> PipelineParams:
        """Undo `canonical`."""
        return to_pipeline(params, self.stages, self.schedule.placement)


def cast_for_compute(params: PyTree, dtype: jnp.dtype) -> PyTree:
    """Parameters in the compute dtype; routers and norms stay float32, in which they are computed."""

    def cast(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = names_of(path)
        return leaf if "router" in names or names[-1] == "scale" else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def _update_router_biases(params: PipelineParams, aux: Any, rate: float) -> PipelineParams:
    """Move each router's bias by the counts of the whole batch (DeepSeek-V3, section 2.1.2); padding layers stay."""
    if rate == 0.0:
        return params
    move = lambda bias, counts: update_bias(bias, counts, rate)  # noqa: E731
    stages = []
    for tree, stats in zip(params.stages, aux.stages, strict=True):
        layers = [_biased(layer, jax.vmap(move), stats["counts"][:, i]) for i, layer in enumerate(tree["layers"])]
        stages.append({**tree, "layers": layers})
    shared = params.shared
    if "mtp" in shared:
        block = _biased(shared["mtp"]["block"], move, aux.last["mtp"]["counts"])
        shared = {**shared, "mtp": {**shared["mtp"], "block": block}}
    return params._replace(stages=tuple(stages), shared=shared)


def _biased(layer: PyTree, move: Callable[..., jax.Array], counts: jax.Array) -> PyTree:
    """The layer with its router's bias moved by counts [(ranks,) experts]."""
    router = layer["moe"]["router"]
    return {**layer, "moe": {**layer["moe"], "router": {**router, "bias": move(router["bias"], counts)}}}


def _expert_counts(aux: Any) -> jax.Array:
    """float32 [layers (padding ones too), experts]: assignments of the whole batch."""
    all_counts = [s["counts"] for s in aux.stages]
    if "mtp" in aux.last:
        all_counts.append(aux.last["mtp"]["counts"])
    return jnp.concatenate([c.reshape(-1, c.shape[-1]) for c in all_counts]).astype(jnp.float32)
