"""The default run: small enough for two CPU cores, with everything in it. 8 (emulated) devices: pp=4, ep=2."""

from dualpipe_jax.config import Config


def config() -> Config:
    return Config()
