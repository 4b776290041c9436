"""Worlds for each form of head-of-line coupling: by long steps, at admission, and between two prefills."""

from __future__ import annotations

from dataclasses import replace

from families import COUPLED, MIXED, Family, Rng, chat, engine, long_prompts, uniform, world

from tailscope.sim.scenario import Load, Scenario, Sizes


def by_long_steps(rng: Rng, strength: float) -> Scenario:
    """Prompts that fit a step whole: who comes meanwhile, or decodes, waits for one long step."""
    documents = replace(
        long_prompts(rng, strength), prompt_tokens=Sizes(uniform(rng, 5_000, 12_000), 0.2, 4_000, 15_000)
    )
    made = engine(rng, max_num_batched_tokens=16_384)
    return world(rng, chat(rng), documents, engine=made, causes=(COUPLED, MIXED))


def at_admission(rng: Rng, strength: float) -> Scenario:
    """A small budget that one long prompt takes whole, step after step: who comes meanwhile stays in the queue."""
    documents = replace(
        long_prompts(rng, strength), prompt_tokens=Sizes(uniform(rng, 12_000, 22_000), 0.2, 8_500, 31_000)
    )
    made = engine(rng, max_num_batched_tokens=int(rng.choice([1_024, 2_048])))
    return world(rng, chat(rng), documents, engine=made, causes=(COUPLED, MIXED))


def between_prefills(rng: Rng, strength: float) -> Scenario:
    """Reports of some thousand tokens and answers of a few, beside documents that take half of each step's budget: each
    prefill takes several steps, and the longer one makes those of the other longer."""
    budget = int(rng.choice([2_048, 4_096]))
    reports = Load(
        "reports",
        rate=uniform(rng, 0.8, 1.5),
        prompt_tokens=Sizes(4_000, 0.15, 2_200, 6_000),
        output_tokens=Sizes(8, 0.4, 2, 20),
    )
    documents = replace(
        long_prompts(rng, strength), prompt_tokens=Sizes(uniform(rng, 18_000, 24_000), 0.2, 14_000, 31_000)
    )
    made = engine(rng, max_num_batched_tokens=budget, long_prefill_token_threshold=budget // 2)
    one = world(rng, reports, documents, engine=made, causes=(COUPLED,))
    return replace(one, cost=replace(one.cost, prefill_token=2e-5, attention=1e-9))


FAMILIES: tuple[Family, ...] = (
    Family("coupled by long steps", "fault", by_long_steps, "long prompts that fit a step whole", (1, 2)),
    Family("coupled at admission", "fault", at_admission, "long prompts that take the whole budget", (1, 2)),
    Family(
        "coupled prefills", "fault", between_prefills, "prompts that share steps with longer ones", (1, 2)
    ),
)
