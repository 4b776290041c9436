"""tailscope's own health as metrics, and what its engines were last seen to do."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import tailscope


class Health:
    """Metrics of a running server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tailscope_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tailscope_{name}", text, labels, registry=registry)

        gauge("build_info", "Version of tailscope.", "version").labels(tailscope.__version__).set(1)
        self.spans = counter("spans_received", "Spans in accepted exports.", "protocol")
        self.refused = counter("requests_refused", "Exports that were not accepted.", "protocol", "reason")
        self.written = counter("rows_written", "Rows in parts of the trace.", "table")
        self.rejected = counter("rows_rejected", "Records that could not be used.", "reason")
        self.skipped = counter("rows_skipped", "Valid records that are not telemetry of ours.", "reason")
        self.duplicates = counter("rows_duplicate", "Rows given again, stored once.")
        self.damaged = counter(
            "segments_damaged", "Segments of the journal that could not be read to their end."
        )
        self.scrapes = counter("scrapes", "Scrapes of engines.", "server", "outcome")
        self.scrape_seconds = gauge("scrape_duration_seconds", "Duration of the last scrape.", "server")
        self.up = gauge("up", "Whether the last scrape was good.", "server")
        self.journal_bytes = gauge("journal_bytes", "Rows accepted that are not parts yet.")
        self.sync_seconds = Histogram(
            "tailscope_journal_sync_seconds",
            "Writing and syncing the journal.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
            registry=registry,
        )
        self.trace_bytes = gauge("trace_bytes", "Size of the trace.")
        self.trace_parts = gauge("trace_parts", "Files of the trace.")
        self.disk_full = gauge("disk_full", "Whether the last write failed for want of space.")
        self._full: set[str] = set()
        self.restarts = counter(
            "process_restarts", "Parts of the server that died and were started again.", "part"
        )
        self.reloads = counter("config_reloads", "Times the configuration was read again.", "outcome")
        self.kv_usage = gauge("kv_cache_usage_ratio", "Share of the KV cache in use.", "server", "engine")
        self.running = gauge("requests_running", "Requests in the engine's batch.", "server", "engine")
        self.waiting = gauge("requests_waiting", "Requests in the engine's queue.", "server", "engine")
        self.preemptions = counter("preemptions", "Preemptions that the engine counted.", "server", "engine")

    def set_disk_full(self, who: str, full: bool) -> None:
        """Whether the last write of `who` failed for want of space; the disk is full as long as one does."""
        (self._full.add if full else self._full.discard)(who)
        self.disk_full.set(bool(self._full))
