"""Rank timelines as torch's profiler writes them, of any size: `python big_profile.py FOLDER --events 1000000 --ranks 1`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

BASE_NS = 1_711_964_646_000_000_000
GEMM = (
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_64x3_tn_align8>"
    "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_64x3_tn_align8::Params)"
)
NORM = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, "
    "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, at::detail::Array<char*, 3> >(int)"
)
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MOE = "fused_moe_kernel"


class Timeline:
    """One rank's events as Kineto's text, in its order: a step's CPU side, then what ran on the GPU."""

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.random = random.Random(seed * 1_000 + rank)
        self.pid, self.id, self.now_us, self.count, self.seq = 4_000 + rank, 0, 4_458_676_416_788.0, 0, 0

    def cpu(self, category: str, name: str, start: float, duration: float, args: str) -> str:
        self.count += 1
        self.id += 1
        return (
            f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {self.pid}, "tid": {self.pid},\n'
            f'    "ts": {start:.3f}, "dur": {duration:.3f},\n    "args": {{\n'
            f'      "External id": {self.id},"Record function id": {self.id}, {args}\n    }}\n  }}'
        )

    def launched(
        self, name: str, stream: int, start: float, gpu_start: float, duration: float, args: str
    ) -> str:
        """A launch, its kernel, and the arrow between them."""
        self.count += 4
        self.id += 1
        i, pid = self.id, self.pid
        return (
            f'  {{\n    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": {pid}, "tid": {pid},\n'
            f'    "ts": {start:.3f}, "dur": 5.120,\n    "args": {{\n'
            f'      "External id": {i}, "cbid": 211, "correlation": {i}\n    }}\n  }},\n'
            f'  {{\n    "ph": "s", "id": {i}, "pid": {pid}, "tid": {pid}, "ts": {start:.3f},\n'
            f'    "cat": "ac2g", "name": "ac2g"\n  }},\n'
            f'  {{\n    "ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream},\n'
            f'    "ts": {gpu_start:.3f}, "dur": {duration:.3f},\n    "args": {{\n'
            f'      "External id": {i}, "queued": 0, "device": {self.rank}, "context": 1, "stream": {stream}, '
            f'"correlation": {i}, "registers per thread": 96, "shared memory": 41760, "blocks per SM": 0.15, '
            f'"warps per SM": 3.0, "grid": [12, 1, 1], "block": [512, 1, 1], "est. achieved occupancy %": 75{args}\n'
            f"    }}\n  }},\n"
            f'  {{\n    "ph": "f", "id": {i}, "pid": 0, "tid": {stream}, "ts": {gpu_start:.3f},\n'
            f'    "cat": "ac2g", "name": "ac2g", "bp": "e"\n  }}'
        )

    def step(self, layers: int) -> Iterator[str]:
        start = self.now_us
        decode = self.random.randrange(8, 64)
        work = [self.random.uniform(20, 30) for _ in range(layers)]
        yield self.cpu(
            "user_annotation",
            f"execute_context_1(64)_generation_{decode}({decode})",
            start,
            80.0 * layers,
            '"Ev Idx": 1',
        )
        now = start
        for layer in range(layers):
            dims = f'"Concrete Inputs": ["", ""], "Input type": ["c10::BFloat16", "c10::BFloat16"], "Input Dims": [[{decode}, 4096], [4096, 4096]]'
            yield self.cpu("cpu_op", "aten::mm", now, 12.0, dims)
            yield self.launched(GEMM, 7, now + 2, now + 10, work[layer], "")
            yield self.cpu("cpu_op", "aten::mul", now + 14, 8.0, dims)
            yield self.launched(NORM, 7, now + 15, now + 11 + work[layer], 3.0, "")
            yield self.cpu("cpu_op", "vllm::moe_forward", now + 24, 20.0, dims)
            yield self.launched(MOE, 7, now + 26, now + 41, 20.0, "")
            self.seq += 1
            comms = (
                f', "Collective name": "allreduce", "In msg nelems": {decode * 4096}, "Out msg nelems": {decode * 4096}, '
                f'"Group size": {self.ranks}, "dtype": "BFloat16", "Process Group Name": "2", '
                f'"Process Group Description": "tp:0", "Seq": {self.seq}'
            )
            # The kernel ends on all ranks when the last has arrived.
            arrival = now + 62 + self.random.uniform(0, 5)
            yield self.launched(REDUCE, 9, now + 50, arrival, now + 72 - arrival, comms)
            now += 80.0
        self.now_us = now + 20.0


def write_profile(
    path: Path, events: int, rank: int = 0, ranks: int = 1, layers: int = 48, seed: int = 1
) -> int:
    """Write one rank's timeline of at least `events` events; returns how many it holds."""
    timeline = Timeline(rank, ranks, seed)
    with path.open("w", encoding="utf-8") as file:
        file.write(
            '{\n  "schemaVersion": 1,\n  "deviceProperties": [],\n  "distributedInfo": {"backend": "nccl", '
            f'"rank": {rank}, "world_size": {ranks}}},\n  "displayTimeUnit": "ms",\n'
            f'  "baseTimeNanoseconds": {BASE_NS},\n  "traceEvents": [\n'
        )
        first = True
        while timeline.count < events:
            for text in timeline.step(layers):
                file.write(text if first else ",\n" + text)
                first = False
        file.write('\n  ],\n  "traceName": "generated.json"\n}')
    return timeline.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for rank in range(args.ranks):
        path = args.folder / f"rank{rank}.1711964700000000000.pt.trace.json"
        count = write_profile(path, args.events, rank, args.ranks)
        print(f"{path}: {count:,} events, {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
