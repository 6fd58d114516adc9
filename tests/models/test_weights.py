"""Loading: every way in which a folder of weights can be wrong is named (LD-03, LD-07, LD-09 to LD-12)."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from denim.errors import ConfigError
from denim.layers.norm import RMSNorm
from denim.models.tensor_files import INDEX, find_tensors
from denim.models.weights import load_model, random_weights
from denim.spec.config_file import embedded_model
from denim.spec.reader import read_spec
from tests.tiny import checkpoint


def load(folder: Path) -> torch.nn.Module:
    return load_model(read_spec(folder), folder, device="cpu", chunk_size=64)


def embedding(folder: Path) -> torch.Tensor:
    return load(folder).embedding.data


def shard(folder: Path, parts: int = 3) -> dict[str, str]:
    """Split model.safetensors of `folder` into shards with an index; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {
        name: f"model-0000{i % parts + 1}-of-0000{parts}.safetensors" for i, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_sharded_equals_single(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    single = {n: t.clone() for n, t in load(tmp_path).targets().items()}
    shard(tmp_path)
    for name, tensor in load(tmp_path).targets().items():
        assert torch.equal(tensor, single[name]), name


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """LD-09."""
    checkpoint(tmp_path)
    shard(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").rename(tmp_path / "model-00002-of-00003.safetensors.part")
    with pytest.raises(ConfigError, match="model-00002-of-00003"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_shard_is_named(tmp_path: Path, keep: int) -> None:
    """LD-09."""
    checkpoint(tmp_path)
    shard(tmp_path)
    file = tmp_path / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match="model-00003-of-00003"):
        load(tmp_path)


@pytest.mark.parametrize("assigned", [1, 2])
def test_the_index_decides_between_two_shards(tmp_path: Path, assigned: int) -> None:
    """LD-10: a stale tensor of the same name in another shard never wins, whatever the order of files."""
    checkpoint(tmp_path)
    weight_map = shard(tmp_path, parts=2)
    name = "model.embed_tokens.weight"
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    right = torch.randn_like(load_file(tmp_path / weight_map[name])[name])
    for i, file in enumerate(files, start=1):
        tensors = load_file(tmp_path / file)
        tensors[name] = right.clone() if i == assigned else torch.zeros_like(right)
        save_file(tensors, tmp_path / file)
    write_index(tmp_path, weight_map | {name: files[assigned - 1]})
    assert torch.equal(embedding(tmp_path), right)


def test_a_file_beside_the_shards_is_not_read(tmp_path: Path) -> None:
    """Some vendors put the same weights there once more, in a form of their own."""
    checkpoint(tmp_path)
    shard(tmp_path)
    right = embedding(tmp_path)
    save_file({"tok_embeddings.weight": torch.zeros(3, 4)}, tmp_path / "consolidated.safetensors")
    assert torch.equal(embedding(tmp_path), right)


def test_a_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match="'model.norm.weight' is in"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.linear_attn.A_log", "lm_head.weight"])
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"lack '{name}'") as error:
        load(tmp_path)
    assert ("tie_word_embeddings: true" in str(error.value)) == (name == "lm_head.weight")


def test_surplus_tensor_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.9.extra": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'model.layers.9.extra'.*config"):
        load(tmp_path)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    change_config(tmp_path, intermediate_size=88)
    with pytest.raises(ConfigError, match=r"mlp.*shape \[.*80.*\].*asks for \[.*88.*\]"):
        load(tmp_path)


def test_a_transposed_tensor_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].t().contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"down_proj.*shape \[80, 48\].*asks for \[48, 80\]"):
        load(tmp_path)


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    norm = {"model.language_model.norm.weight": tensors["model.norm.weight"].clone()}
    save_file(tensors | norm, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="language_model.*the same tensor under two names"):
        load(tmp_path)


def test_quantised_tensor_is_refused(tmp_path: Path) -> None:
    """LD-08: a projection that is not a float tensor."""
    checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.linear_attn.in_proj_z.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"in_proj_z.*quantised"):
        load(tmp_path)


def test_tied_head_in_the_files(tmp_path: Path) -> None:
    """LD-03: an equal copy is fine, another matrix contradicts the config."""
    checkpoint(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    load(tmp_path)
    narrow = head.bfloat16()
    both = {"model.embed_tokens.weight": narrow.float(), "lm_head.weight": narrow}
    save_file(tensors | both, tmp_path / "model.safetensors")
    load(tmp_path)
    save_file(tensors | {"lm_head.weight": head + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        load(tmp_path)


def test_zeroed_projection_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LD-07: the k rows of layer 0; nothing is said of the good file."""
    checkpoint(tmp_path)
    with caplog.at_level(logging.WARNING, logger="denim"):
        load(tmp_path)
        assert not caplog.records
        tensors = load_file(tmp_path / "model.safetensors")
        name = "model.layers.0.linear_attn.in_proj_qkv.weight"
        tensors[name][32:64] = 0  # q is 2 heads of 16 rows, k the next 32
        save_file(tensors, tmp_path / "model.safetensors")
        load(tmp_path)
    assert name in caplog.text
    assert "32 of" in caplog.text


MTP_ROWS = {"q_proj": 288, "k_proj": 48, "v_proj": 48}


def mtp_tensors() -> dict[str, torch.Tensor]:
    """The head of the small dense model: one full-attention block, join and norms."""
    names = {
        "mtp.fc.weight": (48, 96),
        "mtp.pre_fc_norm_embedding.weight": (48,),
        "mtp.pre_fc_norm_hidden.weight": (48,),
        "mtp.norm.weight": (48,),
        "mtp.layers.0.input_layernorm.weight": (48,),
        "mtp.layers.0.post_attention_layernorm.weight": (48,),
        "mtp.layers.0.self_attn.q_norm.weight": (24,),
        "mtp.layers.0.self_attn.k_norm.weight": (24,),
        "mtp.layers.0.self_attn.o_proj.weight": (48, 144),
        "mtp.layers.0.mlp.gate_proj.weight": (80, 48),
        "mtp.layers.0.mlp.up_proj.weight": (80, 48),
        "mtp.layers.0.mlp.down_proj.weight": (48, 80),
    }
    names |= {f"mtp.layers.0.self_attn.{n}.weight": (rows, 48) for n, rows in MTP_ROWS.items()}
    return {name: torch.randn(shape) for name, shape in names.items()}


def test_mtp_head_is_loaded_and_kept(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    change_config(tmp_path, mtp_num_hidden_layers=1)
    head = mtp_tensors()
    save_file(load_file(tmp_path / "model.safetensors") | head, tmp_path / "model.safetensors")
    targets = load(tmp_path).targets()
    for name, tensor in head.items():
        assert torch.equal(targets[name], tensor), name


def test_mtp_promised_but_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LD-12: the model loads without the head, and says so."""
    checkpoint(tmp_path)
    change_config(tmp_path, mtp_num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, logger="denim"):
        model = load(tmp_path)
    assert model.mtp is None and not model.spec.mtp_layers
    assert "MTP" in caplog.text


def test_mtp_head_that_the_index_forgot(tmp_path: Path) -> None:
    """LD-11: headers are the truth; and a head that the index names must be there."""
    checkpoint(tmp_path)
    change_config(tmp_path, mtp_num_hidden_layers=1)
    weight_map = shard(tmp_path)
    head = mtp_tensors()
    save_file(head, tmp_path / "mtp.safetensors")
    assert torch.equal(load(tmp_path).targets()["mtp.fc.weight"], head["mtp.fc.weight"])
    (tmp_path / "mtp.safetensors").unlink()
    write_index(tmp_path, weight_map | dict.fromkeys(head, "mtp.safetensors"))
    with pytest.raises(ConfigError, match=r"mtp\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000]
)
def test_an_index_that_is_none(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ConfigError, match="is not a safetensors index: .*download it again"):
        find_tensors(tmp_path)


def test_sizes_that_no_memory_holds(tmp_path: Path) -> None:
    """Told by the config alone, before torch is asked for such tensors."""
    checkpoint(tmp_path)
    spec = read_spec(tmp_path)
    with pytest.raises(ConfigError, match="the config asks for .* of weights; correct its sizes"):
        load_model(replace(spec, vocab_size=2**62), tmp_path, device="cpu", chunk_size=64)


def test_folders_without_weights(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no \\*.safetensors"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        load_model(read_spec(tmp_path), tmp_path / "nowhere", device="cpu", chunk_size=64)


def test_random_weights_are_those_of_a_fresh_model() -> None:
    """Norms that scale by 1 and decays between e^-1 and e^-16 at a step of 1, in the model's own dtype."""
    spec = replace(read_spec(embedded_model(), dtype="float32"), weight_blocks=(128, 128))
    model = random_weights(spec, device="cpu", chunk_size=64)
    assert model.spec.weight_blocks is None
    assert all((m.scale == 1).all() for m in model.modules() if isinstance(m, RMSNorm))
    targets = model.targets()
    rates = torch.cat([tensor for name, tensor in targets.items() if name.endswith("A_log")]).exp()
    assert 1 <= rates.min() < rates.max() <= 16
    assert targets["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)
