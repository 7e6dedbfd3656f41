"""Set the emulated devices before JAX is imported, and make JAX strict."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Emulated devices may start independent collectives in different orders and wait for ever.
    "--xla_cpu_enable_concurrency_optimized_scheduler": "false",
}
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{k}={v}" for k, v in _FLAGS.items() if k not in _given)]).strip()

_HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
_CACHE = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", _HOME / "dualpipe_jax" / "tests"))
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_CACHE)

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
# Half the compile time; the programs are tiny. Tests of the compiled program itself turn it off.
jax.config.update("jax_disable_most_optimizations", True)
