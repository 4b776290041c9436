"""What the names in a torch profile mean: steps, phases of a layer, kinds of collectives. Data, and what reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pyarrow import compute

#: What is read of a name: symbols of kernels are longer, but say what they do at their beginning. With patterns that take a
#: time linear in it, a name that was made to be slow costs no more than others.
MOST_NAME = 512
# -- steps -------------------------------------------------------------------------------------

_VLLM = re.compile(r"execute_context_(\d{1,9})\((\d{1,9})\)_generation_(\d{1,9})\((\d{1,9})\)$")
_VLLM_DETAILED = re.compile(
    r"execute_\d+_context_(\d{1,9})\(sq(\d{1,9})sk\d+sqsq\d+sqsk\d+\)_generation_(\d{1,9})\(sq(\d{1,9})sk\d+sqsq\d+sqsk\d+\)$"
)
_VLLM_012 = re.compile(r"execute_new_(\d{1,9})_cached_(\d{1,9})$")
_SGLANG = re.compile(r"step\[(\w+)((?: \w+=\d{1,9})*)\]$")
_TORCH = re.compile(r"ProfilerStep#(\d+)$")
#: torch's own grammar: it numbers steps of a schedule, whatever they hold.
TORCH_GRAMMAR = 2
CAPTURE = re.compile(r"capture_\d+_[A-Z]+|capture_bs_\d+")
#: What begins the capture of a graph: the runtime's call, vLLM's annotation.
CAPTURING = re.compile(r"(?:cuda|hip)StreamBeginCapture|capture_")


@dataclass(frozen=True)
class StepName:
    """What an annotation says of its step; `grammar` orders them, the first that a file has are its steps."""

    grammar: int
    prefill_requests: int | None = None
    prefill_tokens: int | None = None
    decode_requests: int | None = None
    decode_tokens: int | None = None


def step_of(name: str) -> StepName | None:
    """The step an annotation stands for: vLLM's (three grammars), SGLang's, torch's own; None for others."""
    if found := _VLLM.match(name) or _VLLM_DETAILED.match(name):
        return StepName(0, *(int(n) for n in found.groups()))
    if found := _VLLM_012.match(name):
        return StepName(0, prefill_requests=int(found[1]), decode_requests=int(found[2]))
    if found := _SGLANG.match(name):
        values = {k: int(v) for k, v in (pair.split("=") for pair in found[2].split())}
        requests, tokens = values.get("bs"), values.get("toks")
        if found[1] in ("EXTEND", "PREFILL"):
            return StepName(1, requests, tokens, 0, 0)
        if found[1] in ("DECODE", "IDLE"):
            return StepName(1, 0, 0, requests, tokens if tokens is not None else requests)
        # Drafts, their verification and mixed batches do not say how many of each there are.
        return StepName(1)
    return StepName(TORCH_GRAMMAR) if _TORCH.match(name) else None


def read_of(texts: Any) -> Any:
    """The part of each name, in an Arrow array, that all patterns here are for."""
    slice_: Any = compute.utf8_slice_codeunits
    return slice_(texts, 0, MOST_NAME)


# -- phases ------------------------------------------------------------------------------------

#: Annotations made by people: words suffice. The first that matches.
_ANNOTATED = (
    ("moe", re.compile(r"MoE\[", re.I)),
    ("eplb", re.compile(r"eplb", re.I)),
    ("dispatch", re.compile(r"dispatch(?!er)", re.I)),
    ("combine", re.compile(r"combine", re.I)),
    ("router", re.compile(r"router|routing|top_?k|(?<![a-z])gat(?:e|ing)(?![a-z])", re.I)),
    ("expert", re.compile(r"experts?(?![a-z])|fused_moe", re.I)),
    ("attention", re.compile(r"attention|(?<![a-z])attn", re.I)),
    ("moe", re.compile(r"(?<![a-z])moe(?![a-z])", re.I)),
    ("capture", CAPTURE),
)
#: Ops and kernels: symbols hold many words, so each pattern is of one library. The first that matches. What may stand far
#: apart is looked for from the beginning of the name or word, the first of each in its turn: `(?>…)` never goes back.
_EXECUTED = (
    (
        "dispatch",
        re.compile(
            r"\A(?s:(?>.*?deep_ep::).*dispatch)|(?:internode|intranode|internode_ll)::(?:cached_)?(?:notify_)?dispatch"
        ),
    ),
    (
        "dispatch",
        re.compile(
            r"\b(?>\w*?Ep)(?>\w*?Dispatch)\w*(?:Kernel|Staging)|moe_?a2a_?(?:(?:prepare_?)?dispatch|sanitize)|"
            r"\A(?s:(?>.*?nixl_ep::).*dispatch)",
            re.I,
        ),
    ),
    (
        "combine",
        re.compile(
            r"\A(?s:(?>.*?deep_ep::).*combine)|(?:internode|intranode|internode_ll)::(?:cached_)?(?:notify_)?combine"
        ),
    ),
    (
        "combine",
        re.compile(
            r"\b(?>\w*?Ep)(?>\w*?Combine)(?:Sync|\w*Kernel)|moe_?a2a_?(?:prepare_?)?combine|"
            r"\A(?s:(?>.*?nixl_ep::).*combine)",
            re.I,
        ),
    ),
    (
        "router",
        re.compile(
            r"topk_?(?:softmax|gating|sigmoid|forward)|grouped_topk|moe_align_block_size|count_and_sort_expert_tokens|"
            r"_sum_bitmatrix|_combined_routing|routing(?:Main|Indices|Compute)|expert_map|select_experts",
            re.I,
        ),
    ),
    (
        "expert",
        re.compile(
            r"fused_moe|moe_?gemm|(?:m_)?grouped_gemm|group_gemm|GroupedGemm|GroupProblemShape|_matmul_ogs|"
            r"_finalize_matmul|marlin_moe|moe_wna16|moe_sum|\A(?s:(?>.*?ck_?tile).*moe)|aiter::fmoe|fmoe_|fused_experts",
            re.I,
        ),
    ),
    ("moe", re.compile(r"vllm::moe_forward|sglang::moe_forward")),
    (
        "attention",
        re.compile(
            r"unified_attention|unified_kv_cache_update|flash_?(?:fwd|attn|attention|infer|mla)|fmha|paged_attention|"
            r"attention_(?:2d|3d|kernel)|(?:Decode|Prefill)With(?:Paged|Ragged)|reshape_and_cache|"
            r"scaled_dot_product|mla_(?:decode|prefill)|attn_fwd|concat_and_cache|store_kv_?cache",
            re.I,
        ),
    ),
)
#: One of these runs once per layer; where nothing names the layers they are counted by it.
LAYER_MARK = re.compile(r"vllm::unified_(?:mla_)?attention(?:_with_output)?$")
#: Kernels that put a layer's keys and values into the cache, once per layer, however many kernels attend to them.
CACHE_WRITER = re.compile(r"reshape_and_cache|concat_and_cache|store_kv_?cache")
#: Calls that make something run on a GPU; copies and waits for events have others. For Arrow, which never goes back.
LAUNCH = r"(?:cuda|hip|cu).*(?:Launch|launch)"
_LAYER = re.compile(r"(?:^|[^a-z])layers?[._\[ ]?(\d{1,4})(?!\d)", re.I)


@lru_cache(maxsize=65_536)
def annotated_phase(name: str) -> str | None:
    """Phase that an annotation names."""
    return next((phase for phase, pattern in _ANNOTATED if pattern.search(name)), None)


@lru_cache(maxsize=65_536)
def executed_phase(name: str) -> str | None:
    """Phase that the name of an op or kernel tells."""
    return next((phase for phase, pattern in _EXECUTED if pattern.search(name)), None)


@lru_cache(maxsize=65_536)
def layer_of(name: str) -> int | None:
    """The layer a name holds, as in `layer_1.experts` or `model.layers.12.mlp`."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


# -- collectives -------------------------------------------------------------------------------

_KINDS = (
    (
        "all_reduce",
        re.compile(
            r"all_?reduce|cross_device_reduce|one_?shot_all|two_?shot_all|multimem_all|quick_?reduce", re.I
        ),
    ),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all_gather", re.compile(r"all_?gather", re.I)),
    ("all_to_all", re.compile(r"all_?to_?all", re.I)),
    ("barrier", re.compile(r"barrier", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
    ("send_recv", re.compile(r"send_?recv|(?:^|[^a-z])(?:send|recv|isend|irecv)(?:$|[^a-z])", re.I)),
    ("scatter", re.compile(r"scatter", re.I)),
    ("gather", re.compile(r"gather", re.I)),
    ("reduce", re.compile(r"reduce", re.I)),
)
_COMMUNICATION = re.compile(
    r"(?:nccl|rccl)(?:Dev)?Kernel|cross_device_reduce|(?i:(?:one|two)_?shot_?all_?reduce|multimem_(?:one_shot_)?all_?reduce|"
    r"quick_?(?:all_?)?reduce|all_?reduce_?fusion)|deep_ep::|(?:internode|intranode|internode_ll)::|nixl_ep::|"
    r"moeA2A(?:Dispatch|Combine)Kernel|\b(?>\w*?Ep(?:Dispatch|Combine))\w*Kernel|EpCombineSyncBarrier"
)
#: Helpers of DeepEP and its like that move nothing between ranks.
_LOCAL = re.compile(
    r"get_dispatch_layout|clean_low_latency_buffer|cached_notify|copy_epilogue|reduce_epilogue|\b(?>\w*?Ep)\w*CopyToStaging"
)
KINDS = (*(kind for kind, _ in _KINDS), "unknown")
KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}
#: The CPU side of a collective.
CALL = re.compile(r"record_param_comms$|nccl:|c10d::|gloo:")
GLOO = re.compile(r"gloo:(\w+)$")


@lru_cache(maxsize=65_536)
def collective_kind(name: str) -> str | None:
    """all_reduce, all_gather … from any spelling of it; None where the name says none."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), None)


@lru_cache(maxsize=65_536)
def kernel_collective(name: str) -> str | None:
    """Kind of collective a GPU kernel carries out, `unknown` where the name is generic (RCCL), None for others.

    Exchanges of experts' tokens are `all_to_all` (DeepEP, MoRI, NIXL's, FlashInfer's one-sided); what only spins until all
    have come, as DeepEP's `notify_dispatch` does, is a `barrier`.
    """
    if not _COMMUNICATION.search(name) or _LOCAL.search(name):
        return None
    if executed_phase(name) in ("dispatch", "combine"):
        return "barrier" if "notify" in name or "SyncBarrier" in name else "all_to_all"
    # An argument type may name another operation; the symbol comes first.
    return (
        collective_kind(name.replace("(anonymous namespace)::", "").split("(")[0].split("<")[0]) or "unknown"
    )


def is_low_latency(name: str) -> bool:
    """Kernels of DeepEP, and of NIXL's form of it, that are launched twice for one exchange: to send, then to receive."""
    return "internode_ll::" in name or "nixl_ep::" in name


#: Bytes of an element by c10d's and the profiler's names of types.
ELEMENT_BYTES = {
    **dict.fromkeys(
        ("Byte", "Char", "Bool", "unsigned char", "signed char", "bool", "Float8_e4m3fn", "Float8_e5m2"), 1
    ),
    **dict.fromkeys(("Half", "BFloat16", "Short", "c10::Half", "c10::BFloat16", "short"), 2),
    **dict.fromkeys(("Float", "Int", "float", "int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat", "double", "long int", "long"), 8),
}

#: What a name must hold to tell anything: a screen that Arrow applies, so that few names reach Python.
TELLING = (
    "dispatch|combine|moe|expert|attn|attention|WithPaged|WithRagged|fmha|flash|routi|router|top_?k|gat[ei]|layer|"
    "nccl|rccl|cross_device|all_?reduce|deep_ep|internode|intranode|bitmatrix|group_?(?:ed_?)?gemm|GroupProblem|"
    "matmul_ogs|finalize_matmul|eplb|capture|_cache|kvcache|scaled_dot|mla_|all_?to_?all|gloo:|c10d::|record_param_comms|"
    "quick_?reduce|multimem|one_?shot|two_?shot"
)

# -- ranks -------------------------------------------------------------------------------------

_COORDINATES = re.compile(r"(?:^|[_-])(dp|pp|tp|ep|dcp|pcp)-?(\d{1,9})(?=[_.-]|$)", re.I)
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_]?(\d{1,9})(?!\d)", re.I)
_EXPORTED = re.compile(r"\.(\d{13}|\d{16}|\d{19})\.pt\.trace")


def coordinates_of(file_name: str) -> dict[str, int]:
    """dp, pp, tp, ep and so on from a file name of vLLM (`dp1_pp0_tp0_…`) or SGLang (`-TP-0-DP-1`)."""
    return {key.lower(): int(value) for key, value in _COORDINATES.findall(file_name)}


def rank_in_name(file_name: str) -> int | None:
    """The rank a file name says, as in `rank3.…`, `worker0_step_12.…`, `rank-34.…`."""
    found = _RANK.findall(file_name)
    return int(found[-1]) if found else None


def exported_ns(file_name: str) -> int | None:
    """When the profile was written, by its file name: ns, µs or ms since the epoch."""
    found = _EXPORTED.search(file_name)
    return int(found[1].ljust(19, "0")) if found else None
