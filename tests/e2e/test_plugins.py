"""A family from a folder of one's own, served by the programs that serve the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.client import Answer, Client
from tests.e2e.servers import launched
from tests.fakes.tiny_model import write_tiny_llama
from tests.server.models.test_plugins import FAMILY


async def ask(url: str) -> Answer:
    async with Client(url) as client:
        return await client.generate("hello world", max_new_tokens=8, ignore_eos=True)


@pytest.mark.slow
def test_the_launchers_flag_reaches_the_shard(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "novel.py").write_text(FAMILY.replace("SIGN", "1.0"))
    model = write_tiny_llama(tmp_path / "model", model_type="novel")
    with launched("--model-id", str(model), "--model-plugins", str(plugins), "--max-total-tokens", "512") as server:
        answer = asyncio.run(ask(server.url))
        assert server.launcher.stop(timeout_s=30) == 0, server.log
    assert len(answer.ids) == 8
