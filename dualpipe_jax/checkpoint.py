"""Checkpoints of a run: arrays sharded over any mesh, and small host values, written behind the next steps.

A checkpoint is a folder named by its step, with `arrays` (all leaves of a pytree, each under its path in the tree, e.g.
`params.embed.kernel`) and `host` (JSON). It gets its name when all of it is on the disk; an interrupted save is never
mistaken for one. Written with orbax (https://orbax.readthedocs.io), which any process count and mesh can read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import LatestN

PyTree = Any
_ARRAYS, _HOST = "arrays", "host"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or does not hold what was asked for."""


class Checkpointer:
    """The checkpoints in one folder. Every process of the run makes one and calls the same methods in the same order.

    Args:
        directory: made if it does not exist; leftovers of interrupted saves in it are removed.
        keep: this many newest are kept, older ones deleted.

    Raises:
        CheckpointError: the folder cannot be made or listed.
        ValueError: `keep` is below 1.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2):
        if keep < 1:
            raise ValueError(f"{keep=} must be at least 1; the nearest valid value is 1")
        self._directory = Path(directory).resolve()
        try:
            self._manager = ocp.CheckpointManager(
                self._directory,
                options=ocp.CheckpointManagerOptions(preservation_policy=LatestN(keep), cleanup_tmp_directories=True),
                item_handlers={_ARRAYS: ocp.StandardCheckpointHandler(), _HOST: ocp.JsonCheckpointHandler()},
            )
        except OSError as error:
            raise CheckpointError(f"cannot use the folder of checkpoints {self._directory}: {error}") from error

    def save(self, step: int, arrays: PyTree, host: dict[str, Any]) -> None:
        """Start to write a checkpoint, once the one before is written; returns when `arrays` may be donated.

        Args:
            step: must be above all steps that are there.
            arrays: pytree of jax.Array; typed PRNG keys as their key data.
            host: JSON-able. Tuples come back as lists.

        Raises:
            CheckpointError: this save cannot start, or the one before failed in the background.
        """
        try:
            started = self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{_ARRAYS: ocp.args.StandardSave(_named(arrays)), _HOST: ocp.args.JsonSave(host)}
                ),
            )
        except Exception as error:
            raise self._failed(f"cannot save step {step}", error) from error
        if not started:
            newest = self._manager.latest_step() or 0  # the one being written too
            raise CheckpointError(
                f"cannot save {step=} in {self._directory}: it has step {newest} already; "
                f"the nearest valid step is {newest + 1}"
            )

    def latest(self) -> int | None:
        """The newest complete step, or None; one that is still being written does not count."""
        return max(self._steps(), default=None)

    def restore(self, step: int, abstract: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The arrays and host values of a step, bit for bit. Waits for a save that is under way.

        Args:
            step: one that is complete.
            abstract: pytree of jax.ShapeDtypeStruct with shardings, of any mesh; its structure is the result's.

        Raises:
            CheckpointError: there is no such step, or the checkpoint has other arrays than `abstract`: lists all that
                are missing, too many, or of another shape or dtype.
        """
        self.wait()
        steps = self._steps()
        if step not in steps:
            raise CheckpointError(
                f"no complete checkpoint of {step=} in {self._directory}; there are {steps or 'none'}"
            )
        wanted = _named(abstract)
        self._compare(step, wanted)
        restored = self._manager.restore(
            step, args=ocp.args.Composite(**{_ARRAYS: ocp.args.StandardRestore(wanted), _HOST: ocp.args.JsonRestore()})
        )
        leaves = [restored[_ARRAYS][name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves), restored[_HOST]

    def describe(self, step: int) -> dict[str, str]:
        """What a checkpoint holds: path of each array -> dtype and shape, as "float32[256,64]"."""
        tree = self._manager.item_metadata(step)[_ARRAYS].tree
        return {name: _spell(saved) for name, saved in tree.items()}

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            CheckpointError: the save in the background failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed("a save failed", error) from error

    def close(self) -> None:
        """Wait, then release threads.

        Raises:
            CheckpointError: the save in the background failed.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _steps(self) -> list[int]:
        return sorted(ocp.utils.checkpoint_steps(self._directory))  # the manager counts one under way too

    def _compare(self, step: int, wanted: dict[str, Any]) -> None:
        saved, asked = self.describe(step), {name: _spell(leaf) for name, leaf in wanted.items()}
        problems = [f"missing: {name} {asked[name]}" for name in asked if name not in saved]
        problems += [f"not asked for: {name} {saved[name]}" for name in saved if name not in asked]
        problems += [
            f"different: {name} is {saved[name]}, not {asked[name]}"
            for name in asked
            if saved.get(name, asked[name]) != asked[name]
        ]
        if problems:
            raise CheckpointError(
                f"checkpoint {self._directory / str(step)} does not fit this model:"
                + "".join(f"\n  - {p}" for p in problems)
            )

    def _failed(self, what: str, error: Exception) -> CheckpointError:
        reason = f"{type(error).__name__}: {error}"
        return CheckpointError(f"{what} in {self._directory} ({reason}); the last complete step is {self.latest()}")


def _named(tree: PyTree) -> dict[str, Any]:
    """The leaves by their path: a tree of named tuples, modules or dicts is saved as plain names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _spell(leaf: Any) -> str:
    return f"{jax.numpy.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
