"""The scripted shard as a process.

Speaks generate.v4 through the server's own RPC room, so that what it costs on the wire is what a real shard costs.
"""

from __future__ import annotations

import argparse
import signal
from concurrent import futures
from typing import Any, cast

import grpc

from benchmarks.scripted_shard import ScriptedShard
from tgi.proto.v4 import generate_pb2_grpc as rpc
from tgi.server.engine.service import Shard
from tgi.server.rpc.v4 import V4Service

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripted_process", description=__doc__)
    parser.add_argument("--socket", required=True, help="path of the Unix socket")
    parser.add_argument("--token-ids", type=int, nargs="+", required=True, help="what the rows say, in turn")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--rows", type=int, default=2_048)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=0.0, help="shortest time between two steps")
    arguments = parser.parse_args()
    shard = ScriptedShard(
        arguments.token_ids, arguments.vocab_size, arguments.rows, arguments.window, arguments.step_ms / 1_000
    )
    shard.start()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8), options=cast(Any, UNLIMITED))
    url = f"unix://{arguments.socket}"
    rpc.add_ShardServiceServicer_to_server(V4Service(cast(Shard, shard), [url]), server)
    server.add_insecure_port(url)
    server.start()
    print("listening", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop(0).wait()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
