"""What a run is made of and what it leaves behind, as plain data.

Only the standard library is imported here, so that reading a config, listing hardware or printing help never loads
torch. YAML holds the values (`conf/`, `recipes/`); these classes hold the types. Units stand in the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Any
"""None, bool, int, float, str, list or dict of these: what JSON can hold."""

GOALS = ("latency", "throughput", "memory", "size")
ATTRIBUTIONS = ("prefix", "leave_one_out", "ends")
VERDICTS = ("ok", "no_gain", "regression", "failed_quality", "failed", "oom", "incomplete")
DTYPES = ("fp32", "fp16", "bf16")
"""Names of the dtypes that a model's weights can have before any quantization."""
EXPORT_FORMATS = ("compressed_tensors", "huggingface", "torch_export", "aot_inductor", "onnx")
"""Names of `export.FORMATS`, for readers of configs, which load no torch; a test holds them equal."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Facts about one accelerator; null (None, or a missing key) means unknown or absent, never zero.

    `peak_flops` maps a product dtype (`fp32`, `tf32`, `fp16`, `bf16`, `fp8`, `int8`, `int4`, `fp4`) to dense
    operations per second; a dtype that is absent has no matrix units there. `sources` maps each figure's key to where
    it was published.
    """

    name: str
    description: str = ""
    backend: str
    arch: str
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None
    link: str | None = None
    link_bytes_per_s: float | None = None
    devices: int | None = None
    """Devices of one machine that `link` joins; None where nobody said how many there are."""
    shared_memory_bytes: int | None = None
    fp8_format: str | None = None
    price_per_hour: float | None = None
    """What an hour of it costs, all devices of a run together: the user's own figure; None is shipped."""
    currency: str | None = None
    """Of the price, in the user's own words."""
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the weights and activations of a layer are represented.

    `weight_dtype` and `activation_dtype` are `int8`, `int4`, `fp8`, `fp4` or None for unquantized; `granularity` is `channel`,
    `group` (of inputs), `block` (a square of outputs and inputs) or `tensor` for weights; `activation_granularity` is `row`,
    `group` or `tensor`. `group_size` is the length of a group and the side of a block.
    """

    name: str
    weight_dtype: str
    weight_bits: int
    granularity: str
    group_size: int | None = None
    symmetric: bool = True
    activation_dtype: str | None = None
    activation_granularity: str | None = None
    static: bool = False
    """Activation scales are found once, on calibration data, instead of anew in every call."""
    scale_dtype: str = "fp32"
    """Of the scales beside the weight: `fp32`; `e8m0` (a power of two) or `fp8` (e4m3, under one fp32 scale in all), a byte each."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One named entry of a recipe. `options` are the transform's fields as written or defaulted; `transform` is the
    checked dataclass instance that they make."""

    name: str
    use: str
    options: Mapping[str, Json]
    transform: Any
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    keep: str = "always"

    @property
    def kind(self) -> str:
        return self.use.split("/", 1)[0]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Ordered optimizations, what they are for, and the quality they must hold."""

    name: str
    description: str = ""
    goal: str = "throughput"
    steps: tuple[Step, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A configured model, data set or workload: the registered name that builds it (`kind`), the option file it came
    from (`name`) and the checked dataclass instance (`source`)."""

    name: str
    kind: str
    options: Mapping[str, Json]
    source: Any


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How time and memory are measured."""

    attribution: str = "prefix"
    """prefix: a row per growing prefix; leave_one_out: also the whole recipe without each step; ends: only the baselines
    and the whole recipe."""
    budget_s: float | None = None
    """Seconds for all timing together; null means each row runs until it is steady or reaches `max_s`."""
    warmup: int = 3
    """Untimed calls before the first sample; compile time is reported apart."""
    min_rounds: int = 8
    """Alternating rounds of baseline and candidate that are always run."""
    max_s: float = 12.0
    """Seconds after which one row stops, steady or not."""
    steady: float = 0.01
    """A row is steady when the 95% interval of its ratio to the baseline is within this fraction of the median."""
    batch_ms: float = 10.0
    """Calls shorter than this are timed several at a time."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the processes of a recipe with a shard step work together."""

    timeout_s: float = 60.0
    """Seconds that one waits for the others before all are ended. Loading and compiling take each a time of its own: raise it where
    they take minutes."""
    max_restarts: int = 0
    """How often all are started again after one failed."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How the jobs of a sweep are run; the same for all of them, and no part of any."""

    devices: str | tuple[str, ...] | None = None
    """Numbers of the GPUs to share out, one job on each at a time; `all`; None: one job at a time, which sees every device."""
    on_error: str = "continue"
    """continue: later jobs run after a failure; stop: they are not started."""
    timeout_s: float | None = None
    """Seconds after which a job is ended; None: never."""
    resume: str | None = None
    """Folder of an earlier sweep of the same definition whose finished jobs are kept."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How the difference from the baseline is measured."""

    enabled: bool = True
    tokens: int = 4096
    """Text tokens evaluated for perplexity, KL of logits, top-1 agreement and SQNR."""
    window: int = 512
    """Tokens per window; windows do not overlap."""
    items: int = 1000
    """Images (or other items) evaluated for top-1, agreement and SQNR."""
    generate: int = 32
    """New tokens of the two generations shown side by side; 0 leaves them out."""
    metric: str | None = None
    """`package.module:callable` called as metric(model) or metric(model, loaded); gives a number (higher is better) or named ones,
    {"f1": 0.91, "wer": (0.12, "lower")}; null for none."""


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """What steps that need data run the model on; how many samples and how long is each step's own."""

    factory: str | None = None
    """`package.module:callable` called as factory(1), yields a sample at a time; None takes the run's data, after the part that
    quality is measured on."""
    max_bad_fraction: float = 0.0
    """Share of the samples that may hold NaN or Inf; those are left out, and more of them is an error."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that one run is: the composed, checked configuration."""

    recipe: Recipe
    model: Part
    data: Part
    workload: Part
    hardware: Hardware
    quality: Quality = Quality()
    calibration: CalibrationData = CalibrationData()
    measure: Measure = Measure()
    launch: Launch = Launch()
    sweep: SweepOptions = SweepOptions()
    save: bool = False
    export: tuple[str, ...] = ()
    """Formats that the optimized model is written in after it was measured, each checked in its own engine."""
    downgrade: str = "allow"
    reorder: str = "allow"
    require_target: bool = False
    fail_on: tuple[str, ...] = ()
    seed: int = 0
    trust: bool = False
    output_dir: str = "outputs"
    command: str = ""
    resolved: Mapping[str, Json] = field(default_factory=dict)
    """The whole resolved configuration, as `optforge show` prints it."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> where its value came from (a file, the command line, a default)."""


# What a run leaves behind. These are the objects of report.json, schema_version 1; None is written as null.


@dataclass(kw_only=True)
class Measurement:
    """Time and memory of one row, measured on `device`. Samples are seconds of one call."""

    latency_ms: dict[str, float | int | None] = field(default_factory=dict)
    """p50, p90, mean, stdev, n."""
    tokens_per_s: float | None = None
    items_per_s: float | None = None
    compile_time_s: float | None = None
    compiles: int | None = None
    graph_breaks: int | None = None
    graph_break_reasons: list[str] = field(default_factory=list)
    recompile_limit_hit: bool = False
    sizes_seen: dict[str, list[int]] = field(default_factory=dict)
    """`tensor, dimension` -> the sizes that were compiled for or asked for, where a size forced a recompile."""
    peak_memory_bytes: int | None = None
    memory: dict[str, int | None] = field(default_factory=dict)
    """allocated, reserved, process: peaks in bytes, each counter reset before the measured section."""
    memory_parts: dict[str, int] = field(default_factory=dict)
    """Training: the peak by what it is for: weights, gradients, optimizer (states and master weights), rest (activations, workspace; on
    a CPU the process itself too). Gradients are counted as all of them."""
    weight_bytes: int | None = None
    devices: int = 1
    """Devices that worked on it together; memory and bytes are those of one, rates those of all."""
    batches: int = 1
    """Batches that they had at once in a call, each as large as the baseline's one."""
    mfu: float | None = None
    mbu: float | None = None
    energy_j: float | None = None
    samples_s: list[float] = field(default_factory=list)
    baseline_samples_s: list[float] = field(default_factory=list)
    """The baseline's samples from the same alternating rounds, paired with `samples_s`."""
    steady: bool | None = None


@dataclass(kw_only=True)
class Ratio:
    """How many times better a row is than what it is compared with (above 1 is better), with its 95% interval."""

    value: float
    low: float
    high: float
    unit: str = "latency"


@dataclass(kw_only=True)
class LossCurve:
    """One training from the weights as loaded. Losses are in nats."""

    seed: int = 0
    """Decides the order of the data."""
    losses: list[float] = field(default_factory=list)
    """Of each step, the mean over its batches before the update."""
    held_out_before: float | None = None
    held_out: float | None = None
    """Mean loss over batches that are never trained on, before the first and after the last step; None where none are held out."""


@dataclass(kw_only=True)
class TrainingResult:
    """A row's training beside the baseline's, over the same data in the same order."""

    own: LossCurve
    baseline: LossCurve
    other_seed: LossCurve
    """The baseline once more, in another order of the data."""
    difference: float | None = None
    """Nats by which the row's loss (held out; else the mean of the last quarter) lies above the baseline's."""
    band: float | None = None
    """Nats between the baseline's two seeds."""
    limit: float | None = None
    """Greatest allowed difference: twice the band, at least 0.5% of the loss."""


@dataclass(kw_only=True)
class QualityResult:
    """The difference from the baseline on real data; None where it does not apply."""

    perplexity: float | None = None
    baseline_perplexity: float | None = None
    perplexity_increase: float | None = None
    kl: float | None = None
    kl_kind: str | None = None
    """`full` over the whole vocabulary, or `top128` (a lower bound) against cached reference outputs."""
    agreement: float | None = None
    top1: float | None = None
    baseline_top1: float | None = None
    top1_drop: float | None = None
    sqnr_db: float | None = None
    """Signal to noise of the outputs; 300 stands for outputs that are the same bit for bit."""
    cross_entropy: float | None = None
    baseline_cross_entropy: float | None = None
    """Nats per labelled item, for classifiers."""
    loss_increase: float | None = None
    """Relative increase of the task's loss: of the mean negative log-likelihood, or of the cross-entropy."""
    relative_error: float | None = None
    """Norm of the outputs' difference over the norm of the baseline's outputs, for modules of no known task."""
    metric: float | None = None
    baseline_metric: float | None = None
    """The user's own metric where it is a bare number, higher is better."""
    metrics: dict[str, dict[str, Json]] = field(default_factory=dict)
    """The figures that it names: name -> value, baseline and better (`higher` or `lower`)."""
    count: int | None = None
    data: str | None = None
    training: TrainingResult | None = None
    """The loss curves, where the workload is a training."""
    missed: list[str] = field(default_factory=list)
    """Each limit that is missed, as a sentence with both numbers."""


@dataclass(kw_only=True)
class StepReport:
    """One step: what it did, what it cost, what it gained."""

    name: str
    kind: str
    use: str
    verdict: str | None = "incomplete"
    """One of VERDICTS; None when this step was not measured alone (`measure.attribution: ends`)."""
    reason: str = ""
    receipt: dict[str, Json] | None = None
    seconds: float | None = None
    measured: Measurement | None = None
    vs_previous: Ratio | None = None
    vs_baseline: Ratio | None = None
    vs_compiled_baseline: Ratio | None = None
    without: Ratio | None = None
    """leave_one_out: how many times better the whole recipe is with this step than without it."""
    quality: QualityResult | None = None
    sparsity: float | None = None
    """Exact zeros as a share of the weights of the layers that were pruned by then; None where none was."""
    kept: bool = True
    predicted: dict[str, Json] | None = None


@dataclass(kw_only=True)
class Downgrade:
    """A step that the target hardware turns into something else."""

    step: str
    requested: str
    runs_as: str
    reason: str
    alternatives: list[dict[str, Json]] = field(default_factory=list)
    """Ranked by predicted gain: {use, predicted_speedup, note}."""


@dataclass(kw_only=True)
class Report:
    """report.json, schema_version 1."""

    schema_version: int = 1
    status: str = "incomplete"
    """complete, incomplete, failed, oom."""
    verdict: str = "incomplete"
    reason: str = ""
    recipe: dict[str, Json] = field(default_factory=dict)
    target: dict[str, Json] = field(default_factory=dict)
    device: dict[str, Json] = field(default_factory=dict)
    model: dict[str, Json] = field(default_factory=dict)
    data: dict[str, Json] = field(default_factory=dict)
    workload: dict[str, Json] = field(default_factory=dict)
    baseline: Measurement | None = None
    baseline_reason: str | None = None
    compiled_baseline: Measurement | None = None
    steps: list[StepReport] = field(default_factory=list)
    optimized: Measurement | None = None
    speedup: dict[str, Ratio | None] = field(default_factory=dict)
    """vs_baseline, vs_compiled_baseline."""
    quality: QualityResult | None = None
    generations: list[dict[str, str]] = field(default_factory=list)
    """{prompt, baseline, optimized} for language models."""
    predicted: dict[str, Json] = field(default_factory=dict)
    """Figures for the target from its roofline; never measured."""
    downgrades: list[Downgrade] = field(default_factory=list)
    plan: dict[str, Json] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)
    artifact: dict[str, Json] | None = None
    exports: list[dict[str, Json]] = field(default_factory=list)
    """What each export.json holds, and its folder: format, files, figures of the reload check, notes."""
    environment: dict[str, Json] = field(default_factory=dict)
    command: str = ""
    settings: dict[str, Json] = field(default_factory=dict)
    """The resolved run, as in run.yaml, without the hardware's facts, which stand in `target`."""
    started: str = ""
    seconds: float | None = None
    error: dict[str, Json] | None = None
    folder: str = ""
