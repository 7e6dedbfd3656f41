"""Checkpoints: bitwise on any mesh, strict about what they hold, loud when they fail, usable after a kill."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dualpipe_jax.checkpoint import Checkpointer, CheckpointError


class Moments(NamedTuple):
    mu: dict[str, jax.Array]
    count: jax.Array


def sharding(num_devices, *spec):
    mesh = jax.make_mesh((num_devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:num_devices])
    return NamedSharding(mesh, PartitionSpec(*spec))


def state(num_devices):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 6), np.float32)
    weight[0, :2] = np.nan, -0.0  # bitwise means these too
    split, whole = sharding(num_devices, "x"), sharding(num_devices)
    return {
        "params": {"w": jax.device_put(weight, split), "scale": jax.device_put(jnp.ones(3, jnp.bfloat16) / 3, whole)},
        "moments": Moments({"w": jax.device_put(weight * 2, split)}, jax.device_put(jnp.int32(7), whole)),
        "key": jax.device_put(jax.random.key_data(jax.random.key(5)), whole),
    }


def abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def assert_bitwise(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), got, wanted)


def bits(array):
    return np.asarray(array).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("devices", [8, 2, 1])
def test_restore_is_bitwise_on_other_meshes(tmp_path, devices):
    host = {"data": {"next_batch": 3}, "learning_rate": 0.1, "none": None}
    with Checkpointer(tmp_path / "new" / "folder") as checkpointer:
        checkpointer.save(3, state(8), host)
    target = state(devices)
    with Checkpointer(tmp_path / "new" / "folder") as checkpointer:
        restored, restored_host = checkpointer.restore(3, abstract(target))
    assert_bitwise(restored, target)
    assert jax.tree.structure(restored) == jax.tree.structure(target)
    assert restored["params"]["w"].sharding == target["params"]["w"].sharding
    assert restored["params"]["scale"].dtype == jnp.bfloat16
    assert restored_host == host


def test_latest_and_keep(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.latest() is None
        for step in (1, 2, 5):
            checkpointer.save(step, {"x": jnp.float32(step)}, {})
        checkpointer.wait()
        assert checkpointer.latest() == 5
        with pytest.raises(CheckpointError, match=r"no complete checkpoint of step=1.*there are \[2, 5\]"):
            checkpointer.restore(1, {"x": jax.ShapeDtypeStruct((), jnp.float32)})
        with pytest.raises(CheckpointError, match=r"step=4.*has step 5 already.*nearest valid step is 6"):
            checkpointer.save(4, {"x": jnp.float32(0)}, {})


def test_differences_are_all_listed(tmp_path):
    x = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding(1))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.zeros(2), "b": jnp.zeros(3), "c": jnp.zeros(2)}, {})
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(1, {"b": x, "c": x.update(dtype=jnp.bfloat16), "d": {"e": x}})
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        "- missing: d.e float32[2]",
        "- not asked for: a float32[2]",
        "- different: b is float32[3], not float32[2]",
        "- different: c is float32[2], not bfloat16[2]",
    ]


def test_describe_needs_no_mesh(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(8), {})
        checkpointer.wait()
        assert checkpointer.describe(1)["moments.mu.w"] == "float32[8,6]"


def test_saved_arrays_may_be_donated_at_once(tmp_path):
    """The writer works in the background; it must not see what later steps put into the same memory."""
    increment = jax.jit(lambda a: a + 1, donate_argnums=0)
    x = jax.device_put(jnp.zeros((8, 1 << 16)), sharding(8, "x"))
    shape = abstract(x)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": x}, {})
        for _ in range(10):
            x = increment(x)
        x.block_until_ready()
        restored, _ = checkpointer.restore(1, {"x": shape})
    assert not np.any(restored["x"])


def run_script(body: str, folder: Path) -> subprocess.CompletedProcess:
    script = "import jax.numpy as jnp, os, resource, signal, sys\n" + textwrap.dedent(body)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def restored_value(folder, step):
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.latest() == step
        shape = jax.ShapeDtypeStruct((1 << 22,), jnp.float32, sharding=sharding(1))
        return np.unique(checkpointer.restore(step, {"x": shape})[0]["x"]).tolist()


def test_kill_in_the_middle_of_a_save_leaves_the_last_complete_one(tmp_path):
    result = run_script(
        """
        from dualpipe_jax.checkpoint import Checkpointer
        checkpointer = Checkpointer(sys.argv[1])
        checkpointer.save(1, {"x": jnp.full(1 << 22, 1.0)}, {})
        checkpointer.wait()
        checkpointer.save(2, {"x": jnp.full(1 << 22, 2.0)}, {})  # 16 MB: still being written at the next line
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert any("tmp" in entry.name for entry in tmp_path.iterdir()), "the save must have begun"
    assert restored_value(tmp_path, 1) == [1.0]


def test_full_disk_is_loud_at_the_next_save(tmp_path):
    """A limit on the size of files stands for a full disk; unlike permissions it binds root too."""
    result = run_script(
        """
        from dualpipe_jax.checkpoint import Checkpointer, CheckpointError
        checkpointer = Checkpointer(sys.argv[1])
        checkpointer.save(1, {"x": jnp.full(1 << 22, 1.0)}, {})
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, resource.RLIM_INFINITY))
        x = jnp.arange(1 << 22, dtype=jnp.float32)  # does not compress
        raised = 0
        for step in (2, 3):
            try:
                checkpointer.save(step, {"x": x}, {})
            except CheckpointError as error:
                raised += 1
                print(error)
                break
        assert raised == 1
        raise SystemExit(7)
        """,
        tmp_path,
    )
    assert result.returncode == 7, result.stderr
    assert "the last complete step is 1" in result.stdout
    assert restored_value(tmp_path, 1) == [1.0]


def test_a_save_under_way_is_not_the_latest(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": jnp.zeros(1)}, {})
        checkpointer.wait()
        checkpointer.save(2, {"x": jnp.zeros(1 << 24)}, {})
        assert checkpointer.latest() == 1 or (tmp_path / "2").exists()
        checkpointer.wait()
        assert checkpointer.latest() == 2


def test_two_processes_save_what_one_restores(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            from dualpipe_jax.distributed import exit_on_failure, initialize_from_environment
            processes = initialize_from_environment(timeout_s=30)
            with exit_on_failure(processes):
                import jax
                import numpy as np
                from jax.sharding import AxisType, NamedSharding, PartitionSpec
                from dualpipe_jax.checkpoint import Checkpointer
                mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,))
                sharding = NamedSharding(mesh, PartitionSpec("x"))
                whole = np.arange(1 << 22, dtype=np.float32) // (1 << 20)
                x = jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
                with Checkpointer(sys.argv[1]) as checkpointer:
                    checkpointer.save(1, {"x": x}, {})
                    checkpointer.save(2, {"x": x + 1}, {})
                    checkpointer.wait()
                    assert checkpointer.latest() == 2
                jax.distributed.shutdown()
        """)
    )
    launch = Path(__file__).parent.parent / "run" / "launch.py"
    options = [
        "--processes",
        "2",
        "--devices-per-process",
        "2",
        "--script",
        str(script),
        "--log-dir",
        str(tmp_path / "log"),
    ]
    result = subprocess.run(
        [sys.executable, str(launch), *options, "--", str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert restored_value(tmp_path / "checkpoints", 2) == [1.0, 2.0, 3.0, 4.0]


def test_unusable_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot use the folder of checkpoints"):
        Checkpointer(tmp_path / "file" / "checkpoints")
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Checkpointer(tmp_path, keep=0)
