"""Statistics against simulations with known answers; every simulation is seeded."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.stats import multivariate_normal, norm

from tailscope import stats
from tailscope.ledger.coupling import Victims
from tailscope.ledger.coupling import exposure as exposure_of_victims

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
S = 1_000_000_000
INF = float("inf")


# -- intervals and effective samples ------------------------------------------------------------------


@pytest.mark.parametrize(("q", "n"), [(0.5, 50), (0.95, 500), (0.99, 1000), (0.99, 3000)])
def test_the_interval_of_a_quantile_covers_it(q: float, n: int) -> None:
    """95 % of the samples of a distribution with a heavy tail; the ranks are whole, so a little more."""
    make = np.random.default_rng(1)
    hits, runs = 0, 1500
    truth = 1 / (1 - q) ** (1 / 1.5)
    for _ in range(runs):
        interval = stats.quantile_interval((1 - make.random(n)) ** (-1 / 1.5), q, n)
        assert interval is not None
        hits += interval[0] <= truth <= interval[1]
    assert 0.935 <= hits / runs <= 0.985


def test_fewer_effective_samples_widen_the_interval() -> None:
    values = np.arange(10_000.0)
    widths = []
    for n_eff in (10_000, 3_000, 1_000):
        interval = stats.quantile_interval(values, 0.99, n_eff)
        assert interval is not None and interval[0] < 9_900 < interval[1]
        widths.append(interval[1] - interval[0])
    assert widths == sorted(widths)


@pytest.mark.parametrize("n_eff", [0, 0.4, 1, 5, 100, 300])
def test_an_interval_beyond_the_sample_is_none(n_eff: float) -> None:
    assert stats.quantile_interval(np.arange(500.0), 0.99, n_eff) is None


def test_an_interval_of_equal_values_is_a_point() -> None:
    assert stats.quantile_interval(np.full(2000, 3.0), 0.99, 2000) == (3.0, 3.0)


def autoregressive(phi: float, n: int, seed: int) -> Floats:
    return np.asarray(lfilter([1], [1, -phi], np.random.default_rng(seed).normal(size=n)))


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_effective_samples_of_an_autoregression(phi: float) -> None:
    """n (1 - phi) / (1 + phi), within 35 % nine times of ten."""
    n = 5000
    expected = n * (1 - phi) / (1 + phi)
    ratios = [
        stats.effective_samples(autoregressive(phi, n, seed), np.arange(n)) / expected for seed in range(20)
    ]
    assert np.median(ratios) == pytest.approx(1, abs=0.1)
    assert np.mean(np.abs(np.array(ratios) - 1) <= 0.35) >= 0.9
    assert max(ratios) <= 1 + 0.35 and (phi or max(ratios) <= 1)


def test_effective_samples_go_by_time_not_by_order() -> None:
    values = autoregressive(0.9, 5000, 1)
    shuffled = np.random.default_rng(0).permutation(5000)
    in_time = stats.effective_samples(values, np.arange(5000))
    assert stats.effective_samples(values[shuffled], shuffled) == pytest.approx(in_time)
    assert stats.effective_samples(values[shuffled], np.arange(5000)) > 5 * in_time


def arrivals_in_bursts(sigma: float, seed: int, n: int = 4000, last: int = 200) -> Ints:
    """n arrivals, some ten a second, whose rate follows an AR(1) over about so many of them."""
    load = sigma * np.sqrt(2 / last) * autoregressive(np.exp(-1 / last), n, seed)
    gaps = np.random.default_rng(seed + 1000).exponential(0.1, n) * np.exp(-load)
    return ns(np.cumsum(gaps))


def test_values_are_worth_no_more_than_the_bursts_they_arrive_in() -> None:
    """Values alike in calm and in bursts, as in a window that saw no burst of those that reach the tail."""
    worth: dict[float, list[float]] = {0.0: [], 0.5: []}
    for sigma, found in worth.items():
        for seed in range(20):
            times, values = arrivals_in_bursts(sigma, seed), np.random.default_rng(seed).random(4000)
            found.append(stats.effective_samples(values, times) / 4000)
            assert found[-1] <= stats.uncorrelated(values, times) / 4000 <= 1
    assert np.median(worth[0.0]) > 0.75
    # 1 + 2 x 200 x the share of the gaps' variance that is the load's.
    assert max(worth[0.5]) < 0.25 and np.median(worth[0.5]) < 0.08


@pytest.mark.parametrize("idle_s", [0, 600])
def test_a_pause_between_two_halves_is_no_burst(idle_s: int) -> None:
    times = ns(np.cumsum(np.random.default_rng(2).exponential(0.1, 4000)))
    times[2000:] += idle_s * S
    values = np.random.default_rng(3).random(4000)
    assert stats.effective_samples(values, times) > 0.6 * 4000


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e300])
def test_constants_are_all_independent(value: float) -> None:
    assert stats.effective_samples(np.full(1000, value), np.arange(1000)) == 1000


@settings(max_examples=100, deadline=None)
@example([0.0, 0.0, 0.0, 1e-200])
@given(st.lists(st.floats(-1e6, 1e6), max_size=50))
def test_effective_samples_are_between_one_and_all(values: list[float]) -> None:
    n = len(values)
    result = stats.effective_samples(np.array(values), np.zeros(n, np.int64))
    assert min(n, 1) <= result <= n
    assert n >= 4 or result == n


def half_in_bursts(phi: float, seed: int, n: int) -> Floats:
    """Log-normal values of which half of the variance follows an AR(1)."""
    load = autoregressive(phi, n, seed) * np.sqrt(1 - phi**2)
    return np.asarray(np.exp(0.8 * (load + np.random.default_rng(seed + 1).normal(size=n)) / np.sqrt(2)))


def test_ranks_show_bursts_that_a_few_exceedances_hide() -> None:
    """By its exceedances alone half of these windows would tell a p99, with an interval that is wrong two times of five."""
    n, told, right = 2000, [0, 0], 0
    for seed in range(100):
        values = half_in_bursts(0.98, seed, n)
        by_exceedances = stats.effective_samples(
            (values > np.quantile(values, 0.99)).astype(np.float64), np.arange(n)
        )
        safe = stats.quantile_samples(values, 0.99, np.arange(n))
        assert 1 <= safe <= by_exceedances
        for i, n_eff in enumerate((by_exceedances, safe)):
            told[i] += stats.allows_quantile(0.99, n_eff)
        interval = stats.quantile_interval(values, 0.99, by_exceedances)
        right += interval is not None and interval[0] <= np.exp(0.8 * 2.3263) <= interval[1]
    assert told[0] > 30 and right < 80 and told[1] <= 2


def test_independent_values_are_worth_what_they_were() -> None:
    """Chance correlation of ranks takes nothing away."""
    for seed in range(20):
        values = np.random.default_rng(seed).lognormal(size=3000)
        lags = stats.rank_autocorrelation(values, np.arange(3000))
        assert stats.samples_by_ranks(3000, 0.99, lags) > 0.9 * 3000


def test_what_ranks_do_to_exceedances() -> None:
    """Equal ranks exceed together; what half correlated normal values do follows from the probability that both exceed, by
    scipy's `multivariate_normal`."""
    for q in (0.99, 0.95):
        both = multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]]).cdf([norm.ppf(1 - q)] * 2)
        correlation = (both - (1 - q) ** 2) / (q * (1 - q))
        assert 0.1 < correlation < 0.3
        assert stats.samples_by_ranks(1000, q, np.array([0.5])) == pytest.approx(
            1000 / (1 + 2 * correlation), rel=0.01
        )
        assert stats.samples_by_ranks(1000, q, np.array([1.0])) == pytest.approx(1000 / 3)
    assert stats.samples_by_ranks(1000, 0.99, np.empty(0)) == 1000
    assert stats.quantile_samples(np.full(50, 1.0), 0.99, np.arange(50)) == 50


def test_the_interval_of_a_share() -> None:
    """Wilson's, as statsmodels' proportion_confint gives it for 8 of 10."""
    assert stats.share_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert stats.share_interval(1.0, 20)[1] == 1.0 and stats.share_interval(0.0, 20)[0] == 0.0


def test_what_a_quantile_needs() -> None:
    """Ten effective samples beyond it."""
    assert not stats.allows_quantile(0.99, 999.9) and stats.allows_quantile(0.99, 1000.1)
    assert not stats.allows_quantile(0.95, 199.9) and stats.allows_quantile(0.95, 200.1)
    assert stats.allows_quantile(0.5, 20)


# -- objectives -----------------------------------------------------------------------------------


def windows(share: float, n: int, runs: int, together: int = 1) -> list[tuple[NDArray[np.bool_], Ints]]:
    """Poisson arrivals, of which `share` lie above a limit, in runs of so many."""
    made = []
    for seed in range(runs):
        make = np.random.default_rng(seed)
        above = np.repeat(make.random(n // together) < share, together)
        made.append((above, ns(np.cumsum(make.exponential(0.1, len(above))))))
    return made


@pytest.mark.parametrize("together", [1, 3])
def test_a_limit_at_the_quantile_is_called_broken_in_one_of_twenty(together: int) -> None:
    verdicts = [stats.exceeds(*w, 0.99) for w in windows(0.01, 2000 * together, 600, together)]
    assert 0.03 <= np.mean([v is True for v in verdicts]) <= 0.065


def test_a_limit_far_below_the_quantile_is_broken_and_one_far_above_is_kept() -> None:
    broken = [stats.exceeds(*w, 0.99) for w in windows(0.025, 3000, 50)]
    kept = [stats.exceeds(*w, 0.99) for w in windows(0.002, 3000, 50)]
    assert np.mean([v is True for v in broken]) >= 0.95
    assert all(v is False for v in kept)


def test_too_few_samples_decide_nothing() -> None:
    times = ns(np.arange(200.0))
    none, few = np.zeros(200, bool), np.arange(200) % 80 == 0
    assert stats.exceeds(none, times, 0.99) is None, (
        "none of 200 lies above: so it would be of one in a hundred"
    )
    assert stats.exceeds(few, times, 0.99) is None
    assert stats.exceeds(~none, times, 0.99) is True, "all of them"
    assert stats.exceeds(none, times, 0.5) is False


# -- histograms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "q", "bucket"),
    [
        ([10, 20, 100, 100], 0.05, (0.0, 1.0)),
        ([10, 20, 100, 100], 0.15, (1.0, 5.0)),
        ([10, 20, 100, 100], 0.99, (5.0, 30.0)),
        ([10, 20, 30, 100], 0.99, (30.0, None)),
        ([0, 0, 0, 7], 0.5, (30.0, None)),
        ([0, 0, 7, 7], 0.0, (5.0, 30.0)),
        ([0, 99, 99, 100], 0.99, (1.0, 5.0)),
        ([0, 0, 0, 0], 0.99, None),
        ([], 0.99, None),
        # Cumulative counts that fall were scraped while they changed, or are no histogram.
        ([50, 20, 100, 90], 0.5, (0.0, 1.0)),
        ([5, 5, 5, -1], 0.5, None),
        ([1, 2, 3, float("nan")], 0.5, None),
    ],
)
def test_a_histogram_gives_the_bucket_of_a_quantile(
    counts: list[float], q: float, bucket: tuple[float, float | None] | None
) -> None:
    assert stats.histogram_quantile([1.0, 5.0, 30.0, INF][: len(counts)], counts, q) == bucket


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_the_bucket_holds_the_quantile(values: list[float], q: float) -> None:
    bounds = [0.1, 1.0, 10.0, INF]
    counts = [float(sum(v <= bound for v in values)) for bound in bounds]
    bucket = stats.histogram_quantile(bounds, counts, q)
    truth = float(np.quantile(values, q, method="inverted_cdf"))
    assert bucket is not None and bucket[0] < truth <= (bucket[1] or INF)


# -- exposure -------------------------------------------------------------------------------------


def pools(seed: int, *, coupled: bool, phi: float = 0.98) -> tuple[Ints, Floats, Ints, Ints]:
    """Twenty minutes of short requests and of long prefills whose arrivals follow one load, an AR(1) by the second.

    Arrivals and latencies of the short ones, starts and ends of the prefills: on two servers, or on one.
    """
    make = np.random.default_rng(seed)
    seconds = 1200
    load = np.exp(0.6 * lfilter([np.sqrt(1 - phi**2)], [1, -phi], make.normal(size=seconds)))

    def arrivals(rate: float) -> Floats:
        at = np.repeat(np.arange(seconds), make.poisson(rate * load))
        return np.sort(at + make.random(len(at)))

    short, long = arrivals(1.0), arrivals(0.05)
    work = np.concatenate([make.gamma(4, 0.05, len(short)), make.uniform(0.8, 2.0, len(long))])
    order = np.argsort(np.concatenate([short, long]), kind="stable")
    arrived, free = np.concatenate([short, long]), [0.0, 0.0]
    end = np.empty(len(arrived))
    for i in order:
        server = 0 if coupled or i < len(short) else 1
        free[server] = end[i] = max(arrived[i], free[server]) + work[i]
    n = len(short)
    start = end - work
    return ns(short), end[:n] - short, ns(start[n:]), ns(end[n:])


def ns(seconds: Floats) -> Ints:
    return np.asarray(1_795_000_000 * S + seconds * S, dtype=np.int64)


def judged(times: Ints, latency: Floats, starts: Ints, ends: Ints) -> stats.ExposureEffect | None:
    """As the ledger calls it."""
    victims = Victims(times, latency, times + np.asarray(latency * S, np.int64), np.ones(len(times)))
    return exposure_of_victims(victims, starts, ends)


def test_pools_that_only_share_a_load_are_rarely_called_coupled() -> None:
    effects = [judged(*pools(seed, coupled=False)) for seed in range(150)]
    p_values = np.array([effect.p_value for effect in effects if effect])
    assert len(p_values) == 150
    assert np.mean(p_values <= 0.05) <= 0.08
    assert np.mean(p_values <= 0.01) <= 0.03


def test_a_shared_server_is_always_found() -> None:
    effects = [judged(*pools(seed, coupled=True)) for seed in range(1000, 1020)]
    assert all(effect and effect.p_value <= 0.05 for effect in effects)
    assert 0.5 < np.median([effect.difference for effect in effects if effect]) < 2


Steady = tuple[Ints, Floats, Ints, Ints]


def steady(n: int = 400, exposed_n: int = 20, effect: float = 1.0) -> Steady:
    """A request a second or so; some arrive just before a prefill of 10 ms and are slower by `effect`."""
    make = np.random.default_rng(0)
    times = np.sort(make.integers(0, n * S, n))
    exposed = np.zeros(n, bool)
    exposed[make.choice(np.arange(10, n - 10), exposed_n, replace=False)] = True
    latency = 0.2 + make.normal(0, 0.01, n) + effect * exposed
    starts = times[exposed] + 1
    return times, latency, starts, starts + S // 100


def exposure(world: Steady, **how: int) -> stats.ExposureEffect | None:
    times, latency, starts, ends = world
    return stats.exposure_test(
        times,
        latency,
        starts,
        ends,
        window_ns=how.pop("window_ns", 10),
        controls=np.zeros((len(times), 1)),
        **how,
    )


def test_the_difference_is_the_effect() -> None:
    effect = exposure(steady())
    assert effect is not None and (effect.exposed, effect.unexposed) == (20, 380)
    assert effect.difference == pytest.approx(1, abs=0.02) and effect.p_value < 0.01
    none = exposure(steady(effect=0.0))
    assert none is not None and none.p_value > 0.05
    faster = exposure(steady(effect=-0.1))
    assert faster is not None and faster.p_value > 0.9, "one-sided"


def test_the_order_of_rows_and_what_is_said_twice_do_not_matter() -> None:
    times, latency, starts, ends = steady()
    make = np.random.default_rng(0)
    rows, prefills = make.permutation(len(times)), make.permutation(len(starts))
    expected = exposure((times, latency, starts, ends))
    assert exposure((times[rows], latency[rows], starts[prefills], ends[prefills])) == expected
    assert exposure((times, latency, np.tile(starts, 3), np.tile(ends, 3))) == expected


def test_too_few_on_either_side_is_no_test() -> None:
    times, latency, starts, ends = steady()
    nobody = np.empty(0, np.int64)
    assert exposure((times, latency, starts[:4], ends[:4])) is None
    assert exposure((times, latency, starts[:5], ends[:5])) is not None
    assert exposure((times, latency, nobody, nobody)) is None
    assert exposure((nobody, np.empty(0), starts, ends)) is None
    assert exposure((times[:1], latency[:1], starts, ends)) is None
    assert exposure((times, latency, times[:1] - S, times[-1:] + S)) is None, "a prefill longer than all"
    assert exposure((times[4:], latency[4:], times[:1], times[-2:-1])) is None, "all but one"


def test_equal_times_and_equal_latencies() -> None:
    times, latency, starts, ends = steady()
    equal = exposure((times, np.full(len(times), 0.2), starts, ends))
    assert equal is not None and equal.difference == pytest.approx(0, abs=1e-12) and equal.p_value == 1
    assert exposure((np.zeros_like(times), latency, starts, ends), window_ns=0) is None


def test_prefills_outside_the_requests_time_expose_nobody() -> None:
    """Only one that reaches into it; none is moved into it before the first shift."""
    times, latency, starts, ends = steady()
    expected = exposure((times, latency, starts, ends))
    assert expected is not None
    length = int(times[-1])
    before = (starts - length - S, ends - length - S)
    after = (starts + length + S, ends + length + S)
    outside = (np.concatenate([before[0], starts, after[0]]), np.concatenate([before[1], ends, after[1]]))
    assert exposure((times, latency, *outside)) == expected
    reaching = exposure(
        (times, latency, np.append(starts, times[0] - 90 * S), np.append(ends, times[0] + 3 * S + 1))
    )
    early = int((times <= times[0] + 3 * S + 1).sum())
    assert reaching is not None and reaching.exposed == expected.exposed + early


Controls = Callable[[Floats], Floats]


@pytest.mark.parametrize("shape", [lambda x: x, np.exp, lambda x: x * x], ids=["line", "exp", "square"])
def test_controls_take_out_what_load_explains(shape: Controls) -> None:
    """More load makes requests slower, and brings more prefills, but not because of them."""
    make = np.random.default_rng(0)
    times = np.arange(2000, dtype=np.int64) * S
    load = np.repeat(make.normal(size=400), 5)
    latency = 0.2 + 0.1 * shape(load) + make.normal(0, 0.05, 2000)
    busy = shape(load) > np.quantile(shape(load), 0.7)
    exposed = make.random(2000) < np.where(busy, 0.3, 0.05)
    starts = times[exposed] + S // 100
    noise = make.normal(size=2000)
    naive, fair = (
        stats.exposure_test(times, latency, starts, starts + S // 10, window_ns=S // 10, controls=controls)
        for controls in (noise[:, None], np.column_stack([noise, load]))
    )
    assert naive is not None and naive.difference > 0.06 and naive.p_value < 0.01
    assert fair is not None and abs(fair.difference) < 0.02 and fair.p_value > 0.05


def test_an_effect_shows_beside_controls() -> None:
    times, latency, starts, ends = steady()
    load = np.random.default_rng(1).random(len(times))
    effect = stats.exposure_test(times, latency + load, starts, ends, window_ns=10, controls=load[:, None])
    assert effect is not None and effect.difference == pytest.approx(1, abs=0.02) and effect.p_value < 0.01


@pytest.mark.parametrize("scale", [1e-9, 1e12])
def test_the_scale_of_controls_does_not_matter(scale: float) -> None:
    times, latency, starts, ends = steady()
    load = np.random.default_rng(1).random((len(times), 2))
    expected, scaled = (
        stats.exposure_test(times, latency, starts, ends, window_ns=10, controls=controls)
        for controls in (load, load * scale - scale)
    )
    assert expected is not None and scaled == expected


def test_controls_that_say_who_is_exposed_leave_nothing_to_test() -> None:
    times, latency, starts, ends = steady()
    exposed = np.isin(times + 1, starts).astype(np.float64)
    assert exposure((times, latency, starts, ends)) is not None
    assert stats.exposure_test(times, latency, starts, ends, window_ns=10, controls=exposed[:, None]) is None


def test_shorter_and_longer_bursts_of_exposure_do_not_fire_by_themselves() -> None:
    """In common bursts runs of culprits are longer and latencies vary more; nothing slows anybody."""
    fired = []
    for seed in range(300):
        make = np.random.default_rng(seed)
        load = np.repeat(np.exp(1.2 * autoregressive(0.5, 100, seed)), 3)
        at = np.repeat(np.arange(300), make.poisson(3 * np.minimum(load, 8)))
        times = ns(np.sort(at + make.random(len(at))))
        latency = 1 + make.normal(0, 0.2, len(at)) * load[at]
        began = np.repeat(np.arange(300), make.poisson(0.1 * np.minimum(load, 8)))
        starts = ns(began.astype(np.float64) + 0.5)
        level = np.log(load[at])[:, None]
        effect = stats.exposure_test(
            times, latency, starts, starts + S // 2, window_ns=S // 2, controls=level, seed=seed
        )
        fired.append(effect is not None and effect.p_value <= 0.05)
    assert 0.01 <= np.mean(fired) <= 0.085


def test_the_place_of_the_first_request_does_not_matter() -> None:
    """Culprits that run when the first arrives, or go on past the last, wrap round to nobody."""
    times = np.arange(0, 1000 * S, S, dtype=np.int64)
    latency = np.random.default_rng(0).random(1000)
    starts = np.array([-5 * S, 500 * S, 995 * S], np.int64)
    ends = np.array([2 * S, 504 * S, 2000 * S], np.int64)
    effect = exposure((times, latency, starts, ends), window_ns=S // 2)
    assert effect is not None and effect.exposed == 3 + 5 + 5


# -- scale ----------------------------------------------------------------------------------------


def seconds(run: Callable[[], object]) -> float:
    took = []
    for _ in range(3):
        began = time.process_time()
        run()
        took.append(time.process_time() - began)
    return min(took)


@pytest.mark.parametrize("one_time", [False, True])
def test_four_times_the_samples_take_nothing_like_sixteen_times_the_time(one_time: bool) -> None:
    def run(n: int) -> Callable[[], object]:
        make = np.random.default_rng(0)
        times = np.sort(make.integers(0, 1 if one_time else n * S, n))
        latency, starts = make.random(n), make.integers(0, n * S, n // 10)

        def both() -> None:
            stats.effective_samples(latency, times)
            stats.exposure_test(
                times, latency, starts, starts + S, window_ns=S // 10, controls=make.random((n, 4)), rounds=20
            )

        return both

    # Below some hundredths of a second a clock tells what else the machine does; a square would be seconds.
    assert seconds(run(80_000)) < 9 * max(seconds(run(20_000)), 0.05)


def test_many_rounds_on_many_victims_take_a_second() -> None:
    make = np.random.default_rng(0)
    times = np.sort(make.integers(0, 1000 * S, 10_000))
    starts = np.sort(make.integers(0, 1000 * S, 1_000))
    latency, controls = make.random(10_000), make.random((10_000, 14))
    took = seconds(
        lambda: stats.exposure_test(times, latency, starts, starts + S, window_ns=S // 10, controls=controls)
    )
    assert took < 2
