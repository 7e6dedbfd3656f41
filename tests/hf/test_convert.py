"""run/convert.py: a checkpoint into a run that trains, and out again as it came."""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_cases import DATA, config_of
from safetensors.numpy import load_file

from dualpipe_jax.checkpoint import Checkpointer
from dualpipe_jax.config import from_json
from dualpipe_jax.hf import load_params, save_params
from dualpipe_jax.model.model import Model
from dualpipe_jax.train import canonical, restore, train
from dualpipe_jax.train_step import Trainer

ROOT = Path(__file__).parent.parent.parent


def convert(*argv):
    spec = importlib.util.spec_from_file_location("convert", ROOT / "run" / "convert.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(a) for a in argv])


FLAGS = ["--pipeline.pp", 2, "--pipeline.num-microbatches", 4, "--data.batch-size", 8, "--data.seq-len", 16]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "deepseek_v3_basic" / name, folder)
    (folder / "tokenizer.json").write_bytes(b'{"version": "1.0"}\r\n')
    return folder


@pytest.fixture(scope="module")
def run_dir(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "mine"
    assert convert("import", "--source", source, "--train.run-dir", folder, *FLAGS) == 0
    return folder


def test_round_trip_is_bitwise(source, run_dir, tmp_path):
    assert convert("export", "--run-dir", run_dir, "--target", tmp_path / "out") == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    got, want = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", source))
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], strict=True)


def test_the_run_is_one_that_the_trainer_takes_up(source, run_dir):
    """Its checkpoint restores under a pipeline, strictly: nothing missing, nothing too many, moments zero."""
    config = from_json((run_dir / "config.json").read_text())
    assert config.model == config_of("deepseek_v3_basic")
    trainer = Trainer(config)
    with Checkpointer(run_dir / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 0
        state, host = restore(trainer, checkpoints, 0)
    assert host["data"]["next_batch"] == 0
    assert int(state.step) == 0
    assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(state.optimizer))
    jax.tree.map(np.testing.assert_array_equal, canonical(trainer, state).params, load_params(source))
    np.testing.assert_array_equal(state.key, jax.random.key_data(jax.random.key(config.train.seed)))


def test_export_in_other_forms(run_dir, tmp_path):
    """bfloat16 in several files; `config.json` says so and is the source's otherwise."""
    target = tmp_path / "out"
    convert("export", "--run-dir", run_dir, "--target", target, "--dtype", "bfloat16", "--shard-gb", "5e-5")
    assert (target / "model.safetensors.index.json").is_file()
    ours = json.loads((target / "config.json").read_text())
    theirs = json.loads((DATA / "deepseek_v3_basic" / "config.json").read_text())
    assert ours == theirs | {"dtype": "bfloat16"}


def test_a_changed_model_has_a_new_config(run_dir, tmp_path):
    changed = shutil.copytree(run_dir, tmp_path / "run")
    config = from_json((changed / "config.json").read_text())
    moe = dataclasses.replace(config.model.moe, route_scale=2.0)
    model = json.loads((changed / "config.json").read_text())
    model["model"]["moe"]["route_scale"] = moe.route_scale
    (changed / "config.json").write_text(json.dumps(model))
    convert("export", "--run-dir", changed, "--target", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["routed_scaling_factor"] == 2.0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["import", "--source", "{source}"], "say where to: --train.run-dir"),
        (["import", "--source", "{source}", "--train.run-dir", "{run}"], "has checkpoints already"),
        (["import", "--source", "{run}/gone", "--train.run-dir", "{new}"], "cannot read"),
        (["import", "--source", "{source}", "--train.run-dri", "{new}"], "train.run-d"),
        (["export", "--run-dir", "{source}", "--target", "{new}"], "unknown entry 'architectures'"),
        (["export", "--run-dir", "{source}/gone", "--target", "{new}"], "no run folder"),
        (["export", "--run-dir", "{run}", "--target", "{new}", "--step", "3"], "nearest valid value is 0"),
        (["export", "--run-dir", "{run}", "--target", "{source}"], "choose an empty folder"),
        (["export", "--run-dir", "{run}", "--target", "{new}", "--shard-gb", "0"], "must be above 0"),
        (["export", "--run-dir", "{run}", "--target", "{new}", "--sharp"], "--sharp"),
        (["convert"], "invalid choice"),
    ],
)
def test_mistakes_end_with_2(argv, said, source, run_dir, tmp_path, capsys):
    argv = [a.format(source=source, run=run_dir, new=tmp_path / "new") for a in argv]
    with pytest.raises(SystemExit) as exit_:
        convert(*argv)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_multi_token_prediction_left_out(source, tmp_path):
    """The export says that there is none, and is as it was otherwise."""
    config = dataclasses.replace(config_of("deepseek_v3_basic"), mtp_depth=1)
    params = jax.jit(Model(config, 1, 1).init)(jax.random.key(0))
    save_params(tmp_path / "in", config, params, max_length=64)
    convert("import", "--source", tmp_path / "in", "--skip-mtp", "--train.run-dir", tmp_path / "run", *FLAGS)
    convert("export", "--run-dir", tmp_path / "run", "--target", tmp_path / "out")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("in", "out"))
    assert after == before | {"num_nextn_predict_layers": 0}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the whole trainer, third-party packages included
def test_an_imported_run_trains(tmp_path):
    """In bfloat16, with latent attention, YaRN and multi-token prediction; and is exported with other values."""
    config = dataclasses.replace(config_of("deepseek_v3_yarn"), vocab_size=256, mtp_depth=1)
    params = jax.jit(Model(config, 1, 1).init)(jax.random.key(0))
    save_params(tmp_path / "in", config, params, max_length=64)
    flags = [*FLAGS, "--train.dtype", "bfloat16", "--train.steps", 12]
    convert("import", "--source", tmp_path / "in", "--train.run-dir", tmp_path / "run", *flags)
    with jax.numpy_dtype_promotion("standard"):  # as a user has it; JAX's attention needs it for bfloat16 gradients
        result = train(from_json((tmp_path / "run" / "config.json").read_text()))
    losses = [line["loss"] for line in result.metrics]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.1
    convert("export", "--run-dir", tmp_path / "run", "--target", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    still = [n for n in before if np.array_equal(before[n], after[n])]
    assert all(name.endswith("e_score_correction_bias") for name in still), still
