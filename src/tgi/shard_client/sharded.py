"""Finding the shards at start: wait for rank 0, which speaks for all. Knows no policy but the deadline it is given."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from tgi.enums import Phase
from tgi.errors import Unavailable
from tgi.shard_client.client import ShardClient

POLL_S = 0.05
HEALTH_TIMEOUT_S = 2.0


async def connect_when_ready(
    uds_path: str, deadline_s: float, should_stop: Callable[[], bool] = lambda: False
) -> ShardClient:
    """A client of rank 0, once its socket exists and Health answers.

    `should_stop` is asked at every turn (a signal has come, the shard's process has ended). Raises Unavailable when it
    says so, when the shard says that it has failed, or after `deadline_s` seconds.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + deadline_s
    reason = "its socket does not exist"
    while not should_stop():
        if os.path.exists(uds_path):  # noqa: ASYNC240 (a stat of a local file)
            client = ShardClient.connect(uds_path)
            try:
                health = await client.health(min(HEALTH_TIMEOUT_S, max(POLL_S, give_up_at - loop.time())))
            except Unavailable as error:
                reason = str(error)
                await client.close()
            except BaseException:
                await client.close()
                raise
            else:
                if health.phase != Phase.FAILED:
                    return client
                await client.close()
                raise Unavailable(f"the model server at {uds_path} has failed; see its log")
        if loop.time() >= give_up_at:
            raise Unavailable(f"the model server at {uds_path} was not ready within {deadline_s:g} s: {reason}")
        await asyncio.sleep(POLL_S)
    raise Unavailable(f"stopped while waiting for the model server at {uds_path}")
