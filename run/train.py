"""Train a model: `python run/train.py --help`. Without a flag, a small one on 8 emulated CPU devices."""

from __future__ import annotations

import os

from dualpipe_jax.cli import fail, parse_cli
from dualpipe_jax.config import Config
from dualpipe_jax.emulate import emulate_devices
from dualpipe_jax.validation import ConfigError, check_config


def main() -> None:
    config = parse_cli()
    try:
        check_config(config)
    except ConfigError as error:
        fail(str(error))
    if _on_cpu():
        emulate_devices(_devices_of_this_process(config))
    _train(config)


def _on_cpu() -> bool:
    """Whether to emulate devices: unless the user chose a platform, or an accelerator is there."""
    chosen = os.environ.get("JAX_PLATFORMS", "")
    return chosen == "cpu" or (not chosen and not os.path.exists("/dev/nvidiactl"))


def _devices_of_this_process(config: Config) -> int:
    from dualpipe_jax.distributed import processes_from_environment

    return max(1, config.pipeline.num_devices // processes_from_environment().num_processes)


def _train(config: Config) -> None:
    import jax

    from dualpipe_jax.distributed import LaunchError, exit_on_failure, initialize_from_environment

    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR") or _cache_dir())
    try:
        processes = initialize_from_environment()
        check_config(config, num_devices=jax.device_count(), num_processes=processes.num_processes)
    except (ConfigError, LaunchError) as error:
        fail(str(error))
    from dualpipe_jax.train import train

    with exit_on_failure(processes):
        try:
            train(config)
        except ConfigError as error:
            fail(str(error))


def _cache_dir() -> str:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "dualpipe_jax", "xla")


if __name__ == "__main__":
    main()
