"""Architectures without a file here: transformers' own code, over our paged attention where it takes one, else with
transformers' own caches (padded_model.py).

Whether an architecture takes our attention is asked of the model itself, once it is loaded: it must say the same over a
cache in two steps beside another row as by its own attention in one. Never runs code that a checkpoint brings along.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tgi.errors import StartupError
from tgi.server.context import AttentionOption, CacheShape, ForwardContext
from tgi.server.layers.source import Source
from tgi.server.models.model import CausalLM
from tgi.server.models.padded_model import PaddedDecoder, PaddedEncoderDecoder
from tgi.server.models.transformers_attention import NAME, NotPaged, attending, register
from tgi.server.models.transformers_parts import DecoderHead, gap, in_one_line, learned_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from tgi.model_config import ModelConfig

log = logging.getLogger(__name__)

TRIAL = 40  # tokens of the longer row
STEP = 25  # of them in the first of two steps
NAMED = 3  # tensors in a message
OTHER_PARTS = ("vision_config", "audio_config", "speech_config", "image_config", "video_config")


def load_through_transformers(config: ModelConfig, source: Source, path: Path, longest: int | None) -> CausalLM:
    """The model at `path`. Raises StartupError where transformers does not know it, where its weights are not all
    there, and for more than one rank."""
    what = f"model_type {config.model_type!r}"
    if source.group.world_size > 1:
        raise StartupError(f"{what} is served through transformers, which runs on one shard: start with --num-shard 1")
    register()
    settings = _settings(what, config, path)
    lm = _load(what, config, settings, source, path).eval().requires_grad_(False)
    lm.config.return_dict = True
    try:
        return _served(what, config, lm, longest)
    except (StartupError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model that asks for more than ids makes of them
        raise StartupError(
            f"{what} cannot be served through transformers: it fails with {type(error).__name__}: {in_one_line(error)}"
        ) from error


def _served(what: str, config: ModelConfig, lm: PreTrainedModel, longest: int | None) -> CausalLM:
    num_bytes = weight_bytes(lm)
    longest = longest or config.max_position_embeddings
    freeze_rope(lm, longest)
    if lm.config.is_encoder_decoder:
        padded = PaddedEncoderDecoder(config, lm, num_bytes)
        log.info("%s is served through transformers: encoder and decoder, %s", what, padded.batching.value)
        return padded
    head = DecoderHead(lm)
    try:
        model = PagedModel(lm, head, num_bytes)
    except NotPaged as reason:
        padded = PaddedDecoder(config, head, num_bytes)
        how = padded.batching.value
        log.warning("%s is served through transformers, %s with its own cache: %s", what, how, reason)
        return padded
    log.info("%s is served through transformers", what)
    return model


class PagedModel:
    """A causal model of transformers over our KV cache. Makes sure that this is possible: NotPaged where it is not."""

    def __init__(self, lm: PreTrainedModel, head: DecoderHead, num_bytes: int) -> None:
        if not lm._supports_attention_backend or lm._is_stateful:
            raise NotPaged("its code does not take other attention functions")
        self._body = head.body
        self._head = head
        self.vocab_size = head.vocab_size
        self.weight_bytes = num_bytes
        self.cache_shape = self._try()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens] ids and positions -> [tokens, hidden]"""
        with attending(context.attention):
            return self._run(input_ids, positions).last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        return self._head(hidden)

    def _try(self) -> CacheShape:
        """What the layers ask for. Raises NotPaged where the model goes wrong over a cache, and leaves it as it was."""
        body = self._body
        own = body.config._attn_implementation
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (TRIAL,), generator=generator).to(body.device)
        try:
            expected = self._run(ids, torch.arange(TRIAL, device=ids.device)).last_hidden_state[0]
            body.set_attn_implementation(NAME)
            trial = Trial()
            found = self._in_two_steps(ids, trial)
            for part in (slice(STEP), slice(STEP, TRIAL)):  # each for itself: what a cache is for shows in the second
                if (off := gap(found[part], expected[part])) != 0.0:
                    raise NotPaged(f"over a paged cache it says something else (off by {off:.2g})")
            return replace(trial.cache_shape(), max_positions=learned_positions(body))
        except Exception as error:
            body.set_attn_implementation(own)
            if isinstance(error, NotPaged):
                raise
            raise NotPaged(f"over a paged cache it fails with {type(error).__name__}: {in_one_line(error)}") from error

    def _run(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        # A mask of ones says that this is one sequence, not several packed into one: rows are the attention's business.
        ones = torch.ones(1, len(ids), dtype=torch.int64, device=ids.device)
        return self._body(
            input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), attention_mask=ones, use_cache=False
        )

    def _in_two_steps(self, ids: torch.Tensor, trial: Trial) -> torch.Tensor:
        """The hidden states of `ids`, read beside a row of the same ids from the third on, both cut in two."""
        other, found = ids[2:], []
        for own, others in (((0, STEP), (0, 7)), ((STEP, len(ids)), (7, len(other)))):
            trial.spans = (own, others)
            positions = torch.cat([torch.arange(*own), torch.arange(*others)]).to(ids.device)
            tokens = torch.cat([ids[slice(*own)], other[slice(*others)]])
            hidden = self.forward(tokens, positions, ForwardContext(trial))
            trial.end_step()
            found.append(hidden[: own[1] - own[0]])
        return torch.cat(found)


class Trial:
    """An AttentionStep of two rows that keeps keys and values in plain tensors, and notes what the layers ask for."""

    def __init__(self) -> None:
        self.spans: Sequence[tuple[int, int]] = ()  # of positions, by row
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by layer and row
        self._asked: list[int] = []  # layers, in this step
        self._num_layers = 0
        self._shapes: set[tuple[int, int, int, int]] = set()
        self._options: set[AttentionOption] = set()

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._asked.append(layer)
        self._shapes.add((query.shape[1], key.shape[1], query.shape[2], value.shape[2]))
        given: dict[AttentionOption, object] = {"window": window, "softcap": softcap, "sinks": sinks}
        self._options.update(name for name, option in given.items() if option is not None)
        lens = [end - begin for begin, end in self.spans]
        parts = zip(query.split(lens), key.split(lens), value.split(lens), strict=True)
        return torch.cat(
            [self._attend((layer, row), *part, scale, window, softcap, sinks) for row, part in enumerate(parts)]
        )

    def _attend(
        self,
        place: tuple[int, int],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[tokens, heads, value_dim] of one row."""
        if place in self._kept:
            key, value = (torch.cat(both) for both in zip(self._kept[place], (key, value), strict=True))
        self._kept[place] = key, value
        group = query.shape[1] // key.shape[1]
        keys, values = (part.float().repeat_interleave(group, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
        hidden = (distance < 0) | (distance >= (window or len(key)))
        scores = scores.masked_fill(hidden.to(scores.device), float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, len(query), 1)], -1)
        weights = scores.softmax(-1)[..., : len(key)]
        return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)

    def end_step(self) -> None:
        """Raises NotPaged where the layers of the step are not each asked once."""
        if sorted(self._asked) != list(range(len(self._asked))) or not self._asked:
            raise NotPaged("its layers do not each attend once")
        self._num_layers = len(self._asked)
        self._asked.clear()

    def cache_shape(self) -> CacheShape:
        if len(self._shapes) != 1:
            raise NotPaged("its layers differ in their heads")
        heads, kv_heads, head_dim, value_dim = next(iter(self._shapes))
        if value_dim != head_dim:
            self._options.add("value_dim")
        return CacheShape(self._num_layers, kv_heads, heads, head_dim, value_dim, frozenset(self._options))


def weight_bytes(lm: torch.nn.Module) -> int:
    """Memory of all parameters, shared ones counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in lm.parameters())


def _settings(what: str, config: ModelConfig, path: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    if not path.is_dir():
        raise StartupError(f"{what} cannot be served from {path.name}; take the model's safetensors")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = in_one_line(error)
        if "auto_map" in config.raw:
            reason = "it brings code of its own (auto_map), which is never run, --trust-remote-code or not"
        raise StartupError(f"{what} is not supported, neither here nor by transformers: {reason}") from error


def _load(what: str, config: ModelConfig, settings: PreTrainedConfig, source: Source, path: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind: Any = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else AutoModelForCausalLM
    if type(settings) not in kind._model_mapping:
        raise StartupError(f"{what} is not supported: transformers has no model of it that makes text of text alone")
    if not source.checkpoint.names():  # random weights
        with source.device:
            return kind.from_config(settings, dtype=source.dtype)
    try:
        lm, report = kind.from_pretrained(
            path,
            config=settings,
            dtype=source.dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the report names them: in our words
            output_loading_info=True,
        )
    except Exception as error:
        raise StartupError(f"{what} cannot be loaded through transformers: {in_one_line(error)}") from error
    others = [name for name in OTHER_PARTS if isinstance(config.raw.get(name), dict)]
    if others and report.get("unexpected_keys"):
        raise StartupError(f"{what} is not supported: it takes more than text ({', '.join(others)})")
    _check_report(path, report)
    _check_numbers(lm)
    return lm.to(source.device)


def _check_report(path: Path, report: dict[str, Any]) -> None:
    for kind, sentence in (
        ("mismatched_keys", "has {} in another shape than the model's configuration asks for"),
        ("missing_keys", "lacks {}, which the model's configuration asks for"),
        ("unexpected_keys", "holds {}, for which the model's configuration has no place"),
    ):
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in report.get(kind, ()))
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise StartupError(f"{path} {sentence.format(', '.join(names[:NAMED]) + more)}; fetch the model again")


def _check_numbers(lm: torch.nn.Module) -> None:
    for name, parameter in lm.named_parameters():
        if parameter.is_floating_point() and not all(bound.isfinite() for bound in torch.aminmax(parameter)):
            raise StartupError(f"The weights of {name} hold values that are no finite numbers; fetch the model again")


def freeze_rope(body: torch.nn.Module, longest: int | None) -> None:
    """Frequencies that follow the longest position of a step would let a row's neighbours change its answer: they are
    those of the longest request from the start."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary: Any
    for rotary in [module for module in body.modules() if hasattr(module, "rope_type")]:
        is_layered = isinstance(rotary.rope_type, dict)
        kinds: dict[str | None, object] = dict(rotary.rope_type) if is_layered else {None: rotary.rope_type}
        for layer_type, kind in kinds.items():
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                prefix = "" if layer_type is None else f"{layer_type}_"
                device, rope = getattr(rotary, f"{prefix}inv_freq").device, ROPE_INIT_FUNCTIONS[kind]
                frequencies, scaling = rope(rotary.config, device, seq_len=longest, layer_type=layer_type)
                setattr(rotary, f"{prefix}inv_freq", frequencies)
                setattr(rotary, f"{prefix}attention_scaling", scaling)
                kinds[layer_type] = "default"
        rotary.rope_type = kinds if is_layered else kinds[None]
