"""Any causal language model or classifier of transformers, by a local folder or a hub name.

The structure comes from the config alone, the weights from files that are checked first. The network is used only when
the user allows it, and code that comes with a checkpoint runs only when the user trusts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optforge import checkpoint
from optforge.errors import ModelError, Problem, TrustError
from optforge.models.base import Companions, Loaded, Tell
from optforge.pretrained import check_dtype, companions, filled, skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
_CONFIGS = ("*.json", "*.model", "*.txt", "merges.txt", "*.jinja")
_EXAMPLE_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """A checkpoint in the hub's layout: config.json, weights, and a tokenizer for language models."""

    path: str
    """A local folder, or a hub name such as org/model."""
    revision: str | None = None
    """Branch, tag or commit of a hub name; null is its main branch."""
    allow_download: bool = False
    """true: files of a hub name may be downloaded; false uses what lies in the local hub cache."""
    dtype: str = "bf16"
    """fp32, fp16 or bf16: the dtype of all weights."""
    trust: bool = False
    """true: code that comes with the checkpoint (a remote class, a pickle) may run."""
    allow_nonfinite: bool = False
    """true: NaN or Inf in the weights is noted instead of refused."""

    def check(self) -> Iterator[Problem]:
        yield from check_dtype(self.dtype)
        if not self.path:
            yield Problem(where="model.path", what="is required and has no value", fix="give a local folder or a hub name")
            return
        if _looks_local(self.path):
            if not (Path(self.path).expanduser() / "config.json").is_file():
                yield Problem(where="model.path", what=f"{self.path} holds no config.json", fix="give a folder that save_pretrained wrote")
        elif not self.allow_download and _in_hub_cache(self.path, self.revision) is None:
            what = f"{self.path} is neither a local folder nor in the local hub cache"
            yield Problem(where="model.path", what=what, fix="set model.allow_download=true to download it")

    def skeleton(self) -> Loaded:
        """The structure from config.json (downloaded alone where that is allowed)."""
        folder = self._folder(_CONFIGS)
        config = self._config(folder)
        auto, family = _auto_class(config, self.path)
        options = {"trust_remote_code": True} if self.trust else {}
        try:
            module = skeleton(auto, config, self.dtype, **options)
        except ValueError as error:
            raise _unusable(self.path, error) from error
        loaded = Loaded(module=module, family=family, name=self.path, vocab_size=getattr(config, "vocab_size", None))
        if family == "image_classifier":
            loaded.image_shape = _image_shape(config)
        elif family == "module":
            loaded.example = _token_example(config)
        return loaded

    def load(self, seed: int = 0, tell: Tell | None = None) -> Loaded:
        loaded = self.skeleton()
        folder = self._folder((*_CONFIGS, *_WEIGHTS))
        where = str(folder)
        state = checkpoint.read(folder, trust=self.trust)
        loaded.notes += checkpoint.require_finite(state.items(), where, allow=self.allow_nonfinite)
        structure: Any = loaded.module
        loaded.module = filled(type(structure), structure.config, state, self.dtype, where)
        loaded.digest = checkpoint.module_digest(loaded.module)
        if loaded.family != "image_classifier":
            loaded.tokenizer = companions(folder, trust=self.trust).tokenizer
        return loaded

    def companions(self) -> Companions:
        """The tokenizer and the generation config that lie beside the weights."""
        return companions(self._folder(_CONFIGS), trust=self.trust)

    def _folder(self, patterns: tuple[str, ...]) -> Path:
        """Where the files lie: the local folder, or the hub cache, filled first where downloading is allowed."""
        if _looks_local(self.path):
            return Path(self.path).expanduser()
        cached = _in_hub_cache(self.path, self.revision)
        if not self.allow_download:
            if cached is None:
                raise ModelError(*self.check())
            return cached
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(self.path, revision=self.revision, allow_patterns=list(patterns)))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(
                Problem(where="model.path", what=f"{self.path} cannot be downloaded ({reason})", fix="check name and network")
            ) from error

    def _config(self, folder: Path) -> PreTrainedConfig:
        from transformers import AutoConfig

        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=self.trust)
        except (OSError, ValueError) as error:
            raise _unusable(self.path, error) from error
        return config


def _unusable(path: str, error: Exception) -> ModelError | TrustError:
    """What to say of a config that transformers refused."""
    if "trust_remote_code" in str(error):
        return TrustError(Problem(where=path, what="comes with its own code", fix="read it, then set model.trust=true if you trust it"))
    return ModelError(Problem(where=path, what=f"config.json cannot be used ({str(error).splitlines()[0]})"))


def _looks_local(path: str) -> bool:
    """A folder that exists, or a name that no hub has (absolute, relative with a dot, or with more than one slash)."""
    return Path(path).expanduser().is_dir() or path.startswith((".", "/", "~")) or path.count("/") > 1


def _in_hub_cache(name: str, revision: str | None) -> Path | None:
    """The folder of a hub name in the local cache, or None. Touches no network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _auto_class(config: PreTrainedConfig, path: str) -> tuple[Any, str]:
    """The auto class and family for the architecture that a config names."""
    import transformers

    names = config.architectures or []
    known = {
        "ForCausalLM": (transformers.AutoModelForCausalLM, "causal_lm"),
        "LMHeadModel": (transformers.AutoModelForCausalLM, "causal_lm"),
        "ForImageClassification": (transformers.AutoModelForImageClassification, "image_classifier"),
        "ForSequenceClassification": (transformers.AutoModelForSequenceClassification, "module"),
    }
    for ending, found in known.items():
        if any(name.endswith(ending) for name in names):
            return found
    what = f"architectures {', '.join(names) or 'none'} in config.json: neither a causal language model nor a classifier"
    raise ModelError(Problem(where=path, what=what, fix="use model=module with a factory of your own"))


def _image_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Channels, height and width; 224 pixels where a config does not say, as its architectures were trained."""
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(config, "num_channels", 3), height, width


def _token_example(config: PreTrainedConfig) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of one run of token ids for a sequence classifier."""
    import torch

    ids = torch.arange(3, 3 + _EXAMPLE_TOKENS).remainder(config.vocab_size)[None]
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
