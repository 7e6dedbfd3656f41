"""Measurements of the pipeline, behind `python run/bench.py`. jax is imported only when something is measured."""
