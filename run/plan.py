"""What a run would need: `python run/plan.py --count --preset deepseek_v3_671b`; flags as of run/train.py change it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from dualpipe_jax.cli import fail, parse_cli
from dualpipe_jax.config import Config
from dualpipe_jax.model.count import ParameterCount, count_parameters
from dualpipe_jax.validation import ConfigError, check_config


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the arguments ask for; exit with 2 where they are wrong. Allocates nothing."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--count", action="store_true", help="parameters, all and active")
    parser.add_argument("--json", action="store_true", help="as one JSON object, and nothing else")
    args, rest = parser.parse_known_args(argv)
    config = parse_cli(rest)
    if not args.count:
        fail("say what to plan: --count")
    try:
        check_config(config)
    except ConfigError as error:
        fail(str(error))
    count = count_parameters(config.model)
    print(json.dumps(count._asdict()) if args.json else _described(config, count))
    return 0


def _described(config: Config, count: ParameterCount) -> str:
    rows = {
        "total": count.total,
        "active a token": count.active,
        "  without the embedding's table": count.active_without_lookup,
        "embedding and output matrix": count.embedding,
        "routed experts": count.experts,
        "multi-token prediction, besides": count.mtp,
    }
    model = config.model
    moe = f"{model.moe.num_experts} experts, top {model.moe.top_k}" if model.moe else "no experts"
    title = f"{model.num_layers} layers of d_model {model.d_model}, {moe}"
    return "\n".join([title, *(f"{name:<32}{n:>20,}  {n / 1e9:>9.3f} B" for name, n in rows.items())])


if __name__ == "__main__":
    sys.exit(main())
