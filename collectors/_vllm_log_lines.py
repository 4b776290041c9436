"""What vLLM's log lines look like, from 0.4 to 0.33."""

from __future__ import annotations

import re

ANSI = re.compile(rb"\x1b\[[0-9;]*m")
#: Level, time and place as vLLM's formatter writes them, after what Docker, Kubernetes, Compose or journald
#: put before a line, and after the name of the process. vLLM 0.7 and older have no bracket before the file.
HEADER = re.compile(
    rb"(?:[\w.-]{1,99} {0,40}\| {0,9}|\[[^\]]{1,200}\] |"
    rb"[A-Z][a-z]{2} [ \d]\d [\d:]{8} [\w.-]{1,99} [\w./@-]{1,99}(?:\[\d{1,9}\])?: )?"
    rb"(?:(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)?) "
    rb"(?:std(?:out|err) [FP] |\| )?)?"
    rb"((?:\([\w .=,:-]{1,99}\) )*)"
    rb"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d) \[?[^\s:\]]{1,200}:\d{1,9}\] ?"
)
RANK = re.compile(rb"_DP(\d{1,4})(?!\d)")
ENGINE = re.compile(rb"(?:Engine (\d{1,4}): |\d+ Engines Aggregated: )?(Iteration\(|Avg prompt throughput: )")
ITERATION = re.compile(
    rb"Iteration\((\d{1,18})\): (\d{1,18}) context requests, (\d{1,18}) context tokens, "
    rb"(\d{1,18}) generation requests, (\d{1,18}) generation tokens, "
    rb"iteration elapsed time: ([^\s,]{1,40}) ms( \(dummy\))?"
    rb"(?:, \w{1,40} KV cache usage: ([^\s,%]{1,40})%)?(?=,|\s*$)"
)

#: Statistics line: the number, its series, and what to divide by. `Waiting` includes `Deferred`; the V0
#: engine calls it `Pending`, and has the usage of the CPU's cache after that of the GPU's.
GAUGES = tuple(
    (re.compile(pattern), name, divisor)
    for pattern, name, divisor in (
        (rb"Avg prompt throughput: ([^\s,]{1,40}) tokens/s", "log:prompt_throughput_tokens_per_s", 1),
        (rb"Avg generation throughput: ([^\s,]{1,40}) tokens/s", "log:generation_throughput_tokens_per_s", 1),
        (rb"Running: ([^\s,]{1,40}) reqs", "vllm:num_requests_running", 1),
        (rb"(?:Waiting|Pending): ([^\s,]{1,40}) reqs", "vllm:num_requests_waiting", 1),
        (rb"Preemptions: ([^\s,]{1,40})", "log:preemptions", 1),
        (rb"KV cache usage: ([^\s,%]{1,40})%", "vllm:kv_cache_usage_perc", 100),
        (rb", Prefix cache hit rate: ([^\s,%]{1,40})%", "log:prefix_cache_hit_rate", 100),
    )
)

#: Numbers of EPLB's lines, which are events too. Balancedness is mean over max, imbalance max over mean; tokens are those of a
#: rank, summed over the layers, which hides what single layers are.
EPLB = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (rb"EPLB step: .*?\bavg_tokens=([\d.]{1,40})", "log:eplb_avg_tokens"),
        (rb"EPLB step: .*?\bmax_tokens=([\d.]{1,40})", "log:eplb_max_tokens"),
        (rb"EPLB step: .*?\bbalancedness=([\d.]{1,40})", "log:eplb_balancedness"),
        (rb"\[EPLB\] Skip rearrange: imbalance ([\d.]{1,40}) ->", "log:eplb_imbalance"),
    )
)

#: Lines that are an event as they stand. The groups that matched are its detail.
EVENTS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            "eplb",
            rb"(EPLB step: \d+)(?: for model .*)?[:,]? "
            rb"(avg_tokens=[\d.]+, max_tokens=\d+, balancedness=[\d.]+)"
            rb"(?:, (steps until the next rearrangement: \d+))?",
        ),
        ("eplb", rb"(Rearranging experts)(?: ?(\(async mode\)|sync mode))?(?: ?(\(profile\)))?"),
        ("eplb", rb"(Rearranged experts) *(\(profile\))? *(in [\d.]+ s)"),
        ("eplb", rb"(\[EPLB\] Skip rearrange)(?:: (imbalance [\d.]+ -> [\d.]+))?"),
        ("jit", rb"(Dynamo bytecode transform time: [\d.]+ s)"),
        ("jit", rb"(Compiling a graph)(?: for .{1,80}?)? (takes [\d.]+ s)"),
        ("jit", rb"(torch\.compile)(?: and initial profiling/warmup run together)? (takes|took) ([\d.]+ s)"),
        ("jit", rb"(Graph capturing finished in [\d.]+ secs?)"),
        ("jit", rb"(\w{1,40} (?:kernel )?JIT compilation during inference: [\w.]{0,99}\w)"),
        ("jit", rb"(Triton autotuning for function \w{1,99})"),
        ("config", rb"(Max profiling iterations reached)"),
    )
)
#: First bytes of all these, so that most lines are passed over at once.
LIKELY = re.compile(
    rb"EPLB|Rearrang|\[EPLB\]|Dynamo|Compiling|torch\.c|Graph c|\w{1,40} (?:kernel )?JIT|Triton auto|Max prof"
)
START = re.compile(rb"Initializing an? (?:V\d )?LLM engine \(v([\w.+-]{1,80})\)")
KV_SIZE = re.compile(rb"(?:\w+ )?KV cache size: ([\d,]{1,30}) tokens")
ABORT = re.compile(rb"Aborted request\(s\) (\S.*?)\.?$")
ABORTED = re.compile(rb"Request (\S+) aborted\.")
DEATH = re.compile(rb"EngineDeadError|died unexpectedly|EngineCore encountered a fatal error")
PROFILER = re.compile(rb"(Start|Stopp)ing profiler\.\.\.$")
#: Lines without a time: they lie between those around them.
UNTIMED = re.compile(rb"_profile HTTP/|Triton autotuning for function ")
AUTOTUNING = re.compile(rb"(?:\([\w .=,:-]{1,99}\) )?(Triton autotuning for function \w{1,99})")
PROFILER_CALL = re.compile(rb'INFO: +\S+ - "POST /(start|stop)_profile HTTP/[\d.]+" 200\b')
#: vLLM appends eight hex digits to a request's id for its own use; this is what the client's id lacks.
INTERNAL = re.compile(r"-[0-9a-f]{8}\Z")
#: Settings of scheduler, cache and parallelism: nothing that names a path, a model or a key.
SETTING = re.compile(
    rb"'(max_num_batched_tokens|max_num_seqs|block_size|num_gpu_blocks_override|enable_prefix_caching|"
    rb"enable_chunked_prefill|long_prefill_token_threshold|scheduling_policy|async_scheduling|"
    rb"tensor_parallel_size|data_parallel_size|enable_expert_parallel)': "
    rb"(True|False|None|\d{1,18}|'[a-z]{1,20}')(?=[,}])"
)


def plain(line: bytes) -> bytes:
    """The line without colours and without the progress bar that it overwrites."""
    if b"\r" in line:
        line = line.strip(b"\r").rpartition(b"\r")[2]
    return ANSI.sub(b"", line) if b"\x1b" in line else line
