"""What every registered transform option keeps to, whoever wrote it.

Each option of `conf/transform` is built as a recipe would build it and applied to a toy that it can change: names are
kept or renamed as declared, meta gives the same decisions, a second time changes nothing, the result exports, compiles
as one graph, and is rebuilt bit for bit from its receipt. A new option file is under these tests without a line here.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass

import llamas
import pytest
import torch
from torch import Tensor, nn
from toys import FixedSamples, context, tiny_cnn, tiny_lm, token_ids
from transformers import LlamaConfig, LlamaForCausalLM

from optforge import registry
from optforge.backends.base import CompileOptions
from optforge.backends.cpu import CpuBackend
from optforge.compiling import compile_, lift_
from optforge.config.paths import options
from optforge.config.steps import step
from optforge.errors import UserError
from optforge.measure.language import logits_of
from optforge.measure.size import weight_bytes
from optforge.select import original_name
from optforge.share import alias, on_meta
from optforge.spec import Hardware
from optforge.transforms.base import Context, Receipt, Touched, Transform

MEASURED = ("quantize/auto",)
"""What they do depends on what they measure in a run: tests/transforms/test_choose.py holds them to the same."""
OPTIONS = [option.name for option in options("transform") if option.name not in MEASURED]
GPU = Hardware(name="h100", backend="nvidia", arch="sm_90")
"""A target that has what every option asks for; the device stays the CPU."""


@dataclass(kw_only=True)
class Case:
    """An option applied to a toy."""

    transform: Transform
    original: nn.Module
    model: nn.Module
    example: Tensor
    receipt: Receipt

    @property
    def rewrites(self) -> bool:
        """Compile changes how a module is called, shard decides where tensors go, kv_cache what is kept between calls; none changes one."""
        return self.transform.kind not in ("compile", "shard", "kv_cache")


class Logits(nn.Module):
    """A model of transformers that gives its logits alone, through a cache of its own where its steps ask for one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, ids: Tensor) -> Tensor:
        return logits_of(self.model, ids)


class LogitsAlone(LlamaForCausalLM):
    """A model of transformers that gives a tensor where it is asked for no loss."""

    def __init__(self, config: LlamaConfig) -> None:
        torch.manual_seed(0)
        super().__init__(config)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> object:
        output = super().forward(input_ids=input_ids, labels=labels, use_cache=False)
        return output.logits if labels is None else output


def toy(use: str) -> tuple[nn.Module, Tensor]:
    """A model that the option changes, and its input. Widths are multiples of the largest group size."""
    if use == "fuse/conv_bn":
        return tiny_cnn(), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    if use.startswith("loss/"):
        return LogitsAlone(llamas.config()).eval(), token_ids().remainder(llamas.VOCABULARY)
    if use.startswith("kv_cache/"):
        return Logits(llamas.module()), token_ids().remainder(llamas.VOCABULARY)
    model = tiny_lm(width=128, heads=4, layers=4 if use == "prune/layers" else 2, tied=False)
    return (model.bfloat16() if use == "precision/fp32" else model), token_ids()


TRAINING = ("checkpointing", "optimizer", "loss", "adapter", "fp8_training")
"""Kinds that a training alone takes."""
SETTINGS: dict[str, dict[str, object]] = {"fp8_training": {"smallest": 0}}
"""Fields of a kind that a toy needs otherwise."""


def built(use: str) -> Transform:
    """The option as a recipe would build it."""
    return step("contract", {"use": use, **SETTINGS.get(use.partition("/")[0], {})}).transform


def workload_of(transform: Transform) -> str:
    """The workload that an option is for."""
    cast = getattr(getattr(transform, "training", None), "name", "plain")
    return "train" if transform.kind in TRAINING or cast != "plain" else "forward"


def around(example: Tensor, **fields: object) -> Context:
    samples = FixedSamples([((row[None],), {}) for row in example])
    return dataclasses.replace(context("contract", ((example,), {}), samples=samples, uses_cache=True, **fields), target=GPU)


def run(model: nn.Module, example: Tensor) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(example)
    return output


@pytest.fixture(scope="module", params=OPTIONS)
def case(request: pytest.FixtureRequest) -> Case:
    transform = built(request.param)
    original, example = toy(request.param)
    model = alias(original)
    with torch.no_grad():
        receipt = transform.apply(model, around(example, backend=CpuBackend(), reference=original))
    for module in model.modules():
        lift_(module)
    return Case(transform=transform, original=original, model=model, example=example, receipt=receipt)


def test_every_registered_kind_has_an_option() -> None:
    assert {name.split("/", maxsplit=1)[0] for name in OPTIONS} == set(registry.kinds())


def test_it_is_a_frozen_transform(case: Case) -> None:
    assert isinstance(case.transform, Transform)
    field = dataclasses.fields(case.transform)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(case.transform, field, None)
    assert list(case.transform.check(around(case.example, workload=workload_of(case.transform)))) == []


def test_something_is_touched_and_the_receipt_is_true(case: Case) -> None:
    assert case.receipt.touched
    for touched in case.receipt.touched:
        module = case.model.get_submodule(touched.name)
        assert touched.what
        for name, dtype in touched.dtypes.items():
            assert str(getattr(module, name).dtype) == f"torch.{dtype.removeprefix('torch.')}"
    before, after = weight_bytes(case.original), weight_bytes(case.model)
    assert case.receipt.total_bytes == before
    assert case.receipt.bytes_before - case.receipt.bytes_after == before - after
    assert sum(t.bytes_before for t in case.receipt.touched) == case.receipt.bytes_before


def test_it_is_written_as_strict_json(case: Case) -> None:
    written = json.dumps(dataclasses.asdict(case.receipt), allow_nan=False)
    assert json.loads(written)["decisions"] == json.loads(json.dumps(case.receipt.decisions))


def test_names_are_kept_or_renamed_as_declared(case: Case) -> None:
    names = {name for name, _ in case.model.named_modules()}
    assert all(original_name(name) == name for name in names)
    gone = set(case.receipt.decisions.get("gone", ()))
    there = {name for name, _ in case.original.named_modules()}
    if gone:  # as many layers fewer, numbered anew
        assert len([name for name in there - names if name.count(".") == 1]) == len(gone)
        return
    assert there <= names, "the model's own code still finds every module"
    added = names - {name for name, _ in case.original.named_modules()}
    assert added <= set(case.receipt.renamed)
    before, after = set(case.original.state_dict()), set(case.model.state_dict())
    renamed = {name for originals in case.receipt.renamed.values() for name in originals}
    touched = {touched.name for touched in case.receipt.touched}
    assert {key.rpartition(".")[0] for key in before - after} <= renamed | touched
    assert {key.rpartition(".")[0] for key in after - before} <= touched


def test_parameters_stay_parameters(case: Case) -> None:
    for touched in case.receipt.touched:
        own = dict(case.model.get_submodule(touched.name).named_parameters(recurse=False))
        assert all(name in own for name in touched.dtypes if name.startswith("weight"))


def test_the_tree_it_shares_tensors_with_is_as_it_was(case: Case) -> None:
    untouched, example = toy_of(case)
    assert torch.equal(run(case.original, example), run(untouched, example))
    for (name, old), new in zip(case.original.state_dict().items(), untouched.state_dict().values(), strict=True):
        assert old.dtype == new.dtype and torch.equal(old, new), name


def toy_of(case: Case) -> tuple[nn.Module, Tensor]:
    """The same toy again, seeded alike."""
    return toy(next(name for name in OPTIONS if built(name) == case.transform))


def test_meta_gives_the_same_structure_and_sizes(case: Case) -> None:
    model = on_meta(case.original)
    receipt = case.transform.apply(model, around(case.example.to("meta")))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert foreseeable(receipt) == foreseeable(case.receipt)
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in case.model.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()} == expected


def foreseeable(receipt: Receipt) -> dict[str, object]:
    """A receipt without what only values tell: figures of samples, and which of a model's layers matter least."""
    known = dataclasses.asdict(receipt)
    known["notes"] = [note for note in receipt.notes if " samples " not in note and not note.startswith("block influence")]
    if "gone" in receipt.decisions:
        known["renamed"] = len(receipt.decisions["gone"])
        known["decisions"] = {key: value for key, value in receipt.decisions.items() if key not in ("gone", "removed")}
    return known


def test_a_second_time_is_refused_or_changes_nothing(case: Case) -> None:
    model = copy.deepcopy(case.model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        receipt = case.transform.apply(model, around(case.example))
    except UserError:
        receipt = Receipt()
    assert receipt.touched == [] or not case.rewrites
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(run(model, case.example), run(case.model, case.example))


def test_the_output_stays_near_the_original(case: Case) -> None:
    before, after = run(case.original, case.example).double(), run(case.model, case.example).double()
    assert after.isfinite().all()
    # 4 bits on random weights lose a good part, half of the weights more; anything wired wrongly is off by more than the signal itself
    assert (after - before).norm() / before.norm() < (1.0 if case.transform.kind == "prune" else 0.5)


def test_copies_compute_the_same(case: Case) -> None:
    expected = run(case.model, case.example)
    assert torch.equal(run(copy.deepcopy(case.model), case.example), expected)
    assert torch.equal(run(alias(case.model), case.example), expected)


def test_it_exports(case: Case) -> None:
    if case.transform.kind == "fp8_training":
        pytest.skip("torchao's training tensors cannot be exported, and a training is not")
    program = torch.export.export(case.model, (case.example,), strict=False)
    exported = run(program.module(), case.example)
    torch.testing.assert_close(exported, run(case.model, case.example), atol=1e-4, rtol=1e-4)


def test_it_compiles_as_one_graph(case: Case, fresh_compiler: None) -> None:
    model = alias(case.model)
    compile_(model, CompileOptions(engine="eager", fullgraph=True))
    torch.testing.assert_close(run(model, case.example), run(case.model, case.example), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_inductor_computes_the_same(case: Case, fresh_compiler: None) -> None:
    model, expected = alias(case.model), run(case.model, case.example).float()
    compile_(model, CompileOptions(fullgraph=True))
    tolerance = 3e-2 if run(case.model, case.example).dtype != torch.float32 else 1e-3
    assert (run(model, case.example).float() - expected).norm() / expected.norm() < tolerance


def test_the_receipt_rebuilds_it_bit_for_bit(case: Case) -> None:
    """As loading an artifact does: structure on meta, receipt from JSON, tensors assigned."""
    written = json.loads(json.dumps(dataclasses.asdict(case.receipt)))
    receipt = Receipt(**{**written, "touched": [Touched(**touched) for touched in written["touched"]]})
    rebuilt = on_meta(toy_of(case)[0])
    case.transform.replay(rebuilt, receipt)
    missing = rebuilt.load_state_dict(case.model.state_dict(), assign=True)
    assert (missing.missing_keys, missing.unexpected_keys) == ([], [])
    for name, buffer in case.model.named_buffers():  # an artifact stores those too that no state dict has (rotary tables)
        module, _, local = name.rpartition(".")
        setattr(rebuilt.get_submodule(module), local, buffer)
    assert torch.equal(run(rebuilt, case.example), run(case.model, case.example))
    assert [type(m).__name__ for m in rebuilt.modules()] == [type(m).__name__ for m in case.model.modules()]


def test_only_floating_parameters_ask_for_a_gradient(case: Case) -> None:
    assert [name for name, p in case.model.named_parameters() if p.requires_grad and not p.is_floating_point()] == []
