"""Safetensors folders: written and read bit for bit, sharded, with 8-bit weights; what does not fit is listed."""

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from hf_cases import CASES, DATA, config_of, tensors
from safetensors.numpy import load_file, save_file

from configs import get
from dualpipe_jax.config import ModelConfig
from dualpipe_jax.hf import load_config, load_params, save_params
from dualpipe_jax.hf.load import dequantized
from dualpipe_jax.hf.parts import leaf_shapes, parts
from dualpipe_jax.hf.tensors import Tensors
from dualpipe_jax.model.model import Model
from moe.config import MoEConfig

CASE = "deepseek_v3_basic"


@pytest.fixture
def folder(tmp_path):
    """A copy of a checkpoint that a test may damage."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / CASE / name, tmp_path / "model")
    return tmp_path / "model"


def change(folder, edit):
    content = load_file(folder / "model.safetensors")
    edit(content)
    save_file(content, folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bitwise(case, tmp_path):
    params = load_params(DATA / case)
    save_params(tmp_path / "out", config_of(case), params, max_length=64)
    want, got = tensors(case, "model"), load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], strict=True)
    assert load_config(tmp_path / "out") == config_of(case)


@pytest.mark.parametrize("case", CASES)
def test_the_tree_is_that_of_a_fresh_model(case):
    fresh = jax.eval_shape(Model(config_of(case), 1, 1).init, jax.random.key(0))
    read = load_params(DATA / case)
    assert jax.tree.structure(read) == jax.tree.structure(fresh)
    for ours, theirs in zip(jax.tree.leaves(read), jax.tree.leaves(fresh), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype


def test_as_many_tensors_as_deepseek_v3_published():
    """91,991 entries of its index, multi-token prediction included: tensors, and scales of the 8-bit ones."""
    names = [part.name for part in parts(dataclasses.replace(get("deepseek_v3_671b").model, mtp_depth=1))]
    eight_bit = [n for n in names if n.endswith(("_proj.weight", "_with_mqa.weight")) and "eh_proj" not in n]
    assert len(set(names)) + len(eight_bit) == 91_991


def test_sharded_with_an_index(tmp_path):
    config, params = config_of(CASE), load_params(DATA / CASE)
    save_params(tmp_path, config, params, max_length=64, shard_bytes=100_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) >= 4
    assert all((tmp_path / file).stat().st_size < 120_000 for file in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(CASE, "model").values())
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path), params)


def test_bfloat16_survives(tmp_path):
    """As published: 16 bits in the file, 32 in training, 16 in the export."""
    config = config_of(CASE)
    save_params(tmp_path / "a", config, load_params(DATA / CASE), max_length=64, dtype=ml_dtypes.bfloat16)
    wide = load_params(tmp_path / "a")
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {np.dtype(np.float32)}
    save_params(tmp_path / "b", config, wide, max_length=64, dtype=ml_dtypes.bfloat16)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_memory_is_the_callers(tmp_path):
    """Arrays are filled where the caller wants them; every leaf is asked for once."""
    asked = {}

    def allocate(name, shape, dtype):
        asked[name] = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", dtype, shape)
        return asked[name]

    tree = load_params(DATA / CASE, allocate=allocate)
    assert {name: array.shape for name, array in asked.items()} == leaf_shapes(config_of(CASE))
    jax.tree.map(np.testing.assert_array_equal, tree, load_params(DATA / CASE))


# -------------------------------------------------------------------- 8-bit weights


def quantised(weight):
    """e4m3 values and a scale for each block of 128 x 128, as DeepSeek publishes; blocks at the edge are smaller."""
    scale = np.zeros([-(-n // 128) for n in weight.shape], np.float32)
    values = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    for i, j in np.ndindex(scale.shape):
        block = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        scale[i, j] = np.abs(weight[block]).max() / 448
        values[block] = (weight[block] / scale[i, j]).astype(ml_dtypes.float8_e4m3fn)
    return values, scale


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """(folder with 8-bit matrices of several, uneven blocks, the parameters they were made from)."""
    moe = MoEConfig(d_ff=136, num_experts=2, num_shared_experts=0, bias_rate=0.0, balance_loss_weight=0.0)
    config = ModelConfig(d_model=160, num_layers=1, num_heads=2, num_kv_heads=2, num_dense_layers=0, d_ff=136, moe=moe)
    params = jax.tree.map(np.asarray, Model(config, 1, 1).init(jax.random.key(0)))
    folder = tmp_path_factory.mktemp("fp8")
    save_params(folder, config, params, max_length=64)
    content = load_file(folder / "model.safetensors")
    for name in [n for n in content if "experts" in n or "proj" in n]:
        content[name], content[name + "_scale_inv"] = quantised(content[name])
    save_file(content, folder / "model.safetensors")
    hf = json.loads((folder / "config.json").read_text())
    hf["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(hf))
    return folder, params


def test_8_bit_weights_are_dequantised(fp8):
    folder, params = fp8
    assert "F8_E4M3" in (folder / "model.safetensors").read_bytes()[:20_000].decode(errors="ignore")
    for got, want in zip(jax.tree.leaves(load_params(folder)), jax.tree.leaves(params), strict=True):
        # 3 bits of mantissa: half a step is 1/16 of the value, or 2^-10 of the scale's unit for the smallest ones.
        np.testing.assert_allclose(got, want, rtol=1 / 16, atol=np.abs(want).max() / 448 * 2**-9)


def test_each_block_has_its_own_scale(tmp_path):
    """All ones, so that the result is the scales."""
    ones = np.ones((130, 257), ml_dtypes.float8_e4m3fn)
    scale = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    save_file({"w": ones, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    got = dequantized(Tensors(tmp_path), "w")
    assert got.shape == (130, 257)
    assert (got[0, 0], got[127, 127], got[127, 128], got[0, 256], got[128, 0], got[129, 256]) == (1, 1, 2, 3, 4, 6)


def test_other_blocks_are_refused(fp8, tmp_path):
    folder = shutil.copytree(fp8[0], tmp_path / "other")
    hf = json.loads((folder / "config.json").read_text())
    hf["quantization_config"]["weight_block_size"] = [64, 64]
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match=r"weight_block_size \[128, 128\]"):
        load_params(folder)


def test_a_missing_scale_is_named(fp8, tmp_path):
    folder = shutil.copytree(fp8[0], tmp_path / "other")
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    entry = Tensors(folder).entries[name]
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content.replace(name.encode(), name[:-1].encode() + b"w"))
    assert entry.shape == (2, 2)
    with pytest.raises(ValueError, match=rf"missing: {name} \[2, 2\]\n.*not known: .*weight_scale_inw"):
        load_params(folder)


# -------------------------------------------------------------------- what does not fit


def test_all_that_does_not_fit_is_listed(folder):
    def edit(content):
        content["model.norm.wight"] = content.pop("model.norm.weight")
        content["lm_head.weight"] = content["lm_head.weight"][:50].copy()
        content["model.layers.1.mlp.gate.weight"] = content["model.layers.1.mlp.gate.weight"].astype(np.int32)

    change(folder, edit)
    with pytest.raises(ValueError, match="does not fit") as caught:
        load_params(folder)
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  - different: lm_head.weight is [50, 48], not [97, 48]",
        "  - different: model.layers.1.mlp.gate.weight is int32, not a float of 16 bits or more, or float8_e4m3fn",
        "  - missing: model.norm.weight [48]",
        "  - not known: model.norm.wight [48]",
    ]


@pytest.fixture
def with_mtp(tmp_path):
    """(a checkpoint with multi-token prediction, its configuration and parameters)."""
    config = dataclasses.replace(config_of(CASE), mtp_depth=1)
    params = jax.tree.map(np.asarray, jax.jit(Model(config, 1, 1).init)(jax.random.key(0)))
    save_params(tmp_path, config, params, max_length=64)
    return tmp_path, config, params


def test_multi_token_prediction(with_mtp):
    """A layer behind the last, with the published names; what it shares is there twice, and once in the tree."""
    folder, config, params = with_mtp
    assert load_config(folder) == config
    jax.tree.map(np.testing.assert_array_equal, load_params(folder), params)
    names = load_file(folder / "model.safetensors")
    assert names["model.layers.4.eh_proj.weight"].shape == (48, 96)
    for copy, shared in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        np.testing.assert_array_equal(names[f"model.layers.4.{copy}.weight"], names[f"{shared}.weight"])
    new = {n for n in names if n.startswith("model.layers.4.") and n.replace("layers.4", "layers.3") not in names}
    own = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")
    assert new == {f"model.layers.4.{name}.weight" for name in own}


def test_multi_token_prediction_is_left_out_when_told_so(with_mtp):
    folder, config, params = with_mtp
    without = load_params(folder, skip_mtp=True)
    jax.tree.map(np.testing.assert_array_equal, without, {k: v for k, v in params.items() if k != "mtp"})
    with pytest.raises(ValueError, match=r"not known: model.layers.4.eh_proj.weight \[48, 96\]"):
        load_params(folder, dataclasses.replace(config, mtp_depth=0))
    change(folder, lambda content: content.update({"model.layers.3.eh_proj.weight": np.zeros((48, 96), np.float32)}))
    with pytest.raises(ValueError, match=r"not known: model.layers.3.eh_proj.weight"):
        load_params(folder, skip_mtp=True)


def test_what_is_shared_must_be_the_same(with_mtp):
    folder, _, _ = with_mtp
    change(folder, lambda content: content["model.layers.4.embed_tokens.weight"].__setitem__((3, 5), 7.0))
    with pytest.raises(ValueError, match=r"model.layers.4.embed_tokens.weight of .* must be equal to the tensor"):
        load_params(folder)


def test_router_biases_are_not_lost(tmp_path):
    params = load_params(DATA / "mixtral_tiny")
    params["layers"][2]["moe"]["router"]["bias"][3] = 0.25
    with pytest.raises(ValueError, match=r"would be lost:\n  - layers.2.moe.router.bias is not zero"):
        save_params(tmp_path, config_of("mixtral_tiny"), params, max_length=64)
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(folder):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"has model.safetensors already; choose an empty folder"):
        save_params(folder, config_of(CASE), load_params(folder), max_length=64)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "model.safetensors").unlink(), r"no model.safetensors and no model.safetensors.index.json"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), r"both model.safetensors and"),
        (lambda f: cut(f / "model.safetensors", 100_000), r"is cut short or damaged: .* the file has 100000"),
        (lambda f: cut(f / "model.safetensors", 100), r"no safetensors file, or cut short"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\n" + b"\0" * 7 + b"version https"), r"no safetensors file"),
        (lambda f: (f / "config.json").unlink(), r"cannot read .*config.json"),
        (lambda f: (f / "config.json").write_text("{"), r"config.json is no JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"must be an object"),
    ],
)
def test_damaged_folders(folder, damage, said):
    damage(folder)
    with pytest.raises(ValueError, match=said):
        load_params(folder)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda m: m.pop("model.norm.weight"), r"has model.norm.weight, which the index lacks"),
        (lambda m: m.update({"more": m["lm_head.weight"]}), r"model-.* lacks more"),
        (lambda m: m.update({"more": "gone.safetensors"}), r"cannot read .*gone.safetensors"),
    ],
)
def test_an_index_that_does_not_fit_its_files(tmp_path, edit, said):
    save_params(tmp_path, config_of(CASE), load_params(DATA / CASE), max_length=64, shard_bytes=100_000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=said):
        load_params(tmp_path)
