"""One-way throughput of the TCP transport between two processes: ``python -m benchmarks.transport --mib 512``.

The sender writes from one buffer, the receiver reads into another, `--chunk-kib` at a time; the clock runs from the
first byte to the receiver's answer. Prints MB/s (10^6 bytes) and, what compares better between machines that are busy
with other things, CPU seconds per GiB at each end, per run and as medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from shoal.base.peer import Address
from shoal.protocol.identity import Identity
from shoal.transport.base import Connection
from shoal.transport.tcp import TcpTransport

GIB = 1 << 30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=512, help="MiB per run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--chunk-kib", type=int, default=1024, help="KiB per write and per read")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


async def receive(runs: int, size: int, chunk: int) -> None:
    """Print our address, then for each run answer with the CPU seconds that receiving took."""
    transport = TcpTransport(Identity.ephemeral())
    accepted: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    await transport.listen(accepted.set_result)
    print(transport.addresses[0], flush=True)
    connection = await accepted
    target = memoryview(bytearray(chunk))
    for _ in range(runs):
        await connection.readinto(target[:1])
        cpu_s = time.process_time()
        for _ in range(size // chunk):
            await connection.readinto(target)
        answer = json.dumps({"cpu_s": time.process_time() - cpu_s, "rss_kib": max_rss_kib()})
        await connection.write(answer.encode().ljust(256))
    await connection.close()
    await transport.close()


async def send(address: Address, runs: int, size: int, chunk: int) -> list[dict[str, float]]:
    transport = TcpTransport(Identity.ephemeral(), client_mode=True)
    started = time.perf_counter()
    connection = await transport.dial(address.peer_id, [address], timeout_s=10)
    connect_ms = (time.perf_counter() - started) * 1e3
    source, answer, results = memoryview(os.urandom(chunk)), bytearray(256), []
    for _ in range(runs):
        await connection.write(b"!")
        cpu_s, started = time.process_time(), time.perf_counter()
        for _ in range(size // chunk):
            await connection.write(source)
        await connection.readinto(answer)
        duration_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
        other = json.loads(answer)
        results.append(
            {
                "mb_per_s": size / duration_s / 1e6,
                "send_cpu_s_per_gib": cpu_s * GIB / size,
                "receive_cpu_s_per_gib": other["cpu_s"] * GIB / size,
                "send_rss_mib": max_rss_kib() / 1024,
                "receive_rss_mib": other["rss_kib"] / 1024,
                "connect_ms": connect_ms,
            }
        )
    await connection.close()
    await transport.close()
    return results


def max_rss_kib() -> float:
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    args = parse()
    chunk = args.chunk_kib << 10
    size = max(args.mib << 20, chunk) // chunk * chunk
    if args.receive:
        asyncio.run(receive(args.runs, size, chunk))
        return
    command = [sys.executable, "-m", "benchmarks.transport", "--receive"]
    command += [f"--{name}={value}" for name, value in (("mib", args.mib), ("runs", args.runs))]
    with subprocess.Popen([*command, f"--chunk-kib={args.chunk_kib}"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = Address.parse(child.stdout.readline())
        results = asyncio.run(send(address, args.runs, size, chunk))
    medians = {name: statistics.median(run[name] for run in results) for name in results[0]}
    if args.json:
        print(json.dumps({"mib": size / (1 << 20), "chunk_kib": args.chunk_kib, "runs": results, "median": medians}))
        return
    print(f"TCP + TLS 1.3, one way, {size >> 20} MiB per run in pieces of {args.chunk_kib} KiB, {args.runs} runs")
    print(f"{'':>8}{'MB/s':>8}{'CPU-s/GiB send':>17}{'receive':>10}")
    for name, row in [*((str(number + 1), run) for number, run in enumerate(results)), ("median", medians)]:
        print(f"{name:>8}{row['mb_per_s']:8.0f}{row['send_cpu_s_per_gib']:17.2f}{row['receive_cpu_s_per_gib']:10.2f}")
    print(
        f"connect {medians['connect_ms']:.1f} ms; "
        f"peak memory {medians['send_rss_mib']:.0f} MiB sender, {medians['receive_rss_mib']:.0f} MiB receiver"
    )


if __name__ == "__main__":
    main()
