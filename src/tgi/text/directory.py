"""A model directory in the hub's layout -> TokenizerSource. Knows file names and their quirks, never the network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tgi.errors import StartupError
from tgi.text.source import TokenizerSource, set_begin_and_end, templates_of

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def read_directory(path: Path, tokenizer_config_path: Path | None = None) -> TokenizerSource:
    """Read tokenizer.json and the files beside it. Raises StartupError, one line, when they cannot be used.

    Chat templates, the later wins: tokenizer_config.json, chat_template.json, additional_chat_templates/*.jinja and
    chat_template.jinja, and those of `tokenizer_config_path`, which stands in for tokenizer_config.json altogether.
    """
    backend = _read_backend(path / "tokenizer.json")
    given = tokenizer_config_path is not None
    own = _read_json(tokenizer_config_path or path / "tokenizer_config.json", required=given)
    _add_missing_tokens(backend, own)
    source = TokenizerSource(backend, named_tokens=_named_tokens(own, _read_json(path / "special_tokens_map.json")))
    configs = [_read_json(path / name) for name in ("generation_config.json", "config.json")]
    _adopt_ids(source, "bos_token", _ids_of("bos_token_id", configs))
    listed = _ids_of("eos_token_id", configs)
    _adopt_ids(source, "eos_token", listed)
    eos_id = source.token_id("eos_token")
    source.eos_ids = tuple(dict.fromkeys(listed if eos_id is None else [*listed, eos_id]))
    flags = {name: own.get(name) for name in ("add_bos_token", "add_eos_token")}
    if any(isinstance(flag, bool) for flag in flags.values()):
        set_begin_and_end(source, flags["add_bos_token"] is True, flags["add_eos_token"] is True)
    source.chat_templates = templates_of(own.get("chat_template"))
    if not (given and source.chat_templates):
        source.chat_templates |= templates_of(_read_json(path / "chat_template.json").get("chat_template"))
        source.chat_templates |= _jinja_files(path)
    return source


def override_from(source: TokenizerSource, tokenizer_config_path: Path) -> None:
    """Let a tokenizer_config.json given by the operator replace tokens and templates of any other source."""
    config = _read_json(tokenizer_config_path, required=True)
    source.named_tokens |= _named_tokens(config, {})
    eos_id = source.token_id("eos_token")
    if eos_id is not None and eos_id not in source.eos_ids:
        source.eos_ids = (*source.eos_ids, eos_id)
    source.chat_templates = templates_of(config.get("chat_template")) or source.chat_templates


def read_chat_template(given: str) -> dict[str, str]:
    """--chat-template: a file, Jinja or a JSON object with `chat_template`, or the template's text itself."""
    if any(mark in given for mark in ("{{", "{%", "\n")):
        return {"default": given}
    path = Path(given)
    if path.suffix == ".json":
        templates = templates_of(_read_json(path, required=True, flag="--chat-template").get("chat_template"))
        if not templates:
            raise StartupError(f"{path} has no chat_template. Check --chat-template")
        return templates
    if not path.is_file():
        raise StartupError(f"The chat template {path} is neither a file nor a template. Check --chat-template")
    return {"default": _read_text(path)}


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise StartupError(
            f"{path.parent} has no tokenizer.json. Make one with: text-generation-server download-weights, "
            "or save the tokenizer with transformers' save_pretrained"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise StartupError(f"{path} cannot be used: {error}. Fetch it again, or update `tokenizers`") from error
    # Left over from training; both would change what users sent.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path, required: bool = False, flag: str = "--tokenizer-config-path") -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise StartupError(f"The file {path} does not exist. Check {flag}")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path} cannot be read: {error}. Correct or fetch it again") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object. Correct or fetch it again")
    return value


def _content(value: object) -> str | None:
    """A token in a config: its text, or an object with the text in `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(config: Mapping[str, Any], fallback: Mapping[str, Any]) -> dict[str, str]:
    """The usual ones, and what the model's makers named themselves: "image_token" …"""
    own = config.get("extra_special_tokens")
    extra = {**(own if isinstance(own, Mapping) else {}), **{k: v for k, v in config.items() if k.endswith("_token")}}
    found = {name: _content(config.get(name)) or _content(fallback.get(name)) for name in NAMED_TOKENS}
    found |= {name: _content(value) for name, value in extra.items() if name not in NAMED_TOKENS}
    return {name: text for name, text in found.items() if text is not None}


def _ids_of(key: str, configs: Iterable[Mapping[str, Any]]) -> list[int]:
    """Every id that the configs list under `key`; of a config with a language model inside, that one's too."""
    ids: list[int] = []
    for config in configs:
        inner = config.get("text_config")
        for value in (config.get(key), inner.get(key) if isinstance(inner, Mapping) else None):
            values = value if isinstance(value, list) else [value]
            ids += [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    return list(dict.fromkeys(ids))


def _adopt_ids(source: TokenizerSource, name: str, ids: list[int]) -> None:
    """A token that only the model's config knows, by its id, gets its name."""
    if name not in source.named_tokens and ids:
        text = source.backend.id_to_token(ids[0])
        if text is not None:
            source.named_tokens[name] = text


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that were added after tokenizer.json was written stand in tokenizer_config.json alone."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    missing: list[tuple[int, tokenizers.AddedToken]] = []
    for key, entry in listed.items():
        text = _content(entry)
        if text is not None and str(key).isdecimal() and backend.token_to_id(text) is None:
            flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "normalized", "single_word")}
            missing.append((int(key), tokenizers.AddedToken(text, special=bool(entry.get("special", False)), **flags)))
    for token_id, token in sorted(missing, key=lambda pair: pair[0]):
        # The library numbers new tokens itself; one that would get another id than the model knows is left out.
        if token_id == backend.get_vocab_size():
            backend.add_tokens([token]) if not token.special else backend.add_special_tokens([token])


def _jinja_files(path: Path) -> dict[str, str]:
    named = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        named["default"] = path / "chat_template.jinja"
    return {name: _read_text(file) for name, file in named.items()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(f"The chat template {path} cannot be read: {error}. Correct or fetch it again") from error
