"""Files nobody vouches for: which are read, that nothing in them is executed, and what is refused unread."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from support.checkpoints import LLAMA_CONFIG, eagle_tensors, hydra_tensors, medusa_tensors, write_checkpoint
from support.layouts import HYDRA, LAYOUTS, TINY_MEDUSA, write_file

from hf_specheads import load_heads
from hf_specheads.checkpoints.files import MAX_JSON_BYTES, SAFETENSORS_INDEX
from hf_specheads.errors import CheckpointShapeError, CheckpointValueError, CorruptCheckpointError, HeadLoadError

GOLDENS = Path(__file__).resolve().parents[1] / "recordings" / "goldens"


class Malicious:
    """Writes a file when unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.marker, "executed")


def eagle_folder(path: Path, **config: Any) -> Path:
    write_file(path / "config.json", LLAMA_CONFIG | config)
    return path


# ------------------------------------------------------------------ pickles
PICKLED = {
    "pytorch_model.bin": (eagle_tensors, LLAMA_CONFIG),
    "medusa_lm_head.pt": (medusa_tensors, TINY_MEDUSA),
    "hydra_lm_head.pt": (hydra_tensors, HYDRA),
    "pytorch_model-00001-of-00001.bin": (eagle_tensors, LLAMA_CONFIG),
    "state_3/pytorch_model.bin": (eagle_tensors, LLAMA_CONFIG),
    "state_3/pytorch_model_0.bin": (eagle_tensors, LLAMA_CONFIG),
}


def write_pickled(folder: Path, name: str, content: Any, *, plain: bool = False) -> None:
    """Writes a pickled checkpoint; `plain` without torch's archive around it."""
    write_file(folder / "config.json", PICKLED[name][1])
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if plain:
        (folder / name).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, folder / name)
    if "-of-" in name:
        write_file(folder / "pytorch_model.bin.index.json", {"weight_map": dict.fromkeys(content, name)})


@pytest.mark.parametrize("name", PICKLED)
def test_pickled_files_are_read(name: str, tmp_path: Path) -> None:
    tensors = PICKLED[name][0]()
    write_pickled(tmp_path, name, tensors)
    assert load_heads(tmp_path).num_parameters() > 1000


@pytest.mark.parametrize("plain", [False, True], ids=["archive", "plain"])
@pytest.mark.parametrize("name", PICKLED)
def test_no_pickle_is_executed(name: str, plain: bool, tmp_path: Path) -> None:
    marker, tensors = tmp_path / "marker", PICKLED[name][0]()
    write_pickled(tmp_path / "x", name, tensors | {next(iter(tensors)): Malicious(marker)}, plain=plain)
    with pytest.raises(CorruptCheckpointError, match="none of its code was executed"):
        load_heads(tmp_path / "x")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Malicious(marker)))  # it would have been
    assert marker.exists()


def test_safetensors_come_first_and_training_states_are_not_opened(tmp_path: Path) -> None:
    """What lies beside the weights is never read, however it is named."""
    marker = tmp_path / "marker"
    for folder in (tmp_path / "a", tmp_path / "b" / "state_7"):
        write_checkpoint(folder, eagle_tensors())
        for name in (
            "pytorch_model.bin",
            "optimizer.bin",
            "scheduler.bin",
            "random_states_0.pkl",
            "medusa_lm_head.pt",
        ):
            (folder / name).write_bytes(pickle.dumps(Malicious(marker)))
        assert load_heads(folder).config.method == "eagle"
    assert not marker.exists()


def test_files_of_older_versions_of_torch(tmp_path: Path) -> None:
    tensors = eagle_tensors()
    torch.save(tensors, eagle_folder(tmp_path) / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_heads(tmp_path).fc.weight, tensors["fc.weight"])
    torch.save({key: torch.nn.Parameter(tensor) for key, tensor in tensors.items()}, tmp_path / "pytorch_model.bin")
    assert torch.equal(load_heads(tmp_path).fc.weight, tensors["fc.weight"])


def test_archives_that_unpack_to_more(tmp_path: Path) -> None:
    path = eagle_folder(tmp_path) / "pytorch_model.bin"
    torch.save(eagle_tensors(), path)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    assert torch.load(path, weights_only=True)["fc.weight"].shape == (32, 64)  # torch itself unpacks it
    with pytest.raises(CorruptCheckpointError, match=r"not an archive as `torch\.save` writes it"):
        load_heads(tmp_path)


def test_damaged_archives(tmp_path: Path) -> None:
    """What torch's own reader does not notice: bits of the weights, and an entry that calls itself a folder, for which
    it hands out memory that nobody filled."""
    path = eagle_folder(tmp_path) / "pytorch_model.bin"
    torch.save(eagle_tensors(), path)
    sound = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo("pytorch_model/data/2")
    middle = entry.header_offset + entry.file_size // 2
    path.write_bytes(sound[:middle] + bytes([sound[middle] ^ 1]) + sound[middle + 1 :])
    torch.load(path, weights_only=True)
    with pytest.raises(CorruptCheckpointError, match=r"data/2 in .* does not match its checksum"):
        load_heads(tmp_path)
    attributes = sound.rindex(b"pytorch_model/data/2") - 8  # in the directory at the end
    path.write_bytes(sound[:attributes] + b"\x10" + sound[attributes + 1 :])
    torch.load(path, weights_only=True)
    with pytest.raises(CorruptCheckpointError, match=r"not an archive as `torch\.save` writes it"):
        load_heads(tmp_path)
    path.write_bytes(sound[:-10])
    with pytest.raises(CorruptCheckpointError, match=r"pytorch_model\.bin"):
        load_heads(tmp_path)


def test_one_number_for_a_large_tensor(tmp_path: Path) -> None:
    """A view that repeats one number costs nothing in the file."""
    tensors = eagle_tensors() | {"fc.weight": torch.zeros(1).expand(32, 64)}
    with pytest.raises(CheckpointShapeError, match="impossible shape"):
        load_heads(write_checkpoint(tmp_path, tensors, pickled=True))


# ------------------------------------------------------------------ safetensors
def with_header(tmp_path: Path, header: str | bytes, data: bytes = b"", size: int | None = None) -> Path:
    content = header.encode() if isinstance(header, str) else header
    length = struct.pack("<Q", len(content) if size is None else size)
    (eagle_folder(tmp_path) / "model.safetensors").write_bytes(length + content + data)
    return tmp_path


ENTRY = '"dtype":"F32","shape":[2],"data_offsets":[0,8]'


@pytest.mark.parametrize(
    ("header", "size", "error"),
    [
        (f'{{"a":{{{ENTRY}}},"a":{{{ENTRY}}}}}', None, "names the tensor a twice"),
        ("{}", 2**60, "truncated or no safetensors"),
        ('{"a":{"dtype":"F32","shape":[2,9999999999999],"data_offsets":[0,8]}}', None, "impossible shape"),
        ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}', None, "impossible shape"),
        ('{"a":{"dtype":"F32","shape":"2","data_offsets":[0,8]}}', None, "impossible shape"),
        ('{"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}}', None, "of type 'F31'"),
        ('{"a":{"dtype":[],"shape":[2],"data_offsets":[0,8]}}', None, r"of type \[\]"),
        ('{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', None, "truncated or no safetensors"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,800]}}', None, "truncated or no safetensors"),
        ("[" * 100_000, None, "truncated or no safetensors"),
        (b"\xff" * 50, None, "truncated or no safetensors"),
    ],
)
def test_headers(tmp_path: Path, header: str | bytes, size: int | None, error: str) -> None:
    with pytest.raises(HeadLoadError, match=error):
        load_heads(with_header(tmp_path, header, bytes(8), size))


@pytest.mark.parametrize(("number", "words"), [(7e4, "no fp16 number is above"), (-1e30, "no fp16 number is above")])
def test_numbers_that_no_weight_is(tmp_path: Path, number: float, words: str) -> None:
    tensors = eagle_tensors()
    tensors["fc.weight"][3, 4] = number
    with pytest.raises(CheckpointValueError, match=words):
        load_heads(write_checkpoint(tmp_path, tensors))


def test_types_side_by_side(tmp_path: Path) -> None:
    """fp32 norms in a bf16 file are usual; fp16 next to bf16 is one of the two misread."""
    tensors = {key: tensor.bfloat16() for key, tensor in eagle_tensors().items()}
    norm = "layers.0.post_attention_layernorm.weight"
    heads = load_heads(write_checkpoint(tmp_path / "a", tensors | {norm: tensors[norm].float()}))
    assert heads.dtype == torch.bfloat16
    with pytest.raises(CheckpointValueError, match=r"fp16 and .* is bf16"):
        load_heads(write_checkpoint(tmp_path / "b", tensors | {norm: tensors[norm].half()}))


# ------------------------------------------------------------------ JSON
@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '{"b": {"c": 1, "c": 1}}', '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_json_that_is_refused(tmp_path: Path, text: str) -> None:
    (write_checkpoint(tmp_path, eagle_tensors()) / "config.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"config\.json"):
        load_heads(tmp_path)


def test_json_of_absurd_size(tmp_path: Path) -> None:
    with (write_checkpoint(tmp_path, eagle_tensors()) / "config.json").open("r+b") as file:
        file.truncate(MAX_JSON_BYTES + 1)  # sparse: takes no room
    with pytest.raises(CorruptCheckpointError, match="expected at most"):
        load_heads(tmp_path)


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 10**9}, {"vocab_size": 10**12}, {"num_attention_heads": 10**9},
               {"rope_theta": 10**400}, {"rms_norm_eps": 1e300}, {"max_position_embeddings": 10**15}],
)  # fmt: skip
@pytest.mark.parametrize("name", ["eagle-qkv-bias", "ours-eagle3"])
def test_absurd_numbers_are_no_trouble(name: str, change: dict, tmp_path: Path) -> None:
    """Refused, or of no consequence; in any case at once."""
    files = LAYOUTS[name].files()
    files["config.json"] |= change
    try:
        heads = load_heads(LAYOUTS[name].write(tmp_path, files))
    except HeadLoadError:
        return
    assert heads.num_parameters() < 10**5


# ------------------------------------------------------------------ shards
@pytest.mark.parametrize("name", ["eagle-fp16-shards", "poss-pickled-shards"])
@pytest.mark.parametrize(
    ("place", "words"),
    [("../{}", "proper `weight_map`"), ("/etc/passwd", "proper `weight_map`"), ("a/{}", "proper `weight_map`"),
     ("..\\{}", "proper `weight_map`"), ("config.json", "proper `weight_map`"), (3, "proper `weight_map`"),
     ("other-{}", "lacks the weight file")],
)  # fmt: skip
def test_an_index_that_leads_elsewhere(name: str, place: Any, words: str, tmp_path: Path) -> None:
    files = LAYOUTS[name].files()
    index = next(content for file, content in files.items() if "index" in file)["weight_map"]
    for key, file in index.items():
        index[key] = place.format(file) if isinstance(place, str) else place
    with pytest.raises(CorruptCheckpointError, match=words):
        load_heads(LAYOUTS[name].write(tmp_path, files), **LAYOUTS[name].arguments)


@pytest.mark.parametrize("name", ["eagle-fp16-shards", "poss-pickled-shards"])
def test_index_and_shards_must_agree(name: str, tmp_path: Path) -> None:
    """A tensor lost from a shard would otherwise make heads of another kind, without bias."""
    files = LAYOUTS[name].files()
    shard = next(content for content in files.values() if "fc.bias" in content)
    bias = shard.pop("fc.bias")
    with pytest.raises(CorruptCheckpointError, match=r"disagree about \['fc.bias'\]"):
        load_heads(LAYOUTS[name].write(tmp_path / "lost", files), **LAYOUTS[name].arguments)
    shard["fc.bias"] = bias
    other = next(content for file, content in files.items() if "-of-" in file and "fc.bias" not in content)
    other["fc.bias"] = bias.clone()
    with pytest.raises(CorruptCheckpointError, match=r"fc\.bias"):
        load_heads(LAYOUTS[name].write(tmp_path / "twice", files), **LAYOUTS[name].arguments)


def test_too_many_shards(tmp_path: Path) -> None:
    names = {f"k{i}": f"model-{i}.safetensors" for i in range(1001)}
    write_file(eagle_folder(tmp_path) / SAFETENSORS_INDEX, {"weight_map": names})
    with pytest.raises(CorruptCheckpointError, match="expected at most 1000"):
        load_heads(tmp_path)


def test_of_a_whole_target_only_the_heads_shards_are_needed(tmp_path: Path) -> None:
    """Sixteen gigabytes of target need not be on this machine to read its heads."""
    files = LAYOUTS["medusa-2-whole-model"].files()
    places = next(content for file, content in files.items() if "index" in file)["weight_map"]
    theirs = {key: "model-00001-of-00003.safetensors" for key in places if "medusa" in key or "embed_tokens" in key}
    shard = {key: next(t[key] for f, t in files.items() if "-of-" in f and key in t) for key in theirs}
    index = {"weight_map": dict.fromkeys(places, "model-00002-of-00003.safetensors") | theirs}
    kept = {"config.json": files["config.json"], SAFETENSORS_INDEX: index, "model-00001-of-00003.safetensors": shard}
    heads = load_heads(LAYOUTS["medusa-2-whole-model"].write(tmp_path, kept))
    assert heads.config.num_heads == 3 and heads.config.target["fingerprint"]


def test_links_are_followed(tmp_path: Path) -> None:
    """Hugging Face's cache is made of them."""
    source = LAYOUTS["eagle-fp16-shards"].write(tmp_path)
    (tmp_path / "snapshot").mkdir()
    for file in source.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert load_heads(tmp_path / "snapshot").config.method == "eagle"


# ------------------------------------------------------------------ training states
def state(folder: Path, name: str = "state_1", file: str = "model.safetensors") -> Path:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / file).write_bytes(save(eagle_tensors()))
    (folder / name / "optimizer.bin").write_bytes(b"?")
    return folder / name


@pytest.mark.parametrize("name", ["state_1", "checkpoint_12", "epoch-3"])
@pytest.mark.parametrize("file", ["model.safetensors", "model_0.safetensors"])
def test_a_training_state_uses_the_config_above_it(tmp_path: Path, name: str, file: str) -> None:
    folder = state(eagle_folder(tmp_path), name, file)
    assert load_heads(folder).num_parameters() > 1000
    if name != "epoch-3":
        assert load_heads(tmp_path).num_parameters() > 1000


def test_training_states_that_do_not_say_enough(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"needs a config\.json"):
        load_heads(state(tmp_path / "a"))
    state(eagle_folder(tmp_path / "b"), "state_1")
    state(tmp_path / "b", "state_2")
    with pytest.raises(HeadLoadError, match=r"\['state_1', 'state_2'\]; pass the folder of one"):
        load_heads(tmp_path / "b")
    (state(eagle_folder(tmp_path / "c")) / "model_1.safetensors").touch()
    with pytest.raises(HeadLoadError, match="several models"):
        load_heads(tmp_path / "c")
    (eagle_folder(tmp_path / "d") / "pytorch_model").mkdir()
    with pytest.raises(HeadLoadError, match="scattered over processes"):
        load_heads(tmp_path / "d")
