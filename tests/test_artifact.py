"""Artifacts: the loaded model answers bit for bit, ties stay ties, and no failure costs the old artifact."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors import safe_open
from torch import nn

from optforge import artifact, atomic, registry
from optforge.artifact import table as statetable
from optforge.artifact import write
from optforge.errors import ModelError, OutputError
from optforge.transforms.base import Phase, Receipt, Touched


class Tied(nn.Module):
    """Embedding(50, 8), a hidden layer, and a head that is the embedding; a rotary-like table that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 8)
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("table", torch.arange(8, dtype=torch.float32) / 7, persistent=False)
        self.original_table = self.table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(ids) * self.table + self.original_table
        return self.head(torch.relu(self.fc2(self.fc1(hidden))))


class Rounded(nn.Linear):
    """An int8 weight and an fp32 scale per channel, plain parameters, under the linear's own name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.weight_scale[:, None], self.bias)


def as_rounded(linear: nn.Linear, weight: torch.Tensor, scale: torch.Tensor) -> None:
    linear.__class__ = Rounded
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.weight_scale = nn.Parameter(scale, requires_grad=False)


@dataclass(frozen=True, kw_only=True)
class Round:
    """A transform of the tests' own: int8 per channel for the named linears."""

    names: tuple[str, ...] = ("fc1",)
    kind: ClassVar[str] = "quantize"
    phase: ClassVar[Phase] = Phase.QUANTIZE

    def apply(self, model: nn.Module) -> Receipt:
        receipt = Receipt(total_bytes=statetable.table(model).nbytes, decisions={"names": list(self.names)})
        for name in self.names:
            linear = model.get_submodule(name)
            scale = linear.weight.detach().abs().amax(1) / 127
            as_rounded(linear, (linear.weight.detach() / scale[:, None]).round().to(torch.int8), scale)
            receipt.touched.append(Touched(name=name, what="int8", dtypes={"weight": "int8"}))
        return receipt

    def replay(self, model: nn.Module, receipt: Receipt) -> None:
        for name in receipt.decisions["names"]:
            linear = model.get_submodule(name)
            as_rounded(linear, torch.empty_like(linear.weight, dtype=torch.int8), torch.empty(linear.out_features, device="meta"))


@pytest.fixture(autouse=True)
def own_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    real = registry.get
    monkeypatch.setattr(registry, "get", lambda group, name: Round if (group, name) == ("transforms", "round") else real(group, name))


def receipts(receipt: Receipt, use: str = "round/int8") -> list[dict]:
    return [{"step": "weights", "use": use, "options": {}, "receipt": asdict(receipt)}]


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def ids() -> torch.Tensor:
    return torch.arange(12).view(2, 6)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[nn.Module, Path]]:
    torch.manual_seed(0)
    model = Tied().eval()
    receipt = Round().apply(model)
    artifact.save(model, tmp_path, run_yaml="recipe: {}\n", receipts=receipts(receipt))
    yield model, tmp_path


def stored(folder: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    with safe_open(folder / "artifact" / file, framework="pt") as reader:
        return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  not a mapping


@pytest.mark.case("B78")
def test_b78_loaded_model_answers_bit_for_bit(saved: tuple[nn.Module, Path]) -> None:
    model, folder = saved
    loaded = artifact.load_into(on_meta(), folder)
    assert torch.equal(loaded(ids()), model(ids()))
    assert type(loaded.fc1) is Rounded and loaded.fc1.weight.dtype is torch.int8
    assert not loaded.training and not any(p.requires_grad for p in loaded.fc1.parameters() if p.dtype is torch.int8)


@pytest.mark.case("B78")
def test_b78_a_fresh_float_model_with_other_values_becomes_the_saved_one(saved: tuple[nn.Module, Path]) -> None:
    model, folder = saved
    torch.manual_seed(1)
    assert torch.equal(artifact.load_into(Tied(), folder)(ids()), model(ids()))


@pytest.mark.case("B20")
def test_b20_ties_and_unsaved_buffers_survive_meta(saved: tuple[nn.Module, Path]) -> None:
    model, folder = saved
    loaded = artifact.load_into(on_meta(), folder)
    assert loaded.head.weight is loaded.emb.weight
    assert loaded.original_table is loaded.table and torch.equal(loaded.table, model.table)
    assert not any(tensor.is_meta for *_, tensor, _ in statetable.walk(loaded))
    assert "table" not in loaded.state_dict()


@pytest.mark.case("B22")
def test_b22_a_tied_tensor_is_stored_once_with_an_alias(saved: tuple[nn.Module, Path]) -> None:
    _, folder = saved
    assert set(stored(folder)) == {"emb.weight", "fc1.weight", "fc1.bias", "fc1.weight_scale", "fc2.weight", "fc2.bias", "table"}
    manifest = json.loads((folder / "artifact/artifact.json").read_text())
    assert manifest["aliases"]["head.weight"] == {"of": "emb.weight", "same": "object", "kind": "parameter"}


@pytest.mark.case("B16")
@pytest.mark.case("B22")
def test_b16_two_parameters_over_one_storage_share_it_again(tmp_path: Path) -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.emb.weight.data)
    artifact.save(model, tmp_path, run_yaml="", receipts=[])
    loaded = artifact.load_into(on_meta(), tmp_path)
    assert loaded.head.weight is not loaded.emb.weight
    assert loaded.head.weight.data_ptr() == loaded.emb.weight.data_ptr()


@pytest.mark.case("B17")
def test_b17_an_artifact_that_grew_says_that_the_tie_broke(tmp_path: Path) -> None:
    model = Tied()
    before, bytes_before = statetable.ties(model), statetable.table(model).nbytes
    assert before == {"head.weight": "emb.weight", "original_table": "table"}
    model.head.weight = nn.Parameter(model.emb.weight.detach().clone())
    receipt = Round(names=("fc1",)).apply(model)
    receipt.total_bytes = bytes_before
    summary = artifact.save(model, tmp_path, run_yaml="", receipts=receipts(receipt, "quantize/int8"), ties_before=before)
    grown = 50 * 8 * 4 - 8 * 8 * 3 + 8 * 4  # the second copy, minus three of four bytes of fc1's weight, plus its scales
    assert summary["weight_bytes"] == bytes_before + grown
    assert len(summary["warnings"]) == 1 and "tie broken: head.weight no longer is emb.weight" in summary["warnings"][0]


@pytest.mark.case("B17")
def test_b17_a_smaller_artifact_warns_of_nothing(saved: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model = Tied()
    receipt = Round(names=("fc1", "fc2")).apply(model)
    summary = artifact.save(model, tmp_path, run_yaml="", receipts=receipts(receipt, "quantize/int8"))
    assert summary["warnings"] == [] and summary["weight_bytes"] < summary["bytes_before"]


@pytest.mark.case("B06")
def test_b06_an_ignored_layer_is_bit_identical_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Tied().to(torch.bfloat16)
    weight = model.fc2.weight.detach().clone()
    artifact.save(model, tmp_path, run_yaml="", receipts=receipts(Round(names=("fc1",)).apply(model)))
    on_disk = stored(tmp_path)["fc2.weight"]
    assert on_disk.dtype is torch.bfloat16
    assert torch.equal(on_disk.view(torch.int16), weight.view(torch.int16))


@pytest.mark.case("B69")
@pytest.mark.parametrize("wrapped", ["whole", "inner", "in place"])
def test_b69_names_are_those_of_the_uncompiled_model(tmp_path: Path, wrapped: str) -> None:
    model = Tied()
    names = set(statetable.table(model).entries)
    if wrapped == "whole":
        model = torch.compile(model)
    elif wrapped == "inner":
        model.fc1 = torch.compile(model.fc1)
    else:
        model.compile()
    artifact.save(model, tmp_path, run_yaml="", receipts=[])
    assert set(stored(tmp_path)) == names - {"original_table"}
    assert torch.equal(artifact.load_into(on_meta(), tmp_path).fc1.weight, stored(tmp_path)["fc1.weight"])


class Packed(torch.Tensor):
    """A tensor subclass that no plain file holds."""


@pytest.mark.case("B79")
def test_b79_an_unknown_tensor_type_is_refused_by_name_before_writing(tmp_path: Path) -> None:
    model = Tied()
    model.fc2.register_buffer("packed", torch.zeros(3).as_subclass(Packed))
    model.fc1.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(ModelError, match=r"fc1\.sparse.*sparse_coo(.|\n)*fc2\.packed.*Packed"):
        artifact.save(model, tmp_path / "out", run_yaml="", receipts=[])
    assert not (tmp_path / "out").exists()


def test_layouts_survive(tmp_path: Path) -> None:
    """Channels-last and transposed weights keep their strides, on which kernels and rounding depend."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 7, bias=False)).to(memory_format=torch.channels_last)
    model[1].weight = nn.Parameter(torch.randn(5, 7).t())
    artifact.save(model, tmp_path, run_yaml="", receipts=[])
    with torch.device("meta"):
        fresh = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 7, bias=False))
    loaded = artifact.load_into(fresh, tmp_path)
    for now, then in zip(loaded.parameters(), model.parameters(), strict=True):
        assert now.stride() == then.stride() and torch.equal(now, then)


def test_a_large_model_is_split_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "SHARD_BYTES", 1000)
    model = Tied().eval()
    summary = artifact.save(model, tmp_path, run_yaml="", receipts=[])
    assert sum(name.endswith(".safetensors") for name in summary["files"]) > 1
    assert torch.equal(artifact.load_into(on_meta(), tmp_path)(ids()), model(ids()))


# --- failures while writing -------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from optforge.artifact import layout, write
from test_artifact import Tied
write.SHARD_BYTES = 500
where = sys.argv[3]
real_save, real_rename = write.save_file, os.rename
def save_then_die(tensors, path):
    real_save(tensors, path)
    if "00002" in path.name:
        print("ready", flush=True)
        time.sleep(60)
def rename_then_die(old, new):
    real_rename(old, new)
    if Path(new).name == layout.PREVIOUS:
        print("ready", flush=True)
        time.sleep(60)
if where == "between tensors":
    write.save_file = save_then_die
else:
    os.rename = rename_then_die
torch.manual_seed(9)
write.save(Tied(), Path(sys.argv[1]), run_yaml="", receipts=[])
"""


@pytest.mark.case("B82")
@pytest.mark.parametrize("where", ["between tensors", "between the renames"])
def test_b82_a_kill_while_saving_leaves_the_old_artifact_whole(saved: tuple[nn.Module, Path], where: str) -> None:
    model, folder = saved
    command = [sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parent), where]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline().strip() == "ready"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert list(folder.glob(f".artifact{atomic.TEMPORARY}*"))
    assert torch.equal(artifact.load_into(on_meta(), folder)(ids()), model(ids()))

    newer = Tied().eval()
    artifact.save(newer, folder, run_yaml="", receipts=[])
    assert sorted(path.name for path in folder.iterdir()) == ["artifact"]
    assert torch.equal(artifact.load_into(on_meta(), folder)(ids()), newer(ids()))


@pytest.mark.case("B84")
def test_b84_a_full_volume_is_told_with_path_needed_and_free_and_leaves_nothing(saved: tuple[nn.Module, Path]) -> None:
    model, folder = saved
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OutputError, match=r"artifact: cannot be written.*needs [\d,]+ bytes, [\d,]+ bytes are free"):
            artifact.save(Tied(), folder, run_yaml="", receipts=[])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert sorted(path.name for path in folder.iterdir()) == ["artifact"]
    assert torch.equal(artifact.load_into(on_meta(), folder)(ids()), model(ids()))


@pytest.mark.case("B84")
def test_b84_too_little_space_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match=r"1,000 bytes are free on its volume; free some space"):
        artifact.save(Tied(), tmp_path, run_yaml="", receipts=[])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        artifact.save(Tied(), tmp_path, run_yaml="", receipts=[])


# --- bad artifacts ----------------------------------------------------------------------------------------------------


def edit(folder: Path, change: str) -> None:
    path = folder / "artifact/artifact.json"
    manifest = json.loads(path.read_text())
    exec(change, {"m": manifest})
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("m['format_version'] = 99", "format_version 99; this OptForge .* reads up to 1; upgrade OptForge"),
        ("del m['format_version']", "has no format_version"),
        ("del m['tensors']", "cannot be understood .KeyError: 'tensors'"),
        ("m['tensors']['fc2.bias']['file'] = '../../secret'", "names a file outside the artifact: '../../secret'"),
        ("m['tensors']['fc2.bias']['file'] = '.hidden'", "names a file outside the artifact"),
        ("m['tensors']['fc2.bias']['file'] = 'absent.safetensors'", "absent.safetensors: is missing"),
        ("m['tensors']['fc2.forward'] = m['tensors'].pop('fc2.bias')", "fc2.forward|fc2.bias"),
        ("del m['tensors']['fc2.bias']", "fc2.bias: this parameter of the model is not in the artifact"),
        ("m['tensors']['fc2.bias']['shape'] = [9]", r"fc2.bias: has the shape \[9\] in the artifact and \[8\] in the model"),
        ("m['aliases']['head.weight']['of'] = 'nothing'", "nothing"),
        ("m['tensors']['fc2.bias'] = 3", "cannot be understood"),
        ("m['receipts'] = [{}]", "cannot be understood"),
    ],
)
def test_a_bad_manifest_is_refused_in_one_line(saved: tuple[nn.Module, Path], change: str, message: str) -> None:
    _, folder = saved
    edit(folder, change)
    with pytest.raises(ModelError, match=message):
        artifact.load_into(on_meta(), folder)


def test_another_model_is_refused_in_a_few_lines(saved: tuple[nn.Module, Path]) -> None:
    _, folder = saved
    edit(folder, "m['receipts'] = []")
    with pytest.raises(ModelError) as error:
        artifact.load_into(nn.Linear(2, 2, device="meta"), folder)
    assert len(str(error.value).splitlines()) == 4 and "more do not fit this model" in str(error.value)


def test_a_truncated_a_changed_and_a_missing_file_are_told(saved: tuple[nn.Module, Path]) -> None:
    _, folder = saved
    path = folder / "artifact/model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ModelError, match=f"has {len(content) - 1:,} bytes instead of {len(content):,}"):
        artifact.load_into(on_meta(), folder)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelError, match="its sha256 differs"):
        artifact.load_into(on_meta(), folder)
    path.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: is missing"):
        artifact.load_into(on_meta(), folder)
    (folder / "artifact/artifact.json").write_text("{")
    with pytest.raises(ModelError, match=r"artifact\.json: cannot be read"):
        artifact.load_into(on_meta(), folder)
    with pytest.raises(ModelError, match="holds no artifact; run again with save=true"):
        artifact.load_into(on_meta(), folder / "elsewhere")


def test_a_fresh_process_loads_what_this_one_saved(tmp_path: Path) -> None:
    model = Tied().eval()
    artifact.save(model, tmp_path, run_yaml="", receipts=[])
    program = f"""
        import sys, torch
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from optforge import artifact
        from test_artifact import on_meta, ids
        torch.save(artifact.load_into(on_meta(), {str(tmp_path)!r})(ids()), {str(tmp_path / "out.pt")!r})
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), model(ids()))
