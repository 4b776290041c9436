"""How each emitter shows what ranks do: which kernels stand for a collective, what they are named, what they say.

gloo: annotations of worker threads on a CPU that say no group. nccl: c10d's kernels and calls, with its metadata. custom: vLLM's
own all-reduce and its NCCL wrapper, whose kernels say nothing. graph: the same, and steps of decodes alone are replayed from
a CUDA graph: one launch, no ops. deepep-ll: DeepEP's low-latency exchange, whose dispatch is launched twice, to send and to
receive, in replayed steps too. deepep-ht: its normal one, in which ranks spin in `notify_dispatch` until all have come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tailscope.sim.rank_places import ALL_TO_ALL, Place

#: Streams of kernels and of NCCL's.
COMPUTE, NCCL = 7, 24


@dataclass(frozen=True)
class Form:
    """`told`: collectives have c10d's metadata. `graphs`: steps of decodes alone are replayed."""

    on_gpu: bool = True
    told: bool = False
    graphs: bool = False
    exchange: Literal["nccl", "deepep-ll", "deepep-ht"] = "nccl"


FORMS = {
    "gloo": Form(on_gpu=False),
    "nccl": Form(told=True),
    "custom": Form(),
    "graph": Form(graphs=True),
    "deepep-ll": Form(graphs=True, exchange="deepep-ll"),
    "deepep-ht": Form(exchange="deepep-ht"),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel of a rank's part in a collective; `collective`: its kind on the one that stands for it.

    `part` of the time from arrival to leave: whole; send and the rest, receive; meet until all have come and the rest, move.
    """

    name: str
    collective: str | None
    stream: int
    part: Literal["whole", "send", "receive", "meet", "move"] = "whole"


#: Kind of collective -> what gloo's call is named, then NCCL's kernel, then c10d's own word for it, then vLLM's op.
CALLS = {
    "all_reduce": ("c10d::allreduce_", "AllReduce_Sum_bf16", "allreduce", "vllm::all_reduce"),
    "all_gather": ("c10d::_allgather_base_", "AllGather", "_allgather_base", "vllm::all_gather"),
    "reduce_scatter": (
        "c10d::_reduce_scatter_base_",
        "ReduceScatter_Sum_bf16",
        "_reduce_scatter_base",
        "vllm::reduce_scatter",
    ),
    ALL_TO_ALL: ("c10d::alltoall_base_", "SendRecv", "all_to_allv", ""),
}
#: What writes a layer's keys and values into the cache.
CACHE_WRITER = (
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>"
    "(__nv_bfloat16 const*, __nv_bfloat16 const*)"
)
_ALL_REDUCE = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)"
_LOW_LATENCY = {
    "dispatch": "void deep_ep::legacy::internode_ll::dispatch<true, false, 7168>(void*, void*)",
    "combine": "void deep_ep::legacy::internode_ll::combine<false, 7168, 9>(void*, void*)",
}


def kernels_of(form: Form, place: Place, hosts: int) -> tuple[Kernel, ...]:
    """The kernels of a collective, in order, of ranks on so many hosts."""
    if form.exchange != "nccl" and place.phase in _LOW_LATENCY:
        return _exchange(form, place, "intranode" if hosts == 1 else "internode")
    if not form.told and place.kind == "all_reduce":
        return (Kernel(_ALL_REDUCE, place.kind, COMPUTE),)
    ring = "" if place.kind == ALL_TO_ALL else "_RING_LL"
    name = f"ncclDevKernel_{CALLS[place.kind][1]}{ring}(ncclDevKernelArgsStorage<4096ul>)"
    # vLLM's wrapper of NCCL runs on the stream of the model.
    return (Kernel(name, place.kind, NCCL if form.told else COMPUTE),)


def _exchange(form: Form, place: Place, where: str) -> tuple[Kernel, ...]:
    if form.exchange == "deepep-ll":
        name = _LOW_LATENCY[place.phase]
        if place.phase == "combine":
            return (Kernel(name, ALL_TO_ALL, COMPUTE),)
        return (Kernel(name, None, COMPUTE, "send"), Kernel(name, ALL_TO_ALL, COMPUTE, "receive"))
    if place.phase == "combine":
        return (Kernel(f"void deep_ep::legacy::{where}::combine<__nv_bfloat16, 8>(int4*)", ALL_TO_ALL, NCCL),)
    return (
        Kernel(f"void deep_ep::legacy::{where}::notify_dispatch<8>(int const*)", "barrier", NCCL, "meet"),
        Kernel(f"void deep_ep::legacy::{where}::dispatch<8, 768>(int4*)", ALL_TO_ALL, NCCL, "move"),
    )
